"""Adds up what a run costs as the dispatcher sees it: time by a roofline, FLOPs, and the most fresh bytes alive."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from ...operators.convolution import CONVOLUTIONS
from ...operators.gpus import Gpu, gpu_named
from ...operators.registry import of
from ...program.program import storage_of, tensor_leaves
from ...program.tensors import LiveBytes
from ...torch_state.private import OpOverload, TorchDispatchMode, decomposes, schema_of, storage_id

log = logging.getLogger(__name__)

REACHED = 0.7
"""What kernels reach of the rates in a GPU's data sheet: a guess, not measured. Ratios alone decide a plan."""

LAUNCH_SECONDS = 5e-6
"""Of a kernel on a GPU: a guess, data sheets have none, and it was not measured."""

HiddenBytes = Callable[[Any, Any, list[torch.Tensor]], int]
"""Bytes that an operator with these arguments and results allocates underneath the dispatcher."""

Seconds = Callable[[int, int, torch.dtype, bool], float]
"""How long an operator takes that computes and moves so much (FLOPs, bytes), in a type, or in TF32."""


@dataclass(frozen=True)
class Rates:
    """What a device does per second, and the least that an operator takes.

    With ``gpu``, FLOPs depend on the type that is computed in.
    """

    flops: float
    bytes: float
    launch_seconds: float
    gpu: Gpu | None = None

    def seconds(self, flops: int, moved: int, dtype: torch.dtype = torch.float32, is_tf32: bool = False) -> float:
        """How long an operator takes that computes and moves so much (FLOPs, bytes), in a type, or in TF32."""
        rate = self.flops if self.gpu is None else REACHED * self.gpu.flops(dtype, is_tf32)
        return max(flops / rate, moved / self.bytes) + self.launch_seconds


CPU = Rates(flops=1.2e11, bytes=1.0e10, launch_seconds=2e-6)
"""Round figures for one core of a server. Measured on a busy Xeon, torch 2.14, float32: matrix products 88 GFLOP/s,
3x3 convolutions 46; copies 5.8 GB/s read and written; an addition of one element 1.5 us."""


def rates_of(kind: str, gpu: Gpu | None = None) -> Rates:
    """Those of a type of device, and of which GPU; where there are none, those of CUDA, which the log says once."""
    if kind == "cpu":
        return CPU
    if gpu is None:
        _tell_once(kind)
        gpu = gpu_named(None)
    return Rates(REACHED * gpu.fp32, REACHED * gpu.bytes, LAUNCH_SECONDS, gpu)


@cache
def _tell_once(kind: str) -> None:
    log.warning("ogc has no rates for %s: it estimates times with those of CUDA", kind)


@dataclass(frozen=True)
class Reading:
    """Seconds, FLOPs, and fresh bytes: the most alive at once, those at the end, and those at the first ``asked()``."""

    seconds: float
    flops: int = 0
    peak_bytes: int = 0
    held_bytes: int = 0
    first_bytes: int = 0


class Meter(TorchDispatchMode):
    """Adds up the cost of every operator that runs inside, and the fresh bytes alive at once.

    Args:
        seconds: of an operator.
        hidden: tells of bytes that are allocated underneath the dispatcher.
        on_cpu: count what elementwise operators allocate there.
        on_meta: tensors have no content.
    """

    def __init__(
        self,
        seconds: Seconds,
        hidden: HiddenBytes | None = None,
        on_cpu: bool = False,
        on_meta: bool = True,
    ) -> None:
        super().__init__()
        self.seconds_of, self.hidden, self.on_cpu, self.on_meta = seconds, hidden, on_cpu, on_meta
        self.first: int | None = None
        self._reset()

    def take(self) -> Reading:
        """What was measured since the last call."""
        reading = Reading(self.seconds, self.flops, self.peak, self.fresh.bytes, self.first or 0)
        self._reset()
        return reading

    def asked(self) -> None:
        """Note that something is asked for that was saved."""
        self.first = self.fresh.bytes if self.first is None else self.first

    def _reset(self) -> None:
        self.seconds, self.flops, self.peak = 0.0, 0, 0
        self.fresh, self.first = LiveBytes(), None

    def _tensors(self, tree: Any) -> list[torch.Tensor]:
        has_storage = (lambda t: t.layout is torch.strided) if self.on_meta else (lambda t: storage_of(t) is not None)
        return list(filter(has_storage, tensor_leaves(tree)))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, special = kwargs or {}, of(function)
        result = ((self.on_meta and special.on_meta) or function)(*args, **kwargs)
        if _only_views(function):
            return result
        inputs, outputs = self._tensors((args, kwargs)), self._tensors(result)
        known = {storage_id(tensor) for tensor in inputs}
        made = [t for t in outputs if storage_id(t) not in known]
        flops = int(flops_of(function, args, kwargs, result))
        if made or flops or getattr(schema_of(function), "is_mutable", False):
            moved = sum(t.numel() * t.element_size() for t in inputs + outputs)
            self.seconds += self.seconds_of(flops, moved, *_computed_in(function, outputs))
            self.flops += flops
        for tensor in made:
            self.fresh.add(tensor.untyped_storage())
        copies = self.hidden(function, args, outputs) if self.hidden else 0
        copies += _converted_bytes(function, inputs) if self.on_cpu else 0
        self.peak = max(self.peak, self.fresh.bytes + copies)
        return result


def flops_of(function: Any, args: Any, kwargs: Any, result: Any) -> int | torch.SymInt:
    """FLOPs of an operator by PyTorch's counter; 0 of one that it does not know."""
    count: Callable[..., int] | None = flop_registry.get(getattr(function, "overloadpacket", None))
    return 0 if count is None else count(*args, **kwargs, out_val=result)


def _computed_in(function: Any, outputs: Sequence[torch.Tensor]) -> tuple[torch.dtype, bool]:
    """The type that an operator computes in, and whether CUDA may take TF32 for it."""
    dtype = outputs[0].dtype if outputs else torch.float32
    if function in CONVOLUTIONS:
        return dtype, torch.backends.cudnn.allow_tf32
    return dtype, torch.get_float32_matmul_precision() != "highest"


def _converted_bytes(function: Any, operands: Sequence[torch.Tensor]) -> int:
    """Bytes of operands that an elementwise operator on a CPU first converts to the type that it computes in.

    Source: aten/src/ATen/TensorIterator.cpp. What chooses by a mask does not convert the mask.
    """
    if torch.Tag.pointwise not in getattr(function, "tags", ()) or of(function).chooses_by_mask:
        return 0
    types = {tensor.dtype for tensor in operands if tensor.dim()}
    if len(types) < 2:
        return 0
    common = reduce(torch.promote_types, types)
    return sum(t.numel() * common.itemsize for t in operands if t.dim() and t.dtype != common)


@cache
def _only_views(function: Any) -> bool:
    """Whether an operator makes nothing; those that decompose into others may make a copy in place of a view."""
    return isinstance(function, OpOverload) and function.is_view and not decomposes(function)
