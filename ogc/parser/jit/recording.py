"""What the tracer of ``torch.jit`` writes down, before any of its passes, which take longer than the tracing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from .places import inputs_of, origin, outputs_of, value_of
from .traced import has_effects

_PURE = {
    "prim::Constant", "prim::ListConstruct", "prim::ListUnpack", "prim::NumToTensor", "prim::TupleConstruct",
    "prim::TupleUnpack",
}  # fmt: skip


@dataclass(frozen=True)
class Recording:
    """Nodes of a jit graph in the order of their execution, each with an effect or with a use.

    Attributes:
        nodes: scripted functions are inlined.
        inputs: the values of the tensors that were given.
        results: the values of the tensors that were returned.
        scripted: where scripted functions are called.
    """

    nodes: list[Any]
    inputs: list[Any]
    results: list[Any]
    scripted: list[dict[str, str]]


def record(function: Callable[..., Sequence[torch.Tensor]], tensors: Sequence[torch.Tensor]) -> Recording:
    """Call ``function`` with ``tensors`` under the tracer.

    Raises:
        Exception: whatever ``function`` raises.
    """

    def run(*given: torch.Tensor) -> None:
        results = function(*given)
        raise _Done(torch._C._get_tracing_state().graph(), [value_of(tensor) for tensor in results])

    try:
        torch._C._create_graph_by_tracing(run, tuple(tensors), lambda tensor: "", False, False)
    except _Done as done:
        graph, results = done.args
    nodes = _needed(graph, results)
    scripted = [origin(node) for node in nodes if node.kind() == "prim::CallFunction"]
    if scripted:
        torch._C._jit_pass_inline(graph)
        nodes = _needed(graph, results)
    return Recording(nodes, list(graph.inputs()), results, scripted)


class _Done(Exception):
    """Leaves the tracer with all that it wrote down."""


def _backwards(graph: Any) -> Iterator[Any]:
    """The nodes of a jit graph, last first; the calls of modules are blocks of their own in it."""
    pending = [graph.return_node().prev()]
    while pending:
        node = pending.pop()
        kind = node.kind()
        if kind == "prim::Param":  # stands in front of the first
            continue
        pending.append(node.prev())
        if kind == "prim::TracedModuleForward":
            pending += (block.returnNode().prev() for block in node.blocks())
        else:
            yield node


def _needed(graph: Any, results: Iterable[Any]) -> list[Any]:
    used = {value.unique() for value in results}
    found = []
    for node in _backwards(graph):
        is_used = not used.isdisjoint([value.unique() for value in outputs_of(node)])
        if is_used or (node.kind() not in _PURE and _has_effects(node.schema())):
            used.update([value.unique() for value in inputs_of(node)])
            found.append(node)
    return found[::-1]


_OTHER_NAMES = {
    "absolute": "abs", "arccos": "acos", "arccosh": "acosh", "arcsin": "asin", "arcsinh": "asinh", "arctan": "atan",
    "arctan2": "atan2", "arctanh": "atanh", "clip": "clamp", "concat": "cat", "concatenate": "cat", "divide": "div",
    "fix": "trunc", "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "moveaxis": "movedim",
    "multiply": "mul", "negative": "neg", "not_equal": "ne", "special_expit": "sigmoid", "subtract": "sub",
    "true_divide": "div",
}  # fmt: skip
SAME_OPERATOR = {f"{name}{end}": f"{usual}{end}" for name, usual in _OTHER_NAMES.items() for end in ("", "_")}
"""By what name operators are known here that have several."""


class Argument(NamedTuple):
    """One of an operator's arguments; ``wants_tensor`` if it takes no number in its place."""

    name: str
    kwarg_only: bool
    wants_tensor: bool


@cache
def overload_of(schema_text: str) -> tuple[Any, list[Argument]]:
    """The operator overload that a jit node's schema names, and its arguments; None where there is no schema."""
    if "(no schema)" in schema_text:
        return None, []
    schema = torch._C.parse_schema(schema_text)
    namespace, name = schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), SAME_OPERATOR.get(name, name))
    overload = getattr(packet, schema.overload_name or "default")
    return overload, arguments_of(overload)


def arguments_of(overload: Any) -> list[Argument]:
    """The arguments that an operator takes."""
    numbers_too = torch._C._should_allow_numbers_as_tensors(overload._opname)
    return [
        Argument(a.name, a.kwarg_only, str(a.type) in ("Tensor", "Optional[Tensor]") and not numbers_too)
        for a in overload._schema.arguments
    ]


@cache
def _has_effects(schema_text: str) -> bool:
    overload, _ = overload_of(schema_text)
    return overload is None or overload.namespace == "ogc" or has_effects(overload)  # a leaf may do anything
