"""What a segment and a saved tensor cost: a network of next to no work in 1 to 16 segments, recomputed at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from statistics import linear_regression, median

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import ogc

from .measuring import (
    Inputs,
    Run,
    Seconds,
    as_before,
    called,
    clock_of,
    differing,
    distances,
    first_of,
    in_turn,
    measure,
    step,
    timed,
    timed_call,
)
from .row import Data
from .trial import Trial
from .ways import around_blocks, checkpointed

SEGMENTS = (1, 2, 4, 8, 16)
"""They divide the sixteen blocks, and a line through them is mostly told by its ends."""

MOST = str(SEGMENTS[-1])
PLAIN, FORWARD, CHECKPOINT = "plain", "forward", "checkpoint"


def items_of(trial: Trial, rounds: int, seconds: float) -> Data:
    """From steps in turn, seconds of a step:

    * ``more_seconds`` than a plain step, by the number of segments, each recomputed at once;
    * ``forward_seconds`` of a forward without autograd, which is what every one of these plans runs again;
    * ``saved_tensors`` that autograd saves in a plain step;
    * ``us_per_segment``, the slope of a line through ``more_seconds``;
    * ``us_per_saved_tensor``, what the line leaves at no segments, less the forward, over the tensors;
    * ``over_checkpoint``, the step with a segment for each block, over that with torch's checkpoint on each;
    * ``differs``, kinds of tensors of any of these plans that are not bitwise the plain model's.
    """
    model, inputs, (plain, left_out) = trial.model, trial.inputs, trial.plain
    runs: dict[str, Run] = {PLAIN: model}
    runs |= {str(number): ogc.apply(model, trial.graph, in_segments(trial.graph, number)) for number in SEGMENTS}
    found = [measure(model, run, inputs, trial.seed) for run in runs.values()]
    runs[CHECKPOINT] = around_blocks(trial.case, model, checkpointed)
    clock = clock_of(first_of(inputs).device)

    def forward() -> object:
        with torch.no_grad():
            return called(model, inputs)

    steps: dict[str, Callable[[], float]] = {n: partial(timed, run, inputs, clock) for n, run in runs.items()}
    steps[FORWARD] = lambda: timed_call(forward, inputs, clock)
    with as_before(model):
        took = in_turn(steps, rounds, seconds)
        saved = saved_tensors(model, inputs)
    more = {n: Seconds(took[str(n)], took[PLAIN]).paid * median(took[PLAIN]) for n in SEGMENTS}
    per_segment, per_tensor = fitted(more, median(took[FORWARD]), saved)
    return {
        "arch": trial.arch,
        "input_shape": list(first_of(inputs).shape),
        "plain_seconds": median(took[PLAIN]),
        "forward_seconds": median(took[FORWARD]),
        "more_seconds": {str(number): seconds for number, seconds in more.items()},
        "saved_tensors": saved,
        "us_per_segment": per_segment,
        "us_per_saved_tensor": per_tensor,
        "over_checkpoint": Seconds(took[MOST], took[CHECKPOINT]).paid + 1,
        "differs": sorted({kind for other in found for kind in differing(distances(plain, other, left_out))}),
        "rounds": len(took[PLAIN]),
    }


def in_segments(graph: ogc.Graph, number: int) -> ogc.Plan:
    """The plan that runs each of as many equal segments again at once."""
    cuts = [len(graph) * place // number for place in range(number + 1)]
    return ogc.make_plan(graph, [ogc.recomputed(start, stop) for start, stop in pairwise(cuts)])


def fitted(more_seconds: dict[int, float], forward_seconds: float, saved_tensors: int) -> tuple[float, float]:
    """Microseconds per segment, and per saved tensor: of a line, its slope, and what is left without segments.

    All of these plans run the same forward again and hand on the same tensors; they differ in segments alone.
    """
    slope, rest = linear_regression(list(more_seconds), list(more_seconds.values()))
    return slope * 1e6, (rest - forward_seconds) / saved_tensors * 1e6


def saved_tensors(model: nn.Module, inputs: Inputs) -> int:
    """How many tensors autograd saves in a plain step."""
    count = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        step(model, inputs)
    return count
