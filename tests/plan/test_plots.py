"""The numbers behind the pictures are the simulator's and the allocator's; files come out as asked for."""

import copy
import json
import pickle
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from helpers import chain, measured_peak, random_graph, random_plans
from test_chunking import Wide

import benchmark
import ogc
from benchmarks.cases import CASES
from ogc.plan import Decisions, trace
from ogc.plan.pictures import LAYERS, MIB, Timeline, mib
from ogc.plan.schedule import FORWARD, Schedule
from ogc.plan.simulate import plain_timeline

ROOT = Path(__file__).parents[2]
KINDS = tuple(LAYERS)


def plans_of_random_graphs(count):
    for seed in range(count):
        yield from random_plans(random_graph(seed, most=14), random.Random(seed), 1)


def timeline_of(plan):
    return Timeline.of(plan.graph, plan.decisions)


def checkpoints(plan):
    return Schedule(plan.graph, plan.decisions).checkpoints


@pytest.fixture(scope="module")
def resnet():
    torch.manual_seed(0)
    model, images = CASES["resnet18"].build(), torch.randn(4, 3, 96, 96)
    return SimpleNamespace(model=model, images=images, graph=ogc.parse(model, images))


# -- the numbers ---------------------------------------------------------------------------------------------


def test_the_kinds_of_bytes_add_up_to_the_simulators_at_every_event():
    seen = 0
    for plan in plans_of_random_graphs(600):
        cost, moments = ogc.simulate(plan.graph, plan), trace(plan.graph, plan)
        assert tuple(moment.event for moment in moments) == cost.timeline
        for moment in moments:
            kinds = [getattr(moment, kind) for kind in KINDS]
            assert min(kinds) >= 0
            assert sum(kinds) == moment.event.bytes
        assert max(moment.event.bytes for moment in moments) == plan.peak_bytes
        seen += 1
    assert seen > 400


def test_the_timeline_peaks_where_the_plan_does():
    for plan in plans_of_random_graphs(200):
        timeline = timeline_of(plan)
        assert timeline.total.max() == plan.peak_bytes
        assert timeline.plain[1].max() == plan.plain_peak_bytes
        assert len(timeline.edges) == len(timeline.total) + 1
        assert timeline.edges[-1] == pytest.approx(sum(1 for _ in steps(plan)))


def steps(plan):
    return Schedule(plan.graph, plan.decisions).steps


def test_the_kinds_on_a_chain():
    graph = chain([10] * 6, gradient_bytes=7, backward_bytes=9, scratch_bytes=2)
    plan = ogc.make_plan(graph, [ogc.recomputed(0, 3), ogc.saved(3, 6)])
    moments = trace(graph, plan)
    # No run starts from a value. v2 to v4 are kept for the saved segment; the output is the caller's.
    assert [moment.checkpoints for moment in moments] == [0] * len(moments)
    turn = moments[6]
    assert (turn.event.phase, turn.saved, turn.gradients, turn.working) == ("backward", 40, 7, 2)
    again = [moment for moment in moments if moment.event.phase == "recompute"]
    assert [(m.recomputed, m.saved, m.gradients, m.working) for m in again] == [(10, 10, 7, 2), (20, 10, 7, 2)]


def test_checkpoints_are_what_runs_start_from():
    graph = chain([10, 20, 30, 40, 50, 60])
    plan = ogc.make_plan(graph, [ogc.recomputed(0, 2), ogc.recomputed(2, 4), ogc.saved(4, 6)])
    assert checkpoints(plan) == {1}
    moments = trace(graph, plan)
    assert max(moment.checkpoints for moment in moments) == 20
    for plan in plans_of_random_graphs(200):
        schedule = Schedule(plan.graph, plan.decisions)
        read = {
            v
            for step in steps(plan)
            for run, v in schedule.reads(step)
            if run == FORWARD != step.run and plan.graph.values[v].bytes
        }
        assert read <= schedule.checkpoints


@pytest.mark.full
def test_a_plain_plan_has_the_plain_models_timeline(resnet):
    plan = ogc.solve(resnet.graph, solver="none")
    assert tuple(moment.event for moment in trace(resnet.graph, plan)) == plain_timeline(resnet.graph)
    timeline = timeline_of(plan)
    assert timeline.total.tolist() == timeline.plain[1].tolist()
    assert timeline.total.max() == plan.peak_bytes == plan.plain_peak_bytes
    plan.plot()
    plan.draw()


@pytest.mark.full
@pytest.mark.parametrize("goal", [{}, {"max_overhead": 0.3}, {"memory_budget": 0.6}])
def test_the_timeline_peaks_where_the_allocator_says(resnet, goal):
    plan = ogc.solve(resnet.graph, **goal)
    timeline = timeline_of(plan)
    assert timeline.total.max() == plan.peak_bytes
    optimised = ogc.apply(resnet.model, resnet.graph, plan)
    assert timeline.total.max() == pytest.approx(measured_peak(optimised, (resnet.images,)), rel=0.03)
    assert timeline.plain[1].max() == pytest.approx(measured_peak(resnet.model, (resnet.images,)), rel=0.03)


def test_a_sliced_graph_shows_the_plain_peak_alone():
    model, x = Wide(), torch.randn(10, 3, 32, 32)
    graph, plan = ogc.chunk_batch(model, x, ogc.parse(model, x), chunks=4)
    assert graph.plain_peak_bytes
    timeline = timeline_of(plan)
    assert timeline.plain is None
    assert timeline.total.max() == plan.peak_bytes
    assert f"plain model, peak {mib(plan.plain_peak_bytes)}" in texts(plan.plot())
    with pytest.raises(ogc.PlanError, match="runs chunk by chunk"):
        trace(graph, ogc.solve(graph, solver="none"))


# -- the pictures --------------------------------------------------------------------------------------------


def texts(figure):
    from matplotlib.text import Text

    return [text.get_text() for text in figure.findobj(Text)]


@pytest.mark.full
def test_the_budget_is_drawn_where_it_is(resnet):
    plan = ogc.solve(resnet.graph, memory_budget=0.6)
    assert plan.budget_bytes == int(0.6 * plan.plain_peak_bytes)
    (ax,) = plan.plot().axes
    lines = [line.get_ydata()[0] for line in ax.lines if line.get_label().startswith("budget")]
    assert lines == [plan.budget_bytes / MIB]
    assert not [text for text in texts(ogc.solve(resnet.graph, memory_budget="least").plot()) if "budget" in text]


@pytest.mark.full
def test_the_frontier_shows_its_plans_and_the_peers(resnet):
    curve = ogc.frontier(resnet.graph, points=6)
    (ax,) = curve.plot(peers={"chen": (5 * MIB, 0.25)}).axes
    ours, plain, bound, chen = ax.lines
    assert ours.get_xdata().tolist() == [plan.peak_bytes / MIB for plan in curve.plans]
    assert ours.get_ydata().tolist() == [plan.overhead * 100 for plan in curve.plans]
    assert (plain.get_xdata()[0], plain.get_ydata()[0]) == (
        curve.plans[-1].plain_peak_bytes / MIB,
        curve.plans[-1].overhead * 100,
    )
    assert bound.get_xdata()[0] == curve.plans[0].lower_bound / MIB
    assert (chen.get_xdata()[0], chen.get_ydata()[0], chen.get_label()) == (5, 25, "chen, 5 MiB at 25%")


@pytest.mark.full
def test_the_graph_names_every_operation_and_checkpoint(resnet):
    plan = ogc.solve(resnet.graph, max_overhead=0.3)
    found = texts(plan.draw())
    assert found.count("convolution") == sum(op.target == "aten.convolution.default" for op in resnet.graph.operations)
    sizes = [mib(resnet.graph.values[v].bytes) for v in checkpoints(plan)]
    assert sizes and set(sizes) <= set(found)
    assert "layer1.0.conv1" in found


@pytest.mark.full
def test_no_two_texts_of_a_picture_overlap(resnet):
    plan = ogc.solve(resnet.graph, memory_budget=0.6)
    peers = {"chen": (5 * MIB, 0.25), "uniform": (5 * MIB, 0.26)}
    for figure in (plan.plot(), plan.draw(), ogc.frontier(resnet.graph, points=6).plot(peers=peers)):
        figure.draw_without_rendering()
        boxes = [(text.get_text(), text.get_window_extent()) for text in shown(figure)]
        assert len(boxes) > 10
        width, height = figure.get_size_inches() * figure.dpi
        for number, (name, box) in enumerate(boxes):
            assert box.x0 >= -1 and box.x1 <= width + 1 and box.y0 >= -1 and box.y1 <= height + 1, name
            for other, its in boxes[:number]:
                shared = min(box.x1, its.x1) - max(box.x0, its.x0), min(box.y1, its.y1) - max(box.y0, its.y0)
                assert min(shared) < 2, (name, other)


def shown(figure):
    (ax,) = figure.axes
    yield from (text for legend in figure.legends for text in legend.get_texts())
    yield from ax.texts
    for axis in (ax.xaxis, ax.yaxis) if ax.axison else ():
        low, high = sorted(axis.get_view_interval())
        yield axis.label
        yield from (tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high)


@pytest.mark.full
@pytest.mark.parametrize("ending", ["png", "svg"])
def test_files_are_as_their_ending_says_and_the_same_each_time(resnet, tmp_path, ending):
    plan, curve = ogc.solve(resnet.graph, max_overhead=0.3), ogc.frontier(resnet.graph, points=6)
    for name, picture in (("timeline", plan.plot), ("graph", plan.draw), ("frontier", curve.plot)):
        path, again = tmp_path / f"{name}.{ending}", tmp_path / f"{name}_again.{ending}"
        picture(path)
        picture(str(again))
        assert path.read_bytes() == again.read_bytes()
        if ending == "png":
            assert path.read_bytes().startswith(b"\x89PNG")
        else:
            assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_given_axes_are_drawn_on(resnet):
    from matplotlib.figure import Figure

    figure = Figure()
    left, right = figure.subplots(1, 2)
    plan = ogc.solve(resnet.graph, memory_budget="least")
    assert plan.plot(ax=left) is figure
    assert ogc.frontier(resnet.graph, points=4).plot(ax=right) is figure
    assert left.get_ylabel() == "activation memory, MiB"
    assert right.get_xlabel() == "peak activation memory, MiB"


def test_notebooks_show_a_figure(resnet):
    assert ogc.solve(resnet.graph, memory_budget="least").plot()._repr_png_().startswith(b"\x89PNG")


@pytest.mark.full
def test_long_and_empty_graphs_are_drawn():
    graph = chain([4] * 1000)
    plan = ogc.solve(graph, memory_budget="least")
    assert plan.draw().get_size_inches()[1] < 20
    plan.plot()
    empty = ogc.solve(ogc.Graph((), ()), memory_budget="least")
    empty.plot()
    empty.draw()
    curve = ogc.frontier(ogc.Graph((), ()))
    curve.plot()
    assert str(curve).splitlines()[1].split() == ["0.0", "-", "0.0%", "0"]


# -- plans remember their graph, not its program -----------------------------------------------------------------


def test_a_plan_is_pickled_and_copied_with_its_graph_but_no_program(resnet):
    plan = ogc.solve(resnet.graph, memory_budget="least")
    assert plan.graph is resnet.graph
    for twin in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert twin == plan
        assert twin.graph == plan.graph and twin.graph.program is None
        assert timeline_of(twin).total.tolist() == timeline_of(plan).total.tolist()


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["picture", "picture.jpg", "picture.txt"])
def test_an_unknown_ending_is_refused_before_anything_is_drawn(name, tmp_path):
    plan = ogc.solve(chain([4] * 5), memory_budget="least")
    curve = ogc.frontier(chain([4] * 5))
    for picture in (plan.plot, plan.draw, curve.plot):
        with pytest.raises(ogc.InputError, match=r"must end in \.png, \.svg, \.pdf, not"):
            picture(tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("point", [3, (1,), ("a", "b"), (float("nan"), 0.1), (1, -0.1)])
def test_a_peer_that_is_no_point_is_refused(point):
    with pytest.raises(ogc.InputError, match="peer 'chen' must be"):
        ogc.frontier(chain([4] * 5)).plot(peers={"chen": point})


def test_a_plan_without_its_graph_is_refused():
    plan = ogc.Plan(Decisions(()), 0, 0, 0, 0.0, 0, 0.0, 0)
    for picture in (plan.plot, plan.draw):
        with pytest.raises(ogc.PlanError, match="does not know its graph"):
            picture()


@pytest.mark.full
def test_without_matplotlib_everything_else_works_and_pictures_say_what_to_install():
    script = """
import sys
sys.modules["matplotlib"] = None
sys.path.insert(0, "tests")
import ogc
from helpers import chain
plan, curve = ogc.solve(chain([4] * 5)), ogc.frontier(chain([4] * 5))
print(plan, curve)
for picture in (plan.plot, plan.draw, curve.plot):
    try:
        picture()
    except ogc.DependencyError as error:
        assert isinstance(error, ImportError)
        assert "pip install matplotlib" in str(error), error
    else:
        raise AssertionError
import benchmark
assert benchmark.main(["--arch", "resnet18", "--device", "cpu", "--plot", "nowhere"]) == 2
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--plot: pictures need matplotlib" in done.stderr
    assert not (ROOT / "nowhere").exists()


# -- the command line ------------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_benchmark_draws_three_pictures_in_two_formats(tmp_path, capsys):
    folder = tmp_path / "new" / "pictures"
    arguments = ["--arch", "resnet18", "--device", "cpu", "--batch-size", "2", "--image-size", "64"]
    arguments += ["--iterations", "1", "--solver", "optimal", "chen", "none", "--plot", str(folder)]
    assert benchmark.main([*arguments, "--json", str(tmp_path / "out.json")]) == 0
    names = {f"resnet18_{what}.{ending}" for what in ("timeline", "frontier", "graph") for ending in ("png", "svg")}
    assert {path.name for path in folder.iterdir()} == names
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["way"] for row in rows] == ["optimal", "chen", "none"]
