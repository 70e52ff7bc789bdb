"""Plans for calls of an optimised module that differ from its sample input."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

import torch

from .errors import ParseError, SolveError
from .graph import Graph
from .parser import carry_over, hooked_modules
from .plan import simulate
from .plan.plan import Plan
from .program.structures import Call, InputSpec
from .solver import Budget

log = logging.getLogger(__name__)

Make = Callable[[torch.nn.Module, Any, "Budget | None"], "tuple[Graph, Plan]"]
"""Parses a model with a sample input and plans within a budget."""


class Replanner:
    """Carries plans over to other sizes and, given ``make``, makes plans for any other call.

    A budget in bytes stays one, a share is one of that call's own plain peak. Where it cannot be met, the
    plan is the one with the least peak. No plan is made for hooks that submodules did not have when the model was
    optimized (``hooked`` had some): making it would run them several times.
    """

    def __init__(
        self, make: Make | None = None, budget: Budget | None = None, hooked: Collection[str] = frozenset()
    ) -> None:
        self.make = make
        self.budget = budget
        self.hooked = hooked

    def carry_over(self, model: torch.nn.Module, call: Call, graph: Graph, plan: Plan) -> Graph | None:
        """``graph`` for inputs of other sizes, or None unless ``plan`` still holds and meets the wish."""
        if self.budget is not None and not isinstance(self.budget, float) and _elements(call) > _elements(graph):
            return None  # more bytes than were planned for
        if plan.is_plain:
            return graph
        try:
            carried = carry_over(model, graph, call)
            simulate(carried, plan)  # refuses a plan that the graph does not allow
        except Exception as error:  # if the call is broken, so is the plain model's
            log.info("the plan is not carried over: %s", error)
            return None
        return carried

    def plan(self, model: torch.nn.Module, call: Call) -> tuple[Graph, Plan] | None:
        """A graph and a plan for the call, by the wish that the module was optimised for."""
        if self.make is None:
            return None
        for name in sorted(hooked_modules(dict(model.named_modules(remove_duplicate=False)))):
            if name and name not in self.hooked:
                raise ParseError(f"module {name} has got hooks since the model was optimized; optimize it again")
        try:
            return self.make(model, call, self.budget)
        except SolveError as error:
            log.warning("taking the least peak instead: %s", error)
            return self.make(model, call, None)


def _elements(given: Call | Graph) -> int:
    inputs = InputSpec.of(given.args, given.kwargs)[0] if isinstance(given, Call) else given.program.inputs
    return sum(torch.Size(spec.shape).numel() for spec in inputs.tensors)
