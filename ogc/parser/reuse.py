"""Gives a graph for a call whose inputs differ in size, or in what Python reads out of them, by the same plan.

The forward is recorded anew for that call. Where it is the same program up to numbers, the plan of the first one
serves, and its weights too unless it matters what the plan takes now. What its operations save and share is seen again,
as kernels are chosen by shape.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch

from ..errors import InputError, ParseError
from ..graph import Graph, Operation, Variant
from ..process import collecting_new_only
from ..program.opaque import Opaque, OpaqueCall, Region, opaque_in
from ..program.program import SHAPE, Outcome, Program
from ..program.structures import InputSpec
from ..torch_state.no_trace import plainly, untouched
from ..torch_state.ranks import alone, parameters_apart
from .arguments import Sample, call_arguments, check_tensors
from .assemble import graph_of, memory_of, program_of, values_of, versions_of
from .faithful import follow
from .loss import losses_of, modules_of, with_step_end
from .opaque import OpaqueModules
from .parse import lower, profiler_of, record_program
from .passes.numbers import check_memory, guards_along, looked_at, numbers_of
from .traced import Traced, Unlike
from .weigh.measure import Profiler, weigh
from .weigh.record import Record


@plainly()
@alone()
def reuse(model: torch.nn.Module, graph: Graph, sample_input: Any, weighed: bool = False) -> Graph:
    """``graph`` as it is for another call.

    The forward runs as often as in :func:`ogc.parse`, with the memory of inference; see :func:`reuse_quickly` for once.

    A loss that does not take what the model returns for that call counts in proportion to what it took for the first.

    Args:
        model: what ``graph`` was parsed from.
        graph: from :func:`ogc.parse`.
        sample_input: the other call.
        weighed: find the weights of its operations anew, or else keep those of the first call.

    Raises:
        ParseError: it is another program.
    """
    program: Program = graph.program
    if any(isinstance(node.target, Region) for node in program.operations):
        raise ParseError("a plan in chunks, or compiled, is not reused")
    sample = Sample(model, *InputSpec.of(*call_arguments(sample_input)))
    home = check_tensors(sample)
    opaque = {node.target.name: node.target for node in program.operations if isinstance(node.target, OpaqueCall)}
    profiler = profiler_of(graph.profile, home, home) if weighed else None
    with untouched(*modules_of(program.after_forward.loss), given=sample.spec.constants), parameters_apart(model):
        recorded = record_program(sample, program.parse_graph, OpaqueModules(model, sorted(opaque_in(program.graph))))
        bare = replace(recorded, outputs=[], state={}, grad_targets=frozenset())
        recorded, has_loss = _with_step_end(sample, recorded, program)
        traced, observation = lower(sample, recorded, home, partial(_visit, model, opaque, profiler))
    if weighed:
        found = graph_of(sample.spec, traced, observation, graph.device, graph.profile, graph.runtime.choice)
        check_same_program(program.graph, found.program.graph)
    else:
        taken = versions_of(traced.graph, observation)
        again = program_of(sample.spec, traced, observation, taken)
        check_same_program(program.graph, again.graph)
        seen = memory_of(observation, taken)
        known, outside = (graph.operations, graph.outside) if has_loss else (graph.operations[: graph.end], 0)
        operations = tuple(_reused(op, fields) for op, fields in zip(known, seen, strict=True))
        values = values_of(traced, observation)
        found = replace(graph, operations=operations, values=values, program=again, outside=outside, free=None)
    made = replace(found.program, parse_graph=program.parse_graph, recorded=bare)
    found = replace(found, program=made, host=graph.host, in_flight=graph.in_flight)
    return found if has_loss else _with_outside_of(graph, found)


@plainly()
@alone()
@collecting_new_only()
def reuse_quickly(model: torch.nn.Module, graph: Graph, sample_input: Any, holds: Callable[[Shapes], bool]) -> Graph:
    """``graph`` for a call in which numbers alone are others, be they arguments, attributes or sizes.

    It takes one forward, with the memory of inference: the program was verified for other numbers, and what its
    operations save and share is seen there. ``program.graph`` stays that of the known call: the numbers of this one are
    apart. The weights stay, too.

    Args:
        model, graph, sample_input: as for :func:`reuse`.
        holds: whether the plan holds for these shapes, in the order of :func:`shapes_of`.

    Raises:
        ParseError: another program, or what numbers alone do not tell.
    """
    program: Program = graph.program
    known: Traced | None = program.recorded
    if known is None or program.parse_graph or program.cold is not None or _has_opaque(program):
        raise ParseError("the program has parts that numbers do not tell")
    sample = Sample(model, *InputSpec.of(*call_arguments(sample_input)))
    check_tensors(sample)
    with parameters_apart(model):
        try:
            with follow(sample, known, looked_at(program, known.graph)) as (found, observer):
                is_changed = any((one.owner.number, one.key) not in observer.effects for one in observer.writes(None))
                is_loss_alone = program.after_forward.outputs == "loss"
                wanted = losses_of(sample, found) if is_loss_alone else range(len(found.outputs))
                expected = Outcome.of(model, [found.outputs[n] for n in wanted])
            shapes = [found.shapes.get(node.name, ()) for node in known.graph.nodes]
            if shapes != shapes_of(known.graph) and not holds(shapes):
                raise Unlike("the plan may not keep to its goal for these sizes")
            numbers = numbers_of(program, known.graph, found)
            saves = check_memory(program, known.graph, found)
            guards = guards_along(program.guards, found)
        except Unlike as unlike:
            raise ParseError(str(unlike)) from None
        if guards is not None:
            guards = replace(guards, expected=guards.read(model, sample.tensors))  # as before each call
    if is_changed or (found.output_spec, found.requires_grad) != (known.output_spec, known.requires_grad):
        raise ParseError("what the forward returns or writes is another")
    reads = observer.reads()
    again = replace(
        program,
        inputs=sample.spec,
        saves=saves,
        numbers=numbers,
        guards=guards,
        reads=reads,
        cold=None,
        recorded=None,
        expected=expected,
    )
    return graph.running(again)


Shapes = list[tuple[int, ...]]


def shapes_of(graph: torch.fx.Graph) -> Shapes:
    """The shape of each tensor of a recorded program, those of its inputs first; () for what is no tensor."""
    return [() if node.op == "get_attr" else tuple(node.meta.get(SHAPE, ())) for node in graph.nodes]


def at_shapes(graph: Graph, shapes: Shapes) -> Graph:
    """``graph`` with times in proportion to what its operations return for other shapes, those of :func:`shapes_of`.

    What the runtime takes beside its operators stays. The graph is to be weighed, not run.
    """
    recorded = graph.program.recorded.graph
    share, shares = 1.0, dict[str, float]()
    for node, before, now in zip(recorded.nodes, shapes_of(recorded), shapes, strict=True):
        if prod(before) and SHAPE in node.meta:
            of = node.args[0] if node.target is operator.getitem else node
            shares.setdefault(of.name, prod(now) / prod(before))
    return replace(graph, operations=tuple(op.scaled(share := shares.get(op.name, share)) for op in graph.operations))


def _has_opaque(program: Program) -> bool:
    return any(isinstance(node.target, Opaque) for node in program.operations)


def _with_step_end(sample: Sample, recorded: Traced, program: Program) -> tuple[Traced, bool]:
    """The program with the loss that was given for the first call, and whether that takes what this one returns.

    It may have targets bound in which are right for the first call alone.
    """
    try:
        return with_step_end(sample, recorded, program.after_forward), True
    except InputError:
        return with_step_end(sample, recorded, replace(program.after_forward, loss="outputs")), False


def _with_outside_of(known: Graph, found: Graph) -> Graph:
    """A graph of the model alone with what the caller goes on with in the known one, and its numbers for values.

    The loss takes as much more, or less, as the model returns.
    """
    numbers = [v for v, producer in enumerate(known.producers) if producer < known.end]
    returned = [n for n, v in enumerate(numbers) if known.values[v].is_returned]
    before, now = sum(known.values[numbers[n]].bytes for n in returned), sum(found.values[n].bytes for n in returned)
    share = now / max(1, before)
    values = [replace(value, bytes=round(share * value.bytes)) for value in known.values]
    for number, value in zip(numbers, found.values, strict=True):
        values[number] = value
    storages = {ref: numbers[v] for ref, v in found.program.storages.items()}
    return replace(
        known,
        operations=(
            *(op.renumbered(numbers) for op in found.operations),
            *(op.scaled(share) for op in known.operations[known.end :]),
        ),
        values=tuple(values),
        program=replace(found.program, storages=storages, after_forward=known.program.after_forward),
    )


def _reused(op: Operation, seen: dict[str, Any]) -> Operation:
    """The operation as it was seen for the other call, with the weights that it had."""
    now: Variant | None = seen.pop("low_memory")
    variant = now and op.low_memory and replace(op.low_memory, saves=now.saves, internal_bytes=now.internal_bytes)
    return replace(op, low_memory=variant, **seen)


def _visit(
    model: torch.nn.Module,
    opaque: dict[str, OpaqueCall],
    profiler: Profiler | None,
    record: Record,
    args: Any,
    kwargs: Any,
) -> None:
    """Let an opaque module be recomputed if it may in the known program; weigh an operation given a profiler."""
    node = record.node
    if isinstance(node.target, OpaqueCall) and (known := opaque.get(node.target.name)) is not None:
        node.target = replace(node.target, repeatable=known.repeatable, aside=known.aside)
        record.random |= known.repeatable  # as it may draw numbers
    if profiler is not None:
        record.weights = weigh(model, profiler, record, args, kwargs)


def check_same_program(known: torch.fx.Graph, new: torch.fx.Graph) -> None:
    """Raise ParseError unless two programs are the same up to numbers."""
    for then, now in zip(known.nodes, new.nodes, strict=False):
        alike = then.name == now.name and then.op == now.op and _same_target(then.target, now.target)
        if not alike or not _same((then.args, then.kwargs), (now.args, now.kwargs)):
            raise ParseError(
                f"the forward runs another program for these inputs: {now.name} at {now.meta.get('source', '')} in the "
                f"place of {then.name}"
            )
    if len(known.nodes) != len(new.nodes):
        raise ParseError(f"the forward runs {len(new.nodes)} operations for these inputs instead of {len(known.nodes)}")


def _same_target(a: Any, b: Any) -> bool:
    if isinstance(a, OpaqueCall) and isinstance(b, OpaqueCall):
        return (a.module, a.function, a.grad, a.autocast, a.new) == (b.module, b.function, b.grad, b.autocast, b.new)
    return bool(a == b)


def _same(a: Any, b: Any) -> bool:
    """Whether two arguments are the same up to numbers."""
    if isinstance(a, torch.fx.Node) and isinstance(b, torch.fx.Node):
        return a.name == b.name
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (int, float)) and isinstance(b, (int, float)) and not isinstance(a, bool):
        return type(a) is type(b)
    return type(a) is type(b) and bool(a == b)
