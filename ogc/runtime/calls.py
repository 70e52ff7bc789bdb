"""Calls of an optimized module: what kind they are, what ran them, and training that never reaches the planned forward.

Equal kinds take the same plan.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import wraps
from itertools import chain
from textwrap import wrap
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch

from ..process import OnThread
from ..program.program import tensor_leaves
from ..program.structures import EACH_BY_ITSELF, HolderSpec, InputSpec, Same, TensorSpec, same_leaf
from ..torch_state.module_state import State, changed_state
from ..torch_state.private import own_call, pytree
from ..torch_state.settings import Flags, changed_flags

log = logging.getLogger(__name__)

MOST = 3
"""How many differences are told."""


class Kind(NamedTuple):
    """The module, the arguments and PyTorch's settings at a call. Equal where the same plan holds."""

    state: State
    inputs: InputSpec
    flags: Flags

    def fits(self, other: Kind, size: bool = True) -> bool:
        """Whether calls are of one kind; without ``size``, up to shapes, strides and numbers."""
        same_state = self.state is other.state or self.state == other.state
        return same_state and self.flags == other.flags and self.inputs.fits(other.inputs, size)

    def differences(self, model: torch.nn.Module, other: Kind) -> str:
        """In what this kind differs from another, in words."""
        found = [*changed_state(model, other.state, self.state), *_autocast(self.inputs.casts, other.inputs.casts)]
        found += [*changed_flags(other.flags, self.flags), *_inputs(model, self.inputs, other.inputs)]
        rest = f" and {len(found) - MOST} more" if len(found) > MOST else ""
        return (", ".join(found[:MOST]) + rest) or "the arguments are nested otherwise"


def _autocast(now: tuple[Any, ...], then: tuple[Any, ...]) -> Iterator[str]:
    if now == then:
        return
    casts = [f"casts to {one[1]} on {one[0]}" for one in now if one is not EACH_BY_ITSELF]
    cache = ", without its cache" if EACH_BY_ITSELF in now else ""
    yield f"autocast {' and '.join(casts) or 'is off'}{cache}"


def _inputs(model: torch.nn.Module, given: InputSpec, sample: InputSpec) -> Iterator[str]:
    here, there = (_by_name(model, spec) for spec in (given, sample))
    for name, leaf in here.items():
        if name not in there:
            yield f"{name} is {_text(leaf)}, which the sample has not"
        elif not same_leaf(leaf, there[name]):
            now, then = _text(leaf), _text(there[name])
            yield f"{name} is {now}, not {then}" if now != then else f"{name} has other strides or contents"
    yield from (f"{name} is not there" for name in there if name not in here)


def _by_name(model: torch.nn.Module, spec: InputSpec) -> dict[str, Any]:
    """The leaves of a call's arguments, by the names of the forward's parameters."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    args, kwargs = spec.tree.children()
    places = [positional[n] if n < len(positional) else f"argument {n}" for n in range(args.num_children)]
    names = [name for place, tree in zip(places, args.children(), strict=True) for name in _names(place, tree)]
    names += [name for key, tree in zip(kwargs.context, kwargs.children(), strict=True) for name in _names(key, tree)]
    return dict(zip(names, spec.leaves, strict=True))


def _names(name: str, tree: pytree.TreeSpec) -> Iterator[str]:
    """A name for each leaf of an argument."""
    if tree.is_leaf():
        yield name
        return
    keys = tree.context if tree.type is dict else range(tree.num_children)
    for key, child in zip(keys, tree.children(), strict=True):
        yield from _names(f"{name}[{key!r}]", child)


def _text(leaf: Any) -> str:
    if isinstance(leaf, TensorSpec):
        grad = " that requires grad" if leaf.requires_grad else ""
        return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)} on {leaf.device}{grad}"
    if isinstance(leaf, Same):
        return "an object that is given before"
    if isinstance(leaf, HolderSpec):
        return "given more than once" if leaf.kind is None else f"another {leaf.kind.__name__}"
    return repr(leaf)[:40]


@dataclass(frozen=True)
class Calls:
    """Calls of one kind.

    Attributes:
        kind: how they differ from the sample; "" where they run the plain model whatever their kind.
        runs: the plan that ran them, or ``"plain: "`` and why.
        count: how many there were.
        module: the planned part, where the model is planned in parts.
    """

    kind: str
    runs: str
    count: int
    module: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether the plain model ran them."""
        return self.runs.startswith("plain")


@dataclass(frozen=True)
class Report:
    """The calls of an optimized module and of its copies until now, by kind and by what ran them."""

    calls: tuple[Calls, ...]

    @property
    def planned(self) -> int:
        """How many calls ran by a plan."""
        return sum(calls.count for calls in self.calls if not calls.is_plain)

    @property
    def plain(self) -> int:
        """How many calls ran the plain model."""
        return sum(calls.count for calls in self.calls if calls.is_plain)

    def of(self, module: str) -> Report:
        """The same, said to be of a part with that name."""
        return Report(tuple(replace(calls, module=module) for calls in self.calls))

    def __str__(self) -> str:
        """What ran by a plan, its price first; kinds that one plan ran together, in lines of ``WIDTH`` columns."""
        plans = dict.fromkeys(calls.runs.removeprefix("plan: ") for calls in self.calls if not calls.is_plain)
        only = f": {next(iter(plans))}" if len(plans) == 1 else ""
        together: dict[tuple[str, str], list[Calls]] = {}
        for calls in self.calls:
            together.setdefault((calls.module, calls.runs), []).append(calls)
        lines = (_lines(*found) for found in together.values())
        return "\n".join([f"{self.planned} calls by a plan, {self.plain} plain{only}", *chain.from_iterable(lines)])


WIDTH = 100
"""Columns of a printed report."""


def _lines(first: Calls, *others: Calls) -> list[str]:
    """What is printed of calls that one plan ran, or that were plain for one reason."""
    count = sum(calls.count for calls in (first, *others))
    where = f"{1 + len(others)} kinds, the first: {first.kind}" if others else first.kind
    text = " ".join(filter(None, [first.module and f"{first.module}:", first.runs, where and f"({where})"]))
    return wrap(text, WIDTH, initial_indent=f"{count:7}  ", subsequent_indent=" " * 9, break_long_words=False)


beside = OnThread(True)
"""Whether no optimized model runs on this thread, nor the plain model of one: submodules are called by themselves."""

REACH = "_ogc_reach"
"""The attribute of an optimized module's class that knows whether its forward was called in training."""

FEW = 3
"""Differentiable results of other methods after which there is a warning: some are used beside the forward."""


class Reach:
    """Whether training has called the forward of an optimized module, and what it has called until then."""

    def __init__(self) -> None:
        self.is_reached = self.is_inside = False
        self.others: dict[str, int] = {}  # what gave differentiable results: how often
        self.more: Callable[[torch.nn.Module], tuple[Calls, ...]] = lambda module: ()  # calls beside the forward

    def watches(self, module: torch.nn.Module) -> bool:
        """Whether a call of a module that is about to begin is looked at."""
        is_off = self.is_reached or self.is_inside or not module.training
        return not is_off and torch.is_grad_enabled() and not torch.compiler.is_compiling()

    def followed(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose result is looked at."""

        @wraps(run)
        def follow(*args: Any, **kwargs: Any) -> Any:
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
        return self.followed("forward", own_call(module)) if self.watches(module) else None

    def reported(self, report: Callable[[torch.nn.Module], Report]) -> Callable[[torch.nn.Module], Report]:
        """The same report, with what was called in the place of the forward."""

        def report_of_all(module: torch.nn.Module) -> Report:
            others = (Calls("", f"plain: {_told(name)}", count) for name, count in self.others.items())
            return Report((*report(module).calls, *self.more(module), *others))

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
        return MethodType(self.follow if self.reach.watches(module) else self.function, module)


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
