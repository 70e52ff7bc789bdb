"""Values written piece by piece and used much later, which are no reason against cuts in between."""

import logging
import random

import pytest
import torch
from helpers import assert_same_training, forced, measured_peak, random_plans, random_tree, random_values
from torch import nn

import ogc

TOKENS = torch.randint(1, 20, (3, 8), generator=torch.Generator().manual_seed(0))


class Pair(nn.Module):
    """An encoder, and after it what ``prepare`` made of the tokens before it."""

    def __init__(self, prepare, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.prepare = prepare
        self.embedding = nn.Embedding(20, width)
        layers = [(nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width), nn.Dropout(0.1)) for _ in range(5)]
        self.encoder = nn.Sequential(*(layer for four in layers for layer in four))
        self.last = nn.Linear(width, width)

    def forward(self, tokens):
        prepared = self.prepare(self, tokens)
        return self.last(self.encoder(self.embedding(tokens))) + prepared


def shifted(net, tokens):
    ids = tokens.new_zeros(tokens.shape)
    ids[:, 1:] = tokens[:, :-1].clone()
    ids[:, 0] = 2
    ids.masked_fill_(ids == 5, 1)
    return ids.unsqueeze(-1)


def masked(net, tokens):
    mask = torch.ones(tokens.shape)
    mask[tokens.shape[0] - 1 :, 3:] = 0
    return mask[..., None]


def summed(net, tokens):
    count = torch.zeros(*tokens.shape, 1)
    for _ in range(3):
        count += count.cumsum(1) + 1
    return count


def written_twice(net, tokens):
    a, b = torch.ones(tokens.shape), torch.zeros(tokens.shape)
    a[:, 0] = 0
    b[:, 0] = a[:, 1]
    a[:, 1] = b[:, 2]
    return (a * b)[..., None] + a.t().t()[..., None] + a[..., None]


COPIED = [shifted, masked, summed]


@pytest.mark.parametrize("prepare", [*COPIED, written_twice])
def test_training_is_that_of_the_plain_model_under_any_plan(prepare):
    model = Pair(prepare)
    graph = ogc.parse(model, TOKENS)
    for seed in range(4):
        rng = random.Random(seed)
        plan = ogc.make_plan(graph, random_tree(graph, rng), recomputed_values=random_values(graph, rng))
        assert_same_training(model, ogc.apply(model, graph, plan), (TOKENS,), steps=2)


@pytest.mark.parametrize("prepare", COPIED)
def test_the_program_can_be_cut_between_the_last_write_and_a_use_far_away(prepare):
    graph = ogc.parse(Pair(prepare), TOKENS)
    encoder = [t for t, op in enumerate(graph.operations) if op.module.startswith("encoder")]
    assert set(encoder[1:]) <= set(graph.cuts)


def test_a_plan_with_a_copy_is_carried_over(caplog):
    model = Pair(shifted)
    optimised = forced(model, TOKENS)
    for size in (2, 5):
        with caplog.at_level(logging.INFO, logger="ogc.runtime.runner"):
            assert_same_training(model, optimised, (TOKENS[:size],), steps=1)
            assert_same_training(model, optimised, (TOKENS[:, :size],), steps=1)
    assert caplog.text.count("reused for") == 3


def test_memory_of_the_encoder_is_saved():
    model, tokens = Pair(shifted, width=64), TOKENS.repeat(8, 8)
    optimised = ogc.optimize(model, tokens, memory_budget="least")
    assert optimised.plan.peak_bytes < 0.5 * optimised.plan.plain_peak_bytes
    assert measured_peak(optimised, (tokens,)) < 0.6 * measured_peak(model, (tokens,))


def used_by_an_older_view(net, tokens):
    mask = torch.ones(tokens.shape)
    view = mask[..., None]
    mask[:, 0] = 0
    return view + mask[..., None]


def of_a_gradient(net, tokens):
    weights = net.embedding(tokens) * 2
    weights[:, 0] = 0
    return weights


def written_at_last(net, tokens):
    net.mask = torch.ones(tokens.shape)
    net.mask[:, 0] = 0
    return net.mask[..., None]


class WritesAtLast(Pair):
    def forward(self, tokens):
        result = super().forward(tokens)
        self.mask.mul_(2)
        return result, self.__dict__.pop("mask")


@pytest.mark.parametrize(
    ("make", "prepare"), [(Pair, used_by_an_older_view), (Pair, of_a_gradient), (WritesAtLast, written_at_last)]
)
def test_other_values_are_not_copied(make, prepare):
    model = make(prepare)
    graph = ogc.parse(model, TOKENS)
    assert not any("clone" in op.target for op in graph.operations)
    for plan in random_plans(graph, random.Random(0), 4):
        assert_same_training(model, ogc.apply(model, graph, plan), (TOKENS,), steps=1)
