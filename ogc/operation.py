"""The nodes of a computation graph: operations, in the forms that they may run in, and the values that they make."""

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


@dataclass(frozen=True)
class Form:
    """What an operation takes in another form than PyTorch's own operator; the fields are those of an operation."""

    saves: tuple[int, ...] = ()
    internal_bytes: int = 0
    scratch_bytes: int = 0
    backward_bytes: int = 0
    late_bytes: int = 0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    repeat_seconds: float | None = None


@dataclass(frozen=True)
class Operation:
    """One node of the program with its weights (bytes and seconds).

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
    saves: tuple[int, ...] = ()  # values that its backward reads
    internal_bytes: int = 0  # tensors saved for its backward that are no value (statistics, masks)
    scratch_bytes: int = 0  # temporaries of its forward
    gradient_bytes: int = 0  # gradients alive, copies of them too, when its backward asks for what it saved
    backward_bytes: int = 0  # most gradients and temporaries alive while its backward runs
    late_bytes: int = 0  # of these, once it has let go of what it saved, if it does so before it is done
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    forward_flops: int = 0
    backward_flops: int = 0
    again_seconds: float = 0.0  # of a forward that is part of its backward, beyond ``backward_seconds``
    again_flops: int = 0
    repeat_seconds: float | None = None  # of its forward where its internal tensors are there; None: as ever
    saved_tensors: int = 0  # how many tensors autograd saves for its backward
    replayable: bool = True  # False: running it twice would change the model or the numbers
    takes_over: int | None = None  # a value whose storage its result takes where no cut separates the two
    low_memory: Form | None = None  # its low-memory form, if it has one; a plan decides which of the two runs
    plain_scratch_bytes: int | None = None  # of the plain model, where that takes less, or runs what nothing uses
    plain_backward_bytes: int | None = None  # of the plain model, where that runs another operator there

    def in_form(self, is_low_memory: bool) -> Operation:
        """The operation in one form alone."""
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
        """The operation with so many times the bytes, seconds and FLOPs; one without a low-memory form."""
        names = [name for name in self.__dataclass_fields__ if name.endswith(("_bytes", "_seconds", "_flops"))]
        weights = {name: weight for name in names if (weight := getattr(self, name))}
        return replace(self, **{name: type(weight)(share * weight) for name, weight in weights.items()})

    def renumbered(self, numbers: Sequence[int]) -> Operation:
        """The operation with other numbers for values, by the numbers that it has."""

        def new(values: Iterable[int]) -> tuple[int, ...]:
            return tuple(numbers[v] for v in values)

        taken, form = self.takes_over, self.low_memory
        return replace(
            self,
            reads=new(self.reads),
            writes=new(self.writes),
            saves=new(self.saves),
            takes_over=None if taken is None else numbers[taken],
            low_memory=form and replace(form, saves=new(form.saves)),
        )

    @property
    def form_seconds(self) -> float:
        """What its low-memory form takes more, forward and backward."""
        form = self.in_form(True)
        return form.forward_seconds + form.backward_seconds - self.forward_seconds - self.backward_seconds

    @property
    def keeps_otherwise(self) -> bool:
        """Whether its low-memory form keeps something else for the backward, and not only takes other bytes at once."""
        form = self.in_form(True)
        return self.internal_bytes != form.internal_bytes or set(self.saves) != set(form.saves)
