"""Batches in parts: what a function gives for the whole, of one part after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch


def even_parts(samples: int, count: int) -> tuple[slice, ...]:
    """So many slices of a batch; none has over one sample more than another, and the first has the fewest."""
    return tuple(slice(a, b) for a, b in pairwise(samples * k // count for k in range(count + 1)))


def part_by_part(parts: Sequence[slice], run: Callable[[slice], torch.Tensor]) -> torch.Tensor:
    """What ``run`` gives for each part, joined along the first axis: one part's lives beside the whole."""
    if len(parts) == 1:
        return run(parts[0])
    result: torch.Tensor | None = None
    for part in parts:
        found = run(part)
        if result is None:
            result = found.new_empty((parts[-1].stop, *found.shape[1:]))
        result[part] = found
        del found
    assert result is not None
    return result
