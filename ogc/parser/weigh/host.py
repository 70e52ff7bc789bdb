"""What the host does in a step: the runtime's own work, and handing operations over to a GPU.

The runtime's costs are found from a small piece of the same work, measured once in a process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace
from functools import cache
from itertools import accumulate, count
from operator import add
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks

from ...graph import Operation, RuntimeCosts, Variant
from ...torch_state.module_state import WatchedModule
from ...torch_state.reads import Reads
from .measure import Caches, own_clock

T = TypeVar("T", Operation, Variant)

LENGTH, REPEATS = 64, 15
"""Operations of the chain, and how often it runs: some 20 ms in all."""

HOOK_SECONDS = 1.1e-6
"""Of a hooked tensor of the chain, on a virtual EPYC (Zen 5) with torch 2.14: where nothing is measured."""

OF_TENSOR, OF_RUN = 3.1, 80.0
"""What a saved tensor and a recomputation take, by the time of a hooked tensor of the chain, with the parameters that
are noted for it. In a residual network of 208 tiny operations, cut into 1 to 16 runs, a tensor took 3.4 us more than
running its operation again, and a run 89, on a virtual EPYC (Zen 5) with torch 2.14, where that took 1.1."""

OF_VARIANT = 0.5
"""What a low-memory operator takes behind a CPU's other kernels more than by itself, by what a recomputation takes: it
is a function in Python. In three networks 10 to 200 us, 60 in the median, where a recomputation took 125."""

OF_CALL = 0.33
"""What a function takes that the plain forward calls, and the generated one does not: that network's forward calls 1700
more, and on the EPYC a step in which nothing is recomputed took 1.5 ms less, though choosing its plan took 0.3 ms."""

COLD = 2.5
"""By how much these take longer where kernels between them need the caches. In 20 plans of seven convolutional networks
a tensor took 8 to 11 us, and a run 250 to 390, on that EPYC."""

OF_CHOICE = 100.0
"""What stands between a call and its forward, whatever the model, by the same: it took 0.15 to 0.35 ms of that
network's step where nothing was to be done, most of it for what a step has driven out of the caches."""

CHOICES = 5
"""Times that the choice of a plan is measured. Most of it is waiting for memory: what a step leaves in the caches."""

OF_FORWARD, OF_BACKWARD = 16.0, 23.0
"""What handing an operation to a GPU takes, forward and backward, by the time of a hooked tensor. Beside an H100 that
was 2.0 to 2.3 us, and in seven networks where nothing was recomputed it took 17 to 49 us for a forward, 32 in the
median, and 23 to 79 for a backward, 49 in the median. It varies by half from minute to minute."""

SLOWER = 1.25
"""So much more than in a plain step the host has to do in a planned one, which says what is the host's: most of what
plans add is."""


def runtime_costs(is_measured: bool, calls_left_out: int, choice: float, kernels_evict: bool = False) -> RuntimeCosts:
    """The costs on this host, ``choice`` among them; estimated, nothing is taken off for what is left out.

    ``kernels_evict`` says that what a step does between recomputations needs the caches for itself: kernels on a CPU do
    where their tensors are large, and on CUDA what hands kernels over does.
    """
    hooked = hook_seconds() if is_measured else HOOK_SECONDS
    left_out = OF_CALL * hooked * max(0, calls_left_out) if is_measured else 0.0
    each = COLD * hooked if is_measured and kernels_evict else hooked
    return RuntimeCosts(OF_RUN * each, OF_TENSOR * each, left_out, choice)


def choice_seconds(model: torch.nn.Module, reads: Reads) -> float:
    """What it takes before a call to see that a module, in all its tables, is what it was.

    Measured once in a process for so many modules and parameters, so that what is planned twice costs the same.
    """
    size = sum(1 for _ in model.modules()), sum(1 for _ in model.parameters())
    if size not in _choices:
        module, caches = WatchedModule(model, count(1)), Caches()
        reads.first_changed(model)

        def seconds() -> float:
            caches.evict()
            begin = own_clock()
            module.state(model)
            reads.first_changed(model)
            return own_clock() - begin

        _choices[size] = OF_CHOICE * hook_seconds() + median(seconds() for _ in range(CHOICES))
    return _choices[size]


_choices: dict[tuple[int, int], float] = {}


@cache
def hook_seconds() -> float:
    """Seconds that a saved tensor takes more where hooks in Python pack and unpack it."""

    def seconds(hooks: _Hooks | None) -> float:
        start = torch.zeros(4, requires_grad=True)
        begin = own_clock()
        if hooks is None:
            end = _chain(start)
        else:
            with saved_tensors_hooks(hooks.pack, _unpack):
                end = _chain(start)
        torch.autograd.grad(end, start)
        return own_clock() - begin

    differences = []
    with torch.enable_grad():
        for _ in range(REPEATS):
            plain, hooked = seconds(None), seconds(_Hooks())
            differences.append((hooked - plain) / LENGTH)
    return max(0.0, median(differences))


def _chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(LENGTH):
        x = x.sigmoid()
    return x.sum()


class _Hooks:
    def __init__(self) -> None:
        self.held: dict[int, torch.Tensor] = {}

    def pack(self, tensor: torch.Tensor) -> Any:
        self.held[len(self.held)] = tensor.detach()
        return self, len(self.held) - 1

    def fetch(self, number: int) -> torch.Tensor:
        return self.held[number]


def _unpack(packed: Any) -> torch.Tensor:
    hooks, number = packed
    found: torch.Tensor = hooks.fetch(number)
    return found


class _Seconds(NamedTuple):
    """Of an operation, or of handing it over."""

    forward: float
    backward: float


def beside_device(
    operations: Sequence[Operation], costs: RuntimeCosts, hooked: float
) -> tuple[tuple[Operation, ...], RuntimeCosts]:
    """Operations that were measured on the device's clock, and the runtime's costs, as they add up to a step.

    An operation starts when it is handed over and the one before it is done. So a step takes what the host takes up to
    one of them and the device from there on: for that one of all for which this is the most. Those before it are *the
    host's*, those behind it the device's. In a forward the host runs ahead; in a backward it loses that lead at the
    last layers' many small kernels, and the device is behind again at the first layers.

    An operation whose backward is the host's takes what the slower of host and device takes for it. What these add up
    to beyond the step is overlapped. Of the runtime's costs the part counts that is the host's in a step's backward.
    ``hooked`` are the seconds of a hooked tensor on this host.
    """
    handed = [_Seconds(OF_FORWARD * hooked, OF_BACKWARD * hooked * (op.backward_bytes > 0)) for op in operations]
    host = _in_order(handed)
    device = _in_order([_Seconds(op.forward_seconds, op.backward_seconds) for op in operations])
    change, _ = longest([SLOWER * seconds for seconds in host], device)
    first = len(host) - change - 1  # operations from here on have their backward among the host's
    counted = [*operations[:first], *map(_at_least, operations[first:], handed[first:])]
    _, step = longest(host, device)
    overlapped = sum(op.forward_seconds + op.backward_seconds for op in counted) - step
    backward = sum(host[len(operations) :])
    part = sum(of_host.backward for of_host in handed[first:]) / backward if backward else 0.0
    return tuple(counted), replace(RuntimeCosts(*(part * each for each in astuple(costs))), overlapped=overlapped)


def longest(host: Sequence[float], device: Sequence[float]) -> tuple[int, float]:
    """Up to which of the operations that are handed over in turn the host is waited for, and the seconds of them all.

    ``host`` are the seconds that it takes to hand each over, ``device`` those that it takes there.
    """
    after = list(accumulate(reversed(device)))[::-1]
    seconds = list(map(add, accumulate(host), after))
    most = max(seconds, default=0.0)
    return (seconds.index(most) if seconds else 0), most


def _in_order(seconds: Sequence[_Seconds]) -> list[float]:
    """Those of a step: of all forwards, then of all backwards."""
    return [each.forward for each in seconds] + [each.backward for each in reversed(seconds)]


def _at_least(operation: Operation, host: _Seconds) -> Operation:
    """The operation, which takes no less than its host, in either form."""
    variant = operation.low_memory
    return replace(_raised(operation, host), low_memory=variant and _raised(variant, host))


def _raised(weights: T, host: _Seconds) -> T:
    repeat: Any = weights.repeat_seconds
    return replace(
        weights,
        forward_seconds=max(weights.forward_seconds, host.forward),
        backward_seconds=max(weights.backward_seconds, host.backward),
        repeat_seconds=None if repeat is None else max(repeat, host.forward),
    )
