"""Offloading beside recomputation alone, for GPUs that are not here: what a step takes longer in as much memory.

Models lie on ``meta``, in bfloat16. Each is planned within the peak of a checkpoint around every block: by plans that
offload nothing, and by plans that may, over the link that such GPUs mostly have. Times are estimated by data sheets.
Every plan runs hollow too, for its bytes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn

import ogc
from ogc.plan.simulate import plain_peak
from ogc.sizing.hollow import hollow_run

from .cases import CASES
from .results import Impossible, Results
from .row import Data

GPUS = {"H100": "PCIe 5", "A100 80GB": "PCIe 4"}
"""And their links."""

HOST_MEMORY = "256GB"
"""For each GPU: an eighth of what a host with eight has."""


@dataclass(frozen=True)
class Network:
    """Attributes: how to ``build`` it; its ``sample``; a pattern of the names of its ``blocks``."""

    build: Callable[[], nn.Module]
    sample: Callable[[], Any]
    blocks: str


def _of_transformers(kind: str, blocks: str, batch: int, tokens: int, **config: Any) -> Network:
    def build() -> nn.Module:
        import transformers

        made = getattr(transformers, f"{kind}Config")(**config, **({} if kind == "Bert" else {"use_cache": False}))
        return getattr(transformers, f"{kind}Model")(made)  # type: ignore[no-any-return]

    return Network(build, lambda: {"input_ids": torch.zeros(batch, tokens, dtype=torch.long)}, blocks)


def _of_images(name: str, batch: int, size: int = 224) -> Network:
    case = CASES[name]
    return Network(case.build, lambda: torch.zeros(batch, 3, size, size, dtype=torch.bfloat16), case.block)


def _llama(layers: int, width: int, hidden: int, kv: int, tokens: int, batch: int = 1) -> Network:
    shape = {"hidden_size": width, "intermediate_size": hidden, "num_key_value_heads": kv}
    heads = {"num_attention_heads": width // 128, "num_hidden_layers": layers, "max_position_embeddings": tokens}
    return _of_transformers("Llama", r"layers\.\d+", batch, tokens, vocab_size=32_000, **shape, **heads)


NETWORKS: dict[str, Network] = {
    "llama_1b, 4k": _llama(16, 2048, 8192, 8, 4096, 2),
    "llama_8b, 8k": _llama(32, 4096, 14_336, 8, 8192),
    "llama_8b, 128k": _llama(32, 4096, 14_336, 8, 131_072),
    "qwen3_1.7b, 4k": _of_transformers(
        "Qwen3", r"layers\.\d+", 2, 4096, vocab_size=32_000, hidden_size=2048, intermediate_size=6144,
        num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
    ),
    "gpt2_medium, 4k": _of_transformers(
        "GPT2", r"h\.\d+", 2, 4096, n_embd=1024, n_layer=24, n_head=16, n_positions=4096, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    "bert_large, 4k": _of_transformers(
        "Bert", r"encoder\.layer\.\d+", 2, 4096, hidden_size=1024, intermediate_size=4096, num_hidden_layers=24,
        num_attention_heads=16, max_position_embeddings=4096, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ),
    "vit_b_16": _of_images("vit_b_16", 128),
    "convnext_tiny": _of_images("convnext_tiny", 128),
    "swin_t": _of_images("swin_t", 128),
    "resnet50": _of_images("resnet50", 128),
    "unet": _of_images("unet", 32),
}  # fmt: skip


def add_row(name: str, results: Results) -> None:
    for gpu in GPUS:
        results.add({"arch": name, **row_of(NETWORKS[name], gpu)})


def row_of(network: Network, gpu: str) -> Data:
    """Bytes and added time of blocks, of plans without offloading, and of those with it, in the memory of blocks."""
    with torch.device("meta"):
        model = network.build().to(torch.bfloat16).train()
    sample = torch.utils._pytree.tree_map(lambda tensor: tensor.to("meta"), network.sample())
    graph = ogc.parse(model, sample, device="cuda", profile="estimate", gpu=gpu)
    blocks = around_blocks(graph, network.blocks)
    start = time.process_time()
    alone = ogc.solve(graph, memory_budget=blocks.peak_bytes)
    planned = time.process_time()
    with_host = ogc.with_host(graph, bandwidth=GPUS[gpu], host_memory=HOST_MEMORY)
    plan = ogc.solve(with_host, memory_budget=blocks.peak_bytes)
    ended = time.process_time()
    assert plan.graph is not None
    hollow = hollow_run(model, plan.graph, plan, gpu=gpu)
    return {
        "gpu": gpu, "operations": len(graph), "plain_bytes": plain_peak(graph), "step_seconds": graph.step_seconds,
        "blocks_bytes": blocks.peak_bytes, "blocks_overhead": blocks.overhead,
        "alone_bytes": alone.peak_bytes, "alone_overhead": alone.overhead, "alone_seconds": planned - start,
        "peak_bytes": plan.peak_bytes, "overhead": plan.overhead, "seconds": ended - planned,
        "offloaded_bytes": sum(plan.graph.values[one.value].bytes for one in plan.offloaded),
        "waiting_seconds": plan.waiting_seconds, "hollow_bytes": hollow.peak_bytes,
    }  # fmt: skip


def around_blocks(graph: ogc.Graph, pattern: str) -> ogc.Plan:
    """The plan of a checkpoint around every block: each is recomputed from its first cut to its last.

    Raises:
        Impossible: no module has such a name.
    """
    named = re.compile(f"({pattern})(?:\\..*)?")

    def block_of(module: str) -> str:
        found = named.fullmatch(module)
        return "" if found is None else found[1]

    segments, before = [], 0
    numbered = groupby(enumerate(graph.operations), lambda each: block_of(each[1].module))
    for name, each in numbered:
        numbers = [t for t, _ in each]
        inside = [cut for cut in graph.cuts if numbers[0] <= cut <= numbers[-1] + 1]
        if name and len(inside) > 1 and inside[0] >= before:
            segments += [ogc.saved(before, inside[0])] if inside[0] > before else []
            segments.append(ogc.recomputed(inside[0], inside[-1]))
            before = inside[-1]
    if not segments:
        raise Impossible(f"no module is named like {pattern}")
    return ogc.make_plan(graph, [*segments, ogc.saved(before, len(graph))] if before < len(graph) else segments)
