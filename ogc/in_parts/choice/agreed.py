"""The same choice on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ...errors import PlanError
from ...graph import Graph
from ...plan import Decisions, make_plan, part_cost
from ...torch_state.ranks import first_of_all
from .combine import Choice
from .ways import Way

log = logging.getLogger(__name__)

Ways = list[tuple[Way, ...]]


def agreed_choice(asked: str, graphs: Sequence[Graph], ways: Ways, choice: Choice, solver: str) -> tuple[Ways, Choice]:
    """The choice of the first rank that made one, and the ways that it is among.

    Args:
        asked: what all ranks ask that choose for the same parts by the same wish.
        graphs: of the parts.
        ways: to run each of them, as they were found here; the very same list is returned where it needs no other.
        choice: made here, a number for each part.
        solver: the name of what plans.
    """
    own = tuple(of[number].plan.decisions for of, number in zip(ways, choice, strict=True))
    found = first_of_all(asked, lambda: own)
    if found == own:
        return ways, choice
    try:
        chosen = [_way(*one, solver) for one in zip(graphs, ways, found, strict=True)]
    except PlanError as error:
        log.info("the plans of another rank do not fit: %s", error)
        return ways, choice
    ways = [of if way in of else (way, *of) for way, of in zip(chosen, ways, strict=True)]
    return ways, tuple(of.index(way) for way, of in zip(chosen, ways, strict=True))


def _way(graph: Graph, ways: tuple[Way, ...], decisions: Decisions, solver: str) -> Way:
    """The way with these decisions; that another rank chose it means that it need not be among those found here."""
    known = next((way for way in ways if way.plan.decisions == decisions), None)
    if known is not None:
        return known
    plan = make_plan(graph, decisions, solver)
    return Way(plan, part_cost(graph, plan))
