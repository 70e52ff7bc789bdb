"""Operators that compute what PyTorch's do, bit for bit, with a backward that needs less memory.

Forward kernels are PyTorch's own; what is alive at once in the backward differs. How, each family says in its room.
With ``create_graph=True`` every backward is PyTorch's, so that it can be differentiated.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch

from .weights import Use, Weights


@dataclass(frozen=True, eq=False)
class LowMemory(ABC):
    """A drop-in for ``operator``, which runs ``function`` where that pays. Each form is a class of its own."""

    operator: torch._ops.OpOverload
    function: type[torch.autograd.Function]

    cpu_only: ClassVar[bool] = True
    starts: ClassVar[int] = 1
    """How many arguments, from the first on, may want a gradient; it pays if one of them does."""
    saves_less: ClassVar[bool] = False
    """Whether it is of use within a slice of a batch too."""
    takes_notes: ClassVar[bool] = False
    """Whether, run again, it makes use of the internal tensors that it saved: its last arguments."""
    has_two_phases: ClassVar[bool] = False
    """Whether its backward lets go of what it saved before it is done; neither half takes more than the whole."""
    copies_strided_gradients: ClassVar[bool | None] = None
    """Whether its backward first makes a gradient contiguous; None: as PyTorch's does."""

    @property
    def __name__(self) -> str:
        name, overload = self.operator._schema.name.removeprefix("aten::"), self.operator._overloadname
        return name.replace("::", "_") + ("" if overload == "default" else f"_{overload}")

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if not self.pays(*args):
            return self.operator(*args[: len(self.operator._schema.arguments)], **keywords)
        return self.apply(args, keywords)

    def apply(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """The call itself; most have no arguments by name."""
        return self.function.apply(*args)

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

    def plain_weights(self, use: Use, plain: Weights) -> Weights:
        """The weights of PyTorch's operator, where this form was seen in its place and saved something else."""
        return plain


def plain_operator(target: Any) -> Any:
    """PyTorch's operator, where a drop-in stands for it."""
    return target.operator if isinstance(target, LowMemory) else target


# -- whose gradient it is ---------------------------------------------------------------------------------


def is_ours(gradient: torch.Tensor) -> bool:
    """Whether the gradient covers its storage once and nobody but the calling backward holds either.

    Call it before anything else in a backward: it compares with the reference counts of a gradient that
    nobody else holds, at that place. They differ between releases of PyTorch, so they are looked up once. A
    gradient that came through a view, such as that of a linear layer on more than two dimensions, has a base
    that only it holds.
    """
    holders = _holders(gradient)
    return bool(holders) and holders in holders_when_ours()


def _holders(gradient: torch.Tensor) -> tuple[int, ...]:
    base = gradient._base
    whole = gradient.is_contiguous() and (base is None or base.numel() == gradient.numel())
    if type(gradient) is not torch.Tensor or not whole:
        return ()
    # By its address: ``untyped_storage()`` would leave a holder behind, and autograd would no longer add in place.
    storage = torch._C._storage_Use_Count(torch._C._storage_address(gradient))  # type: ignore[attr-defined]
    holders = sys.getrefcount(gradient), gradient._use_count(), storage  # type: ignore[attr-defined]
    if base is None:
        return holders
    return (*holders, sys.getrefcount(base), base._use_count())  # type: ignore[attr-defined]


@cache
def holders_when_ours() -> tuple[tuple[int, ...], ...]:
    """The counts of a gradient that is no view, and of one that is."""
    found = []

    def look(gradient: torch.Tensor) -> None:
        found.append(_holders(gradient))

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            look(gradient)
            return gradient

    with torch.enable_grad():
        x = torch.ones(2, requires_grad=True)
        torch.autograd.grad((Probe.apply(x * 2) * 3).sum(), x)
        torch.autograd.grad((Probe.apply(x * 2).view(2, 1) * 3).sum(), x)
    return tuple(found)
