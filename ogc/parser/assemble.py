"""Puts a weighted graph together from a program, what was seen when it ran, and the weights of its operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from ..errors import ParseError
from ..graph import Graph, Operation, Value, Variant
from ..operators.registry import copies_strided_gradients, of
from ..operators.weights import Weights
from ..program.leaf import runs_once
from ..program.program import OUTSIDE, SHARED, LowMemoryForm, Program, Saved, TensorRef
from ..program.structures import InputSpec
from .passes.lifetimes import forget_unreached, note_lifetimes, with_unused
from .passes.writes import separate_versions
from .traced import StepEnd, Traced
from .weigh.backward.again import Layouts
from .weigh.gradients import LiveGradients, OperationGradients, gradient_bytes
from .weigh.host.costs import hook_seconds, runtime_costs
from .weigh.host.queue import beside_device
from .weigh.record import Observation, Record, SeenForm
from .weigh.timing import EVICTING_BYTES


def graph_of(
    spec: InputSpec, traced: Traced, observation: Observation, device: str, kind: str, choice: float = 0.0
) -> Graph:
    """The graph of a program that was observed and weighed for ``device``; ``kind`` is the profile's.

    ``choice`` are the seconds that it takes to see that a plan of it is for a call.
    """
    records = observation.records
    taken = versions_of(traced.graph, observation)
    ends = refs_of_outputs(traced.graph)
    returned = [observation.rebased.get(ends[n], ends[n]) for n in end_of(traced).starts]
    live = gradient_bytes([_gradients(r, r.weights) for r in records], returned)
    in_forms = gradient_bytes([_gradients_of_form(r) for r in records], returned)
    of_plain = gradient_bytes([_gradients_of_plain(r) for r in records], returned)
    seen = memory_of(observation, taken)
    each = zip(records, live, in_forms, of_plain, seen, strict=True)
    values = values_of(traced, observation)
    operations = tuple(with_unused([_operation(*of_one) for of_one in each], values, observation))
    program = program_of(spec, traced, observation, taken)
    outside = outside_of(records)
    calls = traced.python_calls - (len(operations) - outside)
    is_cuda = torch.device(device).type == "cuda"
    evicts = is_cuda or sum(observation.value_bytes) > EVICTING_BYTES
    costs = runtime_costs(kind != "estimate", calls, choice, evicts)
    if kind == "measure" and is_cuda:
        operations, costs = beside_device(operations, costs, hook_seconds())
    copies = sum(record.weights.plain_seconds for record in records)
    costs = replace(costs, left_out=costs.left_out + copies)
    return Graph(operations, values, program, device, kind, runtime=costs, outside=outside)


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
    ends = [observation.rebased.get(ref, ref) for ref in refs_of_outputs(graph)]
    dead = forget_unreached(observation, [_gradients(record, record.weights) for record in observation.records], ends)
    _refuse_overwritten(observation)
    taken = separate_versions(observation, {ref.node for ref in refs_of_outputs(graph)})
    note_lifetimes(observation, taken, dead)
    return taken


def _refuse_overwritten(observation: Observation) -> None:
    for value, saver, writer in observation.overwritten:
        if value in saver.saved_values:
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
    held = range(len(refs)) if end.rest.holds_outputs else [n for n in end.starts if not traced.outputs[n].dim()]
    outputs = {observation.storages.get(refs[n]) for n in held}
    starts = {v for record in observation.records if of(record.node.target).begins_graph for v in record.reads}
    outputs |= starts  # autograd's graph holds them until it is gone itself
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
        saves=tuple(tuple(record.saves) for record in records),
        forms={
            t: LowMemoryForm(record.form.target, _saves_of_form(record.form, observation.storages))
            for t, record in enumerate(records)
            if record.form is not None
        },
        storages=observation.storages,
        differentiable=frozenset(
            ref for r in records for ref, flag in zip(r.outputs, r.differentiable, strict=True) if flag
        ),
        random=frozenset(t for t, record in enumerate(records) if record.random),
        out_of_place={t: twin for t, (_, twin) in taken.items()},
        bindings={(t, target): name for t, r in enumerate(records) for target, name in r.bindings.items()},
        guards=traced.guards,
        rest=end.rest,
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
    written = {e for record in records for e in record.writes_external} - observation.inputs
    writers = (t for t, record in enumerate(records) if not observation.inputs.isdisjoint(record.writes_external))
    last_of_inputs = max(writers, default=-1)  # those of another call may share memory, views or not
    fields = []
    for t, record in enumerate(records):
        # What a read of a buffer saw is gone once it is written, by a later operation or by the next forward, which may
        # come before this one's backward; what one of an input saw, once a later operation has written that.
        is_early = t < last_of_inputs and not observation.inputs.isdisjoint(record.reads_external)
        stale = is_early or not written.isdisjoint(record.reads_external)
        fields.append(
            {
                "reads": tuple(record.reads),
                "writes": tuple(record.writes),
                "saves": tuple(record.saved_values),
                "saved_tensors": len(record.saves),
                "low_memory": _seen_form(record, storages),
                "takes_over": taken.get(t, (None,))[0],
                "replayable": not (
                    record.writes_external or stale or runs_once(record.node.target) or OUTSIDE in record.node.meta
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


def _saves_of_form(form: SeenForm, storages: dict[TensorRef, int]) -> tuple[Saved, ...]:
    """What a form saves; a result that a leaf has made a buffer of is no value."""
    return tuple(s if s.tensor is None or s.tensor in storages else Saved(external=True) for s in form.saves)


def _seen_form(record: Record, storages: dict[TensorRef, int]) -> Variant | None:
    """What was seen of an operation's low-memory form, without its weights."""
    if record.form is None:
        return None
    saves = dict.fromkeys(storages[s.tensor] for s in _saves_of_form(record.form, storages) if s.tensor is not None)
    return Variant(saves=tuple(saves), internal_bytes=record.form.internal_bytes)


def _operation(
    record: Record, live: LiveGradients, in_form: LiveGradients, of_plain: LiveGradients, seen: dict[str, Any]
) -> Operation:
    node, weights = record.node, record.weights
    form: Variant | None = seen.pop("low_memory")
    if form is not None and weights.low_memory is not None:
        form = replace(
            form,
            scratch_bytes=weights.low_memory.scratch_bytes,
            backward_bytes=in_form.during,
            late_bytes=in_form.late,
            forward_seconds=weights.low_memory.forward_seconds,
            backward_seconds=weights.low_memory.backward_seconds,
            repeat_seconds=weights.low_memory.repeat_seconds,
            forward_flops=weights.forward_flops,
            backward_flops=weights.backward_flops,
            again_seconds=weights.again_seconds,
            again_flops=weights.again_flops,
        )
    return Operation(
        name=node.name,
        target=str(node.meta.get("operator", node.target)),
        module=node.meta.get("module", ""),
        source=node.meta.get("source", ""),
        internal_bytes=weights.ready_bytes
        + (record.internal_bytes if weights.internal_bytes is None else weights.internal_bytes),
        scratch_bytes=weights.scratch_bytes,
        gradient_bytes=live.first,
        backward_bytes=live.during,
        late_bytes=live.late,
        forward_seconds=weights.forward_seconds,
        backward_seconds=weights.backward_seconds,
        forward_flops=weights.forward_flops,
        backward_flops=weights.backward_flops,
        again_seconds=weights.again_seconds,
        again_flops=weights.again_flops,
        repeat_seconds=weights.repeat_seconds,
        low_memory=form,
        plain_scratch_bytes=weights.plain_scratch_bytes,
        plain_backward_bytes=None if weights.plain_working_bytes is None else of_plain.during,
        **seen,
    )


def _gradients_of_form(record: Record) -> OperationGradients:
    if record.form is None or record.weights.low_memory is None:
        return _gradients(record, record.weights)
    return _gradients(record, record.weights.low_memory, record.form.target)


def _gradients_of_plain(record: Record) -> OperationGradients:
    """As the plain model has it."""
    working = record.weights.plain_working_bytes
    return _gradients(record, record.weights if working is None else replace(record.weights, working_bytes=working))


def _gradients(record: Record, weights: Weights, target: Any = None) -> OperationGradients:
    def again(layouts: Layouts, are_held: bool) -> OperationGradients | None:
        usual = {n: record.usual[n] for n in layouts}
        found = None if record.again is None else record.again(layouts, usual, target is not None, are_held)
        if found is None:
            return None
        new = found.weights(weights)
        changed = replace(gradients, gradients=new.gradients, working_bytes=new.working_bytes, again=None)
        return replace(
            changed,
            first_bytes=max(found.first, weights.first_bytes),
            late_bytes=new.late_bytes,
            copies_strided=changed.copies_strided and not found.has_copies,
        )

    gradients = OperationGradients(
        outputs=tuple(record.outputs),
        output_bytes=tuple(record.output_bytes),
        differentiable=tuple(record.differentiable),
        arguments=tuple(record.receivers),
        gradients=weights.gradients,
        working_bytes=weights.working_bytes,
        first_bytes=weights.first_bytes,
        late_bytes=weights.late_bytes,
        ready_bytes=weights.ready_bytes,
        copies_strided=copies_strided_gradients(target or record.node.target),
        sources=tuple(record.sources),
        is_start=of(record.node.target).begins_graph,
        usual=tuple(record.usual),
        again=again,
    )
    return gradients if record.rebase is None else gradients.through_base(record.rebase)
