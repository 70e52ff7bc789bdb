"""Which tensors a backward would reach: a program that gives gradients to others is not the model's."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch


def reached(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> frozenset[Any]:
    """The tensors that the backward of ``outputs`` ends at: an input is its number, anything else itself."""
    numbers = {id(tensor): number for number, tensor in enumerate(inputs)}
    found: set[Any] = {numbers.get(id(t), t) for t in outputs if t.requires_grad and t.grad_fn is None}
    pending: list[Any] = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if hasattr(node, "variable"):
            found.add(numbers.get(id(node.variable), node.variable))
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        pending += new
    return frozenset(found)


def names_of(tensors: Collection[Any], model: torch.nn.Module) -> str:
    """What to call inputs and parameters in a message."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [f"input {t}" if isinstance(t, int) else names[id(t)] for t in tensors]
    return ", ".join(sorted(found)) or "nothing"
