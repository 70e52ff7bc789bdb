"""Tells, cheaply and before every call, whether what a forward read outside of tensors is still the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, contains, is_, itemgetter, methodcaller
from types import CellType, FunctionType
from typing import Any

import torch

from .owners import MODULE, Reads, data_of_class, items_of, table_of
from .states import content_of, has_state

_values = methodcaller("values")
_look = attrgetter("requires_grad", "dtype", "device", "shape")
_of_function = attrgetter("__code__", "__defaults__", "__kwdefaults__", "__dict__")
_of_cell = attrgetter("cell_contents")
_END = object()
_GONE = (LookupError, AttributeError, ValueError, TypeError)


class WatchedReads:
    """What a forward read, for a model and its copies.

    Each call compares it with what it was by identity, and only where that differs by what it holds.
    """

    def __init__(self, reads: Reads, model: torch.nn.Module) -> None:
        self.reads = reads
        self.seen: weakref.WeakKeyDictionary[torch.nn.Module, _Seen] = weakref.WeakKeyDictionary()
        self.first_changed(model)

    def first_changed(self, model: torch.nn.Module) -> str | None:
        """In words, what Python would read otherwise of a model now; None if nothing."""
        seen = self.seen.get(model)
        if seen is not None and seen.is_same():
            return None
        changed = self.reads.first_changed(model)
        if changed is None:
            self.seen[model] = _Seen(self.reads, self.reads.objects(model))
        return changed

    def write(self, model: torch.nn.Module) -> None:
        """Write what the forward writes."""
        if self.reads.effects:
            self.reads.write(model)


class _Seen:
    """Where values are that were read, and what they were when they were last looked at.

    No reference to the model itself is held: it is the key of the weak dictionary that holds this.
    """

    def __init__(self, reads: Reads, objects: Sequence[Any]) -> None:
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
            if owner.keys:
                alike.setdefault(owner.keys, []).append(table_of(thing))
            if owner.absent:
                self.absent += [(table_of(thing), key) for key in owner.absent]
            if owner.slots:
                get = attrgetter(*owner.slots, owner.slots[0])
                self.others.append(lambda thing=thing, get=get: get(thing))  # type: ignore[misc]
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
        self.contents = list(map(content_of, self.stateful))
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
                and list(map(content_of, self.stateful)) == self.contents
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
