"""The backend ``"ogc"`` of torch.compile: what dynamo captures is planned, and runs as it is or compiled."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4
from weakref import WeakValueDictionary

import torch
from torch.fx import GraphModule

from ..errors import InputError, SolveError
from ..graph import Graph
from ..plan import Plan
from ..program.program import tensor_leaves
from ..solver import Goal
from ..solver.goal import LEAST_PEAK
from ..torch_state.compilers import aot_autograd, compile_by_inductor, run_as_it_is
from .partitioner import Partitioner
from .sharing import least_shared, saved_bytes, shared

log = logging.getLogger(__name__)

GOALS = ("memory_budget", "max_overhead", "effort")
"""The options of the backend that are a partitioner's."""


def backend(
    gm: GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """``torch.compile(model, backend="ogc", options={"memory_budget": 0.5})``.

    A budget in bytes is for all graphs of a model together. They are known after the first step, in which each has what
    those before it leave, or takes as little as it can; the second step plans them together, where there are several. A
    share or an overhead is each graph's own.

    Args:
        gm, inputs: what dynamo captured, and what it is called with.
        options: ``memory_budget``, ``max_overhead`` and ``effort``, as for :func:`ogc.solve`; ``inductor``: whether
            Inductor compiles what is planned, or each operator runs by itself, as in eager mode. With it, all options
            of Inductor.
        mode: none; torch hands on that of ``torch.compile``.

    Returns:
        What computes the same.

    Raises:
        InputError: an option is unknown, or of the wrong kind.
        SolveError: nothing fits the budget.
    """
    if mode is not None:
        raise InputError(
            f'backend="ogc" has no mode {mode!r}; the same with Inductor: options={{"inductor": True, '
            f'"memory_budget": ..., **torch._inductor.list_mode_options({mode!r})}}'
        )
    settings = Settings(options or {})
    is_one_size = all(isinstance(given, torch.Tensor) for given in inputs)
    if not (settings.goal.is_in_bytes and is_one_size and torch.is_grad_enabled()):
        return settings.compiled(gm, inputs, settings.partitioner())
    return _Part(_group_of(options, settings), gm, inputs)


ON_CPU = {"layout_optimization": False}
"""Options of Inductor on a CPU, where it else copies the weights of convolutions into another layout: a step of a
ResNet-18 at 64 x 64 peaked at 93 MiB in the place of 61."""


def _is_on_cpu(inputs: Sequence[Any]) -> bool:
    return all(given.device.type == "cpu" for given in inputs if isinstance(given, torch.Tensor))


class Settings:
    """The options of the backend.

    Raises:
        InputError: one is unknown, or of the wrong kind.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.goals = {name: options[name] for name in GOALS if name in options}
        self.has_inductor = options.get("inductor", False)
        self.others = {name: value for name, value in options.items() if name not in (*GOALS, "inductor")}
        if not isinstance(self.has_inductor, bool):
            raise InputError(f"the option inductor must be True or False, not {self.has_inductor!r}")
        if self.others and not self.has_inductor:
            raise InputError(
                f'backend="ogc" has no option {", ".join(map(repr, sorted(self.others)))}; it has {", ".join(GOALS)} '
                "and inductor, and with inductor those of Inductor"
            )
        self.goal = Goal(**{name: value for name, value in self.goals.items() if name != "effort"})

    def partitioner(self) -> Partitioner:
        return Partitioner(**self.goals, fuses=self.has_inductor)

    def compiled(self, gm: GraphModule, inputs: Sequence[Any], partitioner: Partitioner) -> Callable[..., Any]:
        """What computes the same as a graph, by the plan of a partitioner."""
        if self.has_inductor:
            options = {**partitioner.options, **(ON_CPU if _is_on_cpu(inputs) else {}), **self.others}
            return compile_by_inductor(gm, list(inputs), config_patches=options)
        compiler = aot_autograd(fw_compiler=run_as_it_is, partition_fn=partitioner, keep_inference_input_mutations=True)
        compiled: Callable[..., Any] = compiler(gm, inputs)
        return compiled


class _OneOfMany(Partitioner):
    """Plans one graph of a model that may have more."""

    def __init__(self, group: _Group) -> None:
        super().__init__(**group.settings.goals, fuses=group.settings.has_inductor)
        self.group, self.own = group, uuid4().hex
        self.graph: Graph | None = None
        self.chosen: Plan | None = None

    def plan_for(self, graph: Graph) -> Plan:
        if self.chosen is not None:
            return self.chosen
        self.graph = graph
        used = 0 if self.group.is_over else sum(part.saved_bytes for part in self.group.step)
        try:
            return self.solving.plan(graph, Goal(max(self.group.budget - used, 1)))
        except SolveError as error:
            if (error.least_peak_bytes or 0) > self.group.budget:
                raise
            return self.solving.plan(graph, LEAST_PEAK)

    def uuid(self) -> str:
        """Its own while the plan depends on the other graphs; then that of the plan that was chosen.

        What Inductor finds in its caches has no graph that could be planned with the others.
        """
        return f"{super().uuid()} {self.chosen.decisions if self.chosen else self.own}"


class _Part:
    """One graph of a model.

    Attributes:
        plan: by which it runs; None of a graph without backward.
    """

    def __init__(self, group: _Group, gm: GraphModule, inputs: Sequence[Any]) -> None:
        self.group, self.gm = group, gm
        self.partitioner = _OneOfMany(group)
        self._compile(inputs)

    def _compile(self, inputs: Sequence[Any]) -> None:
        self.run = self.group.settings.compiled(self.gm, inputs, self.partitioner)
        plans = self.partitioner.plans
        self.plan = self.partitioner.chosen or (plans[-1] if plans else None)

    @property
    def saved_bytes(self) -> int:
        """Bytes that its forward leaves."""
        graph, plan = self.partitioner.graph, self.plan
        return 0 if graph is None or plan is None else saved_bytes(graph, plan)

    def __call__(self, *args: Any) -> Any:
        is_counted = torch.is_grad_enabled() and self.plan is not None
        if is_counted:
            self.group.called(self)
        if self.partitioner.chosen not in (None, self.plan):
            self._compile(args)
        results = self.run(*args)
        if is_counted:
            self.group.wait_for_backward(results)
        return results


class _Group:
    """The graphs of one model, in the order in which a step calls them."""

    def __init__(self, options: object, settings: Settings) -> None:
        self.options, self.settings = options, settings
        self.step: list[_Part] = []
        self.planned: list[list[_Part]] = []
        self.is_over = False  # a backward has begun

    @property
    def budget(self) -> int:
        """Bytes for all of them."""
        return self.settings.goal.budget_bytes(0) or 0

    def called(self, part: _Part) -> None:
        """Note a call; where a step begins anew, plan those of the one before together."""
        if self.is_over:
            if len(self.step) > 1 and self.step not in self.planned:
                self._plan(self.step)
                self.planned.append(self.step)
            self.step, self.is_over = [], False
        self.step.append(part)

    def wait_for_backward(self, results: Any) -> None:
        """Note when the backward of a call begins."""
        nodes = [t.grad_fn for t in tensor_leaves(results) if t.grad_fn is not None]
        if nodes:
            nodes[0].register_prehook(self._backward_begins)

    def _backward_begins(self, gradients: Any) -> None:
        self.is_over = True

    def _plan(self, parts: Sequence[_Part]) -> None:
        graphs = [part.partitioner.graph for part in parts if part.partitioner.graph is not None]
        plans = shared(graphs, self.budget)
        if plans is None:
            least = least_shared(graphs)
            raise SolveError(
                f"no plans found for the {len(graphs)} calls of graphs in a step of this model that together peak at "
                f"or below {self.budget} bytes; the smallest peak is some {least} bytes",
                least,
            )
        for part, plan in zip(parts, plans, strict=True):
            part.partitioner.chosen = plan
        log.info("%d graphs share %d bytes: %s", len(plans), self.budget, "; ".join(plan.summary for plan in plans))


_groups: WeakValueDictionary[int, _Group] = WeakValueDictionary()
"""The graphs of each torch.compile, by the identity of its options, which each group holds so that no others get it."""


def _group_of(options: object, settings: Settings) -> _Group:
    return _groups.setdefault(id(options), _Group(options, settings))
