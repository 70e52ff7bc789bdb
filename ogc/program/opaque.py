"""Operations of a program that are no operators of PyTorch: all others ask the class, not which one it is.

An opaque module is a submodule that is called as it is, hooks and all, as one operation of a program.

It hides what cannot be replayed by operators: control flow on data, a custom ``autograd.Function``, hooks, scripted
code. Nothing proves that it may run twice, so it runs once per step, unless it is seen or said to compute the same
again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..errors import ReplayError
from ..torch_state.forwards import hooks_off
from ..torch_state.private import storage_id, version_of
from ..torch_state.ranks import arrived
from .program import call_node, run_nodes
from .structures import Given, InputSpec, OutputSpec, TensorSpec


class Opaque:
    """A module that is called as it is, or a region that runs as one operation.

    Attributes:
        name: identifies it in generated code.
        runs_once: it must not be recomputed for its backward.
        live: the numbers of the arguments that it updates and its own results do not depend on.
        given: how many of its node's arguments a call is given; None for all.
    """

    name: str
    runs_once: bool
    live: tuple[int, ...]
    given: ClassVar[int | None] = None


class Region(Opaque, ABC):
    """A part of a program as one operation, made by a rewrite; its results are the program's up to rounding.

    Attributes:
        graph: the part; a placeholder for each argument.
        recomputes: its backward runs its forward again, unless that has made the gradients.
    """

    graph: torch.fx.Graph
    recomputes: ClassVar[bool] = False
    runs_once = False

    @property
    def key(self) -> Any:
        """What its times are remembered by."""
        return self

    @abstractmethod
    def to_weigh(self) -> Callable[..., Any]:
        """What runs in its place where its shapes alone are looked at."""

    def hidden_bytes(self, operator: Any, args: Any, results: list[torch.Tensor]) -> int:
        """Bytes that a CPU's kernels of a call inside allocate at once beyond its results."""
        return 0

    def is_run_for_bytes(self, flops: int) -> bool:
        """Whether it is run for the bytes of its kernels, if its forward has so many FLOPs."""
        return True

    def run(self, inputs: Any) -> Any:
        """The region, operator by operator."""
        return run_nodes(self.graph.nodes, inputs, _no_attribute, call_node)


def runs_once(target: Any) -> bool:
    """Whether what a node calls must not be recomputed."""
    return isinstance(target, Opaque) and target.runs_once


def _no_attribute(name: str) -> None:
    raise AssertionError(f"a region is given {name} as an argument")


@dataclass(frozen=True)
class Returned:
    """What a call returned, beside the tensors that it was given."""

    outputs: OutputSpec  # the structure of the result
    tensors: tuple[TensorSpec, ...]  # what each tensor in it is like
    # for each, the number of the given tensor that it is, left as it was; None for any other
    same: tuple[int | None, ...]
    # for each, the number of a given tensor whose storage it shares, and its offset in that (None: of another type)
    views: tuple[tuple[int, int | None] | None, ...]

    @staticmethod
    def of(
        result: Any, given: Given, inputs: Sequence[torch.Tensor], versions: Sequence[int]
    ) -> tuple[Returned, list[torch.Tensor]]:
        """The description of a call's result, and the tensors in it; ``versions`` are those of ``inputs`` before."""
        outputs, tensors = OutputSpec.of(result, given)
        numbered = enumerate(zip(inputs, versions, strict=True))
        unchanged = {id(tensor): n for n, (tensor, version) in numbered if version_of(tensor) == version}
        storages = {storage_id(one): n for n, one in reversed(list(enumerate(inputs)))}
        sources = [storages.get(storage_id(tensor)) for tensor in tensors]
        return Returned(
            outputs,
            tuple(map(TensorSpec.of, tensors)),
            tuple(unchanged.get(id(tensor)) for tensor in tensors),
            tuple(
                None if n is None else (n, _offset(tensor, inputs[n]))
                for n, tensor in zip(sources, tensors, strict=True)
            ),
        ), tensors

    def holds_for(self, other: Returned) -> bool:
        """Whether a program made for this result can go on with the other one."""
        if self.outputs != other.outputs or self.tensors != other.tensors:
            return False
        pairs = [*zip(self.same, other.same, strict=True), *zip(self.views, other.views, strict=True)]
        return all(now == then for then, now in pairs if then is not None)

    def __str__(self) -> str:
        constants = list(map(repr, self.outputs.constants))
        tensors = [_text(*described) for described in zip(self.tensors, self.same, self.views, strict=True)]
        return f"({', '.join(tensors + constants)})"


def _offset(tensor: torch.Tensor, source: torch.Tensor) -> int | None:
    kinds = [(t.dtype, t.is_conj(), t.is_neg()) for t in (tensor, source)]
    return int(tensor.storage_offset() - source.storage_offset()) if kinds[0] == kinds[1] else None


def _text(tensor: TensorSpec, same: int | None, view: tuple[int, int | None] | None) -> str:
    if same is not None:
        return f"its input {same}"
    kind = f"{tensor.dtype} of shape {list(tensor.shape)} and strides {list(tensor.stride)}"
    kind += "" if tensor.requires_grad else " without gradient"
    if view is None:
        return kind
    number, offset = view
    return f"{kind} in the memory of its input {number}" + ("" if offset is None else f", {offset} entries on")


@dataclass(frozen=True)
class Aside:
    """What a call holds past autograd, as in attributes of a custom function's context, until autograd's graph goes.

    Attributes:
        given, made: numbers of tensors that it is given, and of those that it returns.
    """

    given: tuple[int, ...] = ()
    made: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class OpaqueCall(Opaque):
    """One call of a submodule."""

    name: str  # of the call in generated code
    module: str  # qualified name of the submodule
    source: str  # file and line of the call
    inputs: InputSpec  # how its arguments are rebuilt from the given tensors
    returned: Returned  # what it returned when it was recorded
    grad: bool  # whether gradients were on
    autocast: tuple[tuple[str, torch.dtype], ...]  # device types for which autocast was on, and their dtypes
    repeatable: bool = False  # may be recomputed for its backward
    function: type[torch.autograd.Function] | None = None  # the custom function that it is, if no submodule
    talks: bool = False  # runs collectives, which other ranks join once in each step
    takes_no_hooks: bool = False  # differentiates by torch.func, and saves past hooks for saved tensors
    aside: Aside = Aside()  # what it holds past autograd

    live = ()
    given: ClassVar[int | None] = 2  # the third are tensors that its module holds

    @property
    def submodule(self) -> str | None:
        """The name of the submodule that is called, if it is one."""
        return self.module if self.function is None else None

    @property
    def runs_once(self) -> bool:  # type: ignore[override]
        """Whether it must not be recomputed."""
        return not self.repeatable

    @property
    def __name__(self) -> str:
        return "opaque"

    def __call__(self, module: torch.nn.Module | None, given: list[torch.Tensor], state: Sequence[object] = ()) -> Any:
        """Call the module; ``state`` is what it holds, named for those who ask what the call depends on.

        It returns the tensors that it was not given: the one there is, or a tuple.
        """
        args, kwargs = self.inputs.rebuild(given)
        before = Given(args, kwargs)
        versions = [version_of(tensor) for tensor in given]
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            if self.takes_no_hooks:
                stack.enter_context(hooks_off())
            call: Any = module if self.function is None else self.function.apply
            result = call(*args, **kwargs)
            if self.talks:
                result = arrived(result)
        returned, tensors = Returned.of(result, before, given, versions)
        if not self.returned.holds_for(returned):
            raise ReplayError(
                f"the opaque module {self.module} returned {returned} where it returned {self.returned} when the "
                "model was optimized, and a plan holds for that alone; make a module around it the opaque module "
                "(opaque_modules=), one whose results are always alike"
            )
        new = [tensors[number] for number in self.new]
        return new[0] if len(new) == 1 else tuple(new)

    @property
    def new(self) -> list[int]:
        """Numbers of the returned tensors that are none of the given."""
        return [number for number, same in enumerate(self.returned.same) if same is None]

    @property
    def view(self) -> tuple[int, tuple[Any, ...], int] | None:
        """If all that is new is one view: the number of the given tensor, its (size, stride), and its offset in that.

        None also for one that takes the memory for another type than the given tensor does.
        """
        if len(self.new) != 1 or (found := self.returned.views[self.new[0]]) is None:
            return None
        spec = self.returned.tensors[self.new[0]]
        number, offset = found
        return None if offset is None else (number, (spec.shape, spec.stride), offset)


def opaque_in(graph: torch.fx.Graph) -> set[str]:
    """The submodules that a program calls as they are."""
    calls = [node.target for node in graph.nodes if isinstance(node.target, OpaqueCall)]
    return {opaque.module for opaque in calls if opaque.submodule is not None}
