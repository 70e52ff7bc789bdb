"""Operators that meta tensors cannot stand in for: they are weighed on real ones."""

import logging
from dataclasses import replace

import pytest
import torch
from helpers import assert_same_training, forced
from torch import nn
from torch.nn import functional as F

import ogc
from ogc.operators import registry
from ogc.parser.weigh import meter

TOKENS = torch.randint(0, 20, (4, 8), generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, sparse=False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 16, sparse=sparse)
        self.first, self.recurrent, self.last = nn.Linear(16, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 20)

    def forward(self, tokens):
        return self.loss(torch.tanh(self.first(self.embedding(tokens))))

    def loss(self, x):
        return F.cross_entropy(self.last(torch.tanh(x)).flatten(0, 1), TOKENS.flatten())


class Aligned(Net):
    """``ctc_loss`` has no kernel for meta tensors."""

    def loss(self, x):
        scores = self.last(torch.tanh(x)).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, TOKENS[:, :3] + 1, torch.full((4,), 8), torch.full((4,), 3))


class Packed(Net):
    """``_pack_padded_sequence`` wants the lengths on a CPU."""

    def loss(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([8, 6, 5, 2]), batch_first=True)
        return super().loss(nn.utils.rnn.pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)[0])


@pytest.mark.full
@pytest.mark.parametrize("profile", ["estimate", "measure"])
@pytest.mark.parametrize("kind", [Aligned, Packed])
def test_operators_without_a_kernel_for_meta_tensors(kind, profile):
    model = kind()
    optimised = ogc.optimize(model, TOKENS, profile=profile, memory_budget="least")
    assert ogc.check(model, optimised, TOKENS).ok
    assert all(op.backward_seconds > 0 for op in optimised.graph.operations if "ctc" in op.target)


def test_what_fails_on_shapes_alone_is_named_in_the_log(caplog, monkeypatch):
    def broken(*args):
        raise RuntimeError("broken")

    model, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.randn(2, 3)
    relu = torch.ops.aten.relu.default
    monkeypatch.setitem(registry._registered, relu, replace(registry.of(relu), on_meta=broken))
    with caplog.at_level(logging.INFO, "ogc"):
        graph = ogc.parse(model, x)
        ogc.optimize(Packed(), TOKENS, memory_budget="least")
    assert graph.operations[-1].backward_bytes and graph.operations[-1].forward_seconds
    told = {record.args[0]: record for record in caplog.records if "is weighed on real tensors" in record.message}
    assert told[torch.ops.aten.relu.default].levelname == "WARNING"
    assert "RuntimeError('broken')" in told[torch.ops.aten.relu.default].message
    assert told[torch.ops.aten._pack_padded_sequence.default].levelname == "INFO"  # as is known of it


def test_a_device_without_rates_is_named_once(caplog):
    meter._tell_once.cache_clear()
    for _ in range(2):
        graph = ogc.parse(nn.Linear(3, 3), torch.randn(2, 3), device="meta")
    (record,) = caplog.records
    assert record.getMessage() == "ogc has no rates for meta: it estimates times with those of CUDA"
    assert graph.step_seconds == ogc.parse(nn.Linear(3, 3), torch.randn(2, 3), device="cuda").step_seconds


@pytest.mark.parametrize("profile", ["estimate", "measure"])
def test_sparse_gradients(profile):
    model = Net(sparse=True)
    gradients = []
    for run in (model, forced(model, TOKENS, profile=profile)):
        model.zero_grad()
        run(TOKENS).backward()
        gradients.append(model.embedding.weight.grad)
    assert all(gradient.is_sparse for gradient in gradients)
    assert torch.equal(gradients[0].to_dense(), gradients[1].to_dense())


class Masks(nn.Module):
    """PyTorch has no derivative of ``bernoulli`` with a probability, and no backward comes to it."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x).tanh()
        return self.last(torch.where(torch.bernoulli(x, 0.5) == 1, x, 0.0).exp())


@pytest.mark.parametrize("profile", ["estimate", "measure"])
def test_operators_without_a_derivative_that_no_backward_comes_to(profile):
    model, x = Masks(), torch.randn(64, 8)
    graph = ogc.parse(model, x, profile=profile)
    assert "aten.bernoulli.p" in [op.target for op in graph.operations]
    assert_same_training(model, ogc.optimize(model, x, profile=profile, memory_budget="least"), (x,))
    wholly = ogc.apply(model, graph, ogc.make_plan(graph, [ogc.recomputed(0, len(graph))]))
    assert_same_training(model, wholly, (x,))
