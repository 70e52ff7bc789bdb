"""What a segment and a saved tensor cost: a network of next to no work in 1 to 16 segments, recomputed at once."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from statistics import linear_regression, median

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import ogc
from benchmarks.measuring import Run, as_before, measure, step, timed, timed_call
from benchmarks.peers.ways import around_blocks, checkpointed

from .measured import Timing, differing
from .rounds import Clock, Seconds, clock_of, in_turn
from .row import Items

SEGMENTS = (1, 2, 4, 8, 16)
"""They divide the sixteen blocks, and a line through them is mostly told by its ends."""

MOST = str(SEGMENTS[-1])
PLAIN, FORWARD, CHECKPOINT = "plain", "forward", "checkpoint"


def items_of(timing: Timing) -> Items:
    """The figures, from steps in turn."""
    model, inputs, options = timing.model, timing.inputs, timing.options
    runs: dict[str, Run] = {PLAIN: model}
    runs |= {str(number): ogc.apply(model, timing.graph, in_segments(timing.graph, number)) for number in SEGMENTS}
    found = {name: measure(model, run, inputs, options.seed) for name, run in runs.items()}
    runs[CHECKPOINT] = around_blocks(timing.subject.architecture, model, checkpointed)
    clock = clock_of(inputs.device)
    steps = {name: partial(timed, run, inputs, clock) for name, run in runs.items()}
    steps[FORWARD] = partial(_forward_seconds, model, inputs, clock)
    with as_before(model):
        seconds = in_turn(steps, options.rounds, options.seconds)
        saved = saved_tensors(model, inputs)
    differs = {kind for other in found.values() for kind in differing(timing.plain, other, timing.empty.unrepeatable)}
    plain = median(seconds[PLAIN])
    more = {number: Seconds(seconds[str(number)], seconds[PLAIN]).paid * plain for number in SEGMENTS}
    forward = median(seconds[FORWARD])
    per_segment, per_tensor = fitted(more, forward, saved)
    return Items(
        arch=timing.empty.arch,
        input_shape=timing.empty.input_shape,
        device=timing.empty.device,
        plain_seconds=plain,
        forward_seconds=forward,
        more_seconds=more,
        saved_tensors=saved,
        us_per_segment=per_segment,
        us_per_saved_tensor=per_tensor,
        over_checkpoint=Seconds(seconds[MOST], seconds[CHECKPOINT]).paid + 1,
        differs=tuple(sorted(differs)),
        rounds=len(seconds[PLAIN]),
    )


def _forward_seconds(model: nn.Module, inputs: torch.Tensor, clock: Clock) -> float:
    with torch.no_grad():
        return timed_call(lambda: model(inputs), inputs, clock)


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


def saved_tensors(model: nn.Module, inputs: torch.Tensor) -> int:
    """How many tensors autograd saves in a plain step."""
    count = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        step(model, inputs)
    return count
