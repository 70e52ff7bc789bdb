"""Observes one run of a forward: what Python reads outside of tensors, and what it writes."""

from __future__ import annotations

import builtins
import re
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum
from io import IOBase
from itertools import chain
from types import FrameType, FunctionType
from typing import Any, NamedTuple

import torch

from ...errors import InputError
from ...process import OnThread
from ..forwards import original_class
from ..private import MEMBERS
from ..ranks import has_flat_parameters, views_of_flat
from .intercept import MODULE_CODE, Called, CalledFunctions, ObservedClasses, can_be_observed, is_followed
from .objects import (
    ABSENT,
    OF_MODELS,
    SLOTS,
    UNWATCHED,
    Before,
    is_container,
    is_plain,
    items_of,
    no_attributes,
    numbers_of,
    same_objects,
    value_of,
)
from .owners import FIXED, MODULE, Beginning, OwnerReads, Reads, Source, contents


@dataclass(eq=False)
class Owner:
    """An object that the forward may read from."""

    thing: Any
    number: int  # in the order in which objects were met
    source: Source  # where it is found
    before: Before  # what it held when it was met, before the forward could write it
    scope: str  # the module that read from it last
    names: dict[str, None] = field(default_factory=dict)  # that were read, be there something or not
    is_whole: bool = False  # whether all that it holds counts
    is_open: bool = False  # whether the data of its classes count

    @property
    def is_read(self) -> bool:
        return bool(self.names or self.is_whole)

    @property
    def reads(self) -> OwnerReads:
        return OwnerReads(self.source, tuple(self.names), self.is_whole)

    def now(self, name: str) -> Any:
        """What it holds by a name now; ``ABSENT`` if nothing."""
        return value_of(self.thing, name)

    def forget(self) -> None:
        """Begin again, from what it holds now."""
        self.before = self.before.renewed(self.thing)
        self.names.clear()
        self.is_whole = self.is_open = False


class Write(NamedTuple):
    """Something outside of tensors that a forward has changed."""

    owner: Owner
    key: str  # the attribute; "" for the items of a container
    module: str  # that holds the object or, if none does, that has read it last

    def note(self) -> None:
        if self.key:
            self.owner.names[self.key] = None
        else:
            self.owner.is_whole = True


def reads_of(met: Mapping[int, Owner], effects: Mapping[tuple[int, str], Any], root: Callable[[], Any]) -> Reads:
    """What was read of the objects ``met``, by their identities, as it is now.

    ``effects`` are what planned calls write: values by the numbers of owners and by names; ``root`` gives the model.
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
        held = [owner.now(name) for name in owner.names]
        held += items_of(owner.thing)[1] if owner.is_whole else []
        pending += [met[id(value)].number for value in held if id(value) in met]
        pending += [owner.source.parent] if owner.source.parent >= 0 else []
    return needed


_LARGEST = 100_000
"""Items up to which a container is compared; of larger ones, whether they are the same ones."""


class Observer:
    """Observes a forward of ``model`` on this thread; ``where`` gives the name of the module that runs.

    If it ``is_brief``, which module has read something last is not known, nor what opaque modules write. It then goes
    on from what another forward read, if that is ``known``, holds, and changed nothing: the reads are those of both.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        where: Callable[[], str] = str,
        is_brief: bool = False,
        known: Reads | None = None,
    ) -> None:
        self._where, self.root = where, weakref.ref(model)
        self.owners: dict[int, Owner] = {}  # by the identity of the object
        self.assigned: dict[tuple[int, str], None] = {}  # attributes that the forward sets outside of opaque modules
        self.effects: dict[tuple[int, str], Any] = {}  # of these, plain values of such as it does not read
        self.written_in_opaque: dict[tuple[int, str], str] = {}
        self.opaque_that_write: dict[str, tuple[int, str]] = {}
        self.mixed: dict[str, str] = {}  # modules that read what opaque modules write, and what that is
        self.opaque: str | None = None
        self.thread = threading.get_ident()
        self._told_of: set[tuple[int, str]] = set()  # objects, by identity, and attributes of theirs that were read
        self.classes = ObservedClasses(self._told, self._assigned, self._told_of if is_brief else frozenset())
        self.functions = CalledFunctions(self._called, lambda: self.opaque is None)
        self._is_busy = False
        is_flat = has_flat_parameters(model)
        for name, module in model.named_modules():
            skipped = {*no_attributes(module), *UNWATCHED, *(views_of_flat(module) if is_flat else ())}
            self._add(module, Source(MODULE, "", name), skipped).scope = name
        self._modules = dict.fromkeys(self.owners)
        self._is_on = self._has_changed = False  # whether it observes; whether the forward was seen to change anything
        self._is_as_before = False  # whether nothing is other than when it was met
        self._known: Reads | None = None  # from which it goes on, and how many reads these are
        self._count = 0
        if is_brief and known is not None and known.calls and known.first_changed(model) is None:
            self._go_on_from(known, model)

    def _go_on_from(self, known: Reads, model: torch.nn.Module) -> None:
        """Begin where another forward of the model ended, which read ``known``."""
        objects = known.objects(model)
        if len(set(map(id, objects))) < len(objects):
            return
        self.functions = CalledFunctions(self._called, lambda: self.opaque is None, known.calls[0])
        self._known = known
        owners: list[Owner] = []
        for (source, names, is_whole), thing in zip(known.owners, objects, strict=True):
            is_globals = type(thing) is dict and source.parent == FIXED
            moved = source if source.parent < 0 else source._replace(parent=owners[source.parent].number)
            owners.append(owner := self._add(thing, moved, is_globals=is_globals))
            owner.is_open = is_whole and isinstance(thing, type)
            for name in names if is_globals else ():
                owner.before.add(thing, name)
            owner.names, owner.is_whole = dict.fromkeys(names), is_whole
        self._count = self._reads_until_now()
        modules = [self.owners[number].thing for number in self._modules][1:]
        again = known.begun_at(model)
        if again is not None and same_objects(modules, again.modules):
            self._told_of |= again.told_of
            return
        number = len(self.owners)
        self._meet_again(owners)
        if len(self.owners) == number:
            known.begin_at(model, Beginning(modules, frozenset(self._told_of)))

    def _meet_again(self, owners: list[Owner]) -> None:
        """Look at what was read of these, as when it was, and note what need not be told of."""
        before = [(owner.names, owner.is_whole) for owner in owners]
        with self._busy():
            for owner, (names, is_whole) in zip(owners, before, strict=True):
                owner.names, owner.is_whole = {}, False
                if is_whole:
                    self._read_all(owner)
                for name in names:
                    self._name_read(owner, name)
        assert before == [(owner.names, owner.is_whole) for owner in owners]
        whole = {id(owner.thing) for owner in owners if owner.is_open}
        for owner in owners:
            if not isinstance(owner.thing, (dict, type)):
                self._told_of.update((id(owner.thing), name) for name in owner.names)
        for number in self._modules:
            module = self.owners[number].thing
            if all(id(kind) in whole for kind in _mro(module) if is_followed(kind.__module__)):
                self._told_of.update((number, name) for name in ("__class__", *_members_of(module)))

    def _reads_until_now(self) -> int:
        return sum(len(owner.names) + owner.is_whole for owner in self.owners.values())

    def where(self) -> str:
        return self._where() if self.opaque is None else self.opaque

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def observed(*args: Any, **kwargs: Any) -> Any:
            self._is_on, self._is_as_before = True, False
            self._observe_all()
            try:
                with _observer.set_to(self), self.functions.observed():
                    return forward(*args, **kwargs)
            finally:
                self.classes.restore()
                self._note_effects()

        return observed

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, no class is changed."""
        with self._busy(), self.classes.paused():
            yield

    @contextmanager
    def in_opaque(self, name: str) -> Iterator[None]:
        """Inside, what is read makes no difference: an opaque module runs, which reads it in each call."""
        before = self._differences()
        self.opaque, outer = name, self.opaque
        try:
            yield
        finally:
            self.opaque = outer
            for change, values in self._differences().items():
                if not same_objects(values, before.get(change, ())):
                    self.written_in_opaque[change] = name
                    self.opaque_that_write[name] = change

    # -- what is read --------------------------------------------------------------------------------------

    def _told(self, thing: Any, name: str, frame: FrameType) -> None:
        owner = self.owners.get(id(thing))
        if owner is None or self._is_busy or threading.get_ident() != self.thread or name in owner.before.skipped:
            return
        if (id(thing), name) in self._told_of and not self.written_in_opaque:
            owner.scope = self.where()
            return
        is_ours = str(frame.f_globals.get("__name__")).startswith("ogc.") and OF_MODELS not in frame.f_globals
        if frame.f_globals is MODULE_CODE or is_ours:
            return
        with self._busy():
            owner.scope = self.where()
            self._open(owner)
            if name == "__dict__":
                self._read_all(owner)
                return
            if not (name.startswith("__") and name.endswith("__")):
                self._read(owner, name)
            if self.opaque is None:
                self._told_of.add((id(thing), name))

    def _assigned(self, thing: Any, name: str, _: FrameType) -> None:
        owner = self.owners.get(id(thing))
        is_ours = owner is not None and self.opaque is None and threading.get_ident() == self.thread
        if owner is not None and is_ours and not self._is_busy and name not in owner.before.skipped:
            self.assigned[owner.number, name] = None

    def _note_effects(self) -> None:
        owners = list(self.owners.values())
        for number, name in self.assigned:
            owner = owners[number]
            if name not in owner.names and is_plain(value := owner.now(name)):
                self.effects[number, name] = value

    @contextmanager
    def _busy(self) -> Iterator[None]:
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    def _read(self, owner: Owner, name: str) -> None:
        thing = owner.thing
        table = vars(thing) if hasattr(thing, "__dict__") else {}
        kinds = _mro(thing)
        kind = next((one for one in kinds if name in vars(one)), None)
        found = None if kind is None else vars(kind)[name]
        is_module = id(thing) in self._modules
        is_slot = isinstance(found, SLOTS)
        if is_slot or (name in table and not hasattr(type(found), "__set__")):
            self._name_read(owner, name)
        elif kind is not None:
            if not hasattr(type(found), "__set__"):
                self._name_read(owner, name)
            for one in kinds[: kinds.index(kind) + 1]:
                self._name_read(self._class(one), name)
        elif is_module and any(name in vars(thing)[members] for members in MEMBERS if members in vars(thing)):
            return  # parameters, buffers and submodules are looked at by themselves
        elif not is_module and any("__getattr__" in vars(one) for one in kinds):
            self._read_all(owner)  # which finds it wherever it likes
        else:
            self._name_read(owner, name)

    def _name_read(self, owner: Owner, name: str) -> None:
        """Note that a name was read, be there something or not."""
        if not self._is_as_at_first(owner, name):
            return
        value = owner.now(name)
        if self.opaque is None and not (value is ABSENT and isinstance(owner.thing, _NO_TABLE)):
            owner.names[name] = None
        if value is not ABSENT:
            self._meet(value, Source(owner.number, "name", name))

    def _is_as_at_first(self, owner: Owner, name: str) -> bool:
        """Whether a name stands for what it stood for before the forward; what it wrote itself is no read."""
        written = self.written_in_opaque.get((owner.number, name))
        if written is not None and self.opaque is None:
            self.mixed.setdefault(self.where(), f"reads {name}, which {written} writes while it runs")
        return owner.now(name) is owner.before.held(name)

    def _read_all(self, owner: Owner) -> None:
        """Note that all that an object holds was read."""
        if self.opaque is None and not owner.is_whole:
            owner.is_whole = True
            written = self.written_in_opaque.get((owner.number, ""))
            if written is not None:
                self.mixed.setdefault(self.where(), f"reads what {written} writes while it runs")
        keys, items = items_of(owner.thing)
        if len(items) > _LARGEST:
            owner.is_whole = False
            return
        is_class = isinstance(owner.thing, type)
        for place, item in enumerate(items):
            self._meet(item, Source(owner.number, *(("name", keys[place]) if is_class else ("item", place))))

    # -- whom it is read from ------------------------------------------------------------------------------

    def _meet(self, value: Any, source: Source) -> None:
        """Look at a value that Python has got: from now on it may read from that."""
        if is_plain(value) or isinstance(value, torch.Tensor):
            return
        place = f"[{source.key}]" if source.step == "item" else str(source.key)
        _refuse_used_up(value, lambda: self._name(source.parent, place))
        if isinstance(value, type):
            if is_followed(value.__module__) and not issubclass(value, Enum):
                self._class(value)
            return
        is_function = isinstance(value, FunctionType)
        is_whole = is_container(value) and not (is_function and not (is_followed(value.__module__) and vars(value)))
        if not is_whole and (is_function or not can_be_observed(value)):
            return
        is_new = id(value) not in self.owners
        owner = self._add(value, source)
        if is_new and self._is_on:
            self._observe(owner)
        if is_whole and (is_new or (self.opaque is None and not owner.is_whole)):
            self._read_all(owner)

    def _observe(self, owner: Owner) -> None:
        if can_be_observed(owner.thing) and not self.classes.observe(owner.thing):
            self._read_all(owner)

    def _observe_all(self) -> None:
        no_instances = (torch.jit.ScriptModule, type, *((FunctionType,) if self._known is not None else ()))
        done = set[type]()  # classes of modules that tell
        with self._busy():
            for owner in list(self.owners.values()):
                if type(owner.thing) not in done and not isinstance(owner.thing, no_instances):
                    self._observe(owner)
                    if isinstance(owner.thing, torch.nn.Module) and not owner.is_whole:
                        done.add(type(owner.thing))

    def _open(self, owner: Owner) -> None:
        """From now on the data of an object's classes count."""
        if self.opaque is None and not owner.is_open:
            owner.is_open = True
            for kind in _mro(owner.thing):
                if is_followed(kind.__module__):
                    self._class(kind)

    def _class(self, kind: type) -> Owner:
        """A class; of one whose attributes may change, all that are data count."""
        owner = self._add(kind, Source(FIXED, "", kind))
        if self.opaque is None and not owner.is_open and is_followed(kind.__module__):
            owner.is_open = True
            self._read_all(owner)
        return owner

    def _called(self, called: Called) -> None:
        if self._is_busy:
            return
        with self._busy():
            first = self.owners.get(id(called.first))
            if isinstance(called.first, type) and is_followed(called.first.__module__):
                self._class(called.first)
            elif first is not None:
                self._open(first)
            self._globals(called.table, called.table if "globals" in called.names else called.names)
            for function in called.functions:
                self._function(function)

    def _function(self, function: FunctionType) -> None:
        owner = self._add(function, Source(FIXED, "", function))
        self._read_all(owner)
        for place, cell in enumerate(function.__closure__ or ()):
            self._read_all(self._add(cell, Source(owner.number, "cell", place)))

    def _globals(self, table: dict[str, Any], names: Collection[str]) -> None:
        owner = self._add(table, Source(FIXED, "", table), is_globals=True)
        owner.scope = self.where()
        for name in list(names):
            if not name.startswith("__") and (name in table or not hasattr(builtins, name)):
                owner.before.add(table, name)
                self._name_read(owner, name)

    def _add(self, thing: Any, source: Source, skipped: Collection[str] = (), is_globals: bool = False) -> Owner:
        owner = self.owners.get(id(thing))
        if owner is None:
            before = Before(thing, skipped, is_globals)
            owner = self.owners[id(thing)] = Owner(thing, len(self.owners), source, before, self.where())
        return owner

    # -- what came of it -----------------------------------------------------------------------------------

    def _changed(self) -> Iterator[tuple[int, str]]:
        with self._busy():
            for owner in list(self.owners.values()):
                for key in owner.before.changed(owner.thing):
                    self._has_changed = True
                    yield owner.number, key

    def _differences(self) -> dict[tuple[int, str], list[Any]]:
        owners = list(self.owners.values())
        return {(n, key): [owners[n].now(key)] if key else items_of(owners[n].thing)[1] for n, key in self._changed()}

    def changing(self) -> dict[str, str]:
        """The modules that have changed something, opaque ones too, and what."""
        owners = list(self.owners.values())
        of_opaque = [Write(owners[number], key, opaque) for opaque, (number, key) in self.opaque_that_write.items()]
        found = (*self.writes(None), *of_opaque)
        return {write.module: self.name(write) for write in found}

    def writes(self, opaque: Collection[str] | None) -> list[Write]:
        """After it: what the forward has changed, but for what these opaque modules change, as they do in each call."""
        owners, covered = list(self.owners.values()), tuple(f"{name}." for name in opaque or ())
        known = numbers_of([owner.thing for owner in owners])
        found, changed = [], list(self._changed())
        self._is_as_before = not changed
        for number, key in changed:
            owner, is_of_opaque = owners[number], (number, key) in self.written_in_opaque
            if (is_of_opaque and opaque is not None) or owner.before.is_equal(owner.thing, key, known):
                continue
            module = str(owner.source.key) if owner.source.parent == MODULE else owner.scope
            if not f"{module}.".startswith(covered):
                found.append(Write(owner, key, module))
        return found

    def name(self, write: Write) -> str:
        """What messages call what was written, as that of the module that writes it."""
        name = self._name(write.owner.number, write.key)
        name = re.sub(r"(\[\d+\])+$", "", name)  # the items of a container
        own = f"the attribute {write.module}." if write.module else "the attribute "
        is_own = name.startswith(own) and " of class " not in name
        return f"its attribute {name.removeprefix(own)}" if is_own else name

    def _name(self, number: int, key: str) -> str:
        return Reads(tuple(owner.reads for owner in self.owners.values())).name(number, key)

    def put_back(self) -> None:
        """Let all that was met hold what it held before; of two that share a table, the first that was met is right."""
        if self._is_as_before:
            return
        for owner in reversed(self.owners.values()):
            owner.before.put_back(owner.thing)

    @property
    def others(self) -> list[tuple[Any, Before]]:
        """What was met beside the model's modules, with what it held before."""
        return [(owner.thing, owner.before) for owner in self.owners.values() if owner.source.parent != MODULE]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Observe from what all holds now; afterwards it holds what it held before the first time."""
        before = [(owner, owner.before) for owner in self.owners.values()]
        for owner, _ in before:
            owner.forget()
        for found in (self.written_in_opaque, self.assigned, self.effects, self._told_of):
            found.clear()
        self.functions = CalledFunctions(self._called, lambda: self.opaque is None)
        try:
            yield
        finally:
            self.put_back()
            for owner, held in before:
                held.put_back(owner.thing)

    def reads(self, written: Collection[Write] = ()) -> Reads:
        """What the forward has read, as it is now; with what it has ``written``, unless planned calls write that."""
        for write in written:
            write.note()
        is_settled = self._is_as_before and not (self._has_changed or self.effects)
        calls = [self.functions.known] if is_settled else []
        if self._known is not None and not self.effects and self._reads_until_now() == self._count:
            self._known.calls[:] = calls or self._known.calls
            return self._known
        return replace(reads_of(self.owners, self.effects, self.root), calls=calls)


_observer: OnThread[Observer | None] = OnThread(None)


@contextmanager
def opaque_call(name: str) -> Iterator[None]:
    """Inside, an opaque module runs: what it reads makes no difference to who observes."""
    observer = _observer.value
    with nullcontext() if observer is None else observer.in_opaque(name):
        yield


@contextmanager
def call_unseen() -> Iterator[None]:
    """Inside, nothing is observed: compiled code looks at the classes of what it calls."""
    observer = _observer.value
    with nullcontext() if observer is None else observer.off():
        yield


def _refuse_used_up(thing: Any, name: Callable[[], str]) -> None:
    """Raise InputError, with its name, for what gives something else each time and cannot be put back."""
    if not isinstance(thing, Iterator) or isinstance(thing, IOBase):
        return
    if not isinstance(getattr(type(thing), "__next__", None), FunctionType):  # else its attributes are observed
        raise InputError(
            f"the forward reads {name()}, an iterator ({type(thing).__name__}), which planning would use up, as nobody "
            "can put it back; hand what it gives in as an argument, or optimize submodules that do without"
        )


def _members_of(module: torch.nn.Module) -> Iterator[str]:
    """The names of parameters, buffers and submodules that are looked up nowhere else."""
    table = vars(module)
    for name in chain.from_iterable(table[members] for members in MEMBERS if members in table):
        if name not in table and not any(name in vars(kind) for kind in _mro(module)):
            yield name


_NO_TABLE = (list, tuple, set, frozenset)


def _mro(thing: Any) -> tuple[type, ...]:
    """The classes in which the attributes of an object are looked up."""
    if isinstance(thing, type):
        return ()
    return (original_class(thing) if isinstance(thing, torch.nn.Module) else type(thing)).__mro__
