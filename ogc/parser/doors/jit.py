"""The door of ``torch.jit``: a traced, inlined TorchScript graph, read as calls of aten operators.

A trace has numbers where eager has them, but as tensors: what is computed of sizes is computed here by Python. It has no
gradient modes: where a result does not require grad though an argument does, the call runs without. What else a trace
gets wrong stays wrong, for the verifier to refuse.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

from ...errors import ParseError
from ...torch_state.forwards import plain_forward
from ..arguments import Sample
from ..custom import CustomForward
from ..forward.flat import FlatForward, nothing_saved
from ..forward.location import line_of
from . import script_calls
from .places import FlatModule, Names

aten = torch.ops.aten


def jit(sample: Sample) -> CustomForward:
    """A :data:`~ogc.parser.doors.door.Tracer`."""
    if not callable(getattr(torch.jit, "trace", None)):
        raise ParseError('front_end="jit" needs torch.jit.trace, which this torch lacks; take "export" or "record"')
    flat = FlatModule(sample.model, FlatForward(plain_forward(sample.model), sample.spec))
    with warnings.catch_warnings(), nothing_saved():
        warnings.simplefilter("ignore")  # of numbers that are baked in, which are refused, and of torch.jit's end
        traced = torch.jit.trace(flat, tuple(sample.tensors), check_trace=False)
    return CustomForward(sample.model, _Reader(traced.inlined_graph, flat).read())


class _Reader:
    """Reads a TorchScript graph as an fx graph."""

    def __init__(self, script: Any, flat: FlatModule) -> None:
        self.script = script
        self.names = Names(flat.model)
        self.graph = torch.fx.Graph()
        attributes = chain.from_iterable(vars(module).values() for module in flat.model.modules())
        self.held = {one.data_ptr() for one in attributes if isinstance(one, torch.Tensor)}
        first, *rest = script.inputs()
        self.values: dict[str, Any] = {first.debugName(): flat}  # by name: nodes, and what is known already
        for number, value in enumerate(rest):
            self.values[value.debugName()] = self.graph.placeholder(f"input_{number}")

    def read(self) -> torch.fx.Graph:
        for node in self.script.nodes():
            read = getattr(self, "_" + node.kind().partition("::")[2].lower(), None)
            if node.kind().startswith("prim::") and read is not None:
                read(node)
            elif node.kind().startswith("prim::"):
                raise ParseError(
                    f'front_end="jit": the graph has {node.kind()} at {_line(node)}, which no program has'
                )
            else:
                self._operator(node)
        (result,) = self.script.outputs()
        outputs = self._of(result)
        self.graph.output(tuple(outputs))
        return self.graph

    def _of(self, value: Any) -> Any:
        return self.values[value.debugName()]

    def _inputs(self, node: Any) -> list[Any]:
        return [self._of(value) for value in node.inputs()]

    def _put(self, node: Any, value: Any) -> None:
        self.values[node.output().debugName()] = value

    # -- by the kinds of nodes -----------------------------------------------------------------------------

    def _constant(self, node: Any) -> None:
        self._put(node, node.output().toIValue())

    def _getattr(self, node: Any) -> None:
        self._put(node, getattr(self._of(node.input()), node.s("name")))

    def _listconstruct(self, node: Any) -> None:
        self._put(node, self._inputs(node))

    def _tupleconstruct(self, node: Any) -> None:
        self._put(node, tuple(self._inputs(node)))

    def _listunpack(self, node: Any) -> None:
        given = self._of(node.input())
        for number, value in enumerate(node.outputs()):
            is_known = not isinstance(given, torch.fx.Node)
            item = given[number] if is_known else self.graph.call_function(script_calls.item_of, (given, number))
            self.values[value.debugName()] = item

    _tupleunpack = _listunpack

    def _numtotensor(self, node: Any) -> None:
        self._put(node, self._of(node.input()))

    def _pythonop(self, node: Any) -> None:
        tensors, scalars = iter(self._inputs(node)), iter(node.scalar_args())
        args = tuple(next(scalars if kind == "c" else tensors) for kind in node.cconv())
        self._call(node, node.pyobj(), args, {})

    def _operator(self, node: Any) -> None:
        given = self._inputs(node)
        if node.kind() not in _OF_TENSORS:
            given = [self._number(value) for value in node.inputs()]
        if node.kind() in script_calls.CASTS:
            self._call(node, script_calls.CASTS[node.kind()], tuple(given), {})
            return
        operator = self._overload(node)
        if operator is aten._convolution.default:
            operator, given = aten.convolution.default, given[:9]  # the name that it has before a trace sees it
        args, kwargs = script_calls.arguments_of(operator, given)
        if _is_left_out_by_eager(node) and _leaves_all(node):
            self._call(node, script_calls.Operate(aten.alias.default, False), args[:1], {})
        elif _is_left_out_by_eager(node) or self._is_fresh(node):
            self._put(node, args[0])
        elif operator is aten.detach.default and self._is_fresh(node.input().node()):
            self._call(node, script_calls.fresh, args, {})
        else:
            self._call(node, script_calls.Operate(operator, _is_without_grad(node)), args, kwargs)

    def _number(self, value: Any) -> Any:
        """An argument; a number of Python where the trace has made a constant tensor of one."""
        given = self._of(value)
        is_one = value.node().kind() == "prim::Constant" and not getattr(given, "data_ptr", int)() in self.held
        return script_calls.as_number(given) if is_one else given

    def _overload(self, node: Any) -> Any:
        found = _SCHEMA.match(node.schema())
        if found is None:
            raise ParseError(f'front_end="jit": {node.kind()} at {_line(node)} is no operator')
        packet = getattr(getattr(torch.ops, found["namespace"]), found["name"])
        return getattr(packet, found["overload"] or "default")

    def _is_fresh(self, node: Any) -> bool:
        """Whether a node is that of ``torch.tensor`` of Python's data, which is moved and detached in a trace."""
        if node.kind() != "aten::to" or not isinstance(self._of(next(node.inputs())), torch.Tensor):
            return False
        uses = list(node.output().uses())
        return len(uses) == 1 and uses[0].user.kind() == "aten::detach" and _line(uses[0].user) == _line(node)

    def _call(self, node: Any, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = self.graph.call_function(target, args, kwargs)
        call.meta.update(module=self.names.of(_scope(node)), source=_line(node))
        outputs = list(node.outputs())
        if len(outputs) == 1:
            self.values[outputs[0].debugName()] = call
            return
        for number, value in enumerate(outputs):
            self.values[value.debugName()] = self.graph.call_function(script_calls.item_of, (call, number))


_SCHEMA = re.compile(r"(?P<namespace>\w+)::(?P<name>\w+)(\.(?P<overload>\w+))?\(")
_FRAME = re.compile(r"^(?P<file>.+)\((?P<line>\d+)\): ", re.MULTILINE)
_INDEXING = {"aten::slice", "aten::select", "aten::unsqueeze", "aten::index", "aten::index_put_", "aten::copy_"}
_OF_TENSORS = {"aten::to", "aten::detach", "aten::lift_fresh"}
_TO_THE_END = 2**63 - 1


def _scope(node: Any) -> str:
    """The path of the module that a node is in, such as ``model.blocks.0``."""
    return str(node.scopeName()).rpartition("/")[2].removeprefix("__module.")


def _line(node: Any) -> str:
    return line_of((found["file"], int(found["line"])) for found in _FRAME.finditer(node.sourceRange()))


def _is_without_grad(node: Any) -> bool:
    """Whether the trace says of all results that they do not require grad; of a convolution what uses it says so."""
    if node.kind() == "aten::_convolution":
        return all(map(_is_without_grad, [use.user for use in node.output().uses()]))
    kinds = [value.type() for value in node.outputs()]
    return bool(kinds) and all(kind.kind() == "TensorType" and not kind.requires_grad() for kind in kinds)


def _is_left_out_by_eager(node: Any) -> bool:
    """Whether a slice is one of several steps of indexing, and takes all: eager has it in a trace alone."""
    if node.kind() != "aten::slice" or [value.toIValue() for value in list(node.inputs())[2:]] != [0, _TO_THE_END, 1]:
        return False
    return _goes_on(node) or _indexes_with(_before(node), node)


def _leaves_all(node: Any) -> bool:
    """Whether a step of indexing is the last of several of which none does anything: eager makes an alias."""
    if _goes_on(node):
        return False
    while _indexes_with(before := _before(node), node):
        if not _is_left_out_by_eager(before):
            return False
        node = before
    return True


def _before(node: Any) -> Any:
    return next(node.inputs()).node()


def _goes_on(node: Any) -> bool:
    return any(_indexes_with(use.user, node) for use in node.output().uses())


def _indexes_with(one: Any, other: Any) -> bool:
    """Whether both are steps of the same indexing."""
    return one.kind() in _INDEXING and one.sourceRange() == other.sourceRange()
