"""A model that is planned at its first call in training, by what is known then.

The arguments, their types, autocast, hooks, devices and shards are those of the step that the call is part of. Planning
leaves no trace in that step, and takes no more memory than the step would.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections import Counter
from threading import RLock
from typing import Any, Protocol

import torch

from ..errors import CheckError, InputError, OgcError, SolveError
from ..process import during_step
from ..program.structures import Call, input_tensors
from ..torch_state.forwards import original_class, plain_forward
from ..torch_state.no_trace import is_plain
from .calls import Calls, Report
from .module import MADE_AGAIN, OWN_REPORT, copied, instance_around, kept_from_compiling, plain_instance
from .runner import COSTS_THE_SAVING, Modes, first_line, plain_because, tell_plain

log = logging.getLogger(__name__)

UNTRAINED = "nothing in the model and its arguments requires grad"


class PlansCalls(Protocol):
    """Optimizes models for a call."""

    @property
    def submodule(self) -> str:
        """The name of what is planned in the model that was optimized; "" for all of it."""

    def again(self, model: torch.nn.Module) -> torch.nn.Module:
        """What an optimized model is unpickled as."""

    def optimized(self, model: torch.nn.Module, sample_input: Any) -> torch.nn.Module:
        """The optimized model. InputError: an argument of ``optimize`` is wrong. SolveError: no plan meets the goal."""

    def for_least(self) -> PlansCalls:
        """The same for the least peak."""

    def bytes_of_step(self, model: torch.nn.Module, call: Call) -> int:
        """What a step with this call takes at least. OgcError: nothing could be planned for it."""


def planned_when_called(model: torch.nn.Module, planning: PlansCalls) -> torch.nn.Module:
    """The module, planned at its first call in training. A copy that is made before is planned at its own.

    Where it cannot be planned the plain model runs, with one warning.
    """
    of: weakref.WeakKeyDictionary[torch.nn.Module, WhenCalled] = weakref.WeakKeyDictionary()

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = of.get(self)  # a replica of DataParallel has none
        planned = None if found is None else found.planned_for(self, Call(args, kwargs))
        if planned is not None:
            return planned.forward(*args, **kwargs)
        result = plain_forward(self)(*args, **kwargs)
        return result if found is None else found.modes.looked_at(self, result)

    def deep_copy(self: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
        made = copied(self, memo)
        of[made] = of[self].copy(memo)
        return made

    def shallow_copy(self: torch.nn.Module) -> torch.nn.Module:
        made = type(self).__new__(type(self))
        vars(made).update(vars(self))
        of[made] = WhenCalled(planning, Modes(made))
        return made

    def reduced(self: torch.nn.Module, protocol: Any) -> Any:
        planned = of[self].planned
        known = None if planned is None else getattr(type(planned), MADE_AGAIN, None)
        function, *arguments = known or (made_again, planning)
        return function, (plain_instance(self), *arguments)

    def report(self: torch.nn.Module) -> Report:
        return of[self].report()

    def now(name: str) -> property:
        """What the planned model has; None before it is planned."""
        return property(lambda self: getattr(of[self].planned, name, None))

    shown = {**{name: now(name) for name in ("plan", "graph", "code")}, "report": report}
    copies = {"__deepcopy__": deep_copy, "__copy__": shallow_copy, "__reduce_ex__": reduced}
    members = {"forward": kept_from_compiling(forward), **copies}
    result = instance_around(model, original_class(model).__name__, members, shown)
    of[result] = WhenCalled(planning, Modes(model))
    return result


def made_again(model: torch.nn.Module, planning: PlansCalls) -> torch.nn.Module:
    """An optimized model as it is unpickled, from the plain one."""
    return planning.again(model)


class WhenCalled:
    """What is planned of one module, and the calls that ran plain before."""

    def __init__(self, planning: PlansCalls, modes: Modes) -> None:
        self.planning, self.modes = planning, modes
        self.planned: torch.nn.Module | None = None
        self.problem = ""  # why it could not be planned
        self.plain: Counter[str] = Counter()
        self.told: set[str] = set()
        self.lock = RLock()

    def copy(self, memo: dict[int, Any]) -> WhenCalled:
        """The same for a deep copy of the module, whose attributes are in ``memo``."""
        made = WhenCalled(self.planning, self.modes)
        made.planned, made.problem = copy.deepcopy(self.planned, memo), self.problem
        made.plain, made.told = self.plain, self.told
        return made

    def planned_for(self, module: torch.nn.Module, call: Call) -> torch.nn.Module | None:
        """What runs the call; None for the plain forward."""
        if is_plain():
            return None
        if self.planned is None and not (why := self._plain_because(module, call)):
            with self.lock:
                if self.planned is None and not self.problem:
                    self._plan(module, call)
            why = self.problem
        if self.planned is None:
            self.plain[why] += 1
            if why in COSTS_THE_SAVING:
                tell_plain(why, self.told)
        return self.planned

    def _plain_because(self, module: torch.nn.Module, call: Call) -> str:
        if why := self.problem or plain_because(module, self.modes.in_training_alone):
            return why
        tensors = input_tensors(call.args, call.kwargs)
        is_trained = any(t.requires_grad for t in module.parameters()) or any(t.requires_grad for t in tensors)
        return "" if is_trained else UNTRAINED

    def _plan(self, module: torch.nn.Module, call: Call) -> None:
        model = plain_instance(module)
        try:
            available = self.planning.bytes_of_step(model, call)
        except OgcError as error:
            self._fail(error)
            return  # any other error is the forward's own
        try:
            with during_step(available):
                self.planned = self._optimized(model, call)
        except Exception as error:
            is_asked_for = isinstance(error, InputError) and "forward" not in vars(module)  # or it was replaced since
            if is_asked_for or isinstance(error, CheckError):
                raise
            self._fail(error)

    def _optimized(self, model: torch.nn.Module, call: Call) -> torch.nn.Module:
        """By the goal, or, as a training goes on where it is not met, with the least peak."""
        try:
            return self.planning.optimized(model, call)
        except SolveError as error:
            log.warning("taking the least peak instead: %s", first_line(error))
            return self.planning.for_least().optimized(model, call)

    def _fail(self, error: Exception) -> None:
        self.problem = first_line(error)
        what = f"{self.planning.submodule} as it is" if self.planning.submodule else "the plain model"
        log.warning("ogc runs %s, as it cannot be planned at its first call: %s", what, self.problem)

    def report(self) -> Report:
        """All calls until now."""
        planned = () if self.planned is None else getattr(type(self.planned), OWN_REPORT)(self.planned).calls
        return Report((*planned, *(Calls("", f"plain: {why}", count) for why, count in self.plain.items())))
