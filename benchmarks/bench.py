"""Plans, checks and times a model beside the plain one: a row for each solver."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from tqdm import tqdm

import ogc
from ogc.device.fitting import within_device
from ogc.device.needs import fixed_needs

from .losses import LOSSES, planned_as
from .measuring import (
    MIB,
    CheckFailed,
    Measured,
    allocate_gradients,
    as_before,
    deterministic_if_possible,
    device_name,
    measure,
    timed,
    unrepeatable,
)
from .networks import ARCHITECTURES
from .row import Row

T = TypeVar("T")

CPU_BATCH_SIZE = 4

SLICED_TOLERANCE = 1e-2
"""Most by which a tensor may differ from the plain model's where the batch is sliced, relative to its largest entry."""


def batch_size_of(name: str, device: torch.device, options: argparse.Namespace) -> int:
    batch_size = options.batch_size or (CPU_BATCH_SIZE if device.type == "cpu" else "published")
    return ARCHITECTURES[name].batch_size if batch_size == "published" else int(batch_size)


def build(name: str, device: torch.device, options: argparse.Namespace) -> tuple[torch.nn.Module, torch.Tensor]:
    """The model in training mode, and a batch."""
    architecture = ARCHITECTURES[name]
    torch.manual_seed(options.seed)
    model = architecture.build().to(device).train()
    return model, architecture.input.sample(batch_size_of(name, device, options), options.size).to(device)


class Bench:
    """One architecture, parsed once. Attributes: ``graph``; ``plans``, of the rows so far, by solver."""

    def __init__(self, name: str, device: torch.device, options: argparse.Namespace) -> None:
        self.name, self.options = name, options
        self.architecture = ARCHITECTURES[name]
        total = 1 + len(options.solver) * (2 + options.iterations) + bool(options.plot)
        self.progress = tqdm(total=total, desc=f"{name}: parse", leave=False, disable=None)
        self.model, self.inputs = build(name, device, options)
        self.loss = LOSSES[options.loss]
        deterministic_if_possible(self.model, self.inputs, self.loss)
        start = time.perf_counter()
        self.graph = ogc.parse(self.model, self.inputs, loss=planned_as(options.loss), profile=options.profile)
        self.parse_seconds = time.perf_counter() - start
        allocate_gradients(self.model)
        self.plans: dict[str, ogc.Plan] = {}

    def _stage(self, what: str) -> None:
        self.progress.update()
        self.progress.set_description(f"{self.name}: {what}")

    @cached_property
    def plain(self) -> tuple[Measured, tuple[str, ...]]:
        """The plain step, and the tensors in which another one differs from it."""
        found = measure(self.model, self.model, self.inputs, self.options.seed, self.loss)
        return found, unrepeatable(self.model, self.inputs, self.options.seed, found, self.loss)

    def row(self, solver: str) -> Row:
        """Plan, check and time one solver's model.

        Raises:
            CheckFailed: it computes other numbers than the plain model.
        """
        self._stage(f"solve ({solver})")
        start = time.perf_counter()
        graph, plan = self._solve(solver)
        solve_seconds = time.perf_counter() - start
        at_theirs = self._at_theirs() if solver == "optimal" else None
        self._stage("check and memory")
        optimised = ogc.apply(self.model, graph, plan)
        tolerance = SLICED_TOLERANCE if graph is not self.graph else 0.0
        plain, left_out = self.plain
        ours = measure(self.model, optimised, self.inputs, self.options.seed, self.loss)
        deviation = check(plain, ours, left_out, tolerance)
        plain_times, ogc_times = [], []
        with as_before(self.model):
            for number in range(self.options.iterations):
                self._stage(f"timed step {number + 1}")
                plain_times.append(timed(self.model, self.inputs, loss=self.loss))
                ogc_times.append(timed(optimised, self.inputs, loss=self.loss))
        self.plans[solver] = plan
        return Row(
            arch=self.name,
            solver=solver,
            device=device_name(self.inputs.device),
            batch_size=len(self.inputs),
            input_shape=tuple(self.inputs.shape),
            plain_bytes=plain.peak,
            ogc_bytes=ours.peak,
            predicted_plain_bytes=plan.plain_peak_bytes,
            predicted_bytes=plan.peak_bytes,
            plain_seconds=median(plain_times) if plain_times else None,
            ogc_seconds=median(ogc_times) if ogc_times else None,
            predicted_overhead=plan.overhead,
            plain_flops=plain.flops,
            ogc_flops=ours.flops,
            segments=len(plan.rows),
            recomputed_segments=sum(row[3] == "recomputed" for row in plan.rows),
            parse_seconds=self.parse_seconds,
            solve_seconds=solve_seconds,
            overhead_at_theirs=at_theirs.overhead if at_theirs else None,
            flops_at_theirs=at_theirs.flops_overhead if at_theirs else None,
            batch_slices=self.options.batch_slices,
            deviation=deviation,
            published=asdict(self.architecture.published) if self.architecture.published else None,
            unrepeatable=left_out,
        )

    def _at_theirs(self) -> ogc.Plan | None:
        """Our plan that fits into the published memory, where the batch is the published one."""
        known = self.architecture
        if known.published is None or not known.is_published(len(self.inputs), self.inputs.shape[-1]):
            return None
        return ogc.solve(self.graph, memory_budget=known.published.theirs * MIB)

    def _solve(self, solver: str) -> tuple[ogc.Graph, ogc.Plan]:
        """The plan that the options ask for, and its graph; by default our least peak at the published overhead."""
        options = self.options

        def plan(**wish: Any) -> tuple[ogc.Graph, ogc.Plan]:
            if options.batch_slices > 1:
                sliced = {"slices": options.batch_slices, "loss": self.graph.program.rest.loss}
                return ogc.slice_batch(self.model, self.inputs, self.graph, **sliced, **wish)
            return self.graph, ogc.solve(self.graph, **wish)

        if solver != "optimal":
            return self.graph, ogc.solve(self.graph, solver=solver)
        if options.device_memory is not None:
            needs = fixed_needs(self.model, self.inputs, options.optimizer)
            memory = options.device_memory
            return within_device(needs, memory, lambda most: plan(memory_budget=most), itemgetter(1))
        if options.memory_budget is not None or options.max_overhead is not None:
            return plan(memory_budget=options.memory_budget, max_overhead=options.max_overhead)
        if self.architecture.published is None:
            return plan()
        published = self.architecture.published.overhead
        return within_published_overhead(lambda overhead: plan(max_overhead=overhead), published, itemgetter(1))


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


def check(plain: Measured, ours: Measured, left_out: Collection[str] = (), tolerance: float = 0.0) -> float:
    """The most by which a tensor of ours differs from the plain one, as a share of that one's largest entry.

    Raises:
        CheckFailed: it is more than the tolerance.
    """
    deviation = 0.0
    for name, value in plain.tensors.items():
        other = ours.tensors[name]
        if name in left_out or torch.equal(value, other):
            continue
        distance = (value.double() - other.double()).abs().max().item()
        share = distance / max(value.double().abs().max().item(), 1e-300)
        deviation = max(deviation, share)
        if not share <= tolerance:
            raise CheckFailed(f"{name} differs by at most {distance:.3g}, {share:.3g} of its largest entry")
    return deviation


def draw(folder: Path, name: str, graph: ogc.Graph, plans: Mapping[str, ogc.Plan]) -> None:
    """The first solver's memory over a step and graph, and the frontier with all other solvers' plans."""
    folder.mkdir(parents=True, exist_ok=True)
    first = plans[next(iter(plans))]
    curve = ogc.frontier(graph)
    peers = {solver: (plan.peak_bytes, plan.overhead) for solver, plan in plans.items() if solver != "none"}
    if "optimal" in peers:
        peers = {"this plan": peers.pop("optimal"), **peers}
    for ending in ("png", "svg"):
        first.plot(folder / f"{name}_timeline.{ending}")
        curve.plot(folder / f"{name}_frontier.{ending}", peers=peers)
        first.draw(folder / f"{name}_graph.{ending}")
