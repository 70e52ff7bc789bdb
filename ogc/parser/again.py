"""Holds a graph against a call whose inputs have other sizes than those it was parsed from.

A traced program reads sizes when it runs, so it computes the same for all of them, unless the forward made a
Python number of one (``if x.shape[0] > 4``, ``range(x.shape[1])``). The tracer writes down each such number;
where all are the same, Python took the same way and the program is the same. What its operations save and
share may still differ, as kernels are chosen by shape, so that is seen again by running it once. What a leaf
makes of a size is not written down: a program with leaves is not held against other sizes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..compare import same_bits
from ..errors import ParseError
from ..graph import Graph
from ..program import InputSpec, Program
from .jit import Traced, forward_alone, same_number
from .leaves import refuse_root_hooks
from .observe import Record, observe, untouched
from .parse import (
    call_arguments,
    check_same,
    copies,
    memory_of,
    program_of,
    state_of,
    values_of,
    versions_of,
)


def carry_over(model: torch.nn.Module, graph: Graph, sample_input: Any) -> Graph:
    """``graph`` as it is for inputs of other sizes; the weights of its operations stay those of the first ones.

    The program and the model's forward run once each on copies of the inputs, with the memory of inference.

    Raises:
        ParseError: it is not sure to be the same program.
    """
    program: Program = graph.program
    if program.checked is None:
        raise ParseError("the forward makes numbers of sizes in a way that cannot be checked")
    refuse_root_hooks(model)
    spec, tensors = InputSpec.of(*call_arguments(sample_input))
    numbers = Traced(program.checked, program.constants, program.outputs, [])
    with untouched(model):
        observation = observe(model, numbers, copies(tensors), _check_number)
        after_program = state_of(model)
    with untouched(model):
        outputs_spec, outputs = forward_alone(model, spec, copies(tensors))
        after_forward = state_of(model)
    if outputs_spec != program.outputs:
        raise ParseError("the forward returns another structure than for the sample input")
    check_same(replace(numbers, outputs=outputs), observation, after_forward, after_program, same_bits)
    names = {node.name for node in program.graph.nodes}
    if any(record.writes for record in observation.records if record.node.name not in names):
        raise ParseError("the forward makes numbers of the sizes of tensors that it does not use")
    observation.records[:] = [record for record in observation.records if record.node.name in names]
    taken = versions_of(program.graph, observation)
    traced = Traced(program.graph, program.constants, program.outputs, outputs)
    again = replace(program_of(spec, traced, observation, taken), checked=program.checked)
    seen = memory_of(observation.records, taken)
    operations = tuple(replace(op, **fields) for op, fields in zip(graph.operations, seen, strict=True))
    return replace(graph, operations=operations, values=values_of(observation), program=again)


def _check_number(node: torch.fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], record: Record) -> None:
    if node.target is same_number and not same_number(*args):
        raise ParseError(f"a size gives {args[0]!r} where it gave {args[1]!r} ({node.meta.get('source', '')})")
