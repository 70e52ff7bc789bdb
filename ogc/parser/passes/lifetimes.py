"""How long the plain forward holds values that nothing uses any more, and calls that nothing uses.

Frames of Python hold arguments and variables until they return. A part of autograd's graph that no backward comes to
goes with the last result that it belongs to, and holds until then what it saved. A plan's code does neither.
"""

from __future__ import annotations

import operator
from bisect import bisect
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import itemgetter
from typing import Any

import torch

from ...graph import Operation, Value
from ...program.opaque import OpaqueCall
from ...program.program import TensorRef
from ..traced import ALIVE, BYTES, CALL, HISTORY, History
from ..weigh.record import Observation, Span


def unused_memory(recorded: torch.fx.Graph, program: torch.fx.Graph) -> list[Span]:
    """What calls of a recorded forward make that nothing uses, so that the ``program`` has none of them.

    What autograd holds for them of other memory is noted in the ``meta`` of the program's nodes that made that.
    """
    made = {node.name for node in program.nodes}
    alive = {node.name: node.meta.get(ALIVE, 0) for node in recorded.nodes}
    unused = [node for node in recorded.nodes if node.op == "call_function" and node.name not in made]
    ends: dict[torch.fx.Node, int] = {}  # the last call during which autograd has a node for it
    found: list[Span] = []
    for node in reversed(unused):
        ends[node] = max((ends[user] for user in node.users), default=0)
        history: History | None = node.meta.get(HISTORY)
        if history is None:
            ends[node] *= node.target is operator.getitem
            continue
        ends[node] = max(ends[node], node.meta[CALL], *map(alive.__getitem__, history.results))
        alive.update((name, max(ends[node], alive[name])) for name in history.saved)
        if history.bytes:
            found.append(Span(node.meta[CALL], ends[node], history.bytes))
    for node in program.nodes:
        if ALIVE in node.meta:
            node.meta[ALIVE] = alive[node.name]
    for node in unused:
        call = next((one.meta[CALL] for one in (node, *node.all_input_nodes[:1]) if CALL in one.meta), None)
        if BYTES in node.meta and call is not None:
            found.append(Span(call, max(call, alive[node.name]), node.meta[BYTES]))
    return found


def with_unused(operations: Sequence[Operation], values: Sequence[Value], observation: Observation) -> list[Operation]:
    """The operations, with what the plain forward has in memory that nothing uses among its temporaries."""
    if not observation.unused:
        return list(operations)
    end = 1 + max(span.last for span in observation.unused)
    change = [0] * (end + 1)
    for span in observation.unused:
        change[span.first] += span.bytes
        change[span.last + 1] -= span.bytes
    alive = list(accumulate(change))  # by call
    calls: list[int] = []  # of each operation, or of the next that has one
    for record in reversed(observation.records):
        calls.append(record.node.meta.get(CALL, calls[-1] if calls else end))
    after = [call + 1 for call in calls[:0:-1]]
    starts, stops = [0, *after], [*after, end]
    known: set[int] = set()
    found = []
    for op, start, call, stop in zip(operations, starts, reversed(calls), stops, strict=True):
        new = set(op.writes) - known
        known |= new
        plain = op.as_plain.scratch_bytes
        # Before the operation makes anything, and while it runs; after the last one, too.
        made = sum(values[v].bytes for v in new) + op.internal_bytes + plain
        more = max(max(alive[start:call], default=0) - made, max(alive[call:stop], default=0))
        found.append(replace(op, plain_scratch_bytes=plain + more) if more > 0 else op)
    return found


Dead = dict[int, list[int]]
"""Positions of operations that no backward comes to, and the values that each saves."""


def forget_unreached(observation: Observation) -> Dead:
    """Take from operations that no backward from an output comes to what they save; ``observation`` is changed.

    What they save besides values becomes a value of its own, which nothing uses.
    """
    dead: Dead = {}
    for t, record in enumerate(observation.records):
        if record.is_reached or isinstance(record.node.target, OpaqueCall):
            continue
        dead[t] = list(record.saved.values)
        if record.saved.internal_bytes:
            dead[t].append(observation.new_value(f"{record.node.name}.saved", record.saved.internal_bytes))
            record.writes.append(dead[t][-1])
        record.forget_saves()
    return dead


def note_lifetimes(observation: Observation, taken: dict[int, tuple[int, Any]], dead: Dead) -> None:
    """Note in ``observation`` until when values are held that are used no more.

    ``taken``: for operations, values whose storage their result takes over; ``dead`` is of :func:`forget_unreached`.
    """
    records = observation.records
    heirs = {old: records[t].writes[0] for t, (old, _) in taken.items()}
    uses = {v: t for t, record in enumerate(records) for v in (*record.reads, *record.writes)}
    frames = _held_by_frames(observation, heirs, uses)
    for t, end in _ends(observation, dead, {**uses, **frames}).items():
        frames.update({v: max(end, frames.get(v, 0)) for v in dead[t] if v not in heirs})
    observation.held = {v: t for v, t in frames.items() if t > uses[v]}


def _held_by_frames(observation: Observation, heirs: dict[int, int], uses: dict[int, int]) -> dict[int, int]:
    """The last operation during which Python held a value where that was recorded, if it is behind the last use."""
    records = observation.records
    calls = [(call, t) for t, record in enumerate(records) if (call := record.node.meta.get(CALL)) is not None]
    held: dict[int, int] = {}
    kept = observation.output_values.union(*(record.saved.values for record in records))
    tails = []
    aside = {observation.storages[ref] for record in records for ref in record.aside}  # which autograd's graph holds
    for record in records:
        value, alive = observation.storages.get(TensorRef(record.node.name, 0)), record.node.meta.get(ALIVE)
        if value is None or alive is None or value in aside:
            continue
        while value in heirs:
            value = heirs[value]
        call, end = calls[bisect(calls, alive, key=itemgetter(0)) - 1]
        if end > max(uses[value], held.get(value, 0)):
            held[value] = end
        if call < alive and end >= uses[value] and value not in kept:
            tails.append(Span(call + 1, alive, observation.value_bytes[value]))
    if observation.unused:  # calls that are no operations, during which these are held
        observation.unused = [*observation.unused, *tails]
    return held


def _ends(observation: Observation, dead: Dead, uses: dict[int, int]) -> dict[int, int]:
    """For operations that no backward comes to, the last one during which something computed from them is there."""
    ends: dict[int | TensorRef, int] = {}  # of results, and of what is computed from them
    found: dict[int, int] = {}
    for t in reversed(dead):
        record = observation.records[t]
        for output in record.outputs:
            if output.differentiable:
                value = observation.storages.get(output.ref)
                last = ends.get(output.ref if value is None else value, 0)
                found[t] = max(last, 0 if value is None else uses[value], found.get(t, 0))
        for argument in record.arguments:
            key = observation.storages.get(argument.ref, argument.ref)
            ends[key] = max(found[t], ends.get(key, 0))
    return found
