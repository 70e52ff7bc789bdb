"""Ways to save activation memory: each a function that makes what is run in the place of a model.

What people use: ``torch.utils.checkpoint`` around every block, the best split of ``checkpoint_sequential``,
selective checkpointing that keeps matrix products and convolutions, the model's own switch if it has one, and
``torch.compile`` with a budget for activations. What a block is, each case says (``cases.py``). And our plans that
answer them: for each of the others the fastest in its memory, and the smallest with its FLOPs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

import ogc
from ogc.graph import Operation, RuntimeCosts, Variant
from ogc.torch_state.allocator import peak_bytes

from .cases import Case
from .losses import Loss
from .measuring import Inputs, Run, as_before, first_of, step
from .results import Impossible
from .row import Row

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


Make = Callable[[], Run]


def peers_of(
    case: Case, model: nn.Module, inputs: Inputs, budgets: Sequence[float], loss: Loss | None, backend: str
) -> dict[str, Make]:
    """What makes each of the others, by name."""
    found: dict[str, Make] = {
        "blocks": lambda: around_blocks(case, model, checkpointed),
        "sequential": lambda: best_sequential(case, model, inputs, loss),
        "selective": lambda: around_blocks(case, model, selectively_checkpointed),
    }
    if any(hasattr(module, "memory_efficient") for module in model.modules()):
        found["memory_efficient"] = lambda: memory_efficient(model)
    compiling = {f"compile {b:g}": partial(compiled, model, inputs, b, loss, backend) for b in budgets}
    return {**found, **compiling}


def checkpointed(layer: Run) -> Run:
    return partial(checkpoint, layer, use_reentrant=False)


def selectively_checkpointed(layer: Run) -> Run:
    contexts = partial(create_selective_checkpoint_contexts, KEPT)
    return partial(checkpoint, layer, use_reentrant=False, context_fn=contexts)


def around_blocks(case: Case, model: nn.Module, wrap: Callable[[Run], Run], call: Run | None = None) -> Run:
    """The model, or ``call``, which calls it, with every block wrapped while it runs.

    Raises:
        Impossible: it has no blocks.
    """
    forwards: dict[nn.Module, Run] = {block: wrap(block.forward) for block in case.blocks(model)}
    if case.stages:
        owner = model.get_submodule(case.stages)
        stages = [wrap(stage) for stage in _stages(owner.children())]
        forwards[owner] = lambda x: reduce(lambda value, stage: stage(value), stages, x)
    if not forwards:
        raise Impossible("the architecture has no submodules that are its blocks")

    def run(*args: Any, **kwargs: Any) -> Any:
        with _replaced(forwards):
            return (call or model)(*args, **kwargs)

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


def best_sequential(case: Case, model: nn.Module, inputs: Inputs, loss: Loss | None = None) -> Split:
    """``checkpoint_sequential`` with as many splits as have the least peak.

    Raises:
        Impossible: the architecture is no sequence.
    """
    if isinstance(case.sequence, str):
        raise Impossible(f"no sequence: {case.sequence}")
    layers = tuple(joined(case.sequence(model)))
    peaks: dict[Split, int] = {}
    for number in range(2, min(len(layers), MOST_SPLITS) + 1):
        split = Split(layers, number)
        with as_before(model):
            peaks[split] = peak_bytes(partial(step, split, inputs, loss), first_of(inputs).device)
    return min(peaks, key=lambda split: (peaks[split], split.number))


def joined(layers: Iterable[Run]) -> list[Run]:
    """Layers that write over their input stay with the one before: what a checkpoint keeps must not change."""
    found: list[Run] = []
    for layer in layers:
        before = found[-1] if found else None
        if getattr(layer, "inplace", False) and isinstance(layer, nn.Module) and isinstance(before, nn.Module):
            found[-1] = nn.Sequential(before, layer)
        else:
            found.append(layer)
    return found


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


def compiled(
    model: nn.Module,
    inputs: Inputs,
    budget: float = 1.0,
    loss: Loss | None = None,
    backend: str = "inductor",
    around: Callable[[Run], Run] = lambda run: run,
    fallback_random: bool = True,
    **options: Any,
) -> Run:
    """The model compiled anew with a budget for its activations, warmed up.

    Each has a backend of its own: compiled code is found again by its function and its backend, so that two budgets
    of one model would otherwise share the code of the one that was called first.

    Args:
        around: gives what is called of what is compiled.
        fallback_random: draw eager's random numbers.
        options: of the backend.
    """
    import torch._functorch.config
    import torch._inductor.config

    torch._dynamo.config.recompile_limit = 64  # of one function, all its backends together
    compile_it = torch._dynamo.lookup_backend(backend)
    run = around(torch.compile(model, backend=lambda graph, given: compile_it(graph, given, **options)))
    with (
        torch._functorch.config.patch(activation_memory_budget=budget),
        torch._inductor.config.patch(fallback_random=fallback_random, force_disable_caches=True),
    ):
        step(run, inputs, loss)

    def as_warmed_up(*args: Any, **kwargs: Any) -> Any:
        with torch.compiler.set_stance("fail_on_recompile"):
            return run(*args, **kwargs)

    return as_warmed_up


# -- ours ---------------------------------------------------------------------------------------------------------

OVERHEAD = 0.2
"""The share of a plain step's time that one of our rows may recompute."""

POINTS = 48
"""Points of the frontier, beside those at others' memory."""

Answer = tuple[str, "ogc.Plan | None", float]
"""To a question: the plan, if there is one, and the seconds it took to find it."""


def our_plans(graph: ogc.Graph, rows: Sequence[Row]) -> list[Answer]:
    """The least peak, 20 % overhead, and what answers each of the other rows, of which the first is the plain model.

    The plans at others' memory are points of the frontier by time, those with others' FLOPs of one by FLOPs as well. A
    plan that answers several questions is one row.
    """
    found: list[tuple[str, str, ogc.Plan | None, float]] = []
    for kind, most in (("least peak", None), (f"{OVERHEAD:.0%} overhead", OVERHEAD)):
        start = time.perf_counter()
        plan = ogc.solve(graph, max_overhead=most)
        found.append((kind, "", plan, time.perf_counter() - start))
    plain, *others = (row for row in rows if not row.reason)
    start = time.perf_counter()
    plans = ogc.frontier(graph, points=POINTS, budgets=[row.peak_bytes for row in others]).plans
    seconds = time.perf_counter() - start
    of_few_flops = [*plans, *frontier_by_flops(graph)]
    both_seconds = time.perf_counter() - start
    for row in others:
        fitting = (plan for plan in plans if plan.peak_bytes <= row.peak_bytes)
        quickest = min(fitting, key=lambda plan: (plan.recomputed_seconds, plan.peak_bytes), default=None)
        found.append(("memory of", row.way, quickest, seconds))
        more = max(0, row.flops - plain.flops)
        alike = (plan for plan in of_few_flops if plan.recomputed_flops <= more)
        smallest = min(alike, key=lambda plan: (plan.peak_bytes, plan.recomputed_seconds))
        found.append(("FLOPs of", row.way, smallest, both_seconds))
    return _by_plan(found)


def frontier_by_flops(graph: ogc.Graph) -> list[ogc.Plan]:
    """The plans of a frontier whose time is that of FLOPs, nearly: what has none takes a thousandth of its time."""
    flops = sum(op.forward_flops for op in graph.operations)
    if not flops:
        return []
    rate = flops / graph.forward_seconds

    def seconds(flops: int, measured: float) -> float:
        return flops / rate + measured / 1000

    def by_flops(of: Variant, op: Operation) -> dict[str, Any]:
        repeat = None if of.repeat_seconds is None else seconds(op.forward_flops, of.repeat_seconds)
        return {
            "forward_seconds": seconds(op.forward_flops, of.forward_seconds),
            "backward_seconds": seconds(op.backward_flops, of.backward_seconds),
            "again_seconds": seconds(op.again_flops, op.again_seconds),
            "repeat_seconds": repeat,
        }

    operations = tuple(
        replace(
            op,
            **by_flops(op, op),
            low_memory=op.low_memory and replace(op.low_memory, **by_flops(op.low_memory, op)),
        )
        for op in graph.operations
    )
    plans = ogc.frontier(replace(graph, operations=operations, runtime=RuntimeCosts()), points=POINTS).plans
    return [ogc.make_plan(graph, plan.decisions, plan.solver) for plan in plans]


def _by_plan(found: Sequence[tuple[str, str, ogc.Plan | None, float]]) -> list[Answer]:
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
