"""One way to train a model, measured; all of them side by side, and which of them another one dominates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.measuring import MIB
from benchmarks.row import not_compared
from ogc.graph import table


@dataclass(frozen=True)
class PeerRow:
    """One way to train the model. Bytes, seconds; FLOPs of a whole step.

    Attributes:
        detail: what was chosen, for instance how many splits.
        reason: why it could not run; then nothing else is known.
        failed: whether it is one that ogc runs, and that should have run.
        plain_seconds: of the plain steps in between its own.
        planning_seconds: until the first step; for our rows parsing and planning, which several may share.
        deviation: most by which a gradient's entry differs from the plain one, as a share of the largest
            entry of all; 0 if all are equal bit by bit.
        differs: what else is not bitwise the plain model's: outputs, buffers, random state.
        recomputed_share: by the plan, the recomputed time over that of a plain step.
        predicted_bytes: the plan's peak.
        dominated_by: the name of a row with no more peak and no more FLOPs, and less of one of them.
    """

    name: str
    detail: str = ""
    is_ours: bool = False
    reason: str = ""
    failed: bool = False
    peak_bytes: int = 0
    flops: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0
    planning_seconds: float = 0.0
    deviation: float = 0.0
    differs: tuple[str, ...] = ()
    recomputed_share: float | None = None
    predicted_bytes: int | None = None
    dominated_by: str = ""

    @property
    def said(self) -> str:
        """Its peak, or why it did not run."""
        return self.reason or f"{self.peak_bytes / MIB:.1f} MiB"


@dataclass(frozen=True)
class Comparison:
    """All rows of one architecture, the plain model first; the tensors in which two plain steps differ."""

    arch: str
    input_shape: tuple[int, ...]
    rows: tuple[PeerRow, ...]
    unrepeatable: tuple[str, ...] = ()

    def __str__(self) -> str:
        header = [
            "method", "peak MiB", "of plain", "more FLOPs", "step time", "planning s", "gradients", "differs in",
            "recomputed", "verdict",
        ]  # fmt: skip
        title = f"{self.arch}, input {'×'.join(map(str, self.input_shape))}"
        cells = [_cells(row, self.rows[0]) for row in self.rows]
        notes = [f"{row.name}: {row.reason}" for row in self.rows if row.reason]
        notes += [not_compared(self.unrepeatable)] if self.unrepeatable else []
        return "\n".join([title, table(header, cells), *notes])


def with_verdicts(rows: Sequence[PeerRow]) -> tuple[PeerRow, ...]:
    """The rows, each with the name of the one that dominates it by the least FLOPs, if any does."""
    return tuple(replace(row, dominated_by=_dominating(row, rows)) for row in rows)


def _dominating(row: PeerRow, rows: Sequence[PeerRow]) -> str:
    def is_better(other: PeerRow) -> bool:
        here, there = (row.peak_bytes, row.flops), (other.peak_bytes, other.flops)
        return there != here and there[0] <= here[0] and there[1] <= here[1]

    better = [other for other in rows if not row.reason and not other.reason and is_better(other)]
    return min(better, key=lambda other: (other.flops, other.peak_bytes)).name if better else ""


def _cells(row: PeerRow, plain: PeerRow) -> list[str]:
    if row.reason:
        return [row.name, *[""] * 8, "did not run, see below"]
    return [
        f"{row.name} ({row.detail})" if row.detail else row.name,
        f"{row.peak_bytes / MIB:.1f}",
        f"{row.peak_bytes / plain.peak_bytes:.1%}",
        f"{row.flops / plain.flops - 1:+.1%}" if plain.flops else "",
        f"{row.seconds / row.plain_seconds:.2f}",
        f"{row.planning_seconds:.1f}",
        f"off by {row.deviation:.1e}" if row.deviation else "bitwise",
        ", ".join(row.differs) or "nothing",
        "" if row.recomputed_share is None else f"{row.recomputed_share:.1%}",
        f"dominated by {row.dominated_by}" if row.dominated_by else "",
    ]
