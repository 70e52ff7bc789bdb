"""Tells of each attribute that Python reads or sets, and of each function that it calls."""

from __future__ import annotations

import dis
import gc
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from logging import Logger, LoggerAdapter
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

MODULE_CODE = vars(torch.nn.modules.module)
"""Whatever reads attributes of modules there, calls and finds what these have."""

Told = Callable[[Any, str, FrameType], None]
"""Is given an object, the name of an attribute and who reads or sets it."""

NOT_FOLLOWED = frozenset({*sys.stdlib_module_names, "numpy", "ogc", "torch"} - {"__main__"})
"""Packages whose globals and classes decide nothing that changes."""


def is_followed(name: Any) -> bool:
    """Whether what Python reads of a Python module, or in it, may change what a forward computes."""
    return not str(name).startswith("namedtuple_") and str(name).partition(".")[0] not in NOT_FOLLOWED


class ObservedClasses:
    """Classes that tell, until :meth:`restore`, before an attribute is ``read`` or ``assigned``.

    ``__getattribute__`` and ``__setattr__`` are put into the class, or into that of its bases which has its own: the
    class stays what it is.
    """

    def __init__(self, read: Told, assigned: Told, known: Collection[tuple[int, str]] = ()) -> None:
        """Reads in ``known``, of objects by their identities, are not told of."""
        self.told = {"__getattribute__": read, "__setattr__": assigned}
        self.known = known
        self._known: dict[tuple[type, str], bool] = {}
        self._put_in: list[Callable[[], None]] = []  # what was done, to be done again
        self._restore: list[Callable[[], None]] = []
        self._of_modules: type[ModuleType] | None = None

    def observe(self, thing: Any) -> bool:
        """Observe the class of an object; whether that can be done."""
        if type(thing) is not ModuleType:
            return all(self._put(type(thing), name) for name in self.told)
        if self._of_modules is None:
            self._of_modules = type(
                "module", (ModuleType,), {name: self._telling(ModuleType, name) for name in self.told}
            )
        self._do(
            partial(setattr, thing, "__class__", self._of_modules), partial(setattr, thing, "__class__", ModuleType)
        )
        return True

    def restore(self) -> None:
        """Let all classes be as before; they may be observed again."""
        for restore in reversed(self._restore):
            restore()
        for found in (self._restore, self._put_in, self._known):
            found.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, all classes are as before, and none is to be observed."""
        puts, restores = self._put_in, self._restore
        self._put_in, self._restore = [], []
        for restore in reversed(restores):
            restore()
        try:
            yield
        finally:
            for put in puts:
                put()
            self._put_in, self._restore = puts, restores

    def _do(self, put: Callable[[], None], restore: Callable[[], None]) -> None:
        put()
        self._put_in.append(put)
        self._restore.append(restore)

    def _put(self, kind: type, name: str) -> bool:
        if (kind, name) in self._known:
            return self._known[kind, name]
        owner = next(one for one in kind.__mro__ if name in vars(one))
        is_own = isinstance(vars(owner)[name], FunctionType)
        target = owner if is_own else torch.nn.Module if issubclass(kind, torch.nn.Module) else kind
        if (target, name) not in self._known:
            self._known[target, name] = self._replace(target, name)
        self._known[kind, name] = self._known[target, name]
        return self._known[kind, name]

    def _replace(self, target: type, name: str) -> bool:
        before, telling = vars(target).get(name), self._telling(target, name)
        restore = partial(delattr, target, name) if before is None else partial(setattr, target, name, before)
        try:
            self._do(partial(setattr, target, name, telling), restore)
        except TypeError:  # a class that is written in C
            return False
        return True

    def _telling(self, kind: type, name: str) -> Callable[..., Any]:
        do: Callable[..., Any] = getattr(kind, name)
        told, frame_of, known = self.told[name], sys._getframe, self.known

        def telling(self: Any, name: str, *value: Any) -> Any:
            told(self, name, frame_of(1))
            return do(self, name, *value)

        def telling_of_new(self: Any, name: str) -> Any:
            if (id(self), name) not in known and (frame := frame_of(1)).f_globals is not MODULE_CODE:
                told(self, name, frame)
            return do(self, name)

        return telling_of_new if name == "__getattribute__" and isinstance(known, set) else telling


SERVICES = (Logger, LoggerAdapter)


def can_be_observed(thing: Any) -> bool:
    """Whether an object is one of those whose attributes may decide what a forward computes."""
    kind = type(thing)
    if isinstance(thing, ModuleType):
        return is_followed(thing.__name__)
    if isinstance(thing, torch.nn.Module):
        return True
    is_torchs = kind.__module__.partition(".")[0] in ("torch", "ogc")
    has_names = kind.__dictoffset__ != 0 or any(vars(one).get("__slots__") for one in kind.__mro__)
    return has_names and not is_torchs and not isinstance(thing, (*SERVICES, torch.Tensor, type))


# -- functions -------------------------------------------------------------------------------------------


_KNOWN = 5_000
"""Functions of which it is remembered which globals they name."""


class Called(NamedTuple):
    """A function that is about to run."""

    functions: list[FunctionType]  # those that have its code; none if the forward itself makes it
    table: dict[str, Any]  # its globals
    names: frozenset[str]  # which of them it names
    first: Any  # its first argument; None without one


@lru_cache(maxsize=_KNOWN)
def _globals_named(code: CodeType) -> frozenset[str]:
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opname in _OF_GLOBALS)


_OF_GLOBALS = {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"}

_functions: dict[int, list[weakref.ref[FunctionType]]] = {}
"""By the number of a code, which they keep alive: the functions that had it when they were last looked for."""


class KnownCalls(NamedTuple):
    """Calls that were told of. What is kept keeps the numbers of objects from being used again."""

    seen: frozenset[tuple[Any, ...]]
    codes: dict[int, CodeType]  # of functions that are followed
    others: dict[int, CodeType]
    closures: tuple[Any, ...]  # what the variables in the closures of the functions were


_MADE = object()
"""In the place of its closure: the forward itself makes the function that is called."""


class CalledFunctions:
    """Tells of functions that this thread calls, once for each class of the first argument, closure and ``mode()``.

    It does not tell of calls that are ``known``, as those of another forward.
    """

    def __init__(
        self, told: Callable[[Called], None], mode: Callable[[], object], known: KnownCalls | None = None
    ) -> None:
        self.told, self.mode = told, mode
        self._known = frozenset[tuple[Any, ...]]() if known is None else known.seen
        self._seen: set[tuple[Any, ...]] = {*self._known}
        self._of_forward: set[tuple[Any, ...]] = set()  # of these, calls of functions that end with the forward
        self._codes: dict[int, CodeType] = {} if known is None else {**known.codes}  # of those that are followed
        self._others: dict[int, CodeType] = {} if known is None else {**known.others}  # which keeps their numbers, too
        self._closures: list[Any] = [] if known is None else [*known.closures]
        self._is_sure = self._has_looked = False
        self._around: FrameType | None = None  # the frame that calls the forward

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Inside, calls are told of.

        Python has two hooks for calls. A profiler, a debugger and coverage each take one; of two, one is put aside.
        """
        get, put = (sys.getprofile, sys.setprofile) if sys.getprofile() is None else (sys.gettrace, sys.settrace)
        before: Any = get()
        put(self._note)
        try:
            yield
        finally:
            put(before)
            self._around = None

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":  # as most are not
            return
        code = frame.f_code
        if id(code) in self._others:
            return
        self._around = self._around or frame.f_back
        if not is_followed(frame.f_globals.get("__name__")):
            self._others[id(code)] = code
            return
        seen_now = frame.f_locals if code.co_argcount or code.co_freevars else {}
        first = seen_now.get(code.co_varnames[0]) if code.co_argcount else None
        kind = id(code), type(first), self.mode()
        closure = [seen_now.get(name) for name in code.co_freevars]
        seen: tuple[Any, ...] = *kind, *map(id, closure)
        if seen in self._seen or (closure and self._is_made_again(kind, frame)) or _is_of_collector(frame):
            return
        self._codes[id(code)] = code
        self._seen.add(seen)
        functions = self._of(code, frame)
        self._closures += closure if functions else ()
        if closure and not functions:
            self._of_forward.add(seen)
            if id(code) in self._made_within(frame):
                self._seen.add((*kind, _MADE))
        self.told(Called(functions, frame.f_globals, _globals_named(code), first))

    def _is_made_again(self, kind: tuple[Any, ...], frame: FrameType) -> bool:
        """Whether a call is one of a function that this forward makes, as the known one did."""
        number, is_known = kind[0], (*kind, _MADE) in self._known
        return is_known and number not in _functions and number in self._made_within(frame)

    @property
    def known(self) -> KnownCalls:
        """What was told of, but for the closures of functions that end with the forward."""
        return KnownCalls(frozenset(self._seen - self._of_forward), self._codes, self._others, tuple(self._closures))

    def _of(self, code: CodeType, frame: FrameType) -> list[FunctionType]:
        """The functions that have a code and the closure of a call; none where the forward has made it."""
        if not self._is_sure:
            _forget_those_with_other_codes()
            self._is_sure = True
        known = _known(code, frame)
        if self._has_looked or known or id(code) in (made := self._made_within(frame)):
            return known
        self._has_looked = True
        old = {id(function) for found in _functions.values() for reference in found if (function := reference())}
        _functions.clear()
        for function in _all_functions():
            is_made = id(function.__code__) in made and id(function) not in old
            if not is_made and is_followed(function.__globals__.get("__name__")):
                _functions.setdefault(id(function.__code__), []).append(weakref.ref(function))
        return _known(code, frame)

    def _made_within(self, frame: FrameType | None) -> set[int]:
        """The numbers of the codes of which calls that run in the forward make functions."""
        made: set[int] = set()
        while frame is not None and frame is not self._around:
            made.update(id(constant) for constant in frame.f_code.co_consts if isinstance(constant, CodeType))
            frame = frame.f_back
        return made


def is_observer(profiler: Any) -> bool:
    """Whether a profiler is that of :class:`CalledFunctions`."""
    return getattr(profiler, "__func__", None) is CalledFunctions._note


def _known(code: CodeType, frame: FrameType) -> list[FunctionType]:
    found = (reference() for reference in _functions.get(id(code), ()))
    alike = [function for function in found if function is not None and function.__code__ is code]
    return [function for function in alike if _has_cells_of(function, frame)]


def _forget_those_with_other_codes() -> None:
    """Have all functions be looked for if one has got another's code."""
    for number, found in _functions.items():
        for reference in found:
            function = reference()
            if function is not None and id(function.__code__) != number:
                _functions.clear()
                return


def _has_cells_of(function: FunctionType, frame: FrameType) -> bool:
    """Whether the variables of a function's closure are those that a call sees."""
    names = function.__code__.co_freevars
    if not names:
        return True
    seen, cells = frame.f_locals, zip(names, function.__closure__ or (), strict=True)
    try:
        return all(cell.cell_contents is seen.get(name) for name, cell in cells)
    except ValueError:  # a variable that is not set yet
        return False


def _is_of_collector(frame: FrameType | None) -> bool:
    """Whether a call is one that the garbage collector makes, in the middle of whatever runs."""
    codes = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame is not None


def _all_functions() -> Iterator[FunctionType]:
    is_frozen = gc.get_freeze_count() > 0
    if is_frozen:
        gc.unfreeze()
    found = gc.get_objects()
    if is_frozen:
        gc.freeze()
    return (thing for thing in found if type(thing) is FunctionType)
