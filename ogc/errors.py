"""The errors that the library raises on purpose, which share one root; and packages that may be missing."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

log = logging.getLogger(__name__)


class OgcError(Exception):
    """Root of every error that ``ogc`` raises itself."""


class InputError(OgcError):
    """An argument is of the wrong kind; the message says what was expected."""


class ParseError(OgcError):
    """The model cannot be turned into a graph that computes the same numbers."""


class SolveError(OgcError):
    """No plan of the solver's class meets what was asked.

    Attributes:
        least_peak_bytes: the smallest budget that would do, where that is known.
    """

    def __init__(self, message: str, least_peak_bytes: int | None = None) -> None:
        super().__init__(message)
        self.least_peak_bytes = least_peak_bytes


class PlanError(OgcError):
    """A plan does not fit the graph it is used with."""


class ReplayError(OgcError):
    """A segment cannot be recomputed as it ran in the forward pass."""


class CheckError(OgcError):
    """An optimized model computed something else than the plain one."""


class DependencyError(OgcError, ImportError):
    """An optional package is not installed; the message says how to install it."""


def add_note(error: BaseException, note: str) -> None:
    """Say more about an error that is not ours."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # Python 3.10
        log.error(note)


def optional(module: str) -> Any:
    """A module of a package that may be missing, such as ``"sizing.needs"``.

    Raises:
        DependencyError: the package is not there.
    """
    package = f"ogc.{module.partition('.')[0]}"
    try:
        return import_module(f"ogc.{module}")
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise DependencyError(f"this needs {package}, which is not there; install all of ogc") from None
