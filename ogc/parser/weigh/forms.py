"""The low-memory forms of a program's operations, and what each saves, seen on tensors without data."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import map_aggregate

from ...operators.registry import low_memory_form
from ...operators.weights import Place
from ...program.program import storage_bytes, tensor_leaves
from ..forward.flat import saving
from .calls import call_key
from .record import Record, SeenForm, alike, saved_at


class Forms:
    """Finds the forms of operations on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seen: dict[Any, tuple[tuple[Place | None, ...], int]] = {}

    def of(self, record: Record, args: Any, kwargs: Any) -> SeenForm | None:
        """The form of a recorded call, if it has one that pays for these arguments."""
        form = low_memory_form(record.node.target, self.device)
        if form is None or not form.pays(*args):
            return None
        key = call_key(form, args, kwargs)
        if key not in self.seen:
            self.seen[key] = saved_places(form, args, kwargs, record.in_place)
        places, internal_bytes = self.seen[key]
        return SeenForm(form, saved_at(record, places), internal_bytes)


def saved_places(
    target: Any, args: Any, kwargs: Any, in_place: bool, device: torch.device | str = "meta"
) -> tuple[tuple[Place | None, ...], int]:
    """Where each saved tensor of a call on a device lies, None for one of its own, and the bytes of those."""
    saved: list[torch.Tensor] = []
    with torch.enable_grad(), saving(saved):
        given = map_aggregate((args, kwargs), lambda leaf: pretended(leaf, in_place, device))
        result = target(*given[0], **given[1])
    known = [(t, (True, n)) for n, t in enumerate(tensor_leaves(result))]
    known += [(t, (False, n)) for n, t in enumerate(tensor_leaves(given))]
    places = tuple(alike(tensor, known) for tensor in saved)
    return places, storage_bytes(tensor for tensor, place in zip(saved, places, strict=True) if place is None)


def pretended(leaf: Any, in_place: bool, device: torch.device | str = "meta") -> Any:
    """An argument as it is on another device."""
    if not isinstance(leaf, torch.Tensor):
        return torch.device(device) if isinstance(leaf, torch.device) else leaf
    shadow = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)
    shadow.requires_grad_(leaf.requires_grad)
    # A leaf could not be written in place.
    return shadow.clone() if in_place and leaf.requires_grad else shadow
