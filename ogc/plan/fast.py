"""The costs of many plans of one graph: what :func:`ogc.simulate` counts, by compiled code where that was built.

``replay.c`` is compiled when the package is installed. Where there was no compiler, :func:`ogc.simulate` is asked.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import accumulate, chain
from pathlib import Path
from struct import Struct, unpack
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import PlanError
from ..graph import Graph, Operation
from .decisions import Decisions, Policies, Segment
from .schedule import with_saved_end
from .simulate import simulate

Array = NDArray[np.generic]

ROW = Struct("4i")
"""Of a segment: start, stop, how many parts, how many policies."""

FOUND, NO_PLAN, RUNS_TWICE = 0, 1, 2
"""What the library returns: that it counted, that the decisions do not fit the graph, and that an operation would run
twice that must not."""

MOST_KNOWN = 50_000
"""Segments whose rows are held."""


class Cost(NamedTuple):
    """What a search asks of a plan; the fields are those of :class:`.simulate.Simulation`."""

    peak_bytes: int
    added_seconds: float
    peak_values: tuple[int, ...]


class Replay:
    """Costs of plans of one graph.

    Attributes:
        is_compiled: whether compiled code counts.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self._library = graph, library()
        self.is_compiled = self._library is not None
        if self._library is None:
            return
        variants = graph.with_variants(()), graph.with_variants(graph.low_memory)
        self._seconds = [list(map(_seconds, each.operations)) for each in variants]
        self._again = sum(op.again_seconds for op in graph.operations)
        self._arrays = _arrays_of(graph, variants)  # the library has their addresses
        self._state = self._library.ogc_new(self._arrays[0].ctypes.data)
        if self._state is None:
            raise MemoryError("there is no memory to weigh plans in")
        weakref.finalize(self, self._library.ogc_delete, self._state)
        self._cost = array("q", bytes(48))
        self._flat: dict[int, tuple[Segment, bytes, bytes]] = {}  # by the identity of the segment, which is held

    def __call__(self, decisions: Decisions) -> Cost:
        """The cost of a plan.

        Raises:
            PlanError: as :func:`ogc.simulate` does.
        """
        return self._counted(decisions) if self._replayed(decisions) == FOUND else self._simulated(decisions)

    def if_possible(self, decisions: Decisions) -> Cost | None:
        """The cost of a plan; None of one that cannot be carried out, without a reason, which takes long to find."""
        status = self._replayed(decisions)
        if status == RUNS_TWICE:
            return None
        try:
            return self._counted(decisions) if status == FOUND else self._simulated(decisions)
        except PlanError:
            return None

    def _simulated(self, decisions: Decisions) -> Cost:
        cost = simulate(self.graph, decisions)
        return Cost(cost.peak_bytes, cost.added_seconds, cost.peak_values)

    def _counted(self, decisions: Decisions) -> Cost:
        """What the library has counted last."""
        peak, runs, seen, alive, place, recomputed = unpack("5qd", self._cost)
        costs, (own, low) = self.graph.runtime, self._seconds
        seconds = costs.choice + costs.run * runs + costs.saved_tensor * seen - costs.left_out
        seconds += recomputed + self._again + sum(low[t] - own[t] for t in decisions.low_memory)
        values = (ctypes.c_int32 * alive).from_address(place) if alive else ()
        return Cost(peak, seconds, tuple(sorted(values)))

    def _replayed(self, decisions: Decisions) -> int:
        """Count with the library; what it returns."""
        graph, library = self.graph, self._library
        if library is None:
            return NO_PLAN
        if len(self._flat) > MOST_KNOWN:
            self._flat.clear()
        outermost, told = with_saved_end(graph, decisions.segments), graph.told
        whole = (range(one.start, one.stop) for one in outermost if told.in_recomputed and not one.parts)
        if not all(map(told.in_recomputed.isdisjoint, whole)):
            return NO_PLAN
        found, everywhere = [*map(self._flattened, outermost)], decisions.as_told(told).policies
        segments = b"".join([rows for _, rows, _ in found])
        policies = _packed(everywhere) + b"".join([policies for _, _, policies in found])
        is_low = bytearray(len(graph))
        for t in decisions.low_memory:
            if not 0 <= t < len(graph):
                return NO_PLAN
            is_low[t] = graph.operations[t].low_memory is not None
        columns = [array("B", column) for column in (segments, policies, is_low)]
        counts = len(segments) // ROW.size, len(everywhere)
        plan = array("q", (*counts, *(column.buffer_info()[0] for column in columns)))
        return int(library.ogc_replay(self._state, plan.buffer_info()[0], self._cost.buffer_info()[0]))

    def _flattened(self, one: Segment) -> tuple[Segment, bytes, bytes]:
        """A segment, itself and its parts as rows, and their policies; the segments of other plans are known."""
        if (known := self._flat.get(id(one))) is not None:
            return known
        row, policies = ROW.pack(one.start, one.stop, len(one.parts), len(one.policies)), _packed(one.policies)
        for _, rows_of_part, policies_of_part in map(self._flattened, one.parts):
            row += rows_of_part
            policies += policies_of_part
        self._flat[id(one)] = one, row, policies
        return self._flat[id(one)]


def _packed(policies: Policies) -> bytes:
    return array("i", chain.from_iterable(policies)).tobytes()


def _seconds(op: Operation) -> float:
    """Seconds of an operation in any step, beside its recomputation."""
    return op.forward_seconds + op.backward_seconds + op.again_seconds


def _places(lists: Iterable[Sequence[int]]) -> tuple[Array, Array]:
    """Lists behind one another, and where each begins."""
    lists = list(lists)
    places = np.array([0, *accumulate(map(len, lists))], np.int32)
    return np.array([*chain(*lists)], np.int32), places


def _arrays_of(graph: Graph, variants: Sequence[Graph]) -> list[Array]:
    """All that ``replay.c`` knows of a graph; the first has the numbers of operations and values, and the addresses of
    the others."""
    ops, values = graph.operations, graph.values
    found: list[Array] = [*_places(op.reads for op in ops), *_places(op.writes for op in ops)]
    for own in variants:
        found += _places(op.saves for op in own.operations)
        for name in ("internal_bytes", "scratch_bytes", "backward_bytes", "late_bytes"):
            found.append(np.array([getattr(op, name) for op in own.operations], np.int64))
        found += [np.array(own.repeat_seconds, np.float64), np.array(own.keeps_internals, np.uint8)]
    found += [
        np.array([op.gradient_bytes for op in ops], np.int64),
        np.array([value.bytes for value in values], np.int64),
        np.array([-1 if op.takes_over is None else op.takes_over for op in ops], np.int32),
        np.array([op.saved_tensors for op in ops], np.int32),
        np.array([op.replayable for op in ops], np.uint8),
        np.isin(np.arange(len(ops) + 1), graph.cuts).astype(np.uint8),
        np.array([value.is_output for value in values], np.uint8),
        np.array([value.is_returned for value in values], np.uint8),
        *(np.array(numbers, np.int32) for numbers in (graph.producers, graph.last_writes, graph.last_uses)),
    ]
    return [np.array([len(ops), len(values), *(array.ctypes.data for array in found)], np.int64), *found]


@cache
def library() -> ctypes.CDLL | None:
    """What ``replay.c`` was compiled to; None if it was not."""
    folder = Path(__file__).parent
    for path in (folder / f"_replay{suffix}" for suffix in EXTENSION_SUFFIXES):
        if path.exists():
            found = ctypes.CDLL(str(path))
            found.ogc_new.restype, found.ogc_new.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
            found.ogc_delete.restype, found.ogc_delete.argtypes = None, [ctypes.c_void_p]
            found.ogc_replay.restype, found.ogc_replay.argtypes = ctypes.c_int, [ctypes.c_void_p] * 3
            return found
    return None
