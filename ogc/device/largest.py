"""The largest batch that fits on a device: planned for a few sizes, foretold for others, and proved where it ends.

Bytes of operations and values are numbers that grow with the size of the input: as a line with a batch, as a parabola
with the length of a sequence. From the graphs for three sizes follow those for any other, but for what kernels do
otherwise with larger inputs. The largest is found on such graphs; then those for it and for the next are parsed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import prod
from typing import Any, TypeVar

import torch

from ..errors import InputError, SolveError
from ..graph import Graph
from ..parser import Loss, parse
from ..plan import Plan
from ..plan.simulate import lower_bound, plain_peak
from ..solver import Budget, Wish, solve
from .needs import Estimate, activation_budget, device_bytes, fixed_needs, input_bytes
from .optimizer import Optimizer

SIZES = (2, 4, 6)
"""Multiples of ``step`` for which graphs are parsed first. With one sample alone, operators do otherwise."""

GUESSES = 4
"""How often a size is foretold from two others, by the line through what is missing for them."""

MOST = 2**20
"""Multiples of ``step`` that are looked at, at most."""

Part = TypeVar("Part")


@dataclass(frozen=True)
class LargestBatch:
    """What :func:`largest_batch` found.

    Attributes:
        plain: the largest size at which the plain model's step fits; 0 if none does.
        size: the largest at which a planned step does.
        plan: for that size; ``ogc.apply(model, graph, plan)`` makes the module that runs it. Without ``max_overhead``
            its overhead is estimated on a CPU.
        graph: for that size.
        needs: what a step needs beside activations at that size.
        device_memory: bytes of the device.
        too_large: the next size, which was seen not to fit.
    """

    plain: int
    size: int
    plan: Plan
    graph: Graph
    needs: Estimate
    device_memory: int
    too_large: int

    def __str__(self) -> str:
        used = self.needs.with_activations(self.plan.peak_bytes)
        return (
            f"{self.size} fit with {self.plan.overhead:.1%} more time, {self.plain} by the plain model: "
            f"{used / 2**20:.1f} of {self.device_memory / 2**20:.1f} MiB, {self.too_large} would not fit"
        )


def largest_batch(
    model: torch.nn.Module,
    make_sample: Callable[[int], Any],
    *,
    device_memory: Budget,
    optimizer: Optimizer | None = None,
    loss: Loss | None = None,
    make_loss: Callable[[int], Loss] | None = None,
    max_overhead: float | None = None,
    step: int = 1,
    device: torch.device | str | None = None,
    **parsing: Any,
) -> LargestBatch:
    """The largest batch, or length of a sequence, whose training step fits on a device.

    The forward runs with the memory of inference, at few sizes: three small ones, and those near the answer.

    Args:
        model: the module to train.
        make_sample: ``make_sample(n)`` returns a sample input of size n: a batch of n, or a sequence of that length.
        device_memory: bytes of the device, or a text such as ``"24GB"``.
        optimizer, device: as for :func:`ogc.estimate`.
        loss: as for :func:`ogc.optimize`, where it takes outputs of any size.
        make_loss: or ``make_loss(n)`` returns the loss for size n.
        max_overhead: the share of a plain step's time that a plan may add; without it any.
        step: sizes are multiples of this.
        parsing: further arguments of :func:`ogc.parse`.

    Raises:
        InputError: an argument is of the wrong kind, or the model computes another program for other sizes.
        SolveError: not even the smallest size fits; the message says what would do.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise InputError(f"step must be a number of samples, at least 1, not {step!r}")
    if loss is not None and make_loss is not None:
        raise InputError("give loss or make_loss, not both")
    Wish(max_overhead=max_overhead)

    def known(size: int) -> tuple[Graph, int]:
        own, sample = loss if make_loss is None else make_loss(size), make_sample(size)
        return parse(model, sample, loss=own, device=device, **parsing), input_bytes(sample)

    needs = fixed_needs(model, make_sample(step), optimizer, device)
    if max_overhead is None and needs.device == "cpu":  # where bytes are all that counts, and not measured
        parsing = {"profile": "estimate", **parsing}
    return _Largest(known, needs, device_bytes(device_memory), max_overhead, step).find()


class _Largest:
    """The search for one model on one device."""

    def __init__(
        self,
        known: Callable[[int], tuple[Graph, int]],
        needs: Estimate,
        room: int,
        max_overhead: float | None,
        step: int,
    ) -> None:
        self.known, self.needs = known, needs
        self.room, self.max_overhead, self.step = room, max_overhead, step
        self.graphs: dict[int, Graph] = {}
        self.inputs: dict[int, int] = {}  # bytes
        self.plans: dict[int, Plan | None] = {}

    def find(self) -> LargestBatch:
        try:
            for multiple in SIZES:
                self._graph(multiple * self.step)
        except RuntimeError as error:
            raise InputError(f"the model does not run for sizes {SIZES} times {self.step}: {error}") from error
        size = self._largest(self._least_peak, self._plan)
        if not size:
            least = self._needs(self.step).with_activations(solve(self._graph(self.step)).peak_bytes)
            without = "" if self.max_overhead is None else " without max_overhead"
            raise SolveError(
                f"no step of size {self.step} fits on a device of {self.room / 1e6:.1f} MB; the smallest that would do"
                f"{without} has {least / 1e6:.1f} MB"
            )
        plan = self._plan(size)
        assert plan is not None
        plain = self._largest(plain_peak, self._fits_plain)
        return LargestBatch(plain, size, plan, self._graph(size), self._needs(size), self.room, size + self.step)

    def _largest(self, peak_of: Callable[[Graph], int], proved: Callable[[int], object]) -> int:
        """The largest size that fits, as it is on a graph of its own, where the next does not; 0 if none does.

        Args:
            peak_of: the least peak that counts, on a graph that may be foretold.
            proved: whether a size fits, on its own graph.
        """
        low, high, stride = 0, (MOST + 1) * self.step, self.step  # fits, does not
        for number in count():
            if high - low <= self.step:
                break
            # What is foretold is near, and nearer once a large size is known; kernels may do otherwise at each size.
            guess = self._foretold(peak_of, low, high) if number < 2 else low
            if guess <= low:
                guess = min(low + stride, high - self.step)
                stride *= 2
            if proved(guess):
                low = guess
            else:
                high, stride = guess, self.step
        return low

    def _foretold(self, peak_of: Callable[[Graph], int], low: int, high: int) -> int:
        """The largest size between both that fits, about, by graphs foretold from those that are known."""

        def excess(size: int) -> int:
            return peak_of(self._graph_like(size)) - self._budget(size)

        before, size = min(self.graphs), max(self.graphs)
        more_before, more = excess(before), excess(size)
        for _ in range(GUESSES):
            slope = (more - more_before) / (size - before)
            if slope <= 0:
                break
            root = int((size - more / slope) // self.step) * self.step
            root = min(max(root, low, self.step), high - self.step)
            if root in (before, size):
                return root
            before, more_before, size, more = size, more, root, excess(root)
        return size

    def _graph(self, size: int) -> Graph:
        if size not in self.graphs:
            self.graphs[size], self.inputs[size] = self.known(size)
        return self.graphs[size]

    def _graph_like(self, size: int) -> Graph:
        """The graph for a size, or what those of two small ones and the largest known say of it."""
        if size in self.graphs:
            return self.graphs[size]
        known = sorted(self.graphs)
        apart = [known[0], known[len(SIZES) - 1], known[-1]] if len(known) > len(SIZES) else known
        return foretold([self.graphs[one] for one in apart], apart, size)

    def _needs(self, size: int) -> Estimate:
        if size in self.inputs:
            return replace(self.needs, inputs=self.inputs[size])
        few, many = min(self.inputs), max(self.inputs)
        inputs = _mixed(_shares((few, many), size), (self.inputs[few], self.inputs[many]))
        return replace(self.needs, inputs=max(0, round(inputs)))

    def _budget(self, size: int) -> int:
        return activation_budget(self._needs(size), self.room)

    def _planned(self, graph: Graph, size: int) -> Plan | None:
        """The plan for a graph that fits, if there is one."""
        budget = self._budget(size)
        if budget < max(1, lower_bound(graph)):
            return None
        try:
            plan = solve(graph, memory_budget=budget)
        except SolveError:
            return None
        is_slow = self.max_overhead is not None and plan.overhead > self.max_overhead
        return None if is_slow else plan

    def _least_peak(self, graph: Graph) -> int:
        """The least peak with as much more time as a plan may add."""
        return solve(graph, max_overhead=self.max_overhead).peak_bytes

    def _plan(self, size: int) -> Plan | None:
        if size not in self.plans:
            self.plans[size] = self._planned(self._graph(size), size)
        return self.plans[size]

    def _fits_plain(self, size: int) -> bool:
        return plain_peak(self._graph(size)) <= self._budget(size)


def foretold(graphs: Sequence[Graph], sizes: Sequence[int], size: int) -> Graph:
    """The graph for a size, by those for three others: each number lies on the parabola through theirs.

    Seconds lie on the line through the outer ones, as they are measured.

    Raises:
        InputError: the graphs differ in more than numbers.
    """
    first = graphs[0]
    for other in graphs[1:]:
        alike = len(other) == len(first) and all(
            (a.target, a.reads, a.writes, a.saves) == (b.target, b.reads, b.writes, b.saves)
            for a, b in zip(first.operations, other.operations, strict=True)
        )
        if not alike:
            raise InputError(
                f"the model computes another program for size {sizes[0]} than for {sizes[-1]}, from which other sizes "
                "cannot be foretold; give a make_sample whose samples differ in size alone"
            )
    parabola, line = _shares(sizes, size), _shares((sizes[0], sizes[-1]), size)

    def mixed(parts: Sequence[Part]) -> Part:
        found: dict[str, Any] = {}
        for name in type(parts[0]).__dataclass_fields__:  # type: ignore[attr-defined]
            numbers = [getattr(part, name) for part in parts]
            if name.endswith("_seconds") and None not in numbers:
                found[name] = max(0.0, _mixed(line, (numbers[0], numbers[-1])))
            elif name.endswith(("bytes", "_flops")) and None not in numbers:
                found[name] = max(0, round(_mixed(parabola, numbers)))
            elif name == "low_memory" and None not in numbers:
                found[name] = mixed(numbers)
        return replace(parts[0], **found)  # type: ignore[type-var]

    return replace(
        first,
        operations=tuple(mixed(each) for each in zip(*(graph.operations for graph in graphs), strict=True)),
        values=tuple(mixed(each) for each in zip(*(graph.values for graph in graphs), strict=True)),
        program=None,
    )


def _shares(places: Sequence[int], place: int) -> list[float]:
    """What each of the numbers at some places counts at another, on the polynomial through all of them."""
    return [prod((place - other) / (one - other) for other in places if other != one) for one in places]


def _mixed(shares: Sequence[float], numbers: Sequence[float]) -> float:
    return sum(share * number for share, number in zip(shares, numbers, strict=True))
