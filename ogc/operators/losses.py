"""Losses: over classes, which add up what they give for rows, and by distance."""

from __future__ import annotations

from typing import Any

import torch

from .registry import Arguments, Operator, Summed, register, run_for_bytes

aten = torch.ops.aten

MEAN, SUM = 1, 2
"""How aten numbers reductions."""


def _over_classes(args: Arguments) -> Summed | None:
    """Of scores, targets, and what follows with its default: weights of classes, reduction, target to ignore."""
    given: tuple[Any, ...] = (*args, *(None, MEAN, -100)[len(args) - 2 :])
    scores, targets, classes, reduction, ignored, *rest = given
    if reduction not in (MEAN, SUM):
        return None
    return Summed((scores, targets, classes, SUM, ignored, *rest), targets, classes, ignored, reduction == MEAN)


register(
    Operator(aten.cross_entropy_loss.default, summed=_over_classes),
    Operator(aten.nll_loss_nd.default, summed=_over_classes),
    Operator(aten.nll_loss.default, summed=_over_classes),
    # A CPU has all distances at once.
    *run_for_bytes(aten.mse_loss.default, aten.smooth_l1_loss.default),
    *run_for_bytes(aten.cosine_embedding_loss.default, aten.triplet_margin_loss.default),
)
