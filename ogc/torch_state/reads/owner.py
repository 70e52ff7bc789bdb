"""An object that a forward reads from while it is observed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .owners import ABSENT, OwnerReads, Reads, Source, contents, items_of, table_of
from .put_back import Before


@dataclass(eq=False)
class Owner:
    """An object that the forward may read from.

    Attributes:
        thing: the object itself.
        number: in the order in which objects were met.
        source: where it is found.
        before: what it held when it was met, before the forward could write it.
        scope: the module that read from it last.
        keys, absent, slots: names that were read.
        is_whole: whether all that it holds counts.
        is_open: whether the data of its classes count.
    """

    thing: Any
    number: int
    source: Source
    before: Before
    scope: str
    keys: dict[str, None] = field(default_factory=dict)
    absent: dict[str, None] = field(default_factory=dict)
    slots: dict[str, None] = field(default_factory=dict)
    is_whole: bool = False
    is_open: bool = False

    @property
    def is_read(self) -> bool:
        """Whether something was read of it."""
        return bool(self.keys or self.absent or self.slots or self.is_whole)

    @property
    def reads(self) -> OwnerReads:
        """What was read of it."""
        return OwnerReads(self.source, tuple(self.keys), tuple(self.absent), tuple(self.slots), self.is_whole)

    def now(self, name: str) -> Any:
        """What it holds by a name now; ``ABSENT`` if nothing."""
        return (
            getattr(self.thing, name, ABSENT) if name in self.before.slots else table_of(self.thing).get(name, ABSENT)
        )

    def forget(self) -> None:
        """Begin again, from what it holds now."""
        self.before = self.before.renewed(self.thing)
        for found in (self.keys, self.absent, self.slots):
            found.clear()
        self.is_whole = self.is_open = False


class Write(NamedTuple):
    """Something outside of tensors that a forward has changed.

    Attributes:
        owner: the object that holds it.
        key: the attribute; "" for the items of a container.
        module: the module that holds the object or, if none does, that has read it last.
    """

    owner: Owner
    key: str
    module: str

    def note(self) -> None:
        """Note it as read."""
        owner, key = self.owner, self.key
        if not key:
            owner.is_whole = True
        elif key in owner.before.slots:
            owner.slots[key] = None
        else:
            (owner.absent if owner.now(key) is ABSENT else owner.keys)[key] = None


def reads_of(met: Mapping[int, Owner], effects: Mapping[tuple[int, str], Any], root: Callable[[], Any]) -> Reads:
    """What was read of the objects that were met, by their identities, as it is now.

    Args:
        met: the objects.
        effects: what planned calls write: values by the numbers of owners and by names.
        root: gives the model.
    """
    owners = list(met.values())
    numbers = _needed(met, [owner.number for owner in owners if owner.is_read] + [number for number, _ in effects])
    kept = [owners[number] for number in sorted(numbers)]
    new = {owner.number: place for place, owner in enumerate(kept)}
    found = []
    for owner in kept:
        source = owner.source
        moved = source if source.parent < 0 else source._replace(parent=new[source.parent])
        found.append(owner.reads._replace(source=moved))
    expected = contents(found, [owner.thing for owner in kept])
    written = tuple((new[number], key, value) for (number, key), value in effects.items())
    return Reads(tuple(found), expected, written, root)


def _needed(met: Mapping[int, Owner], pending: list[int]) -> set[int]:
    """These owners, those that hold them, and those that were what was read."""
    owners, needed = list(met.values()), set[int]()
    while pending:
        owner = owners[pending.pop()]
        if owner.number in needed:
            continue
        needed.add(owner.number)
        held = [owner.now(key) for key in (*owner.keys, *owner.slots)]
        held += items_of(owner.thing)[1] if owner.is_whole else []
        pending += [met[id(value)].number for value in held if id(value) in met]
        pending += [owner.source.parent] if owner.source.parent >= 0 else []
    return needed
