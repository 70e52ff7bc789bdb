"""Holds a recorded program against the model on other inputs than the sample's, where content decided on something.

Where data decide on sizes, the program is right for other data if its guards tell these from the sample's, or if it
computes what the model computes; else something was baked in that nobody sees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ..program.copies import copies
from ..torch_state.forwards import plain_forward
from ..torch_state.no_trace import untouched
from .arguments import Sample
from .forward.flat import FlatForward
from .judge import judge
from .traced import READS, SIZED, Traced


def judge_on_other_inputs(sample: Sample, traced: Traced) -> None:
    """Do nothing if the program is what the model's forward runs on other inputs that its guards let pass.

    Raises:
        OpaqueError: as from :func:`~ogc.parser.judge.judge`.
    """
    if not any(node.meta.get(key) for node in traced.graph.nodes for key in (READS, SIZED)):
        return
    for change in (_with_rows_repeated, _with_rows_turned):
        other = sample._replace(tensors=[_changed(tensor, change) for tensor in copies(sample.tensors)])
        if _lets_pass(other, traced) and (outputs := _outputs(other)) is not None:
            judge(other, replace(traced, outputs=outputs))


def _lets_pass(sample: Sample, traced: Traced) -> bool:
    with untouched(sample.model):
        return traced.guards is None or not traced.guards.difference(sample.model, sample.copies())


def _outputs(sample: Sample) -> list[torch.Tensor] | None:
    """What the model returns, None if such inputs are none for it."""
    flat = FlatForward(plain_forward(sample.model), sample.spec)
    try:
        with untouched(sample.model):
            flat.run(sample.copies())
    except Exception:  # the inputs are ours
        return None
    return flat.outputs


def _changed(tensor: torch.Tensor, change: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
    """The tensor with other content: each entry is one of the sample's, as others may lead an index out of bounds."""
    rows = next((dim for dim, size in enumerate(tensor.shape) if size > 1), None)
    if rows is not None and tensor.numel():
        with torch.no_grad():
            tensor.copy_(change(tensor.detach().clone(), rows))
    return tensor


def _with_rows_repeated(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Each other row is the one before it."""
    first = torch.arange(tensor.shape[rows], device=tensor.device) // 2 * 2
    return tensor.index_select(rows, first)


def _with_rows_turned(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The rows of what is no index, in the other order: as many of them are above a limit as before."""
    return tensor.flip(rows) if tensor.is_floating_point() or tensor.dtype is torch.bool else tensor
