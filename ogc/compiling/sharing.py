"""One budget in bytes for all graphs of a model: where dynamo breaks it, each graph waits for the ones behind it.

The backward of a graph comes when those behind it are done, so that the peak of a step is that of one graph, and what
the ones before it have saved, with the gradients of parameters that the ones behind it have left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..graph import Graph
from ..plan import Plan
from ..plan.schedule import FORWARD, Schedule
from ..solver.solve import frontier

POINTS = 12
"""Plans of each graph that are weighed against those of the others."""


class Choice(NamedTuple):
    """Plans for the graphs that a step has called so far: bytes that they save, seconds that they add."""

    saved_bytes: int
    seconds: float
    plans: tuple[Plan, ...]


def saved_bytes(graph: Graph, plan: Plan) -> int:
    """Bytes that are alive when the forward of a plan is done."""
    needs = Schedule(graph, plan.decisions).last_needs
    return sum(
        value.bytes
        for v, value in enumerate(graph.values)
        if needs.get((FORWARD, v), -1) >= len(graph) or value.is_output
    )


def shared(calls: Sequence[Graph], budget: int) -> tuple[Plan, ...] | None:
    """The plans with which a step takes the least time within a budget in bytes; None where none fit.

    Args:
        calls: the graphs in the order in which their forwards run. One that runs several times has one plan.
        budget: bytes for all of them.

    Returns:
        A plan for each call.
    """
    again = {id(graph) for graph in calls if sum(one is graph for one in calls) > 1}
    points = POINTS if len(again) < 2 else 4
    plans = {
        id(graph): [(saved_bytes(graph, plan), plan) for plan in frontier(graph, points=points).plans]
        for graph in calls
    }
    first = [next(n for n, one in enumerate(calls) if one is graph) for graph in calls]
    best = [Choice(0, 0.0, ())]
    for n, graph in enumerate(calls):
        left = sum(one.left_bytes for one in calls[n + 1 :])
        found = [
            Choice(known.saved_bytes + more, known.seconds + plan.added_seconds, (*known.plans, plan))
            for known in best
            for more, plan in plans[id(graph)]
            if known.saved_bytes + plan.peak_bytes + left <= budget and (first[n] == n or known.plans[first[n]] is plan)
        ]
        by_plans: dict[tuple[int, ...], list[Choice]] = {}
        for one in found:  # plans of what runs again are part of the state
            key = tuple(id(plan) for plan, call in zip(one.plans, calls, strict=False) if id(call) in again)
            by_plans.setdefault(key, []).append(one)
        best = [one for group in by_plans.values() for one in _not_beaten(group)]
    return min(best, key=lambda one: one.seconds).plans if best else None


def least_shared(calls: Sequence[Graph]) -> int:
    """The least budget that plans for all graphs keep to, to a percent."""
    low, high = 0, sum(frontier(graph, points=POINTS).plans[-1].peak_bytes for graph in calls)
    while high - low > high // 100:
        middle = (low + high) // 2
        low, high = (low, middle) if shared(calls, middle) else (middle, high)
    return high


def _not_beaten(choices: Sequence[Choice]) -> list[Choice]:
    """Those that no other beats in both bytes and seconds."""
    kept: list[Choice] = []
    for one in sorted(choices, key=lambda one: one[:2]):
        if not kept or one.seconds < kept[-1].seconds:
            kept.append(one)
    return kept
