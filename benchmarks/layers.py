"""Equal layers, few to many: what a tenth more time saves of the peak, and how long parsing and planning take."""

from __future__ import annotations

import time

import torch

import ogc

from .polished import WORDS, llama_of
from .results import Results

LAYERS = ("12", "32", "80", "200")
WIDTH, TOKENS, BATCH = 128, 256, 4
"""So small that the number of operations decides how long planning takes, and arithmetic about half of parsing."""

OVERHEAD = 0.1


def add_row(name: str, results: Results) -> None:
    torch.manual_seed(0)
    model = llama_of(int(name), WIDTH).train()
    words = torch.randint(WORDS, (BATCH, TOKENS))
    start = time.process_time()
    graph = ogc.parse(model, {"input_ids": words, "labels": words}, profile="estimate")
    parsed = time.process_time()
    plan = ogc.solve(graph, max_overhead=OVERHEAD)
    results.add({
        "arch": f"{name} layers", "operations": len(graph), "plain_bytes": plan.plain_peak_bytes,
        "peak_bytes": plan.peak_bytes, "overhead": plan.overhead, "parse_seconds": parsed - start,
        "plan_seconds": time.process_time() - parsed,
    })  # fmt: skip
