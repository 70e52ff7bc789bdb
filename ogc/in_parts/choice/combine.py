"""Chooses, for each part of a model, one of its plans: numbers in, numbers out, nothing here needs torch.

Parts are called one after the other and run backward in the reverse order. While one runs, forward or backward, there
is what all calls before it keep, what it takes itself, and what the rest of the model holds then. So the largest of
these sums is the peak, and only what is kept adds up. A table over the bytes kept so far, call by call, finds the
least time within a budget, or the least peak. Bytes are counted in units, rounded up; what that loses is looked for
afterwards by exchanging single choices. Where a backward runs inside the forward, calls may end there: what they kept
is subtracted, so the plans of their parts are looked for one by one, as those of parts that are called several times.
What such a backward takes is not in the table: its budget is made smaller until that fits, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ...plan import PartCost

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
        again: bytes that it saves and that derivatives of its gradients hold, too: each time they are taken, what
            it does not keep is made again for that.
        backwards: how often it is run backward.
        inside: calls that run backward inside the forward before the next call, with bytes of others while they do.
        ended: the numbers of the calls that keep nothing any more when the next call begins.
    """

    part: int
    forward: int = 0
    backward: int = 0
    after: int = 0
    again: tuple[int, ...] = ()
    backwards: int = 1
    inside: tuple[tuple[int, int], ...] = ()
    ended: tuple[int, ...] = ()

    def most(self, cost: PartCost) -> int:
        """Most bytes alive in this call, forward or backward, where the part takes ``cost``."""
        return max(self.forward + cost.forward_bytes, self.backward + cost.backward_bytes)

    def making_room(self, place: int) -> Stop:
        """The same where another call is put in as number ``place``."""

        def renumbered(call: int) -> int:
            return call + (call >= place)

        inside = tuple((renumbered(call), others) for call, others in self.inside)
        return replace(self, inside=inside, ended=tuple(map(renumbered, self.ended)))


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
        """The parts that are called several times, or of which calls end inside the forward."""
        ended = {self.stops[call].part for stop in self.stops for call in stop.ended}
        return tuple(part for part, count in sorted(self.calls.items()) if count > 1 or part in ended)

    def kept(self, stop: Stop, option: int) -> int:
        """Bytes that stay of a call which runs by an option, with what derivatives of its gradients hold."""
        cost, plain = self.options[stop.part][option], self.options[stop.part][-1]
        missing = max(0, plain.kept_bytes - cost.kept_bytes + cost.beyond_bytes)
        return cost.kept_bytes + sum(min(again, missing) for again in stop.again)

    def peak(self, choice: Sequence[int]) -> int:
        """Most bytes alive at once where each part runs by the option that ``choice`` names."""
        held, peak = 0, self.before
        runs = {call for stop in self.stops for call, _ in stop.inside}
        own = {call: self._backward_beyond_kept(self.stops[call], choice) for call in runs}
        for stop in self.stops:
            option = choice[stop.part]
            peak = max(peak, held + stop.most(self.options[stop.part][option]))
            held += self.kept(stop, option)
            peak = max(peak, held + stop.after, *(held + others + own[call] for call, others in stop.inside))
            held -= sum(self.kept(self.stops[call], choice[self.stops[call].part]) for call in stop.ended)
        return peak

    def _backward_beyond_kept(self, stop: Stop, choice: Sequence[int]) -> int:
        option = choice[stop.part]
        return self.options[stop.part][option].backward_bytes - self.kept(stop, option)

    def seconds(self, choice: Sequence[int]) -> float:
        """The time that one step recomputes."""
        return sum(self.options[stop.part][choice[stop.part]].seconds * stop.backwards for stop in self.stops)


Choice = tuple[int, ...]
"""For each part, the number of its option."""


def least_peak(problem: Problem, slack: float = 0.0) -> Choice:
    """The choice with the least peak, and the least time at it or at this share more."""
    least = _least(problem)
    return _polished(problem, least, int((1 + slack) * problem.peak(least)))


def fastest(problem: Problem, budget: int) -> Choice | None:
    """The choice with the least time whose peak is at most ``budget`` bytes; None if nothing fits."""
    least = _least(problem)
    best = least if problem.peak(least) <= budget else None
    fixed = {part: least[part] for part in problem.repeated}
    best = _better(problem, best, _fastest(problem, budget, fixed))
    for _ in range(SWEEPS if fixed else 0):
        before = best
        for part in problem.repeated:
            for option in range(len(problem.options[part])):
                best = _better(problem, best, _fastest(problem, budget, {**fixed, part: option}))
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


def _polished(problem: Problem, choice: Choice, budget: int) -> Choice:
    """The choice after exchanges, of one part's option each, that save time within the budget."""
    while True:
        quicker = [c for c in _neighbours(problem, choice) if problem.seconds(c) < problem.seconds(choice)]
        fits = [c for c in quicker if problem.peak(c) <= budget]
        if not fits:
            return choice
        choice = min(fits, key=problem.seconds)


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
    fixed = {part: choice[part] for part in problem.repeated}
    other = _cheapest(problem, problem.peak(choice), fixed, lambda peaks, held, _: np.maximum(peaks, held))
    return min(choice, other or choice, key=problem.peak)


Pay = Callable[[Any, Any, float], Any]
"""What costs become where so many bytes are alive and so many seconds are spent."""


def _fastest(problem: Problem, budget: int, fixed: dict[int, int]) -> Choice | None:
    """The least time within the budget, as far as it is found; ``fixed`` as for :func:`_cheapest`."""
    within = budget
    for _ in range(STEPS):

        def pay(costs: Any, held: Any, time: float, within: int = within) -> Any:
            return np.where(held <= within, costs + time, np.inf)

        found = _cheapest(problem, within, fixed, pay) if within >= 0 else None
        if found is None or problem.peak(found) <= budget:
            return found
        within -= problem.peak(found) - budget
    return None


def _cheapest(problem: Problem, budget: int, fixed: dict[int, int], pay: Pay) -> Choice | None:
    """The cheapest way through all calls, from a table over the units kept so far; None if there is none.

    Args:
        problem: what is to be chosen.
        budget: bytes that no more than are kept.
        fixed: the options of parts that have no choice.
        pay: tells what is cheap.
    """
    unit = max(1, -(-budget // CELLS))
    held = np.arange(budget // unit + 1, dtype=np.int64) * unit
    units = [[-(-problem.kept(s, n) // unit) for n in range(len(problem.options[s.part]))] for s in problem.stops]
    gone = [sum(units[n][fixed[problem.stops[n].part]] for n in stop.ended) for stop in problem.stops]
    start = np.where(held == 0, 0.0, np.inf)
    table, chosen = pay(start, np.array(problem.before), 0.0), []
    for number, stop in enumerate(problem.stops):
        best, taken = np.full(len(held), np.inf), np.full(len(held), -1, np.int32)  # by the units kept after the call
        for option, cost in enumerate(problem.options[stop.part]):
            more = units[number][option]
            if fixed.get(stop.part, option) == option and more < len(held):
                there = pay(table, held + stop.most(cost), cost.seconds * stop.backwards)[: len(held) - more]
                better = there < best[more:]
                best[more:][better] = there[better]
                taken[more:][better] = option
        table = pay(best, held + stop.after, 0.0)
        table = np.append(table[gone[number] :], np.full(min(gone[number], len(held)), np.inf))
        chosen.append(taken)
    end = int(np.argmin(table))
    if not np.isfinite(table[end]):
        return None
    choice = [0] * len(problem.options)
    for number in reversed(range(len(problem.stops))):
        end += gone[number]
        choice[problem.stops[number].part] = option = int(chosen[number][end])
        end -= units[number][option]
    return tuple(choice)
