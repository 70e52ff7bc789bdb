"""The process that plans: values of each thread, the garbage collector, and what a running step leaves for planning."""

from __future__ import annotations

import gc
import math
import threading
import time
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


SHOWN_AFTER = 2.0
"""Seconds after which planning shows what it does."""

_bar: OnThread[Any] = OnThread(None)


@contextmanager
def shown() -> Iterator[None]:
    """What is planned in here, on this thread, shows what it does: one bar of tqdm's, on a terminal."""
    if _bar.value is not None:
        yield
        return
    with tqdm(delay=SHOWN_AFTER, leave=False, disable=None, bar_format="{desc} [{elapsed}]") as bar, _bar.set_to(bar):
        yield


def tell_stage(what: str) -> None:
    """Say what is done from here on."""
    if _bar.value is not None:
        _bar.value.set_description_str(f"ogc: {what}", refresh=False)
        _bar.value.update()


def counted(items: Any, what: str) -> Iterator[Any]:
    """The items, while the bar counts them."""
    for number, item in enumerate(items, 1):
        tell_stage(f"{what} {number} of {len(items)}")
        yield item


_deadline = OnThread(math.inf)


def within_seconds(seconds: float | None) -> AbstractContextManager[None]:
    """What is planned in here, on this thread, is to be done after so many seconds; the first deadline holds."""
    wanted = math.inf if seconds is None else time.perf_counter() + seconds
    return _deadline.set_to(min(wanted, _deadline.value))


def is_late() -> bool:
    """Whether the best that is known by now has to do."""
    return time.perf_counter() > _deadline.value


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
