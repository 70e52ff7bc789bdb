"""One architecture's result with one solver, what is printed of it, and what is known of a row that failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ogc.graph import table

from .measuring import MIB


@dataclass(frozen=True)
class Row:
    """One architecture's result with one solver. Bytes, seconds, shares of the plain step."""

    arch: str
    solver: str
    device: str
    batch_size: int
    input_shape: tuple[int, ...]
    plain_bytes: int
    ogc_bytes: int
    predicted_plain_bytes: int
    predicted_bytes: int
    plain_seconds: float | None  # None where no step is timed
    ogc_seconds: float | None
    predicted_overhead: float
    plain_flops: int
    ogc_flops: int
    segments: int
    recomputed_segments: int
    parse_seconds: float
    solve_seconds: float
    overhead_at_theirs: float | None  # recomputed time of our plan that fits into the published memory
    flops_at_theirs: float | None  # its recomputed FLOPs
    batch_slices: int
    deviation: float  # most by which a tensor differs from the plain model's, as a share of its largest entry
    published: dict[str, Any] | None  # the row of the published table, for the batch size that it names
    unrepeatable: tuple[str, ...] = ()  # tensors in which two plain steps differ, and which were not compared

    @property
    def cut(self) -> float:
        return 1 - self.ogc_bytes / self.plain_bytes

    @property
    def overhead(self) -> float | None:
        return self.ogc_seconds / self.plain_seconds - 1 if self.ogc_seconds and self.plain_seconds else None

    @property
    def flops_overhead(self) -> float:
        return self.ogc_flops / self.plain_flops - 1


@dataclass(frozen=True)
class Failure:
    """A row that is not there, and why.

    Attributes:
        name: the architecture, with the solver or the way to save memory if only that one failed.
        status: the exit status that it makes: 1 for other numbers than the plain model's, 2 for what cannot be
            planned, 3 for too little memory, 4 for anything else.
    """

    name: str
    reason: str
    status: int

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def not_compared(names: Sequence[str]) -> str:
    """What is said of tensors that tell nothing."""
    first = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"not compared, as two plain steps differ there: {first}"


def printed(rows: Sequence[Row]) -> str:
    """A table, and below it what was not compared."""
    header = [
        "arch", "solver", "input", "plain MiB", "ogc MiB", "cut", "plain s", "ogc s", "overhead", "by FLOPs",
        "predicted MiB", "error", "predicted overhead", "segments", "planning s",
        "published: plain", "theirs", "overhead",
    ]  # fmt: skip
    notes = [f"{row.arch}, {row.solver}: {not_compared(row.unrepeatable)}" for row in rows if row.unrepeatable]
    return "\n".join([table(header, [_cells(row) for row in rows]), *notes])


def _cells(row: Row) -> list[str]:
    return [
        row.arch,
        row.solver,
        "×".join(map(str, row.input_shape)),
        f"{row.plain_bytes / MIB:.1f}",
        f"{row.ogc_bytes / MIB:.1f}",
        f"{row.cut:.1%}",
        *("-" if seconds is None else f"{seconds:.3f}" for seconds in (row.plain_seconds, row.ogc_seconds)),
        "-" if row.overhead is None else f"{row.overhead:.1%}",
        f"{row.flops_overhead:.1%}",
        f"{row.predicted_bytes / MIB:.1f}",
        f"{row.predicted_bytes / row.ogc_bytes - 1:+.2%}",
        f"{row.predicted_overhead:.1%}",
        f"{row.segments}",
        f"{row.parse_seconds + row.solve_seconds:.1f}",
        *_published_cells(row),
    ]


def _published_cells(row: Row) -> list[str]:
    published = row.published
    if published is None:
        return ["-", "-", "-"]
    comparable = (row.input_shape[0], row.input_shape[-1]) == (published["batch_size"], published["image_size"])
    plain = f"{published['plain']}" if comparable else f"{published['plain']} (batch {published['batch_size']})"
    return [plain, f"{published['theirs']}", f"{published['overhead']:.0%}"]
