"""Equal plans on all ranks, although each measures other times: the plan that a rank finds first is everybody's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from ..errors import PlanError
from ..graph import Graph
from ..plan import Plan, make_plan
from ..plan.decisions import Decisions
from ..plan.plan import plain_plan
from ..plan.saving import structure_of
from ..torch_state.ranks import first_of_all

log = logging.getLogger(__name__)


def agreed_plan(graph: Graph, asked: object, make: Callable[[], Plan]) -> Plan:
    """The plan of the rank that was the first to plan an equal graph by the same goal.

    Args:
        graph: weighed on this rank; times do not count.
        asked: the goal; its text counts.
        make: plans; called where no rank has a plan yet.
    """
    made: list[Plan] = []

    def own() -> Plan:
        made.append(make())
        return made[0]

    def answer() -> tuple[Decisions, str, int | None]:
        plan = own()
        return plan.decisions, plan.solver, plan.budget_bytes

    decisions, solver, budget = first_of_all(question(asked, [graph]), answer)
    if made and decisions == made[0].decisions:
        return made[0]
    try:
        plan = plain_plan(graph) if decisions.is_plain else make_plan(graph, decisions, solver)
        if budget is not None and plan.peak_bytes > budget:  # sizes were measured, and are others there
            raise PlanError(f"it takes {plan.peak_bytes} bytes on this rank, more than {budget}")
    except PlanError as error:
        log.info("the plan of another rank does not fit: %s", error)
        return made[0] if made else own()
    return replace(plan, solver=solver, budget_bytes=budget)


def question(asked: object, graphs: Iterable[Graph]) -> str:
    """What has the same answer on all ranks that compute the same."""
    return repr((asked, list(map(structure_of, graphs))))
