"""All ways to run one network: planned, compared with the plain step, and timed in turn."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import nn

import ogc
from benchmarks.measuring import (
    Measured,
    Run,
    allocate_gradients,
    as_before,
    deterministic_if_possible,
    device_name,
    measure,
    unrepeatable,
)
from benchmarks.peers.comparing import differences
from benchmarks.peers.ways import Impossible, around_blocks, checkpointed, selectively_checkpointed

from .networks import Subject
from .rounds import Seconds, seconds_of
from .row import BLOCKS, NOTHING, OF_BLOCKS, OF_SELECTIVE, PLAIN, SELECTIVE, TimeRow

WISHES: dict[str, dict[str, Any]] = {
    "memory 0.7": {"memory_budget": 0.7},
    "memory 0.45": {"memory_budget": 0.45},
    "overhead 0.2": {"max_overhead": 0.2},
}
"""What people ask for: a little less memory, half of it, a limit to the time."""


@dataclass(frozen=True)
class Options:
    """How to measure: see the command's help."""

    device: torch.device
    profile: str
    rounds: int
    seconds: float
    batch_factor: int = 1
    seed: int = 0


class NoPlan(Exception):
    """Why there is nothing to run."""


class Timing:
    """One network. Attributes: ``model``; ``inputs``; ``graph``; ``rows``, as far as they are."""

    def __init__(self, name: str, subject: Subject, options: Options) -> None:
        self.subject, self.options = subject, options
        torch.manual_seed(options.seed)
        self.model: nn.Module = subject.architecture.build().to(options.device).train()
        batch_size = subject.batch_size * options.batch_factor
        self.inputs = subject.architecture.input.sample(batch_size, subject.size).to(options.device)
        deterministic_if_possible(self.model, self.inputs)
        self.graph = ogc.parse(self.model, self.inputs, profile=options.profile)
        allocate_gradients(self.model)
        self.plain = measure(self.model, self.model, self.inputs, options.seed)
        left_out = unrepeatable(self.model, self.inputs, options.seed, self.plain)
        self.empty = TimeRow(
            name, tuple(self.inputs.shape), device_name(options.device), "",
            plain_bytes=self.plain.peak, unrepeatable=left_out,
        )  # fmt: skip
        self.rows: dict[str, TimeRow] = {}
        self.runs: dict[str, Run] = {"": self.model}

    def measured(self) -> list[TimeRow]:
        """A row for each way: first peaks and bits of each, then the time of all of them in turn."""
        self.add(PLAIN, lambda: (self.model, None))
        self.planned(NOTHING, lambda: ogc.make_plan(self.graph, [ogc.saved(0, len(self.graph))]))
        for name, wish in WISHES.items():
            self.planned(name, lambda wish=wish: ogc.solve(self.graph, **wish))  # type: ignore[misc]
        architecture = self.subject.architecture
        self.add(BLOCKS, lambda: (around_blocks(architecture, self.model, checkpointed), None))
        self.add(SELECTIVE, lambda: (around_blocks(architecture, self.model, selectively_checkpointed), None))
        for name, peer in ((OF_BLOCKS, BLOCKS), (OF_SELECTIVE, SELECTIVE)):
            self.planned(name, lambda peer=peer: self._at_memory_of(peer))  # type: ignore[misc]
        with as_before(self.model):
            seconds = seconds_of(self.runs, self.inputs, self.options.rounds, self.options.seconds)
        return [_with_time(row, seconds.get(way)) for way, row in self.rows.items()]

    def planned(self, way: str, find: Callable[[], ogc.Plan]) -> None:
        """The row of a plan that ``find`` finds."""

        def make() -> tuple[Run, ogc.Plan]:
            plan = find()
            return ogc.apply(self.model, self.graph, plan), plan

        self.add(way, make)

    def add(self, way: str, make: Callable[[], tuple[Run, ogc.Plan | None]]) -> None:
        """The row of what ``make`` returns, but for the time; or of why it cannot be run: others are all the same."""
        empty = replace(self.empty, way=way)
        is_peer = way in (BLOCKS, SELECTIVE)
        try:
            run, plan = make()
            found = measure(self.model, run, self.inputs, self.options.seed)
            self.rows[way] = _of_bytes(empty, self.plain, found, plan)
            self.runs[way] = run
        except (Impossible, NoPlan, ogc.SolveError) as error:
            self.rows[way] = replace(empty, reason=str(error))
        except Exception as error:
            self.rows[way] = replace(empty, reason=f"{type(error).__name__}: {error}", failed=not is_peer)

    def _at_memory_of(self, peer: str) -> ogc.Plan:
        """The fastest plan within what the peer was measured to need.

        Raises:
            NoPlan: the peer did not run.
        """
        budget = self.rows[peer].peak_bytes
        if not budget:
            raise NoPlan(f"{peer} has no figures")
        return ogc.solve(self.graph, memory_budget=budget)


def differing(plain: Measured, found: Measured, left_out: Collection[str]) -> tuple[str, ...]:
    """Kinds of tensors that are not bitwise those of the plain step."""
    deviation, others = differences(plain, found, left_out)
    return (*(("gradients",) if deviation else ()), *others)


def _of_bytes(empty: TimeRow, plain: Measured, found: Measured, plan: ogc.Plan | None) -> TimeRow:
    """A row without times. One that is ogc's and has other bits than the plain step has failed."""
    differs = differing(plain, found, empty.unrepeatable)
    row = replace(empty, peak_bytes=found.peak, differs=differs)
    if plan is None:
        return row
    return replace(
        row,
        promised=plan.overhead,
        predicted_bytes=plan.peak_bytes,
        segments=len(plan.segments),
        failed=bool(differs),
        reason=f"not the plain model's {', '.join(differs)}" if differs else "",
    )


def _with_time(row: TimeRow, seconds: Seconds | None) -> TimeRow:
    if seconds is None:
        return row
    low, high = seconds.quartiles
    return replace(
        row,
        paid=seconds.paid,
        paid_low=low,
        paid_high=high,
        seconds=median(seconds.own),
        plain_seconds=median(seconds.plain),
        rounds=len(seconds.own),
    )
