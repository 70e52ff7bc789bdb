"""A model with the plans that its goal asks for: as a whole, in parts, or unit by unit."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from .checking.check import check_two_steps
from .errors import InputError, ParseError, PlanError, SolveError, optional
from .given import memory_bytes
from .graph import Graph
from .in_parts import (
    check_goal_of_units,
    frugal_plan,
    heavy_opaque,
    in_parts_if_better,
    in_parts_instead,
    optimize_in_parts,
    optimize_units,
    shards_alone,
    with_calls_beside,
)
from .parser import hooked_modules
from .parser.arguments import call_arguments, check_model, check_tensors, sample_of
from .parser.custom import parse_graph_of
from .parser.forward.flat import saved_bytes
from .parser.traced import RECORD
from .plan import Fingerprint, Plan, SavedPlan, plan_on
from .plan.saving import PARTS, structure_of
from .planning import Given, GraphAndPlan, OfGraph, PlanOptions, Replanner, look_for, meets, tell_broken
from .program.program import Optimizer, device_of_model, get_attribute
from .program.structures import Call
from .runtime import optimized_module
from .runtime.module import MADE_AGAIN, OWN_PLAN
from .runtime.when_called import made_again, planned_when_called
from .solver import LEAST, Budget
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
        own = shards_alone(model) if has_units(model) else model
        needs = sizing.fixed_needs(own, sample_input, self.optimizer, ddp=self.ddp, gradients=self.gradients)
        parsing = replace(planning.options.parsing, gradients=needs.when)

        def optimized(budget: Budget) -> torch.nn.Module:
            options = replace(planning.options.within(budget), parsing=parsing)
            return replace(planning, options=options, verify=False).optimized(model, sample_input)

        found: torch.nn.Module = sizing.within_device(
            needs, self.memory, optimized, lambda made: getattr(type(made), OWN_PLAN)
        )
        return found


@dataclass(frozen=True)
class Whole(OfGraph):
    """The plan of a model, or of a submodule, for one call; the graph that it runs on may have regions in chunks."""

    model: torch.nn.Module
    sample_input: Any
    chunks: int
    is_one_of_many: bool

    @property
    def asked(self) -> tuple[Any, ...]:
        return "plan", structure_of(self.graph), self.chunks, self.is_one_of_many

    def restored(self, saved: SavedPlan) -> GraphAndPlan:
        graph, goal = self.graph, self.options.goal
        if saved.kind == PARTS:
            raise PlanError("the plan is for a model in parts, but this one is planned as a whole")
        if saved.unchunked is not None:
            if difference := saved.unchunked.difference(Fingerprint.of(graph)):
                raise PlanError(f"the plan does not fit the graph, which has {difference}")
            if saved.chunks != self.chunks:
                raise PlanError(f"the plan runs regions in {saved.chunks} chunks of the batch; give chunks= so many")
            parsing, chunked_along = self.options.parsing, optional("rewrites.chunking").chunked_along
            graph = chunked_along(saved.regions, self.model, self.sample_input, graph, self.chunks, parsing)
        plan = plan_on(graph, saved)
        budget = goal.budget_bytes(plan.plain_peak_bytes)
        return graph, replace(plan, budget_bytes=budget, max_overhead=goal.max_overhead)

    def taken_up(self, saved: SavedPlan) -> GraphAndPlan | None:
        (graph, plan), goal = self.restored(saved), self.options.goal
        keeps = meets(goal)
        if keeps is None or keeps(graph, plan):
            return graph, plan
        tell_broken(goal, plan.peak_bytes, plan.overhead)
        return None

    def searched(self) -> GraphAndPlan:
        parsing, solving = self.options.parsing, self.options.solving
        if self.chunks > 1:
            chunked_plan = optional("rewrites.chunking").chunked_plan
            found: GraphAndPlan = chunked_plan(self.model, self.sample_input, self.graph, self.chunks, parsing, solving)
            return found
        is_frugal = self.is_one_of_many and solving.solver == "optimal"
        return self.graph, frugal_plan(solving, self.graph) if is_frugal else solving.plan(self.graph)


@dataclass(frozen=True)
class Planning:
    """What :func:`optimize` was asked for; :mod:`ogc.planning` has the order in which plans are looked for."""

    options: PlanOptions
    chunks: int
    given: Given
    backend: str | None = None
    device: OnDevice | None = None
    verify: bool = False
    submodule: str = ""
    is_one_of_many: bool = False

    def result(self, model: torch.nn.Module, sample_input: Any, plain: torch.nn.Module) -> torch.nn.Module:
        """What :func:`optimize` returns for a model, which may have a loss behind the ``plain`` one."""
        if sample_input is None or has_units(model):
            self.check(model)
            made = planned_when_called(model, self)
        else:
            made = self.optimized(model, sample_input)
        return with_calls_beside(made, plain, self.of_submodule)

    def again(self, model: torch.nn.Module) -> torch.nn.Module:
        """The same of a model that was unpickled."""
        return with_calls_beside(planned_when_called(model, self), model, self.of_submodule)

    def of_submodule(self, name: str, module: torch.nn.Module, is_one_of_many: bool) -> Planning:
        """What plans calls of a submodule by themselves: a budget holds for each."""
        options = self.options.of_submodule(name, module)
        return Planning(options, self.chunks, Given(), self.backend, submodule=name, is_one_of_many=is_one_of_many)

    def for_least(self) -> Planning:
        """The same for the least peak, whatever the device has."""
        return replace(self, options=self.options.within(LEAST), device=None)

    def check(self, model: torch.nn.Module) -> None:
        """Raise InputError if an argument is of the wrong kind, as far as that is known without a call."""
        if not has_units(model):
            check_model(model, may_lack_content=True)
        elif self.verify or self.backend is not None:
            raise InputError("verify= and compile= need all of a model, and this one is sharded: leave them out")
        elif self.options.needs_one_plan:
            raise InputError(f"{self.options.needs_one_plan} one plan of all of a model, and this one is sharded")
        else:
            check_goal_of_units(model, self.options, self.chunks)
        if self.device is not None:
            memory_bytes(self.device.memory, "device_memory")
        self.options.parsing.check(model)

    def bytes_of_step(self, model: torch.nn.Module, call: Call) -> int:
        """What a step with this call takes at least. OgcError: nothing could be planned for it."""
        if has_inner_units(model):
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
            with self.options.while_planning(), remembering():
                result = self.now(model, sample_input)
            plan = getattr(type(result), OWN_PLAN)
            is_known = self.backend is None and not isinstance(plan, property)  # of units none is; code is not saved
            found = Given(plan.as_saved() if is_known else None, must_fit=False)
            setattr(type(result), MADE_AGAIN, (made_again, replace(self, given=found, verify=False)))
        if self.verify:
            check_two_steps(model, result, call_arguments(sample_input)).raise_if_different()
        return result

    def now(self, model: torch.nn.Module, sample_input: Any) -> torch.nn.Module:
        """The model planned as it stands, without what unpickles it."""
        options = self.options
        if has_units(model) and has_inner_units(model):
            if options.in_flight > 1:
                raise ParseError("in_flight= needs one plan of all of a model, and this one is sharded")
            return optimize_units(model, sample_input, replace(options, offloading=None))
        is_by_hand = parse_graph_of(model, options.parsing.parse_graph) is not None
        is_by_hand = is_by_hand or options.parsing.front_end != RECORD
        in_one_plan = self.chunks > 1 or self.backend is not None or is_by_hand or bool(options.needs_one_plan)
        try:
            graph = options.parse(model, sample_input)
        except ParseError as problem:
            if needs := options.needs_one_plan:
                raise ParseError(f"{needs} one plan of the whole model, leave it out: {problem}") from problem
            if in_one_plan:
                raise
            return in_parts_instead(model, sample_input, options, problem, partial(look_for, given=self.given))
        is_wrapped = "forward" in vars(model)  # and what it is wrapped in knows nothing of parts
        heavy = {} if in_one_plan or is_wrapped else heavy_opaque(model, graph, options)
        wanted = self.wanted(options, model, sample_input, graph)
        if heavy and self.given.saved is not None and self.given.saved.kind == PARTS:
            if (started := optimize_in_parts(model, sample_input, options, heavy, self.given)) is not None:
                return started
        elif (given := self.given(wanted)) is not None:
            return self.as_a_whole(model, given)
        found: GraphAndPlan | SolveError
        try:
            found = self.plan(wanted)
        except SolveError as error:
            found = error
        if (in_parts := in_parts_if_better(model, sample_input, options, heavy, found)) is not None:
            return in_parts
        if isinstance(found, SolveError):
            raise found
        return self.as_a_whole(model, found)

    def wanted(self, options: PlanOptions, model: torch.nn.Module, sample_input: Any, graph: Graph) -> Whole:
        """The plan that is looked for to run a call."""
        return Whole(options, graph, model, sample_input, self.chunks, self.is_one_of_many)

    def plan(self, wanted: Whole) -> GraphAndPlan:
        """The plan that is wanted, with its regions compiled if that was asked for."""
        found = look_for(wanted)
        if self.backend is None:
            return found
        compiled: GraphAndPlan = optional("rewrites.compiled").compile_plan(
            wanted.model, wanted.sample_input, *found, self.backend, wanted.options.parsing, wanted.options.solving
        )
        return compiled

    def make(self, model: torch.nn.Module, call: Call) -> GraphAndPlan:
        """A plan for a call unlike the first, which a loss with the first one's targets bound in may not take."""
        options = self.options
        with options.while_planning():
            try:
                graph = options.parse(model, call)
            except InputError as error:
                options = replace(options, parsing=replace(options.parsing, loss="outputs"))
                graph = options.parse(model, call)
                log.info("what is planned for ends with the model's outputs: %s", error)
            wanted = self.wanted(options, model, call, graph)
            try:
                return self.plan(wanted)
            except SolveError as error:
                log.warning("taking the least peak instead: %s", error)
                return self.plan(replace(wanted, options=options.within(LEAST)))

    def as_a_whole(self, model: torch.nn.Module, found: GraphAndPlan) -> torch.nn.Module:
        """The model with one plan for everything."""
        graph, plan = found
        name, is_optimized = self.submodule or "model", self.options.solving.solver != "none"
        if plan.is_plain and plan.budget_bytes is None and is_optimized:
            level = logging.INFO if self.submodule else logging.WARNING
            log.log(level, "no plan needs less memory than the plain %s: %s", name, plan.summary)
        else:
            log.info("ogc plans the %s: %s", name, plan.summary)
        return _apply(model, graph, plan, self.planner(model) if is_optimized else None)

    def planner(self, model: torch.nn.Module) -> Replanner:
        """What plans for calls unlike the first."""
        goal, hooked = self.options.goal, hooked_modules(dict(model.named_modules()))
        anew = replace(self, given=Given(), verify=False).now
        return Replanner(self.make, goal.memory_budget, hooked, meets(goal), anew)


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
