"""What an operation adds to a step on CUDA, where the host hands operations over and the device carries them out.

An operation starts when it is handed over and the one before it is done. So a step takes what the host takes up to one
of them and the device from there on: up to that one, of all, for which this is the most. What is before it is *the
host's* here, and what is behind it the device's. In a forward the host runs ahead while the device is busy with the
large tensors of the first layers; in a backward it runs out of that lead at the last layers' many small kernels, and
the device is behind again at the first layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace
from itertools import accumulate
from operator import add
from typing import Any, NamedTuple, TypeVar

from ....graph import RuntimeCosts
from ....operation import Operation, Variant

T = TypeVar("T", Operation, Variant)

OF_FORWARD, OF_BACKWARD = 16.0, 23.0
"""What handing an operation to a GPU takes, forward and backward, by the time of a hooked tensor; see costs.py. Beside
an H100 that was 2.0 to 2.3 us, and in seven networks where nothing was run again it took 17 to 49 us for a forward, 32
in the median, and 23 to 79 for a backward, 49 in the median. It varies by half from minute to minute."""

SLOWER = 1.25
"""So much more than in a plain step the host has to do in a planned one, which says what is the host's: most of what
plans add is."""


class _Seconds(NamedTuple):
    """Of an operation, or of handing it over."""

    forward: float
    backward: float


def beside_device(
    operations: Sequence[Operation], costs: RuntimeCosts, hooked: float
) -> tuple[tuple[Operation, ...], RuntimeCosts]:
    """Operations that were measured on the device's clock, and the runtime's costs, as they add up to a step.

    An operation whose backward is among the host's takes what the slower of host and device takes for it. What these
    add up to beyond the step is overlapped. Of the runtime's costs that part counts, in a step's backward, that is the
    host's. ``hooked`` are the seconds of a hooked tensor on this host.
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
    until = accumulate(host)
    after = list(accumulate(reversed(device)))[::-1]
    seconds = list(map(add, until, after))
    most = max(seconds, default=0.0)
    return (seconds.index(most) if seconds else 0), most


def _in_order(seconds: Sequence[_Seconds]) -> list[float]:
    """Those of a step: of all forwards, then of all backwards."""
    return [each.forward for each in seconds] + [each.backward for each in reversed(seconds)]


def _at_least(operation: Operation, host: _Seconds) -> Operation:
    """The operation, which takes no less than its host, in either form."""
    form = operation.low_memory
    return replace(_raised(operation, host), low_memory=form and _raised(form, host))


def _raised(weights: T, host: _Seconds) -> T:
    repeat: Any = weights.repeat_seconds
    return replace(
        weights,
        forward_seconds=max(weights.forward_seconds, host.forward),
        backward_seconds=max(weights.backward_seconds, host.backward),
        repeat_seconds=None if repeat is None else max(repeat, host.forward),
    )
