"""What planning may do in the middle of somebody's training step: show no progress, and take little memory."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

from tqdm import tqdm

from .on_thread import OnThread

_available_bytes = OnThread(math.inf)


def during_step(available_bytes: int) -> AbstractContextManager[None]:
    """On this thread a step is running, which so many bytes were planned for."""
    return _available_bytes.set_to(available_bytes)


def available_bytes() -> float:
    """What planning may take; infinite where no step is running."""
    return _available_bytes.value


def progress(items: Any = None, **options: Any) -> Any:
    """A bar of tqdm's, on a terminal, where it is there for more than a second and no step is running."""
    is_hidden = True if math.isfinite(available_bytes()) else None  # None: where there is no terminal
    return tqdm(items, delay=1, leave=False, disable=is_hidden, **options)
