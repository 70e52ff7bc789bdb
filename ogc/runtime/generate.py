"""Writes the Python of a planned forward: one function for the step, one for each recomputation.

The text is what runs; ``OptimizedModule.code`` shows it. Each value is released after its last use.
"""

from __future__ import annotations

import linecache
import math
import operator
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from types import FunctionType, SimpleNamespace
from typing import Any, cast

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.node import map_aggregate

from ..graph import Graph
from ..plan.plan import Plan
from ..plan.schedule import FORWARD, Run
from ..program.opaque import Opaque, OpaqueCall
from ..program.program import Place, Program, Saved, TensorRef, leaves_of
from .frame import AWAY, DROP, KEEP, RunCode
from .held import dropped, unpack
from .layout import Layout, argument, call_of, copy_of, let_go, live_nodes, takes_notes, view_of

_serial = count()


@dataclass(frozen=True, eq=False)
class Generated:
    """The code of a plan.

    Attributes:
        source: its text.
        forward: ``forward(step, *inputs, *bound)`` returns the list of output tensors.
        bound: names of what that is given of the model and the constants: parameters, buffers, opaque modules.
        copied: those of which ``bound`` has a copy too, behind them: buffers that recomputation writes to no purpose.
        runs: the code of each recomputation.
        numbers: by their places, the names in the code of numbers that differ between calls.
    """

    source: str
    forward: Callable[..., list[torch.Tensor]]
    bound: tuple[str, ...]
    copied: tuple[str, ...]
    runs: dict[int, RunCode]
    numbers: dict[Place, str] = field(default_factory=dict)
    key: object = field(default_factory=object)  # the same for all that is made of it for other numbers

    def of(self, program: Program) -> Generated | None:
        """The same code for another call of the program, with its numbers; None if it has numbers that have no name."""
        numbers = numbers_of(program)
        if not numbers.keys() <= self.numbers.keys():
            return None
        names = dict(self.forward.__globals__)
        names.update((self.numbers[place], number) for place, number in numbers.items())

        def made(function: Callable[..., Any]) -> Any:
            return FunctionType(function.__code__, names, function.__name__)  # type: ignore[attr-defined]

        runs = {number: replace(run, program=made(run.program)) for number, run in self.runs.items()}
        return replace(self, forward=made(self.forward), runs=runs)


def numbers_of(program: Program) -> dict[Place, Any]:
    """The numbers of a program that are others in other calls: those that it takes, and layouts of what it saves."""
    layouts = {
        (f"{node.name} saves", k): saved.layout
        for node, saves in zip(program.operations, program.saves, strict=True)
        for k, saved in enumerate(saves)
        if saved.layout is not None
    }
    return program.numbers | layouts


def generate(graph: Graph, plan: Plan, numbers: Collection[Place] = ()) -> Generated:
    """Generate and compile the code that runs ``plan`` over ``graph.program``.

    Numbers in these places have a name in it: the code is for calls with others, too; see :meth:`Generated.of`.
    """
    named = {place: f"{_prefix(graph.program)}{n}" for n, place in enumerate(sorted(numbers))}
    layout = Layout(replace(graph, program=with_names(graph.program, named)) if named else graph, plan.decisions)
    forward = _ForwardWriter(layout)
    again = [_RunWriter(layout, number) for number in range(1, len(layout.schedule.runs))]
    source = "\n\n".join([forward.text(), *(writer.text() for writer in again)])
    targets = [node.target for node in graph.program.operations]
    variants = SimpleNamespace(**{variant.__name__: variant for variant in layout.variants()})
    names: dict[str, Any] = {"torch": torch, "operator": operator, "low_memory": variants}
    names.update(saved_tensors_hooks=saved_tensors_hooks, unpack=unpack, dropped=dropped)
    names.update(inf=math.inf, nan=math.nan)
    values = _values(graph.program)
    names.update((name, values[place]) for place, name in named.items())
    names.update({target.name: target for target in targets if isinstance(target, Opaque)})
    filename = f"<ogc plan {next(_serial)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)  # for tracebacks
    exec(compile(source, filename, "exec"), names)
    weakref.finalize(names["forward"].__code__, linecache.cache.pop, filename, None)  # goes with all that it names
    runs = {writer.number: writer.code(names[f"run_{writer.number}"]) for writer in again}
    runs |= {FORWARD: forward.code()} if forward.hooked else {}
    return Generated(source, names["forward"], *layout.bound_names(), runs, named)


# -- numbers that have a name ------------------------------------------------------------------------------


class _NamedInt(int):
    name: str

    def __repr__(self) -> str:
        return self.name


class _NamedFloat(float):
    name: str

    def __repr__(self) -> str:
        return self.name


class _NamedLayout(tuple[Any, ...]):
    name: str

    def __repr__(self) -> str:
        return self.name


_NAMED: dict[type, Any] = {int: _NamedInt, float: _NamedFloat, tuple: _NamedLayout}


def _named(value: Any, name: str) -> Any:
    """The number, whose text is the name."""
    result = _NAMED[type(value)](value)
    result.name = name
    return result


def _prefix(program: Program) -> str:
    """How the names of numbers begin, and none of a node."""
    prefix = "number_"
    while any(node.name.startswith(prefix) for node in program.graph.nodes):
        prefix = f"_{prefix}"
    return prefix


def _values(program: Program) -> dict[Place, Any]:
    """All numbers of a program as they are written in its graph, by their places."""
    found: dict[Place, Any] = {}
    for node in program.graph.nodes:
        found.update(((node.name, n), leaf) for n, leaf in enumerate(leaves_of(node.args, node.kwargs)))
    return found | {place: layout for place, layout in numbers_of(program).items() if place not in program.numbers}


def with_names(program: Program, named: Mapping[Place, str]) -> Program:
    """The program with names for the numbers in these places."""
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in program.graph.nodes:
        copies[node] = copy = graph.node_copy(node, copies.__getitem__)
        places = count()

        def leaf_of(leaf: Any) -> Any:
            name = named.get((node.name, next(places)))  # noqa: B023 - called at once
            return leaf if name is None else _named(leaf, name)

        copy.args, copy.kwargs = map_aggregate((copy.args, copy.kwargs), leaf_of)
    saves = []
    for node, kept in zip(program.operations, program.saves, strict=True):
        names = [named.get((f"{node.name} saves", k)) for k in range(len(kept))]
        each = zip(kept, names, strict=True)
        saves.append(tuple(s if n is None else replace(s, layout=_named(s.layout, n)) for s, n in each))
    return replace(program, graph=graph, saves=tuple(saves))


class _ForwardWriter:
    """The text of the forward."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.draws = layout.program.random & layout.repeated
        self.opened: dict[int, list[int]] = {}
        self.closed: dict[int, list[int]] = {}
        for number, run in enumerate(layout.schedule.runs[1:], 1):
            self.opened.setdefault(run.start, []).append(number)
            self.closed.setdefault(run.stop, []).append(number)
        self.last: dict[torch.fx.Node, tuple[int, bool]] = {}  # where a node was used last, before runs hold it
        self.frees = self._frees()
        in_forward = [t for start, stop in layout.schedule.runs[FORWARD].saved for t in range(start, stop)]
        self.hooked = [  # operations of the forward's own segments that save what is offloaded
            t for t in in_forward if t < len(layout.operations) and any(map(self._is_away, layout.saves[t]))
        ]
        self.copies = self._copies()

    def _is_away(self, saved: Saved) -> bool:
        return self.layout.offloaded_in(saved) is not None

    def code(self) -> RunCode:
        """The table of the forward's frame, which sees what ``hooked`` save; it is never run again."""
        marks = tuple(mark_of(self.layout, t, k) for t in self.hooked for k in range(len(self.layout.saves[t])))
        return RunCode(FORWARD, marks, (), _nothing, (), {})

    def _copies(self) -> dict[int, list[str]]:
        """Statements on offloaded values behind each operation."""
        layout, lines = self.layout, dict[int, list[str]]()
        fetched: dict[int, list[tuple[int, int]]] = {}  # behind operations before whose backward values are fetched
        places = {ref: v for ref, v in layout.program.storages.items() if v in layout.trips}
        for v, trip in layout.trips.items():
            node = layout.operations[trip.made]
            ref = next(ref for ref, value in places.items() if value == v and ref.node == node.name)
            lines.setdefault(trip.made, []).append(f"copies.out({v}, {node.name}, {ref.index})")
            step = layout.schedule.steps[trip.back]
            if trip.back < trip.needed:
                t = step.operation if step.during is None else step.during
                fetched.setdefault(t, []).append((trip.needed, v))
        for t, values in fetched.items():
            numbers = ", ".join(str(v) for _, v in sorted(values))
            lines.setdefault(t, []).append(f"copies.before_backward({layout.operations[t].name}, {numbers})")
        for node, (t, _) in self.last.items():
            if layout.is_offloaded(node) and self.frees_at.get(node, (t, False)) != (t, False):
                lines.setdefault(t, []).append(f"{node.name} = {layout.stand_in(node)}")
        return lines

    def _left(self, place: int) -> list[str]:
        """The statement that lets go of values before an operation."""
        values = [v for v, trip in self.layout.trips.items() if trip.gone == place]
        return [f"copies.leave({', '.join(map(str, values))})"] if values else []

    def text(self) -> str:
        graph = self.layout.program.graph
        placeholders = [node.name for node in graph.nodes if node.op == "placeholder"]
        output = next(node for node in graph.nodes if node.op == "output")
        saved = sorted((ends, n) for n, run in enumerate(self.layout.schedule.runs) for ends in run.saved)
        saved = [(ends, n) for ends, n in saved if ends[0] < len(self.layout.operations)]  # the rest is the caller's
        lines = ["copies = step.copies"] if self.layout.trips else []
        lines += ["frame_0 = step.open(0)"] if self.hooked else []
        lines += [line for (start, stop), number in saved for line in self._segment(start, stop, number)]
        lines += ["frame_0.close()"] if self.hooked else []
        lines += self._left(len(self.layout.operations))
        lines.append(f"return {argument(output.args[0])}")
        return _function(f"forward({', '.join(['step', *placeholders, *self.layout.bound])})", lines)

    def _segment(self, start: int, stop: int, number: int) -> list[str]:
        lines = [f"# operations {start}-{stop - 1}" + (f", recomputed in run {number}" if number else "")]
        for n in self.opened.get(start, []):
            parent = self.layout.schedule.runs[n].parent
            lines.append(f"frame_{n} = step.open({n}{f', frame_{parent}' if parent else ''})")
        body = [line for t in range(start, stop) for line in self._operation(t, number)]
        hooks = f"with saved_tensors_hooks(frame_{number}.pack, unpack):"
        lines += [hooks, *(f"    {line}" for line in body)] if number else body
        lines += [f"frame_{n}.close({self.layout.handed(n, FORWARD)})" for n in reversed(self.closed.get(stop, []))]
        freed = let_go(self.frees.get((stop, True), [])).removeprefix("; ")
        return [*lines, *([freed] if freed else [])]

    def _operation(self, t: int, number: int) -> list[str]:
        node = self.layout.operations[t]
        freed = let_go(self.frees.get((t, False), []))
        lines = [self.layout.write(FORWARD, t)]
        if number and self.layout.is_repeated(number, t):
            lines = [self._repeated(t, number)]
        elif isinstance(node.target, OpaqueCall):
            if number:
                lines = self._within_frame(t, number, lines[0])
            lines += [f"step.mark_returned({t}, {node.name})"] if t in self.layout.repeated else []
        if not number and t in self.hooked:
            lines[-1] = f"with saved_tensors_hooks(frame_0.pack, unpack): {lines[-1]}"
        elif not number and any(saved.unneeded for saved in self.layout.saves[t]):
            lines[-1] = f"with saved_tensors_hooks(dropped, unpack): {lines[-1]}"
        if t in self.draws:
            lines = [f"step.remember_random({t})", *lines, f"step.remember_drawn({t}, {node.name})"]
        lines = [*self._left(t), *lines, *self.copies.get(t, ())]
        lines[-1] += freed
        return lines

    def _within_frame(self, t: int, number: int, call: str) -> list[str]:
        """The statements that call an opaque module whose run does not call it again."""
        node = self.layout.operations[t]
        saves = [(saved, saved.tensor) for saved in self.layout.saves[t] if saved.tensor is not None]
        given = [self.layout.saved_node(saved).name for saved, ref in saves if ref.node != node.name]
        is_one = len(cast(OpaqueCall, node.target).new) == 1
        made = [node.name if is_one else f"{node.name}[{ref.index}]" for _, ref in saves if ref.node == node.name]
        head = f"with frame_{number}.opaque({', '.join(given)})"
        if not made:
            return [f"{head}:", f"    {call}"]
        return [f"{head} as made:", f"    {call}", f"    made({', '.join(made)})"]

    def _repeated(self, t: int, number: int) -> str:
        """The statement that calls an opaque module which the run recomputes."""
        node = self.layout.operations[t]
        given = cast(list[torch.fx.Node], node.args[1])
        stays = [one for one in given if self.layout.stays(number, one)]
        assert isinstance(node.target, OpaqueCall)
        made = (self.layout.program.storages[TensorRef(node.name, k)] for k in range(len(node.target.new)))
        results = [k for k, value in enumerate(made) if self.layout.schedule.source(number, value) == FORWARD]
        return f"{node.name} = frame_{number}.call({t}, {call_of(node)}, stays={argument(stays)}, results={results})"

    def _frees(self) -> dict[tuple[int, bool], list[torch.fx.Node]]:
        """Names to release, by (operation after which, False) or (cut at which, True)."""
        last: dict[torch.fx.Node, tuple[int, bool]] = {}
        for node in self.layout.program.graph.nodes:
            if node.op in ("placeholder", "call_function"):
                last[node] = (self.layout.position.get(node, 0), False)
            for used in node.all_input_nodes:
                last[used] = (self.layout.position.get(node, len(self.layout.operations)), False)
        self.last = dict(last)
        for held, run in zip(self.layout.held, self.layout.schedule.runs, strict=True):
            for node, source in held.items():
                if source == FORWARD and run.stop > last[node][0]:
                    last[node] = (run.stop, True)
        self.frees_at = last
        return _by_place({node: place for node, place in last.items() if node.op != "get_attr"})


class _RunWriter:
    """The text of one recomputation and the tables that its frames need."""

    def __init__(self, layout: Layout, number: int) -> None:
        self.layout = layout
        self.number = number
        self.run: Run = layout.schedule.runs[number]
        self.nodes = layout.nodes[number]
        self.executed = frozenset(self.nodes)
        self.held = list(layout.held[number])

    def text(self) -> str:
        names = [node.name for node in self.held]
        bound = sorted({self.layout.place[name] for node in self.nodes for name in self._bound(node)})
        lines = [f"{self.layout.bound[place]} = bound[{place}]" for place in bound]
        lines += [f"{', '.join(names)}, = frame.take({', '.join(map(repr, names))})"] if names else []
        lines += self._fills(before=True)
        freed = self._frees()
        for node in self.nodes:
            t = self.layout.position[node]
            text = view_of(node) or self.layout.write(self.number, t)
            if self.layout.is_repeated(self.number, t):
                text = f"{node.name} = frame.recompute({t}, {call_of(node)})"
            frees = let_go(freed.get(node, []))
            if t in self.layout.program.random and t in self.run.program:
                text = f"with frame.random({t}):\n        {text}\n    frame.step.check_drawn({t}, {node.name})"
            lines.append(f"{text}{frees}")
        lines += self._fills(before=False)
        inside = sorted({number for numbers in self.layout.wanted[self.number].values() for number in numbers})
        lines += [f"frame.give({number}, {self.layout.handed(number, self.number)})" for number in inside]
        return _function(f"run_{self.number}(bound, frame)", lines or ["pass"])

    def _bound(self, node: torch.fx.Node) -> list[str]:
        """The names by which a run uses what the program is given of the model."""
        used: list[Any] = node.all_input_nodes
        if isinstance(node.target, OpaqueCall):
            used = [node.args[0], *cast(list[torch.fx.Node], node.args[1])] if not node.target.view else []
        live = live_nodes(node)
        nodes = [one for one in used if isinstance(one, torch.fx.Node) and one.op == "get_attr"]
        return [copy_of(one) if one in live else one.name for one in nodes]

    def _fills(self, before: bool) -> list[str]:
        """Statements that fill the slots of operations that are not recomputed, from the tensors they saved."""
        return [
            f"frame.fill({slot}, {node.name}{'' if layout is None else f', {layout!r}'})"
            for node, slot, layout in self.layout.fills(self.number)
            if before == (node not in self.executed)
        ]

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
        return _by_place(last)

    def code(self, program: Callable[..., None]) -> RunCode:
        """The tables of this run for its frames."""
        layout, slots = self.layout, self.layout.slots[self.number]
        saves = layout.saves
        saved = [t for start, stop in self.run.saved for t in range(start, stop)]
        flat = [(t, k) for t in saved if not layout.is_repeated(self.number, t) for k in range(len(saves[t]))]
        operations = [layout.position[node] for node in self.nodes if not isinstance(node.target, OpaqueCall)]
        again = [(t, k) for t in operations for k in range(len(saves[t]))]
        read = [(n, node) for node in self.nodes for n in self._reads(node) if n.op == "get_attr"]
        return RunCode(
            number=self.number,
            slots=tuple(slots[key] if key in slots else mark_of(layout, *key) for key in flat),
            targets=tuple(slots.get(key, KEEP) for key in again),
            program=program,
            externals=tuple(dict.fromkeys(layout.place[n.name] for n, _ in read)),
            of_opaque={layout.place[n.name]: str(n.target) for n, node in read if isinstance(node.target, OpaqueCall)},
        )

    def _reads(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        """Nodes of the tensors that a node's result depends on."""
        if isinstance(node.target, OpaqueCall):  # and what its module holds, unless a view is all that is made
            state = cast(list[torch.fx.Node], node.args[2])
            return state if self.layout.is_repeated(self.number, self.layout.position[node]) else []
        live = live_nodes(node)
        return [n for n in node.all_input_nodes if n not in live]


def mark_of(layout: Layout, t: int, k: int) -> int:
    """What marks a saved tensor that has no slot."""
    if layout.saves[t][k].unneeded:
        return DROP
    if (value := layout.offloaded_in(layout.saves[t][k])) is not None:
        return AWAY - value
    of_use = t in layout.repeated and takes_notes(layout.target(FORWARD, t)) and layout.saves[t][k] == Saved()
    return KEEP - 1 - t if of_use else KEEP


def _nothing(bound: Any, frame: Any) -> None:
    raise AssertionError("the forward is never run again")


def _by_place(places: dict[torch.fx.Node, Any]) -> dict[Any, list[torch.fx.Node]]:
    """The nodes of each place, in order."""
    nodes: dict[Any, list[torch.fx.Node]] = {}
    for node, place in places.items():
        nodes.setdefault(place, []).append(node)
    return nodes


def _function(head: str, lines: list[str]) -> str:
    return "\n    ".join([f"def {head}:", *lines]) + "\n"
