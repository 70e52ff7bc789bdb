"""Weights of a leaf: it is run, forward and backward, and what it holds is read off the allocator."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from ...operators.weights import Weights
from ...program.leaf import Leaf
from ...program.program import device_of_model, has_backward, storage_bytes, storage_of, tensor_leaves
from ...program.tensors import ByStorage, contents, made_copies
from ...torch_state.allocator import allocated_bytes, can_measure, marked_bytes
from ...torch_state.compare import fingerprint
from ...torch_state.no_trace import cut_history, members_put_back, untouched, unwatched
from ...torch_state.private import storage_id, untraced
from ...torch_state.ranks import are_several, own_parameters
from ..forward.flat import gradient_targets, saved_until_done
from .calls import ASKED, most_and_first
from .estimate import Estimator, input_gradients
from .measure import Measurer
from .meter import Reading, Seconds, metered
from .record import Record

Profiler = Estimator | Measurer
"""What weighs operators."""


def weigh(model: torch.nn.Module, profiler: Profiler, record: Record, args: Any, kwargs: Any) -> Weights:
    """The weights of one call, be it of an operator or of a leaf; the model is afterwards as before.

    A leaf's bytes are those of the device that the model is on; its time and FLOPs come from the profiler.
    """
    leaf = record.node.target
    if not isinstance(leaf, Leaf):
        return _of_operator(profiler, record, args, kwargs)
    home = device_of_model(model, args[1])
    seconds = (profiler.estimator if isinstance(profiler, Measurer) else profiler).rates.seconds
    with untouched(model):
        call = _Call(leaf, args, in_place=record.in_place)
        call.take_parameters_apart()
        call.prepare()
        forward = _reading(call, seconds, call.forward)
        call.prepare()
        peak, compared, held = _peaks(call, home, forward)
        weights = Weights(
            scratch_bytes=max(0, peak - held, compared - held),
            plain_scratch_bytes=max(0, peak - held),
            internal_bytes=max(0, held - call.result_bytes()) + _bytes_aside(record, leaf, args),
            forward_seconds=forward.seconds,
            forward_flops=forward.flops,
        )
        if isinstance(profiler, Measurer):
            weights = replace(weights, forward_seconds=profiler.measure(call.prepare, call.forward)[1])
        if not call.prepare_backward():
            return weights
        backward = _reading(call, seconds, call.backward)
        call.prepare()
        working, first = backward.peak_bytes, 0
        if can_measure(home):
            working, first = most_and_first(marked_bytes(call.marked, home, call.prepare_backward))
        weights = replace(
            weights,
            # The gradients of its results are made inside, here, so that they go as early as in a step.
            working_bytes=max(0, working - call.seed_bytes),
            first_bytes=max(0, first - call.first_seed_bytes),
            gradients=input_gradients(call.found, call.seeds),
            backward_seconds=backward.seconds,
            backward_flops=backward.flops,
        )
        if isinstance(profiler, Measurer):
            weights = replace(weights, backward_seconds=profiler.measure(call.prepare_backward, call.backward)[1])
        return weights


def _reading(call: _Call, seconds: Seconds, run: Callable[[], object]) -> Reading:
    """What ``run()`` costs; where nobody may look at its operators, by the clock alone."""
    if call.module not in unwatched:
        return metered(seconds, run)
    start = time.perf_counter()
    run()
    return Reading(time.perf_counter() - start, 0, 0, 0)


def _peaks(call: _Call, home: torch.device, forward: Reading) -> tuple[int, int, int]:
    """The most bytes of a call, of one that is compared with another, and those that stay."""
    if not can_measure(home):  # what PyTorch's operators allocate has to do
        return forward.peak_bytes, forward.peak_bytes, forward.held_bytes
    peak, held = allocated_bytes(call.forward, home, call.prepare)
    compared = allocated_bytes(call.forward_compared, home, call.prepare)[0] if call.leaf.repeatable else peak
    return peak, compared, held


def _of_operator(profiler: Profiler, record: Record, args: Any, kwargs: Any) -> Weights:
    """The weights of a call of an operator, and what weighs it for other gradients."""
    weights = profiler.weigh(record, args, kwargs)
    record.again = profiler.again(record, args, kwargs) if weights.gradients else None
    return weights


def held_aside(leaf: Leaf, module: torch.nn.Module | None, given: list[torch.Tensor]) -> list[int]:
    """The numbers of given tensors that a call holds on to beside what it tells autograd to save.

    A custom function may keep them in attributes of its context. A result that is one of them, or a view, does not
    count. The model may be changed by the call.
    """
    inputs = made_copies(given)  # as the graph holds what is a leaf of autograd
    references = [(n, weakref.ref(storage)) for n, storage in enumerate(map(storage_of, inputs)) if storage is not None]
    with torch.enable_grad(), saved_until_done():
        results = tensor_leaves(leaf(module, inputs))
    inputs.clear()
    returned = {storage_of(t) for t in results}
    return [n for n, reference in references if (storage := reference()) is not None and storage not in returned]


def _bytes_aside(record: Record, leaf: Leaf, args: Any) -> int:
    """Bytes of the program's values that a leaf holds on to beside what it saves, which are noted in the record."""
    module, given, _ = args
    numbers = [] if record.in_place else held_aside(leaf, module, given)
    record.aside = [ref for n in numbers if (ref := record.arguments[n]) is not None]
    return storage_bytes(given[n] for n in numbers if record.arguments[n] is not None)


class _Call:
    """A call of a leaf that can be run forward and backward again and again.

    Gradients of parameters go no further than to where they would be added up.
    """

    def __init__(self, leaf: Leaf, args: Any, in_place: bool) -> None:
        self.leaf = leaf
        self.module, self.given, self.state = args
        self.parameters = [t for t in self.state if t.requires_grad and t.is_leaf]
        self.when_asked: Callable[[], None] | None = None  # something for the first time that may run again
        self.in_place = in_place
        self.results: list[torch.Tensor] = []
        self.found: list[tuple[int, torch.Tensor]] = []  # gradients, by the number of the given tensor
        self.seeds: ByStorage[int] = ByStorage()  # storage of a result's gradient -> number of the result
        self.seed_bytes = 0
        self.first_seed_bytes = 0  # of those that are there when it first asks for what was saved
        self.root: torch.Tensor | None = None
        self.ends: set[Any] = set()
        modules = [] if self.module is None else list(self.module.modules())
        cut_history(modules)
        self.put_back = members_put_back(modules)  # each call comes from where the first one does

    def take_parameters_apart(self) -> None:
        """Give the module parameters of its own: hooks of the others tell other ranks that gradients are ready."""
        if self.module is not None and are_several():
            self.parameters = [twin for twin in own_parameters(self.module) if twin.requires_grad]

    def prepare(self) -> None:
        """Fresh inputs."""
        self.put_back()
        self.results, self.found, self.root, self.ends = [], [], None, set()
        self.starts = [t.detach().requires_grad_(t.requires_grad) for t in self.given]
        # A tensor that starts a graph must not be written in place.
        self.inputs = [t.clone() if self.in_place else t for t in self.starts]

    def prepare_backward(self) -> bool:
        """Fresh inputs and a forward; whether there is a backward."""
        self.prepare()
        with saved_tensors_hooks(self._pack, self._unpack):
            self.forward()
        ends = [(number, t) for number, t in enumerate(self.results) if has_backward(t)]
        starts = [t for t in (*self.starts, *self.parameters) if t.requires_grad]
        if ends and starts:
            self.root = _Seed.apply(self, [number for number, _ in ends], *(t for _, t in ends))
            self.ends = {get_gradient_edge(t).node for t in starts} | leaf_nodes(self.root)
        return self.root is not None

    def forward(self) -> None:
        with torch.enable_grad():
            self.results = tensor_leaves(self.leaf(self.module, self.inputs))

    def forward_compared(self) -> list[Any]:
        """The forward as plans run it that call the leaf again: all that it saved is compared once it has returned.

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
        return [fingerprint(t) for t in (*made, *self.results)]

    def backward(self) -> None:
        root, self.root = self.root, None
        assert root is not None
        handles = [end.register_prehook(self._stop(end)) for end in self.ends]
        try:
            root.backward()
        finally:  # else no backward of the model would ever give these a gradient
            for handle in handles:
                handle.remove()

    def marked(self, mark: Callable[[str], None]) -> None:
        """The backward, with a mark whenever it asks for what a plan may have to compute again."""

        def asked() -> None:
            self.when_asked = None
            self.first_seed_bytes = sum(storage.nbytes() for storage in self.seeds)
            mark(ASKED)

        self.when_asked = asked
        self.backward()

    @untraced
    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @untraced
    def _unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.when_asked is None:
            return tensor
        here = {storage_id(t) for t in contents(tensor) if storage_of(t) is not None}
        stays = {storage_id(t) for t in self.state if storage_of(t) is not None}
        given = {storage_id(t) for t in self.inputs if storage_of(t) is not None}
        if not here <= stays if self.leaf.repeatable else here & given:
            self.when_asked()
        return tensor

    def result_bytes(self) -> int:
        """Bytes of the storages that the results do not share with what was given."""
        return storage_bytes(self.results, self.inputs)

    def _stop(self, end: Any) -> Any:
        number = next((n for n, start in enumerate(self.starts) if start is end.variable), None)

        def stop(gradients: tuple[torch.Tensor | None, ...]) -> tuple[None]:
            if number is not None and gradients[0] is not None:
                self.found.append((number, gradients[0].detach()))
            return (None,)

        return stop


def leaf_nodes(root: torch.Tensor) -> set[Any]:
    """The nodes of a graph that add gradients up in tensors."""
    _, nodes = gradient_targets([root], ())
    return {node for node in nodes if hasattr(node, "variable")}


class _Seed(torch.autograd.Function):
    """Makes the gradients of a call's results when its backward starts, and holds on to none."""

    @staticmethod
    def forward(ctx: Any, call: _Call, numbers: list[int], *ends: torch.Tensor) -> torch.Tensor:
        ctx.call, ctx.numbers = call, numbers
        ctx.like = [(tuple(t.shape), t.dtype, t.device) for t in ends]
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        made = [torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like]
        ctx.call.seeds = ByStorage({t.untyped_storage(): n for n, t in zip(ctx.numbers, made, strict=True)})
        ctx.call.seed_bytes = storage_bytes(made)
        return None, None, *made
