"""Regions of operators that run as code that torch.compile makes of them, forward and backward."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..errors import DependencyError, InputError, ParseError, SolveError
from ..graph import Graph, Operation
from ..operators.registry import live_arguments, out_of_place
from ..parser import ParseOptions, parsed
from ..plan import Plan, make_plan
from ..plan.decisions import Decisions, Segment, saved
from ..plan.simulate import plain_peak
from ..program.opaque import Region
from ..program.program import SHARED, get_attribute
from ..solver import SolveOptions
from ..torch_state.private import OpOverload, schema_of
from .blocks import place_of
from .rules import rule_of

log = logging.getLogger(__name__)

RegionEnds = tuple[str, ...]
"""Names of operations."""

GRADIENTS = 0.02
"""A region takes in no more parameters where those that it has are a larger share of the plan's peak."""


class Compiler:
    """Has regions compiled by a backend of torch.compile, equal ones once."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.made: dict[Any, Callable[..., Any]] = {}

    def code_for(self, graph: torch.fx.Graph, tensors: tuple[torch.Tensor, ...]) -> Callable[..., Any]:
        """What runs a region on tensors like these."""
        kinds = tuple((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors)
        key = _text(graph), kinds
        if key not in self.made:
            module = torch.fx.GraphModule(torch.nn.Module(), graph)
            self.made[key] = torch.compile(module, backend=self.backend, fullgraph=True, dynamic=False)
        return self.made[key]


@dataclass(eq=False)
class Compiled(Region):
    """A region that runs as code that torch.compile makes of it, which ``compiler`` has compiled when it first runs."""

    name: str
    graph: torch.fx.Graph
    live: tuple[int, ...]
    compiler: Compiler
    code: Callable[..., Any] | None = field(default=None, repr=False)

    @property
    def __name__(self) -> str:
        return "compiled"

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if self.code is None:
            return self._compiled(*tensors)
        return self.code(*tensors)

    def _compiled(self, *tensors: torch.Tensor) -> Any:
        """The result of the first call; raises ParseError where the region cannot be compiled."""
        code = self.compiler.code_for(self.graph, tensors)
        try:
            result = code(*tensors)
        except Exception as error:
            calls = [node for node in self.graph.nodes if node.op == "call_function"]
            raise ParseError(
                f"the operations from {calls[0]} to {calls[-1]}, in module {calls[0].meta.get('module', '')!r}, cannot "
                f"be compiled: {str(error).strip().partition(chr(10))[0]}; leave out compile=, or name the module in "
                "opaque_modules"
            ) from error
        self.code = code
        return result

    def to_weigh(self) -> Callable[..., Any]:
        return lambda *tensors: self.run(tensors)


def _text(graph: torch.fx.Graph) -> str:
    """The region with names by position."""
    places = {node: f"%{n}" for n, node in enumerate(graph.nodes)}
    return "\n".join(
        f"{node.op} {node.target if node.op == 'call_function' else ''} "
        + str(torch.fx.node.map_arg((node.args, node.kwargs), places.__getitem__))
        for node in graph.nodes
    )


@dataclass(frozen=True)
class Compilation:
    """A rewrite: which regions are to run compiled, by the names of their operations, and what compiles them."""

    regions: tuple[RegionEnds, ...]
    compiler: Compiler

    def __call__(self, graph: torch.fx.Graph, device: torch.device) -> None:
        """Put a :class:`Compiled` in the place of each region that is there; others come as operators unfold."""
        by_name = {node.name: node for node in graph.nodes}
        for names in self.regions:
            if by_name.keys() >= set(names):
                _replace([by_name[name] for name in names], self.compiler)


def name_of(names: Sequence[str]) -> str:
    """What a region of these operations is called once it is one."""
    return f"compiled_{names[0]}"


def _writes_given(node: torch.fx.Node, inside: set[torch.fx.Node]) -> bool:
    """Whether an operation writes in place what the region is given; there it takes over nothing."""
    return out_of_place(node.target) is not None and node.args[0] not in inside


def _replace(nodes: Sequence[torch.fx.Node], compiler: Compiler) -> None:
    inside, graph, last = set(nodes), nodes[0].graph, nodes[-1]
    given = list(dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside))
    results = [node for node in nodes if not inside.issuperset(node.users)]
    body = torch.fx.Graph()
    copies = {node: body.placeholder(f"given_{n}") for n, node in enumerate(given)}
    for node in nodes:
        copies[node] = body.node_copy(node, copies.__getitem__)
        if _writes_given(node, inside):
            copies[node].target = out_of_place(node.target)
    body.output(copies[results[0]] if len(results) == 1 else tuple(copies[one] for one in results))
    live = {one for node in nodes for one in live_arguments(node.target, node.args)}
    numbers = tuple(n for n, node in enumerate(given) if node in live)
    with graph.inserting_after(last):
        code = Compiled(name_of([node.name for node in nodes]), body, numbers, compiler)
        new = graph.call_function(code, tuple(given))
    new.meta.update(last.meta, module=place_of(nodes), operator="compiled")
    made, after = [new], new
    if len(results) > 1:
        made = []
        for number in range(len(results)):
            with graph.inserting_after(after):
                after = graph.call_function(operator.getitem, (new, number))
            after.meta.update(results[number].meta)
            made.append(after)
    for old, one in zip(results, made, strict=True):
        old.replace_all_uses_with(one, lambda user: user not in inside)
    for node in reversed(nodes):
        graph.erase_node(node)


def check_backend(backend: str, device: torch.device) -> None:
    """Compile next to nothing, to see whether that can be.

    Raises:
        InputError: torch.compile has no such backend.
        DependencyError: it cannot compile here.
    """
    if backend not in (known := torch.compiler.list_backends(exclude_tags=())):
        raise InputError(f"compile must be True or a backend of torch.compile, not {backend!r}: {', '.join(known)}")
    try:
        torch.compile(_next_to_nothing, backend=backend, fullgraph=True)(torch.zeros(2, device=device))
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise DependencyError(
            f"torch.compile cannot compile with backend {backend!r} here ({reason}); install what it needs, on a CPU a "
            "C++ compiler such as g++, or leave out compile="
        ) from error


def _next_to_nothing(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def compile_plan(
    model: torch.nn.Module,
    sample_input: Any,
    graph: Graph,
    plan: Plan,
    backend: str,
    parsing: ParseOptions,
    solving: SolveOptions,
) -> tuple[Graph, Plan]:
    """The graph whose operations are compiled regions, as far as these can be, and its plan.

    A region ends where ``plan``, which is for ``graph``, cuts the program, and where an operation must run as it is.
    Those that take longer compiled than operator by operator are left as they are, unless the plan is worse for it.

    Args:
        model, sample_input, graph, parsing: what ``graph`` was parsed from, and how.
        plan, solving: for ``graph``, and how it was found.
        backend: of torch.compile.

    Raises:
        ParseError: a region cannot be compiled.
        SolveError: nothing fits the budget, whatever is compiled.
    """
    compiler, most, goal = Compiler(backend), int(GRADIENTS * plan.peak_bytes), solving.goal
    # The plain plan here is that of the compiled program; a share is one of the model's own peak.
    goal = replace(goal, memory_budget=goal.budget_bytes(plain_peak(graph))) if goal.is_bounded else goal

    def with_these(regions: tuple[RegionEnds, ...]) -> tuple[Graph, Plan]:
        options = replace(parsing.as_for(graph), rewrite=Compilation(regions, compiler))
        compiled = parsed(model, sample_input, options)
        found = solving.plan(replace(compiled, plain_peak_bytes=None), goal)
        decisions = Decisions((saved(0, len(compiled)),)) if found.is_plain else found.decisions
        return compiled, replace(make_plan(compiled, decisions, found.solver), budget_bytes=found.budget_bytes)

    def between(cuts: Iterable[int]) -> tuple[Graph, Plan]:
        regions = tuple(regions_between(model, graph, cuts, most))
        compiled, found = with_these(regions)
        quicker = tuple(those_that_gain(regions, graph, compiled))
        if quicker == regions:
            return compiled, found
        try:
            fewer, other = with_these(quicker)
        except SolveError:  # what is compiled saves less
            return compiled, found
        return (compiled, found) if _cost(found) <= _cost(other) else (fewer, other)

    def between_as_few_as_fit() -> tuple[Graph, Plan]:
        cuts = set(cuts_of(plan.segments))
        heavy = {t for t, node in enumerate(graph.program.operations) if rule_of(node.target).is_heavy}
        for some in (cuts, cuts | heavy):
            try:
                return between(some)
            except SolveError as error:
                log.info("smaller regions are tried: %s", error)
        return between(graph.cuts)

    chosen = between_as_few_as_fit()
    if not _code_of(chosen[0]):
        log.warning(
            "nothing is compiled: no two operations lie together between cuts that meet the goal, and gain by it"
        )
    return chosen


def regions_between(model: torch.nn.Module, graph: Graph, cuts: Iterable[int], most: int) -> Iterator[RegionEnds]:
    """The names of operations that may be compiled together between two cuts.

    A compiled backward returns all gradients at its end: where those of parameters take ``most`` bytes, no operation
    that has further ones is added.
    """
    cuts, names, sizes = set(cuts), list[str](), list[int]()
    for t, node in enumerate(graph.program.operations):
        size = _gradient_bytes(model, graph, node)
        is_cut = t in cuts or (size and sum(sizes) > most)
        may_be_next = _may_be_compiled(graph, t, node, names)
        if names and (is_cut or not (may_be_next or _stands_alone(node))):
            yield from [tuple(names)] if len(names) > 1 else []
            names, sizes = [], []
            may_be_next = _may_be_compiled(graph, t, node, names)
        if may_be_next:
            names, sizes = [*names, node.name], [*sizes, size]
    yield from [tuple(names)] if len(names) > 1 else []


def those_that_gain(regions: Iterable[RegionEnds], graph: Graph, compiled: Graph) -> Iterator[RegionEnds]:
    """The regions that take less time compiled than their operations take."""
    taken, code = {op.name: op for op in graph.operations}, _code_of(compiled)
    for names in regions:
        if (op := code.get(name_of(names))) is None or _seconds(op) < sum(_seconds(taken[name]) for name in names):
            yield names


def _code_of(graph: Graph) -> dict[str, Operation]:
    """The operations that are compiled regions, by the names of these."""
    nodes = zip(graph.program.operations, graph.operations, strict=False)  # a loss comes behind
    return {node.target.name: op for node, op in nodes if isinstance(node.target, Compiled)}


def _seconds(op: Operation) -> float:
    return op.forward_seconds + op.backward_seconds


def _cost(plan: Plan) -> float:
    """What a plan is chosen by: time within a budget, otherwise memory."""
    return plan.peak_bytes if plan.budget_bytes is None else plan.step_seconds + plan.added_seconds


def _gradient_bytes(model: torch.nn.Module, graph: Graph, node: torch.fx.Node) -> int:
    """Bytes of the gradients of parameters that an operation takes."""
    constants = graph.program.constants
    attributes = (one for one in node.all_input_nodes if one.op == "get_attr")
    given = (get_attribute(model, constants, str(one.target)) for one in attributes)
    return sum(t.nbytes for t in given if isinstance(t, torch.Tensor) and t.requires_grad)


def _stands_alone(node: torch.fx.Node) -> bool:
    """Whether nothing else of the program has to do with an operation, such as one that counts steps in a buffer."""
    return not node.users and all(one.op == "get_attr" and len(one.users) == 1 for one in node.all_input_nodes)


def _may_be_compiled(graph: Graph, t: int, node: torch.fx.Node, inside: Collection[str]) -> bool:
    """Whether an operation may be part of a region that has these: it draws nothing, and writes nothing for good."""
    op = graph.operations[t]
    is_item = node.target is operator.getitem and getattr(node.args[0], "name", "") in inside
    is_operator = isinstance(node.target, OpOverload) and not node.meta.get(SHARED)
    is_operator = is_operator and not rule_of(node.target).runs_uncompiled
    if is_operator and schema_of(node.target).is_mutable:  # what is given stays as it is
        takes_over = op.takes_over is not None and out_of_place(node.target) is not None
        is_operator = takes_over or all(graph.operations[graph.producers[v]].name in inside for v in op.writes)
    return (is_item or is_operator) and op.replayable and t not in graph.program.random


def cuts_of(segments: Iterable[Segment]) -> Iterator[int]:
    """Where segments start, at any level."""
    for segment in segments:
        yield segment.start
        yield from cuts_of(segment.parts)
