"""The largest batch that fits on a device of so many bytes: the plain model, checkpointed blocks, and ours."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import suppress

import ogc
from ogc.given import memory_bytes
from ogc.sizing.needs import fixed_needs
from ogc.torch_state.allocator import peak_bytes

from .losses import planned_as
from .measuring import Inputs, Run, allocate_gradients, first_of, give_back_freed_memory, timed
from .results import Impossible
from .row import Data
from .trial import Trial
from .ways import around_blocks, checkpointed

OVERHEADS = (0.2, 0.5)
"""Shares of a plain step's time that our plans may add."""

Step = dict[str, float]
"""That was run: ``bytes`` of the whole step, the allocator's peak and what is there beside activations, and ``seconds``
of the CPU for each sample."""


def largest(trial: Trial, options: argparse.Namespace) -> Data:
    """Find the batches, and run the step of each of them, for the allocator to say what it takes.

    Returns:
        ``plain``: samples that the plain model takes, 0 where not one fits; ``blocks``: with checkpointed blocks, by
        measuring, None where the network has none; ``plain_step`` and ``blocks_step``: the steps of so many; ``ours``:
        by the most overhead, with the ``factor`` over the plain model's and the next size, which does not fit;
        ``search_seconds``: of the CPU, until the plain model's size and ours were proved by simulation.
    """
    model, optimizer, device = trial.model, options.optimizer, first_of(trial.inputs).device
    room = memory_bytes(options.device_memory, "device_memory")
    allocate_gradients(model)

    def sample(size: int) -> Inputs:
        give_back_freed_memory()  # each size leaves gaps of its own
        return trial.case.sample(size, options.size, device)

    def measured(run: Run, size: int) -> Step:
        batch, seconds = sample(size), []

        def timed_step() -> None:
            seconds.append(timed(run, batch, time.process_time, trial.loss))

        peak = peak_bytes(timed_step, device)
        needs = fixed_needs(model, batch, optimizer, gradients="kept")
        return {"bytes": needs.with_activations(peak), "seconds": seconds[0] / size}

    start = time.process_time()
    found = ogc.largest_batches(
        model,
        sample,
        max_overheads=OVERHEADS,
        device_memory=options.device_memory,
        optimizer=optimizer,
        loss=planned_as(trial.loss),
        gradients="kept",
        profile="auto" if options.profile == "measure" else options.profile,
    )
    seconds, plain, blocks, blocks_step = time.process_time() - start, found[0].plain, None, None
    ours = {}
    for share, fits in zip(OVERHEADS, found, strict=True):
        took = measured(ogc.apply(model, fits.graph, fits.plan), fits.size)
        ours[f"{share:.0%}"] = {
            "size": fits.size,
            "factor": fits.size / plain if plain else None,
            "overhead": fits.plan.overhead,
            "measured_bytes": took["bytes"],
            "seconds": took["seconds"],
            "next_does_not_fit": fits.too_large,
        }
    with suppress(Impossible):
        run = around_blocks(trial.case, model, checkpointed)
        blocks, blocks_step = largest_measured(lambda size: measured(run, size), room)
    return {
        "arch": trial.arch,
        "input_shape": list(first_of(trial.inputs).shape),
        "device_memory": room,
        "search_seconds": seconds,
        "plain": plain,
        "plain_step": measured(model, plain) if plain else None,
        "blocks": blocks,
        "blocks_step": blocks_step,
        "ours": ours,
    }


def largest_measured(measured: Callable[[int], Step], room: int) -> tuple[int, Step | None]:
    """The largest size whose step was measured to fit, where the next was measured not to, and its step; 0 for none."""
    few, many = 2, 4
    steps = {size: measured(size) for size in (few, many)}
    small, large = steps[few]["bytes"], steps[many]["bytes"]
    size = max(1, int(few + (many - few) * (room - small) / max(1, large - small)))

    def fits(size: int) -> bool:
        if size and size not in steps:
            steps[size] = measured(size)
        return not size or steps[size]["bytes"] <= room

    while not fits(size):
        size -= 1
    while fits(size + 1):
        size += 1
    return size, steps.get(size)
