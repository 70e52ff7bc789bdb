"""The step that is planned is the step that is run: with the caller's loss, and what the caller holds."""

import copy
import logging
import random
import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from helpers import measured_peak, random_decisions, random_graph
from models import Doubled
from torch import nn
from torch.nn import functional as F

import ogc
from ogc.errors import InputError, ParseError, PlanError
from ogc.graph import Graph, Operation, Value
from ogc.plan.decisions import recomputed, saved, up_to
from ogc.plan.schedule import FORWARD, Schedule
from ogc.plan.simulate import plain_peak, simulate

IDS = torch.randint(0, 500, (2, 64), generator=torch.Generator().manual_seed(0))


class Language(nn.Module):
    """A small language model: logits of N, L, V, and with targets the loss beside them."""

    def __init__(self, vocabulary=500, width=32, layers=3):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids, targets=None):
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden)
        return logits if targets is None else {"loss": cross_entropy(logits, targets), "logits": logits}


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def shifted(logits):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten(), label_smoothing=0.1)


def dice(logits):
    shares = logits.softmax(-1)
    wanted = F.one_hot(IDS, logits.shape[-1]).float()
    overlap = 2 * (shares * wanted).sum((0, 1)) / (shares.sum((0, 1)) + wanted.sum((0, 1)) + 1)
    return F.cross_entropy(logits.flatten(0, 1), IDS.flatten()) + 1 - overlap.mean()


@pytest.mark.full
@pytest.mark.parametrize("holds_outputs", [True, False])
@pytest.mark.parametrize(
    ("inputs", "loss", "given"),
    [
        pytest.param((IDS,), lambda logits: cross_entropy(logits, IDS), True, id="outside"),
        pytest.param((IDS,), shifted, True, id="shifted"),
        pytest.param((IDS,), dice, True, id="dice"),
        pytest.param((IDS, IDS), lambda output: output["loss"], False, id="inside"),
        pytest.param((IDS, IDS), lambda output: output["loss"], True, id="inside, said"),
    ],
)
def test_peaks_with_a_loss_are_as_simulated(inputs, loss, given, holds_outputs):
    model = Language()
    options = {"holds_outputs": holds_outputs, **({"loss": loss} if given else {})}
    least = ogc.optimize(model, inputs, **options)
    plan = ogc.solve(least.graph, memory_budget=0.7)
    assert least.plan.peak_bytes < plan.peak_bytes < 0.7 * plan.plain_peak_bytes + 1
    within = ogc.apply(model, least.graph, plan)
    for run, promised in (
        (least, least.plan.peak_bytes),
        (within, plan.peak_bytes),
        (model, plan.plain_peak_bytes),
    ):
        assert measured_peak(run, inputs, loss, holds_outputs) == pytest.approx(promised, rel=0.01)


def perceptrons(width):
    layers = (nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(6))
    return nn.Sequential(nn.Linear(32, width), *layers, nn.Linear(width, 10))


def test_a_step_with_a_frozen_teacher_peaks_as_simulated():
    model, teacher, x = perceptrons(64), perceptrons(128).requires_grad_(False), torch.randn(256, 32)

    def distilled(output):
        with torch.no_grad():
            wanted = teacher(x).softmax(-1)
        return F.kl_div(output.log_softmax(-1), wanted, reduction="batchmean")

    optimised = ogc.optimize(model, x, loss=distilled, memory_budget="least")
    assert optimised.plan.peak_bytes < 0.7 * optimised.plan.plain_peak_bytes
    for run, promised in ((model, optimised.plan.plain_peak_bytes), (optimised, optimised.plan.peak_bytes)):
        assert measured_peak(run, (x,), distilled, True) == pytest.approx(promised, rel=0.01)


def blocks(*widths, last):
    return nn.Sequential(
        *(nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.GELU()) for a, b in pairwise(widths)),
        *last,
    )


@pytest.mark.full
def test_both_steps_of_an_adversarial_training_peak_as_simulated():
    made = blocks(8, 32, 32, 32, last=[nn.Conv2d(32, 3, 3, padding=1)])
    verify = blocks(3, 32, 32, 32, last=[nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 1)])
    steps = [
        (verify, torch.randn(4, 3, 32, 32), lambda score: F.softplus(score).mean()),
        (made, torch.randn(4, 8, 32, 32), lambda images: F.softplus(-verify(images)).mean()),
    ]
    for model, x, loss in steps:
        verify.requires_grad_(model is verify)
        optimised = ogc.optimize(model, x, loss=loss, memory_budget="least")
        assert optimised.plan.peak_bytes < 0.7 * optimised.plan.plain_peak_bytes
        for run, promised in ((model, optimised.plan.plain_peak_bytes), (optimised, optimised.plan.peak_bytes)):
            assert measured_peak(run, (x,), loss, True) == pytest.approx(promised, rel=0.01)


def test_what_is_not_held_is_not_counted():
    model, loss = Language(), dice
    held, dropped = (plain_peak(ogc.parse(model, IDS, loss=loss, holds_outputs=flag)) for flag in (True, False))
    assert held > dropped


@pytest.mark.full
@pytest.mark.parametrize("holds_outputs", [True, False])
def test_training_with_a_loss_is_bitwise_the_plain_models(holds_outputs):
    model = Language()
    optimised = ogc.optimize(model, IDS, loss=shifted, holds_outputs=holds_outputs, memory_budget="least")
    assert not optimised.plan.is_plain
    found = []
    for one in (model, optimised):
        torch.manual_seed(1)
        one.zero_grad()
        loss = shifted(one(IDS))
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters()), torch.get_rng_state()])
    assert all(map(torch.equal, *found))
    ogc.check(model, optimised, IDS).raise_if_different()


def starts_of(result, loss=None, names=()):
    """The outputs that the backward of a graph starts at, by the gradients alive when it begins."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 8)

        def forward(self, x):
            return result(self.linear(x))

    graph = ogc.parse(Model(), torch.randn(16, 4), loss=loss)
    return graph.operations[-1].gradient_bytes


@pytest.mark.full
def test_the_backward_starts_at_the_one_scalar():
    assert starts_of(lambda y: (y, y.mean())) == 4
    assert starts_of(lambda y: (y, y.detach().mean())) == 16 * 8 * 4


@pytest.mark.full
def test_of_several_scalars_the_backward_starts_at_the_one_called_loss():
    assert starts_of(lambda y: {"other": y.square().sum(), "loss": y.mean(), "y": y}) == 4
    assert starts_of(lambda y: {"other": y.square().sum(), "second": y.mean()}) == 8


def test_outputs_all_start_the_backward_where_that_is_said():
    assert starts_of(lambda y: (y, y.mean()), loss="outputs") == 16 * 8 * 4 + 4


def test_the_operations_of_a_loss_are_behind_the_models_and_run_once():
    model = Language()
    graph, without = ogc.parse(model, IDS, loss=shifted), ogc.parse(model, IDS)
    assert [op.name for op in graph.operations[: graph.end]] == [op.name for op in without.operations]
    assert graph.outside == len(graph) - len(without) > 0
    assert not any(op.replayable for op in graph.operations[graph.end :])
    assert len(graph.program.operations) == graph.end
    assert graph.end in graph.cuts


def test_a_loss_may_be_a_module_and_is_left_as_it_was():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    criterion = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Flatten(0), nn.Linear(64, 1))
    before, random_before = copy.deepcopy(criterion.state_dict()), torch.get_rng_state()
    graph = ogc.parse(model, torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), loss=criterion)
    assert "aten.dropout.default" in {op.target for op in graph.operations[graph.end :]}
    assert all(map(torch.equal, before.values(), criterion.state_dict().values()))
    assert torch.equal(random_before, torch.get_rng_state())
    assert all(p.grad is None for p in (*model.parameters(), *criterion.parameters()))


@pytest.mark.full
def test_a_loss_that_no_program_can_hold_is_one_operation():
    def branching(output):
        loss = output.square().mean()
        return 2 * loss if float(loss.detach()) > 0 else loss

    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
    assert ogc.parse(model, x, loss=branching).outside
    graph = ogc.parse(model, x, loss=lambda output: Doubled.apply(output).sum())
    assert any(op.target.startswith("opaque") for op in graph.operations[graph.end :])
    optimised = ogc.optimize(model, x, loss=lambda output: Doubled.apply(output).sum(), memory_budget="least")
    Doubled.apply(optimised(x)).sum().backward()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (3, "must be a function of the model's output"),
        ("mean", "must be a function of the model's output"),
        (lambda output: output, r"one number to differentiate, not a tensor of shape \[2, 64, 500\]"),
        (lambda output: output.detach().sum(), "does not require grad"),
        (lambda output: 1.0, "must return a tensor, not float"),
        (lambda output: output.logits.sum(), "loss failed on what the model returns"),
        (lambda output: output.mul_(2).sum(), "writes in place to what the model returns"),
    ],
)
def test_a_wrong_loss_is_refused(loss, message):
    model = Language()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match=message):
        ogc.optimize(model, IDS, loss=loss, memory_budget="least")
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    assert type(model) is Language


@pytest.mark.full
def test_a_plan_with_a_loss_is_carried_over_where_the_loss_takes_the_output(caplog):
    model = Language()
    optimised = ogc.optimize(model, IDS, loss=lambda logits: logits.square().mean(), memory_budget=0.7)
    with caplog.at_level(logging.INFO, "ogc"):
        optimised(IDS[:1]).square().mean().backward()
    assert re.search(r"reused for calls where \w+ is int64 \[1, 64\]", caplog.text)


@pytest.mark.full
def test_a_plan_is_carried_over_where_the_loss_does_not_take_the_output(caplog):
    model = Language()
    optimised = ogc.optimize(model, IDS, loss=lambda logits: cross_entropy(logits, IDS), memory_budget=0.7)
    small, loss = (IDS[:1],), lambda logits: cross_entropy(logits, IDS[:1])
    with caplog.at_level(logging.INFO, "ogc"):
        peak = measured_peak(optimised, small, loss, True)
    assert re.search(r"reused for calls where \w+ is int64 \[1, 64\]", caplog.text)
    plain = plain_peak(ogc.parse(model, IDS[:1], loss=loss))
    assert peak <= 0.71 * plain
    ogc.check(model, optimised, IDS).raise_if_different()


@pytest.mark.full
def test_another_kind_of_call_is_planned_without_a_loss_that_does_not_take_its_output(caplog):
    model = Language()
    optimised = ogc.optimize(model, IDS, loss=lambda logits: cross_entropy(logits, IDS), memory_budget="least")
    with caplog.at_level(logging.INFO, "ogc"):
        optimised(IDS[:1].int(), IDS[:1])["loss"].backward()
    assert "ends with the model's outputs" in caplog.text
    assert "is ready" in caplog.text


def graph_with_end(seed):
    """A random graph whose last operations are the caller's."""
    graph = random_graph(seed, most=12)
    ends = [cut for cut in graph.cuts[1:-1] if cut > len(graph) // 2]
    if not ends:
        return None
    end = random.Random(seed).choice(ends)
    operations = (replace(op, replayable=op.replayable and t < end) for t, op in enumerate(graph.operations))
    return replace(graph, operations=tuple(operations), outside=len(graph) - end)


GRAPHS = [graph for graph in map(graph_with_end, range(300)) if graph is not None]


def test_no_plan_runs_the_callers_operations_again():
    tried = 0
    for seed, graph in enumerate(GRAPHS):
        try:
            schedule = Schedule(graph, random_decisions(graph, random.Random(seed)))
        except PlanError:
            continue
        tried += len(schedule.runs) > 1
        assert all(t < graph.end for run in schedule.runs[1:] for t in run.program)
        assert all(run.stop <= graph.end for run in schedule.runs[1:])
    assert tried > 60


@pytest.mark.full
def test_plans_around_the_callers_operations_peak_as_the_simulator_says():
    helped = 0
    for graph in GRAPHS:
        plan = ogc.solve(graph, memory_budget="least")
        assert plan.peak_bytes == min(simulate(graph, plan).peak_bytes, plain_peak(graph))
        assert plan.lower_bound <= plan.peak_bytes <= plain_peak(graph)
        helped += not plan.is_plain
    assert helped > 60


def test_segments_up_to_a_position():
    segments = (saved(0, 2), recomputed(2, 8, saved(2, 5), recomputed(5, 8)), saved(8, 9))
    assert up_to(segments, 9) == segments
    assert up_to(segments, 6) == (saved(0, 2), recomputed(2, 6, saved(2, 5), recomputed(5, 6)))
    assert up_to(segments, 2) == (saved(0, 2),)


def test_a_returned_value_is_there_until_the_forward_ends():
    operations = tuple(Operation(f"op{t}", reads=(t - 1,) if t else (), writes=(t,)) for t in range(3))
    values = (Value("a", 100, is_returned=True), Value("b", 10), Value("c", 1, is_output=True))
    graph = Graph(operations, values)
    assert graph.last_uses == (2, 2, 3)
    assert simulate(graph, [saved(0, 3)]).peak_bytes == 111
    dropped = replace(graph, values=(Value("a", 100), *values[1:]))
    assert simulate(dropped, [saved(0, 3)]).peak_bytes == 110
    assert (FORWARD, 0) in Schedule(graph, ogc.plan.Decisions((saved(0, 3),))).done[2]


def test_a_caller_that_writes_in_place_to_what_it_is_given_is_refused():
    operations = (Operation("made", writes=(0,)), Operation("written", reads=(0,), writes=(0,)))
    with pytest.raises(ParseError, match="written, which follows the model's forward, writes in place"):
        Graph(operations, (Value("v", 8),), outside=1)
