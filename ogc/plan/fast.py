"""The costs of many plans of one graph: what :func:`ogc.simulate` counts, by compiled code where that was built.

``replay.c`` is compiled when the package is installed. Where there was no compiler, :func:`ogc.simulate` is asked.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import accumulate, chain
from pathlib import Path
from struct import Struct, unpack_from
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import PlanError
from ..graph import Graph, Operation
from .decisions import Decisions, Offload, Policies, Policy, Segment
from .queues import replayed, seconds_of
from .schedule import Schedule, Trip, trips_of, with_saved_end
from .simulate import Memory, simulate

Array = NDArray[np.generic]

ROW = Struct("4i")
"""Of a segment: start, stop, how many parts, how many policies."""

IN_BACKWARD = -2
"""In the place of ``Step.during``, of a backward."""

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


@dataclass(frozen=True)
class Profile:
    """What a plan takes step by step where what it may offload is saved.

    Attributes:
        graph: of the plan.
        cost: of the plan.
        step_bytes: of each step, the most bytes alive.
        seconds: of each step.
        during: of each step, its operation, in a recomputation the one whose backward waits for it.
        needed: of values of the forward, the first step that needs them behind it.
    """

    graph: Graph
    cost: Cost
    step_bytes: NDArray[np.int64]
    seconds: NDArray[np.float64]
    during: NDArray[np.int32]
    needed: dict[int, int]

    @classmethod
    def of(cls, graph: Graph, decisions: Decisions, cost: Cost) -> Profile:
        """That of a plan as the schedule has it."""
        schedule = Schedule(graph, decisions)
        memory, sizes = Memory(schedule), []
        for number, step in enumerate(schedule.steps):
            before = len(memory.timeline)
            memory.take(number, step)
            sizes.append(max(event.bytes for event in memory.timeline[before:]))
        during = [step.operation if step.during is None else step.during for step in schedule.steps]
        arrays = np.array(sizes, np.int64), np.array(seconds_of(schedule)), np.array(during, np.int32)
        return cls(graph, cost, *arrays, schedule.needs[0])

    @cached_property
    def starts(self) -> list[float]:
        """When each step would begin, and the last end, if none waited; in seconds."""
        return [0.0, *np.cumsum(self.seconds).tolist()]

    @cached_property
    def backwards(self) -> dict[int, int]:
        """Of each operation, the first step of its backward."""
        found: dict[int, int] = {}
        for number, t in enumerate(self.during[len(self.graph) :].tolist(), len(self.graph)):
            found.setdefault(t, number)
        return found

    def trips(self, offloaded: Iterable[Offload]) -> dict[int, Trip]:
        """When these values are away."""
        return trips_of(self.graph, offloaded, self.needed, self.backwards)

    def bytes_of_steps(self, trips: Mapping[int, Trip]) -> NDArray[np.int64]:
        """Of each step, the most bytes alive where values are away."""
        change = np.zeros(len(self.step_bytes) + 1, np.int64)
        for v, trip in trips.items():
            change[trip.gone] -= self.graph.values[v].bytes
            change[trip.back] += self.graph.values[v].bytes
        found: NDArray[np.int64] = self.step_bytes + np.cumsum(change[:-1])
        return found

    def offloading(self, offloaded: Iterable[Offload]) -> Cost:
        """The cost where these values are offloaded."""
        graph, trips = self.graph, self.trips(offloaded)
        assert graph.host is not None
        alive = self.bytes_of_steps(trips)
        added = replayed(graph.host, trips, [value.bytes for value in graph.values], self.starts).waiting
        added += graph.host.each * len(trips)
        peak = int(alive.argmax()) if len(alive) else 0
        here = [v for v in self.cost.peak_values if v not in trips or not trips[v].gone <= peak < trips[v].back]
        return Cost(int(max(alive.max(initial=0), 0)), self.cost.added_seconds + added, tuple(here))


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
        self._times = [_times(each) for each in variants]
        self._again = sum(op.again_seconds for op in graph.operations)
        self._arrays = _arrays_of(graph, variants)  # the library has their addresses
        self._state = self._library.ogc_new(self._arrays[0].ctypes.data)
        if self._state is None:
            raise MemoryError("there is no memory to weigh plans in")
        weakref.finalize(self, self._library.ogc_delete, self._state)
        self._cost = array("q", bytes(88))
        self._flat: dict[int, tuple[Segment, bytes, bytes]] = {}  # by the identity of the segment, which is held

    def __call__(self, decisions: Decisions) -> Cost:
        """The cost of a plan.

        Raises:
            PlanError: as :func:`ogc.simulate` does.
        """
        if decisions.offloaded and self.graph.host is not None:
            decisions.check(self.graph)
            return self.profile(decisions).offloading(decisions.offloaded)
        return self._counted(decisions) if self._replayed(decisions) == FOUND else self._simulated(decisions)

    def if_possible(self, decisions: Decisions) -> Cost | None:
        """The cost of a plan that offloads nothing; None of one that cannot be carried out, without a reason, which
        takes long to find."""
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
        peak, runs, seen, alive, place, recomputed = unpack_from("5qd", self._cost)
        costs, (own, low) = self.graph.runtime, self._seconds
        seconds = costs.choice + costs.run * runs + costs.saved_tensor * seen - costs.left_out
        seconds += recomputed + self._again + sum(low[t] - own[t] for t in decisions.low_memory)
        values = (ctypes.c_int32 * alive).from_address(place) if alive else ()
        return Cost(peak + (self.graph.in_flight - 1) * self._cost[-1], seconds, tuple(sorted(values)))

    def profile(self, decisions: Decisions) -> Profile:
        """What a plan takes step by step where its offloaded values are saved.

        Raises:
            PlanError: as :func:`ogc.simulate` does.
        """
        decisions = replace(decisions, policies=_saving(decisions), offloaded=())
        graph, status = self.graph, self._replayed(decisions)
        if status == RUNS_TWICE:
            raise PlanError("an operation must not run twice")
        *_, count, steps, sizes, needed = unpack_from("5qd4q", self._cost) if status == FOUND else (0,) * 4
        if not count:  # nothing is compiled, or what is of an earlier version, or the plan cannot be carried out
            return Profile.of(graph, decisions, self(decisions))
        cost = self._counted(decisions)
        table = np.array((ctypes.c_int32 * (3 * count)).from_address(steps), np.int32).reshape(-1, 3)
        step_bytes = np.array((ctypes.c_int64 * count).from_address(sizes), np.int64)
        needs = list((ctypes.c_int32 * len(graph.values)).from_address(needed))
        is_backward = table[:, 2] == IN_BACKWARD
        is_low = np.zeros(len(graph), bool)
        is_low[list(decisions.low_memory)] = True
        forward, again, backward = np.where(is_low, self._times[1], self._times[0])
        seconds = np.where(is_backward, backward[table[:, 1]], again[table[:, 1]])
        seconds[: len(graph)] = forward
        during = np.where(table[:, 2] < 0, table[:, 1], table[:, 2])
        return Profile(graph, cost, step_bytes, seconds, during, {v: n for v, n in enumerate(needs) if n >= 0})

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
        self._cost[-1] = -1
        status = int(library.ogc_replay(self._state, plan.buffer_info()[0], self._cost.buffer_info()[0]))
        is_older = status == FOUND and graph.in_flight > 1 and self._cost[-1] < 0  # it knows of one forward alone
        return NO_PLAN if is_older else status

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


def _saving(decisions: Decisions) -> Policies:
    """The policies of all runs where what is offloaded is saved."""
    every = dict(decisions.policies_of_runs)
    return tuple((v, Policy.SAVED if policy is Policy.OFFLOADED else policy) for v, policy in every.items())


def _times(graph: Graph) -> NDArray[np.float64]:
    """Of each operation, the seconds of its forward, of a recomputation and of its backward."""
    forward = [op.forward_seconds for op in graph.operations]
    return np.array(
        [forward, graph.repeat_seconds, [op.backward_seconds + op.again_seconds for op in graph.operations]]
    )


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
