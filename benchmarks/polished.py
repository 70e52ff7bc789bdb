"""How good plans are: those of the default effort beside the best that long polishing finds, and what is proven.

Networks are weighed by estimated times, so that figures are the same on every machine. Each question is asked of a
graph of which nothing is known. All questions together are then asked of one graph with more effort: what is found for
one serves the others, and the best of all is what the default is held against.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

import ogc

from .cases import CASES, Case, Tokens
from .results import Results
from .row import Data

GOALS: dict[str, dict[str, Any]] = {
    "0.7": {"memory_budget": 0.7},
    "0.5": {"memory_budget": 0.5},
    "+10%": {"max_overhead": 0.1},
    "+30%": {"max_overhead": 0.3},
    "least": {"memory_budget": "least"},
    "fair": {},
}

EFFORT = 2

WORDS, WIDTH = 1000, 256
"""Of language models: so narrow that nothing but the number of operations makes them slow to plan."""


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_embd=WIDTH, n_layer=12, n_head=4, use_cache=False))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    narrow: dict[str, Any] = {"d_model": WIDTH, "d_ff": 1024, "num_layers": 6, "num_heads": 4}
    tokens: dict[str, Any] = {"decoder_start_token_id": 0, "pad_token_id": 0, "vocab_size": WORDS}
    return T5ForConditionalGeneration(T5Config(**narrow, **tokens, use_cache=False))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=4,
    ))  # fmt: skip


def llama_of(layers: int, width: int = WIDTH) -> nn.Module:
    """A Llama of so many equal layers, called with labels."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        vocab_size=WORDS, hidden_size=width, intermediate_size=43 * width // 16, num_hidden_layers=layers,
        num_attention_heads=4, use_cache=False,
    ))  # fmt: skip


def _language(build: Any, size: int = WIDTH) -> Case:
    return Case("transformer", build, Tokens(size, WORDS, True), 2, "", package="transformers")


NETWORKS: dict[str, tuple[Case, int]] = {
    "unet": (CASES["unet"], 1),
    "gpt2": (_language(_gpt2), 2),
    "t5": (_language(_t5, 128), 2),
    "resnet18": (CASES["resnet18"], 8),
    "resnet50": (CASES["resnet50"], 4),
    "llama of 12 layers": (_language(partial(llama_of, 12)), 2),
    "densenet121": (CASES["densenet121"], 2),
    "bert": (_language(_bert), 2),
    "vit_b_16": (CASES["vit_b_16"], 2),
    "swin_t": (CASES["swin_t"], 2),
    "convnext_tiny": (CASES["convnext_tiny"], 2),
    "mobilenet_v2": (CASES["mobilenet_v2"], 8),
    "mobilenet_v3_large": (CASES["mobilenet_v3_large"], 8),
    "efficientnet_b0": (CASES["efficientnet_b0"], 4),
}
"""Each with its batch size."""


def add_rows(name: str, results: Results) -> None:
    """The rows of a network, each as soon as it is there."""
    for row in rows_of(name, graph_of(name)):
        results.add(row)


def graph_of(name: str) -> ogc.Graph:
    case, batch_size = NETWORKS[name]
    torch.manual_seed(0)
    model = case.build().train()
    return ogc.parse(model, case.sample(batch_size, None, torch.device("cpu")), profile="estimate")


def rows_of(name: str, graph: ogc.Graph) -> Iterator[Data]:
    """A row for each goal: the plan, the seconds of planning, what is proven, and the best that is known."""
    plans: dict[str, ogc.Plan] = {}
    seconds: dict[str, float] = {}
    best, long, plain = replace(graph), dict[str, float](), ogc.solve(graph, solver="none").peak_bytes
    for goal, asked in GOALS.items():
        start = time.process_time()
        plan = _plan(replace(graph), asked)
        seconds[goal] = time.process_time() - start
        if plan is not None:
            plans[goal] = plan
    for effort in (1, EFFORT, EFFORT):  # what is known already is not looked for again
        for goal, asked in GOALS.items():
            start = time.process_time()
            found = _plan(best, asked, effort)
            long[goal] = long.get(goal, 0.0) + time.process_time() - start
            if found is not None:
                plans[f"best {goal}"] = found
    for goal in GOALS:
        row: Data = {"arch": name, "operations": len(graph), "goal": goal}
        row |= {"plan_seconds": seconds[goal], "best_seconds": long[goal], "plain_bytes": plain}
        if (known := plans.get(f"best {goal}")) is not None:
            row |= {"best_bytes": known.peak_bytes, "best_overhead": known.overhead}
        if (plan := plans.get(goal)) is not None:
            gap = plan.gap
            row |= {"peak_bytes": plan.peak_bytes, "overhead": plan.overhead}
            row |= {"gap_bytes": gap.bytes, "gap_time": gap.time}
        yield row


def _plan(graph: ogc.Graph, asked: dict[str, Any], effort: int = 1) -> ogc.Plan | None:
    """A plan, if one was found."""
    try:
        return ogc.solve(graph, effort=effort, **asked)
    except ogc.SolveError:
        return None


def above(row: Data) -> float:
    """By what share a plan is worse than the best: in time within a budget, in peak within a time or for the least.

    Without a goal a plan is a bargain of both: then in peak times time.
    """
    if "peak_bytes" not in row:
        return float("inf") if "best_bytes" in row else 0.0
    time, peak = (1 + row["overhead"]) / (1 + row["best_overhead"]), row["peak_bytes"] / row["best_bytes"]
    if row["goal"] == "fair":
        return max(0.0, time * peak - 1)
    return max(0.0, (peak if "memory_budget" not in GOALS[row["goal"]] or row["goal"] == "least" else time) - 1)
