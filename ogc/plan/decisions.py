"""The decisions of a plan: where the program is cut, which segments are recomputed, and the policies of single values.

What that means for operations and values: :mod:`ogc.plan.schedule`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import chain, pairwise
from typing import NamedTuple, Protocol

from ..errors import PlanError
from ..graph import Graph, Told


class Policy(IntEnum):
    """The policy of one value. One without is saved where it crosses a cut, and else recomputed with its segment."""

    SAVED = 1
    """Saved although a recomputed segment alone uses it: what makes it is not recomputed for that segment."""
    RECOMPUTED = 2
    """Not saved although it crosses a cut: every run that needs it recomputes it, however far back that lies."""
    OFFLOADED = 3
    """Saved, but not on the device: :class:`Offload` says from when to when."""


Policies = tuple[tuple[int, Policy], ...]
"""Values and their policies, by ascending value."""


class Offload(NamedTuple):
    """A value of the forward that leaves the device's memory until its backward, and when.

    The copy out starts behind the last operation that writes the value. The first step that needs the value again waits
    for the copy back, and starts it where that comes before ``back``.

    Attributes:
        value: its number.
        gone: the operation of the forward before which the copy out has ended and the bytes are free; the number of the
            model's operations: before what follows its forward.
        back: the operation before whose backward memory is taken and the copy back starts.
    """

    value: int
    gone: int
    back: int


@dataclass(frozen=True, order=True)
class Segment:
    """Operations ``start`` to ``stop - 1``, between two cuts.

    Without ``parts`` the segment is saved, as by plain autograd. With them it is recomputed: its first run saves only
    what later segments need, and before its backward it is recomputed as its parts say, each saved or recomputed in
    turn. One level of checkpointing is a segment with one saved part. ``policies`` hold in its runs and its parts'.
    """

    start: int
    stop: int
    parts: tuple[Segment, ...] = ()
    policies: Policies = ()

    @property
    def depth(self) -> int:
        """How many times the deepest part is recomputed."""
        return 1 + max(part.depth for part in self.parts) if self.parts else 0

    @property
    def saved_values(self) -> tuple[int, ...]:
        """The values that the first run saves although the segment alone uses them, ascending."""
        return _with(Policy.SAVED, self.policies)


class Decided(Protocol):
    """Anything with decisions, such as an :class:`ogc.Plan`."""

    @property
    def decisions(self) -> Decisions: ...


@dataclass(frozen=True, order=True)
class Decisions:
    """All that a plan decides.

    Attributes:
        segments: in program order; they cover the program.
        policies: policies of single values in every run; they override those of segments.
        low_memory: operations that run as their low-memory variant, ascending; all others are PyTorch's own operators.
        is_plain: whether the model itself is to be run.
        offloaded: the values that are :attr:`Policy.OFFLOADED`, ascending, whatever else is decided on them.
    """

    segments: tuple[Segment, ...]
    policies: Policies = ()
    low_memory: tuple[int, ...] = ()
    is_plain: bool = False
    offloaded: tuple[Offload, ...] = ()

    @classmethod
    def of(cls, plan: Decided | Decisions | Iterable[Segment]) -> Decisions:
        """The decisions of a plan, or of segments alone."""
        if isinstance(plan, Decisions):
            return plan
        return cls(tuple(plan)) if isinstance(plan, Iterable) else plan.decisions

    def recomputing(self, values: Iterable[int]) -> Decisions:
        """These decisions, but with the values :attr:`Policy.RECOMPUTED`."""
        policies = {**dict(self.policies), **dict.fromkeys(values, Policy.RECOMPUTED)}
        return replace(self, policies=tuple(sorted(policies.items())))

    def as_told(self, told: Told) -> Decisions:
        """These decisions, with the policies that the user told."""
        if not told:
            return self
        kept, lost = dict.fromkeys(told.saved, Policy.SAVED), dict.fromkeys(told.recomputed, Policy.RECOMPUTED)
        return replace(self, policies=tuple(sorted({**dict(self.policies), **kept, **lost}.items())))

    @property
    def recomputed_values(self) -> tuple[int, ...]:
        """The values that are not saved where they cross a cut, ascending."""
        return _with(Policy.RECOMPUTED, self.policies)

    @property
    def saved_values(self) -> frozenset[int]:
        """The values that the forward saves although a recomputed segment alone uses them, offloaded ones too."""
        own = _with(Policy.SAVED, chain(self.policies, *(segment.policies for segment in self.segments)))
        return frozenset(own).union(one.value for one in self.offloaded)

    @property
    def policies_of_runs(self) -> Policies:
        """All policies that hold in every run."""
        if not self.offloaded:
            return self.policies
        out = {one.value: Policy.OFFLOADED for one in self.offloaded}
        return tuple(sorted({**dict(self.policies), **out}.items()))

    def check(self, graph: Graph) -> None:
        """Raise PlanError unless the segments cover the graph, cut at its cuts, and each value can have its policy."""
        _check_level(graph, set(graph.cuts), self.segments, 0, len(graph))
        for v, _ in self.policies:
            if not 0 <= v < len(graph.values):
                raise PlanError(f"the plan decides on value {v}, which the graph lacks")
        for t in self.low_memory:
            if not 0 <= t < len(graph):
                raise PlanError(f"the plan decides on operation {t}, which the graph lacks")
        _check_moments(self.policies)
        if self.offloaded:
            _check_offloaded(graph, self.offloaded)


def saved(start: int, stop: int) -> Segment:
    """A segment that is saved as by plain autograd."""
    return Segment(start, stop)


def recomputed(start: int, stop: int, *parts: Segment, saved_values: Iterable[int] = ()) -> Segment:
    """A segment that is recomputed, through ``parts`` or, without them, at once, but for ``saved_values``."""
    return Segment(
        start, stop, parts or (Segment(start, stop),), tuple((v, Policy.SAVED) for v in sorted(saved_values))
    )


def cut_into_segments(cuts: Sequence[int], recompute: Sequence[bool]) -> tuple[Segment, ...]:
    """Segments between consecutive ``cuts``, each recomputed at once or saved."""
    return tuple(
        recomputed(*span) if again else saved(*span) for span, again in zip(pairwise(cuts), recompute, strict=True)
    )


MadeWithin = Callable[[int, int, int], bool]
"""Whether a value is made between two positions."""


def fitted(segment: Segment, start: int, stop: int, made_within: MadeWithin) -> Segment:
    """The segment with other ends: its parts are clipped, the outer ones reach to the ends; its policies as far as
    they are on values that it makes then."""
    if (segment.start, segment.stop) == (start, stop):
        return segment
    if not segment.parts:
        return saved(start, stop)
    parts = [part for part in segment.parts if part.start < stop and part.stop > start] or [saved(start, stop)]
    edges = [start, *(part.start for part in parts[1:]), stop]
    inner = (fitted(part, *ends, made_within) for part, ends in zip(parts, pairwise(edges), strict=True))
    policies = tuple(each for each in segment.policies if made_within(each[0], start, stop))
    return Segment(start, stop, tuple(inner), policies)


def clipped(segments: Iterable[Segment], start: int, stop: int, made_within: MadeWithin) -> Iterator[Segment]:
    """The segments as far as they lie between two positions."""
    for segment in segments:
        if segment.start < stop and segment.stop > start:
            yield fitted(segment, max(segment.start, start), min(segment.stop, stop), made_within)


def shifted(segment: Segment, by: int, renumbered: Callable[[Policies], Policies]) -> Segment:
    """The segment so many operations further on, where its policies are on other values."""
    parts = tuple(shifted(part, by, renumbered) for part in segment.parts)
    return Segment(segment.start + by, segment.stop + by, parts, renumbered(segment.policies))


def up_to(segments: Iterable[Segment], stop: int) -> tuple[Segment, ...]:
    """The segments as far as they lie before a position."""
    return tuple(
        segment if segment.stop <= stop else replace(segment, stop=stop, parts=up_to(segment.parts, stop))
        for segment in segments
        if segment.start < stop
    )


def _with(wanted: Policy, policies: Iterable[tuple[int, Policy]]) -> tuple[int, ...]:
    return tuple(v for v, policy in policies if policy is wanted)


def _check_moments(policies: Policies) -> None:
    if away := _with(Policy.OFFLOADED, policies):
        raise PlanError(f"value {away[0]} is to be offloaded at no moment: give it as an ogc.Offload")


def _check_offloaded(graph: Graph, offloaded: tuple[Offload, ...]) -> None:
    if graph.host is None:
        raise PlanError("the plan offloads values, and the graph has no host to offload them to; see ogc.Host")
    may_leave, before = graph.offloadable, -1
    for v, gone, back in offloaded:
        if not before < v < len(graph.values):
            raise PlanError(f"the plan offloads value {v}, which the graph lacks, or which follows value {before}")
        name, before = graph.values[v].name, v
        if v not in may_leave:
            raise PlanError(f"value {name} cannot be offloaded: its caller or an opaque module holds it")
        if not graph.last_uses[v] < gone <= graph.end:
            raise PlanError(
                f"value {name} cannot be gone before operation {gone}: the forward uses it up to operation "
                f"{graph.last_uses[v]}, and ends with operation {graph.end - 1}"
            )
        if not 0 <= back < len(graph):
            raise PlanError(f"value {name} is to be back before operation {back}, which the graph lacks")
    if not graph.fits_host(one.value for one in offloaded):
        size = sum(graph.values[one.value].bytes for one in offloaded)
        raise PlanError(f"the plan offloads {size} bytes, more than the {graph.host.memory} that the host has for them")


def _check_level(graph: Graph, allowed: set[int], segments: Sequence[Segment], start: int, stop: int) -> None:
    edges = [start, *(s.stop for s in segments)]
    if [s.start for s in segments] != edges[:-1] or edges[-1] != stop:
        raise PlanError(f"the segments do not cover operations {start} to {stop - 1} in order")
    for segment in segments:
        _check_moments(segment.policies)
        if segment.stop <= segment.start or segment.stop not in allowed:
            raise PlanError(f"position {segment.stop} is no cut of this graph after {segment.start}; see Graph.cuts")
        for v, _ in segment.policies:
            made = 0 <= v < len(graph.values) and segment.start <= graph.producers[v] < segment.stop
            if not (made and segment.parts):
                raise PlanError(f"segment {segment.start}-{segment.stop - 1} does not make value {v} again")
        if segment.parts:
            _check_level(graph, allowed, segment.parts, segment.start, segment.stop)
