"""What planning may do in the middle of somebody's training step: show no progress, and take little memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm


class _Here(threading.local):
    bytes_at_hand = math.inf


_here = _Here()


@contextmanager
def during_step(bytes_at_hand: int) -> Iterator[None]:
    """On this thread a step is running, which so many bytes were planned for."""
    before, _here.bytes_at_hand = _here.bytes_at_hand, bytes_at_hand
    try:
        yield
    finally:
        _here.bytes_at_hand = before


def bytes_at_hand() -> float:
    """What planning may take; infinite where no step is running."""
    return _here.bytes_at_hand


def progress(items: Any = None, **options: Any) -> Any:
    """A bar of tqdm's, on a terminal, where it is there for more than a second and no step is running."""
    is_hidden = True if math.isfinite(bytes_at_hand()) else None  # None: where there is no terminal
    return tqdm(items, delay=1, leave=False, disable=is_hidden, **options)
