"""From a graph and a goal to a plan: ``solve``, ``frontier``, and the solvers by name."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any

import numpy as np

from ..errors import InputError, PlanError, SolveError
from ..given import bytes_of
from ..graph import MIB, Graph, Operation, Value
from ..plan import Decisions, Frontier, Plan, plain_plan, recomputed, saved, simulate
from ..plan.decisions import up_to
from ..plan.fast import Replay, library
from ..plan.schedule import Schedule
from ..plan.simulate import lower_bound
from ..plan.told import Entry, Instructions, kinds_of
from ..process import collecting_new_only, is_late, shown
from .candidates import Candidate, front_of, inside_a_recomputation, weigh
from .goal import FAIR, FAIR_OVERHEAD, LEAST_PEAK, NEGLIGIBLE, Budget, Goal, Solver
from .offloading import offloading, timed_candidate
from .polish import Aim, polished
from .references import REFERENCES
from .search import Search, VariantSearch, fairest, search_fairly, search_of


def solve(
    graph: Graph,
    *,
    memory_budget: Budget | None = None,
    max_overhead: float | None = None,
    solver: str = "optimal",
    effort: int = 1,
    keep: Iterable[Entry] = (),
    recompute: Iterable[Entry] = (),
    once: Iterable[Entry] = (),
) -> Plan:
    """The plan that is asked for; without a goal, the least peak that about one forward more can buy.

    That is: no operation runs more than twice, a step takes at most a third longer, and of two plans that peak within
    five percent of each other the one whose product of peak and time is less is taken.

    Args:
        graph: the weighted graph, from :func:`ogc.parse` or made by hand.
        memory_budget: the least recomputed time such that the simulated peak of activations fits: bytes, a
            text such as ``"8GB"`` or ``"512MiB"``, or a float in (0, 1], a share of the plain peak. With ``"least"``,
            the plan with the least peak whatever its time, and the least recomputed time at it.
        max_overhead: the least peak with at most this share of the plain step's time recomputed.
        solver: ``"optimal"`` or, to compare with, ``"none"`` (the plain model) or one of :mod:`ogc.solver.references`:
            ``"chen"``, ``"uniform"``, ``"binomial"``, ``"feng-huang"``. Only ``"optimal"`` takes a goal.
        effort: how long a local search improves what the dynamic program finds: 0 not at all, 1 for less time than
            that takes, 2 and 3 for some ten and a hundred times as many moves. Without a compiler fewer are made.
        keep: names, patterns such as ``"layers.*.attn"`` and types of modules whose results are saved and never
            recomputed, wherever they are needed after the forward. A type needs a graph that :func:`ogc.parse` made.
        recompute: modules of which nothing stays from the forward to the backward but what one with submodules hands
            on, what the caller holds, and what cannot be recomputed. Of two entries that contain one another, the inner
            one holds.
        once: modules whose operations never run twice; so their results are saved, as with ``keep``.

    Returns:
        The plan; its summary says what ``keep``, ``recompute`` and ``once`` cost against the one without them. If the
            plain model meets the goal, or nothing beats it by more than half a percent of its peak, that is it
            (``plan.is_plain``). The plan of a reference solver is returned even where the plain model needs less.

    Raises:
        InputError: a goal is of the wrong kind, both are given, the solver is unknown or takes no goal, or this
            is no graph; or a module is named that there is not, or in two ways that contradict.
        SolveError: nothing fits the budget; the message says what would, and what stands in the way.
    """
    _check_graph(graph)
    told = _told(graph, keep, recompute, once)
    plan = SolveOptions(Goal(memory_budget, max_overhead), solver, effort).plan(told)
    if told is not graph and not plan.is_plain:
        _check_kept(told, plan)
    return replace(plan, graph=graph)


@dataclass(frozen=True)
class SolveOptions:
    """The arguments of :func:`solve` beside the graph.

    Raises:
        InputError: the solver is unknown or takes no goal, or the effort is none.
    """

    goal: Goal = FAIR
    solver: str = "optimal"
    effort: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.effort, bool) or self.effort not in EFFORTS:
            raise InputError(f"effort must be 0, 1, 2 or 3, not {self.effort!r}")
        if self.solver not in SOLVERS:
            raise InputError(f"solver must be one of {', '.join(map(repr, SOLVERS))}, not {self.solver!r}")
        if self.solver != "optimal" and self.goal:
            raise InputError(
                f"solver={self.solver!r} takes neither memory_budget nor max_overhead; only 'optimal' does"
            )

    @collecting_new_only()
    @shown()
    def plan(self, graph: Graph, goal: Goal | None = None) -> Plan:
        """The plan of a graph, for another goal if one is given.

        Raises:
            InputError: the solver cannot be told what the graph was.
            SolveError: nothing fits the budget.
        """
        wanted = self.goal if goal is None else goal
        if self.solver == "optimal":
            return optimal(graph, wanted, self.effort)
        if graph.told:
            raise InputError(f"solver={self.solver!r} cannot be told {graph.told.words}; only 'optimal' can")
        plan = SOLVERS[self.solver](graph, wanted)
        if not plan.is_plain:
            _known_of(graph).learn([Candidate(plan.peak_bytes, plan.added_seconds, plan.decisions)])
        return plan


@collecting_new_only()
@shown()
def frontier(
    graph: Graph,
    *,
    points: int = 16,
    budgets: Sequence[Budget] = (),
    keep: Iterable[Entry] = (),
    recompute: Iterable[Entry] = (),
    once: Iterable[Entry] = (),
) -> Frontier:
    """Plans from the least peak to the plain model.

    Each peak is looked at once, so a point may recompute a few percent more than what :func:`solve` finds for the same
    budget. Selective plans, which recompute whatever costs little wherever it is used, are tried too.

    Args:
        graph: the weighted graph.
        points: peaks to look at, evenly spaced on a logarithmic scale; plans that others beat are left out.
        budgets: further peaks to plan for, as :func:`solve` does for a ``memory_budget``; what nothing meets is
            left out.
        keep, recompute, once: as for :func:`solve`. The plain model is left out where it does not keep to them.

    Returns:
        The plans, by ascending peak and descending overhead; hand any of them to :func:`ogc.apply`.
    """
    _check_graph(graph)
    told, plain = _told(graph, keep, recompute, once), plain_plan(graph)
    if not len(graph):
        return Frontier((plain,))
    optimal(told, LEAST_PEAK)
    for peak in sorted({bytes_of(budget, plain.peak_bytes) for budget in budgets}):
        with suppress(SolveError):
            optimal(told, Goal(max(1, peak)))
    known, asked = _known_of(told), ("curve", points)
    if asked not in known.answered:
        known.learn(search_of(told).curve(points))
        if told.host is not None:
            least, search = max(1, lower_bound(told)), _Offloading(told, known, 0)
            peaks = np.geomspace(least, plain.peak_bytes, points + 1)[1:-1]
            known.learn_away(search.within(int(peak), known.plans) for peak in peaks)
        if not is_late():
            known.answered.add(asked)
    found = front_of([*known.plans, *known.away])
    plans = [
        plain.deciding(c.decisions.as_told(told.told), "optimal")
        for c in found
        if c.peak_bytes < plain.peak_bytes or not told.may_be_plain
    ]
    return Frontier((*plans, plain) if told.may_be_plain else tuple(plans))


def _told(graph: Graph, keep: Any, recompute: Any, once: Any) -> Graph:
    """The graph with what is told. InputError: that is of the wrong kind, or of no module, or contradicts itself."""
    said = Instructions(keep, recompute, once)
    said.check(graph.kinds or kinds_of(graph.operations))
    return said.on(graph)


def _check_graph(graph: Any) -> None:
    if not isinstance(graph, Graph):
        kind = type(graph).__name__
        raise InputError(f"graph must be a Graph, as ogc.parse(model, sample_input) returns, not {kind}")


def optimal(graph: Graph, goal: Goal, effort: int = 1) -> Plan:
    """The plan that is asked for, with the least peak that any has in :attr:`ogc.Plan.floor` where nothing is.

    Segments are saved, recomputed at once, or recomputed through parts (:mod:`ogc.solver.levels`). For a goal, one that
    is recomputed at once may also keep what is costly to make (:mod:`ogc.solver.candidates`).

    Raises:
        SolveError: nothing fits the budget; the message says what would, and what stands in the way.
    """
    if graph.free is None:
        return _found(graph, goal, effort)
    of_free, known, costs = _known_of(graph.free), _known_of(graph), Replay(graph)
    for plan in of_free.plans:
        with suppress(PlanError):  # it does not keep to what is told
            known.learn([weigh(costs, plan.decisions)])
    try:
        found = _found(graph, goal, effort)
    except (PlanError, SolveError) as error:
        free, least = _found(graph.free, goal, effort), getattr(error, "least_peak_bytes", None)
        raise SolveError(f"with {graph.told.words} {error}; without, the plan is: {free.summary}", least) from None
    if not found.is_plain:
        found = found.deciding(found.decisions.as_told(graph.told), found.solver)
        of_free.learn([Candidate(found.peak_bytes, found.added_seconds, found.decisions)])
    if is_late():
        return found
    free = _found(graph.free, goal, effort)
    return replace(found, free=(free.peak_bytes, free.added_seconds))


def _check_kept(told: Graph, plan: Plan) -> None:
    """Raise SolveError where a plan repeats what it must not, which its policies alone do not prevent."""
    assert told.free is not None
    again = {t for run in Schedule(told.free, plan.decisions).runs[1:] for t in run.program}
    for op, own in ((told.operations[t], told.free.operations[t]) for t in sorted(again)):
        if own.replayable and not op.replayable:
            raise SolveError(f"with {told.told.words} operation {op.name} would still run twice; leave its module out")


SLOWER_BY_OFFLOADS = 6
"""How many times longer it takes to weigh a plan that offloads."""

OFFLOADING_TIMES_OPERATIONS = 30_000
"""Moves of such plans times operations, up to which none is left out for that."""

HELD, NEARER, BUDGETS_IN_FLIGHT = (0.97, 0.8, 0.6, 0.4, 0.2, 0.1), (0.1, 0.05, 0.025), 4
"""Where several forwards are in flight: shares of the budget that these may keep for their backwards, how much nearer
to the best of them others are tried, in turn, and budgets whose plans are looked for where none is asked for."""

WORTH_MOVES = 1e-3
"""Share of the plain step that a plan which offloads has to add for moves to be tried."""

MOST_OVER = 2
"""Times what can leave in a forward that a plan may have over the budget to be looked at: operations wait for more."""

LOOSER = 4
"""How many plans are looked for that keep more than a budget, of which they offload what is over."""

HALVINGS, NEAR = 6, 1.01
"""How often a budget is halved, in logarithms, to find the least at which a plan that offloads takes no longer than it
may, and how near to the last one that ends."""


def _found(graph: Graph, goal: Goal, effort: int) -> Plan:
    """The plan for a goal, of a graph whose plans keep to what was told; one that offloads where that is better."""
    plain = plain_plan(graph)
    aim = _aim(graph, goal, plain)
    is_met = aim.budget is not None and plain.peak_bytes <= aim.budget
    if graph.host is None or not len(graph) or is_met:
        return _found_in_memory(graph, goal, effort)
    alone: Plan | SolveError
    try:
        alone = _found_in_memory(graph, goal, effort)
    except SolveError as error:
        alone = error
    known, asked = _known_of(graph), ("offloading", goal, effort)
    if asked not in known.answered:
        search = _Offloading(graph, known, _moves(effort, graph))
        if aim.budget is not None:
            search.learn_looser(aim.budget)
            known.learn_away([search.fastest(aim)])
        else:
            least = plain.peak_bytes if isinstance(alone, SolveError) else alone.peak_bytes
            search.learn_looser(least)
            known.learn_away([search.least(aim, least, goal)])
        if not is_late():
            known.answered.add(asked)
    found = aim.best(c for c in known.away if goal or _runs(graph, c) <= 2)
    is_better = found is not None and (
        isinstance(alone, SolveError)
        or (found.seconds < alone.added_seconds if aim.budget is not None else found.peak_bytes < alone.peak_bytes)
    )
    if found is not None and is_better:
        plain = replace(plain, budget_bytes=aim.budget, max_overhead=goal.max_overhead)
        return plain.deciding(found.decisions, "optimal")
    if isinstance(alone, SolveError):
        raise alone
    return alone


def _aim(graph: Graph, goal: Goal, plain: Plan) -> Aim:
    """What plans for a goal are held against; without one, a time that is fair."""
    overhead = goal.max_overhead if goal else FAIR_OVERHEAD
    seconds = None if overhead is None or goal.is_least else overhead * graph.step_seconds
    return Aim(plain.peak_bytes, graph.step_seconds, goal.budget_bytes(plain.peak_bytes), seconds)


class _Offloading:
    """The search for plans of a graph that offload; they start from those that are known, and from the plain model."""

    def __init__(self, graph: Graph, known: _Known, moves: int) -> None:
        self.graph, self.known, self.costs = graph, known, Replay(graph)
        self.moves = max(moves // SLOWER_BY_OFFLOADS, min(moves, OFFLOADING_TIMES_OPERATIONS // len(graph)))
        self.whole = weigh(self.costs, Decisions((saved(0, len(graph)),)))
        assert graph.host is not None
        self.leaving = int(graph.host.out * sum(op.forward_seconds for op in graph.operations))

    def learn_looser(self, budget: int) -> None:
        """Look for plans that keep more than a budget allows, by up to what can leave in a forward."""
        if not is_late():
            search = search_of(self.graph)
            search.offloading(budget, [budget / (budget + n * self.leaving / LOOSER) for n in range(1, LOOSER + 1)])
            self.known.learn(search.found)

    def within(self, budget: int, plans: Iterable[Candidate]) -> Candidate | None:
        """The fastest plan within a budget that offloads what one of these has too much, without a local search."""
        most = budget + MOST_OVER * self.leaving
        return offloading(self.costs, (plan for plan in (*plans, self.whole) if plan.peak_bytes <= most), budget)

    def fastest(self, aim: Aim) -> Candidate | None:
        """The fastest plan within the budget."""
        assert aim.budget is not None
        plans = self.known.plans
        found = aim.best([self.within(aim.budget, plans), *plans])
        if found is None:  # one that waits, rather than none
            found = offloading(self.costs, [*plans, self.whole], aim.budget)
        return self._polished(found, aim, self.moves)

    def least(self, aim: Aim, peak: int, goal: Goal) -> Candidate | None:
        """The plan with the least peak below ``peak`` that takes no longer than it may, by budgets."""
        low, high, best = max(1, lower_bound(self.graph)), peak, None
        plans = self.known.plans if goal else self.known.at_most_twice(self.graph)
        for _ in range(HALVINGS):
            if is_late() or high <= NEAR * low:
                break
            budget = int((low * high) ** 0.5)
            of_budget, found = replace(aim, budget=budget, seconds=None), self.within(budget, plans)
            if found is not None and aim.excess(found):
                found = self._polished(found, of_budget, self.moves // HALVINGS, is_nested=bool(goal))
            is_fair = found is not None and (bool(goal) or _runs(self.graph, found) <= 2)
            if found is not None and is_fair and not aim.excess(found):
                best, high = found, found.peak_bytes
            else:
                low = budget
        return best

    def _polished(self, found: Candidate | None, aim: Aim, moves: int, is_nested: bool = True) -> Candidate | None:
        """A plan made faster by a local search, where it is not as fast as the plain model."""
        added = 0.0 if found is None else found.seconds - self.whole.seconds
        if found is None or not moves or added <= WORTH_MOVES * self.graph.step_seconds:
            return found
        assert aim.budget is not None
        weigh_away = partial(timed_candidate, budget=aim.budget)
        return polished(self.costs, found, aim, moves, nested=is_nested, weigh_away=weigh_away)


def _found_in_memory(graph: Graph, goal: Goal, effort: int) -> Plan:
    """The plan for a goal that offloads nothing."""
    plain = plain_plan(graph)
    aim, known = _aim(graph, goal, plain), _known_of(graph)
    budget, may_be_plain = aim.budget, graph.may_be_plain
    plain = replace(plain, budget_bytes=budget, max_overhead=goal.max_overhead)
    if not len(graph) or (may_be_plain and budget is not None and plain.peak_bytes <= budget):
        return plain
    search, moves, is_new = search_of(graph, nested=bool(goal)), _moves(effort, graph), known.is_new(goal, effort)
    if is_new:
        _look(search, known, aim)
    found = known.best(graph, goal, aim)
    if found is None and not (goal or may_be_plain):  # what is told alone takes longer than is fair
        aim = replace(aim, seconds=TOLD_LONGER * known.plans[-1].seconds)
        if is_new:
            _look(search, known, aim)
        found = known.best(graph, goal, aim)
    if found is not None and moves and is_new:
        known.learn([polished(search.costs, found, aim, moves, nested=bool(goal))])
        found = known.best(graph, goal, aim)
    if not is_late():
        known.answered.add((goal, effort))
    if not goal.is_bounded and known.plans and not is_late():
        plain = replace(plain, floor=(known.plans[0].peak_bytes, known.plans[0].seconds))
    if budget is not None and found is None:
        least = plain.deciding(known.plans[0].decisions, "optimal")
        raise SolveError(_infeasible(graph, least, budget), least.peak_bytes)
    if found is None and not may_be_plain:
        share = known.plans[-1].seconds / graph.step_seconds
        most = (aim.seconds or 0.0) / graph.step_seconds
        raise SolveError(f"no plan found takes at most {most:.1%} more time; the least is {share:.1%}")
    slack = int(NEGLIGIBLE * plain.peak_bytes) if budget is None else 0
    if found is None or (may_be_plain and found.peak_bytes >= plain.peak_bytes - slack):
        return plain
    return plain.deciding(found.decisions, "optimal")


def _look(search: VariantSearch | Search, known: _Known, aim: Aim) -> None:
    """Look for plans; what is found is known then."""
    graph = search.graph
    if graph.in_flight > 1:
        _look_in_flight(search, known, aim)
    if aim.budget is not None:
        search.fastest(aim.budget)
        if aim.best([*search.found, *known.plans]) is None and aim not in known.answered:
            moves, least = LAST_MOVES * _moves(1, graph), min([search.least_peak, *known.plans])
            known.learn([polished(search.costs, least, replace(aim, budget=None), moves, enough=aim.budget)])
            if (fits := aim.best(known.plans)) is not None:
                known.learn([polished(search.costs, fits, aim, moves)])
            if not is_late():
                known.answered.add(aim)
    elif not search.nested:
        search_fairly(search, aim.seconds or 0.0)
        if not is_late():
            known.learn([min(search.least_peak, search_of(graph).least_peak)])
    elif aim.seconds is not None:
        search.within(aim.seconds)
    else:
        known.learn([search.least_peak, search_of(graph, nested=False).least_peak])
    known.learn(search.found)


def _look_in_flight(search: VariantSearch | Search, known: _Known, aim: Aim) -> None:
    """Look for plans where several forwards are in flight: for one forward's, within what all others leave it.

    Of a plan that keeps so many bytes for the backward the others do, too, which leaves the rest of a budget to one.
    """
    graph, least = search.graph, search.least_peak
    alone = search_of(replace(graph, in_flight=1), nested=search.nested).least_peak.decisions

    def learn(decisions: Decisions) -> float:
        """Remember a plan, as it is and inside a recomputation; the seconds of the faster that keeps the bound."""
        found = []
        for one in (decisions, inside_a_recomputation(graph, decisions)):
            with suppress(PlanError):  # an operation would run twice that must not
                found.append(weigh(search.costs, one))
        known.learn(found)
        return min((one.seconds for one in found if not aim.excess(one)), default=inf)

    def seconds(budget: int, share: float) -> float:
        """Those of the fastest plan found of which all forwards keep such a share of a budget."""
        held = share * budget / graph.in_flight
        of_one = search_of(_at_turn(graph, int(budget - graph.in_flight * held)), nested=search.nested)
        best = None if is_late() else of_one.fastest(int(budget - (graph.in_flight - 1) * held))
        if best is None:
            return inf
        return learn(replace(best.decisions, segments=up_to(best.decisions.segments, len(graph))))

    for decisions in (least.decisions, alone, Decisions((recomputed(0, len(graph)),))):
        learn(decisions)
    if aim.budget is None:
        for budget in np.geomspace(least.peak_bytes, aim.plain_bytes, BUDGETS_IN_FLIGHT + 1)[:-1]:
            for share in HELD:
                seconds(int(budget), share)
    else:
        tried = {share: seconds(aim.budget, share) for share in HELD}
        for nearer in NEARER:
            best = min(tried, key=tried.__getitem__)
            tried |= {one: seconds(aim.budget, one) for one in (best - nearer, best + nearer) if 0 < one < 1}


def _at_turn(graph: Graph, size: int) -> Graph:
    """The graph of one forward with so many more bytes once that is done, before its backward."""
    value = len(graph.values)
    turn = Operation("turn", "turn", writes=(value,), saves=(value,), backward_bytes=size, replayable=False)
    operations, values = (*graph.operations, turn), (*graph.values, Value("turn", 0))
    return replace(graph, operations=operations, values=values, outside=graph.outside + 1, in_flight=1, free=None)


@dataclass
class _Known:
    """The plans of a graph that were found for any goal, so that no two answers contradict.

    Attributes:
        plans: those that no other beats in both peak and time, by ascending peak.
        of_one_level: the same of those without levels and values that are recomputed one by one.
        away: the same of those that offload.
        answered: the goals and efforts, the budgets that nothing fitted, and the numbers of points of a curve, for
            which there was time to look.
    """

    plans: list[Candidate] = field(default_factory=list)
    away: list[Candidate] = field(default_factory=list)
    of_one_level: list[Candidate] = field(default_factory=list)
    answered: set[object] = field(default_factory=set)

    def is_new(self, goal: Goal, effort: int) -> bool:
        """Whether no search of as much effort was done for a goal."""
        return not self.answered.intersection((goal, other) for other in EFFORTS if other >= effort)

    def learn(self, found: Iterable[Candidate]) -> None:
        """Remember plans."""
        found = list(found)
        flat = (c for c in found if not c.decisions.policies and all(s.depth <= 1 for s in c.decisions.segments))
        self.plans = front_of([*self.plans, *found])
        self.of_one_level = front_of([*self.of_one_level, *flat])

    def learn_away(self, found: Iterable[Candidate | None]) -> None:
        """Remember plans that offload."""
        self.away = front_of([*self.away, *filter(None, found)])

    def best(self, graph: Graph, goal: Goal, aim: Aim) -> Candidate | None:
        """The plan for a goal."""
        if goal:
            return aim.best(self.plans)
        return fairest(self.at_most_twice(graph), aim.plain_seconds, aim.seconds or 0.0)

    def at_most_twice(self, graph: Graph) -> list[Candidate]:
        """Those plans in which no operation runs more than twice."""
        self.of_one_level = front_of([*self.of_one_level, *(c for c in self.plans if _runs(graph, c) <= 2)])
        return self.of_one_level


def _runs(graph: Graph, plan: Candidate) -> int:
    """How often the operation runs that a plan runs most often."""
    runs = Schedule(graph, plan.decisions).runs
    return max(Counter(t for run in runs for t in run.program).values(), default=0)


_known: dict[int, _Known] = {}


def _known_of(graph: Graph) -> _Known:
    if id(graph) not in _known:
        _known[id(graph)] = _Known()
        weakref.finalize(graph, _known.pop, id(graph))
    return _known[id(graph)]


EFFORTS = {0: 0, 1: 10_000, 2: 50_000, 3: 400_000}
"""Moves of the local search by ``effort``."""

LAST_MOVES = 5
"""Times as many moves as with effort 1, once for each budget that nothing fits which was found."""

MOVES_PER_OPERATION, MOVES_TIMES_OPERATIONS, FEWEST_MOVES = 120, 4_000_000, 1_000
"""Most moves with effort 1: short programs have few, and in long ones each takes longer; but no fewer than those."""

TOLD_LONGER = 1.1
"""Times as long as what is told takes at least, for a plan without a goal where that is more than is fair."""

SLOWER = 50
"""How many times longer a simulation takes where none is compiled."""


def _moves(effort: int, graph: Graph) -> int:
    moves = EFFORTS[effort]
    if effort == 1:
        most = max(FEWEST_MOVES, MOVES_TIMES_OPERATIONS // len(graph))
        moves = min(moves, MOVES_PER_OPERATION * len(graph), most)
    return moves if library() is not None else moves // SLOWER


def _infeasible(graph: Graph, least: Plan, budget: int) -> str:
    cost = simulate(graph, least)
    op = graph.operations[cost.peak_event.operation]
    where = " ".join(part for part in (op.module, f"({op.source})" if op.source else "") if part)
    largest = sorted(((graph.values[v].bytes, graph.values[v].name) for v in cost.peak_values), reverse=True)[:5]
    tensors = ", ".join(f"{name} {size / MIB:.1f} MiB" for size, name in largest)
    return (
        f"no plan found peaks at or below {budget / MIB:.1f} MiB ({budget} bytes); the smallest peak is "
        f"{least.peak_bytes / MIB:.1f} MiB ({least.peak_bytes} bytes) at {least.overhead:.1%} overhead. It is reached "
        f"in the {cost.peak_event.phase} of operation {op.name}, {op.target} {where}, with these alive: {tensors}"
    )


SOLVERS: dict[str, Solver] = {"optimal": optimal, "none": lambda graph, goal: plain_plan(graph), **REFERENCES}
"""All solvers by the names that :func:`ogc.solve` takes; only ``"optimal"`` takes a goal."""
