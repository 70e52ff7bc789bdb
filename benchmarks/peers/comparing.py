"""Every way to save activation memory beside ours: one process, one model, one way to measure. ``--compare``.

What people use (``ways.py``), the published solvers, and ours (``ours.py``): the least peak, 20 % overhead, and
for each of the others the fastest plan in its memory and the smallest with its FLOPs, whatever else that one
recomputes.

One row is dominated by another that has no more peak and no more FLOPs, and less of one of them. FLOPs count matrix
products, convolutions and attention alone: what a row recomputes of anything else shows in the step time and, for
plans of ours, in their recomputed share of a plain step's time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from statistics import median

import torch
from torch import nn
from tqdm import tqdm

import ogc
from benchmarks.measuring import (
    CheckFailed,
    Measured,
    Run,
    allocate_gradients,
    as_before,
    deterministic_if_possible,
    measure,
    timed,
    unrepeatable,
)
from benchmarks.networks import Architecture
from ogc.solver import SOLVERS
from ogc.torch_state.compare import same_bits

from .ours import our_plans
from .row import Comparison, PeerRow, with_verdicts
from .ways import Impossible, Split, peers_of


def compare(
    name: str,
    architecture: Architecture,
    model: nn.Module,
    inputs: torch.Tensor,
    *,
    seed: int = 0,
    iterations: int = 3,
    profile: str = "measure",
    compile_budgets: Iterable[float] = (),
    compile_backend: str = "inductor",
    report: Callable[[Comparison], None] = lambda _: None,
) -> Comparison:
    """Measure every way to save activation memory with one model.

    Args:
        name: of the architecture.
        architecture: what its blocks are, and how it is written as a sequence.
        model: of that architecture, in training mode; its parameters keep their values.
        inputs: a batch.
        seed: of the random numbers in a step.
        iterations: timed steps of each, plain ones in between.
        profile: how our plans weigh operations; see :func:`ogc.parse`.
        compile_budgets: values of torch.compile's ``activation_memory_budget``, a row each.
        compile_backend: ``"inductor"``, ``"aot_eager"`` or another of torch.compile's.
        report: is called with what there is after each row.

    A plan that fails when ogc runs it, or that is not bitwise the plain model, is a row that says so.
    """
    deterministic_if_possible(model, inputs)
    start = time.perf_counter()
    graph = ogc.parse(model, inputs, profile=profile)
    parse_seconds = time.perf_counter() - start
    allocate_gradients(model)
    bench = _Bench(model, inputs, seed, iterations)
    rows: list[PeerRow] = []

    def add(row: PeerRow) -> None:
        rows.append(row)
        report(Comparison(name, tuple(inputs.shape), with_verdicts(rows), bench.unrepeatable))

    add(bench.row("plain", lambda: model))
    for peer, make in peers_of(architecture, model, inputs, tuple(compile_budgets), compile_backend):
        add(bench.peer(peer, make))
    for solver in (s for s in SOLVERS if s not in ("none", "optimal")):
        add(bench.plan(solver, graph, partial(ogc.solve, graph, solver=solver), parse_seconds))
    for label, answer, seconds in our_plans(graph, rows):
        if answer is None:
            add(PeerRow(label, is_ours=True, reason="no plan found peaks as low"))
        else:
            add(replace(bench.plan(label, graph, answer, parse_seconds + seconds), is_ours=True))
    bench.progress.close()
    return Comparison(name, tuple(inputs.shape), with_verdicts(rows), bench.unrepeatable)


class _Bench:
    """Measures runs of one model against its plain step."""

    def __init__(self, model: nn.Module, inputs: torch.Tensor, seed: int, iterations: int) -> None:
        self.model, self.inputs, self.seed, self.iterations = model, inputs, seed, iterations
        self.plain = measure(model, model, inputs, seed)
        self.unrepeatable = unrepeatable(model, inputs, seed, self.plain)
        self.progress = tqdm(desc="plain", leave=False, disable=None)

    def row(self, name: str, make: Callable[[], Run]) -> PeerRow:
        """Whatever ``make`` returns, measured."""
        self.progress.set_description(name)
        self.progress.update()
        start = time.perf_counter()
        with as_before(self.model):
            run = make()
        planning_seconds = time.perf_counter() - start
        measured = measure(self.model, run, self.inputs, self.seed)
        deviation, differs = differences(self.plain, measured, self.unrepeatable)
        seconds = []
        with as_before(self.model):
            for _ in range(self.iterations):
                seconds.append((timed(self.model, self.inputs), timed(run, self.inputs)))
        return PeerRow(
            name,
            detail=run.detail if isinstance(run, Split) else "",
            peak_bytes=measured.peak,
            flops=measured.flops,
            seconds=median(theirs for _, theirs in seconds),
            plain_seconds=median(plain for plain, _ in seconds),
            planning_seconds=planning_seconds,
            deviation=deviation,
            differs=differs,
        )

    def peer(self, name: str, make: Callable[[], Run]) -> PeerRow:
        """The same for a method that is not ours, or why it does not run: it may fail in any way."""
        try:
            return self.row(name, make)
        except Exception as error:
            return PeerRow(name, reason=_reason(error))

    def plan(self, name: str, graph: ogc.Graph, found: ogc.Plan | Callable[[], ogc.Plan], seconds: float) -> PeerRow:
        """A plan, or what finds it, run by ogc. It must give the plain model's bits; else the row failed."""
        try:
            start = time.perf_counter()
            plan = found if isinstance(found, ogc.Plan) else found()
            seconds += time.perf_counter() - start
            row = self.row(name, lambda: ogc.apply(self.model, graph, plan))
            if row.deviation or row.differs:
                what = row.differs or (f"gradients, by {row.deviation:.3g} of the largest",)
                raise CheckFailed(f"not the plain model's {', '.join(what)}")
        except Exception as error:
            return PeerRow(name, reason=_reason(error), failed=True)
        return replace(row, planning_seconds=seconds, recomputed_share=plan.overhead, predicted_bytes=plan.peak_bytes)


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return lines[0] if isinstance(error, Impossible) else f"{type(error).__name__}: {lines[0]}"


def differences(plain: Measured, other: Measured, left_out: Collection[str] = ()) -> tuple[float, tuple[str, ...]]:
    """By how much gradients differ, as a share of the largest entry, and which kinds of other tensors do."""
    largest = distance = 0.0
    differs = []
    for name, value in plain.tensors.items():
        found = other.tensors[name]
        is_gradient = name.startswith("gradient of ")
        if is_gradient:
            largest = max(largest, value.abs().max().item())
        if name in left_out or same_bits(value, found):
            continue
        if is_gradient:
            apart = (value.double() - found.double()).abs().max().item()
            distance = math.inf if math.isnan(apart) else max(distance, apart)
        else:
            differs.append("outputs" if name.startswith("output ") else name.split(" ")[0])
    named = {"buffer": "buffers", "random": "random state"}
    return distance / max(largest, 1e-300), tuple(dict.fromkeys(named.get(kind, kind) for kind in differs))
