"""A step as the allocator sees it: every block that it asks for and frees, in order, and the peaks of that.

At each event of :func:`ogc.simulate` the blocks that are alive add up to its bytes. Each value and the internal tensors
of an operation are one block. Of gradients the graph has sums alone: their blocks have the sizes of their values, as
far as the sums leave room. Temporaries are blocks no larger than what the operation works on, but for workspaces of
convolutions on CUDA, which are one block each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import PlanError
from ..graph import Graph, Operation, table
from ..plan.decisions import Decided, Decisions, Segment, saved
from ..plan.schedule import Schedule, Step
from ..plan.simulate import Event, Memory, replay
from .allocator import DEFAULTS, AllocatorSettings, CachingAllocator, DeviceFullError, Usage

PIECES = 16
"""The most blocks of temporaries of one operation; what would be more is taken as one."""


class Move(NamedTuple):
    """A block that is allocated, or freed: then with its bytes below zero."""

    block: int
    bytes: int


class Content(NamedTuple):
    """What a block is for: of which operation, and what of it."""

    operation: int
    kind: str  # "value", "fetched value", "internal tensors", "temporary" or "gradient"


class Requests(NamedTuple):
    """The moves of one step, and the simulator's events with the number of moves before each.

    After the moves outputs are alive, and gradients of parameters that the backward made.
    """

    moves: tuple[Move, ...]
    timeline: tuple[Event, ...]
    places: tuple[int, ...]
    schedule: Schedule
    steps: tuple[int, ...]  # for each move, the step of the schedule that makes it
    contents: tuple[Content, ...]  # by block


def requests(graph: Graph, plan: Decided | Decisions | Iterable[Segment]) -> Requests:
    """What one step of ``plan`` asks the allocator for; one that ``is_plain`` is the plain model's.

    Raises:
        PlanError: as :func:`ogc.simulate` does, or the plan is plain and the graph's operations are not the plain
            model's.
    """
    found = replay(_Requesting(Schedule.of_step(graph, plan, "the plain model's requests are not known")))
    found.gradients.reach(graph.left_bytes)
    moves, timeline, places = tuple(found.moves), tuple(found.timeline), tuple(found.places)
    return Requests(moves, timeline, places, found.schedule, tuple(found.step_of_moves), tuple(found.contents))


class _Requesting(Memory):
    """The replay of the simulator, with a block for all that it counts."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        self.moves: list[Move] = []
        self.places: list[int] = []
        self.blocks: dict[tuple[int, int], int] = {}  # of copies of values (run, value)
        self.internal_blocks: dict[int, int] = {}
        self.sizes: list[int] = []  # by block
        self.contents: list[Content] = []  # by block
        self.step_of_moves: list[int] = []
        self.number = 0  # of the step
        self.has_workspaces = self.graph.profile == "measure" and self.graph.device.startswith("cuda")
        self.gradients = _Gradients(self)
        self.targets = _gradients_behind(schedule)

    def allocate(self, size: int, kind: str, operation: int | None = None) -> int:
        """A new block for the operation of this step, or another one."""
        own = self.schedule.steps[self.number].operation
        self.sizes.append(size)
        self.contents.append(Content(own if operation is None else operation, kind))
        block = len(self.sizes) - 1
        if size:
            self._move(block, size)
        return block

    def free(self, block: int) -> None:
        """Let go of a block."""
        if self.sizes[block]:
            self._move(block, -self.sizes[block])

    def _move(self, block: int, size: int) -> None:
        self.moves.append(Move(block, size))
        self.step_of_moves.append(self.number)

    def pieces(self, op: Operation, size: int) -> Iterator[int]:
        """Sizes of the temporaries of an operation that together have ``size``."""
        values = self.graph.values
        most = max((values[v].bytes for v in (*op.reads, *op.writes)), default=0)
        if size > PIECES * most or (self.has_workspaces and "convolution" in op.target):
            most = size
        while size:
            yield min(size, most)
            size -= min(size, most)

    def take(self, number: int, step: Step) -> None:
        """Carry out one step."""
        self.number, t = number, step.operation
        self.leave(number)
        if step.is_backward:
            self.gradients.target = self.targets[number]
            self._begin_backward(self.graph.operations[t], self.graph.operations[t].backward_bytes)
            super().take(number, step)
            if t in self.internal_blocks:
                self.free(self.internal_blocks.pop(t))
            left = min(self.targets[number], self.gradients.total)  # the next step makes what is more
            self.gradients.reach(left, let_go=self.graph.operations[t].writes)
        else:
            if step.during is not None:
                self._begin_backward(self.graph.operations[step.during])
            self._take_over(number, step)
            super().take(number, step)

    def _begin_backward(self, op: Operation, most: int | None = None) -> None:
        wanted = op.gradient_bytes if most is None else min(op.gradient_bytes, most)
        self.gradients.reach(wanted, made=self._sizes_of(op.writes))

    def _take_over(self, number: int, step: Step) -> None:
        """The result takes the block of a value that ends here, where it is as large."""
        op = self.graph.operations[step.operation]
        if op.takes_over is None or (step.run, op.takes_over) not in self.schedule.done[number]:
            return
        block = self.blocks.pop((step.run, op.takes_over), None)
        if block is None:
            return
        for v in op.writes:
            if (step.run, v) not in self.live and self.graph.values[v].bytes == self.sizes[block]:
                self.blocks[step.run, v] = block
                return
        self.free(block)

    def _count(self, copy: tuple[int, int], change: int) -> None:
        super()._count(copy, change)
        if copy not in self.live:
            if copy in self.blocks:
                self.free(self.blocks.pop(copy))
        elif copy not in self.blocks:
            step, v = self.schedule.steps[self.number], copy[1]
            if not step.is_backward and v in self.graph.operations[step.operation].writes:
                self.blocks[copy] = self.allocate(change, "value")
            else:
                self.blocks[copy] = self.allocate(change, "fetched value", self.graph.producers[v])

    def _record(self, phase: str, step: Step, extra: int) -> None:
        op = self.graph.operations[step.operation]
        if step.is_backward:
            self._record_backward(phase, step, extra)
            return
        internal = self.allocate(op.internal_bytes, "internal tensors")
        scratch = [self.allocate(size, "temporary") for size in self.pieces(op, op.scratch_bytes)]
        self._mark(phase, step, extra)
        for block in scratch:
            self.free(block)
        if step.run == self.schedule.keepers[step.operation] and step.operation not in self.internals:
            self.internal_blocks[step.operation] = internal
        else:
            self.free(internal)

    def _record_backward(self, phase: str, step: Step, extra: int) -> None:
        op = self.graph.operations[step.operation]
        if self.timeline and self.timeline[-1][:3] == ("backward", step.run, step.operation):  # its late bytes
            self.gradients.reach(extra, let_go=op.writes)
        else:
            self.gradients.work(op, extra, self._sizes_of(op.reads))
        self._mark(phase, step, extra)

    def _mark(self, phase: str, step: Step, extra: int) -> None:
        super()._record(phase, step, extra)
        self.places.append(len(self.moves))

    def _sizes_of(self, values: Iterable[int]) -> dict[int, int]:
        return {v: self.graph.values[v].bytes for v in values}


class _Gradients:
    """The blocks of gradients, and of temporaries of a backward."""

    def __init__(self, memory: _Requesting) -> None:
        self.memory = memory
        self.held: list[tuple[int, int]] = []  # (value that it is the gradient of or -1, block), in order of birth
        self.working: list[int] = []
        self.total = 0
        self.target = 0  # when the backward available is over

    def reach(self, total: int, made: dict[int, int] | None = None, let_go: Sequence[int] = ()) -> None:
        """Allocate for values whose gradients are ``made``, or free those ``let_go`` first, until ``total`` bytes
        are alive.
        """
        if total > self.total:
            self._make(total - self.total, made or {})
        elif total < self.total:
            self._let_go(self.total - total, let_go)

    def work(self, op: Operation, total: int, read: dict[int, int]) -> None:
        """The peak of a backward: gradients of what the operation read are there, and its temporaries."""
        new = total - self.total
        if new <= 0:
            self.reach(total)
            return
        known = {v for v, _ in self.held}
        made = {v: size for v, size in read.items() if v not in known}
        least, most = max(0, self.target - self.total), min(new, self.target)
        staying = min(max(sum(made.values()), least), most) if least <= most else most
        self._make(staying, made)
        late = total - op.late_bytes if op.late_bytes else 0
        first = min(max(late, 0), new - staying)
        for part in (first, new - staying - first):
            for size in self.memory.pieces(op, part):
                self.working.append(self.memory.allocate(size, "temporary"))
                self.total += size

    def _make(self, size: int, made: dict[int, int]) -> None:
        for v, most in (*made.items(), (-1, size)):
            part = min(size, most)
            if part:
                self.held.append((v, self.memory.allocate(part, "gradient")))
                self.total += part
                size -= part

    def _let_go(self, size: int, of: Sequence[int]) -> None:
        """Free so many bytes: temporaries, gradients of the values named, of those made later, others; oldest first."""
        producers, sizes = self.memory.graph.producers, self.memory.sizes
        named = frozenset(of)
        latest = min((producers[v] for v in named), default=len(self.memory.graph))

        def rank(entry: tuple[int, int]) -> int:
            value = entry[0]
            return 0 if value in named else 1 if value >= 0 and producers[value] >= latest else 2

        order = [(-2, block) for block in self.working] + sorted(self.held, key=rank)
        whole = []
        for entry in order:
            if size and sizes[entry[1]] <= size:
                whole.append(entry)
                size -= sizes[entry[1]]
        for entry in whole:
            self._free(entry)
        if size:
            value, block = entry = next(entry for entry in order if entry not in whole)
            rest = sizes[block] - size
            self._free(entry)
            self._make(rest, {value: rest} if value >= 0 else {})

    def _free(self, entry: tuple[int, int]) -> None:
        value, block = entry
        if value == -2:
            self.working.remove(block)
        else:
            self.held.remove(entry)
        self.memory.free(block)
        self.total -= self.memory.sizes[block]


def _gradients_behind(schedule: Schedule) -> list[int]:
    """For each step, the bytes of gradients that are alive once it is done, as far as it is a backward."""
    ops, found = schedule.graph.operations, [0] * len(schedule.steps)
    behind = None
    for number in range(len(schedule.steps) - 1, -1, -1):
        step = schedule.steps[number]
        if step.is_backward:
            if behind is not None:
                op, is_next = ops[behind.operation], schedule.steps[number + 1] is behind
                found[number] = min(op.gradient_bytes, op.backward_bytes) if is_next else op.gradient_bytes
            behind = step
    return found


STEPS = 3
"""Steps that are replayed one after the other: each finds what those before it left, and may reserve more."""


@dataclass(frozen=True)
class WholeStep:
    """A training step as the allocator sees it.

    Attributes:
        moves: of the forward and the backward; what these leave goes after the optimizer's step.
        held: bytes of each tensor that is there throughout: parameters, their gradients if kept, and so on.
        behind: bytes that the optimizer's step takes after the backward.
    """

    moves: tuple[Move, ...]
    held: tuple[int, ...] = ()
    behind: int = 0

    def peaks(
        self, settings: AllocatorSettings = DEFAULTS, device_bytes: int | None = None, steps: int = STEPS
    ) -> Usage:
        """The most bytes over some steps; raises DeviceFullError where ``device_bytes`` do not do."""
        allocator = CachingAllocator(settings, device_bytes)
        for size in self.held:
            allocator.allocate(size)
        for _ in range(steps):
            handles: dict[int, int] = {}
            for block, size in self.moves:
                if size > 0:
                    handles[block] = allocator.allocate(size)
                else:
                    allocator.free(handles.pop(block))
            if self.behind:
                allocator.free(allocator.allocate(self.behind))
            for handle in handles.values():
                allocator.free(handle)
        return allocator.peak

    def needed_bytes(self, settings: AllocatorSettings = DEFAULTS) -> int:
        """The smallest device, to 1 %, on which the steps run: there free segments are given back before it is full."""
        roomy = self.peaks(settings)
        least, most = roomy.allocated, roomy.reserved  # does not do, or is the answer; does
        while most - least > most // 100:
            middle = (least + most) // 2
            try:
                self.peaks(settings, middle)
                most = middle
            except DeviceFullError:
                least = middle
        return most


@dataclass(frozen=True)
class MemoryPeaks:
    """The peaks that CUDA's caching allocator is predicted to reach by a plan, and by the plain model, where that is
    known.
    """

    planned: Usage
    plain: Usage | None
    settings: AllocatorSettings

    def __str__(self) -> str:
        header = ["predicted for CUDA's allocator", "requested MiB", "allocated MiB", "reserved MiB"]
        rows = [("plain", self.plain), ("planned", self.planned)]
        segments = "expandable" if self.settings.expandable_segments else "of fixed size"
        cells = [[name, *(f"{size / 2**20:.1f}" for size in peaks)] for name, peaks in rows if peaks is not None]
        return f"{table(header, cells)}\nsegments are {segments}"


def plain_moves(graph: Graph) -> tuple[Move, ...] | None:
    """The moves of the plain model's step; None where the graph's operations are not the plain model's."""
    if graph.plain_peak_bytes is not None:
        return None
    return requests(graph, Decisions((saved(0, len(graph)),), is_plain=True)).moves if len(graph) else ()


def memory_peaks(
    graph: Graph,
    decisions: Decisions,
    settings: AllocatorSettings,
    step: Callable[[tuple[Move, ...]], WholeStep] = WholeStep,
) -> MemoryPeaks:
    """The peaks of a plan and of the plain model, of a ``step`` around their moves; alone these are activations.

    Raises:
        PlanError: the plan is plain, and the graph's operations are not the plain model's.
    """
    plain = plain_moves(graph)
    plain_peaks = None if plain is None else step(plain).peaks(settings)
    moves = plain if decisions.is_plain else requests(graph, decisions).moves
    if moves is None:
        raise PlanError("this graph runs chunk by chunk, so the plain model's requests are not known")
    return MemoryPeaks(step(moves).peaks(settings), plain_peaks, settings)
