"""A recorded call by itself, of an operator or an opaque module, to be run for its bytes and seconds."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from ...operators.registry import live_arguments, ones_like
from ...operators.weights import Weights
from ...program.opaque import Aside, OpaqueCall
from ...program.program import has_backward, storage_bytes, storage_of, tensor_leaves
from ...program.tensors import ByStorage, Layout, contents, made_copies
from ...torch_state.allocator import allocated_bytes, can_measure, marked_bytes
from ...torch_state.compare import fingerprint
from ...torch_state.no_trace import cut_history, members_put_back
from ...torch_state.private import inner_tensors, maker_of, pytree, storage_id, untraced
from ...torch_state.ranks import are_several, own_parameters
from ...torch_state.settings import cuda_devices
from ..forward.flat import gradient_targets, saved_until_done
from ..passes.writes import COPIED
from .backward import Layouts
from .record import Record

_ASKED = "asked"
"""The label of the moment at which a backward first asks for what was saved."""


REPEATS = 3
"""Runs on CUDA that bytes, and seconds, are taken from."""


class Call:
    """A call that can be run forward and backward again and again; by another ``target``, if that is given.

    Gradients of its results are made when its backward starts, so that they go as early as in a step. Gradients go no
    further than to what the call was given: no ``.grad`` changes.
    """

    def __init__(self, record: Record, args: Any, kwargs: Any, target: Any = None) -> None:
        self.target: Any = record.node.target if target is None else target
        self.leaves, self.tree = pytree.tree_flatten((args, kwargs))
        live = live_arguments(record.node.target, args)
        writes = record.in_place or self.target is record.node.meta.get(COPIED)
        self.copied = [any(leaf is one for one in live) or writes for leaf in self.leaves]
        self.parameters: list[torch.Tensor] = []  # that it takes beside its arguments
        self.seeds: ByStorage[int] = ByStorage()  # storages of the gradients of its results, with their numbers
        self.seed_bytes = self.root_bytes = 0  # of these, and of the gradient that the backward starts from
        self.first_seed_bytes = 0
        self.held: list[torch.Tensor] = []
        self.own_gradients: list[torch.Tensor] | None = None  # of parameters beside its arguments, where they stay
        self.mark: Callable[[str], None] | None = None

    def prepare(self) -> None:
        """Fresh inputs."""
        self.mark = None
        self.results: list[torch.Tensor] = []
        self.saved: list[torch.Tensor] = []
        self.found: list[tuple[int, torch.Tensor]] = []  # gradients, by the number of the tensor argument
        self.root: torch.Tensor | None = None
        self.starts: list[torch.Tensor] = []
        self.inputs: list[Any] = []
        for leaf, copied in zip(self.leaves, self.copied, strict=True):
            if isinstance(leaf, torch.Tensor):
                self.starts.append(leaf.detach().requires_grad_(leaf.requires_grad))
                # What starts autograd's graph must not be written in place.
                leaf = self.starts[-1].clone() if copied else self.starts[-1]
            self.inputs.append(leaf)

    def prepare_backward(self, layouts: Layouts | None = None, are_held: bool = False) -> bool:
        """Fresh inputs and a forward; whether there is a backward.

        Gradients of its results have these layouts, and others hold them, too, if they ``are_held``.
        """
        self.prepare()
        self.forward_saving()
        self.saved = []
        self.held.clear()
        ends = {n: t for n, t in self.ends().items() if layouts is None or n in layouts}
        starts = [t for t in (*self.starts, *self.parameters) if t.requires_grad]
        if ends and starts:
            self.root = _Seed.apply(self, layouts, list(ends), are_held, *ends.values())
            self.stops = {get_gradient_edge(t).node for t in starts} | leaf_nodes(self.root)
        return self.root is not None

    def run(self, *internal: torch.Tensor) -> Any:
        args, kwargs = pytree.tree_unflatten(self.inputs, self.tree)
        return self.target(*args, *internal, **kwargs)

    def forward(self, *internal: torch.Tensor) -> None:
        """Run it; once more if it is given the internal tensors that it saved."""
        with torch.enable_grad():
            self.results = tensor_leaves(self.run(*internal))

    def forward_saving(self) -> None:
        """Run it, and note what it saves."""
        with saved_tensors_hooks(self._pack, self._unpack):
            self.forward()

    def backward(self) -> None:
        root, self.root = self.root, None
        assert root is not None
        handles = [stop.register_prehook(self._stop(stop)) for stop in self.stops]
        try:
            root.backward()
        finally:  # else no backward of the model would ever give these a gradient
            for handle in handles:
                handle.remove()

    def backward_bytes(
        self, device: torch.device | str, layouts: Layouts | None = None, are_held: bool = False
    ) -> tuple[int, int]:
        """Most bytes that its backward allocates beside the gradients that it is given, and those until it first asks
        for what was saved."""
        marks = marked_bytes(self._marked_backward, device, partial(self.prepare_backward, layouts, are_held))
        most = max(mark.peak_bytes for mark in marks[1:])
        first = next((mark.bytes for mark in marks if mark.label == _ASKED), 0)
        return max(0, most - self.seed_bytes - self.root_bytes), max(0, first - self.first_seed_bytes - self.root_bytes)

    def ends(self) -> dict[int, torch.Tensor]:
        """The results that a backward may start from, by number."""
        return {number: t for number, t in enumerate(self.results) if has_backward(t)}

    def own_bytes(self) -> int:
        """Bytes of what the forward made and keeps: its results and what it saves."""
        return storage_bytes(self.results + self.saved, (t for t in self.inputs if isinstance(t, torch.Tensor)))

    def asks(self, tensor: torch.Tensor) -> bool:
        """Whether a plan may have to recompute a tensor that was saved."""
        return True

    def counted_seed_bytes(self) -> int:
        """Bytes of the gradients of its results that count when it first asks for what was saved."""
        return self.seed_bytes

    def _marked_backward(self, mark: Callable[[str], None]) -> None:
        self.mark = mark
        self.backward()

    @untraced
    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.saved.append(tensor.detach())
        return tensor.detach()

    @untraced
    def _unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.mark is not None and self.asks(tensor):
            self.first_seed_bytes = self.counted_seed_bytes()
            self.mark(_ASKED)
            self.mark = None
        return tensor

    def _stop(self, end: Any) -> Any:
        number = next((n for n, start in enumerate(self.starts) if start is end.variable), None)

        def stop(gradients: tuple[torch.Tensor | None, ...]) -> tuple[None]:
            if number is not None and gradients[0] is not None:
                self.found.append((number, gradients[0].detach()))
            if number is None and gradients[0] is not None and self.own_gradients is not None:
                self.own_gradients.append(gradients[0].detach())
            return (None,)

        return stop


class CallOfOpaque(Call):
    """A call of an opaque module."""

    def __init__(self, record: Record, args: Any) -> None:
        self.module, given, self.state = args
        super().__init__(record, given, {})
        self.opaque: OpaqueCall = record.node.target  # type: ignore[assignment]
        self.leaves, self.copied = list(given), [record.in_place] * len(given)
        self.parameters = [t for t in self.state if t.requires_grad and t.is_leaf]
        modules = [] if self.module is None else list(self.module.modules())
        cut_history(modules)
        self.put_back = members_put_back(modules)  # each call comes from where the first one does
        if self.module is not None and are_several():  # hooks of parameters tell other ranks that gradients are ready
            self.parameters = [own for own in own_parameters(self.module) if own.requires_grad]

    def prepare(self) -> None:
        self.put_back()
        super().prepare()

    def run(self, *internal: torch.Tensor) -> Any:
        return self.opaque(self.module, self.inputs)

    def forward_compared(self) -> list[Any]:
        """The forward as plans run it that call the module again: what it saved is compared once it has returned.

        Returns:
            What it is compared by.
        """
        saved: list[torch.Tensor] = []

        @untraced
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            held = tensor.detach()
            saved.extend(contents(held))
            return held

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            self.forward()
        state = [] if self.module is None else [*self.module.parameters(), *self.module.buffers()]
        known = {storage_id(t) for t in (*self.inputs, *state) if storage_of(t) is not None}
        made = [t for t in saved if storage_of(t) is not None and storage_id(t) not in known]
        return [fingerprint(t) for t in (*made, *chain.from_iterable(map(contents, self.results)))]

    def asks(self, tensor: torch.Tensor) -> bool:
        here = {storage_id(t) for t in contents(tensor) if storage_of(t) is not None}
        known = {
            storage_id(t) for t in (self.state if self.opaque.repeatable else self.inputs) if storage_of(t) is not None
        }
        return not here <= known if self.opaque.repeatable else bool(here & known)

    def counted_seed_bytes(self) -> int:
        """Of those that are there: others may hold them in a step."""
        return sum(storage.nbytes() for storage in self.seeds)

    @untraced
    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()


class _Seed(torch.autograd.Function):
    """Makes the gradients of a call's results when its backward starts."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, layouts: Layouts | None, numbers: list[int], are_held: bool, *ends: torch.Tensor
    ) -> torch.Tensor:
        ctx.call, ctx.layouts, ctx.numbers, ctx.are_held = call, layouts, numbers, are_held
        ctx.like = list(map(_ones_like, ends))
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        call, layouts = ctx.call, ctx.layouts
        made = [like(None if layouts is None else layouts[n]) for n, like in zip(ctx.numbers, ctx.like, strict=True)]
        seeds = [(n, inner) for n, t in zip(ctx.numbers, made, strict=True) for inner in contents(t)]
        call.seeds = ByStorage({inner.untyped_storage(): n for n, inner in seeds})
        call.seed_bytes = storage_bytes(inner for _, inner in seeds)
        call.root_bytes = gradient.nbytes if made[0].device == gradient.device else 0
        call.held += made if ctx.are_held else []
        return None, None, None, None, *made


def _ones_like(tensor: torch.Tensor) -> Callable[[Layout | None], torch.Tensor]:
    """Makes a gradient for a tensor, which is not held; without a layout of its own one of the usual layout."""
    shape, dtype, device = tuple(tensor.shape), tensor.dtype, tensor.device
    if parts := {name: _ones_like(part) for name, part in inner_tensors(tensor).items()}:
        make = maker_of(tensor.detach())
        return lambda layout: make({name: like(None) for name, like in parts.items()})
    return lambda layout: (
        torch.ones(shape, dtype=dtype, device=device) if layout is None else layout.zeros(dtype, device)
    )


def leaf_nodes(root: torch.Tensor) -> set[Any]:
    """The nodes of a graph that add gradients up in tensors."""
    _, nodes = gradient_targets([root], ())
    return {node for node in nodes if hasattr(node, "variable")}


def held_aside(
    opaque: OpaqueCall, module: torch.nn.Module | None, given: list[torch.Tensor], home: torch.device
) -> tuple[Aside, int]:
    """What a call holds on to beside what it tells autograd to save, and the bytes of other tensors that it so holds.

    A custom function may keep them in attributes of its context. The model may be changed by the call.
    """
    references: list[dict[int, weakref.ref[torch.UntypedStorage]]] = []
    graph: list[Any] = []

    def call() -> None:
        inputs = made_copies(given)  # as the graph holds what is an opaque module of autograd
        with torch.enable_grad(), saved_until_done():
            results = tensor_leaves(opaque(module, inputs))
        for tensors in (inputs, results):
            storages = enumerate(map(storage_of, tensors))
            references.append({n: weakref.ref(storage) for n, storage in storages if storage is not None})
        graph.extend(t.grad_fn for t in results)  # which holds what is aside

    held = 0
    if can_measure(home):
        _, held = allocated_bytes(call, home)
    else:
        call()
    given_aside, made_aside = ([n for n, one in each.items() if one() is not None] for each in references)
    known = {one() for each in references for one in each.values()} - {None}
    return Aside(tuple(given_aside), tuple(made_aside)), max(0, held - sum(one.nbytes() for one in known if one))


def own_argument(leaf: Any, copied: bool) -> Any:
    """A tensor for autograd to start from, copied if it may be written; anything else as it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    own = leaf.detach().requires_grad_(leaf.requires_grad)
    return own.clone() if copied else own  # what starts autograd's graph must not be written in place


def with_measured_bytes(
    weights: Weights,
    call: Call,
    device: torch.device,
    gradients: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] = ones_like,
) -> Weights:
    """The weights with the bytes that the call is measured to allocate on a device, from ``gradients`` of its results.

    Others hold these, too.
    """

    def forward() -> tuple[int, int]:
        peak, _ = allocated_bytes(call.forward_saving, device, call.prepare)
        return max(0, peak - call.own_bytes()), 0

    with torch.random.fork_rng(cuda_devices()):
        scratch, _ = most_bytes(forward, device)
        ends = call.ends()
        working = first = 0
        if ends and any(start.requires_grad for start in call.starts):
            layouts = {n: Layout.of(gradient) for n, gradient in zip(ends, gradients([*ends.values()]), strict=False)}
            del ends
            working, first = most_bytes(lambda: call.backward_bytes(device, layouts, are_held=True), device)
    return replace(weights, scratch_bytes=scratch, working_bytes=working, first_bytes=first)


def most_bytes(run: Callable[[], tuple[int, int]], device: torch.device) -> tuple[int, int]:
    """The most bytes of some runs; on a CPU all are alike.

    On CUDA, kernels are loaded, algorithms chosen and workspaces made by a first one; and a run may begin while
    gradients of the one before it are still alive, and then seems to take less.
    """
    if device.type == "cpu":
        return run()
    run()
    most, first = zip(*(run() for _ in range(REPEATS)), strict=True)
    return max(most), max(first)


def backward_measured(
    record: Record, device: torch.device, args: Any, kwargs: Any, layouts: Layouts, is_low_memory: bool, are_held: bool
) -> tuple[int, int]:
    """The bytes of the backward of a recorded call; see :class:`.backward.Relaid`."""
    call = Call(record, args, kwargs, record.variant.target if is_low_memory and record.variant else None)
    with torch.random.fork_rng(cuda_devices()):
        return call.backward_bytes(device, layouts, are_held)


def call_key(target: Any, args: Any, kwargs: Any) -> Any:
    """What two calls must share to cost the same."""
    return target, _described(args), _described(kwargs)


def _described(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tuple(tree.shape), tree.stride(), tree.dtype, tree.requires_grad
    if isinstance(tree, (tuple, list)):
        return tuple(map(_described, tree))
    if isinstance(tree, dict):
        return tuple((key, _described(item)) for key, item in tree.items())
    return type(tree), tree
