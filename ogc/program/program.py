"""The executable form of a model: a ``torch.fx.Graph`` of operators and what was seen when it ran.

The parser makes it, the runtime runs it; neither needs to know the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list

from ..torch_state.private import OpOverload, id_of_storage, is_any_autocast_enabled, is_view, pytree
from ..torch_state.reads import Reads
from .structures import InputSpec, OutputSpec, autocast_kinds

Loss = Callable[[Any], torch.Tensor] | Literal["outputs"]
"""A function of what the forward returns; ``"outputs"`` is whatever starts the backward at all outputs."""

Optimizer = torch.optim.Optimizer | Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
"""An optimizer of a model, or a class or function that makes one of parameters."""

Gradients = Literal["kept", "none"] | Mapping[tuple[int, ...], int]
"""Where parameters' gradients are: there all the time, none before the backward makes them, or gone as soon as they are
made, as a hook steps the optimizer; then by shape the bytes that such a step takes."""


@dataclass(frozen=True)
class AfterForward:
    """How the caller goes on."""

    loss: Loss | None = None  # from what the backward starts; None to find that out
    holds_outputs: bool = True  # all outputs are held through the backward
    outputs: str = "all"  # ``"all"`` of them are wanted, or the ``"loss"`` alone
    gradients: Gradients = "kept"


def losses_among(output: Any, tensors: Sequence[torch.Tensor], requires_grad: Sequence[bool]) -> list[int]:
    """The numbers of the tensors that may be the loss: scalars to differentiate, of several the one by that name."""
    found = [n for n, tensor in enumerate(tensors) if requires_grad[n] and not tensor.dim()]
    if len(found) < 2:
        return found
    named = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    return [n for n in found if tensors[n] is named] or found


CONSTANT = "_ogc_constant_"
"""How the names begin of tensors that are no attribute of the model."""

OWN = "own"
"""In a node's ``meta``: the forward makes a constant anew each time, of which the program has a copy made."""

OUTSIDE = "outside"
"""In a node's ``meta``: it is a call of the caller's, who goes on from what the model's forward returns."""

SHARED = "shared"
"""In a node's ``meta``: it is a cast of autocast's, which all uses of a parameter in the caller's region share."""

SHAPE = "shape"
"""In a node's ``meta``: the shape of its tensor, where it is one tensor."""


@dataclass(frozen=True)
class TensorRef:
    """One tensor of the program: the fx node that returns it and its place among the node's results."""

    node: str
    index: int


@dataclass(frozen=True)
class Saved:
    """One tensor that autograd saves while an operation runs, in the order of saving."""

    tensor: TensorRef | None = None  # the program tensor whose storage it shares; else it is internal
    # its (size, stride, offset) where another than that tensor's
    layout: tuple[tuple[int, ...], tuple[int, ...], int] | None = None
    external: bool = False  # in memory anyway: a parameter, a buffer, an input
    unneeded: bool = False  # no backward asks for it


@dataclass(frozen=True)
class LowMemoryVariant:
    """The low-memory variant of an operation: what runs instead, and what autograd saves then, in order."""

    target: Any
    saves: tuple[Saved, ...]


@dataclass(frozen=True)
class Program:
    """What the runtime needs to run a model's forward operation by operation."""

    # of flattened tensor inputs, parameters and buffers, and the calls of ``Graph.operations`` in their order
    graph: torch.fx.Graph
    # tensors that are no attribute of the model, by the name of their ``get_attr`` node
    constants: dict[str, torch.Tensor]
    inputs: InputSpec  # how the arguments flatten, with the values of those that are no tensors
    outputs: OutputSpec  # how the result is rebuilt from the tensors of the output node
    saves: tuple[tuple[Saved, ...], ...]  # for each operation, what autograd saves, in order
    storages: dict[TensorRef, int]  # the value number of each program tensor that is a value
    differentiable: frozenset[TensorRef]  # the program tensors that a backward through them leads on from
    random: frozenset[int]  # operations that draw random numbers
    variants: dict[int, LowMemoryVariant] = field(default_factory=dict)  # low-memory ones, by operation
    # for operations that may take over a value's storage, the operator that does not
    out_of_place: dict[int, Any] = field(default_factory=dict)
    # for an operation and its operator, a function of PyTorch's that calls that sooner than ``torch.ops`` does
    bindings: dict[tuple[int, Any], str] = field(default_factory=dict)
    guards: Guards | None = None  # what Python read out of tensors, if anything
    parse_graph: Any = None  # the function that made the graph by hand, if one did
    after_forward: AfterForward = field(default_factory=AfterForward)  # how the caller goes on
    # what Python read outside of tensors; the program holds where that is the same
    reads: Reads = field(default_factory=Reads)
    # what is read in a first call, run plain, that settles what all others read, if there is one
    cold: Reads | None = None
    recorded: Any = None  # the forward as it was recorded, before anything was made of it

    @property
    def operations(self) -> list[torch.fx.Node]:
        return [node for node in self.graph.nodes if node.op == "call_function"]


@dataclass(frozen=True)
class WithoutGrad:
    """An operator that runs under ``torch.no_grad()``, as it was recorded; all else about it is its own.

    Kernels are those of the recorded forward, as arguments still say that they require grad.
    """

    operator: OpOverload

    def __getattr__(self, name: str) -> Any:
        if name == "operator":  # of an instance that is being copied
            raise AttributeError(name)
        return getattr(self.operator, name)

    def __str__(self) -> str:
        return str(self.operator)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        with torch.no_grad():
            return self.operator(*args, **keywords)


@dataclass(frozen=True)
class Guards:
    """What Python read out of tensors in a recorded forward, and the program that reads it again."""

    graph: torch.fx.Graph  # from the flattened tensor inputs to numbers, tensors and lists of shapes
    # tensors that are no attribute of the model, by the name of their ``get_attr`` node
    constants: dict[str, torch.Tensor]
    expected: tuple[Any, ...]  # what it returned for the sample
    what: tuple[str, ...]  # each of these in words

    def read(self, model: torch.nn.Module, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
        with torch.no_grad(), without_autocast():
            return tuple(run_nodes(self.graph.nodes, inputs, partial(get_attribute, model, self.constants), call_node))

    def difference(self, model: torch.nn.Module, inputs: list[torch.Tensor]) -> str:
        """The first thing that Python would read otherwise out of these inputs, in words; "" if there is none.

        What follows a difference is not run: it holds for the recorded values alone, and may fail for others.
        """
        (output,) = self.graph.find_nodes(op="output")
        places = {node: place for place, node in enumerate(output.args[0])}
        place = -1  # of the last read

        def call(node: torch.fx.Node, values: dict[torch.fx.Node, Any]) -> Any:
            nonlocal place
            value, place = call_node(node, values), places.get(node, place)
            if node in places and not _same_value(value, self.expected[place]):
                raise _OtherValueError(value)
            return value

        try:
            with torch.no_grad(), without_autocast():
                run_nodes(self.graph.nodes, inputs, partial(get_attribute, model, self.constants), call)
        except _OtherValueError as other:
            now, then = other.args[0], self.expected[place]
            is_long = isinstance(then, torch.Tensor) and then.dim()
            return f"{self.what[place]} gives {'something else' if is_long else f'{now} where it gave {then}'}"
        except Exception as error:  # the plain forward runs, and raises it where it is an error of the call
            return f"{self.what[min(place + 1, len(self.what) - 1)]} cannot be read ({type(error).__name__}: {error})"
        return ""


class _OtherValueError(Exception):
    """What Python would read, its argument, is not what it read before."""


def _same_value(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a, b))
    return type(a) is type(b) and bool(a == b or (a != a and b != b))


def shapes_of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[int, ...]]:
    """In a program: the shapes of an operator's results."""
    return [tuple(tensor.shape) for tensor in tensor_leaves(operator(*args, **kwargs))]


@contextmanager
def without_autocast() -> Iterator[None]:
    """Casts are part of a recorded program: autocast must not add its own."""
    if not is_any_autocast_enabled():
        yield
        return
    with ExitStack() as stack:
        for kind in autocast_kinds():
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def has_history(tensor: torch.Tensor) -> bool:
    """Whether a backward through the tensor reaches anything.

    A view made under ``no_grad`` of what requires grad says that it requires it too, and is where its gradient ends.
    """
    try:
        return tensor.requires_grad and not (tensor.is_leaf and is_view(tensor))
    except RuntimeError:  # PyTorch will not tell the history of such a view once it is written
        return False


def has_backward(tensor: torch.Tensor) -> bool:
    """Whether a backward may start from the tensor; PyTorch has none for some operators, ``bernoulli`` among these."""
    return has_history(tensor) and (tensor.grad_fn is None or "NotImplemented" not in tensor.grad_fn.name())


def attribute(root: Any, name: str) -> Any:
    """What a dotted name such as ``layer1.0.weight`` stands for, looked up from ``root``."""
    for part in name.split("."):
        root = getattr(root, part)
    return root


def device_of_model(model: torch.nn.Module, inputs: Iterable[torch.Tensor] = ()) -> torch.device:
    """Where a model's parameters are; without any its buffers, or else what it is given."""
    tensors = chain(model.parameters(), model.buffers(), inputs)
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def get_attribute(model: torch.nn.Module, constants: dict[str, torch.Tensor], target: str) -> Any:
    """The tensor, or the module of an opaque module, that a ``get_attr`` node of a program stands for."""
    return constants[target] if target in constants else attribute(model, target)


def args_of(node: torch.fx.Node, values: dict[torch.fx.Node, Any]) -> Any:
    """Positional and keyword arguments of a call, with values in the places of nodes."""
    return torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)


def call_node(node: torch.fx.Node, values: dict[torch.fx.Node, Any]) -> Any:
    """What a call returns, with values in the places of nodes."""
    args, kwargs = args_of(node, values)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def run_nodes(
    nodes: Iterable[torch.fx.Node],
    inputs: Iterable[Any],
    attribute_of: Callable[[str], Any],
    call: Callable[[torch.fx.Node, dict[torch.fx.Node, Any]], Any],
) -> Any:
    """Run a program node by node and return what it returns; each value is freed after its last use.

    ``attribute_of`` gives what the target of a ``get_attr`` node stands for; ``call`` runs any other node, given the
    values that live.
    """
    values: dict[torch.fx.Node, Any] = {}
    users: dict[torch.fx.Node, int] = {}
    given = iter(inputs)
    for node in nodes:
        if node.op == "output":
            return args_of(node, values)[0][0]
        if node.op == "placeholder":
            values[node] = next(given)
        else:
            values[node] = attribute_of(str(node.target)) if node.op == "get_attr" else call(node, values)
        users[node] = len(node.users)
        for used in (node, *node.all_input_nodes):
            users[used] -= used is not node
            if not users[used]:
                del values[used]
    raise AssertionError("a program has an output")


def tensor_leaves(*trees: Any) -> list[torch.Tensor]:
    """The tensors in nested arguments or results, in order."""
    found: list[torch.Tensor] = []
    _collect(trees, found)
    return found


def _collect(tree: Any, found: list[torch.Tensor]) -> None:
    # Asked for with every recorded call, so the usual kinds are told apart here, several times faster.
    if isinstance(tree, torch.Tensor):
        found.append(tree)
    elif type(tree) in (tuple, list, immutable_list):
        for item in tree:
            _collect(item, found)
    elif type(tree) in (dict, immutable_dict):
        for item in tree.values():
            _collect(item, found)
    elif tree is not None and type(tree) not in (int, float, bool, str):
        found += [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The tensor's storage, if it has one: sparse tensors and those of torch.func's transforms have none."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def storage_bytes(tensors: Iterable[torch.Tensor], given: Iterable[torch.Tensor] = ()) -> int:
    """Bytes of the storages of some tensors, each once, but for those that they share with what was ``given``."""
    return sum(each_storage_bytes(tensors, given))


def each_storage_bytes(tensors: Iterable[torch.Tensor], given: Iterable[torch.Tensor] = ()) -> tuple[int, ...]:
    """The same of each storage."""
    known = {id_of_storage(raw) for raw in map(storage_of, given) if raw is not None}
    sizes = {id_of_storage(raw): raw.nbytes() for raw in map(storage_of, tensors) if raw is not None}
    return tuple(size for storage, size in sizes.items() if storage not in known)


def call_beside(node: torch.fx.Node, operator: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
    """A call put into the graph of ``node``, said to come from the same place in the user's code."""
    call = node.graph.call_function(operator, args, kwargs)
    call.meta.update({key: node.meta[key] for key in ("module", "source", OUTSIDE) if key in node.meta})
    return call


def operator_name(operator: Any) -> str:
    """``batch_norm`` for ``torch.ops.aten.batch_norm.default``."""
    packet = getattr(operator, "overloadpacket", operator)
    return str(getattr(packet, "__name__", packet))
