"""What objects hold that are written in C, as far as it can be read and put back: numbers, and states of generators."""

from __future__ import annotations

import copy
import pickle
import random
from array import array
from collections.abc import Callable, Iterator
from io import IOBase
from types import FunctionType
from typing import Any, NamedTuple

import numpy

from ...errors import InputError


class _Kind(NamedTuple):
    """How the state of a kind of objects is read.

    Attributes:
        content: gives what is equal for equal states.
        keep: gives what ``put`` takes to put the state back.
    """

    content: Callable[[Any], Any]
    keep: Callable[[Any], Any]
    put: Callable[[Any, Any], object]


def _of_array(found: numpy.ndarray) -> Any:
    raw = pickle.dumps(found) if found.dtype.hasobject else found.tobytes()
    return str(found.dtype), found.shape, found.strides, raw


def _write_all(thing: Any, kept: Any) -> None:
    thing[:] = kept


def _write_array(thing: Any, kept: Any) -> None:
    thing[...] = kept


def _bits(found: Any) -> Any:
    return pickle.dumps(found.bit_generator.state)


_KINDS: dict[type, _Kind] = {
    numpy.ndarray: _Kind(_of_array, copy.copy, _write_array),
    bytearray: _Kind(bytes, bytes, _write_all),
    array: _Kind(bytes, copy.copy, _write_all),
    random.Random: _Kind(random.Random.getstate, random.Random.getstate, random.Random.setstate),
    numpy.random.RandomState: _Kind(
        lambda found: pickle.dumps(found.get_state(legacy=False)),
        lambda found: found.get_state(legacy=False),
        lambda found, kept: found.set_state(kept),
    ),
    numpy.random.Generator: _Kind(
        _bits,
        lambda found: copy.deepcopy(found.bit_generator.state),
        lambda found, kept: setattr(found.bit_generator, "state", kept),
    ),
}


def _kind_of(thing: Any) -> _Kind:
    return next(_KINDS[kind] for kind in type(thing).__mro__ if kind in _KINDS)


def has_state(thing: Any) -> bool:
    """Whether an object has such a state."""
    return isinstance(thing, tuple(_KINDS)) and not isinstance(thing, random.SystemRandom)


def content_of(thing: Any) -> Any:
    """What is equal for equal states."""
    return _kind_of(thing).content(thing)


def kept_state(thing: Any) -> Any:
    """What :func:`put_state` takes."""
    return _kind_of(thing).keep(thing)


def put_state(thing: Any, kept: Any) -> None:
    """Put a state back."""
    _kind_of(thing).put(thing, kept)


def refuse_used_up(thing: Any, name: Callable[[], str]) -> None:
    """Raise InputError, with its name, for what gives something else each time and cannot be put back."""
    if not isinstance(thing, Iterator) or isinstance(thing, IOBase):
        return
    if not isinstance(getattr(type(thing), "__next__", None), FunctionType):  # else its attributes are observed
        raise InputError(
            f"the forward reads {name()}, an iterator ({type(thing).__name__}), which planning would use up, as nobody "
            "can put it back; hand what it gives in as an argument, or optimize submodules that do without"
        )
