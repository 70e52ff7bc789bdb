"""The states of torch's random generators, as arrays: a step may hold many, and they are none of its tensors."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.random import set_rng_state  # itself, also where a recorder sees the calls of torch's

State = NDArray[np.uint8]


def random_states(devices: Iterable[torch.device]) -> tuple[State, ...]:
    """That of the CPU, then those of these CUDA devices."""
    states = (torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices))
    return tuple(state.numpy().copy() for state in states)


def set_random_states(states: Sequence[State], devices: Iterable[torch.device]) -> None:
    """Put back what :func:`random_states` returned for the same devices."""
    set_rng_state(torch.from_numpy(states[0]))
    for device, state in zip(devices, states[1:], strict=True):
        torch.cuda.set_rng_state(torch.from_numpy(state), device)


def same_states(before: Sequence[State], after: Sequence[State]) -> bool:
    """Whether nothing was drawn in between."""
    return all(map(np.array_equal, before, after))


def cuda_devices() -> tuple[torch.device, ...]:
    """All there are, once CUDA is in use."""
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    return tuple(torch.device("cuda", index) for index in range(count))


def python_random_state() -> tuple[Any, ...]:
    """Where the random streams of Python and numpy are."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), name, np.asarray(keys).tobytes(), *rest
