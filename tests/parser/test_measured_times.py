"""Times that are measured on the device available."""

import copy
import sys
import time
from dataclasses import replace

import pytest
import torch
from helpers import assert_same_training
from models import Residual, images
from torch import nn

import ogc
from ogc.graph import RuntimeCosts
from ogc.parser import assemble
from ogc.parser.weigh import host, measure
from ogc.parser.weigh.host import runtime_costs
from ogc.parser.weigh.measure import seconds_of, typical
from ogc.torch_state.reads import Reads

pytestmark = pytest.mark.usefixtures("measured_times")


class Guarded(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        with torch.no_grad():
            scale = x.sin()
        return self.layer(x) * scale


def test_times_are_measured_and_bytes_are_not():
    model = Residual()
    timed, estimated = ogc.parse(model, images()), ogc.parse(model, images(), profile="estimate")
    assert timed.profile == "time"
    untimed = {"forward_seconds": 0.0, "backward_seconds": 0.0, "repeat_seconds": None, "low_memory": None}
    plain = [[replace(op, **untimed) for op in graph.operations] for graph in (timed, estimated)]
    assert plain[0] == plain[1]
    assert timed.forward_seconds > 0 and timed.forward_seconds != estimated.forward_seconds


def test_equal_calls_are_measured_once_in_a_process():
    graphs = [ogc.parse(Residual(), images()) for _ in range(2)]
    assert graphs[0].operations == graphs[1].operations


def test_what_is_measured_first_in_a_process_is_measured_once_more(monkeypatch):
    monkeypatch.setattr(measure, "_known", {})
    took, measured = iter([3.0, *[1.0] * 100]), []

    def seconds(self, repeats):
        measured.append(self.target)
        return measure.CallSeconds(next(took))

    monkeypatch.setattr(measure._TimedCall, "seconds", seconds)
    graph = ogc.parse(nn.Sequential(nn.Tanh(), nn.Sigmoid()), torch.randn(4, 4, requires_grad=True))
    assert [op.forward_seconds for op in graph.operations] == [1.0, 1.0] and measured[:2] == [torch.tanh] * 2


def test_a_low_memory_variant_costs_what_stands_around_a_function_in_python(monkeypatch):
    monkeypatch.setattr(assemble, "OF_VARIANT", 0.0)
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), torch.randn(2, 3, 8, 8)
    bare = ogc.parse(model, x)
    monkeypatch.undo()
    graph = ogc.parse(model, x)
    assert graph.low_memory
    for t in graph.low_memory:
        more = graph.operations[t].low_memory.backward_seconds - bare.operations[t].low_memory.backward_seconds
        assert more == pytest.approx(host.OF_VARIANT * graph.runtime.run)


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return sum(self.layer(x[t]).chunk(2, 1)[t % 2].sum() for t in range(len(x)))


@pytest.mark.full
def test_a_view_is_measured_once_wherever_it_lies(monkeypatch):
    counts = []
    for rows in (2, 12):
        monkeypatch.setattr(measure, "_known", {})
        ogc.parse(Rows(), torch.randn(rows, 4, 8)[:rows])
        counts.append(len(measure._known))
    assert counts[0] == counts[1]


def test_plans_by_measured_times_train_bitwise():
    model = Residual()
    for goal in ({}, {"memory_budget": 0.8}, {"max_overhead": 0.5}):
        assert_same_training(model, ogc.optimize(model, images(), **goal), (images(),))


def test_what_runs_without_gradients_has_no_backward():
    graph = ogc.parse(Guarded(), torch.randn(4, 8, requires_grad=True))
    (inside,) = (op for op in graph.operations if "sin" in op.name)
    assert inside.forward_seconds > 0 and not inside.backward_seconds


def test_what_is_not_affordable_is_estimated_at_the_same_pace(monkeypatch):
    monkeypatch.setattr(measure, "AFFORDABLE_SECONDS", -1.0)
    monkeypatch.setattr(measure, "_known", {})
    graphs = [ogc.parse(Residual(), images(), profile=profile) for profile in ("time", "estimate")]
    times = [[(op.forward_seconds, op.backward_seconds) for op in graph.operations] for graph in graphs]
    assert times[0] == times[1]


def test_the_runtimes_work_has_a_price():
    costs = runtime_costs(is_measured=True, calls_left_out=100, choice=0.5)
    assert 0 < costs.saved_tensor < costs.run < 0.01
    assert 0 < costs.left_out < 0.01 and costs.choice == 0.5
    graph = replace(ogc.parse(Residual(), images()), runtime=RuntimeCosts(run=1.0))
    cut = graph.cuts[len(graph.cuts) // 2]
    plan = ogc.make_plan(graph, [ogc.recomputed(0, cut), ogc.recomputed(cut, len(graph))])
    assert plan.runtime_seconds == 2.0
    assert plan.added_seconds == plan.recomputed_seconds + 2.0


def test_the_runtimes_work_takes_longer_where_kernels_use_the_caches():
    model = nn.Sequential(*(nn.Tanh() for _ in range(4)))
    small, large = (ogc.parse(model, torch.randn(size, requires_grad=True)).runtime for size in (8, 2**21))
    assert large.run == pytest.approx(host.COLD * small.run)
    assert large.saved_tensor == pytest.approx(host.COLD * small.saved_tensor)


def test_runs_that_meet_new_memory_do_not_count_unless_all_do():
    assert measure._undisturbed([(5.0, 3000), (1.0, 0), (4.0, 1500), (1.1, 2)]) == [1.0, 1.1]
    assert measure._undisturbed([(5.0, 3000), (5.2, 3100)]) == [5.0, 5.2]


def test_new_memory_is_waited_out(monkeypatch):
    """The first eight runs write new pages, and are slow for it."""
    runs = []

    def seconds_of(run, device):
        runs.append(run())
        return 0.008 if len(runs) <= 8 else 0.001

    monkeypatch.setattr(measure, "seconds_of", seconds_of)
    monkeypatch.setattr(measure, "page_faults", lambda: 1000 * min(len(runs), 8))
    assert typical(lambda: None, torch.device("cpu")) == 0.001
    assert len(runs) == 8 + measure.ENOUGH


def test_runs_that_others_disturb_do_not_count(monkeypatch):
    took = iter([0.001, 0.008, 0.006, 0.001, 0.009, 0.0011, 0.007, 0.009, 0.008, 0.00105])
    monkeypatch.setattr(measure, "seconds_of", lambda run, device: next(took))
    monkeypatch.setattr(measure, "page_faults", lambda: 0)
    assert typical(lambda: None, torch.device("cpu")) == 0.00105
    assert measure._undisturbed([(1.0, 0), (1.3, 0), (0.5, 9000), (1.1, 0)]) == [1.0, 1.1]


def test_memory_that_is_always_new_counts(monkeypatch):
    runs = []
    monkeypatch.setattr(measure, "seconds_of", lambda run, device: runs.append(run()) or 0.008)
    monkeypatch.setattr(measure, "page_faults", lambda: 1000 * len(runs))
    assert typical(lambda: None, torch.device("cpu")) == 0.008
    assert len(runs) == 1 + measure.AT_LAST


@pytest.mark.skipif(sys.platform == "win32", reason="there threads are counted in steps of 16 ms")
@pytest.mark.parametrize("threads", [1], indirect=True)
def test_on_one_thread_what_others_take_does_not_count(threads):
    assert seconds_of(lambda: time.sleep(0.05), torch.device("cpu")) < 0.01


class Wrapped(nn.Module):
    def __init__(self, inner, depth):
        super().__init__()
        self.inner = Wrapped(inner, depth - 1) if depth else inner

    def forward(self, x):
        return self.inner(x)


def test_a_plan_is_quicker_than_the_plain_model_by_the_calls_of_modules_that_it_leaves_out():
    shallow, deep = (ogc.parse(Wrapped(nn.Linear(8, 8), depth), torch.randn(4, 8)) for depth in (2, 60))
    assert deep.runtime.left_out > 5 * shallow.runtime.left_out > 0
    wide = ogc.parse(nn.Sequential(*(Wrapped(nn.Tanh(), 60) for _ in range(12)), nn.Linear(8, 8)), torch.randn(4, 8))
    plan = ogc.make_plan(wide, [ogc.saved(0, len(wide))])
    assert plan.overhead == (wide.runtime.choice - wide.runtime.left_out) / wide.step_seconds
    assert -1 < plan.overhead < 0


@pytest.mark.full
def test_choosing_a_plan_has_the_price_of_a_look_at_each_module():
    few, many = (nn.Sequential(*(nn.Tanh() for _ in range(number))) for number in (2, 2000))
    for_any = host.OF_CHOICE * host.hook_seconds()
    assert host.choice_seconds(many, Reads()) - for_any > 5 * (host.choice_seconds(few, Reads()) - for_any) > 0
    assert host.choice_seconds(many, Reads()) == host.choice_seconds(copy.deepcopy(many), Reads())


def test_the_plain_model_has_the_price_of_a_look_too():
    graph = replace(ogc.parse(Residual(), images()), runtime=RuntimeCosts(choice=0.5))
    plain = ogc.solve(graph, memory_budget=1.0)
    assert plain.is_plain and plain.added_seconds == plain.runtime_seconds == 0.5


def test_calls_are_not_counted_where_somebody_else_profiles():
    events = []
    sys.setprofile(lambda *event: events.append(event))
    try:
        graph = ogc.parse(Wrapped(nn.Linear(8, 8), 5), torch.randn(4, 8))
        assert sys.getprofile() is not None
    finally:
        sys.setprofile(None)
    assert events and graph.runtime.left_out == 0


@pytest.mark.parametrize("profile", ["estimate", "measure"])
def test_where_anomalies_are_detected_weighing_finds_none(profile):
    """Operators are weighed on memory that nobody has filled: its NaNs are no anomalies of the model."""
    words = torch.randint(10, (6, 8))
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(0, 1), nn.Linear(4, 10))
    with torch.autograd.set_detect_anomaly(True):
        graph = ogc.parse(model, words, profile=profile)
        assert torch.is_anomaly_enabled()
    assert graph.operations
