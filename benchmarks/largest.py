"""The largest batch that fits on a device of so many bytes: the plain model, checkpointed blocks, and ours."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import geometric_mean

import torch

import ogc
from ogc.device.needs import device_bytes, fixed_needs
from ogc.torch_state.allocator import peak_bytes

from .losses import LOSSES, planned_as
from .measuring import MIB, Run, allocate_gradients, give_back_freed_memory, timed
from .networks import ARCHITECTURES
from .peers.ways import Impossible, around_blocks, checkpointed

OVERHEADS = (0.2, 0.5)
"""Shares of a plain step's time that our plans may add."""


@dataclass(frozen=True)
class Measured:
    """A step that was run.

    Attributes:
        bytes: of the whole step: the allocator's peak, and what is there beside activations.
        seconds: of the CPU, for each sample.
    """

    bytes: int
    seconds: float


@dataclass(frozen=True)
class Ours:
    """The largest batch of a plan of ours.

    Attributes:
        size: samples.
        factor: over those of the plain model; None where not one fits.
        overhead: that the plan promises.
        measured_bytes, seconds: as in :class:`Measured`.
        next_does_not_fit: the next size, by simulation.
    """

    size: int
    factor: float | None
    overhead: float
    measured_bytes: int
    seconds: float
    next_does_not_fit: int


@dataclass(frozen=True)
class Largest:
    """Batch sizes that fit, by the way of training.

    Attributes:
        arch: the architecture.
        input_shape: of the batch that the model was built with; the sizes found are others.
        device_memory: bytes of the device.
        search_seconds: of the CPU, until the plain model's size and ours were proved by simulation.
        plain: samples that the plain model takes; 0 where not one fits.
        plain_step: its step of so many; None for none.
        blocks: with checkpointed blocks, by measuring; None where the architecture has none.
        blocks_step: the step of so many; None for none.
        ours: by the most overhead.
    """

    arch: str
    input_shape: tuple[int, ...]
    device_memory: int
    search_seconds: float
    plain: int
    plain_step: Measured | None
    blocks: int | None
    blocks_step: Measured | None
    ours: dict[str, Ours]

    def factor(self, size: int | None) -> float | None:
        """Over the plain model's batch, where both are there."""
        return size / self.plain if size is not None and self.plain else None

    def __str__(self) -> str:
        ours = ", ".join(
            f"{row.size} at up to {share} more time ({_times(row.factor)}, promised {row.overhead:.0%}, measured "
            f"{_said(Measured(row.measured_bytes, row.seconds))})"
            for share, row in self.ours.items()
        )
        steps = [("plain", self.plain_step), ("checkpointed", self.blocks_step)]
        others = "".join(f"; {name} measured {_said(found)}" for name, found in steps if found)
        blocks = "none" if self.blocks is None else self.blocks
        shape = "×".join(map(str, self.input_shape[1:]))
        return (
            f"{self.arch}, {shape}, {self.device_memory / MIB:.0f} MiB: {self.plain} "
            f"plain, {blocks} with checkpointed blocks, ours {ours}{others}; found in {self.search_seconds:.0f} s of "
            "the CPU"
        )


def _said(step: Measured) -> str:
    return f"{step.bytes / MIB:.0f} MiB and {step.seconds:.3g} s a sample"


def _times(factor: float | None) -> str:
    return "of none" if factor is None else f"{factor:.1f} x"


def summary(rows: Sequence[Largest]) -> str:
    """The geometric means of what fits over what the plain model takes, where it takes any; empty for none."""
    found = [row for row in rows if row.plain]
    if not found:
        return ""
    means = {share: geometric_mean([one.ours[share].size / one.plain for one in found]) for share in found[0].ours}
    said = ", ".join(f"{mean:.1f} x at up to {share}" for share, mean in means.items())
    blocks = [row.blocks / row.plain for row in found if row.blocks]
    if blocks:
        said += f"; {geometric_mean(blocks):.1f} x with checkpointed blocks, of {len(blocks)}"
    return f"geometric mean over the plain model's batch, {len(found)} of {len(rows)} networks: ours {said}"


def largest(name: str, model: torch.nn.Module, inputs: torch.Tensor, options: argparse.Namespace) -> Largest:
    """Find the batches, and run the step of each of them, for the allocator to say what it takes.

    Args:
        name, model: the architecture.
        inputs: a batch of it, for its device.
        options: of the command line.
    """
    architecture, optimizer, loss = ARCHITECTURES[name], options.optimizer, LOSSES[options.loss]
    room = device_bytes(options.device_memory)
    allocate_gradients(model)

    def sample(size: int) -> torch.Tensor:
        give_back_freed_memory()  # each size leaves gaps of its own
        return architecture.input.sample(size, options.size).to(inputs.device)

    def measured(run: Run, size: int) -> Measured:
        batch, seconds = sample(size), []

        def timed_step() -> None:
            seconds.append(timed(run, batch, time.process_time, loss))

        peak = peak_bytes(timed_step, batch.device)
        return Measured(fixed_needs(model, batch, optimizer).with_activations(peak), seconds[0] / size)

    start = time.process_time()
    found = ogc.largest_batches(
        model,
        sample,
        max_overheads=OVERHEADS,
        device_memory=options.device_memory,
        optimizer=optimizer,
        loss=planned_as(options.loss),
        profile="auto" if options.profile == "measure" else options.profile,
    )
    seconds, plain, blocks, blocks_step = time.process_time() - start, found[0].plain, None, None
    ours = {}
    for share, fits in zip(OVERHEADS, found, strict=True):
        took = measured(ogc.apply(model, fits.graph, fits.plan), fits.size)
        factor = fits.size / plain if plain else None
        ours[f"{share:.0%}"] = Ours(
            fits.size, factor, fits.plan.overhead, took.bytes, took.seconds, next_does_not_fit=fits.too_large
        )
    with suppress(Impossible):
        run = around_blocks(architecture, model, checkpointed)
        blocks, blocks_step = _largest_measured(lambda size: measured(run, size), room)
    plain_step = measured(model, plain) if plain else None
    return Largest(name, tuple(inputs.shape), room, seconds, plain, plain_step, blocks, blocks_step, ours)


def _largest_measured(measured: Callable[[int], Measured], room: int) -> tuple[int, Measured | None]:
    """The largest size whose step was measured to fit, where the next was measured not to, and its step; 0 for none."""
    few, many = 2, 4
    steps = {size: measured(size) for size in (few, many)}
    small, large = steps[few].bytes, steps[many].bytes
    size = max(1, int(few + (many - few) * (room - small) / max(1, large - small)))

    def fits(size: int) -> bool:
        if size and size not in steps:
            steps[size] = measured(size)
        return not size or steps[size].bytes <= room

    while not fits(size):
        size -= 1
    while fits(size + 1):
        size += 1
    return size, steps.get(size)
