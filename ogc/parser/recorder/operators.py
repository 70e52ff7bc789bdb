"""Operators of aten: other names, those recorded in parts, those that tell Python what tensors hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from ...program.program import operator_name, tensor_leaves
from ...torch_state.dispatch import Call
from ...torch_state.private import OpOverload, overload_name

_OTHER_NAMES = {
    "absolute": "abs", "arccos": "acos", "arccosh": "acosh", "arcsin": "asin", "arcsinh": "asinh", "arctan": "atan",
    "arctan2": "atan2", "arctanh": "atanh", "clip": "clamp", "concat": "cat", "concatenate": "cat", "divide": "div",
    "fix": "trunc", "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "moveaxis": "movedim",
    "multiply": "mul", "negative": "neg", "not_equal": "ne", "special_expit": "sigmoid", "subtract": "sub",
    "true_divide": "div",
}  # fmt: skip
SAME_OPERATOR = {f"{name}{end}": f"{usual}{end}" for name, usual in _OTHER_NAMES.items() for end in ("", "_")}
"""By what name operators are known here that have several."""

OPENED = {
    *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)), "_convolution", "_convolution_mode",
    "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
}  # fmt: skip
"""Operators that are recorded as the operators that they are made of: ``aten::convolution`` and its like."""

_ABOUT_TENSORS = {
    "_fused_sdp_choice", "_has_compatible_shallow_copy_type", "_has_same_storage_numel", "_nested_tensor_size",
    "_use_cudnn_ctc_loss", "_version", "can_cast", "is_complex", "is_conj", "is_contiguous", "is_floating_point",
    "is_inference", "is_leaf", "is_neg", "is_non_overlapping_and_dense", "is_pinned", "is_same_size", "is_set_to",
    "is_signed", "is_strides_like_format", "numel", "output_nr", "promote_types", "result_type", "retains_grad",
    "size", "storage_offset", "stride", "sym_is_contiguous", "sym_numel", "sym_size", "sym_storage_offset",
    "sym_stride",
}  # fmt: skip


def tells_content(operator: OpOverload) -> bool:
    """Whether numbers that the operator returns depend on what tensors hold."""
    return operator.namespace != "aten" or operator_name(operator) not in _ABOUT_TENSORS


@cache
def usual_name(operator: OpOverload) -> OpOverload:
    """The overload of the same operator by the name that it is known by here."""
    name = operator_name(operator)
    if operator.namespace != "aten" or name not in SAME_OPERATOR:
        return operator
    usual: OpOverload = getattr(getattr(torch.ops.aten, SAME_OPERATOR[name]), overload_name(operator))
    return usual


PACKED = {"_pack_padded_sequence", "_pad_packed_sequence", "gru", "lstm", "rnn_tanh", "rnn_relu"}
"""Operators whose second argument says how long the sequences of a batch are; of recurrent layers, those packed."""

_DECIDED_BY: dict[str, Callable[[Sequence[Any]], list[Any]]] = {
    "index": lambda args: [one for one in args[1] if one is not None and one.dtype in (torch.bool, torch.uint8)],
    "bincount": lambda args: [args[0]],
    "repeat_interleave": lambda args: tensor_leaves(args[:2])[-1:],
    **dict.fromkeys(("masked_select", "tensor_split", *PACKED), lambda args: [args[1]]),
}


def deciding(call: Call) -> list[torch.Tensor]:
    """The tensors whose content decides on the shape of the result, which that of some does."""
    known = _DECIDED_BY.get(operator_name(call.operator)) if call.operator.namespace == "aten" else None
    return tensor_leaves(call.args, call.kwargs) if known is None else known(call.args)
