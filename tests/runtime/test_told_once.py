"""What costs the saving is told once per cause, whatever the sizes of inputs, with what to do about it."""

import logging

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ogc

LENGTHS = (16, 12, 10, 8, 16)


class Blocks(nn.Module):
    """Like models of ``transformers``: a flag checkpoints the blocks, and a hook comes with it."""

    def __init__(self, picks=False):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(4))
        self.gradient_checkpointing, self.picks = False, picks

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.gradient_checkpointing else block(x))
            x = x[x.sum((1, 2)) > -1e9] if self.picks else x
        return x

    def enable(self):
        self.gradient_checkpointing = True
        self.first.register_forward_hook(lambda module, args, output: output.requires_grad_(True))


def told(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("ogc")]


def train(model):
    for length in LENGTHS:
        model(torch.randn(4, length, 8)).sum().backward()


def test_hooks_that_came_with_checkpointing(caplog):
    optimised = ogc.optimize(Blocks(), torch.randn(4, 16, 8), memory_budget="least")
    optimised.enable()
    caplog.clear()
    train(optimised)
    told_of_hooks = [message for message in told(caplog) if "the hooks of first are others" in message]
    assert len(told_of_hooks) == 1 and "planned anew" in told_of_hooks[0]
    assert optimised.report().planned == len(LENGTHS)


def test_hooks_that_cannot_be_planned_for(caplog, monkeypatch):
    optimised = ogc.optimize(Blocks(), torch.randn(4, 16, 8))
    optimised.first.register_forward_hook(lambda module, args, output: output)

    def refuse(*given, **named):
        raise ogc.ParseError("it cannot be")

    monkeypatch.setattr("ogc.planning.parsed", refuse)
    monkeypatch.setattr("ogc.planned.in_parts_instead", refuse)
    caplog.clear()
    train(optimised)
    assert [message for message in told(caplog) if "ogc runs the plain model" in message and "it cannot be" in message]
    assert optimised.report().plain == len(LENGTHS)


def test_parts_that_are_checkpointed(caplog):
    optimised = ogc.optimize(Blocks(picks=True), torch.randn(4, 16, 8), memory_budget="least")
    assert isinstance(optimised.plan, ogc.PartsPlan)
    optimised.gradient_checkpointing = True
    caplog.clear()
    train(optimised)
    (message,) = told(caplog)
    assert "switch gradient checkpointing off" in message
    assert optimised.report().plain == 4 * len(LENGTHS)


def test_parts_that_are_checkpointed_when_they_are_looked_for(caplog):
    model = Blocks(picks=True)
    model.gradient_checkpointing = True
    with caplog.at_level(logging.INFO), pytest.raises(ogc.ParseError, match="switch gradient checkpointing off"):
        ogc.optimize(model, torch.randn(4, 16, 8), memory_budget="least")
