"""The nodes of a computation graph: operations with their variants, and the values that they make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Value:
    """One tensor storage made by the program: its name and its size in bytes."""

    name: str
    bytes: int
    is_output: bool = False  # held by the caller whom it is returned to, or by autograd's graph, beyond the backward
    is_returned: bool = False  # returned to the caller, who lets go of it before the backward pass
    held_until: int | None = None  # the last operation during which the plain forward holds it, after its last use


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What one implementation of an operation costs (bytes and seconds): PyTorch's own operator or a low-memory one."""

    saves: tuple[int, ...] = ()  # values that its backward reads
    internal_bytes: int = 0  # tensors saved for its backward that are no value (statistics, masks)
    scratch_bytes: int = 0  # temporaries of its forward
    backward_bytes: int = 0  # most gradients and temporaries alive while its backward runs
    late_bytes: int = 0  # of these, once it has released what it saved, if it does so before it is done
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    repeat_seconds: float | None = None  # of its forward where its internal tensors are there; None: as ever
    forward_flops: int = 0
    backward_flops: int = 0
    again_seconds: float = 0.0  # of a forward that is part of its backward, beyond ``backward_seconds``
    again_flops: int = 0


@dataclass(frozen=True)
class Operation(Variant):
    """One node of the program, with the costs of PyTorch's own operator, and of its low-memory variant if it has one.

    ``writes`` names the values the operation makes and those it changes in place; the first operation to
    write a value is its producer. ``gradient_bytes`` and ``backward_bytes`` do not depend on the plan:
    checkpointing changes which values are in memory, never which gradients are.
    """

    name: str
    target: str = ""  # the operator, e.g. aten.convolution
    module: str = ""  # qualified name of the module that called it
    source: str = ""  # file:line of the user's code
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    gradient_bytes: int = 0  # gradients alive, copies of them too, when its backward asks for what it saved
    saved_tensors: int = 0  # how many tensors autograd saves for its backward
    replayable: bool = True  # False: running it twice would change the model or the numbers
    takes_over: int | None = None  # a value whose storage its result takes where no cut separates the two
    low_memory: Variant | None = None  # a plan decides which of the two runs
    plain_scratch_bytes: int | None = None  # of the plain model, where that takes less, or runs what nothing uses
    plain_backward_bytes: int | None = None  # of the plain model, where that runs another operator there

    def in_variant(self, is_low_memory: bool) -> Operation:
        """The operation with one of its variants alone."""
        if self.low_memory is None:
            return self
        return replace(self, low_memory=None, **(vars(self.low_memory) if is_low_memory else {}))

    @property
    def as_plain(self) -> Operation:
        """The operation as the plain model runs it."""
        if self.plain_scratch_bytes is None and self.plain_backward_bytes is None:
            return self
        scratch = self.scratch_bytes if self.plain_scratch_bytes is None else self.plain_scratch_bytes
        backward = self.backward_bytes if self.plain_backward_bytes is None else self.plain_backward_bytes
        return replace(self, scratch_bytes=scratch, backward_bytes=backward)

    def scaled(self, share: float) -> Operation:
        """The operation with so many times the bytes, seconds and FLOPs; one without a low-memory variant."""
        names = [name for name in self.__dataclass_fields__ if name.endswith(("_bytes", "_seconds", "_flops"))]
        weights = {name: weight for name in names if (weight := getattr(self, name))}
        return replace(self, **{name: type(weight)(share * weight) for name, weight in weights.items()})

    def renumbered(self, numbers: Sequence[int]) -> Operation:
        """The operation with other numbers for values, by the numbers that it has."""

        def new(values: Iterable[int]) -> tuple[int, ...]:
            return tuple(numbers[v] for v in values)

        taken, variant = self.takes_over, self.low_memory
        return replace(
            self,
            reads=new(self.reads),
            writes=new(self.writes),
            saves=new(self.saves),
            takes_over=None if taken is None else numbers[taken],
            low_memory=variant and replace(variant, saves=new(variant.saves)),
        )

    @property
    def variant_seconds(self) -> float:
        """What its low-memory variant takes more, forward and backward."""
        low = self.low_memory or self
        return low.forward_seconds + low.backward_seconds - self.forward_seconds - self.backward_seconds

    @property
    def variant_saves_otherwise(self) -> bool:
        """Whether its low-memory variant saves something else, and does not only take other bytes while it runs."""
        low = self.low_memory or self
        return self.internal_bytes != low.internal_bytes or set(self.saves) != set(low.saves)
