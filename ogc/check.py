"""Holds an optimized model against the plain one on the user's own data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .compare import difference, distance, same_bits
from .errors import CheckError, InputError
from .parser.observe import untouched
from .program import tensor_leaves
from .random_state import random_states


@dataclass(frozen=True)
class Difference:
    """One thing in which the optimized model differs from the plain one.

    Attributes:
        name: what it is, for instance ``"gradient of conv.weight"``.
        distance: the largest distance between two entries; infinite where shapes or kinds differ.
        text: the difference in words.
    """

    name: str
    distance: float
    text: str

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


@dataclass(frozen=True)
class CheckReport:
    """What :func:`check` found; true if nothing differs.

    Attributes:
        compared: how many tensors and other results were compared.
        differences: those that differ, in the order outputs, gradients, buffers, parameters, inputs, random state.
        is_deterministic: whether the plain model gave the same twice; it is run again only after a difference.
    """

    compared: int
    differences: tuple[Difference, ...]
    is_deterministic: bool = True

    @property
    def ok(self) -> bool:
        """Whether both models did the same."""
        return not self.differences

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.ok:
            return f"the same as the plain model: {self.compared} results compared bit by bit"
        text = f"{len(self.differences)} of {self.compared} results differ from the plain model's, first {self.first}"
        if not self.is_deterministic:
            text += (
                "; the plain model differs from itself when it is run again, "
                "so use torch.use_deterministic_algorithms(True) before comparing"
            )
        return text

    @property
    def first(self) -> Difference | None:
        """The first difference, if there is any."""
        return self.differences[0] if self.differences else None

    def raise_if_different(self) -> None:
        """Do nothing if nothing differs.

        Raises:
            CheckError: something differs; the message is the report.
        """
        if not self.ok:
            raise CheckError(str(self))


def check(model: torch.nn.Module, optimized: torch.nn.Module, *inputs: Any, **named_inputs: Any) -> CheckReport:
    """Run one forward and backward of both models from the same state and compare everything bit by bit.

    Compared are the outputs, the gradients of all parameters and of inputs that require grad, the buffers,
    parameters and inputs after the step, and the random stream. The backward starts from random gradients of the
    outputs, the same for both. Nothing is left behind: parameters, their gradients, buffers and the random
    state are afterwards as before, and the inputs are copied. The parameters' own hooks run, but none that
    wait for a gradient to be accumulated.

    Args:
        model: the plain model.
        optimized: what :func:`ogc.optimize` made of it, or any other module with the same parameters.
        inputs: positional arguments of the forward.
        named_inputs: its keyword arguments.

    Returns:
        The report: ``report.ok``, ``print(report)``, ``report.raise_if_different()``.

    Raises:
        InputError: an argument is no module, or the two have other parameters or buffers.
    """
    _check_comparable(model, optimized)
    call = (inputs, named_inputs)
    plain = _results(model, optimized, model, call)
    found = _differences(_results(model, optimized, optimized, call), plain)
    if not found:
        return CheckReport(len(plain), ())
    again = _differences(_results(model, optimized, model, call), plain)
    return CheckReport(len(plain), tuple(found), is_deterministic=not again)


def _check_comparable(model: torch.nn.Module, optimized: torch.nn.Module) -> None:
    for module in (model, optimized):
        if not isinstance(module, torch.nn.Module):
            raise InputError(f"check compares two torch.nn.Modules, not {type(module).__name__}")
    names = [{name for name, _ in _state(module)} for module in (model, optimized)]
    if names[0] != names[1]:
        stranger = min(names[0] ^ names[1])
        raise InputError(f"only one of the two models has {stranger}; they cannot be compared")


def _state(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    buffers = [(f"buffer {name}", tensor) for name, tensor in model.named_buffers()]
    return buffers + [(f"parameter {name}", tensor) for name, tensor in model.named_parameters()]


def _results(
    model: torch.nn.Module, optimized: torch.nn.Module, run: torch.nn.Module, call: Any
) -> list[tuple[str, Any]]:
    """Everything that one step of ``run`` gives, by name."""
    with _restored(model, optimized):
        args, kwargs = pytree.tree_map_only(torch.Tensor, _copy, call)
        given = tensor_leaves(args, kwargs)
        with torch.enable_grad():
            result = run(*args, **kwargs)
        leaves, tree = pytree.tree_flatten(result)
        outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        sources = {f"input {number}": tensor for number, tensor in enumerate(given)} | dict(run.named_parameters())
        found: list[tuple[str, Any]] = [("structure of the output", tree)]
        found += [(f"output {number}", _detached(leaf)) for number, leaf in enumerate(leaves)]
        found += [(f"requires_grad of output {n}", tensor.requires_grad) for n, tensor in enumerate(outputs)]
        found += [(f"gradient of {name}", gradient) for name, gradient in _gradients(outputs, sources).items()]
        found += [(name, tensor.detach().clone()) for name, tensor in _state(run)]
        found += [(f"input {number} after the step", tensor.detach()) for number, tensor in enumerate(given)]
        return found + _random_states(given)


def _gradients(outputs: list[torch.Tensor], sources: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    """Gradients of the sources that require any, for random gradients of the outputs."""
    sources = {name: tensor for name, tensor in sources.items() if tensor.requires_grad}
    differentiable = [tensor for tensor in outputs if tensor.requires_grad]
    if not differentiable or not sources:
        return dict.fromkeys(sources)
    generator = torch.Generator().manual_seed(0)
    upstream = [
        torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype) for tensor in differentiable
    ]
    gradients = torch.autograd.grad(differentiable, list(sources.values()), upstream, allow_unused=True)
    return dict(zip(sources, gradients, strict=True))


def _differences(ours: list[tuple[str, Any]], plain: list[tuple[str, Any]]) -> list[Difference]:
    theirs, mine = dict(plain), dict(ours)
    missing = object()
    found = []
    for name in dict.fromkeys(chain(theirs, mine)):
        a, b = mine.get(name, missing), theirs.get(name, missing)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            if not same_bits(a, b):
                found.append(Difference(name, distance(a, b), difference(a, b)))
        elif type(a) is not type(b) or (_has_value(a) and a != b):
            found.append(Difference(name, float("inf"), f"{_described(a)} instead of {_described(b)}"))
    return found


def _has_value(thing: Any) -> bool:
    """Whether things of this type are equal by what they hold, not by being one and the same."""
    return type(thing).__eq__ is not object.__eq__


def _described(thing: Any) -> str:
    if isinstance(thing, torch.Tensor):
        return f"a tensor of shape {tuple(thing.shape)}"
    return "nothing" if type(thing) is object else repr(thing)


def _detached(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor elsewhere in memory, strides and all; an argument of its own for autograd."""
    storage = tensor.untyped_storage().clone()
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    copy.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    return copy.requires_grad_(tensor.requires_grad)


def _random_states(tensors: list[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    devices = list(dict.fromkeys(tensor.device for tensor in tensors if tensor.is_cuda))
    states = map(torch.from_numpy, random_states(devices))
    return [(f"random state of {d}", state) for d, state in zip(["cpu", *devices], states, strict=True)]


@contextmanager
def _restored(*models: torch.nn.Module) -> Iterator[None]:
    """Whatever runs inside, both models' state and all random states are afterwards as before."""
    parameters = {p: p.detach().clone() for model in models for p in model.parameters()}
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(untouched(model))
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, before in parameters.items():
                    if not torch.equal(parameter, before):
                        parameter.copy_(before)
