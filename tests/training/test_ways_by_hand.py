"""Ways of training that reach into gradients, weights and calls by hand, each beside the plain model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trained import BATCH, Images, Way, assert_trained_alike, data, layers, pictures, registering, sgd, steps, unnamed

pytestmark = pytest.mark.full

WAYS: dict[str, Way] = {}
way = registering(WAYS)


def stepped(optimizer, loss):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@way()
def backwards_in_another_order(training):
    run = training.optimize(layers(), torch.randn(BATCH, 32))
    first, second = (F.cross_entropy(run(x), y) for x, y in data(2))
    second.backward()
    first.backward()
    sgd(run).step()


@way()
def a_step_between_forward_and_backward(training):
    """An error for the plain model, and for a plan."""
    run = training.optimize(layers(), torch.randn(BATCH, 32))
    optimizer = sgd(run)
    late, now = (F.cross_entropy(run(x), y) for x, y in data(2))
    stepped(optimizer, now)
    with pytest.raises(Exception, match="modified"):
        late.backward()
    optimizer.zero_grad()


@way()
def a_batch_written_in_place(training):
    run = training.optimize(layers(), torch.randn(BATCH, 32))
    optimizer, given = sgd(run), torch.empty(BATCH, 32)
    for x, y in data():
        stepped(optimizer, F.cross_entropy(run(given.copy_(x)), y))


@way()
def gradients_of_outputs_kept_and_changed(training):
    run = training.optimize(layers(), torch.randn(BATCH, 32))
    optimizer = sgd(run)
    for x, y in data():
        output = run(x)
        output.retain_grad()
        output.register_hook(lambda gradient: 2 * gradient)
        F.cross_entropy(output, y).backward()
        training.same(output.grad)
        optimizer.step()
        optimizer.zero_grad()


@way()
def gradients_of_some_weights(training):
    model = layers()
    run = training.optimize(model, torch.randn(BATCH, 32))
    optimizer = sgd(run)
    for x, y in data():
        F.cross_entropy(run(x), y).backward(inputs=[model[0][0].weight, model[-1].weight])
        optimizer.step()
        optimizer.zero_grad()


@way()
def jacobians(training):
    run = training.optimize(layers(3, drop=0.0), torch.randn(32, 32, requires_grad=True))
    x = torch.randn(32, 32, requires_grad=True)
    each = torch.eye(5)[:, None].expand(5, 32, 5)
    training.same(*torch.autograd.grad(run(x), x, each, is_grads_batched=True))
    training.same(torch.autograd.functional.jacobian(lambda x: run(x).sum(0), torch.randn(32, 32)))


@way()
def neural_ode(training):
    """Heun's method: the model twice in each of several time steps, one backward."""
    run = training.optimize(layers(2, out=32, drop=0.0), torch.randn(64, 32, requires_grad=True))
    optimizer = sgd(run)
    for state, _ in data(2, 64):
        for _ in range(3):
            slope = run(state)
            state = state + 0.05 * (slope + run(state + 0.1 * slope))
        stepped(optimizer, state.square().mean())


@way()
def a_distribution_returned(training):
    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = layers(out=8)

        def forward(self, x):
            mean, spread = self.body(x).chunk(2, 1)
            return torch.distributions.Normal(mean, spread.exp(), validate_args=False)

    run = training.optimize(Policy(), torch.randn(BATCH, 32))
    optimizer = sgd(run)
    for x, _ in data():
        stepped(optimizer, -run(x).log_prob(torch.ones(4)).mean())


@way()
def lists_of_any_length(training):
    class Each(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = layers()

        def forward(self, bags):
            return [self.body(bag) for bag in bags]

    run = training.optimize(Each(), ([torch.randn(64, 32), torch.randn(32, 32)],))
    optimizer = sgd(run)
    for count in (2, 3, 2, 1):
        found = run([torch.randn(64 - 8 * n, 32) for n in range(count)])
        stepped(optimizer, sum(scores.square().mean() for scores in found))


@way()
def settings_in_an_object(training):
    """A temperature on a schedule, in a config that stays the same object."""

    class Tempered(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.config = layers(), SimpleNamespace(temperature=1.0, step=0)

        def forward(self, x):
            return self.body(x) / self.config.temperature

    run = training.optimize(Tempered(), torch.randn(BATCH, 32))
    optimizer = sgd(run)
    for number, batch in enumerate(data(6)):
        run.config.temperature, run.config.step = 1 + 0.1 * number, number
        steps(training, run, [batch], optimizer)


@way()
def embeddings_with_max_norm(training):
    """The forward writes its own weights."""

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.body = nn.Embedding(30, 32, padding_idx=0, max_norm=1.0), layers()

        def forward(self, ids):
            return self.body(self.words(ids).mean(1))

    run = training.optimize(Words(), torch.randint(30, (BATCH, 5)))
    optimizer = sgd(run)
    for _ in range(3):
        stepped(optimizer, run(torch.randint(30, (BATCH, 5))).square().mean())


@way()
def arguments_that_come_and_go(training):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = layers()

        def forward(self, x, *, mask=None, scale=1.0):
            scores = self.body(x) * scale
            return scores if mask is None else scores * mask

    run = training.optimize(Masked(), {"x": torch.randn(BATCH, 32)})
    optimizer = sgd(run)
    for n in range(4):
        mask = torch.rand(BATCH, 1) if n % 2 else None
        stepped(optimizer, run(torch.randn(BATCH, 32), scale=1.0 + n, mask=mask).square().mean())


@way()
def random_numbers_of_their_own(training):
    """The forward draws from a stream that is put back before the backward."""
    run = training.optimize(layers(), torch.randn(BATCH, 32))
    optimizer = sgd(run)
    for x, y in data():
        with torch.random.fork_rng():
            torch.manual_seed(5)
            loss = F.cross_entropy(run(x), y)
        training.same(torch.randn(3))
        stepped(optimizer, loss)


@way()
def deterministic_algorithms(training):
    torch.use_deterministic_algorithms(True)
    try:
        run = training.optimize(Images(), torch.randn(8, 3, 16, 16))
        steps(training, run, pictures(), sgd(run))
    finally:
        torch.use_deterministic_algorithms(False)


@way()
def gradients_and_weights_in_one_flat_tensor(training):
    model = layers()
    run = training.optimize(model, torch.randn(BATCH, 32))
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    gradients, start = torch.zeros_like(weights), 0
    for p in model.parameters():
        place = slice(start, start := start + p.numel())
        p.data, p.grad = weights[place].view_as(p), gradients[place].view_as(p)
    for x, y in data():
        gradients.zero_()
        F.cross_entropy(run(x), y).backward()
        weights.add_(gradients, alpha=-0.05)
    training.same(weights, gradients)


def test_the_page_on_training_names_each_way():
    assert not unnamed(WAYS)


@pytest.mark.parametrize("name", WAYS)
def test_way(name, monkeypatch):
    assert_trained_alike(WAYS[name].train, monkeypatch, WAYS[name].share, WAYS[name].runs_plan)
