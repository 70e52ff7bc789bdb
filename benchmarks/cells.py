"""Cells of the tables in docs/results.md, and the order of their rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import geometric_mean
from typing import Any

MIB = 2**20

Data = dict[str, Any]


def in_order(runs: Sequence[Data]) -> list[Data]:
    """All rows by the published table's families."""
    found = [row for run in runs for row in run["rows"]]
    return sorted(found, key=lambda row: (row["arch"][:3], len(row["arch"]), row["arch"]))


def table(header: str, cells: Iterable[Sequence[object]]) -> str:
    """Markdown; empty without rows."""
    names = header.split(" | ")
    lines = [f"| {header} |", "|" + "---|" * len(names)]
    for row in cells:
        assert len(row) == len(names), row
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines) + "\n" if len(lines) > 2 else ""


def mib(size: float) -> str:
    return f"{size / MIB:.0f}"


def cut(row: Data) -> str:
    return f"{1 - row['ogc_bytes'] / row['plain_bytes']:.0%}"


def more_flops(row: Data, digits: int = 1) -> str:
    return f"{row['ogc_flops'] / row['plain_flops'] - 1:.{digits}%}"


def more_time(row: Data) -> float:
    """Measured overhead, as a share of the plain step."""
    return float(row["ogc_seconds"] / row["plain_seconds"] - 1)


def error(row: Data) -> float:
    """How far off the predicted peak is."""
    return float(abs(row["predicted_bytes"] / row["ogc_bytes"] - 1))


def ratio(found: Sequence[Data]) -> float:
    """Geometric mean of ours over published."""
    return geometric_mean(row["ogc_bytes"] / MIB / row["published"]["theirs"] for row in found)
