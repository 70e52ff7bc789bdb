"""One search per graph for many questions, with the exact outermost level over nested tables.

The simulator weighs every answer: what tables round, or count for a boundary that nobody needs, is not lost.

Low-memory variants: decisions are looked for with PyTorch's own operators first. Where variants would lower the peak
that is found, they are looked for once more as if every variant ran and cost nothing, which allows the most; then each
operation gets PyTorch's own operator back where that does not raise the peak. The better one of both is taken.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

import numpy as np

from ..errors import PlanError
from ..graph import MIB, Graph, Operation
from ..plan.decisions import Decisions, Segment, recomputed
from ..plan.fast import Replay
from ..plan.simulate import lower_bound, simulate
from ..process import is_late, tell_stage
from .candidates import Candidate, but_told, drop_one_by_one, finest, front_of, selective, weigh, worth_keeping
from .costs import Costs, Ints, SegmentCosts
from .cuts import alike, choose_grids, distinct, narrowest
from .levels import NestedTable, OuterLevel
from .paths import LABELS, NEAR_ENOUGH, SLACK

LEVELS = 160
"""Units into which a nested table divides the available bytes. More round less; time and memory grow with them."""

FINE_LEVELS = 320
"""Units of the table for the least peak, which rounding makes larger."""

ROUGH_LEVELS = 48
ROUGH_LABELS = 20_000
"""Units of a table, and labels of the outermost level, where a first idea is enough: several times fewer."""

ROUGH = 0.02
"""Share by which a first idea of the least peak may be too large: about one unit of its table."""

STEP = 1.4
"""Ratio of the peak that a table was made for to the least that it serves: its units get coarse for less."""

MAX_CUTS = 800
MAX_CELLS = 3_000_000
MIN_CUTS = 250
"""Most cuts, most cuts times operations, and cuts whatever there are of these: time is quadratic in the cuts, memory
linear in both. Longer programs are cut where they are narrowest."""

FEW_CUTS = 300
"""Cuts up to which all are looked at: with more, fronts of labels are so thin that nothing better is found."""

FIRST_CUTS = 150
MOST_FIRST_CUTS = 250
OPERATIONS_PER_CUT = 20
"""Cuts of a longer program that are looked at together: the fewest, the most, one for so many operations in between."""

MOST_SECOND_CUTS = 350
"""Cuts that are looked at then where few are alike."""

AROUND = 2
NEAR_VOTE = 0.1
"""Cuts on either side of a used one that are looked at too, and what they count beside it."""

NEAR_LEAST = 1.1
PERHAPS_LEAST = 2.0
"""Ratios of a budget, and of a peak found for a time in a long program, to the lower bound, up to which the plan with
the least peak is looked at too."""

NEARLY_ALL = 0.9
"""Share of the seconds that are allowed which a plan takes, or else something is in its way: then low-memory variants
are looked at and, in a long program, the plan with the least peak."""

ROUNDS = 3
FURTHER = 0.93
FEW_PEAKS = 3
"""How often cuts are chosen by the plan before, the share of its peak that is not gone below where a plan is known
there, and the peaks that are tried in between."""

KEPT_VALUES_UP_TO = 600
"""Operations up to which segments that keep values are tried for the least peak too: single operations bound that in
small programs, which leaves bytes to spare elsewhere."""

PEAKS = 8
CLOSE = 0.005
ROUGHLY_CLOSE = 0.03
"""Peaks that are tried at most for a time, and the share by which the next has to differ, at last and first."""

WIDE = 1.15
WIDEST = 2.0
"""Ratios of the peaks left above which rough labels are enough, and above which the next peak halves the range."""

WORTH_A_SEARCH = 0.005
"""Share by which all low-memory variants must lower a plan's peak for plans with them to be looked for as well."""

MOST_TRIALS = 12
"""Variants that save something else are taken back one by one, with a simulation each, up to so many."""

NEAR_KNEE = 1.05
"""Ratio of a peak to the least within a time, up to which one that takes less time may be the better bargain."""

ATTEMPTS = 3
"""How often less recomputation is asked for, where the time of variants exceeds the overhead that is allowed."""

Known = tuple[int, float]
"""A peak in bytes and the seconds of the fastest plan known within it."""


class CutSearch:
    """Plans of a graph between ``cuts``, positions of which the first and the last are the ends of the program.

    Unless they are ``nested``, no segment is recomputed through parts: then no operation runs more than twice. One that
    is recomputed may keep the values of one of these sets.
    """

    def __init__(
        self, graph: Graph, cuts: Sequence[int], nested: bool = True, kept_values: Sequence[Collection[int]] = ()
    ) -> None:
        self.graph, self.nested, self.kept_values = graph, nested, kept_values
        self.weights = SegmentCosts(graph, cuts)
        self.grids = choose_grids(graph, self.cuts)
        self.tables: dict[tuple[int, int], NestedTable] = {}  # by the peak and the units they were made for
        self.level: OuterLevel | None = None  # the last one that was asked for: each takes memory

    @property
    def cuts(self) -> Ints:
        """The positions."""
        return self.weights.cuts

    def least_peak(self, above: int) -> tuple[Segment, ...] | None:
        """A plan with the least peak, where none peaks at ``above`` bytes; None if none keeps to what is told."""
        if not self.nested:
            level = OuterLevel(self._costs)
            return level.fastest(level.least_peak(above=above))
        self.tables.clear()  # or what was asked before would decide how it is rounded
        costs = self.weights.costs(*but_told(self.graph))
        flat = OuterLevel(costs.between(self.grids[:2][-1].chosen)).least_peak(above=above, tolerance=ROUGH)
        rough = OuterLevel(costs, self._table(flat, ROUGH_LEVELS)).least_peak(above=above, near=flat, tolerance=ROUGH)
        level = OuterLevel(costs, self._table(rough, FINE_LEVELS))
        least = level.least_peak(above=above, near=rough)
        # So few plans fit that the fastest is seldom near the bound: do not start with those that are.
        return level.fastest(least, ROUGH_LABELS, SLACK[2:])

    def fastest(self, peak: int, labels: int, staying: float = 1.0) -> tuple[Segment, ...] | None:
        """The fastest plan for ``peak`` bytes, with so many labels in all, or None if nothing fits.

        Of what it keeps for the backward, such a share is ``staying`` in the device's memory.
        """
        table = self._table(peak) if self.nested else None
        if staying < 1.0:
            return OuterLevel(self._costs.staying(staying), table).fastest(peak, labels)
        if self.level is None or self.level.table is not table:
            self.level = OuterLevel(self._costs, table)
        return self.level.fastest(peak, labels)

    def _table(self, peak: int, levels: int = LEVELS) -> NestedTable:
        """A table whose range is right for ``peak``."""
        for (top, units), table in self.tables.items():
            if top / STEP <= peak <= top and units >= levels:
                return table
        self.tables[peak, levels] = NestedTable(self.weights.nested, self.grids, peak, levels)
        return self.tables[peak, levels]

    @cached_property
    def _costs(self) -> Costs:
        """The weights of the outermost level with segments that keep values."""
        return self.weights.costs(*self.kept_values).undominated()


class Search:
    """Plans over one weighted graph, by the outermost level and, where they are ``nested``, tables of parts.

    A long program has more cuts than are of use at once: fronts of labels are thinned the more, the more cuts share
    them. A plan is looked for between few cuts first, then between those like the ones that it uses, in all layers.
    """

    def __init__(self, graph: Graph, nested: bool = True) -> None:
        self.graph, self.nested, self.costs = graph, nested, Replay(graph)
        self.seen: dict[tuple[Segment, ...], Candidate] = {}

    @cached_property
    def least_peak(self) -> Candidate:
        """The plan with the least peak, and the fastest of those."""
        segments, best = self._all_cuts.least_peak(lower_bound(self.graph) - 1), self._saved
        if segments is not None:
            with suppress(PlanError):  # as in _at
                best = min(best, self._weigh(segments))
        if not self.nested or is_late():
            return best
        best = finest(self.costs, drop_one_by_one(self.costs, best))
        if len(self.graph) > KEPT_VALUES_UP_TO:
            return best
        return min(best, self._at(best.peak_bytes, self._all_cuts) or best)

    def fastest(self, peak: int) -> Candidate | None:
        """The fastest plan found whose simulated peak is at most ``peak`` bytes."""
        if peak < lower_bound(self.graph):  # tables for so little would have as many units as there are bytes
            return None
        found = self._fitting(peak, self._some_cuts)
        if found and self._some_cuts is not self._all_cuts:
            found = self._faster(found, peak)
        # If so few plans fit, all cuts can be looked at, and the one with the least peak may be as fast.
        few = not found or found.seconds > self.graph.forward_seconds or peak < NEAR_LEAST * lower_bound(self.graph)
        if few and self._some_cuts is not self._all_cuts:
            self._fitting(peak, self._all_cuts)
        known = [*self.seen.values(), *([self.least_peak] if few else [])]
        return min((c for c in known if c.peak_bytes <= peak), key=_by_time, default=None)

    def _faster(self, found: Candidate, peak: int) -> Candidate:
        """The fastest plan within ``peak`` bytes between cuts like those of one that was found, or that one."""
        for _ in range(ROUNDS):
            before = found
            found = min(before, self._fitting(peak, self._around([before])) or before, key=_by_time)
            if found.seconds > (1 - CLOSE) * before.seconds or is_late():
                break
        return found

    def _fitting(self, peak: int, cuts: CutSearch) -> Candidate | None:
        """The fastest plan found between some cuts whose simulated peak is at most ``peak`` bytes."""
        # The simulator may find that plans for a little more fit after all.
        less = 0.0  # share of what was asked for that the simulator finds
        for share in (1.07, 1.03, 1.01, 1.0):
            if share > 1.0 and share * less > 1 + CLOSE:
                continue
            here = self._at(int(peak * share), cuts)
            if here is not None and here.peak_bytes <= peak:
                return here
            less = less if here is None else here.peak_bytes / (peak * share)
        return None

    def within(self, seconds: float) -> Candidate | None:
        """The plan found with the least simulated peak of those that recompute for at most ``seconds``."""
        if self._saved.seconds > seconds:
            return None
        if self._some_cuts is self._all_cuts:
            if self.least_peak.seconds <= seconds:
                return self.least_peak
            low = self.least_peak.peak_bytes, self.least_peak.seconds
            low = self._narrow(low, self._saved, seconds, self._all_cuts, PEAKS)
            found = self._best_within(seconds)
            if found.peak_bytes > low[0]:
                self._at(found.peak_bytes, self._all_cuts)  # there may be a faster one for the same bytes
            return self._best_within(seconds)
        low = lower_bound(self.graph) - 1, np.inf
        low = self._narrow(low, self._saved, seconds, self._some_cuts, PEAKS, rough=True)
        for _ in range(ROUNDS):
            before = self._best_within(seconds)
            self._narrow_further(low, before, seconds)
            if self._best_within(seconds).peak_bytes > (1 - CLOSE) * before.peak_bytes or is_late():
                break
        found = self._best_within(seconds)
        near = low[1] == np.inf or found.peak_bytes < PERHAPS_LEAST * lower_bound(self.graph)
        perhaps = near or found.seconds < NEARLY_ALL * seconds
        return min(found, self.least_peak) if perhaps and self.least_peak.seconds <= seconds else found

    def _narrow_further(self, low: Known, found: Candidate, seconds: float) -> None:
        """Look at peaks below that of a plan between cuts like those that it uses."""
        cuts = self._around([found])
        found = min(self._at(found.peak_bytes, cuts) or found, found, key=_by_time)
        below = FURTHER * found.peak_bytes
        slower = max((c for c in self.seen.values() if c.seconds > seconds and c.peak_bytes < below), default=None)
        self._narrow((slower.peak_bytes, slower.seconds) if slower else low, found, seconds, cuts, FEW_PEAKS)

    def _best_within(self, seconds: float) -> Candidate:
        return min(c for c in (self._saved, *self.seen.values()) if c.seconds <= seconds)

    def _narrow(
        self, low: Known, fast: Candidate, seconds: float, cuts: CutSearch, peaks: int, rough: bool = False
    ) -> Known:
        """Look for the least peak below that of a ``fast`` plan with a plan of at most so many ``seconds``.

        Args:
            low: bytes within which there is none.
            cuts: between which plans are looked for.
            peaks: that are looked at, at most.
            rough: a first idea is enough.

        Returns:
            What ``low`` is then.
        """
        high, close = (fast.peak_bytes, fast.seconds), ROUGHLY_CLOSE if rough else CLOSE
        halve = high[0] > WIDEST * low[0]
        for number in range(1 + peaks):
            least, most, before = (1 + close) * low[0], (1 - close) * high[0], high[0] / low[0]
            if least > most or (number and is_late()):
                break
            halve = halve or low[1] == np.inf
            guess = np.sqrt(float(low[0]) * high[0]) if halve else _between(low, high, seconds, number)
            middle = int(min(max(guess, least), most))
            labels = ROUGH_LABELS if rough or before > WIDE else LABELS
            here = self._at(middle, cuts, labels)
            if labels < LABELS and not rough and here is not None and seconds < here.seconds <= NEAR_ENOUGH * seconds:
                here = self._at(middle, cuts)  # it may fit after all
            if here is not None and here.seconds <= seconds:
                high = min(middle, here.peak_bytes), here.seconds
            else:
                low = middle, low[1] if here is None else here.seconds
            # Near the end one of both ends hardly moves: if the last step has not halved what is left, the next does.
            halve = not halve and (high[0] / low[0]) ** 2 > before
        return low

    def curve(self, points: int) -> list[Candidate]:
        """Plans from the least peak to the saved model, each faster and larger than the one before."""
        peaks = np.geomspace(self._saved.peak_bytes, self.least_peak.peak_bytes, points)[1:-1]
        sweeps = 1 if self._some_cuts is self._all_cuts else 2
        for sweep in range(sweeps):
            cuts = self._around(front_of(self.seen.values())) if sweep else self._some_cuts
            for peak in peaks:  # descending: a table serves those below
                self._at(int(peak), cuts, ROUGH_LABELS)
        # What is a hair below the least peak recomputes the step many times over.
        found = (c for c in selective(self.costs) if c.peak_bytes > self.least_peak.peak_bytes)
        return front_of([self.least_peak, *self.seen.values(), *found])

    def offloading(self, peak: int, shares: Sequence[float]) -> None:
        """Look for plans that peak at ``peak`` where such shares of what they keep for the backward stay."""
        for share in shares:
            self._at(peak, self._some_cuts, ROUGH_LABELS, share)

    @property
    def found(self) -> Iterable[Candidate]:
        """All plans that were weighed."""
        least = vars(self).get("least_peak")
        return [*self.seen.values(), *filter(None, [least])]

    @cached_property
    def _saved(self) -> Candidate:
        """The plan that recomputes nothing, or what is told alone."""
        end, others = self.graph.end, but_told(self.graph)
        if others:
            outside = (Segment(end, len(self.graph)),) if self.graph.outside else ()
            return self._weigh((recomputed(0, end, saved_values=others[0]), *outside))
        return self._weigh((Segment(0, len(self.graph)),))

    @cached_property
    def _all_cuts(self) -> CutSearch:
        """Plans between all cuts, or as many as a program of this length allows."""
        most = min(MAX_CUTS, max(MIN_CUTS, MAX_CELLS // max(1, len(self.graph))))
        return self._between(narrowest(self.graph, distinct(self.graph), most))

    @property
    def _few(self) -> int:
        """Cuts that are looked at together in a long program."""
        return min(MOST_FIRST_CUTS, max(FIRST_CUTS, len(self.graph) // OPERATIONS_PER_CUT))

    @cached_property
    def _some_cuts(self) -> CutSearch:
        """Plans between so many cuts as are looked at first."""
        cuts = self._all_cuts.cuts
        if len(cuts) <= FEW_CUTS:
            return self._all_cuts
        return self._between(narrowest(self.graph, cuts, self._few))

    def _around(self, found: Iterable[Candidate]) -> CutSearch:
        """Plans between the cuts that some plans use, those that are like them in other layers, and some about them."""
        cuts = self._all_cuts.cuts
        used = np.searchsorted(cuts, sorted({cut for c in found for s in c.decisions.segments for cut in _ends(s)}))
        near = np.clip(used[:, None] + np.arange(-AROUND, AROUND + 1), 0, len(cuts) - 1).ravel()
        kinds, sizes = self._kinds, np.bincount(self._kinds)
        votes, near_votes = (np.bincount(kinds[some], minlength=len(sizes)) for some in (used, near))
        votes = votes + NEAR_VOTE * near_votes
        chosen = np.isin(cuts, (*cuts[used], self.graph.end))
        for kind in np.argsort(-votes / sizes, kind="stable"):
            if votes[kind] and chosen.sum() + sizes[kind] <= self._few:
                chosen |= kinds == kind
        # Where few cuts are alike, others of this program are no worse a guess than those.
        others = np.flatnonzero(~chosen)
        more = max(0, min(MOST_SECOND_CUTS, len(sizes)) - int(chosen.sum()))
        chosen[others[np.linspace(0, len(others), more, endpoint=False).astype(int)]] = True
        return self._between(cuts[chosen].tolist())

    def _between(self, cuts: Sequence[int]) -> CutSearch:
        return CutSearch(self.graph, cuts, self.nested, self._kept_values)

    @cached_property
    def _kept_values(self) -> Sequence[Collection[int]]:
        return worth_keeping(self.graph)

    @cached_property
    def _kinds(self) -> Ints:
        return alike(self.graph, self._all_cuts.cuts)

    def _at(self, peak: int, cuts: CutSearch, labels: int = LABELS, staying: float = 1.0) -> Candidate | None:
        """The fastest plan for ``peak`` between some cuts, or None if nothing fits."""
        tell_stage(f"search within {peak / MIB:.1f} MiB")
        segments = cuts.fastest(peak, labels, staying)
        try:
            return None if segments is None else self._weigh(segments)
        except PlanError:  # what the user told to recompute, from further back than was counted
            return None

    def _weigh(self, segments: tuple[Segment, ...]) -> Candidate:
        if segments not in self.seen:
            self.seen[segments] = weigh(self.costs, Decisions(segments))
        return self.seen[segments]


class VariantSearch:
    """Plans over a graph with low-memory variants; what :class:`Search` is without them."""

    def __init__(self, graph: Graph, nested: bool = True) -> None:
        self.graph, self.nested, self.costs = graph, nested, Replay(graph)
        self.weighed: list[Candidate] = []

    @cached_property
    def economical(self) -> Search:
        """Plans in which every variant runs and costs nothing."""
        free = replace(self.graph, operations=tuple(map(_with_free_variant, self.graph.operations)))
        return Search(free.with_variants(self.graph.low_memory), self.nested)

    @cached_property
    def own(self) -> Search:
        """Plans of PyTorch's own operators alone."""
        return Search(self.graph.with_variants(()), self.nested)

    @cached_property
    def least_peak(self) -> Candidate:
        """The plan with the least peak, and the fastest of those."""
        return self._fewest(self.economical.least_peak)

    def fastest(self, peak: int) -> Candidate | None:
        """The fastest plan found whose simulated peak is at most ``peak`` bytes."""
        own = self.own.fastest(peak) if max(self.own.graph.operation_bounds) <= peak else None
        if own is not None and (is_late() or not self._variants_lower(own)):
            return own
        found = self.economical.fastest(peak)
        both = own, None if found is None else self._fewest(found, peak)
        best = min(filter(None, both), key=lambda c: (c.seconds, c.peak_bytes), default=None)
        if best is None and self.least_peak.peak_bytes <= peak:  # which fewer variants may have lowered
            return self.least_peak
        return best

    def within(self, seconds: float) -> Candidate | None:
        """The plan found with the least simulated peak of those that add at most ``seconds``."""
        own = self.own.within(seconds)
        if own is not None and (is_late() or not self._variants_may_lower(own, seconds)):
            return own
        found, limit = [*filter(None, [own]), self.least_peak], seconds
        for _ in range(ATTEMPTS):
            candidate = self.economical.within(limit) if self.least_peak.seconds > seconds else None
            if candidate is None:
                break
            found.append(self._fewest(candidate))
            if found[-1].seconds <= seconds or is_late():
                break
            limit = seconds - (found[-1].seconds - candidate.seconds)  # less than what this one takes
        return min((c for c in found if c.seconds <= seconds), default=None)

    def offloading(self, peak: int, shares: Sequence[float]) -> None:
        """Look for plans that peak at ``peak`` where such shares of what they keep for the backward stay."""
        if max(self.own.graph.operation_bounds) <= peak:
            self.own.offloading(peak, shares)
        if any(map(self._variants_lower, self.own.found)):
            self.economical.offloading(peak, shares)

    def curve(self, points: int) -> list[Candidate]:
        """Plans from the least peak to the saved model, each faster and larger than the one before."""
        found = self.own.curve(points)
        if any(map(self._variants_lower, found)):
            found += [self._fewest(c) for c in self.economical.curve(points)]
        return front_of([self.least_peak, *found])

    def _variants_may_lower(self, found: Candidate, seconds: float) -> bool:
        """Whether variants would lower the peak of a plan, or of another where this one leaves seconds over."""
        if self._variants_lower(found):
            return True
        enough = (1 - WORTH_A_SEARCH) * found.peak_bytes
        return found.seconds < NEARLY_ALL * seconds and self.least_peak.peak_bytes < enough

    @property
    def found(self) -> Iterable[Candidate]:
        """All plans that were weighed, but for those in which each variant costs nothing."""
        return [*self.own.found, *self.weighed]

    def _variants_lower(self, found: Candidate) -> bool:
        """Whether all variants would lower the peak of a plan that has none by enough.

        Or that of another: a plan that peaks at what one operation takes may take as much elsewhere, to be quick.
        """
        enough = (1 - WORTH_A_SEARCH) * found.peak_bytes
        if max(self.own.graph.operation_bounds) >= enough:
            return max(self.graph.with_variants(self.graph.low_memory).operation_bounds) < enough
        with_all = self.costs.if_possible(replace(found.decisions, low_memory=self.graph.low_memory))
        return with_all is None or with_all.peak_bytes < enough  # what saves something else may need other cuts

    def _fewest(self, found: Candidate, peak: int | None = None) -> Candidate:
        """A plan that was made for all variants, with the fewest for ``peak`` bytes, or for what it peaks at."""
        self.weighed.append(self._with_fewest(found, peak))
        return self.weighed[-1]

    def _with_fewest(self, found: Candidate, peak: int | None) -> Candidate:
        """What :meth:`_fewest` gives.

        A variant that saves what PyTorch's own operator saves only changes the bytes while the operation itself runs:
        those that are needed are read off one timeline. The others are tried one by one.
        """
        graph, peak = self.graph, found.peak_bytes if peak is None else peak
        keeping = [t for t in graph.low_memory if graph.operations[t].variant_saves_otherwise]

        def with_needed(keeping: Sequence[int]) -> Candidate | None:
            """With these variants and those without which some operation would exceed ``peak``, if it fits then."""
            with suppress(PlanError):  # a variant left out would save what the plan makes again
                first = simulate(graph, replace(found.decisions, low_memory=tuple(keeping)))
                over = {event.operation for event in first.timeline if event.bytes > peak}
                needed = over.intersection(graph.low_memory)
                made = weigh(self.costs, replace(found.decisions, low_memory=tuple(sorted(needed.union(keeping)))))
                return made if made.peak_bytes <= peak else None
            return None

        best = with_needed(keeping)
        if best is None:  # the variants of operations that the search saw otherwise
            return weigh(self.costs, replace(found.decisions, low_memory=graph.low_memory))
        for dropped in ([*keeping], *([t] for t in keeping[:MOST_TRIALS])):
            rest = [t for t in keeping if t not in dropped]
            other = with_needed(rest) if len(rest) < len(keeping) else None
            if other is not None and other.seconds < best.seconds:
                best, keeping = other, rest
        return best


def _with_free_variant(op: Operation) -> Operation:
    """The operation with a low-memory variant that takes the time of PyTorch's operator."""
    low, forward, backward = op.low_memory, op.forward_seconds, op.backward_seconds
    free = low and replace(low, forward_seconds=forward, backward_seconds=backward, repeat_seconds=None)
    return replace(op, low_memory=free)


def search_of(graph: Graph, nested: bool = True) -> VariantSearch | Search:
    """What finds plans of a graph; those that are not ``nested`` run no operation more than twice."""
    return VariantSearch(graph, nested) if graph.low_memory else Search(graph, nested)


def search_fairly(search: VariantSearch | Search, seconds: float) -> None:
    """Look for the least peak that so many ``seconds`` can buy, and for quicker plans near it."""
    least = search.within(seconds)
    if least is not None and not is_late():
        search.fastest(int(NEAR_KNEE * least.peak_bytes))


def fairest(plans: Iterable[Candidate], step: float, seconds: float) -> Candidate | None:
    """The least peak of the plans that take so many ``seconds``, or a better bargain.

    A plan that peaks up to ``NEAR_KNEE`` higher is one where it saves a larger share of the ``step`` than that.
    """
    within = [plan for plan in plans if plan.seconds <= seconds]
    most = NEAR_KNEE * min((plan.peak_bytes for plan in within), default=0)
    near = (plan for plan in within if plan.peak_bytes <= most)
    return min(near, key=lambda plan: (plan.peak_bytes * (step + plan.seconds), plan), default=None)


def _by_time(candidate: Candidate) -> tuple[float, int]:
    return candidate.seconds, candidate.peak_bytes


def _ends(segment: Segment) -> Iterator[int]:
    """Where a segment and its parts start and stop."""
    yield from (segment.start, segment.stop)
    for part in segment.parts:
        yield from _ends(part)


def _between(low: Known, high: Known, seconds: float, number: int) -> float:
    """A peak between two, about where a plan takes so many seconds, from the peaks and what plans for them take.

    Between a line and a power law, which take turns by the ``number`` of the guess: one is above what plans take where
    the other is below, so that both ends move.
    """
    (small, slow), (large, fast) = low, high
    if slow <= fast:
        return float(large)
    if number % 2 and 0 < fast < seconds:
        return float(large * (small / large) ** (np.log(seconds / fast) / np.log(slow / fast)))
    return large - (large - small) * (seconds - fast) / (slow - fast)
