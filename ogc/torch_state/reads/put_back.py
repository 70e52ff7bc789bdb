"""What an object held, to see whether it was changed, and to put it back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import is_
from types import CellType, FunctionType
from typing import Any

from .owners import (
    ABSENT,
    content,
    is_container,
    items_of,
    kind_of_container,
    set_attribute,
    slots_of,
    table_of,
)
from .states import content_of, has_state, kept_state, put_state


class Before:
    """What an object held at first.

    Args:
        thing: an object, a class, a Python module, the globals of a function, or a container.
        skipped: names that do not count.
        is_globals: whether it is the globals of a function, of which each is remembered when it is named.
    """

    def __init__(self, thing: Any, skipped: Collection[str] = (), is_globals: bool = False) -> None:
        self.skipped = frozenset(skipped)
        self.is_globals = is_globals
        self.slots = () if isinstance(thing, type) else tuple(slots_of(type(thing)))
        self.items = items_of(thing) if is_container(thing) and not is_globals else None
        self.state = (kept_state(thing), content_of(thing)) if has_state(thing) else None
        table = self._table(thing)
        self.values = list(table.values()) if not is_globals else []
        self.names = dict(table) if not is_globals else {}
        self.in_slots = {name: getattr(thing, name, ABSENT) for name in self.slots}

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
        return self.in_slots[name] if name in self.in_slots else self.names.get(name, ABSENT)

    def changed(self, thing: Any) -> Iterator[str]:
        """The attributes that are others now; "" for the items of a container."""
        table = self._table(thing)
        if self.is_globals:
            yield from (key for key, value in self.names.items() if table.get(key, ABSENT) is not value)
        elif len(table) != len(self.values) or not all(map(is_, table.values(), self.values)):
            is_class = isinstance(thing, type)
            keys = {**self.names, **table}.keys() - self.skipped
            keys = {key for key in keys if not (is_class and key.startswith("__"))}
            yield from (key for key in keys if table.get(key, ABSENT) is not self.names.get(key, ABSENT))
        yield from (name for name in self.slots if getattr(thing, name, ABSENT) is not self.in_slots[name])
        is_other_state = self.state is not None and content_of(thing) != self.state[1]
        if is_other_state or (self.items is not None and not _same(self.items, items_of(thing))):
            yield ""

    def is_equal(self, thing: Any, key: str, known: Mapping[int, int]) -> bool:
        """Whether what is another object now is equal to what was there."""
        if not key:
            if self.items is None or self.state is not None:
                return False
            keys, items = items_of(thing)
            now, before = ([content(item, known) for item in found] for found in (items, self.items[1]))
            return keys == self.items[0] and now == before
        value = getattr(thing, key, ABSENT) if key in self.slots else self._table(thing).get(key, ABSENT)
        return bool(content(value, known) == content(self.held(key), known))

    def put_back(self, thing: Any) -> None:
        """Let the object hold what it held at first."""
        for key in list(self.changed(thing)):
            if self.state is not None and not key:
                put_state(thing, self.state[0])
            elif not key:
                self._put_items_back(thing)
            elif isinstance(thing, type) or key in self.slots:
                set_attribute(thing, key, self.held(key))
            else:
                table: Any = self._table(thing)
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

    def _table(self, thing: Any) -> Mapping[str, Any]:
        """The names of the object and what they stand for; those of containers are among their items."""
        if self.is_globals:
            return thing  # type: ignore[no-any-return]
        has_table = hasattr(thing, "__dict__") and not isinstance(thing, FunctionType)
        return table_of(thing) if has_table else {}


def same_objects(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects."""
    return len(some) == len(others) and all(map(is_, some, others))


def _same(some: tuple[list[Any], list[Any]], others: tuple[list[Any], list[Any]]) -> bool:
    return all(map(same_objects, some, others))
