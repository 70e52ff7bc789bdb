"""One operation by itself, with inputs of its own, to be measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from ...operators.registry import live_arguments, ones_like
from ...operators.weights import Weights
from ...program.program import has_backward, storage_bytes, tensor_leaves
from ...program.tensors import Layout
from ...torch_state.allocator import Mark, marked_bytes, peak_bytes
from ...torch_state.private import pytree, untraced
from ...torch_state.settings import cuda_devices
from ..passes.writes import COPIED
from .backward.again import Layouts
from .record import Record

ASKED = "asked"
"""The label of the moments at which a backward asks for what was saved."""


class Call:
    """One call with inputs of its own, ready to run forward and backward again and again; by another ``target``, if
    that is given, and from these ``gradients`` of its first results."""

    def __init__(
        self,
        record: Record,
        args: Any,
        kwargs: Any,
        target: Any = None,
        gradients: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] = ones_like,
    ) -> None:
        self.make_gradients = gradients
        self.when_asked: Callable[[], None] = lambda: None
        self.target: Any = record.node.target if target is None else target
        self.leaves, self.tree = pytree.tree_flatten((args, kwargs))
        live = live_arguments(record.node.target, args)
        writes = record.in_place or self.target is record.node.meta.get(COPIED)
        self.copied = [any(leaf is one for one in live) or writes for leaf in self.leaves]
        self.result: Any = None
        self.saved: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor] = []

    def prepare(self, with_gradients: bool = False) -> None:
        """Fresh inputs; with gradients, the forward is run too and the gradients of its results made."""
        self.result, self.saved, self.gradients = None, [], []
        self.inputs = [own_argument(leaf, copied) for leaf, copied in zip(self.leaves, self.copied, strict=True)]
        self.starts = [t for t in self.inputs if isinstance(t, torch.Tensor) and t.requires_grad]
        if with_gradients:
            self.forward()
            self.saved = []
            self.gradients = self.make_gradients(self.ends())

    def forward(self, *internal: torch.Tensor) -> None:
        """Run it, again if it is given the internal tensors that it saved."""
        args, kwargs = pytree.tree_unflatten(self.inputs, self.tree)
        self.edges = [torch.autograd.graph.get_gradient_edge(t) for t in self.starts]
        with torch.enable_grad(), saved_tensors_hooks(self._pack, self._unpack):
            self.result = self.target(*args, *internal, **kwargs)

    def backward(self) -> Any:
        # Kept by the caller's frame only, so that they are freed when it is done.
        return torch.autograd.grad(self.ends()[: len(self.gradients)], self.edges, self.gradients, allow_unused=True)

    def marked(self, mark: Callable[[str], None]) -> None:
        """The backward, with a mark whenever it asks for what was saved."""
        self.when_asked = partial(mark, ASKED)
        self.backward()

    def ends(self) -> list[torch.Tensor]:
        return [t for t in tensor_leaves(self.result) if has_backward(t)]

    def own_bytes(self) -> int:
        """Bytes of what the forward made and keeps: its results and what it saves."""
        given = (t for t in self.inputs if isinstance(t, torch.Tensor))
        return storage_bytes(tensor_leaves(self.result) + self.saved, given)

    @untraced
    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.saved.append(tensor.detach())
        return tensor.detach()

    def _unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.when_asked()
        return tensor


def own_argument(leaf: Any, copied: bool) -> Any:
    """A tensor for autograd to start from, copied if it may be written; anything else as it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    own = leaf.detach().clone() if copied else leaf.detach()
    if leaf.requires_grad:
        own.requires_grad_()
    # An operation that writes in place must not be given a leaf.
    return own.clone() if copied and leaf.requires_grad else own


def with_measured_bytes(weights: Weights, call: Call) -> Weights:
    """The same with the bytes that the call, and its backward, are measured to take on a CPU beside what it keeps."""
    with torch.random.fork_rng([]):
        call.prepare()
        scratch, working, first = max(0, peak_bytes(call.forward, "cpu") - call.own_bytes()), 0, 0
        call.prepare(with_gradients=True)
        if call.ends() and call.starts:
            # Prepared once more under the eyes of the profiler: what several operators saved goes one by one.
            working, first = most_and_first(
                marked_bytes(call.marked, "cpu", partial(call.prepare, with_gradients=True))
            )
    return replace(weights, scratch_bytes=scratch, working_bytes=working, first_bytes=first)


def most_and_first(marks: Sequence[Mark]) -> tuple[int, int]:
    """The most bytes of a backward, and those until it first asked for what was saved, of which there are marks."""
    return max(mark.peak_bytes for mark in marks[1:]), next((mark.bytes for mark in marks if mark.label == ASKED), 0)


@dataclass
class _Seeds:
    """The gradients that a backward is given: their bytes, and themselves if others hold them, too."""

    are_held: bool
    bytes: int = 0
    tensors: list[torch.Tensor] = field(default_factory=list)


class BackwardBytes(NamedTuple):
    """What the backward of a call allocates beside the gradients that it is given, and how its results are laid out.

    ``first`` are the bytes until it asks for what it saved; layouts are by the numbers of the arguments.
    """

    most: int
    first: int
    layouts: dict[int, Layout]


def backward_measured(
    record: Record, device: torch.device, args: Any, kwargs: Any, layouts: Layouts, is_low_memory: bool, are_held: bool
) -> BackwardBytes:
    """The bytes of the backward of a recorded call, run on these arguments.

    The gradients that it is given are made on the way, so that they go as early as in a step, unless they ``are_held``
    by somebody else, too.
    """
    ends = [n for n, flag in enumerate(record.differentiable) if flag]
    target = record.form.target if is_low_memory and record.form else None
    call, found, seeds = Call(record, args, kwargs, target), dict[int, Layout](), _Seeds(are_held)

    def prepare() -> None:
        seeds.tensors.clear()
        call.prepare()
        call.forward()
        call.saved = []
        results = {n: end for n, end in zip(ends, call.ends(), strict=True) if n in layouts}
        call.result = _Given.apply([layouts[n] for n in results], seeds, *results.values())

    def run(mark: Callable[[str], None]) -> None:
        call.when_asked = partial(mark, ASKED)
        starts = [n for n, tensor in enumerate(tensor_leaves(call.inputs)) if tensor.requires_grad]
        results = torch.autograd.grad(call.result, call.edges, allow_unused=True)
        found.update((n, Layout.of(t)) for n, t in zip(starts, results, strict=True) if t is not None)

    with torch.random.fork_rng(cuda_devices()):
        marks = marked_bytes(run, device, prepare)
    most, first = most_and_first(marks)
    return BackwardBytes(max(0, most - seeds.bytes), max(0, first - seeds.bytes), found)


class _Given(torch.autograd.Function):
    """Makes the gradients of a call's results when its backward starts."""

    @staticmethod
    def forward(ctx: Any, layouts: list[Layout], seeds: _Seeds, *ends: torch.Tensor) -> torch.Tensor:
        ctx.layouts, ctx.kinds, ctx.seeds = layouts, [(end.dtype, end.device) for end in ends], seeds
        return ends[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        gradients = [layout.zeros(*kind) for layout, kind in zip(ctx.layouts, ctx.kinds, strict=True)]
        ctx.seeds.bytes = storage_bytes(gradients) + gradient.nbytes
        if ctx.seeds.are_held:
            ctx.seeds.tensors.extend(gradients)
        return None, None, *gradients


def call_key(target: Any, args: Any, kwargs: Any) -> Any:
    """What two calls must share to cost the same."""
    return target, _described(args), _described(kwargs)


def timing_key(record: Record, target: Any, args: Any, kwargs: Any) -> Any:
    """What two calls must share to take as long: views may lie anywhere in what they are of."""
    if not record.outputs or record.writes or record.writes_external or record.internal_bytes:
        return call_key(target, args, kwargs)
    args, kwargs = pytree.tree_map(lambda leaf: None if isinstance(leaf, int) else leaf, (args, kwargs))
    return call_key(target, args, kwargs), tuple(record.usual)


def _described(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tuple(tree.shape), tree.stride(), tree.dtype, tree.requires_grad
    if isinstance(tree, (tuple, list)):
        return tuple(map(_described, tree))
    if isinstance(tree, dict):
        return tuple((key, _described(item)) for key, item in tree.items())
    return type(tree), tree
