"""Batches of many sizes: what the first call at a new size takes, and later ones, over the plain step of that size.

Each model is optimized without a sample, and called at one size after another. The first two calls at new sizes record
and plan; they are told apart from the others, for which the plan of those two is reused. Every first call is held
against the plain model's bits.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

import ogc

from .losses import Loss, own_loss, summed
from .measuring import Inputs, Measured, allocate_gradients, as_before, distances, everything, step, timed
from .networks.graphs import AttentionLayer, GraphNetwork, MessageLayer, random_graph
from .polished import WORDS, llama_of
from .results import CheckFailed, Results

STEPS = 200
"""Of a training over all sizes, for what all new sizes together add to it."""


Trained = tuple[nn.Module, Iterator[Any], Loss]


def _llama(width: int) -> Trained:
    lengths = random.Random(0).sample(range(32, 128), 40)
    words = (torch.randint(WORDS, (4, length)) for length in lengths)
    return llama_of(12, width), ({"input_ids": each, "labels": each} for each in words), own_loss


def _graphs(layer: type[nn.Module]) -> Trained:
    draw = random.Random(0)
    return GraphNetwork(layer), (random_graph(draw) for _ in range(20)), summed


def _detector() -> Trained:
    """Images of twelve sizes, with one to three boxes each."""
    from torchvision.models.detection import retinanet_resnet50_fpn

    draw = random.Random(0)
    shapes = [(256, 256 + 32 * n) for n in range(6)] + [(288 + 32 * n, 256) for n in range(6)]

    def picture(height: int, width: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        boxes = [[x, y, x + draw.randint(30, 90), y + draw.randint(30, 90)] for x, y in ((3, 5), (60, 40), (120, 140))]
        chosen = torch.tensor(draw.sample(boxes, draw.randint(1, 3)), dtype=torch.float32)
        return torch.rand(3, height, width), {"boxes": chosen, "labels": torch.randint(1, 5, (len(chosen),))}

    model = retinanet_resnet50_fpn(weights=None, weights_backbone=None, num_classes=5, min_size=256, max_size=448)
    draw.shuffle(shapes)
    batches = ([picture(*shape) for _ in range(2)] for shape in shapes)
    return model, (tuple(map(list, zip(*batch, strict=True))) for batch in batches), lambda out: summed(out.values())


NETWORKS: dict[str, Callable[[], Trained]] = {
    **{f"llama_{width}": partial(_llama, width) for width in (128, 512)},
    "retinanet": _detector,
    "messages": partial(_graphs, MessageLayer),
    "attention": partial(_graphs, AttentionLayer),
}


def add_row(name: str, results: Results) -> None:
    """Shares of a plain step's CPU time: medians over the sizes, and the most; and of a training of 200 steps."""
    torch.manual_seed(0)
    model, batches, loss = NETWORKS[name]()
    optimized: Any = ogc.optimize(model.train())
    allocate_gradients(model)
    steps = [_taken(name, model, optimized, inputs, loss) for inputs in batches]
    later, report = steps[2:], optimized.report()
    first = [first / plain for plain, first, _ in later]
    more = sum(first - known for _, first, known in steps)
    results.add({
        "arch": name, "sizes": len(steps), "planned_calls": report.planned, "plain_calls": report.plain,
        "first": median(first), "most": max(first), "known": median(known / plain for plain, _, known in later),
        "first_two": [first / plain for plain, first, _ in steps[:2]],
        "of_training": more / (STEPS * sum(known for *_, known in steps) / len(steps)),
    })  # fmt: skip


def _taken(name: str, model: nn.Module, optimized: Any, inputs: Inputs, loss: Loss) -> tuple[float, float, float]:
    """CPU seconds at a size: a plain step, the first by a plan, and a later one; medians of the first and last."""

    def seconds(run: Any) -> float:
        with as_before(model):
            return timed(run, inputs, time.process_time, loss)

    seconds(model)
    plain = median(seconds(model) for _ in range(3))
    expected, _ = _result(model, model, inputs, loss)
    found, first = _result(model, optimized, inputs, loss)
    if apart := distances(expected, found):
        raise CheckFailed(f"{name}: {', '.join(apart)}")
    return plain, first, median(seconds(optimized) for _ in range(3))


def _result(model: nn.Module, run: nn.Module, inputs: Inputs, loss: Loss) -> tuple[Measured, float]:
    """All that a step from the same state leaves, and its CPU seconds."""
    torch.manual_seed(0)
    with as_before(model):
        start = time.process_time()
        outputs = step(run, inputs, loss)
        seconds = time.process_time() - start
        return Measured(0, 0, dict(everything(model, outputs))), seconds
