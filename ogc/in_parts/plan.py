"""Plans of parts that keep little, and the plan of all parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from os import PathLike

from ..errors import PlanError
from ..graph import MIB, Graph, price, table
from ..plan import Plan, SavedPlan, make_plan, plain_plan, recomputed
from ..plan.saving import PARTS, SavedDecisions
from ..solver import LEAST_PEAK, SolveOptions
from ..solver.candidates import inside_a_recomputation
from .joined import PartCost


def frugal(solving: SolveOptions, graph: Graph) -> Plan:
    """A plan of a part that keeps little until its backward; the plain one if none keeps less or peaks lower."""
    least, plain = solving.plan(graph, LEAST_PEAK), plain_plan(graph)
    if solving.solver != "optimal":
        return least
    plans = [least]
    for decisions in (inside_a_recomputation(graph, least.decisions), (recomputed(0, len(graph)),)):
        with suppress(PlanError):  # an operation would run twice that must not
            plans.append(make_plan(graph, decisions, "optimal"))
    costs = [PartCost.of(graph, plan) for plan in (*plans, plain)]
    cost, found = min(zip(costs, plans, strict=False), key=lambda pair: (pair[0].saved_bytes, pair[0].most))
    is_better = cost.saved_bytes < costs[-1].saved_bytes or cost.most < costs[-1].most
    return found if is_better or not graph.may_be_plain else plain


COLUMNS = (
    "part",
    "calls",
    "operations",
    "saved MiB",
    "its peak MiB",
    "plain MiB",
    "of time",
    "recomputed",
    "opaque modules",
)


@dataclass(frozen=True)
class PartPlan:
    """One part, for one kind of calls.

    Attributes:
        name: of the submodule.
        calls: how often a step calls it.
        plan: its own plan.
        cost: what that takes of the whole.
        opaque_modules: those in it that are called as they are.
        is_late: whether the sample's forward left it out; the plan is then that of an equal part.
    """

    name: str
    calls: int
    plan: Plan
    cost: PartCost
    opaque_modules: tuple[str, ...] = ()
    is_late: bool = False


@dataclass(frozen=True)
class PlainModule:
    """A module whose own Python runs in each step.

    Attributes:
        name: of the module; empty for the model itself.
        why: it is not planned.
        saved_bytes: what autograd saves for operators of its own, beside those of parts and of other such modules.
    """

    name: str
    why: str
    saved_bytes: int = 0


@dataclass(frozen=True)
class PartsPlan:
    """The plans of all parts, and what stays plain.

    Attributes:
        parts: in the order of their first calls.
        plain: the modules that stay plain, the model itself first.
        peak_bytes: expected peak of a step with this plan, its forward, its backward and the gradients of its outputs.
        plain_peak_bytes: the same for the plain model.
        outside_bytes: what the plain modules hold from the forward to the backward.
        part_seconds: of a plain step, in its parts.
        outside_seconds: the same outside of them; measured, so that it varies.
        recomputed_seconds: what the plan adds to it, the runtime's own work included.
        budget_bytes: the memory budget that was asked for, if one was.
        max_overhead: the overhead that was asked for, if one was.
        floor: peak and added seconds of the plans with the least peak, where they were looked for.
        idle: submodules that could be planned, but for which no plan is better than the plain one.
        is_measured: whether what is outside of the parts was measured; else it is not among the bytes.
        solver: the name of the solver that chose the plans.
    """

    parts: tuple[PartPlan, ...]
    plain: tuple[PlainModule, ...]
    peak_bytes: int
    plain_peak_bytes: int
    outside_bytes: int
    part_seconds: float
    recomputed_seconds: float
    outside_seconds: float = field(default=0.0, compare=False)
    budget_bytes: int | None = None
    is_measured: bool = True
    solver: str = "optimal"
    max_overhead: float | None = field(default=None, compare=False)
    idle: tuple[SavedDecisions, ...] = ()
    floor: tuple[int, float] | None = field(default=None, compare=False)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan to a JSON file, for ``ogc.optimize(..., plan=path)``.

        Raises:
            OSError: the file cannot be written.
        """
        self.as_saved().write(path)

    def as_saved(self) -> SavedPlan:
        """What :meth:`save` writes."""
        of_parts = [(part.name, part.plan.as_saved()) for part in self.parts]
        costs = ("peak_bytes", "plain_peak_bytes", "outside_bytes", "part_seconds", "added_seconds")
        return SavedPlan(
            tuple(replace(plan, name=name) for name, saved in of_parts for plan in saved.plans),
            PARTS,
            self.solver,
            self.budget_bytes,
            self.max_overhead,
            idle=self.idle,
            about={name: getattr(self, name) for name in costs},
        )

    @property
    def step_seconds(self) -> float:
        """The time of the plain step."""
        return self.part_seconds + self.outside_seconds

    @property
    def added_seconds(self) -> float:
        """All that the plan adds to the plain step."""
        return self.recomputed_seconds

    @property
    def overhead(self) -> float:
        """Time that the plan adds over that of the plain step."""
        return self.added_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def summary(self) -> str:
        """Its price in one line; see :attr:`ogc.Plan.summary`."""
        return price(self.peak_bytes, self.plain_peak_bytes, self.added_seconds, self.step_seconds, self.floor)

    @property
    def is_plain(self) -> bool:
        """Whether every part runs as it is."""
        return all(part.plan.is_plain for part in self.parts)

    def __str__(self) -> str:
        note = "" if self.is_measured else "; what is outside of the parts could not be measured and comes on top"
        plain = table(["plain", "saved MiB", "why"], self._plain_rows())
        return f"{self.summary}{note}\n{table(COLUMNS, list(self._part_rows()))}\n{plain}\n{len(self.parts)} parts"

    def _part_rows(self) -> Iterator[list[str]]:
        """A row for each run of parts with the same plan."""
        for _, group in groupby(self.parts, lambda p: (p.plan.decisions, p.cost, p.calls, p.is_late)):
            parts = list(group)
            first, calls = parts[0], sum(part.calls for part in parts)
            yield [
                first.name if len(parts) == 1 else f"{first.name} … {parts[-1].name}",
                f"{calls}{' (left out by the sample)' if first.is_late else ''}",
                str(len(first.plan.graph) if first.plan.graph is not None else 0),
                f"{first.cost.saved_bytes * calls / MIB:.2f}",
                f"{max(first.cost.forward_bytes, first.cost.backward_bytes) / MIB:.2f}",
                f"{first.plan.plain_peak_bytes / MIB:.2f}",
                self._share(first.plan.step_seconds * calls),
                "plain" if first.plan.is_plain else f"{first.plan.overhead:.0%}",
                ", ".join(first.opaque_modules) or "-",
            ]

    def _plain_rows(self) -> list[list[str]]:
        rows = [[one.name or "the model", f"{one.saved_bytes / MIB:.2f}", one.why] for one in self.plain]
        total, share = f"{self.outside_bytes / MIB:.2f}", self._share(self.outside_seconds)
        return [*rows, ["all of these", total, f"{share} of time"]]

    def _share(self, seconds: float) -> str:
        return f"{seconds / self.step_seconds:.0%}" if self.step_seconds else "-"
