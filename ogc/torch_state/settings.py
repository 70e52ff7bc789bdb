"""PyTorch's global state: settings that choose kernels, modes of this thread, states of random generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.random import set_rng_state  # itself, also where a recorder sees the calls of torch's

from .private import FLAGS, are_deterministic, get_fp32_precision, matmul_precision, set_fp32_precision

Flags = tuple[Any, ...]
"""The value of each setting that chooses kernels."""

State = NDArray[np.uint8]
"""Of a random generator of torch's, as an array: a step may hold many, and they are none of its tensors."""


class _Setting(NamedTuple):
    name: str
    get: Callable[[], Any]
    set: Callable[[Any], object]


# -- what chooses kernels and how exactly they compute: a recomputation needs those of its forward ---------


def flags() -> Flags:
    """The settings as they are."""
    return tuple([get() for get in _GETTERS])


def set_flags(wanted: Flags) -> None:
    """Make the settings those."""
    for flag, value in zip(_FLAGS, wanted, strict=True):
        if value is not None and flag.get() != value:
            flag.set(value)


@contextmanager
def flags_held(wanted: Flags) -> Iterator[None]:
    """Inside, the settings are those; afterwards as before."""
    before = flags()
    if before == wanted:
        yield
        return
    set_flags(wanted)
    try:
        yield
    finally:
        set_flags(before)


def changed_flags(then: Flags, now: Flags) -> list[str]:
    """In words, the settings that are others now."""
    changed = zip(_FLAGS, then, now, strict=True)
    return [f"{flag.name} is {value}, not {before}" for flag, before, value in changed if value != before]


def without_benchmark(wanted: Flags) -> Flags:
    """The same settings with ``torch.backends.cudnn.benchmark`` off."""
    return tuple(False if n == _BENCHMARK else value for n, value in enumerate(wanted))


def _deterministic() -> tuple[bool, bool]:
    asked, only_warns = are_deterministic
    return asked(), only_warns()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _matmul_precision() -> str | None:
    try:
        precision: str = matmul_precision()
        return precision
    except RuntimeError:  # PyTorch refuses to tell once it is set by kind of kernel, which is looked at too
        return None


def _set_fp32_precision(backend: str, kernels: str, value: str) -> None:
    """Set what a kind of kernels computes float32 in, as its backend's own where that is the same."""
    set_fp32_precision(backend, kernels, "none" if get_fp32_precision(backend, "all") == value else value)


_FLAGS = (
    *(_Setting(name, *functions) for name, functions in FLAGS.items()),
    _Setting("deterministic algorithms (and whether they only warn)", _deterministic, _set_deterministic),
    _Setting("the precision of float32 products", _matmul_precision, torch.set_float32_matmul_precision),
    *(
        _Setting(f"fp32_precision of {pair}", partial(get_fp32_precision, *pair), partial(_set_fp32_precision, *pair))
        for pair in product(("cuda", "mkldnn"), ("matmul", "conv", "rnn"))
    ),
    _Setting("the default type", torch.get_default_dtype, torch.set_default_dtype),
    _Setting("the number of threads", torch.get_num_threads, torch.set_num_threads),
)
_GETTERS = [flag.get for flag in _FLAGS]
_BENCHMARK = [flag.name for flag in _FLAGS].index("torch.backends.cudnn.benchmark")


# -- modes of this thread ----------------------------------------------------------------------------------

_MODES = (
    _Setting("gradients", torch.is_grad_enabled, torch.set_grad_enabled),
    _Setting("the cache of autocast", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    *(
        _Setting(f"{what} of autocast on {kind}", partial(get, kind), partial(put, kind))
        for kind in ("cpu", "cuda")
        for what, get, put in (
            ("state", torch.is_autocast_enabled, torch.set_autocast_enabled),
            ("type", torch.get_autocast_dtype, torch.set_autocast_dtype),
        )
    ),
)


def modes_put_back() -> Callable[[], None]:
    """Makes gradients and autocast, when called, what they are now."""
    found = [(mode, mode.get()) for mode in _MODES]

    def put_back() -> None:
        for mode, value in found:
            mode.set(value)

    return put_back


# -- random generators -------------------------------------------------------------------------------------


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


def digest_of_states(states: Sequence[State]) -> int:
    """A number that is the same for equal states, and hardly for others."""
    return hash(tuple(state.tobytes() for state in states))


def cuda_devices() -> tuple[torch.device, ...]:
    """All there are, once CUDA is in use."""
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    return tuple(torch.device("cuda", index) for index in range(count))


def python_random_state() -> tuple[Any, ...]:
    """Where the random streams of Python and numpy are."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), name, np.asarray(keys).tobytes(), *rest


def random_put_back(generators: Iterable[torch.Generator] = ()) -> Callable[[], None]:
    """Puts back, when called, the random states of torch, of Python, of numpy and of these generators."""
    devices = cuda_devices()
    states, of_python, of_numpy = random_states(devices), random.getstate(), np.random.get_state()
    own = [(generator, generator.get_state()) for generator in generators]

    def put_back() -> None:
        set_random_states(states, devices)
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        for generator, state in own:
            generator.set_state(state)

    return put_back
