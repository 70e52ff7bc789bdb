"""A front end of another tracer: its graph becomes the program, and the forward itself runs beside it.

The graph gives the operators, their order, their arguments and the modules. It runs once, operator by operator, and is
recorded. A graph does not tell what Python reads and writes besides, what it does that no program can hold, how long it
holds a tensor, and calls that nothing uses: all that is recorded of the forward. The verifier compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...errors import OgcError, ParseError
from ...program.opaque import OpaqueCall
from ...program.program import CONSTANT, leaves_of
from ...program.structures import InputSpec
from ...torch_state.compare import same_bits
from ...torch_state.forwards import plain_forward
from ...torch_state.no_trace import untouched
from ..arguments import Sample
from ..forward.flat import FlatForward
from ..traced import HISTORY, FrontEnd, Traced, forget_calls, used

Tracer = Callable[[Sample], Callable[..., Any]]
"""Traces the model's own forward, and returns a function of the sample's tensors that runs the graph, operator by
operator, in :func:`~ogc.parser.forward.location.scope` of their places. It returns the tensors of the result."""


@dataclass(frozen=True)
class Door:
    """A :class:`~ogc.parser.traced.FrontEnd`: the recorded graph of ``tracer``, by the name of the door."""

    name: str
    tracer: Tracer
    record: FrontEnd
    knows_lines: bool = True  # or only those within functions named ``forward``

    def __call__(self, sample: Sample, forward: Callable[..., Any], opaque: set[str], is_careful: bool) -> Traced:
        """As any front end, but without opaque modules."""
        assert not opaque, opaque
        model, held = sample.model, sample.spec.constants
        with untouched(model, given=held):  # first, so that whoever observes it knows what else is to be put back
            seen = self.record(sample._replace(tensors=sample.copies()), forward, set(), is_careful)
        with untouched(model, given=held):
            traced = self._traced(sample._replace(tensors=sample.copies()))
        with untouched(model, given=held):
            spec, _ = InputSpec.of(tuple(sample.tensors), {})
            program = self.record(Sample(model, spec, sample.copies()), traced, set(), is_careful)
        FlatForward(plain_forward(model), sample.spec).run(sample.tensors)  # state is left as by one forward
        return _with_what_only_the_forward_shows(program, seen, self.knows_lines)

    def _traced(self, sample: Sample) -> Callable[..., Any]:
        try:
            return self.tracer(sample)
        except OgcError:
            raise
        except Exception as error:
            text = next(filter(None, map(str.strip, str(error).splitlines())), "")
            raise ParseError(
                f'front_end="{self.name}" cannot trace the forward, which raises {type(error).__name__} in it: {text}. '
                "Leave front_end away for the recorder"
            ) from error


def _with_what_only_the_forward_shows(program: Traced, seen: Traced, knows_lines: bool) -> Traced:
    """The program of a graph, with what was ``seen`` of the forward; the verifier refuses it where they are unlike."""
    parting = _Merge(program, seen, knows_lines).run()
    for node in program.graph.nodes if parting else ():
        forget_calls(node)
    return replace(seen, graph=program.graph, constants=program.constants, parting=parting)


def _in_words(node: torch.fx.Node) -> str:
    module, source = node.meta.get("module"), node.meta.get("source")
    where = ", ".join(filter(None, (f"module '{module}'" if module else "the model", source)))
    return f"{node.target} ({where})" if node.op == "call_function" else "the end of the graph"


class _Merge:
    """Puts into a program the calls that were ``seen`` and that nothing uses, and what is known of each call."""

    def __init__(self, program: Traced, seen: Traced, knows_lines: bool) -> None:
        self.program, self.seen, self.knows_lines = program, seen, knows_lines
        self.found: dict[torch.fx.Node, torch.fx.Node] = {}  # for each node that was seen, the program's

    def run(self) -> str:
        """Where the two part, in words; "" if they are alike, but for calls that nothing uses."""
        graph, needed = self.program.graph, used(self.seen.graph)
        given = graph.find_nodes(op="placeholder"), self.seen.graph.find_nodes(op="placeholder")
        self.found.update(zip(reversed(given[1]), reversed(given[0]), strict=True))
        rest = [node for node in graph.nodes if node.op in ("call_function", "output")]
        for theirs in self.seen.graph.nodes:
            if theirs.op in ("call_function", "output") and self._is_like(rest[0], theirs):
                self.found[theirs] = rest.pop(0)
            elif theirs.op == "call_function" and theirs not in needed:
                with graph.inserting_before(rest[0]):
                    self.found[theirs] = graph.node_copy(theirs, self._of)
            elif theirs.op in ("call_function", "output"):
                return _in_words(rest[0])
        self._take_meta()
        return ""

    def _is_like(self, ours: torch.fx.Node, theirs: torch.fx.Node) -> bool:
        """Whether both call the same on the same."""
        is_opaque = isinstance(ours.target, OpaqueCall) and isinstance(theirs.target, OpaqueCall)
        if ours.op != theirs.op or not (is_opaque or ours.target == theirs.target):
            return False
        pairs = leaves_of(ours.args, ours.kwargs), leaves_of(theirs.args, theirs.kwargs)
        if len(pairs[0]) != len(pairs[1]):
            return False
        known: dict[torch.fx.Node, torch.fx.Node] = {}
        for mine, other in zip(*pairs, strict=True):
            if isinstance(mine, torch.fx.Node) and isinstance(other, torch.fx.Node):
                if self.found.get(other, known.get(other)) is not mine and not self._is_same_tensor(mine, other):
                    return False
                known[other] = mine
            elif type(mine) is not type(other) or repr(mine) != repr(other):
                return False
        self.found.update((other, mine) for other, mine in known.items() if other not in self.found)
        return True

    def _is_same_tensor(self, ours: torch.fx.Node, theirs: torch.fx.Node) -> bool:
        if ours.op != "get_attr" or theirs.op != "get_attr" or theirs in self.found:
            return False
        mine, other = self.program.constants.get(str(ours.target)), self.seen.constants.get(str(theirs.target))
        if mine is None or other is None:
            return mine is other and ours.target == theirs.target
        return same_bits(mine, other)

    def _of(self, theirs: torch.fx.Node) -> torch.fx.Node:
        """The program's node for one that was seen, made now if it is a tensor that the program has not met yet."""
        if theirs not in self.found:
            target = str(theirs.target)
            if theirs.op == "get_attr" and target in self.seen.constants:
                target = f"{CONSTANT}{len(self.program.constants)}"
                self.program.constants[target] = self.seen.constants[str(theirs.target)]
            self.found[theirs] = self.program.graph.node_copy(theirs)
            self.found[theirs].target = target
        return self.found[theirs]

    def _take_meta(self) -> None:
        names = {theirs.name: ours.name for theirs, ours in self.found.items()}
        for theirs, ours in self.found.items():
            place: dict[str, Any] = {key: ours.meta[key] for key in ("module", "source") if ours.meta.get(key)}
            ours.meta = {**theirs.meta, **place}
            if not self.knows_lines and "source" in theirs.meta:
                ours.meta["source"] = theirs.meta["source"]
            if HISTORY in ours.meta:
                history = ours.meta[HISTORY]
                results, saved = ([names[name] for name in one] for one in (history.results, history.saved))
                ours.meta[HISTORY] = history._replace(results=tuple(results), saved=tuple(saved))
