"""Hollow runs: planned steps of a GPU that is not there, by which plans for one are held against what runs.

The runtime, autograd and every allocation that the dispatcher sees are real, the backward has a thread of its own as on
a GPU, and no kernel runs: tensors are meta tensors, on which operators save what those on CUDA save. What a kernel
allocates by itself is added where a rule is known (:mod:`ogc.sizing.cuda.kernels`).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import InputError
from ..graph import Graph
from ..operators.gpus import Gpu, gpu_of
from ..operators.low_memory import counted_here
from ..parser.weigh.backward import Allocations
from ..plan.plan import Plan
from ..program.program import AfterForward, attribute, get_attribute, losses_among, tensor_leaves
from ..program.structures import TensorSpec
from ..runtime.frame import Step
from ..runtime.generate import generate
from ..torch_state.forwards import plain_forward
from ..torch_state.settings import flags
from .cuda.kernels import as_on_cuda, hidden_in_backward

_TORCH, _ENGINE = str(Path(torch.__file__).parent), "_engine_run_backward"


@dataclass(frozen=True)
class HollowRun:
    """Attributes: ``peak_bytes`` over one step; the ``operator`` that ran when they were first reached."""

    peak_bytes: int
    operator: str


def hollow_run(model: torch.nn.Module, graph: Graph, plan: Plan, *, gpu: str | None = None) -> HollowRun:
    """One step, forward and backward, by a plan for CUDA, with parameters' gradients where the graph has them.

    It starts from the loss that the graph was parsed with, which is given meta tensors; without one from the sum of the
    outputs, whose gradient takes no memory, though kernels that need it whole copy it unseen.

    Args:
        model: what ``graph`` was parsed from; it may be on any device, and its memory is not touched.
        graph: from :func:`ogc.parse` with ``device="cuda"``, without opaque modules.
        plan: for ``graph``; a plain one runs the model's own forward.
        gpu: which one is meant, as for :func:`ogc.parse`.

    Returns:
        The peak in bytes, without parameters, buffers, inputs and gradients that are kept.

    Raises:
        InputError: the graph is not for CUDA.
    """
    device = torch.device(graph.device)
    if device.type != "cuda":
        raise InputError(f"a hollow run is of a graph for CUDA, not for {device}: there the allocator tells the peak")
    step = _HollowStep(model, graph, plan, gpu_of(device, gpu))
    with step.inside():
        output = step.forward()
        start = _start(output, graph.program.after_forward)
        if not graph.program.after_forward.holds_outputs:
            del output
    step.on_another_thread(start.backward)
    return HollowRun(step.allocations.peak, step.allocations.operator)


def _start(output: Any, after_forward: AfterForward) -> torch.Tensor:
    """Where the backward starts."""
    if callable(after_forward.loss):
        return after_forward.loss(output)
    tensors = tensor_leaves(output)
    losses = losses_among(output, tensors, [t.requires_grad for t in tensors]) if after_forward.loss is None else []
    if len(losses) == 1:
        return tensors[losses[0]]
    return torch.stack([tensor.sum() for tensor in tensors if tensor.requires_grad]).sum()


class _HollowStep:
    """A model without memory, what is allocated for it, and what runs it."""

    def __init__(self, model: torch.nn.Module, graph: Graph, plan: Plan, gpu: Gpu | None) -> None:
        self.program, self.gpu, self.is_plain = graph.program, gpu, plan.is_plain
        held = {id(t): _on_meta(t) for t in (*model.parameters(), *model.buffers())}
        self.model = copy.deepcopy(model, dict(held))
        self.code = generate(graph, plan)
        constants = {
            name: held.get(id(value), _on_meta(value)) if isinstance(value, torch.Tensor) else value
            for name, value in self.program.constants.items()
        }
        bound = [get_attribute(self.model, constants, name) for name in self.code.bound]
        self.bound = [*bound, *(torch.zeros_like(attribute(self.model, name)) for name in self.code.copied)]
        self.inputs = [_like(spec) for spec in self.program.inputs.tensors]
        trained = [tensor for tensor in held.values() if tensor.requires_grad]
        is_kept = self.program.after_forward.gradients == "kept"
        for tensor in trained:
            tensor.grad = torch.zeros_like(tensor) if is_kept else None
        self.allocations = _Peak(gpu)
        self.home = _Nowhere() if plan.offloaded else None

    @contextmanager
    def inside(self) -> Iterator[None]:
        """What is called is CUDA's, and what it allocates is counted."""
        with as_on_cuda(self.gpu, is_recorded=False), self.allocations:
            yield

    def forward(self) -> Any:
        """The model's output."""
        args, kwargs = self.program.inputs.rebuild(self.inputs)
        if self.is_plain:
            return plain_forward(self.model)(*args, **kwargs)
        step = Step(self.model, self.code.runs, self.bound, (), flags(), self.home)
        return self.program.outputs.deliver(self.code.forward(step, *self.inputs, *self.bound), args, kwargs)

    def on_another_thread(self, backward: Callable[[], None]) -> None:
        """Where autograd runs the backward of tensors on a GPU."""

        def run() -> None:
            with _Peak(self.gpu):
                counted = counted_here()
            with counted, self.inside():
                backward()

        with ThreadPoolExecutor(1) as pool:
            pool.submit(run).result()


class _Nowhere:
    """Where offloaded values go: copies take no time, and one back has memory from its start, as on a GPU."""

    def __init__(self) -> None:
        self.told = set[str]()

    def out(self, data: torch.Tensor) -> _Gone:
        return _Gone(data.nbytes)


@dataclass
class _Gone:
    """A copy out of so many bytes."""

    nbytes: int

    def wait(self) -> None:
        """It has ended."""

    def back(self) -> _Returned:
        return _Returned(torch.empty(self.nbytes, dtype=torch.uint8, device="meta"))


@dataclass
class _Returned:
    """A copy back."""

    data: torch.Tensor

    def wait(self) -> None:
        """It has ended."""


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    made = _like(TensorSpec.of(tensor))
    return torch.nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else made


def _like(spec: TensorSpec) -> torch.Tensor:
    made = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
    return made.requires_grad_(spec.requires_grad)


class _Peak(Allocations):
    """The most bytes at once, and the operator that ran when they were first reached."""

    def __init__(self, gpu: Gpu | None) -> None:
        super().__init__()
        self.gpu, self.peak, self.operator = gpu, 0, ""

    def reach(self, reached: int, function: Any, args: Any) -> None:
        reached += hidden_in_backward(function, args, self.gpu) if args else 0
        if reached > self.peak:
            self.peak, self.operator = reached, str(function)

    def is_called_by_autograd(self) -> bool:
        """Whether the engine called an operator, and no code in Python between."""
        frame = sys._getframe(2)
        while frame.f_code.co_filename.startswith(_TORCH) and frame.f_code.co_name != _ENGINE and frame.f_back:
            frame = frame.f_back
        return frame.f_code.co_name == _ENGINE
