"""Operators that compute what PyTorch's do, bit for bit, with a backward that needs less memory.

Forward kernels are PyTorch's own. With ``create_graph=True`` every backward is PyTorch's, so that it can be
differentiated. A backward may write over the gradient that it is given where nobody else holds that.
"""

from __future__ import annotations

import logging
import mmap
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, ClassVar

import torch

from ..process import OnThread
from ..torch_state.private import (
    OpOverload,
    base_of,
    is_batched,
    overload_name,
    schema_of,
    storage_holders,
    tensor_holders,
)
from .weights import Use, Weights


@dataclass(frozen=True)
class Extra:
    """Work beside that of PyTorch's operator: further calls of operators, and bytes that they move."""

    calls: int = 0
    bytes: int = 0


@dataclass(frozen=True, eq=False)
class LowMemory(ABC):
    """A drop-in for ``operator``, which runs ``function`` where that pays, on meta tensors too. Each form is a
    class.
    """

    operator: OpOverload
    function: type[torch.autograd.Function]

    cpu_only: ClassVar[bool] = True
    writes_over: ClassVar[bool] = False
    """Whether its backward writes over the gradient that it is given."""
    starts: ClassVar[int] = 1
    """How many arguments, from the first on, may want a gradient; it pays if one of them does."""
    saves_less: ClassVar[bool] = False
    """Whether it is of use within a slice of a batch too."""
    takes_notes: ClassVar[bool] = False
    """Whether, recomputed, it makes use of the internal tensors that it saved: its last arguments."""
    has_two_phases: ClassVar[bool] = False
    """Whether its backward lets go of what it saved before it is done; neither half takes more than the whole."""
    copies_strided_gradients: ClassVar[bool | None] = None
    """Whether its backward first makes a gradient contiguous; None: as PyTorch's does."""

    @property
    def __name__(self) -> str:
        name, overload = schema_of(self.operator).name.removeprefix("aten::"), overload_name(self.operator)
        return name.replace("::", "_") + ("" if overload == "default" else f"_{overload}")

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if not self.pays(*args):
            return self.operator(*args[: len(schema_of(self.operator).arguments)], **keywords)
        return self.apply(args, keywords)

    def apply(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """The call itself; most have no arguments by name."""
        return self.function.apply(*args)

    def is_for(self, device: torch.device) -> bool:
        """Whether it may stand for the operator in programs on a device."""
        # Holders are counted here, outside of any backward.
        return (device.type == "cpu" or not self.cpu_only) and (not self.writes_over or bool(holders_when_ours()))

    def pays(self, *args: Any) -> bool:
        """Whether a call with these arguments runs the function, not the operator itself."""
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in args[: self.starts])
        return wanted and self.suits(*args)

    @abstractmethod
    def suits(self, *args: Any) -> bool:
        """Whether the function is made for such arguments."""

    @abstractmethod
    def weights(self, use: Use, plain: Weights) -> Weights:
        """Its memory rule: the weights of a call that it pays for, from those of PyTorch's operator."""

    def extra(self, use: Use) -> tuple[Extra, Extra]:
        """What it does more than PyTorch's operator, forward and backward, beside being called from Python."""
        return Extra(), Extra()


def plain_operator(target: Any) -> Any:
    """PyTorch's operator, where a drop-in stands for it."""
    return target.operator if isinstance(target, LowMemory) else target


log = logging.getLogger(__name__)

REPEATS = 3
"""How often the holders of a gradient are counted before the counts are believed."""


def is_ours(gradient: torch.Tensor) -> bool:
    """Whether the gradient covers its storage once and nobody but the calling backward holds either.

    Call it before anything else in a backward: it compares with the reference counts of a gradient that nobody else
    holds, at that place. They differ between releases of PyTorch and Python, and where torch.compile evaluates frames,
    so they are counted once for each. A gradient that came through a view has a base that only it holds.
    """
    holders = _holders(gradient)
    return bool(holders) and holders in (_here.value or holders_when_ours())


def is_pytorchs(gradient: torch.Tensor) -> bool:
    """Whether a backward has to be by PyTorch's own operators: it is differentiated, or for many gradients at once."""
    return torch.is_grad_enabled() or is_batched(gradient)


def _holders(gradient: torch.Tensor) -> tuple[int, ...]:
    base = base_of(gradient)
    whole = gradient.is_contiguous() and (base is None or base.numel() == gradient.numel())
    if type(gradient) is not torch.Tensor or not whole or is_batched(gradient):
        return ()
    holders = held_by_calls(), sys.getrefcount(gradient), tensor_holders(gradient), storage_holders(gradient)
    if holders[0] != held_by_calls():  # the evaluator changed in between
        return ()
    return holders if base is None else (*holders, sys.getrefcount(base), tensor_holders(base))


def held_by_calls() -> int:
    """How often a call holds what it is given: once more where torch.compile evaluates frames of Python.

    It does so in this process while compiled code runs, and for good once a compilation failed.
    """
    return _references(object())


def _references(thing: object) -> int:
    return sys.getrefcount(thing)


_when_ours: dict[int, set[tuple[int, ...]]] = {}
"""By what :func:`held_by_calls` says."""

_here: OnThread[set[tuple[int, ...]] | None] = OnThread(None)


def counted_here() -> AbstractContextManager[None]:
    """Inside, holders on this thread are those that are counted now, under torch's modes, which are holders, too."""
    return _here.set_to(_holders_in_backward())


def holders_when_ours() -> set[tuple[int, ...]]:
    """The counts of a gradient that is no view, and of one that is; none as long as others hold whatever there is.

    Each begins with :func:`held_by_calls`: counts under one evaluation of frames are never taken for those of another.

    They are counted in a thread of its own, out of sight of tracers and torch's modes, and believed where each time
    gives the same and all of it is gone afterwards.
    """
    held = held_by_calls()
    if held not in _when_ours:
        found: list[set[tuple[int, ...]]] = []
        thread = threading.Thread(target=_count_holders, args=(found,), daemon=True)
        thread.start()
        thread.join()
        is_steady = len(found) == REPEATS and all(counts == found[0] for counts in found)
        if is_steady and {holders[:1] for holders in found[0]} == {(held,)}:
            _when_ours[held] = found[0]
        else:
            log.warning("gradients are not written over others: something holds what autograd makes, as tracers may")
    return _when_ours.get(held, set())


def _count_holders(found: list[set[tuple[int, ...]]]) -> None:
    sys.settrace(None)  # debuggers set one for each new thread
    sys.setprofile(None)
    for _ in range(REPEATS):
        found.append(_holders_in_backward())


def _holders_in_backward() -> set[tuple[int, ...]]:
    """The counts of fresh gradients; none if somebody holds one of them afterwards."""
    counts: set[tuple[int, ...]] = set()
    gone: list[Callable[[], bool]] = []

    def look(gradient: torch.Tensor) -> None:
        counts.add(_holders(gradient))
        held = [weakref.ref(t) for t in (gradient, base_of(gradient), gradient.untyped_storage()) if t is not None]
        gone.append(lambda: all(one() is None for one in held))

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            look(gradient)
            return gradient.clone()

    x = torch.ones(2, requires_grad=True)
    torch.autograd.grad((Probe.apply(x * 2) * 3).sum(), x)
    torch.autograd.grad((Probe.apply(x * 2).view(2, 1) * 3).sum(), x)
    return counts if all(is_gone() for is_gone in gone) else set()


def even_parts(samples: int, count: int) -> tuple[slice, ...]:
    """So many chunks of a batch; none has over one sample more than another, and the first has the fewest."""
    return tuple(slice(a, b) for a, b in pairwise(samples * k // count for k in range(count + 1)))


def part_by_part(
    parts: Sequence[slice], run: Callable[[slice], torch.Tensor], result: torch.Tensor | None = None
) -> torch.Tensor:
    """What ``run`` gives for each part, joined along the first axis, in ``result`` where there are several parts."""
    if len(parts) == 1:
        return run(parts[0])
    for part in parts:
        found = run(part)
        if result is None:
            result = found.new_empty((parts[-1].stop, *found.shape[1:]))
        result[part] = found
        del found
    assert result is not None
    return result


def untouched(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A contiguous tensor whose memory is promised but never used: some operators ask for one for its shape alone."""
    if device.type != "cpu":
        return torch.empty(1, dtype=dtype, device=device).expand(shape)
    if not prod(shape):
        return torch.empty(shape, dtype=dtype)
    pages = mmap.mmap(-1, prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype, count=prod(shape)).view(shape)


def has_usual_strides(images: torch.Tensor) -> bool:
    """Whether these are a batch of images with the strides of a new tensor.

    With a size of one there are others that are contiguous too, and say that the channels come last.
    """
    if images.dim() != 4:
        return False
    _, channels, height, width = images.shape
    return bool(images.stride() == (channels * height * width, height * width, width, 1))
