"""Writes docs/api.md: every public name with its signature and what its docstring says.

python docs/make_api.py
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import ogc

PAGE = Path(__file__).with_name("api.md")

PARTS = {
    "Training in less memory": ("optimize", "apply", "check", "Checker", "CheckReport", "Difference"),
    "What fits": ("estimate", "Estimate", "largest_batch", "largest_batches", "LargestBatch"),
    "Graphs": ("parse", "Graph", "Operation", "Value", "Host", "with_host", "GraphBuilder"),
    "Plans": (
        *("solve", "frontier", "Frontier", "chunk_batch", "simulate", "load_plan", "Plan", "PartsPlan"),
        *("make_plan", "saved", "recomputed", "Segment", "Policy", "Offload", "Decisions"),
    ),
    "Compiled code, pipelines": ("Partitioner", "in_flight"),
    "Errors": (
        *("OgcError", "InputError", "ParseError", "SolveError", "PlanError"),
        *("ReplayError", "CheckError", "DependencyError"),
    ),
}

_ROLE = re.compile(r":\w+:`~?([^`]+)`")


def page() -> str:
    """The text of docs/api.md."""
    lines = [
        "# Public names",
        "",
        "What `help(ogc.optimize)` and the like say, written by `python docs/make_api.py`. Sizes are in bytes, times",
        "in seconds, overheads are shares of a plain step.",
    ]
    for title, names in PARTS.items():
        lines += ["", f"## {title}"]
        for name in names:
            lines += ["", f"### `{name}`", "", "```text", *_told(f"ogc.{name}", getattr(ogc, name)), "```"]
    return "\n".join(lines) + "\n"


def _told(name: str, what: Any) -> Iterator[str]:
    yield f"{name}{_signature(what)}"
    yield from _indented(what)
    if inspect.isclass(what) and not issubclass(what, (Enum, Exception)):
        for attribute, member in vars(what).items():
            called = getattr(what, attribute) if isinstance(member, (classmethod, staticmethod)) else member
            is_told = callable(called) or isinstance(member, (property, cached_property))
            if is_told and not attribute.startswith("_"):
                yield ""
                yield f".{attribute}{_signature(called)}"
                yield from _indented(member)


def _signature(what: Any) -> str:
    """Names and defaults; an error is raised by ogc alone, an enumeration and a property are not called."""
    if isinstance(what, (property, cached_property)) or (inspect.isclass(what) and issubclass(what, (Enum, Exception))):
        return ""
    signature = inspect.signature(what)
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values() if p.name != "self"]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


def _indented(what: Any) -> Iterator[str]:
    for line in (inspect.getdoc(what) or "").splitlines():
        yield ("    " + _ROLE.sub(r"`\1`", line)).rstrip()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
