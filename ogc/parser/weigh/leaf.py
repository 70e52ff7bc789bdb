"""Weights of an opaque module: it is run, forward and backward, and what it holds is read off the allocator."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ...operators.weights import Weights
from ...program.copies import made_copies
from ...program.leaf import Leaf
from ...program.program import device_of_model, storage_bytes, storage_of, tensor_leaves
from ...program.wrapped import contents
from ...torch_state.allocator import allocated_bytes, can_measure
from ...torch_state.compare import fingerprint
from ...torch_state.no_trace import cut_history, members_put_back, untouched, unwatched
from ...torch_state.private import storage_id, untraced
from ...torch_state.ranks.collectives import are_several
from ...torch_state.ranks.shards import own_parameters
from ..forward.flat import saved_until_done
from .call import Call
from .estimate import Estimator, input_gradients
from .measure import Measurer
from .meter import Meter, Reading, Seconds
from .record import Record

Profiler = Estimator | Measurer
"""What weighs operators."""


def weigh(model: torch.nn.Module, profiler: Profiler, record: Record, args: Any, kwargs: Any) -> Weights:
    """The weights of one call, be it of an operator or of an opaque module; the model is afterwards as before.

    A module's bytes are those of the device that the model is on; its time and FLOPs come from the profiler.
    """
    if not isinstance(record.node.target, Leaf):
        weights = profiler.weigh(record, args, kwargs)
        record.relaid = profiler.relaid(record, args, kwargs) if weights.gradients else None
        return weights
    home = device_of_model(model, args[1])
    measurer = profiler if isinstance(profiler, Measurer) else None
    seconds = (profiler.estimator if isinstance(profiler, Measurer) else profiler).rates.seconds
    with untouched(model):
        call = _LeafCall(record, args)
        call.prepare()
        forward = _reading(call, seconds, call.forward)
        call.prepare()
        peak, compared, held = _peaks(call, home, forward)
        weights = Weights(
            scratch_bytes=max(0, peak - held, compared - held),
            plain_scratch_bytes=max(0, peak - held),
            internal_bytes=max(0, held - call.own_bytes()) + _bytes_aside(record, call),
            forward_seconds=measurer.seconds(call.forward, call.prepare) if measurer else forward.seconds,
            forward_flops=forward.flops,
        )
        if not call.prepare_backward():
            return weights
        backward = _reading(call, seconds, call.backward)
        call.prepare()
        working, first = max(0, backward.peak_bytes - call.seed_bytes), 0
        if can_measure(home):
            working, first = call.backward_bytes(home)
        return replace(
            weights,
            working_bytes=working,
            first_bytes=first,
            gradients=input_gradients(call.found, call.seeds),
            backward_seconds=measurer.seconds(call.backward, call.prepare_backward) if measurer else backward.seconds,
            backward_flops=backward.flops,
        )


def _reading(call: _LeafCall, seconds: Seconds, run: Callable[[], object]) -> Reading:
    """What ``run()`` costs; where nobody may look at its operators, by the clock alone."""
    if call.module not in unwatched:
        with Meter(seconds, on_meta=False) as meter:
            run()
        return meter.take()
    start = time.perf_counter()
    run()
    return Reading(time.perf_counter() - start)


def _peaks(call: _LeafCall, home: torch.device, forward: Reading) -> tuple[int, int, int]:
    """The most bytes of a call, of one that is compared with another, and those that stay."""
    if not can_measure(home):  # what PyTorch's operators allocate has to do
        return forward.peak_bytes, forward.peak_bytes, forward.held_bytes
    peak, held = allocated_bytes(call.forward, home, call.prepare)
    compared = allocated_bytes(call.forward_compared, home, call.prepare)[0] if call.leaf.repeatable else peak
    return peak, compared, held


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


def _bytes_aside(record: Record, call: _LeafCall) -> int:
    """Bytes of the program's values that a module holds on to beside what it saves, which are noted in the record."""
    numbers = [] if record.in_place else held_aside(call.leaf, call.module, call.leaves)
    held = [(ref, call.leaves[n]) for n in numbers if (ref := record.arguments[n].value) is not None]
    record.aside = [ref for ref, _ in held]
    return storage_bytes(tensor for _, tensor in held)


class _LeafCall(Call):
    """A call of an opaque module."""

    def __init__(self, record: Record, args: Any) -> None:
        self.module, given, self.state = args
        super().__init__(record, given, {})
        self.leaf: Leaf = record.node.target  # type: ignore[assignment]
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
        return self.leaf(self.module, self.inputs)

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
        return [fingerprint(t) for t in (*made, *self.results)]

    def asks(self, tensor: torch.Tensor) -> bool:
        here = {storage_id(t) for t in contents(tensor) if storage_of(t) is not None}
        known = {
            storage_id(t) for t in (self.state if self.leaf.repeatable else self.inputs) if storage_of(t) is not None
        }
        return not here <= known if self.leaf.repeatable else bool(here & known)

    def counted_seed_bytes(self) -> int:
        """Of those that are there: others may hold them in a step."""
        return sum(storage.nbytes() for storage in self.seeds)

    @untraced
    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()
