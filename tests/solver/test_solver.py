"""The simulator by hand and by closed form; the solver against brute force."""

import itertools
import random
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from helpers import chain, random_decisions, random_graph, random_plans
from interval_oracle import all_flat_plans, flat_segments, weigh
from oracles import every_tree
from stacks import with_views

import ogc
from ogc.errors import InputError, PlanError, SolveError
from ogc.graph import Graph, Operation, Value
from ogc.plan import make_plan
from ogc.plan.decisions import Decisions, Policy, Segment, cut_into_segments, recomputed, saved
from ogc.plan.plan import fold
from ogc.plan.schedule import Schedule
from ogc.plan.simulate import Memory, lower_bound, plain_peak, replay, simulate
from ogc.solver import LEAST_PEAK, search
from ogc.solver.costs import NEVER, SegmentCosts, boundary_bytes
from ogc.solver.cuts import CutGrid, choose_grids, distinct, narrowest
from ogc.solver.levels import NestedTable, OuterLevel

SEEDS = range(500)


def test_plain_peak_of_a_chain_is_all_that_is_saved():
    graph = chain([5, 5, 5, 5])
    assert simulate(graph, [saved(0, 4)]).peak_bytes == 20


def test_timeline_of_a_chain_in_two_segments():
    graph = chain([5, 7, 9, 11], backward_bytes=2, gradient_bytes=1)
    plan = cut_into_segments([0, 2, 4], [True, False])
    events = [(e.phase, e.operation, e.bytes) for e in simulate(graph, plan).timeline]
    assert events == [
        ("forward", 0, 5),
        ("forward", 1, 5 + 7),
        ("forward", 2, 7 + 9),  # value 0 is gone, it comes back
        ("forward", 3, 7 + 9 + 11),
        ("backward", 3, 7 + 9 + 11 + 2),
        ("backward", 2, 7 + 11 + 2),
        ("recompute", 0, 5 + 11 + 1),  # value 1 was kept for segment 1 only
        ("backward", 1, 5 + 11 + 2),
        ("backward", 0, 11 + 2),
    ]


def test_timeline_of_a_nested_chain():
    graph = chain([5, 7, 9, 11, 13])
    plan = [recomputed(0, 4, recomputed(0, 2), saved(2, 4)), saved(4, 5)]
    events = [(e.phase, e.run, e.operation, e.bytes) for e in simulate(graph, plan).timeline]
    assert events[5:] == [
        ("backward", 0, 4, 11 + 13),
        ("recompute", 1, 0, 5 + 13),  # the output stays
        ("recompute", 1, 1, 5 + 7 + 13),  # value 0 is let go of again
        ("recompute", 1, 2, 7 + 9 + 13),
        ("backward", 1, 3, 7 + 9 + 13),
        ("backward", 1, 2, 7 + 13),
        ("recompute", 2, 0, 5 + 13),
        ("backward", 2, 1, 5 + 13),
        ("backward", 2, 0, 13),
    ]


def test_what_a_backward_lets_go_of_early_is_not_counted_twice():
    graph = chain([10, 10], backward_bytes=3, late_bytes=8)
    assert [e.bytes for e in simulate(graph, [saved(0, 2)]).timeline if e.phase == "backward"] == [23, 18, 13, 18]


def program(graph, start, stop):
    segments = [s for s in (saved(0, start), recomputed(start, stop), saved(stop, len(graph))) if s.start < s.stop]
    return Schedule(graph, Decisions.of(segments)).runs[1].program


def test_a_run_leaves_out_what_the_backward_does_not_need():
    # norm saves its input, relu_ its result, the convolution its input; nobody needs the last result.
    graph = Graph(
        (
            Operation("conv", writes=(0,)),
            Operation("norm", reads=(0,), writes=(1,), saves=(0,)),
            Operation("relu_", reads=(1,), writes=(1,), saves=(1,)),
            Operation("conv2", reads=(1,), writes=(2,), saves=(1,)),
            Operation("norm2", reads=(2,), writes=(3,), saves=(2,)),
        ),
        tuple(Value(f"v{n}", 8) for n in range(4)),
    )
    assert program(graph, 0, 4) == (0, 1, 2)
    # What the cut keeps need not be remade: relu_'s result is there, and with it nobody needs the norm.
    assert program(graph, 0, 3) == (0,)


def test_an_in_place_write_that_must_run_again_gets_its_old_input():
    graph = Graph(
        (
            Operation("make", writes=(0,)),
            Operation("dropout_", reads=(0,), writes=(0,), internal_bytes=8),
            Operation("use", reads=(0,), writes=(1,), saves=(0,)),
        ),
        (Value("x", 8), Value("y", 8)),
    )
    assert program(graph, 0, 2) == (0, 1)


def test_an_operation_without_internal_tensors_asks_for_none():
    graph = Graph(
        (
            Operation("make", writes=(0,)),
            Operation("drop", reads=(0,), writes=(1,), internal_bytes=4),
            Operation("add_", reads=(0, 1), writes=(0,), saves=(1,)),  # runs again, as an in-place writer
            Operation("use", reads=(1,), writes=(2,)),
        ),
        (Value("x", 8), Value("y", 8), Value("z", 8)),
    )
    steps = Schedule(graph, Decisions.of([recomputed(0, 3), saved(3, 4)])).steps
    assert [(step.operation, step.during) for step in steps if step.during is not None] == [(0, 1), (1, 1), (2, 1)]


def test_what_is_run_again_is_not_there_before_somebody_asks_for_it():
    """The stem of a residual network: while the pooling goes back, the activation before it is not there."""
    graph = Graph(
        (
            Operation("convolution", writes=(0,), forward_seconds=9),
            Operation("norm", reads=(0,), writes=(1,), saves=(0,), gradient_bytes=8, forward_seconds=2),
            Operation(
                "relu_", reads=(1,), writes=(1,), saves=(1,), gradient_bytes=8, backward_bytes=8, forward_seconds=1
            ),
            Operation("pool", reads=(1,), writes=(2,), internal_bytes=4, backward_bytes=10, forward_seconds=5),
            Operation("head", reads=(2,), writes=(3,), saves=(2,), backward_bytes=3, forward_seconds=1),
        ),
        (Value("a", 8), Value("b", 8), Value("c", 2), Value("d", 2, is_output=True)),
    )
    segments = OuterLevel(SegmentCosts(graph).costs({2})).fastest(26)
    found = simulate(graph, segments)
    assert (found.peak_bytes, found.recomputed_seconds) == (26, 2 + 1)
    assert next(event.bytes for event in found.timeline if (event.phase, event.operation) == ("backward", 3)) == 24


@pytest.mark.full
@pytest.mark.parametrize("seed", SEEDS)
def test_flat_plans_are_brute_force(seed):
    """The least peak of one level and the least recomputation at it, by the rule that cuts keep their boundary."""
    graph = random_graph(seed, most=7)
    best = min(all_flat_plans(graph))
    level = OuterLevel(SegmentCosts(graph).costs())
    assert level.least_peak() == best[0]
    found = simulate(graph, level.fastest(best[0]))
    assert found.recomputed_seconds <= best[1]
    assert found.peak_bytes <= best[0], "the simulator lets go of what nobody needs"
    assert level.fastest(best[0] - 1) is None


def random_keeping(graph, rng):
    """Two sets of values that segments might keep, the second larger."""
    saved = [v for v in range(len(graph.values)) if graph.first_savers[v] < len(graph)]
    some = {v for v in saved if not graph.values[v].is_output and rng.random() < 0.4}
    return some, some.union(v for v in saved if not graph.values[v].is_output and rng.random() < 0.4)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100))
def test_plans_that_keep_values_are_brute_force(seed):
    graph = random_graph(5000 + seed, most=5)
    keeping = random_keeping(graph, random.Random(seed))
    costs = SegmentCosts(graph).costs(*keeping)
    plans = list(all_flat_plans(graph, keeping))
    for peak in {peak for peak, _ in all_flat_plans(graph)}:
        best = min(seconds for bytes_, seconds in plans if bytes_ <= peak)
        for weights in (costs, costs.undominated()):
            found = simulate(graph, OuterLevel(weights).fastest(peak))
            assert found.recomputed_seconds <= best * (1 + 1e-12)
            assert found.peak_bytes <= peak


def test_segments_that_keep_values_to_no_avail_are_left_out():
    graph = chain([4, 3, 2, 4])
    everything = range(len(graph.values) - 1)
    costs = SegmentCosts(graph).costs({1}, everything)
    found = costs.undominated()
    assert len(found.local) == len(found.kept_values) == 3, "to keep everything is to save the segment"
    whole = -1, 0
    assert (found.local[:2] == costs.local[:2]).all()
    assert found.local[2][whole] == costs.local[2][whole] < NEVER
    short = 3, 1
    assert costs.local[2][short] < NEVER
    assert found.local[2][short] == NEVER, "without value 1 there is nothing to make again"


@pytest.mark.parametrize("seed", range(60))
def test_segment_costs_agree_with_the_rule_on_larger_graphs(seed):
    """The solver's own arithmetic for one random plan of a larger graph gives the oracle's peak and time."""
    graph = random_graph(1000 + seed, most=40)
    rng = random.Random(seed)
    keeping = random_keeping(graph, rng)
    costs = SegmentCosts(graph).costs(*keeping)
    index = [0, *sorted(rng.sample(range(1, len(costs.cuts) - 1), min(4, len(costs.cuts) - 2))), len(costs.cuts) - 1]
    modes = [rng.randrange(4) for _ in index[1:]]
    kept, peak, seconds = 0, 0, 0.0
    for place, (i, j) in enumerate(pairwise(index)):
        while modes[place] > 1 and costs.seconds[modes[place], j, i] == costs.seconds[modes[place] - 1, j, i]:
            modes[place] -= 1  # the larger set gains nothing here
        peak = max(peak, kept + int(costs.local[modes[place], j, i]))
        kept += int(costs.kept[modes[place], j, i])
        seconds += costs.seconds[modes[place], j, i]
    cuts = [int(costs.cuts[i]) for i in index]
    expected = weigh(graph, flat_segments(graph, cuts, modes, keeping))
    if expected is None:
        assert peak > 2**60
    else:
        assert (peak, seconds) == (expected[0], pytest.approx(expected[1]))


def nested_level(graph, top=None, levels=None):
    weights = SegmentCosts(graph)
    costs = weights.costs()
    top = top or OuterLevel(costs).least_peak()
    count = len(costs.cuts)
    grid = CutGrid(np.arange(count), count - 1)
    return OuterLevel(costs, NestedTable(weights.nested, [grid], top, levels or top + 1))


@pytest.mark.parametrize("seed", range(80))
def test_nested_plans_fit_wherever_they_are_planned_to(seed):
    """The tables count no less than the simulator, also where gradients grow before something is run again."""
    graph = random_graph(9000 + seed, most=20)
    level, top = nested_level(graph), plain_peak(graph)
    least = level.least_peak()
    for peak in {least, (least + top) // 2, (3 * least + top) // 4}:
        found = level.fastest(peak)
        assert found is not None
        assert simulate(graph, found).peak_bytes <= peak


@pytest.mark.parametrize("seed", range(5))
def test_what_can_be_run_again_at_once_is_not_divided(seed):
    """Of ways that take as long, the one with the fewest segments; what is rounded in a sum does not decide."""
    rng = random.Random(seed)
    graph = chain([rng.randrange(1, 9) for _ in range(40)])
    operations = (replace(op, forward_seconds=rng.random()) for op in graph.operations)
    table = nested_level(replace(graph, operations=tuple(operations))).table
    again = table.grids[0].at_once
    pairs = itertools.combinations(range(len(again)), 2)
    possible = [(i, j, int(again[i, j - i])) for i, j in pairs if again[i, j - i] < table.levels]
    assert possible
    for i, j, least in possible:
        for units in range(least, table.levels):
            assert table.segment(i, j, units * table.unit) == recomputed(i, j)


def test_a_writer_behind_a_reader_is_among_what_runs_again():
    """An operation that must not run twice writes in place what one before it, which would run again, has read."""
    graph = random_graph(708, most=12)
    assert [op.replayable for op in graph.operations[:5]] == [True, True, False, True, True]
    assert simulate(graph, ogc.solve(graph, memory_budget="least")).peak_bytes <= plain_peak(graph)


def test_the_unit_of_a_table_divides_what_is_kept():
    graph = chain([1000] * 60, scratch_bytes=1)
    assert nested_level(graph, top=20_000, levels=100).table.unit == 250  # and not 203


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("count", [30, 50, 99])
def test_a_long_program_is_cut_at_narrow_places_and_around_its_largest_operation(seed, count):
    rng = random.Random(seed)
    sizes = [rng.randrange(1, 9) for _ in range(100)]
    largest = rng.randrange(10, 90)
    graph = chain([*sizes[:largest], 1000, *sizes[largest + 1 :]])
    every = np.arange(101)
    cuts = narrowest(graph, every, count)
    assert len(cuts) == count and cuts[0] == 0 and cuts[-1] == 100
    assert {largest, largest + 1} <= set(cuts)
    assert max(np.diff(cuts)) <= 2 * (-(-100 // (count - count // 10 - 6)))
    widths = boundary_bytes(graph)
    assert np.median(widths[cuts]) <= np.median(widths)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(60))
def test_nothing_is_lost_without_the_cuts_behind_which_nothing_is_made_or_saved(seed):
    graph = with_views(random_graph(seed, most=14), seed)
    every, few = (OuterLevel(SegmentCosts(graph, cuts).costs()) for cuts in (graph.cuts, distinct(graph).tolist()))
    assert set(few.cuts) <= set(every.cuts)
    least = every.least_peak()
    assert few.least_peak() == least
    for peak in (least, 6 * least // 5, 3 * least // 2):
        seconds = [simulate(graph, level.fastest(peak)).recomputed_seconds for level in (every, few)]
        assert seconds[1] <= seconds[0]


def test_a_coarser_grid_has_the_narrow_places_between_layers():
    graph = chain([1, 8, 9, 7, 8, 9] * 80)
    coarser = choose_grids(graph, np.arange(len(graph) + 1))[-1]
    widths = boundary_bytes(graph)
    assert len(coarser.chosen) < len(graph) / 2
    assert set(np.flatnonzero(widths == 1)) <= set(coarser.chosen)


@pytest.mark.full
@pytest.mark.parametrize("length", [300, 1000, 5000])
def test_a_coarser_grid_has_no_stretch_beyond_the_reach_of_the_finer_one(length):
    grids = choose_grids(chain([1] * length), np.arange(length + 1))
    for finer, coarser in pairwise(grids):
        assert set(coarser.chosen) < set(finer.chosen)
        assert np.diff(np.searchsorted(finer.chosen, coarser.chosen)).max() <= finer.reach


@pytest.mark.full
@pytest.mark.parametrize("seed", range(60))
def test_nested_plans_of_chains_are_brute_force(seed):
    rng = random.Random(seed)
    graph = chain([rng.choice([1, 2, 3, 5, 8]) for _ in range(5)], backward_bytes=rng.randrange(6))
    best, level = every_tree(graph, LEAST_PEAK), nested_level(graph)
    assert level.least_peak() == best.peak_bytes
    found = simulate(graph, level.fastest(best.peak_bytes))
    assert (found.peak_bytes, found.recomputed_seconds) == (best.peak_bytes, best.recomputed_seconds)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(150))
def test_nested_plans_of_any_graph_peak_at_most_as_planned(seed):
    graph = random_graph(seed, most=14)
    top = OuterLevel(SegmentCosts(graph).costs()).least_peak()
    for levels in (top + 1, 12):
        level = nested_level(graph, top, levels)
        peak = level.least_peak()
        assert peak <= top
        for share in (1.0, 1.2):
            assert simulate(graph, level.fastest(int(peak * share))).peak_bytes <= peak * share


@pytest.mark.parametrize("seed", range(100))
def test_nothing_is_below_the_lower_bound(seed):
    graph = random_graph(seed, most=14)
    rng = random.Random(seed)
    bound = lower_bound(graph)
    for plan in random_plans(graph, rng, 10):
        assert plan.peak_bytes >= bound


class Strict(Memory):
    """Refuses to carry out a step that reads what is not there."""

    def take(self, number, step):
        makes = self.graph.operations[step.operation].writes
        for run, value in self.schedule.reads(step):
            assert (run, value) in self.live or (run == step.run and value in makes)
        super().take(number, step)


def test_whatever_is_decided_of_values_all_that_a_step_reads_is_there():
    carried_out = 0
    for seed in range(300):
        graph = random_graph(seed, most=14)
        with suppress(PlanError):
            schedule = Schedule(graph, random_decisions(graph, random.Random(seed)))
            assert replay(Strict(schedule)).peak_bytes >= lower_bound(graph)
            carried_out += 1
    assert carried_out > 200


def test_what_is_decided_around_a_segment_goes_before_what_is_decided_in_it():
    graph, segments = chain([1] * 5), [recomputed(0, 4, saved_values=[1]), saved(4, 5)]
    assert Schedule(graph, Decisions.of(segments)).runs[1].program == (0, 2)
    assert Schedule(graph, Decisions.of(segments).recomputing([1])).runs[1].program == (0, 1, 2)
    kept = Decisions(cut_into_segments([0, 4, 5], [True, False]), ((1, Policy.SAVED),))
    assert Schedule(graph, kept).runs[1].program == (0, 2)


def test_a_value_that_is_remade_is_not_there_between_its_uses():
    free = chain([1, 9, 1, 1, 8, 8])
    skip = Operation(**{**vars(free.operations[3]), "reads": (2, 1), "saves": (*free.operations[3].saves, 1)})
    graph = Graph((*free.operations[:3], skip, *free.operations[4:]), free.values)
    segments = [recomputed(0, 2), recomputed(2, 4), saved(4, 6)]
    assert [run.program for run in Schedule(graph, Decisions.of(segments)).runs[1:]] == [(2,), (0,)]
    assert [run.program for run in Schedule(graph, Decisions.of(segments).recomputing([1])).runs[1:]] == [(1, 2), (0,)]
    kept, dropped = simulate(graph, segments), simulate(graph, Decisions.of(segments).recomputing([1]))
    # Value 1 is gone after operation 3, and value 0 stays in its place, from which it is made again.
    assert [event.bytes for event in kept.timeline[:6]] == [1, 10, 10, 11, 18, 26]
    assert [event.bytes for event in dropped.timeline[:6]] == [1, 10, 11, 12, 10, 18]
    assert dropped.recomputed_seconds == kept.recomputed_seconds + graph.operations[1].forward_seconds


def test_a_uniform_chain_needs_about_the_square_root():
    graph = chain([1] * 400)
    plan = ogc.solve(graph, memory_budget="least")
    # k checkpoints and a longest segment of 400/k values: 2 sqrt(400) at the least, plus the ends.
    assert plan.plain_peak_bytes == 400
    flat = OuterLevel(SegmentCosts(graph).costs())
    assert flat.least_peak() <= 42
    assert simulate(graph, flat.fastest(42)).recomputed_seconds < 400
    assert plan.peak_bytes < 25, "several levels need less"


def test_same_graph_same_plan():
    graph = random_graph(3, most=60)
    assert ogc.solve(graph, memory_budget="least") == ogc.solve(graph, memory_budget="least")


def test_where_nothing_helps_the_plan_is_the_plain_model():
    plan = ogc.solve(chain([3]), memory_budget="least")
    assert plan.is_plain
    assert plan.peak_bytes == plan.plain_peak_bytes
    assert plan.overhead == 0


def test_an_operation_that_must_not_run_twice_stays_in_a_saved_segment():
    sizes = [10] * 30
    free = chain(sizes)
    bound = Graph(
        tuple(Operation(**{**vars(op), "replayable": t not in (5, 6)}) for t, op in enumerate(free.operations)),
        free.values,
    )
    plan = ogc.solve(bound, memory_budget="least")
    assert not any({5, 6} & set(run.program) for run in Schedule(bound, plan.decisions).runs[1:])
    assert ogc.solve(free, memory_budget="least").peak_bytes < plan.peak_bytes < plan.plain_peak_bytes


def test_a_plan_prints_its_segments():
    text = str(ogc.solve(chain([1_000_000] * 20), memory_budget="least"))
    first, header, *_, last = text.splitlines()
    assert first.startswith("peak ") and " of 19.1 MiB, +" in first
    assert header.split() == ["segment", "operations", "modules", "mode", "saved", "MiB", "recomputed"]
    assert "recomputed" in text and last.startswith("recomputation +")


def test_equal_layers_are_printed_once():
    layers = [1_000_000, 8_000_000, 2_000_000, 4_000_000] * 9
    graph = chain(layers)
    operations = (replace(op, module=f"layers.{t // 4}.linear") for t, op in enumerate(graph.operations))
    cuts = [*range(0, 37, 4)]
    plan = make_plan(replace(graph, operations=tuple(operations)), [recomputed(*ends) for ends in pairwise(cuts)])
    lines = str(plan).splitlines()
    assert len(lines) < 9 and "9 segments" in lines[-1]
    assert sum(times * len(stretch) for stretch, times in fold(layers, lambda size: size)) == len(layers)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([Segment(0, 3)], "cover operations 0 to 3"),
        ([Segment(0, 2), Segment(2, 2), Segment(2, 4)], "no cut of this graph"),
        ([Segment(0, 9), Segment(9, 4)], "no cut of this graph"),
        ([recomputed(0, 4, saved(0, 3))], "cover operations 0 to 3"),
        ([saved(0, 1), recomputed(1, 4, saved(0, 4))], "cover operations 1 to 3"),
    ],
)
def test_wrong_segments_are_refused(segments, message):
    with pytest.raises(PlanError, match=message):
        ogc.make_plan(chain([1] * 4), segments)


GIB = chain([2**30] * 30, forward_flops=1)


@pytest.mark.parametrize(
    ("budget", "size"),
    [(20 * 2**30, 20 * 2**30), ("20GiB", 20 * 2**30), ("20 gb", 20 * 10**9), ("0.02TB", 20 * 10**9), (0.5, 15 * 2**30)],
)
def test_a_budget_is_kept_with_little_recomputation(budget, size):
    plan = ogc.solve(GIB, memory_budget=budget)
    assert plan.peak_bytes <= size
    assert 0 < plan.overhead < 1 / 3
    assert ogc.solve(GIB, memory_budget=size // 2).overhead > plan.overhead


def test_what_is_costly_to_make_is_kept_and_the_rest_runs_again():
    def operation(t):
        before = (t - 1,) if t else ()
        return Operation(f"op{t}", reads=before, writes=(t,), saves=before, forward_seconds=1.0 if t % 2 else 10.0)

    operations = tuple(map(operation, range(40)))
    graph = Graph(operations, tuple(Value(f"v{t}", 64 if t % 2 else 8) for t in range(40)))
    plan = ogc.solve(graph, memory_budget=0.45)
    again = {t for run in Schedule(graph, plan.decisions).runs[1:] for t in run.program}
    assert any(segment.saved_values for segment in plan.segments)
    assert again and all(t % 2 for t in again)


def test_internal_tensors_are_kept_with_the_results_of_a_costly_operation():
    def operation(t):
        before, costly = ((t - 1,) if t else ()), t % 4 == 0
        return Operation(
            f"op{t}",
            reads=before,
            writes=(t,),
            saves=() if costly else before,
            internal_bytes=4 if costly else 0,
            forward_seconds=20.0 if costly else 1.0,
        )

    graph = Graph(tuple(map(operation, range(40))), tuple(Value(f"v{t}", 4 if t % 4 == 0 else 64) for t in range(40)))
    plan = ogc.solve(graph, memory_budget=0.45)
    again = {t for run in Schedule(graph, plan.decisions).runs[1:] for t in run.program}
    assert again and all(t % 4 for t in again)


def test_what_is_kept_need_not_be_saved_to_spare_the_operation_that_makes_it():
    """As in a transformer: a matrix product and a sum, of which the norm behind them saves the sum alone."""
    operations, size = [], []
    for block in range(12):
        x, product, total, norm = (4 * block - 1,) if block else (), 4 * block, 4 * block + 1, 4 * block + 2
        operations += [
            Operation(f"product{block}", reads=x, writes=(product,), saves=x, forward_seconds=20.0),
            Operation(f"sum{block}", reads=(*x, product), writes=(total,), forward_seconds=1.0),
            Operation(f"norm{block}", reads=(total,), writes=(norm,), saves=(total,), forward_seconds=1.0),
            Operation(f"next{block}", reads=(norm,), writes=(norm + 1,), saves=(norm,), forward_seconds=1.0),
        ]
        size += [8, 64, 64, 64]
    graph = Graph(tuple(operations), tuple(Value(f"v{n}", bytes_) for n, bytes_ in enumerate(size)))
    plan = ogc.solve(graph, memory_budget=0.3)
    again = {t for run in Schedule(graph, plan.decisions).runs[1:] for t in run.program}
    assert again and all(t % 4 for t in again)


def test_a_budget_that_the_plain_model_meets_costs_nothing():
    for budget in (1.0, "30GiB", 31 * 2**30):
        plan = ogc.solve(GIB, memory_budget=budget)
        assert plan.is_plain
        assert plan.overhead == 0


@pytest.mark.parametrize("seed", range(40))
def test_the_least_peak_is_a_budget_that_is_met(seed):
    graph = random_graph(seed, most=12)
    least = ogc.solve(graph, memory_budget="least")
    assert ogc.solve(graph, memory_budget=max(1, least.peak_bytes)).peak_bytes <= max(1, least.peak_bytes)


def test_a_budget_that_nothing_meets_is_refused_with_what_would():
    with pytest.raises(SolveError) as caught:
        ogc.solve(GIB, memory_budget="1GiB")
    least = ogc.solve(GIB, memory_budget="least")
    for part in (
        "(1073741824 bytes)",
        f"{least.peak_bytes} bytes",
        f"{least.overhead:.1%} overhead",
        "operation op",
        "alive",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.2, 0.3, 0.6])
def test_overhead_is_bounded(share):
    plan = ogc.solve(GIB, max_overhead=share)
    assert plan.overhead <= share
    assert plan.is_plain == (share == 0)
    if share >= 0.3:
        assert plan.peak_bytes < 12 * 2**30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_budget": "8 apples"}, "'8 apples'"),
        ({"memory_budget": 0}, "not 0"),
        ({"memory_budget": 1.5}, r"share in \(0, 1\]"),
        ({"memory_budget": True}, "not True"),
        ({"memory_budget": -1.0}, "not -1.0"),
        ({"memory_budget": float("nan")}, "not nan"),
        ({"max_overhead": -0.1}, "such as 0.2"),
        ({"max_overhead": True}, "such as 0.2"),
        ({"memory_budget": 0.5, "max_overhead": 0.1}, "not both"),
    ],
)
def test_wrong_goal_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        ogc.solve(GIB, **options)


def test_the_frontier_is_monotone_and_its_plans_are_as_simulated():
    graph = random_graph(5, most=60)
    found = ogc.frontier(graph)
    peaks = [plan.peak_bytes for plan in found.plans]
    assert peaks == sorted(peaks)
    assert (np.diff([plan.recomputed_seconds for plan in found.plans[:-1]]) < 0).all()
    assert found.plans[-1].is_plain
    assert peaks[0] == ogc.solve(graph, memory_budget="least").peak_bytes
    for plan in found.plans[:-1]:
        assert simulate(graph, plan).peak_bytes == plan.peak_bytes >= lower_bound(graph)
    assert str(found).splitlines()[0].split() == ["peak", "MiB", "of", "plain", "overhead", "levels"]


def dense_in_flops(blocks):
    """Convolutions and norms, each convolution of all norms before it: only the convolutions have FLOPs."""
    operations: list[Operation] = []
    for n in range(blocks):
        conv, norm = 2 * n, 2 * n + 1
        before = tuple(range(1, conv, 2))
        operations += [
            Operation(f"conv{n}", reads=before, writes=(conv,), saves=before, forward_seconds=1, forward_flops=1),
            Operation(f"norm{n}", reads=(conv,), writes=(norm,), saves=(conv,), forward_seconds=1e-6),
        ]
    return Graph(tuple(operations), tuple(Value(f"v{v}", 1000) for v in range(2 * blocks)))


def test_the_frontier_knows_what_costs_next_to_nothing_though_it_crosses_every_cut(monkeypatch):
    graph = dense_in_flops(12)
    norms = [2 * n + 1 for n in range(12)]
    by_hand = ogc.make_plan(graph, [recomputed(*cuts) for cuts in pairwise(graph.cuts)], recomputed_values=norms)
    assert by_hand.recomputed_flops == 0

    def is_found():
        plans = ogc.frontier(replace(graph)).plans  # of which nothing is known
        return any(p.peak_bytes <= by_hand.peak_bytes and p.recomputed_flops == 0 for p in plans)

    assert is_found()
    monkeypatch.setattr(search, "selective", lambda graph: iter(()))
    assert not is_found()


def test_selective_plans_leave_out_what_must_not_run_twice():
    graph = random_graph(5, most=60)
    operations = tuple(replace(op, replayable=False) for op in graph.operations)
    (plain,) = ogc.frontier(replace(graph, operations=operations)).plans
    assert plain.is_plain


@pytest.mark.full
def test_the_frontier_has_plans_for_the_budgets_asked_for():
    graph = random_graph(5, most=60)
    least, plain = ogc.solve(graph, memory_budget="least").peak_bytes, ogc.solve(graph, solver="none").peak_bytes
    budgets = [least + (plain - least) * n // 7 for n in range(7)]
    plans = ogc.frontier(graph, points=2, budgets=[*budgets, plain, least - 1, 0.0001]).plans
    assert [p.peak_bytes for p in plans] == sorted(p.peak_bytes for p in plans)
    for budget in budgets:
        found = min(p.recomputed_seconds for p in plans if p.peak_bytes <= budget)
        assert found <= ogc.solve(graph, memory_budget=budget).recomputed_seconds
    with pytest.raises(InputError, match="memory_budget must be"):
        ogc.frontier(graph, budgets=["much"])


def test_no_time_is_spent_for_next_to_nothing():
    graph = chain([3, 3, 3, 3], backward_bytes=10_000)
    plain = ogc.solve(graph, solver="none").peak_bytes
    assert ogc.frontier(graph).plans[0].peak_bytes < plain
    assert ogc.solve(graph, memory_budget="least").is_plain and ogc.solve(graph, max_overhead=1.0).is_plain
    assert ogc.solve(graph, memory_budget=plain - 1).peak_bytes < plain, "who asks for that gets it"
