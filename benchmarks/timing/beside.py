"""Plans beside torch's two kinds of checkpoints in the memory of each, a row for each network."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from benchmarks.cells import mib, table

from .row import BLOCKS, OF_BLOCKS, OF_SELECTIVE, PLAIN, SELECTIVE, TimeRow

SHOWN = (BLOCKS, OF_BLOCKS, SELECTIVE, OF_SELECTIVE)


def beside_others(rows: Sequence[TimeRow]) -> str:
    """Peaks in MiB and what a step paid; of all plans, also those with other wishes, how far promises were off."""
    by_network: dict[str, dict[str, TimeRow]] = {}
    for row in rows:
        by_network.setdefault(row.arch, {})[row.way] = row
    cells = []
    for arch, ways in by_network.items():
        plain = ways[PLAIN]
        step, cut = f"{plain.plain_seconds * 1e3:.0f} ms", (_cell(ways.get(way)) for way in SHOWN)
        cells.append([arch, plain.size, step, mib(plain.plain_bytes), *cut])
    off = [abs(row.off) * 100 for row in rows if row.promised is not None]
    return (
        f"{table('model | input | plain step | plain | blocks | ogc in no more | selective | ogc in no more', cells)}\n"
        f"Of {len(off)} plans of {len(cells)} networks, promised and paid are {median(off):.1f} points apart in the "
        f"median, {max(off):.1f} at worst.\n"
    )


def _cell(row: TimeRow | None) -> str:
    return "–" if row is None or row.paid is None else f"{mib(row.peak_bytes)}, {row.paid:+.1%}"
