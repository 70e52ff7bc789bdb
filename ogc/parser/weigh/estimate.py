"""Weights of one operation without computing it: shapes only, time from a roofline.

An operation is run once, forward and backward, on meta tensors of the shapes that it was seen with (several times
faster than fake ones, and all but one weight depends on shapes alone). Every operator that this dispatches to is seen
by :class:`.meter.Meter`, which adds up FLOPs and bytes moved and keeps the most bytes of fresh storage alive at once.
Equal calls are looked up, not run again. On a CPU, attention and some convolutions are run all the same, for the bytes
that their kernels take. What an operation saves can depend on the device (a dropout mask has one byte or four); for a
device that the model is not on, it is found out under FakeTensorMode, which needs no such device.
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

from ...operators.gpus import gpu_of
from ...operators.low_memory import Extra
from ...operators.registry import Operator, is_elementwise, like, of, ones_like
from ...operators.weights import InputGradient, Use, Weights
from ...optional import optional
from ...program.leaf import Region, runs_once
from ...program.program import WithoutGrad, has_backward, storage_bytes, tensor_leaves
from ...program.tensors import Layout, is_dense
from ...torch_state.allocator import can_measure
from ...torch_state.dispatch import out_of_mode
from ...torch_state.private import FakeTensorMode, OpOverload, is_view, sparse_parts
from ...torch_state.settings import cuda_devices
from ..forward.flat import saving
from ..passes.writes import COPIES, REBASED
from .backward.again import LONG_FLOPS, Again, Layouts
from .calls import Call, backward_measured, call_key, own_argument, with_measured_bytes
from .forms import pretended, saved_places
from .meter import HiddenBytes, Meter, rates_of
from .record import Record, SeenForm

log = logging.getLogger(__name__)


FUNCTION_SECONDS = 4e-6
"""Of the host, for a call from Python of an operator that is one of ogc's: measured 2.6 us forward, 3.2 backward, and
that of PyTorch's operators inside, on a Xeon with torch 2.14."""


class Estimator:
    """Estimates operations for ``device``, which this machine may lack; the model is on ``home``.

    Without ``runs`` no call is run for the bytes of its kernels: rules have to do, right or wrong. ``gpu`` names the
    one that is meant by a CUDA device. Where bytes ``are_measured``, rules for what its kernels take are left out.
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
        self.backwards: dict[Any, Again] = {}

    def again(self, record: Record, args: Any, kwargs: Any, can_measure: bool = False) -> Again | None:
        """What weighs the backward of a call of an operator for gradients that are laid out in another way.

        ``can_measure`` says that its bytes can be measured on a device that is no CPU, too.
        """
        target = record.node.target
        if not isinstance(target, OpOverload):
            return None
        key = call_key(target, args, kwargs), record.form is None
        if key not in self.backwards:
            in_place = record.in_place  # now: its result may become a value of its own

            def run(args: Any, kwargs: Any, layouts: Layouts) -> Weights:
                return self._run_on(pretended, target, args, kwargs, in_place, None, layouts)

            measure = partial(backward_measured, record, self.device) if can_measure or self._can_measure() else None
            self.backwards[key] = Again(target, args, kwargs, run, measure)
        return self.backwards[key]

    def weigh(self, record: Record, args: Any, kwargs: Any) -> Weights:
        """The weights of a call of an operator with these arguments."""
        node = record.node
        operator = node.target
        if isinstance(operator, Region):
            return self._region(operator, record, args, kwargs)
        kernel = operator.operator if isinstance(operator, WithoutGrad) else operator
        if not record.outputs or not isinstance(kernel, OpOverload):
            return Weights(gradients=_pass_through(record))
        key = call_key(node.target, args, kwargs), record.form is None
        if key not in self.seen:
            weights = self._by_kernel(record, args, kwargs)
            gradients = of(kernel).to_run_with
            is_known = kernel.namespace == "aten"  # what a library's kernels take is nowhere to be seen
            if gradients is None and not (is_known and not _may_copy_operands(kernel, weights, args, kwargs)):
                gradients = ones_like
            if gradients and self._can_measure():
                weights = with_measured_bytes(weights, Call(record, args, kwargs, gradients=gradients))
            use = Use(args, record.output_bytes[0], weights, self._can_measure())
            self.seen[key] = self._in_both_forms(record.form, use, of(kernel))
        return _with_plain_copies(node, record, self.seen[key])

    def _in_both_forms(self, form: SeenForm | None, use: Use, operator: Operator) -> Weights:
        """What the operator's room says of a use, as PyTorch runs it and in its low-memory form."""
        plain = operator.weigh(use) if self.device.type == "cpu" else use.weights
        if form is None:
            return plain
        found = form.target.weights(use, plain)
        forward, backward = (self._more_seconds(extra) for extra in form.target.extra(use))
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

    def _region(self, region: Region, record: Record, args: Any, kwargs: Any) -> Weights:
        hidden = region.hidden_bytes if self.device.type == "cpu" else None
        weights = self._run(region.to_weigh(), args, kwargs, False, hidden)
        if region.is_run_for_bytes(weights.forward_flops) and self._can_measure():
            weights = with_measured_bytes(weights, Call(record, args, kwargs))
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
        target = record.node.target
        kernel, hidden = None, (0, 0)
        if self.by_rules is not None and isinstance(target, OpOverload):
            kernel, hidden = self.by_rules.kernel(target, args, kwargs), self.by_rules.hidden(target, args)
        run = target if kernel is None else kernel.run
        weights = self._run(run, args, kwargs, record.in_place)
        forward, backward = hidden
        if kernel is not None:
            backward += kernel.working_bytes
        weights = replace(
            weights,
            scratch_bytes=weights.scratch_bytes + forward,
            working_bytes=weights.working_bytes + (backward if weights.gradients else 0),
        )
        return self._with_what_it_saves(weights, run, record, args, kwargs) if self.elsewhere else weights

    def _with_what_it_saves(self, weights: Weights, run: Any, record: Record, args: Any, kwargs: Any) -> Weights:
        try:
            with out_of_mode(), FakeTensorMode():
                places, internal = saved_places(run, args, kwargs, record.in_place, self.device)
        except (NotImplementedError, RuntimeError) as error:
            target = record.node.target
            log.warning("%s is taken to save on %s what it saves here: %r", target, self.device, error)
            places, internal = None, record.internal_bytes
        return replace(weights, internal_bytes=internal, saves=places)

    def _run(self, target: Any, args: Any, kwargs: Any, in_place: bool, hidden: HiddenBytes | None = None) -> Weights:
        # With a mask, shapes depend on data, which meta tensors do not have.
        if not of(target).needs_data(tensor_leaves(args, kwargs)):
            try:
                return self._run_on(pretended, target, args, kwargs, in_place, hidden)
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
        layouts: Layouts | None = None,
    ) -> Weights:
        is_cpu, on_meta = self.device.type == "cpu", pretend is pretended
        meter = Meter(self.rates.seconds, hidden or self.hidden, is_cpu, on_meta)
        with out_of_mode(), torch.enable_grad():
            given = map_aggregate((args, kwargs), lambda leaf: pretend(leaf, in_place))
            saved: list[torch.Tensor] = []
            tensors = tensor_leaves(given)
            # What is written in place is another tensor afterwards.
            starts = [(n, get_gradient_edge(t) if in_place else t) for n, t in enumerate(tensors) if t.requires_grad]
            with saving(saved, asked=meter.asked), meter:
                result = target(*given[0], **given[1])
            outputs = tensor_leaves(result)
            forward = meter.take()
            kept = storage_bytes(outputs + saved, tensors)
            ready = max(0, forward.held_bytes - kept) if runs_once(target) else 0
            scratch = max(0, forward.peak_bytes - kept - ready)
            ends = [t for t in outputs if has_backward(t)]
            weights = Weights(scratch, forward.seconds, forward.flops, ready_bytes=ready)
            if layouts is None:
                gradients = {id(end): like(end) for end in ends}
            else:
                numbered = ((layouts.get(n), t) for n, t in enumerate(outputs) if has_backward(t))
                gradients = {
                    id(t): layout.zeros(t.dtype, t.device.type) for layout, t in numbered if layout is not None
                }
            return self._with_backward(weights, outputs, gradients, starts, meter) if gradients and starts else weights

    def _with_backward(
        self, weights: Weights, outputs: list[torch.Tensor], given: dict[int, torch.Tensor], starts: Any, meter: Meter
    ) -> Weights:
        """Run it backward from the gradients that its outputs are given, by identity.

        ``starts`` are numbers of arguments, and the tensors or their gradient edges.
        """
        ends = [t for t in outputs if id(t) in given]
        with meter:
            found = torch.autograd.grad(ends, [start for _, start in starts], list(given.values()), allow_unused=True)
        backward = meter.take()
        shared = {given[id(t)].untyped_storage(): n for n, t in enumerate(outputs) if id(t) in given}
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
        if gradient.layout is not torch.strided:
            size = sum(part.untyped_storage().nbytes() for part in sparse_parts(gradient))
            group = groups.setdefault(argument, len(groups))
            gradients.append(InputGradient(argument, size, None, group, dense=False, contiguous=False))
            continue
        storage = gradient.untyped_storage()
        gradients.append(
            InputGradient(
                argument=argument,
                bytes=storage.nbytes(),
                shares=of_results.get(storage),
                group=groups.setdefault(storage, len(groups)),
                dense=is_dense(gradient),
                contiguous=gradient.is_contiguous(),
                is_view=is_view(gradient),
                layout=Layout.of(gradient),
            )
        )
    return tuple(gradients)


def _may_copy_operands(operator: OpOverload, weights: Weights, args: Any, kwargs: Any) -> bool:
    """Whether kernels may first make an operand contiguous, which shapes do not show.

    Not so of what goes entry by entry, moves entries, or has a rule of its own; nor is a long product run for it.
    """
    special = of(operator)
    is_seen = is_elementwise(operator) or operator.is_view or special.moves or special.has_rule
    is_long = weights.forward_flops > LONG_FLOPS
    return not (is_seen or is_long or all(t.is_contiguous() for t in tensor_leaves(args, kwargs)))


def _with_plain_copies(node: torch.fx.Node, record: Record, weights: Weights) -> Weights:
    """What an operator that the plain model runs in place on a view takes there."""
    if REBASED not in node.meta or record.in_place or not weights.gradients:
        return weights
    return replace(weights, plain_working_bytes=COPIES * record.output_bytes[0])


def _pass_through(record: Record) -> tuple[InputGradient, ...]:
    """Python-level operations (taking an item) hand the gradient on as it is."""
    if len(record.outputs) == 1 and len(record.arguments) == 1 and record.differentiable[0]:
        return (InputGradient(0, record.output_bytes[0], shares=0),)
    return ()
