"""Every way to save activation memory beside ours: one process, one model, one way to measure. ``--compare``.

What people use: ``torch.utils.checkpoint`` around every block, the best split of ``checkpoint_sequential``,
selective checkpointing that keeps matrix products and convolutions, the model's own switch if it has one, and
``torch.compile`` with a budget for activations. Then the published solvers, and ours: the least peak, 20 %
overhead, and for each of the others the fastest plan in its memory and the smallest with its FLOPs, whatever else
that one recomputes.

What a block is, each architecture says (``networks/architectures.py``). One row is dominated by another that has
no more peak and no more FLOPs, and less of one of them. FLOPs count matrix products, convolutions and attention
alone: what a row recomputes of anything else shows in the step time and, for plans of ours, in their
recomputed share of a plain step's time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts
from tqdm import tqdm

import ogc
from measuring import MIB, CheckFailed, Measured, Run, allocate_gradients, as_before, measure, step, timed
from networks import Architecture
from ogc.graph import table
from ogc.solver import SOLVERS
from ogc.torch_state.allocator import peak_bytes
from ogc.torch_state.compare import same_bits

OVERHEAD = 0.2
"""The share of a plain step's time that one of our rows may recompute."""

POINTS = 48
"""Points of the frontier, beside those at others' memory."""

MOST_SPLITS = 32
"""Splits of checkpoint_sequential that are tried, from two on."""

aten = torch.ops.aten
KEPT = [
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
]
"""What selective checkpointing keeps; everything else it runs again."""


class Impossible(Exception):
    """Why a way to save memory does not apply to a model."""


@dataclass(frozen=True)
class PeerRow:
    """One way to train the model. Bytes, seconds; FLOPs of a whole step.

    Attributes:
        detail: what was chosen, for instance how many splits.
        reason: why it could not run; then nothing else is known.
        plain_seconds: of the plain steps in between its own.
        planning_seconds: until the first step; for our rows parsing and planning, which several may share.
        deviation: most by which a gradient's entry differs from the plain one, as a share of the largest
            entry of all; 0 if all are equal bit by bit.
        differs: what else is not bitwise the plain model's: outputs, buffers, random state.
        recomputed_share: by the plan, the recomputed time over that of a plain step.
        predicted_bytes: the plan's peak.
        dominated_by: the name of a row with no more peak and no more FLOPs, and less of one of them.
    """

    name: str
    detail: str = ""
    is_ours: bool = False
    reason: str = ""
    peak_bytes: int = 0
    flops: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0
    planning_seconds: float = 0.0
    deviation: float = 0.0
    differs: tuple[str, ...] = ()
    recomputed_share: float | None = None
    predicted_bytes: int | None = None
    dominated_by: str = ""


@dataclass(frozen=True)
class Comparison:
    """All rows of one architecture, the plain model first."""

    arch: str
    input_shape: tuple[int, ...]
    rows: tuple[PeerRow, ...]

    def __str__(self) -> str:
        header = [
            "method", "peak MiB", "of plain", "more FLOPs", "step time", "planning s", "gradients", "differs in",
            "recomputed", "verdict",
        ]  # fmt: skip
        title = f"{self.arch}, input {'×'.join(map(str, self.input_shape))}"
        cells = [_cells(row, self.rows[0]) for row in self.rows]
        notes = [f"{row.name}: {row.reason}" for row in self.rows if row.reason]
        return "\n".join([title, table(header, cells), *notes])


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

    Raises:
        CheckFailed: a plan run by ogc is not bitwise the plain model.
    """
    start = time.perf_counter()
    graph = ogc.parse(model, inputs, profile=profile)
    parse_seconds = time.perf_counter() - start
    allocate_gradients(model)
    bench = _Bench(model, inputs, seed, iterations)
    rows = [bench.row("plain", lambda: model)]
    for peer, make in _peers(architecture, model, inputs, tuple(compile_budgets), compile_backend):
        rows.append(bench.peer(peer, make))
    for solver in (s for s in SOLVERS if s not in ("none", "optimal")):
        start = time.perf_counter()
        plan = ogc.solve(graph, solver=solver)
        rows.append(bench.plan(solver, graph, plan, parse_seconds + time.perf_counter() - start))
    for label, answer, seconds in _our_plans(graph, rows):
        if answer is None:
            rows.append(PeerRow(label, is_ours=True, reason="no plan found peaks as low"))
        else:
            rows.append(replace(bench.plan(label, graph, answer, parse_seconds + seconds), is_ours=True))
    return Comparison(name, tuple(inputs.shape), with_verdicts(rows))


# -- verdicts -------------------------------------------------------------------------------------------


def with_verdicts(rows: Sequence[PeerRow]) -> tuple[PeerRow, ...]:
    """The rows, each with the name of the one that dominates it by the least FLOPs, if any does."""
    return tuple(replace(row, dominated_by=_dominating(row, rows)) for row in rows)


def _dominating(row: PeerRow, rows: Sequence[PeerRow]) -> str:
    def is_better(other: PeerRow) -> bool:
        here, there = (row.peak_bytes, row.flops), (other.peak_bytes, other.flops)
        return there != here and there[0] <= here[0] and there[1] <= here[1]

    better = [other for other in rows if not row.reason and not other.reason and is_better(other)]
    return min(better, key=lambda other: (other.flops, other.peak_bytes)).name if better else ""


# -- measuring ------------------------------------------------------------------------------------------


class _Bench:
    """Measures runs of one model against its plain step."""

    def __init__(self, model: nn.Module, inputs: torch.Tensor, seed: int, iterations: int) -> None:
        self.model, self.inputs, self.seed, self.iterations = model, inputs, seed, iterations
        self.plain = measure(model, model, inputs, seed)
        self.progress = tqdm(desc="plain", leave=False)

    def row(self, name: str, make: Callable[[], Run]) -> PeerRow:
        """Whatever ``make`` returns, measured."""
        self.progress.set_description(name)
        self.progress.update()
        start = time.perf_counter()
        with as_before(self.model):
            run = make()
        planning_seconds = time.perf_counter() - start
        measured = measure(self.model, run, self.inputs, self.seed)
        deviation, differs = _differences(self.plain, measured)
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
            lines = str(error).strip().splitlines() or ["no message"]
            kind = "" if isinstance(error, Impossible) else f"{type(error).__name__}: "
            return PeerRow(name, reason=kind + lines[0])

    def plan(self, name: str, graph: ogc.Graph, plan: ogc.Plan, planning_seconds: float) -> PeerRow:
        """A plan that ogc runs, which must give the plain model's bits."""
        row = self.row(name, lambda: ogc.apply(self.model, graph, plan))
        if row.deviation or row.differs:
            what = row.differs or (f"gradients, by {row.deviation:.3g} of the largest",)
            raise CheckFailed(f"{name}: not the plain model's {', '.join(what)}")
        return replace(
            row,
            planning_seconds=planning_seconds,
            recomputed_share=plan.overhead,
            predicted_bytes=plan.peak_bytes,
        )


def _differences(plain: Measured, other: Measured) -> tuple[float, tuple[str, ...]]:
    """By how much gradients differ, as a share of the largest entry, and which kinds of other tensors do."""
    largest = distance = 0.0
    differs = []
    for name, value in plain.tensors.items():
        found = other.tensors[name]
        is_gradient = name.startswith("gradient of ")
        if is_gradient:
            largest = max(largest, value.abs().max().item())
        if same_bits(value, found):
            continue
        if is_gradient:
            distance = max(distance, (value.double() - found.double()).abs().max().item())
        else:
            differs.append("outputs" if name.startswith("output ") else name.split(" ")[0])
    named = {"buffer": "buffers", "random": "random state"}
    return distance / max(largest, 1e-300), tuple(dict.fromkeys(named.get(kind, kind) for kind in differs))


# -- the others -----------------------------------------------------------------------------------------


def _peers(
    architecture: Architecture, model: nn.Module, inputs: torch.Tensor, budgets: Sequence[float], backend: str
) -> Iterator[tuple[str, Callable[[], Run]]]:
    """Names, and functions that make what is run."""
    yield "blocks", lambda: around_blocks(architecture, model, _checkpointed)
    yield "sequential", lambda: best_sequential(architecture, model, inputs)
    yield "selective", lambda: around_blocks(architecture, model, _selectively_checkpointed)
    if any(hasattr(module, "memory_efficient") for module in model.modules()):
        yield "memory_efficient", lambda: memory_efficient(model)
    for budget in budgets:
        yield f"compile {budget:g}", partial(compiled, model, inputs, budget, backend)


def _checkpointed(layer: Run) -> Run:
    return partial(checkpoint, layer, use_reentrant=False)


def _selectively_checkpointed(layer: Run) -> Run:
    contexts = partial(create_selective_checkpoint_contexts, KEPT)
    return partial(checkpoint, layer, use_reentrant=False, context_fn=contexts)


def around_blocks(architecture: Architecture, model: nn.Module, wrap: Callable[[Run], Run]) -> Run:
    """The model with every block wrapped while it runs.

    Raises:
        Impossible: it has no blocks.
    """
    forwards: dict[nn.Module, Run] = {block: wrap(block.forward) for block in architecture.blocks(model)}
    if architecture.stages:
        owner = model.get_submodule(architecture.stages)
        stages = [wrap(stage) for stage in _stages(owner.children())]
        forwards[owner] = lambda x: reduce(lambda value, stage: stage(value), stages, x)
    if not forwards:
        raise Impossible("the architecture has no submodules that are its blocks")

    def run(x: torch.Tensor) -> Any:
        with _replaced(forwards):
            return model(x)

    return run


@contextmanager
def _replaced(forwards: dict[nn.Module, Run]) -> Iterator[None]:
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module in forwards:
            del module.forward


def _stages(children: Iterable[nn.Module]) -> Iterator[nn.Sequential]:
    """Children in a row, each up to and with a max pool; what is after the last pool is one more."""
    stage: list[nn.Module] = []
    for child in children:
        stage.append(child)
        if isinstance(child, nn.MaxPool2d):
            yield nn.Sequential(*stage)
            stage = []
    if stage:
        yield nn.Sequential(*stage)


@dataclass(frozen=True)
class Split:
    """A model as a sequence, cut into ``number`` parts of which all but the last are checkpointed."""

    layers: tuple[Run, ...]
    number: int

    @property
    def detail(self) -> str:
        return f"{self.number} splits of {len(self.layers)} layers"

    def __call__(self, x: torch.Tensor) -> Any:
        return checkpoint_sequential(list(self.layers), self.number, x, use_reentrant=False)


def best_sequential(architecture: Architecture, model: nn.Module, inputs: torch.Tensor) -> Split:
    """``checkpoint_sequential`` with as many splits as have the least peak.

    Raises:
        Impossible: the architecture is no sequence.
    """
    if isinstance(architecture.sequence, str):
        raise Impossible(f"no sequence: {architecture.sequence}")
    layers = tuple(_joined(architecture.sequence(model)))
    peaks: dict[Split, int] = {}
    for number in range(2, min(len(layers), MOST_SPLITS) + 1):
        split = Split(layers, number)
        with as_before(model):
            peaks[split] = peak_bytes(partial(step, split, inputs), inputs.device)
    return min(peaks, key=lambda split: (peaks[split], split.number))


def _joined(layers: Iterable[Run]) -> list[Run]:
    """Layers that write over their input stay with the one before: what a checkpoint keeps must not change."""
    joined: list[Run] = []
    for layer in layers:
        before = joined[-1] if joined else None
        if getattr(layer, "inplace", False) and isinstance(layer, nn.Module) and isinstance(before, nn.Module):
            joined[-1] = nn.Sequential(before, layer)
        else:
            joined.append(layer)
    return joined


def memory_efficient(model: nn.Module) -> Run:
    """torchvision's own switch of its dense layers: their concatenations are checkpointed."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "memory_efficient")]

    def run(x: torch.Tensor) -> Any:
        for layer in layers:
            layer.memory_efficient = True
        try:
            return model(x)
        finally:
            for layer in layers:
                layer.memory_efficient = False

    return run


def compiled(model: nn.Module, inputs: torch.Tensor, budget: float, backend: str) -> Run:
    """The model compiled with a budget for its activations, warmed up; it draws eager's random numbers."""
    import torch._functorch.config
    import torch._inductor.config

    torch._dynamo.reset()
    run = torch.compile(model, backend=backend)
    with (
        torch._functorch.config.patch(activation_memory_budget=budget),
        torch._inductor.config.patch(fallback_random=True),
    ):
        step(run, inputs)

    def as_warmed_up(x: torch.Tensor) -> Any:
        with torch.compiler.set_stance("fail_on_recompile"):
            return run(x)

    return as_warmed_up


# -- ours -----------------------------------------------------------------------------------------------


def _our_plans(graph: ogc.Graph, peers: Sequence[PeerRow]) -> list[tuple[str, ogc.Plan | None, float]]:
    """Labels, plans and the seconds it took to find them; a plan that answers several questions is one row.

    The plans at others' memory are points of the frontier by time, those with others' FLOPs of one by FLOPs as well.
    """
    found: list[tuple[str, str, ogc.Plan | None, float]] = []

    def solved(kind: str, max_overhead: float | None) -> None:
        start = time.perf_counter()
        plan = ogc.solve(graph, max_overhead=max_overhead)
        found.append((kind, "", plan, time.perf_counter() - start))

    solved("least peak", None)
    solved(f"{OVERHEAD:.0%} overhead", OVERHEAD)
    plain, *others = (row for row in peers if not row.reason)
    start = time.perf_counter()
    plans = ogc.frontier(graph, points=POINTS, budgets=[row.peak_bytes for row in others]).plans
    seconds = time.perf_counter() - start
    of_few_flops = [*plans, *_frontier_by_flops(graph)]
    both_seconds = time.perf_counter() - start
    for row in others:
        fitting = (plan for plan in plans if plan.peak_bytes <= row.peak_bytes)
        plan = min(fitting, key=lambda plan: (plan.recomputed_seconds, plan.peak_bytes), default=None)
        found.append(("memory of", row.name, plan, seconds))
        more = max(0, row.flops - plain.flops)
        plan = min((p for p in of_few_flops if p.recomputed_flops <= more), key=_size)
        found.append(("FLOPs of", row.name, plan, both_seconds))
    return _by_plan(found)


def _frontier_by_flops(graph: ogc.Graph) -> list[ogc.Plan]:
    """The plans of a frontier whose time is that of FLOPs, nearly: what has none takes a thousandth of its time."""
    flops = sum(op.forward_flops for op in graph.operations)
    if not flops:
        return []
    rate = flops / graph.forward_seconds

    def seconds(flops: int, measured: float) -> float:
        return flops / rate + measured / 1000

    operations = tuple(
        replace(
            op,
            forward_seconds=seconds(op.forward_flops, op.forward_seconds),
            backward_seconds=seconds(op.backward_flops, op.backward_seconds),
            again_seconds=seconds(op.again_flops, op.again_seconds),
            repeat_seconds=None if op.repeat_seconds is None else seconds(op.forward_flops, op.repeat_seconds),
        )
        for op in graph.operations
    )
    plans = ogc.frontier(replace(graph, operations=operations), points=POINTS).plans
    return [ogc.make_plan(graph, plan.decisions, plan.solver) for plan in plans]


def _size(plan: ogc.Plan) -> tuple[int, float]:
    return plan.peak_bytes, plan.recomputed_seconds


def _by_plan(
    found: Sequence[tuple[str, str, ogc.Plan | None, float]],
) -> list[tuple[str, ogc.Plan | None, float]]:
    """Questions with the same answer, put together; where that is the plain model it has its row already."""
    groups: dict[Any, list[tuple[str, str, ogc.Plan | None, float]]] = {}
    for entry in found:
        plan = entry[2]
        if plan is None:
            groups[entry[:2]] = [entry]
        elif not plan.is_plain:
            groups.setdefault(plan.decisions, []).append(entry)
    rows = []
    for group in groups.values():
        kinds: dict[str, list[str]] = {}
        for kind, name, _, _ in group:
            kinds.setdefault(kind, []).append(name)
        label = "; ".join(f"{kind} {', '.join(names)}".strip() for kind, names in kinds.items())
        rows.append((f"ogc: {label}", group[0][2], group[0][3]))
    return rows


# -- the table ------------------------------------------------------------------------------------------


def _cells(row: PeerRow, plain: PeerRow) -> list[str]:
    if row.reason:
        return [row.name, *[""] * 8, "did not run, see below"]
    return [
        f"{row.name} ({row.detail})" if row.detail else row.name,
        f"{row.peak_bytes / MIB:.1f}",
        f"{row.peak_bytes / plain.peak_bytes:.1%}",
        f"{row.flops / plain.flops - 1:+.1%}" if plain.flops else "",
        f"{row.seconds / row.plain_seconds:.2f}",
        f"{row.planning_seconds:.1f}",
        f"off by {row.deviation:.1e}" if row.deviation else "bitwise",
        ", ".join(row.differs) or "nothing",
        "" if row.recomputed_share is None else f"{row.recomputed_share:.1%}",
        f"dominated by {row.dominated_by}" if row.dominated_by else "",
    ]
