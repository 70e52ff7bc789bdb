"""What a forward read outside of tensors, and whether that is still the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import attrgetter, contains, is_, itemgetter, methodcaller
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch

from ..forwards import original_class
from .intercept import KnownCalls
from .objects import (
    ABSENT,
    NO_DATA,
    Itself,
    content,
    data_of_class,
    has_state,
    items_of,
    numbers_of,
    set_attribute,
    slots_of,
    state_of,
    table_of,
    value_of,
)

MODULE, FIXED = -1, -2
"""In the place of a parent: the object is a submodule of the model, by its name; or it is the same for all models."""


class Source(NamedTuple):
    """Where an object is found."""

    parent: int  # the number of the owner that holds it, ``MODULE`` or ``FIXED``
    step: str  # how it is found there: ``"name"``, ``"item"`` or, of a function, ``"cell"``
    key: Any  # by what name or position; the name of a submodule; what is fixed itself

    def find(self, model: torch.nn.Module, objects: Sequence[Any]) -> Any:
        if self.parent == FIXED:
            return self.key
        if self.parent == MODULE:
            return model.get_submodule(self.key)
        holder = objects[self.parent]
        if self.step == "item":
            return items_of(holder)[1][self.key]
        if self.step == "cell":
            return holder.__closure__[self.key]
        found = value_of(holder, self.key)
        if found is ABSENT:
            raise LookupError(self.key)
        return found


class OwnerReads(NamedTuple):
    """What was read of one object."""

    source: Source  # where it is found
    names: tuple[str, ...]  # attributes and globals, be there something or not
    is_whole: bool  # whether all items count, as of a list


class Beginning(NamedTuple):
    """Where an observer goes on from what a forward read of a model, as long as each value is the same object."""

    modules: list[torch.nn.Module]  # of the model beside itself
    told_of: frozenset[tuple[int, str]]  # objects, by identity, and attributes of theirs that say nothing new


@dataclass(frozen=True, eq=False, repr=False)
class Reads:
    """What a forward read outside of tensors, and what it wrote.

    It is compared for a model and its copies: by identity, and by content where that differs.
    """

    owners: tuple[OwnerReads, ...] = ()  # the objects that it read from, each after those in which it is found
    expected: tuple[Any, ...] = ()  # what these held at the start of the forward
    # plain values that it wrote and did not read before: the number of the owner, the name, the value
    effects: tuple[tuple[int, str, Any], ...] = ()
    # gives the model that was observed; a copy stands for it, also where a function is bound to it
    root: Callable[[], Any] = lambda: None
    # what it called, if it changed nothing outside of tensors: another forward may be observed from there
    calls: list[KnownCalls] = field(default_factory=list)
    _seen: weakref.WeakKeyDictionary[torch.nn.Module, _Seen] = field(
        default_factory=weakref.WeakKeyDictionary, init=False
    )

    def objects(self, model: torch.nn.Module) -> list[Any]:
        """The owners as they are found now; LookupError, AttributeError, ValueError or TypeError if one is gone."""
        found: list[Any] = []
        for owner in self.owners:
            found.append(owner.source.find(model, found))
        return found

    def first_changed(self, model: torch.nn.Module) -> str | None:
        """In words, what Python would read otherwise of a model now; None if nothing."""
        seen = self._seen.get(model)
        if seen is not None and seen.is_same():
            return None
        changed = self._first_changed(model)
        if changed is None:
            self._seen[model] = _Seen(self, self.objects(model))
        return changed

    def _first_changed(self, model: torch.nn.Module) -> str | None:
        found: list[Any] = []
        for number, owner in enumerate(self.owners):
            try:
                found.append(owner.source.find(model, found))
            except (LookupError, AttributeError, ValueError, TypeError):
                return self.name(number)
        known = numbers_of(found)
        if any(thing is model for thing in found):
            known[id(self.root())] = known[id(model)]
        for number, (owner, thing, before) in enumerate(zip(self.owners, found, self.expected, strict=True)):
            try:
                now = _content_of_owner(known, owner, thing)
            except TypeError:  # it is an object of another kind
                return self.name(number)
            if before != now:
                return self.name(number, _first_difference(before, now))
        return None

    def begun_at(self, model: torch.nn.Module) -> Beginning | None:
        """What was noted since :meth:`first_changed` has last looked at the content of a model."""
        return self._seen[model].beginning

    def begin_at(self, model: torch.nn.Module, beginning: Beginning) -> None:
        self._seen[model].beginning = beginning

    def write(self, model: torch.nn.Module) -> None:
        objects = self.objects(model) if self.effects else []
        for number, key, value in self.effects:
            set_attribute(objects[number], key, value)

    def name(self, number: int, key: str = "") -> str:
        """What messages call an attribute of an owner, or the owner."""
        path = [key] if key else []
        while True:
            source = self.owners[number].source
            if source.parent == FIXED:
                return _fixed_name(source.key, ".".join(path).replace(".[", "["))
            if source.parent == MODULE:
                return "the attribute " + ".".join([*([source.key] if source.key else []), *path]).replace(".[", "[")
            number = source.parent
            is_cell, holder = source.step == "cell", self.owners[number].source.key
            name = holder.__code__.co_freevars[source.key] if is_cell else source.key
            path.insert(0, f"[{name}]" if source.step == "item" else str(name))


def _fixed_name(thing: Any, path: str) -> str:
    """What messages call what is found in an object that is the same for all models."""
    if isinstance(thing, type):
        return f"the attribute {path} of class {thing.__qualname__}"
    if isinstance(thing, FunctionType):
        is_of_closure = path and not path.startswith("[")
        what = f"the variable {path.removesuffix('[0]')}" if is_of_closure else "a default argument or an attribute"
        return f"{what} of {thing.__qualname__}"
    return f"the global {path} of {thing.get('__name__', 'a module')}"


def contents(owners: Sequence[OwnerReads], objects: Sequence[Any]) -> tuple[Any, ...]:
    """What each owner holds of what counts."""
    known = numbers_of(objects)
    return tuple(map(partial(_content_of_owner, known), owners, objects))


def _content_of_owner(known: Mapping[int, int], owner: OwnerReads, thing: Any) -> dict[str, Any]:
    is_root = owner.source.parent == MODULE and not owner.source.key
    kind = original_class(thing) if isinstance(thing, torch.nn.Module) else type(thing)
    found: dict[str, Any] = {} if is_root else {"": (known[id(thing)], Itself(kind))}
    found |= {name: content(value_of(thing, name), known) for name in owner.names}
    if owner.is_whole:
        keys, items = items_of(thing)
        inside = [content(item, known) for item in items]
        if has_state(thing):
            inside = [state_of(thing)]
        found["[]"] = [*map(repr, keys)], inside
        if isinstance(thing, type):
            methods = {key: Itself(value) for key, value in vars(thing).items() if not key.startswith(NO_DATA)}
            found["[]"] = {**methods, **dict(zip(keys, inside, strict=True))}
    return found


def _first_difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    key = next((key for key in before if before[key] != now.get(key)), "")
    return "" if key == "[]" else key


_values = methodcaller("values")
_look = attrgetter("requires_grad", "dtype", "device", "shape")
_of_function = attrgetter("__code__", "__defaults__", "__kwdefaults__", "__dict__")
_of_cell = attrgetter("cell_contents")
_END = object()
_GONE = (LookupError, AttributeError, ValueError, TypeError)


class _Seen:
    """Where values are that were read, and what they were when they were last looked at.

    It holds no reference to the model itself, which is the key of the weak dictionary that holds this.
    """

    def __init__(self, reads: Reads, objects: Sequence[Any]) -> None:
        self.beginning: Beginning | None = None
        alike: dict[tuple[str, ...], list[Any]] = {}
        self.absent: list[tuple[Any, str]] = []
        self.others: list[Callable[[], Any]] = []  # what gives the values of other owners
        self.dicts: list[Mapping[Any, Any]] = []
        self.lists: list[Any] = []
        self.classes: list[Mapping[str, Any]] = []
        self.functions: list[FunctionType] = []
        self.cells: list[CellType] = []
        self.typed: list[Any] = []
        self.stateful: list[Any] = []
        for owner, thing in zip(reads.owners, objects, strict=True):
            table = table_of(thing)
            if keys := tuple(name for name in owner.names if name in table):
                alike.setdefault(keys, []).append(table)
            slots = () if isinstance(thing, type) else slots_of(type(thing))
            self.absent += [(table, name) for name in owner.names if name not in table and name not in slots]
            if names := [name for name in owner.names if name not in table and name in slots]:
                self.others.append(partial(map, partial(value_of, thing), names))
            if owner.source.parent != MODULE or owner.source.key:
                self.typed.append(thing)
            if owner.is_whole and isinstance(thing, type):
                self.classes.append(vars(thing))
                if data := data_of_class(thing):
                    alike.setdefault(tuple(data), []).append(vars(thing))
            elif owner.is_whole:
                self._add_whole(thing)
        self.looks = [(itemgetter(*keys, keys[0]), same) for keys, same in alike.items()]  # two at least, for a tuple
        self.tables, self.names = [table for table, _ in self.absent], [key for _, key in self.absent]
        self.types = list(map(type, self.typed))
        self.values = list(self._values())
        self.sizes = list(map(len, self.lists))
        self.members = self._members()
        self.contents = list(map(state_of, self.stateful))
        self.tensors = [value for value in self.values if isinstance(value, torch.Tensor)]
        self.tensor_looks = list(map(_look, self.tensors))

    def is_same(self) -> bool:
        """Whether each value is the same object, and nothing is there that was not."""
        try:
            return (
                list(map(type, self.typed)) == self.types
                and list(map(len, self.lists)) == self.sizes
                and all(map(is_, self._values(), self.values))
                and self._members() == self.members  # of which data are among the values
                and not any(map(contains, self.tables, self.names))
                and list(map(_look, self.tensors)) == self.tensor_looks
                and list(map(state_of, self.stateful)) == self.contents
            )
        except _GONE:
            return False

    def _add_whole(self, thing: Any) -> None:
        if type(thing) is dict:
            self.lists.append(thing)
            self.dicts.append(thing)
        elif type(thing) in (list, tuple):
            self.lists.append(thing)
        elif isinstance(thing, FunctionType):
            self.functions.append(thing)
            self._add_whole(vars(thing))
        elif isinstance(thing, CellType) and items_of(thing)[1]:
            self.cells.append(thing)
        elif has_state(thing):
            self.stateful.append(thing)
        else:
            self.others.append(lambda: chain(*items_of(thing)))

    def _members(self) -> list[Any]:
        """The names in classes and what they stand for; what are no data are equal if they are the same."""
        return [*chain.from_iterable(self.classes), *chain.from_iterable(map(_values, self.classes))]

    def _values(self) -> Iterator[Any]:
        """What is compared, and an end: so that others are never a beginning of these."""
        tables = chain.from_iterable(chain.from_iterable(map(look, tables) for look, tables in self.looks))
        functions = chain.from_iterable(map(_of_function, self.functions))
        cells = map(_of_cell, self.cells)
        lists = chain.from_iterable(self.lists)  # of dicts, the keys
        dicts = chain.from_iterable(map(_values, self.dicts))
        others = chain.from_iterable(give() for give in self.others)
        return chain(tables, functions, cells, lists, dicts, others, (_END,))
