"""The objects that a forward reads from, where they are found, and what they hold."""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy
import torch

from ..attributes import Itself
from ..forwards import original_class
from .states import content_of, has_state

MODULE, FIXED = -1, -2
"""In the place of a parent: the object is a submodule of the model, by its name; or it is the same for all models."""

PLAIN = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type(Ellipsis), numpy.generic,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
"""What is the same whenever its text is."""

ABSENT = object()
"""In the place of a value: there is none."""

_CONTAINERS = (list, tuple, OrderedDict, dict, set, frozenset, deque)
_NO_DATA = ("__", "_abc_")
_look = attrgetter("requires_grad", "dtype", "device", "shape")


class Source(NamedTuple):
    """Where an object is found.

    Attributes:
        parent: the number of the owner that holds it, ``MODULE`` or ``FIXED``.
        step: how it is found there: ``"attribute"``, ``"slot"``, ``"item"`` or, of a function, ``"cell"``.
        key: by what name or position; the name of a submodule; what is fixed itself.
    """

    parent: int
    step: str
    key: Any

    def find(self, model: torch.nn.Module, objects: Sequence[Any]) -> Any:
        """The object, given those that are found before it."""
        if self.parent == FIXED:
            return self.key
        if self.parent == MODULE:
            return model.get_submodule(self.key)
        holder = objects[self.parent]
        if self.step == "item":
            return items_of(holder)[1][self.key]
        if self.step == "cell":
            return holder.__closure__[self.key]
        return getattr(holder, self.key) if self.step == "slot" else table_of(holder)[self.key]


class OwnerReads(NamedTuple):
    """What was read of one object.

    Attributes:
        source: where it is found.
        keys: the attributes or globals that were there.
        absent: those that were not there.
        slots: those in slots.
        is_whole: whether all items count, as of a list.
    """

    source: Source
    keys: tuple[str, ...]
    absent: tuple[str, ...]
    slots: tuple[str, ...]
    is_whole: bool


@dataclass(frozen=True, eq=False, repr=False)
class Reads:
    """What a forward read outside of tensors, and what it wrote.

    Attributes:
        owners: the objects that it read from, each after those in which it is found.
        expected: what these held at the start of the forward.
        effects: plain values that it wrote and did not read before: the number of the owner, the name, the value.
        root: gives the model that was observed. A copy of it stands for it, also where a function is bound to it.
    """

    owners: tuple[OwnerReads, ...] = ()
    expected: tuple[Any, ...] = ()
    effects: tuple[tuple[int, str, Any], ...] = ()
    root: Callable[[], Any] = lambda: None

    def objects(self, model: torch.nn.Module) -> list[Any]:
        """The owners as they are found now.

        Raises:
            LookupError, AttributeError, ValueError, TypeError: one is no longer there.
        """
        found: list[Any] = []
        for owner in self.owners:
            found.append(owner.source.find(model, found))
        return found

    def first_changed(self, model: torch.nn.Module) -> str | None:
        """In words, what Python would read otherwise now; None if nothing."""
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

    def write(self, model: torch.nn.Module) -> None:
        """Write what the forward writes."""
        objects = self.objects(model)
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
            path.insert(0, self._step_name(source, self.owners[number].source.key))

    def _step_name(self, source: Source, holder: Any) -> str:
        if source.step == "cell":
            return str(holder.__code__.co_freevars[source.key])
        return f"[{source.key}]" if source.step == "item" else str(source.key)


def _fixed_name(thing: Any, path: str) -> str:
    """What messages call what is found in an object that is the same for all models."""
    if isinstance(thing, type):
        return f"the attribute {path} of class {thing.__qualname__}"
    if isinstance(thing, FunctionType):
        is_of_closure = path and not path.startswith("[")
        what = f"the variable {path.removesuffix('[0]')}" if is_of_closure else "a default argument or an attribute"
        return f"{what} of {thing.__qualname__}"
    return f"the global {path} of {thing.get('__name__', 'a module')}"


def table_of(thing: Any) -> Mapping[str, Any]:
    """The names that an object, a class, a Python module or a function's globals have, and what they stand for."""
    return thing if type(thing) is dict else vars(thing) if hasattr(thing, "__dict__") else {}


def is_container(thing: Any) -> bool:
    """Whether an object is read as a whole: what it gives of itself cannot be observed."""
    return isinstance(thing, (*_CONTAINERS, partial, MethodType, CellType, FunctionType)) or has_state(thing)


def items_of(thing: Any) -> tuple[list[Any], list[Any]]:
    """The keys and the items of what is read as a whole, whatever its class makes of them."""
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
    named = {key: value for key, value in vars(kind).items() if not key.startswith(_NO_DATA)}
    return {key: value for key, value in named.items() if not hasattr(type(value), "__get__")}


def _of_cell(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # nothing is in it yet
        return []


def is_plain(value: Any) -> bool:
    """Whether a value is data that is the same whenever its text is."""
    if isinstance(value, tuple) and not hasattr(value, "__dict__"):
        return all(map(is_plain, value))
    return isinstance(value, (*PLAIN, enum.Enum))


def content(value: Any, known: Mapping[int, int]) -> Any:
    """What is equal for values that make no difference to a forward; owners are ``known`` by their numbers."""
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
    """The number of each owner, by its identity; of one that is found in several places, the first."""
    return {id(thing): number for number, thing in reversed(list(enumerate(objects)))}


def contents(owners: Sequence[OwnerReads], objects: Sequence[Any]) -> tuple[Any, ...]:
    """What each owner holds of what counts."""
    known = numbers_of(objects)
    return tuple(map(partial(_content_of_owner, known), owners, objects))


def _content_of_owner(known: Mapping[int, int], owner: OwnerReads, thing: Any) -> dict[str, Any]:
    is_root = owner.source.parent == MODULE and not owner.source.key
    kind = original_class(thing) if isinstance(thing, torch.nn.Module) else type(thing)
    found: dict[str, Any] = {} if is_root else {"": (known[id(thing)], Itself(kind))}
    if owner.keys or owner.absent:
        table = table_of(thing)
        found |= {key: content(table[key], known) if key in table else None for key in owner.keys}
        found |= {key: key in table for key in owner.absent}
    found |= {key: content(getattr(thing, key, None), known) for key in owner.slots}
    if owner.is_whole:
        keys, items = items_of(thing)
        inside = [content(item, known) for item in items]
        if has_state(thing):
            inside = [content_of(thing)]
        found["[]"] = [*map(repr, keys)], inside
        if isinstance(thing, type):
            methods = {key: Itself(value) for key, value in vars(thing).items() if not key.startswith(_NO_DATA)}
            found["[]"] = {**methods, **dict(zip(keys, inside, strict=True))}
    return found


def _first_difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    key = next((key for key in before if before[key] != now.get(key)), "")
    return "" if key == "[]" else key


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


def slots_of(kind: type) -> Iterator[str]:
    """The names of the slots that instances of a class have."""
    for one in kind.__mro__:
        found = vars(one).get("__slots__", ())
        for name in (found,) if isinstance(found, str) else tuple(found):
            if name not in ("__dict__", "__weakref__"):
                private = name.startswith("__") and not name.endswith("__")
                yield f"_{one.__name__.lstrip('_')}{name}" if private else name
