"""What a use of an operator costs, forward and backward, be it PyTorch's own or its low-memory variant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ..program.tensors import Layout

T = TypeVar("T")

Place = tuple[tuple[bool, int], Any]
"""What a saved tensor shares its storage with, a result or else a tensor argument, its number, and a layout."""


@dataclass(frozen=True)
class InputGradient:
    """The gradient that an operation's backward returns for one of its tensor arguments.

    ``shares`` is the number of the output whose gradient it shares storage with; else it is new and
    ``group`` numbers the operation's new storages, of ``bytes`` each. With ``reuses`` it is written over that
    output's gradient where that is contiguous and nobody else's. Without a ``layout`` it is sparse.
    """

    argument: int
    bytes: int
    shares: int | None
    group: int = 0
    reuses: int | None = None
    layout: Layout | None = None


@dataclass(frozen=True)
class Weights:
    """What one operation costs, forward and backward (bytes, seconds, FLOPs)."""

    scratch_bytes: int = 0
    forward_seconds: float = 0.0
    forward_flops: int = 0
    working_bytes: int = 0
    first_bytes: int = 0  # what its backward has allocated once it asks for what was saved
    late_bytes: int = 0  # most bytes its backward allocates once it has let go of what it saved
    backward_seconds: float = 0.0
    backward_flops: int = 0
    again_seconds: float = 0.0  # of a forward that is part of its backward, beyond the above
    again_flops: int = 0
    repeat_seconds: float | None = None  # of a forward whose internal tensors are there, if that is quicker
    gradients: tuple[InputGradient, ...] = ()
    internal_bytes: int | None = None  # None: as observed
    saves: tuple[Place | None, ...] | None = None  # where each saved tensor lies; None: as observed
    aside_bytes: int = 0  # of its internal tensors that go with autograd's graph, not with its backward
    ready_bytes: int = 0  # of gradients that its forward makes and its backward hands out
    own_gradient_bytes: int = 0  # of parameters that are no arguments, as an opaque module's
    own_working_bytes: int = 0  # ``working_bytes`` where these stay
    on_meta: bool = False  # it runs on meta tensors, forward and backward
    low_memory: Weights | None = None  # of its low-memory variant
    plain_scratch_bytes: int | None = None  # of the plain model, where that takes less
    plain_working_bytes: int | None = None  # of the plain model, where that runs another operator
    plain_seconds: float = 0.0  # that the plain model's forward takes more, as it copies what it writes over

    def written_over(self) -> Weights:
        """The same with the first argument's gradient written over the result's, where that is possible."""
        gradients = (replace(g, reuses=0) if g.argument == 0 else g for g in self.gradients)
        return replace(self, gradients=tuple(gradients))

    def taking(self, more: int) -> Weights:
        """The same where the backward takes so many bytes more."""
        late = self.late_bytes and max(0, self.late_bytes + more)
        return replace(self, working_bytes=max(0, self.working_bytes + more), late_bytes=late)


@dataclass(frozen=True, eq=False)
class Use:
    """A call of an operator that is to be weighed.

    Attributes:
        args: its arguments.
        result_bytes: of its first result.
        weights: of PyTorch's operator as far as they depend on shapes, without what its kernels allocate themselves.
        can_run: whether it may be run for the bytes that its kernels take.
    """

    args: Sequence[Any]
    result_bytes: int
    weights: Weights
    can_run: bool = False
    _found: dict[Any, Any] = field(default_factory=dict)

    def once(self, function: Callable[[Use], T]) -> T:
        """``function(self)``, found once for all who ask."""
        if function not in self._found:
            self._found[function] = function(self)
        found: T = self._found[function]
        return found
