"""Whether a leaf that is called again gives what it gave the first time, told without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ReplayError
from ..torch_state.compare import fingerprint


@dataclass(frozen=True)
class Marks:
    """What stands for tensors in comparisons.

    Attributes:
        layouts: shape, strides and type of each.
        prints: of each, its fingerprint, where the tensor is.
    """

    layouts: tuple[Any, ...]
    prints: tuple[torch.Tensor, ...]

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> Marks:
        return Marks(tuple((t.shape, t.stride(), t.dtype) for t in tensors), tuple(map(fingerprint, tensors)))

    def expect(self, again: Marks, error: Callable[[], ReplayError]) -> None:
        """Raise the error unless the tensors are the same, now or, on a device that is not waited for, in a later call.

        Raises:
            ReplayError: the tensors are others.
        """
        if self.layouts != again.layouts:
            raise error()
        pairs = list(zip(self.prints, again.prints, strict=True))
        if any(not bool(a == b) for a, b in pairs if is_read_at_once(a)):
            raise error()
        _pending.extend((_read_later(a != b), error()) for a, b in pairs if not is_read_at_once(a))


def raise_what_is_known() -> None:
    """Raise the error of a comparison that a device has come to since, if the tensors were others.

    Raises:
        ReplayError: they were; what has been computed since the call that it names is wrong.
    """
    while _pending and (differs := _pending[0][0]()) is not None:
        error = _pending.pop(0)[1]
        if differs:
            _pending.clear()
            raise ReplayError(f"in an earlier step, whose gradients are wrong: {error}")


_pending: list[tuple[Callable[[], bool | None], ReplayError]] = []
"""In order, what is not known yet: each is asked for what it is, None as long as nobody knows."""


def is_read_at_once(tensor: torch.Tensor) -> bool:
    """Whether reading a tensor waits for nothing."""
    return tensor.device.type == "cpu"


def _read_later(flag: torch.Tensor) -> Callable[[], bool | None]:
    held = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(flag, non_blocking=True)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(flag.device))
    return lambda: bool(held) if done.query() else None
