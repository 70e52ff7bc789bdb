"""Plain attributes that a forward changes, and those that it reads.

A replayed program does not change them: what depends on them would be wrong. It has what they were made into: it holds
as long as they are the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch

LARGE, DEEP = 1000, 4
"""Containers with more items, and those that are nested deeper, are not looked into."""

TABLES = tuple(key for key, value in vars(torch.nn.Module()).items() if isinstance(value, dict))
"""What torch.nn.Module keeps parameters, buffers, submodules and hooks in."""


def attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Plain attributes and flags, not what torch.nn.Module keeps in tables of its own."""
    return {key: value for key, value in vars(module).items() if key not in TABLES}


def containers(value: Any, depth: int = 0) -> Iterator[Any]:
    """The lists, dicts and sets that a value is or holds."""
    if not isinstance(value, (list, tuple, dict, set)) or depth == DEEP:
        return
    if type(value) in (list, dict, set):
        yield value
    if length(value) <= LARGE:
        for item in items(value):
            yield from containers(item, depth + 1)


def length(value: Any) -> int:
    """How many items a container has, whatever its class makes of ``len``."""
    return next(kind.__len__(value) for kind in _KINDS if isinstance(value, kind))


def items(value: Any) -> Iterator[Any]:
    """What a container holds, whatever its class makes of it."""
    if isinstance(value, dict):
        return iter(dict.values(value))
    return next(kind.__iter__(value) for kind in _KINDS if isinstance(value, kind))


_KINDS: tuple[Any, ...] = (list, tuple, dict, set)


def attributes_of(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """The attributes of each module, by its name; what they hold, not what it is held in."""
    return {
        name: {key: _content(value) for key, value in attributes(module).items()}
        for name, module in model.named_modules()
    }


def changes(
    before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]], leaves: Collection[str]
) -> Iterator[tuple[str, str]]:
    """The modules that are not inside leaves, with the first attribute of each that differs; see attributes_of."""
    covered = tuple(f"{leaf}." for leaf in leaves)
    for name, found in after.items():
        known = before.get(name, {})
        keys = dict.fromkeys((*found, *known))
        first = next((key for key in keys if known.get(key, _ABSENT) != found.get(key, _ABSENT)), None)
        if first is not None and not f"{name}.".startswith(covered):
            yield name, first


_ABSENT = object()

UNREAD = ("training", "forward")
"""Attributes of which it is known in other ways what they are."""


class ReadAttributes:
    """What the plain attributes of some names hold, of a module and its submodules, and whether they still do.

    Each call compares by identity, and only where that differs by what they hold.

    Args:
        model: as it is now.
        names: of the attributes.
        leaves: names of submodules that are called as they are, and may change what they like.
    """

    def __init__(self, model: torch.nn.Module, names: Collection[str], leaves: Collection[str]) -> None:
        self.names = frozenset(names).difference(UNREAD)
        self.inside = tuple(f"{leaf}." for leaf in leaves)
        self.seen: weakref.WeakKeyDictionary[torch.nn.Module, _Seen] = weakref.WeakKeyDictionary()
        self.held = self._held(self._found(model))
        self.seen[model] = _Seen.of(self._found(model))

    def first_changed(self, model: torch.nn.Module) -> str | None:
        """The name of an attribute of ``model``, or a copy, that is not what it was; None if none is."""
        seen = self.seen.get(model)
        if seen is not None and seen.is_same():
            return None
        found = self._found(model)
        held = self._held(found)
        for name in self.held.keys() | held.keys():
            before, now = self.held.get(name, {}), held.get(name, {})
            for key in before.keys() | now.keys():
                if before.get(key, _ABSENT) != now.get(key, _ABSENT):
                    return f"{name}.{key}" if name else key
        self.seen[model] = _Seen.of(found)
        return None

    def _found(self, model: torch.nn.Module) -> dict[str, tuple[dict[str, Any], tuple[str, ...]]]:
        """For each module, by its name, its attributes and which of them are meant."""
        found = {}
        for name, module in model.named_modules():
            keys = tuple(key for key in vars(module) if key in self.names and key not in TABLES)
            if keys and not f"{name}.".startswith(self.inside):
                found[name] = vars(module), keys
        return found

    def _held(self, found: dict[str, tuple[dict[str, Any], tuple[str, ...]]]) -> dict[str, dict[str, Any]]:
        return {name: {key: _content(held[key]) for key in keys} for name, (held, keys) in found.items()}


class _Seen(NamedTuple):
    """The values of attributes when they were last looked at, and how to look again."""

    looks: Sequence[tuple[Callable[[Any], Any], dict[str, Any]]]
    values: list[Any]

    @staticmethod
    def of(found: dict[str, tuple[dict[str, Any], tuple[str, ...]]]) -> _Seen:
        looks = [(itemgetter(*keys, keys[0]), held) for held, keys in found.values()]
        return _Seen(looks, [value for look, held in looks for value in look(held)])

    def is_same(self) -> bool:
        try:
            now = chain.from_iterable([look(held) for look, held in self.looks])
        except KeyError:
            return False
        return all(map(is_, now, self.values))


class _Itself:
    """Equal to what wraps the same object."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.wrapped is other.wrapped

    __hash__ = None  # type: ignore[assignment]


def _content(value: Any, depth: int = 0) -> Any:
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return type(value), repr(value)  # a NaN is the same as before
    if not isinstance(value, (list, tuple, dict, set)) or depth == DEEP:
        return _Itself(value)
    if length(value) > LARGE:
        return type(value), length(value)
    if isinstance(value, set):
        return type(value), frozenset(value)
    pairs = dict.items(value) if isinstance(value, dict) else enumerate(items(value))
    return type(value), [(key, _content(item, depth + 1)) for key, item in pairs]
