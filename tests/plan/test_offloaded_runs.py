"""Random plans that offload at random moments, run: the plain model's bits and the peak that they promise, at least."""

import os
import random
from dataclasses import replace

import pytest
import torch
from helpers import loss_of, measured_peak, random_decisions, trace_of_training
from test_random_plans import CASES, MORE, SCALARS, exact_runs, stack
from torch import nn

import ogc
from ogc.plan.decisions import Decisions, Offload
from ogc.runtime.copies import offloadable_values

pytestmark = pytest.mark.skipif(not hasattr(os, "preadv"), reason="files cannot be read at places here")
FAST = 1e12
"""Bytes per second of a disk that nobody waits for."""


def offloading_plans(graph, count):
    """So many random plans that offload at random moments, the first all that they can."""
    rng, found = random.Random(1), []
    while len(found) < count:
        decisions = Decisions((ogc.saved(0, len(graph)),)) if len(found) < 2 else random_decisions(graph, rng)
        offloaded = [
            Offload(v, rng.randrange(graph.last_uses[v] + 1, graph.end + 1), rng.randrange(graph.end))
            for v in sorted(graph.offloadable)
            if rng.random() < 0.5 or not found
        ]
        low = [t for t in graph.low_memory if rng.random() < 0.5]
        try:
            found.append(ogc.make_plan(graph, decisions, offloaded=offloaded, low_memory=low))
        except ogc.PlanError:  # an operation would run twice that must not
            continue
    return found


SOME = ("residual", "attention", "autocast")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SOME else pytest.mark.full) for name in (CASES | MORE)]
)
def test_random_plans_have_the_plain_models_bits_and_the_peak_that_they_promise(name, tmp_path):
    torch.manual_seed(0)
    make, make_inputs = (CASES | MORE)[name]
    model, inputs = make(), (make_inputs(),)
    graph = ogc.parse(model, inputs, loss=loss_of, holds_outputs=False, profile="estimate")
    graph = replace(graph, host=ogc.Host(FAST, FAST, offloadable_values(graph), str(tmp_path)))
    plans = offloading_plans(graph, 8)
    assert exact_runs(model, inputs, graph, plans) >= len(plans) / 2 and os.listdir(tmp_path) == []


NETWORKS = {
    **{name: case for name, case in (CASES | MORE).items() if name not in ("opaque", "without grad")},
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.1), 3, enable_nested_tensor=False
        ),
        lambda: torch.randn(4, 32, 64),
    ),
    "perceptron": (lambda: stack(nn.GELU, 8), lambda: torch.randn(256, 64)),
    "convolutions": (
        lambda: nn.Sequential(
            *(m for _ in range(5) for m in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()))
        ),
        lambda: torch.randn(8, 8, 16, 16),
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", NETWORKS)
def test_plans_that_are_found_take_what_they_promise_to_the_byte(name, tmp_path):
    torch.manual_seed(0)
    make, make_inputs = NETWORKS[name]
    model, inputs = make(), (make_inputs(),)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = trace_of_training(model, model, inputs, 1)
    options = {"offload": tmp_path, "bandwidth": FAST, "profile": "estimate", "holds_outputs": False, "loss": loss_of}
    offloading = 0
    for share in (0.8, 0.6, 0.45):
        try:
            run = ogc.optimize(model, *inputs, memory_budget=share, **options)
        except ogc.SolveError:
            continue
        offloading += bool(run.plan.offloaded)
        assert not run.plan.offloaded or abs(run.plan.peak_bytes - measured_peak(run, inputs)) <= SCALARS
        model.load_state_dict(state)
        found = trace_of_training(model, run, inputs, 1)
        assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    assert offloading
