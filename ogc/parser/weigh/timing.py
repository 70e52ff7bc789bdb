"""Seconds of one operation by running it; its bytes are estimated, which on a CPU is exact.

Each distinct call is run by itself, forward and backward, once in a process: what is planned twice is planned with the
same times. Warmed up, a short one is run several times and counts as the median, which one slow run does not touch.
What the host takes to start a backward is not counted, as a step starts one.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import re
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

from ...during_step import bytes_at_hand
from ...operators.weights import Weights
from ...plan.saving import write_at_once
from ...program.leaf import Region
from ...program.program import WithoutGrad, tensor_leaves
from ...torch_state.private import OpOverload, pytree
from ...torch_state.settings import cuda_devices
from ..forward.flat import saving
from ..passes.writes import COPIED
from .calls import Call, call_key, timing_key
from .measure import LONG_SECONDS, Measurer, page_faults, seconds_of
from .record import Record

log = logging.getLogger(__name__)

SHORT_SECONDS = 0.01
"""A shorter call is run until it has taken so long, though from ``LEAST`` to ``MOST`` times."""
LEAST, MOST = 5, 12

ENOUGH, FEW_FAULTS = 3, 2
"""How many runs are waited for, until ``MOST`` are over, that meet no more pages which are new to the process."""

MORE_BACKWARDS = 4
"""Calls by which the two backwards differ that tell what a short one takes."""

AFFORDABLE_SECONDS = 30.0
"""When measuring has taken so long, the rest is estimated, at the pace of what was measured: how long one waits for a
plan is a matter of patience, and a few calls make up most of a network's time."""

EVICTING_BYTES = 8 << 20
"""More than a core's own cache has, on servers of these years: what was used before a call."""

AGED_BYTES = 64 << 20
"""More than the cache that cores share has for one of them: what was used before so many bytes of other calls. Of
parameters there are several copies, and results are let go of after so many bytes, so that the next ones are not
written where the last ones were."""

SHARE_OF_STEP = 8
"""Each of these takes at most this part of the bytes at hand while a step is running, as all of them come together."""

_KNOWN = 20_000
"""Calls whose times are remembered: a network has some hundreds."""


@dataclass(frozen=True)
class Seconds:
    """Of a call: forward, backward, and forward again where its internal tensors are there."""

    forward: float
    backward: float = 0.0
    repeat: float | None = None


_known: dict[Any, Seconds] = {}
"""By what a call is, as text; where that text would hold an address, by the things themselves, for this process."""


def _described(function: Any) -> Any:
    """A function, or what tells equal regions, of which there is a new one each time."""
    return function.key if isinstance(function, Region) else function


def _key_of(call: Any) -> Any:
    text = re.sub(r" of type object at 0x[0-9a-f]+", "", repr(call))  # a builtin of torch, which has a name
    return call if " at 0x" in text else text


@contextmanager
def times_kept_in(folder: str) -> Iterator[None]:
    """In here, calls that were measured before on such a machine by this torch are not; others are noted in a file.

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
    return sha256(repr((platform.machine(), model, os.cpu_count(), devices, torch.__version__)).encode()).hexdigest()[
        :16
    ]


def _read(path: Path) -> dict[str, Seconds]:
    try:
        found = json.loads(path.read_text("utf-8"))
        return {key: _seconds(*seconds) for key, seconds in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("the times in %s are not used: %s", path, error)
        return {}


def _seconds(forward: Any, backward: Any, repeat: Any) -> Seconds:
    return Seconds(float(forward), float(backward), None if repeat is None else float(repeat))


def _write(path: Path, times: dict[str, Seconds]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_at_once(path, json.dumps({key: astuple(seconds) for key, seconds in times.items()}))
    except OSError as error:
        log.warning("times that were measured are not kept: %s", error)


class Timer(Measurer):
    """Measures times on the device that the model lives on, and estimates all else."""

    measures_bytes = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.spent = self.estimated = self.measured = 0.0
        self.held: deque[torch.Tensor] = deque()
        self.held_bytes = 0

    @cached_property
    def caches(self) -> Caches:
        return Caches()

    def weigh(self, record: Record, args: Any, kwargs: Any) -> Weights:
        """The weights of a call of an operator with these arguments."""
        weights = self.estimator.weigh(record, args, kwargs)
        target = record.node.target
        kernel = target.operator if isinstance(target, WithoutGrad) else target
        if not isinstance(kernel, (OpOverload, Region)):
            return weights
        binding = record.bindings.get(target) if target is kernel else None  # which would run with gradients
        function = target if binding is None else attrgetter(binding.removeprefix("torch."))(torch)
        weights = self._timed(record, function, args, kwargs, weights)
        if record.form is not None and weights.low_memory is not None:
            form = self._timed(record, record.form.target, args, kwargs, weights.low_memory)
            weights = replace(weights, low_memory=form)
        if COPIED in record.node.meta:
            weights = replace(weights, plain_seconds=self._copying(record, function, args, kwargs))
        return weights

    def _copying(self, record: Record, function: Any, args: Any, kwargs: Any) -> float:
        """Seconds that the plain model's operator takes more, as it copies; 0 where that is too dear to know."""

        def measure() -> Seconds:
            plain, own = (_TimedCall(self, record, each, args, kwargs) for each in (copying, function))
            more = self.seconds_more((plain.prepare_forward, plain.forward), (own.prepare_forward, own.forward))
            return Seconds(more)

        copying = record.node.meta[COPIED]
        found = self._known_or(("more", function, call_key(copying, args, kwargs)), record.internal_bytes, measure)
        return 0.0 if found is None else found.forward

    def _timed(self, record: Record, function: Any, args: Any, kwargs: Any, weights: Weights) -> Weights:
        guess = weights.forward_seconds + weights.backward_seconds
        found = self._known_or(
            timing_key(record, _described(function), args, kwargs),
            record.internal_bytes + weights.working_bytes,
            lambda: _TimedCall(self, record, function, args, kwargs).seconds(weights.repeat_seconds is not None),
        )
        if found is None:
            return self._at_pace(weights)
        self.estimated, self.measured = self.estimated + guess, self.measured + found.forward + found.backward
        again = found.forward if weights.again_seconds else 0.0
        return replace(
            weights,
            forward_seconds=found.forward,
            backward_seconds=max(0.0, found.backward - again),
            again_seconds=again,
            repeat_seconds=found.repeat,
        )

    def _known_or(self, call: Any, needed_bytes: int, measure: Callable[[], Seconds]) -> Seconds | None:
        """What is known of a call, or measured now; None where that would take too much time or memory."""
        settings = torch.get_num_threads(), str(self.device), torch.are_deterministic_algorithms_enabled()
        key = _key_of((call, settings))
        if key not in _known:
            if self.spent > AFFORDABLE_SECONDS or needed_bytes > bytes_at_hand():
                return None
            start = time.perf_counter()
            with torch.random.fork_rng(cuda_devices()), torch.enable_grad():
                found = measure()
            self.spent += time.perf_counter() - start
            if len(_known) >= _KNOWN:
                _known.clear()
            _known[key] = found
        return _known[key]

    def _at_pace(self, weights: Weights) -> Weights:
        pace = self.measured / self.estimated if self.estimated else 1.0
        repeat = weights.repeat_seconds
        return replace(
            weights,
            forward_seconds=weights.forward_seconds * pace,
            backward_seconds=weights.backward_seconds * pace,
            repeat_seconds=None if repeat is None else repeat * pace,
        )

    def hold(self, results: Any) -> None:
        """Keep them for a while."""
        for tensor in tensor_leaves(results):
            self.held.append(tensor)
            self.held_bytes += tensor.nbytes
        while self.held_bytes > _at_most(AGED_BYTES):
            self.held_bytes -= self.held.popleft().nbytes

    def measure(self, prepare: Callable[[], object], run: Callable[[], object]) -> tuple[int, float]:
        """No bytes, and seconds of ``run``, each time prepared anew."""
        return 0, self.typical(run, prepare)

    def typical(self, run: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> float:
        """Seconds of a run in the middle of some, the first of which does not count."""

        def timed() -> tuple[float, int]:
            prepare()
            faults = page_faults()
            return seconds_of(run, self.device), page_faults() - faults

        first, _ = timed()
        if first > LONG_SECONDS:
            return min(first, timed()[0])
        runs = [timed() for _ in range(max(LEAST, min(MOST, int(SHORT_SECONDS / max(first, 1e-9)))))]
        while len(runs) < MOST and sum(faults <= FEW_FAULTS for _, faults in runs) < ENOUGH:
            runs.append(timed())
        return median(_in_known_memory(runs))


def _in_known_memory(runs: Sequence[tuple[float, int]]) -> list[float]:
    """Seconds of those that met hardly more pages that are new to the process than any must.

    The first results lie on new pages, which take several times as long to write. A step in its third round, say, has
    been everywhere, unless what it allocates is so large that the system gives it new pages each time.
    """
    least = min(faults for _, faults in runs)
    return [seconds for seconds, faults in runs if faults <= 1.1 * least + FEW_FAULTS]


class _TimedCall(Call):
    """A call that does nothing but what is timed, and finds in the caches about what it would in a step."""

    def __init__(self, timer: Timer, record: Record, function: Any, args: Any, kwargs: Any) -> None:
        super().__init__(record, args, kwargs, function)
        self.timer = timer
        places = (n for n, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor))
        self.parameters = {
            n: _aged(self.leaves[n]) for n, made in zip(places, record.arguments, strict=True) if not made
        }

    def prepare_forward(self) -> None:
        """Fresh inputs."""
        self._fresh()
        self.timer.caches.evict()

    def prepare_backward(self, times: int = 1) -> None:
        """The forward of so many calls. What they saved is in no cache, the gradients of their results are."""
        self.found, self.edges = [], []
        for _ in range(times):
            self._fresh()
            self.edges += [get_gradient_edge(t) for t in self.starts]
            self.forward()
            self.found += self.ends()
        self.timer.caches.evict()
        self.gradients = [torch.ones_like(end) for end in self.found]

    def _fresh(self) -> None:
        self.timer.hold(self.result)
        for place, copies in self.parameters.items():
            self.leaves[place] = next(copies)
        self.prepare()
        self.args, self.kwargs = pytree.tree_unflatten(self.inputs, self.tree)

    def forward(self, *internal: torch.Tensor) -> None:
        self.result = self.target(*self.args, *internal, **self.kwargs)

    def backward(self) -> None:
        torch.autograd.grad(self.found, self.edges, self.gradients, allow_unused=True)

    def seconds(self, repeats: bool) -> Seconds:
        forward = self.timer.typical(self.forward, self.prepare_forward)
        repeat = self._repeat(forward) if repeats else None
        self.prepare_backward()
        backward = self._backward() if self.found and self.starts else 0.0
        return Seconds(forward, backward, repeat)

    def _backward(self) -> float:
        """Seconds of the backward, without what it takes to start one: of several calls' at once, if they are short."""
        one = self.timer.typical(self.backward, self.prepare_backward)
        overheads = _overheads(str(self.timer.device))
        if one > SHORT_SECONDS / 10 or math.isfinite(bytes_at_hand()):  # several at once take more memory
            return one - overheads.once
        several = self.timer.typical(self.backward, partial(self.prepare_backward, 1 + MORE_BACKWARDS))
        found = (several - one) / MORE_BACKWARDS
        return max(0.1 * found, found - overheads.each)

    def _repeat(self, forward: float) -> float:
        """Seconds of the forward with the internal tensors of the first."""
        with saving(self.saved):
            self.forward()
        return min(forward, self.timer.typical(partial(self.forward, *self.saved[-2:])))


def _aged(parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """Copies in turn."""
    number = min(MOST, max(1, _at_most(AGED_BYTES) // max(1, parameter.nbytes)))
    return cycle([parameter.detach().clone().requires_grad_(parameter.requires_grad) for _ in range(number)])


class Caches:
    """The processor's, which what was used last is in."""

    def __init__(self) -> None:
        size, total = _at_most(EVICTING_BYTES), _at_most(AGED_BYTES)
        self.others = cycle(torch.zeros(1 + total // 4).split(1 + size // 4))

    def evict(self) -> None:
        """Read and write so many bytes that what was used before is not in a core's cache; each time others."""
        next(self.others).add_(1)


def _at_most(size: int) -> int:
    return int(min(size, bytes_at_hand() / SHARE_OF_STEP))


@dataclass(frozen=True)
class _Overheads:
    """What a backward takes beside its operations: once, and for each call whose results it starts from."""

    once: float
    each: float


@cache
def _overheads(device: str) -> _Overheads:
    """Measured with views, which do next to nothing."""
    timer = Timer(torch.device(device))

    def of(chains: int, length: int) -> float:
        with torch.enable_grad():
            starts = [torch.zeros(1, device=device, requires_grad=True) for _ in range(chains)]
            ends = starts
            for _ in range(length):
                ends = [end.view(1) for end in ends]
            ones = [torch.ones_like(end) for end in ends]
            return timer.typical(lambda: torch.autograd.grad(ends, starts, ones, retain_graph=True))

    one, long, several = of(1, 1), of(1, 21), of(1 + MORE_BACKWARDS, 1)
    node, call = (long - one) / 20, (several - one) / MORE_BACKWARDS
    return _Overheads(max(0.0, one - node), max(0.0, call - node))
