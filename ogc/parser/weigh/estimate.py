"""Weights of one operation without computing it: shapes only, time from a roofline.

An operation is run once, forward and backward, on meta tensors of the shapes that it was seen with (several
times faster than fake ones, and all but one weight depends on shapes alone). Every operator that this
dispatches to is seen by :class:`_Meter`, which adds up FLOPs and bytes moved and keeps the most bytes of
fresh storage alive at once. Equal calls are looked up, not run again. On a CPU, attention and some
convolutions are run all the same, for the bytes that their kernels take. What an operation saves can depend on
the device (a dropout mask has one byte or four); for a device that the model is not on, it is found out
under FakeTensorMode, which needs no such device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.fx.node import map_aggregate
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import flop_registry

from ...operators.lean import INDEX_BYTES, Lean, channels_at_once, images_at_once, repeats_exactly
from ...operators.sliced import Sliced
from ...program.program import has_history, operator_name, storage_of, tensor_leaves
from ...program.without_grad import WithoutGrad
from ...torch_state.allocator import can_measure
from ...torch_state.private import (
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    decomposes,
    id_of_storage,
    is_view,
    schema_of,
    sparse_parts,
    storage_id,
)
from ...torch_state.random_state import cuda_devices
from ..passes.rebased import COPIES, REBASED
from .calls import Call, measured_bytes, own_argument
from .convolution import ConvolutionBytes, estimated, has_rule, in_parts, measured, with_partial_sums
from .gradients import InputGradient
from .record import Record, is_dense


@dataclass(frozen=True)
class Rates:
    """What a device does per second; only the ratio of the two decides a plan."""

    flops: float
    bytes: float
    launch_seconds: float


RATES = {
    "cpu": Rates(flops=1.2e11, bytes=1.0e10, launch_seconds=2e-6),
    "cuda": Rates(flops=3.0e13, bytes=1.5e12, launch_seconds=5e-6),
}


@dataclass(frozen=True)
class Weights:
    """What one operation costs, forward and backward (bytes, seconds, FLOPs)."""

    scratch_bytes: int = 0
    forward_seconds: float = 0.0
    forward_flops: int = 0
    working_bytes: int = 0
    late_bytes: int = 0  # most bytes its backward allocates once it has let go of what it saved
    backward_seconds: float = 0.0
    backward_flops: int = 0
    again_seconds: float = 0.0  # of a forward that is part of its backward, beyond the above
    again_flops: int = 0
    repeat_seconds: float | None = None  # of a forward whose internal tensors are there, if that is quicker
    gradients: tuple[InputGradient, ...] = ()
    internal_bytes: int | None = None  # None: as observed
    saved_arguments: tuple[int, ...] = ()  # tensors that are saved besides those that were observed
    plain: Weights | None = None  # of the operator that a lean one stands for


class Estimator:
    """Estimates operations for ``device``, which this machine may lack; the model is on ``home``."""

    def __init__(self, device: torch.device, home: torch.device) -> None:
        self.device = device
        self.elsewhere = device.type != home.type
        self.rates = RATES.get(device.type, RATES["cuda"])
        self.seen: dict[Any, Weights] = {}

    def weigh(self, node: torch.fx.Node, args: Any, kwargs: Any, record: Record) -> Weights:
        """The weights of the call ``node.target(*args, **kwargs)``."""
        lean = node.target if isinstance(node.target, Lean) else None
        operator = lean.operator if lean else node.target
        if isinstance(operator, Sliced):
            return self._sliced(node, args, kwargs, record)
        kernel = operator.operator if isinstance(operator, WithoutGrad) else operator
        if not record.outputs or not isinstance(kernel, OpOverload):
            return Weights(gradients=_pass_through(record))
        key = call_key(node.target, args, kwargs)
        if key not in self.seen:
            weights = self._run(operator, args, kwargs, record.in_place)
            if self.elsewhere and record.internal_bytes:
                weights = replace(weights, internal_bytes=self._internal_bytes(operator, args, kwargs))
            if kernel in _OTHER_KERNELS and self._can_measure():
                scratch, working = measured_bytes(Call(node, args, kwargs, record.in_place))
                weights = replace(weights, scratch_bytes=scratch, working_bytes=working)
            sizes = self._convolution_bytes(kernel, args, record, weights)
            if self.device.type == "cpu":
                weights = _with_kernel_copies(operator_name(node.target), args, record, weights, sizes)
            if lean and lean.pays(*args):
                found = _LEAN[lean.kind](args, record, weights, sizes and self._in_parts(args, record, weights, sizes))
                weights = replace(found, plain=found.plain or weights)
            self.seen[key] = weights
        return _with_plain_copies(node, record, self.seen[key])

    def _can_measure(self) -> bool:
        """Whether a call can be run for the bytes of its CPU kernels."""
        return self.device.type == "cpu" and not self.elsewhere and can_measure(self.device)

    def _convolution_bytes(self, operator: Any, args: Any, record: Record, weights: Weights) -> ConvolutionBytes | None:
        """What oneDNN allocates for a convolution on a CPU; None for anything else."""
        if operator is not torch.ops.aten.convolution.default or self.device.type != "cpu":
            return None
        wanted = [n in {gradient.argument for gradient in weights.gradients} for n in range(3)]
        return self._bytes_of_convolution(args, record.output_bytes[0], weights.forward_flops, wanted)

    def _bytes_of_convolution(self, args: Any, result: int, flops: int, wanted: Sequence[bool]) -> ConvolutionBytes:
        can_run = self._can_measure()
        if can_run and not has_rule(args[0], args[1], args[3:9], flops):
            return measured(args, wanted)
        sizes = estimated(args[0], args[1], result, args[3:9])
        if can_run and wanted[1]:
            sizes = with_partial_sums(sizes, args, result, flops)
        return sizes if wanted[0] else replace(sizes, input_phase=0)

    def _in_parts(self, args: Any, record: Record, weights: Weights, whole: ConvolutionBytes) -> ConvolutionBytes:
        """The same for a lean convolution."""
        result = record.output_bytes[0]

        def weigh(part: Sequence[Any], result_of_part: int) -> ConvolutionBytes:
            flops = weights.forward_flops * result_of_part // result
            return self._bytes_of_convolution(part, result_of_part, flops, (True, False, False))

        return in_parts(whole, args[:9], result, weigh)

    def _sliced(self, node: torch.fx.Node, args: Any, kwargs: Any, record: Record) -> Weights:
        assert isinstance(node.target, Sliced)
        plain = node.target.with_plain_operators()
        weights = self._run(plain, args, kwargs, False, kernel_copies=self.device.type == "cpu")
        if self._can_measure() and weights.forward_flops < _SMALL_STRETCH_FLOPS:
            scratch, working = measured_bytes(Call(node, args, kwargs, record.in_place))
            weights = replace(weights, scratch_bytes=scratch, working_bytes=working)
        if not weights.gradients:
            return weights
        return replace(
            weights,
            backward_seconds=weights.backward_seconds - weights.forward_seconds,
            backward_flops=weights.backward_flops - weights.forward_flops,
            again_seconds=weights.forward_seconds,
            again_flops=weights.forward_flops,
        )

    def _internal_bytes(self, target: Any, args: Any, kwargs: Any) -> int:
        """Bytes that the operation saves on the device besides its arguments and results."""

        def fake(leaf: Any) -> Any:
            return _pretended(leaf, True, self.device)

        saved: list[torch.Tensor] = []
        with FakeTensorMode(), torch.enable_grad(), _saving(saved):
            given = map_aggregate((args, kwargs), fake)
            result = target(*given[0], **given[1])
        known = {storage_id(t) for t in tensor_leaves(given, result)}
        internal = {storage_id(t): t.untyped_storage().nbytes() for t in saved}
        return sum(size for key, size in internal.items() if key not in known)

    def _run(self, target: Any, args: Any, kwargs: Any, in_place: bool, kernel_copies: bool = False) -> Weights:
        on_cpu = self.device.type == "cpu"
        # With a mask, shapes depend on data, which meta tensors do not have.
        if target not in _INDEXING or not any(t.dtype in _MASKS for t in tensor_leaves(args, kwargs)):
            try:
                meter = _Meter(self.rates, kernel_copies, on_cpu)
                return self._run_on(_pretended, target, args, kwargs, in_place, meter)
            except (NotImplementedError, RuntimeError):
                pass  # some operators have no kernel for meta tensors, or want certain operands on a CPU
        meter = _Meter(self.rates, kernel_copies, on_cpu, on_meta=False)
        with torch.random.fork_rng(cuda_devices()):
            return self._run_on(own_argument, target, args, kwargs, in_place, meter)

    def _run_on(
        self, pretend: Callable[[Any, bool], Any], target: Any, args: Any, kwargs: Any, in_place: bool, meter: _Meter
    ) -> Weights:
        with torch.enable_grad():
            given = map_aggregate((args, kwargs), lambda leaf: pretend(leaf, in_place))
            saved: list[torch.Tensor] = []
            tensors = tensor_leaves(given)
            # What is written in place is another tensor afterwards.
            starts = [(n, get_gradient_edge(t) if in_place else t) for n, t in enumerate(tensors) if t.requires_grad]
            with _saving(saved), meter:
                result = target(*given[0], **given[1])
            outputs = tensor_leaves(result)
            own = {storage_id(t): t.untyped_storage().nbytes() for t in outputs + saved}
            for tensor in tensors:
                own.pop(storage_id(tensor), None)
            forward = meter.take()
            scratch = max(0, forward.peak_bytes - sum(own.values()))
            ends = [t for t in outputs if has_history(t)]
            if not ends or not starts:
                return Weights(scratch, forward.seconds, forward.flops)
            return self._run_backward(outputs, ends, starts, meter, scratch, forward)

    def _run_backward(
        self,
        outputs: list[torch.Tensor],
        ends: list[torch.Tensor],
        starts: list[tuple[int, Any]],  # numbers of arguments, and the tensors or their gradient edges
        meter: _Meter,
        scratch: int,
        forward: Reading,
    ) -> Weights:
        given = {id(end): _like(end) for end in ends}
        with meter:
            found = torch.autograd.grad(ends, [start for _, start in starts], list(given.values()), allow_unused=True)
        backward = meter.take()
        shared = {storage_id(given[id(t)]): n for n, t in enumerate(outputs) if id(t) in given}
        pairs = [(n, gradient) for (n, _), gradient in zip(starts, found, strict=True) if gradient is not None]
        return Weights(
            scratch,
            forward.seconds,
            forward.flops,
            backward.peak_bytes,
            backward_seconds=backward.seconds,
            backward_flops=backward.flops,
            gradients=input_gradients(pairs, shared),
        )


def input_gradients(found: Sequence[tuple[int, torch.Tensor]], of_results: dict[int, int]) -> tuple[InputGradient, ...]:
    """What there is to know of the gradients of arguments, by number, and of results, by their storages."""
    groups: dict[int, int] = {}
    gradients = []
    for argument, gradient in found:
        if gradient.layout is not torch.strided:
            size = sum(part.untyped_storage().nbytes() for part in sparse_parts(gradient))
            group = groups.setdefault(-1 - argument, len(groups))
            gradients.append(InputGradient(argument, size, None, group, dense=False, contiguous=False))
            continue
        key = storage_id(gradient)
        gradients.append(
            InputGradient(
                argument=argument,
                bytes=gradient.untyped_storage().nbytes(),
                shares=of_results.get(key),
                group=groups.setdefault(key, len(groups)),
                dense=is_dense(gradient),
                contiguous=gradient.is_contiguous(),
                is_view=is_view(gradient),
            )
        )
    return tuple(gradients)


def metered(rates: Rates, run: Callable[[], object]) -> Reading:
    """What ``run()`` costs, run on real tensors."""
    meter = _Meter(rates, on_meta=False)
    with meter:
        run()
    return meter.take()


def _with_kernel_copies(
    name: str, args: Any, record: Record, weights: Weights, sizes: ConvolutionBytes | None
) -> Weights:
    """Add the copies that CPU kernels are known to make underneath the dispatcher.

    Read off the allocator for torch 2.11 to 2.15: the backward of batch and instance norm allocates its result twice.
    """
    if sizes is not None:
        return replace(weights, scratch_bytes=sizes.scratch, working_bytes=sizes.backward if weights.gradients else 0)
    if name in ("batch_norm", "instance_norm"):  # the one is made of the other
        return replace(weights, working_bytes=weights.working_bytes + record.output_bytes[0])
    return weights


def _with_plain_copies(node: torch.fx.Node, record: Record, weights: Weights) -> Weights:
    """What an operator that the plain model runs in place on a view takes there."""
    if REBASED not in node.meta or record.in_place or not weights.gradients:
        return weights
    return replace(weights, plain=replace(weights.plain or weights, working_bytes=COPIES * record.output_bytes[0]))


def _lean_convolution(args: Any, record: Record, weights: Weights, sizes: ConvolutionBytes | None) -> Weights:
    if sizes is None:
        return weights
    weights = replace(weights, scratch_bytes=sizes.scratch)
    wanted = {gradient.argument for gradient in weights.gradients}
    if 0 not in wanted:
        return weights
    if 1 not in wanted:
        return replace(weights, working_bytes=sizes.input_phase)
    kernel = _bytes_of([args[1]])
    return replace(weights, working_bytes=sizes.weights_phase, late_bytes=kernel + sizes.input_phase)


def _copied_bytes(function: Any, args: Any, outputs: list[torch.Tensor]) -> int:
    """Bytes that a lean convolution or its backward on a CPU allocates at once, beyond its results."""
    if function is torch.ops.aten.convolution.default:
        return _estimated_in_parts(args[:9], _bytes_of(outputs)).scratch
    if function is torch.ops.aten.convolution_backward.default:
        sizes = _estimated_in_parts(args[1:10], _bytes_of(args[:1]))
        late = _bytes_of([args[2]]) + (sizes.input_phase if args[-1][0] else 0)
        return max(sizes.weights_phase, late) - _bytes_of(outputs)
    return 0


def _estimated_in_parts(args: Sequence[Any], result: int) -> ConvolutionBytes:
    """Those of a lean convolution with these arguments by the rule."""

    def by_rule(given: Sequence[Any], result_of_given: int) -> ConvolutionBytes:
        return estimated(given[0], given[1], result_of_given, given[3:])

    return in_parts(by_rule(args, result), args, result, by_rule)


def _bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _lean_batch_norm(args: Any, record: Record, weights: Weights, sizes: ConvolutionBytes | None) -> Weights:
    x = args[0]
    chunk = channels_at_once(x) * x.numel() * x.element_size() // x.shape[1]
    return replace(
        weights,
        working_bytes=record.output_bytes[0] + 4 * chunk,
        gradients=_reusing(weights.gradients),
        repeat_seconds=_REPEATED_BATCH_NORM * weights.forward_seconds if repeats_exactly(*args) else None,
    )


_REPEATED_BATCH_NORM = 0.5
"""Time of batch norm whose statistics are known, on a CPU: measured 0.2 to 0.6 of the whole."""


def _lean_elementwise(args: Any, record: Record, weights: Weights, sizes: ConvolutionBytes | None) -> Weights:
    return replace(weights, gradients=_reusing(weights.gradients))


def _reusing(gradients: tuple[InputGradient, ...]) -> tuple[InputGradient, ...]:
    """The same, with the first argument's written over the result's where that is possible."""
    return tuple(replace(g, reuses=0) if g.argument == 0 else g for g in gradients)


def _lean_max_pool2d(args: Any, record: Record, weights: Weights, sizes: ConvolutionBytes | None) -> Weights:
    samples, channels = args[0].shape[:2]
    positions = record.output_bytes[0] // max(1, args[0].element_size() * samples * channels)
    indices = INDEX_BYTES * positions * (1 + channels * images_at_once((samples, channels, positions)))
    return replace(
        weights,
        scratch_bytes=indices,
        working_bytes=weights.working_bytes + indices,
        plain=replace(weights, internal_bytes=INDEX_BYTES * samples * channels * positions, saved_arguments=(0,)),
    )


_LEAN = {
    "elementwise": _lean_elementwise,
    "batch_norm": _lean_batch_norm,
    "convolution": _lean_convolution,
    "max_pool2d": _lean_max_pool2d,
}


def _saving(saved: list[torch.Tensor]) -> saved_tensors_hooks:
    """Hooks that list what autograd saves."""

    def pack(tensor: torch.Tensor) -> int:
        saved.append(tensor)
        return len(saved) - 1

    return saved_tensors_hooks(pack, saved.__getitem__)


def _pretended(leaf: Any, in_place: bool, device: torch.device | str = "meta") -> Any:
    """An argument as it is on another device."""
    if isinstance(leaf, torch.Tensor):
        return _shadow(leaf, in_place, device)
    return torch.device(device) if isinstance(leaf, torch.device) else leaf


def _shadow(tensor: torch.Tensor, in_place: bool, device: torch.device | str = "meta") -> torch.Tensor:
    """A tensor of the same shape, strides and type without memory."""
    shadow = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if not tensor.requires_grad:
        return shadow
    # A leaf could not be written in place.
    return shadow.requires_grad_().clone() if in_place else shadow.requires_grad_()


@dataclass(frozen=True)
class Reading:
    """Estimated seconds and FLOPs, the most fresh bytes alive at once, and those alive at the end."""

    seconds: float
    flops: int
    peak_bytes: int
    held_bytes: int


class _Meter(TorchDispatchMode):
    """Adds up the cost of every operator that runs inside, and the fresh bytes alive at once.

    With ``kernel_copies``, also what a lean convolution on a CPU allocates underneath the dispatcher; ``on_cpu``, what
    elementwise operators do.
    """

    def __init__(self, rates: Rates, kernel_copies: bool = False, on_cpu: bool = False, on_meta: bool = True) -> None:
        super().__init__()
        self.rates = rates
        self.quick = QUICK if on_meta else {}
        self.kernel_copies = kernel_copies
        self.on_cpu = on_cpu
        self._reset()

    def take(self) -> Reading:
        """What was measured since the last call."""
        held = sum(size for size, storage in self.fresh.values() if not storage.expired())
        reading = Reading(self.seconds, self.flops, self.peak, held)
        self._reset()
        return reading

    def _reset(self) -> None:
        self.seconds, self.flops, self.peak = 0.0, 0, 0
        self.fresh: dict[int, tuple[int, StorageWeakRef]] = {}

    def _has_storage(self, tensor: torch.Tensor) -> bool:
        return tensor.layout is torch.strided if self.quick else storage_of(tensor) is not None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = self.quick.get(function, function)(*args, **kwargs)
        if _only_views(function):
            return result
        inputs, outputs = (
            [t for t in tensor_leaves(tree) if self._has_storage(t)] for tree in ((args, kwargs), result)
        )
        known = {storage_id(tensor) for tensor in inputs}
        made = [t for t in outputs if storage_id(t) not in known]
        flops = 0
        packet = getattr(function, "overloadpacket", None)
        if packet in flop_registry:
            flops = int(flop_registry[packet](*args, **kwargs, out_val=result))
        if made or flops or _writes(function):
            moved = sum(t.numel() * t.element_size() for t in inputs + outputs)
            self.seconds += max(flops / self.rates.flops, moved / self.rates.bytes) + self.rates.launch_seconds
            self.flops += flops
        for tensor in made:
            storage = tensor.untyped_storage()
            self.fresh[id_of_storage(storage)] = (storage.nbytes(), StorageWeakRef(storage))
        self.fresh = {key: entry for key, entry in self.fresh.items() if not entry[1].expired()}
        copies = _copied_bytes(function, args, outputs) if self.kernel_copies else 0
        copies += _converted_bytes(function, inputs) if self.on_cpu else 0
        self.peak = max(self.peak, sum(size for size, _ in self.fresh.values()) + copies)
        return result


def _converted_bytes(function: Any, operands: Sequence[torch.Tensor]) -> int:
    """Bytes of operands that an elementwise operator on a CPU first converts to the type that it computes in.

    Source: aten/src/ATen/TensorIterator.cpp. What chooses by a mask does not convert the mask.
    """
    if torch.Tag.pointwise not in getattr(function, "tags", ()) or function.overloadpacket in _CHOOSE_BY_MASK:
        return 0
    types = {tensor.dtype for tensor in operands if tensor.dim()}
    if len(types) < 2:
        return 0
    common = reduce(torch.promote_types, types)
    return sum(t.numel() * common.itemsize for t in operands if t.dim() and t.dtype != common)


_CHOOSE_BY_MASK = {torch.ops.aten.where, torch.ops.aten.masked_fill, torch.ops.aten.masked_fill_}


def _like(tensor: torch.Tensor, *rest: Any) -> torch.Tensor:
    return tensor.new_empty(tensor.shape) if tensor.is_contiguous() else torch.empty_like(tensor)


def _threshold_backward(gradient: torch.Tensor, result: torch.Tensor, *rest: Any) -> torch.Tensor:
    alike = gradient.is_contiguous() and result.is_contiguous() and gradient.dtype == result.dtype
    return _like(gradient) if alike else torch.ops.aten.threshold_backward.default(gradient, result, *rest)


def _cat(tensors: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    first, *others = tensors
    if not all(t.is_contiguous() and t.dtype == first.dtype and t.dim() == first.dim() for t in tensors):
        return torch.ops.aten.cat.default(tensors, dim)
    shape = list(first.shape)
    shape[dim] += sum(t.shape[dim] for t in others)
    return first.new_empty(shape)


def _convolution(image: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None, *settings: Any) -> torch.Tensor:
    stride, padding, dilation, transposed, *_ = settings
    is_short = not len(stride) == len(padding) == len(dilation) == image.dim() - 2
    if is_short or transposed or not _is_plain(image) or not _is_plain(kernel):
        return torch.ops.aten.convolution.default(image, kernel, bias, *settings)
    sizes = zip(image.shape[2:], kernel.shape[2:], stride, padding, dilation, strict=True)
    steps = [(size + 2 * pad - skip * (width - 1) - 1) // step + 1 for size, width, step, pad, skip in sizes]
    return image.new_empty((image.shape[0], kernel.shape[0], *steps))


def _convolution_backward(
    gradient: torch.Tensor, image: torch.Tensor, kernel: torch.Tensor, bias_sizes: list[int] | None, *rest: Any
) -> tuple[torch.Tensor | None, ...]:
    if not _is_plain(image) or not _is_plain(kernel):
        return torch.ops.aten.convolution_backward.default(gradient, image, kernel, bias_sizes, *rest)
    shapes = (image.shape, kernel.shape, bias_sizes or ())
    return tuple(gradient.new_empty(shape) if want else None for shape, want in zip(shapes, rest[-1], strict=True))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether nobody takes it for channels_last."""
    return tensor.is_contiguous() and tensor.shape[1] > 1


def _batch_norm(image: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    wide = torch.promote_types(image.dtype, torch.float32)
    mean, deviation = (image.new_empty(image.shape[1], dtype=wide) for _ in range(2))
    return _like(image), mean, deviation


def _batch_norm_backward(
    gradient: torch.Tensor, image: torch.Tensor, weight: torch.Tensor | None, *rest: Any
) -> tuple[torch.Tensor | None, ...]:
    parameter = image if weight is None else weight
    wanted = rest[-1][1:]
    return _like(gradient), *(parameter.new_empty(image.shape[1]) if want else None for want in wanted)


QUICK = {
    torch.ops.aten.relu.default: _like,
    torch.ops.aten.threshold_backward.default: _threshold_backward,
    torch.ops.aten.cat.default: _cat,
    torch.ops.aten.convolution.default: _convolution,
    torch.ops.aten.convolution_backward.default: _convolution_backward,
    torch.ops.aten.native_batch_norm.default: _batch_norm,
    torch.ops.aten.native_batch_norm_backward.default: _batch_norm_backward,
}
"""What PyTorch finds for meta tensors too, but by running decomposed operators in Python, up to twenty for one."""


_INDEXING = {
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten.masked_scatter.default,
    torch.ops.aten.masked_scatter_.default,
}
_MASKS = (torch.bool, torch.uint8)

_SMALL_STRETCH_FLOPS = 1e9
"""Below this, what the kernels of a sliced stretch copy is measured: small slices are convolved in many ways."""

_OTHER_KERNELS = {torch.ops.aten.scaled_dot_product_attention.default}
"""What a CPU computes with kernels that take less memory than those for meta tensors."""


def copies_strided_gradients(node: torch.fx.Node) -> bool:
    """Whether the operator's backward kernel makes a gradient contiguous before it reads it."""
    chunked = isinstance(node.target, Lean) and node.target.kind == "batch_norm"
    return operator_name(node.target) in _CONTIGUOUS_BACKWARD and not chunked


_CONTIGUOUS_BACKWARD = {"convolution", "batch_norm", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d"}


def _pass_through(record: Record) -> tuple[InputGradient, ...]:
    """Python-level operations (taking an item) hand the gradient on as it is."""
    if len(record.outputs) == 1 and len(record.arguments) == 1 and record.differentiable[0]:
        return (InputGradient(0, record.output_bytes[0], shares=0),)
    return ()


@cache
def _only_views(function: Any) -> bool:
    """Whether an operator makes nothing; those that decompose into others may make a copy in place of a view."""
    return isinstance(function, OpOverload) and function.is_view and not decomposes(function)


def _writes(function: Any) -> bool:
    schema = schema_of(function)
    return bool(schema is not None and schema.is_mutable)


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
