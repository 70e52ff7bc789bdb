"""Hollow runs: what they count is what the allocator measures, and what plans for a GPU promise."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torchvision
from helpers import measured_peak
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import ogc
from ogc.sizing.hollow import HollowRun, hollow_run

GPU = "A100"


def on_meta(make, *args, **kwargs):
    with torch.device("meta"):
        return make(*args, **kwargs).train()


class Block(nn.Module):
    def __init__(self, width, heads=2):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.dropout = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.1)
        self.heads = heads

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1))
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.second(x)))))


class Words(nn.Module):
    def __init__(self, words=1000, width=64, layers=4):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        logits = self.head(self.blocks(self.embedding(ids)))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


IMAGES = torch.zeros(4, 3, 64, 64)
NETWORKS = {
    **{
        name: (getattr(torchvision.models, name), IMAGES)
        for name in ("resnet18", "densenet121", "vgg11_bn", "mobilenet_v3_small", "squeezenet1_1", "shufflenet_v2_x0_5")
    },
    "googlenet": (lambda: torchvision.models.googlenet(init_weights=False), IMAGES),  # with three outputs
    "words": (Words, torch.zeros(4, 64, dtype=torch.long)),
    "many words": (Words, torch.zeros(64, 64, dtype=torch.long)),  # whose gradient is sorted
}
GOALS = {
    "plain": {"solver": "none"}, "least": {"memory_budget": "least"}, "fair": {}, "quick": {"max_overhead": 0.1},
}  # fmt: skip
TOO_MUCH = {("many words", "kept", "fair"), ("many words", "none", "fair")}
"""0.6 % too much is promised: partial sums of a bias's gradient count beside what the products before have let go."""


@cache
def parsed(name, gradients):
    make, x = NETWORKS[name]
    model = on_meta(make)
    return model, ogc.parse(model, x, device="cuda", profile="estimate", gpu=GPU, gradients=gradients)


@pytest.mark.full
@pytest.mark.parametrize(
    ("gradients", "goal"), [*(("kept", goal) for goal in GOALS), ("none", "least"), ("none", "fair")]
)
@pytest.mark.parametrize("name", NETWORKS)
def test_plans_for_cuda_peak_as_promised(name, gradients, goal, request, all_moves):
    if (name, gradients, goal) in TOO_MUCH:
        request.applymarker(pytest.mark.xfail(reason="sums of a bias's gradient", strict=True))
    model, graph = parsed(name, gradients)
    plan = ogc.solve(graph, **GOALS[goal])
    assert goal == "plain" or plan.segments
    assert hollow_run(model, graph, plan, gpu=GPU).peak_bytes == pytest.approx(plan.peak_bytes, rel=0.005)


@pytest.mark.full
@pytest.mark.parametrize("goal", [{"memory_budget": 0.7}, {"max_overhead": 0.05}, {}], ids=str)
@pytest.mark.parametrize("name", ["densenet121", "words", "squeezenet1_1"])
def test_plans_that_offload_peak_as_promised(name, goal):
    model, graph = parsed(name, "kept")
    graph = ogc.with_host(graph, bandwidth=1e12)
    plan = ogc.solve(graph, **goal)
    assert plan.offloaded
    assert hollow_run(model, graph, plan, gpu=GPU).peak_bytes == pytest.approx(plan.peak_bytes, rel=0.005)


@pytest.mark.parametrize("name", ["linear", "in places", "frozen"])
def test_kernels_that_allocate_nothing_unseen_peak_as_the_allocator_says(name):
    """The same plan on a CPU, of operators that CUDA runs as a CPU does."""
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())]
    if name == "in places":
        layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU(inplace=True))]
    model, x = nn.Sequential(*layers), torch.randn(512, 64)
    if name == "frozen":
        model[0].requires_grad_(False)
    on_cpu, on_cuda = (ogc.parse(model, x, device=device, profile="estimate") for device in ("cpu", "cuda"))
    segments = (ogc.recomputed(0, 4), ogc.recomputed(4, 9), ogc.saved(9, 12))
    plan = ogc.make_plan(on_cuda, segments)
    optimised = ogc.apply(model, on_cpu, ogc.make_plan(on_cpu, segments))
    measured = measured_peak(optimised, (x,), loss=torch.sum, holds_outputs=True)
    assert hollow_run(model, on_cuda, plan).peak_bytes == pytest.approx(measured, abs=16)


def test_the_model_is_left_alone_and_the_operator_is_named():
    model = nn.Sequential(nn.Linear(8, 4096), nn.GELU(), nn.Linear(4096, 8))
    graph = ogc.parse(model, torch.zeros(64, 8), device="cuda", profile="estimate")
    before = [parameter.clone() for parameter in model.parameters()]
    found = hollow_run(model, graph, ogc.solve(graph, memory_budget="least"))
    assert isinstance(found, HollowRun) and found.operator.startswith("aten.")
    assert all(map(torch.equal, before, model.parameters()))
    assert all(parameter.grad is None and parameter.device.type == "cpu" for parameter in model.parameters())


def test_outputs_that_are_dropped_are_not_counted():
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4096))
    peaks = []
    for held in (True, False):
        graph = ogc.parse(
            model, torch.zeros(64, 8), device="cuda", profile="estimate", loss=lambda y: y.mean(), holds_outputs=held
        )
        plan = ogc.solve(graph, solver="none")
        peaks.append(hollow_run(model, graph, plan).peak_bytes)
        assert peaks[-1] == pytest.approx(plan.peak_bytes, rel=0.005)
    assert peaks[1] < peaks[0]


def test_a_loss_that_fails_in_the_backward_raises_here():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("not today")

    model = nn.Linear(8, 8)
    graph = ogc.parse(model, torch.zeros(4, 8), device="cuda", profile="estimate", loss=lambda y: y.sum())
    plan = ogc.solve(graph, solver="none")
    after_forward = replace(graph.program.after_forward, loss=Fails.apply)
    object.__setattr__(graph.program, "after_forward", after_forward)
    with pytest.raises(ValueError, match="not today"):
        hollow_run(model, graph, plan)


def test_graphs_for_a_cpu_are_refused():
    model, x = nn.Linear(8, 8), torch.zeros(4, 8)
    graph = ogc.parse(model, x)
    with pytest.raises(ogc.InputError, match="for CUDA, not for cpu"):
        hollow_run(model, graph, ogc.solve(graph, memory_budget="least"))
