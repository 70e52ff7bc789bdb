"""GPUs by name: what they do per second, and what kernels PyTorch has for them."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache

import torch

from ..process import OnThread

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gpu:
    """Peak rates of a GPU as its vendor states them, dense, without sparsity.

    Attributes:
        name: as in the vendor's data sheet.
        capability: CUDA's compute capability.
        fp32, tf32, half: FLOPs per second in float32, in TF32, and in float16 or bfloat16 on tensor cores.
        bytes: of memory read or written per second.
        processors: multiprocessors.
    """

    name: str
    capability: tuple[int, int]
    fp32: float
    tf32: float
    half: float
    bytes: float
    processors: int

    @property
    def threads(self) -> int:
        """The most that run on a multiprocessor. Source: CUDA C++ Programming Guide, compute capabilities."""
        return {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}.get(self.capability, 2048)

    def flops(self, dtype: torch.dtype, is_tf32: bool) -> float:
        """Peak FLOPs per second of products of matrices of a type."""
        if dtype in (torch.float16, torch.bfloat16):
            return self.half
        return self.tf32 if is_tf32 and dtype == torch.float32 else self.fp32


# TFLOP/s in float32, TF32 and float16, GB/s, and multiprocessors, from NVIDIA's data sheets of each name and its white
# papers on architectures. Where a sheet states tensor cores with sparsity alone, half of that. Turing and Volta have no
# TF32, and bfloat16 is emulated there.
_STATED = (
    # "NVIDIA H100 Tensor Core GPU" data sheet: SXM and PCIe; "NVIDIA H200": SXM; "NVIDIA Blackwell" (HGX B200).
    ("H100 SXM", (9, 0), 67, 494, 989, 3350, 132),
    ("H100 PCIe", (9, 0), 51, 378, 756, 2000, 114),
    ("H200", (9, 0), 67, 494, 989, 4800, 132),
    ("B200", (10, 0), 75, 1100, 2250, 7700, 148),
    # "NVIDIA A100 Tensor Core GPU" data sheet: 40 GB, 80 GB SXM and PCIe.
    ("A100 40GB", (8, 0), 19.5, 156, 312, 1555, 108),
    ("A100 80GB SXM", (8, 0), 19.5, 156, 312, 2039, 108),
    ("A100 80GB PCIe", (8, 0), 19.5, 156, 312, 1935, 108),
    # Data sheets "NVIDIA A10G" (AWS g5; NVIDIA A10's has 31.2, 62.5, 125), "A10", "A30", "A40", "A6000", "L4", "L40S".
    ("A10G", (8, 6), 31.5, 35, 70, 600, 80),
    ("A10", (8, 6), 31.2, 62.5, 125, 600, 72),
    ("A30", (8, 0), 10.3, 82, 165, 933, 56),
    ("A40", (8, 6), 37.4, 74.8, 149.7, 696, 84),
    ("RTX A6000", (8, 6), 38.7, 77.4, 154.8, 768, 84),
    ("L4", (8, 9), 30.3, 60, 121, 300, 58),
    ("L40S", (8, 9), 91.6, 183, 362, 864, 142),
    # "NVIDIA T4 Tensor Core GPU" and "NVIDIA Tesla V100" data sheets; V100: SXM2, PCIe.
    ("T4", (7, 5), 8.1, 8.1, 65, 320, 40),
    ("V100 SXM2", (7, 0), 15.7, 15.7, 125, 900, 80),
    ("V100 PCIe", (7, 0), 14, 14, 112, 900, 80),
    # "NVIDIA Tesla P100" data sheet: PCIe, 16 GB. It has no tensor cores.
    ("P100", (6, 0), 9.3, 9.3, 18.7, 732, 56),
    # NVIDIA's architecture white papers "Turing" (reference specification), "Ampere GA102", "Ada" and "RTX Blackwell",
    # with accumulation in float32.
    ("RTX 2080 Ti", (7, 5), 13.4, 13.4, 53.8, 616, 68),
    ("RTX 3090", (8, 6), 35.6, 35.6, 71, 936, 82),
    ("RTX 4090", (8, 9), 82.6, 82.6, 165.2, 1008, 128),
    ("RTX 5090", (12, 0), 104.8, 104.8, 209.5, 1792, 170),
)
GPUS = tuple(
    Gpu(name, capability, fp32 * 1e12, tf32 * 1e12, half * 1e12, gigabytes * 1e9, processors)
    for name, capability, fp32, tf32, half, gigabytes, processors in _STATED
)
DEFAULT = "A100 40GB"
"""What ``device="cuda"`` means where nothing says which GPU."""


def gpu_of(device: torch.device, name: str | None) -> Gpu | None:
    """The GPU that is meant by a CUDA device: that of the name, or else the one that is there, or else the default."""
    if device.type != "cuda":
        return None
    if name is None and torch.cuda.is_available():
        name = torch.cuda.get_device_name(device)
    return gpu_named(name)


def gpu_named(name: str | None) -> Gpu:
    """The GPU of a name, as in a data sheet or from ``torch.cuda.get_device_name()``; else the default, with one
    warning.

    Of several that share all words of one of the names, the first with the most words: ``"H100"`` is the SXM.
    """
    return _gpu_named(DEFAULT if name is None else name)


@cache
def _gpu_named(name: str) -> Gpu:
    asked = _words(name)
    found = [gpu for gpu in GPUS if asked and (asked <= _words(gpu.name) or _words(gpu.name) <= asked)]
    if not found:  # such as "NVIDIA H100 80GB HBM3": a family, with other words
        found = [gpu for gpu in GPUS if _family(gpu.name) in asked]
    if found:
        return max(found, key=lambda gpu: len(asked & _words(gpu.name)))
    known = ", ".join(gpu.name for gpu in GPUS)
    log.warning("ogc knows no GPU named %r: it estimates with the rates of %s. Known are %s", name, DEFAULT, known)
    return _gpu_named(DEFAULT)


def _words(name: str) -> frozenset[str]:
    return frozenset(name.upper().replace("-", " ").split()) - {"NVIDIA", "TESLA", "GEFORCE"}


def _family(name: str) -> str:
    """The word of a name that begins the same GPU's other names; those of consumer cards are given in full."""
    return "" if name.startswith("RTX") else name.upper().split()[0]


_of_meta: OnThread[tuple[Gpu | None, bool]] = OnThread((None, True))


def meta_stands_for(gpu: Gpu | None, is_recorded: bool = True) -> AbstractContextManager[None]:
    """Inside, on this thread, meta tensors stand for those on a GPU; whether what is called there is recorded."""
    return _of_meta.set_to((gpu, is_recorded))


def gpu_of_meta() -> tuple[Gpu | None, bool]:
    """The GPU that meta tensors stand for, if any, and whether what is called is recorded."""
    return _of_meta.value


def is_for_cuda(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on CUDA, or stands for one there."""
    return tensor.is_cuda or _of_meta.value[0] is not None


def runs_kernels_of_cuda(tensor: torch.Tensor) -> bool:
    """Whether operators on a tensor are CUDA's: those that are recorded are PyTorch's own."""
    gpu, is_recorded = _of_meta.value
    return tensor.is_cuda or (tensor.is_meta and gpu is not None and not is_recorded)
