"""Weights of one operation by running it: time on the device's clock, bytes from its allocator.

Each distinct call (operator, shapes, constants) is run by itself, forward and backward, on the tensors that
it was seen with. What it needs beyond inference is the memory of one operation.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from ...operators.low_memory import LowMemory
from ...operators.weights import Weights
from ...torch_state.allocator import allocated_bytes, can_measure
from ...torch_state.private import sleep_on_cuda
from ..passes.writes import COPIED, REBASED
from .backward.again import Again
from .calls import Call, call_key
from .estimate import Estimator
from .record import Record

try:
    import resource
except ImportError:  # on Windows
    resource = None  # type: ignore[assignment]

REPEATS = 3
LONG_SECONDS = 0.05
"""A call that takes longer is run once more, and no oftener."""

TURNS = 5
"""Of two calls that are compared. Timed one after the other, on a machine whose neighbours slow it down by two for
seconds at a time, a copy of 4 MB seemed to take no time in one of five processes."""

own_clock = time.perf_counter if sys.platform == "win32" else time.thread_time
"""Seconds of this thread, which others on the machine do not add to; Windows counts them in steps of 16 ms."""

HEAD_START_CYCLES = 3_000_000
"""Of the device's clock, some 2 ms: more than the host takes to hand one operation to it."""


Prepared = tuple[Callable[[], object], Callable[[], object]]
"""What prepares a run, each time anew, and the run."""


class Measurer:
    """Measures operations on the device that the model lives on; gradients' layout and FLOPs are estimated."""

    measures_bytes = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.estimator = Estimator(device, device, are_measured=self.measures_bytes)
        self.seen: dict[Any, Weights] = {}

    def weigh(self, record: Record, args: Any, kwargs: Any) -> Weights:
        """The weights of a call of an operator with these arguments."""
        node, estimate = record.node, self.estimator.weigh(record, args, kwargs)
        if not (record.writes or record.saves) or not can_measure(self.device):
            return estimate
        key = call_key(node.target, args, kwargs), REBASED in node.meta, COPIED in node.meta, record.form is None
        if key not in self.seen:
            devices = [self.device] if self.device.type == "cuda" else []
            with torch.random.fork_rng(devices):
                self.seen[key] = self._run(Call(record, args, kwargs), estimate)
                if COPIED in node.meta:
                    plain, own = Call(record, args, kwargs, node.meta[COPIED]), Call(record, args, kwargs)
                    more = self.seconds_more((plain.prepare, plain.forward), (own.prepare, own.forward))
                    self.seen[key] = replace(self.seen[key], plain_seconds=more)
                if record.form is not None:
                    assert estimate.low_memory is not None
                    call = Call(record, args, kwargs, record.form.target)
                    form = self._run_form(record.form.target, call, estimate.low_memory)
                    self.seen[key] = replace(self.seen[key], low_memory=form)
        return self.seen[key]

    def again(self, record: Record, args: Any, kwargs: Any) -> Again | None:
        """What weighs the backward of a call for gradients that are laid out in another way."""
        return self.estimator.again(record, args, kwargs, can_measure(self.device))

    def _run(self, call: Call, estimate: Weights) -> Weights:
        """The weights of PyTorch's operator."""
        peak, seconds = self.measure(call.prepare, call.forward)
        weights = replace(estimate, scratch_bytes=max(0, peak - call.own_bytes()), forward_seconds=seconds)
        if call.ends() and call.starts:
            peak, seconds = self.measure(lambda: call.prepare(with_gradients=True), call.backward)
            again = weights.forward_seconds if estimate.again_seconds else 0.0
            weights = replace(
                weights, working_bytes=peak, backward_seconds=max(0.0, seconds - again), again_seconds=again
            )
        return weights

    def _run_form(self, form: LowMemory, call: Call, estimate: Weights) -> Weights:
        """The weights of an operator's low-memory form."""
        peak, seconds = self.measure(call.prepare, call.forward)
        weights = replace(estimate, scratch_bytes=max(0, peak - call.own_bytes()), forward_seconds=seconds)
        if estimate.repeat_seconds is not None:
            internal = call.saved[-2:]
            _, seconds = self.measure(call.prepare, lambda: call.forward(*internal))
            weights = replace(weights, repeat_seconds=min(seconds, weights.forward_seconds))
        if call.ends() and call.starts:
            peak, seconds = self.measure(lambda: call.prepare(with_gradients=True), call.backward)
            # It is measured as one, in circumstances that it may not meet: more than was estimated is news, less is
            # not.
            known = peak <= max(estimate.working_bytes, estimate.late_bytes)
            working = estimate.working_bytes if known else peak
            if form.has_two_phases:
                working = min(working, peak)
                weights = replace(weights, late_bytes=min(weights.late_bytes, peak))
            weights = replace(weights, working_bytes=working, backward_seconds=seconds)
        return weights

    def measure(self, prepare: Callable[[], object], run: Callable[[], object]) -> tuple[int, float]:
        """Peak bytes, if there is a way to know, and median seconds of ``run``; a long run is timed twice at most.

        On CUDA every run tells its bytes, and the most count. On a CPU the first does, and is not timed.
        """
        times, peaks = list[float](), list[int]()
        is_cuda = self.device.type == "cuda"

        def timed() -> None:
            times.append(seconds_of(run, self.device))

        def once() -> None:
            if can_measure(self.device) and (is_cuda or not peaks):
                peaks.append(allocated_bytes(timed, self.device, prepare)[0])
            else:
                prepare()
                timed()

        if is_cuda:  # kernels are loaded, algorithms chosen and workspaces made by a first run
            prepare()
            run()
        once()
        first = times.pop()
        for _ in range(1 if first > LONG_SECONDS else REPEATS):
            once()
        return max(peaks, default=0), min(first, *times) if first > LONG_SECONDS else median(times)

    def seconds_more(self, one: Prepared, other: Prepared) -> float:
        """Seconds that one run takes more than another, 0 at least. They take turns, as a processor's speed changes."""

        def seconds(prepare: Callable[[], object], run: Callable[[], object]) -> float:
            prepare()
            return seconds_of(run, self.device)

        first, _ = seconds(*one), seconds(*other)  # these do not count
        turns = 1 if first > LONG_SECONDS else TURNS
        return max(0.0, median(seconds(*one) - seconds(*other) for _ in range(turns)))


def page_faults() -> int:
    """Pages that this process has met for the first time; 0 where nobody counts."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """What a run takes on a device: on CUDA by its own clock, all that it is to do being at hand when it starts.

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
