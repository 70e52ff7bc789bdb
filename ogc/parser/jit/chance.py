"""The generators of Python and numpy, whose random numbers a trace would hold as constants."""

from __future__ import annotations

import random
from typing import Any

import numpy as np


def state_of_chance() -> tuple[Any, ...]:
    """The state of both generators; equal where nothing was drawn in between."""
    state: Any = np.random.get_state()
    name, key, *rest = state
    return random.getstate(), name, key.tobytes(), *rest


def set_chance(state: tuple[Any, ...]) -> None:
    """Put both generators back to where they were."""
    ours, name, key, *rest = state
    random.setstate(ours)
    np.random.set_state((name, np.frombuffer(key, np.uint32), *rest))
