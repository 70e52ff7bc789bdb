"""What was measured of one way to run one network, and of single items; and how it is printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.measuring import MIB
from benchmarks.row import not_compared
from ogc.graph import table

PLAIN, NOTHING, BLOCKS, SELECTIVE = "plain again", "nothing recomputed", "blocks", "selective"
OF_BLOCKS, OF_SELECTIVE = "memory of blocks", "memory of selective"
NOT_INSTALLED = "all"
"""The one row of a network whose package is not there."""


@dataclass(frozen=True)
class TimeRow:
    """One way to run a network. Bytes, seconds of a step, overheads as shares of the plain step.

    Attributes:
        arch, input_shape, device: the network, its batch and where it ran.
        way: a wish, what was done instead, or the plain model once more, which tells how well times repeat.
        promised: the plan's overhead; None where ogc did not plan.
        paid: the median over the rounds of the step's time over that of the plain one, less 1.
        paid_low, paid_high: between which the middle half of the rounds are.
        rounds: steps of each.
        predicted_bytes: the plan's peak; 0 where there is no plan.
        segments: of the plan.
        differs: kinds of tensors that are not bitwise those of the plain step.
        unrepeatable: tensors in which two plain steps differ, which were not compared.
        reason: why there are no figures.
        failed: whether there should be.
    """

    arch: str
    input_shape: tuple[int, ...]
    device: str
    way: str
    promised: float | None = None
    paid: float | None = None
    paid_low: float = 0.0
    paid_high: float = 0.0
    seconds: float = 0.0
    plain_seconds: float = 0.0
    rounds: int = 0
    peak_bytes: int = 0
    plain_bytes: int = 0
    predicted_bytes: int = 0
    segments: int = 0
    differs: tuple[str, ...] = ()
    unrepeatable: tuple[str, ...] = ()
    reason: str = ""
    failed: bool = False

    @classmethod
    def read(cls, data: dict[str, Any]) -> TimeRow:
        """From what JSON makes of it."""
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return cls(**fields)

    @property
    def is_bitwise(self) -> bool:
        return not self.differs

    @property
    def size(self) -> str:
        """That of the batch."""
        return "×".join(map(str, self.input_shape))

    @property
    def off(self) -> float:
        """How much more is paid than promised; 0 where nothing was promised."""
        return 0.0 if self.promised is None or self.paid is None else self.paid - self.promised

    @property
    def said(self) -> str:
        """One line."""
        if self.paid is None:
            return f"{self.arch}, {self.way}: {self.reason}"
        promised = "" if self.promised is None else f", promised {self.promised:+.1%}"
        return f"{self.arch}, {self.way}: paid {self.paid:+.1%}{promised}"


@dataclass(frozen=True)
class Items:
    """What single items cost in a network of next to no work. Seconds of a step.

    Attributes:
        arch, input_shape, device: the network, its batch and where it ran.
        more_seconds: than a plain step, by the number of segments, each recomputed at once.
        forward_seconds: of a forward without autograd, which is what every one of these plans runs again.
        saved_tensors: that autograd saves in a plain step.
        us_per_segment: the slope of a line through ``more_seconds``.
        us_per_saved_tensor: what the line leaves at no segments, less the forward, over the tensors.
        over_checkpoint: the step with a segment for each block, over that with torch's checkpoint on each.
        differs: kinds of tensors of any of these plans that are not bitwise the plain model's.
        rounds: steps of each.
    """

    arch: str
    input_shape: tuple[int, ...]
    device: str
    plain_seconds: float
    forward_seconds: float
    more_seconds: dict[int, float]
    saved_tensors: int
    us_per_segment: float
    us_per_saved_tensor: float
    over_checkpoint: float
    differs: tuple[str, ...]
    rounds: int

    @classmethod
    def read(cls, data: dict[str, Any]) -> Items:
        """From what JSON makes of it."""
        more = {int(number): seconds for number, seconds in data["more_seconds"].items()}
        tuples = {key: tuple(data[key]) for key in ("input_shape", "differs")}
        return cls(**{**data, **tuples, "more_seconds": more})


def printed(rows: Sequence[TimeRow]) -> str:
    """A table, and below it why some rows have no figures and what was not compared."""
    header = [
        "arch", "input", "way", "promised", "paid", "middle half", "off by", "plain s", "rounds", "peak MiB",
        "plan's MiB", "of plain", "bitwise",
    ]  # fmt: skip
    measured = [row for row in rows if row.paid is not None]
    reasons = [row.said for row in rows if row.paid is None]
    notes = {row.arch: f"{row.arch}: {not_compared(row.unrepeatable)}" for row in rows if row.unrepeatable}
    return "\n".join([table(header, [_cells(row) for row in measured]), *reasons, *notes.values()])


def _cells(row: TimeRow) -> list[str]:
    return [
        row.arch,
        row.size,
        row.way,
        "-" if row.promised is None else f"{row.promised:+.1%}",
        f"{row.paid:+.1%}",
        f"{row.paid_low:+.1%} to {row.paid_high:+.1%}",
        "-" if row.promised is None else f"{row.off * 100:+.1f}",
        f"{row.plain_seconds:.4f}",
        f"{row.rounds}",
        f"{row.peak_bytes / MIB:.2f}",
        f"{row.predicted_bytes / MIB:.2f}" if row.predicted_bytes else "-",
        f"{row.peak_bytes / row.plain_bytes:.0%}",
        "yes" if row.is_bitwise else f"differs in: {', '.join(row.differs)}",
    ]
