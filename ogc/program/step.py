"""What is said of the rest of a step, which begins where the model's forward returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

Loss = Callable[[Any], torch.Tensor] | Literal["outputs"]
"""A function of what the forward returns; ``"outputs"`` is whatever starts the backward at all outputs."""

Optimizer = torch.optim.Optimizer | Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
"""An optimizer of a model, or a class or function that makes one of parameters."""


@dataclass(frozen=True)
class Rest:
    """How the caller goes on.

    Attributes:
        loss: from what the backward starts; None to find that out.
        holds_outputs: all outputs are held through the backward.
        outputs: ``"all"`` of them are wanted, or the ``"loss"`` alone.
    """

    loss: Loss | None = None
    holds_outputs: bool = True
    outputs: str = "all"


def losses_among(output: Any, tensors: Sequence[torch.Tensor], requires_grad: Sequence[bool]) -> list[int]:
    """The numbers of the tensors of an output that may be its loss: one number each, to differentiate; of several the
    one that goes by that name, if one does."""
    found = [n for n, tensor in enumerate(tensors) if requires_grad[n] and not tensor.dim()]
    if len(found) < 2:
        return found
    named = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    return [n for n in found if tensors[n] is named] or found
