"""Writes the Python of a planned forward: one function for the step, one for each run again.

The text is what runs; ``OptimizedModule.code`` shows it. Each value is let go after its last use.
"""

from __future__ import annotations

import linecache
import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import torch

from ..graph import Graph
from ..operators.lean import OPERATORS, Lean
from ..operators.sliced import Sliced
from ..plan.plan import Plan
from ..plan.schedule import FORWARD, Run, Schedule
from ..program.leaf import Leaf, runs_once
from ..program.program import CONSTANT, LIVE_ARGUMENTS, Program, Saved, TensorRef, operator_name
from ..program.without_grad import WithoutGrad
from ..torch_state.private import OpOverload
from .frame import KEEP, RunCode

_serial = count()

_LEAN = SimpleNamespace(**{lean.__name__: lean for lean in OPERATORS.values()})


@dataclass(frozen=True)
class Generated:
    """The code of a plan: ``forward(model, step, *inputs)`` returns the list of output tensors."""

    source: str
    forward: Callable[..., list[torch.Tensor]]
    runs: dict[int, RunCode]


def generate(graph: Graph, plan: Plan) -> Generated:
    """Generate and compile the code that runs ``plan`` over ``graph.program``."""
    layout = _Layout(graph, Schedule(graph, plan.segments, plan.remade))
    again = [_RunWriter(layout, number) for number in range(1, len(layout.schedule.runs))]
    source = "\n\n".join([_ForwardWriter(layout).text(), *(writer.text() for writer in again)])
    names: dict[str, Any] = {"torch": torch, "operator": operator, "lean": _LEAN, "inf": math.inf, "nan": math.nan}
    names.update(graph.program.constants)
    names.update({n.target.name: n.target for n in graph.program.operations if isinstance(n.target, (Leaf, Sliced))})
    filename = f"<ogc plan {next(_serial)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)  # for tracebacks
    exec(compile(source, filename, "exec"), names)
    runs = {writer.number: writer.code(names[f"run_{writer.number}"]) for writer in again}
    return Generated(source, names["forward"], runs)


class _Layout:
    """Where every tensor of every run comes from: the schedule, spelled out for fx nodes.

    Attributes:
        slots: for each run, a slot for each saved tensor (operation, number) that the run remakes.
        nodes: for each run, the nodes that it executes: its program and the views that it needs.
        held: for each run, the nodes that it starts from, by the run that makes them.
    """

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self.graph = graph
        self.schedule = schedule
        self.program: Program = graph.program
        self.operations = self.program.operations
        self.position = {node: t for t, node in enumerate(self.operations)}
        self.by_name = {node.name: node for node in self.operations}
        self.step_numbers = {
            (step.run, step.operation): n for n, step in enumerate(schedule.steps) if not step.is_backward
        }
        runs = schedule.runs
        self.slots: list[dict[tuple[int, int], int]] = [self._assign_slots(n) for n in range(len(runs))]
        self.nodes: list[list[torch.fx.Node]] = [[] for _ in runs]
        self.held: list[dict[torch.fx.Node, int]] = [{} for _ in runs]
        self.wanted: list[dict[torch.fx.Node, list[int]]] = [{} for _ in runs]  # node -> runs inside that start from it
        for number in range(len(runs) - 1, FORWARD, -1):
            self._place_nodes(number)

    def _assign_slots(self, number: int) -> dict[tuple[int, int], int]:
        if number == FORWARD:
            return {}
        slots: dict[tuple[int, int], int] = {}
        for start, stop in self.schedule.runs[number].leaves:
            for t in range(start, stop):
                for k, saved in enumerate(self.program.saves[t]):
                    if saved.external or self.is_repeated(number, t):
                        continue
                    if saved.tensor is None:
                        source = self.schedule.keepers[t]
                    else:
                        source = self.schedule.source(number, self.program.storages[saved.tensor])
                    if source != FORWARD:
                        slots[t, k] = len(slots)
        return slots

    def is_repeated(self, number: int, t: int) -> bool:
        """Whether an operation is a leaf that the run calls again: what it saves is told apart when it does."""
        return isinstance(self.operations[t].target, Leaf) and t in self.schedule.runs[number].program

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
            source = self._source(number, node)
            self.held[number][node] = source
            self.wanted[source].setdefault(node, []).append(number)

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
        leaf = node.target if isinstance(node.target, Leaf) else None
        again = self.graph.operations[t].replayable if leaf is None else leaf.view is not None
        return again and (value in self.schedule.runs[number].made or user <= self.graph.last_writes[value])

    def fills(self, number: int) -> list[tuple[torch.fx.Node, int, Any]]:
        """Slots of operations that do not run again: (node of the tensor they saved, slot, layout)."""
        again = set(self.schedule.runs[number].program)
        return [
            (self.saved_node(saved), slot, saved.layout)
            for (t, k), slot in self.slots[number].items()
            if t not in again and (saved := self.program.saves[t][k]).tensor is not None
        ]

    def saved_node(self, saved: Saved) -> torch.fx.Node:
        """The node whose result is the program tensor that was saved."""
        ref = saved.tensor
        assert ref is not None
        node = self.by_name[ref.node]
        if ref.index == 0 and not any(user.target is operator.getitem for user in node.users):
            return node
        for user in node.users:
            if user.target is operator.getitem and user.args[1] == ref.index:
                return user
        return node

    def target(self, number: int, t: int) -> Any:
        """The operator to run: in place only where the value that is taken over is of this run and not needed again."""
        taken = self.graph.operations[t].takes_over
        if taken is not None and self.schedule.last_needs.get((number, taken)) != self.step_numbers[number, t]:
            return self.program.out_of_place[t]
        return self.operations[t].target

    @cached_property
    def repeated(self) -> set[int]:
        """Operations that some run executes again."""
        return {t for run in self.schedule.runs[1:] for t in run.program}


class _ForwardWriter:
    """The text of the forward."""

    def __init__(self, layout: _Layout) -> None:
        self.layout = layout
        self.draws = layout.program.random & layout.repeated
        self.opened: dict[int, list[int]] = {}
        self.closed: dict[int, list[int]] = {}
        for number, run in enumerate(layout.schedule.runs[1:], 1):
            self.opened.setdefault(run.start, []).append(number)
            self.closed.setdefault(run.stop, []).append(number)
        self.frees = self._frees()

    def text(self) -> str:
        graph = self.layout.program.graph
        placeholders = [node.name for node in graph.nodes if node.op == "placeholder"]
        output = next(node for node in graph.nodes if node.op == "output")
        lines = [f"def forward({', '.join(['self', 'step', *placeholders])}):"]
        leaves = sorted((leaf, n) for n, run in enumerate(self.layout.schedule.runs) for leaf in run.leaves)
        for (start, stop), number in leaves:
            lines += [f"    {line}" for line in self._leaf(start, stop, number)]
        lines.append(f"    return [{', '.join(_argument(node) for node in output.args[0])}]")
        return "\n".join(lines) + "\n"

    def _leaf(self, start: int, stop: int, number: int) -> list[str]:
        lines = [f"# operations {start}-{stop - 1}" + (f", run again in run {number}" if number else "")]
        lines += [self._open(n) for n in self.opened.get(start, [])]
        body = [line for t in range(start, stop) for line in self._operation(t, number)]
        lines += [f"with frame_{number}:", *(f"    {line}" for line in body)] if number else body
        for n in reversed(self.closed.get(stop, [])):
            lines.append(self._close(n))
        freed = _let_go(self.frees.get((stop, True), [])).removeprefix("; ")
        return [*lines, *([freed] if freed else [])]

    def _operation(self, t: int, number: int) -> list[str]:
        node = self.layout.operations[t]
        freed = _let_go(self.frees.get((t, False), []))
        lines = [_statement(node, self.layout.target(FORWARD, t))]
        if number and self.layout.is_repeated(number, t):
            lines = [self._repeated(t, number)]
        elif isinstance(node.target, Leaf):
            if number:
                saved = [self.layout.saved_node(saved).name for saved in self.layout.program.saves[t]]
                lines = [f"with frame_{number}.leaf({', '.join(saved)}):", f"    {lines[0]}"]
            lines += [f"step.mark_returned({t}, {node.name})"] if t in self.layout.repeated else []
        lines[-1] += freed
        return [f"step.remember_random({t})", *lines] if t in self.draws else lines

    def _repeated(self, t: int, number: int) -> str:
        """The statement that calls a leaf which the run calls again."""
        node = self.layout.operations[t]
        given = cast(list[torch.fx.Node], node.args[1])
        stays = [one for one in given if self.layout.stays(number, one)]
        assert isinstance(node.target, Leaf)
        made = (self.layout.program.storages[TensorRef(node.name, k)] for k in range(len(node.target.new)))
        results = [k for k, value in enumerate(made) if self.layout.schedule.source(number, value) == FORWARD]
        return f"{node.name} = frame_{number}.call({t}, {_call(node)}, stays={_argument(stays)}, results={results})"

    def _open(self, number: int) -> str:
        parent = self.layout.schedule.runs[number].parent
        around = f", frame_{parent}" if parent else ""
        return f"frame_{number} = step.open({number}{around})"

    def _close(self, number: int) -> str:
        held = [n.name for n, source in self.layout.held[number].items() if source == FORWARD]
        return f"frame_{number}.close({', '.join(f'{name}={name}' for name in held)})"

    def _frees(self) -> dict[tuple[int, bool], list[torch.fx.Node]]:
        """Names to let go of, by (operation after which, False) or (cut at which, True)."""
        last: dict[torch.fx.Node, tuple[int, bool]] = {}
        for node in self.layout.program.graph.nodes:
            if node.op in ("placeholder", "call_function"):
                last[node] = (self.layout.position.get(node, 0), False)
            for used in node.all_input_nodes:
                last[used] = (self.layout.position.get(node, len(self.layout.operations)), False)
        for held, run in zip(self.layout.held, self.layout.schedule.runs, strict=True):
            for node, source in held.items():
                if source == FORWARD and run.stop > last[node][0]:
                    last[node] = (run.stop, True)
        frees: dict[tuple[int, bool], list[torch.fx.Node]] = {}
        for node, place in last.items():
            if node.op != "get_attr":
                frees.setdefault(place, []).append(node)
        return frees


class _RunWriter:
    """The text of one run again and the tables that its frames need."""

    def __init__(self, layout: _Layout, number: int) -> None:
        self.layout = layout
        self.number = number
        self.run: Run = layout.schedule.runs[number]
        self.nodes = layout.nodes[number]
        self.executed = frozenset(self.nodes)
        self.held = list(layout.held[number])

    def text(self) -> str:
        names = [node.name for node in self.held]
        lines = [f"def run_{self.number}(self, frame):"]
        if names:
            keys = ", ".join(f"{name!r}" for name in names)
            lines.append(f"    {', '.join(names)}{',' if len(names) == 1 else ''} = frame.take({keys})")
        lines += [f"    {line}" for line in self._fills(before=True)]
        freed = self._frees()
        for node in self.nodes:
            t = self.layout.position[node]
            text = _view(node) or _statement(node, self.layout.target(self.number, t), again=t)
            if self.layout.is_repeated(self.number, t):
                text = f"{node.name} = frame.call_again({t}, {_call(node)})"
            frees = _let_go(freed.get(node, []))
            if t in self.layout.program.random and t in self.run.program:
                lines += [f"    with frame.random({t}):", f"        {text}"]
                lines += [f"    {frees.removeprefix('; ')}"] if frees else []
            else:
                lines.append(f"    {text}{frees}")
        lines += [f"    {line}" for line in self._fills(before=False)]
        lines += [f"    {line}" for line in self._gives()]
        return "\n".join(lines if len(lines) > 1 else [*lines, "    pass"]) + "\n"

    def _fills(self, before: bool) -> list[str]:
        """Statements that fill the slots of operations that do not run again, from the tensors they saved."""
        lines = []
        for node, slot, layout in self.layout.fills(self.number):
            if before == (node not in self.executed):
                layout_text = f", {layout!r}" if layout is not None else ""
                lines.append(f"frame.fill({slot}, {node.name}{layout_text})")
        return lines

    def _gives(self) -> list[str]:
        """Statements that hand values to the runs inside this one."""
        names: dict[int, list[str]] = {}
        for node, receivers in self.layout.wanted[self.number].items():
            for number in receivers:
                names.setdefault(number, []).append(f"{node.name}={node.name}")
        return [f"frame.give({number}, {', '.join(given)})" for number, given in sorted(names.items())]

    def _frees(self) -> dict[torch.fx.Node, list[torch.fx.Node]]:
        """For each node of the program, the names that nothing needs after it."""
        last: dict[torch.fx.Node, torch.fx.Node] = {}
        for node in self.nodes:
            last[node] = node
            for used in node.all_input_nodes:
                if used.op != "get_attr":
                    last[used] = node
        for node in (*(node for node, _, _ in self.layout.fills(self.number)), *self.layout.wanted[self.number]):
            if node in self.executed:
                last.pop(node, None)
        frees: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        for node, user in last.items():
            frees.setdefault(user, []).append(node)
        return frees

    def code(self, program: Callable[..., None]) -> RunCode:
        """The tables of this run for its frames."""
        layout, slots = self.layout, self.layout.slots[self.number]
        saves = layout.program.saves
        flat = [
            (t, k)
            for start, stop in self.run.leaves
            for t in range(start, stop)
            if not layout.is_repeated(self.number, t)
            for k in range(len(saves[t]))
        ]
        operations = [layout.position[node] for node in self.nodes if not isinstance(node.target, Leaf)]
        again = [(t, k) for t in operations for k in range(len(saves[t]))]
        read = [str(n.target) for node in self.nodes for n in self._reads(node) if n.op == "get_attr"]
        constants = layout.program.constants
        notes = {
            place: t
            for place, (t, k) in enumerate(flat)
            if t in layout.repeated and _takes_notes(layout.operations[t]) and saves[t][k] == Saved()
        }
        return RunCode(
            number=self.number,
            slots=tuple(slots.get(key, KEEP) for key in flat),
            notes=notes,
            targets=tuple(slots.get(key, KEEP) for key in again),
            program=program,
            externals=tuple(dict.fromkeys(name for name in read if name not in constants)),
            constants=tuple(constants[name] for name in dict.fromkeys(read) if name in constants),
        )

    def _reads(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        """Nodes of the tensors that a node's result depends on."""
        if isinstance(node.target, Leaf):  # and what its module holds, unless a view is all that is made
            state = cast(list[torch.fx.Node], node.args[2])
            return state if self.layout.is_repeated(self.number, self.layout.position[node]) else []
        live = _live_arguments(node)
        return [n for n in node.all_input_nodes if n not in live]


def _live_arguments(node: torch.fx.Node) -> list[Any]:
    positions = LIVE_ARGUMENTS.get(operator_name(node.target), ())
    return [node.args[p] for p in positions if p < len(node.args) and isinstance(node.args[p], torch.fx.Node)]


def _view(node: torch.fx.Node) -> str | None:
    """The statement that makes what a leaf returned, a view of an argument, anew."""
    if not isinstance(node.target, Leaf) or (view := node.target.view) is None:
        return None
    number, layout = view
    given = node.args[1]
    assert isinstance(given, list)
    return f"{node.name} = {_argument(given[number])}.as_strided{layout!r}"


def _takes_notes(node: torch.fx.Node) -> bool:
    """Whether the operator, run again, makes use of the internal tensors that it saved."""
    return isinstance(node.target, Lean) and node.target.kind == "batch_norm"


def _call(node: torch.fx.Node) -> str:
    """The arguments of a call of a leaf: itself, its module, the tensors that it is given."""
    assert isinstance(node.target, Leaf)
    return f"{node.target.name}, {_argument(node.args[0])}, {_argument(node.args[1])}"


def _statement(node: torch.fx.Node, target: Any, again: int | None = None) -> str:
    """The statement that runs an operation; ``again`` is its number where it has run before."""
    if isinstance(target, Leaf):
        return f"{node.name} = {target.name}({_argument(node.args[0])}, {_argument(node.args[1])})"
    if isinstance(target, WithoutGrad):
        return f"with torch.no_grad(): {_statement(node, target.operator, again)}"
    cloned = _live_arguments(node) if again is not None else []
    arguments = [_argument(a) + (".clone()" if any(a is c for c in cloned) else "") for a in node.args]
    if again is not None and _takes_notes(node):
        arguments.append(f"*frame.notes({again})")
    arguments += [f"{key}={_argument(value)}" for key, value in node.kwargs.items()]
    if isinstance(target, Lean):
        function = f"lean.{target.__name__}"
    elif isinstance(target, Sliced):
        function = target.name
    elif isinstance(target, OpOverload):
        function = f"torch.ops.{target}"
    else:
        function = f"operator.{target.__name__}"
    return f"{node.name} = {function}({', '.join(arguments)})"


def _argument(value: Any) -> str:
    if isinstance(value, torch.fx.Node):
        if value.op != "get_attr":
            return value.name
        target = str(value.target)
        return target if target.startswith(CONSTANT) else _attribute(target)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_argument(item) for item in value)}]"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    return repr(value)


def _attribute(path: str) -> str:
    text = "self"
    for part in path.split("."):
        text = f"{text}.{part}" if part.isidentifier() else f"getattr({text}, {part!r})"
    return text


def _let_go(nodes: Iterable[torch.fx.Node]) -> str:
    names = list(dict.fromkeys(node.name for node in nodes))
    return f"; {' = '.join(names)} = None" if names else ""
