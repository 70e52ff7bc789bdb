"""What ran the calls of an optimized module, and messages that name what differs."""

import logging
from typing import ClassVar

import pytest
import torch
from helpers import chain, loss_of, measured_peak, peak_bytes
from torch import nn

import ogc
from ogc.process import SHOWN_AFTER, counted, is_late, shown, tell_stage, within_seconds
from ogc.runtime.calls import WIDTH, Calls, Report
from ogc.solver.search import CutSearch


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.batch, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.1)

    def forward(self, x, scale=1.0, *, options=None):
        for layer in self.layers:
            x = torch.tanh(self.batch(layer(x)) * scale).square()
        return self.drop(x)


def unwrapped(report):
    return " ".join(str(report).split())


def hook_on_all():
    return nn.modules.module.register_module_forward_hook(lambda *_: None)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x():
    return torch.randn(64, 16)


CHANGES = {
    "batch is in eval mode": lambda net: net.batch.eval(),
    "layers.2.weight has requires_grad False, not True": lambda net: net.layers[2].weight.requires_grad_(False),
    "the hooks of layers.1 are others (1, not 0)": lambda net: net.layers[1].register_forward_hook(lambda *_: None),
    "the submodules are others": lambda net: setattr(net, "drop", nn.Identity()),
    "the attribute drop.p is another": lambda net: setattr(net.drop, "p", 0.5),
    "the forward of batch was replaced": lambda net: setattr(net.batch, "forward", net.batch.forward),
}
CALLS = {
    "x is float32 [40, 16] on cpu, not float32 [64, 16] on cpu": lambda x: ((x[:40],), {}),
    "scale is 0.5, which the sample has not": lambda x: ((x, 0.5), {}),
    "options['depth'] is 3, which the sample has not": lambda x: ((x,), {"options": {"depth": 3}}),
    "x is float32 [64, 16] on cpu that requires grad": lambda x: ((x.clone().requires_grad_(),), {}),
    "x has other strides": lambda x: ((x.t().contiguous().t(),), {}),
}


@pytest.mark.full
@pytest.mark.parametrize("words", [*CHANGES, *CALLS])
def test_a_message_names_what_differs(words, net, x, caplog):
    optimised = ogc.optimize(net, x, memory_budget="least")
    CHANGES.get(words, id)(net)
    args, kwargs = CALLS[words](x) if words in CALLS else ((x,), {})
    with caplog.at_level(logging.INFO, "ogc"):
        optimised(*args, **kwargs).sum().backward()
    assert words in caplog.text
    assert words in unwrapped(optimised.report())


def test_settings_and_autocast_are_named(net, x, caplog):
    optimised = ogc.optimize(net, x, memory_budget="least")
    with torch.autocast("cpu"):
        optimised(x)
    torch.set_num_threads(torch.get_num_threads() + 1)
    try:
        optimised(x)
    finally:
        torch.set_num_threads(torch.get_num_threads() - 1)
    assert "where autocast casts to torch.bfloat16 on cpu is ready" in caplog.text
    assert "where the number of threads is" in caplog.text


def test_a_report_counts_what_ran_and_why(net, x):
    optimised = ogc.optimize(net, x, memory_budget="least")
    for _ in range(3):
        optimised(x)
    optimised(x[:30])
    with torch.no_grad():
        optimised(x)
    optimised.eval()(x)
    optimised.train()
    handle = hook_on_all()
    optimised(x)
    handle.remove()
    report = optimised.report()
    assert (report.planned, report.plain) == (4, 3)
    assert [calls.count for calls in report.calls] == [3, 1, 1, 1, 1]
    assert report.calls[0].kind == "like the sample" and report.calls[0].runs.startswith("plan: peak")
    assert report.calls[1].runs.startswith("reused")
    assert report.calls[2].is_plain and report.calls[2].runs == "plain: gradients are off"
    first, *lines = str(report).splitlines()
    assert first == "4 calls by a plan, 3 plain" and all(len(line) <= WIDTH for line in lines)


def test_calls_that_one_plan_ran_are_one_line_of_a_report():
    kinds = [Calls(f"x is float32 [{n}, 16] on cpu, not [64, 16]", "reused from a plan of peak", 1) for n in range(40)]
    report = Report((Calls("like the sample", "plan: peak 1.0 of 2.0 MiB", 3), *kinds))
    assert str(report).splitlines() == [
        "43 calls by a plan, 0 plain",
        "      3  plan: peak 1.0 of 2.0 MiB (like the sample)",
        "     40  reused from a plan of peak (40 kinds, the first: x is float32 [0, 16] on cpu, not [64, 16])",
    ]
    alone = str(Report(report.calls[:1])).splitlines()
    assert alone[0] == "3 calls by a plan, 0 plain: peak 1.0 of 2.0 MiB"


@pytest.mark.full
def test_a_report_of_parts_names_them():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(32, 32), nn.Tanh(), nn.Softplus())))

        def forward(self, x):
            return self.inner(x)

    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                if torch.rand(()) < 2:  # decided anew in each step
                    x = layer(x)
            return x

    x = torch.randn(128, 32)
    optimised = ogc.optimize(Dropping(), x, memory_budget="least")
    assert isinstance(optimised.plan, ogc.PartsPlan)
    optimised(x).sum().backward()
    with torch.no_grad():
        optimised(x)
    report = optimised.report()
    assert {calls.module for calls in report.calls if not calls.is_plain} == {"layers.0", "layers.1", "layers.2"}
    assert [calls.runs for calls in report.calls if calls.is_plain] == ["plain: gradients are off"]


@pytest.mark.parametrize("what", ["hooks of all modules", "eval mode with gradients", "another forward was assigned"])
def test_what_costs_the_saving_is_told_once(what, net, x, caplog):
    optimised, handle = ogc.optimize(net, x, memory_budget="least"), None
    if what == "hooks of all modules":
        handle = hook_on_all()
    elif what == "eval mode with gradients":
        net.eval()
    else:
        net.forward = net.forward
    try:
        for _ in range(3):
            optimised(x).sum().backward()
    finally:
        if handle is not None:
            handle.remove()
    assert caplog.text.count("ogc runs the plain model, which keeps all activations") == 1
    assert what in caplog.text


def test_evaluation_is_nothing_to_tell(net, x, caplog):
    optimised = ogc.optimize(net, x, memory_budget="least")
    caplog.clear()
    with torch.no_grad():
        optimised.eval()(x)
    optimised.train()(x)
    assert not caplog.records


class Bar:
    """What stands in for tqdm: remembers what it is told."""

    made: ClassVar[list] = []

    def __init__(self, **options):
        self.options, self.told = options, []
        self.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.is_closed = True

    def set_description_str(self, text, refresh):
        self.told.append(text)

    def update(self):
        pass


def test_one_bar_tells_what_planning_does(monkeypatch):
    monkeypatch.setattr("ogc.process.tqdm", Bar)
    monkeypatch.setattr(Bar, "made", [])
    with shown():
        graph = ogc.parse(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)), torch.randn(2, 4))
        ogc.solve(graph, memory_budget="least")
    tell_stage("nothing")  # no one looks
    (bar,) = Bar.made
    assert bar.is_closed and bar.options["delay"] == SHOWN_AFTER and bar.options["disable"] is None
    for stage in ("ogc: record operation 2", "ogc: weigh operation 1 of ", "ogc: search within 0.0 MiB"):
        assert any(text.startswith(stage) for text in bar.told), (stage, bar.told)
    assert list(counted("ab", "letter")) == ["a", "b"]


def test_past_a_deadline_the_best_plan_so_far_is_taken(monkeypatch):
    graph, asked = chain([10 + t % 7 for t in range(60)]), []
    fastest = CutSearch.fastest
    monkeypatch.setattr(CutSearch, "fastest", lambda *args: asked.append(args) or fastest(*args))
    plan = ogc.solve(graph)
    unhurried = len(asked)
    asked.clear()
    with within_seconds(0.0), within_seconds(1000.0):
        hurried = ogc.solve(graph)
    assert len(asked) < unhurried and hurried.floor is None and not hurried.is_plain
    assert plan.peak_bytes <= hurried.peak_bytes <= plan.plain_peak_bytes
    assert not is_late()


@pytest.mark.full
def test_a_model_is_planned_with_little_time_or_much_effort(net, x):
    hurried = ogc.optimize(net, x, planning_seconds=1e-3)
    assert hurried.plan.floor is None
    plans = [ogc.optimize(net, x, memory_budget="least", effort=effort).plan for effort in (0, 2)]
    assert plans[1].peak_bytes <= plans[0].peak_bytes
    for plain, planned in zip(net.parameters(), hurried.parameters(), strict=True):
        assert plain is planned


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"planning_seconds": 0}, "planning_seconds must be a number of seconds above 0, not 0"),
        ({"planning_seconds": "1"}, "planning_seconds must be"),
        ({"effort": 4}, "effort must be 0, 1, 2 or 3, not 4"),
    ],
)
def test_bad_limits_of_planning_are_refused(asked, words, net):
    with pytest.raises(ogc.InputError, match=words):
        ogc.optimize(net, **asked)


@pytest.mark.full
@pytest.mark.parametrize("profile", ["estimate", "time"])
def test_planning_in_a_step_takes_no_more_than_the_step(profile, monkeypatch):
    """Times are measured with copies of parameters and other things that are let go of late."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    model, x = nn.TransformerEncoder(encoder, 4, enable_nested_tensor=False), torch.randn(8, 128, 64)
    optimised = ogc.optimize(model, x, profile=profile, memory_budget="least")
    measured_peak(optimised, (x,))
    monkeypatch.setattr("ogc.parser.weigh.measure._known", {})

    def step():
        with torch.autocast("cpu"):
            output = optimised(x)
        loss_of(output).backward()

    first = peak_bytes(step, torch.device("cpu"))
    assert optimised.report().planned == 3
    assert first <= 1.2 * peak_bytes(step, torch.device("cpu"))
