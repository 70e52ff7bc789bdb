"""Operators on meta tensors as CUDA runs them: what their results look like, and what autograd saves."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import torch

from ...on_thread import OnThread
from ...torch_state.private import composed
from ..registry import Operator, registered
from .gpus import Gpu

_gpu: OnThread[tuple[Gpu | None, bool]] = OnThread((None, True))


def as_on_cuda(gpu: Gpu | None, is_recorded: bool = True) -> AbstractContextManager[None]:
    """Operators that are called on meta tensors inside, on this thread, are those of a GPU, if one is given.

    Where what is called ``is_recorded``, only those made of PyTorch's own operators.
    """
    if gpu is not None:
        _install()
    return _gpu.set_to((gpu, is_recorded))


def is_for_cuda(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on CUDA, or stands for one there."""
    return tensor.is_cuda or _gpu.value[0] is not None


def runs_kernels_of_cuda(tensor: torch.Tensor) -> bool:
    """Whether operators on a tensor are CUDA's: those that are recorded are PyTorch's own."""
    gpu, is_recorded = _gpu.value
    return tensor.is_cuda or (tensor.is_meta and gpu is not None and not is_recorded)


@cache
def _install() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    for operator in registered():
        if operator.on_cuda is not None:
            library.impl(operator.target, partial(_run, operator), "AutogradMeta")
    return library  # which takes the functions back when it is let go


def _run(operator: Operator, *args: Any, **kwargs: Any) -> Any:
    gpu, is_recorded = _gpu.value
    kernel = None if gpu is None else operator.kernel_on_cuda(args, kwargs, gpu)
    if kernel is None or (is_recorded and not kernel.is_of_operators):
        return composed(operator.target, *args, **kwargs)
    return kernel.run(*args, **kwargs)
