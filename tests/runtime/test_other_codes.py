"""Functions that are given another function's code after the model was planned."""

import pytest
import torch
from torch import nn

import ogc


def rectified(x):
    return x.relu()


def squashed(x):
    return 2 * x.sigmoid()


class Activated(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = rectified(layer(x))
        return x


@pytest.mark.parametrize("known", [(32,), (32, 24), (32, 24, 20)])
@pytest.mark.full
def test_another_code_is_seen_at_known_sizes_and_new_ones(known, monkeypatch):
    model = Activated()
    planned = ogc.optimize(model, torch.randn(known[0], 16), memory_budget="least")
    for rows in known:
        x = torch.randn(rows, 16)
        assert torch.equal(planned(x), model(x))
    monkeypatch.setattr(rectified, "__code__", squashed.__code__)
    for rows in (*reversed(known), 12, 8):
        x = torch.randn(rows, 16)
        assert torch.equal(planned(x), model(x))
