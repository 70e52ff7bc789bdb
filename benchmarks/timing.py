"""Time that was promised and paid: what the rows are held to, and a picture of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median

from ogc.graph import table

from .experiments import BLOCKS, DEFAULT, NOTHING, OF_BLOCKS, OF_SELECTIVE, PLAIN, SELECTIVE, TINY
from .measuring import MIB
from .row import Data, Row

MEDIAN_OFF, WORST_OFF = 0.015, 0.05
"""Promised and paid: what tells one plan of a frontier from the next, and what nobody notices in a training run."""

NOTHING_PAID = 0.01
"""Of a forward that recomputes nothing: about what two measurements of the same step differ by."""

OF_BLOCKS_EACH, OF_BLOCKS_MEAN = 0.5, 0.4
"""Our overhead over that of checkpointed blocks, in no more memory: half, and better than that on the whole."""

OVER_CHECKPOINT = 0.6
"""A step whose segments are the blocks, over one with torch's checkpoint on each of them."""

LEAST_OVERHEAD = 0.01
"""A smaller overhead counts as this much in a quotient, for it is not told from none."""


@dataclass(frozen=True)
class Finding:
    """An answer.

    Attributes:
        question: what was asked.
        of: how many rows, or networks, the figure is of.
        found: the figure.
        aim: what it should be; empty where there is no aim.
        missed: what misses it, each with its own figure.
    """

    question: str
    of: int
    found: str
    aim: str = ""
    missed: tuple[str, ...] = ()


def findings(rows: Sequence[Row], items: Data | None) -> list[Finding]:
    """All answers there are to give."""
    by_way: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_way.setdefault(row.way, {})[row.arch] = row
    return [
        *_promises([row for row in rows if row.promised is not None]),
        *_nothing(_timed(by_way.get(NOTHING, {}))),
        *_over_blocks(rows),
        *_default(_timed(by_way.get(DEFAULT, {})), _timed(by_way.get(BLOCKS, {}))),
        *_within_selective(by_way.get(OF_SELECTIVE, {}), _timed(by_way.get(SELECTIVE, {}))),
        *_repeated(_timed(by_way.get(PLAIN, {}))),
        *_items(items),
    ]


def _timed(rows: Mapping[str, Row]) -> dict[str, Row]:
    return {arch: row for arch, row in rows.items() if row.paid is not None}


def _promises(rows: Sequence[Row]) -> list[Finding]:
    if not rows:
        return []
    off = [abs(row.off) for row in rows]
    missed = [row for row in sorted(rows, key=lambda row: -abs(row.off)) if abs(row.off) > WORST_OFF]
    said = tuple(f"{row.arch}, {row.way} ({row.promised:.1%}, paid {row.paid:.1%})" for row in missed)
    others = tuple(f"{row.arch}, {row.way} ({', '.join(row.differs)})" for row in rows if row.differs)
    question = "promised and paid, apart in points"
    return [
        Finding(f"{question}: median", len(rows), _points(median(off)), f"≤ {_points(MEDIAN_OFF)}",
                ("the median",) if median(off) > MEDIAN_OFF else ()),
        Finding(f"{question}: worst", len(rows), _points(max(off)), f"≤ {_points(WORST_OFF)}", said),
        Finding("ogc's rows with other bits than the plain step", len(rows), str(len(others)), "0", others),
    ]  # fmt: skip


def _nothing(rows: Mapping[str, Row]) -> list[Finding]:
    if not rows:
        return []
    paid = {arch: row.paid for arch, row in rows.items() if row.paid is not None}
    found = [
        Finding("nothing recomputed: worst overhead", len(paid), f"{max(paid.values()):+.1%}", f"≤ {NOTHING_PAID:+.0%}",
                _above(paid, NOTHING_PAID, "{:+.1%}")),
    ]  # fmt: skip
    if TINY in paid:
        step = {TINY: 1 + paid[TINY]}
        missed = _above(step, 1.0, "{:.2f}")
        found.append(
            Finding(f"nothing recomputed: the step of {TINY} over plain", 1, f"{step[TINY]:.2f}", "≤ 1", missed)
        )
    return found


def over_blocks(rows: Sequence[Row]) -> dict[str, float]:
    """By network, our overhead in the memory of checkpointed blocks over theirs."""
    ours, theirs = _with_blocks(rows)
    return {arch: _counted(row) / _counted(theirs[arch]) for arch, row in _timed(ours).items() if arch in theirs}


def _counted(row: Row) -> float:
    return max(row.paid or 0.0, LEAST_OVERHEAD)


def _with_blocks(rows: Sequence[Row]) -> tuple[dict[str, Row], dict[str, Row]]:
    """Plans in the memory of checkpointed blocks, and these where they need less than the plain step, which is free."""
    ours, theirs = ({row.arch: row for row in rows if row.way == way} for way in (OF_BLOCKS, BLOCKS))
    return ours, {arch: row for arch, row in _timed(theirs).items() if row.peak_bytes < row.plain_bytes}


def _over_blocks(rows: Sequence[Row]) -> list[Finding]:
    ours, theirs = _with_blocks(rows)
    quotients = over_blocks(rows)
    if not quotients:
        return []
    mean = geometric_mean(quotients.values())
    question = "our overhead over that of blocks, where these save memory"
    missed = (*_above(quotients, OF_BLOCKS_EACH, "{:.2f}"), *_without(ours, theirs))
    return [
        Finding(f"{question}: worst", len(quotients), f"{max(quotients.values()):.2f}", f"≤ {OF_BLOCKS_EACH}", missed),
        Finding(f"{question}: geometric mean", len(quotients), f"{mean:.2f}", f"≤ {OF_BLOCKS_MEAN}",
                ("the mean",) if mean > OF_BLOCKS_MEAN else ()),
    ]  # fmt: skip


def _default(ours: Mapping[str, Row], theirs: Mapping[str, Row]) -> list[Finding]:
    both = [(row, theirs[arch]) for arch, row in ours.items() if arch in theirs]
    if not both:
        return []
    missed = tuple(
        f"{row.arch} ({row.peak_bytes / other.peak_bytes:.2f} of the peak at {row.paid:+.0%}, not {other.paid:+.0%})"
        for row, other in both
        if row.peak_bytes > other.peak_bytes and _counted(row) > _counted(other)
    )
    less = geometric_mean(row.peak_bytes / other.peak_bytes for row, other in both)
    return [
        Finding("networks whose default plan takes more memory and more time than blocks", len(both), str(len(missed)),
                "0", missed),
        Finding("the default's peak over that of blocks: geometric mean", len(both), f"{less:.2f}"),
    ]  # fmt: skip


def _within_selective(ours: Mapping[str, Row], theirs: Mapping[str, Row]) -> list[Finding]:
    more = {
        arch: row.paid - theirs[arch].paid  # type: ignore[operator]
        for arch, row in _timed(ours).items()
        if arch in theirs
    }
    if not more:
        return []
    missed = tuple(f"{arch} ({_points(apart, '+')})" for arch, apart in more.items() if apart > 0)
    return [
        Finding("our overhead at the memory of selective, above theirs in points: worst", len(more),
                _points(max(more.values()), "+"), "≤ 0", (*missed, *_without(ours, theirs))),
    ]  # fmt: skip


def _without(ours: Mapping[str, Row], theirs: Mapping[str, Row]) -> tuple[str, ...]:
    """Networks for which there is no plan at the memory of a peer that runs, or one that was measured to need more."""
    both = [(arch, row, theirs[arch]) for arch, row in ours.items() if arch in theirs]
    none = [f"{arch} ({row.reason})" for arch, row, _ in both if row.paid is None]
    more = [
        f"{arch} (needs {ours.peak_bytes / MIB:.2f} MiB, not {other.peak_bytes / MIB:.2f})"
        for arch, ours, other in both
        if ours.peak_bytes > other.peak_bytes
    ]
    return (*none, *more)


def _repeated(rows: Mapping[str, Row]) -> list[Finding]:
    apart = [abs(row.paid) for row in rows.values() if row.paid is not None]
    if not apart:
        return []
    found = f"{_points(median(apart))}, worst {_points(max(apart))}"
    return [Finding("the plain step measured twice, apart in points: median", len(apart), found)]


def _items(items: Data | None) -> list[Finding]:
    if items is None:
        return []
    over = {items["arch"]: items["over_checkpoint"]}
    missed = _above(over, OVER_CHECKPOINT, "{:.2f}")
    numbers, differs = [*map(int, items["more_seconds"])], tuple(items["differs"])
    return [
        Finding(f"a step in {max(numbers)} segments, over torch's checkpoint on the same blocks", 1,
                f"{items['over_checkpoint']:.2f}", f"≤ {OVER_CHECKPOINT}", missed),
        Finding("microseconds per segment", len(numbers), f"{items['us_per_segment']:.1f}"),
        Finding("microseconds per saved tensor", len(numbers), f"{items['us_per_saved_tensor']:.2f}"),
        Finding("kinds of tensors that differ in these steps", len(numbers), str(len(differs)), "0", differs),
    ]  # fmt: skip


def _above(figures: Mapping[str, float], aim: float, form: str) -> tuple[str, ...]:
    """Those that miss an aim, the worst first."""
    ordered = sorted(figures.items(), key=lambda pair: -pair[1])
    return tuple(f"{arch} ({form.format(figure)})" for arch, figure in ordered if figure > aim)


def _points(share: float, sign: str = "") -> str:
    return f"{share * 100:{sign}.1f}"


def summary(found: Sequence[Finding]) -> str:
    """A table, and below it what misses each aim."""
    cells = [[f.question, str(f.of), f.found, f.aim or "-", _verdict(f)] for f in found]
    missed = [f"misses {f.question}: {'; '.join(f.missed)}" for f in found if f.missed]
    return "\n".join([table(["question", "of", "found", "aim", "met"], cells), *missed])


def _verdict(finding: Finding) -> str:
    return "-" if not finding.aim else "no" if finding.missed else "yes"


# -- the picture --------------------------------------------------------------------------------------------------

LABELLED = 5
"""Plans that are named: those whose promise is the furthest off."""


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the plans of these rows; SVG, PNG or PDF by the ending of the path.

    Raises:
        DependencyError: matplotlib is not installed.
    """
    from ogc.plan import pictures as canvas

    figure, ax, is_ours = canvas.axes_of(None, (7.0, 5.5))
    planned = [row for row in rows if row.promised is not None and row.paid is not None]
    ends = [0.0, *(100 * share for row in planned for share in (row.promised, row.paid) if share is not None)]
    line = min(ends), max(ends)
    ax.plot(line, line, color=canvas.GREY, linewidth=0.8, zorder=1)
    colours = (canvas.BLACK, canvas.BLUE, canvas.SKY, canvas.GREEN, canvas.ORANGE, canvas.PURPLE)
    ways = list(dict.fromkeys(row.way for row in planned))
    known = [way for way in (NOTHING, OF_BLOCKS, OF_SELECTIVE) if way in ways]
    handles = []
    for colour, way in zip(colours, [*(way for way in ways if way not in known), *known], strict=False):
        xs = [100 * row.promised for row in planned if row.way == way and row.promised is not None]
        ys = [100 * row.paid for row in planned if row.way == way and row.paid is not None]
        ax.scatter(xs, ys, s=16, color=colour, zorder=2)
        handles.append(canvas.Line2D([], [], marker="o", linestyle="", markersize=4, color=colour, label=way))
    for row in sorted(planned, key=lambda row: -abs(row.off))[:LABELLED]:
        place = 100 * row.promised, 100 * row.paid  # type: ignore[operator]
        ax.annotate(row.arch, place, xytext=(4, 3), textcoords="offset points", fontsize=8)
    ax.set_xlabel("promised overhead, % of the plain step")
    ax.set_ylabel("paid overhead, % of the plain step")
    canvas.draw_grid(ax)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.finish(figure, ax, handles, is_ours, path)
