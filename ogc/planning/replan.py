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
from ..solver.goal import in_bytes
from ..torch_state.forwards import collects_now
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

    return keeps if goal else None


@dataclass(frozen=True, eq=False)
class Replanner:
    """Reuses plans to other sizes and, given ``make``, makes plans for any other call.

    A budget in bytes stays one, a share is one of that call's own plain peak, and an overhead one of its own time: a
    plan that does not keep them is not reused, as ``keeps`` tells. Where a budget cannot be met, the plan is the
    one with the least peak; one that misses its share is reused like those without a goal. ``units`` plans a model that
    was sharded, ``anew`` one with hooks that submodules did not have when it was optimized (``hooked`` had some).
    """

    make: Make | None = None
    budget: Budget | None = None
    hooked: Collection[str] = frozenset()
    keeps: Meets | None = None
    units: Callable[[torch.nn.Module], torch.nn.Module] | None = None
    anew: Callable[[torch.nn.Module, Call], torch.nn.Module] | None = None

    def apart(self, model: torch.nn.Module, call: Call) -> torch.nn.Module | None:
        """The model planned unit by unit if it was sharded since it was planned, anew if it has got hooks."""
        if self.units is not None and has_inner_units(model):
            log.warning("the model was sharded since it was optimized: its units are planned one by one")
            return self.units(model)
        new = [name for name in sorted(_hooked(model)) if name and name not in self.hooked]
        if self.anew is None or not new or _collecting(model):
            return None
        log.warning("module %s has got hooks since the model was optimized: it is planned anew", new[0])
        return self.anew(model, call)

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
        if name := _collecting(model):
            raise ParseError(f"module {name} has hooks that collect what it gives for a forward around the model")
        try:
            return self.make(model, call, self.budget)
        except SolveError as error:
            log.warning("taking the least peak instead: %s", error)
            return self.make(model, call, None)


def _hooked(model: torch.nn.Module) -> set[str]:
    return hooked_modules(dict(model.named_modules(remove_duplicate=False)))


def _collecting(model: torch.nn.Module) -> str:
    """A module that collects for a forward around the model; planning would add to that."""
    return next((name for name, module in model.named_modules() if name and collects_now(module)), "")
