"""A partitioner for torch.compile: what the forward saves, and what the backward recomputes and when, by a plan."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..graph import Graph
from ..plan import Plan
from ..plan.schedule import Schedule, Step
from ..solver import Budget, Goal, SolveOptions
from ..torch_state.compilers import CustomPartitioner, OrderedSet, hash_of_files, hold_order, partition_in_order
from .joint import JointGraph, is_seeded
from .kernels import Kernel, base_of, is_free, is_inlined, is_part, is_tensor

log = logging.getLogger(__name__)


@cache
def sources() -> str:
    """A hash of all code that a plan depends on."""
    paths = sorted(Path(__file__).parents[1].rglob("*.py"))
    return str(hash_of_files(tuple(map(str, paths))).hex())


class Partitioner(CustomPartitioner):
    """Plans the joint graph of each function that torch.compile compiles.

    ``torch.compile(model, options={"custom_partitioner_fn": ogc.Partitioner(memory_budget=0.5)})``

    Args:
        memory_budget, max_overhead, effort: as for :func:`ogc.solve`.
        fuses: whether a compiler fuses operators; else each runs by itself.

    Attributes:
        plans: those of the graphs that were compiled, in order; none of what Inductor found in its caches.
    """

    def __init__(
        self,
        *,
        memory_budget: Budget | None = None,
        max_overhead: float | None = None,
        effort: int = 1,
        fuses: bool = True,
    ) -> None:
        self.solving, self.fuses = SolveOptions(Goal(memory_budget, max_overhead), effort=effort), fuses
        self.plans: list[Plan] = []

    @property
    def options(self) -> dict[str, Any]:
        """Inductor's options with which the measured peak is the planned one: ``torch.compile(model, options=...)``.

        Inductor keeps a freed buffer for a later one where it thinks that there is room.
        """
        return {"custom_partitioner_fn": self, "allow_buffer_reuse": False}

    def __call__(self, gm: GraphModule, inputs: Sequence[object], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        """The forward and the backward of a joint graph."""
        kwargs.pop("compiler", None)
        parameters = kwargs.get("static_lifetime_input_indices") or ()
        joint = JointGraph(gm.graph, kwargs["num_fwd_outputs"], self.fuses, parameters)
        if not joint.later:
            return partition_in_order(gm, inputs, **kwargs)
        graph = joint.weighted(_device_of(joint))
        plan = self.plan_for(graph)
        self.plans.append(plan)
        log.info("a compiled graph of %d operations: %s", len(graph), plan.summary)
        waiting = Rewriting(gm, joint, Schedule(graph, plan.decisions)).run()
        for node in filter(is_seeded, joint.forward):  # or the backward, too, would draw what nothing reads
            node.meta["partitioner_tag"] = "must_be_in_forward"
        forward, backward = partition_in_order(gm, inputs, **kwargs)
        if self.fuses:
            hold(backward, waiting)
        return forward, backward

    def plan_for(self, graph: Graph) -> Plan:
        """The plan of a graph.

        Raises:
            SolveError: nothing fits the budget.
        """
        return self.solving.plan(graph)

    def uuid(self) -> str:
        """What Inductor's caches know a partitioner by. None would not keep them from what others compiled."""
        return f"{sources()} {self.solving} {self.fuses}"

    def __getstate__(self) -> dict[str, Any]:
        """Without plans: Inductor's caches pickle all options."""
        return {"solving": self.solving, "fuses": self.fuses, "plans": []}

    def __deepcopy__(self, memo: object) -> Partitioner:
        """Itself: Inductor copies all options."""
        return self


def _device_of(joint: JointGraph) -> torch.device:
    devices = {node.meta["val"].device for node in joint.forward if is_tensor(node)}
    return max(devices, key=lambda device: device.type != "cpu", default=torch.device("cpu"))


def hold(backward: GraphModule, waiting: Mapping[str, Sequence[str]]) -> None:
    """Let nodes wait for others though they read nothing of them, so that no scheduler moves them up."""
    by_name = {node.name: node for node in backward.graph.nodes}
    waits = {
        by_name[name]: OrderedSet(by_name[other] for other in others if other in by_name)
        for name, others in waiting.items()
        if name in by_name
    }
    hold_order(backward.graph, waits)
    backward.recompile()


class Rewriting:
    """Puts recomputations into the backward of a joint graph, as a schedule says; all else moves behind the forward.

    What the backward then reads of the forward is what is saved.
    """

    def __init__(self, gm: GraphModule, joint: JointGraph, schedule: Schedule) -> None:
        self.graph, self.joint, self.schedule = gm.graph, joint, schedule
        self.copies: dict[tuple[int, int], Node] = {}  # the node that holds a run's copy of a value
        self.latest: dict[int, Node] = {}
        self.values = {base: v for v, base in enumerate(joint.values)}
        self.module = gm
        (self.end,) = (node for node in self.graph.nodes if node.op == "output")
        self.placed: set[Node] = set()
        self.kernel: list[Node] = []  # what was placed for the kernel at hand
        self.last: tuple[Node, ...] = ()  # what the next kernel waits for: the last of the backward that is not fused,
        self.left: list[Node] = []  # and before a recomputation also what fused ones left, that these run before it
        self.following: set[Node] = set()  # what cannot run before that
        self.waiting: dict[Node, tuple[Node, ...]] = {}

    def run(self) -> dict[str, list[str]]:
        """Rewrite the graph. Returns, for each node that could run earlier than planned, which nodes it waits for."""
        turns: dict[int, list[Kernel]] = {}
        for kernel in self.joint.backward.kernels:
            turns.setdefault(kernel.turn, []).append(kernel)
        with self.graph.inserting_before(self.end):
            for step in self.schedule.steps[len(self.joint.kernels.kernels) :]:
                if step.is_backward:
                    self._backward(step, turns.get(step.operation, ()))
                else:
                    self._recompute(step)
            for node in self.joint.later:  # views that are returned, and what no kernel computes
                self._place(node, _Copying(self, {}, False))
        for node in self.graph.nodes:
            node.meta.pop("recompute", None)
        self.graph.eliminate_dead_code()
        self.graph.lint()
        self.module.recompile()
        return {node.name: [waited.name for waited in others] for node, others in self.waiting.items()}

    def _recompute(self, step: Step) -> None:
        """Copy the nodes of an operation, as far as its run makes what they leave in memory."""
        if self.left:
            self.last, self.left, self.following = (*self.last, *self.left), [], set()
        writes = self.schedule.graph.operations[step.operation].writes
        made = self.schedule.runs[step.run].made.intersection(writes)
        copies = self._copies_for(step) | {v: self._copy(step.run, v) for v in writes if v not in made}
        local = _Copying(self, copies, True)
        for v in sorted(made):
            self.copies[step.run, v] = self.latest[v] = local.copy(self.joint.values[v])
        self._end_kernel()

    def _backward(self, step: Step, kernels: Sequence[Kernel]) -> None:
        """Move the kernels whose turn it is to the end, and let them read the copies that are there."""
        copies = self._copies_for(step)
        for kernel in kernels:
            local = _Copying(self, copies, False)
            for node in kernel.nodes:
                self._place(node, local)
            self._end_kernel()
            if kernel.is_fused:
                self.left += self.joint.left_by(kernel)
            else:
                self.last, self.following = tuple(kernel.nodes), {*kernel.nodes}

    def _place(self, node: Node, local: _Copying) -> None:
        """Move a node of the backward to the end, behind all that it reads."""
        if node in self.placed or node not in self.joint.turns:
            return
        self.placed.add(node)
        for given in node.all_input_nodes:
            self._place(given, local)
        copies = {one: local.copy(one) for one in node.all_input_nodes if one in self.joint.in_forward}
        self.end.prepend(node)
        node.args, node.kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: copies.get(n, n))
        self.kernel.append(node)

    def _end_kernel(self) -> None:
        """Let what was placed wait for the last kernel of the backward, where it does not read of it anyway."""
        placed, self.kernel = self.kernel, []
        if not self.last:
            return
        for node in placed:
            given = [base_of(one) for one in node.all_input_nodes]
            if not self.following.isdisjoint(node.all_input_nodes):
                self.following.add(node)
            elif not is_free(node) and not is_part(node) and not all(map(is_inlined, given)):
                self.waiting[node] = self.last
                self.following.add(node)

    def _copies_for(self, step: Step) -> dict[int, Node]:
        """For each value that a step needs, the node that holds its copy."""
        return {v: self._copy(run, v) for run, v in self.schedule.reads(step)}

    def _copy(self, run: int, v: int) -> Node:
        return self.copies.get((self.schedule.source(run, v), v), self.joint.values[v])


class _Copying:
    """Copies nodes of the forward for one use, each once.

    Args:
        copies: the nodes that hold values, by the numbers of these. Others that make values are copied in a
            recomputation (``recomputes``); else the last copy of the value is taken.
    """

    def __init__(self, rewriting: Rewriting, copies: dict[int, Node], recomputes: bool) -> None:
        self.rewriting, self.copies, self.recomputes = rewriting, copies, recomputes
        self.known: dict[Node, Node] = {}

    def copy(self, node: Node) -> Node:
        """A node that holds what one of the forward holds."""
        holds = is_tensor(node) or isinstance(node.meta.get("val"), (tuple, list))
        if node not in self.rewriting.joint.in_forward or not holds or node.op == "get_attr":
            return node
        if node not in self.known:
            self.known[node] = self._copied(node)
        return self.known[node]

    def _copied(self, node: Node) -> Node:
        rewriting, v = self.rewriting, self.rewriting.values.get(node)
        if v in self.copies:
            return self.copies[v]
        if v is not None and not self.recomputes:
            return rewriting.latest.get(v, node)
        new = rewriting.graph.node_copy(node, self.copy)
        new.meta = {**node.meta, "partitioner_tag": "is_backward"}
        rewriting.kernel.append(new)
        return new
