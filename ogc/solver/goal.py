"""The goal that a plan is to meet, and the one signature of all solvers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import InputError
from ..given import bytes_of, is_number
from ..graph import Graph
from ..plan import Plan

NEGLIGIBLE = 0.005
"""Share of a peak that no time is spent for: peaks are not known better."""

Budget = int | float | str

LEAST = "least"
"""The ``memory_budget`` that asks for the least peak there is, whatever the time."""

FAIR_OVERHEAD = 1 / 3
"""Share of a plain step's time that a plan may add where nothing is asked for: a forward more takes about as much."""


@dataclass(frozen=True)
class Goal:
    """A goal for a plan: without one of the two, the least peak that about one forward more can buy.

    Attributes:
        memory_budget, max_overhead: as for :func:`ogc.solve`.

    Raises:
        InputError: one of them is of the wrong kind, or both are given.
    """

    memory_budget: Budget | None = None
    max_overhead: float | None = None

    def __post_init__(self) -> None:
        share = self.max_overhead
        if self.memory_budget is not None and share is not None:
            raise InputError("give memory_budget or max_overhead, not both: each is bounded as the other allows")
        if share is not None and not (is_number(share) and share >= 0):
            raise InputError(f"max_overhead must be a share of the plain step's time, such as 0.2, not {share!r}")
        self.budget_bytes(1)

    def __bool__(self) -> bool:
        return self != Goal()

    @property
    def is_least(self) -> bool:
        """Whether it is the least peak."""
        return self.memory_budget == LEAST

    @property
    def is_bounded(self) -> bool:
        """Whether it is a budget or an overhead, which a plan keeps or does not."""
        return bool(self) and not self.is_least

    @property
    def is_in_bytes(self) -> bool:
        """Whether the budget is a number of bytes, whatever the sizes of the inputs."""
        return in_bytes(self.memory_budget)

    def budget_bytes(self, plain: int) -> int | None:
        """The budget in bytes, where the plain model peaks at ``plain``; None without one."""
        return None if self.memory_budget in (None, LEAST) else bytes_of(self.memory_budget, plain)


FAIR, LEAST_PEAK = Goal(), Goal(LEAST)
"""The goal for nothing in particular, and the one for the least peak."""

Solver = Callable[[Graph, Goal], Plan]
"""Finds a plan for a graph.

Raises:
    InputError: it does not take this goal.
    SolveError: nothing fits the budget; the message says what would.
"""


def in_bytes(budget: Budget | None) -> bool:
    """Whether a budget is a number of bytes, and no share."""
    return budget not in (None, LEAST) and not isinstance(budget, float)
