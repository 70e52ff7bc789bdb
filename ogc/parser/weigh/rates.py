"""What a device does per second, by its data sheet: times by a roofline."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch

from ...operators.cuda.gpus import Gpu, gpu_named

log = logging.getLogger(__name__)

REACHED = 0.7
"""What kernels reach of the rates in a GPU's data sheet: a guess, not measured. Ratios alone decide a plan."""


@dataclass(frozen=True)
class Rates:
    """What a device does per second, and the least that an operator takes; their ratios alone decide a plan.

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

LAUNCH_SECONDS = 5e-6
"""Of a kernel on a GPU: a guess, data sheets have none, and it was not measured."""


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
