"""Devices of CUDA are as full as what the allocator reserves; none is here, so its model stands for it."""

from dataclasses import replace

import pytest
import torch
from helpers import chain
from test_needs import IMAGES, Network, loss
from torch import nn

import ogc
from ogc.errors import InputError, SolveError
from ogc.sizing import needs
from ogc.sizing.allocator import AllocatorSettings, Usage
from ogc.sizing.needs import (
    Estimate,
    activation_budget,
    bucket_bytes,
    fits,
    fixed_needs,
    moves_of,
    needed_bytes,
    used_bytes,
    within_device,
)
from ogc.sizing.requests import WholeStep
from ogc.torch_state.allocator import peak_bytes

MIB = 2**20
NOTHING = {name: 0 for name in (*needs.KINDS, "ddp_buckets") if name not in ("device", "tensors")}


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


def cuda(**given):
    return Estimate(**{**NOTHING, "device": "cuda", **given})


def graph_of(sizes, **weights):
    return chain([size * MIB for size in sizes], **weights)


def test_what_is_reserved_decides():
    """Values of 9 and 11 MiB: segments of 20 and 12 MiB, of which parts stay idle."""
    graph = graph_of([11, 9, 9])
    plan = ogc.make_plan(graph, [ogc.saved(0, 3)])
    assert plan.peak_bytes == 29 * MIB
    used = used_bytes(cuda(), plan)
    assert used == 32 * MIB
    assert fits(cuda(), plan, used) and not fits(cuda(), plan, used - 1)
    with_context = cuda(context=7 * MIB)
    assert fits(with_context, plan, used + 7 * MIB) and not fits(with_context, plan, used + 7 * MIB - 1)
    beside = cuda(parameters=3 * MIB, tensors=(3 * MIB,))
    assert used_bytes(beside, plan) == 40 * MIB  # two segments of 20, the first with room for 11 behind the 3
    assert fits(beside, plan, 40 * MIB) and not fits(beside, plan, 39 * MIB)
    here = cuda(parameters=3 * MIB, tensors=(3 * MIB,), device="cpu")
    assert used_bytes(here, plan) == 32 * MIB and fits(here, plan, 32 * MIB)


def test_free_segments_are_given_back_before_the_device_is_full():
    graph = graph_of([30, 60, 1])
    plan = ogc.make_plan(graph, [ogc.saved(0, 3)])
    step = cuda(optimizer_step=70 * MIB)
    assert used_bytes(step, plan) == 162 * MIB
    # all goes back for the optimizer's 70; in the next step the value of 30 splits these, so that 60 are new
    assert fits(step, plan, 132 * MIB) and not fits(step, plan, 131 * MIB)


def test_the_settings_of_the_process_count(monkeypatch):
    graph = graph_of([11, 9, 9])
    plan = ogc.make_plan(graph, [ogc.saved(0, 3)])
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert used_bytes(cuda(), plan) == 40 * MIB


@pytest.mark.full
def test_smaller_budgets_are_tried_until_what_is_reserved_fits():
    graph = graph_of([11] * 12, gradient_bytes=11 * MIB, backward_bytes=22 * MIB)
    on_cuda = cuda(parameters=3 * MIB, tensors=(3 * MIB,))
    plain, least = ogc.solve(graph, solver="none"), ogc.solve(graph, memory_budget="least")
    for room in range(used_bytes(on_cuda, least), used_bytes(on_cuda, plain), 7 * MIB):
        asked = []

        def plan(budget, asked=asked):
            asked.append(budget)
            return ogc.solve(graph, memory_budget=budget)

        found = within_device(on_cuda, room, plan, lambda plan: plan)
        assert fits(on_cuda, found, room)
        assert asked[0] == activation_budget(on_cuda, room) == room - 3 * MIB
        assert found.budget_bytes == asked[-1] or len(asked) > 1
        if len(asked) > 1:
            assert not fits(on_cuda, ogc.solve(graph, memory_budget=asked[0]), room)


def test_a_device_on_which_nothing_fits_is_told_what_would_do():
    graph = graph_of([11] * 6, gradient_bytes=11 * MIB, backward_bytes=22 * MIB)
    on_cuda = cuda(parameters=3 * MIB, tensors=(3 * MIB,))
    least = ogc.solve(graph, memory_budget="least")
    needed = needed_bytes(on_cuda, least)
    assert fits(on_cuda, least, needed) and not fits(on_cuda, least, int(0.98 * needed))
    assert 3 * MIB + least.peak_bytes < int(0.98 * needed) < used_bytes(on_cuda, least)
    for room in (needed // 3, 3 * MIB + least.peak_bytes, int(0.98 * needed)):
        with pytest.raises(SolveError, match="one that would do has") as caught:
            within_device(on_cuda, room, lambda budget: ogc.solve(graph, memory_budget=budget), lambda plan: plan)
        assert f"{needed / 2**20:.1f} MiB" in str(caught.value)


@pytest.fixture
def as_on_cuda(monkeypatch):
    """A CPU's memory is taken to be handed out as CUDA's is."""
    monkeypatch.setattr(needs, "CACHING", {"cpu", "cuda"})


def wide(width=512, layers=6):
    """Linear layers and activations: N, 64 to N, 10."""
    between = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(nn.Linear(64, width), nn.GELU(), *between, nn.Linear(width, 10))


@pytest.mark.full
def test_a_model_is_planned_for_what_is_reserved(as_on_cuda):
    model, inputs = wide(), torch.randn(8192, 64)
    estimate = ogc.estimate(model, inputs, optimizer=torch.optim.Adam)
    room = (estimate.least_bytes + estimate.plain_bytes) // 2
    optimised = ogc.optimize(model, inputs, optimizer=torch.optim.Adam, device_memory=room)
    bare = fixed_needs(model, inputs, torch.optim.Adam)
    assert fits(bare, optimised.plan, room) and not fits(bare, ogc.solve(optimised.graph, solver="none"), room)
    assert bare.fixed + peak_bytes(lambda: optimised(inputs).sum().backward(), "cpu") <= room


@pytest.mark.full
def test_the_largest_batch_is_what_is_reserved_for(as_on_cuda):
    model, room, step = wide(), 150 * MIB, 1024

    def samples(number):
        return torch.randn(number, 64)

    found = ogc.largest_batch(model, samples, device_memory=room, step=step)
    assert 1 <= found.plain < found.size
    assert fits(found.needs, found.plan, room)
    assert f"{used_bytes(found.needs, found.plan, room) / MIB:.1f} of 150.0 MiB" in str(found)
    for size, does_fit in ((found.plain, True), (found.plain + step, False)):
        plain = ogc.solve(ogc.parse(model, samples(size)), solver="none")
        assert fits(fixed_needs(model, samples(size), None), plain, room) == does_fit
    counted = found.needs.with_activations(
        ogc.solve(ogc.parse(model, samples(found.size + step)), memory_budget="least").peak_bytes
    )
    assert counted <= room  # by bytes alone the next would have fitted too


def test_an_estimate_for_cuda_tells_what_is_reserved():
    model = Network()
    found = ogc.estimate(model, IMAGES, loss=loss, optimizer=torch.optim.Adam, device="cuda")
    memory = found.memory()
    for needed, peaks in ((found.least_bytes, memory.planned), (found.plain_bytes, memory.plain)):
        assert found.context + peaks.requested < needed <= found.context + peaks.reserved
    assert fits(found, found.least, found.least_bytes)
    counted = found.with_activations(found.least.peak_bytes) - found.context
    assert counted == memory.planned.requested <= memory.planned.allocated <= memory.planned.reserved
    text = str(found)
    assert "predicted for CUDA's allocator" in text and f"{memory.planned.reserved / MIB:.1f}" in text
    assert all(name in text for name in ("context", "cublas", "cudnn"))
    expandable = found.memory(AllocatorSettings(expandable_segments=True))
    assert expandable.planned.requested == memory.planned.requested


def test_an_estimate_for_a_cpu_counts_bytes_and_can_predict():
    found = ogc.estimate(Network(), IMAGES, loss=loss)
    assert "predicted" not in str(found)
    assert found.plain_bytes == found.with_activations(found.plain)
    memory = found.memory()
    assert memory.plain.requested == found.fixed + found.plain
    assert fixed_needs(Network(), IMAGES, None).memory() is None


def test_each_tensor_that_is_there_before_a_step_counts():
    model = Network()
    found = fixed_needs(model, IMAGES, torch.optim.Adam, "cuda", ddp=True)
    assert sum(found.tensors) + found.inputs + found.context == found.fixed
    parameters = [p.numel() * 4 for p in model.parameters()]
    assert list(found.tensors[: len(parameters)]) == parameters
    assert found.step(()) == WholeStep((), (*found.tensors, found.inputs), found.optimizer_step)


def test_libraries_have_allowances_of_their_own(monkeypatch):
    assert fixed_needs(nn.Linear(3, 3), torch.ones(3), None, "cuda").cudnn == 0
    assert fixed_needs(nn.LSTM(3, 3), torch.ones(3), None, "cuda").cudnn == 64 * MIB
    large = fixed_needs(nn.Linear(3, 3), torch.ones(3), None, "cuda")
    assert large.cublas == large.workspaces == 2 * 32 * MIB
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, each in (((8, 0), 8320 * 1024), ((9, 0), 32 * MIB), ((10, 0), 32 * MIB)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert fixed_needs(nn.Linear(3, 3), torch.ones(3), None, "cuda").cublas == 2 * each


def test_ddp_gathers_gradients_in_buckets():
    sizes = [MIB // 4, 3 * MIB, MIB // 2, MIB // 8, MIB // 8]  # floats, as they are in the model
    parameters = [nn.Parameter(torch.empty(size, device="meta")) for size in sizes]
    parameters.append(nn.Parameter(torch.empty(MIB, device="meta"), requires_grad=False))
    assert bucket_bytes(parameters) == (MIB, 15 * MIB)  # the last ones first, until there is 1 MiB; then 25 MiB
    many = [nn.Parameter(torch.empty(2 * MIB, device="meta")) for _ in range(9)]
    assert bucket_bytes(many) == (8 * MIB, 32 * MIB, 32 * MIB)
    halves = [nn.Parameter(torch.empty(MIB, device="meta", dtype=torch.bfloat16)), *many[:1]]
    assert sorted(bucket_bytes(halves)) == [2 * MIB, 8 * MIB]


def test_ddp_takes_buckets_beside_gradients_or_instead_of_them():
    model = Network()
    kept = (fixed_needs(model, IMAGES, None, ddp=ddp, gradients="kept") for ddp in (False, True, "views"))
    alone, beside, views = kept
    assert beside.ddp_buckets == alone.gradients == beside.gradients
    assert beside.fixed == alone.fixed + alone.gradients
    assert views.fixed == alone.fixed and views.ddp_buckets == 0
    assert fixed_needs(model, IMAGES, None, ddp="views") == views  # the buckets are there throughout
    assert fixed_needs(model, IMAGES, None, ddp=True).fixed == alone.fixed
    assert len(views.tensors) < len(alone.tensors) and sum(views.tensors) == sum(alone.tensors)
    assert "ddp buckets" in str(ogc.estimate(model, IMAGES, ddp=True))
    with pytest.raises(InputError, match='ddp must be True, False or "views"'):
        ogc.estimate(model, IMAGES, ddp="view")


class Twice(nn.Module):
    """Uses one layer twice: its weights are cast once."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x):
        return self.last(self.layer(self.layer(x).relu()).relu())


def test_weights_that_autocast_keeps_are_named():
    model, inputs = Twice(), torch.randn(8, 64)
    with torch.autocast("cpu", torch.bfloat16):
        found = ogc.estimate(model, inputs, loss="outputs")
    assert found.autocast == sum(2 * p.numel() for p in model.parameters())
    assert "of these autocast's weights" in str(found)
    assert found.autocast <= found.plain
    assert ogc.estimate(model, inputs, loss="outputs").autocast == 0


def test_plans_in_parts_are_judged_by_bytes():
    plan = ogc.solve(graph_of([11, 9, 9]), memory_budget="least")
    assert moves_of(plan)
    assert moves_of(replace(plan, graph=None)) is None
    assert used_bytes(cuda(), replace(plan, graph=None)) == plan.peak_bytes
    assert Usage(*map(int, (1, 2, 3))) == (1, 2, 3)


def test_ddp_takes_its_share_of_a_device():
    model, room = Network(), 12 * MIB
    needs_of = {ddp: fixed_needs(model, IMAGES, None, ddp=ddp) for ddp in (False, True)}
    budgets = {
        ddp: ogc.optimize(model, IMAGES, loss=loss, device_memory=room, ddp=ddp).plan.budget_bytes for ddp in needs_of
    }
    assert budgets == {ddp: room - found.fixed for ddp, found in needs_of.items()}
    assert budgets[False] - budgets[True] == needs_of[False].gradients
