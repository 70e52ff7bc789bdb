"""Seconds that planning takes: stacks of equal transformer layers, and convolutional networks to compare with.

    OMP_NUM_THREADS=1 python -m benchmarks.planning --json FILE

CPU seconds of one thread, without parsing, with the limits in seconds for stacks. It needs torchvision.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ogc

from .measuring import environment, write_json
from .networks import ARCHITECTURES

Question = Callable[[ogc.Graph], Any]

QUESTIONS: dict[str, Question] = {
    "least peak": ogc.solve,
    **{f"budget {share:.0%}": partial(ogc.solve, memory_budget=share) for share in (0.3, 0.5, 0.7)},
    **{f"overhead {share:.0%}": partial(ogc.solve, max_overhead=share) for share in (0.1, 0.2, 0.3)},
    "frontier": ogc.frontier,
}

LIMITS = {12: (2, 3, 10), 32: (5, 8, 25), 80: (15, 25, 60)}
"""Seconds for the least peak, for a plan within something, and for a frontier, by layers."""

CONVOLUTIONAL = (
    "resnet50", "resnet101", "resnet152", "densenet121", "densenet201", "inception_v3", "unet", "mobilenet_v3_large",
)  # fmt: skip


class WrittenOut(nn.Module):
    """A transformer layer with everything between its products written out: N, T, D to N, T, D."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.scales = nn.ParameterList(torch.ones(width) for _ in range(2))
        self.queries, self.keys, self.values, self.out = (nn.Linear(width, width) for _ in range(4))
        self.gate, self.up, self.down = (
            nn.Linear(width, 4 * width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attend(normalised(x, self.scales[0])), 0.1, self.training)
        y = normalised(x, self.scales[1])
        gate = self.gate(y)
        gelu = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        return x + F.dropout(self.down(gelu * self.up(y)), 0.1, self.training)

    def attend(self, x: Tensor) -> Tensor:
        products = (linear(x) for linear in (self.queries, self.keys, self.values))
        queries, keys, values = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in products)
        scores = rotated(queries) @ rotated(keys).transpose(-1, -2) / math.sqrt(queries.shape[-1])
        behind = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(behind, -math.inf)
        scores = (scores - scores.amax(-1, keepdim=True).detach()).exp()
        weights = F.dropout(scores / scores.sum(-1, keepdim=True), 0.1, self.training)
        return self.out((weights @ values).transpose(1, 2).flatten(2))


def normalised(x: Tensor, scale: Tensor) -> Tensor:
    """The last axis with mean 0 and variance 1, times ``scale``."""
    x = x - x.mean(-1, keepdim=True)
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * scale


def rotated(x: Tensor) -> Tensor:
    """Queries or keys turned by their places (Su et al., "RoFormer", 2021)."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] / 10_000 ** (torch.arange(half) / half)
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def networks(names: list[str]) -> Iterator[tuple[str, int, nn.Module, Tensor]]:
    """The name, layers if they are all equal, network and input of each."""
    for layers in LIMITS:
        if not names or f"{layers}_layers" in names:
            yield (
                f"{layers}_layers",
                layers,
                nn.Sequential(*(WrittenOut(64) for _ in range(layers))),
                torch.rand(4, 64, 64),
            )
    for name in CONVOLUTIONAL:
        if not names or name in names:
            yield name, 0, ARCHITECTURES[name].build(), ARCHITECTURES[name].input.sample(2, None)


def rows(names: list[str]) -> Iterator[dict[str, Any]]:
    for name, layers, model, inputs in networks(names):
        graph = ogc.parse(model.train(), inputs, profile="estimate")
        limits = LIMITS.get(layers, (None, None, None))
        for question, ask in QUESTIONS.items():
            start = time.process_time()
            try:
                plan = ask(graph)
                figures = {} if question == "frontier" else {"peak_bytes": plan.peak_bytes, "overhead": plan.overhead}
            except ogc.SolveError as error:  # to find that out takes its time, too
                figures = {"reason": str(error)}
            seconds = time.process_time() - start
            limit = limits[0 if question == "least peak" else 2 if question == "frontier" else 1]
            about = {"arch": name, "operations": len(graph), "question": question}
            yield {**about, "seconds": seconds, "limit": limit, **figures}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"default: 12_layers, 32_layers, 80_layers, {CONVOLUTIONAL}"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    found, slow = [], 0
    for row in rows(options.names):
        found.append(row)
        slow += row["limit"] is not None and row["seconds"] > row["limit"]
        within = f"of {row['limit']}" if row["limit"] else ""
        print(
            f"{row['arch']:20} {row['operations']:6} {row['question']:14} {row['seconds']:6.2f} s {within}", flush=True
        )
    if options.json:
        command = shlex.join(["python", "-m", "benchmarks.planning", *sys.argv[1:]])
        data = environment(command, torch.device("cpu"), seed=0, keeps_freed_memory=False)
        write_json(options.json, {**data, "rows": found})
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
