"""Verifies a recorded program against a forward that nobody records.

The model runs once as in training and the program once, each under a log below autograd. Both must dispatch the same
operators with the same scalars on tensors of the same storages, shapes, strides and types, save the same for their
backward in between, build the same autograd graph, and leave the same outputs, buffers and random state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import zip_longest
from typing import Any, NoReturn

import torch

from ..program.program import OWN, call_node, get_attribute, run_nodes, storage_of, without_autocast
from ..program.tensors import ByStorage, copies, input_started
from ..torch_state.compare import difference, fingerprint, same_bits
from ..torch_state.dispatch import OperatorMode, run_in
from ..torch_state.forwards import plain_forward
from ..torch_state.no_trace import untouched
from ..torch_state.private import is_wait, schema_of
from ..torch_state.ranks import is_arrival
from .arguments import Sample
from .forward.contents import has_content
from .forward.flat import FlatForward, edges, gradient_targets, nothing_saved, other_state, state_of
from .forward.location import CallCounter
from .forward.patches import seen_as_recorded
from .traced import ON_CONSTANTS, READS, SIZED, OpaqueError, Traced
from .weigh.record import layout_of


def verify(sample: Sample, traced: Traced, forward: Callable[..., Any] | None = None) -> CallCounter:
    """Do nothing if the program, every call in it, is what the model's forward runs, or ``forward`` if that is given.

    It takes a run of each, with the memory of inference, and returns what the forward's own code calls. OpaqueError
    names the module, the file and the line where the two part.
    """
    flat = FlatForward(plain_forward(sample.model) if forward is None else forward, sample.spec)
    calls = CallCounter(sample.model)
    eager = _Run(sample, traced.graph, lambda log, inputs: calls.run(flat, *inputs))
    _compare_outputs(traced, traced.outputs, eager.outputs)
    eager.outputs = []
    replay = _Run(sample, traced.graph, partial(_replay, sample.model, traced))
    _compare_events(eager.log, replay.log)
    if flat.output_spec != traced.output_spec:
        _refuse(None, f"a result of the structure {traced.output_spec} instead of {flat.output_spec}")
    _compare_outputs(traced, replay.outputs, traced.outputs)
    if replay.autograd != eager.autograd:
        _refuse(None, _first_difference(replay.autograd, eager.autograd))
    if other := other_state(replay.state, eager.state):
        _refuse(None, ": ".join(other))
    return calls


def verify_on_other_inputs(sample: Sample, traced: Traced, is_own: bool = True) -> None:
    """The same on other inputs that the guards let pass: sizes that data decide may have been baked in.

    A program made by hand (``is_own`` is False) and a model without content are left to the sample.
    """
    is_in_doubt = any(node.meta.get(key) for node in traced.graph.nodes for key in (READS, SIZED))
    if not (is_own and is_in_doubt and all(map(has_content, sample.tensors))):
        return
    for change in _CHANGES:
        other = sample._replace(tensors=[_changed(tensor, change) for tensor in copies(sample.tensors)])
        with untouched(sample.model):
            passes = traced.guards is None or not traced.guards.difference(sample.model, other.copies())
        if passes and (outputs := _outputs(other)) is not None:
            verify(other, replace(traced, outputs=outputs))


def _outputs(sample: Sample) -> list[torch.Tensor] | None:
    """What the model returns, None if such inputs are none for it."""
    flat = FlatForward(plain_forward(sample.model), sample.spec)
    try:
        with untouched(sample.model):
            flat.run(sample.copies())
    except Exception:  # the inputs are ours
        return None
    return flat.outputs


def _changed(tensor: torch.Tensor, change: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
    """The tensor with other content: each entry is one of the sample's, as others may lead an index out of bounds."""
    rows = next((dim for dim, size in enumerate(tensor.shape) if size > 1), None)
    if rows is not None and tensor.numel():
        with torch.no_grad():
            tensor.copy_(change(tensor.detach().clone(), rows))
    return tensor


_CHANGES: tuple[Callable[[torch.Tensor, int], torch.Tensor], ...] = (
    # All rows are the first one: a limit is above all of them, or none.
    lambda tensor, rows: tensor.narrow(rows, 0, 1).expand_as(tensor),
    # Each other row is the one before it.
    lambda tensor, rows: tensor.index_select(rows, torch.arange(tensor.shape[rows], device=tensor.device) // 2 * 2),
    # The rows of what is no index in the other order: as many are above a limit as before.
    lambda tensor, rows: tensor.flip(rows) if tensor.is_floating_point() or tensor.dtype is torch.bool else tensor,
)


class _Log(OperatorMode):
    """Writes down what is dispatched below autograd, and what autograd saves."""

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.events: list[tuple[Any, ...]] = []  # in the order in which they happened
        self.owners: list[torch.fx.Node | None] = []  # for each, the node of the program that it belongs to
        self.owner: torch.fx.Node | None = None
        self.is_paused = False
        self.storages: ByStorage[int] = ByStorage()
        self.count = 0
        for tensor in known:
            if storage_of(tensor) is not None:
                self._number(tensor)

    def called(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Write a call down."""
        if operator in ON_CONSTANTS or self.is_paused or is_wait(operator):  # which eager does later
            return operator(*args, **kwargs)
        written = _written_over(operator)  # a result, too
        given = self._described((args, {key: kwargs[key] for key in kwargs if key not in written}), is_known=False)
        result = operator(*args, **kwargs)
        self._add((operator, *given, *self._described(result, is_known=True)))
        return result

    def saved(self, tensor: torch.Tensor) -> None:
        """Note that autograd saves a tensor."""
        if not self.is_paused:
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
        if isinstance(given, torch.UntypedStorage):  # by its bytes; cuDNN's recurrent layers look at their weights' so
            return [self._tensor(torch.empty(0, dtype=torch.uint8, device=given.device).set_(given), is_known)]
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
        return number, content, *layout_of(tensor), tensor.dtype, tensor.device

    def _number(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage not in self.storages:
            self.storages[storage] = self.count
            self.count += 1
        return self.storages[storage]


@cache
def _written_over(operator: Any) -> frozenset[str]:
    """The arguments of an operator whose content it does not read."""
    arguments: Any = getattr(schema_of(operator), "arguments", ())
    return frozenset(argument.name for argument in arguments if argument.is_out)


class _Run:
    """One run under a log, and what came of it; ``forward`` returns output tensors, given the log and input tensors."""

    def __init__(
        self, sample: Sample, graph: torch.fx.Graph, forward: Callable[[_Log, list[torch.Tensor]], list[torch.Tensor]]
    ) -> None:
        model = sample.model
        with untouched(model):
            inputs = sample.copies()
            self.log = log = _Log([*inputs, *model.parameters(), *model.buffers()])
            with seen_as_recorded(model, graph, log.saved, log.paused), nothing_saved(log.saved), run_in(log):
                outputs = forward(log, inputs)
            self.outputs = [tensor.detach() for tensor in outputs]
            _, self._nodes = gradient_targets(outputs, inputs)  # held until the outputs are gone
            self.autograd = self._described(outputs, [*inputs, *model.parameters()])
            self.state = state_of(model)

    def _described(self, outputs: list[torch.Tensor], ends: list[torch.Tensor]) -> list[Any]:
        """The autograd graph behind the outputs, in an order that depends on it alone."""
        nodes = [node for node in self._nodes if not is_arrival(node)]  # which calls of modules alone have
        numbers = {node: number for number, node in enumerate(nodes)}
        known = {id(tensor): number for number, tensor in enumerate(ends)}

        def place_of(node: Any, place: int) -> Any:
            while is_arrival(node):
                ((node, place),) = edges(node)
            return None if node is None else (numbers[node], place)

        described: list[Any] = [place_of(t.grad_fn, t.output_nr) for t in outputs]
        for node in nodes:
            after = [place_of(*edge) for edge in edges(node)]
            variable = getattr(node, "variable", None)
            target = input_started(node) if variable is None else known.get(id(variable))
            described.append((node.name(), after, target))
        return described


def _replay(model: torch.nn.Module, traced: Traced, log: _Log, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Run a program, and tell the log which call is running."""

    def call(node: torch.fx.Node, values: dict[torch.fx.Node, Any]) -> Any:
        log.owner = node
        with log.paused() if OWN in node.meta else nullcontext():
            return call_node(node, values)

    try:
        with without_autocast():
            return list(run_nodes(traced.graph.nodes, inputs, partial(get_attribute, model, traced.constants), call))
    except Exception as error:
        _refuse(log.owner, f"a call that fails ({type(error).__name__}: {error})")


def _compare_events(eager: _Log, replay: _Log) -> None:
    for theirs, ours, owner in zip_longest(eager.events, replay.events, replay.owners):
        if ours is None:
            _refuse(replay.owner, f"nothing more where {_text(theirs)} follows")
        if theirs is None:
            _refuse(owner, f"{_text(ours)} where nothing more follows")
        if theirs != ours:
            _refuse(owner, f"{_text(ours)} instead of {_text(theirs)}")


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
