"""Plans for calls that nobody planned for: of parts, of submodules that the sample left out, of units that are sharded.

A unit is planned with its first call, when its parameters are there. What it recomputes in its backward runs between
the hooks that gather its parameters for that and let go of them: it needs no gathering of its own.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import OgcError, SolveError
from ..graph import Graph
from ..parser import hooked_modules, reuse
from ..plan import Plan, SavedPlan, plain_plan, simulate
from ..plan.saving import structure_of
from ..plan.simulate import plain_peak
from ..planning import GraphAndPlan, Meets, OfGraph, PlanOptions, Replanner, look_for
from ..program.structures import Call
from ..solver import Goal, SolveOptions
from .find import Part, is_alike, look_of
from .joined import REGION_BACK, Joined, PartCost
from .plan import frugal

SLACK = 1.001
"""What a part may take more than its share: sizes are whole numbers of elements."""


@dataclass(frozen=True)
class Share:
    """What the plan of a part takes, as the measure for its other plans.

    With a goal in bytes the same bytes hold for calls of any size, else the same share of their plain peak or time.
    """

    options: PlanOptions
    plan: Plan
    cost: PartCost

    @property
    def meets(self) -> Meets | None:
        """What tells whether a plan keeps to the share; None without a goal."""
        return self._keeps if self.options.goal.is_bounded else None

    def _keeps(self, graph: Graph, plan: Plan) -> bool:
        if self.options.goal.max_overhead is not None:
            seconds = 0.0 if plan.is_plain else simulate(graph, plan).added_seconds
            return seconds <= SLACK * self.plan.overhead * graph.step_seconds
        (kept, most), cost = self._limits(graph), PartCost.of(graph, plan)
        return cost.saved_bytes <= kept and cost.most <= most

    def _limits(self, graph: Graph) -> tuple[int, int]:
        """The most bytes to be kept, and alive at once."""
        share = 1.0 if self.options.goal.is_in_bytes else plain_peak(graph) / max(1, self.plan.plain_peak_bytes)
        return int(SLACK * share * self.cost.saved_bytes), max(1, int(SLACK * share * self.cost.most))

    def plan_of(self, graph: Graph) -> Plan:
        """The fastest plan that keeps to the share; a frugal one if none does."""
        (kept, most), solving = self._limits(graph), self.options.solving
        is_for_time = solving.goal.max_overhead is not None
        with suppress(SolveError):
            plan = _solved(solving, graph, most - kept, Goal(most))
            if not is_for_time or self._keeps(graph, plan):
                return plan
        if not is_for_time:
            return frugal(solving, graph)
        return _solved(solving, graph, most - kept, Goal(max_overhead=SLACK * self.plan.overhead))

    def planner(self, name: str, module: torch.nn.Module) -> Replanner | None:
        """What plans a part for calls unlike its sample."""
        if self.options.solving.solver == "none":
            return None

        def make(module: torch.nn.Module, call: Call) -> GraphAndPlan:
            with self.options.while_planning():
                graph = self.options.of_submodule(name, module).parse(module, call)
                return look_for(_LatePlan(self.options, graph, self))

        budget = self.cost.most if self.options.goal.is_in_bytes else None
        return Replanner(make, budget, hooked_modules(dict(module.named_modules())), self.meets)


@dataclass(frozen=True)
class _LatePlan(OfGraph):
    """The plan of a part: one that keeps to a share, or else as little as the goal allows."""

    share: Share | None

    @property
    def asked(self) -> tuple[Any, ...]:
        return "part", structure_of(self.graph), self.share and self.share.plan.decisions

    def taken_up(self, saved: SavedPlan) -> GraphAndPlan:
        return self.restored(saved)

    def searched(self) -> GraphAndPlan:
        plan = frugal_plan(self.options.solving, self.graph) if self.share is None else self.share.plan_of(self.graph)
        return self.graph, plan


def _solved(solving: SolveOptions, graph: Graph, beside: int, goal: Goal) -> Plan:
    """The plan of a part for a goal where so many bytes are alive ``beside`` those that it keeps for its backward.

    Raises:
        SolveError: nothing fits the budget.
    """
    if solving.solver != "optimal":
        return solving.plan(graph)
    step = Joined((graph,))
    found = solving.plan(step.graph({(REGION_BACK, 1): beside}), goal)
    return step.plan_of_call(0, found.decisions, found.solver)


@dataclass
class LatePlanner:
    """Plans submodules that the sample's forward left out, or that are not there before they run.

    Args:
        options: what the model was optimized by.
        examples: parts, and what modules that are like one of these may take.
    """

    options: PlanOptions
    examples: list[tuple[Part, Share]]

    def __call__(self, module: torch.nn.Module, name: str, call: Call) -> tuple[Graph, Plan, Replanner | None]:
        """The graph of the first call of a submodule, a plan for it and what plans for other calls.

        One that is like no part keeps as little as the goal allows, and is an example for others from then on.

        Raises:
            OgcError: the call cannot be parsed or planned.
        """
        told = self.options.of_submodule(name, module).parsing.told
        alike = [
            (part, share)
            for part, share in self.examples
            if part.name == name or (is_alike(part, module) and part.told == told)
        ]
        alike.sort(key=lambda example: example[0].name != name)
        for part, share in alike:
            with suppress(OgcError):
                graph, plan = reuse(module, part.graph, call, weighed=share.meets is not None), share.plan
                if share.meets is None or share.meets(graph, plan):
                    return graph, plan, share.planner(name, module)
        with self.options.while_planning():
            graph = self.options.of_submodule(name, module).parse(module, call)
            known = alike[0][1] if alike else None
            _, plan = look_for(_LatePlan(self.options, graph, known))
        if known is not None:
            return graph, plan, known.planner(name, module)
        share = Share(self.options, plan, PartCost.of(graph, plan))
        self.examples.append((Part(name, module, graph, 0, look_of(module), told), share))
        return graph, plan, share.planner(name, module)


def frugal_plan(solving: SolveOptions, graph: Graph) -> Plan:
    """The plan that keeps least for a goal that is a share, of bytes or of time, as it holds for this part alone."""
    share, plain = solving.goal.memory_budget, PartCost.of(graph, plain_plan(graph))
    with suppress(SolveError):
        if isinstance(share, float):
            return _solved(solving, graph, plain.most, Goal(int(plain.most + share * plain.saved_bytes)))
        if not share:
            return _solved(solving, graph, plain.most, solving.goal)
    return frugal(solving, graph)
