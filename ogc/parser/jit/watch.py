"""Sees each call of a traced forward, for what the trace does not record."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, NamedTuple

import numpy
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ...errors import ParseError
from ...leaf import Leaf
from ...program import TENSOR, TensorSpec, storage_of, tensor_leaves
from .places import inputs_of, scope_name, user_line, value_of

_NUMBER_METHODS = ["__bool__", "__int__", "__float__", "__index__", "__complex__", "__len__", "item", "tolist", "numpy"]
_TEXT_METHODS = ["__repr__", "__format__"]  # messages name sizes
_INDEX_METHODS = {"__getitem__", "__setitem__"}  # the tracer follows sizes used as bounds
_LAYOUT_METHODS = {"stride", "is_contiguous", "storage_offset", "data_ptr"}  # a trace does not follow these
_HOOK_METHODS = {"register_hook", "register_post_accumulate_grad_hook", "retain_grad"}
_CONVOLUTIONS = {"convolution", "_convolution", *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3))}
WITHOUT_GRAD = "ogc_without_grad"
"""How the names begin of what convolutions made while gradients were off, which the tracer does not write down."""
_CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, type, enum.Enum, slice, type(Ellipsis),
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip


class OpaqueError(ParseError):
    """The forward does what no trace can hold; modules that hide it, by name, and why each would have to."""

    def __init__(self, message: str, modules: dict[str, str]) -> None:
        super().__init__(message)
        self.modules = modules


class LookAgain(Exception):
    """Only a careful trace shows which module it is that does what no trace can hold."""


class Decision(NamedTuple):
    """A size, or what was computed from sizes, that became a Python number."""

    size: torch.Tensor
    number: Any
    module: str


class Watch(TorchFunctionMode):
    """What is seen of one traced forward.

    With ``follows``, also which leaf each tensor comes from: one that comes or goes on other ways than as an
    argument or a result would be a constant of the trace.

    Attributes:
        calls: the calls of leaves, in order.
        decisions: the Python numbers that were made of sizes.
        unclear: where sizes became anything else, or Python looked at layouts.
    """

    def __init__(self, follows: bool, inputs: Sequence[torch.Tensor], careful: bool = False) -> None:
        super().__init__()
        self.careful = careful
        self.calls: list[Leaf] = []
        self.decisions: list[Decision] = []
        self.unclear: list[str] = []
        self.numbers: dict[str, str] = {}  # module -> where a tensor's content became a Python number
        self.writes_without_grad: dict[str, str] = {}
        self.hooks: dict[str, str] = {}  # module -> why its hooks are not the business of the forward alone
        self.is_harmless = False  # whether sizes are being made numbers without consequence
        self.python_state = python_random_state()
        self.python_draws: dict[str, str] = {}  # module -> where random numbers were drawn past torch
        self.leaky: dict[str, str] = {}  # leaf -> what it does that a leaf must not
        self.follows = follows
        self.makers: dict[int, tuple[str, StorageWeakRef]] = {}  # storage -> leaf that made it, "" for none
        self.leaf = ""  # that we are inside of
        self.given: set[int] = set()
        self.counting: set[str] = set()  # leaves that read numbers out of tensors
        self._note(inputs)

    def aside(self) -> list[torch.Tensor]:
        """What the traced forward is to return beside its result."""
        return [decision.size for decision in self.decisions]

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "").partition(".")[0]  # of an overload such as add_.Tensor: add_
        kwargs = kwargs or {}
        if not self.leaf:
            self._look(name, args)
            if self.careful:
                self._look_for_python_draws(f"before {user_line()}")
        self.check(args, kwargs)
        call = partial(self._harmlessly, function) if name in _INDEX_METHODS else function
        given = () if torch.is_grad_enabled() else tensor_leaves(args, kwargs)
        versions = [(tensor, tensor._version) for tensor in given if tensor.requires_grad]
        result = call(*args, **kwargs)
        if not self.leaf:
            if any(tensor._version != version for tensor, version in versions):
                self.writes_without_grad.setdefault(scope_name(), f"{name} at {user_line()}")
            if name in _CONVOLUTIONS and not torch.is_grad_enabled():
                value_of(result).setDebugName(WITHOUT_GRAD)
            result = _without_false_grad(result)
        self._note(result)
        return result

    def _look(self, name: str, args: Any) -> None:
        if name in _LAYOUT_METHODS and args and origins(args[0]):
            self.unclear.append(f"{name} at {user_line()}")
        if name in _HOOK_METHODS:
            self.hooks.setdefault(scope_name(), f"calls {name} of a tensor at {user_line()}")

    def _look_for_python_draws(self, where: str) -> None:
        state = python_random_state()
        if state != self.python_state:
            self.python_state = state
            self.python_draws.setdefault(scope_name(), f"random numbers of Python or numpy {where}")

    # -- numbers -------------------------------------------------------------------------------------------

    def number(self, method: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a method that makes something else of a tensor, and write down what came of it."""
        name = method.__name__
        if name in _TEXT_METHODS:
            return self._harmlessly(method, tensor, *args, **kwargs)
        if self.leaf and name != "__len__":
            self.counting.add(self.leaf)
        found, result = origins(tensor), method(tensor, *args, **kwargs)
        if self.is_harmless and "prim::Param" not in found:
            return result
        if name == "__len__" and found:
            self.decisions.append(Decision(tensor.size(0), result, scope_name()))
        elif "prim::Param" in found:
            self.numbers.setdefault(scope_name(), f"{name.strip('_')}() of a tensor at {user_line()}")
        elif found and isinstance(result, (bool, int, float)):
            self.decisions.append(Decision(tensor, result, scope_name()))
        elif found:
            self.unclear.append(f"{name} at {user_line()}")
        return result

    def _harmlessly(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before, self.is_harmless = self.is_harmless, True
        try:
            return function(*args, **kwargs)
        finally:
            self.is_harmless = before

    @contextmanager
    def told_of_numbers(self) -> Iterator[None]:
        """Numbers made of tensors are seen in any Python code, that of ``torch.nn.functional`` included."""

        def told(method: Callable[..., Any]) -> Callable[..., Any]:
            return wraps(method)(lambda *args, **kwargs: self.number(method, *args, **kwargs))

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

    # -- leaves --------------------------------------------------------------------------------------------

    @contextmanager
    def inside(self, leaf: str, given: Sequence[torch.Tensor]) -> Iterator[None]:
        """Watch the call of a leaf."""
        self._look_for_python_draws(f"before the call of {leaf}")
        self.leaf, self.given = leaf, {t.untyped_storage()._cdata for t in given}
        try:
            yield
        finally:
            self.leaf, self.given = "", set()
            self.python_state = python_random_state()

    def returned(self, leaf: Leaf, new: Sequence[torch.Tensor]) -> None:
        """Note what a leaf returned."""
        for tensor in new:
            self.makers[tensor.untyped_storage()._cdata] = ("", StorageWeakRef(tensor.untyped_storage()))
        constants = [x for x in leaf.returned.outputs.leaves if x is not TENSOR]
        arguments = [x for x in leaf.inputs.leaves if not isinstance(x, TensorSpec)]
        strange = [x for x in (*arguments, *constants) if not isinstance(x, _CONSTANTS)]
        decides = leaf.module in self.counting
        returns_input = any(view is not None for view in leaf.returned.views)
        if strange:
            self.leaky[leaf.module] = f"takes or returns a {type(strange[0]).__name__}, in which tensors may hide"
        elif decides and any(isinstance(x, (int, float)) for x in constants):
            self.leaky[leaf.module] = "returns a number read out of a tensor"
        elif decides and returns_input and "." in leaf.module:  # else there is no module around it
            self.leaky[leaf.module] = "returns its own input, as the data will have it"

    def check(self, *used: Any) -> None:
        """Note which of the tensors should not be known here."""
        for storage in filter(None, map(storage_of, tensor_leaves(*used) if self.follows else ())):
            maker, _ = self.makers.get(storage._cdata, (self.leaf, None))
            if maker != self.leaf and storage._cdata not in self.given:
                for leaf in filter(None, (maker, self.leaf)):
                    self.leaky.setdefault(leaf, "shares tensors with other modules by other ways than arguments")

    def _note(self, made: Any) -> None:
        for storage in filter(None, map(storage_of, tensor_leaves(made) if self.follows else ())):
            self.makers.setdefault(storage._cdata, (self.leaf, StorageWeakRef(storage)))

    # -- verdicts ------------------------------------------------------------------------------------------

    def raise_if_leaky(self) -> None:
        """Raise OpaqueError if a leaf does what it must not."""
        if self.leaky:
            found = "; ".join(f"{leaf} {why}" for leaf, why in self.leaky.items())
            raise OpaqueError(
                f"what cannot be traced leaves the modules that would hide it: {found}. Pass tensors as arguments and "
                "results (or in tuples, lists and dicts of these), or optimize the submodules around it instead",
                self.leaky,
            )

    def raise_if_unfaithful(self) -> None:
        """Raise OpaqueError if the trace is not the whole truth."""
        self.raise_if_leaky()
        if self.hooks:
            found = "; ".join(f"{module or 'the model'} {why}" for module, why in self.hooks.items())
            raise OpaqueError(f"what no trace can hold: {found}. Optimize the model around it instead", self.hooks)
        if self.numbers:
            raise OpaqueError(
                f"the forward reads numbers out of tensors: {'; '.join(dict.fromkeys(self.numbers.values()))}. What it "
                "computes then depends on the data, and a plan for the sample input would be wrong for other "
                "data. Replace the branch or loop by tensor operations (torch.where, masks), put it into a "
                "submodule of its own, optimize the submodules around it instead, or write down what is computed "
                "with parse_graph=.",
                self.numbers,
            )
        self._look_for_python_draws("at its end")
        if self.python_draws and not self.careful:
            raise LookAgain
        if self.python_draws:
            raise OpaqueError(
                f"the forward draws {'; '.join(self.python_draws.values())}: those of the sample input would be "
                "repeated in every step. Draw them with torch, or put it into a submodule of its own.",
                self.python_draws,
            )
        if self.writes_without_grad:
            raise OpaqueError(
                "in-place operation under no_grad on a tensor that requires grad: "
                f"{next(iter(self.writes_without_grad.values()))}; make it out of place",
                {module: f"{place} under no_grad" for module, place in self.writes_without_grad.items()},
            )


def _without_false_grad(result: Any) -> Any:
    """Views made under ``no_grad`` without the ``requires_grad`` of their base, which they report but do not have."""
    if torch.is_grad_enabled():
        return result
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach() if t._is_view() and t.is_leaf else t, result)


def python_random_state() -> tuple[Any, ...]:
    """Where the random streams of Python and numpy are."""
    name, keys, *rest = numpy.random.get_state(legacy=True)
    return random.getstate(), name, numpy.asarray(keys).tobytes(), *rest


def origins(tensor: Any) -> set[str]:
    """What a traced tensor is computed from: ``prim::Param`` stands for data, ``aten::size`` for sizes."""
    if not isinstance(tensor, torch.Tensor) or not torch._C._get_tracing_state():
        return set()
    pending = [value_of(tensor)]
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
        elif kind in ("prim::Param", "ogc::leaf"):
            found.add("prim::Param")
        elif kind != "prim::Constant":
            pending.extend(inputs_of(value.node()))
    return found
