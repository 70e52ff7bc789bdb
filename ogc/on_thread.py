"""What each thread has for itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

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
