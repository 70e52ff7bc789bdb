"""Chooses which stretches of a model run slice by slice: those that bound the peak, one after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import SolveError
from ..graph import Graph
from ..parser import parse
from ..parser.passes.stretches import Stretch
from ..plan import Plan, simulate
from ..plan.simulate import plain_peak
from ..solver import Budget, solve

Stretches = tuple[Stretch, ...]


@dataclass(frozen=True)
class Choice:
    """A graph with ``stretches`` sliced, and the plan that the wish gets on it, if any."""

    graph: Graph
    stretches: Stretches
    plan: Plan | None


def slice_batch(
    model: torch.nn.Module,
    sample_input: Any,
    graph: Graph,
    *,
    slices: int,
    memory_budget: Budget | None = None,
    max_overhead: float | None = None,
    **parsing: Any,
) -> tuple[Graph, Plan]:
    """The graph and the plan with those stretches run slice by slice that make the plan better.

    Starts from the plan without slices: the stretch that holds most of what is alive at the peak is sliced, with those
    like it, and the plan made anew, until none holds anything there. The simulator judges which plan is the best.
    Stretches are chosen by estimated weights; the plan is made on weights found like those of ``graph``.

    Args:
        model: what ``graph`` was parsed from.
        sample_input: the same as for ``graph``.
        graph: from :func:`ogc.parse`, without slices.
        slices: into how many parts a stretch divides the batch.
        memory_budget, max_overhead: as for :func:`ogc.solve`.
        parsing: further arguments of :func:`ogc.parse`, the same as for ``graph``.

    Raises:
        SolveError: nothing fits the budget, with slices or without; the message is that of the last try.
    """
    failure: SolveError | None = None

    def choose(stretches: Stretches, profile: str) -> Choice:
        nonlocal failure
        sliced = graph
        if stretches:
            sliced = sliced_along(stretches, model, sample_input, graph, slices=slices, profile=profile, **parsing)
        try:
            return Choice(sliced, stretches, solve(sliced, memory_budget=memory_budget, max_overhead=max_overhead))
        except SolveError as error:
            failure = error
            return Choice(sliced, stretches, None)

    def rank(choice: Choice) -> tuple[bool, float, float]:
        if choice.plan is None:
            return True, 0.0, 0.0
        costs = choice.plan.peak_bytes, choice.plan.overhead
        return False, *(costs if memory_budget is None else costs[::-1])

    choices = [choose((), graph.profile)]
    while hot := _hot_stretches(choices[-1]):
        choices.append(choose((*choices[-1].stretches, *hot), "estimate"))
    best = min(choices, key=rank)
    if best.stretches and graph.profile != "estimate":
        best = min(choices[0], choose(best.stretches, graph.profile), key=rank)
    if best.plan is None:
        assert failure is not None
        raise failure
    return best.graph, best.plan


def sliced_along(
    stretches: Stretches,
    model: torch.nn.Module,
    sample_input: Any,
    graph: Graph,
    *,
    slices: int,
    profile: str,
    **parsing: Any,
) -> Graph:
    """The graph with these stretches in slices; the arguments are those of :func:`slice_batch`.

    Raises:
        InputError: the graph has no such stretch.
    """
    leaves = {op.module for op in graph.operations[: graph.end] if op.target.startswith("leaf ")}
    sliced = parse(
        model,
        sample_input,
        profile=profile,
        stretches=stretches,
        slices=slices,
        plain_peak_bytes=plain_peak(graph),
        leaf_modules=leaves,
        **parsing,
    )
    return replace(sliced, slices=slices, sliced=stretches, unsliced=replace(graph, program=None))


def _hot_stretches(choice: Choice) -> Stretches:
    """The stretch that holds most of what is alive at the peak, if one holds anything and slicing may still help.

    With it those that do the same, such as the same block of every other layer, which would be the next ones.
    """
    graph, plan = choice.graph, choice.plan or solve(choice.graph)
    if plan.is_plain and choice.stretches:
        return ()
    cost = simulate(graph, plan)
    position = {op.name: t for t, op in enumerate(graph.operations)}
    held = {}
    for stretch in graph.stretches:
        first, last = (position[name] for name in stretch)
        inside = [v for v in cost.peak_values if first <= graph.producers[v] < last]
        held[stretch] = sum(graph.values[v].bytes for v in inside)
        if first <= cost.peak_event.operation <= last:
            op = graph.operations[cost.peak_event.operation]
            held[stretch] += op.backward_bytes if cost.peak_event.phase == "backward" else op.scratch_bytes
    hot = max(held, key=held.__getitem__, default=None)
    if hot is None or not held[hot]:
        return ()

    def described(stretch: Stretch) -> list[tuple[str, tuple[int, ...]]]:
        first, last = (position[name] for name in stretch)
        operations = graph.operations[first : last + 1]
        return [(op.target, tuple(graph.values[v].bytes for v in op.writes)) for op in operations]

    return tuple(stretch for stretch in graph.stretches if described(stretch) == described(hot))
