"""Blocks that are compiled one by one by the backend, and then sharded, as in trainers of large models."""

import warnings

import pytest
import torch
from ranks import Ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

from ogc.torch_state.allocator import peak_bytes

WAYS = {"eager": None, "planned": {}, "budget": {"memory_budget": "5.2MB"}}
"""Options of the backend; None for eager's."""


@pytest.fixture
def two():
    ranks = Ranks(2, 120)
    yield ranks
    ranks.stop()


def trained(rank, way):
    """The gradients of the third step, and its peak."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's
        from ogc.compiling.backend import backend

        return _trained(rank, {"backend": "eager"} if WAYS[way] is None else {"backend": backend, "options": WAYS[way]})


def _trained(rank, how):
    torch._dynamo.reset()
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Dropout(0.1)) for _ in range(4))
    )
    for block in model:
        block.forward = torch.compile(block.forward, **how)
        fully_shard(block)
    fully_shard(model)
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(rank))

    def step():
        torch.manual_seed(rank)
        model(x).square().mean().backward()

    for _ in range(2):
        step()
        model.zero_grad()
    peak = peak_bytes(step, "cpu")
    return [p.grad.to_local().clone() for p in model.parameters()], peak


@pytest.mark.full
def test_sharded_blocks_are_planned_within_one_budget(two):
    """It is for the graphs: what FSDP gathers and reduces comes on top."""
    found = {way: two.run(trained, way) for way in WAYS}
    for rank in range(2):
        (plain, most), *ours = (found[way][rank] for way in WAYS)
        assert all(all(map(torch.equal, gradients, plain)) for gradients, _ in ours)
        (_, fair), (_, within) = ours
        assert fair < 0.75 * most and fair < within < 0.95 * most
