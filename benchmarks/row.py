"""What was measured of one way to run one network, and how it is printed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ogc.graph import table

from .measuring import MIB

Data = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One way to run one network. Bytes, seconds and FLOPs are those of a step, overheads shares of the plain step.

    Attributes:
        arch, input_shape, device: the network, its batch and where it ran.
        way: ``plain``, a solver, a goal of ours (these begin with ``ogc``), or how others save memory.
        paid: the median over the rounds of the step's time over that of the plain one, less 1; None if not timed.
        paid_low, paid_high: between which the middle half of the rounds are.
        planning_seconds: until the first step; with parsing, which several rows may share.
        promised, predicted_bytes, predicted_plain_bytes, segments, recomputed_segments: of the plan, if there is one.
        deviation: of what ogc runs, the most by which a tensor differs, as a share of its largest entry; of others, the
            most by which a gradient does, as a share of the largest entry of all.
        differs: kinds of tensors that are not bitwise the plain step's.
        unrepeatable: tensors in which two plain steps differ, and which were not compared.
        detail: what was chosen, for instance how many splits.
        reason: why there are no figures.
        failed: whether there should be.
        dominated_by: the way with no more peak and no more FLOPs, and less of one of them.
        published: the row of the published table.
        overhead_at_theirs, flops_at_theirs: what our fastest plan within the published memory recomputes.
    """

    arch: str
    way: str
    device: str = "cpu"
    input_shape: tuple[int, ...] = ()
    plain_bytes: int = 0
    peak_bytes: int = 0
    plain_flops: int = 0
    flops: int = 0
    plain_seconds: float = 0.0
    seconds: float = 0.0
    paid: float | None = None
    paid_low: float = 0.0
    paid_high: float = 0.0
    rounds: int = 0
    planning_seconds: float = 0.0
    promised: float | None = None
    predicted_plain_bytes: int = 0
    predicted_bytes: int = 0
    segments: int = 0
    recomputed_segments: int = 0
    chunks: int = 1
    deviation: float = 0.0
    differs: tuple[str, ...] = ()
    unrepeatable: tuple[str, ...] = ()
    detail: str = ""
    reason: str = ""
    failed: bool = False
    dominated_by: str = ""
    published: dict[str, Any] | None = None
    overhead_at_theirs: float | None = None
    flops_at_theirs: float | None = None

    @classmethod
    def read(cls, data: Data) -> Row:
        """From what JSON makes of it."""
        fields: Data = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
        return cls(**fields)

    def written(self) -> Data:
        """For JSON: what is not as usual."""
        usual = {field.name: field.default for field in fields(self)}
        return {key: value for key, value in asdict(self).items() if value != usual[key]}

    @property
    def is_ours(self) -> bool:
        return self.way.startswith("ogc")

    @property
    def size(self) -> str:
        """That of the batch."""
        return "×".join(map(str, self.input_shape))

    @property
    def off(self) -> float:
        """How much more is paid than promised; 0 where nothing was promised."""
        return 0.0 if self.promised is None or self.paid is None else self.paid - self.promised

    @property
    def more_flops(self) -> float:
        return self.flops / self.plain_flops - 1 if self.plain_flops else 0.0

    @property
    def at_published_size(self) -> bool:
        row = self.published
        return bool(row) and (self.input_shape[0], self.input_shape[-1]) == (row["batch_size"], row["image_size"])  # type: ignore[index]

    def __str__(self) -> str:
        """One line."""
        if self.reason:
            return f"{self.arch}, {self.way}: {self.reason}"
        paid = "" if self.paid is None else f", paid {self.paid:+.1%}"
        promised = "" if self.promised is None else f", promised {self.promised:+.1%}"
        of = f"{self.peak_bytes / MIB:.1f} of {self.plain_bytes / MIB:.1f} MiB"
        return f"{self.arch}, {self.way}: {of}{paid}{promised}"


def with_verdicts(rows: Sequence[Row]) -> list[Row]:
    """The rows of one network, each with the way that dominates it by the least FLOPs, if any does."""
    return [replace(row, dominated_by=_dominating(row, rows)) for row in rows]


def _dominating(row: Row, rows: Sequence[Row]) -> str:
    def is_better(other: Row) -> bool:
        here, there = (row.peak_bytes, row.flops), (other.peak_bytes, other.flops)
        return there != here and there[0] <= here[0] and there[1] <= here[1]

    better = [other for other in rows if not row.reason and not other.reason and is_better(other)]
    return min(better, key=lambda other: (other.flops, other.peak_bytes)).way if better else ""


# -- printed ------------------------------------------------------------------------------------------------------


def _share(share: float | None, sign: str = "") -> str:
    return "-" if share is None else f"{share:{sign}.1%}"


def _theirs(row: Row) -> str:
    if row.published is None:
        return "-"
    batch = "" if row.at_published_size else f" (batch {row.published['batch_size']})"
    return f"{row.published['plain']}{batch}"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "arch": lambda row: row.arch,
    "input": lambda row: row.size,
    "way": lambda row: f"{row.way} ({row.detail})" if row.detail else row.way,
    "plain MiB": lambda row: f"{row.plain_bytes / MIB:.1f}",
    "peak MiB": lambda row: f"{row.peak_bytes / MIB:.1f}",
    "cut": lambda row: _share(1 - row.peak_bytes / row.plain_bytes),
    "plain s": lambda row: f"{row.plain_seconds:.3f}" if row.plain_seconds else "-",
    "s": lambda row: f"{row.seconds:.3f}" if row.seconds else "-",
    "paid": lambda row: _share(row.paid, "+"),
    "middle half": lambda row: f"{row.paid_low:+.1%} to {row.paid_high:+.1%}" if row.rounds > 1 else "-",
    "promised": lambda row: _share(row.promised, "+"),
    "more FLOPs": lambda row: _share(row.more_flops, "+") if row.flops else "-",
    "plan's MiB": lambda row: f"{row.predicted_bytes / MIB:.1f}" if row.predicted_bytes else "-",
    "error": lambda row: f"{row.predicted_bytes / row.peak_bytes - 1:+.2%}" if row.predicted_bytes else "-",
    "segments": lambda row: str(row.segments or "-"),
    "planning s": lambda row: f"{row.planning_seconds:.1f}" if row.planning_seconds else "-",
    "gradients": lambda row: f"off by {row.deviation:.1e}" if row.deviation else "bitwise",
    "differs in": lambda row: ", ".join(row.differs) or "nothing",
    "dominated by": lambda row: row.dominated_by,
    "published: plain": _theirs,
    "theirs": lambda row: str(row.published["theirs"]) if row.published else "-",
    "overhead": lambda row: f"{row.published['overhead']:.0%}" if row.published else "-",
}
"""What a table may have; it leaves out what all of its rows lack."""


def printed(rows: Sequence[Row]) -> str:
    """A table, and below it why some rows have no figures, and what was not compared."""
    measured = [row for row in rows if not row.reason]
    columns = {name: [cell(row) for row in measured] for name, cell in COLUMNS.items()}
    empty = ("-", "", "bitwise", "nothing")
    shown = {name: cells for name, cells in columns.items() if name in ("paid", "cut") or set(cells) - set(empty)}
    notes = [str(row) for row in rows if row.reason]
    notes += dict.fromkeys(f"{row.arch}: {_not_compared(row.unrepeatable)}" for row in measured if row.unrepeatable)
    lines = [table(list(shown), list(zip(*shown.values(), strict=True)))] if measured else []
    return "\n".join([*lines, *notes])


def _not_compared(names: Sequence[str]) -> str:
    """What is said of tensors that tell nothing."""
    first = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"not compared, as two plain steps differ there: {first}"
