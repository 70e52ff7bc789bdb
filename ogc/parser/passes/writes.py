"""Writes that need not bind their value: in-place operators that run out of place, copies after a last write.

A convolution, batch norm and ``relu_`` in a row share one storage. Seen as one value, no cut may fall between them. But
``relu_`` can run as ``relu`` where the norm's result is wanted later, with the same bits: the result becomes a new
value that *takes over* the storage, and the runtime writes in place exactly where no cut separates the two.

A write to a view, such as instance norm returns, is differentiated as one to the whole storage, which takes three more
copies (``CopySlices`` in torch/csrc/autograd/functions/tensor.cpp) and excludes a low-memory backward. ``silu_`` saves
a copy of what it writes over; ``silu`` keeps as many bytes, and copies nothing.

A value that is read or viewed before its last write (shifted token ids, masks that are filled) has several contents, so
no cut may fall before its last use, which may be most of a model away: what comes later uses a copy.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from ...operators.registry import is_elementwise, of, out_of_place
from ...program.program import OUTSIDE, TensorRef, call_beside
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
        functional = out_of_place(node.target)
        is_random = torch.Tag.nondeterministic_seeded in getattr(functional, "tags", ())
        if node.all_input_nodes != [given] or not is_elementwise(functional) or is_random:
            continue
        node.meta[REBASED] = True
        if len(given.users) == 1 and _saves_result(node, functional) == _saves_result(node, node.target):
            node.target = functional


def save_operands(observation: Observation) -> bool:
    """Put operators without underscore in the places of those that save a copy of what they write over; whether any.

    Only of what one of PyTorch's operators has just made, which nothing else uses or saves.
    """
    records, users = observation.records, _users(observation)
    places = {record.node: t for t, record in enumerate(records) if isinstance(record.node.target, OpOverload)}
    found = []
    for t, record in enumerate(records):
        functional = _functional_without_copies(record)
        if functional is None:
            continue
        (value,), (operand,) = record.writes, record.node.all_input_nodes
        before = [user for user in users[value] if user < t]
        if before == [places.get(operand)] and len(operand.users) == 1 and value not in records[before[0]].saved.values:
            found.append((record.node, functional))
    for node, functional in found:
        node.meta[COPIED], node.target = node.target, functional
    return bool(found)


def _functional_without_copies(record: Record) -> Any:
    """The operator without its underscore, where that saves its operand and this one a copy; else None."""
    kept = record.saved
    copies = len(kept.tensors) == 1 and kept.internal_bytes and not kept.values
    if not copies or len(record.writes) != 1 or not {REBASED, OUTSIDE}.isdisjoint(record.node.meta):
        return None
    functional = _out_of_place(record, record.writes[0])
    if functional is None or len(record.node.all_input_nodes) != 1:
        return None
    given, _, saved = _tried(record.node, functional)
    return functional if saved == {given} else None


def separate_versions(observation: Observation, output_nodes: set[str]) -> dict[int, tuple[int, Any]]:
    """Renumber values so that eligible in-place operations make new ones; ``observation`` is changed.

    It gives for such operations the value that each takes over and the operator that leaves that as it is.
    """
    records = observation.records
    taken: dict[int, tuple[int, Any]] = {}
    for value, users in enumerate(_users(observation)):
        writers = [t for t in users if value in records[t].writes]
        functionals = [_out_of_place(records[t], value) for t in writers[1:]]
        if (
            len(writers) < 2
            or None in functionals
            or not _only_the_chain(observation, value, users, writers, output_nodes)
        ):
            continue
        old = value
        for t, functional in zip(writers[1:], functionals, strict=True):
            new = len(observation.value_bytes)
            observation.value_bytes.append(observation.value_bytes[value])
            observation.value_names.append(records[t].node.name)
            _rename(observation, old, new, [user for user in users if user >= t])
            taken[t] = (old, functional)
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
    functional = out_of_place(record.node.target)
    if not is_elementwise(functional) or (record.saved.values and not _has_same_backward(record.node, functional)):
        return None
    return functional


def _has_same_backward(node: torch.fx.Node, functional: Any) -> bool:
    """Whether ``functional``, out of place, computes the same gradient as its operator, and saves the same for it.

    What a result was computed from is gone when it is written in place, so some gradients are computed from the result
    there, but by other formulas from the operand out of place (``elu_``).
    """
    return _saves_result(node, node.target) == _saves_result(node, functional)


def _saves_result(node: torch.fx.Node, target: Any) -> bool:
    """Whether the backward of such a call of ``target`` needs what it returns."""
    _, result, saved = _tried(node, target)
    return result in saved


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
    if any(observation.storages.get(ref) == value for t in users for ref in records[t].aside):
        return False
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


# -- copies after a last write ---------------------------------------------------------------------------


FAR = 10
"""Operations between the last write and the last use from which on a copy is made."""


def copy_after_last_write(graph: torch.fx.Graph, observation: Observation) -> bool:
    """Put a copy behind the last write of each such value that needs no gradient; whether there is any."""
    nodes = {node.name: node for node in graph.nodes}
    places = {node: place for place, node in enumerate(graph.nodes)}
    found = _written_in_pieces(observation)
    for writer, name in ((nodes[writer], nodes[name]) for writer, name in found):
        later = [user for user in name.users if places[user] > places[writer]]
        with graph.inserting_after(writer):
            copy = call_beside(writer, torch.ops.aten.clone.default, name)
        for user in later:
            user.replace_input_with(name, copy)
    return bool(found)


def _written_in_pieces(observation: Observation) -> list[tuple[str, str]]:
    """The last writer of each such value, and the name by which all later operations use it."""
    records = observation.records
    readers: dict[int, list[int]] = {}
    last_writes: dict[int, int] = {}
    for t, record in enumerate(records):
        last_writes.update(dict.fromkeys(record.writes, t))
        for value in record.reads:
            readers.setdefault(value, []).append(t)
    outputs = (output for record in records for output in record.outputs if output.differentiable)
    differentiable = {observation.storages.get(output.ref) for output in outputs}
    found = []
    for value, last in last_writes.items():
        times = readers.get(value, [])
        is_early = any(t < last and value not in records[t].writes for t in times)
        is_far = bool(times) and times[-1] - last > FAR
        if not is_early or not is_far or value in differentiable or value in observation.output_values:
            continue
        name = _only_name(observation, value, [t for t in times if t > last])
        if name is not None:
            found.append((records[last].node.name, name))
    return found


def _only_name(observation: Observation, value: int, times: list[int]) -> str | None:
    """The one node by whose result a value is used at these times, if a copy of that is laid out as it is."""
    made_since: set[TensorRef] = set()
    used: dict[TensorRef, bool] = {}
    for record in (observation.records[t] for t in times):
        for argument in record.arguments:
            ref = argument.value
            if ref is not None and observation.storages.get(ref) == value and ref not in made_since:
                used[ref] = argument.kind[-1]
        made_since.update(output.ref for output in record.outputs)
    if len(used) != 1 or not all(used.values()):
        return None
    (ref,) = used
    node = next(record.node for record in observation.records if record.node.name == ref.node)
    is_tensor = not any(user.target in (operator.getitem, len) for user in node.users)
    return ref.node if is_tensor else None
