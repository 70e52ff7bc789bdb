"""Sharded, tensor parallel and in a pipeline at once, in eight processes: bitwise what it is without plans."""

import warnings

import pytest
import torch
from ranks import Ranks
from test_devices import assert_same
from test_tensor_parallel import COLUMNS, WIDTH, Block, own
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import parallel as styles

import ogc
from ogc.torch_state.allocator import peak_bytes

BATCHES = 4


@pytest.fixture
def eight():
    ranks = Ranks(8, 240)
    yield ranks
    ranks.stop()


def trained(rank, goal):
    """What three steps leave, and the peak of one."""
    from torch.distributed import pipelining

    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("stages", "shards", "layers"))
    stages, shards, layers = (mesh[name] for name in mesh.mesh_dim_names)
    number = stages.get_local_rank()
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(4)][2 * number : 2 * number + 2])
    for block in model:
        columns = {name: style() for name, style in COLUMNS.items()}
        rows = {"attention.out": styles.RowwiseParallel(), "down": styles.RowwiseParallel()}
        styles.parallelize_module(block, layers, {**columns, **rows, "up": styles.ColwiseParallel()})
        fully_shard(block, mesh=shards)
    fully_shard(model, mesh=shards)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's
        stage = pipelining.PipelineStage(model, number, 2, torch.device("cpu"), group=stages.get_group())
        schedule = pipelining.Schedule1F1B(stage, BATCHES, loss_fn=nn.functional.mse_loss)
        if goal is not None:
            stage.submod = ogc.optimize(stage.submod, **goal)
        torch.manual_seed(7 + shards.get_local_rank())
        x, y = torch.randn(2, 4 * BATCHES, 16, WIDTH)
        optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []

        def step():
            losses = []
            schedule.step(*([x] if number == 0 else []), **({"target": y, "losses": losses} if number else {}))
            return losses

        for count in range(3):
            optimizer.zero_grad()
            torch.manual_seed(20 + count)
            seen += [loss.detach().clone() for loss in step()]
            optimizer.step()
            seen += [own(tensor).detach().clone() for p in model.parameters() for tensor in (p, p.grad)]
        peak = min(peak_bytes(step, "cpu") for _ in range(3))
    return seen, peak, stage.submod.report().planned if goal is not None else 0


@pytest.mark.full
def test_sharded_and_parallel_and_in_a_pipeline(eight):
    plain, ours = (eight.run(trained, goal) for goal in (None, {"memory_budget": "least"}))
    for (expected, most, _), (seen, peak, planned) in zip(plain, ours, strict=True):
        assert_same(expected, seen)
        assert planned >= 2 * 3 * BATCHES
        assert peak < 0.85 * most, (peak, most)
