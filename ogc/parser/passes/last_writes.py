"""Lets programs be cut after a value that was written piece by piece: what comes later uses a copy of it.

Token ids that are shifted, masks that are filled: such a value is read, or seen through a view, before it is last
written. As it had several contents, no cut may fall before its last use, which may be most of a model away.
"""

from __future__ import annotations

import operator

import torch

from ...program.program import TensorRef, call_beside
from ..weigh.record import Observation

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
