"""The largest batch that fits on a device: predicted from a few small sizes, and proved where it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from os import PathLike
from typing import Any

import torch

from ..errors import InputError, SolveError
from ..given import memory_bytes
from ..graph import MIB, Graph
from ..parser import Loss
from ..parser.opaque import NamesAndTypes
from ..plan import Plan, plain_plan
from ..plan.simulate import lower_bound, plain_peak
from ..process import collecting_new_only
from ..runtime.offloading import Bandwidth, Offloading
from ..solver import LEAST, LEAST_PEAK, Budget, Goal, optimal, solve
from .graphs import SIZES, Graphs
from .needs import Estimate, Optimizer, activation_budget, fits, fixed_needs, made_within, used_bytes

GUESSES = 4
"""How often a size is predicted from two others, by the line through what is missing for them."""

MOST = 2**20
"""Multiples of ``step`` that are looked at, at most."""


@dataclass(frozen=True)
class LargestBatch:
    """What :func:`largest_batch` found.

    Attributes:
        plain: the largest size at which the plain model's step fits; 0 if none does.
        size: the largest at which a planned step does.
        plan: for that size; ``ogc.apply(model, graph, plan)`` makes the module that runs it. Without ``max_overhead``
            its overhead is estimated on a CPU.
        graph: for that size.
        needs: of a step of that size, beside activations.
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
        used = used_bytes(self.needs, self.plan, self.device_memory)
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
    ddp: bool | str = False,
    gradients: str = "none",
    shards: int = 1,
    units: NamesAndTypes = (),
    offload: str | PathLike[str] | bool = False,
    bandwidth: Bandwidth | None = None,
    host_memory: Budget | None = None,
    ranks_per_host: int = 1,
    **parsing: Any,
) -> LargestBatch:
    """The largest batch, or length of a sequence, whose training step fits on a device.

    The forward runs with the memory of inference: a few times for small sizes, and once for each answer. Graphs of
    other sizes follow from shapes, or else those near the answer are parsed.

    Args:
        model: the module to train.
        make_sample: ``make_sample(n)`` returns a sample input of size n: a batch of n, or a sequence of that length.
        device_memory: bytes of the device, or a text such as ``"24GB"``.
        optimizer, device, ddp, gradients, shards, units: as for :func:`ogc.estimate`.
        loss: as for :func:`ogc.optimize`, where it takes outputs of any size.
        make_loss: or ``make_loss(n)`` returns the loss for size n.
        max_overhead: the share of a plain step's time that a plan may add; without it any.
        step: sizes are multiples of this.
        offload, bandwidth, host_memory, ranks_per_host: plans may offload, as those of :func:`ogc.optimize`.
        parsing: further arguments of :func:`ogc.parse`.

    Raises:
        InputError: an argument is of the wrong kind.
        SolveError: not even the smallest size fits; the message says what would do.
    """
    (found,) = largest_batches(
        model,
        make_sample,
        max_overheads=(max_overhead,),
        device_memory=device_memory,
        optimizer=optimizer,
        loss=loss,
        make_loss=make_loss,
        step=step,
        device=device,
        ddp=ddp,
        gradients=gradients,
        shards=shards,
        units=units,
        offload=offload,
        bandwidth=bandwidth,
        host_memory=host_memory,
        ranks_per_host=ranks_per_host,
        **parsing,
    )
    return found


@collecting_new_only()
def largest_batches(
    model: torch.nn.Module,
    make_sample: Callable[[int], Any],
    *,
    max_overheads: Sequence[float | None],
    device_memory: Budget,
    optimizer: Optimizer | None = None,
    loss: Loss | None = None,
    make_loss: Callable[[int], Loss] | None = None,
    step: int = 1,
    device: torch.device | str | None = None,
    ddp: bool | str = False,
    gradients: str = "none",
    shards: int = 1,
    units: NamesAndTypes = (),
    offload: str | PathLike[str] | bool = False,
    bandwidth: Bandwidth | None = None,
    host_memory: Budget | None = None,
    ranks_per_host: int = 1,
    **parsing: Any,
) -> tuple[LargestBatch, ...]:
    """What :func:`largest_batch` gives for each of several overheads, with what they share found once.

    Args:
        max_overheads: in any order; None for one without a limit.
        model, make_sample, device_memory, optimizer, loss, make_loss, step, device, ddp, gradients, shards, units,
            offload, bandwidth, host_memory, ranks_per_host, parsing: as for :func:`largest_batch`.

    Raises:
        InputError, SolveError: as :func:`largest_batch` does, for any of them.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise InputError(f"step must be a number of samples, at least 1, not {step!r}")
    if loss is not None and make_loss is not None:
        raise InputError("give loss or make_loss, not both")
    if isinstance(max_overheads, (str, bytes)) or not isinstance(max_overheads, Sequence) or not max_overheads:
        raise InputError(f"max_overheads must be a list of shares of a step's time, not {max_overheads!r}")
    for max_overhead in max_overheads:
        Goal(max_overhead=max_overhead)
    offloading = Offloading.of(offload, bandwidth, host_memory, ranks_per_host)
    needs = fixed_needs(model, make_sample(step), optimizer, device, ddp, gradients, shards, units)
    if needs.device == "cpu" and set(max_overheads) == {None}:  # where bytes are all that counts, and not measured
        parsing = {"profile": "estimate", **parsing}
    parsing = {"device": device, "gradients": needs.when, **parsing}
    graphs = Graphs(model, make_sample, make_loss or (lambda size: loss), step, parsing)
    search = _Search(graphs, needs, memory_bytes(device_memory, "device_memory"), step, offloading)
    return search.find(max_overheads)


class _Search:
    """The search for one model on one device of ``room`` bytes."""

    def __init__(
        self, graphs: Graphs, needs: Estimate, room: int, step: int, offloading: Offloading | None = None
    ) -> None:
        self.graphs, self.needs, self.room, self.step = graphs, needs, room, step
        self.offloading = offloading
        self.on_host: dict[int, tuple[Graph, Graph]] = {}  # by the identity of a graph, which is the first
        self.plans: dict[tuple[int, float | None], Plan | None] = {}

    def find(self, max_overheads: Sequence[float | None]) -> tuple[LargestBatch, ...]:
        try:
            self.graphs.look()
        except RuntimeError as error:
            raise InputError(f"the model does not run for sizes {SIZES} times {self.step}: {error}") from error
        sizes = [self._largest_planned(max_overhead) for max_overhead in max_overheads]
        plain = self._largest(plain_peak, self._fits_plain)
        while not (plain == 0 or self.graphs.holds(plain, is_planned=False)):
            plain = self._largest(plain_peak, self._fits_plain)
        return tuple(self._found(plain, *each) for each in zip(sizes, max_overheads, strict=True))

    def _found(self, plain: int, size: int, max_overhead: float | None) -> LargestBatch:
        graph, plan = self._with_host(self.graphs.of(size)), self._plan(size, max_overhead)
        assert plan is not None
        plan = replace(plan, graph=graph)
        return LargestBatch(plain, size, plan, graph, self._needs(size), self.room, size + self.step)

    def _largest_planned(self, max_overhead: float | None) -> int:
        """The largest size of which a planned step fits; raises SolveError where there is none."""

        def least_peak(graph: Graph) -> int:
            goal = Goal(LEAST) if max_overhead is None else Goal(max_overhead=max_overhead)
            return optimal(self._with_host(graph), goal).peak_bytes

        while True:
            size = self._largest(least_peak, lambda size: self._plan(size, max_overhead))
            if not size:
                least_plan = optimal(self._with_host(self.graphs.of(self.step)), LEAST_PEAK)
                least = self._needs(self.step).with_activations(least_plan.peak_bytes)
                without = "" if max_overhead is None else " without max_overhead"
                raise SolveError(
                    f"no step of size {self.step} fits on a device of {self.room / MIB:.1f} MiB; the smallest that "
                    f"would do{without} has {least / MIB:.1f} MiB"
                )
            if self.graphs.holds(size, is_planned=True):
                return size
            self.plans.clear()  # their graphs may have been others

    def _largest(self, peak_of: Callable[[Graph], int], proved: Callable[[int], object]) -> int:
        """The largest size that is ``proved`` to fit where the next is proved not to; 0 if none does.

        ``peak_of`` gives the least peak that counts, on a graph that may be a guess.
        """
        most = MOST * self.step
        low, high, stride = 0, most + self.step, self.step  # fits, does not
        for number in count():
            if high - low <= self.step:
                break
            # A prediction is near, and nearer once a large size is known; kernels may do otherwise at each size.
            guess = self._predicted(peak_of, low, high) if number < 2 else low
            is_downwards = guess <= low and not low and high <= most  # where nothing is known to fit
            if guess <= low:
                guess = max(high - stride, self.step) if is_downwards else min(low + stride, high - self.step)
                stride *= 2
            does_fit = bool(proved(guess))
            low, high = (guess, high) if does_fit else (low, guess)
            if does_fit == is_downwards:  # both ends are known
                stride = self.step
        return low

    def _predicted(self, peak_of: Callable[[Graph], int], low: int, high: int) -> int:
        """The largest size between both that fits, about: by secants through sizes whose graphs are soon found."""

        def excess(size: int) -> int | None:
            graph = self.graphs.like(size)
            return None if graph is None else peak_of(graph) - self._budget(size)

        before, size = min(self.graphs.known), max(self.graphs.known)
        more_before, more = excess(before), excess(size)
        assert more_before is not None and more is not None
        for _ in range(GUESSES):
            slope = (more - more_before) / (size - before)
            if slope <= 0:
                break
            root = int((size - more / slope) // self.step) * self.step
            root = min(max(root, low, self.step), high - self.step)
            if root in (before, size) or (more_at_root := excess(root)) is None:
                return root
            before, more_before, size, more = size, more, root, more_at_root
        return size

    def _with_host(self, graph: Graph) -> Graph:
        """The graph, whose plans may offload if that is asked for."""
        if self.offloading is None:
            return graph
        if id(graph) not in self.on_host:
            self.on_host[id(graph)] = graph, self.offloading.on(graph)
        return self.on_host[id(graph)][1]

    def _needs(self, size: int) -> Estimate:
        return replace(self.needs, inputs=self.graphs.input_bytes(size))

    def _budget(self, size: int) -> int:
        return activation_budget(self._needs(size), self.room)

    def _planned(self, graph: Graph, size: int, max_overhead: float | None) -> Plan | None:
        """The plan for a graph that fits, if there is one."""
        budget = self._budget(size)
        if budget < max(1, lower_bound(graph)):
            return None

        def solved(budget: int) -> Plan:
            return solve(self._with_host(graph), memory_budget=budget)

        try:
            plan = made_within(self._needs(size), self.room, budget, solved, lambda plan: plan)
        except SolveError:
            return None
        is_slow = max_overhead is not None and plan.overhead > max_overhead
        return None if is_slow else plan

    def _plan(self, size: int, max_overhead: float | None) -> Plan | None:
        if (size, max_overhead) not in self.plans:
            self.plans[size, max_overhead] = self._planned(self.graphs.of(size), size, max_overhead)
        return self.plans[size, max_overhead]

    def _fits_plain(self, size: int) -> bool:
        graph = self.graphs.of(size, is_timed=False)
        fits_counted = plain_peak(graph) <= self._budget(size)
        return fits_counted and fits(self._needs(size), plain_plan(graph), self.room)
