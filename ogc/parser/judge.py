"""Holds a recorded program against a forward that nobody records: eager is the judge of the parser.

The model runs once as in training and the program once, each under a log below autograd. Both must dispatch the same
operators with the same scalars on tensors of the same storages, shapes, strides and types, save the same for their
backward in between, build the same autograd graph, and leave the same outputs, buffers and random state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..program.program import OWN, args_of, get_attribute, run_nodes, storage_of, without_autocast
from ..program.structures import InputSpec, OutputSpec
from ..torch_state.compare import difference, fingerprint, same_bits
from ..torch_state.no_trace import untouched
from ..torch_state.private import TorchDispatchMode, id_of_storage
from .arguments import copies
from .forward.flat import FlatForward, nothing_saved
from .forward.patches import seen_as_recorded
from .passes.reached import reached
from .traced import ON_CONSTANTS, OpaqueError, Traced, called_leaves
from .weigh.observe import state_of

Forward = Callable[..., Any]


def judge(
    model: torch.nn.Module,
    spec: InputSpec,
    tensors: list[torch.Tensor],
    traced: Traced,
    forward: Forward | None = None,
) -> None:
    """Do nothing if the program is what the forward runs.

    It takes a forward of the model and one of the program, with the memory of inference.

    Args:
        model: the model.
        spec: how the arguments are rebuilt from ``tensors``.
        tensors: the tensors among the arguments of the call.
        traced: the recorded program, every call in it.
        forward: what was recorded, if not the model's forward.

    Raises:
        OpaqueError: it names the module, the file and the line where the two part.
    """
    leaves = called_leaves(traced.graph)
    with untouched(model):
        eager = _Run(model, copies(tensors))
        with eager.seen(leaves):
            eager.run_forward(model.forward if forward is None else forward, spec)
    _compare_outputs(traced, traced.outputs, eager.outputs)
    eager.outputs = []
    with untouched(model):
        replay = _Run(model, copies(tensors))
        with replay.seen(leaves):
            replay.run_program(traced)
    _compare_events(eager.log, replay.log)
    _compare_results(model, eager, replay, traced)


class _Log(TorchDispatchMode):
    """Writes down what is dispatched below autograd, and what autograd saves.

    Attributes:
        events: in the order in which they happened.
        owners: for each, the node of the program that it belongs to.
    """

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.events: list[tuple[Any, ...]] = []
        self.owners: list[torch.fx.Node | None] = []
        self.owner: torch.fx.Node | None = None
        self.is_paused = False
        self.storages: dict[int, tuple[int, StorageWeakRef]] = {}
        self.count = 0
        for tensor in known:
            self._number(tensor)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in ON_CONSTANTS or self.is_paused:
            return function(*args, **kwargs)
        given = self._described((args, kwargs), is_known=False)
        result = function(*args, **kwargs)
        self._add((function, *given, *self._described(result, is_known=True)))
        return result

    def saved(self, tensor: torch.Tensor) -> None:
        """Note that autograd saves a tensor."""
        if self.is_paused:
            return
        self._add(("saved", self._tensor(tensor, is_known=True)))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing that runs inside is written down."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def _add(self, event: tuple[Any, ...]) -> None:
        self.events.append(event)
        self.owners.append(self.owner)

    def _described(self, given: Any, is_known: bool) -> list[Any]:
        if isinstance(given, torch.Tensor):
            return [self._tensor(given, is_known)]
        if isinstance(given, (tuple, list)):
            return ["(", *(entry for item in given for entry in self._described(item, is_known)), ")"]
        if isinstance(given, dict):
            return [entry for key in given for entry in (key, *self._described(given[key], is_known))]
        if isinstance(given, torch.Generator):  # known by what it would draw, as each call gets another wrapper
            return [(type(given), int(fingerprint(given.get_state())))]
        return [(type(given), repr(given))]

    def _tensor(self, tensor: torch.Tensor, is_known: bool) -> tuple[Any, ...]:
        if storage_of(tensor) is None:
            return tensor.layout, tuple(tensor.shape), tensor.dtype
        before = self.count
        number = self._number(tensor)
        # What nobody made in this forward is known by what it holds.
        content = None if is_known or self.count == before or tensor.is_meta else int(fingerprint(tensor))
        return (
            number,
            content,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.storage_offset(),
            tensor.dtype,
            tensor.device,
        )

    def _number(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        known = self.storages.get(id_of_storage(storage))
        if known is None or known[1].expired():
            known = self.storages[id_of_storage(storage)] = self.count, StorageWeakRef(storage)
            self.count += 1
        return known[0]


class _Run:
    """One run under a log, and what came of it."""

    def __init__(self, model: torch.nn.Module, inputs: list[torch.Tensor]) -> None:
        self.model = model
        self.inputs = inputs
        self.log = _Log([*inputs, *model.parameters(), *model.buffers()])
        self.outputs: list[torch.Tensor] = []
        self.output_spec: OutputSpec | None = None
        self.autograd: list[Any] = []
        self.state: list[torch.Tensor] = []
        self._nodes: list[Any] = []  # held until the outputs are gone

    def seen(self, leaves: Collection[str]) -> AbstractContextManager[None]:
        """Inside, the forward runs as a front end sees it, and this log is told of what leaves save."""
        return seen_as_recorded(self.model, leaves, self.log.saved, self.log.paused)

    def run_forward(self, forward: Forward, spec: InputSpec) -> None:
        """Run what eager runs."""
        flat = FlatForward(forward, spec)
        with nothing_saved(self.log.saved), self.log:
            outputs = flat(*self.inputs)
        self.output_spec = flat.output_spec
        self._finish(outputs)

    def run_program(self, traced: Traced) -> None:
        """Run a program."""
        try:
            with nothing_saved(self.log.saved), without_autocast(), self.log:
                fetch = partial(get_attribute, self.model, traced.constants)
                outputs = list(run_nodes(traced.graph.nodes, self.inputs, fetch, self._call))
        except Exception as error:
            _refuse(self.log.owner, f"a call that fails ({type(error).__name__}: {error})")
        self._finish(outputs)

    def _finish(self, outputs: list[torch.Tensor]) -> None:
        self.outputs = [tensor.detach() for tensor in outputs]
        _, self._nodes = reached(outputs, self.inputs)
        self.autograd = self._described(outputs)
        self.state = state_of(self.model)
        self.inputs = []

    def _described(self, outputs: list[torch.Tensor]) -> list[Any]:
        """The autograd graph behind the outputs, in an order that depends on it alone."""
        numbers = {node: number for number, node in enumerate(self._nodes)}
        known = {id(tensor): number for number, tensor in enumerate([*self.inputs, *self.model.parameters()])}
        described: list[Any] = [None if t.grad_fn is None else (numbers[t.grad_fn], t.output_nr) for t in outputs]
        for node in self._nodes:
            edges = [None if after is None else (numbers[after], place) for after, place in node.next_functions]
            variable = getattr(node, "variable", None)
            described.append((node.name(), edges, None if variable is None else known.get(id(variable))))
        return described

    def _call(self, node: torch.fx.Node, values: dict[torch.fx.Node, Any]) -> Any:
        self.log.owner = node
        args, kwargs = args_of(node, values)
        target: Any = node.target
        with self.log.paused() if OWN in node.meta else nullcontext():
            return target(*args, **kwargs)


def _compare_events(eager: _Log, replay: _Log) -> None:
    for number, (theirs, ours) in enumerate(zip(eager.events, replay.events, strict=False)):
        if theirs != ours:
            _refuse(replay.owners[number], f"{_text(ours)} instead of {_text(theirs)}")
    if len(eager.events) > len(replay.events):
        _refuse(replay.owner, f"nothing more where {_text(eager.events[len(replay.events)])} follows")
    if len(eager.events) < len(replay.events):
        number = len(eager.events)
        _refuse(replay.owners[number], f"{_text(replay.events[number])} where nothing more follows")


def _compare_results(model: torch.nn.Module, eager: _Run, replay: _Run, traced: Traced) -> None:
    if eager.output_spec != traced.output_spec:
        _refuse(None, f"a result of the structure {traced.output_spec} instead of {eager.output_spec}")
    _compare_outputs(traced, replay.outputs, traced.outputs)
    if replay.autograd != eager.autograd:
        _refuse(None, _first_difference(replay.autograd, eager.autograd))
    names = [*(f"buffer {name}" for name, _ in model.named_buffers()), "random state"]
    for name, ours, theirs in zip(names, replay.state, eager.state, strict=True):
        if not same_bits(ours, theirs):
            _refuse(None, f"another {name}: {difference(ours, theirs)}")


def _compare_outputs(traced: Traced, ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    (output,) = traced.graph.find_nodes(op="output")
    if len(ours) != len(theirs):
        _refuse(None, f"{len(ours)} output tensors instead of {len(theirs)}")
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if not same_bits(mine, other):
            _refuse(output.args[0][number], f"another output {number}: {difference(mine, other)}")


def _first_difference(ours: list[Any], theirs: list[Any]) -> str:
    for one, other in zip(ours, theirs, strict=False):
        if one != other:
            return f"{one} in the autograd graph instead of {other}"
    return f"an autograd graph of {len(ours)} nodes instead of {len(theirs)}"


def _refuse(node: torch.fx.Node | None, what: str) -> NoReturn:
    module = "" if node is None else str(node.meta.get("module", ""))
    source = "" if node is None else str(node.meta.get("source", ""))
    where = ", ".join(filter(None, (f"module '{module}'" if module else "the model", source)))
    raise OpaqueError(
        f"the program that was recorded is not what the forward runs by itself ({where}): it has {what}. The forward "
        "is not deterministic, depends on Python state that changes between calls, or does what cannot be recorded",
        {module: f"runs otherwise by itself: {what}"},
    )


def _text(event: tuple[Any, ...]) -> str:
    what, *details = event
    described = ", ".join(map(_detail, details))
    return f"{what}({described})"[:300]


def _detail(detail: Any) -> str:
    if isinstance(detail, tuple) and len(detail) == 7:
        number, _, shape, stride, _, dtype, _ = detail
        return f"tensor {number} of shape {list(shape)}, strides {list(stride)}, {dtype}"
    return detail[1] if isinstance(detail, tuple) and len(detail) == 2 else str(detail)
