"""The published table as it would be on CUDA, without a GPU: what plans promise beside hollow runs of them.

    python -m benchmarks.hollow [--arch ARCH ...] --json FILE

Nothing is computed and no memory is needed: models lie on ``meta``, at the published batch sizes, and their plans run
on tensors without content (:mod:`ogc.checking.hollow`). Times are estimated by the rates of the published table's GPU.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import ogc
from ogc.checking.hollow import hollow_run
from ogc.graph import table

from .bench import within_published_overhead
from .losses import cross_entropy
from .measuring import MIB, environment, write_json
from .networks import ARCHITECTURES

GPU = "RTX 2080 Ti"
"""On which Feng & Huang measured."""

PUBLISHED = tuple(name for name, architecture in ARCHITECTURES.items() if architecture.published)
TRANSFORMERS = ("bert_base", "gpt2_small")
"""With cross-entropy, whose gradient no kernel copies unseen."""


@dataclass(frozen=True)
class HollowRow:
    """One network. Bytes of one step; ``plain``, our ``least`` and ``ours``: our least peak at the published overhead.

    Attributes:
        hollow_plain_bytes, hollow_least_bytes, hollow_ours_bytes: those that a hollow run reaches.
        overhead, flops_overhead: of ours, by estimated time and by FLOPs.
        low_memory: how many operators of ours run in their low-memory forms.
        published: the row of the published table, sizes in MiB; None where there is none.
    """

    arch: str
    batch_size: int
    plain_bytes: int
    hollow_plain_bytes: int
    least_bytes: int
    hollow_least_bytes: int
    ours_bytes: int
    hollow_ours_bytes: int
    overhead: float
    flops_overhead: float
    low_memory: int
    published: dict[str, Any] | None

    @property
    def errors(self) -> tuple[float, ...]:
        """Of what is promised, as shares of what is reached."""
        return (
            self.plain_bytes / self.hollow_plain_bytes - 1,
            self.least_bytes / self.hollow_least_bytes - 1,
            self.ours_bytes / self.hollow_ours_bytes - 1,
        )


def row_of(name: str) -> HollowRow:
    """Plan for a GPU, and run hollow."""
    architecture = ARCHITECTURES[name]
    with torch.device("meta"):
        model = architecture.build().train()
    inputs = architecture.input.sample(architecture.batch_size, None)
    loss: dict[str, Any] = {"loss": cross_entropy} if name in TRANSFORMERS else {}
    graph = ogc.parse(model, inputs, device="cuda", profile="estimate", gpu=GPU, **loss)
    plain, least = ogc.solve(graph, solver="none"), ogc.solve(graph)
    ours = least
    if architecture.published is not None:
        ours = within_published_overhead(
            lambda overhead: ogc.solve(graph, max_overhead=overhead), architecture.published.overhead, lambda plan: plan
        )
    reached = [hollow_run(model, graph, plan, gpu=GPU).peak_bytes for plan in (plain, least, ours)]
    return HollowRow(
        name, len(inputs), plain.peak_bytes, reached[0], least.peak_bytes, reached[1], ours.peak_bytes, reached[2],
        ours.overhead, ours.flops_overhead, len(ours.low_memory),
        None if architecture.published is None else asdict(architecture.published),
    )  # fmt: skip


def printed(rows: list[HollowRow]) -> str:
    """As a table."""
    header = ["arch", "batch", "plain MiB", "least", "ours", "overhead", "by FLOPs", "published: plain", "theirs"]
    cells = [
        [
            *(row.arch, str(row.batch_size)),
            *(f"{size / MIB:.0f}" for size in (row.plain_bytes, row.least_bytes, row.ours_bytes)),
            *(f"{row.overhead:.1%}", f"{row.flops_overhead:.1%}"),
            *([str(row.published["plain"]), str(row.published["theirs"])] if row.published else ["-", "-"]),
            f"{max(row.errors, key=abs):+.3%}",
        ]
        for row in rows
    ]
    return table([*header, "error"], cells)


def main() -> int:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=[*PUBLISHED, *TRANSFORMERS], choices=ARCHITECTURES)
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    rows = []
    for name in options.arch:
        rows.append(row_of(name))
        print(printed(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(printed(rows))
    if options.json:
        command = shlex.join(["python", "-m", "benchmarks.hollow", *sys.argv[1:]])
        around = environment(command, torch.device("cpu"), 0, False)
        write_json(options.json, {**around, "gpu": GPU, "rows": list(map(asdict, rows))})
    return 0


if __name__ == "__main__":
    sys.exit(main())
