"""Where every tensor of every run of a plan comes from, and the statements that make it."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch

from ..graph import Graph
from ..operators.low_memory import LowMemory
from ..operators.registry import live_arguments, of
from ..plan.decisions import Decisions
from ..plan.schedule import FORWARD, Schedule
from ..program.opaque import Opaque, OpaqueCall, runs_once
from ..program.program import SHARED, Program, Saved, TensorRef, WithoutGrad
from ..torch_state.private import OpOverload


class Layout:
    """Where every tensor of every run comes from: the schedule, spelled out for fx nodes.

    Attributes:
        slots: for each run, a slot for each saved tensor (operation, number) that the run remakes.
        nodes: for each run, the nodes that it executes: its program and the views that it needs.
        held: for each run, the nodes that it starts from, each with the run that makes it.
        wanted: for each run, the nodes that it makes for runs inside it, each with these.
        repeated: the operations that some run executes again.
        trips: the values that are offloaded, each with when that is.
    """

    def __init__(self, graph: Graph, decisions: Decisions) -> None:
        self.schedule = schedule = Schedule(graph, decisions)
        self.graph = schedule.graph
        self.program: Program = graph.program
        self.low_memory = {t for t in decisions.low_memory if t in self.program.variants}
        self.saves = [
            self.program.variants[t].saves if t in self.low_memory else saves
            for t, saves in enumerate(self.program.saves)
        ]
        self.operations = self.program.operations
        self.position = {node: t for t, node in enumerate(self.operations)}
        self.by_name = {node.name: node for node in self.operations}
        self.step_numbers = {
            (step.run, step.operation): n for n, step in enumerate(schedule.steps) if not step.is_backward
        }
        runs = schedule.runs
        self.repeated = {t for run in runs[1:] for t in run.program}
        self.trips = schedule.trips
        self.slots: list[dict[tuple[int, int], int]] = [{}, *map(self._assign_slots, range(1, len(runs)))]
        self.nodes: list[list[torch.fx.Node]] = [[] for _ in runs]
        self.held: list[dict[torch.fx.Node, int]] = [{} for _ in runs]
        self.wanted: list[dict[torch.fx.Node, list[int]]] = [{} for _ in runs]
        for number in range(len(runs) - 1, FORWARD, -1):
            self._place_nodes(number)
        attributes = self.program.graph.find_nodes(op="get_attr")
        again = {live for nodes in self.nodes[1:] for node in nodes for live in live_nodes(node)}
        self.bound = [node.name for node in attributes]
        self.bound += [copy_of(node) for node in attributes if node in again]
        self.place = {name: n for n, name in enumerate(self.bound)}

    def bound_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What the program reads of the model, and what of it is copied; see :class:`Generated`."""
        attributes = self.program.graph.find_nodes(op="get_attr")
        copied = (node for node in attributes if copy_of(node) in self.place)
        return tuple(str(node.target) for node in attributes), tuple(str(node.target) for node in copied)

    def _assign_slots(self, number: int) -> dict[tuple[int, int], int]:
        slots: dict[tuple[int, int], int] = {}
        for start, stop in self.schedule.runs[number].saved:
            for t in range(start, stop):
                for k, saved in enumerate(self.saves[t]):
                    if saved.external or saved.unneeded or self.is_repeated(number, t):
                        continue
                    if saved.tensor is None:
                        source = self.schedule.keepers[t]
                    else:
                        source = self.schedule.source(number, self.program.storages[saved.tensor])
                    if source != FORWARD:
                        slots[t, k] = len(slots)
        return slots

    def is_repeated(self, number: int, t: int) -> bool:
        """Whether an operation is an opaque module that the run calls again: what it saves is told apart then."""
        return isinstance(self.operations[t].target, OpaqueCall) and t in self.schedule.runs[number].program

    def stays(self, number: int, node: torch.fx.Node) -> bool:
        """Whether a tensor is in memory for the backward that a run supplies, whatever the run makes."""
        value = self._value(node)
        return value is None or self.schedule.source(number, value) == FORWARD

    def _place_nodes(self, number: int) -> None:
        """Find what the run executes and what it starts from; runs inside it come first."""
        run = self.schedule.runs[number]
        executed = {self.operations[t] for t in run.program}
        ends = [*self.wanted[number], *(node for node, _, _ in self.fills(number))]
        used = dict.fromkeys(ends)
        pending: list[tuple[torch.fx.Node, int]] = []  # what is used, and where

        def use_inputs(node: torch.fx.Node) -> None:
            inputs = [n for n in node.all_input_nodes if n.op != "get_attr"]
            used.update(dict.fromkeys(inputs))
            pending.extend((n, self.position[node]) for n in inputs)

        for t in run.program:
            use_inputs(self.operations[t])
        pending += [(node, len(self.operations)) for node in ends]
        while pending:
            node, user = pending.pop()
            if node not in executed and self._is_own_view(number, node, user):
                executed.add(node)
                use_inputs(node)
        self.nodes[number] = sorted(executed, key=self.position.__getitem__)
        for node in sorted((n for n in used if n not in executed), key=lambda n: self.position.get(n, -1)):
            source = self.held[number][node] = self._source(number, node)
            self.wanted[source].setdefault(node, []).append(number)

    def handed(self, number: int, source: int) -> str:
        """The keyword arguments by which one run hands over what another starts from."""
        nodes = [node for node, maker in self.held[number].items() if maker == source]
        return ", ".join(f"{node.name}={self.stand_in(node) if source == FORWARD else node.name}" for node in nodes)

    def is_offloaded(self, node: torch.fx.Node) -> bool:
        """Whether a node of the forward returns tensors of a value that is offloaded."""
        return self._value(node) in self.trips

    def stand_in(self, node: torch.fx.Node) -> str:
        """What a recomputation holds of a node of the forward."""
        return f"copies.stand_in({self._value(node)}, {node.name})" if self.is_offloaded(node) else node.name

    def offloaded_in(self, saved: Saved) -> int | None:
        """The offloaded value in whose storage autograd saves a tensor, if it does."""
        value = None if saved.tensor is None or saved.unneeded else self.program.storages.get(saved.tensor)
        return value if value in self.trips else None

    def _source(self, number: int, node: torch.fx.Node) -> int:
        value = self._value(node)
        return FORWARD if value is None or runs_once(node.target) else self.schedule.source(number, value)

    def _value(self, node: torch.fx.Node) -> int | None:
        return self.program.storages.get(TensorRef(node.name, 0))

    def _is_own_view(self, number: int, node: torch.fx.Node, user: int) -> bool:
        """Whether the node is a view of a value that the run makes, or has made so far where ``user`` needs it."""
        t, value = self.position.get(node, -1), self._value(node)
        if t < 0 or value is None or self.graph.operations[t].writes:
            return False
        opaque = node.target if isinstance(node.target, OpaqueCall) else None
        again = self.graph.operations[t].replayable if opaque is None else opaque.view is not None
        return again and (value in self.schedule.runs[number].made or user <= self.graph.last_writes[value])

    def fills(self, number: int) -> list[tuple[torch.fx.Node, int, Any]]:
        """Slots of operations that are not recomputed: (node of the tensor they saved, slot, layout)."""
        again = set(self.schedule.runs[number].program)
        return [
            (self.saved_node(saved), slot, saved.layout)
            for (t, k), slot in self.slots[number].items()
            if t not in again and (saved := self.saves[t][k]).tensor is not None
        ]

    def saved_node(self, saved: Saved) -> torch.fx.Node:
        """The node whose result is the program tensor that was saved."""
        ref = saved.tensor
        assert ref is not None
        node = self.by_name[ref.node]
        items = (user for user in node.users if user.target is operator.getitem and user.args[1] == ref.index)
        return next(items, node)

    def target(self, number: int, t: int) -> Any:
        """The operator to run: in place only where the value that is taken over is of this run and not needed again."""
        taken, target = self.graph.operations[t].takes_over, self.operations[t].target
        if taken is not None and self.schedule.last_needs.get((number, taken)) != self.step_numbers[number, t]:
            target = self.program.out_of_place[t]
        return self._form(t, target) if t in self.low_memory else target

    def _form(self, t: int, target: Any) -> Any:
        """The low-memory variant of an operation, or of what stands for it out of place."""
        return (
            self.program.variants[t].target if target is self.operations[t].target else of(target).low_memory or target
        )

    def variants(self) -> set[LowMemory]:
        """All low-memory variants that may run."""
        targets = ((t, self.operations[t].target) for t in self.low_memory)
        others = ((t, self.program.out_of_place[t]) for t in self.low_memory if t in self.program.out_of_place)
        found = {self._form(t, target) for t, target in (*targets, *others)}
        return {target for target in found if isinstance(target, LowMemory)}

    def write(self, number: int, t: int) -> str:
        """The statement of an operation in a run."""
        target = self.target(number, t)
        if number == FORWARD and self.operations[t].meta.get(SHARED):
            return f"{self.operations[t].name} = step.cast({', '.join(map(argument, self.operations[t].args))})"
        return statement(self.operations[t], target, self.program.bindings.get((t, target)), t if number else None)


def live_nodes(node: torch.fx.Node) -> list[Any]:
    """Those of its arguments that the operator updates and its own result does not depend on."""
    return [live for live in live_arguments(node.target, node.args) if isinstance(live, torch.fx.Node)]


def view_of(node: torch.fx.Node) -> str | None:
    """The statement that makes anew what an opaque module returned, a view of an argument."""
    if not isinstance(node.target, OpaqueCall) or (view := node.target.view) is None:
        return None
    number, (size, stride), offset = view
    given = node.args[1]
    assert isinstance(given, list)
    source = argument(given[number])
    return f"{node.name} = {source}.as_strided({size!r}, {stride!r}, {source}.storage_offset() + {offset})"


def takes_notes(target: Any) -> bool:
    """Whether an operator, recomputed, uses the internal tensors that it saved."""
    return isinstance(target, LowMemory) and target.takes_notes


def copy_of(node: torch.fx.Node) -> str:
    """The name of a copy of a buffer, which recomputation writes in its place."""
    return f"copy_of_{node.name}"


def call_of(node: torch.fx.Node) -> str:
    """The arguments of a call of an opaque module: it, its ``nn.Module``, the tensors that it is given."""
    assert isinstance(node.target, OpaqueCall)
    return f"{node.target.name}, {argument(node.args[0])}, {argument(node.args[1])}"


def statement(node: torch.fx.Node, target: Any, binding: str | None = None, again: int | None = None) -> str:
    """The statement that runs ``target`` for an operation.

    ``binding`` is what PyTorch calls the operator by, where that is quicker than ``torch.ops``, and ``again`` the
    number of the operation where it has run before.
    """
    if isinstance(target, WithoutGrad):
        return f"with torch.no_grad(): {statement(node, target.operator, binding, again)}"
    live = live_nodes(node) if again is not None else []
    given = node.args[: target.given] if isinstance(target, Opaque) else node.args
    arguments = [_unchanged(a) if any(a is one for one in live) else argument(a) for a in given]
    if again is not None and takes_notes(target):
        arguments.append(f"*frame.notes({again})")
    arguments += [f"{key}={argument(value)}" for key, value in node.kwargs.items()]
    if isinstance(target, LowMemory):
        function = f"low_memory.{target.__name__}"
    elif isinstance(target, Opaque):
        function = target.name
    elif isinstance(target, OpOverload):
        function = binding or f"torch.ops.{target}"
    else:
        function = f"operator.{target.__name__}"
    return f"{node.name} = {function}({', '.join(arguments)})"


def _unchanged(given: Any) -> str:
    """What is written in the place of an argument that must stay as it is."""
    return copy_of(given) if given.op == "get_attr" else f"{given.name}.clone()"


def argument(value: Any) -> str:
    """The text of an argument, nodes by their names."""
    if isinstance(value, torch.fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(argument(item) for item in value)}]"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    return repr(value)


def let_go(nodes: Iterable[torch.fx.Node]) -> str:
    """What to put behind a statement to release these names."""
    names = list(dict.fromkeys(node.name for node in nodes))
    return f"; {' = '.join(names)} = None" if names else ""
