"""Other ways to save activation memory: each a function that makes what is run in the place of a model.

What people use: ``torch.utils.checkpoint`` around every block, the best split of ``checkpoint_sequential``,
selective checkpointing that keeps matrix products and convolutions, the model's own switch if it has one, and
``torch.compile`` with a budget for activations. What a block is, each architecture says
(``networks/architectures.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

from benchmarks.measuring import Run, as_before, step
from benchmarks.networks import Architecture
from ogc.torch_state.allocator import peak_bytes

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


def peers_of(
    architecture: Architecture, model: nn.Module, inputs: torch.Tensor, budgets: Sequence[float], backend: str
) -> Iterator[tuple[str, Callable[[], Run]]]:
    """Names, and functions that make what is run."""
    yield "blocks", lambda: around_blocks(architecture, model, checkpointed)
    yield "sequential", lambda: best_sequential(architecture, model, inputs)
    yield "selective", lambda: around_blocks(architecture, model, selectively_checkpointed)
    if any(hasattr(module, "memory_efficient") for module in model.modules()):
        yield "memory_efficient", lambda: memory_efficient(model)
    for budget in budgets:
        yield f"compile {budget:g}", partial(compiled, model, inputs, budget, backend)


def checkpointed(layer: Run) -> Run:
    return partial(checkpoint, layer, use_reentrant=False)


def selectively_checkpointed(layer: Run) -> Run:
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
    layers = tuple(joined(architecture.sequence(model)))
    peaks: dict[Split, int] = {}
    for number in range(2, min(len(layers), MOST_SPLITS) + 1):
        split = Split(layers, number)
        with as_before(model):
            peaks[split] = peak_bytes(partial(step, split, inputs), inputs.device)
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
