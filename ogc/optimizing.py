"""The one function above parser, solver and runtime."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from typing import Any

import torch

from .checking.check import ONE_STEP
from .device.fitting import within_device
from .device.needs import fixed_needs
from .device.optimizer import Optimizer
from .errors import InputError, ParseError, PlanError, SolveError
from .graph import Graph
from .in_parts import Options, PartsPlan, heavy_leaves, in_parts_if_better, in_parts_instead, optimize_in_parts
from .parser import LeafModules, Loss, ParseGraph, hooked_modules, parse
from .parser.arguments import call_arguments, check_model
from .parser.custom import parse_graph_of
from .parser.loss import modules_of, tensors_of
from .plan.plan import Plan
from .plan.saving import PARTS, SavedPlan
from .program.program import device_of_model, get_attribute
from .program.structures import Call
from .replan import Replanner, meets
from .runtime import optimized_module
from .runtime.module import MADE_AGAIN, OWN_PLAN, instance_around
from .runtime.runner import is_planned_call
from .runtime.with_loss import TARGETS, with_loss
from .slicing import Stretches, slice_batch, sliced_along
from .solver import Budget, Wish, solve
from .stored import NOWHERE, Store, key_of, saved_plan, taken_up
from .torch_state.forwards import original_class, plain_forward

log = logging.getLogger(__name__)


def optimize(
    model: torch.nn.Module,
    sample_input: Any,
    *,
    loss: Loss | None = None,
    holds_outputs: bool = True,
    outputs: str = "all",
    targets: Any = None,
    parse_graph: ParseGraph | bool | None = None,
    memory_budget: Budget | None = None,
    max_overhead: float | None = None,
    device_memory: Budget | None = None,
    optimizer: Optimizer | None = None,
    ddp: bool | str = False,
    solver: str = "optimal",
    profile: str = "auto",
    batch_slices: int = 1,
    leaf_modules: LeafModules = (),
    repeatable_leaves: LeafModules | bool | None = None,
    plan: str | PathLike[str] | Plan | PartsPlan | SavedPlan | None = None,
    cache_dir: str | PathLike[str] | None = None,
    verify: bool = False,
) -> torch.nn.Module:
    """The same model with less activation memory: the least there is, or as much less as is asked for.

    Args:
        model: any module whose forward takes and returns tensors; it stays usable and shares its
            parameters, buffers and submodules with the result.
        sample_input: a tensor, a tuple of positional arguments or a dict of keyword arguments, shaped like
            a training batch and on the model's device.
        loss: how a step goes on: ``loss(output)`` returns the one number that the backward starts from, such as a
            criterion with its targets bound in. What it computes counts too; see :func:`ogc.parse`.
        holds_outputs: the caller holds all outputs through the backward; with False nothing but the loss.
        outputs: with ``"loss"`` the model returns its loss, and None in the place of all other tensors, where a plan
            runs: those need not exist whole then. Calls that run the plain model return everything. A model that
            returns no loss takes ``loss`` behind its forward then, and returns what that returns.
        targets: what ``loss`` takes besides the output, a tensor or a structure of tensors: ``loss(output, targets)``.
            With ``outputs="loss"`` each call takes its own: ``result(images, targets=labels)``.
        parse_graph: a function that returns a graph of the model made by hand; see :func:`ogc.parse`.
        memory_budget: recompute as little as possible such that the activations' peak fits: bytes, a text
            such as ``"8GB"`` or ``"512MiB"``, or a float in (0, 1], a share of the plain model's peak.
        max_overhead: the least peak with at most this share of a plain step's time recomputed.
        device_memory: in place of ``memory_budget``, what the whole step may take, such as ``"24GB"``: what
            :func:`ogc.estimate` finds beside activations is taken off. On CUDA what its allocator reserves counts.
        optimizer: what is to train the model, or a class such as ``torch.optim.AdamW``; for ``device_memory``.
        ddp: whether it is trained in DistributedDataParallel; for ``device_memory``, see :func:`ogc.estimate`.
        solver: another name than ``"optimal"`` plans by a method to compare with; see :func:`ogc.solve`.
        profile: how operations are weighed, ``"auto"``, ``"time"``, ``"estimate"`` or ``"measure"``; see
            :func:`ogc.parse`.
        batch_slices: allow stretches of convolutions, activations, pooling, linear layers and layer norms to
            run in so many slices of the batch where that makes the plan better. Results then differ from
            the plain model's by rounding: sums over the batch are added up in another order.
        leaf_modules: names and types of submodules to call as they are, never in parts; see :func:`ogc.parse`.
        repeatable_leaves: names and types of submodules such that leaves in them may be called again for their
            backward; True for all, False for none. Without it that is found out. See :func:`ogc.parse`.
        plan: a file that ``result.plan.save(path)`` wrote, or such a plan, to start from without a search. It has to
            fit the model and the sample input. One that does not keep the wish here is told in the log, and made anew.
        cache_dir: a folder in which plans are found again by what the model computes, the wish and the solver, and
            kept when they are made, those for other calls too; with the times that were measured for them.
        verify: run one step of the result and one of the plain model on the sample input and compare them. That takes
            the time and the memory of a plain step; :func:`ogc.check` tries more.

    Returns:
        A module of a subclass of the model's class. Calls like the sample input in training recompute by
        ``result.plan``. For inputs of other sizes it is carried over where the model computes the same
        program for them; calls that differ otherwise (types, flags, autocast) are planned for when they
        come, by the same wish. Where the model's own forward cannot be represented, or leaves hold much of the
        memory, its submodules are planned instead, and ``result.plan`` is an :class:`ogc.PartsPlan`.
        Eval mode and ``torch.no_grad()`` run the original forward. Outputs,
        gradients, buffers and the random stream are bitwise those of the plain model, unless the batch is
        sliced.

    Raises:
        InputError: an argument is of the wrong kind; the message says what was expected.
        ParseError: neither the forward nor any part of it can be represented faithfully; the message says why.
        SolveError: nothing fits the budget; the message says what would.
        PlanError: ``plan`` is no plan, or does not fit; the message says in what.
        CheckError: with ``verify``, where the result differs from the plain model.
    """
    _check_slices(batch_slices, solver, verify)
    store, saved = Store.at(cache_dir), None if plan is None else saved_plan(plan)
    if targets is not None and not callable(loss):
        raise InputError("targets= is what loss= takes besides the output; give loss= too")
    if callable(loss) and outputs == "loss":
        model, sample_input = _returning_its(loss, model, sample_input, targets)
        loss = None
    elif callable(loss) and targets is not None:
        loss = partial(_loss_of, loss, targets)
    parsing: dict[str, Any] = {
        "loss": loss,
        "holds_outputs": holds_outputs,
        "outputs": outputs,
        "parse_graph": parse_graph,
        "repeatable_leaves": repeatable_leaves,
    }

    def within(budget: Budget | None) -> torch.nn.Module:
        wish = Wish(budget, max_overhead)
        planning = _Planning(parsing, profile, leaf_modules, wish, solver, batch_slices, store, saved)
        return planning.optimized(model, sample_input)

    if device_memory is None:
        optimized = within(memory_budget)
    elif memory_budget is None:
        needs = fixed_needs(model, sample_input, optimizer, ddp=ddp)
        optimized = within_device(needs, device_memory, within, lambda made: getattr(type(made), OWN_PLAN))
    else:
        raise InputError("give memory_budget or device_memory, not both")
    if verify:
        args, kwargs = call_arguments(sample_input)
        ONE_STEP.check(model, optimized, *args, **kwargs).raise_if_different()
    return optimized


def _loss_of(loss: Callable[..., torch.Tensor], targets: Any, output: Any) -> torch.Tensor:
    return loss(output, targets)


def _returning_its(
    loss: Callable[..., torch.Tensor], model: torch.nn.Module, sample_input: Any, targets: Any
) -> tuple[torch.nn.Module, Call]:
    """The model that returns its loss, and a sample of what it takes.

    Raises:
        InputError: the loss holds tensors, or trains.
    """
    check_model(model)
    if held := tensors_of(loss):
        raise InputError(
            f'with outputs="loss" the loss runs in every step, but it holds on to a tensor of shape '
            f"{list(held[0].shape)} as it is now; hand it in with each call: loss(output, targets) and targets="
        )
    if any(parameter.requires_grad for module in modules_of(loss) for parameter in module.parameters()):
        raise InputError("the loss has parameters that require grad; make it a submodule of the model, whose they are")
    args, kwargs = call_arguments(sample_input)
    given = {} if targets is None else {TARGETS: targets}
    return with_loss(model, loss, bool(given)), Call(args, {**kwargs, **given})


@dataclass(frozen=True)
class _Planning:
    """The arguments of :func:`optimize` by which models are parsed and planned; ``parsing`` has those of parse.

    The first plan is ``saved``, if that keeps the wish; where it need not fit, another model is planned anew.
    """

    parsing: dict[str, Any]
    profile: str
    leaf_modules: LeafModules
    wish: Wish
    solver: str
    batch_slices: int
    store: Store = NOWHERE
    saved: SavedPlan | None = None
    must_fit: bool = True

    def optimized(self, model: torch.nn.Module, sample_input: Any) -> torch.nn.Module:
        """The model by one plan, or in parts where that cannot be or is worse."""
        with self.store.times():
            result = self._optimized(model, sample_input)
        found = getattr(type(result), OWN_PLAN).as_saved()
        setattr(type(result), MADE_AGAIN, (_unpickled, replace(self, saved=found, must_fit=False)))
        return result

    def _optimized(self, model: torch.nn.Module, sample_input: Any) -> torch.nn.Module:
        own_graph, leaves = self.parsing["parse_graph"], self.parsing["repeatable_leaves"]
        own = own_graph is None
        options = Options(self.wish, self.solver, self.profile, self.leaf_modules, leaves, own, self.store)
        in_one_plan = self.batch_slices > 1 or parse_graph_of(model, own_graph) is not None
        try:
            graph = self.graph_of(model, sample_input)
        except ParseError as problem:
            if in_one_plan:
                raise
            in_parts = partial(in_parts_instead, model, sample_input, options, problem)
            started = self._started(in_parts)
            return in_parts(None) if started is None else started
        is_wrapped = "forward" in vars(model)  # and what it is wrapped in knows nothing of parts
        heavy = {} if in_one_plan or is_wrapped else heavy_leaves(model, graph, options)
        budget = self.wish.memory_budget
        hooked = hooked_modules(dict(model.named_modules()))
        planner = None if self.solver == "none" else Replanner(self.make, budget, hooked, meets(self.wish))

        def take_up(saved: SavedPlan) -> torch.nn.Module | None:
            if saved.kind == PARTS and heavy:
                return optimize_in_parts(model, sample_input, options, heavy, saved=saved)
            found = self._taken_up(model, sample_input, graph, self.wish, saved)
            return found and _as_a_whole(model, found, planner)

        if (started := self._started(take_up)) is not None:
            return started
        found: tuple[Graph, Plan] | SolveError
        try:
            found = self.plan(model, sample_input, graph, budget)
        except SolveError as error:
            found = error
        return in_parts_if_better(model, sample_input, options, heavy, found) or _as_a_whole(model, found, planner)

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
        return parse(model, sample_input, profile=self.profile, leaf_modules=self.leaf_modules, **given)

    def plan(
        self, model: torch.nn.Module, sample_input: Any, graph: Graph, budget: Budget | None
    ) -> tuple[Graph, Plan]:
        """The plan for a graph within a budget, and the graph that it is for: one that was kept, or a new one."""
        wish, overhead = Wish(budget, self.wish.max_overhead), self.wish.max_overhead
        key = key_of("plan", graph, wish, self.solver, self.batch_slices)
        found = self.store.found(key, partial(self._taken_up, model, sample_input, graph, wish))
        if found is not None:
            return found
        asked: dict[str, Any] = {"memory_budget": budget, "max_overhead": overhead}
        if self.batch_slices > 1:
            found = slice_batch(model, sample_input, graph, slices=self.batch_slices, **self.parsing, **asked)
        else:
            found = graph, solve(graph, solver=self.solver, **asked)
        self.store.keep(key, found[1].as_saved)
        return found

    def _taken_up(
        self, model: torch.nn.Module, sample_input: Any, graph: Graph, wish: Wish, saved: SavedPlan
    ) -> tuple[Graph, Plan] | None:
        def sliced(stretches: Stretches) -> Graph:
            given = {"slices": self.batch_slices, "profile": graph.profile, **self.parsing}
            return sliced_along(stretches, model, sample_input, graph, **given)

        return taken_up(saved, graph, wish, self.batch_slices, sliced)

    def make(self, model: torch.nn.Module, sample_input: Any, budget: Budget | None) -> tuple[Graph, Plan]:
        """A plan for a call unlike the first, which a loss with the first one's targets bound in may not take."""
        with self.store.times():
            try:
                graph = self.graph_of(model, sample_input)
            except InputError as error:
                graph = self.graph_of(model, sample_input, loss="outputs")
                log.info("what is planned for ends with the model's outputs: %s", error)
            return self.plan(model, sample_input, graph, budget)


def _unpickled(model: torch.nn.Module, planning: _Planning) -> torch.nn.Module:
    """The module that was pickled, which is planned at its first call in training."""
    training, found = model.training, list[torch.nn.Module]()

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not found and not is_planned_call(self, training):
            return plain_forward(self)(*args, **kwargs)
        if not found:
            found.append(planning.optimized(model, Call(args, kwargs)))
            made = vars(type(found[0]))
            for name in made.keys() & {"plan", "graph", "code", "report"}:  # unless the model has such an attribute
                setattr(type(self), name, made[name])
        return found[0].forward(*args, **kwargs)

    result = instance_around(model, original_class(model).__name__, {"forward": forward}, {})
    setattr(type(result), MADE_AGAIN, (_unpickled, planning))
    return result


def _check_slices(batch_slices: int, solver: str, verify: bool) -> None:
    if isinstance(batch_slices, bool) or not isinstance(batch_slices, int) or batch_slices < 1:
        raise InputError(f"batch_slices must be a number of slices, 1 for none, not {batch_slices!r}")
    if batch_slices > 1 and solver != "optimal":
        raise InputError(f"solver={solver!r} does not slice the batch; only 'optimal' does")
    if verify and batch_slices > 1:
        raise InputError("verify=True compares bit by bit, but a sliced batch is equal up to rounding only")


def _as_a_whole(
    model: torch.nn.Module, found: tuple[Graph, Plan] | SolveError, planner: Replanner | None
) -> torch.nn.Module:
    """The model with one plan for everything."""
    if isinstance(found, SolveError):
        raise found
    graph, plan = found
    if plan.is_plain and plan.budget_bytes is None and planner is not None:
        log.warning("no plan needs less memory than the plain model (%.1f MB)", plan.plain_peak_bytes / 1e6)
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
