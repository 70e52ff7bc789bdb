"""Calls of leaves as nodes of a trace, with the tracer switched off while they run."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from ...leaf import Leaf, Returned
from ...program import InputSpec, autocast_kinds, tensor_leaves
from .places import outputs_of, untraced, user_line, value_of
from .watch import Watch, origins

# How a leaf's node is written down; it is never run.
_LEAF = torch.library.Library("ogc", "DEF")
_LEAF.define("leaf(Tensor[] given, int number) -> Tensor[]")


@contextmanager
def leaf_calls(model: torch.nn.Module, leaves: Collection[str], watch: Watch) -> Iterator[None]:
    """Calls of the leaves, hooks included, become nodes; ``watch`` is told of them."""
    with ExitStack() as stack:
        for name in leaves:
            # Module.__call__ looks for this attribute, which Module.compile() sets, before anything else.
            attributes = vars(model.get_submodule(name))
            if "_compiled_call_impl" in attributes:
                stack.callback(attributes.__setitem__, "_compiled_call_impl", attributes["_compiled_call_impl"])
            else:
                stack.callback(attributes.pop, "_compiled_call_impl")
            attributes["_compiled_call_impl"] = LeafCall(name, model.get_submodule(name), watch)
        yield


class LeafCall:
    """Stands for the call of a leaf while its model is traced."""

    def __init__(self, name: str, module: torch.nn.Module, watch: Watch) -> None:
        self.name = name
        self.call = module._compiled_call_impl or module._call_impl
        self.watch = watch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.jit.is_tracing():  # inside another leaf
            return self.call(*args, **kwargs)
        with _unwatched():
            args, kwargs = pytree.tree_map(_size_as_number, (args, kwargs))
            values = [value_of(t) for t in tensor_leaves(args, kwargs)]
        with untraced() as graph:
            with _unwatched():
                inputs, given = InputSpec.of(args, kwargs)
                versions = [tensor._version for tensor in given]
                self.watch.check(given)
            with self.watch.inside(self.name, given), saved_until_done():
                result = self.call(*args, **kwargs)
            with _unwatched():
                returned, tensors = Returned.of(result, given, versions)
                leaf = Leaf(
                    name=f"_ogc_leaf_{len(self.watch.calls)}",
                    module=self.name,
                    source=os.path.basename(user_line()),
                    inputs=inputs,
                    returned=returned,
                    grad=torch.is_grad_enabled(),
                    autocast=tuple((kind, torch.get_autocast_dtype(kind)) for kind in autocast_kinds()),
                )
                new = [tensors[number] for number in leaf.new]
                self.watch.returned(leaf, new)
        self._write(graph, values, new)
        self.watch.calls.append(leaf)
        return result

    def _write(self, graph: Any, values: list[Any], new: list[torch.Tensor]) -> None:
        """The call's node, between a list of what it is given and one of what it returns."""
        tensors = torch._C.ListType(torch._C.TensorType.get())
        packed = graph.insertNode(graph.create("prim::ListConstruct", values, 1)).output()
        packed.setType(tensors)
        number = graph.insertConstant(len(self.watch.calls))
        result = graph.insertNode(graph.create("ogc::leaf", [packed, number], 1)).output()
        result.setType(tensors)
        unpacked = graph.insertNode(graph.create("prim::ListUnpack", [result], len(new)))
        for tensor, value in zip(new, outputs_of(unpacked), strict=True):
            value.inferTypeFrom(tensor)
            torch._C._set_value_trace(tensor, value)  # type: ignore[attr-defined]


_unwatched = torch._C.DisableTorchFunction


def _size_as_number(argument: Any) -> Any:
    """While a model is traced, its sizes are tensors; a leaf is to see numbers."""
    if not isinstance(argument, torch.Tensor) or argument.dim() or argument.dtype != torch.int64:
        return argument
    return int(argument) if origins(argument) == {"aten::size"} else argument


@contextmanager
def saved_until_done() -> Iterator[list[torch.Tensor]]:
    """What is saved for a backward is there for a backward that is run inside, and gone afterwards."""
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        saved.append(tensor)
        return len(saved) - 1

    with saved_tensors_hooks(pack, saved.__getitem__):
        yield saved
    saved.clear()
