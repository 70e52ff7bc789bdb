"""What CUDA runs in the place of operators, on meta tensors: what results look like, what autograd saves, and what
kernels allocate underneath the dispatcher, in the forward and in the backward.

Sources, in aten/src/ATen/native: Normalization.cpp (``_select_batch_norm_backend``), Dropout.cpp
(``is_fused_kernel_acceptable``), layer_norm.cpp (``rms_norm_symint``), cuda/layer_norm_kernel.cu, cuda/Activation.cpp
(``log_sigmoid_forward``). Tests hold meta tensors against fake ones on CUDA. The sums of rows and the gradient of an
embedding were measured on an H200.

cuDNN runs all layers and steps of recurrent layers as one. What autograd saves is PyTorch's
(tools/autograd/derivatives.yaml, ``_cudnn_rnn``); what cuDNN reserves is not documented. Counted is what the equations
need: gates, cell and hidden state of each layer, direction and step, a mask of dropout between layers, the gates of one
layer as workspace. The buffer of weights is the parameters' own. Not measured on CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from ...operators.gpus import Gpu, gpu_of_meta, meta_stands_for
from ...operators.normalization import cudnn_normalizes
from ...torch_state.private import composed
from . import CudaKernel
from .attention import Attention, attention_on_cuda, of_efficient, of_flash
from .autocast import autocast_of_cuda

aten = torch.ops.aten

Rule = Callable[[Sequence[Any], dict[str, Any], Gpu], CudaKernel | None]
"""The kernel for a call's arguments; None where it is what PyTorch makes of the operator for tensors on CUDA."""


@contextmanager
def as_on_cuda(gpu: Gpu | None, is_recorded: bool = True, casts: bool = False) -> Iterator[None]:
    """Inside, on this thread, operators on meta tensors are those of a GPU, if one is given.

    Where what is called ``is_recorded``, only those made of PyTorch's own operators. With ``casts`` autocast is CUDA's,
    too, be it on for the CPU.
    """
    with ExitStack() as stack:
        if gpu is not None:
            _install()
        if casts:
            stack.enter_context(autocast_of_cuda())
        stack.enter_context(meta_stands_for(gpu, is_recorded))
        yield


class Rules:
    """What a GPU runs, and allocates underneath the dispatcher, told without running it."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def kernel(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> CudaKernel | None:
        """What it runs in the place of an operator, if that is another."""
        return KERNELS[target](args, kwargs, self.gpu) if target in KERNELS else None

    def hidden(self, target: Any, args: Sequence[Any]) -> tuple[int, int]:
        """Bytes that an operator's kernels allocate unseen in the forward and in the backward."""
        return hidden_in_forward_and_backward(target, args)

    def hidden_in_sums(self, function: Any, args: Sequence[Any], results: list[torch.Tensor]) -> int:
        """Bytes that an operator allocates unseen if it is a sum."""
        return hidden_in_sums(function, args, self.gpu)


@cache
def _install() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    for target, rule in KERNELS.items():
        library.impl(target, partial(_run, target, rule), "AutogradMeta")
    return library  # which takes the functions back when it is let go


def _run(target: Any, rule: Rule, *args: Any, **kwargs: Any) -> Any:
    gpu, is_recorded = gpu_of_meta()
    kernel = None if gpu is None else rule(args, kwargs, gpu)
    if kernel is None or (is_recorded and not kernel.is_of_operators):
        return composed(target, *args, **kwargs)
    return kernel.run(*args, **kwargs)


def batch_norm_on_cuda(args: Sequence[Any], kwargs: dict[str, Any], gpu: Gpu) -> CudaKernel | None:
    """cuDNN's, which keeps a reserve besides: empty but in channels_last, whose bytes are not documented."""
    return CudaKernel(_cudnn_batch_norm, is_of_operators=False) if cudnn_normalizes(*args[:8]) else None


def _cudnn_batch_norm(*args: Any) -> torch.Tensor:
    result: torch.Tensor = aten.cudnn_batch_norm.default(*args[:8])[0]
    return result


def dropout_on_cuda(args: Sequence[Any], kwargs: dict[str, Any], gpu: Gpu) -> CudaKernel | None:
    """One kernel with a mask of a byte for each entry."""
    x, p, train = args
    return CudaKernel(_native_dropout, is_of_operators=False) if train and 0 < p < 1 and x.numel() else None


def _native_dropout(*args: Any) -> torch.Tensor:
    result: torch.Tensor = aten.native_dropout.default(*args)[0]
    return result


def rms_norm_on_cuda(args: Sequence[Any], kwargs: dict[str, Any], gpu: Gpu) -> CudaKernel | None:
    """One kernel that keeps what it divided each row by."""
    x, _, weight, *_ = (*args, None)
    is_composite = x.is_complex() or (weight is not None and weight.dtype != x.dtype) or _has_channels_last(x)
    return None if is_composite else CudaKernel(_rms_norm, is_of_operators=False)


def _has_channels_last(x: torch.Tensor) -> bool:
    variants = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.dim() in variants and x.is_contiguous(memory_format=variants[x.dim()]) and not x.is_contiguous()


def _rms_norm(x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, eps: Any = None) -> Any:
    return _RmsNorm.apply(x, weight, len(shape))


class _RmsNorm(torch.autograd.Function):
    """Allocates and saves as the kernels do, and gives results without content."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, dims: int) -> torch.Tensor:
        rows = (*x.shape[: x.dim() - dims], *(1,) * dims)
        ctx.save_for_backward(x, x.new_empty(rows, dtype=torch.promote_types(x.dtype, torch.float32)), weight)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, _, weight = ctx.saved_tensors
        gradient.contiguous()
        wanted = ctx.needs_input_grad
        return torch.empty_like(x) if wanted[0] else None, torch.empty_like(weight) if wanted[1] else None, None


def log_sigmoid_on_cuda(args: Sequence[Any], kwargs: dict[str, Any], gpu: Gpu) -> CudaKernel:
    """A kernel that keeps nothing for the backward but its input."""
    return CudaKernel(_LogSigmoid.apply, is_of_operators=False)


class _LogSigmoid(torch.autograd.Function):
    """Allocates and saves as the kernels do, and gives results without content."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(gradient)


@dataclass(frozen=True)
class Kind:
    """A kind of recurrent layer: its gates, the values of the hidden state's size that a step's backward needs, its
    states.
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
        return CudaKernel(partial(_run_recurrent, kind, is_packed), is_of_operators=False)

    return rule


def _run_recurrent(kind: Kind, is_packed: bool, *args: Any) -> tuple[torch.Tensor, ...]:
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


KERNELS: dict[Any, Rule] = {
    aten.batch_norm.default: batch_norm_on_cuda,
    aten.dropout.default: dropout_on_cuda,
    aten.log_sigmoid.default: log_sigmoid_on_cuda,
    aten.rms_norm.default: rms_norm_on_cuda,
    aten.scaled_dot_product_attention.default: attention_on_cuda,
    **{
        getattr(packet, overload): recurrent_on_cuda(kind, is_packed=overload == "data")
        for packet, kind in ((aten.lstm, LSTM), (aten.gru, GRU), (aten.rnn_tanh, PLAIN), (aten.rnn_relu, PLAIN))
        for overload in ("input", "data")
    },
}
"""The rules of operators of which CUDA runs others than PyTorch makes of them for meta tensors."""


# -- what kernels allocate unseen ----------------------------------------------------------------------


def of_group_norm(args: Sequence[Any]) -> tuple[int, int]:
    """Factors and sums for each sample and channel. Source: aten/src/ATen/native/cuda/group_norm_kernel.cu."""
    x, groups, weight, *_ = (*args, None)
    samples, channels, *places = x.shape
    if x.numel() == samples * channels or not places:
        return 0, 0
    each = samples * channels * torch.promote_types(x.dtype, torch.float32).itemsize
    of_groups = 2 * each * groups // channels
    return 2 * each, (3 if weight is not None else 2) * each + of_groups


SMALL_LOOKUP = 3072
"""Indices up to which the gradient of an embedding is added up without sorting them."""

_SEGMENT = 10
"""Rows that one thread adds up of an embedding's gradient."""


def of_embedding(args: Sequence[Any]) -> tuple[int, int]:
    """Sorted indices, their places, and sums of rows: at most, as it depends on the indices.

    Sources: aten/src/ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu.
    """
    weight, indices, *_ = args
    number = indices.numel()
    if number <= SMALL_LOOKUP:
        return 0, 0
    segments = min(number, weight.shape[0])
    parts = number // _SEGMENT + segments
    sums = parts * weight.shape[1] * torch.promote_types(weight.dtype, torch.float32).itemsize
    return 0, indices.element_size() * (2 * number + 3 * segments + parts) + sums


_MOST_THREADS, _WARP = 512, 32
"""Of a block, and that work in step."""

_VALUES = 16, 256
"""The fewest that a thread adds up where blocks share a sum, and from which on they do."""


def of_sum(args: Sequence[Any], gpu: Gpu) -> int:
    """Partial sums of blocks that share those of a matrix's columns, such as a bias's gradient; else nothing.

    For 8192 rows of 3072, an H200 takes 132 MiB, more than the matrix. Source: aten/src/ATen/native/cuda/Reduce.cuh.
    """
    x, dims, *_ = args
    first = sorted(dim % x.dim() for dim in dims or ()) if x.dim() else []
    rows = math.prod(x.shape[: len(first)])
    if first != list(range(len(first))) or not x.is_contiguous() or not 0 < rows < x.numel():
        return 0
    columns = x.numel() // rows
    vector = math.gcd(columns, 4)
    most = _MOST_THREADS // vector
    width, height = (min(most, 2 ** (size.bit_length() - 1)) for size in (columns // vector, rows))
    height = min(height, most // min(width, _WARP))
    width = min(width, most // height)
    fewest, shared_from = _VALUES
    if rows < min(fewest * height, shared_from):
        return 0
    values, grid = -(-rows // height), -(-columns // vector // width)
    blocks_at_once = gpu.processors * (gpu.threads // (width * height))
    if values < shared_from or grid > blocks_at_once:
        return 0
    blocks = max(min(-(-blocks_at_once // grid), -(-values // fewest)), -(-values // shared_from))
    added_up_in = torch.promote_types(x.dtype, torch.float32)
    return columns * blocks * width * vector * added_up_in.itemsize if blocks > 1 else 0


def hidden_in_forward_and_backward(target: Any, args: Sequence[Any]) -> tuple[int, int]:
    """Bytes that the kernels of a call, and of its backward, allocate unseen."""
    return _BY_CALL[target](args) if target in _BY_CALL else (0, 0)


_BY_CALL: dict[Any, Callable[[Sequence[Any]], tuple[int, int]]] = {
    aten.embedding.default: of_embedding,
    aten.group_norm.default: of_group_norm,
}


def hidden_in_sums(function: Any, args: Sequence[Any], gpu: Gpu | None) -> int:
    """Bytes that an operator allocates unseen if it is a sum."""
    return of_sum(args, gpu) if gpu is not None and function is aten.sum.dim_IntList else 0


def hidden_in_backward(function: Any, args: Sequence[Any], gpu: Gpu | None) -> int:
    """Bytes that an operator of a backward allocates unseen, by its own arguments."""
    if gpu is None or function not in _IN_BACKWARD:
        return 0
    return _IN_BACKWARD[function](args, gpu)


def _embedding_backward(args: Sequence[Any], gpu: Gpu) -> int:
    gradient, indices, rows, *_ = args
    return of_embedding((gradient.new_empty((rows, gradient.shape[-1]), device="meta"), indices))[1]


def _group_norm_backward(args: Sequence[Any], gpu: Gpu) -> int:
    _, x, _, _, weight, _, _, _, groups, _ = args
    return of_group_norm((x, groups, weight))[1]


def _flash_backward(args: Sequence[Any], gpu: Gpu) -> int:
    _, query, key, value, _, _, _, _, _, _, dropout_p, is_causal, *_ = args
    return of_flash(Attention(query, key, value, None, dropout_p, is_causal))


def _efficient_backward(args: Sequence[Any], gpu: Gpu) -> int:
    _, query, key, value, mask, _, _, _, _, dropout_p, _, is_causal, *_ = (*args, False)
    return of_efficient(Attention(query, key, value, mask, dropout_p, is_causal), gpu)


_IN_BACKWARD: dict[Any, Callable[[Sequence[Any], Gpu], int]] = {
    aten.sum.dim_IntList: of_sum,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
}
