"""Which modules hide that the shapes of some tensors depend on data, as those of ``x[mask]`` do."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from .places import inputs_of, origin, outputs_of
from .recording import Recording, overload_of
from .watch import Decision, OpaqueError

_SIZES = {"aten::size", "aten::numel"}
_LISTS = {"prim::ListConstruct", "prim::TupleConstruct", "prim::ListUnpack", "prim::TupleUnpack"}
_LIKE_FIRST_INPUT = {
    f"aten::{name}" for name in ("copy", "index_add", "index_copy", "index_put", "put", "scatter", "scatter_add",
    "scatter_reduce", "masked_scatter", "select_scatter", "slice_scatter")
}  # fmt: skip


def refuse_shapes_of_data(recording: Recording, decisions: Sequence[Decision], outputs: int) -> None:
    """Raise OpaqueError if an operator's result has another shape for other data.

    It names the smallest module that all tensors of such shapes, and the numbers made of these, stay inside of.

    Args:
        recording: its results are the model's output tensors and the sizes of ``decisions``.
        decisions: the Python numbers that were made of sizes.
        outputs: how many output tensors the model has.
    """
    modules: dict[str, str] = {}
    message = ""
    for node in recording.nodes:
        if depends_on_data(node):
            place = origin(node)
            what = f"the operator {node.kind()}, whose result has a shape that depends on the data"
            around = _around(_Spread(recording, node, decisions, outputs).modules)
            modules.setdefault(around, f"{what}, at {place['source']}")
            message = message or (
                f"{what}, cannot be replayed operation by operation (module '{place['module']}', {place['source']}); "
                "use masks in its stead, put it into a submodule that returns tensors of fixed shapes, or optimize "
                "the submodules around it instead"
            )
    if modules:
        raise OpaqueError(message, modules)


def depends_on_data(node: Any) -> bool:
    """Whether another input of the same shape may give a result of another shape."""
    if not node.kind().startswith("aten::") or not _has_dynamic_shape(node.schema()):
        return False
    if node.kind() == "aten::one_hot":
        return node.inputsAt(1).toIValue() == -1  # else the number of classes is given
    if node.kind() != "aten::index":
        return True
    indices = inputs_of(node.inputsAt(1).node())
    types = [index.type() for index in indices if isinstance(index.type(), torch._C.TensorType)]
    return any(t.dtype() in (torch.bool, torch.uint8) for t in types)


@cache
def _has_dynamic_shape(schema_text: str) -> bool:
    return torch.Tag.dynamic_output_shape in getattr(overload_of(schema_text)[0], "tags", ())


class _Spread:
    """What depends on the shape of one operator's result: tensors by their shapes, numbers by their values."""

    def __init__(self, recording: Recording, source: Any, decisions: Sequence[Decision], outputs: int) -> None:
        self.shapes = {value.unique() for value in outputs_of(source)}
        self.numbers: set[int] = set()
        self.modules = [origin(source)["module"]]  # where any of it is used
        for node in recording.nodes:
            self._pass(node)
        returned = recording.results
        for number, value in enumerate(returned):
            if number < outputs and value.unique() in self.shapes | self.numbers:
                self.modules.append("")
        sizes = returned[len(returned) - len(decisions) :]
        self.modules += [d.module for d, value in zip(decisions, sizes, strict=True) if value.unique() in self.numbers]

    def _pass(self, node: Any) -> None:
        inputs = [value.unique() for value in inputs_of(node)]
        has_shape = not self.shapes.isdisjoint(inputs)
        numbers = [value for value in inputs_of(node) if value.unique() in self.numbers]
        if not has_shape and not numbers:
            return
        self.modules.append(origin(node)["module"])
        outputs = [value.unique() for value in outputs_of(node)]
        if node.kind() in _SIZES:
            self.numbers.update(outputs)
        elif node.kind() in _LISTS:
            self.shapes.update(outputs if has_shape else ())
            self.numbers.update(outputs if numbers else ())
        elif all(map(_is_number, outputs_of(node))):
            self.numbers.update(outputs if numbers else ())  # a tensor of one element has no other shape
        elif not all(map(_is_tensor, numbers)):
            self.shapes.update(outputs)  # as an argument of another type, a number may say how many
        elif has_shape and (inputs[0] in self.shapes or not _is_like_first_input(node.kind())):
            self.shapes.update(outputs)


def _is_like_first_input(kind: str) -> bool:
    return kind.endswith("_") or kind in _LIKE_FIRST_INPUT


def _is_tensor(value: Any) -> bool:
    return isinstance(value.type(), torch._C.TensorType)


def _is_number(value: Any) -> bool:
    return value.type().dim() == 0 if _is_tensor(value) else str(value.type()) in ("int", "float", "bool", "Scalar")


def _around(modules: Sequence[str]) -> str:
    """The innermost module that holds all of these."""
    paths = [name.split(".") if name else [] for name in modules]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
