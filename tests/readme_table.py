"""Writes the README's table from tests/results: ``python tests/readme_table.py``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "tests" / "results"
START, END = "<!-- results -->\n", "<!-- end of results -->"
MIB = 2**20


def runs() -> list[dict[str, Any]]:
    """The committed runs at the published batch sizes."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("cpu_published*.json"))]


def rows() -> list[dict[str, Any]]:
    """Their rows, in the order of the published table's families."""
    return sorted(
        (row for run in runs() for row in run["rows"]), key=lambda row: (row["arch"][:3], len(row["arch"]), row["arch"])
    )


def markdown() -> str:
    """The table and what it was measured with."""
    lines = [
        "| model | batch | plain MiB | ogc MiB | cut | more FLOPs | published: ogc's predecessor | its overhead |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows():
        published = row["published"]
        lines.append(
            f"| {row['arch']} | {row['batch_size']} | {row['plain_bytes'] / MIB:.0f} | {row['ogc_bytes'] / MIB:.0f} "
            f"| {1 - row['ogc_bytes'] / row['plain_bytes']:.0%} | {row['ogc_flops'] / row['plain_flops'] - 1:.1%} "
            f"| {published['theirs']} MiB | {published['overhead']:.0%} |"
        )
    ratios = [row["ogc_bytes"] / MIB / row["published"]["theirs"] for row in rows()]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    versions = runs()[0]["versions"]
    commands = "; ".join(f"`{run['command']}` ({run['note']})" for run in runs())
    return (
        "\n".join(lines)
        + f"\n\nPeak of the CPU allocator over one step, torch {versions['torch']}, float32, all outputs, gradients "
        f"and buffers equal bit by bit. Geometric mean of ours over published: {mean:.2f}. The published figures "
        f"were measured on a GPU; CPU kernels add temporaries of their own (see Limits). Made by {commands}.\n"
    )


def inserted(text: str) -> str:
    """The README with the table in its place."""
    before, rest = text.split(START)
    _, after = rest.split(END)
    return f"{before}{START}{markdown()}{END}{after}"


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(inserted(path.read_text(encoding="utf-8")), encoding="utf-8")
