"""Times that are measured on the device at hand."""

import sys
from dataclasses import replace

import pytest
import torch
from helpers import assert_same_training
from models import Residual, images
from torch import nn

import ogc
from ogc.graph import RuntimeCosts
from ogc.parser.weigh import timing
from ogc.parser.weigh.host import runtime_costs

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


def test_plans_by_measured_times_train_bitwise():
    model = Residual()
    for wish in ({}, {"memory_budget": 0.8}, {"max_overhead": 0.5}):
        assert_same_training(model, ogc.optimize(model, images(), **wish), (images(),))


def test_what_runs_without_gradients_has_no_backward():
    graph = ogc.parse(Guarded(), torch.randn(4, 8, requires_grad=True))
    (inside,) = (op for op in graph.operations if "sin" in op.name)
    assert inside.forward_seconds > 0 and not inside.backward_seconds


def test_what_is_not_affordable_is_estimated_at_the_same_pace(monkeypatch):
    monkeypatch.setattr(timing, "AFFORDABLE_SECONDS", -1.0)
    monkeypatch.setattr(timing, "_known", {})
    graphs = [ogc.parse(Residual(), images(), profile=profile) for profile in ("time", "estimate")]
    times = [[(op.forward_seconds, op.backward_seconds) for op in graph.operations] for graph in graphs]
    assert times[0] == times[1]


def test_the_runtimes_work_has_a_price():
    costs = runtime_costs(is_measured=True, calls_left_out=100)
    assert 0 < costs.saved_tensor < costs.run < 0.01
    assert 0 < costs.left_out < 0.01
    graph = replace(ogc.parse(Residual(), images()), runtime=RuntimeCosts(run=1.0))
    cut = graph.cuts[len(graph.cuts) // 2]
    plan = ogc.make_plan(graph, [ogc.recomputed(0, cut), ogc.recomputed(cut, len(graph))])
    assert plan.runtime_seconds == 2.0
    assert plan.added_seconds == plan.recomputed_seconds + 2.0


class Wrapped(nn.Module):
    def __init__(self, inner, depth):
        super().__init__()
        self.inner = Wrapped(inner, depth - 1) if depth else inner

    def forward(self, x):
        return self.inner(x)


def test_a_plan_is_quicker_than_the_plain_model_by_the_calls_of_modules_that_it_leaves_out():
    shallow, deep = (ogc.parse(Wrapped(nn.Linear(8, 8), depth), torch.randn(4, 8)) for depth in (2, 60))
    assert deep.runtime.left_out > 5 * shallow.runtime.left_out > 0
    plan = ogc.make_plan(deep, [ogc.saved(0, len(deep))])
    assert plan.overhead == -deep.runtime.left_out / deep.step_seconds
    assert -1 < plan.overhead < 0


def test_calls_are_not_counted_where_somebody_else_profiles():
    events = []
    sys.setprofile(lambda *event: events.append(event))
    try:
        graph = ogc.parse(Wrapped(nn.Linear(8, 8), 5), torch.randn(4, 8))
        assert sys.getprofile() is not None
    finally:
        sys.setprofile(None)
    assert events and graph.runtime.left_out == 0
