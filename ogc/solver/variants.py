"""Which operators run in their low-memory form: as few as the wish takes, each at its price.

Decisions are looked for with PyTorch's own operators first. Where forms would lower the peak that is found, they are
looked for once more as if every form ran and cost nothing, which allows the most; then each operation gets PyTorch's
own operator back where that does not raise the peak. The better one of both is taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property

from ..graph import Graph, Operation
from ..plan import simulate
from ..plan.decisions import Decisions
from .candidates import Candidate, front_of, weigh
from .search import Search

WORTH_A_SEARCH = 0.005
"""Share by which all low-memory forms must lower the peak of a plan for plans with them to be looked for as well."""

MOST_TRIALS = 12
"""Forms that change what is kept are taken back one by one, with a simulation each, as far as these go."""

ATTEMPTS = 3
"""How often less recomputation is asked for, where what forms take would exceed the overhead that is allowed."""


class FormSearch:
    """Plans over a graph whose operations may have low-memory forms; what :class:`.search.Search` is without them."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    @cached_property
    def economical(self) -> Search:
        """Plans in which every form runs and costs nothing."""
        free = replace(self.graph, operations=tuple(map(_with_free_form, self.graph.operations)))
        return Search(free.with_variants(self.graph.low_memory))

    @cached_property
    def own(self) -> Search:
        """Plans of PyTorch's own operators alone."""
        return Search(self.graph.with_variants(()))

    @cached_property
    def least_peak(self) -> Candidate:
        """The plan with the least peak, and the fastest of those."""
        return self._fewest(self.economical.least_peak)

    def fastest(self, peak: int) -> Candidate | None:
        """The fastest plan found whose simulated peak is at most ``peak`` bytes."""
        own = self.own.fastest(peak) if max(self.own.graph.operation_bounds) <= peak else None
        if own is not None and not self._forms_lower(own):
            return own
        found = self.economical.fastest(peak)
        both = own, None if found is None else self._fewest(found, peak)
        best = min(filter(None, both), key=lambda c: (c.seconds, c.peak_bytes), default=None)
        if best is None and self.least_peak.peak_bytes <= peak:  # which fewer forms may have lowered
            return self.least_peak
        return best

    def within(self, seconds: float) -> Candidate | None:
        """The plan found with the least simulated peak of those that add at most ``seconds``."""
        own = self.own.within(seconds)
        if own is not None and not self._forms_lower(own):
            return own
        found, limit = [*filter(None, [own]), self.least_peak], seconds
        for _ in range(ATTEMPTS):
            candidate = self.economical.within(limit)
            if candidate is None:
                break
            found.append(self._fewest(candidate))
            if found[-1].seconds <= seconds:
                break
            limit = seconds - (found[-1].seconds - candidate.seconds)  # less than what this one takes
        return min((c for c in found if c.seconds <= seconds), default=None)

    def curve(self, points: int) -> list[Candidate]:
        """Plans from the least peak to the saved model, each faster and larger than the one before."""
        found = self.own.curve(points)
        if any(map(self._forms_lower, found)):
            found += [self._fewest(c) for c in self.economical.curve(points)]
        return front_of([self.least_peak, *found])

    def _forms_lower(self, found: Candidate) -> bool:
        """Whether all forms would lower the peak of a plan that has none, by enough for others to be looked for.

        Or that of another: a plan that peaks at what one operation takes may take as much elsewhere, to be quick.
        """
        enough = (1 - WORTH_A_SEARCH) * found.peak_bytes
        if max(self.own.graph.operation_bounds) >= enough:
            return max(self.graph.with_variants(self.graph.low_memory).operation_bounds) < enough
        all_forms = replace(found.decisions, low_memory=self.graph.low_memory)
        return simulate(self.graph, all_forms).peak_bytes < enough

    def _fewest(self, found: Candidate, peak: int | None = None) -> Candidate:
        """The same plan with the fewest forms with which it peaks at no more than ``peak``, or than it does."""
        return fewest_forms(self.graph, found, found.peak_bytes if peak is None else peak)


def _with_free_form(op: Operation) -> Operation:
    """The operation with a low-memory form that takes the time of PyTorch's operator."""
    if op.low_memory is None:
        return op
    form = replace(
        op.low_memory,
        forward_seconds=op.forward_seconds,
        backward_seconds=op.backward_seconds,
        repeat_seconds=None,
    )
    return replace(op, low_memory=form)


def fewest_forms(graph: Graph, found: Candidate, peak: int) -> Candidate:
    """A plan that was made for all low-memory forms, with as few of them as ``peak`` bytes take.

    A form that saves what PyTorch's own operator saves only changes the bytes while the operation itself runs: those
    that are needed are read off one timeline. The others are tried one by one.
    """
    keeping = [t for t in graph.low_memory if graph.operations[t].variant_saves_otherwise]
    best = _with_needed(graph, found.decisions, keeping, peak)
    if best is None:  # the forms of operations that the search saw otherwise
        return weigh(graph, replace(found.decisions, low_memory=graph.low_memory))
    for dropped in ([*keeping], *([t] for t in keeping[:MOST_TRIALS])):
        rest = [t for t in keeping if t not in dropped]
        other = _with_needed(graph, found.decisions, rest, peak) if len(rest) < len(keeping) else None
        if other is not None and other.seconds < best.seconds:
            best, keeping = other, rest
    return best


def _with_needed(graph: Graph, decisions: Decisions, keeping: Iterable[int], peak: int) -> Candidate | None:
    """The plan with these forms and those without which some operation would exceed ``peak``, if it fits then."""
    first = simulate(graph, replace(decisions, low_memory=tuple(keeping)))
    needed = {event.operation for event in first.timeline if event.bytes > peak}.intersection(graph.low_memory)
    found = weigh(graph, replace(decisions, low_memory=tuple(sorted(needed.union(keeping)))))
    return found if found.peak_bytes <= peak else None


def search_of(graph: Graph) -> FormSearch | Search:
    """What finds plans of a graph."""
    return FormSearch(graph) if graph.low_memory else Search(graph)
