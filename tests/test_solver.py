"""The simulator by hand and by closed form; the solver against brute force."""

import random

import pytest
from helpers import all_plans, chain, random_graph

import ogc
from ogc.errors import PlanError, SolveError
from ogc.graph import Graph, Operation, Value
from ogc.plan import Segment, cut_into_segments, recompute_program
from ogc.solver.interval import least_kept, least_peak, least_peak_plan, least_seconds, segment_costs
from ogc.solver.simulate import simulate

SEEDS = range(350)


def test_plain_peak_of_a_chain_is_all_that_is_saved():
    graph = chain([5, 5, 5, 5])
    assert simulate(graph, [Segment(0, 4, False)]).peak_bytes == 20


def test_timeline_of_a_chain_in_two_segments():
    graph = chain([5, 7, 9, 11], backward_bytes=2, gradient_bytes=1)
    plan = cut_into_segments(graph, [0, 2, 4], [True, False])
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


def test_a_recompute_program_leaves_out_what_the_backward_does_not_need():
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
    assert recompute_program(graph, 0, 4) == (0, 1, 2)
    # What the cut keeps need not be remade: relu_'s result is there, and with it nobody needs the norm.
    assert recompute_program(graph, 0, 3) == (0,)


def test_an_in_place_write_that_must_run_again_gets_its_old_input():
    graph = Graph(
        (
            Operation("make", writes=(0,)),
            Operation("dropout_", reads=(0,), writes=(0,), internal_bytes=8),
            Operation("use", reads=(0,), writes=(1,), saves=(0,)),
        ),
        (Value("x", 8), Value("y", 8)),
    )
    assert recompute_program(graph, 0, 2) == (0, 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_solver_is_brute_force(seed):
    graph = random_graph(seed, most=7)
    best = min((s.peak_bytes, s.recomputed_seconds) for s in all_plans(graph))
    costs = segment_costs(graph)
    cuts, modes = least_seconds(costs, least_peak(costs))
    found = simulate(graph, cut_into_segments(graph, cuts, modes))
    assert (found.peak_bytes, found.recomputed_seconds) == best
    assert least_kept(costs, best[0] - 1)[-1] >= 2**60, "feasible one byte below the optimum"
    with pytest.raises(SolveError, match=f"the least peak is {best[0]} bytes"):
        least_seconds(costs, best[0] - 1)


@pytest.mark.parametrize("seed", range(20))
def test_segment_costs_agree_with_the_simulator_on_larger_graphs(seed):
    """The DP's own arithmetic for one random plan of a larger graph gives the simulator's peak."""
    graph = random_graph(1000 + seed, most=40)
    rng = random.Random(seed)
    costs = segment_costs(graph)
    index = [0, *sorted(rng.sample(range(1, len(costs.cuts) - 1), min(4, len(costs.cuts) - 2))), len(costs.cuts) - 1]
    modes = [rng.random() < 0.5 for _ in index[1:]]
    try:
        expected = simulate(graph, cut_into_segments(graph, [int(costs.cuts[i]) for i in index], modes)).peak_bytes
    except PlanError:
        expected = None
    kept, peak = 0, 0
    for i, j, mode in zip(index[:-1], index[1:], modes, strict=True):
        peak = max(peak, kept + int(costs.local[int(mode), i, j]))
        kept += int(costs.kept[int(mode), i, j])
    assert (peak == expected) if expected is not None else peak > 2**60


def test_a_uniform_chain_needs_about_the_square_root():
    graph = chain([1] * 400)
    plan = ogc.solve(graph)
    # k checkpoints and a longest segment of 400/k values: 2 sqrt(400) at the least, plus the ends.
    assert plan.plain_peak_bytes == 400
    assert plan.peak_bytes <= 42
    assert plan.overhead < 1 / 3


def test_same_graph_same_plan():
    graph = random_graph(3, most=60)
    assert least_peak_plan(graph) == least_peak_plan(graph)
    assert ogc.solve(graph) == ogc.solve(graph)


def test_where_nothing_helps_the_plan_is_the_plain_model():
    plan = ogc.solve(chain([3]))
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
    plan = ogc.solve(bound)
    assert not any({5, 6} & set(segment.program) for segment in plan.segments)
    assert ogc.solve(free).peak_bytes < plan.peak_bytes < plan.plain_peak_bytes


def test_a_plan_prints_its_segments():
    text = str(ogc.solve(chain([1_000_000] * 20)))
    assert text.splitlines()[0].split() == ["segment", "operations", "modules", "mode", "kept", "MB", "recomputed"]
    assert "recomputed" in text
    assert "plain 20.0 MB" in text.splitlines()[-1]


@pytest.mark.parametrize(
    ("cuts", "modes", "message"),
    [
        ([0, 3], [True], "from 0 to 4"),
        ([0, 2, 2, 4], [True] * 3, "no cut of this graph"),
        ([0, 9, 4], [True] * 2, "no cut of this graph"),
        ([0, 4], [True, True], "one flag per segment"),
    ],
)
def test_wrong_cuts_are_refused(cuts, modes, message):
    with pytest.raises(PlanError, match=message):
        ogc.make_plan(chain([1] * 4), cuts, modes)


def test_segments_of_another_graph_are_refused():
    with pytest.raises(PlanError, match="do not cover operations 0 to 3"):
        simulate(chain([1] * 4), [Segment(0, 3, False)])
