"""Puts a weighted graph together from a program, what was seen when it ran, and the weights of its operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch

from ..errors import ParseError, optional
from ..graph import Graph, Operation, Value, Variant
from ..operators.gpus import gpu_of, gpu_of_meta
from ..operators.registry import of
from ..operators.weights import Weights
from ..program.opaque import runs_once
from ..program.program import OUTSIDE, SHARED, LowMemoryVariant, Program, Saved, TensorRef
from ..program.structures import InputSpec
from .passes.lifetimes import forget_unreached, note_lifetimes, with_unused
from .passes.writes import separate_versions
from .traced import StepEnd, Traced
from .weigh.backward import Backwards, LiveGradients
from .weigh.host import OF_VARIANT, beside_device, hook_seconds, runtime_costs
from .weigh.measure import EVICTING_BYTES
from .weigh.record import Observation, Record, SeenVariant

OF_COMPARED = 40
"""What a tensor takes that an opaque module saves, in hooked ones: a recomputation compares it. On a virtual EPYC, in a
transformer of six compiled blocks of 16 such tensors, that took 0.14 ms each where a hooked one took 2.9 us."""


def graph_of(
    spec: InputSpec, traced: Traced, observation: Observation, device: str, kind: str, choice: float = 0.0
) -> Graph:
    """The graph of a program that was observed and weighed for ``device``; ``kind`` is the profile's.

    ``choice`` are the seconds that it takes to see that a plan of it is for a call.
    """
    records = observation.records
    taken = versions_of(traced.graph, observation)
    _weigh_written_aside(observation)
    gradients = end_of(traced).after_forward.gradients
    found = Backwards(traced.graph, observation, end_of(traced).starts, gradients, _as_on(torch.device(device)))
    weights = [record.weights for record in records]
    live, of_plain = found.live(weights), found.live(list(map(_of_plain, weights)))
    in_variants = found.live([record.weights.low_memory if record.variant else None for record in records])
    seen = memory_of(observation, taken)
    each = zip(records, live, in_variants, of_plain, seen, strict=True)
    values = values_of(traced, observation)
    operations = tuple(with_unused([_operation(*of_one) for of_one in each], values, observation))
    program = program_of(spec, traced, observation, taken)
    outside = outside_of(records)
    calls = traced.python_calls - (len(operations) - outside)
    is_cuda = torch.device(device).type == "cuda"
    evicts = is_cuda or sum(observation.value_bytes) > EVICTING_BYTES
    costs = runtime_costs(kind != "estimate", calls, choice, evicts)
    if not is_cuda:  # there the host does it while kernels run
        operations = tuple(_behind_kernels(op, OF_VARIANT * costs.run) for op in operations)
    elif kind == "measure":
        operations, costs = beside_device(operations, costs, hook_seconds())
    copies = sum(record.weights.plain_seconds for record in records)
    costs = replace(costs, left_out=costs.left_out + copies)
    return Graph(operations, values, program, device, kind, runtime=costs, outside=outside, left_bytes=found.left)


def _as_on(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, operators on meta tensors are all a device's."""
    if device.type != "cuda":
        return nullcontext()
    gpu = gpu_of_meta()[0] or gpu_of(device, None)
    found: AbstractContextManager[Any] = optional("sizing.cuda.kernels").as_on_cuda(gpu, is_recorded=False)
    return found


def _behind_kernels(op: Operation, seconds: float) -> Operation:
    """With so much more time for the backward of its low-memory variant, if it has one."""
    if op.low_memory is None:
        return op
    return replace(op, low_memory=replace(op.low_memory, backward_seconds=op.low_memory.backward_seconds + seconds))


def _aside(observation: Observation) -> Iterator[tuple[Record, int, bool]]:
    """Operations with values that each holds past autograd, and whether a later one writes them."""
    last_writes = {v: t for t, record in enumerate(observation.records) for v in record.writes}
    for t, record in enumerate(observation.records):
        for value in sorted({observation.storages[ref] for ref in record.aside}):
            yield record, value, last_writes[value] > t


def _weigh_written_aside(observation: Observation) -> None:
    """Count what is held past autograd and written later with its holder, beside the value: too much, not too little.

    As an output it would bar cuts to the end of the program.
    """
    for record, value, is_written in _aside(observation):
        if is_written:
            size, known = observation.value_bytes[value], record.weights
            internal = size + (known.internal_bytes or 0)
            record.weights = replace(known, internal_bytes=internal, aside_bytes=known.aside_bytes + size)


def end_of(traced: Traced) -> StepEnd:
    """How the step goes on from a program, of which that is known."""
    assert traced.end is not None
    return traced.end


def outside_of(records: Sequence[Record]) -> int:
    """How many operations are the caller's: the last ones."""
    return sum(OUTSIDE in record.node.meta for record in records)


def refs_of_outputs(graph: torch.fx.Graph) -> list[TensorRef]:
    """The outputs of a program, in order."""
    output = next(node for node in graph.nodes if node.op == "output")
    return [TensorRef(node.name, 0) for node in cast(Sequence[torch.fx.Node], output.args[0])]


def versions_of(graph: torch.fx.Graph, observation: Observation) -> dict[int, tuple[int, Any]]:
    """Make values of their own of what is written in place; see :func:`separate_versions`.

    What no output depends on saves nothing from here on: its part of autograd's graph goes with its results.
    """
    dead = forget_unreached(observation)
    _refuse_overwritten(observation)
    taken = separate_versions(observation, {ref.node for ref in refs_of_outputs(graph)})
    note_lifetimes(observation, taken, dead)
    return taken


def _refuse_overwritten(observation: Observation) -> None:
    for value, saver, writer in observation.overwritten:
        if value in saver.saved.values:
            name = observation.value_names[value]
            (place, by), (where, at) = ((one.node.name, _place(one.node)) for one in (writer, saver))
            raise ParseError(
                f"{place} ({by}) changes {name} in place after {where} ({at}) saved it for its backward, which "
                "autograd refuses; make the in-place operation out of place"
            )


def _place(node: torch.fx.Node) -> str:
    return node.meta.get("module", "") or str(node.meta.get("source", ""))


def values_of(traced: Traced, observation: Observation) -> tuple[Value, ...]:
    """The values of a graph."""
    end, refs = end_of(traced), refs_of_outputs(traced.graph)
    held = (
        range(len(refs)) if end.after_forward.holds_outputs else [n for n in end.starts if not traced.outputs[n].dim()]
    )
    outputs = {observation.storages.get(refs[n]) for n in held}
    starts = {v for record in observation.records if of(record.node.target).begins_graph for v in record.reads}
    aside = {v for _, v, is_written in _aside(observation) if not is_written}
    outputs |= starts | aside  # autograd's graph holds them until it is gone itself
    each = zip(observation.value_names, observation.value_bytes, strict=True)
    casts = (TensorRef(node.name, 0) for node in traced.graph.nodes if node.meta.get(SHARED))
    returned = observation.output_values | {observation.storages[ref] for ref in casts}  # which autocast holds
    return tuple(
        Value(
            name,
            size,
            is_output=v in outputs,
            is_returned=v in returned,
            held_until=observation.held.get(v),
        )
        for v, (name, size) in enumerate(each)
    )


def program_of(spec: InputSpec, traced: Traced, observation: Observation, taken: dict[int, tuple[int, Any]]) -> Program:
    """A recorded program with what was seen when it ran."""
    records = observation.records[: len(observation.records) - outside_of(observation.records)]
    end = end_of(traced)
    graph = without_outside(traced.graph, len(traced.outputs) - 1) if end.has_loss else traced.graph
    used = {node.target for node in graph.find_nodes(op="get_attr")}
    return Program(
        graph=graph,
        constants={name: tensor for name, tensor in traced.constants.items() if name in used},
        inputs=spec,
        outputs=traced.output_spec,
        saves=tuple(tuple(record.saved.tensors) for record in records),
        variants={
            t: LowMemoryVariant(record.variant.target, _saves_of_variant(record.variant, observation.storages))
            for t, record in enumerate(records)
            if record.variant is not None
        },
        storages=observation.storages,
        differentiable=frozenset(out.ref for r in records for out in r.outputs if out.differentiable),
        random=frozenset(t for t, record in enumerate(records) if record.random),
        out_of_place={t: functional for t, (_, functional) in taken.items()},
        bindings={(t, target): name for t, r in enumerate(records) for target, name in r.bindings.items()},
        guards=traced.guards,
        after_forward=end.after_forward,
        reads=traced.reads,
        cold=traced.cold,
    )


def without_outside(graph: torch.fx.Graph, outputs: int) -> torch.fx.Graph:
    """A program without the caller's calls, with its first ``outputs`` alone."""
    result = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        if node.op == "output":
            result.output(tuple(copies[one] for one in cast(Sequence[torch.fx.Node], node.args[0])[:outputs]))
        elif OUTSIDE not in node.meta:
            copies[node] = result.node_copy(node, copies.__getitem__)
            assert copies[node].name == node.name
    return result


def memory_of(observation: Observation, taken: dict[int, tuple[int, Any]]) -> list[dict[str, Any]]:
    """For each operation, the fields of the graph's that say what it does to memory, whatever it weighs."""
    records, storages = observation.records, observation.storages
    written = {e for record in records for e in record.externals.writes} - observation.inputs
    writers = (t for t, record in enumerate(records) if not observation.inputs.isdisjoint(record.externals.writes))
    last_of_inputs = max(writers, default=-1)  # those of another call may share memory, views or not
    fields = []
    for t, record in enumerate(records):
        # What a read of a buffer saw is gone once it is written, by a later operation or by the next forward, which may
        # come before this one's backward; what one of an input saw, once a later operation has written that.
        is_early = t < last_of_inputs and not observation.inputs.isdisjoint(record.externals.reads)
        stale = is_early or not written.isdisjoint(record.externals.reads)
        fields.append(
            {
                "reads": tuple(record.reads),
                "writes": tuple(record.writes),
                "saves": tuple(record.saved.values),
                "saved_tensors": len(record.saved.tensors) + OF_COMPARED * record.saved.compared,
                "low_memory": _seen_variant(record, storages),
                "takes_over": taken.get(t, (None,))[0],
                "replayable": not (
                    record.externals.writes or stale or runs_once(record.node.target) or OUTSIDE in record.node.meta
                ),
            }
        )
    _hold_in_frames(records, fields)
    return fields


def _hold_in_frames(records: Sequence[Record], fields: Sequence[dict[str, Any]]) -> None:
    """Let what the caller's modules are given be there until they return, as Python's frames hold it.

    The plain model's frames do so too, but nearly all that these hold is saved for the backward; what a caller computes
    without gradients, such as a teacher's output, is not.
    """
    made = {v: t for t, record in reversed([*enumerate(records)]) for v in record.writes}
    modules = [f"{record.node.meta.get('module', '')}." for record in records]
    taken = {one["takes_over"] for one in fields}
    for t in range(len(records) - outside_of(records), len(records)):
        parts = modules[t].split(".")[:-1]
        for v in set(records[t].reads) - taken:
            around = (".".join(parts[:n]) + "." for n in range(1, len(parts) + 1))
            given = next((name for name in around if not modules[made[v]].startswith(name)), None)
            last = t
            while given is not None and last + 1 < len(records) and modules[last + 1].startswith(given):
                last += 1
            if v not in fields[last]["reads"]:
                fields[last]["reads"] += (v,)


def _saves_of_variant(variant: SeenVariant, storages: dict[TensorRef, int]) -> tuple[Saved, ...]:
    """What a form saves; a result that an opaque module has made a buffer of is no value."""
    return tuple(s if s.tensor is None or s.tensor in storages else Saved(external=True) for s in variant.saves)


def _seen_variant(record: Record, storages: dict[TensorRef, int]) -> Variant | None:
    """What was seen of an operation's low-memory variant, without its weights."""
    if record.variant is None:
        return None
    saves = dict.fromkeys(
        storages[s.tensor] for s in _saves_of_variant(record.variant, storages) if s.tensor is not None
    )
    return Variant(saves=tuple(saves), internal_bytes=record.variant.internal_bytes)


_OF_VARIANT = ("scratch_bytes", "forward_seconds", "backward_seconds", "repeat_seconds")
_OF_OPERATION = ("forward_flops", "backward_flops", "again_seconds", "again_flops")


def _operation(
    record: Record, live: LiveGradients, in_variant: LiveGradients, of_plain: LiveGradients, seen: dict[str, Any]
) -> Operation:
    node, weights = record.node, record.weights
    costs: dict[str, Any] = {name: getattr(weights, name) for name in _OF_OPERATION}
    variant: Variant | None = seen.pop("low_memory")
    if variant is not None and weights.low_memory is not None:
        own = {name: getattr(weights.low_memory, name) for name in _OF_VARIANT}
        variant = replace(variant, backward_bytes=in_variant.during, late_bytes=in_variant.late, **own, **costs)
    costs |= {name: getattr(weights, name) for name in (*_OF_VARIANT, "plain_scratch_bytes")}
    internal = record.saved.internal_bytes if weights.internal_bytes is None else weights.internal_bytes
    return Operation(
        name=node.name,
        target=str(node.meta.get("operator", node.target)),
        module=node.meta.get("module", ""),
        source=node.meta.get("source", ""),
        internal_bytes=weights.ready_bytes + internal,
        gradient_bytes=live.first,
        backward_bytes=live.during,
        late_bytes=live.late,
        low_memory=variant,
        plain_backward_bytes=None if weights.plain_working_bytes is None else of_plain.during,
        **costs,
        **seen,
    )


def _of_plain(weights: Weights) -> Weights:
    """The weights in the plain model, which may run another operator."""
    working = weights.plain_working_bytes
    return weights if working is None else replace(weights, working_bytes=working)
