"""The plan of a model in parts that was saved, taken up part by part."""

from __future__ import annotations

from collections.abc import Collection

from ..errors import PlanError
from ..graph import Graph
from ..plan import Fingerprint, Plan, SavedPlan, part_cost, plain_plan, restored
from ..plan.saving import PARTS, SavedDecisions
from .choice.ways import Way


class SavedParts:
    """What was saved for parts, each for one kind of calls.

    Raises:
        PlanError: it is a plan for a whole model.
    """

    def __init__(self, saved: SavedPlan) -> None:
        if saved.kind != PARTS:
            raise PlanError("the plan is for a model that is planned as a whole, but this one is planned in parts")
        self.saved = saved
        self.used: set[SavedDecisions] = set()

    def ways(self, name: str, graph: Graph) -> tuple[Way, ...]:
        """The saved way to run a part, then the plain one; that alone if no plan of the part was better.

        Where the plan was made, the forward may have left other parts out: one of an equal part does as well.

        Raises:
            PlanError: nothing was saved for such a part; the message says in what it differs, or that it is new.
        """
        fingerprint, plain = Fingerprint.of(graph), _way(graph, plain_plan(graph))
        if any((one.name, one.fingerprint) == (name, fingerprint) for one in self.saved.idle):
            return (plain,)
        named = [one for one in self.saved.plans if one.name == name]
        for one in (*named, *self.saved.plans):
            if one.fingerprint == fingerprint:
                self.used.add(one)
                return _way(graph, restored(graph, one, self.saved)), plain
        for one in (*named, *self.saved.idle):
            if one.name == name:
                restored(graph, one, self.saved)  # which says in what it differs
        raise PlanError(f"the plan has nothing for part {name}; it was saved for another model, or other parts of it")

    def check_all_used(self, late: Collection[str]) -> None:
        """Raise PlanError if a part is no more; one that the forward has left out, by ``late``, may be planned yet."""
        known = {one.name for one in self.used}
        for one in self.saved.plans:
            if one.name not in known and one.name not in late:
                raise PlanError(f"the plan is for a model with a part {one.name}, which is none here")


def _way(graph: Graph, plan: Plan) -> Way:
    return Way(plan, part_cost(graph, plan))
