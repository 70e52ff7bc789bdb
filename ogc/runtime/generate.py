"""Writes the Python of a planned forward: one function for the step, one for each segment run again.

The text is what runs; ``OptimizedModule.code`` shows it. Each value is let go after its last use.
"""

from __future__ import annotations

import linecache
import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from ..graph import Graph
from ..plan import Plan, Segment
from ..program import LIVE_ARGUMENTS, Program, TensorRef, operator_name
from .frame import KEEP, SegmentCode

_serial = count()


@dataclass(frozen=True)
class Generated:
    """The code of a plan: ``forward(model, open_segment, *inputs)`` returns the list of output tensors."""

    source: str
    forward: Callable[..., list[torch.Tensor]]
    segments: dict[int, SegmentCode]


def generate(graph: Graph, plan: Plan) -> Generated:
    """Generate and compile the code that runs ``plan`` over ``graph.program``."""
    program: Program = graph.program
    writers = [_Writer(graph, program, s, number) for number, s in enumerate(plan.segments)]
    functions = [_forward(program, writers)]
    functions += [writer.program() for writer in writers if writer.segment.recompute]
    source = "\n\n".join(functions)
    names: dict[str, Any] = {"torch": torch, "operator": operator, "inf": math.inf, "nan": math.nan}
    names.update(program.constants)
    filename = f"<ogc plan {next(_serial)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)  # for tracebacks
    exec(compile(source, filename, "exec"), names)
    segments = {w.number: w.code(names[f"recompute_{w.number}"]) for w in writers if w.segment.recompute}
    return Generated(source, names["forward"], segments)


def _forward(program: Program, writers: list[_Writer]) -> str:
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    output = next(node for node in program.graph.nodes if node.op == "output")
    last_use = _last_uses(program)
    lines = [f"def forward({', '.join(['self', 'open_segment', *(p.name for p in placeholders)])}):"]
    for writer in writers:
        lines += [f"    {line}" for line in writer.forward(last_use)]
    lines.append(f"    return [{', '.join(_argument(node) for node in output.args[0])}]")
    return "\n".join(lines) + "\n"


def _last_uses(program: Program) -> dict[torch.fx.Node, torch.fx.Node]:
    last: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in program.graph.nodes:
        last[node] = node
        for used in node.all_input_nodes:
            last[used] = node
    return last


class _Writer:
    """The text of one segment and the tables that its frame needs."""

    def __init__(self, graph: Graph, program: Program, segment: Segment, number: int) -> None:
        self.graph = graph
        self.data = program
        self.segment = segment
        self.number = number
        self.nodes = program.operations
        self.position = {node: t for t, node in enumerate(self.nodes)}
        self.slots = self._assign_slots() if segment.recompute else {}
        self.run = self._nodes_to_run() if segment.recompute else []
        inputs = self._inputs()
        self.before = [n for n in inputs if self.position.get(n, -1) < segment.start]
        self.retained = [n for n in inputs if n not in self.before]
        self.draws = {t: k for k, t in enumerate(t for t in segment.program if t in program.random)}

    # -- forward --------------------------------------------------------------------------------------

    def forward(self, last_use: dict[torch.fx.Node, torch.fx.Node]) -> list[str]:
        segment = self.segment
        body: list[str] = []
        for t in range(segment.start, segment.stop):
            node = self.nodes[t]
            if t in self.draws:
                body.append(f"frame_{self.number}.remember_random()")
            body.append(_statement(node, self._target(t)) + self._free(node, last_use))
        mode = "recomputed" if segment.recompute else "saved"
        title = f"# segment {self.number}: operations {segment.start}-{segment.stop - 1}, {mode}"
        if not segment.recompute:
            return [title, *body]
        if self.retained:
            body.append(f"frame_{self.number}.retain({', '.join(n.name for n in self.retained)})")
        body.append(self._free_retained(last_use))
        arguments = ", ".join(["self", str(self.number), *(n.name for n in self.before)])
        return [title, f"with open_segment({arguments}) as frame_{self.number}:", *(f"    {x}" for x in body if x)]

    def _free(self, node: torch.fx.Node, last_use: dict[torch.fx.Node, torch.fx.Node]) -> str:
        done = [n for n in (*node.all_input_nodes, node) if n.op != "get_attr" and last_use[n] is node]
        return _let_go(n for n in done if n not in self.retained)

    def _free_retained(self, last_use: dict[torch.fx.Node, torch.fx.Node]) -> str:
        stop = self.segment.stop
        done = [n for n in self.retained if self.position.get(last_use[n], stop) < stop]
        return _let_go(done).removeprefix("; ")

    def _target(self, t: int) -> Any:
        """The operator to run: in place only where the value that is taken over was made in the segment."""
        taken = self.graph.operations[t].takes_over
        if taken is not None and self.graph.producers[taken] < self.segment.start:
            return self.data.out_of_place[t]
        return self.nodes[t].target

    # -- recomputation --------------------------------------------------------------------------------

    def program(self) -> str:
        names = [n.name for n in (*self.before, *self.retained)]
        lines = [f"def recompute_{self.number}(self, frame):"]
        if names:
            lines.append(f"    {', '.join(names)}{',' if len(names) == 1 else ''} = frame.take()")
        last = self._last_uses_in_program()
        lines += [f"    {line}" for line in self._fills(before=True)]
        for node in self.run:
            t = self.position[node]
            text = _statement(node, self._target(t), clone_live=True)
            frees = _let_go(n for n in last if last[n] is node)
            if t in self.draws:
                lines += [f"    with frame.random({self.draws[t]}):", f"        {text}"]
                lines += [f"    {frees.removeprefix('; ')}"] if frees else []
            else:
                lines.append(f"    {text}{frees}")
        lines += [f"    {line}" for line in self._fills(before=False)]
        return "\n".join(lines if len(lines) > 1 else [*lines, "    pass"]) + "\n"

    def _fills(self, before: bool) -> list[str]:
        """Statements that fill the slots of operations that do not run again, from the tensors they saved."""
        lines = []
        for node, slot, layout in self._plain_fills():
            if before == (node not in self.run):
                layout_text = f", {layout!r}" if layout is not None else ""
                lines.append(f"frame.fill({slot}, {node.name}{layout_text})")
        return lines

    def _plain_fills(self) -> list[tuple[torch.fx.Node, int, Any]]:
        by_name = {node.name: node for node in self.nodes}
        run = set(self.segment.program)
        return [
            (self._element(by_name[saved.tensor.node], saved.tensor), slot, saved.layout)
            for (t, k), slot in self.slots.items()
            if t not in run and (saved := self.data.saves[t][k]).tensor is not None
        ]

    def _element(self, node: torch.fx.Node, ref: TensorRef) -> torch.fx.Node:
        if ref.index == 0 and not any(user.target is operator.getitem for user in node.users):
            return node
        for user in node.users:
            if user.target is operator.getitem and user.args[1] == ref.index:
                return user
        return node

    def _last_uses_in_program(self) -> dict[torch.fx.Node, torch.fx.Node]:
        """For each name of the program, the node after which nothing needs it."""
        last: dict[torch.fx.Node, torch.fx.Node] = {}
        for node in self.run:
            last[node] = node
            for used in node.all_input_nodes:
                if used.op != "get_attr":
                    last[used] = node
        for node, _, _ in self._plain_fills():
            last.pop(node, None)
        return last

    def _assign_slots(self) -> dict[tuple[int, int], int]:
        """A slot for each saved tensor (operation, number) that does not stay in memory."""
        graph, segment = self.graph, self.segment
        slots: dict[tuple[int, int], int] = {}
        for t in range(segment.start, segment.stop):
            for k, saved in enumerate(self.data.saves[t]):
                if saved.external:
                    continue
                if saved.tensor is None:
                    stays = graph.keeps_internals[t]
                else:
                    value = self.data.storages[saved.tensor]
                    stays = graph.producers[value] < segment.start or graph.last_uses[value] >= segment.stop
                if not stays:
                    slots[t, k] = len(slots)
        return slots

    def _nodes_to_run(self) -> list[torch.fx.Node]:
        """The segment's program, with the views that it and the slots are reached through."""
        run = {self.nodes[t] for t in self.segment.program}
        pending = [*run, *(node for node, _, _ in self._plain_fills())]
        while pending:
            node = pending.pop()
            if node not in run and self._is_view(node):
                run.add(node)
            if node in run:
                pending.extend(n for n in node.all_input_nodes if n not in run and self._is_view(n))
        return sorted(run, key=self.position.__getitem__)

    def _is_view(self, node: torch.fx.Node) -> bool:
        t = self.position.get(node, -1)
        if not self.segment.start <= t < self.segment.stop:
            return False
        op = self.graph.operations[t]
        made_here = any(self.graph.producers[v] >= self.segment.start for v in op.reads)
        return not op.writes and made_here and op.replayable and TensorRef(node.name, 0) in self.data.storages

    def _inputs(self) -> list[torch.fx.Node]:
        run = set(self.run)
        used = [n for node in self.run for n in node.all_input_nodes]
        used += [node for node, _, _ in (self._plain_fills() if self.segment.recompute else [])]
        return [n for n in dict.fromkeys(used) if n not in run and n.op != "get_attr"]

    def code(self, program: Callable[..., None]) -> SegmentCode:
        """The tables of this segment for its frames."""
        saves, segment = self.data.saves, self.segment
        flat = [(t, k) for t in range(segment.start, segment.stop) for k in range(len(saves[t]))]
        again = [(self.position[n], k) for n in self.run for k in range(len(saves[self.position[n]]))]
        externals = {
            str(n.target): None
            for node in self.run
            for n in node.all_input_nodes
            if n.op == "get_attr" and n not in _live_arguments(node) and n.target not in self.data.constants
        }
        device = torch.device(self.graph.device)
        return SegmentCode(
            number=self.number,
            slots=tuple(self.slots.get(key, KEEP) for key in flat),
            targets=tuple(self.slots.get(key, KEEP) for key in again),
            program=program,
            externals=tuple(externals),
            devices=(device,) if device.type == "cuda" and self.draws else (),
        )


def _live_arguments(node: torch.fx.Node) -> list[Any]:
    positions = LIVE_ARGUMENTS.get(operator_name(node), ())
    return [node.args[p] for p in positions if p < len(node.args) and isinstance(node.args[p], torch.fx.Node)]


def _statement(node: torch.fx.Node, target: Any, clone_live: bool = False) -> str:
    cloned = _live_arguments(node) if clone_live else []
    arguments = [_argument(a) + (".clone()" if any(a is c for c in cloned) else "") for a in node.args]
    arguments += [f"{key}={_argument(value)}" for key, value in node.kwargs.items()]
    is_operator = isinstance(target, torch._ops.OpOverload)
    function = f"torch.ops.{target}" if is_operator else f"operator.{target.__name__}"
    return f"{node.name} = {function}({', '.join(arguments)})"


def _argument(value: Any) -> str:
    if isinstance(value, torch.fx.Node):
        if value.op != "get_attr":
            return value.name
        target = str(value.target)
        return target if target.startswith("_ogc_constant_") else _attribute(target)
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
