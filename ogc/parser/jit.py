"""Reads a model's forward with the tracer of ``torch.jit`` and carries it over to a ``torch.fx.Graph``.

The only file that touches ``torch.jit``: another front end can take its place by returning the same
:class:`Traced`. Tracing records what one call computes. What a trace cannot see is found out here and
refused: numbers read from tensors (control flow that depends on data), custom autograd functions,
scripted code, in-place writes without gradients.
"""

from __future__ import annotations

import operator
import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, wraps
from itertools import chain, dropwhile
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from ..errors import OgcError, ParseError, add_note
from ..program import InputSpec, OutputSpec

_OWN_CODE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_NOT_USER_CODE = (os.path.dirname(torch.__file__) + os.sep, _OWN_CODE)
_PLACE = re.compile(r"^\s*(\S.*?)\((\d+)\): ", re.MULTILINE)  # in the tracer's call stacks
_NUMBER_METHODS = ["__bool__", "__int__", "__float__", "__index__", "__complex__", "__len__", "item", "tolist", "numpy"]
_TEXT_METHODS = ["__repr__", "__format__"]  # messages name sizes
_INDEX_METHODS = {"__getitem__", "__setitem__"}  # the tracer follows sizes used as bounds
_LAYOUT_METHODS = {"stride", "is_contiguous", "storage_offset", "data_ptr"}  # a trace does not follow these
_CONVOLUTIONS = {"convolution", *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3))}
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
_DEFAULT_SCALARS = {torch.float64, torch.int64, torch.bool, torch.complex128}


@dataclass(frozen=True)
class Traced:
    """A traced forward: its program, and the outputs and output structure of the traced call.

    Nodes of ``graph`` carry ``meta["module"]`` and ``meta["source"]``. Calls of :func:`same_number` stand where the
    forward made Python numbers of sizes; ``follows_sizes`` tells whether these are all.
    """

    graph: torch.fx.Graph
    constants: dict[str, torch.Tensor]
    output_spec: OutputSpec
    outputs: list[torch.Tensor]
    requires_grad: list[bool] = field(default_factory=list)  # of each output
    follows_sizes: bool = False


def same_number(now: Any, then: Any) -> bool:
    """In a program: whether a size, or what was computed from sizes, is the number that Python saw in the trace."""
    return bool(now == then)


def trace(
    model: torch.nn.Module,
    spec: InputSpec,
    tensors: list[torch.Tensor],
    forward: Callable[..., Any] | None = None,
) -> Traced:
    """Run ``model``, or ``forward`` in its place, once on ``tensors`` and return what it computed.

    Gradients are on, but nothing is saved for a backward: memory is that of inference.

    Raises:
        ParseError: the forward cannot be represented faithfully; the message names file and line.
        Exception: whatever the model's own forward raises, with a note saying so.
    """
    scripted = [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        raise ParseError(
            f"module {scripted[0]} is a torch.jit.ScriptModule, which cannot be replayed operation by operation; "
            "put the eager module that it was made from in its place"
        )
    watch = _Watch()
    flat = FlatForward(model.forward if forward is None else forward, spec, watch)
    state = dict(chain(model.named_parameters(), model.named_buffers()))
    with (
        warnings.catch_warnings(),
        nothing_saved(),
        _without_jit_autocast(),
        _module_scopes(model),
        _numbers_told(watch),
        watch,
    ):
        # torch.jit is deprecated; what its tracer warns of is decided here, by _Watch.
        warnings.filterwarnings("ignore", message=r".*torch\.jit")
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        warnings.filterwarnings("ignore", message="To copy construct from a tensor")  # sizes are tensors here only
        # torch.jit.trace would make a script module of every submodule, which takes longer than the
        # forward. The tracer tells tensors by identity: parameters and buffers may as well be inputs.
        jit_graph, _ = torch._C._create_graph_by_tracing(
            lambda *given: flat(*given[: len(tensors)]), (*tensors, *state.values()), lambda tensor: "", False, False
        )
        torch._C._jit_pass_inline(jit_graph)  # scripted functions
        torch._C._jit_pass_peephole(jit_graph, True)  # makes one of nested concatenations
    watch.raise_if_unfaithful()
    assert flat.output_spec is not None
    lowering = _Lowering(state, watch)
    lowering.run(jit_graph)
    return Traced(
        lowering.graph, lowering.constants, flat.output_spec, flat.outputs, flat.requires_grad, not watch.unclear
    )


def without_decisions(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A copy without :func:`same_number` and what is computed for it alone."""
    result = torch.fx.Graph()
    outputs = result.graph_copy(graph, {})
    result.output(outputs)
    pending = [node for node in reversed(result.nodes) if node.target is same_number]
    while pending:
        node = pending.pop(0)
        if node.op in ("call_function", "get_attr") and not node.users and not _has_effects(node):
            before = node.all_input_nodes
            result.erase_node(node)
            pending.extend(n for n in before if n not in pending)
    return result


def _has_effects(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return bool(schema and schema.is_mutable) or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def forward_alone(
    model: torch.nn.Module, spec: InputSpec, tensors: list[torch.Tensor]
) -> tuple[OutputSpec, list[torch.Tensor]]:
    """The structure and the tensors that the model's forward returns, with gradients on and nothing saved."""
    flat = FlatForward(model.forward, spec)
    with nothing_saved():
        flat(*tensors)
    assert flat.output_spec is not None
    return flat.output_spec, flat.outputs


@contextmanager
def _module_scopes(model: torch.nn.Module) -> Iterator[None]:
    """Every node is traced in a scope named after the module that runs it."""
    before = torch.jit._trace._trace_module_map
    torch.jit._trace._trace_module_map = {m: name for name, m in model.named_modules(remove_duplicate=False)}
    try:
        yield
    finally:
        torch.jit._trace._trace_module_map = before


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Operators traced inside are said to come from ``name``, unless they come from a module."""
    state = torch._C._get_tracing_state()
    state.push_scope(name)
    try:
        yield
    finally:
        state.pop_scope()


@contextmanager
def _numbers_told(watch: _Watch) -> Iterator[None]:
    """``watch`` is told of numbers made of tensors in any Python code, that of ``torch.nn.functional`` included."""

    def told(method: Callable[..., Any]) -> Callable[..., Any]:
        return wraps(method)(lambda *args, **kwargs: watch.number(method, *args, **kwargs))

    own = {name: vars(torch.Tensor).get(name) for name in (*_NUMBER_METHODS, *_TEXT_METHODS)}
    for name in own:
        setattr(torch.Tensor, name, told(getattr(torch.Tensor, name)))
    try:
        yield
    finally:
        for name, method in own.items():
            if method is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, method)


@contextmanager
def _without_jit_autocast() -> Iterator[None]:
    """The trace has autocast's casts already; torch.jit would add its own, where autocast is off too."""
    before = torch._C._jit_set_autocast_mode(False)
    try:
        yield
    finally:
        torch._C._jit_set_autocast_mode(before)


@contextmanager
def nothing_saved() -> Iterator[None]:
    """Gradients are on, but nothing is kept for a backward: memory is that of inference."""
    with saved_tensors_hooks(lambda tensor: None, _never_unpacked), torch.enable_grad():
        yield


def _never_unpacked(packed: object) -> torch.Tensor:
    raise ParseError("the model runs a backward pass inside its forward, which cannot be traced")


class FlatForward:
    """A forward as a function of a flat list of tensors. It remembers what it returned."""

    def __init__(self, forward: Callable[..., Any], spec: InputSpec, watch: _Watch | None = None) -> None:
        self.forward = forward
        self.spec = spec
        self.watch = watch
        self.output_spec: OutputSpec | None = None
        self.outputs: list[torch.Tensor] = []
        self.requires_grad: list[bool] = []

    def __call__(self, *tensors: torch.Tensor) -> Any:
        args, kwargs = self.spec.rebuild(list(tensors))
        try:
            result = self.forward(*args, **kwargs)
        except OgcError:
            raise
        except Exception as error:
            add_note(error, "ogc: this error was raised by the model's own forward on the sample input.")
            raise
        self.output_spec, outputs = OutputSpec.of(result)
        if not outputs:
            raise ParseError("the model's forward returns no tensor; there is nothing to train")
        self.outputs = [tensor.detach() for tensor in outputs]
        self.requires_grad = [tensor.requires_grad for tensor in outputs]
        sizes = [tensor for tensor, _ in self.watch.decisions] if self.watch is not None else []
        return (*outputs, *sizes)


class _Watch(TorchFunctionMode):
    """Sees each call of the traced forward, for what the trace does not record."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[str] = []  # places where a tensor's content became a Python number
        self.writes_without_grad: list[str] = []
        self.convolution_grad: list[bool] = []
        self.decisions: list[tuple[torch.Tensor, Any]] = []  # sizes that became Python numbers, and which
        self.is_harmless = False  # whether sizes are being made numbers without consequence
        self.unclear: list[str] = []  # where sizes became anything else, or Python looked at layouts

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "").partition(".")[0]  # of an overload such as add_.Tensor: add_
        if name in _LAYOUT_METHODS and args and _origins(args[0]):
            self.unclear.append(f"{name} at {_user_line()}")
        if name in _INDEX_METHODS:
            return self._harmlessly(function, *args, **(kwargs or {}))
        if name in _CONVOLUTIONS:
            self.convolution_grad.append(torch.is_grad_enabled())
        if not torch.is_grad_enabled() and _is_in_place(name) and args and getattr(args[0], "requires_grad", False):
            self.writes_without_grad.append(f"{name} at {_user_line()}")
        return function(*args, **(kwargs or {}))

    def number(self, method: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a method that makes something else of a tensor, and write down what came of it."""
        name = method.__name__
        if name in _TEXT_METHODS:
            return self._harmlessly(method, tensor, *args, **kwargs)
        origins, result = _origins(tensor), method(tensor, *args, **kwargs)
        if self.is_harmless and "prim::Param" not in origins:
            return result
        if name == "__len__" and origins:
            self.decisions.append((tensor.size(0), result))
        elif "prim::Param" in origins:
            self.numbers.append(f"{name.strip('_')}() of a tensor at {_user_line()}")
        elif origins and isinstance(result, (bool, int, float)):
            self.decisions.append((tensor, result))
        elif origins:
            self.unclear.append(f"{name} at {_user_line()}")
        return result

    def _harmlessly(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before, self.is_harmless = self.is_harmless, True
        try:
            return function(*args, **kwargs)
        finally:
            self.is_harmless = before

    def raise_if_unfaithful(self) -> None:
        if self.numbers:
            raise ParseError(
                f"the forward reads numbers out of tensors: {'; '.join(dict.fromkeys(self.numbers))}. What it "
                "computes then depends on the data, and a plan for the sample input would be wrong for other "
                "data. Replace the branch or loop by tensor operations (torch.where, masks), optimize the "
                "submodules around it instead, or write down what is computed with parse_graph=."
            )
        if self.writes_without_grad:
            raise ParseError(
                f"in-place operation under no_grad on a tensor that requires grad: {self.writes_without_grad[0]}; "
                "make it out of place"
            )


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") and name != "requires_grad_"


def _origins(tensor: Any) -> set[str]:
    """What a traced tensor is computed from: ``prim::Param`` stands for data, ``aten::size`` for sizes."""
    if not isinstance(tensor, torch.Tensor) or not torch._C._get_tracing_state():
        return set()
    pending = [torch._C._get_value_trace(tensor)]  # type: ignore[attr-defined]
    seen: set[int] = set()
    found: set[str] = set()
    while pending:
        value = pending.pop()
        if value.unique() in seen:
            continue
        seen.add(value.unique())
        kind = value.node().kind()
        if kind in ("aten::size", "aten::numel"):
            found.add("aten::size")
        elif kind == "prim::Param":
            found.add(kind)
        elif kind != "prim::Constant":
            pending.extend(value.node().inputs())
    return found


def _user_line() -> str:
    for frame in reversed(traceback.extract_stack()[:-2]):
        if not frame.filename.startswith(_NOT_USER_CODE):
            return f"{frame.filename}:{frame.lineno}"
    return "unknown place"


class _Lowering:
    """Carries a jit graph over to fx, node by node."""

    def __init__(self, state: dict[str, torch.Tensor], watch: _Watch) -> None:
        self.state = state
        self.watch = watch
        self.graph = torch.fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self.values: dict[str, Any] = {}  # jit value -> fx node, Python constant, or list
        self.unused: dict[str, str] = {}  # jit value -> parameter or buffer that no node has used yet
        self.scalars: set[torch.fx.Node] = set()
        self.requires_grad: dict[torch.fx.Node, bool] = {}
        self.convolutions = 0

    def run(self, jit_graph: Any) -> None:
        values = list(jit_graph.inputs())
        inputs = values[: len(values) - len(self.state)]
        for number, value in enumerate(inputs):
            node = self.graph.placeholder(f"input_{number}")
            self.requires_grad[node] = bool(value.requires_grad())
            self.values[value.debugName()] = node
        for value, name in zip(values[len(inputs) :], self.state, strict=True):
            self.unused[value.debugName()] = name
        for node in jit_graph.nodes():
            self._lower(node)
        (result,) = jit_graph.outputs()
        outputs = self.values[result.debugName()]
        outputs = tuple(outputs) if isinstance(outputs, (list, tuple)) else (outputs,)
        count = len(outputs) - len(self.watch.decisions)
        for size, (_, number) in zip(outputs[count:], self.watch.decisions, strict=True):
            self._compare(size, number)
        self.graph.output(outputs[:count])
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
            self._set(node, [self._get(value) for value in node.inputs()])
        elif kind in ("prim::ListUnpack", "prim::TupleUnpack"):
            self._unpack(node)
        elif kind in _SAME_VALUE and self._is_scalar(next(iter(node.inputs()))):
            self._set(node, self._get(next(iter(node.inputs()))))
        elif kind.removesuffix("_") in _SCALAR_OPERATORS and all(self._is_scalar(v) for v in self._operands(node)):
            self._scalar_call(node)
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
        name = f"_ogc_constant_{len(self.constants)}"
        self.constants[name] = value
        return self._get_attr(name, value)

    def _unpack(self, node: Any) -> None:
        packed = self._get(next(iter(node.inputs())))
        if isinstance(packed, torch.fx.Node):
            count = self.graph.call_function(len, (packed,))
            count.meta.update(packed.meta)
            self._compare(count, len(list(node.outputs())))
        for index, value in enumerate(node.outputs()):
            if isinstance(packed, (list, tuple)):
                self.values[value.debugName()] = packed[index]
                continue
            item = self.graph.call_function(operator.getitem, (packed, index))
            item.meta.update(packed.meta)
            self.requires_grad[item] = bool(value.requires_grad())
            self.values[value.debugName()] = item

    def _scalar_call(self, node: Any) -> None:
        function = _SCALAR_OPERATORS[node.kind().removesuffix("_")]
        operands = [self._get(value) for value in self._operands(node)]
        if node.kind() == "aten::rsub":
            operands.reverse()
        rounding = [value for value in list(node.inputs())[2:] if isinstance(self._get(value), str)]
        if node.kind() == "aten::div" and rounding:
            function = operator.floordiv  # sizes are not negative: "trunc" is "floor"
        if not any(isinstance(x, torch.fx.Node) for x in operands):
            self._set(node, function(*operands))
            return
        result = self.graph.call_function(function, tuple(operands))
        result.meta.update(_origin(node))
        self.scalars.add(result)
        self._set(node, result)

    def _operands(self, node: Any) -> list[Any]:
        count = 1 if node.kind() == "aten::neg" else 2
        return list(node.inputs())[:count]

    def _call(self, node: Any) -> None:
        schema = node.schema()
        if "(no schema)" in schema:
            self._refuse(node)
        overload, arguments = _resolve(schema)
        if _shape_depends_on_data(overload, node):
            self._refuse(node)
        args, kwargs = [], {}
        for argument, value in zip(arguments, node.inputs(), strict=True):
            given = self._get(value)
            if self._is_scalar(value) and _wants_tensor(argument, overload):
                given = self.graph.call_function(torch.ops.aten.scalar_tensor.default, (given,), _dtype_of(value))
                given.meta.update(_origin(node))
            if argument.kwarg_only:
                kwargs[argument.name] = given
            else:
                args.append(given)
        if overload._opname == "repeat_interleave" and self._is_scalar(list(node.inputs())[1]):
            sizes = node.output().type().sizes()  # without it there is no knowing the shape on meta tensors
            kwargs["output_size"] = sizes[args[2] if args[2] is not None else 0]
        is_convolution = node.kind() == "aten::_convolution"
        if is_convolution:
            # The tracer records the flags of the day; aten::convolution reads them when it runs.
            overload, args, kwargs = torch.ops.aten.convolution.default, args[:9], {}
        call = self.graph.call_function(overload, tuple(args), kwargs)
        call.meta.update(_origin(node))
        outputs = list(node.outputs())
        if len(outputs) != 1:
            for index, value in enumerate(outputs):
                item = self.graph.call_function(operator.getitem, (call, index))
                item.meta.update(call.meta)
                self.requires_grad[item] = bool(value.requires_grad())
                self.values[value.debugName()] = item
            return
        if str(outputs[0].type()) in ("int", "bool", "float"):
            self.scalars.add(call)
        self._set(node, self._without_grad(call, outputs[0], is_convolution))

    def _without_grad(self, call: torch.fx.Node, output: Any, is_convolution: bool) -> torch.fx.Node:
        """The call, detached where the traced forward ran it under ``no_grad``."""
        wants = any(self.requires_grad.get(x, False) for x in call.all_input_nodes)
        if is_convolution:
            modes = self.watch.convolution_grad
            has = wants and (self.convolutions >= len(modes) or modes[self.convolutions])
            self.convolutions += 1
        elif isinstance(output.type(), torch._C.TensorType):
            has = bool(output.requires_grad())
        else:
            has = wants
        if wants and not has and isinstance(output.type(), torch._C.TensorType) and _is_floating(output):
            detached = self.graph.call_function(torch.ops.aten.detach.default, (call,))
            detached.meta.update(call.meta)
            call = detached
        self.requires_grad[call] = has
        return call

    def _refuse(self, node: Any) -> None:
        what = {
            "prim::PythonOp": "a custom torch.autograd.Function",
            "prim::If": "scripted control flow",
            "prim::Loop": "a scripted loop",
        }.get(node.kind(), f"the operator {node.kind()}")
        if node.kind().startswith("aten::") and "(no schema)" not in node.schema():
            what += ", whose result has a shape that depends on the data,"
        origin = _origin(node)
        raise ParseError(
            f"{what} cannot be replayed operation by operation (module '{origin['module']}', {origin['source']}); "
            "optimize the submodules around it instead"
        )

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


def _hashable(found: Any) -> bool:
    return not isinstance(found, (list, dict))


def _shape_depends_on_data(overload: Any, node: Any) -> bool:
    """Whether another input of the same shape may give a result of another shape, as ``x[mask]`` does."""
    if torch.Tag.dynamic_output_shape not in getattr(overload, "tags", ()):
        return False
    if overload._opname != "index":
        return True
    indices = list(node.inputs())[1].node().inputs()
    types = [index.type() for index in indices if isinstance(index.type(), torch._C.TensorType)]
    return any(t.dtype() in (torch.bool, torch.uint8) for t in types)


def _wants_tensor(argument: Any, overload: Any) -> bool:
    """Whether an operator takes a tensor here and no number in its place."""
    kinds = ("Tensor", "Optional[Tensor]")
    return str(argument.type) in kinds and not torch._C._should_allow_numbers_as_tensors(overload._opname)


def _dtype_of(value: Any) -> dict[str, Any]:
    dtype = value.type().dtype() if isinstance(value.type(), torch._C.TensorType) else None
    return {"dtype": dtype} if dtype is not None else {}


def _is_floating(output: Any) -> bool:
    dtype = output.type().dtype()
    return dtype is not None and (dtype.is_floating_point or dtype.is_complex)


@cache
def _resolve(schema_text: str) -> tuple[Any, list[Any]]:
    """The operator overload that a jit node's schema names, and its arguments."""
    schema = torch._C.parse_schema(schema_text)
    namespace, name = schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name)
    return getattr(packet, schema.overload_name or "default"), schema.arguments


def _origin(node: Any) -> dict[str, str]:
    """Module path and source line of a jit node."""
    module = node.scopeName().rsplit("/", 1)[-1]
    places = _PLACE.findall(node.sourceRange())  # innermost first: watch, model, tracer, whoever called that
    called = dropwhile(lambda place: not place[0].startswith(_OWN_CODE), reversed(places))
    inside = [*dropwhile(lambda place: place[0].startswith(_OWN_CODE), called)][::-1]
    foreign = [place for place in inside if not place[0].startswith(_OWN_CODE)]
    user = [place for place in foreign if not place[0].startswith(_NOT_USER_CODE)] or foreign
    source = f"{os.path.basename(user[0][0])}:{user[0][1]}" if user else ""
    return {"module": module, "source": source}
