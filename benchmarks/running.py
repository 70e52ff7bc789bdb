"""What ``benchmark.py --arch`` runs: one network after another, each by its solvers, or beside other tools."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import ogc
from ogc.sizing.needs import fixed_needs, within_device
from ogc.solver import SOLVERS

from .cases import CASES
from .largest import largest
from .losses import LOSSES
from .measuring import MIB, deterministic, give_back_freed_memory, keep_freed_memory
from .results import Impossible, Results, environment, plain_progress, refusal_of
from .row import with_verdicts
from .summaries import largest as largest_table
from .trial import Planned, Trial, what_fits, within_published_overhead
from .ways import our_plans, peers_of

CPU_BATCH_SIZE = 4

CHUNKED_TOLERANCE = 1e-2
"""Most by which a tensor may differ from the plain model's where the batch is in chunks, as a share of its largest."""


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Measure and print what the options ask for; the exit status, which is that of the first failure."""
    device = torch.device(options.device)
    if refusal := refusal_of(options.arch, list(CASES), device) or _missing(options):
        return refused(refusal)
    keeps = device.type == "cuda" or keep_freed_memory()
    results = Results(options.json, environment(command, device, options.seed, keeps))
    measure = compare if options.compare else _largest if options.largest_batch else bench
    with deterministic(device), plain_progress():
        for name in tqdm(options.arch, desc="architectures", disable=True if len(options.arch) == 1 else None):
            give_back_freed_memory()
            hint = partial(what_fits, CASES[name], device, batch_size_of(name, device, options), options.size)
            results.tried(name, lambda: measure(_trial(name, device, options, results), options), hint)  # noqa: B023
    if device.type == "cpu" and options.batch_size is None:
        print(f"CPU run: batch size {CPU_BATCH_SIZE} instead of the published ones (--batch-size published)")
    print(results)
    if options.largest_batch:
        print(largest_table([{"rows": results.rows}]))
    return results.status


def refused(why: str) -> int:
    print(why, file=sys.stderr)
    return 2


def _missing(options: argparse.Namespace) -> str:
    """Which package the options need that is not there; empty if none."""
    try:
        import torchvision  # noqa: F401

        if options.plot:
            from ogc.plan import pictures  # noqa: F401
    except ogc.DependencyError as error:
        return f"--plot: {error}"
    except ImportError:
        return "benchmark.py needs torchvision: pip install torchvision"
    return ""


def batch_size_of(name: str, device: torch.device, options: argparse.Namespace) -> int:
    batch_size = options.batch_size or (CPU_BATCH_SIZE if device.type == "cpu" else "published")
    return CASES[name].batch_size if batch_size == "published" else int(batch_size)


def _trial(name: str, device: torch.device, options: argparse.Namespace, results: Results) -> Trial:
    return Trial(
        name, CASES[name], device, results, batch_size=batch_size_of(name, device, options), size=options.size,
        seed=options.seed, profile=options.profile, loss_of=lambda _: LOSSES[options.loss],
    )  # fmt: skip


def _timed(trial: Trial, way: str, options: argparse.Namespace) -> None:
    trial.timed([way], options.iterations, 0.0, time.perf_counter)


# -- solvers ------------------------------------------------------------------------------------------------------


def bench(trial: Trial, options: argparse.Namespace) -> None:
    """A row for each solver, all with the same model and graph."""
    plans: dict[str, ogc.Plan] = {}
    trial.graph  # noqa: B018  # parsed once, before its first row is timed

    def planned(solver: str) -> Planned:
        graph, plans[solver] = _solved(trial, solver, options)
        return Planned(ogc.apply(trial.model, graph, plans[solver]), plans[solver])

    known = trial.case.published
    published = None if known is None else asdict(known)
    for solver in options.solver:
        tolerance = CHUNKED_TOLERANCE if solver == "optimal" and options.chunks > 1 else 0.0
        make = partial(planned, solver)
        trial.measured(solver, make, is_ours=True, tolerance=tolerance, spared_seconds=trial.parse_seconds)
        _timed(trial, solver, options)
        row = replace(trial.rows[solver], published=published, chunks=options.chunks)
        if known and solver == "optimal" and row.at_published_size and not row.reason:
            plan = ogc.solve(trial.graph, memory_budget=known.theirs * MIB)
            row = replace(row, overhead_at_theirs=plan.overhead, flops_at_theirs=plan.flops_overhead)
        trial.results.add(row)
    if options.plot and plans:
        draw(options.plot, trial.arch, trial.graph, plans)
    trial.progress.close()


def _solved(trial: Trial, solver: str, options: argparse.Namespace) -> tuple[ogc.Graph, ogc.Plan]:
    """The plan that the options ask for, and its graph; by default our least peak at the published overhead."""
    graph, known = trial.graph, trial.case.published

    def plan(**goal: Any) -> tuple[ogc.Graph, ogc.Plan]:
        if options.chunks > 1:
            chunked = {"chunks": options.chunks, "loss": graph.program.after_forward.loss}
            return ogc.chunk_batch(trial.model, trial.inputs, graph, **chunked, **goal)
        return graph, ogc.solve(graph, **goal)

    if solver != "optimal":
        return graph, ogc.solve(graph, solver=solver)
    if options.device_memory is not None:
        needs = fixed_needs(trial.model, trial.inputs, options.optimizer)
        return within_device(needs, options.device_memory, lambda most: plan(memory_budget=most), itemgetter(1))
    if options.memory_budget is not None or options.max_overhead is not None:
        return plan(memory_budget=options.memory_budget, max_overhead=options.max_overhead)
    if known is None:
        return plan()
    return within_published_overhead(lambda overhead: plan(max_overhead=overhead), known.overhead, itemgetter(1))


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


# -- other tools --------------------------------------------------------------------------------------------------


def compare(trial: Trial, options: argparse.Namespace) -> None:
    """Every way to save activation memory: what people use, the other solvers, and ours (see ``ways.py``).

    One row is dominated by another that has no more peak and no more FLOPs, and less of one of them. FLOPs count matrix
    products, convolutions and attention alone: what a row recomputes of anything else shows in the step time and, for
    plans of ours, in their recomputed share of a plain step's time.
    """
    graph, model = trial.graph, trial.model

    def add(way: str, make: Callable[[], Any], **how: Any) -> None:
        trial.measured(way, make, **how)
        _timed(trial, way, options)
        trial.results.add(*with_verdicts([*trial.rows.values()]))

    add("plain", lambda: model)
    budgets: Iterable[float] = options.compile_budgets
    peers = peers_of(trial.case, model, trial.inputs, tuple(budgets), trial.loss, options.compile_backend)
    for peer, make in peers.items():
        add(peer, make)
    for solver in (name for name in SOLVERS if name not in ("none", "optimal")):
        find = partial(ogc.solve, graph, solver=solver)
        add(solver, partial(trial.planned, find), is_ours=True, spared_seconds=trial.parse_seconds)
    for way, plan, seconds in our_plans(graph, [*trial.rows.values()]):
        if plan is None:
            add(way, _none_as_low)
        else:
            spared = trial.parse_seconds + seconds
            add(way, partial(trial.planned, partial(_itself, plan)), is_ours=True, spared_seconds=spared)
    trial.progress.close()


def _itself(plan: ogc.Plan) -> ogc.Plan:
    return plan


def _none_as_low() -> Any:
    raise Impossible("no plan found peaks as low")


def _largest(trial: Trial, options: argparse.Namespace) -> None:
    """How many samples fit on a device, by each way of training."""
    trial.results.add(largest(trial, options))
