"""Puts a weighted graph together from a program, what was seen when it ran, and the weights of its operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..graph import Graph, Operation, PlainOperator, Value
from ..operators.registry import copies_strided_gradients
from ..operators.weights import Weights
from ..program.leaf import runs_once
from ..program.program import Program, TensorRef
from ..program.structures import InputSpec
from .passes.in_place import separate_versions
from .traced import Traced
from .weigh.gradients import LiveGradients, OperationGradients, gradient_bytes
from .weigh.record import Observation, Record


def graph_of(spec: InputSpec, traced: Traced, observation: Observation, device: str, kind: str) -> Graph:
    """The graph of a program that was observed and weighed for ``device``; ``kind`` is the profile's."""
    records = observation.records
    taken = versions_of(traced.graph, observation)
    ends = [TensorRef(node.name, 0) for node in _returned(traced.graph)]
    returned = [observation.rebased.get(ref, ref) for ref in ends]
    live = gradient_bytes([_gradients(r, r.weights) for r in records], returned)
    plain = gradient_bytes([_gradients(r, r.weights.plain or r.weights) for r in records], returned)
    seen = memory_of(records, taken)
    each = zip(records, live, plain, seen, strict=True)
    operations = tuple(_operation(*of_one, observation.storages) for of_one in each)
    program = program_of(spec, traced, observation, taken)
    return Graph(operations, values_of(observation), program, device, kind)


def _returned(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return next(node for node in graph.nodes if node.op == "output").all_input_nodes


def versions_of(graph: torch.fx.Graph, observation: Observation) -> dict[int, tuple[int, Any]]:
    """Make values of their own of what is written in place; see :func:`separate_versions`."""
    return separate_versions(observation, {node.name for node in _returned(graph)})


def values_of(observation: Observation) -> tuple[Value, ...]:
    """The values of a graph."""
    return tuple(
        Value(name, size, number in observation.output_values)
        for number, (name, size) in enumerate(zip(observation.value_names, observation.value_bytes, strict=True))
    )


def program_of(spec: InputSpec, traced: Traced, observation: Observation, taken: dict[int, tuple[int, Any]]) -> Program:
    """A recorded program with what was seen when it ran."""
    records = observation.records
    return Program(
        graph=traced.graph,
        constants=traced.constants,
        inputs=spec,
        outputs=traced.output_spec,
        saves=tuple(tuple(record.saves) for record in records),
        storages=observation.storages,
        differentiable=frozenset(
            ref for r in records for ref, flag in zip(r.outputs, r.differentiable, strict=True) if flag
        ),
        random=frozenset(t for t, record in enumerate(records) if record.random),
        out_of_place={t: twin for t, (_, twin) in taken.items()},
        guards=traced.guards,
    )


def memory_of(records: Sequence[Record], taken: dict[int, tuple[int, Any]]) -> list[dict[str, Any]]:
    """For each operation, the fields of the graph's that say what it does to memory."""
    last_external_write = {e: t for t, record in enumerate(records) for e in record.writes_external}
    fields = []
    for t, record in enumerate(records):
        # What a read of a buffer saw is gone once a later operation has written it.
        stale = any(last_external_write.get(e, -1) >= t for e in record.reads_external)
        fields.append(
            {
                "reads": tuple(record.reads),
                "writes": tuple(record.writes),
                "saves": tuple(record.saved_values),
                "takes_over": taken.get(t, (None,))[0],
                "replayable": not (record.writes_external or stale or runs_once(record.node.target)),
            }
        )
    return fields


def _operation(
    record: Record,
    live: LiveGradients,
    plain_gradients: LiveGradients,
    seen: dict[str, Any],
    storages: dict[TensorRef, int],
) -> Operation:
    node, weights = record.node, record.weights
    ours = PlainOperator(seen["saves"], _internal_bytes(record, weights), weights.scratch_bytes, live.during)
    theirs = weights.plain or weights
    given = (record.arguments[n] for n in theirs.saved_arguments)
    saves = {storages[ref] for ref in given if ref is not None and ref in storages}.difference(ours.saves)
    plain = PlainOperator(
        (*ours.saves, *sorted(saves)), _internal_bytes(record, theirs), theirs.scratch_bytes, plain_gradients.during
    )
    return Operation(
        name=node.name,
        target=str(node.meta.get("operator", node.target)),
        module=node.meta.get("module", ""),
        source=node.meta.get("source", ""),
        internal_bytes=ours.internal_bytes,
        scratch_bytes=weights.scratch_bytes,
        gradient_bytes=live.before,
        backward_bytes=live.during,
        late_bytes=live.late,
        plain=None if plain == ours and not live.late else plain,
        forward_seconds=weights.forward_seconds,
        backward_seconds=weights.backward_seconds,
        forward_flops=weights.forward_flops,
        backward_flops=weights.backward_flops,
        again_seconds=weights.again_seconds,
        again_flops=weights.again_flops,
        repeat_seconds=weights.repeat_seconds,
        **seen,
    )


def _internal_bytes(record: Record, weights: Weights) -> int:
    return record.internal_bytes if weights.internal_bytes is None else weights.internal_bytes


def _gradients(record: Record, weights: Weights) -> OperationGradients:
    gradients = OperationGradients(
        outputs=tuple(record.outputs),
        output_bytes=tuple(record.output_bytes),
        differentiable=tuple(record.differentiable),
        arguments=tuple(record.receivers),
        gradients=weights.gradients,
        working_bytes=weights.working_bytes,
        late_bytes=weights.late_bytes,
        copies_strided=copies_strided_gradients(record.node.target),
        sources=tuple(record.sources),
    )
    return gradients if record.rebase is None else gradients.through_base(record.rebase)
