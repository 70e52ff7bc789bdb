"""Plans for calls of an optimized module that differ from its sample input."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod
from operator import gt
from typing import Any

import torch

from ..errors import ParseError, SolveError
from ..graph import Graph
from ..parser import Shapes, hooked_modules, reuse, reuse_quickly, shapes_of
from ..plan import simulate
from ..plan.plan import Plan
from ..plan.simulate import plain_peak
from ..program.structures import Call, InputSpec
from ..solver import Budget, Goal
from ..solver.goal import in_bytes
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


_ADVICE = {
    False: "optimize it again",
    True: "switch gradient checkpointing off, in the model and in the trainer (gradient_checkpointing=False): what is "
    "planned recomputes by itself",
}
"""What to do about hooks; those of ``transformers`` come with its gradient checkpointing."""


@dataclass
class _Sizes:
    """For which calls a plan is known to hold and to keep its goal, the first of them that for which it was made."""

    sizes: list[Shapes]  # of the tensors of their programs, the inputs first
    is_trusted: bool = True  # whether others may be found by their numbers alone
    told: bool = False

    @property
    def are_two(self) -> bool:
        return len(self.sizes) > 1

    def have(self, sizes: Shapes, is_in_bytes: bool) -> bool:
        """Whether a goal is kept for others as no size is larger than one, nor smaller than another, that keep it.

        Smaller ones take fewer bytes, but not a smaller share of those that they take in the plain model.
        """
        below = is_in_bytes or any(_is_within(one, sizes) for one in self.sizes)
        return below and any(_is_within(sizes, one) for one in self.sizes)

    def miss(self, why: str) -> None:
        """Note that a call was not found by its numbers."""
        if not self.told:
            log.info("the plan is not reused by numbers alone: %s", why)
        self.told = True


def _is_within(small: Shapes, large: Shapes) -> bool:
    return not any(map(gt, chain.from_iterable(small), chain.from_iterable(large)))


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
    known: dict[int, _Sizes] = field(default_factory=dict)  # of each graph, by the identity of its program

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
        known = self._sizes_of(graph)

        def holds(shapes: Shapes) -> bool:
            return keeps is None or known.have(shapes, is_in_bytes)

        if known.is_trusted and (sizes == planned or (known.are_two and holds(sizes))):
            try:
                return reuse_quickly(model, graph, call, holds if known.are_two else None)
            except Exception as error:  # be it slowly
                known.miss(str(error))
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
        known.sizes.append(shapes_of(reused.program.recorded.graph))
        return replace(reused, program=replace(reused.program, recorded=None))

    def distrust(self, graph: Graph) -> None:
        """Find no more graphs like this one by numbers alone."""
        self._sizes_of(graph).is_trusted = False

    def _sizes_of(self, graph: Graph) -> _Sizes:
        """Those for which a graph, or the one that it was found from, is known."""
        program, key = graph.program.graph, id(graph.program.graph)
        if key not in self.known:
            recorded = graph.program.recorded
            self.known[key] = _Sizes([] if recorded is None else [shapes_of(recorded.graph)])
            weakref.finalize(program, self.known.pop, key, None)
        return self.known[key]

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
            return self.make(model, call, None)
