"""Operators of aten: other names, those recorded in parts, those whose results' sizes data decide.

The latter is seen by a call without content. What runs on meta tensors makes sizes of shapes alone; of others fake
tensors tell, where such sizes are symbols. An operator without a kernel for either is tried on other contents.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from ...program.program import operator_name, tensor_leaves
from ...torch_state.dispatch import Call, unseen
from ...torch_state.private import FakeTensorMode, OpOverload, log_of_fakes, overload_name, pytree
from ...torch_state.reads import call_unseen
from ...torch_state.settings import cuda_devices, random_states, set_random_states

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


# -- sizes that data decide ------------------------------------------------------------------------------


KINDS = 10_000
"""Of how many kinds of calls it is remembered."""


class Sizes(NamedTuple):
    """Of the results of a kind of calls."""

    are_decided: bool  # by what the tensors hold that are given
    are_tried: bool  # on other contents alone


_known: dict[Any, Sizes] = {}


def sizes_of(call: Call, results: list[torch.Tensor]) -> Sizes:
    """Whether the shapes of a call's results depend on data."""
    kind = call.operator, _kind(call.args), _kind(call.kwargs)
    known = _known.get(kind)
    if known is None:
        if len(_known) >= KINDS:
            _known.clear()
        with call_unseen(), unseen(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            known = _known[kind] = _found(call, results)
    return known


def _kind(given: Any) -> Any:
    """Equal for arguments of which the same is true."""
    if isinstance(given, torch.Tensor):
        return given.dtype, given.dim(), given.layout, given.numel() > 0
    if isinstance(given, (tuple, list)):
        return tuple(map(_kind, given))
    if isinstance(given, dict):
        return tuple((key, _kind(item)) for key, item in given.items())
    is_exact = given is None or isinstance(given, (bool, int, str, torch.dtype))
    return (type(given), given) if is_exact else type(given)


def _found(call: Call, results: list[torch.Tensor]) -> Sizes:
    given = tensor_leaves(call.args, call.kwargs)
    if not given or any(isinstance(one, torch.UntypedStorage) for one in call.args):
        return Sizes(False, False)
    without = None if torch.Tag.dynamic_output_shape in call.operator.tags else _shapes_without_content(call)
    if without is not None and (call.operator.namespace == "aten" or without == _shapes(results)):
        return Sizes(False, False)
    found = _found_by_symbols(call) if without is None else None  # or else its kernel for them is wrong
    if found is not None:
        return Sizes(found, False)
    return Sizes(any(_differ_by_trying(call, place) for place in range(len(given))), True)


def _shapes_without_content(call: Call) -> list[tuple[int, ...]] | None:
    with suppress(Exception):  # there is no kernel that works so
        return _shapes(_run(call, lambda place, tensor: _empty_like(tensor, "meta")))
    return None


def _shapes(tensors: list[torch.Tensor]) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors]


def _found_by_symbols(call: Call) -> bool | None:
    """None if there is no telling."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv  # which takes long

    with FakeTensorMode(shape_env=ShapeEnv()):
        before, log_of_fakes.disabled = log_of_fakes.disabled, True
        try:
            results = _run(call, lambda place, tensor: _empty_like(tensor, "cpu"))
        except GuardOnDataDependentSymNode:
            return True
        except Exception:  # there is no kernel that works so
            return None
        finally:
            log_of_fakes.disabled = before
        return any(isinstance(size, torch.SymInt) for tensor in results for size in tensor.shape)


def _differ_by_trying(call: Call, place: int) -> bool:
    """Whether other sizes come of other content of one tensor that is given, or nothing, as its kernel refuses it."""
    sizes = []
    states = random_states(devices := cuda_devices())
    try:
        for change in (torch.clone, *_CHANGES):
            changes = {place: change}
            with suppress(Exception):
                sizes.append(_shapes(_run(call, partial(_changed, changes))))
    finally:
        set_random_states(states, devices)
    return len(sizes) < 2 or any(one != sizes[0] for one in sizes)


_CHANGES: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    torch.zeros_like,
    lambda tensor: ~tensor if tensor.dtype is torch.bool else -tensor if tensor.is_floating_point() else tensor * 0,
    lambda tensor: tensor[:1].expand_as(tensor) if tensor.dim() else tensor,
)
"""Other contents: indices stay such as there are, or become 0, as others may lead out of bounds."""


def _changed(
    changes: dict[int, Callable[[torch.Tensor], torch.Tensor]], place: int, tensor: torch.Tensor
) -> torch.Tensor:
    """A copy of what is given at a place, with its content changed."""
    copy = tensor.detach().clone()
    is_dense = tensor.layout is torch.strided
    return copy.copy_(changes[place](copy.clone())) if is_dense and place in changes else copy


def _run(call: Call, change: Callable[[int, torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """The results of a call that is given other tensors, made of the place and the content of each."""
    places = iter(range(len(tensor_leaves(call.args, call.kwargs))))

    def changed(given: Any) -> Any:
        return change(next(places), given) if isinstance(given, torch.Tensor) else given

    args, kwargs = pytree.tree_map(
        lambda x: None if isinstance(x, torch.Generator) else changed(x), (call.args, call.kwargs)
    )
    return tensor_leaves(call.operator(*args, **kwargs))


def _empty_like(tensor: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
