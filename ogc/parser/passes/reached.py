"""Which tensors a backward would reach: a program that gives gradients to others is not the model's."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch


def reached(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> tuple[frozenset[Any], list[Any]]:
    """The tensors that the backward of ``outputs`` ends at: an input is its number, anything else itself.

    Returns:
        The tensors, and the nodes on the way, which are to be held until the outputs are gone. Nodes that Python
        has looked at are freed recursively by PyTorch 2.15, which takes more stack for a long program than there is;
        a list lets go of its last item first, and each node here comes after those that it holds.
    """
    numbers = {id(tensor): number for number, tensor in enumerate(inputs)}
    found: set[Any] = {numbers.get(id(t), t) for t in outputs if t.requires_grad and t.grad_fn is None}
    starts: list[Any] = [t.grad_fn for t in outputs if t.grad_fn is not None]
    holders = dict.fromkeys(starts, 0)
    pending = list(holders)
    while pending:
        for following in _following(pending.pop()):
            if following not in holders:
                holders[following] = 0
                pending.append(following)
            holders[following] += 1
    nodes: list[Any] = []
    pending = [node for node, count in holders.items() if count == 0]
    while pending:
        nodes.append(node := pending.pop())
        if hasattr(node, "variable"):
            found.add(numbers.get(id(node.variable), node.variable))
        for following in _following(node):
            holders[following] -= 1
            if holders[following] == 0:
                pending.append(following)
    return frozenset(found), nodes[::-1]


def _following(node: Any) -> list[Any]:
    return [following for following, _ in node.next_functions if following is not None]


def names_of(tensors: Collection[Any], model: torch.nn.Module) -> str:
    """What to call inputs and parameters in a message."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [f"input {t}" if isinstance(t, int) else names[id(t)] for t in tensors]
    return ", ".join(sorted(found)) or "nothing"
