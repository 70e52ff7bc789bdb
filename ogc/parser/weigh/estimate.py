"""Weights of one operation without computing it: shapes only, time from a roofline.

An operation is run once, forward and backward, on meta tensors of the shapes that it was seen with (several times
faster than fake ones). Every operator that this dispatches to is seen by :class:`.meter.Meter`. Equal calls are looked
up. On a CPU, some are run all the same, for the bytes that their kernels take. What an operation saves can depend on
the device; for one that the model is not on, it is found out under FakeTensorMode, which needs no such device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.fx.node import map_aggregate

from ...errors import optional
from ...operators.gpus import gpu_of
from ...operators.low_memory import Extra
from ...operators.registry import Operator, is_elementwise, like, low_memory_variant, of, ones_like
from ...operators.weights import InputGradient, Place, Use, Weights
from ...program.opaque import Region, runs_once
from ...program.program import WithoutGrad, has_backward, storage_bytes, tensor_leaves
from ...program.tensors import Layout
from ...torch_state.allocator import can_measure
from ...torch_state.dispatch import out_of_mode
from ...torch_state.private import FakeTensorMode, OpOverload, sparse_parts
from ...torch_state.settings import cuda_devices
from ..forward.flat import saving
from ..passes.writes import COPIES, REBASED
from .backward import LONG_FLOPS, Relaid
from .call import Call, backward_measured, call_key, own_argument, with_measured_bytes
from .meter import HiddenBytes, Meter, rates_of
from .record import Record, SeenVariant, alike, saved_at

log = logging.getLogger(__name__)

FUNCTION_SECONDS = 4e-6
"""Of the host, for a call from Python of an operator that is one of ogc's: measured 2.6 us forward, 3.2 backward, and
that of PyTorch's operators inside, on a Xeon with torch 2.14."""


class Estimator:
    """Estimates operations for ``device``, which this machine may lack; the model is on ``home``.

    Args:
        device, home: see above.
        runs: run calls for the bytes of their kernels where shapes do not tell; or else take what rules say.
        gpu: the name of the one that is meant by a CUDA device.
        are_measured: leave out rules for what kernels on CUDA take, as bytes are measured.
    """

    def __init__(
        self,
        device: torch.device,
        home: torch.device,
        runs: bool = True,
        gpu: str | None = None,
        are_measured: bool = False,
    ) -> None:
        self.device, self.runs = device, runs
        self.elsewhere = device.type != home.type
        self.gpu = gpu_of(device, gpu)
        self.rates = rates_of(device.type, self.gpu)
        has_rules = self.gpu is not None and not are_measured
        self.by_rules = optional("sizing.cuda.kernels").Rules(self.gpu) if has_rules else None
        self.hidden: HiddenBytes | None = self.by_rules and self.by_rules.hidden_in_sums
        self.seen: dict[Any, Weights] = {}
        self.backwards: dict[Any, Relaid] = {}

    def relaid(self, record: Record, args: Any, kwargs: Any, is_measurable: bool = False) -> Relaid | None:
        """What weighs the backward of a call of an operator for gradients of other layouts.

        ``is_measurable`` says that its bytes can be measured on a device that is no CPU, too.
        """
        target = record.node.target
        if not isinstance(target, OpOverload) or not (is_measurable or self._can_measure()):
            return None
        key = call_key(target, args, kwargs), record.variant is None
        if key not in self.backwards:
            self.backwards[key] = Relaid(target, args, kwargs, partial(backward_measured, record, self.device))
        return self.backwards[key]

    def weigh(self, record: Record, args: Any, kwargs: Any) -> Weights:
        """The weights of a call of an operator with these arguments."""
        operator = record.node.target
        if isinstance(operator, Region):
            return self._region(operator, record, args, kwargs)
        kernel = operator.operator if isinstance(operator, WithoutGrad) else operator
        if not record.outputs or not isinstance(kernel, OpOverload):
            return Weights()
        key = call_key(operator, args, kwargs), record.variant is None
        if key not in self.seen:
            weights = self._by_kernel(record, args, kwargs)
            gradients = of(kernel).to_run_with
            is_known = kernel.namespace == "aten"  # what a library's kernels take is nowhere to be seen
            if gradients is None and not (is_known and not _may_copy_operands(kernel, weights, args, kwargs)):
                gradients = ones_like
            if gradients:
                weights = self._measured(weights, record, args, kwargs, gradients)
            use = Use(args, record.outputs[0].bytes, weights, self._can_measure())
            self.seen[key] = self._in_both_variants(record.variant, use, of(kernel))
        weights = self.seen[key]
        if REBASED not in record.node.meta or record.in_place or not weights.gradients:
            return weights
        return replace(
            weights, plain_working_bytes=COPIES * record.outputs[0].bytes
        )  # which runs it in place on a view

    def _in_both_variants(self, variant: SeenVariant | None, use: Use, operator: Operator) -> Weights:
        """What the registry says of a use, as PyTorch runs it and in its low-memory variant."""
        plain = operator.weigh(use) if self.device.type == "cpu" else use.weights
        if variant is None:
            return plain
        found = variant.target.weights(use, plain)
        forward, backward = (self._more_seconds(extra) for extra in variant.target.extra(use))
        found = replace(
            found,
            forward_seconds=found.forward_seconds + forward,
            backward_seconds=found.backward_seconds + backward,
        )
        return replace(plain, low_memory=found)

    def _more_seconds(self, extra: Extra) -> float:
        return FUNCTION_SECONDS + extra.bytes / self.rates.bytes + extra.calls * self.rates.launch_seconds

    def _can_measure(self) -> bool:
        """Whether a call can be run for the bytes of its CPU kernels."""
        return self.runs and self.device.type == "cpu" and not self.elsewhere and can_measure(self.device)

    def _measured(
        self, weights: Weights, record: Record, args: Any, kwargs: Any, gradients: Any = ones_like
    ) -> Weights:
        if not self._can_measure():
            return weights
        return with_measured_bytes(weights, Call(record, args, kwargs), self.device, gradients)

    def _region(self, region: Region, record: Record, args: Any, kwargs: Any) -> Weights:
        hidden = region.hidden_bytes if self.device.type == "cpu" else None
        weights = self._run(region.to_weigh(), args, kwargs, False, hidden)
        if region.is_run_for_bytes(weights.forward_flops):
            weights = self._measured(weights, record, args, kwargs)
        if not weights.gradients or weights.ready_bytes or not region.recomputes:
            return weights
        return replace(
            weights,
            backward_seconds=weights.backward_seconds - weights.forward_seconds,
            backward_flops=weights.backward_flops - weights.forward_flops,
            again_seconds=weights.forward_seconds,
            again_flops=weights.forward_flops,
        )

    def _by_kernel(self, record: Record, args: Any, kwargs: Any) -> Weights:
        """The weights of a call, by the kernel that runs on the device, and if the model is not there what it saves."""
        run = target = record.node.target
        forward = backward = 0
        if self.by_rules is not None and isinstance(target, OpOverload):
            forward, backward = self.by_rules.hidden(target, args)
            if (kernel := self.by_rules.kernel(target, args, kwargs)) is not None:
                run, backward = kernel.run, backward + kernel.working_bytes
        weights = self._run(run, args, kwargs, record.in_place)
        weights = replace(
            weights,
            scratch_bytes=weights.scratch_bytes + forward,
            working_bytes=weights.working_bytes + (backward if weights.gradients else 0),
        )
        if not self.elsewhere:
            return weights
        places, internal = None, record.saved.internal_bytes
        try:
            with out_of_mode(), FakeTensorMode():
                places, internal = _saved_places(run, args, kwargs, record.in_place, self.device)
        except (NotImplementedError, RuntimeError) as error:
            log.warning("%s is taken to save on %s what it saves here: %r", target, self.device, error)
        return replace(weights, internal_bytes=internal, saves=places)

    def _run(self, target: Any, args: Any, kwargs: Any, in_place: bool, hidden: HiddenBytes | None = None) -> Weights:
        # With a mask, shapes depend on data, which meta tensors do not have.
        if not of(target).needs_data(tensor_leaves(args, kwargs)):
            try:
                found = self._run_on(pretended, target, args, kwargs, in_place, hidden)
                return replace(found, on_meta=all(gradient.layout for gradient in found.gradients))
            except (NotImplementedError, RuntimeError) as error:
                # Some operators have no kernel for meta tensors, or want certain operands on a CPU; else it is news.
                level = logging.INFO if "meta" in str(error).lower() else logging.WARNING
                log.log(level, "%s is weighed on real tensors, as it fails on shapes alone: %r", target, error)
        with torch.random.fork_rng(cuda_devices()):
            return self._run_on(own_argument, target, args, kwargs, in_place, hidden)

    def _run_on(
        self,
        pretend: Callable[[Any, bool], Any],
        target: Any,
        args: Any,
        kwargs: Any,
        in_place: bool,
        hidden: HiddenBytes | None,
    ) -> Weights:
        """The weights of a call with such arguments."""
        meter = Meter(self.rates.seconds, hidden or self.hidden, self.device.type == "cpu", pretend is pretended)
        with out_of_mode(), torch.enable_grad():
            given = map_aggregate((args, kwargs), lambda leaf: pretend(leaf, in_place))
            saved: list[torch.Tensor] = []
            tensors = tensor_leaves(given)
            # What is written in place is another tensor afterwards.
            starts: list[tuple[int, Any]] = [
                (n, get_gradient_edge(t) if in_place else t) for n, t in enumerate(tensors) if t.requires_grad
            ]
            with saving(saved, asked=meter.asked), meter:
                result = target(*given[0], **given[1])
            outputs = tensor_leaves(result)
            forward = meter.take()
            kept = storage_bytes(outputs + saved, tensors)
            ready = max(0, forward.held_bytes - kept) if runs_once(target) else 0
            scratch = max(0, forward.peak_bytes - kept - ready)
            weights = Weights(scratch, forward.seconds, forward.flops, ready_bytes=ready)
            ends = {n: t for n, t in enumerate(outputs) if has_backward(t)}
            if not ends or not starts:
                return weights
            seeds = list(map(like, ends.values()))
            with meter:
                edges = [start for _, start in starts]
                found = torch.autograd.grad([*ends.values()], edges, seeds, allow_unused=True)
            backward = meter.take()
            shared = {seed.untyped_storage(): n for n, seed in zip(ends, seeds, strict=True)}
            pairs = [(n, gradient) for (n, _), gradient in zip(starts, found, strict=True) if gradient is not None]
            return replace(
                weights,
                working_bytes=backward.peak_bytes,
                first_bytes=backward.first_bytes,
                backward_seconds=backward.seconds,
                backward_flops=backward.flops,
                gradients=input_gradients(pairs, shared),
            )


def input_gradients(
    found: Sequence[tuple[int, torch.Tensor]], of_results: Mapping[torch.UntypedStorage, int]
) -> tuple[InputGradient, ...]:
    """What there is to know of the gradients of arguments, by number, and of results, by their storages."""
    groups: dict[Any, int] = {}
    gradients = []
    for argument, gradient in found:
        storage: Any = gradient.untyped_storage() if gradient.layout is torch.strided else None
        is_sparse = storage is None
        size = storage_bytes(sparse_parts(gradient) if is_sparse else [gradient])
        group = groups.setdefault(argument if is_sparse else storage, len(groups))
        layout, shares = (None, None) if is_sparse else (Layout.of(gradient), of_results.get(storage))
        gradients.append(InputGradient(argument, size, shares, group, layout=layout))
    return tuple(gradients)


def _may_copy_operands(operator: OpOverload, weights: Weights, args: Any, kwargs: Any) -> bool:
    """Whether kernels may first make an operand contiguous, which shapes do not show.

    Not so of what goes entry by entry, moves entries, or has a rule of its own; nor is a long product run for it.
    """
    special = of(operator)
    is_seen = is_elementwise(operator) or operator.is_view or special.moves or special.has_rule
    is_long = weights.forward_flops > LONG_FLOPS
    return not (is_seen or is_long or all(t.is_contiguous() for t in tensor_leaves(args, kwargs)))


class Variants:
    """Finds the low-memory variants of operations on a device, and what each saves, seen on tensors without data."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seen: dict[Any, tuple[tuple[Place | None, ...], int]] = {}

    def of(self, record: Record, args: Any, kwargs: Any) -> SeenVariant | None:
        """The form of a recorded call, if it has one that pays for these arguments."""
        variant = low_memory_variant(record.node.target, self.device)
        if variant is None or not variant.pays(*args):
            return None
        key = call_key(variant, args, kwargs)
        if key not in self.seen:
            self.seen[key] = _saved_places(variant, args, kwargs, record.in_place)
        places, internal_bytes = self.seen[key]
        return SeenVariant(variant, saved_at(record, places), internal_bytes)


def _saved_places(
    target: Any, args: Any, kwargs: Any, in_place: bool, device: torch.device | str = "meta"
) -> tuple[tuple[Place | None, ...], int]:
    """Where each saved tensor of a call on a device lies, None for one of its own, and the bytes of those."""
    saved: list[torch.Tensor] = []
    with torch.enable_grad(), saving(saved):
        given = map_aggregate((args, kwargs), lambda leaf: pretended(leaf, in_place, device))
        result = target(*given[0], **given[1])
    known = [(t, (True, n)) for n, t in enumerate(tensor_leaves(result))]
    known += [(t, (False, n)) for n, t in enumerate(tensor_leaves(given))]
    places = tuple(alike(tensor, known) for tensor in saved)
    return places, storage_bytes(tensor for tensor, place in zip(saved, places, strict=True) if place is None)


def pretended(leaf: Any, in_place: bool, device: torch.device | str = "meta") -> Any:
    """An argument as it is on another device."""
    if not isinstance(leaf, torch.Tensor):
        return torch.device(device) if isinstance(leaf, torch.device) else leaf
    shadow = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)
    shadow.requires_grad_(leaf.requires_grad)
    # An opaque module could not be written in place.
    return shadow.clone() if in_place and leaf.requires_grad else shadow
