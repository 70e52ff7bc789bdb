"""Products of matrices: linear layers, attention and recurrent layers.

Attention with dropout on a CPU is unfolded into the operators that PyTorch makes it of there. As one it saves nine
tensors of its own, which a plan could only keep or recompute together. Source of the sequence:
``_scaled_dot_product_attention_math`` in aten/src/ATen/native/transformers/attention.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .registry import Arguments, Operator, ones_like, register, run_for_bytes
from .weights import Use, Weights

aten = torch.ops.aten

_TYPES = (torch.float32, torch.float64)
"""Others are computed in float32."""


@dataclass(frozen=True)
class Attention:
    """What the operators that a call of attention is made of depend on, besides its arguments."""

    heads: int
    width: int
    dtype: torch.dtype
    has_boolean_mask: bool

    def __call__(
        self,
        call: Callable[..., Any],
        query: Any,
        key: Any,
        value: Any,
        mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        **_: Any,
    ) -> Any:
        """The result, made by ``call(operator, *args, **kwargs)`` for each operator in turn."""
        root = math.sqrt(1 / math.sqrt(self.width) if scale is None else scale)
        query = call(aten.mul.Scalar, query, root)
        key = call(aten.mul.Scalar, call(aten.transpose.int, key, -2, -1), root)
        scores = self._product(call, query, key)
        if is_causal:
            one = call(aten.select.int, call(aten.select.int, call(aten.detach.default, scores), 0, 0), 0, 0)
            mask = call(aten.tril.default, call(aten.ones_like.default, one, dtype=torch.bool))
        if is_causal or self.has_boolean_mask:
            zeros = call(aten.zeros_like.default, mask, dtype=self.dtype)
            mask = call(aten.masked_fill.Scalar, zeros, call(aten.logical_not.default, mask), -math.inf)
        if mask is not None:
            scores = call(aten.add.Tensor, scores, mask)
        shares = call(aten.dropout.default, call(aten._safe_softmax.default, scores, -1), dropout_p, True)
        return self._product(call, shares, value)

    def _product(self, call: Callable[..., Any], one: Any, other: Any) -> Any:
        factors = [call(aten.flatten.using_ints, factor, 0, 1) for factor in (one, other)]
        return call(aten.unflatten.int, call(aten.bmm.default, *factors), 0, [-1, self.heads])


def _unfolded(args: Arguments, kwargs: dict[str, Any]) -> Attention | None:
    if not kwargs.keys() <= {"scale", "enable_gqa"} or kwargs.get("enable_gqa", False):
        return None
    given: tuple[Any, ...] = (*args, *(None, 0.0, False)[len(args) - 3 :])
    query, key, value, mask, dropout_p, _ = given
    alike = all(t.device.type == "cpu" and t.dim() == 4 and t.dtype in _TYPES for t in (query, key, value))
    if not alike or not dropout_p or not query.shape[:2] == key.shape[:2] == value.shape[:2]:
        return None
    has_boolean_mask = mask is not None and mask.dtype == torch.bool
    return Attention(query.shape[1], query.shape[-1], query.dtype, has_boolean_mask)


def _adding_the_bias_in_place(use: Use) -> Weights:
    """A modeless call adds the bias in place; seen by a mode, it does not, if the input is not to be had as a matrix.

    The copy that is made of the input is saved, unless the weight is frozen. Source: aten/src/ATen/native/Linear.cpp.
    """
    x, weight = use.args[:2]
    if not use.weights.scratch_bytes:
        return use.weights
    copied = 0 if weight.requires_grad or x.is_contiguous() else x.numel() * x.element_size()
    return replace(use.weights, scratch_bytes=min(use.weights.scratch_bytes, copied))


def _marking_what_is_masked(use: Use) -> Weights:
    """The entries that are minus infinity are marked by a byte each, and the rows of nothing else.

    Source: aten/src/ATen/native/SoftMax.cpp.
    """
    scores, dim = use.args[:2]
    marks = scores.numel() + scores.numel() // max(1, scores.shape[dim]) + scores.element_size()
    return replace(use.weights, scratch_bytes=max(use.weights.scratch_bytes, marks))


register(
    Operator(aten.linear.default, weigh=_adding_the_bias_in_place),
    Operator(aten._safe_softmax.default, weigh=_marking_what_is_masked),
    # Kernels that compute a whole matrix or signal at once copy what they are given as it lies.
    *run_for_bytes(aten.cdist.default, aten.matrix_exp.default, aten.linalg_matrix_exp.default),
    *run_for_bytes(
        *(
            getattr(aten, f"fft_{kind}{end}").default
            for kind in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
            for end in ("", "2", "n")
        )
    ),
    Operator(
        aten.scaled_dot_product_attention.default,
        to_run_with=ones_like,
        unfolded=_unfolded,
    ),
)


def _of_the_sequence(results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Not of the last states, which are used more rarely, and without whose gradients it takes a little more.

    With the batch first, the sequence is transposed, and a gradient that is not, as is usual, is copied.
    """
    return [torch.ones_like(results[0], memory_format=torch.contiguous_format)]


# Shapes do not tell what the kernels of a single step in time take, nor how gradients of weights that all steps share
# are added up.
register(
    *(
        Operator(getattr(packet, overload), to_run_with=_of_the_sequence)
        for packet in (aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu)
        for overload in ("input", "data")
    )
)
