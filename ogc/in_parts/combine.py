"""Chooses, for each part of a model, one of its plans: numbers in, numbers out, nothing here needs torch.

Parts are called one after the other and run backward in the reverse order. While one runs, forward or backward, there
is what all calls before it keep, what it takes itself, and what the rest of the model holds then. So the largest of
these sums is the peak, and only what is kept adds up. A table over the bytes kept so far, call by call, finds the
least time within a budget, or the least peak. Bytes are counted in units, rounded up; what that loses is looked for
afterwards by exchanging single choices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..plan import PartCost

CELLS = 8192
"""Units into which the bytes are divided."""

STEPS = 16
"""How often a budget is halved on the way to the least peak within a time."""

SWEEPS = 2
"""How often the plan of each part that is called several times is chosen anew, given those of the others."""


@dataclass(frozen=True)
class Stop:
    """One call of a part, and what the rest of the model holds around it, beside what calls keep.

    Attributes:
        part: the number of the part.
        forward, backward: bytes of others while it runs.
        after: most bytes of the rest between this call and the next, forward or backward.
    """

    part: int
    forward: int = 0
    backward: int = 0
    after: int = 0

    def most(self, cost: PartCost) -> int:
        """Most bytes alive in this call, forward or backward, where the part takes ``cost``."""
        return max(self.forward + cost.forward_bytes, self.backward + cost.backward_bytes)


@dataclass(frozen=True)
class Problem:
    """A step of a model in parts.

    Attributes:
        stops: the calls in the order of the forward.
        options: for each part, what a call of it takes by each plan that it may get.
        before: most bytes of the rest before the first call, forward or backward.
    """

    stops: tuple[Stop, ...]
    options: tuple[tuple[PartCost, ...], ...]
    before: int = 0

    @cached_property
    def calls(self) -> Counter[int]:
        """How often each part is called."""
        return Counter(stop.part for stop in self.stops)

    @cached_property
    def repeated(self) -> tuple[int, ...]:
        """The parts that are called several times."""
        return tuple(part for part, count in sorted(self.calls.items()) if count > 1)

    def peak(self, choice: Sequence[int]) -> int:
        """Most bytes alive at once where each part runs by the option that ``choice`` names."""
        held, peak = 0, self.before
        for stop in self.stops:
            cost = self.options[stop.part][choice[stop.part]]
            peak = max(peak, held + stop.most(cost))
            held += cost.kept_bytes
            peak = max(peak, held + stop.after)
        return peak

    def seconds(self, choice: Sequence[int]) -> float:
        """The time that one step recomputes."""
        return sum(self.options[part][choice[part]].seconds * count for part, count in self.calls.items())


Choice = tuple[int, ...]
"""For each part, the number of its option."""


def least_peak(problem: Problem) -> Choice:
    """The choice with the least peak, and the least time at it."""
    return _polished(problem, _least(problem))


def fastest(problem: Problem, budget: int) -> Choice | None:
    """The choice with the least time whose peak is at most ``budget`` bytes; None if nothing fits."""
    least = _least(problem)
    best = least if problem.peak(least) <= budget else None
    fixed = {part: least[part] for part in problem.repeated}
    best = _better(problem, best, _Table(problem, budget, fixed).fastest())
    for _ in range(SWEEPS if fixed else 0):
        before = best
        for part in problem.repeated:
            for option in range(len(problem.options[part])):
                best = _better(problem, best, _Table(problem, budget, {**fixed, part: option}).fastest())
            fixed = {part: best[part] for part in problem.repeated} if best else fixed
        if best == before:
            break
    return None if best is None else _polished(problem, best, budget)


def within(problem: Problem, seconds: float) -> Choice:
    """The choice with the least peak that recomputes for at most ``seconds``; the fastest if none does."""
    quickest = tuple(min(range(len(o)), key=lambda n: (o[n].seconds, o[n].kept_bytes)) for o in problem.options)
    if problem.seconds(quickest) > seconds:
        return quickest
    best, low, high = quickest, problem.peak(least_peak(problem)), problem.peak(quickest)
    for step in range(STEPS):
        middle = low if step == 0 else (low + high) // 2
        found = fastest(problem, middle)
        if found is not None and problem.seconds(found) <= seconds:
            best, high = min(best, found, key=problem.peak), middle
        else:
            low = middle
    return best


def _better(problem: Problem, one: Choice | None, other: Choice | None) -> Choice | None:
    found = [choice for choice in (one, other) if choice is not None]
    return min(found, key=lambda choice: (problem.seconds(choice), problem.peak(choice)), default=None)


def _polished(problem: Problem, choice: Choice, budget: int | None = None) -> Choice:
    """The choice after exchanges, of one part's option each, that save time within the same peak or the budget."""
    budget = problem.peak(choice) if budget is None else budget
    while True:
        better = [c for c in _neighbours(problem, choice) if problem.seconds(c) < problem.seconds(choice)]
        found = min((c for c in better if problem.peak(c) <= budget), key=problem.seconds, default=None)
        if found is None:
            return choice
        choice = found


def _neighbours(problem: Problem, choice: Choice) -> list[Choice]:
    return [
        (*choice[:part], option, *choice[part + 1 :])
        for part in problem.calls
        for option in range(len(problem.options[part]))
        if option != choice[part]
    ]


def _least(problem: Problem) -> Choice:
    """A choice with the least peak; of those parts that are called several times, given the others."""
    choice = tuple(min(range(len(o)), key=lambda n: (o[n].kept_bytes, o[n].backward_bytes)) for o in problem.options)
    while True:
        found = min([choice, *_neighbours(problem, choice)], key=problem.peak)
        if problem.peak(found) >= problem.peak(choice):
            break
        choice = found
    table = _Table(problem, problem.peak(choice), {part: choice[part] for part in problem.repeated})
    return min(choice, table.least() or choice, key=problem.peak)


class _Table:
    """Choices for the calls one by one, by the units kept so far.

    Args:
        problem: what is to be chosen.
        budget: bytes that nothing may exceed.
        fixed: parts whose option is given.
    """

    def __init__(self, problem: Problem, budget: int, fixed: dict[int, int]) -> None:
        self.problem = problem
        self.budget = budget
        self.unit = max(1, -(-budget // CELLS))
        self.held = np.arange(budget // self.unit + 1, dtype=np.int64) * self.unit
        self.allowed = {
            part: [fixed[part]] if part in fixed else range(len(options))
            for part, options in enumerate(problem.options)
        }

    def fastest(self) -> Choice | None:
        """The least time within the budget."""
        return self._run(lambda costs, bytes_, seconds: np.where(bytes_ <= self.budget, costs + seconds, np.inf))

    def least(self) -> Choice | None:
        """The least peak."""
        return self._run(lambda costs, bytes_, _: np.maximum(costs, bytes_))

    def _run(self, pay: Pay) -> Choice | None:
        """The cheapest way through all calls."""
        costs = np.full(len(self.held), np.inf)
        costs[0] = 0
        costs = pay(costs, np.array(self.problem.before), 0.0)
        chosen: list[Any] = []
        for stop in self.problem.stops:
            costs, options = self._call(pay, costs, stop)
            chosen.append(options)
        end = int(np.argmin(costs))
        return self._back(chosen, end) if np.isfinite(costs[end]) else None

    def _call(self, pay: Pay, costs: Any, stop: Stop) -> tuple[Any, Any]:
        """The costs after a call, and for each number of units kept then the option that led there."""
        best = np.full(len(self.held), np.inf)
        options = np.full(len(self.held), -1, np.int32)
        for option in self.allowed[stop.part]:
            cost = self.problem.options[stop.part][option]
            units = -(-cost.kept_bytes // self.unit)
            if units >= len(self.held):
                continue
            there = pay(costs, self.held + stop.most(cost), cost.seconds)[: len(self.held) - units]
            better = there < best[units:]
            best[units:][better] = there[better]
            options[units:][better] = option
        return pay(best, self.held + stop.after, 0.0), options

    def _back(self, chosen: list[Any], units: int) -> Choice:
        choice = [0] * len(self.problem.options)
        for stop, options in zip(reversed(self.problem.stops), reversed(chosen), strict=True):
            choice[stop.part] = option = int(options[units])
            units -= -(-self.problem.options[stop.part][option].kept_bytes // self.unit)
        return tuple(choice)


Pay = Callable[[Any, Any, float], Any]
"""What costs become where so many bytes are alive and so many seconds are spent."""
