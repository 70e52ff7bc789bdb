"""Where logits are the widest tensor: a language model with labels, by every way to save memory, side by side.

    OMP_NUM_THREADS=1 python -m benchmarks.logits [WORDS ...] --json FILE

A Llama of eight layers and width 256 with its own loss on 2 x 512 tokens, and a vocabulary of so many words. It needs
transformers.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ogc

from .side_by_side import Forward, Row, Way, compiled, main, rows

TOKENS, WIDTH, LAYERS, SLICES = (2, 512), 256, 8, 8
VOCABULARIES = ("32000", "128000")
CHUNKED = "linear_cross_entropy"
"""PyTorch's own loss in chunks, from 2.14 on: the model is changed to call it."""


class Subject:
    """The model, a batch, and the ways to run it."""

    def __init__(self, vocabulary: int) -> None:
        llama: Any = importlib.import_module("transformers.models.llama")
        torch.manual_seed(0)
        config = llama.LlamaConfig(
            vocab_size=vocabulary, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=LAYERS,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=TOKENS[1], use_cache=False,
        )  # fmt: skip
        self.model: Any = llama.LlamaForCausalLM(config).train()
        ids = torch.randint(vocabulary, TOKENS)
        self.batch = {"input_ids": ids, "labels": ids}

    def ways(self) -> dict[str, Way]:
        """By name."""
        sliced = {"batch_slices": SLICES, "outputs": "loss"}
        chunked: dict[str, Way] = {CHUNKED: lambda: (self._chunked, None)} if hasattr(F, CHUNKED) else {}
        return {
            "plain": lambda: (partial(self.model, **self.batch), None),
            "checkpoint per layer": lambda: (self._checkpointed, None),
            "compiled, budget 0.5": partial(self._compiled, 0.5),
            "compiled, budget 0": partial(self._compiled, 0.0),
            **chunked,
            "ogc, overhead 0.2": partial(self._planned, max_overhead=0.2),
            "ogc": self._planned,
            f"ogc, {SLICES} slices, half": partial(self._planned, memory_budget=0.5, **sliced),
            f"ogc, {SLICES} slices, overhead 0.2": partial(self._planned, max_overhead=0.2, **sliced),
            f"ogc, {SLICES} slices": partial(self._planned, **sliced),
        }

    def _checkpointed(self) -> Any:
        layers = list(self.model.model.layers)
        for layer in layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        try:
            return self.model(**self.batch)
        finally:
            for layer in layers:
                del layer.forward

    def _compiled(self, budget: float) -> tuple[Forward, None]:
        return partial(compiled(self.model, budget), **self.batch), None

    def _chunked(self) -> Any:
        """The model with a loss that shifts the labels as its own does."""
        ids = self.batch["input_ids"]
        hidden = self.model.model(input_ids=ids).last_hidden_state.flatten(0, 1)
        targets = F.pad(ids, (0, 1), value=-100)[:, 1:].flatten()
        options = torch.nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined]
        loss = getattr(F, CHUNKED)(hidden, self.model.lm_head.weight, targets, options=options)
        return argparse.Namespace(loss=loss)

    def _planned(self, **wish: Any) -> tuple[Forward, ogc.Plan]:
        optimized = ogc.optimize(self.model, self.batch, **wish)
        plan: Any = optimized.plan
        return partial(optimized, **self.batch), plan


def _measure(vocabulary: str, rounds: int) -> list[Row]:
    subject = Subject(int(vocabulary))
    return rows(f"{int(vocabulary):,} words", subject.model, subject.ways(), rounds)


if __name__ == "__main__":
    sys.exit(main("benchmarks.logits", __doc__, VOCABULARIES, _measure))
