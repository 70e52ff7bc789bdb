"""What a forward's Python does: how many functions it calls, and which attributes it reads."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch

OWN = ("torch", "ogc")
"""Of these, only ``torch.nn`` belongs to a model; the rest serves whoever watches the forward."""


_KNOWN = 5_000
"""Functions of which it is remembered what they read."""


class CallCounter:
    """How many functions, Python's and others, are called in the packages that a model's modules come from.

    Attributes:
        count: so many.
        codes: of all of Python's functions that were called.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.count = 0
        self.codes: set[CodeType] = set()
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
            self.codes.add(frame.f_code)

    def names_read(self) -> frozenset[str]:
        """Names of attributes that the functions may have read, also by their names in text, and do not assign."""
        found = [_names(code) for code in self.codes]
        read, written = (frozenset().union(*names) for names in zip(*found, strict=True)) if found else ([], [])
        return frozenset(read) - frozenset(written)


@lru_cache(maxsize=_KNOWN)
def _names(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Names of attributes that a function reads, or texts that may be some, and of those that it assigns."""
    written = {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_ATTR"}
    texts = {constant for constant in code.co_consts if isinstance(constant, str) and constant.isidentifier()}
    return frozenset(code.co_names) | texts, frozenset(written)
