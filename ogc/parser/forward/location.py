"""Where in the model an operator is called: module, file and line; and how many functions its Python calls."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import CodeType, FrameType
from typing import Any

import torch

from ...process import OnThread

_OWN_CODE = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_TORCH_CODE = os.path.dirname(torch.__file__) + os.sep
_entries: set[CodeType] = set()


def entry(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function of our own that calls the model: what called it is not the model's code."""
    _entries.add(function.__code__)
    return function


@cache
def _owner(filename: str) -> str:
    return "ogc" if filename.startswith(_OWN_CODE) else "torch" if filename.startswith(_TORCH_CODE) else "user"


def user_line() -> str:
    """File and line of the model's code that is running; of torch's where there is none of the model's."""
    scopes = _scopes.value
    return scopes.line if scopes is not None and scopes.line else line_of(_running())


def line_of(frames: Iterable[tuple[str, int]]) -> str:
    """The same of frames, each a file and a line, the innermost first."""
    line = ""
    for file, number in frames:
        owner = _owner(file)
        if owner == "user" or (owner == "torch" and not line):
            line = f"{os.path.basename(file)}:{number}"
            if owner == "user":
                break
    return line


def is_before_us(frame: tuple[str, int]) -> bool:
    """Whether a frame, of those from the innermost one, does not belong to what calls the model here."""
    return _owner(frame[0]) != "ogc"


def _running() -> Iterator[tuple[str, int]]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _entries:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


_scopes: OnThread[Scopes | None] = OnThread(None)


def scopes_in_use(scopes: Scopes) -> AbstractContextManager[None]:
    """Inside, :func:`scope` on this thread adds to ``scopes``."""
    return _scopes.set_to(scopes)


def running() -> str:
    """The name of the module that is being recorded on this thread."""
    scopes = _scopes.value
    return "" if scopes is None else scopes.current


def scope(name: str, line: str = "") -> AbstractContextManager[None]:
    """Operators recorded inside are said to come from ``name``, unless they come from a module, and from a ``line``."""
    scopes = _scopes.value
    return nullcontext() if scopes is None else scopes.inside(name, line)


class Scopes:
    """The modules that are being called, by name, the innermost last."""

    def __init__(self) -> None:
        self.names = [""]
        self.line = ""  # of a graph that is run, where its calls come from
        self.failed = ""  # the innermost that was left by an exception

    @property
    def current(self) -> str:
        return self.names[-1]

    @contextmanager
    def inside(self, name: str, line: str = "") -> Iterator[None]:
        self.names.append(name)
        before, self.line = self.line, line or self.line
        try:
            yield
        except BaseException:
            self.failed = self.failed or name
            raise
        finally:
            self.names.pop()
            self.line = before

    def here(self) -> dict[str, str]:
        """Module path and source line of what is running, for the ``meta`` of a node."""
        return {"module": self.current, "source": user_line()}


OWN = ("torch", "ogc")
"""Of these, only ``torch.nn`` belongs to a model; the rest serves whoever watches the forward."""


class CallCounter:
    """How many functions, Python's and others, are called in the packages that a model's modules come from.

    Attributes:
        count: so many.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.count = 0
        kinds = {kind for module in model.modules() for kind in type(module).__mro__}
        packages = {kind.__module__.split(".")[0] for kind in kinds if kind is not object}
        self.packages = tuple(f"{package}." for package in (*packages.difference(OWN), "torch.nn"))

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """What the function returns; calls are counted while it runs, unless somebody else profiles."""
        if sys.getprofile() is not None:
            return function(*args)
        sys.setprofile(self._note)
        try:
            return function(*args)
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event in ("call", "c_call") and f"{frame.f_globals.get('__name__')}.".startswith(self.packages):
            self.count += 1
