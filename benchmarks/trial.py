"""One network by any of its ways: planned, compared with the plain step, and timed in turn with it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import median
from typing import Any, TypeVar

import torch
from torch import nn
from tqdm import tqdm

import ogc
from ogc import Segment

from .cases import Case
from .losses import Loss, planned_as
from .measuring import (
    MIB,
    Clock,
    Inputs,
    Measured,
    Run,
    Seconds,
    allocate_gradients,
    as_before,
    deterministic_if_possible,
    differing,
    distances,
    first_of,
    give_back_freed_memory,
    in_turn,
    largest_entry,
    measure,
    timed,
    unrepeatable,
)
from .results import CheckFailed, Impossible, Results, device_name, failure_of
from .row import Row

T = TypeVar("T")


@dataclass(frozen=True)
class Planned:
    """What a plan is run as; its graph and the plan."""

    run: Run
    plan: Any


class Trial:
    """One network.

    Attributes:
        arch, case, model, inputs, loss: what it is.
        rows: by way, as far as they are.
        runs: what was measured and is still to be timed.
    """

    def __init__(
        self,
        arch: str,
        case: Case,
        device: torch.device,
        results: Results,
        *,
        batch_size: int,
        size: int | None = None,
        seed: int = 0,
        profile: str = "measure",
        loss_of: Callable[[Inputs], Loss | None] = lambda inputs: None,
    ) -> None:
        self.arch, self.case, self.results = arch, case, results
        self.hint = partial(what_fits, case, device, batch_size, size)
        self.seed, self.profile = seed, profile
        self.progress = tqdm(desc=f"{arch}: build", leave=False, disable=None)
        torch.manual_seed(seed)
        self.model: nn.Module = case.build().to(device).train()
        self.inputs = case.sample(batch_size, size, device)
        self.loss = loss_of(self.inputs)
        deterministic_if_possible(self.model, self.inputs, self.loss)
        self.rows: dict[str, Row] = {}
        self.runs: dict[str, Run] = {}

    @cached_property
    def graph(self) -> ogc.Graph:
        self.stage("parse")
        start = time.perf_counter()
        graph = ogc.parse(self.model, self.inputs, loss=planned_as(self.loss), profile=self.profile)
        self.parse_seconds = time.perf_counter() - start
        return graph

    @cached_property
    def plain(self) -> tuple[Measured, tuple[str, ...]]:
        """The plain step, and the tensors in which another one differs from it."""
        allocate_gradients(self.model)
        found = measure(self.model, self.model, self.inputs, self.seed, self.loss)
        return found, unrepeatable(self.model, self.inputs, self.seed, found, self.loss)

    def stage(self, what: str) -> None:
        self.progress.update()
        self.progress.set_description(f"{self.arch}: {what}")

    def planned(self, find: Callable[[], ogc.Plan]) -> Planned:
        """What ``find`` plans for the graph, to be run."""
        plan = find()
        return Planned(ogc.apply(self.model, self.graph, plan), plan)

    def measured(
        self,
        way: str,
        make: Callable[[], Run | Planned],
        *,
        is_ours: bool = False,
        tolerance: float = 0.0,
        left_out: Sequence[str] = (),
        spared_seconds: float = 0.0,
    ) -> Row:
        """The row of what ``make`` returns, but for the time; or of why it does not run.

        Args:
            way, make: what is run, and its name.
            is_ours: whether ogc runs it. Then it must give the plain step's bits, or tensors within the ``tolerance``
                of their largest entries; otherwise it is a failure. Others may differ, and fail in any way.
            left_out: tensors that are not compared.
            spared_seconds: of planning that was done for several rows.
        """
        self.stage(way)
        tensor, (plain, unsteady) = first_of(self.inputs), self.plain
        row = Row(
            self.arch, way, device_name(tensor.device), tuple(tensor.shape),
            plain_bytes=plain.peak, plain_flops=plain.flops, unrepeatable=unsteady,
        )  # fmt: skip
        start, failure = time.perf_counter(), None
        try:
            with as_before(self.model):
                made = make()
            row = replace(row, planning_seconds=time.perf_counter() - start + spared_seconds)
            run = made.run if isinstance(made, Planned) else made
            found = measure(self.model, run, self.inputs, self.seed, self.loss)
            row = _with_plan(row, made.plan) if isinstance(made, Planned) else row
            row = replace(row, peak_bytes=found.peak, flops=found.flops, detail=getattr(run, "detail", ""))
            apart = distances(plain, found, (*unsteady, *left_out))
            row = replace(row, differs=differing(apart), deviation=_deviation(plain, apart, tolerance, is_ours))
            self.runs[way] = run
        except Impossible as error:
            row = replace(row, reason=str(error))
        except Exception as error:
            failure = failure_of(f"{self.arch}, {way}", error)
        if failure:
            if failure.status == 3:  # the traceback holds no tensors any more
                failure = replace(failure, reason=self.hint())
            row = replace(row, reason=failure.reason, failed=is_ours)
            if is_ours:
                self.results.fail(failure)
        self.rows[way] = row
        return row

    def timed(self, ways: Sequence[str], rounds: int, seconds: float, clock: Clock, twins: bool = False) -> list[Row]:
        """The rows of these ways with the time of their steps, all in turn with the plain one; gradients add up."""
        self.stage("time")
        own_runs = {way: self.runs.pop(way) for way in ways if way in self.runs}
        runs: dict[str, Run] = {"": self.model, **own_runs} if own_runs else {}
        steps = {way: partial(timed, run, self.inputs, clock, self.loss) for way, run in runs.items()}
        with as_before(self.model):
            found = in_turn(steps, rounds, seconds, twins=("", ways[0]) if twins else None) if rounds else {}
        for way, own in found.items():
            if way:
                self.rows[way] = _with_time(self.rows[way], Seconds(own, found[""]))
        return [self.rows[way] for way in ways]


def _deviation(plain: Measured, apart: Mapping[str, float], tolerance: float, is_ours: bool) -> float:
    """See :attr:`Row.deviation`.

    Raises:
        CheckFailed: it is ours, and more than the tolerance.
    """
    if not is_ours:
        gradients = [name for name in plain.tensors if name.startswith("gradient ")]
        return max((apart[name] for name in gradients if name in apart), default=0.0) / largest_entry(plain, gradients)
    shares = {name: distance / largest_entry(plain, [name]) for name, distance in apart.items()}
    for name, share in shares.items():
        if not share <= tolerance:
            raise CheckFailed(f"{name} differs by at most {apart[name]:.3g}, {share:.3g} of its largest entry")
    return max(shares.values(), default=0.0)


def what_fits(case: Case, device: torch.device, batch_size: int, size: int | None) -> str:
    """What did not fit, and what would: from a plan for a small batch, as activations grow with it."""
    give_back_freed_memory()
    memory = (
        torch.cuda.get_device_properties(device).total_memory
        if device.type == "cuda"
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    said = f"out of memory at batch size {batch_size} on {device} ({memory / MIB:.0f} MiB)"
    try:
        model = case.build()
        plan = ogc.solve(ogc.parse(model, case.input.sample(2, size), profile="estimate"), memory_budget="least")
    except Exception:  # it is a hint, and there is little memory
        return said
    fixed = 2 * sum(p.numel() * p.element_size() for p in model.parameters())
    plain, ours = (max(0, int(2 * (memory - fixed) * 0.9 / peak)) for peak in (plan.plain_peak_bytes, plan.peak_bytes))
    return (
        f"{said}. About {plain} samples would fit the plain model, {ours} the optimised one; both are run, so try "
        f"--batch-size {max(1, plain)}"
    )


def _with_plan(row: Row, plan: Any) -> Row:
    return replace(
        row,
        promised=plan.overhead,
        predicted_bytes=plan.peak_bytes,
        predicted_plain_bytes=plan.plain_peak_bytes,
        segments=sum(1 for _ in _all_segments(plan.segments)),
        recomputed_segments=sum(bool(segment.parts) for segment in _all_segments(plan.segments)),
    )


def _all_segments(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Segments with those inside them."""
    for segment in segments:
        yield segment
        if len(segment.parts) > 1:
            yield from _all_segments(segment.parts)


def _with_time(row: Row, seconds: Seconds) -> Row:
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


def within_published_overhead(plan: Callable[[float], T], published: float, plan_of: Callable[[T], ogc.Plan]) -> T:
    """What ``plan`` gives for the overhead, such that it is within it in FLOPs as well as in time."""
    limit = published
    for _ in range(4):
        found = plan(limit)
        more = plan_of(found).flops_overhead
        if more <= published:
            break
        limit *= 0.97 * published / more
    return found
