"""Bounds by prices of bytes against brute force, and how much is left to look at in stacks of equal layers."""

import random
from dataclasses import replace

import numpy as np
import pytest
from stacks import stack

import ogc
from ogc.plan.simulate import plain_peak, simulate
from ogc.solver import paths as constrained_path
from ogc.solver.costs import SegmentCosts
from ogc.solver.levels import OuterLevel
from ogc.solver.paths import LABELS, ConstrainedPaths, Priced, Segments, _front, at_the_end, raised
from ogc.solver.search import Search

PEAK = 60


def random_segments(seed):
    """Segments between eight cuts that fit ``PEAK`` bytes by themselves, some of several kinds."""
    rng = random.Random(seed)
    found = []
    for j in range(1, 8):
        for i in range(j):
            for _ in range(rng.choice([1, 1, 2, 3])):
                local, kept = rng.randrange(5, 50), rng.randrange(0, 20)
                found.append((i, j, PEAK - local, local if j == 7 else kept, float(rng.randrange(10))))
    i, j, limit, kept, seconds = (np.array(column) for column in zip(*found, strict=True))
    return Segments(7, i, j, limit, kept, seconds)


def every_plan(segments, cut=0, kept=0):
    """The seconds of every plan that fits, with the numbers of its segments."""
    if cut == segments.last:
        yield 0.0, ()
    for n in np.flatnonzero((segments.i == cut) & (segments.limit >= kept)):
        for seconds, path in every_plan(segments, int(segments.j[n]), kept + int(segments.kept[n])):
            yield seconds + segments.seconds[n], (int(n), *path)


@pytest.mark.parametrize("seed", range(60))
def test_no_plan_is_below_the_bounds(seed):
    segments = random_segments(seed)
    plans = list(every_plan(segments))
    if not plans:
        return
    best = min(seconds for seconds, _ in plans)
    one = at_the_end(segments, PEAK)
    for priced in (one, raised(one, best), Priced(segments, np.cumsum(np.random.default_rng(seed).random(8)))):
        assert priced.bound <= best + 1e-9
        assert priced.cheapest[0][-1] == pytest.approx(priced.bound)
        for seconds, path in plans:
            assert max(priced.through[list(path)]) <= seconds + 1e-9
    assert raised(one, best).bound >= one.bound - 1e-9


@pytest.mark.parametrize("many", [0, 10**9])
@pytest.mark.parametrize("seed", range(40))
def test_paths_are_brute_force(seed, many, monkeypatch):
    monkeypatch.setattr(constrained_path, "MANY", many)
    s = random_segments(seed)
    best = min((seconds for seconds, _ in every_plan(s)), default=None)
    paths = ConstrainedPaths(PEAK, s.i, s.j, s.limit, s.kept, s.seconds, lambda numbers, before: s.seconds[numbers])
    prices = None
    for _ in range(2):  # prices of the first call are good for the second
        path, prices = paths.fastest(LABELS, prices=prices)
        assert (sum(s.seconds[n] for n, _ in path) if path else None) == best


@pytest.mark.parametrize("seed", range(5))
def test_a_front_is_of_the_labels_that_no_other_beats(seed):
    rng = np.random.default_rng(seed)
    kept, seconds = rng.integers(0, 10 ** (1 + seed), 500), rng.integers(0, 300, 500).astype(float)
    labels = sorted({*zip(kept.tolist(), seconds.tolist(), strict=True)})
    best = [(k, s) for k, s in labels if not any(a <= k and b <= s and (a, b) != (k, s) for a, b in labels)]
    front = _front(kept, seconds)
    assert [*zip(kept[front].tolist(), seconds[front].tolist(), strict=True)] == best


@pytest.mark.parametrize("almost", [0.0, 0.05])
@pytest.mark.parametrize("seed", range(6))
def test_closer_prices_change_no_plan_of_a_stack(seed, almost, monkeypatch):
    graph = stack(seed, layers=4, almost=almost)
    peaks = [int(plain_peak(graph) * share) for share in (0.3, 0.5, 0.7)]

    def times(many):
        monkeypatch.setattr(constrained_path, "MANY", many)
        level = OuterLevel(SegmentCosts(graph).costs())
        return [simulate(graph, found).recomputed_seconds if (found := level.fastest(p)) else None for p in peaks]

    assert times(0) == pytest.approx(times(10**9))


def looked_at(graph, monkeypatch):
    """Segments that labels went through for the least peak within a tenth of the time."""
    counts = []
    labelled = ConstrainedPaths._labelled

    def counting(self, guide, numbers, within, labels):
        counts.append(len(numbers))
        return labelled(self, guide, numbers, within, labels)

    with monkeypatch.context() as patched:
        patched.setattr(ConstrainedPaths, "_labelled", counting)
        Search(graph).within(0.1 * graph.step_seconds)
    return sum(counts)


@pytest.mark.full
@pytest.mark.parametrize("almost", [0.0, 0.05])
def test_what_is_looked_at_grows_more_slowly_than_the_square_of_the_layers(almost, monkeypatch):
    few, many = (looked_at(stack(0, layers, almost=almost), monkeypatch) for layers in (5, 20))
    assert many < 10 * few


@pytest.mark.full
def test_one_layer_of_another_width_is_planned_too():
    graph = stack(0, layers=10)
    wide = range(48, 60)
    values = tuple(
        replace(value, bytes=3 * value.bytes) if v in wide else value for v, value in enumerate(graph.values)
    )
    plan = ogc.solve(replace(graph, values=values), max_overhead=0.1)
    assert plan.peak_bytes < plan.plain_peak_bytes
    assert plan.overhead <= 0.1


def test_prices_at_all_cuts_bound_better_than_one_at_the_end(monkeypatch):
    """Late segments of a stack have little room to be run again in, which one price does not see."""
    gains = []

    def noting(priced, within):
        better = raised(priced, within)
        gains.append(better.bound / priced.bound)
        return better

    monkeypatch.setattr(constrained_path, "raised", noting)
    monkeypatch.setattr(constrained_path, "MANY", 0)
    for seed in range(4):
        graph = stack(seed, layers=8)
        OuterLevel(SegmentCosts(graph).costs()).fastest(plain_peak(graph) // 2)
    assert min(gains) >= 1 - 1e-9
    assert max(gains) > 1.005
