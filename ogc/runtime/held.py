"""What a run again starts from, as held until then: tensors without their history, and parameters as they were."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..program.tensors import Start, anchor
from ..torch_state.private import is_view, version_of

SMALL = 1 << 14
"""Bytes up to which a vector on the CPU is copied: others may write it where no version counter shows it.

Biases and the weights of norms are such: what plain models compute with and autograd need not hold.
"""

SAMPLED = 32
"""Entries of anything else that are looked at, to see that it was written so."""


class Bound:
    """A parameter, a buffer or a constant as a forward has seen it, for runs again.

    Whatever is done to the tensor until then (another ``data``, another type, ``requires_grad``), this stays.
    Autograd's own nodes hold what they hold of it in the plain model, and see the same as there.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        seen, self.sample = tensor.detach(), None
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_cpu and tensor.is_contiguous()
        if is_plain and tensor.numel():
            if tensor.dim() <= 1 and tensor.nbytes <= SMALL:
                seen = _copy(seen)
            else:
                self.sample = _copy(_sample(seen))
        if type(tensor) is torch.nn.Parameter:  # compiled code makes a difference
            self.tensor: torch.Tensor = torch.nn.Parameter(seen, tensor.requires_grad)
        else:
            self.tensor = seen.requires_grad_(tensor.requires_grad)

    def is_written(self) -> bool:
        """Whether it was seen to be written past autograd."""
        return self.sample is not None and not torch.equal(_sample(self.tensor.detach()), self.sample)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is none of the step's tensors: there may be many, and all are small; aligned as tensors are."""
    memory = np.empty(tensor.nbytes + ALIGNED, np.uint8)
    start = -memory.ctypes.data % ALIGNED
    copy = torch.from_numpy(memory[start : start + tensor.nbytes]).view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


ALIGNED = 64
"""To so many bytes, as tensors on the CPU are."""


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    count = min(SAMPLED, tensor.numel())
    return tensor.as_strided((count,), (tensor.numel() // max(1, count),))


@dataclass(frozen=True, slots=True)
class _Held:
    """A leaf, or another tensor without its history, and whether it required grad, which may have been set since."""

    tensor: torch.Tensor
    requires_grad: bool

    @property
    def is_to_start(self) -> bool:
        """Whether it is to be made differentiable."""
        return self.requires_grad and not self.tensor.requires_grad

    @property
    def is_as_it_was(self) -> bool:
        """Whether the tensor may be used as it is."""
        return self.requires_grad == self.tensor.requires_grad


def detached(value: Any, tensors: list[tuple[torch.Tensor, int]]) -> Any:
    """What to hold of a value: a leaf as it is, any other tensor without its history; adds to tensors and versions."""
    if isinstance(value, torch.Tensor):
        is_own = value.is_leaf and not is_view(value)  # a view holds on to what it is a view of
        tensor = value if is_own else value.detach()
        tensors.append((tensor, version_of(tensor)))
        return _Held(tensor, value.requires_grad)
    if isinstance(value, (list, tuple)):
        return type(value)([detached(item, tensors) for item in value])
    return value


def differentiable(held: list[Any]) -> Any:
    """The values that were held, differentiable as before."""
    starts = list(_starts(held))
    return _with(held, iter(Start.apply(anchor, *starts) if starts else ()))


def _starts(held: Any) -> Iterator[torch.Tensor]:
    """The tensors that are to be made differentiable."""
    if isinstance(held, _Held):
        if held.is_to_start:
            yield held.tensor
    elif isinstance(held, (list, tuple)):
        for item in held:
            yield from _starts(item)


def _with(held: Any, made: Iterator[torch.Tensor]) -> Any:
    """What was held, with what was made of these."""
    if isinstance(held, _Held):
        if held.is_to_start:
            return next(made)
        return held.tensor if held.is_as_it_was else held.tensor.detach()
    if isinstance(held, (list, tuple)):
        return type(held)([_with(item, made) for item in held])
    return held
