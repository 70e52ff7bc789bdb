"""Recurrent layers: one call for all steps in time, made of other operators underneath autograd's own bookkeeping."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .registry import Operator, register

aten = torch.ops.aten


def _of_the_sequence(results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Not of the last states, which are used more rarely, and without whose gradients it takes a little more.

    With the batch first, the sequence is transposed, and a gradient that is not, as is usual, is copied.
    """
    return [torch.ones_like(results[0], memory_format=torch.contiguous_format)]


# Shapes do not tell what the kernels of a single step take, nor how gradients of weights that all steps share are
# added up.
register(
    *(
        Operator(getattr(packet, overload), to_run_with=_of_the_sequence)
        for packet in (aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu)
        for overload in ("input", "data")
    )
)
