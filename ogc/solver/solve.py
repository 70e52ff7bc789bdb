"""The solver's front door: a graph in, a described plan out."""

from __future__ import annotations

from collections.abc import Sequence

from ..graph import Graph
from ..plan import Plan, Segment, cut_into_segments
from .interval import least_peak_plan
from .simulate import simulate


def solve(graph: Graph) -> Plan:
    """The plan with the least peak over all interval segmentations, and the least recomputation at it.

    Args:
        graph: the weighted graph, from :func:`ogc.parse` or made by hand.

    Returns:
        The plan. If nothing beats the plain model it has one saved segment (``plan.is_plain``).
    """
    if not len(graph):
        return make_plan(graph, [0], [])
    cuts, recompute = least_peak_plan(graph)
    plan = make_plan(graph, cuts, recompute)
    if plan.peak_bytes >= plan.plain_peak_bytes:
        return make_plan(graph, [0, len(graph)], [False])
    return plan


def make_plan(graph: Graph, cuts: Sequence[int], recompute: Sequence[bool], solver: str = "interval") -> Plan:
    """The plan of the given segmentation, weighed by the simulator.

    Args:
        graph: the weighted graph.
        cuts: positions from 0 to ``len(graph)``, all in ``graph.cuts``.
        recompute: for each segment, whether it is recomputed (else saved).

    Raises:
        PlanError: the cuts are not cuts of the graph, or an operation would run twice that must not.
    """
    segments = cut_into_segments(graph, cuts, recompute) if len(graph) else ()
    cost = simulate(graph, segments)
    plain = simulate(graph, [Segment(0, len(graph), False)] if len(graph) else [])
    return Plan(
        segments=segments,
        peak_bytes=cost.peak_bytes,
        plain_peak_bytes=plain.peak_bytes,
        step_seconds=graph.step_seconds,
        step_flops=graph.step_flops,
        recomputed_seconds=cost.recomputed_seconds,
        recomputed_flops=cost.recomputed_flops,
        solver=solver,
        rows=tuple(_row(graph, number, segment) for number, segment in enumerate(segments)),
    )


def _row(graph: Graph, number: int, segment: Segment) -> tuple[str, ...]:
    inside = graph.operations[segment.start : segment.stop]
    modules = list(dict.fromkeys(op.module for op in inside if op.module))
    span = modules[0] if len(modules) == 1 else f"{modules[0]} … {modules[-1]}" if modules else ""
    kept = sum(graph.values[v].bytes for v in segment.checkpoints if graph.producers[v] < segment.start)
    seconds = sum(op.forward_seconds for op in inside)
    again = sum(graph.operations[t].forward_seconds for t in segment.program)
    share = f"{again / seconds:.0%}" if segment.recompute and seconds else "-"
    mode = "recomputed" if segment.recompute else "saved"
    return (str(number), f"{segment.start}-{segment.stop - 1}", span, mode, f"{kept / 1e6:.2f}", share)
