"""In-place operators that may be run out of place.

A convolution, batch norm, ``relu_`` in a row share one storage. Seen as one value, no cut may fall between
the norm and ``relu_``. But ``relu_`` can be run as ``relu`` where the norm's result is wanted later: the
bits are the same. So the result of such an operation becomes a new value that *takes over* the old one's
storage, and the runtime writes in place exactly where no cut separates the two.

Instance norm returns a view of what batch norm made. Where such a view is written in place, autograd differentiates
the write as one to the whole storage, which takes three more copies of it (``CopySlices`` in
torch/csrc/autograd/functions/tensor.cpp), and a low-memory backward cannot take its place.

``silu_`` saves a copy of what it writes over. ``silu`` keeps as many bytes, and copies nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from ...operators.registry import is_elementwise, of, out_of_place
from ...program.program import OUTSIDE, TensorRef
from ...torch_state.private import OpOverload, storage_id
from ..forward.flat import saving
from ..weigh.record import Observation, Record

REBASED = "rebased"
"""In a node's ``meta``: the plain model runs it in place, on a view."""

COPIED = "copied"
"""In a node's ``meta``: the operator that the plain model runs there, in place, and copies what it writes over."""

COPIES = 3
"""Most copies of what was written that are made in the backward, beside the gradient that it is given."""


def run_out_of_place(graph: torch.fx.Graph) -> None:
    """Mark operators that write such a view; put those without underscore in their places, if nothing else uses it.

    Not if they save what they are given, which would have to be kept beside their result.
    """
    for node in graph.nodes:
        given = node.args[0] if node.op == "call_function" and node.args else None
        if OUTSIDE in node.meta or not isinstance(given, torch.fx.Node) or not of(given.target).returns_view:
            continue
        twin = out_of_place(node.target)
        is_random = torch.Tag.nondeterministic_seeded in getattr(twin, "tags", ())
        if node.all_input_nodes != [given] or not is_elementwise(twin) or is_random:
            continue
        node.meta[REBASED] = True
        if len(given.users) == 1 and _saves_result(node, twin) == _saves_result(node, node.target):
            node.target = twin


def save_operands(observation: Observation) -> bool:
    """Put operators without underscore in the places of those that save a copy of what they write over; whether any.

    Only of what one of PyTorch's operators has just made, which nothing else uses or saves.
    """
    records, users = observation.records, _users(observation)
    places = {record.node: t for t, record in enumerate(records) if isinstance(record.node.target, OpOverload)}
    found = []
    for t, record in enumerate(records):
        twin = _twin_that_copies_nothing(record)
        if twin is None:
            continue
        (value,), (operand,) = record.writes, record.node.all_input_nodes
        before = [user for user in users[value] if user < t]
        if before == [places.get(operand)] and len(operand.users) == 1 and value not in records[before[0]].saved.values:
            found.append((record.node, twin))
    for node, twin in found:
        node.meta[COPIED], node.target = node.target, twin
    return bool(found)


def _twin_that_copies_nothing(record: Record) -> Any:
    """The operator without its underscore, where that saves its operand and this one a copy; else None."""
    saved = record.saved
    copies = len(saved.tensors) == 1 and saved.internal_bytes and not saved.values
    if not copies or len(record.writes) != 1 or not {REBASED, OUTSIDE}.isdisjoint(record.node.meta):
        return None
    twin = _out_of_place(record, record.writes[0])
    if twin is None or len(record.node.all_input_nodes) != 1:
        return None
    return twin if _saves_operand(record.node, twin) else None


def separate_versions(observation: Observation, output_nodes: set[str]) -> dict[int, tuple[int, Any]]:
    """Renumber values so that eligible in-place operations make new ones; ``observation`` is changed.

    Returns:
        For each position of such an operation, the value that it takes over and the operator that leaves
        that value as it is.
    """
    records = observation.records
    taken: dict[int, tuple[int, Any]] = {}
    for value, users in enumerate(_users(observation)):
        writers = [t for t in users if value in records[t].writes]
        twins = [_out_of_place(records[t], value) for t in writers[1:]]
        if len(writers) < 2 or None in twins or not _only_the_chain(observation, value, users, writers, output_nodes):
            continue
        old = value
        for t, twin in zip(writers[1:], twins, strict=True):
            new = len(observation.value_bytes)
            observation.value_bytes.append(observation.value_bytes[value])
            observation.value_names.append(records[t].node.name)
            _rename(observation, old, new, [user for user in users if user >= t])
            taken[t] = (old, twin)
            old = new
    return taken


def _users(observation: Observation) -> list[list[int]]:
    """For each value, the positions of the operations that have anything to do with it."""
    users: list[list[int]] = [[] for _ in observation.value_bytes]
    for t, record in enumerate(observation.records):
        values = {*record.reads, *record.writes, *record.saved.values}
        values.update(observation.storages[o.ref] for o in record.outputs if o.ref in observation.storages)
        for value in values:
            users[value].append(t)
    return users


def _out_of_place(record: Record, value: int) -> Any:
    """The operator without its underscore, if it would compute the same from the same; else None."""
    if record.random or record.writes != [value] or len(record.outputs) != 1:
        return None
    # With another type or layout among the operands, the result could get that one's.
    kinds = {argument.kind for argument in record.arguments}
    if record.saved.values not in ([], [value]) or len(kinds) != 1 or not next(iter(kinds))[-1]:
        return None
    twin = out_of_place(record.node.target)
    if not is_elementwise(twin) or (record.saved.values and not _has_same_backward(record.node, twin)):
        return None
    return twin


def _has_same_backward(node: torch.fx.Node, twin: Any) -> bool:
    """Whether ``twin`` of an operator of one tensor computes the same gradient, and saves the same for it.

    What a result was computed from is gone when it is written in place, so some gradients are computed from the result
    there, but by other formulas from the operand out of place (``elu_``).
    """
    return of(twin).from_either or _saves_result(node, node.target) == _saves_result(node, twin)


def _saves_result(node: torch.fx.Node, target: Any) -> bool:
    """Whether the backward of such a call of ``target`` needs what it returns."""
    _, result, saved = _tried(node, target)
    return result in saved


def _saves_operand(node: torch.fx.Node, target: Any) -> bool:
    """Whether the backward of such a call of ``target`` needs what it is given, and nothing else."""
    given, _, saved = _tried(node, target)
    return saved == {given}


def _tried(node: torch.fx.Node, target: Any) -> tuple[int, int, set[int]]:
    """Of such a call of ``target``, the storages that it is given, returns and saves."""
    kept: list[torch.Tensor] = []
    with torch.enable_grad():
        given = torch.ones(2, requires_grad=True).clone()
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda _: given)
        with saving(kept):
            result = target(*args, **kwargs)
    return storage_id(given), storage_id(result), {storage_id(tensor) for tensor in kept}


def _only_the_chain(
    observation: Observation, value: int, users: list[int], writers: list[int], output_nodes: set[str]
) -> bool:
    """Whether nobody sees an older content through a name that outlives it, or a view of it."""
    records = observation.records
    chain = [TensorRef(records[t].node.name, 0) for t in writers]
    for t in users:
        made = (observation.storages.get(output.ref) for output in records[t].outputs)
        if t < writers[-1] and t not in writers and value in made:
            return False
    for ref, overwritten in zip(chain, writers[1:], strict=False):
        if ref.node in output_nodes or [a.value for a in records[overwritten].arguments[:1]] != [ref]:
            return False
        if any(t > overwritten and any(a.value == ref for a in records[t].arguments) for t in users):
            return False
        if any(t < overwritten and value in records[t].saved.values for t in users):
            return False
    return True


def _rename(observation: Observation, old: int, new: int, users: list[int]) -> None:
    """From the first of ``users`` on, ``old`` is ``new``, but for what that one itself reads."""
    for t in users:
        record = observation.records[t]
        for output in record.outputs:
            if observation.storages.get(output.ref) == old:
                observation.storages[output.ref] = new
        for numbers in (record.writes, record.saved.values, *([record.reads] if t > users[0] else [])):
            numbers[:] = [new if number == old else number for number in numbers]
    if old in observation.output_values:
        observation.output_values.remove(old)
        observation.output_values.add(new)
