"""Notices training that never reaches the forward that was planned, and says so once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from types import FunctionType, MethodType
from typing import Any

import torch

from ...program.program import tensor_leaves
from ...torch_state.private import own_call
from .report import Calls, Report

log = logging.getLogger(__name__)

REACH = "_ogc_reach"
"""The attribute of an optimized module's class that knows whether its forward was called in training."""

FEW = 3
"""Differentiable results of other methods after which there is a warning: some are used beside the forward."""


class Reach:
    """Whether training has called the forward of an optimized module, and what it has called until then."""

    def __init__(self) -> None:
        self.is_reached = self.is_inside = False
        self.others: dict[str, int] = {}  # what gave differentiable results: how often

    def watches(self) -> bool:
        """Whether a call that is about to begin is looked at."""
        is_off = self.is_reached or self.is_inside
        return not is_off and torch.is_grad_enabled() and not torch.compiler.is_compiling()

    def followed(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose result is looked at."""

        @wraps(run)
        def follow(*args: Any, **kwargs: Any) -> Any:
            if not self.watches():
                return run(*args, **kwargs)
            self.is_inside = True
            try:
                result = run(*args, **kwargs)
            finally:
                self.is_inside = False
            if not self.is_reached and any(tensor.grad_fn is not None for tensor in tensor_leaves(result)):
                self._note(name)
            return result

        return follow

    def followed_call(self, module: torch.nn.Module) -> Callable[..., Any] | None:
        """What a module calls to whose forward another was assigned; None if nobody looks at that."""
        return self.followed("forward", own_call(module)) if self.watches() else None

    def reported(self, report: Callable[[torch.nn.Module], Report]) -> Callable[[torch.nn.Module], Report]:
        """The same report, with what was called in the place of the forward."""

        def report_of_all(module: torch.nn.Module) -> Report:
            others = (Calls("", f"plain: {_told(name)}", count) for name, count in self.others.items())
            return Report((*report(module).calls, *others))

        return report_of_all

    def _note(self, name: str) -> None:
        self.others[name] = self.others.get(name, 0) + 1
        if sum(self.others.values()) == FEW:
            log.warning(
                "nothing that ogc planned has run, and no memory is saved: %s. Call the model itself, model(...), and "
                "have its forward do what is trained; or optimize the submodules that are called",
                _told(name),
            )


class Followed:
    """A method of an optimized module: the plain model's, whose results are looked at until the forward is called."""

    def __init__(self, function: FunctionType, reach: Reach) -> None:
        self.function, self.reach = function, reach
        self.follow = reach.followed(function.__name__, function)

    def __get__(self, module: torch.nn.Module | None, owner: type) -> Callable[..., Any]:
        if module is None:
            return self.function
        return MethodType(self.follow if self.reach.watches() else self.function, module)


def followed_methods(original: type[torch.nn.Module], reach: Reach) -> dict[str, Followed]:
    """The public methods of a class that are not every module's, followed, but for the forward."""
    found: dict[str, Any] = {}
    for kind in reversed(original.__mro__[: original.__mro__.index(torch.nn.Module)]):
        found |= vars(kind)
    found = {name: value for name, value in found.items() if not name.startswith("_") and name != "forward"}
    return {name: Followed(value, reach) for name, value in found.items() if type(value) is FunctionType}


def note_reached(module: torch.nn.Module) -> None:
    """Note that the forward of an optimized module is called."""
    reach: Reach | None = getattr(type(module), REACH, None)
    if reach is not None and torch.is_grad_enabled():
        reach.is_reached = True


def _told(name: str) -> str:
    if name == "forward":
        return "training calls a forward that was assigned to the optimized model and does not call the planned one"
    return f"training calls the method {name} of the optimized model, not its forward"
