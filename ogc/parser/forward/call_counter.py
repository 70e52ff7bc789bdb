"""How many functions a forward's Python calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

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
