"""Optimized modules run as they were, while what they compute is looked at."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Switch(threading.local):
    depth = 0


_switch = _Switch()


def are_off() -> bool:
    """Whether optimized modules run their original forwards now, in this thread."""
    return _switch.depth > 0


@contextmanager
def without_plans() -> Iterator[None]:
    """In here, and in this thread, optimized modules run their original forwards."""
    _switch.depth += 1
    try:
        yield
    finally:
        _switch.depth -= 1
