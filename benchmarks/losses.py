"""What a step of the benchmark ends with, by its name: a function of what the forward returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

Loss = Callable[[Any], torch.Tensor]


def cross_entropy(output: Any) -> torch.Tensor:
    """With some class for each sample, position or pixel.

    Args:
        output: logits of N, C (images), N, L, C (sequences) or N, C, H, W (pixels), or several such.
    """
    logits = output if isinstance(output, torch.Tensor) else output[0]
    if logits.dim() == 3:
        logits = logits.flatten(0, 1)
    shape = (len(logits), *logits.shape[2:])
    return F.cross_entropy(logits, torch.zeros(shape, dtype=torch.long, device=logits.device))


def summed(output: Any) -> torch.Tensor:
    """The sum of all that is returned."""
    outputs = [output] if isinstance(output, torch.Tensor) else list(output)
    total: torch.Tensor = sum(one.sum() for one in outputs)  # type: ignore[assignment]
    return total


def mean_square(output: Any) -> torch.Tensor:
    """Of the first tensor that is returned."""
    first: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    return first.square().mean()


def own_loss(output: Any) -> torch.Tensor:
    """That of a model of transformers that was given labels."""
    loss: torch.Tensor = output["loss"]
    return loss


def next_words(tokens: torch.Tensor) -> Loss:
    """For a language model that was given these."""
    words = tokens[:, 1:].flatten()
    return lambda scores: F.cross_entropy(scores[:, :-1].flatten(0, 1), words)


LOSSES: dict[str, Loss] = {"sum": summed, "cross-entropy": cross_entropy}


def planned_as(loss: Loss | None) -> Any:
    """What ogc is told of a loss: the backward of a sum starts at all outputs."""
    return "outputs" if loss in (None, summed) else loss
