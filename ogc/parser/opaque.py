"""Which submodules are opaque: called as they are; and which of these may be recomputed."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch

from ..errors import InputError, ParseError, ReplayError
from ..graph import MIB, SMALL_INTERNALS
from ..program.opaque import OpaqueCall
from ..program.program import device_of_model, storage_bytes, tensor_leaves
from ..program.tensors import contents
from ..torch_state.allocator import allocated_bytes, can_measure
from ..torch_state.compare import same_bits
from ..torch_state.forwards import is_compiled, only_collects, only_holds
from ..torch_state.no_trace import generators_of, untouched
from ..torch_state.private import hooks_of
from ..torch_state.ranks import is_of_parallel
from ..torch_state.reads.objects import attributes_of, changes
from ..torch_state.settings import cuda_devices, python_random_state, random_states, set_random_states
from .forward.flat import saved_until_done
from .traced import RECORD, OpaqueError
from .weigh.call import held_aside
from .weigh.record import Record

log = logging.getLogger(__name__)

NamesAndTypes = Iterable[str | type[torch.nn.Module]]


class OpaqueModules:
    """The opaque modules of one model, by name; more are added as recordings fail.

    Args:
        asked_for: which ones, by name or type.
        repeatable: modules in which opaque ones may be recomputed; True for all, None for those that are seen to
            compute the same again.
        front_end: what records the model. All but the recorder have no opaque modules; ParseError where one has to be.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        asked_for: NamesAndTypes,
        repeatable: NamesAndTypes | bool | None = None,
        front_end: str = RECORD,
    ) -> None:
        self.front_end = front_end
        self.modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
        self.reasons: dict[str, str] = {}  # of those that nobody asked for
        self.obstacles: dict[str, str] = {}  # why some that were said to be repeatable are not
        self.names, self.repeatable = names_in(self.modules, asked_for, repeatable)
        self.finds_repeatable = repeatable is None
        self.repeated: set[str] = set()
        self.changing: dict[str, str] = {}  # an attribute that the forward changes, for each module
        self.written: dict[str, str] = {}  # what is changed in modules that are opaque for that, if in one call alone
        self._cover_at_sight()
        if self.names and front_end != RECORD:
            asked = {name: self.reasons.get(name, "was asked to be called as it is") for name in self.names}
            raise ParseError(f"what another tracer's graph has no place for: {_listed(asked)}. {self._no_door()}")

    def cover(self, problem: OpaqueError) -> None:
        """Make the modules opaque that hide the problem, or those around; ParseError if only the model does."""
        if self.front_end != RECORD:
            raise ParseError(f"{problem}. {self._no_door()}") from problem.__cause__
        for name, why in problem.modules.items():
            # A module that is none of the model's is called by one that cannot be told.
            smallest = self._smallest(name) if name in self.modules else ""
            if not smallest:
                raise ParseError(f"{problem}{self._advice()}") from problem.__cause__
            self._add(smallest, why)
            if problem.are_written:
                self.written[smallest] = why.removeprefix("changes ")

    def _no_door(self) -> str:
        return f'front_end="{self.front_end}" has no opaque modules; leave it away for the recorder, which has'

    def _advice(self) -> str:
        """Advice for messages where nothing smaller than the whole model hides a problem, or nothing."""
        parts = {name: module for name, module in self.modules.items() if "." not in name}
        if not parts:
            return ""
        largest = max(parts, key=lambda name: len(list(parts[name].modules())))
        return (
            f" Nothing smaller than the model hides it; its largest part is {largest}: "
            f"model.{largest} = ogc.optimize(model.{largest}, its_input)."
        )

    def changed_attribute(self, name: str) -> str | None:
        """An attribute that the forward changes in the module or below it."""
        changed = {**self.written, **self.changing}
        return next((key for module, key in changed.items() if _is_within(module, [name])), None)

    def check_hooks(self, called: Iterable[str]) -> None:
        """Raise ParseError if a graph made by hand goes past modules with hooks; ``called`` are what it calls."""
        inside = set(called)
        for name in sorted(hooked_modules(self.modules)):
            if not _is_within(name, inside):
                raise ParseError(f"module {name} has forward or backward hooks, and the graph does not call it")

    def is_repeatable(self, name: str) -> bool:
        """Whether the user says that an opaque module computes the same when it is recomputed."""
        return _is_within(name, self.repeatable) or (not name and bool(self.repeatable))

    def report(self) -> None:
        """Warnings that name those that nobody asked for, and those that cannot be recomputed after all."""
        for again, what in ((True, "as they are"), (False, "as they are, and never recomputes them")):
            listed = {name: why for name, why in self.reasons.items() if (name in self.repeated) == again}
            if listed:
                log.warning("ogc calls these modules %s: %s", what, _listed(listed))
        if self.obstacles:
            log.warning("ogc cannot recompute these opaque modules: %s", _listed(self.obstacles))

    def _cover_at_sight(self) -> None:
        hooked = hooked_modules(self.modules)
        for name, module in self.modules.items():
            if isinstance(module, torch.jit.ScriptModule):
                self._add(name, "a torch.jit.ScriptModule")
            elif is_compiled(module):
                self._add(name, "runs compiled")
            elif name in hooked:
                self._add(name, "has forward or backward hooks")

    def _smallest(self, name: str) -> str:
        """The smallest module that holds the named one and is not within an opaque module; "" for the whole model."""
        while name and (_is_within(name, self.names) or only_holds(self.modules[name])):
            name = name.rpartition(".")[0]
        return name

    def _add(self, name: str, why: str) -> None:
        if not _is_within(name, self.names):
            inside = {one for one in self.names if one.startswith(f"{name}.")}
            self.names = self.names - inside | {name}
            self.reasons = {one: reason for one, reason in self.reasons.items() if one not in inside}
            self.reasons[name] = why


def hooked_modules(modules: Mapping[str, torch.nn.Module]) -> set[str]:
    """The names of those that have forward or backward hooks, but for such as are part of the model's forward."""
    return {name for name, module in modules.items() if any(hooks_of(module)) and not only_collects(module)}


def _is_within(name: str, modules: Iterable[str]) -> bool:
    """Whether a module is one of these or inside one."""
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def _listed(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name} ({why})" for name, why in sorted(reasons.items()))


def names_in(
    modules: dict[str, torch.nn.Module], asked_for: NamesAndTypes, repeatable: NamesAndTypes | bool | None
) -> tuple[set[str], set[str]]:
    """The names of the opaque modules that are asked for, and of those in which they may be called again.

    Raises:
        InputError: a name or type is none of the model's.
    """
    chosen = modules if repeatable is True else modules_named(modules, repeatable or (), "recompute_opaque")
    return set(modules_named(modules, asked_for, "opaque_modules")), set(chosen)


def modules_named(modules: Mapping[str, torch.nn.Module], asked_for: Any, argument: str) -> list[str]:
    """The names of the modules that an argument means. InputError: the model has none such."""
    if isinstance(asked_for, (str, type)) or not isinstance(asked_for, Iterable):
        raise InputError(f"{argument} must be a list of module names and types, not {asked_for!r}")
    resolved: list[str] = []
    for entry in asked_for:
        if isinstance(entry, type):
            names = [name for name, module in modules.items() if isinstance(module, entry)]
            names = [name for name in names if not only_holds(modules[name])]
            known = sorted({type(module).__name__ for module in modules.values()})
            wanted, what = entry.__name__, "no submodule of the model is a"
        elif isinstance(entry, str):
            names = [entry] if entry in modules else []
            known, wanted, what = list(modules), entry, "the model has no submodule"
        else:
            raise InputError(f"{argument} must hold module names and types, not {entry!r}")
        if not names:
            near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.3) or known[:3]
            raise InputError(f"{argument}: {what} {wanted!r}; the nearest are {', '.join(near) or 'none'}")
        if only_holds(modules[names[0]]):
            kind = type(modules[names[0]]).__name__
            raise InputError(f"{argument}: {names[0]!r} is a {kind}, which is never called; name modules in it")
        resolved += names
    return resolved


# -- whether an opaque module may be recomputed ------------------------------------------------------------------


FEW = 1024
"""Bytes that do not count: autograd holds numbers that were multiplied by, and tells nobody."""


def refuse_chance(model: torch.nn.Module, node: torch.fx.Node, args: Any) -> None:
    """Raise OpaqueError if an opaque module returns something else from some of several random states."""
    assert isinstance(node.target, OpaqueCall)
    module, given, _ = args
    for seed in range(CHANCES):
        with untouched(model):
            torch.manual_seed(seed)
            try:
                _call(node.target, module, given)
            except ReplayError:
                why = "returns something else by chance"
                raise OpaqueError(f"the opaque module {node.target.module} {why}", {node.target.module: why}) from None


CHANCES = 16
"""Random states that an opaque module which decides by random numbers is tried from."""


def _hooks(module: torch.nn.Module) -> Iterator[Any]:
    """All that are called with a module."""
    return chain.from_iterable(table.values() for table in hooks_of(module))


def why_not_repeatable(model: torch.nn.Module, record: Record, args: Any) -> str | None:
    """Why an opaque module must not be recomputed, in words; None if two calls from one random state show none."""
    opaque, (module, given, _) = record.node.target, args
    assert isinstance(opaque, OpaqueCall)
    if opaque.talks:
        return "runs collectives, which other ranks join once"
    if opaque.takes_no_hooks:
        return "differentiates by torch.func, and keeps what it saves for that"
    if module is not None and any(not is_of_parallel(hook) for one in module.modules() for hook in _hooks(one)):
        return "has hooks, which would be called again"
    if record.in_place:
        return "writes a buffer, or what it is given"
    if any(opaque.returned.views[number] is not None for number in opaque.new):
        return "returns a view of what it is given"
    with untouched(model):
        return _difference(opaque, module, given, device_of_model(model, given))


def _difference(
    opaque: OpaqueCall, module: torch.nn.Module | None, given: list[torch.Tensor], home: torch.device
) -> str | None:
    devices = cuda_devices()
    states, python_state = random_states(devices), python_random_state()
    called = torch.nn.Module() if module is None else module
    own = [(generator, generator.get_state()) for generator in generators_of([called])]
    before = attributes_of(called)
    first = _call(opaque, module, given)
    for _, changed in changes(before, attributes_of(called)):
        return f"changes its attribute {changed}"
    if python_random_state() != python_state:
        return "draws random numbers of Python or numpy"
    if not all(torch.equal(generator.get_state(), state) for generator, state in own):
        return "draws from a torch.Generator of its own"
    if any(tensor.is_nested for tensor in chain(*first)):
        return "saves nested tensors in one piece (layout=torch.strided), which cannot be told apart"
    set_random_states(states, devices)
    again = _call(opaque, module, given)
    if not all(len(a) == len(b) and all(map(same_bits, a, b)) for a, b in zip(first, again, strict=True)):
        return "computes something else when it is recomputed"
    del again
    if can_measure(home):
        results: list[torch.Tensor] = []
        _, held = allocated_bytes(lambda: results.extend(_call(opaque, module, given)[1]), home)
        others = held - storage_bytes(results)
        if others > FEW and others * SMALL_INTERNALS > storage_bytes([*first[0], *first[1]]):
            return f"keeps {others / MIB:.3g} MiB for its backward that autograd does not know of"
    if aside := held_aside(opaque, module, given, home)[0].given:
        return f"keeps {storage_bytes([given[n] for n in aside]) / MIB:.3g} MiB that it is given past autograd"
    return None


def _call(
    opaque: OpaqueCall, module: torch.nn.Module | None, given: list[torch.Tensor]
) -> tuple[list[torch.Tensor], ...]:
    """The tensors that a call of an opaque module saves, detached, and those that it returns."""
    with saved_until_done() as packed:
        results = tensor_leaves(opaque(module, given))
        saved = [inner.detach() for tensor in packed for inner in contents(tensor)]
    return saved, results
