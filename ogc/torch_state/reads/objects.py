"""What Python objects hold: read whatever their classes make of that, compared, and put back."""

from __future__ import annotations

import copy
import enum
import pickle
import random
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, is_, methodcaller
from types import CellType, FunctionType, MemberDescriptorType, MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy
import torch

from ..private import CALL, parameters_of

PLAIN = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type(Ellipsis), numpy.generic,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
"""What is the same whenever its text is."""

ABSENT = object()
"""In the place of a value: there is none."""

LARGE, DEEP = 1000, 4
"""Attributes of modules: larger and more deeply nested containers are not looked into."""

TABLES = tuple(key for key, value in vars(torch.nn.Module()).items() if isinstance(value, dict))
"""What torch.nn.Module keeps parameters, buffers, submodules and hooks in."""

UNWATCHED = ("training", "forward", CALL)
"""Attributes of modules that plans do not depend on: a flag that they are chosen by, and what replaces calls."""

OF_MODELS = "_ogc_of_models"
"""A global of Python modules of ours whose functions are those of models: what they read is observed."""

NO_DATA = ("__", "_abc_")
_CONTAINERS = (list, tuple, OrderedDict, dict, set, frozenset, deque)
_look = attrgetter("requires_grad", "dtype", "device", "shape")


# -- names and items ---------------------------------------------------------------------------------------


def table_of(thing: Any) -> Mapping[str, Any]:
    """The names that an object, a class, a Python module or a function's globals have, and what they stand for."""
    return thing if type(thing) is dict else vars(thing) if hasattr(thing, "__dict__") else {}


class LookedUp:
    """In a class with one instance, as if it were a slot: an attribute of another object, which ``find`` gives.

    That one makes a value anew for each who asks; here it is the same object until it is another value.
    """

    def __init__(self, name: str, find: Callable[[Any], Any]) -> None:
        self.name, self.find = name, find
        self.known: Any = ABSENT

    def __get__(self, thing: Any, owner: type | None = None) -> Any:
        if thing is None:
            return self
        now = getattr(self.find(thing), self.name)
        if type(now) is not type(self.known) or repr(now) != repr(self.known):
            self.known = now
        return self.known

    def __set__(self, thing: Any, value: Any) -> None:
        setattr(self.find(thing), self.name, value)


SLOTS = (MemberDescriptorType, LookedUp)


def slots_of(kind: type) -> tuple[str, ...]:
    """The names of the slots that instances of a class have."""
    if kind not in _slots:
        found = (name for one in kind.__mro__ for name, held in vars(one).items() if type(held) in SLOTS)
        _slots[kind] = tuple(name for name in dict.fromkeys(found) if not (name[:2] == name[-2:] == "__"))
    return _slots[kind]


_slots: WeakKeyDictionary[type, tuple[str, ...]] = WeakKeyDictionary()


def value_of(thing: Any, name: str) -> Any:
    """What an object holds by a name, also in a slot; ``ABSENT`` if nothing."""
    found = table_of(thing).get(name, ABSENT)
    is_slot = found is ABSENT and not isinstance(thing, type) and name in slots_of(type(thing))
    return getattr(thing, name, ABSENT) if is_slot else found


def set_attribute(thing: Any, key: str, value: Any) -> None:
    """Set or delete an attribute or a global, past what a class makes of that."""
    if type(thing) is dict:
        thing[key] = value
        return
    kind = type if isinstance(thing, type) else object
    if value is ABSENT:
        kind.__delattr__(thing, key)
    else:
        kind.__setattr__(thing, key, value)


def is_container(thing: Any) -> bool:
    """Whether an object is read as a whole: what it gives of itself cannot be observed."""
    return isinstance(thing, _WHOLE) or has_state(thing)


_WHOLE = (*_CONTAINERS, partial, MethodType, CellType, FunctionType)


def items_of(thing: Any) -> tuple[list[Any], list[Any]]:
    """The keys and the items of what is read as a whole."""
    if isinstance(thing, dict):
        kind = kind_of_container(thing)
        return list(kind.keys(thing)), list(kind.values(thing))
    if isinstance(thing, type):
        data = data_of_class(thing)
        return list(data), list(data.values())
    if isinstance(thing, CellType):
        return [], _of_cell(thing)
    if isinstance(thing, FunctionType):
        return list(vars(thing)), [thing.__code__, thing.__defaults__, thing.__kwdefaults__, *vars(thing).values()]
    if isinstance(thing, MethodType):
        return [], [thing.__func__, thing.__self__]
    if isinstance(thing, partial):
        return [], [thing.func, thing.args, thing.keywords]
    if has_state(thing):
        return [], []
    if (kind := kind_of_container(thing)) is not None:
        return [], list(kind.__iter__(thing))
    return list(vars(thing)), list(vars(thing).values())


def kind_of_container(thing: Any) -> Any:
    """The class of Python's own that a container is of, None for other objects."""
    return next((kind for kind in _CONTAINERS if isinstance(thing, kind)), None)


def data_of_class(kind: type) -> dict[str, Any]:
    """The attributes of a class that are no methods nor what Python itself keeps there."""
    named = {key: value for key, value in vars(kind).items() if not key.startswith(NO_DATA)}
    return {key: value for key, value in named.items() if not hasattr(type(value), "__get__")}


def _of_cell(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # nothing is in it yet
        return []


# -- states of objects that are written in C ---------------------------------------------------------------


class _Kind(NamedTuple):
    """The state of a kind of objects: what is equal for equal states, and a copy that ``put`` puts back."""

    content: Callable[[Any], Any]
    keep: Callable[[Any], Any]
    put: Callable[[Any, Any], object]


def _of_array(found: numpy.ndarray) -> Any:
    raw = pickle.dumps(found) if found.dtype.hasobject else found.tobytes()
    return str(found.dtype), found.shape, found.strides, raw


def _write(thing: Any, kept: Any) -> None:
    thing[... if isinstance(thing, numpy.ndarray) else slice(None)] = kept


_KINDS: dict[type, _Kind] = {
    numpy.ndarray: _Kind(_of_array, copy.copy, _write),
    bytearray: _Kind(bytes, bytes, _write),
    array: _Kind(bytes, copy.copy, _write),
    random.Random: _Kind(random.Random.getstate, random.Random.getstate, random.Random.setstate),
    numpy.random.RandomState: _Kind(
        lambda found: pickle.dumps(found.get_state(legacy=False)),
        lambda found: found.get_state(legacy=False),
        lambda found, kept: found.set_state(kept),
    ),
    numpy.random.Generator: _Kind(
        lambda found: pickle.dumps(found.bit_generator.state),
        lambda found: copy.deepcopy(found.bit_generator.state),
        lambda found, kept: setattr(found.bit_generator, "state", kept),
    ),
}
_STATEFUL = tuple(_KINDS)


def has_state(thing: Any) -> bool:
    """Whether an object holds numbers, or is a generator of random ones, that can be read and put back."""
    return isinstance(thing, _STATEFUL) and not isinstance(thing, random.SystemRandom)


def _kind_of(thing: Any) -> _Kind:
    return next(_KINDS[kind] for kind in type(thing).__mro__ if kind in _KINDS)


def state_of(thing: Any) -> Any:
    """What is equal for equal states."""
    return _kind_of(thing).content(thing)


# -- comparison --------------------------------------------------------------------------------------------


class Itself:
    """Equal to what wraps the same object."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self.wrapped is other.wrapped

    __hash__ = None  # type: ignore[assignment]


def is_plain(value: Any) -> bool:
    """Whether a value is data that is the same whenever its text is."""
    if isinstance(value, tuple) and not hasattr(value, "__dict__"):
        return all(map(is_plain, value))
    return isinstance(value, (*PLAIN, enum.Enum))


def content(value: Any, known: Mapping[int, int]) -> Any:
    """What is equal for values that make no difference to a forward; objects are ``known`` by their numbers."""
    if isinstance(value, enum.Enum):
        return Itself(value)
    if is_plain(value):
        return type(value), repr(value)  # a NaN is the same as before
    if (number := known.get(id(value))) is not None:
        return "owner", number
    if isinstance(value, torch.Tensor):
        return Itself(value), *_look(value)
    if isinstance(value, MethodType):
        return content(value.__self__, known), Itself(value.__func__)
    return Itself(value)


def numbers_of(objects: Sequence[Any]) -> dict[int, int]:
    """The number of each object, by its identity; of one that is found in several places, the first."""
    return {id(thing): number for number, thing in reversed(list(enumerate(objects)))}


def same_objects(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects."""
    return len(some) == len(others) and all(map(is_, some, others))


class Before:
    """What an object held at first, by identity.

    Args:
        thing: an object, a class, a Python module, the globals of a function, or a container.
        skipped: names that do not count.
        is_globals: whether it is the globals of a function, of which each is remembered when it is named.
    """

    def __init__(self, thing: Any, skipped: Collection[str] = (), is_globals: bool = False) -> None:
        self.skipped = frozenset(skipped)
        self.is_globals = is_globals
        self.items: tuple[list[Any], list[Any]] | None = None
        self.state: tuple[Any, Any] | None = None
        self.names: dict[str, Any] = {}
        if not is_globals:
            self.names = self._now(thing)
            if not isinstance(thing, torch.nn.Module):
                self.items = items_of(thing) if is_container(thing) else None
                self.state = (_kind_of(thing).keep(thing), state_of(thing)) if has_state(thing) else None

    @classmethod
    def at_copy(cls, thing: Any, held: Any, skipped: Collection[str] = ()) -> Before:
        """The same for a module or a container of Python's own of which ``held`` is a copy: its table, or its items."""
        found = cls({}, skipped, is_globals=True)
        found.is_globals = False
        if isinstance(thing, torch.nn.Module):
            found.names = held
        else:
            found.items = items_of(held)
        return found

    def renewed(self, thing: Any) -> Before:
        """The same for what the object holds now."""
        found = Before(thing, self.skipped, self.is_globals)
        for name in self.names if self.is_globals else ():
            found.add(thing, name)
        return found

    def add(self, table: Mapping[str, Any], name: str) -> None:
        """Remember one of the globals of a function."""
        self.names.setdefault(name, table.get(name, ABSENT))

    def held(self, name: str) -> Any:
        """What the object held by a name, ``ABSENT`` if nothing."""
        return self.names.get(name, ABSENT)

    def changed(self, thing: Any) -> Iterator[str]:
        """The attributes that are others now; "" for the items of a container."""
        if isinstance(thing, torch.nn.Module) and _holds(thing, self.names):
            return
        now = self._now(thing)
        if not same_objects([*now.values()], [*self.names.values()]):
            keys = {**self.names, **now}.keys() - self.skipped
            keys = {key for key in keys if not (isinstance(thing, type) and key.startswith("__"))}
            yield from (key for key in keys if now.get(key, ABSENT) is not self.held(key))
        is_other_state = self.state is not None and state_of(thing) != self.state[1]
        if is_other_state or (self.items is not None and not all(map(same_objects, self.items, items_of(thing)))):
            yield ""

    def is_equal(self, thing: Any, key: str, known: Mapping[int, int]) -> bool:
        """Whether what is another object now is equal to what was there."""
        if not key:
            if self.items is None or self.state is not None:
                return False
            keys, items = items_of(thing)
            now, before = ([content(item, known) for item in found] for found in (items, self.items[1]))
            return keys == self.items[0] and now == before
        return bool(content(value_of(thing, key), known) == content(self.held(key), known))

    def put_back(self, thing: Any) -> None:
        """Let the object hold what it held at first."""
        for key in list(self.changed(thing)):
            if self.state is not None and not key:
                _kind_of(thing).put(thing, self.state[0])
            elif not key:
                self._put_items_back(thing)
            elif isinstance(thing, type) or key in slots_of(type(thing)):
                set_attribute(thing, key, self.held(key))
            else:
                table: Any = table_of(thing)
                if (value := self.held(key)) is ABSENT:
                    del table[key]
                else:
                    table[key] = value

    def _put_items_back(self, thing: Any) -> None:
        assert self.items is not None
        keys, items = self.items
        kind = kind_of_container(thing)
        if isinstance(thing, dict):
            kind.clear(thing)
            for key, item in zip(keys, items, strict=True):
                kind.__setitem__(thing, key, item)
        elif isinstance(thing, CellType):
            if items:
                thing.cell_contents = items[0]
            else:
                del thing.cell_contents
        elif isinstance(thing, FunctionType):
            thing.__defaults__, thing.__kwdefaults__ = items[1:3]
            vars(thing).clear()
            vars(thing).update(zip(keys, items[3:], strict=True))
        elif hasattr(kind, "clear"):
            kind.clear(thing)
            (kind.update if kind is set else kind.extend)(thing, items)

    def _now(self, thing: Any) -> dict[str, Any]:
        """What the object's names stand for, of globals those that count; items of containers are apart."""
        if self.is_globals:
            return {key: thing.get(key, ABSENT) for key in self.names}
        has_table = hasattr(thing, "__dict__") and not isinstance(thing, FunctionType)
        found = dict(table_of(thing)) if has_table else {}
        slots = () if isinstance(thing, type) else slots_of(type(thing))
        return found | {name: getattr(thing, name, ABSENT) for name in slots}


def _holds(module: torch.nn.Module, names: Mapping[str, Any]) -> bool:
    """Whether a module has these attributes alone, and none in slots."""
    table = vars(module)
    return len(table) == len(names) and all(map(is_, table.values(), names.values())) and not slots_of(type(module))


# -- attributes of modules ---------------------------------------------------------------------------------


class Held:
    """What modules and containers hold, to be put back. Only where all at once are not the same, each is looked at."""

    def __init__(self, things: Iterable[Any]) -> None:
        self.tables, self.lists, self.others = list[Any](), list[Any](), list[tuple[Any, Before]]()
        self.empty: list[Any] = []  # tables, as most are
        for thing in {id(thing): thing for thing in things}.values():
            kind = type(thing)
            if kind is dict or (kind is OrderedDict and not vars(thing)):
                if thing:
                    self.tables.append((thing, thing, ()))
                else:
                    self.empty.append(thing)
            elif kind is list:
                self.lists.append(thing)
            elif isinstance(thing, torch.nn.Module) and not slots_of(kind):
                self.tables.append((thing, vars(thing), no_attributes(thing)))
            else:
                self.others.append(
                    (thing, Before(thing, no_attributes(thing) if isinstance(thing, torch.nn.Module) else ()))
                )
        self.copies = [dict(table) for _, table, _ in self.tables], list(map(list, self.lists))
        self.sizes, self.flat = self._sizes(), list(self._items())

    def _sizes(self) -> list[int]:
        return [len(thing) for thing in (*(table for _, table, _ in self.tables), *self.lists)]

    def _items(self) -> Iterator[Any]:
        """All that they hold."""
        tables = [table for _, table, _ in self.tables]
        return chain(chain.from_iterable(tables), chain.from_iterable(map(_values, tables)), *self.lists)

    def put_back(self) -> None:
        for thing, before in self.others:
            before.put_back(thing)
        for thing in filter(None, self.empty):
            thing.clear()
        if self._sizes() == self.sizes and all(map(is_, self._items(), self.flat)):
            return
        tables, lists = self.copies
        for (thing, _, skipped), copied in zip(self.tables, tables, strict=True):
            Before.at_copy(thing, copied, skipped).put_back(thing)
        for thing, items in zip(self.lists, lists, strict=True):
            Before.at_copy(thing, items).put_back(thing)


_values = methodcaller("values")


def held_by(module: torch.nn.Module) -> Iterator[Any]:
    """A module, its tables and the containers among its plain attributes."""
    yield module
    for key, value in vars(module).items():
        if key in TABLES:
            yield value
        elif type(value) not in _ATOMS:
            yield from _containers(value)


_ATOMS = (type(None), bool, int, float, str, torch.Tensor)


def no_attributes(module: torch.nn.Module) -> set[str]:
    """Names that are no plain attributes: tables, and parameters that stand beside theirs."""
    return {*TABLES, *parameters_of(module).keys()}


def _containers(value: Any, depth: int = 0) -> Iterator[Any]:
    """The containers that a value is or holds."""
    kind = kind_of_container(value)
    if kind is None or depth == DEEP:
        return
    if kind not in (tuple, frozenset):
        yield value
    if kind.__len__(value) <= LARGE:
        for item in items_of(value)[1]:
            yield from _containers(item, depth + 1)


def attributes_of(model: torch.nn.Module, unwatched: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """The content of the plain attributes of each module, by its name."""
    found = {}
    for name, module in model.named_modules():
        skipped = {*no_attributes(module), *unwatched}
        found[name] = {key: _deep_content(value) for key, value in vars(module).items() if key not in skipped}
    return found


def watched_attributes(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """The same without those that plans do not depend on."""
    return attributes_of(model, UNWATCHED)


def _deep_content(value: Any, depth: int = 0) -> Any:
    kind = kind_of_container(value)
    if kind is None or depth == DEEP:
        return content(value, {})
    keys, items = items_of(value)
    if len(items) > LARGE:
        return type(value), len(items)
    if kind in (set, frozenset):
        return type(value), frozenset(items)
    return type(value), keys, [_deep_content(item, depth + 1) for item in items]


def changes(
    before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    """The modules whose attributes differ, each with the first one that does; see :func:`attributes_of`."""
    for name, found in after.items():
        known = before.get(name, {})
        keys = dict.fromkeys((*found, *known))
        first = next((key for key in keys if known.get(key, ABSENT) != found.get(key, ABSENT)), None)
        if first is not None:
            yield name, first
