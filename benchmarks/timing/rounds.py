"""Steps of several runs in turn, and what they pay over the first of them: the median of the ratios within a round."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles

import torch

from benchmarks.measuring import Run, timed

Clock = Callable[[], float]

LEAST_ROUNDS = 15
"""Seven on each side of the median: what other work on the machine disturbs is left out. With seven in all, on a busy
machine, one of 164 plans seemed to pay 5 points more than it does."""

SECONDS = 20.0
"""How long a network's rounds go on at least, so that quick steps, which vary more, have more of them."""

MOST_ROUNDS = 201
"""Even so: a quantile of two hundred is as good as it gets."""

STEADY, MOST_TRIES = 0.05, 3
"""A round counts where the machine was steady, which is seen by two plain steps: they are not further apart than this,
or, after so many times the rounds, it is one of those where they are closest. While another guest of the machine was
busy, a plan of MobileNetV3 that promised 20 % paid 8 in the median; in half of the rounds the plain steps were 11
points apart or more."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Kernels run on one thread, so that their time is CPU time; as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def clock_of(device: torch.device) -> Clock:
    """CPU seconds of this process, which others on the machine do not add to; on CUDA those of the wall."""
    return time.perf_counter if device.type == "cuda" else time.process_time


@dataclass(frozen=True)
class Seconds:
    """Of one run, a number for each round.

    Attributes:
        own: seconds of its steps.
        plain: those of the plain model's in the same rounds.
    """

    own: Sequence[float]
    plain: Sequence[float]

    @property
    def paid(self) -> float:
        """The overhead, as a share of the plain step."""
        return median(self._ratios) - 1

    @property
    def quartiles(self) -> tuple[float, float]:
        """Between which the overheads of the middle half of the rounds are."""
        if len(self.own) < 2:
            return self.paid, self.paid
        low, _, high = quantiles(self._ratios, n=4, method="inclusive")
        return low - 1, high - 1

    @property
    def _ratios(self) -> list[float]:
        return [own / plain for own, plain in zip(self.own, self.plain, strict=True)]


def in_turn(
    steps: Mapping[str, Callable[[], float]], rounds: int, seconds: float, twins: tuple[str, str] | None = None
) -> dict[str, list[float]]:
    """Seconds of every step in every round, after one that does not count.

    There are at least ``rounds`` of them, and more until ``seconds`` are spent. Each has an order of its own: a step
    works in the memory that the one before it left, and where the order went round, two plain steps of ResNet-101 were
    3 points apart. Where two of the steps are ``twins``, rounds in which these are apart are replaced by others.
    """
    gc.collect()
    start = time.perf_counter()
    for step in steps.values():
        step()
    each = time.perf_counter() - start
    number = max(rounds, min(MOST_ROUNDS, math.floor(seconds / max(each, 1e-9))))
    found: list[dict[str, float]] = []
    orders = random.Random(0)
    while len(found) < number or (
        twins and len(found) < MOST_TRIES * number and _apart(found[number - 1], twins) > STEADY
    ):
        found.append({name: steps[name]() for name in orders.sample(list(steps), len(steps))})
        if twins:
            found.sort(key=lambda round_: _apart(round_, twins))
    return {name: [round_[name] for round_ in found[:number]] for name in steps}


def _apart(round_: Mapping[str, float], twins: tuple[str, str]) -> float:
    one, other = (round_[name] for name in twins)
    return abs(math.log(one / other))


def seconds_of(runs: Mapping[str, Run], inputs: torch.Tensor, rounds: int, seconds: float) -> dict[str, Seconds]:
    """The time of steps of these runs, of which the first two are the plain model; gradients add up meanwhile."""
    clock = clock_of(inputs.device)
    first, second, *_ = runs
    steps = {name: partial(timed, run, inputs, clock) for name, run in runs.items()}
    found = in_turn(steps, rounds, seconds, twins=(first, second))
    return {name: Seconds(own, found[first]) for name, own in found.items()}
