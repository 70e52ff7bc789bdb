"""What planning may do in the middle of somebody's training step: show no progress, and take little memory."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

from tqdm import tqdm

from .on_thread import OnThread

_bytes_at_hand = OnThread(math.inf)


def during_step(bytes_at_hand: int) -> AbstractContextManager[None]:
    """On this thread a step is running, which so many bytes were planned for."""
    return _bytes_at_hand.set_to(bytes_at_hand)


def bytes_at_hand() -> float:
    """What planning may take; infinite where no step is running."""
    return _bytes_at_hand.value


def progress(items: Any = None, **options: Any) -> Any:
    """A bar of tqdm's, on a terminal, where it is there for more than a second and no step is running."""
    is_hidden = True if math.isfinite(bytes_at_hand()) else None  # None: where there is no terminal
    return tqdm(items, delay=1, leave=False, disable=is_hidden, **options)
