"""The schedule that a plan means: its runs, and how long each copy of a value is needed.

A plan is carried out in *runs*. Run 0 is the forward. Each recomputed segment is recomputed before its backward, from
any values that are still there. The backward of a saved segment takes what it needs from the run that the segment
belongs to. A run repeats the operations that somebody needs; a value is released after its last use. One that crosses
a cut is saved, unless its policy is *recomputed*: whoever needs it recomputes it. One that a recomputed segment has
*saved* is never recomputed; nor are the internal tensors of an operation of which a segment of the forward saves all
results. The simulator counts this, the runtime executes this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

from ..errors import PlanError
from ..graph import Graph
from .decisions import Decided, Decisions, Offload, Policy, Segment, saved, up_to

FORWARD = 0


@dataclass
class Run:
    """One run of the operations between two cuts.

    Attributes:
        start, stop: the region of the program.
        parent: the run around this one; None for the forward.
        policies: policies of values in this run; what is decided around it overrides what is decided inside.
        saved: segments (start, stop) whose backward this run supplies, in program order.
        children: the runs of its recomputed parts, in program order.
        program: the operations that are run, in order, without those whose results nobody needs.
        made: values whose final content the program makes, for itself or for runs inside it.
        needs: values that the program reads or these segments save, and that it does not make.
    """

    start: int
    stop: int
    parent: int | None = None
    policies: Mapping[int, Policy] = field(default_factory=dict)
    saved: list[tuple[int, int]] = field(default_factory=list)
    children: list[int] = field(default_factory=list)
    program: tuple[int, ...] = ()
    made: frozenset[int] = frozenset()
    needs: frozenset[int] = frozenset()


class Step(NamedTuple):
    """One operation run forward (in ``run``) or backward (supplied by ``run``).

    ``during``, in a recomputation, is the operation whose backward waits for it.
    """

    run: int
    operation: int
    is_backward: bool = False
    during: int | None = None


class Trip(NamedTuple):
    """When an offloaded value is away, in numbers of steps: those before which, or with ``made`` behind which.

    ``made``, its content is final and the copy out starts; ``gone``, its bytes are free; ``back``, memory is taken and
    the copy back starts; ``needed``, it has to be there.
    """

    made: int
    gone: int
    back: int
    needed: int


class Schedule:
    """The runs of a plan over a graph, in the order in which they are carried out.

    Attributes:
        graph: the operations in the variants that the plan runs.
        keeps_internals: for each operation, whether the internal tensors of its forward stay for its backward.
        offloaded: what the plan offloads, whether or not a backward needs it.

    Raises:
        PlanError: the decisions do not fit the graph, an operation would run twice that must not, or a value would stay
            for the backward that the user told not to save.
    """

    def __init__(self, graph: Graph, decisions: Decisions) -> None:
        decisions.check(graph)
        decisions = decisions.as_told(graph.told)
        self.graph = graph = graph.with_variants(decisions.low_memory)
        self.runs: list[Run] = [Run(0, len(graph), policies=dict(decisions.policies_of_runs))]
        self.keeps_internals = graph.keeps_internals_with(decisions.saved_values)
        self.offloaded = decisions.offloaded
        self._backwards: list[tuple[int, int, int]] = []  # (supplier, start, stop) of saved segments, as they come
        self._visit(FORWARD, with_saved_end(graph, decisions.segments))
        for start, stop in self.runs[FORWARD].saved if graph.told.in_recomputed else ():
            if kept := sorted(graph.told.in_recomputed.intersection(range(start, stop))):
                name, words = graph.operations[kept[0]].name, graph.told.words
                raise PlanError(f"segment {start}-{stop - 1} saves all of operation {name}, which {words} forbids")
        for run in reversed(self.runs[1:]):
            self._write_program(run)
        forward = self.runs[FORWARD]
        forward.program = tuple(range(len(graph)))
        forward.made = frozenset(range(len(graph.values)))

    @classmethod
    def of_step(cls, graph: Graph, plan: Decided | Decisions | Iterable[Segment], lacks: str) -> Schedule:
        """That of a whole step; of a plain plan, the plain model's.

        Raises:
            PlanError: as above; or the plan is plain and the graph's operations are not the plain model's, so that it
                ``lacks`` something.
        """
        decisions = Decisions.of(plan)
        if decisions.is_plain and graph.plain_peak_bytes is not None:
            raise PlanError(f"this graph runs chunk by chunk, so {lacks}")
        return cls(graph.of_the_plain_model if decisions.is_plain else graph, decisions)

    def _visit(self, number: int, segments: Sequence[Segment]) -> None:
        run = self.runs[number]
        for segment in reversed(segments):
            if segment.parts:
                child = len(self.runs)
                policies = {**dict(segment.policies), **run.policies} if segment.policies else run.policies
                self.runs.append(Run(segment.start, segment.stop, number, policies))
                run.children.insert(0, child)
                self._visit(child, segment.parts)
            else:
                run.saved.insert(0, (segment.start, segment.stop))
                self._backwards.append((number, segment.start, segment.stop))

    def _write_program(self, run: Run) -> None:
        """Find what must be run, from what is needed backwards. Children come first."""
        graph, ops = self.graph, self.graph.operations
        producers, last_writes = graph.producers, graph.last_writes
        is_recomputed = partial(self._is_recomputed, run)

        in_saved = [t for start, stop in run.saved for t in range(start, stop)]
        saved = {v for t in in_saved for v in ops[t].saves}
        needed = saved.union(*(self.runs[child].needs for child in run.children))
        wanted = {v for v in needed if is_recomputed(v)}
        alive = {t for t in in_saved if ops[t].internal_bytes and not self.keeps_internals[t]}
        first = min([run.start, *(producers[v] for v in wanted)])
        complete = False
        while not complete:
            complete, t = True, run.stop
            while t > first:
                t -= 1
                op = ops[t]
                if t in alive or not wanted.isdisjoint(op.writes):
                    alive.add(t)
                    more = {v for v in op.reads if is_recomputed(v) or t <= last_writes[v]} - wanted
                    wanted |= more
                    for v in more:
                        complete &= last_writes[v] <= t  # in-place operations may ask for writers behind them
                        first = min(first, producers[v])
        for t in alive:
            if not ops[t].replayable:
                raise PlanError(f"operation {ops[t].name} must not run twice")
        run.program = tuple(sorted(alive))
        run.made = frozenset(
            v for t in run.program for v in ops[t].writes if last_writes[v] in alive and is_recomputed(v)
        )
        read = {v for t in run.program for v in ops[t].reads if t > last_writes[v]}
        run.needs = frozenset((read | needed) - run.made)

    def _is_recomputed(self, run: Run, v: int) -> bool:
        """Whether a run that needs a value recomputes it, rather than find it still there."""
        match run.policies.get(v):
            case None:  # what is used beyond the region is there from then
                return self.graph.producers[v] >= run.start and self.graph.last_uses[v] < run.stop
            case Policy.SAVED | Policy.OFFLOADED:
                return False
            case Policy.RECOMPUTED:
                return True

    @cached_property
    def checkpoints(self) -> frozenset[int]:
        """The values of the forward that some run starts from."""
        found = ((run.parent, v) for run in self.runs for v in run.needs)
        return frozenset(v for parent, v in found if parent is not None and self.source(parent, v) == FORWARD)

    def source(self, number: int, value: int) -> int:
        """The run whose copy of ``value`` run ``number`` uses: itself if it makes one, else the last before it."""
        while value not in self.runs[number].made:
            parent = self.runs[number].parent
            assert parent is not None
            number = parent
        return number

    @cached_property
    def keepers(self) -> tuple[int, ...]:
        """For each operation, the run whose internal tensors its backward uses; those without bytes stay anyway."""
        keepers = [FORWARD] * len(self.graph)
        for number, run in enumerate(self.runs):
            in_saved = {t for start, stop in run.saved for t in range(start, stop)}
            for t in in_saved.intersection(run.program):
                if self.graph.operations[t].internal_bytes and not self.keeps_internals[t]:
                    keepers[t] = number
        return tuple(keepers)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Every operation run, forward and backward, in order.

        A run is carried out when the first of its saved tensors is asked for, those around it before it.
        """
        steps = [Step(FORWARD, t) for t in range(len(self.graph))]
        done = {FORWARD}
        for number, start, stop in self._backwards:
            for t in range(stop - 1, start - 1, -1):
                if number not in done and self._asks_for(number, t):
                    for waiting in self._around(number, done):
                        done.add(waiting)
                        steps += [Step(waiting, again, during=t) for again in self.runs[waiting].program]
                steps.append(Step(number, t, is_backward=True))
        return tuple(steps)

    @cached_property
    def trips(self) -> dict[int, Trip]:
        """The offloaded values that some step needs behind the forward, by the order of their copies out."""
        return trips_of(self.graph, self.offloaded, *self.needs) if self.offloaded else {}

    @cached_property
    def needs(self) -> tuple[dict[int, int], dict[int, int]]:
        """The first step behind the forward that needs each value of it, and the first of each operation's backward.

        A recomputation begins with all that it starts from.
        """
        needed: dict[int, int] = {}
        starts: dict[int, int] = {}  # of each operation, the first step of its backward
        first: dict[int, int] = {}  # of each recomputation, its first step
        for number, step in enumerate(self.steps[len(self.graph) :], len(self.graph)):
            starts.setdefault(step.operation if step.during is None else step.during, number)
            begins = number if step.is_backward else first.setdefault(step.run, number)
            for run, v in self.reads(step):
                if run == FORWARD:
                    needed[v] = min(begins, needed.get(v, begins))
        return needed, starts

    def _asks_for(self, number: int, t: int) -> bool:
        saves = self.graph.operations[t].saves
        return self.keepers[t] == number or any(self.source(number, v) != FORWARD for v in saves)

    def _around(self, number: int, done: set[int]) -> list[int]:
        """The run and those around it that are not done, outermost first."""
        if number in done:
            return []
        parent = self.runs[number].parent
        assert parent is not None
        return [*self._around(parent, done), number]

    def reads(self, step: Step) -> list[tuple[int, int]]:
        """The copies (run, value) that a step needs to be there."""
        number, t = step.run, step.operation
        op, last_writes = self.graph.operations[t], self.graph.last_writes
        if step.is_backward:
            return [(self.source(number, v), v) for v in op.saves]
        return [(number if t <= last_writes[v] else self.source(number, v), v) for v in op.reads]

    @cached_property
    def last_needs(self) -> dict[tuple[int, int], int]:
        """For each copy (run, value), the number of the last step that makes or needs it."""
        last: dict[tuple[int, int], int] = {}
        for number, step in enumerate(self.steps):
            if not step.is_backward:
                for v in self.graph.operations[step.operation].writes:
                    last[step.run, v] = number
            for copy in self.reads(step):
                last[copy] = number
        for v in self.graph.returned:  # the caller has them until the forward is done
            last[FORWARD, v] = max(last[FORWARD, v], len(self.graph) - 1)
        return last

    @cached_property
    def done(self) -> tuple[list[tuple[int, int]], ...]:
        """For each step, the copies (run, value) that none behind it makes or needs."""
        found: tuple[list[tuple[int, int]], ...] = tuple([] for _ in self.steps)
        for copy, number in self.last_needs.items():
            found[number].append(copy)
        return found


def trips_of(
    graph: Graph, offloaded: Iterable[Offload], needed: Mapping[int, int], starts: Mapping[int, int]
) -> dict[int, Trip]:
    """The trips of those values that are ``needed`` behind the forward, in the order of their copies out.

    Args:
        graph: of the plan.
        offloaded: what it offloads.
        needed: of such values, the first step.
        starts: of operations, the first step of their backward.
    """
    writes = graph.last_writes
    away = sorted((writes[v], v, gone, back) for v, gone, back in offloaded if v in needed)
    return {v: Trip(made, gone, min(starts[back], needed[v]), needed[v]) for made, v, gone, back in away}


def with_saved_end(graph: Graph, segments: Sequence[Segment]) -> Sequence[Segment]:
    """The segments with the caller's operations saved: only the model's are recomputed."""
    return (*up_to(segments, graph.end), saved(graph.end, len(graph))) if graph.outside else segments
