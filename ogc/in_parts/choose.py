"""Chooses the plans of all parts for a goal, by one search in the joined graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..errors import SolveError
from ..graph import Graph
from ..plan import Plan
from ..solver import NEGLIGIBLE, Wish, solve
from .joined import Choice, Joined, Key, usual_events

ATTEMPTS = 8
"""How often less is asked of the search, where its plan takes more in the real step than in the graph."""

Rank = Callable[[Choice], tuple[float, ...]]
"""What less of is better, the most important first."""


@dataclass(frozen=True)
class Chooser:
    """Chooses plans of parts.

    Attributes:
        step: with what the rest takes.
        known: a choice that keeps little; what the rest takes is as it is beside that.
    """

    step: Joined
    known: Choice

    def chosen(self, wish: Wish) -> Choice | None:
        """The best choice found for a goal, the plain one if that is as good; None if nothing fits the budget."""
        step, plain = self.step, self.step.plain
        budget, share = wish.budget_bytes(step.peak(plain)), wish.max_overhead
        if budget is not None:
            best = self._best(budget, step.peak, lambda c: (step.seconds(c), step.peak(c)), self._within_bytes)
            return best if step.peak(best) <= budget else None
        if share is not None:
            limit = share * step.part_seconds
            best = self._best(limit, step.seconds, lambda c: (step.peak(c), step.seconds(c)), self._within_seconds)
        else:
            best = self._best(
                0, lambda c: 0, lambda c: (step.peak(c), step.seconds(c)), lambda _, rank: self._least(rank)
            )
        return best if (1 + NEGLIGIBLE) * step.peak(best) < step.peak(plain) else plain

    def _best(
        self, limit: float, takes: Callable[[Choice], float], cost: Rank, search: Callable[[float, Rank], Choice]
    ) -> Choice:
        """The choice with the least cost that takes no more than a limit, or the least that there is."""

        def rank(choice: Choice) -> tuple[float, ...]:
            return max(0, takes(choice) - limit), *cost(choice)

        found, asked = [self.step.plain, self.known], limit
        for _ in range(ATTEMPTS):
            try:
                found.append(search(asked, rank))
            except SolveError:
                found.append(self._least(rank))
                break
            if takes(found[-1]) <= limit:
                break
            asked -= takes(found[-1]) - limit
        return min(found, key=rank)

    def _within_bytes(self, budget: float, rank: Rank) -> Choice:
        if budget < 1:
            raise SolveError("")
        return self._of_calls(solve(self.graph, memory_budget=int(budget)), rank)

    def _within_seconds(self, seconds: float, rank: Rank) -> Choice:
        return self._of_calls(solve(self.graph, max_overhead=max(0.0, seconds / self.graph.step_seconds)), rank)

    def _least(self, rank: Rank) -> Choice:
        return self._of_calls(solve(self.graph), rank)

    @cached_property
    def graph(self) -> Graph:
        """The joined graph with what the rest takes; backwards inside the forward count as those behind it."""
        step, usual = self.step, usual_events(len(self.step.calls))
        sizes = (most for _, most in step.sizes(self.known, usual))
        known = dict(zip((event.key for event in usual), sizes, strict=True))
        weights: dict[Key, int] = {}
        for event, (_, most) in zip(step.events, step.sizes(self.known), strict=True):
            weights[event.key] = max(weights.get(event.key, 0), event.rest + most - known[event.key])
        return step.graph(weights)

    def _of_calls(self, plan: Plan, rank: Rank) -> Choice:
        """A plan of the joined graph as one of each part: of its calls' plans the one with which the whole is best.

        Where that differs from call to call, or derivatives of gradients hold what is recomputed, the part may get the
        plan that is known, too, or none.
        """
        step = self.step
        found: list[list[Plan]] = [[] for _ in step.parts]
        for n, part in enumerate(step.calls):
            _add(found[part], step.plan_of_call(n, plan.decisions, plan.solver))
        first = tuple(plans[0] for plans in found)
        doubtful = {part for n, part in enumerate(step.calls) if step.saved_again[n] or len(found[part]) > 1}
        for part in doubtful:
            for other in (self.known[part], step.plain[part]):
                _add(found[part], other)
        return min((self._descent(start, found, rank) for start in (first, step.plain)[: 1 + len(doubtful)]), key=rank)

    def _descent(self, choice: Choice, plans: Sequence[Sequence[Plan]], rank: Rank) -> Choice:
        """The choice after the best plan is taken for one part after the other."""
        for part, of_part in enumerate(plans):
            if len(of_part) > 1:
                choice = min(((*choice[:part], one, *choice[part + 1 :]) for one in of_part), key=rank)
        return choice


def _add(plans: list[Plan], plan: Plan) -> None:
    if all(plan.decisions != known.decisions for known in plans):
        plans.append(plan)
