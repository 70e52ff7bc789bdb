"""Where plans come from beside the search: calls of other shapes, plans that were saved, equal plans on all ranks."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import chain
from math import prod
from operator import gt
from pathlib import Path
from typing import Any, TypeVar

import torch

from .errors import InputError, ParseError, PlanError, SolveError
from .graph import MIB, Graph
from .parser import Shapes, hooked_modules, reuse, reuse_quickly, shapes_of
from .parser.weigh.measure import times_kept_in
from .plan import Fingerprint, Plan, SavedPlan, make_plan, plain_plan, plan_on, simulate
from .plan.decisions import Decisions
from .plan.saving import PARTS, VERSION, structure_of
from .plan.simulate import plain_peak
from .program.structures import Call, InputSpec
from .solver import Budget, Goal
from .solver.goal import LEAST, in_bytes
from .torch_state.forwards import collects_now
from .torch_state.ranks import first_of_all, has_inner_units

log = logging.getLogger(__name__)

# -- calls of other shapes -----------------------------------------------------------------------------


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
    one with the least peak; one that misses its share is reused like those without a goal. ``units`` plans a model that
    was sharded, ``anew`` one with hooks that submodules did not have when it was optimized (``hooked`` had some).
    """

    make: Make | None = None
    budget: Budget | None = None
    hooked: Collection[str] = frozenset()
    keeps: Meets | None = None
    units: Callable[[torch.nn.Module], torch.nn.Module] | None = None
    anew: Callable[[torch.nn.Module, Call], torch.nn.Module] | None = None
    known: dict[int, _Sizes] = field(default_factory=dict)  # of each graph, by the identity of its program

    def apart(self, model: torch.nn.Module, call: Call) -> torch.nn.Module | None:
        """The model planned unit by unit if it was sharded since it was planned, anew if it has got hooks."""
        if self.units is not None and has_inner_units(model):
            log.warning("the model was sharded since it was optimized: its units are planned one by one")
            return self.units(model)
        hooked = hooked_modules(dict(model.named_modules(remove_duplicate=False)))
        new = [name for name in hooked if name and name not in self.hooked]
        return None if self.anew is None or not new or _collecting(model) else self.anew(model, call)

    def reuse(self, model: torch.nn.Module, call: Call, graph: Graph, plan: Plan, quickly: bool) -> Graph | None:
        """``graph`` for inputs of other sizes, or None unless ``plan`` still holds and meets the goal.

        ``quickly``, if that is seen by numbers alone.
        """
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

        if quickly:
            if not (known.is_trusted and (sizes == planned or (known.are_two and holds(sizes)))):
                return None
            try:
                return reuse_quickly(model, graph, call, holds if known.are_two else None)
            except Exception as error:  # be it slowly
                known.miss(str(error))
                return None
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
        if name := _collecting(model):
            raise ParseError(f"module {name} has hooks that collect what it gives for a forward around the model")
        try:
            return self.make(model, call, self.budget)
        except SolveError as error:
            log.warning("taking the least peak instead: %s", error)
            return self.make(model, call, LEAST)


def _collecting(model: torch.nn.Module) -> str:
    """A module that collects for a forward around the model; planning would add to that."""
    return next((name for name, module in model.named_modules() if name and collects_now(module)), "")


# -- plans that were saved -----------------------------------------------------------------------------


Found = TypeVar("Found")

ROUNDING, NOISE = 1 + 1e-9, 1.05
"""By how much a saved plan may miss the overhead that was asked for: where times are estimated, and measured anew."""

PlanSource = str | os.PathLike[str] | SavedPlan
"""A file that a plan was saved to, or what is in one; a plan itself will do too."""


def saved_plan(source: Any) -> SavedPlan:
    """What ``ogc.optimize`` is given as ``plan``.

    Raises:
        InputError: it is no plan and no path, or the file cannot be read.
        PlanError: the file is no plan, or of an unknown version.
    """
    if isinstance(source, SavedPlan):
        return source
    if isinstance(source, (str, os.PathLike)):
        try:
            return SavedPlan.from_file(source)
        except OSError as error:
            raise InputError(
                f"plan={os.fspath(source)!r} cannot be read ({error.strerror}); give the path of a file that "
                "result.plan.save(path) wrote, or leave plan= out and have cache_dir= keep and find plans"
            ) from error
    if not hasattr(source, "as_saved"):
        raise InputError(f"plan must be the path of a saved plan, or a plan, not {type(source).__name__}")
    found: SavedPlan = source.as_saved()
    return found


@dataclass(frozen=True)
class Store:
    """A folder of plans, and of the times that were measured for them; without a folder nothing is kept.

    Any number of processes may use it at once: files are whole or not there.
    """

    folder: str | None = None

    @classmethod
    def at(cls, folder: str | os.PathLike[str] | None) -> Store:
        """That of a folder, which is made when the first plan is.

        Raises:
            InputError: there is something else in its place.
        """
        if folder is None:
            return cls()
        if not isinstance(folder, (str, os.PathLike)) or (os.path.exists(folder) and not os.path.isdir(folder)):
            raise InputError(f"cache_dir must be the path of a folder, not {folder!r}")
        return cls(os.path.abspath(folder))

    def found(self, key: str, use: Callable[[SavedPlan], Found | None]) -> Found | None:
        """What ``use`` makes of the plan that is kept under ``key``; None if there is none that holds."""
        if self.folder is None:
            return None
        path = self._path(key)
        try:
            found = use(SavedPlan.from_file(path))
        except FileNotFoundError:
            return None
        except (OSError, PlanError) as error:
            log.warning("a plan is made anew, as the one in cache_dir does not do: %s", error)
            return None
        if found is not None:
            log.info("the plan is that of %s", path)
        return found

    def keep(self, key: str, save: Callable[[], SavedPlan]) -> None:
        """Keep a plan under ``key``, in the place of what was there."""
        if self.folder is None:
            return
        try:
            os.makedirs(self.folder, exist_ok=True)
            save().write(self._path(key))
        except OSError as error:
            log.warning("the plan is not kept in cache_dir: %s", error)

    def times(self) -> AbstractContextManager[None]:
        """In here, operations that were measured before on such a machine are not measured again."""
        return nullcontext() if self.folder is None else times_kept_in(self.folder)

    def _path(self, key: str) -> Path:
        assert self.folder is not None
        return Path(self.folder, f"{key}.json")


NOWHERE = Store()


def key_of(kind: str, what: object, goal: Goal, solver: str, *more: object) -> str:
    """The name of what is kept for a goal; ``what`` tells graphs from others, but not what operations take here."""
    budget = goal.budget_bytes(1) if goal.is_in_bytes else goal.memory_budget
    asked = kind, VERSION, goal.is_in_bytes, budget, goal.max_overhead, solver, *more
    return f"{kind}-{sha256(repr((what, *asked)).encode()).hexdigest()[:32]}"


def taken_up(
    saved: SavedPlan,
    graph: Graph,
    goal: Goal,
    chunks: int,
    chunked_along: Callable[[tuple[tuple[str, str], ...]], Graph],
) -> tuple[Graph, Plan] | None:
    """A plan that was saved, for a graph that it was made for, without a search; and the graph that it runs on.

    Args:
        saved: the plan.
        graph: without chunks.
        goal: that it has to keep.
        chunks: that are allowed.
        sliced_along: gives the graph with regions in chunks.

    Returns:
        None, and a warning in the log, if it does not keep the goal here.

    Raises:
        PlanError: it does not fit the graph, or needs chunks that are not allowed.
    """
    if saved.kind == PARTS:
        raise PlanError("the plan is for a model in parts, but this one is planned as a whole")
    if saved.unchunked is not None:
        if difference := saved.unchunked.difference(Fingerprint.of(graph)):
            raise PlanError(f"the plan does not fit the graph, which has {difference}")
        if saved.chunks != chunks:
            raise PlanError(f"the plan runs regions in {saved.chunks} chunks of the batch; give chunks= so many")
        graph = chunked_along(saved.regions)
    plan = plan_on(graph, saved)
    plan = replace(plan, budget_bytes=goal.budget_bytes(plan.plain_peak_bytes), max_overhead=goal.max_overhead)
    keeps = meets(tolerant(goal, graph))
    if keeps is None or keeps(graph, plan):
        return graph, plan
    tell_broken(goal, plan.peak_bytes, plan.overhead)
    return None


def tolerant(goal: Goal, graph: Graph) -> Goal:
    """The goal with a little more time than was asked for: sums of it are rounded, or it is measured anew."""
    share, slack = goal.max_overhead, ROUNDING if graph.profile == "estimate" else NOISE
    return goal if share is None else replace(goal, max_overhead=slack * share)


def tell_broken(goal: Goal, peak_bytes: int, overhead: float) -> None:
    """Say that a saved plan does not keep the goal."""
    asked = "memory_budget" if goal.max_overhead is None else "max_overhead"
    log.warning(
        "a plan is made anew: the saved one peaks here at %.1f MiB, with %.1f %% more time, and does not keep %s=%r",
        *(peak_bytes / MIB, 100 * overhead, asked, getattr(goal, asked)),
    )


# -- equal plans on all ranks --------------------------------------------------------------------------


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
