"""Runs a TorchScript graph node by node, each call of an operator as Python would make it.

A trace of Python has numbers where Python has them, but as tensors; they are numbers again here. It has no gradient
modes: where a result does not require grad though an argument does, the call runs without. It has steps of indexing and
calls that eager leaves out. Other graphs are run as they stand, control flow and all.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch

from ...errors import ParseError
from ...program.program import tensor_leaves, without_autocast
from ...torch_state.dispatch import unseen
from ..forward.location import scope
from . import script_calls
from .places import INNER, Names
from .script_nodes import (
    input_of,
    is_left_out_by_eager,
    is_moved,
    last_uses,
    leaves_all,
    line_of_node,
    overload_of,
    scope_of,
)

aten = torch.ops.aten


class Script:
    """A TorchScript graph as a function of its inputs behind the first, which is ``root``.

    Args:
        model: whose names modules have in places.
        is_literal: it is no trace of Python, and runs as it stands.
    """

    def __init__(self, graph: Any, root: Any, model: torch.nn.Module, is_literal: bool = False) -> None:
        self.graph = graph  # which holds the nodes
        self.root = root
        self.names = Names(model)
        self.is_literal = is_literal
        self.nodes = list(graph.nodes())
        self.last_uses = last_uses(self.nodes, list(graph.outputs()))
        self.values: dict[str, Any] = {}
        attributes = chain.from_iterable(vars(module).values() for module in model.modules())
        self.held = {one.data_ptr() for one in attributes if isinstance(one, torch.Tensor)}

    def __call__(self, *inputs: Any) -> Any:
        """What the graph returns; casts of a trace are calls of its own."""
        with nullcontext() if self.is_literal else without_autocast():
            return self._called(*inputs)

    def _called(self, *inputs: Any) -> Any:
        first, *rest = self.graph.inputs()
        self.values = {first.debugName(): self.root}
        self.values.update((value.debugName(), given) for value, given in zip(rest, inputs, strict=True))
        for number, node in enumerate(self.nodes):
            self._run(node)
            for name in self.last_uses.get(number, ()):
                self.values.pop(name, None)
        (result,) = [self._of(value) for value in self.graph.outputs()]
        self.values = {}
        return result

    def _run(self, node: Any) -> None:
        kind = node.kind()
        run: Callable[[Any], None] | None = getattr(self, kind.lower().replace("::", "_"), None)
        if run is None and kind.startswith("prim::"):
            raise ParseError(f'front_end="jit": the graph has {kind} at {line_of_node(node)}, which no program has')
        path = scope_of(node)
        with scope(self.names.of(f"{INNER}.{path}" if self.is_literal else path), line_of_node(node)):
            (run or self._operator)(node)

    def _of(self, value: Any) -> Any:
        return self.values[value.debugName()]

    def _inputs(self, node: Any) -> list[Any]:
        return [self._of(value) for value in node.inputs()]

    def _put(self, node: Any, *results: Any) -> None:
        for value, result in zip(node.outputs(), results, strict=True):
            self.values[value.debugName()] = result

    # -- nodes of TorchScript itself -----------------------------------------------------------------------

    def prim_constant(self, node: Any) -> None:
        self._put(node, node.output().toIValue())

    def prim_getattr(self, node: Any) -> None:
        self._put(node, getattr(self._of(node.input()), node.s("name")))

    def prim_listconstruct(self, node: Any) -> None:
        self._put(node, self._inputs(node))

    def prim_tupleconstruct(self, node: Any) -> None:
        self._put(node, tuple(self._inputs(node)))

    def prim_dictconstruct(self, node: Any) -> None:
        given = self._inputs(node)
        self._put(node, dict(zip(given[::2], given[1::2], strict=True)))

    def prim_listunpack(self, node: Any) -> None:
        self._put(node, *self._of(node.input()))

    prim_tupleunpack = prim_listunpack

    def prim_numtotensor(self, node: Any) -> None:
        given = self._of(node.input())
        with unseen():
            self._put(node, torch.tensor(given) if self.is_literal else given)

    def prim_dtype(self, node: Any) -> None:
        self._put(node, self._of(node.input()).dtype)

    def prim_device(self, node: Any) -> None:
        self._put(node, self._of(node.input()).device)

    def prim_unchecked_cast(self, node: Any) -> None:
        self._put(node, self._of(node.input()))

    def prim_pythonop(self, node: Any) -> None:
        tensors, scalars = iter(self._inputs(node)), iter(node.scalar_args())
        function = node.pyobj().__self__  # whose method may have been replaced
        result = function.apply(*(next(scalars if kind == "c" else tensors) for kind in node.cconv()))
        self._put(node, *(result if node.outputsSize() > 1 else [result]))

    def prim_if(self, node: Any) -> None:
        taken, other = node.blocks()
        self._put(node, *self._block(taken if self._of(node.input()) else other))

    def prim_loop(self, node: Any) -> None:
        times, goes_further, *carried = self._inputs(node)
        (body,) = node.blocks()
        count = 0
        while goes_further and count < times:
            number, *inputs = body.inputs()
            self.values[number.debugName()] = count
            self.values.update((value.debugName(), given) for value, given in zip(inputs, carried, strict=True))
            goes_further, *carried = self._block(body)
            count += 1
        self._put(node, *carried)

    def _block(self, block: Any) -> list[Any]:
        for node in block.nodes():
            self._run(node)
        return [self._of(value) for value in block.outputs()]

    def prim_raiseexception(self, node: Any) -> None:
        raise ParseError(f'front_end="jit": the graph raises {self._inputs(node)[0]!r} at {line_of_node(node)}')

    # -- operators -----------------------------------------------------------------------------------------

    def _operator(self, node: Any) -> None:
        given = self._inputs(node)
        if not self.is_literal and self._is_no_call(node, given):
            return
        name = node.kind().removeprefix("aten::")
        by_python = script_calls.CASTS.get(name) or script_calls.ON_OBJECTS.get(name)
        if by_python is None and not tensor_leaves(given):
            by_python = script_calls.ON_NUMBERS.get(name)
        if by_python is not None:
            self._put(node, by_python(*given))
            return
        operator = overload_of(node)
        if operator is aten._convolution.default and not self.is_literal:
            operator, given = aten.convolution.default, given[:9]  # the name that it has before a trace sees it
        args, kwargs = script_calls.arguments_of(operator, given)
        may_be_off = not self.is_literal and _is_without_grad(node)
        is_off = may_be_off and script_calls.would_require_grad(operator, args, kwargs)
        with torch.no_grad() if is_off else nullcontext():
            result = operator(*args, **kwargs)
        self._put(node, *(result if node.outputsSize() > 1 else [result]))

    def _is_no_call(self, node: Any, given: list[Any]) -> bool:
        """Whether eager makes no such call; then its result is put, or its arguments are made what eager has."""
        if node.kind() not in _OF_TENSORS:
            given[:] = map(self._number, node.inputs(), given)
        if is_moved(node):
            self._put(node, script_calls.fresh(given[0]))
        elif (
            node.kind() in _CASTS
            or _is_contiguous_already(node, given)
            or (node.kind() == "aten::detach" and is_moved(input_of(node)))
        ):
            self._put(node, given[0])
        elif is_left_out_by_eager(node):
            self._put(node, aten.alias.default(given[0]) if leaves_all(node) else given[0])
        else:
            return False
        return True

    def _number(self, value: Any, given: Any) -> Any:
        """An argument; a number of Python where the trace has made a constant tensor of one."""
        is_one = value.node().kind() == "prim::Constant" and isinstance(given, torch.Tensor)
        return script_calls.as_number(given, self.held) if is_one else given


def _is_contiguous_already(node: Any, given: list[Any]) -> bool:
    """Whether a tensor is to be what it is: Python makes no call, but a trace has one."""
    is_asked = node.kind() == "aten::contiguous"
    return is_asked and given[0].is_contiguous(memory_format=script_calls.format_of(given[1]))


_CASTS = {"aten::_autocast_to_reduced_precision", "aten::_autocast_to_full_precision"}
"""Which torch.jit adds where autocast is on, to the casts that a trace has seen."""

_OF_TENSORS = {"aten::to", "aten::detach", "aten::lift_fresh"}


def _is_without_grad(node: Any) -> bool:
    """Whether the trace says of all results that they do not require grad; of a convolution what uses it says so."""
    if node.kind() == "aten::_convolution":
        return all(map(_is_without_grad, [use.user for use in node.output().uses()]))
    kinds = [value.type() for value in node.outputs()]
    return bool(kinds) and all(kind.kind() == "TensorType" and not kind.requires_grad() for kind in kinds)
