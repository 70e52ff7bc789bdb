"""From saved decisions to plans for the graphs at hand, weighed by the simulator."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from ..errors import InputError, PlanError
from ..graph import Graph
from .plan import Plan, make_plan, plain_plan
from .saving import WHOLE, Fingerprint, SavedDecisions, SavedPlan, torch_version


def load_plan(path: str | os.PathLike[str], graph: Graph) -> Plan:
    """The plan that ``plan.save(path)`` wrote, for a graph that is the same but for what its operations weigh.

    Args:
        path: of the file.
        graph: from :func:`ogc.parse`, with the same arguments as when the plan was made; the simulator weighs the
            plan on it. One of :func:`ogc.slice_batch`, or one part's of several, is planned through
            ``ogc.optimize(model, sample_input, plan=path)``.

    Returns:
        The plan; hand it to :func:`ogc.apply`.

    Raises:
        InputError: this is no graph.
        OSError: the file cannot be read.
        PlanError: the file is no plan, of an unknown version, or for another graph; the message says in what that
            differs.
    """
    return plan_on(graph, SavedPlan.from_file(path), os.fspath(path))


def plan_from_text(text: str, graph: Graph) -> Plan:
    """The plan of a graph that a text of :func:`text_of` stands for.

    Raises:
        InputError, PlanError: as :func:`load_plan` does.
    """
    return plan_on(graph, SavedPlan.from_text(text))


def text_of(plan: Any) -> str:
    """A plan of any kind as a JSON text, such as ``plan.save`` writes to a file.

    Raises:
        PlanError: the plan does not know its graph.
    """
    text: str = plan.as_saved().text
    return text


def plan_on(graph: Graph, saved: SavedPlan, source: str = "the plan") -> Plan:
    """The plan that was saved for a graph, weighed on it.

    Raises:
        InputError: this is no graph.
        PlanError: it was saved for another graph, or for parts of a model.
    """
    if not isinstance(graph, Graph):
        raise InputError(
            f"graph must be a Graph, as ogc.parse(model, sample_input) returns, not {type(graph).__name__}"
        )
    if saved.kind != WHOLE:
        raise PlanError(
            f"{source} has the plans of a model's parts, not one plan of a graph; hand it to "
            "ogc.optimize(model, sample_input, plan=...)"
        )
    (only,) = saved.plans
    if saved.stretches and (saved.slices, saved.stretches) != (graph.slices, graph.sliced):
        raise PlanError(
            f"{source} is for {len(saved.stretches)} stretches in {saved.slices} slices of the batch, which this graph "
            f"does not run so; use ogc.optimize(model, sample_input, batch_slices={saved.slices}, plan=...)"
        )
    plan = restored(graph, only, saved, source)
    return replace(plan, budget_bytes=saved.budget_bytes, max_overhead=saved.max_overhead)


def restored(graph: Graph, one: SavedDecisions, saved: SavedPlan, source: str = "the plan") -> Plan:
    """One of the plans that were saved, for its graph.

    Raises:
        PlanError: it was saved for another graph; or its decisions cannot be carried out.
    """
    if difference := one.fingerprint.difference(Fingerprint.of(graph)):
        of_part = f" for part {one.name}" if one.name else ""
        is_other = saved.torch != torch_version()
        made = f"; it was saved with torch {saved.torch}, and this is {torch_version()}" if is_other else ""
        raise PlanError(f"{source} does not fit the graph{of_part}, which has {difference}{made}")
    return plain_plan(graph) if one.decisions.is_plain else make_plan(graph, one.decisions, saved.solver)
