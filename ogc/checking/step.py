"""One training step of a model and everything that it gives, by name; what it changes is put back."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..program.program import losses_among, tensor_leaves
from ..program.structures import InputSpec
from ..program.tensors import copies
from ..torch_state.compare import difference, distance, identical, same_bits
from ..torch_state.no_trace import generators_of, untouched
from ..torch_state.private import pytree
from ..torch_state.settings import cuda_devices, random_states


@dataclass(frozen=True)
class Difference:
    """One thing in which the optimized model differs from the plain one.

    Attributes:
        name: what it is, for instance ``"gradient of conv.weight"``.
        distance: the largest distance between two entries; infinite where shapes or kinds differ.
        text: the difference in words.
        found_in: the comparison that it was found in, for instance ``"seed 2"`` or ``"a smaller batch"``.
    """

    name: str
    distance: float
    text: str
    found_in: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.text}" + (f" ({self.found_in})" if self.found_in else "")


Results = list[tuple[str, Any]]

LARGEST_MOVE = 0.1
"""How far an optimizer step moves a parameter: its entry of the largest gradient by this share of its largest entry."""


class Snapshot:
    """The parameters, their gradients and the buffers of some models as they are now, copied once for many steps."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self.models = models
        self.parameters = _copies(parameter for model in models for parameter in model.parameters())
        self.buffers = _copies(buffer for model in models for buffer in model.buffers())
        gradients = (parameter.grad for parameter, _ in self.parameters.values())
        self.gradients = _copies(g for g in gradients if g is not None and g.layout == torch.strided)

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy that was made, where the tensor is as it was; else a new one."""
        known = self.parameters.get(id(tensor)) or self.buffers.get(id(tensor))
        if known and known[0] is tensor and identical(*known):
            return known[1]
        return tensor.detach().clone()

    @contextmanager
    def restored(self, call: Arguments) -> Iterator[None]:
        """Whatever runs inside, the models and all random states, also those in ``call``, are afterwards as before."""
        with untouched(*self.models, given=call):
            try:
                yield
            finally:
                self._put_back()

    @torch.no_grad()
    def _put_back(self) -> None:
        for parameter, copy in self.parameters.values():
            if not identical(parameter, copy):
                parameter.copy_(copy)  # seen by version counters, as what moved it was
        for gradient, copy in self.gradients.values():
            if not identical(gradient, copy):
                gradient.data.copy_(copy)


def results_of(
    run: torch.nn.Module,
    before: Snapshot,
    call: Arguments,
    seed: int,
    after_step: bool | Results = False,
    loss_alone: bool = False,
) -> Results:
    """Everything that one forward and backward of ``run`` gives, by name; the models are afterwards as ``before``.

    With ``after_step`` it is the second step, after a first one and a step of an optimizer, or after that optimizer's
    alone by the gradients in what a first one gave; with ``loss_alone``, of all that the forward returns its loss
    counts.

    Raises:
        NotVaried: there is nothing for the optimizer to do.
    """
    with before.restored(call):
        _set_seed(seed, generators_of([run], call))
        if after_step:
            first = _step(run, before, call, seed, loss_alone) if after_step is True else after_step
            _optimizer_step(run, dict(first))
        return _step(run, before, call, seed, loss_alone)


def _copies(tensors: Iterable[torch.Tensor]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor with a copy of it, by its id."""
    return {key: (tensor, tensor.detach().clone()) for key, tensor in {id(t): t for t in tensors}.items()}


def _set_seed(seed: int, generators: Iterable[torch.Generator]) -> None:
    """Seed these, and the random states of torch, of Python and of numpy."""
    # Not torch.manual_seed: where CUDA is not in use yet, it would be seeded when that begins.
    torch.default_generator.manual_seed(seed)
    if cuda_devices():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed)
    for generator in generators:
        generator.manual_seed(seed)


def _step(run: torch.nn.Module, before: Snapshot, call: Arguments, seed: int, loss_alone: bool) -> Results:
    spec, tensors = InputSpec.of(*call)
    given = copies(tensors)
    args, kwargs = spec.rebuild(given)
    sources = _edges(
        {f"input {n}": tensor for n, tensor in enumerate(given)}
    )  # as they are now: the run may write them
    with torch.enable_grad():
        result = run(*args, **kwargs)
    if loss_alone:
        tensors = tensor_leaves(result)
        result = [tensors[n] for n in losses_among(result, tensors, [t.requires_grad for t in tensors])]
    leaves, tree = pytree.tree_flatten(result)
    outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    sources |= _edges(dict(run.named_parameters()))
    found: Results = [("structure of the output", tree)]
    found += [(f"output {number}", _detached(leaf)) for number, leaf in enumerate(leaves)]
    found += [(f"requires_grad of output {n}", tensor.requires_grad) for n, tensor in enumerate(outputs)]
    found += [(f"gradient of {name}", gradient) for name, gradient in _gradients(outputs, sources, seed).items()]
    found += [(name, before.copy_of(tensor)) for name, tensor in state(run)]
    found += [(f"input {number} after the step", tensor.detach()) for number, tensor in enumerate(given)]
    return found + _random_states(given, generators_of([run], call))


def state(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The model's buffers and parameters."""
    buffers = [(f"buffer {name}", tensor) for name, tensor in model.named_buffers()]
    return buffers + [(f"parameter {name}", tensor) for name, tensor in model.named_parameters()]


def _edges(tensors: dict[str, torch.Tensor]) -> dict[str, GradientEdge]:
    """Where the gradients of those arrive that require any."""
    return {name: get_gradient_edge(tensor) for name, tensor in tensors.items() if tensor.requires_grad}


def _gradients(
    outputs: list[torch.Tensor], sources: dict[str, GradientEdge], seed: int
) -> dict[str, torch.Tensor | None]:
    """Gradients of the sources, for random gradients of the outputs."""
    differentiable = [tensor for tensor in outputs if tensor.requires_grad]
    if not differentiable or not sources:
        return dict.fromkeys(sources)
    generator = torch.Generator().manual_seed(seed)
    upstream = [torch.randn(t.shape, generator=generator).to(t.device, t.dtype) for t in differentiable]
    gradients = torch.autograd.grad(differentiable, list(sources.values()), upstream, allow_unused=True)
    return dict(zip(sources, gradients, strict=True))


@torch.no_grad()
def _optimizer_step(model: torch.nn.Module, found: dict[str, Any]) -> None:
    """A step of gradient descent, in place, at a rate of each parameter's own.

    At one rate for all, random gradients would move some parameters into infinity, and others of few bits not at all.
    """
    moved = [(p, g) for name, p in model.named_parameters() if (g := found.get(f"gradient of {name}")) is not None]
    if not moved:
        raise NotVaried("no parameter gets a gradient")
    for parameter, gradient in moved:
        dense = _dense(gradient)
        largest = dense.abs().max() if dense.numel() else torch.zeros(())
        if 0 < largest < torch.inf:
            parameter.sub_(dense / largest * (LARGEST_MOVE * parameter.abs().max().clamp(min=LARGEST_MOVE)))


def differences(ours: Results, plain: Results, found_in: str) -> list[Difference]:
    """Where ``ours`` is not bit by bit what the plain model gave."""
    theirs, mine, missing = dict(plain), dict(ours), object()
    found = []
    for name in theirs | mine:
        a, b = mine.get(name, missing), theirs.get(name, missing)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.layout == b.layout:
            a, b = _dense(a), _dense(b)
            if a is not b and not same_bits(a, b):
                found.append(Difference(name, distance(a, b), difference(a, b), found_in))
        elif type(a) is not type(b) or isinstance(a, torch.Tensor) or (type(a).__eq__ is not object.__eq__ and a != b):
            text = f"{_described(a)} instead of {_described(b)}"
            found.append(Difference(name, float("inf"), text, found_in))
    return found


def _described(thing: Any) -> str:
    if isinstance(thing, torch.Tensor):
        return f"a {thing.layout} tensor of shape {tuple(thing.shape)}".replace("torch.strided ", "")
    return "nothing" if type(thing) is object else repr(thing)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _detached(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _random_states(tensors: list[torch.Tensor], generators: list[torch.Generator]) -> Results:
    devices = list(dict.fromkeys(tensor.device for tensor in tensors if tensor.is_cuda))
    states = map(torch.from_numpy, random_states(devices))
    found: Results = [(f"random state of {d}", state) for d, state in zip(["cpu", *devices], states, strict=True)]
    return found + [(f"state of generator {n}", generator.get_state()) for n, generator in enumerate(generators)]


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


class NotVaried(Exception):
    """No other input can be made of the given one; the message says why."""


def another_input(call: Arguments) -> Arguments:
    """Inputs of the same shapes and layouts with other values.

    Floating tensors get random values of the same mean and spread, within the limits of the given ones. Where they
    spread around zero, the mean is that of the other sign. Integers, masks, and floating tensors of whole or of
    infinite numbers are likely ids, labels or masks: those that have the batch's first dimension have their samples
    change places, all in the same way; in a batch of one the entries of the next dimension do. Others stay: they may
    point into what does not change places.

    Raises:
        NotVaried: the values are as before, as all were alike.
    """
    size, generator = _batch_size(call), torch.Generator().manual_seed(1)
    spec, tensors = InputSpec.of(*call)
    varied = [_varied(tensor, size, generator) for tensor in tensors]
    if all(map(identical, tensors, varied)):
        raise NotVaried("no other input could be made of the given one, whose samples are alike")
    return spec.rebuild(varied)


def smaller_batch(call: Arguments) -> Arguments:
    """The first half of the batch: of all tensors whose first dimension is that of the first tensor.

    Raises:
        NotVaried: there is no half, or an input on a GPU may hold positions in the batch, which could be wrong ones.
    """
    size = _batch_size(call)
    if size is None or size < 2:
        raise NotVaried("the inputs have no batch" if size is None else f"the batch has {size} sample")
    if any(_may_point(tensor, size) for tensor in tensor_leaves(call)):
        raise NotVaried("an input on the GPU may hold positions in the batch")

    def halved(tensor: torch.Tensor) -> torch.Tensor:
        if not _has_batch(tensor, size):
            return tensor
        return tensor.detach()[: size // 2].requires_grad_(tensor.requires_grad)

    spec, tensors = InputSpec.of(*call)
    return spec.rebuild([halved(tensor) for tensor in tensors])


def _batch_size(call: Arguments) -> int | None:
    return next((tensor.shape[0] for tensor in tensor_leaves(call) if tensor.dim()), None)


def _has_batch(tensor: torch.Tensor, size: int | None) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == size


def _may_point(tensor: torch.Tensor, size: int) -> bool:
    if not tensor.is_cuda or _has_batch(tensor, size) or tensor.is_floating_point() or not tensor.numel():
        return False
    return bool(tensor.max() >= size // 2)


def _varied(tensor: torch.Tensor, size: int | None, generator: torch.Generator) -> torch.Tensor:
    once = _without_repeats(tensor.detach())
    if _is_continuous(once):
        values = _random_like(once, generator)
    elif _has_batch(tensor, size):
        values = once.roll(1, next((d for d, length in enumerate(once.shape) if length > 1), 0))
    else:
        return tensor
    varied = torch.empty_strided(once.shape, once.stride(), dtype=once.dtype, device=once.device).copy_(values)
    return varied.expand(tensor.shape).requires_grad_(tensor.requires_grad)


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """An expanded tensor as it was before that."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dimension, 0, min(1, tensor.shape[dimension]))
    return tensor


def _is_continuous(tensor: torch.Tensor) -> bool:
    """Whether the values look as if those between them were as good."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    values = _real(tensor)
    return bool(values.isfinite().all()) and bool((values != values.round()).any())


def _random_like(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random values; where the given ones spread around zero, their sum has the other sign, which forwards ask for."""
    values = _real(tensor)
    low, high = values.min(), values.max()
    spread, mean = torch.std_mean(values, correction=0)
    if low < 0 < high and mean.abs() < 3 * spread / values.numel() ** 0.5:
        mean, high = -mean, values.abs().max()
        low = -high
    noise = torch.randn(values.shape, generator=generator, dtype=values.dtype).to(values.device)
    fresh = ((noise - noise.mean()) * spread + mean).clamp(low, high)
    return torch.view_as_complex(fresh) if tensor.is_complex() else fresh


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """In a type that everything can be done with."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj()).to(torch.float64)
    return tensor.to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)
