"""The ways to run one part: plans from which the best combination is chosen.

Alone, a plan is good if its peak is low. As one part among others it is good, too, if it keeps little until its
backward, whatever that backward takes. So each plan of the frontier is also tried inside a run again of the whole part,
which keeps nothing but what the part was given, or what is costly to make.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import le

from ...errors import PlanError
from ...graph import Graph
from ...plan import (
    Decisions,
    PartCost,
    Plan,
    SavedPlan,
    Segment,
    make_plan,
    part_cost,
    recomputed,
    restored,
    saved,
)
from ...plan.saving import WAYS
from ...solver import frontier, solve
from ...solver.candidates import worth_keeping

POINTS = 10
"""Peaks that the frontier of a part is looked at for."""

MOST = 40
"""Ways to run a part; more would take time for nothing."""


@dataclass(frozen=True)
class Way:
    """A plan of a part, and what it costs the whole."""

    plan: Plan
    cost: PartCost

    def is_as_good_as(self, other: Way) -> bool:
        """Whether this one takes no more of anything than another."""
        return all(map(le, _amounts(self), _amounts(other)))


def _amounts(way: Way) -> tuple[float, ...]:
    """What less of is better, the most important first."""
    return way.cost.seconds, way.cost.kept_bytes, way.cost.backward_bytes, way.cost.forward_bytes


def ways_of(graph: Graph, solver: str = "optimal") -> tuple[Way, ...]:
    """The ways to run a part that no other way is as good as; the plain model is the last.

    Args:
        graph: of the part.
        solver: as for :func:`ogc.solve`; with another than ``"optimal"`` its plan is the only one, beside the plain.
    """
    plans: list[Plan] = []
    if solver == "optimal":
        plans = [plan for plan in frontier(graph, points=POINTS).plans if not plan.is_plain]
        inner = [*(plan.decisions for plan in plans), Decisions((saved(0, len(graph)),))]
        plans += _allowed(graph, (_inside_a_run_again(graph, decisions) for decisions in inner))
        plans += _allowed(graph, ([recomputed(0, len(graph), kept=kept)] for kept in worth_keeping(graph)))
    elif solver != "none":
        plans = [solve(graph, solver=solver)]
    plain, *others = (Way(plan, part_cost(graph, plan)) for plan in (solve(graph, solver="none"), *plans))
    return (*(_best([plain, *others]) if solver == "optimal" else others), plain)


def saved_ways(ways: Iterable[Way], solver: str) -> SavedPlan:
    """What :func:`ways_by` makes them of."""
    plans = [way.plan.as_saved() for way in ways]
    return SavedPlan(tuple(plan for saved in plans for plan in saved.plans), WAYS, solver)


def ways_by(graph: Graph, saved: SavedPlan) -> tuple[Way, ...]:
    """The ways to run a part that were saved, with what they cost now.

    Raises:
        PlanError: they are for another graph, or are not such ways.
    """
    plans = [restored(graph, one, saved) for one in saved.plans]
    if saved.kind != WAYS or not plans or not plans[-1].is_plain:
        raise PlanError("the text does not have the ways to run a part, of which the plain module is the last")
    return tuple(Way(plan, part_cost(graph, plan)) for plan in plans)


def _allowed(graph: Graph, decisions: Iterable[Decisions | list[Segment]]) -> Iterator[Plan]:
    """The plans of those decisions that the graph allows."""
    for decision in decisions:
        with suppress(PlanError):
            yield make_plan(graph, decision, "optimal")


def _inside_a_run_again(graph: Graph, decisions: Decisions) -> Decisions:
    """The segments as parts of one that is run again, as far as nothing in it must run once."""
    groups: list[list[Segment]] = [[]]
    for segment in decisions.segments:
        if all(op.replayable for op in graph.operations[segment.start : segment.stop]):
            groups[-1].append(segment)
        else:
            groups += [[segment], []]
    return replace(decisions, segments=tuple(_joined(group) for group in groups if group))


def _joined(group: list[Segment]) -> Segment:
    first, last = group[0], group[-1]
    if len(group) == 1 and ((first.parts and not first.kept) or first.start + 1 == first.stop):
        return first
    return recomputed(first.start, last.stop, *group)


def _best(ways: list[Way]) -> list[Way]:
    """Those that no other is as good as in every respect, without the plain one; the most frugal first."""
    front: list[Way] = []
    for way in sorted(ways, key=_amounts):
        if not any(other.is_as_good_as(way) for other in front):
            front.append(way)
    front = [way for way in front if not way.plan.is_plain]
    return sorted(front, key=lambda way: (way.cost.kept_bytes, way.cost.backward_bytes))[:MOST]
