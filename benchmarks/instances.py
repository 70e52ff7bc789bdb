"""What others published of single networks, and ours on the same GPU without one: by meta tensors and rates.

MONeT (Shah et al., ICLR 2021) measured overheads within budgets on a P100, by measured costs and with other algorithms
for single operators, some of which round otherwise. Checkmate (Jain et al., MLSys 2020) says which batch fits in a V100
at one forward more. Budgets are of all memory: ours are what weights, their gradients and the images leave of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import ogc
from ogc.sizing.hollow import hollow_run

from .cases import CASES, timm_model
from .networks.others import VggUNet
from .results import Results
from .row import Data

GIB = 2**30
SKIPS = (416, 608)
"""Height and width of images that are segmented."""


@dataclass(frozen=True)
class Instance:
    """Attributes: ``build``; the ``batch_size``; height and width; the ``gpu``; the ``plain`` step's memory in GiB;
    budgets in GiB with overheads in percent, or none: then that batch is what fits in 16 GiB.
    """

    build: Callable[[], nn.Module]
    batch_size: int
    size: tuple[int, int]
    gpu: str = "P100"
    plain: float | None = None
    points: tuple[tuple[float, float], ...] = ()


def _monet(name: str, batch_size: int, plain: float, *points: tuple[float, float], size: Any = (224, 224)) -> Instance:
    return Instance(CASES[name].build, batch_size, size, plain=plain, points=points)


INSTANCES = {
    "resnet50": _monet(
        "resnet50", 184, 15.06, (10.01, 3.22), (9.01, 4.68), (8.01, 5.56), (6.99, 7.28), (6.0, 9.31), (4.99, 11.95)
    ),
    "googlenet": _monet(
        "googlenet", 320, 14.93, (9.98, 7.13), (8.99, 7.87), (8.01, 8.44), (7.02, 9.71), (6.01, 12.14), (4.99, 15.77)
    ),
    "unet": _monet(
        "unet", 11, 14.32, (10.01, -4.1), (9.01, -2.07), (8.02, -0.09), (7.0, 1.39), (6.01, 4.95), (5.01, 11.51),
        size=SKIPS,
    ),
    "mobilenet_v2": _monet(
        "mobilenet_v2", 272, 14.46, (10.02, 2.4), (9.01, 3.1), (8.02, 4.77), (7.01, 5.53), (6.01, 7.55), (5.01, 8.72)
    ),
    "vgg16": _monet(
        "vgg16", 176, 14.12, (9.71, -5.3), (8.66, -4.64), (7.88, -2.18), (6.82, 1.99), (5.9, 5.44), (5.51, 9.11)
    ),
    "vgg_unet": Instance(VggUNet, 61, SKIPS, "V100 SXM2"),
    "mobilenet_v1": Instance(lambda: timm_model("mobilenetv1_100"), 1105, (224, 224), "V100 SXM2"),
}  # fmt: skip

CARD = 16 * GIB


def add_row(name: str, results: Results) -> None:
    instance = INSTANCES[name]
    results.add({"arch": name, **(_points(instance) if instance.points else _largest(instance))})


def graph_of(instance: Instance, batch_size: int) -> tuple[nn.Module, ogc.Graph, int]:
    """The model on meta, its graph, and the bytes of weights, their gradients and the images."""
    with torch.device("meta"):
        model, images = instance.build().train(), torch.empty(batch_size, 3, *instance.size)
    graph = ogc.parse(model, images, device="cuda", profile="estimate", gpu=instance.gpu)
    return model, graph, 2 * sum(p.nbytes for p in model.parameters()) + images.nbytes


def _points(instance: Instance) -> Data:
    """What ours recomputes within each budget, or the least peak where nothing fits."""
    model, graph, fixed = graph_of(instance, instance.batch_size)
    plain, points = ogc.solve(graph, solver="none"), []
    for budget, overhead in instance.points:
        point: Data = {"budget": budget, "published": overhead / 100}
        try:
            plan = ogc.solve(graph, memory_budget=int(budget * GIB) - fixed)
        except ogc.SolveError:
            plan = ogc.solve(graph, memory_budget="least")
            point["least_bytes"] = plan.peak_bytes + fixed
        hollow = hollow_run(model, graph, plan, gpu=instance.gpu).peak_bytes
        points.append({**point, "overhead": plan.overhead, "bytes": plan.peak_bytes, "hollow_bytes": hollow})
    about = {"batch_size": instance.batch_size, "gpu": instance.gpu, "published_plain": instance.plain}
    return {**about, "plain_bytes": plain.peak_bytes + fixed, "points": points}


def _largest(instance: Instance) -> Data:
    """The largest batch that fits at one forward more, between what fits and what does not."""

    def needs(batch_size: int) -> tuple[int, int, ogc.Plan]:
        _, graph, fixed = graph_of(instance, batch_size)
        plain = ogc.solve(graph, solver="none").peak_bytes + fixed
        plan = ogc.solve(graph, max_overhead=graph.forward_seconds / graph.step_seconds)
        return plan.peak_bytes + fixed, plain, plan

    low, high, guess = 0, 2**20, instance.batch_size
    while high - low > 1:
        total, plain, plan = needs(guess)
        if total <= CARD:
            low, found, of_plain = guess, (total, plan.overhead), plain / guess
        else:
            high = guess
        guess = min(max(guess * CARD // total, low + 1), high - 1)
    return {
        "batch_size": low, "gpu": instance.gpu, "published_batch": instance.batch_size, "overhead": found[1],
        "bytes": found[0], "plain_batch": int(CARD / of_plain),
    }  # fmt: skip
