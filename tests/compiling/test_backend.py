"""backend="ogc": the numbers of backend="eager", bit by bit, at the peak that was planned."""

import gc
import weakref

import pytest
import torch
from helpers import trace_of_training
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention

import ogc
from ogc.compiling import backend as backends
from ogc.compiling import partitioner
from ogc.compiling.backend import backend
from ogc.torch_state.allocator import peak_bytes

# torch's own, where a graph breaks
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def full(*cases):
    return [pytest.param(case, marks=pytest.mark.full) for case in cases]


class Attention(nn.Module):
    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.norm, self.inner = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + nn.functional.dropout(self.out(mixed), 0.1, self.training)
        return x + self.down(gelu(self.up(self.inner(x))))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.body = nn.Embedding(50, 32), nn.Sequential(*(Attention() for _ in range(3)))

    def forward(self, ids):
        logits = self.body(self.embedding(ids)) @ self.embedding.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


class Broken(nn.Module):
    """Dynamo compiles its blocks one by one, as the graph breaks between them."""

    def __init__(self, count=6):
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(count))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return x


def attention():
    return nn.Sequential(*(Attention() for _ in range(4))), torch.randn(4, 32, 32)


def convolutions():
    def layers(given, made):
        return nn.Conv2d(given, made, 3, padding=1), nn.BatchNorm2d(made), nn.ReLU(inplace=True), nn.Dropout(0.2)

    return nn.Sequential(*layers(3, 8), *layers(8, 8), *layers(8, 8), *layers(8, 8)), torch.randn(4, 3, 16, 16)


def tied():
    return Tied(), torch.randint(0, 50, (4, 32))


def residual():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

        def forward(self, x):
            first = x
            for layer in self.layers:
                x = torch.tanh(layer(x)) * torch.sigmoid(x) + first
            return x, first.sum()

    return Residual(), torch.randn(256, 64)


@pytest.fixture
def plans(monkeypatch):
    """All plans that are made."""
    found, plan_for = [], partitioner.Partitioner.plan_for

    def noted(self, graph):
        found.append(plan_for(self, graph))
        return found[-1]

    monkeypatch.setattr(partitioner.Partitioner, "plan_for", noted)
    torch._dynamo.reset()
    gc.collect()
    yield found
    torch._dynamo.reset()


def made(make):
    torch.manual_seed(0)
    return make()


@pytest.mark.parametrize("make", [attention, convolutions, *full(tied, residual)])
@pytest.mark.parametrize(
    "options", [{"memory_budget": 0.7}, *full({"memory_budget": "least"}, {"max_overhead": 0.2}, {})]
)
def test_numbers_are_eager_ones(make, options, plans):
    model, x = made(make)
    plain, x = made(make)
    expected = trace_of_training(plain, torch.compile(plain, backend="eager"), (x,), 2)
    torch._dynamo.reset()
    found = trace_of_training(model, torch.compile(model, backend=backend, options=options), (x,), 2)
    assert all(map(torch.equal, found, expected)) and len(found) == len(expected)
    assert len(plans) == 1 and not plans[0].is_plain


@pytest.mark.parametrize("make", [residual, *full(attention, tied)])
@pytest.mark.parametrize("budget", ["least", *full(1.0, 0.6)])
def test_the_peak_is_the_planned_one(make, budget, plans):
    model, x = made(make)
    run = torch.compile(model, backend=backend, options={"memory_budget": budget})

    def step():
        result = run(x)
        (result[0] if isinstance(result, tuple) else result).sum().backward()

    step()
    model.zero_grad(set_to_none=True)
    measured = peak_bytes(step, "cpu")
    (plan,) = plans
    assert measured == pytest.approx(plan.peak_bytes, rel=0.025)


class Rotary(nn.Module):
    """All layers read the same sines, which each forward makes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))
        self.register_buffer("angles", torch.randn(256, 64))

    def forward(self, x):
        sines = self.angles.sin()
        for layer in self.layers:
            x = x + gelu(layer(x) * sines)
        return x


def test_what_all_layers_read_does_not_put_their_gradients_off(plans):
    torch.compile(Rotary(), backend=backend, options={"memory_budget": 0.5})(torch.randn(256, 64)).sum().backward()
    assert sum(op.backward_seconds > 0 for op in plans[0].graph.operations) >= 12  # else all are the first one's


def test_all_graphs_of_a_model_share_a_budget(plans):
    torch.manual_seed(0)
    model, x = Broken(), torch.randn(4, 32, 32)
    expected = trace_of_training(model, torch.compile(model, backend="eager"), (x,), 2)
    torch._dynamo.reset()
    budget = 1_600_000
    run = torch.compile(model, backend=backend, options={"memory_budget": budget})

    def step():
        torch.manual_seed(3)
        run(x).square().mean().backward()

    peaks = []
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        peaks.append(peak_bytes(step, "cpu"))
    assert peaks[0] > budget >= peaks[1] == peaks[2] > 0.85 * budget
    assert all(map(torch.equal, trace_of_training(model, run, (x,), 2), expected))


@pytest.mark.full
def test_a_budget_that_the_graphs_of_a_model_cannot_share_is_told(plans):
    torch.manual_seed(0)
    model, x = Broken(), torch.randn(4, 32, 32)
    run = torch.compile(model, backend=backend, options={"memory_budget": 800_000})
    run(x).sum().backward()
    with pytest.raises(
        ogc.SolveError, match=r"6 calls of graphs .* at or below 800000 bytes; the smallest peak is some"
    ):
        run(x)


def test_what_nothing_fits_is_told(plans):
    model, x = made(attention)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="SolveError: no plan found peaks at or below"):
        torch.compile(model, backend=backend, options={"memory_budget": 0.01})(x)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"budget": 1}, "has no option 'budget'; it has memory_budget, max_overhead, effort and inductor"),
        pytest.param({"inductor": "yes"}, "inductor must be True or False, not 'yes'", marks=pytest.mark.full),
        pytest.param({"memory_budget": -1}, "memory_budget", marks=pytest.mark.full),
        pytest.param({"effort": 7}, "effort must be 0, 1, 2 or 3", marks=pytest.mark.full),
    ],
)
def test_options_that_are_wrong_are_told(options, message, plans):
    model, x = made(attention)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message):
        torch.compile(model, backend=backend, options=options)(x)


@pytest.mark.full
def test_what_trains_nothing_is_not_planned(plans):
    model, x = made(attention)
    run = torch.compile(model.eval(), backend=backend, options={"memory_budget": 0.5})
    with torch.no_grad():
        assert torch.equal(run(x), model(x))
    assert not plans


@pytest.mark.full
def test_new_sizes_run_by_the_plan(plans):
    model, _ = made(attention)
    eager = torch.compile(model, backend="eager", dynamic=True)
    planned = torch.compile(model, backend=backend, dynamic=True, options={"memory_budget": 0.6})
    for length in (24, 40, 36):
        x = torch.randn(4, length, 32)
        assert all(
            map(torch.equal, trace_of_training(model, planned, (x,), 2), trace_of_training(model, eager, (x,), 2))
        )
    assert len(plans) == 1


@pytest.mark.full
def test_a_new_size_has_the_whole_budget(plans):
    """What the step before saved is gone."""
    model = nn.Sequential(*(Attention() for _ in range(4)))
    sizes = torch.randn(8, 16, 32), torch.randn(8, 12, 32)
    torch.compile(model, backend="ogc", options={"max_overhead": 1.0}, dynamic=False)(sizes[0])
    budget = plans[-1].plain_peak_bytes
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="ogc", options={"memory_budget": budget}, dynamic=False)
    recomputed = []
    for x in sizes:
        compiled(x).sum().backward()
        recomputed += [part.plan.recomputed_flops for part in parts_of_all()]
    assert recomputed == [0, 0]


@pytest.mark.full
def test_a_model_that_nobody_holds_is_freed(plans):
    torch.manual_seed(0)
    model, x = Broken(2), torch.randn(4, 32, 32)
    run = torch.compile(model, backend=backend, options={"memory_budget": 2_000_000})
    for _ in range(2):
        run(x).sum().backward()
    held = [weakref.ref(model), *map(weakref.ref, parts_of_all())]
    assert len(held) == 3
    del model, run
    torch._dynamo.reset()
    gc.collect()
    assert [one() for one in held] == [None] * 3 and not parts_of_all()


def parts_of_all():
    return [part for group in backends._groups.values() for part in group.step]


def test_the_backend_has_a_name():
    assert "ogc" in torch.compiler.list_backends()
