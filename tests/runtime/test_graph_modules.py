"""Modules that torch.fx made: their forward, graph and code are members of a class of their own, and change with it."""

import copy
import pickle

import pytest
import torch
from helpers import assert_same_training, measured_peak
from torch import nn
from torch.fx import symbolic_trace

import ogc

feature_extraction = pytest.importorskip("torchvision.models.feature_extraction")

X = torch.randn(4, 3, 32, 32)


class Dropout(nn.Module):
    """Traced through, so that each mode has a graph of its own."""

    def forward(self, x):
        return nn.functional.dropout(x, 0.1, self.training)


def layers():
    torch.manual_seed(0)
    convolutions = [
        layer
        for width in (3, 8, 8, 8, 8)
        for layer in (nn.Conv2d(width, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Tanh(), Dropout())
    ]
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1))


def extractor():
    return feature_extraction.create_feature_extractor(layers(), {"20": "end"})


def seeded(run):
    torch.manual_seed(1)
    with torch.no_grad():
        return run(X)


MAKERS = {"traced": lambda: symbolic_trace(layers()), "features": extractor}
quiet = pytest.mark.filterwarnings("ignore:NOTE. The nodes obtained by tracing")


@pytest.mark.full
@quiet
@pytest.mark.parametrize("name", MAKERS)
def test_they_train_bitwise_with_the_saving(name):
    model = MAKERS[name]()
    optimised = ogc.optimize(model, X, profile="estimate", holds_outputs=False, memory_budget="least")
    plan = optimised.plan
    assert plan.peak_bytes < 0.7 * plan.plain_peak_bytes
    assert measured_peak(model, (X,)) == pytest.approx(plan.plain_peak_bytes, rel=0.03)
    assert measured_peak(optimised, (X,)) == pytest.approx(plan.peak_bytes, rel=0.03)
    assert_same_training(model, optimised, (X,))
    assert optimised.code == model.code and optimised.graph is model.graph, "as everywhere, the model's own stay"


@pytest.mark.full
@quiet
@pytest.mark.parametrize("name", MAKERS)
def test_modes_may_be_switched(name):
    """A feature extractor has a graph for each mode, and gives its class a new forward."""
    model = MAKERS[name]()
    optimised = ogc.optimize(model, X, memory_budget="least")
    for run in (optimised, model):
        run.eval()
        given, expected = (seeded(one) for one in (optimised, model))
        outputs = zip(*(of.values() if isinstance(of, dict) else [of] for of in (given, expected)), strict=True)
        assert all(torch.equal(a, b) for a, b in outputs)
        run.train()
    before = optimised.report().planned
    assert_same_training(model, optimised, (X,))
    assert optimised.report().planned == before + 3


@pytest.mark.full
@quiet
def test_copies_have_a_forward_of_their_own():
    model = extractor()
    optimised = ogc.optimize(model, X, memory_budget="least")
    average, restored = copy.deepcopy(optimised), pickle.loads(pickle.dumps(optimised))
    average.eval()
    assert average.code != optimised.code
    assert_same_training(model, optimised, (X,))
    assert_same_training(model, optimised, (X[:2],))
    average.train()
    for twin in (average, restored):
        assert_same_training(twin, twin, (X,))
        torch.manual_seed(1)
        ours = twin(X)
        torch.manual_seed(1)
        assert all(torch.equal(a, b) for a, b in zip(ours.values(), model(X).values(), strict=True))
        assert twin.report().planned


@pytest.mark.full
@quiet
def test_another_graph_is_another_plan():
    model = symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
    x = torch.randn(64, 8)
    optimised = ogc.optimize(model, x, memory_budget="least")
    assert_same_training(model, optimised, (x,))
    for changed, target in ((model, "0"), (optimised, "4")):
        node = next(node for node in changed.graph.nodes if node.target in ("2", "0") and node.name != "_0")
        node.target = target
        changed.recompile()
        assert_same_training(model, optimised, (x,))
    assert optimised.report().planned == 9
