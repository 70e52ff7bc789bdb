"""Bytes of the gradients that are alive while each operation's backward runs.

They are seen: the program runs once, forward and backward, on meta tensors, and each of autograd's nodes belongs to the
operation that made it. What kernels allocate by themselves is known from the operation's weights. Recomputation changes
none of it.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.node import map_aggregate

from ...operators.registry import copies_strided_gradients, is_elementwise, of
from ...operators.weights import Weights
from ...program.opaque import Region
from ...program.program import Gradients, args_of, run_nodes, storage_of, tensor_leaves, without_autocast
from ...program.tensors import ByStorage, Layout, LiveBytes, is_dense
from ...torch_state.dispatch import out_of_mode
from ...torch_state.private import TorchDispatchMode, is_view
from .record import Observation, Record, on_meta

LONG_FLOPS = 2e9
"""A call with more is not run where its operator is known to copy gradients of other layouts."""

Layouts = Mapping[int, Layout]
"""Layouts of gradients, by the number of the result; other results get none."""


@dataclass(frozen=True)
class LiveGradients:
    """Bytes of gradients and temporaries around one operation's backward."""

    first: int  # once it asks for what was saved
    during: int
    late: int = 0  # once it has let go of what it saved


@dataclass
class _Seen:
    """What was seen of the backward of one operation: bytes alive, and the gradients of its results."""

    before: int
    inside: int = 0  # the most while its nodes run
    after: int = 0  # the most after them, as gradients are added up and become those of parameters
    layouts: dict[int, Layout] = field(default_factory=dict)
    owned: dict[int, int] = field(default_factory=dict)  # bytes of those that nobody else holds
    are_held: bool = False  # others hold one of them


class Backwards:
    """The backwards of the operations of a program, as one run on meta tensors shows them.

    Args:
        graph, observation: the program, observed and weighed.
        starts: the numbers of the outputs that the backward starts from.
        gradients: of parameters.
        around: entered around all that is called.

    Attributes:
        left: bytes of new gradients of parameters, after all.
    """

    def __init__(
        self,
        graph: torch.fx.Graph,
        observation: Observation,
        starts: Sequence[int],
        gradients: Gradients,
        around: AbstractContextManager[Any],
    ) -> None:
        self.records, self.gradients, self.watch = observation.records, gradients, _Watch()
        self.nodes: dict[Any, None] = {}  # in the order of making
        self.into_views: set[int] = set()  # ids of records of operations that write views
        self.own: list[torch.Tensor] = []  # gradients of parameters that are no arguments
        numbers = {record.node: t for t, record in enumerate(self.records)}
        given, attributes = observation.given, observation.attributes
        outer = tensor_leaves(given, [*attributes.values()])
        leaves = list(dict.fromkeys(t for t in outer if t.requires_grad and t.is_leaf))
        for leaf in leaves:
            leaf.grad = torch.empty_like(leaf) if gradients == "kept" else None
            if not isinstance(gradients, str):
                leaf.register_post_accumulate_grad_hook(self._step)

        def call(node: torch.fx.Node, values: dict[torch.fx.Node, Any]) -> Any:
            return self._call(numbers[node], *map_aggregate(args_of(node, values), _place))

        with out_of_mode(), around, saved_tensors_hooks(torch.Tensor.detach, _itself):  # in the place of a caller's
            with torch.enable_grad(), without_autocast():
                outputs = run_nodes(graph.nodes, given, attributes.__getitem__, call)
                root = _Root.apply(*(outputs[n] for n in starts if outputs[n].requires_grad))
            del outputs
            seed = torch.empty((), device="meta")
            with self.watch:
                if root.requires_grad:
                    root.backward(seed)
                del root
        self.watch.settle()
        left = [*self.own, *(t.grad for t in leaves if gradients == "none" and t.grad is not None)]
        self.left = sum({t.untyped_storage(): t.untyped_storage().nbytes() for t in left}.values())
        while self.nodes:  # the last first, as each holds those before it: PyTorch frees them recursively
            self.nodes.popitem()

    def live(self, weights: Sequence[Weights | None]) -> list[LiveGradients]:
        """For each operation, the bytes of gradients alive around its backward, by such weights."""
        found, before = [], self.watch.alive.bytes
        aside = sum(record.weights.aside_bytes for record in self.records)
        for t, (record, each) in enumerate(zip(self.records, weights, strict=True)):
            aside -= record.weights.aside_bytes
            seen = self.watch.seen.get(t)
            before = before if seen is None else seen.before
            if seen is None or each is None:
                found.append(LiveGradients(before + aside, before + aside))
            else:
                found.append(self._live(record, each, seen, aside))
        return found

    def _live(self, record: Record, weights: Weights, seen: _Seen, aside: int) -> LiveGradients:
        is_low_memory = record.variant is not None and weights is record.weights.low_memory
        if self.gradients == "none" and weights.own_gradient_bytes:
            weights = replace(weights, working_bytes=weights.own_working_bytes)
        strided = 0
        if copies_strided_gradients(record.variant.target if record.variant and is_low_memory else record.node.target):
            strided = sum(record.outputs[n].bytes for n, layout in seen.layouts.items() if not layout.is_dense)
        usual = {n: record.outputs[n].layout for n in seen.layouts}
        if not all(layout.is_like(usual[n]) for n, layout in seen.layouts.items()):
            found = record.relaid and record.relaid(seen.layouts, usual, is_low_memory, seen.are_held, weights)
            if found:
                weights, strided = found, 0
            elif not is_low_memory:
                weights = replace(weights, working_bytes=max(weights.working_bytes, seen.inside - seen.before))
        if id(record) in self.into_views:  # autograd copies the gradient of the base, and once more the view's part
            more = max(0, seen.inside - seen.before - weights.working_bytes)
            weights = replace(weights.taking(more), first_bytes=weights.first_bytes + more)
        before, late = seen.before + aside, weights.late_bytes
        spared = sum(g.bytes for g in weights.gradients if g.reuses is not None and seen.owned.get(g.reuses) == g.bytes)
        first = before + weights.first_bytes
        most = before + max(0, weights.working_bytes + strided - (0 if late else spared))
        after = seen.after and seen.after + aside - spared
        if late:
            return LiveGradients(first, max(first, most), max(before + late + strided - spared, after))
        during, after = (max(first, each - weights.ready_bytes) for each in (most, after))
        return LiveGradients(first, during, after if after > during else 0)

    def _call(self, t: int, args: Any, kwargs: Any) -> Any:
        record = self.records[t]
        target: Any = record.node.target
        is_run = record.weights.on_meta or target is operator.getitem
        target = target.to_weigh() if isinstance(target, Region) else target
        result = target(*args, **kwargs) if is_run else None
        found = [(Layout.of(made), made.dtype) for made in tensor_leaves(result)]
        if not is_run or found != [output.like for output in record.outputs]:
            made = _StandIn.apply(self, record, *tensor_leaves(args, kwargs))
            result = made[0] if len(made) == 1 else made
        for n, (tensor, output) in enumerate(zip(tensor_leaves(result), record.outputs, strict=True)):
            if output.differentiable:  # of others PyTorch may not tell the history
                self._watch(t, n, tensor.grad_fn)
        return result

    def _watch(self, t: int, number: int | None, node: Any) -> None:
        if node is None or hasattr(node, "variable") or node in self.nodes:
            return
        self.nodes[node] = None
        if type(node).__name__ == "CopySlices":
            self.into_views.add(id(self.records[t]))
        node.register_prehook(partial(self.watch.begin, t, number))
        node.register_hook(self.watch.done)
        for following, _ in node.next_functions:
            self._watch(t, None, following)

    def _step(self, parameter: torch.Tensor) -> None:
        assert not isinstance(self.gradients, str)
        _bytes(self.gradients.get(tuple(parameter.shape), 0))
        parameter.grad = None

    def take_own(self, size: int) -> None:
        """Gradients of parameters that an operation has beside its arguments."""
        if self.gradients == "none":
            self.own.append(_bytes(size))
        elif not isinstance(self.gradients, str):
            _bytes(size + max(self.gradients.values(), default=0))


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _bytes(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="meta")


def _place(leaf: Any) -> Any:
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


class Allocations(TorchDispatchMode):
    """Bytes of what operators make inside.

    Where autograd adds up two gradients it writes over the first if that is dense, no view, and nobody else holds it,
    but not while it is watched: the sum counts as written over it where it is gone when the next operator is called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = LiveBytes()
        self.sum: tuple[Any, int] | None = None  # what it may be written over, and the bytes if it is not

    def reach(self, reached: int, function: Any, args: Any) -> None:
        """So many bytes were alive as a function returned."""
        raise NotImplementedError

    def is_called_by_autograd(self) -> bool:
        """Whether the engine called an operator, and no node between."""
        raise NotImplementedError

    def settle(self) -> None:
        """Count the last sum."""
        if self.sum is not None and self.sum[0]() is not None:
            self.reach(self.sum[1], _ADD, ())
        self.sum = None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.settle()
        result = (of(function).on_meta or function)(*args, **(kwargs or {}))
        known = {t.untyped_storage() for t in tensor_leaves(args, kwargs)}
        for storage in {t.untyped_storage() for t in tensor_leaves(result)} - known:
            self.alive.add(storage)
        if function is _ADD and is_dense(args[0]) and not is_view(args[0]) and self.is_called_by_autograd():
            self.sum = weakref.ref(args[0].untyped_storage()), self.alive.bytes
        else:
            self.reach(self.alive.bytes, function, args)
        return result


_ADD = torch.ops.aten.add.Tensor


class _Watch(Allocations):
    """Tells the operations whose backwards these are."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, _Seen] = {}
        self.now: _Seen | None = None
        self.given: dict[int, tuple[Any, int]] = {}  # storages of gradients of its results, with bytes
        self.is_inside = self.is_done = False
        self.of_ends: ByStorage[None] = ByStorage()  # storages of what it starts from, which the caller may hold

    def reach(self, reached: int, function: Any, args: Any) -> None:
        if self.now is not None:
            name = "inside" if self.is_inside else "after"
            setattr(self.now, name, max(getattr(self.now, name), reached))

    def is_called_by_autograd(self) -> bool:
        return not self.is_inside

    def begin(self, t: int, number: int | None, gradients: tuple[torch.Tensor | None, ...]) -> None:
        """A node of an operation is called, be it that of a result with a number."""
        self.settle()
        if self.now is None or self.seen.get(t) is not self.now:
            if self.now is None:
                self.of_ends.update(dict.fromkeys(self.alive))
            self.now, self.given = self.seen.setdefault(t, _Seen(self.alive.bytes)), {}
        self.now.after, self.is_inside = 0, True
        for n, gradient in enumerate(gradients if number is not None else (), number or 0):
            if gradient is not None and gradient.layout is torch.strided and n not in self.now.layouts:
                storage = gradient.untyped_storage()
                self.now.layouts[n] = Layout.of(gradient)
                is_mine = gradient.is_contiguous() and storage not in self.of_ends
                self.given[n] = weakref.ref(storage), storage.nbytes() if is_mine else -1

    def done(self, results: tuple[torch.Tensor | None, ...], _: Any) -> None:
        """That node is done; some of its results may have been made in the forward."""
        for storage in filter(None, map(storage_of, tensor_leaves(results))):
            self.alive.add(storage)
        self.is_inside, self.is_done = False, True

    def settle(self) -> None:
        """Count the last sum; and what of the node that was just done others hold."""
        if self.now is not None and self.is_done:
            self.now.owned = {n: size for n, (storage, size) in self.given.items() if storage() is None}
            self.now.are_held, self.is_done = len(self.now.owned) < len(self.given), False
        super().settle()


class _Root(torch.autograd.Function):
    """Where the backward starts: it makes the gradients of all ends at once."""

    @staticmethod
    def forward(ctx: Any, *ends: torch.Tensor) -> torch.Tensor:
        ctx.like = [(Layout.usual(t), t.dtype) for t in ends]
        return torch.empty((), device="meta")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(layout.zeros(dtype, "meta") for layout, dtype in ctx.like)


class _StandIn(torch.autograd.Function):
    """An operation that is not run on meta tensors: it gives results and gradients like those that were seen."""

    @staticmethod
    def forward(ctx: Any, run: Backwards, record: Record, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.run, ctx.weights, ctx.like = run, record.weights, [(Layout.of(t), t.dtype) for t in tensors]
        ctx.set_materialize_grads(False)
        results = [layout.zeros(dtype, "meta") for layout, dtype in (output.like for output in record.outputs)]
        pairs = zip(results, record.outputs, strict=True)
        ctx.mark_non_differentiable(*(result for result, output in pairs if not output.differentiable))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        found: list[torch.Tensor | None] = [None] * len(ctx.like)
        new = {gradient.group: _bytes(gradient.bytes) for gradient in ctx.weights.gradients if gradient.shares is None}
        for gradient in ctx.weights.gradients:
            source = new[gradient.group] if gradient.shares is None else gradients[gradient.shares]
            (shape, _), dtype = ctx.like[gradient.argument]
            if gradient.layout is None:
                ctx.run.take_own(gradient.bytes)
            elif source is not None:
                made = torch.empty(0, dtype=dtype, device="meta")
                found[gradient.argument] = made.set_(source.untyped_storage(), 0, shape, gradient.layout.strides)
        ctx.run.take_own(ctx.weights.own_gradient_bytes)
        return None, None, *found


class Relaid:
    """Weighs the backward of a call for gradients of other layouts than usual, which many kernels copy first, unseen.

    Args:
        target, args, kwargs: the call; content is not held. It is run on zeros.
        measure: runs the backward of the call, or of its low-memory variant, for gradients of some layouts,
            shared or not; gives the bytes that it allocates, and those until it asks for what was saved.
    """

    def __init__(self, target: Any, args: Any, kwargs: Any, measure: Any) -> None:
        self.target, self.measure = target, measure
        first = tensor_leaves(args, kwargs)[0]
        self.device, self.dtype = first.device, first.dtype
        self.args, self.kwargs = map_aggregate((args, kwargs), on_meta)
        self.found: dict[Any, tuple[int, int] | None] = {}

    def __call__(
        self, layouts: Layouts, usual: Layouts, is_low_memory: bool, are_held: bool, weights: Weights
    ) -> Weights | None:
        """The weights for these gradients, which others hold, too, or not; None if shapes tell them."""
        if is_elementwise(self.target) or self.target.is_view or not weights.on_meta:
            return None
        if weights.forward_flops > LONG_FLOPS and copies_strided_gradients(self.target):
            return weights.taking(sum(prod(layout.shape) * self.dtype.itemsize for layout in layouts.values()))
        given = self._measured(layouts, is_low_memory, are_held)
        ordinary = self._measured(usual, True, are_held) if is_low_memory else (weights.working_bytes, 0)
        if given is None or ordinary is None:
            return None
        found = weights.taking(given[0] - ordinary[0])
        return replace(found, first_bytes=max(given[1], weights.first_bytes))

    def _measured(self, layouts: Layouts, is_low_memory: bool, are_held: bool) -> tuple[int, int] | None:
        key = frozenset(layouts.items()), is_low_memory, are_held
        if key not in self.found:
            with torch.enable_grad(), without_autocast():
                given = map_aggregate((self.args, self.kwargs), self._filled)
                try:
                    self.found[key] = self.measure(*given, layouts, is_low_memory, are_held)
                except RuntimeError:  # it does not take zeros
                    self.found[key] = None
        return self.found[key]

    def _filled(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return Layout.of(leaf).zeros(leaf.dtype, self.device).requires_grad_(leaf.requires_grad)
