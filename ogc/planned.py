"""A model with the plans that its goal asks for: as a whole, in parts, or unit by unit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from .checking.check import check_two_steps
from .errors import InputError, ParseError, PlanError, SolveError, optional
from .graph import Graph
from .in_parts import (
    Options,
    check_goal_of_units,
    frugal_plan,
    heavy_opaque,
    in_parts_if_better,
    in_parts_instead,
    optimize_in_parts,
    optimize_units,
    with_calls_beside,
)
from .parser import NamesAndTypes, hooked_modules, parse
from .parser.arguments import call_arguments, check_model, check_tensors, sample_of
from .parser.custom import parse_graph_of
from .parser.forward.flat import saved_bytes
from .parser.parse import check_options
from .plan.plan import Plan
from .plan.saving import PARTS, SavedPlan, structure_of
from .planning import NOWHERE, Replanner, Store, agreed_plan, key_of, meets, taken_up
from .process import within_seconds
from .program.program import Optimizer, device_of_model, get_attribute
from .program.structures import Call
from .runtime import optimized_module
from .runtime.module import MADE_AGAIN, OWN_PLAN
from .runtime.when_called import made_again, planned_when_called
from .solver import Budget, Goal, solve, solver_of
from .torch_state.no_trace import remembering
from .torch_state.ranks import has_inner_units, has_units

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OnDevice:
    """The device that a whole step is to fit on, and what else there takes memory, as for :func:`ogc.optimize`."""

    memory: Budget
    optimizer: Optimizer | None
    ddp: bool | str
    gradients: str

    def within(self, planning: Planning, model: torch.nn.Module, sample_input: Any) -> torch.nn.Module:
        """The model by a plan within what the device has left for activations."""
        sizing = optional("sizing.needs")
        needs = sizing.fixed_needs(model, sample_input, self.optimizer, ddp=self.ddp, gradients=self.gradients)

        def optimized(budget: Budget) -> torch.nn.Module:
            goal, parsing = Goal(budget, planning.goal.max_overhead), {**planning.parsing, "gradients": needs.when}
            return replace(planning, goal=goal, parsing=parsing, verify=False).optimized(model, sample_input)

        found: torch.nn.Module = sizing.within_device(
            needs, self.memory, optimized, lambda made: getattr(type(made), OWN_PLAN)
        )
        return found


@dataclass(frozen=True)
class Planning:
    """The arguments of :func:`optimize` by which models are parsed and planned; ``parsing`` has those of parse.

    The first plan is ``saved``, if that keeps the goal; where it need not fit, another model is planned anew.
    """

    parsing: dict[str, Any]
    profile: str
    opaque_modules: NamesAndTypes
    goal: Goal
    solver: str
    chunks: int
    store: Store = NOWHERE
    saved: SavedPlan | None = None
    must_fit: bool = True
    backend: str | None = None
    device: OnDevice | None = None
    verify: bool = False
    submodule: str = ""
    is_one_of_many: bool = False
    effort: int = 0
    planning_seconds: float | None = None

    def result(self, model: torch.nn.Module, sample_input: Any, plain: torch.nn.Module) -> torch.nn.Module:
        """What :func:`optimize` returns for a model, which may have a loss behind the ``plain`` one."""
        is_late = sample_input is None or has_units(model)
        result = self.when_called(model) if is_late else self.optimized(model, sample_input)
        return with_calls_beside(result, plain, self.of_submodule)

    def again(self, model: torch.nn.Module) -> torch.nn.Module:
        """The same of a model that was unpickled."""
        return with_calls_beside(planned_when_called(model, self), model, self.of_submodule)

    def of_submodule(self, name: str, module: torch.nn.Module, is_one_of_many: bool) -> Planning:
        """What plans calls of a submodule by themselves: a budget holds for each."""
        opaque_modules, parsing = self.options.of_submodule(name, module)
        return replace(
            self, parsing=parsing, opaque_modules=opaque_modules, saved=None, device=None, verify=False,
            submodule=name, is_one_of_many=is_one_of_many,
        )  # fmt: skip

    def when_called(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model, to be planned at its first call in training.

        Raises:
            InputError: an argument is of the wrong kind.
        """
        self.check(model)
        return planned_when_called(model, self)

    def check(self, model: torch.nn.Module) -> None:
        """Raise InputError if an argument is of the wrong kind, as far as that is known without a call."""
        if not has_units(model):
            check_model(model, may_lack_content=True)
        elif self.verify or self.device is not None or self.backend is not None:
            raise InputError(
                "verify=, device_memory= and compile= need all of a model, and this one is sharded: leave them out"
            )
        else:
            check_goal_of_units(self.options, self.chunks)
        if self.device is not None:
            optional("sizing.needs").device_bytes(self.device.memory)
        check_options(model, self.profile, self.opaque_modules, **self.parsing)
        solver_of(self.solver, self.goal)

    def bytes_of_step(self, model: torch.nn.Module, call: Call) -> int:
        """What a step with this call takes at least. OgcError: nothing could be planned for it."""
        if has_units(model) and has_inner_units(model):
            return 0  # each unit is planned by itself, when it is called
        check_model(model)
        sample = sample_of(model, call, None)
        check_tensors(sample)
        return saved_bytes(*sample)

    def optimized(self, model: torch.nn.Module, sample_input: Any) -> torch.nn.Module:
        """The model by one plan, or in parts where that cannot be or is worse."""
        if self.device is not None:
            result = self.device.within(replace(self, device=None), model, sample_input)
        else:
            with within_seconds(self.planning_seconds), self.store.times(), remembering():
                result = self.now(model, sample_input)
            plan = getattr(type(result), OWN_PLAN)
            is_known = self.backend is None and not isinstance(plan, property)  # of units none is; code is not saved
            found = plan.as_saved() if is_known else None
            again = replace(self, saved=found, must_fit=False, verify=False)
            setattr(type(result), MADE_AGAIN, (made_again, again))
        if self.verify:
            check_two_steps(model, result, call_arguments(sample_input)).raise_if_different()
        return result

    @property
    def options(self) -> Options:
        """Those of parts."""
        own_graph, opaque = self.parsing["parse_graph"], self.parsing["recompute_opaque"]
        own = own_graph is None
        return Options(self.goal, self.solver, self.profile, self.opaque_modules, opaque, own, self.store)

    def now(self, model: torch.nn.Module, sample_input: Any) -> torch.nn.Module:
        """The model planned as it stands, without what unpickles it."""
        own_graph, options = self.parsing["parse_graph"], self.options
        if has_units(model) and has_inner_units(model):
            return optimize_units(model, options)
        in_one_plan = self.chunks > 1 or self.backend is not None or parse_graph_of(model, own_graph) is not None
        try:
            graph = self.graph_of(model, sample_input)
        except ParseError as problem:
            if in_one_plan:
                raise
            return self._in_parts(model, sample_input, problem)
        is_wrapped = "forward" in vars(model)  # and what it is wrapped in knows nothing of parts
        heavy = {} if in_one_plan or is_wrapped else heavy_opaque(model, graph, options)
        budget = self.goal.memory_budget
        hooked = hooked_modules(dict(model.named_modules()))
        units = partial(optimize_units, options=options)
        anew = replace(self, saved=None, verify=False).now
        planner = None if self.solver == "none" else Replanner(self.make, budget, hooked, meets(self.goal), units, anew)

        def take_up(saved: SavedPlan) -> torch.nn.Module | None:
            if saved.kind == PARTS and heavy:
                return optimize_in_parts(model, sample_input, options, heavy, saved=saved)
            found = self._taken_up(model, sample_input, graph, self.goal, saved)
            return found and _as_a_whole(model, found, planner, self.submodule)

        if (started := self._started(take_up)) is not None:
            return started
        found: tuple[Graph, Plan] | SolveError
        try:
            found = self.plan(model, sample_input, graph, budget)
        except SolveError as error:
            found = error
        return in_parts_if_better(model, sample_input, options, heavy, found) or _as_a_whole(
            model, found, planner, self.submodule
        )

    def _in_parts(self, model: torch.nn.Module, sample_input: Any, problem: ParseError) -> torch.nn.Module:
        # Not where the error was caught: its traceback has that frame, which would hold it, and what is returned.
        in_parts = partial(in_parts_instead, model, sample_input, self.options, problem)
        started = self._started(in_parts)
        return in_parts(None) if started is None else started

    def _started(self, take_up: Callable[[SavedPlan], torch.nn.Module | None]) -> torch.nn.Module | None:
        """What is made of the saved plan; None without one, or where it does not do and need not."""
        if self.saved is None:
            return None
        try:
            return take_up(self.saved)
        except PlanError as error:
            if self.must_fit:
                raise
            log.info("a plan is made anew, as the saved one does not do: %s", error)
            return None

    def graph_of(self, model: torch.nn.Module, sample_input: Any, **other: Any) -> Graph:
        """The graph of a call."""
        given = {**self.parsing, **other}
        return parse(model, sample_input, profile=self.profile, opaque_modules=self.opaque_modules, **given)

    def plan(
        self, model: torch.nn.Module, sample_input: Any, graph: Graph, budget: Budget | None
    ) -> tuple[Graph, Plan]:
        """The plan for a graph within a budget, and the graph that it is for: one that was kept, or a new one."""
        goal, overhead = Goal(budget, self.goal.max_overhead), self.goal.max_overhead
        key = key_of("plan", structure_of(graph), goal, self.solver, self.chunks)
        asked: dict[str, Any] = {"memory_budget": budget, "max_overhead": overhead}

        def make() -> tuple[Graph, Plan]:
            found = self.store.found(key, partial(self._taken_up, model, sample_input, graph, goal))
            if found is not None:
                return found
            if self.chunks > 1:
                chunk_batch = optional("rewrites.chunking").chunk_batch
                found = chunk_batch(model, sample_input, graph, chunks=self.chunks, **self.parsing, **asked)
            else:
                keeps_little = self.is_one_of_many and self.solver == "optimal"
                plan = frugal_plan(self.options, graph) if keeps_little else self._solved(graph, asked)
                found = graph, plan
            self.store.keep(key, found[1].as_saved)
            return found

        if self.chunks > 1:
            return make()
        plan = agreed_plan(graph, (goal, self.solver), lambda: make()[1])
        if self.backend is None:
            return graph, plan
        compile_plan = optional("rewrites.compiled").compile_plan
        compiled: tuple[Graph, Plan] = compile_plan(
            model, sample_input, graph, plan, self.backend, **self.parsing, **asked
        )
        return compiled

    def _solved(self, graph: Graph, asked: dict[str, Any]) -> Plan:
        return solve(graph, solver=self.solver, effort=self.effort, **asked)

    def _taken_up(
        self, model: torch.nn.Module, sample_input: Any, graph: Graph, goal: Goal, saved: SavedPlan
    ) -> tuple[Graph, Plan] | None:
        def chunked(regions: tuple[tuple[str, str], ...]) -> Graph:
            given = {"chunks": self.chunks, "profile": graph.profile, **self.parsing}
            found: Graph = optional("rewrites.chunking").chunked_along(regions, model, sample_input, graph, **given)
            return found

        return taken_up(saved, graph, goal, self.chunks, chunked)

    def make(self, model: torch.nn.Module, sample_input: Any, budget: Budget | None) -> tuple[Graph, Plan]:
        """A plan for a call unlike the first, which a loss with the first one's targets bound in may not take."""
        with within_seconds(self.planning_seconds), self.store.times():
            try:
                graph = self.graph_of(model, sample_input)
            except InputError as error:
                graph = self.graph_of(model, sample_input, loss="outputs")
                log.info("what is planned for ends with the model's outputs: %s", error)
            return self.plan(model, sample_input, graph, budget)


def _as_a_whole(
    model: torch.nn.Module, found: tuple[Graph, Plan] | SolveError, planner: Replanner | None, name: str
) -> torch.nn.Module:
    """The model, or the submodule with a name, with one plan for everything."""
    if isinstance(found, SolveError):
        raise found
    graph, plan = found
    if plan.is_plain and plan.budget_bytes is None and planner is not None:
        level = logging.INFO if name else logging.WARNING
        log.log(level, "no plan needs less memory than the plain %s: %s", name or "model", plan.summary)
    else:
        log.info("ogc plans the %s: %s", name or "model", plan.summary)
    return _apply(model, graph, plan, planner)


def apply(model: torch.nn.Module, graph: Graph, plan: Plan) -> torch.nn.Module:
    """The module that :func:`optimize` returns, for a graph and a plan that were made before.

    It carries the plan over to inputs of other sizes too. Calls that differ otherwise run the plain model.

    Args:
        model: the module that ``graph`` was parsed from, unchanged since.
        graph: from :func:`ogc.parse`.
        plan: a plan for this graph, from :func:`ogc.solve` or :func:`ogc.make_plan`.

    Raises:
        PlanError: the graph has no program, or was weighed for a device that the model is not on.
    """
    return _apply(model, graph, plan, Replanner())


def _apply(model: torch.nn.Module, graph: Graph, plan: Plan, planner: Replanner | None) -> torch.nn.Module:
    if graph.program is None:
        raise PlanError("the graph has no program to run; use the graph that ogc.parse returned for the model")
    if plan.graph is not None and [op.name for op in plan.graph.operations] != [op.name for op in graph.operations]:
        raise PlanError("the plan was made for another graph; make one with ogc.solve(graph)")
    for node in graph.program.graph.find_nodes(op="get_attr"):
        try:
            get_attribute(model, graph.program.constants, node.target)
        except AttributeError:
            raise PlanError(f"the graph was parsed from another model: this one has no {node.target}") from None

    home = device_of_model(model)
    if any(True for _ in model.parameters()) and torch.device(graph.device).type != home.type:
        raise PlanError(f"the graph was weighed for {graph.device} but the model is on {home}; parse it there")
    return optimized_module(model, graph, plan, planner)
