"""Carries a jit graph over to a ``torch.fx.Graph``."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch

from ...leaf import Leaf
from ...program import TensorSpec, call_beside, operator_name
from ...without_grad import WithoutGrad
from .places import inputs_of, origin, outputs_of
from .recording import Recording, arguments_of, overload_of
from .traced import same_number
from .watch import WITHOUT_GRAD, OpaqueError, Watch

_SCALAR_OPERATORS: dict[str, Callable[..., Any]] = {
    "aten::add": operator.add,
    "aten::sub": operator.sub,
    "aten::rsub": operator.sub,  # operands swapped
    "aten::pow": operator.pow,
    "aten::mul": operator.mul,
    "aten::floor_divide": operator.floordiv,
    "aten::div": operator.truediv,
    "aten::remainder": operator.mod,
    "aten::neg": operator.neg,
    "aten::eq": operator.eq,
    "aten::ne": operator.ne,
    "aten::lt": operator.lt,
    "aten::le": operator.le,
    "aten::gt": operator.gt,
    "aten::ge": operator.ge,
}
_SAME_VALUE = {
    "prim::NumToTensor",
    "aten::Int",
    "aten::Float",
    "aten::Bool",
    "aten::IntImplicit",
    "aten::FloatImplicit",
    "aten::ScalarImplicit",
    "aten::item",
    "aten::detach",
}
_WITH_NUMBER = {
    torch.ops.aten.pow.Tensor_Tensor: torch.ops.aten.pow.Tensor_Scalar,
    torch.ops.aten.pow_.Tensor: torch.ops.aten.pow_.Scalar,
    torch.ops.aten.repeat_interleave.self_Tensor: torch.ops.aten.repeat_interleave.self_int,
}
"""What is called with a number; sizes are tensors while a forward is traced, and take an overload of other bits."""
_DEFAULT_SCALARS = {torch.float64, torch.int64, torch.bool, torch.complex128}


class Lowering:
    """Carries a jit graph over to fx, node by node."""

    def __init__(
        self,
        model: torch.nn.Module,
        state: dict[str, torch.Tensor],
        watch: Watch,
        recording: Recording,
    ) -> None:
        self.model = model
        self.state = state
        self.watch = watch
        self.recording = recording
        self.graph = torch.fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self.values: dict[str, Any] = {}  # jit value -> fx node, Python constant, or list
        self.state_values: dict[int, Any] = {}  # parameter or buffer -> jit value
        self.unused: dict[str, str] = {}  # jit value -> parameter or buffer that no node has used yet
        self.scalars: set[torch.fx.Node] = set()
        self.requires_grad: dict[torch.fx.Node, bool] = {}
        self.other_overloads = False  # whether some calls are not those that the trace made

    def run(self) -> None:
        values, results = self.recording.inputs, self.recording.results
        inputs = values[: len(values) - len(self.state)]
        for number, value in enumerate(inputs):
            node = self.graph.placeholder(f"input_{number}")
            self.requires_grad[node] = bool(value.requires_grad())
            self.values[value.debugName()] = node
        for value, name in zip(values[len(inputs) :], self.state, strict=True):
            self.unused[value.debugName()] = name
            self.state_values[id(self.state[name])] = value
        for node in self.recording.nodes:
            self._lower(node)
        self._refuse_shared_casts()
        outputs = [self._get(value) for value in results]
        decisions = self.watch.decisions
        count = len(outputs) - len(decisions)
        for size, decision in zip(outputs[count:], decisions, strict=True):
            self._compare(size, decision.number)
        self.graph.output(tuple(outputs[:count]))
        self.graph.lint()

    def _compare(self, now: Any, then: Any) -> None:
        if isinstance(now, torch.fx.Node):
            with self.graph.inserting_after(now):
                call = self.graph.call_function(same_number, (now, then))
            call.meta.update(now.meta)

    def _lower(self, node: Any) -> None:
        kind = node.kind()
        if kind == "prim::Constant":
            self._set(node, self._constant(node))
        elif kind in ("prim::ListConstruct", "prim::TupleConstruct"):
            self._set(node, [self._get(value) for value in inputs_of(node)])
        elif kind in ("prim::ListUnpack", "prim::TupleUnpack"):
            self._unpack(node)
        elif kind in _SAME_VALUE and self._is_scalar(node.inputsAt(0)):
            self._set(node, self._get(node.inputsAt(0)))
        elif kind.removesuffix("_") in _SCALAR_OPERATORS and all(self._is_scalar(v) for v in self._operands(node)):
            self._scalar_call(node)
        elif kind == "ogc::leaf":
            self._leaf(node)
        elif kind.startswith("prim::"):
            self._refuse(node)
        else:
            self._call(node)

    def _get_attr(self, target: str, tensor: torch.Tensor) -> torch.fx.Node:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fx warns that its graph has no owning module
            node = self.graph.get_attr(target)
        self.requires_grad[node] = tensor.requires_grad
        return node

    def _constant(self, node: Any) -> Any:
        value = node.output().toIValue() if node.hasAttributes() else None
        if not isinstance(value, torch.Tensor):
            return value
        if value.dim() == 0 and value.dtype in _DEFAULT_SCALARS and value.device.type == "cpu":
            return value.item()  # a Python number that the tracer wrapped
        return self._constant_node(value)

    def _constant_node(self, value: torch.Tensor) -> torch.fx.Node:
        name = f"_ogc_constant_{len(self.constants)}"
        self.constants[name] = value
        return self._get_attr(name, value)

    def _unpack(self, node: Any) -> None:
        packed = self._get(node.inputsAt(0))
        if isinstance(packed, torch.fx.Node):
            count = self.graph.call_function(len, (packed,))
            count.meta.update(packed.meta)
            self._compare(count, node.outputsSize())
        for index, value in enumerate(outputs_of(node)):
            if isinstance(packed, (list, tuple)):
                self.values[value.debugName()] = packed[index]
                continue
            item, has = self._item(packed, index), bool(value.requires_grad())
            self.values[value.debugName()] = self._without_grad(item, packed, value, has)

    def _item(self, packed: torch.fx.Node, index: int) -> torch.fx.Node:
        return call_beside(packed, operator.getitem, packed, index)

    def _scalar_call(self, node: Any) -> None:
        function = _SCALAR_OPERATORS[node.kind().removesuffix("_")]
        operands = [self._get(value) for value in self._operands(node)]
        if node.kind() == "aten::rsub":
            operands.reverse()
        rounding = [value for value in inputs_of(node)[2:] if isinstance(self._get(value), str)]
        if node.kind() == "aten::div" and rounding:
            function = operator.floordiv  # sizes are not negative: "trunc" is "floor"
        if not any(isinstance(x, torch.fx.Node) for x in operands):
            self._set(node, function(*operands))
            return
        result = self.graph.call_function(function, tuple(operands))
        result.meta.update(origin(node))
        self.scalars.add(result)
        self._set(node, result)

    def _operands(self, node: Any) -> list[Any]:
        count = 1 if node.kind() == "aten::neg" else 2
        return inputs_of(node)[:count]

    def _call(self, node: Any) -> None:
        overload, arguments = overload_of(node.schema())
        if overload is None:
            self._refuse(node)
        if overload in _WITH_NUMBER and self._is_size(node.inputsAt(1)):
            overload, self.other_overloads = _WITH_NUMBER[overload], True
            arguments = arguments_of(overload)
        args, kwargs = [], {}
        for argument, value in zip(arguments, inputs_of(node), strict=True):
            given = self._get(value)
            if argument.wants_tensor and self._is_scalar(value):
                given = self.graph.call_function(torch.ops.aten.scalar_tensor.default, (given,), _dtype_of(value))
                given.meta.update(origin(node))
            if argument.kwarg_only:
                kwargs[argument.name] = given
            else:
                args.append(given)
        if overload is torch.ops.aten.repeat_interleave.self_int:
            sizes = node.output().type().sizes()  # without it there is no knowing the shape on meta tensors
            kwargs["output_size"] = sizes[args[2] if args[2] is not None else 0]
        if node.kind() == "aten::_convolution":
            # The tracer records the flags of the day; aten::convolution reads them when it runs.
            overload, args, kwargs = torch.ops.aten.convolution.default, args[:9], {}
        elif node.kind() == "aten::_convolution_mode":
            overload, args = _with_numbers_for_padding(overload, args, node.inputsAt(1).type().sizes())
        call = self.graph.call_function(overload, tuple(args), kwargs)
        call.meta.update(origin(node))
        outputs = outputs_of(node)
        self._settle_grad(call, outputs)
        if len(outputs) != 1:
            for index, value in enumerate(outputs):
                has = bool(value.requires_grad())
                self.values[value.debugName()] = self._without_grad(self._item(call, index), call, value, has)
            return
        if str(outputs[0].type()) in ("int", "bool", "float"):
            self.scalars.add(call)
        self._set(node, self._without_grad(call, call, outputs[0], self.requires_grad[call]))

    def _leaf(self, node: Any) -> None:
        packed, number = inputs_of(node)
        leaf = self.watch.calls[self._get(number)]
        module = self.model.get_submodule(leaf.module)
        specs = [spec for spec in leaf.inputs.leaves if isinstance(spec, TensorSpec)]
        given = [self._as_tensor(x, spec) for x, spec in zip(self._get(packed), specs, strict=True)]
        held = [self.state_values.get(id(t)) for t in chain(module.parameters(), module.buffers())]
        state = [self._get(value) for value in dict.fromkeys(held) if value is not None]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target = self.graph.get_attr(leaf.module)
        call = self.graph.call_function(leaf, (target, given, state))
        call.meta.update(module=leaf.module, source=leaf.source, operator=f"leaf {type(module).__name__}")
        several = len(leaf.new) > 1
        items = [self._item(call, index) for index in range(len(leaf.new))] if several else [call]
        for item, number in zip(items, leaf.new, strict=False):
            self.requires_grad[item] = leaf.returned.tensors[number].requires_grad
        self._set(node, items[: len(leaf.new)])

    def _refuse_shared_casts(self) -> None:
        """Autocast may cast a parameter once for several uses; a leaf would do it for itself."""
        for node in self.graph.nodes:
            leaf = node.target
            if isinstance(leaf, Leaf) and leaf.autocast and any(len(held.users) > 1 for held in node.args[2]):
                why = "shares a parameter with other calls under autocast"
                raise OpaqueError(f"the leaf module {leaf.module} {why}; cast it outside the leaf", {leaf.module: why})

    def _as_tensor(self, found: Any, like: TensorSpec) -> torch.fx.Node:
        """A tensor that a leaf is given, which may have become a number on its way."""
        if isinstance(found, torch.fx.Node) and found not in self.scalars:
            return found
        kind: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
        return self.graph.call_function(torch.ops.aten.scalar_tensor.default, (found,), kind)

    def _settle_grad(self, call: torch.fx.Node, outputs: Sequence[Any]) -> None:
        """Note whether results require grad; what the traced forward computed under ``no_grad`` is to run under it.

        Nothing is saved for a backward there, so that whatever was read or made may be written afterwards. Kernels
        are chosen by what requires grad, which a detached argument would not.
        """
        differentiable = [x for x in call.all_input_nodes if self.requires_grad.get(x, False)]
        has = bool(differentiable) and str(outputs[0].type()) not in ("int", "bool", "float")
        if operator_name(call.target) == "convolution":
            has = has and not outputs[0].debugName().startswith(WITHOUT_GRAD)
        elif all(isinstance(value.type(), torch._C.TensorType) for value in outputs):
            has = any(value.requires_grad() for value in outputs)
        self.requires_grad[call] = has
        if has or not differentiable or _is_view(call.target):
            return
        if call.target._schema.is_mutable or any(map(_is_floating, outputs)):  # type: ignore[union-attr]
            call.target = WithoutGrad(call.target)  # type: ignore[arg-type]

    def _without_grad(self, result: torch.fx.Node, call: torch.fx.Node, value: Any, has: bool) -> torch.fx.Node:
        """A result of ``call``, detached where it requires grad, but the traced forward's did not."""
        wants = any(self.requires_grad.get(x, False) for x in call.all_input_nodes)
        is_detached = call.target is torch.ops.aten.detach.default or isinstance(call.target, WithoutGrad)
        if wants and not has and not is_detached and isinstance(value.type(), torch._C.TensorType):
            result = self._detached(result, call) if _is_floating(value) else result
        self.requires_grad[result] = has
        return result

    def _detached(self, tensor: torch.fx.Node, like: torch.fx.Node) -> torch.fx.Node:
        return call_beside(like, torch.ops.aten.detach.default, tensor)

    def _refuse(self, node: Any) -> None:
        what = {
            "prim::PythonOp": "a custom torch.autograd.Function",
            "prim::If": "scripted control flow",
            "prim::Loop": "a scripted loop",
        }.get(node.kind(), f"the operator {node.kind()}")
        places = [origin(n) for n in self.recording.nodes if n.kind() == node.kind()]
        if not any(place["module"] for place in places) and self.recording.scripted:
            places = self.recording.scripted  # what a scripted function consists of is in no module's scope
        where = ", ".join(filter(None, (f"module '{places[0]['module']}'", places[0]["source"])))
        raise OpaqueError(
            f"{what} cannot be replayed operation by operation ({where}); "
            "put it into a submodule of its own, or optimize the submodules around it instead",
            {place["module"]: f"{what} at {place['source']}".removesuffix(" at ") for place in reversed(places)},
        )

    def _is_size(self, value: Any) -> bool:
        """Whether this is a number that the model did not make a tensor of."""
        return self._is_scalar(value) and value.node().kind() not in ("aten::detach", "aten::to", "aten::lift_fresh")

    def _is_scalar(self, value: Any) -> bool:
        found = self._get(value)
        return isinstance(found, (bool, int, float, complex)) or found in self.scalars if _hashable(found) else False

    def _get(self, value: Any) -> Any:
        key = value.debugName()
        if key in self.unused:
            name = self.unused.pop(key)
            self.values[key] = self._get_attr(name, self.state[name])
        return self.values[key]

    def _set(self, node: Any, result: Any) -> None:
        self.values[node.output().debugName()] = result


def _with_numbers_for_padding(overload: Any, args: list[Any], kernel: list[int] | None) -> tuple[Any, list[Any]]:
    """The call of a convolution with padding "valid" or "same" as PyTorch makes it, unless it has to pad on one side.

    Source: ``_convolution_mode`` in aten/src/ATen/native/Convolution.cpp.
    """
    *operands, stride, padding, dilation, groups = args
    if kernel is None:
        return overload, args
    steps = dilation * (len(kernel) - 2) if len(dilation) == 1 else dilation
    added = [step * (size - 1) if padding == "same" else 0 for step, size in zip(steps, kernel[2:], strict=True)]
    if any(number % 2 for number in added):
        return overload, args
    settings = [stride, [number // 2 for number in added], dilation, False, [0] * len(added), groups]
    return torch.ops.aten.convolution.default, [*operands, *settings]


def _hashable(found: Any) -> bool:
    return not isinstance(found, (list, dict))


def _dtype_of(value: Any) -> dict[str, Any]:
    dtype = value.type().dtype() if isinstance(value.type(), torch._C.TensorType) else None
    return {"dtype": dtype} if dtype is not None else {}


def _is_view(operator: Any) -> bool:
    """Whether its results may be views of what it was given."""
    return any(result.alias_info and not result.alias_info.is_write for result in operator._schema.returns)


def _is_floating(output: Any) -> bool:
    dtype = output.type().dtype() if isinstance(output.type(), torch._C.TensorType) else None
    return dtype is not None and (dtype.is_floating_point or dtype.is_complex)
