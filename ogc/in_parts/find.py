"""Finds the parts of a model: the largest submodules that can be planned, each with a sample of its own.

The model's forward runs once. Each submodule is parsed when it is first called, with the arguments of that call; then
it runs as it is. One that cannot be parsed stays plain, and what it calls is parsed instead. Nothing is saved for a
backward, so that memory is that of inference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..errors import InputError, OgcError, ParseError
from ..graph import FREE, Graph
from ..parser import reuse
from ..parser.arguments import call_arguments
from ..parser.forward.flat import raise_own_error
from ..parser.forward.patches import wrap
from ..plan.told import Instructions
from ..planning import PlanOptions
from ..program.program import storage_of, tensor_leaves
from ..program.structures import Call, InputSpec, TensorSpec
from ..program.tensors import ByStorage, copies
from ..torch_state.forwards import TAKES_NONE, hooks_off_in, is_compiled, only_holds, plain_forward
from ..torch_state.no_trace import plainly, untouched
from ..torch_state.private import (
    CALL,
    current_backward,
    is_functorch_active,
    own_call,
    saved_tensors_hooks_in_use,
    untraced,
    version_alone,
    version_of,
)
from ..torch_state.ranks import alone
from ..torch_state.reads.objects import changes, watched_attributes


@dataclass(frozen=True, eq=False)
class Part:
    """One kind of calls of a submodule.

    Attributes:
        name, module: the submodule.
        graph: what these calls compute.
        like: equal for parts with equal operations.
        look: see :func:`look_of`.
        told: what its plans keep to.
    """

    name: str
    module: torch.nn.Module
    graph: Graph
    like: int
    look: Any
    told: Instructions


@dataclass
class FoundParts:
    """What one forward showed.

    Attributes:
        parts: in the order of their first calls.
        calls: for each call of a part, the number of the part, in order.
        again: for each of these calls, by the number of a backward inside the forward, the bytes that both save.
        plain: the modules that stay plain, by name, and why; ``""`` is the model itself.
        saved_bytes: what autograd saves for the operators of each of these, beside what others do.
        late: submodules that were not called, by name.
    """

    parts: list[Part] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    again: list[Counter[int]] = field(default_factory=list)
    plain: dict[str, str] = field(default_factory=dict)
    saved_bytes: dict[str, int] = field(default_factory=dict)
    late: dict[str, torch.nn.Module] = field(default_factory=dict)


def find_parts(model: torch.nn.Module, sample_input: Any, options: PlanOptions, plain: Mapping[str, str]) -> FoundParts:
    """The parts of ``model``, which is afterwards as before; ``plain`` has modules that stay plain, by name, and why.

    Raises:
        Exception: what the model's own forward raises.
    """
    spec, tensors = InputSpec.of(*call_arguments(sample_input))
    closed = options.parsing.asked_for(model)
    plain = {**plain, **dict.fromkeys(closed, "was asked to be called as it is")}
    graphs = _Graphs(options)
    keeps = False
    while True:
        forward = _Forward(model, graphs, plain, closed, keeps)
        try:
            with untouched(model, given=spec.constants):
                args, kwargs = spec.rebuild(copies(tensors))
                forward.run(args, kwargs)
        except _Unpacked:
            keeps = True
            continue
        except OgcError:
            raise
        except Exception as error:
            raise_own_error(model, spec, tensors)
            raise ParseError(f"Its forward fails while it is watched: {type(error).__name__}: {error}") from error
        misfits = forward.misfits()
        if not misfits:
            return forward.found
        plain.update(misfits)


@dataclass
class _Graphs:
    """Graphs of calls; equal submodules share what was parsed."""

    options: PlanOptions
    parts: list[Part] = field(default_factory=list)

    def part(self, module: torch.nn.Module, name: str, call: Call) -> Part:
        """The part that a call is of, or a ParseError."""
        inputs = InputSpec.of(call.args, call.kwargs)[0]
        for part in self.parts:
            if part.module is module and part.graph.program.inputs.fits(inputs):
                return part
        options = self.options.of_submodule(name, module)
        shared = self._shared(module, call, inputs)
        graph = options.parse(module, call) if shared is None else options.parsing.told.on(shared)
        like = next((p.like for p in self.parts if p.graph == graph), len(self.parts))
        self.parts.append(Part(name, module, graph, like, look_of(module), options.parsing.told))
        return self.parts[-1]

    def _shared(self, module: torch.nn.Module, call: Call, inputs: InputSpec) -> Graph | None:
        """The graph of an equal submodule, if it is certain to be this one's too."""
        for number, part in enumerate(self.parts):
            is_first = part.like == number and part.module is not module
            if is_first and part.graph.program.inputs.fits(inputs) and is_alike(part, module):
                with suppress(OgcError):
                    return replace(reuse(module, part.graph, call), told=FREE)
        return None


def is_alike(part: Part, module: torch.nn.Module) -> bool:
    """Whether a module looks the same as a part did, but for what parameters and buffers hold."""
    return type(part.module) is type(module) and part.look == look_of(module)


def look_of(module: torch.nn.Module) -> Any:
    """Equal for modules that compute the same from equal parameters."""
    tensors = {name: TensorSpec.of(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    return tensors, [(type(child), child.training) for child in module.modules()], repr(module)


class _Forward:
    """One forward of the model, in which the calls of submodules are seen."""

    def __init__(
        self,
        model: torch.nn.Module,
        graphs: _Graphs,
        plain: dict[str, str],
        closed: Collection[str],
        keeps: bool,
    ) -> None:
        self.model = model
        self.keeps = keeps  # what is saved, for backwards inside
        self.graphs = graphs
        self.closed = closed
        self.names = {module: name for name, module in model.named_modules()}
        self.found = FoundParts(plain=dict(plain))
        self.called: set[torch.nn.Module] = set()
        self.scopes = [""]  # the plain modules that run
        self.in_part = False
        self.hooks = saved_tensors_hooks(self._saved, _unpacked)
        self.given: list[tuple[str, torch.Tensor, int]] = []  # part, what shares the version of its input, version
        self.saved = _Saved()
        self.attributes: dict[str, dict[str, Any]] = {}  # as they were, but for what parts changed of their own
        self.unfit: dict[str, str] = {}  # parts that cannot be, after all
        self.compiled = {m: vars(m).get(CALL) for m in _eager(self.names) if is_compiled(m)}

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run it, and note what is called."""
        for tensor in (*tensor_leaves(args, kwargs), *self.model.parameters(), *self.model.buffers()):
            self.saved.is_new(tensor)
        parameters, self.attributes = dict(self.model.named_parameters()), watched_attributes(self.model)
        with torch.enable_grad(), plainly(), alone(), self._watched():
            results = tensor_leaves(plain_forward(self.model)(*args, **kwargs))
        if not any(tensor.requires_grad for tensor in results):
            raise ParseError("No output of the forward requires grad")
        if {name: id(p) for name, p in self.model.named_parameters()} != {n: id(p) for n, p in parameters.items()}:
            raise ParseError("The forward makes parameters or takes some out of the model")
        self.found.late = {self.names[module]: module for module in self._uncalled(self.model)}

    def misfits(self) -> dict[str, str]:
        """Parts that turned out to be none, and why."""
        why = "what it is given is changed in place afterwards"
        written = {name: why for name, tensor, version in self.given if version_of(tensor) != version}
        return {**written, **self.unfit}

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Calls of submodules come here, and nothing is saved for a backward."""
        inside = {inner for module in self.compiled for inner in module.modules() if inner is not module}
        modules = [m for m in _eager(self.names) if m is not self.model and m not in inside]
        with _own_calls(modules), ExitStack() as stack:
            for module in modules:
                vars(module)[CALL] = partial(self._call, module)
            wrap(stack, torch.autograd.graph, TAKES_NONE, hooks_off_in)
            with self.hooks:
                yield

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        """For the parser, everything is as if there was no forward around it."""
        with _own_calls(self.names, self.compiled):
            self.hooks.__exit__()
            try:
                yield
            finally:
                self.hooks.__enter__()

    def _call(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = self.compiled.get(module) or own_call(module)
        if self.in_part or self.scopes[-1] in self.closed:
            return own(*args, **kwargs)
        self.called.add(module)
        name = self.names[module]
        if module in self.compiled:
            return self._run_plain(module, name, "runs compiled", args, kwargs, own)
        why = self.found.plain.get(name) or self._obstacle(module, tensor_leaves(args, kwargs))
        if why is not None:
            return self._run_plain(module, name, why, args, kwargs)
        # Its hooks may change what it is given: the part begins behind them.
        vars(module)["forward"] = partial(self._forward, module, name)
        try:
            return own_call(module)(*args, **kwargs)
        finally:
            vars(module).pop("forward", None)

    def _obstacle(self, module: torch.nn.Module, given: list[torch.Tensor]) -> str | None:
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return "is called without gradients"
        parameters = list(module.parameters())
        if not parameters or not any(tensor.requires_grad for tensor in chain(parameters, given)):
            return _UNTRAINED
        if is_functorch_active():
            return "is called in a transform of torch.func"
        if "forward" in vars(module):
            return "its forward was replaced on the instance"
        hooks = saved_tensors_hooks_in_use()
        if hooks is None or hooks[0] != self.hooks.pack_hook:
            return (
                "is called under other hooks for saved tensors, as those of torch.utils.checkpoint (switch gradient "
                "checkpointing off, in the model and in the trainer: what is planned recomputes by itself)"
            )
        return None

    def _forward(self, module: torch.nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
        del vars(module)["forward"]
        try:
            with self._unwatched():
                before = watched_attributes(self.model)
                self._refuse_set_from_outside(name, before)
                part = self.graphs.part(module, name, Call(args, kwargs))
        except Exception as error:  # if the call is broken, it raises the same below
            return self._run_plain(module, name, _first_sentence(error), args, kwargs, module.forward)
        shadows = [shadow for tensor in tensor_leaves(args, kwargs) if (shadow := version_alone(tensor)) is not None]
        if part not in self.found.parts:
            self.found.parts.append(part)
        self.found.calls.append(self.found.parts.index(part))
        self.found.again.append(Counter())
        self.in_part = True
        try:
            return module.forward(*args, **kwargs)
        finally:
            self.in_part = False
            self.given += [(name, shadow, version_of(shadow)) for shadow in shadows]
            with self._unwatched():
                self._note_set_outside(name, before)

    def _refuse_set_from_outside(self, name: str, now: dict[str, dict[str, Any]]) -> None:
        """Raise ParseError if the forward around a part has set attributes of it before it is called."""
        for changed, key in changes(self.attributes, now):
            if f"{changed}.".startswith(f"{name}."):
                raise ParseError(f"its attribute {key} is set by the forward around it")

    def _note_set_outside(self, name: str, before: dict[str, dict[str, Any]]) -> None:
        """Note a part that sets attributes of modules around it, which a plan would not."""
        now = watched_attributes(self.model)
        for changed, key in changes(before, now):
            if not f"{changed}.".startswith(f"{name}."):
                self.unfit[name] = f"sets the attribute {key} of {changed or 'the model'}"
            elif changed in self.attributes:  # an opaque module's, which it may change
                self.attributes[changed] = now[changed]

    def _run_plain(self, module: torch.nn.Module, name: str, why: str, args: Any, kwargs: Any, run: Any = None) -> Any:
        if why != _UNTRAINED:
            self.found.plain.setdefault(name, why)
        self.scopes.append(self.scopes[-1] if why == _UNTRAINED else name)
        try:
            return (run or own_call(module))(*args, **kwargs)
        finally:
            self.scopes.pop()

    @untraced
    def _saved(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if self.in_part:
            self.saved.by_part(tensor, self.found.again[-1])
        elif bytes_outside := self.saved.by_outside(tensor):
            scope = self.scopes[-1]
            self.found.saved_bytes[scope] = self.found.saved_bytes.get(scope, 0) + bytes_outside
        return tensor.detach() if self.keeps else None

    def _uncalled(self, module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        """The largest modules that this forward left out, though others may call them."""
        for child in module.children():
            if child in self.compiled or isinstance(child, torch.jit.ScriptModule):
                continue
            if child in self.called:
                if self.names[child] in self.found.plain and self.names[child] not in self.closed:
                    yield from self._uncalled(child)
            elif only_holds(child) or self._has_called(child):
                yield from self._uncalled(child)
            elif any(p.requires_grad for p in child.parameters()):
                yield child

    def _has_called(self, module: torch.nn.Module) -> bool:
        return not self.called.isdisjoint(module.modules())


class _Saved:
    """Counts the bytes that autograd saves in one forward: of parts, outside of them, of derivatives of gradients.

    Where a backward inside the forward is to be differentiated, autograd saves for that what it took out of parts, too:
    the plain model holds it once.
    """

    def __init__(self) -> None:
        self.counted: ByStorage[bool] = ByStorage()
        self.of_parts: ByStorage[tuple[Counter[int], set[int]]] = ByStorage()  # by a call; again by backwards

    def by_part(self, tensor: torch.Tensor, again: Counter[int]) -> None:
        """Note what a call of a part saves; ``again`` counts, by its number, what a backward saves of that."""
        storage = storage_of(tensor)
        if storage is not None:
            self.of_parts[storage] = again, set()

    def by_outside(self, tensor: torch.Tensor) -> int:
        """The bytes of a tensor that is saved outside of the parts; none if they were counted before."""
        storage = storage_of(tensor)
        if storage is None or self._is_saved_again(storage) or not self.is_new(tensor):
            return 0
        return storage.nbytes()

    def is_new(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory was not counted yet; now it is."""
        storage = storage_of(tensor)
        if storage is None or storage in self.counted:
            return False
        self.counted[storage] = True
        return True

    def _is_saved_again(self, storage: torch.UntypedStorage) -> bool:
        """Whether a backward saves what a call of a part has saved."""
        known, number = self.of_parts.get(storage), current_backward()
        if known is None or number == -1:
            return False
        again, backwards = known
        if number not in backwards:
            backwards.add(number)
            again[number] += storage.nbytes()
        return True


def _eager(modules: Collection[torch.nn.Module]) -> list[torch.nn.Module]:
    return [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]


@contextmanager
def _own_calls(
    modules: Collection[torch.nn.Module], compiled: Mapping[torch.nn.Module, Any] | None = None
) -> Iterator[None]:
    """Modules are called as they are by themselves, or by what compiled code is given, and afterwards as before."""
    replaced = {module: vars(module).pop(CALL) for module in modules if CALL in vars(module)}
    for module, call in (compiled or {}).items():
        if call is not None:
            vars(module)[CALL] = call
    try:
        yield
    finally:
        for module in modules:
            vars(module).pop(CALL, None)
        for module, call in replaced.items():
            vars(module)[CALL] = call


_UNTRAINED = "has no parameter that is trained"


class _Unpacked(Exception):
    """A backward is run inside the forward: what is saved is to be kept."""


def _unpacked(packed: torch.Tensor | None) -> torch.Tensor:
    if packed is None:
        raise _Unpacked
    return packed


def _first_sentence(error: Exception) -> str:
    text = str(error) if isinstance(error, (ParseError, InputError)) else f"{type(error).__name__}: {error}"
    return text.partition(" Nothing smaller than the model hides it")[0].partition("\n")[0].rstrip(".;")
