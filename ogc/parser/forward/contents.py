"""A forward on meta tensors, with the content of small tensors that follows from what is known.

Python may read numbers that depend on no parameter: positions, a mask that was given. What is made of constants and of
given tensors is computed beside, as long as it is small.
"""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import torch
from torch.fx.node import map_aggregate

from ...errors import ParseError
from ...program.program import tensor_leaves
from ...program.tensors import ByStorage
from ...torch_state.private import FakeTensor, TorchDispatchMode, schema_of
from .location import user_line

LARGEST = 4 << 20
"""Bytes up to which content is computed."""

_DECIDED_BY_DATA = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Contents(TorchDispatchMode):
    """Runs operators on meta tensors, and knows what is in some of these."""

    def __init__(self) -> None:
        super().__init__()
        self.known: ByStorage[torch.UntypedStorage] = ByStorage()  # with the content of a meta tensor's

    def meta(self, tensor: torch.Tensor) -> torch.Tensor:
        """A meta tensor laid out as a real one, whose content is known from here on; a meta tensor as it is."""
        if tensor.is_meta:
            return tensor
        detached = tensor.detach()
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        if has_content(tensor) and tensor.layout is torch.strided and _size(tensor) <= LARGEST:
            copied = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            self._bind(made, copied.copy_(detached))
        return made.requires_grad_(tensor.requires_grad)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self._on_one_device(args, kwargs or {})
        given = tensor_leaves(args, kwargs)
        is_random = torch.Tag.nondeterministic_seeded in function.tags
        is_known = not is_random and all(not t.is_meta or t.untyped_storage() in self.known for t in given)
        is_read = any(tag in function.tags for tag in _DECIDED_BY_DATA) or _leaves_meta(given, kwargs)
        if is_known and is_read:
            return self._decided(function, args, kwargs)
        try:
            result = function(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if is_read or "meta" in str(error).lower():
                raise ParseError(
                    f"{function} at {user_line()} depends on what tensors hold, and the model "
                    "is parsed without content; parse a model with content instead, or take this out of the forward"
                ) from error
            raise
        if is_known:
            self._follow(function, args, kwargs, result)
        elif getattr(schema_of(function), "is_mutable", False):
            self._forget(function, args)
        return result

    def _on_one_device(self, args: Any, kwargs: Any) -> Any:
        """Arguments with meta tensors in the places of real ones, if they are given beside meta tensors."""
        given = tensor_leaves(args, kwargs)
        if not any(t.is_meta for t in given) or all(t.is_meta or not t.dim() for t in given):
            return args, kwargs

        def on_meta(leaf: Any) -> Any:
            return self.meta(leaf) if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf

        return map_aggregate((args, kwargs), on_meta)

    def _decided(self, function: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator whose shape, or which itself, depends on data that are known."""
        real = function(*self._real(args), **self._real(kwargs))
        given = tensor_leaves(args, kwargs)
        on_meta = any(t.is_meta for t in given) and not _leaves_meta(given, kwargs)
        return map_aggregate(real, lambda x: self.meta(x) if on_meta and isinstance(x, torch.Tensor) else x)

    def _follow(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Compute what an operator made of known tensors, or wrote to them."""
        made = [t for t in tensor_leaves(result) if t.is_meta and t.untyped_storage() not in self.known]
        writes = getattr(schema_of(function), "is_mutable", False)
        if not writes and (not made or sum(map(_size, made)) > LARGEST):
            return
        real = function(*self._real(args), **self._real(kwargs))
        for ours, theirs in zip(tensor_leaves(result), tensor_leaves(real), strict=True):
            if ours.is_meta and ours.untyped_storage() not in self.known and ours.stride() == theirs.stride():
                self._bind(ours, theirs)

    def _forget(self, function: Any, args: Any) -> None:
        for argument, given in zip(schema_of(function).arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tensor_leaves(given):
                    self.known.pop(tensor.untyped_storage(), None)

    def _real(self, tree: Any) -> Any:
        def real(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                return torch.device("cpu")
            if not isinstance(leaf, torch.Tensor) or not leaf.is_meta:
                return leaf
            empty, storage = torch.empty(0, dtype=leaf.dtype, device="cpu"), self.known[leaf.untyped_storage()]
            return empty.set_(storage, leaf.storage_offset(), leaf.shape, leaf.stride())

        return map_aggregate(tree, real)

    def _bind(self, meta: torch.Tensor, real: torch.Tensor) -> None:
        storage = meta.untyped_storage()
        if real.storage_offset() or real.untyped_storage().nbytes() < storage.nbytes():
            real = real.clone(memory_format=torch.preserve_format)
        if real.stride() == meta.stride() and real.untyped_storage().nbytes() >= storage.nbytes():
            self.known[storage] = real.untyped_storage()


def _leaves_meta(given: list[torch.Tensor], kwargs: dict[str, Any]) -> bool:
    """Whether a call copies meta tensors to where Python may read them."""
    device = kwargs.get("device")
    return device is not None and torch.device(device).type != "meta" and any(t.is_meta for t in given)


def has_content(tensor: torch.Tensor) -> bool:
    """Whether a tensor is more than its shape."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def lacks_content(model: torch.nn.Module) -> bool:
    """Whether some of a model's parameters or buffers are nothing but shapes."""
    return not all(map(has_content, chain(model.parameters(), model.buffers())))


def on_meta(model: torch.nn.Module, contents: Contents) -> torch.nn.Module:
    """The model if all of it is on the meta device, or else a copy of it there."""
    state = [*model.parameters(), *model.buffers()]
    if all(tensor.is_meta for tensor in state):
        return model
    memo: dict[int, Any] = {}
    for tensor in state:
        meta, is_parameter = contents.meta(tensor), isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = torch.nn.Parameter(meta, tensor.requires_grad) if is_parameter else meta
    return copy.deepcopy(model, memo)


def _size(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()
