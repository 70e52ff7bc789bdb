"""LSTM, GRU and plain recurrent layers on CUDA, where cuDNN runs all layers and steps as one.

What autograd saves is PyTorch's: tools/autograd/derivatives.yaml, ``_cudnn_rnn``. How many bytes cuDNN reserves and
works with, it does not state; counted is what the equations need: in the reserve, of each layer, direction and step,
gates, cell and hidden state, between layers a mask of dropout; as workspace, the gates of one layer. The buffer of
weights is the parameters' own, as ``flatten_parameters`` leaves them. Not measured on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .gpus import CudaKernel, Gpu


@dataclass(frozen=True)
class Kind:
    """A kind of recurrent layer.

    Attributes:
        gates: how many there are.
        kept: values of the size of the hidden state that the backward needs of a step.
        has_cell: whether its state is two tensors.
    """

    gates: int
    kept: int
    has_cell: bool = False


LSTM = Kind(gates=4, kept=6, has_cell=True)  # gates, cell, hidden state
GRU = Kind(gates=3, kept=5)  # gates, the new gate's recurrent part, hidden state
PLAIN = Kind(gates=1, kept=1)


@dataclass(frozen=True)
class Layers:
    """A call of recurrent layers: what does not depend on its tensors."""

    kind: Kind
    has_biases: bool
    layers: int
    dropout: float
    train: bool
    directions: int
    batch_first: bool
    is_packed: bool


def recurrent_on_cuda(kind: Kind, is_packed: bool) -> Callable[[Sequence[Any], dict[str, Any], Gpu], CudaKernel | None]:
    """The rule of an operator's overload."""

    def rule(args: Sequence[Any], kwargs: dict[str, Any], gpu: Gpu) -> CudaKernel | None:
        if not torch.backends.cudnn.enabled or kwargs:
            return None
        return CudaKernel(partial(_run, kind, is_packed), is_of_operators=False)

    return rule


def _run(kind: Kind, is_packed: bool, *args: Any) -> tuple[torch.Tensor, ...]:
    """The results of a call, without their content."""
    data, rest = args[0], args[2:] if is_packed else args[1:]
    state, weights, has_biases, layers, dropout, train, bidirectional, *order = rest
    settings = Layers(kind, has_biases, layers, dropout, train, 1 + bidirectional, bool(order and order[0]), is_packed)
    states = list(state) if kind.has_cell else [state]
    result: tuple[torch.Tensor, ...] = _Recurrent.apply(settings, data, *states, *weights)
    return result


class _Recurrent(torch.autograd.Function):
    """Allocates, saves and multiplies as cuDNN's kernels do, and gives results without content."""

    @staticmethod
    def forward(ctx: Any, settings: Layers, data: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = 1 + settings.kind.has_cell
        states, weights = rest[:count], rest[count:]
        steps = _by_steps(settings, data)
        pairs = _pairs(settings, weights)
        rows = steps.numel() // steps.shape[-1]
        for of_input, of_state in pairs:
            for weight in (of_input, of_state):
                data.new_empty((rows, weight.shape[1])) @ weight.t()
        output = data.new_empty((*steps.shape[:-1], pairs[0][1].shape[1] * settings.directions))
        reserve = data.new_empty(_reserved(settings, rows, pairs[0][0], data), dtype=torch.uint8)
        ctx.settings, ctx.count = settings, count
        ctx.save_for_backward(data, *states, *weights, output, reserve)
        if settings.batch_first and not settings.is_packed:
            output = output.transpose(0, 1)
        return output, *map(torch.empty_like, states)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        settings, count = ctx.settings, ctx.count
        data, *rest = ctx.saved_tensors
        states, weights = rest[:count], rest[count:-2]
        steps = _by_steps(settings, data)
        rows = steps.numel() // steps.shape[-1]
        for of_input, of_state in _pairs(settings, weights):
            gates = data.new_empty((rows, of_input.shape[0]))
            for weight in (of_input, of_state):
                gates @ weight
        buffer = data.new_zeros(sum(weight.numel() for weight in weights))  # one for the gradients of all weights
        for pair in _pairs(settings, weights):
            for weight in pair:
                data.new_empty((weight.shape[0], rows)).mm(data.new_empty((rows, weight.shape[1])))
        parts = buffer.split([weight.numel() for weight in weights])
        found = [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]
        return None, torch.empty_like(data), *map(torch.empty_like, states), *found


def _by_steps(settings: Layers, data: torch.Tensor) -> torch.Tensor:
    """The input as cuDNN takes it: step by step, contiguous."""
    is_turned = settings.batch_first and not settings.is_packed
    return (data.transpose(0, 1) if is_turned else data).contiguous()


def _pairs(settings: Layers, weights: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The weights of input and hidden state of each layer and direction."""
    number = len(weights) // (settings.layers * settings.directions)
    return [(weights[first], weights[first + 1]) for first in range(0, len(weights), number)]


def _reserved(settings: Layers, rows: int, of_input: torch.Tensor, data: torch.Tensor) -> int:
    """Bytes from the forward to the backward, for so many rows: each a step of a sample."""
    if not settings.train:
        return 0
    each = rows * of_input.shape[0] // settings.kind.gates * settings.directions
    masks = each * (settings.layers - 1) if settings.dropout else 0
    return settings.kind.kept * each * settings.layers * data.element_size() + masks
