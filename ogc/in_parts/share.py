"""What each part may take, and plans for calls of it that nobody planned for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from ..program.structures import Call
from ..replan import Meets, Replanner
from ..solver import Budget
from .find import is_alike
from .options import Options
from .points import Way, ways_of

SLACK = 1.001
"""What a part may take more than its share: sizes are whole numbers of elements."""


@dataclass(frozen=True)
class Share:
    """What the plan of a part takes, as the measure for its other plans.

    Attributes:
        way: of the part, the one that was chosen.
        plain_bytes: the part's plain peak.
        in_bytes: whether the same bytes hold for calls of any size, or else the same share of their plain peak.
    """

    way: Way
    plain_bytes: int
    in_bytes: bool

    def of(self, ways: Sequence[Way]) -> Way:
        """The fastest of these that keeps within the share; the one nearest to it if none does."""
        plain = ways[-1].plan.plain_peak_bytes
        fits = [way for way in ways if self._excess(way.cost, plain) <= 0]
        if fits:
            return min(fits, key=lambda way: way.cost.seconds)
        return min(ways, key=lambda way: self._excess(way.cost, plain))

    def holds(self, graph: Graph, plan: Plan) -> bool:
        """Whether a plan keeps within the share where this graph, weighed for that, is computed."""
        return self._excess(part_cost(graph, plan), plain_peak(graph)) <= 0

    def is_as_quick(self, graph: Graph, plan: Plan) -> bool:
        """Whether a plan recomputes no larger share of the part's time than the one that was chosen."""
        seconds = 0.0 if plan.is_plain else simulate(graph, plan).recomputed_seconds
        return seconds <= self.way.plan.overhead * SLACK * graph.step_seconds

    def _excess(self, cost: PartCost, plain: int) -> float:
        """Bytes beyond the share, where the plain peak is ``plain``."""
        scale = SLACK if self.in_bytes else SLACK * plain / max(1, self.plain_bytes)
        ours = self.way.cost
        return max(cost.kept_bytes - ours.kept_bytes * scale, _most(cost) - _most(ours) * scale)


def _most(cost: PartCost) -> int:
    return max(cost.forward_bytes, cost.backward_bytes)


def _keeps(options: Options, share: Share) -> Meets | None:
    if options.wish.max_overhead is not None:
        return share.is_as_quick
    return None if options.wish.memory_budget is None else share.holds


def _chosen(options: Options, share: Share, graph: Graph, ways: Sequence[Way]) -> Way:
    if options.wish.max_overhead is not None:
        ways = [way for way in ways if share.is_as_quick(graph, way.plan)]  # among them the plain one, the last
    return share.of(ways)


def planner_of(options: Options, name: str, module: torch.nn.Module, share: Share) -> Replanner | None:
    """What plans a part for calls unlike its sample."""
    if options.solver == "none":
        return None
    parse = options.parser_of(name, module)

    def make(module: torch.nn.Module, call: Any, budget: Budget | None) -> tuple[Graph, Plan]:
        graph = parse(module, call)
        return graph, _chosen(options, share, graph, ways_of(graph, options.solver)).plan

    budget = _most(share.way.cost) if share.in_bytes else None
    return Replanner(make, budget, hooked_modules(dict(module.named_modules())), _keeps(options, share))


@dataclass(frozen=True)
class Example:
    """A part that another one is like, and what that other one was given of the whole.

    Attributes:
        module: the part.
        graph: what its calls compute.
        plan: for the other one.
        share: of the other one.
    """

    module: torch.nn.Module
    graph: Graph
    plan: Plan
    share: Share


class LateParts:
    """Plans for submodules that the sample's forward left out, when they are first called.

    Args:
        options: what the model was optimized by.
        examples: for those that are like a part, by name.
    """

    def __init__(self, options: Options, examples: Mapping[str, Example]) -> None:
        self.options = options
        self.examples = examples

    def __call__(self, module: torch.nn.Module, name: str, call: Call) -> tuple[Graph, Plan, Replanner | None]:
        """The graph of a call, a plan for it, and what plans for others; one that is like no part keeps little."""
        example = self.examples.get(name)
        share = None
        if example is not None and is_alike(example.module, module):
            share = example.share
            keeps = _keeps(self.options, share)
            with suppress(OgcError):
                graph = carry_over(module, example.graph, call, weighed=keeps is not None)
                if keeps is None or keeps(graph, example.plan):
                    return graph, example.plan, planner_of(self.options, name, module, share)
        graph = self.options.parser_of(name, module)(module, call)
        ways = ways_of(graph, self.options.solver)
        share = share or Share(ways[0], ways[-1].plan.plain_peak_bytes, False)
        return graph, _chosen(self.options, share, graph, ways).plan, planner_of(self.options, name, module, share)
