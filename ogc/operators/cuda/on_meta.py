"""Operators on meta tensors as CUDA runs them: what their results look like, and what autograd saves."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import torch

from ...on_thread import OnThread
from ..registry import Operator, registered
from .gpus import Gpu

_gpu: OnThread[Gpu | None] = OnThread(None)


def as_on_cuda(gpu: Gpu | None) -> AbstractContextManager[None]:
    """Operators that are called on meta tensors inside, on this thread, are those of a GPU, if one is given."""
    if gpu is not None:
        _install()
    return _gpu.set_to(gpu)


@cache
def _install() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    for operator in registered():
        if operator.on_cuda is not None:
            library.impl(operator.target, partial(_run, operator), "AutogradMeta")
    return library  # which takes the functions back when it is let go


def _run(operator: Operator, *args: Any, **kwargs: Any) -> Any:
    gpu = _gpu.value
    kernel = None if gpu is None else operator.kernel_on_cuda(args, kwargs, gpu)
    if kernel is None or not kernel.is_of_operators:
        return operator.target.decompose(*args, **kwargs)
    return kernel.run(*args, **kwargs)
