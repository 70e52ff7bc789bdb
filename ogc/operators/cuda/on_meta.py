"""Operators on meta tensors as CUDA runs them: what their results look like, and what autograd saves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch

from ..registry import Operator, registered
from .gpus import Gpu

_thread = threading.local()


@contextmanager
def as_on_cuda(gpu: Gpu | None) -> Iterator[None]:
    """Operators that are called on meta tensors inside, on this thread, are those of a GPU, if one is given."""
    if gpu is not None:
        _install()
    before, _thread.gpu = getattr(_thread, "gpu", None), gpu
    try:
        yield
    finally:
        _thread.gpu = before


@cache
def _install() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    for operator in registered():
        if operator.on_cuda is not None:
            library.impl(operator.target, partial(_run, operator), "AutogradMeta")
    return library  # which takes the functions back when it is let go


def _run(operator: Operator, *args: Any, **kwargs: Any) -> Any:
    gpu: Gpu | None = getattr(_thread, "gpu", None)
    kernel = None if gpu is None else operator.kernel_on_cuda(args, kwargs, gpu)
    if kernel is None or not kernel.is_of_operators:
        return operator.target.decompose(*args, **kwargs)
    return kernel.run(*args, **kwargs)
