"""Operators that compute what PyTorch's do, bit for bit, with a backward that needs less memory.

Forward kernels are PyTorch's own; what is alive at once in the backward differs. How, each family says in its room.
With ``create_graph=True`` every backward is PyTorch's, so that it can be differentiated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..torch_state.private import OpOverload, overload_name, schema_of
from .holders import holders_when_ours
from .weights import Use, Weights


@dataclass(frozen=True)
class Extra:
    """Work beside that of PyTorch's operator: further calls of operators, and bytes that they move."""

    calls: int = 0
    bytes: int = 0


@dataclass(frozen=True, eq=False)
class LowMemory(ABC):
    """A drop-in for ``operator``, which runs ``function`` where that pays. Each form is a class of its own.

    It also runs on meta tensors, for what it saves to be seen.
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
    """Whether, run again, it makes use of the internal tensors that it saved: its last arguments."""
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
