"""What CUDA runs in the place of operators, told by PyTorch's and cuDNN's documented rules; no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CudaKernel:
    """What CUDA runs in the place of an operator's call.

    Attributes:
        run: computes the same from the same arguments, on meta and fake tensors, and saves what CUDA's does.
        is_of_operators: it calls PyTorch's own operators alone, so that it may be recorded.
        working_bytes: beyond what that allocates, during the backward.
    """

    run: Callable[..., Any]
    is_of_operators: bool = True
    working_bytes: int = 0
