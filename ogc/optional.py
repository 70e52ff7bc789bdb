"""The packages that the rest does without: asked for here, by name, at the moment they are needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .errors import DependencyError


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
