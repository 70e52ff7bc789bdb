"""Weights of one operation by running it: seconds by a clock, and bytes from the allocator, or else estimated.

Each distinct call is run by itself, forward and backward. Seconds are measured once in a process, so that what is
planned twice is planned with the same times. Warmed up, a short call is run several times and counts as the median.
What the host takes to start a backward is not counted, as a step starts one.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import cache, cached_property, partial
from hashlib import sha256
from itertools import cycle
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from ...operators.weights import Weights
from ...plan.saving import write_at_once
from ...process import available_bytes, is_late
from ...program.opaque import OpaqueCall, Region
from ...program.program import WithoutGrad, device_of_model, has_backward, storage_bytes, tensor_leaves
from ...torch_state.allocator import allocated_bytes, can_measure
from ...torch_state.no_trace import untouched, unwatched
from ...torch_state.private import OpOverload, pytree, sleep_on_cuda
from ...torch_state.settings import cuda_devices
from ..forward.flat import saving
from ..passes.writes import COPIED, REBASED
from .backward import Relaid
from .call import REPEATS, Call, CallOfOpaque, call_key, held_aside, with_measured_bytes
from .estimate import Estimator, input_gradients
from .meter import Meter, Reading, Seconds
from .record import Record

try:
    import resource
except ImportError:  # on Windows
    resource = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

LONG_SECONDS = 0.05
"""A call that takes longer is run once more, and no oftener."""

SHORT_SECONDS = 0.01
"""A shorter call is run until it has taken so long, though from ``LEAST`` to ``MOST`` times."""
LEAST, MOST = 3, 5

ENOUGH, FEW_FAULTS, NEAR, AT_LAST = 3, 2, 1.2, 12
"""How many runs are waited for, until so many are over, that meet no more pages which are new to the process and take
at most so much longer than the quickest: others were disturbed."""

MORE_BACKWARDS = 4
"""Calls by which the two backwards differ that tell what a short one takes."""

AFFORDABLE_SECONDS = 30.0
"""When measuring has taken so long, the rest is estimated, at the pace of what was measured."""

EVICTING_BYTES = 16 << 20
"""More than a core has of the caches, on servers of these years: what was used before a call. With 4 MiB a step of
MobileNetV2 took 12 % more than its operations on a virtual EPYC (Zen 5), with 16 MiB as much."""

AGED_BYTES = 64 << 20
"""More than the cache that cores share has for one of them: what was used before so many bytes of other calls. Of
parameters there are several copies, and results are let go of after so many bytes, so that the next ones are not
written where the last ones were."""

SHARE_OF_STEP = 12
"""Each of these takes at most this part of the available bytes while a step is running, as all come together."""

HEAD_START_CYCLES = 3_000_000
"""Of the device's clock, some 2 ms: more than the host takes to hand one operation to it."""

own_clock = time.perf_counter if sys.platform == "win32" else time.thread_time
"""Seconds of this thread, which others on the machine do not add to; Windows counts them in steps of 16 ms."""

_KNOWN = 20_000
"""Calls whose times are remembered: a network has some hundreds."""


class Measurer:
    """Measures operations on the device that the model lives on: seconds, and bytes if it ``measures_bytes``.

    Layouts of gradients and FLOPs are estimated, and bytes otherwise, which on a CPU is exact.
    """

    def __init__(self, device: torch.device, measures_bytes: bool = True) -> None:
        self.device, self.measures_bytes = device, measures_bytes
        self.estimator = Estimator(device, device, are_measured=measures_bytes)
        self.seen: dict[Any, Weights] = {}
        self.spent = self.estimated = self.measured = 0.0
        self.held: deque[torch.Tensor] = deque()
        self.held_bytes = 0

    def relaid(self, record: Record, args: Any, kwargs: Any) -> Relaid | None:
        """What weighs the backward of a call for gradients of other layouts."""
        return self.estimator.relaid(record, args, kwargs, can_measure(self.device))

    def weigh(self, record: Record, args: Any, kwargs: Any) -> Weights:
        """The weights of a call of an operator with these arguments."""
        weights = self.estimator.weigh(record, args, kwargs)
        target = record.node.target
        kernel = target.operator if isinstance(target, WithoutGrad) else target
        if not isinstance(kernel, (OpOverload, Region)):
            return weights
        if self.measures_bytes and can_measure(self.device) and (record.writes or record.saved.tensors):
            weights = self._with_bytes(record, args, kwargs, weights)
        binding = record.bindings.get(target) if target is kernel else None  # which would run with gradients
        function = target if binding is None else attrgetter(binding.removeprefix("torch."))(torch)
        weights = self._timed(record, function, args, kwargs, weights)
        if record.variant is not None and weights.low_memory is not None:
            variant = self._timed(record, record.variant.target, args, kwargs, weights.low_memory)
            weights = replace(weights, low_memory=variant)
        if COPIED in record.node.meta:
            weights = replace(weights, plain_seconds=self._copying(record, function, args, kwargs))
        return weights

    def _with_bytes(self, record: Record, args: Any, kwargs: Any, estimate: Weights) -> Weights:
        meta = record.node.meta
        key = call_key(record.node.target, args, kwargs), REBASED in meta, COPIED in meta, record.variant is None
        if key not in self.seen:
            weights = with_measured_bytes(estimate, Call(record, args, kwargs), self.device)
            if record.variant is not None and (variant := estimate.low_memory) is not None:
                call = Call(record, args, kwargs, record.variant.target)
                found = with_measured_bytes(variant, call, self.device)
                peak, late = found.working_bytes, variant.late_bytes
                # It is measured as one, in circumstances that it may not meet: only more than was estimated is news.
                working = variant.working_bytes if peak <= max(variant.working_bytes, late) else peak
                if record.variant.target.has_two_phases:
                    working, late = min(working, peak), min(late, peak)
                found = replace(found, working_bytes=working, late_bytes=late, first_bytes=variant.first_bytes)
                weights = replace(weights, low_memory=found)
            self.seen[key] = weights
        return self.seen[key]

    def _copying(self, record: Record, function: Any, args: Any, kwargs: Any) -> float:
        """Seconds that the plain model's operator takes more, as it copies; 0 where that is too dear to know.

        The two take turns, as a processor's speed changes.
        """

        def measure() -> CallSeconds:
            calls = [_TimedCall(self, record, each, args, kwargs) for each in (copying, function)]

            def seconds(call: _TimedCall) -> float:
                call.fresh()
                return seconds_of(call.forward, self.device)

            first, _ = map(seconds, calls)  # these do not count
            turns = 1 if first > LONG_SECONDS else LEAST
            more = [seconds(calls[0]) - seconds(calls[1]) for _ in range(turns)]
            return CallSeconds(max(0.0, median(more)))

        copying = record.node.meta[COPIED]
        call = "more", function, call_key(copying, args, kwargs)
        found = self._known_or(call, record.saved.internal_bytes, measure)
        return 0.0 if found is None else found.forward

    def _timed(self, record: Record, function: Any, args: Any, kwargs: Any, weights: Weights) -> Weights:
        guess = weights.forward_seconds + weights.backward_seconds
        found = self._known_or(
            _timing_key(record, function, args, kwargs),
            record.saved.internal_bytes + weights.working_bytes,
            lambda: _TimedCall(self, record, function, args, kwargs).seconds(weights.repeat_seconds is not None),
        )
        if found is None:
            pace, repeat = self.measured / self.estimated if self.estimated else 1.0, weights.repeat_seconds
            return replace(
                weights,
                forward_seconds=weights.forward_seconds * pace,
                backward_seconds=weights.backward_seconds * pace,
                repeat_seconds=None if repeat is None else repeat * pace,
            )
        self.estimated, self.measured = self.estimated + guess, self.measured + found.forward + found.backward
        again = found.forward if weights.again_seconds else 0.0
        return replace(
            weights,
            forward_seconds=found.forward,
            backward_seconds=max(0.0, found.backward - again),
            again_seconds=again,
            repeat_seconds=found.repeat,
        )

    def _known_or(self, call: Any, needed_bytes: int, measure: Callable[[], CallSeconds]) -> CallSeconds | None:
        """What is known of a call, or measured now; None where that would take too much time or memory."""
        settings = torch.get_num_threads(), str(self.device), torch.are_deterministic_algorithms_enabled()
        key = _key_of((call, settings))
        if key not in _known:
            if self.spent > AFFORDABLE_SECONDS or needed_bytes > available_bytes() or is_late():
                return None
            start = time.perf_counter()
            with torch.random.fork_rng(cuda_devices()), torch.enable_grad():
                if not _known:
                    measure()  # what is measured first in a process seemed to take three times as long
                found = measure()
            self.spent += time.perf_counter() - start
            if len(_known) >= _KNOWN:
                _known.clear()
            _known[key] = found
        return _known[key]

    def seconds(self, run: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> float:
        """Typical seconds of a run, each time prepared anew."""
        return typical(run, self.device, prepare)

    @cached_property
    def caches(self) -> Caches:
        return Caches()

    def hold(self, results: Any) -> None:
        """Keep them for a while, so that the next ones lie elsewhere; in a step without what their backwards need."""
        for tensor in tensor_leaves(results):
            self.held.append(tensor.detach() if math.isfinite(available_bytes()) else tensor)
            self.held_bytes += tensor.nbytes
        while self.held_bytes > _at_most(AGED_BYTES):
            self.held_bytes -= self.held.popleft().nbytes


Profiler = Estimator | Measurer
"""What weighs operators."""


def weigh(model: torch.nn.Module, profiler: Profiler, record: Record, args: Any, kwargs: Any) -> Weights:
    """The weights of one call, be it of an operator or of an opaque module; the model is afterwards as before.

    A module's bytes are those of the device that the model is on; its time and FLOPs come from the profiler.
    """
    if not isinstance(record.node.target, OpaqueCall):
        weights = profiler.weigh(record, args, kwargs)
        record.relaid = profiler.relaid(record, args, kwargs) if weights.gradients else None
        return weights
    home = device_of_model(model, args[1])
    measurer = profiler if isinstance(profiler, Measurer) else None
    seconds = (profiler.estimator if isinstance(profiler, Measurer) else profiler).rates.seconds
    with untouched(model):
        call = CallOfOpaque(record, args)
        call.prepare()
        forward = _reading(call, seconds, call.forward)
        call.prepare()
        peak, compared, held = _peaks(call, home, forward)
        internal = max(0, held - call.own_bytes())
        weights = Weights(
            scratch_bytes=max(0, peak - held, compared - held),
            plain_scratch_bytes=max(0, peak - held),
            internal_bytes=internal,
            aside_bytes=min(internal, _note_aside(record, call, home)),
            forward_seconds=measurer.seconds(call.forward, call.prepare) if measurer else forward.seconds,
            forward_flops=forward.flops,
        )
        if not call.prepare_backward():
            return weights
        backward = _reading(call, seconds, call.backward)
        working, first = max(0, backward.peak_bytes - call.seed_bytes), 0
        own_working, own = working, storage_bytes(call.parameters)
        if can_measure(home):
            call.prepare()  # so that nothing is there of the run before
            working, first = call.backward_bytes(home)
            call.prepare()
            call.own_gradients = []
            own_working, own = call.backward_bytes(home)[0], storage_bytes(call.own_gradients)
            call.own_gradients = None
        return replace(
            weights,
            working_bytes=working,
            first_bytes=first,
            own_working_bytes=own_working,
            own_gradient_bytes=own,
            gradients=input_gradients(call.found, call.seeds),
            backward_seconds=measurer.seconds(call.backward, call.prepare_backward) if measurer else backward.seconds,
            backward_flops=backward.flops,
        )


def _reading(call: CallOfOpaque, seconds: Seconds, run: Callable[[], object]) -> Reading:
    """What ``run()`` costs; where nobody may look at its operators, by the clock alone."""
    if call.module not in unwatched:
        with Meter(seconds, on_meta=False) as meter:
            run()
        return meter.take()
    start = time.perf_counter()
    run()
    return Reading(time.perf_counter() - start)


def _peaks(call: CallOfOpaque, home: torch.device, forward: Reading) -> tuple[int, int, int]:
    """The most bytes of a call, of one that is compared with another, and those that stay."""
    if not can_measure(home):  # what PyTorch's operators allocate has to do
        return forward.peak_bytes, forward.peak_bytes, forward.held_bytes
    peak, held = allocated_bytes(call.forward, home, call.prepare)
    compared = allocated_bytes(call.forward_compared, home, call.prepare)[0] if call.opaque.repeatable else peak
    return peak, compared, held


def _note_aside(record: Record, call: CallOfOpaque, home: torch.device) -> int:
    """Note which of the program's values a call holds past autograd; the bytes of others that it so holds."""
    opaque = call.opaque
    if record.in_place or opaque.takes_no_hooks:  # of the latter, autograd knows, but no hook
        return 0
    aside, others = held_aside(opaque, call.module, call.leaves, home)
    record.node.target = replace(opaque, aside=aside)
    return others


class _TimedCall(Call):
    """A call that does nothing but what is timed, and finds in a CPU's caches about what it would in a step."""

    def __init__(self, measurer: Measurer, record: Record, function: Any, args: Any, kwargs: Any) -> None:
        super().__init__(record, args, kwargs, function)
        self.measurer, self.is_cpu = measurer, measurer.device.type == "cpu"
        self.result: Any = None
        places = (n for n, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor))
        externals = [n for n, argument in zip(places, record.arguments, strict=True) if argument.value is None]
        self.copies = {n: _aged(self.leaves[n]) for n in externals if self.is_cpu}

    def fresh(self) -> None:
        """Fresh inputs."""
        self._fresh()
        self._evict()

    def fresh_backward(self, times: int = 1) -> None:
        """The forward of so many calls. What they saved is in no cache, the gradients of their results are."""
        self.ends_of_all, self.edges = list[torch.Tensor](), list[Any]()
        for _ in range(times):
            self._fresh()
            inputs = [t for t in self.inputs if isinstance(t, torch.Tensor) and t.requires_grad]
            self.edges += [get_gradient_edge(t) for t in inputs]
            self.forward()
            self.ends_of_all += [t for t in tensor_leaves(self.result) if has_backward(t)]
        self._evict()
        self.gradients = [torch.ones_like(end) for end in self.ends_of_all]

    def _fresh(self) -> None:
        if self.is_cpu:
            self.measurer.hold(self.result)
        self.result = None
        for place, copies in self.copies.items():
            self.leaves[place] = next(copies)
        self.prepare()
        self.args, self.kwargs = pytree.tree_unflatten(self.inputs, self.tree)

    def _evict(self) -> None:
        if self.is_cpu:
            self.measurer.caches.evict()

    def forward(self, *internal: torch.Tensor) -> None:
        self.result = self.target(*self.args, *internal, **self.kwargs)

    def backward(self) -> None:
        torch.autograd.grad(self.ends_of_all, self.edges, self.gradients, allow_unused=True)

    def seconds(self, repeats: bool) -> CallSeconds:
        forward = self.measurer.seconds(self.forward, self.fresh)
        repeat = self._repeat(forward) if repeats else None
        self.fresh_backward()
        return CallSeconds(forward, self._backward() if self.ends_of_all and self.edges else 0.0, repeat)

    def _backward(self) -> float:
        """Seconds of the backward, without what it takes to start one: of several calls' at once, if they are short."""
        one = self.measurer.seconds(self.backward, self.fresh_backward)
        if not self.is_cpu:
            return one
        overheads = _overheads(str(self.measurer.device))
        if one > SHORT_SECONDS / 10 or math.isfinite(available_bytes()):  # several at once take more memory
            return one - overheads.once
        several = self.measurer.seconds(self.backward, partial(self.fresh_backward, 1 + MORE_BACKWARDS))
        found = (several - one) / MORE_BACKWARDS
        return max(0.1 * found, found - overheads.each)

    def _repeat(self, forward: float) -> float:
        """Seconds of the forward with the internal tensors of the first."""
        with saving(self.saved):
            self.forward()
        internal = self.saved[-2:]
        return min(forward, self.measurer.seconds(partial(self.forward, *internal)))


def _timing_key(record: Record, function: Any, args: Any, kwargs: Any) -> Any:
    """What two calls must share to take as long: views may lie anywhere in what they are of."""
    function = function.key if isinstance(function, Region) else function  # of which there is a new one each time
    if not record.outputs or record.writes or record.externals.writes or record.saved.internal_bytes:
        return call_key(function, args, kwargs)
    args, kwargs = pytree.tree_map(lambda leaf: None if isinstance(leaf, int) else leaf, (args, kwargs))
    return call_key(function, args, kwargs), tuple(output.layout for output in record.outputs)


def typical(run: Callable[[], object], device: torch.device, prepare: Callable[[], object] = lambda: None) -> float:
    """Seconds of a run in the middle of some, the first of which does not count."""

    def timed() -> tuple[float, int]:
        prepare()
        faults = page_faults()
        return seconds_of(run, device), page_faults() - faults

    first, _ = timed()
    if first > LONG_SECONDS:
        return min(first, timed()[0])
    if device.type == "cuda":
        return median(timed()[0] for _ in range(REPEATS))
    runs = [timed() for _ in range(max(LEAST, min(MOST, int(SHORT_SECONDS / max(first, 1e-9)))))]
    while len(runs) < AT_LAST and min(len(_undisturbed(runs)), sum(n <= FEW_FAULTS for _, n in runs)) < ENOUGH:
        runs.append(timed())
    return median(_undisturbed(runs))


def _undisturbed(runs: Sequence[tuple[float, int]]) -> list[float]:
    """Seconds of those near the quickest, of those that met hardly more pages new to the process than any must.

    New pages take several times as long to write. After a few steps there are none, unless the system gives new pages
    for what is large each time.
    """
    least = min(faults for _, faults in runs)
    found = [seconds for seconds, faults in runs if faults <= 1.1 * least + FEW_FAULTS]
    return [seconds for seconds in found if seconds <= NEAR * min(found)]


def page_faults() -> int:
    """Pages that this process has met for the first time; 0 where nobody counts."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """What a run takes on a device: on CUDA by its own clock, which starts once all is handed over.

    The device sleeps until then. Otherwise it would wait for the host between kernels, as it does not in a step, where
    the host runs ahead: on an H200, operations of some microseconds seemed to take fifteen times as long.
    """
    if device.type != "cuda":
        clock = own_clock if torch.get_num_threads() == 1 else time.perf_counter
        start = clock()
        run()
        return clock() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    with torch.cuda.device(device):
        sleep_on_cuda(HEAD_START_CYCLES)
    begin.record(torch.cuda.current_stream(device))
    run()
    end.record(torch.cuda.current_stream(device))
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)) / 1e3


class Caches:
    """The processor's, which what was used last is in."""

    def __init__(self) -> None:
        size, total = _at_most(EVICTING_BYTES), _at_most(AGED_BYTES)
        self.others = cycle(torch.zeros(1 + total // 4).split(1 + size // 4))

    def evict(self) -> None:
        """Read and write so many bytes that what was used before is not in a core's cache; each time others."""
        next(self.others).add_(1)


def _aged(parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """Copies in turn."""
    number = min(MOST, max(1, _at_most(AGED_BYTES) // max(1, parameter.nbytes)))
    return cycle([parameter.detach().clone().requires_grad_(parameter.requires_grad) for _ in range(number)])


def _at_most(size: int) -> int:
    return int(min(size, available_bytes() / SHARE_OF_STEP))


@dataclass(frozen=True)
class _Overheads:
    """What a backward takes beside its operations: once, and for each call whose results it starts from."""

    once: float
    each: float


@cache
def _overheads(device: str) -> _Overheads:
    """Measured with views, which do next to nothing."""

    def of(chains: int, length: int) -> float:
        with torch.enable_grad():
            starts = [torch.zeros(1, device=device, requires_grad=True) for _ in range(chains)]
            ends = starts
            for _ in range(length):
                ends = [end.view(1) for end in ends]
            ones = [torch.ones_like(end) for end in ends]
            return typical(lambda: torch.autograd.grad(ends, starts, ones, retain_graph=True), torch.device(device))

    one, long, several = of(1, 1), of(1, 21), of(1 + MORE_BACKWARDS, 1)
    node, call = (long - one) / 20, (several - one) / MORE_BACKWARDS
    return _Overheads(max(0.0, one - node), max(0.0, call - node))


@dataclass(frozen=True)
class CallSeconds:
    """Of a call: forward, backward, and forward again where its internal tensors are there."""

    forward: float
    backward: float = 0.0
    repeat: float | None = None


_known: dict[Any, CallSeconds] = {}
"""By what a call is, as text; where that text would hold an address, by the things themselves, for this process."""


def _key_of(call: Any) -> Any:
    text = re.sub(r" of type object at 0x[0-9a-f]+", "", repr(call))  # a builtin of torch, which has a name
    return call if " at 0x" in text else text


@contextmanager
def times_kept_in(folder: str) -> Iterator[None]:
    """In here, times that were measured before on such a machine by this torch are read from a file; new ones are
    added.

    Where that file cannot be read or written, calls are measured as ever. Of two processes that write at once, one's
    new times may be lost.
    """
    path = Path(folder, f"times-{_machine()}.json")
    stored = _read(path)
    for key, seconds in stored.items():
        _known.setdefault(key, seconds)
    try:
        yield
    finally:
        new = {key: seconds for key, seconds in _known.items() if isinstance(key, str) and key not in stored}
        if new:
            _write(path, {**_read(path), **new})


@cache
def _machine() -> str:
    """What times depend on."""
    processors = Path("/proc/cpuinfo")
    lines = processors.read_text("utf-8").splitlines() if processors.exists() else []
    model = next((line for line in lines if line.startswith("model name")), platform.processor())
    devices = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    text = repr((platform.machine(), model, os.cpu_count(), devices, torch.__version__))
    return sha256(text.encode()).hexdigest()[:16]


def _read(path: Path) -> dict[str, CallSeconds]:
    try:
        found = json.loads(path.read_text("utf-8"))
        return {
            key: CallSeconds(float(forward), float(backward), None if repeat is None else float(repeat))
            for key, (forward, backward, repeat) in found.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("the times in %s are not used: %s", path, error)
        return {}


def _write(path: Path, times: dict[str, CallSeconds]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_at_once(path, json.dumps({key: astuple(seconds) for key, seconds in times.items()}))
    except OSError as error:
        log.warning("times that were measured are not kept: %s", error)
