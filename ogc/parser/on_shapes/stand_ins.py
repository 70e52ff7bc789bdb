"""Tensors without content: fake ones for a program to run on, and real ones of their shapes for who looks at a call."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx.node import map_aggregate

from ...torch_state.private import FakeTensorMode


class Fakes:
    """Fake tensors in the places of real ones, alive as long as this is: they are told apart by their addresses.

    Attributes:
        mode: to be entered where operators make fake tensors.
    """

    def __init__(self) -> None:
        self.mode: AbstractContextManager[Any] = FakeTensorMode()
        self.held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the real one and its own, by the former's id

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake of a tensor, the same each time."""
        if id(tensor) not in self.held:
            self.held[id(tensor)] = tensor, self.mode.from_tensor(tensor)  # type: ignore[attr-defined]
        return self.held[id(tensor)][1]


def stand_ins(tree: Any, has_numbers: bool) -> Any:
    """Arguments with real tensors in the places of fake ones, whose memory is not touched: computing may read them.

    Whole numbers are zero, as they may be indices.

    Args:
        tree: nested arguments; the same tensor gets the same one.
        has_numbers: others are such as computing takes its usual time with, or else whatever memory holds.
    """
    known: dict[int, torch.Tensor] = {}

    def stand_in(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in known:
            known[id(leaf)] = _stand_in(leaf, has_numbers)
        return known[id(leaf)]

    return map_aggregate(tree, stand_in)


def _stand_in(fake: torch.Tensor, has_numbers: bool) -> torch.Tensor:
    made = untouched_memory(fake)
    if not (fake.is_floating_point() or fake.is_complex()):
        made.zero_()
    elif has_numbers:
        made.uniform_(-1, 1, generator=torch.Generator(fake.device).manual_seed(0))
    return made.requires_grad_(fake.requires_grad)


def untouched_memory(like: torch.Tensor) -> torch.Tensor:
    """A tensor laid out as another, on its device.

    Not by ``torch.empty``, which fills memory where algorithms are to be deterministic.
    """
    size = like.untyped_storage().nbytes()
    empty = torch.empty(0, dtype=like.dtype, device=like.device)
    storage = torch.UntypedStorage(size, device=like.device)
    return empty.set_(storage, like.storage_offset(), like.shape, like.stride())
