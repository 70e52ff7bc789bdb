"""The process that plans: values of each thread, the garbage collector, and what a running step leaves for planning."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, TypeVar

from tqdm import tqdm

T = TypeVar("T")


class OnThread(threading.local, Generic[T]):
    """A value that is ``default`` on each thread but where it is set."""

    def __init__(self, default: T) -> None:
        self.value = default

    @contextmanager
    def set_to(self, value: T) -> Iterator[None]:
        """Inside, on this thread, it is another one."""
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before


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


@contextmanager
def collecting_new_only() -> Iterator[None]:
    """The garbage collector goes through what is made from here on alone.

    Otherwise each of its full passes goes through all of torch's objects too, a quarter of a second.
    """
    if gc.get_freeze_count():  # by somebody else, who may count on it
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
