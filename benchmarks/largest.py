"""The largest batch that fits on a device of so many bytes: the plain model, checkpointed blocks, and ours."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

import ogc
from ogc.device.needs import device_bytes, fixed_needs
from ogc.torch_state.allocator import peak_bytes

from .losses import LOSSES, planned_as
from .measuring import MIB, Run, allocate_gradients, step
from .networks import ARCHITECTURES
from .peers.ways import Impossible, around_blocks, checkpointed

OVERHEADS = (0.2, 0.5)
"""Shares of a plain step's time that our plans may add."""


@dataclass(frozen=True)
class Largest:
    """Batch sizes that fit, by the way of training; for ours with the overhead and the bytes that a step took."""

    arch: str
    device_memory: int
    plain: int
    blocks: int | None  # None where the architecture has none
    ours: dict[str, dict[str, Any]]

    def __str__(self) -> str:
        ours = ", ".join(
            f"{row['size']} at up to {share} more time ({row['size'] / max(1, self.plain):.1f} x, measured "
            f"{row['measured_bytes'] / MIB:.0f} MiB)"
            for share, row in self.ours.items()
        )
        return (
            f"{self.arch}, {self.device_memory / MIB:.0f} MiB: {self.plain} plain, {self.blocks or 'none'} "
            f"with checkpointed blocks, ours {ours}"
        )


def largest(name: str, model: torch.nn.Module, inputs: torch.Tensor, options: argparse.Namespace) -> Largest:
    """Find the batches, and run the step of each plan once, for the allocator to say what it takes.

    Args:
        name, model: the architecture.
        inputs: a batch of it, for its device.
        options: of the command line.
    """
    architecture, optimizer, loss = ARCHITECTURES[name], options.optimizer, LOSSES[options.loss]
    allocate_gradients(model)

    def sample(size: int) -> torch.Tensor:
        return architecture.input.sample(size, options.size).to(inputs.device)

    def measured(run: Run, size: int) -> int:
        """Bytes of a whole step."""
        batch = sample(size)
        fixed = fixed_needs(model, batch, optimizer).fixed
        step(run, batch, loss)
        return fixed + peak_bytes(lambda: step(run, batch, loss), batch.device)

    found: dict[str, dict[str, Any]] = {}
    for share in OVERHEADS:
        fits = ogc.largest_batch(
            model,
            sample,
            device_memory=options.device_memory,
            optimizer=optimizer,
            loss=planned_as(options.loss),
            max_overhead=share,
            profile="auto" if options.profile == "measure" else options.profile,
        )
        found[f"{share:.0%}"] = {
            "size": fits.size,
            "plain": fits.plain,
            "overhead": fits.plan.overhead,
            "measured_bytes": measured(ogc.apply(model, fits.graph, fits.plan), fits.size),
            "next_does_not_fit": fits.too_large,
        }
    plain, room, blocks = max(row["plain"] for row in found.values()), device_bytes(options.device_memory), None
    with suppress(Impossible):
        run = around_blocks(architecture, model, checkpointed)
        blocks = _largest_measured(lambda size: measured(run, size), room)
    return Largest(name, room, plain, blocks, found)


def _largest_measured(bytes_of: Callable[[int], int], room: int) -> int:
    """The largest size whose step was measured to fit, where the next was measured not to."""
    small, large = bytes_of(2), bytes_of(4)
    size = max(1, int(2 + 2 * (room - small) / max(1, large - small)))
    while bytes_of(size) > room:
        size -= 1
    while bytes_of(size + 1) <= room:
        size += 1
    return size
