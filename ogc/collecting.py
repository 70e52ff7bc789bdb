"""The garbage collector, while many objects are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
