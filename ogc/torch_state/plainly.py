"""Optimized modules that are called while a model is looked at run the plain model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_thread = threading.local()


@contextmanager
def plainly() -> Iterator[None]:
    """Whatever is optimized runs as the plain model inside, on this thread."""
    before, _thread.is_plain = is_plain(), True
    try:
        yield
    finally:
        _thread.is_plain = before


def is_plain() -> bool:
    """Whether optimized modules are to run the plain model."""
    return bool(getattr(_thread, "is_plain", False))
