"""What each part may take, and plans for calls of it that nobody planned for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import OgcError
from ..graph import Graph
from ..parser import carry_over, hooked_modules
from ..plan import PartCost, part_cost, simulate
from ..plan.plan import Plan
from ..plan.simulate import plain_peak
from ..planning.agreement import agreed_plan
from ..planning.replan import Meets, Replanner
from ..program.structures import Call
from ..solver import Budget, Wish
from .choice.ways import Way
from .find import Part, is_alike, look_of
from .options import Options

SLACK = 1.001
"""What a part may take more than its share: sizes are whole numbers of elements."""


@dataclass(frozen=True)
class Share:
    """What the plan of a part takes, as the measure for its other plans.

    Attributes:
        way: of the part, the one that was chosen.
        plain_bytes: the part's plain peak.
        wish: that the whole model was planned by.
        in_bytes: whether the same bytes hold for calls of any size, or else the same share of their plain peak.
    """

    way: Way
    plain_bytes: int
    wish: Wish
    in_bytes: bool

    @property
    def keeps(self) -> Meets | None:
        """What tells whether a plan keeps to the share; None without a wish."""
        if self.wish.max_overhead is not None:
            return self._is_as_quick
        return None if self.wish.memory_budget is None else self._fits

    def plan(self, graph: Graph, ways: Sequence[Way]) -> Plan:
        """The fastest of these plans of a graph that keeps to the share; the one nearest to it if none does."""
        if self.wish.max_overhead is not None:
            ways = [way for way in ways if self._is_as_quick(graph, way.plan)]  # among them the plain one, the last
        plain = ways[-1].plan.plain_peak_bytes
        fits = [way for way in ways if self._excess(way.cost, plain) <= 0]
        if fits:
            return min(fits, key=lambda way: way.cost.seconds).plan
        return min(ways, key=lambda way: self._excess(way.cost, plain)).plan

    def agreed_plan(self, graph: Graph, options: Options) -> Plan:
        """The plan that keeps to the share, of all ways and on all ranks."""
        asked = self.wish, options.solver, self.way.plan.decisions
        return agreed_plan(graph, asked, lambda: self.plan(graph, options.ways(graph)))

    def _fits(self, graph: Graph, plan: Plan) -> bool:
        """Whether a plan takes no more bytes than the share where this graph, weighed for that, is computed."""
        return self._excess(part_cost(graph, plan), plain_peak(graph)) <= 0

    def _is_as_quick(self, graph: Graph, plan: Plan) -> bool:
        """Whether a plan recomputes no larger share of the part's time than the one that was chosen."""
        seconds = 0.0 if plan.is_plain else simulate(graph, plan).added_seconds
        return seconds <= self.way.plan.overhead * SLACK * graph.step_seconds

    def _excess(self, cost: PartCost, plain: int) -> float:
        """Bytes beyond the share, where the plain peak is ``plain``."""
        scale = SLACK if self.in_bytes else SLACK * plain / max(1, self.plain_bytes)
        ours = self.way.cost
        return max(cost.kept_bytes - ours.kept_bytes * scale, _most(cost) - _most(ours) * scale)


def _most(cost: PartCost) -> int:
    return max(cost.forward_bytes, cost.backward_bytes)


def planner_of(options: Options, name: str, module: torch.nn.Module, share: Share) -> Replanner | None:
    """What plans a part for calls unlike its sample."""
    if options.solver == "none":
        return None

    def make(module: torch.nn.Module, call: Any, budget: Budget | None) -> tuple[Graph, Plan]:
        graph = options.parse(module, name, call)
        return graph, share.agreed_plan(graph, options)

    budget = _most(share.way.cost) if share.in_bytes else None
    return Replanner(make, budget, hooked_modules(dict(module.named_modules())), share.keeps)


@dataclass
class LatePlanner:
    """Plans submodules that the sample's forward left out, or that are not there before they run.

    Args:
        options: what the model was optimized by.
        examples: parts, and what modules that are like one of these may take.
    """

    options: Options
    examples: list[tuple[Part, Share]]

    def __call__(self, module: torch.nn.Module, name: str, call: Call) -> tuple[Graph, Plan, Replanner | None]:
        """The graph of the first call of a submodule, a plan for it and what plans for other calls.

        One that is like no part keeps as little as the wish allows, and is an example for others from then on.

        Raises:
            OgcError: the call cannot be parsed or planned.
        """
        options = self.options
        share = next((share for part, share in self.examples if is_alike(part, module)), None)
        for part, known in self.examples if share is not None else ():
            if is_alike(part, module):
                with suppress(OgcError):
                    graph, plan = carry_over(module, part.graph, call, weighed=known.keeps is not None), known.way.plan
                    if known.keeps is None or known.keeps(graph, plan):
                        return graph, plan, planner_of(options, name, module, known)
        graph = options.parse(module, name, call)
        if share is not None:
            return graph, share.agreed_plan(graph, options), planner_of(options, name, module, share)
        share, plan = self._share_of_its_own(graph)
        self.examples.append((Part(name, module, graph, 0, look_of(module)), share))
        return graph, plan, planner_of(options, name, module, share)

    def _share_of_its_own(self, graph: Graph) -> tuple[Share, Plan]:
        """What a submodule may take that is like no other, and its plan."""
        wish, solver = self.options.wish, self.options.solver

        def choose() -> Plan:
            return _most_frugal(self.options.ways(graph), wish).plan

        plan = agreed_plan(graph, (wish, solver, "of its own"), choose)
        share = Share(Way(plan, part_cost(graph, plan)), plan.plain_peak_bytes, wish, in_bytes=False)
        return share, plan


def _most_frugal(ways: Sequence[Way], wish: Wish) -> Way:
    """The way that keeps the least within a wish for a share, of bytes or of time, as it holds for this part alone."""
    plain = ways[-1]
    if wish.max_overhead is not None:
        return next(way for way in ways if way.plan.overhead <= wish.max_overhead or way is plain)
    if isinstance(wish.memory_budget, float):
        fits = [way for way in ways if way.cost.kept_bytes <= wish.memory_budget * plain.cost.kept_bytes]
        return min(fits, key=lambda way: way.cost.seconds, default=ways[0])
    return ways[0]
