"""Whether data decide the sizes of an operator's results: seen by a call without content, whatever the operator.

What runs on meta tensors makes sizes of shapes alone. Of what does not, fake tensors tell: sizes that content decides
are symbols there. An operator without a kernel for either is tried on other contents.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from ...program.program import tensor_leaves
from ...torch_state.dispatch import Call, unseen
from ...torch_state.private import FakeTensorMode, log_of_fakes, pytree
from ...torch_state.random_state import cuda_devices, random_states, set_random_states
from ...torch_state.reads import call_unseen

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
