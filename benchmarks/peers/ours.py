"""Our plans beside other ways to save memory: what they save or recompute, ours at less of the other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ogc
from ogc.graph import Form, Operation, RuntimeCosts

from .row import PeerRow

OVERHEAD = 0.2
"""The share of a plain step's time that one of our rows may recompute."""

POINTS = 48
"""Points of the frontier, beside those at others' memory."""


def our_plans(graph: ogc.Graph, peers: Sequence[PeerRow]) -> list[tuple[str, ogc.Plan | None, float]]:
    """Labels, plans and the seconds it took to find them; a plan that answers several questions is one row.

    The plans at others' memory are points of the frontier by time, those with others' FLOPs of one by FLOPs as well.
    """
    found: list[tuple[str, str, ogc.Plan | None, float]] = []

    def solved(kind: str, max_overhead: float | None) -> None:
        start = time.perf_counter()
        plan = ogc.solve(graph, max_overhead=max_overhead)
        found.append((kind, "", plan, time.perf_counter() - start))

    solved("least peak", None)
    solved(f"{OVERHEAD:.0%} overhead", OVERHEAD)
    plain, *others = (row for row in peers if not row.reason)
    start = time.perf_counter()
    plans = ogc.frontier(graph, points=POINTS, budgets=[row.peak_bytes for row in others]).plans
    seconds = time.perf_counter() - start
    of_few_flops = [*plans, *frontier_by_flops(graph)]
    both_seconds = time.perf_counter() - start
    for row in others:
        fitting = (plan for plan in plans if plan.peak_bytes <= row.peak_bytes)
        plan = min(fitting, key=lambda plan: (plan.recomputed_seconds, plan.peak_bytes), default=None)
        found.append(("memory of", row.name, plan, seconds))
        more = max(0, row.flops - plain.flops)
        plan = min((p for p in of_few_flops if p.recomputed_flops <= more), key=_size)
        found.append(("FLOPs of", row.name, plan, both_seconds))
    return _by_plan(found)


def frontier_by_flops(graph: ogc.Graph) -> list[ogc.Plan]:
    """The plans of a frontier whose time is that of FLOPs, nearly: what has none takes a thousandth of its time."""
    flops = sum(op.forward_flops for op in graph.operations)
    if not flops:
        return []
    rate = flops / graph.forward_seconds

    def seconds(flops: int, measured: float) -> float:
        return flops / rate + measured / 1000

    def in_flops(op: Operation, form: Form) -> Form:
        return replace(
            form,
            forward_seconds=seconds(op.forward_flops, form.forward_seconds),
            backward_seconds=seconds(op.backward_flops, form.backward_seconds),
            repeat_seconds=None if form.repeat_seconds is None else seconds(op.forward_flops, form.repeat_seconds),
        )

    operations = tuple(
        replace(
            op,
            forward_seconds=seconds(op.forward_flops, op.forward_seconds),
            backward_seconds=seconds(op.backward_flops, op.backward_seconds),
            again_seconds=seconds(op.again_flops, op.again_seconds),
            repeat_seconds=None if op.repeat_seconds is None else seconds(op.forward_flops, op.repeat_seconds),
            low_memory=op.low_memory and in_flops(op, op.low_memory),
        )
        for op in graph.operations
    )
    plans = ogc.frontier(replace(graph, operations=operations, runtime=RuntimeCosts()), points=POINTS).plans
    return [ogc.make_plan(graph, plan.decisions, plan.solver) for plan in plans]


def _size(plan: ogc.Plan) -> tuple[int, float]:
    return plan.peak_bytes, plan.recomputed_seconds


def _by_plan(
    found: Sequence[tuple[str, str, ogc.Plan | None, float]],
) -> list[tuple[str, ogc.Plan | None, float]]:
    """Questions with the same answer, put together; where that is the plain model it has its row already."""
    groups: dict[Any, list[tuple[str, str, ogc.Plan | None, float]]] = {}
    for entry in found:
        plan = entry[2]
        if plan is None:
            groups[entry[:2]] = [entry]
        elif not plan.is_plain:
            groups.setdefault(plan.decisions, []).append(entry)
    rows = []
    for group in groups.values():
        kinds: dict[str, list[str]] = {}
        for kind, name, _, _ in group:
            kinds.setdefault(kind, []).append(name)
        label = "; ".join(f"{kind} {', '.join(names)}".strip() for kind, names in kinds.items())
        rows.append((f"ogc: {label}", group[0][2], group[0][3]))
    return rows
