"""Plain attributes that a forward changes, and those that it reads.

A replayed program does not change them: what depends on them would be wrong. It has what they were made into: it holds
as long as they are the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import is_, itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

from .private import CALL, MEMBERS
from .ranks.shards import has_flat_parameters, views_of_flat

LARGE, DEEP = 1000, 4
"""Containers with more items, and those that are nested deeper, are not looked into."""

TABLES = tuple(key for key, value in vars(torch.nn.Module()).items() if isinstance(value, dict))
"""What torch.nn.Module keeps parameters, buffers, submodules and hooks in."""


def attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Plain attributes and flags, not what torch.nn.Module keeps in tables of its own, nor parameters beside these."""
    found = vars(module)
    parameters = found.get(MEMBERS[0], ())
    return {key: value for key, value in found.items() if key not in TABLES and key not in parameters}


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

UNWATCHED = ("training", "forward", CALL)
"""Attributes that plans do not depend on: the flag that they are chosen by anyway, and what stands in for calls."""


def watched_attributes(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """What the plain attributes of each module hold, by its name; without those that plans do not depend on."""
    held = attributes_of(model)
    return {name: {key: value for key, value in found.items() if key not in UNWATCHED} for name, found in held.items()}


class WatchedAttributes:
    """The plain attributes of a module and of its submodules, but for those inside leaves, as they are now.

    Anybody may set them, differently in each step; a program has what they were made into. So each call compares them
    with what they were: by identity, and only where that differs by what they hold.

    Args:
        model: as it is now.
        leaves: names of submodules that are called as they are, and may change what they like.
        names: of the attributes that count, in objects that modules have too; None for all of the modules' own.
    """

    def __init__(
        self, model: torch.nn.Module, leaves: Collection[str] = (), names: Collection[str] | None = None
    ) -> None:
        self.names = None if names is None else frozenset(names)
        self.is_flat = has_flat_parameters(model)
        self.inside = tuple(f"{leaf}." for leaf in leaves)
        self.held = self._held(model)
        self.seen: weakref.WeakKeyDictionary[torch.nn.Module, _Seen] = weakref.WeakKeyDictionary()
        self.seen[model] = self._seen(model)

    def first_changed(self, model: torch.nn.Module) -> str | None:
        """The name of an attribute of the module, or of a copy, that is not what it was; None if none is."""
        seen = self.seen.get(model)
        if seen is not None and seen.is_same():
            return None
        for name, key in changes(self.held, self._held(model), ()):
            return f"{name}.{key}" if name else key
        self.seen[model] = self._seen(model)
        return None

    def _held(self, model: torch.nn.Module) -> dict[str, dict[str, Any]]:
        return {
            name: {key: _content(table[key]) for key in keys} for name, (table, keys) in self._tables(model).items()
        }

    def _seen(self, model: torch.nn.Module) -> _Seen:
        return _Seen.of(list(self._tables(model).values()))

    def _tables(self, model: torch.nn.Module) -> dict[str, tuple[dict[str, Any], tuple[str, ...]]]:
        """By name, the attributes of modules and of objects in these, such as configurations; which of them count."""
        found: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {}
        known: set[int] = set()

        def add(name: str, table: dict[str, Any], keys: Iterable[str], depth: int) -> None:
            if id(table) in known or depth > DEEP:
                return
            known.add(id(table))
            counts = (key for key in keys if key not in UNWATCHED and (self.names is None or key in self.names))
            found[name] = table, tuple(counts)
            for key in found[name][1] if self.names is not None else ():
                if (inner := _attributes_of_object(table[key])) is not None:
                    add(f"{name}.{key}" if name else key, inner, inner, depth + 1)

        for name, module in model.named_modules():
            if not f"{name}.".startswith(self.inside):
                views = views_of_flat(module) if self.is_flat else ()
                add(name, vars(module), (key for key in attributes(module) if key not in views), 0)
        return found


_NO_OBJECTS = (torch.nn.Module, torch.Tensor, type, partial, FunctionType, MethodType, BuiltinFunctionType, ModuleType)


def _attributes_of_object(value: Any) -> dict[str, Any] | None:
    """The plain attributes of an object that a module has, such as a configuration; None if it is anything else."""
    table = None if isinstance(value, _NO_OBJECTS) else getattr(value, "__dict__", None)
    return table if type(table) is dict else None


class _Seen(NamedTuple):
    """Where attributes are, and what they were when they were last looked at."""

    tables: list[dict[str, Any]]
    sizes: list[int]
    looks: list[tuple[Callable[[Any], Any], list[dict[str, Any]]]]  # for tables with the same keys
    values: list[Any]

    @staticmethod
    def of(found: Sequence[tuple[dict[str, Any], tuple[str, ...]]]) -> _Seen:
        alike: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for table, keys in found:
            if keys:
                alike.setdefault(keys, []).append(table)
        tables = [table for table, _ in found]
        looks: list[tuple[Callable[[Any], Any], list[dict[str, Any]]]]
        looks = [(itemgetter(*keys, keys[0]), same) for keys, same in alike.items()]  # two at least, for a tuple
        return _Seen(tables, list(map(len, tables)), looks, list(_values(looks)))

    def is_same(self) -> bool:
        """Whether each attribute is the same object, and none is there that was not."""
        try:
            return list(map(len, self.tables)) == self.sizes and all(map(is_, _values(self.looks), self.values))
        except KeyError:
            return False


def _values(looks: Sequence[tuple[Callable[[Any], Any], list[dict[str, Any]]]]) -> Iterator[Any]:
    return chain.from_iterable(chain.from_iterable(map(look, tables) for look, tables in looks))


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
