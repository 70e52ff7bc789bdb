"""How long values live in the plain forward that nothing uses any more: what holds them is Python or autograd.

The frames of Python hold arguments and variables until they return. A part of autograd's graph that no backward comes
to goes with the last result that it belongs to; until then it holds what it saved. A plan's code does neither.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from ...program.leaf import Leaf
from ...program.program import TensorRef
from ..traced import ALIVE, CALL
from ..weigh.gradients import OperationGradients, reached
from ..weigh.record import Observation, Record

Dead = dict[int, list[int]]
"""Positions of operations that no backward comes to, and the values that each saves."""


def forget_unreached(
    observation: Observation, gradients: Sequence[OperationGradients], ends: Sequence[TensorRef]
) -> Dead:
    """Take from operations that no backward from ``ends`` comes to what they save; ``observation`` is changed.

    What they save besides values becomes a value of its own, which nothing uses.
    """
    dead: Dead = {}
    for t, is_reached in enumerate(reached(gradients, ends, observation.storages)):
        record = observation.records[t]
        if is_reached or isinstance(record.node.target, Leaf) or not any(record.differentiable):
            continue
        dead[t] = list(record.saved_values)
        if record.internal_bytes:
            dead[t].append(observation.new_value(f"{record.node.name}.saved", record.internal_bytes))
            record.writes.append(dead[t][-1])
        record.forget_saves()
    return dead


def note_lifetimes(observation: Observation, taken: dict[int, tuple[int, Any]], dead: Dead) -> None:
    """Note in ``observation`` until when values are held that are used no more.

    Args:
        observation: of a program, as it is planned.
        taken: for positions of operations, values whose storage their result takes over.
        dead: of :func:`forget_unreached`.
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
    aside = {observation.storages[ref] for record in records for ref in record.aside}  # which counts where it is held
    for record in records:
        value, alive = observation.storages.get(TensorRef(record.node.name, 0)), record.node.meta.get(ALIVE)
        if value is None or alive is None or value in aside:
            continue
        while value in heirs:
            value = heirs[value]
        end = calls[bisect(calls, alive, key=itemgetter(0)) - 1][1]
        if end > max(uses[value], held.get(value, 0)):
            held[value] = end
    return held


def _ends(observation: Observation, dead: Dead, uses: dict[int, int]) -> dict[int, int]:
    """For operations that no backward comes to, the last one during which something computed from them is there."""
    ends: dict[int | TensorRef, int] = {}  # of results, and of what is computed from them
    found: dict[int, int] = {}
    for t in reversed(dead):
        record = observation.records[t]
        found[t] = max(_end_of(ref, observation, ends, uses) for ref in _results(record))
        for ref in filter(None, record.receivers):
            key = observation.storages.get(ref, ref)
            ends[key] = max(found[t], ends.get(key, 0))
    return found


def _results(record: Record) -> list[TensorRef]:
    return [ref for ref, flag in zip(record.outputs, record.differentiable, strict=True) if flag]


def _end_of(ref: TensorRef, observation: Observation, ends: dict[int | TensorRef, int], uses: dict[int, int]) -> int:
    value = observation.storages.get(ref)
    return max(ends.get(ref if value is None else value, 0), 0 if value is None else uses[value])
