"""Weights of one operation by running it: time on the device's clock, bytes from its allocator.

Each distinct call (operator, shapes, constants) is run by itself, forward and backward, on the tensors that
it was seen with. What it needs beyond inference is the memory of one operation.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from ..allocator import peak_bytes
from ..lean import Lean
from ..program import LIVE_ARGUMENTS, operator_name, tensor_leaves
from .estimate import Estimator, Weights, call_key
from .observe import Record

REPEATS = 3
LONG_SECONDS = 0.05


class Measurer:
    """Measures operations on the device that the model lives on; gradients' layout and FLOPs are estimated."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.estimator = Estimator(device, device)
        self.seen: dict[Any, Weights] = {}

    def weigh(self, node: torch.fx.Node, args: Any, kwargs: Any, record: Record) -> Weights:
        """The weights of the call ``node.target(*args, **kwargs)``."""
        estimate = self.estimator.weigh(node, args, kwargs, record)
        if not record.writes and not record.saves:
            return estimate  # makes nothing
        key = call_key(node.target, args, kwargs)
        if key not in self.seen:
            devices = [self.device] if self.device.type == "cuda" else []
            with torch.random.fork_rng(devices):
                self.seen[key] = self._run(node, args, kwargs, record, estimate)
        return self.seen[key]

    def _run(self, node: torch.fx.Node, args: Any, kwargs: Any, record: Record, estimate: Weights) -> Weights:
        call = _Call(node, args, kwargs, in_place=record.in_place)
        peak, seconds = self.measure(call.prepare, call.forward)
        weights = replace(estimate, scratch_bytes=max(0, peak - call.own_bytes()), forward_seconds=seconds)
        if call.ends() and call.starts:
            peak, seconds = self.measure(lambda: call.prepare(with_gradients=True), call.backward)
            # A lean backward is measured as one, in circumstances that it may not meet: more than was
            # estimated is news, less is not.
            known = estimate.plain is not None and peak <= max(estimate.working_bytes, estimate.late_bytes)
            working = estimate.working_bytes if known else peak
            again = weights.forward_seconds if estimate.again_seconds else 0.0
            if isinstance(node.target, Lean) and node.target.kind == "convolution":
                # Whatever the estimate says, neither half of it takes more than the whole was seen to.
                working = min(working, peak)
                weights = replace(weights, late_bytes=min(weights.late_bytes, peak))
            weights = replace(
                weights, working_bytes=working, backward_seconds=max(0.0, seconds - again), again_seconds=again
            )
            if estimate.plain is not None:
                plain = max(peak, estimate.plain.working_bytes)
                weights = replace(weights, plain=replace(estimate.plain, working_bytes=plain))
        return weights

    def measure(self, prepare: Callable[[], object], run: Callable[[], object]) -> tuple[int, float]:
        """Peak bytes and median seconds of ``run``; a long run is timed once."""
        times: list[float] = []

        def timed() -> None:
            self._synchronize()
            start = time.perf_counter()
            run()
            self._synchronize()
            times.append(time.perf_counter() - start)

        prepare()
        peak = peak_bytes(timed, self.device)
        if times[0] > LONG_SECONDS:
            return peak, times[0]
        times.clear()
        for _ in range(REPEATS):
            prepare()
            timed()
        return peak, median(times)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class _Call:
    """One call with inputs of its own, ready to run forward and backward again and again."""

    def __init__(self, node: torch.fx.Node, args: Any, kwargs: Any, in_place: bool) -> None:
        self.target: Any = node.target
        self.leaves, self.tree = pytree.tree_flatten((args, kwargs))
        live = [args[p] for p in LIVE_ARGUMENTS.get(operator_name(node), ()) if p < len(args)]
        self.copied = [any(leaf is one for one in live) or in_place for leaf in self.leaves]
        self.result: Any = None
        self.saved: list[torch.Tensor] = []

    def prepare(self, with_gradients: bool = False) -> None:
        """Fresh inputs; with gradients, the forward is run too and the gradients of its results made."""
        self.result, self.saved, self.gradients = None, [], None
        self.inputs = [self._input(leaf, copied) for leaf, copied in zip(self.leaves, self.copied, strict=True)]
        self.starts = [t for t in self.inputs if isinstance(t, torch.Tensor) and t.requires_grad]
        if with_gradients:
            self.forward()
            self.saved = []
            self.gradients = [torch.ones_like(end) for end in self.ends()]

    def forward(self) -> None:
        args, kwargs = pytree.tree_unflatten(self.inputs, self.tree)
        self.edges = [torch.autograd.graph.get_gradient_edge(t) for t in self.starts]
        with torch.enable_grad(), saved_tensors_hooks(self._pack, lambda tensor: tensor):
            self.result = self.target(*args, **kwargs)

    def backward(self) -> Any:
        # Kept by the caller's frame only, so that they are freed when it is done.
        return torch.autograd.grad(self.ends(), self.edges, self.gradients, allow_unused=True)

    def ends(self) -> list[torch.Tensor]:
        return [t for t in tensor_leaves(self.result) if t.requires_grad]

    def own_bytes(self) -> int:
        """Bytes of what the forward made and keeps: its results and what it saves."""
        given = {t.untyped_storage()._cdata for t in self.inputs if isinstance(t, torch.Tensor)}
        made = tensor_leaves(self.result) + self.saved
        kept = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in made}
        return sum(size for key, size in kept.items() if key not in given)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.saved.append(tensor.detach())
        return tensor.detach()

    def _input(self, leaf: Any, copied: bool) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        own = leaf.detach().clone() if copied else leaf.detach()
        if leaf.requires_grad:
            own.requires_grad_()
        # An operation that writes in place must not be given a leaf.
        return own.clone() if copied and leaf.requires_grad else own
