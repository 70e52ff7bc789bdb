"""What CUDA and its libraries take of a device beside the tensors of a step, by name. None of it was measured here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ..graph import Graph
from ..program.program import SHARED, TensorRef

MIB = 2**20

CONTEXT_BYTES = {"cuda": 600 * MIB}
"""What a process takes past the allocator: the driver's context and loaded kernels. A round figure above what is
commonly seen (300 to 500 MiB); it depends on card and driver."""

CUBLAS_BYTES, CUBLAS_LARGE_BYTES = 8320 * 1024, 32 * MIB
"""cuBLAS' workspace for each handle and stream: ``:4096:2:16:8``, in KiB, but 32 MiB from Hopper on. Source:
``parseChosenWorkspaceSize`` in aten/src/ATen/cuda/CublasHandlePool.cpp."""

CUBLAS_HANDLES = 2
"""Handles belong to threads (``getCurrentCUDABlasHandle`` in the same file): one of the forward's and one of the
backward's. cuBLASLt takes the same workspaces."""

CUDNN_BYTES = 64 * MIB
"""The workspace of a convolution or recurrent layer. cuDNN says per call how much it wants, which has no documented
limit; where that does not fit, PyTorch tries the next algorithm (``run_single_conv`` in
aten/src/ATen/native/cudnn/Conv_v8.cpp), so that a step does not fail for it. A round figure."""

FIRST_BUCKET_BYTES, BUCKET_BYTES = MIB, 25 * MIB
"""DDP closes a bucket once it has so many bytes. Source: ``_DEFAULT_FIRST_BUCKET_BYTES`` of torch.distributed and
``bucket_cap_mb`` of DistributedDataParallel; ``compute_bucket_assignment_by_size`` in reducer.cpp."""

USES_CUDNN = (
    *(torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d),
    *(torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d),
    *(torch.nn.RNN, torch.nn.LSTM, torch.nn.GRU),
)


def cublas_bytes(device: torch.device) -> tuple[int, ...]:
    """cuBLAS' workspaces: those of the card where it is there, else the larger ones."""
    if device.type != "cuda":
        return ()
    is_large = not torch.cuda.is_available() or torch.cuda.get_device_capability(device)[0] >= 9
    return (CUBLAS_LARGE_BYTES if is_large else CUBLAS_BYTES,) * CUBLAS_HANDLES


def cudnn_bytes(model: torch.nn.Module, device: torch.device) -> int:
    """cuDNN's workspace, where a module of the model calls it."""
    return CUDNN_BYTES * (device.type == "cuda" and any(isinstance(one, USES_CUDNN) for one in model.modules()))


def bucket_bytes(parameters: Iterable[torch.nn.Parameter]) -> tuple[int, ...]:
    """DDP's buckets, each one tensor: gradients in the order in which they come, by type."""
    return tuple(_buckets([p for p in parameters if p.requires_grad]))


def _buckets(parameters: list[torch.nn.Parameter]) -> Iterator[int]:
    filled: dict[torch.dtype, int] = {}
    closed: set[torch.dtype] = set()
    for parameter in reversed(parameters):
        kind = parameter.dtype
        filled[kind] = filled.get(kind, 0) + parameter.numel() * parameter.element_size()
        if filled[kind] >= (BUCKET_BYTES if kind in closed else FIRST_BUCKET_BYTES):
            closed.add(kind)
            yield filled.pop(kind)
    yield from filled.values()


def autocast_bytes(graph: Graph) -> int:
    """Weights in the types that autocast casts them to, which it keeps until the forward is done."""
    if graph.program is None:
        return 0
    casts = (node for node in graph.program.graph.nodes if node.meta.get(SHARED))
    return sum(graph.values[v].bytes for v in {graph.program.storages[TensorRef(node.name, 0)] for node in casts})
