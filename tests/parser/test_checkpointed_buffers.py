"""Buffers that are written inside torch.utils.checkpoint: once per step in a plan, and the log says so."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ogc


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        return x


class Checkpointed(nn.Module):
    def __init__(self, kind, is_checkpointed):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), kind(), nn.ReLU()) for _ in range(4))
        self.is_checkpointed = is_checkpointed

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return x


KINDS = {"batch norm": lambda: nn.BatchNorm1d(16), "an own counter": Counts}


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_those_of_the_model_without_checkpoint(kind, caplog):
    torch.manual_seed(0)
    without, x = Checkpointed(KINDS[kind], False), torch.randn(8, 16)
    model = copy.deepcopy(without)
    model.is_checkpointed = True
    optimised = ogc.optimize(model, x, memory_budget="least")
    for run in (without, optimised):
        for _ in range(2):
            run(x).square().sum().backward()
    assert all(map(torch.equal, without.buffers(), model.buffers()))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(without.parameters(), model.parameters(), strict=True))
    told = [r.getMessage() for r in caplog.records if "is written in torch.utils.checkpoint" in r.getMessage()]
    assert len(told) == 1 and "once per step" in told[0]


@pytest.mark.parametrize("is_checkpointed", [True, False])
def test_nothing_is_told_without_need(is_checkpointed, caplog):
    ogc.optimize(
        Checkpointed(nn.Tanh if is_checkpointed else KINDS["batch norm"], is_checkpointed),
        torch.randn(8, 16),
        memory_budget="least",
    )
    assert "torch.utils.checkpoint" not in caplog.text
