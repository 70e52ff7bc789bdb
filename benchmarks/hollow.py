"""The published table as it would be on CUDA, without a GPU: what plans promise beside hollow runs of them.

Nothing is computed and no memory is needed: models lie on ``meta``, at the published batch sizes, and their plans run
on tensors without content (:mod:`ogc.sizing.hollow`). Times are estimated by the rates of the published table's GPU.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

import ogc
from ogc.sizing.hollow import hollow_run

from .cases import CASES, PUBLISHED
from .losses import cross_entropy
from .results import Results
from .row import Data
from .trial import within_published_overhead

GPU = "RTX 2080 Ti"
"""On which Feng & Huang measured."""

TRANSFORMERS = ("bert_base", "gpt2_small")
"""With cross-entropy, whose gradient no kernel copies unseen."""

NAMES = (*PUBLISHED, *TRANSFORMERS)


def add_row(name: str, results: Results) -> None:
    results.data["gpu"] = GPU
    results.add(row_of(name))


def row_of(name: str) -> Data:
    """Plan for a GPU, and run hollow: bytes of a step: plain, our least peak, and ours at the published overhead."""
    case = CASES[name]
    with torch.device("meta"):
        model = case.build().train()
    inputs = case.input.sample(case.batch_size)
    loss: dict[str, Any] = {"loss": cross_entropy} if name in TRANSFORMERS else {}
    graph = ogc.parse(model, inputs, device="cuda", profile="estimate", gpu=GPU, **loss)
    plain, least = ogc.solve(graph, solver="none"), ogc.solve(graph, memory_budget="least")
    ours = least
    if case.published is not None:
        ours = within_published_overhead(
            lambda overhead: ogc.solve(graph, max_overhead=overhead), case.published.overhead, lambda plan: plan
        )
    plans = {"plain": plain, "least": least, "ours": ours}
    return {
        "arch": name,
        "batch_size": len(inputs),
        **{f"{kind}_bytes": plan.peak_bytes for kind, plan in plans.items()},
        **{f"hollow_{kind}_bytes": hollow_run(model, graph, plan, gpu=GPU).peak_bytes for kind, plan in plans.items()},
        "overhead": ours.overhead,
        "flops_overhead": ours.flops_overhead,
        "published": case.published and asdict(case.published),
    }


def errors(row: Data) -> list[float]:
    """Of what is promised, as shares of what is reached."""
    return [row[f"{kind}_bytes"] / row[f"hollow_{kind}_bytes"] - 1 for kind in ("plain", "least", "ours")]
