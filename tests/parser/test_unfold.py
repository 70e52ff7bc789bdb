"""Attention with dropout on a CPU, unfolded: the bits of the one operator, and its parts for a plan to choose among."""

import random

import pytest
import torch
from helpers import assert_same_training, measured_peak, random_tree
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import ogc
from benchmarks.ways import frontier_by_flops
from ogc.operators import products
from ogc.parser.passes.calls import unfolds
from ogc.plan.schedule import Schedule

ATTENTION = "aten.scaled_dot_product_attention.default"


class Attends(nn.Module):
    """Heads over rows of nine tokens, twice."""

    def __init__(self, masked="", dropout=0.2, scale=None, heads=4):
        super().__init__()
        self.masked, self.dropout, self.scale, self.heads = masked, dropout, scale, heads
        self.make, self.out = nn.Linear(24, 72), nn.Linear(24, 24)
        self.bias = nn.Parameter(torch.randn(heads, 1, 9))

    def mask(self, x):
        if self.masked == "boolean":
            return torch.arange(9) < torch.arange(x.shape[1])[:, None] + 1
        if self.masked == "float":
            return torch.zeros(x.shape[1], 9).masked_fill(torch.arange(9) > 5, -torch.inf)
        return self.bias if self.masked == "trained" else None

    def forward(self, x):
        for _ in range(2):
            given = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.make(x).chunk(3, -1))
            options = {"is_causal": self.masked == "causal", "scale": self.scale}
            found = scaled_dot_product_attention(*given, self.mask(x), self.dropout, **options)
            x = x + self.out(found.transpose(1, 2).flatten(2))
        return x.mean((1, 2))


def targets(graph):
    return [op.target for op in graph.operations]


@pytest.mark.full
@pytest.mark.parametrize("profile", ["estimate", "measure"])
@pytest.mark.parametrize("masked", ["", "boolean", "float", "trained", "causal"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_unfolded_attention_trains_bitwise_and_peaks_as_simulated(masked, scale, profile):
    torch.manual_seed(0)
    model, x = Attends(masked, scale=scale), torch.randn(64, 9, 24)
    graph = ogc.parse(model, x, profile=profile)
    assert ATTENTION not in targets(graph)
    assert targets(graph).count("aten.bmm.default") == 4
    optimised = ogc.apply(model, graph, ogc.make_plan(graph, [ogc.recomputed(0, len(graph))]))
    assert_same_training(model, optimised, (x,))
    assert measured_peak(optimised, (x,)) == pytest.approx(optimised.plan.peak_bytes, rel=0.02)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6))
def test_any_plan_of_it_is_bitwise_and_peaks_as_simulated(seed):
    model, x = Attends("causal"), torch.randn(64, 9, 24)
    graph = ogc.parse(model, x)
    plan = ogc.make_plan(graph, random_tree(graph, random.Random(seed)))
    optimised = ogc.apply(model, graph, plan)
    assert_same_training(model, optimised, (x,))
    assert measured_peak(optimised, (x,)) == pytest.approx(plan.peak_bytes, rel=0.03)


@pytest.mark.full
def test_its_products_are_kept_and_the_rest_is_made_again():
    """No matrix product runs again where selective checkpointing would keep them all."""
    encoder = nn.TransformerEncoderLayer(64, 4, 128, 0.1, batch_first=True)
    graph = ogc.parse(nn.TransformerEncoder(encoder, 2), torch.randn(4, 64, 64))
    plans = [plan for plan in frontier_by_flops(graph) if not plan.recomputed_flops]
    plan = min(plans, key=lambda plan: plan.peak_bytes)
    again = {graph.operations[t].target for run in Schedule(graph, plan.decisions).runs[1:] for t in run.program}
    assert "aten.dropout.default" in again
    assert {"aten.mul.Scalar", "aten._safe_softmax.default"} & again  # which of them differs with torch's program
    assert not {"aten.linear.default", "aten.bmm.default"} & again
    assert plan.peak_bytes < 0.65 * plan.plain_peak_bytes


@pytest.mark.parametrize(
    "change",
    [
        {"dropout": 0.0},  # another kernel, which saves next to nothing
        {"dtype": torch.bfloat16},
        {"heads": 1, "dims": 3},
    ],
)
def test_what_is_not_made_of_these_operators_stays_whole(change):
    query = torch.randn(2, change.get("heads", 3), 5, 8, dtype=change.get("dtype", torch.float32))
    query = query.flatten(0, 1) if "dims" in change else query
    arguments = (query, query, query, None, change.get("dropout", 0.1))
    assert unfolds(torch.ops.aten.scaled_dot_product_attention.default, arguments, {}) is None


def test_what_turns_out_to_differ_stays_whole(monkeypatch):
    query = torch.randn(2, 3, 5, 8, requires_grad=True)
    arguments = (query, query, query, None, 0.1)
    assert unfolds(torch.ops.aten.scaled_dot_product_attention.default, arguments, {}) is not None
    monkeypatch.setattr(products.math, "sqrt", lambda number: number**0.5 * 1.01)
    assert unfolds(torch.ops.aten.scaled_dot_product_attention.default, arguments, {}) is None


@pytest.mark.full
def test_a_plan_is_carried_over_to_other_sizes(caplog):
    model, x = Attends("causal"), torch.randn(6, 9, 24)
    optimised = ogc.optimize(model, x, memory_budget="least")
    other = torch.randn(3, 7, 24)
    assert_same_training(model, optimised, (other,))
    assert not [record for record in caplog.records if "plain model" in record.message]
