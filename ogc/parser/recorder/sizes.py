"""Whether data decide the sizes of an operator's results: seen by a call without content, whatever the operator.

What runs on meta tensors makes sizes of shapes alone. Of what does not, fake tensors tell: sizes that content decides are
symbols there. An operator without a kernel for either is tried on other contents.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from ...program.program import tensor_leaves
from ...torch_state.dispatch import Call, unseen
from ...torch_state.private import FakeTensorMode, pytree
from ...torch_state.random_state import cuda_devices, random_states, set_random_states

KINDS = 10_000
"""Of how many kinds of calls it is remembered."""

_known: dict[Any, bool] = {}


def content_decides(call: Call) -> bool:
    """Whether the shapes of the results depend on what the tensors hold that an operator is given."""
    kind = call.operator, _kind(call.args), _kind(call.kwargs)
    known = _known.get(kind)
    if known is None:
        if len(_known) >= KINDS:
            _known.clear()
        with unseen(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            known = _known[kind] = _found(call)
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


def _found(call: Call) -> bool:
    given = tensor_leaves(call.args, call.kwargs)
    if not given or any(isinstance(one, torch.UntypedStorage) for one in call.args):
        return False
    if torch.Tag.dynamic_output_shape not in call.operator.tags and _runs_without_content(call):
        return False
    found = _found_by_symbols(call)
    return any(_tried(call, place) for place in range(len(given))) if found is None else found


def _runs_without_content(call: Call) -> bool:
    with suppress(Exception):  # whatever it is, it does not tell
        _run(call, lambda place, tensor: _empty_like(tensor, "meta"))
        return True
    return False


def _found_by_symbols(call: Call) -> bool | None:
    """None if there is no telling."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv  # which takes long

    with FakeTensorMode(shape_env=ShapeEnv()):
        try:
            results = _run(call, lambda place, tensor: _empty_like(tensor, "cpu"))
        except GuardOnDataDependentSymNode:
            return True
        except Exception:  # there is no kernel that works so
            return None
        return any(isinstance(size, torch.SymInt) for tensor in results for size in tensor.shape)


def _tried(call: Call, place: int) -> bool:
    """Whether other sizes come of other content of one tensor that is given, or nothing, as its kernel refuses it."""
    devices = cuda_devices()
    states = random_states(devices)
    sizes = []
    for change in (torch.clone, *_CHANGES):
        with suppress(Exception):
            results = _run(call, lambda n, tensor: _changed(tensor, change if n == place else torch.clone))
            sizes.append([tuple(tensor.shape) for tensor in results])
    set_random_states(states, devices)
    return len(sizes) < 2 or any(one != sizes[0] for one in sizes)


_CHANGES: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    torch.zeros_like,
    lambda tensor: ~tensor if tensor.dtype is torch.bool else -tensor if tensor.is_floating_point() else tensor * 0,
    lambda tensor: tensor[:1].expand_as(tensor) if tensor.dim() else tensor,
)
"""Other contents: indices stay such as there are, or become 0, as others may lead out of bounds."""


def _changed(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return change(tensor.detach()) if tensor.layout is not torch.strided else tensor.detach().clone().copy_(change(tensor))


def _run(call: Call, change: Callable[[int, torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """The results of a call that is given other tensors, made of the place and the content of each."""
    places = iter(range(len(tensor_leaves(call.args, call.kwargs))))

    def changed(given: Any) -> Any:
        return change(next(places), given) if isinstance(given, torch.Tensor) else given

    args, kwargs = pytree.tree_map(lambda x: None if isinstance(x, torch.Generator) else changed(x), (call.args, call.kwargs))
    return tensor_leaves(call.operator(*args, **kwargs))


def _empty_like(tensor: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
