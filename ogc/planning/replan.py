"""Plans for calls of an optimized module that differ from its sample input."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import chain
from math import prod
from operator import gt
from typing import Any

import torch

from ..errors import ParseError, SolveError
from ..graph import Graph
from ..parser import hooked_modules, reuse
from ..plan import simulate
from ..plan.plan import Plan
from ..plan.simulate import plain_peak
from ..program.structures import Call, InputSpec
from ..solver import Budget, Goal
from ..solver.goal import LEAST, in_bytes
from ..torch_state.ranks import has_inner_units

log = logging.getLogger(__name__)

Make = Callable[[torch.nn.Module, Any, "Budget | None"], "tuple[Graph, Plan]"]
"""Parses a model with a sample input and plans within a budget."""

Meets = Callable[[Graph, Plan], bool]
"""Whether a plan keeps the goal where a graph, weighed for that, is computed."""


def meets(goal: Goal) -> Meets | None:
    """What tells whether a plan meets a goal; None for a goal for nothing in particular."""

    def keeps(graph: Graph, plan: Plan) -> bool:
        cost = None if plan.is_plain else simulate(graph, plan)
        if goal.max_overhead is not None:
            return (cost.added_seconds if cost else 0.0) <= goal.max_overhead * graph.step_seconds
        plain = plain_peak(graph)
        budget = goal.budget_bytes(plain)
        return budget is None or (cost.peak_bytes if cost else plain) <= budget

    return keeps if goal.is_bounded else None


_ADVICE = {
    False: "optimize it again",
    True: "switch gradient checkpointing off, in the model and in the trainer (gradient_checkpointing=False): what is "
    "planned recomputes by itself",
}
"""What to do about hooks; those of ``transformers`` come with its gradient checkpointing."""


@dataclass(frozen=True, eq=False)
class Replanner:
    """Reuses plans to other sizes and, given ``make``, makes plans for any other call.

    A budget in bytes stays one, a share is one of that call's own plain peak, and an overhead one of its own time: a
    plan that does not keep them is not reused, as ``keeps`` tells. Where a budget cannot be met, the plan is the
    one with the least peak; one that misses its share is reused like those without a goal. No plan is made for
    hooks that submodules did not have when the model was optimized (``hooked`` had some): making it would run them
    several times. ``units`` plans a model that was sharded.
    """

    make: Make | None = None
    budget: Budget | None = None
    hooked: Collection[str] = frozenset()
    keeps: Meets | None = None
    units: Callable[[torch.nn.Module], torch.nn.Module] | None = None

    def apart(self, model: torch.nn.Module) -> torch.nn.Module | None:
        """The model with its units planned one by one, if it was sharded since it was planned."""
        if self.units is None or not has_inner_units(model):
            return None
        log.warning("the model was sharded since it was optimized: its units are planned one by one")
        return self.units(model)

    def reuse(self, model: torch.nn.Module, call: Call, graph: Graph, plan: Plan) -> Graph | None:
        """``graph`` for inputs of other sizes, or None unless ``plan`` still holds and meets the goal."""
        is_in_bytes = in_bytes(self.budget)
        inputs = InputSpec.of(call.args, call.kwargs)[0], graph.program.inputs
        sizes, planned = ([spec.shape for spec in given.tensors] for given in inputs)
        if is_in_bytes and sum(map(prod, sizes)) > sum(map(prod, planned)):
            return None  # more bytes than were planned for
        is_larger_somewhere = any(map(gt, chain.from_iterable(sizes), chain.from_iterable(planned)))
        if plan.is_plain and not (is_in_bytes and is_larger_somewhere):
            return graph
        missed = isinstance(self.budget, float) and plan.budget_bytes is None  # where it was made
        keeps = None if missed else self.keeps
        try:
            reused = reuse(model, graph, call, weighed=keeps is not None)
            if keeps is None:
                simulate(reused, plan)  # refuses a plan that the graph does not allow
            elif not keeps(reused, plan):
                log.info("the plan is not reused: it would not keep to the goal")
                return None
        except Exception as error:  # if the call is broken, so is the plain model's
            log.info("the plan is not reused: %s", error)
            return None
        return reused

    def plan(self, model: torch.nn.Module, call: Call) -> tuple[Graph, Plan] | None:
        """A graph and a plan for the call, by the goal that the module was optimised for."""
        if self.make is None:
            return None
        for name in sorted(hooked_modules(dict(model.named_modules(remove_duplicate=False)))):
            if name and name not in self.hooked:
                checkpoints = any(
                    getattr(module, "gradient_checkpointing", False) is True for module in model.modules()
                )
                raise ParseError(f"module {name} has got hooks since the model was optimized; {_ADVICE[checkpoints]}")
        try:
            return self.make(model, call, self.budget)
        except SolveError as error:
            log.warning("taking the least peak instead: %s", error)
            return self.make(model, call, LEAST)
