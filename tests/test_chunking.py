"""Regions run chunk by chunk: the numbers are the model's up to rounding, the memory is a slice's."""

import pytest
import torch
from helpers import measured_peak
from torch import nn

import ogc
from ogc.rewrites import chunking
from ogc.rewrites.chunked import Chunked
from ogc.rewrites.chunking import Chunks
from ogc.rewrites.rules import Along, along

aten = torch.ops.aten


class Wide(nn.Module):
    """Two wide stages and a narrow one, as in VGG."""

    def __init__(self):
        super().__init__()
        self.one = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.ReLU(inplace=True),
        )
        self.two = nn.Sequential(nn.MaxPool2d(4), nn.Conv2d(16, 8, 3), nn.SiLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.two(self.one(x)).mean((2, 3)))


@pytest.fixture
def wide():
    torch.manual_seed(0)
    return Wide(), torch.randn(10, 3, 32, 32)


def gradients(run, model, x):
    model.zero_grad()
    loss = run(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def test_stretches_end_where_the_data_narrow_and_without_convolutions_at_the_end(wide):
    graph = ogc.parse(*wide)
    assert graph.regions == (
        ("convolution_default", "max_pool2d_default"),
        ("convolution_default_2", "silu_default"),
    )


def test_sliced_training_is_the_plain_models_up_to_rounding(wide):
    model, x = wide
    optimised = ogc.optimize(model, x, chunks=4, memory_budget="least")
    assert any(op.target == "chunked" for op in optimised.graph.operations)
    plain = gradients(model, model, x)
    statistics = model.two[4].running_var.clone()
    model.two[4].reset_running_stats()
    gradients(model, model, x)
    model.two[4].reset_running_stats()
    ours = gradients(optimised, model, x)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(model.two[4].running_var, statistics)
    assert "sliced_convolution_default(" in optimised.code


@pytest.mark.parametrize("chunks", [2, 3, 5])
def test_the_peak_is_as_simulated_and_lower(wide, chunks):
    model, x = wide
    graph = ogc.parse(model, x)
    chunked, plan = ogc.chunk_batch(model, x, graph, chunks=chunks)
    assert plan.peak_bytes < ogc.solve(graph, memory_budget="least").peak_bytes
    assert plan.plain_peak_bytes == ogc.solve(graph, memory_budget="least").plain_peak_bytes
    measured = measured_peak(ogc.apply(model, chunked, plan), (x,))
    assert plan.peak_bytes == pytest.approx(measured, rel=0.03)


@pytest.mark.full
def test_what_pooling_keeps_of_a_slice_is_as_simulated():
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    layers += [nn.MaxPool2d(3, 1, 1), nn.Conv2d(16, 16, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model, x = nn.Sequential(*layers, nn.Linear(16, 4)), torch.randn(16, 3, 128, 128)
    optimised = ogc.optimize(model, x, chunks=8, memory_budget="least")
    assert "chunked" in optimised.code
    assert optimised.plan.peak_bytes == pytest.approx(measured_peak(optimised, (x,)), rel=0.02)


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
def test_slices_take_the_kernels_of_small_batches(threads):
    """A pointwise convolution of fewer than 16 samples on one thread copies nothing."""
    layers = [nn.Conv2d(3, 32, 1), nn.Conv2d(32, 32, 1), nn.MaxPool2d(8), nn.Flatten()]
    model, x = nn.Sequential(*layers, nn.Linear(32 * 16, 4)), torch.randn(16, 3, 32, 32)
    graph = ogc.parse(model, x)
    chunked = ogc.parse(model, x, rewrite=Chunks(graph.regions[:1], 2))
    plan = ogc.make_plan(chunked, [ogc.saved(0, len(chunked))])
    measured = measured_peak(ogc.apply(model, chunked, plan), (x,))
    assert plan.peak_bytes == pytest.approx(measured, rel=0.03)


def test_the_forward_inside_the_backward_is_counted_as_overhead(wide):
    model, x = wide
    graph = ogc.parse(model, x)
    chunked = ogc.parse(model, x, rewrite=Chunks(graph.regions[:1], 2))
    again = sum(op.forward_flops for op in graph.operations[:5])
    assert [op.again_flops for op in chunked.operations if op.again_flops] == [again]
    assert chunked.step_flops == graph.step_flops
    plan = ogc.make_plan(chunked, [ogc.saved(0, len(chunked))])
    assert plan.recomputed_flops == again
    assert plan.recomputed_seconds > 0


@pytest.mark.full
def test_a_measured_profile_plans_on_measured_slices(wide):
    model, x = wide
    graph = ogc.parse(model, x, profile="measure")
    chunked, plan = ogc.chunk_batch(model, x, graph, chunks=5)
    assert chunked.profile == "measure"
    measured = measured_peak(ogc.apply(model, chunked, plan), (x,))
    assert plan.peak_bytes == pytest.approx(measured, rel=0.03)


@pytest.mark.full
def test_a_budget_that_needs_slices(wide):
    model, x = wide
    budget = ogc.solve(ogc.parse(model, x), memory_budget="least").peak_bytes * 4 // 5
    with pytest.raises(ogc.SolveError, match="no plan found"):
        ogc.optimize(model, x, memory_budget=budget)
    optimised = ogc.optimize(model, x, memory_budget=budget, chunks=10)
    assert measured_peak(optimised, (x,)) <= budget * 1.001
    with pytest.raises(ogc.SolveError, match="no plan found"):
        ogc.optimize(model, x, memory_budget=1000, chunks=10)


def test_no_slices_where_the_overhead_is_not_allowed(wide):
    model, x = wide
    assert not any(op.again_seconds for op in ogc.optimize(model, x, max_overhead=0.0, chunks=4).graph.operations)


def test_a_model_without_stretches_is_planned_as_ever():
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), torch.randn(4, 3, 8, 8)
    assert ogc.parse(model, x).regions == ()
    assert (
        ogc.optimize(model, x, chunks=4, memory_budget="least").plan
        == ogc.optimize(model, x, memory_budget="least").plan
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "layers",
    [
        [nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(12, 4), nn.GELU()],
        [nn.Conv2d(2, 2, 3, padding=1), nn.LayerNorm((4, 4)), nn.Sigmoid(), nn.AdaptiveAvgPool2d(2)],
    ],
)
def test_gradients_and_their_gradients_are_right(layers):
    model, x = nn.Sequential(*layers).double(), torch.randn(3, 2, 4, 4, dtype=torch.double, requires_grad=True)
    graph = ogc.parse(model, x)
    program = ogc.parse(model, x, rewrite=Chunks(graph.regions, 2)).program.graph
    (region,) = (n for n in program.nodes if isinstance(n.target, Chunked))
    parameters = [model.get_parameter(str(n.target)) for n in region.args[1:]]
    assert torch.autograd.gradcheck(region.target, (x, *parameters))
    assert torch.autograd.gradgradcheck(region.target, (x, *parameters))


SETTINGS = None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1


def empty(*shape):
    return torch.empty(shape, device="meta")


@pytest.mark.parametrize(
    "target, args, axes, result, given",
    [
        (aten.convolution.default, (empty(4, 3, 8, 8), empty(2, 3, 3, 3), *SETTINGS), (0, None), 0, (0, None)),
        (aten.layer_norm.default, (empty(4, 3, 8, 8), [8, 8]), (1,), 1, (1,)),
        (aten.rms_norm.default, (empty(4, 3, 8), [8]), (1,), 1, (1,)),
        (aten.linear.default, (empty(4, 5, 8), empty(6, 8)), (1, None), 1, (1, None)),
        (aten.addmm.default, (empty(6), empty(5, 8), empty(8, 6)), (None, 0, None), 0, (None, 0, None)),
        (aten.matmul.default, (empty(4, 5, 8), empty(8, 6)), (1, None), 1, (1, None)),
        (aten.matmul.default, (empty(4, 5, 8), empty(4, 8, 6)), (0, None), 0, (0, 0)),
        (aten.scaled_dot_product_attention.default, (empty(4, 2, 5, 8),) * 3, (None, 0, None), 0, (0, 0, 0)),
        (aten.add.Tensor, (empty(4, 5, 8), empty(5, 1)), (1, None), 1, (1, 0)),
        (aten.mul.Tensor, (empty(8), empty(4, 5, 8)), (None, 1), 1, (None, 1)),
        (aten.mean.dim, (empty(4, 5, 8), [-1], True), (1,), 1, (1,)),
        (aten.mean.dim, (empty(4, 5, 8), [0]), (1,), 0, (1,)),
        (aten.softmax.int, (empty(4, 5, 8), -1), (1,), 1, (1,)),
        (aten.cat.default, ([empty(4, 5, 3), empty(4, 5, 2)], -1), (1, None), 1, (1, 1)),
        (aten.flatten.using_ints, (empty(4, 5, 8), 1, -1), (0,), 0, (0,)),
        (aten.view.default, (empty(4, 5, 8), [-1, 8]), (0,), 0, (0,)),
        (aten.view.default, (empty(4, 5, 8), [4, 5, 2, 4]), (1,), 1, (1,)),
        (aten.transpose.int, (empty(4, 5, 8), 1, 2), (1,), 2, (1,)),
        (aten.permute.default, (empty(4, 5, 8), [2, 0, 1]), (1,), 2, (1,)),
        (aten.slice.Tensor, (empty(4, 5, 8), 1, 0, 3), (0,), 0, (0,)),
        (aten.split.Tensor, (empty(4, 5, 8), 4, 2), (1,), 1, (1,)),
        (aten.dropout.default, (empty(4, 5), 0.0, True), (0,), 0, (0,)),
        (aten.to.dtype, (empty(4, 5), torch.float32), (0,), 0, (0,)),
    ],
)
def test_what_may_be_in_parts(target, args, axes, result, given):
    assert along(target, args, axes) == Along(result, given)


@pytest.mark.parametrize(
    "target, args, axes",
    [
        (aten.convolution.default, (empty(3, 8, 8), empty(2, 3, 3, 3), *SETTINGS), (0, None)),
        (aten.convolution.default, (empty(4, 3, 8, 8), empty(2, 3, 3, 3), *SETTINGS), (2, None)),
        (aten.batch_norm.default, (empty(4, 3, 8, 8), None, None, None, None, True, 0.1, 1e-5, True), (0,)),
        (aten.max_pool2d.default, (empty(3, 8, 8), [2, 2]), (0,)),
        (aten.layer_norm.default, (empty(3, 8, 8), [8, 8]), (1,)),
        (aten.linear.default, (empty(8), empty(6, 8)), (0, None)),
        (aten.linear.default, (empty(4, 8), empty(6, 8)), (None, 0)),
        (aten.matmul.default, (empty(4, 5, 8), empty(4, 8, 6)), (1, None)),
        (aten.scaled_dot_product_attention.default, (empty(4, 2, 5, 8),) * 3, (2, None, None)),
        (aten.add.Tensor, (empty(4, 5, 8), empty(4, 5, 8)), (1, 0)),
        (aten.softmax.int, (empty(4, 5, 8), 1), (1,)),
        (aten.mean.dim, (empty(4, 5, 8), [1]), (1,)),
        (aten.cat.default, ([empty(4, 5, 3), empty(4, 5, 2)], -1), (2, None)),
        (aten.flatten.using_ints, (empty(4, 5), 0, -1), (1,)),
        (aten.view.default, (empty(4, 5, 8), [-1, 8]), (1,)),
        (aten.slice.Tensor, (empty(4, 5, 8), 1, 0, 3), (1,)),
        (aten.dropout.default, (empty(4, 5), 0.1, True), (0,)),
        (aten.cumsum.default, (empty(4, 5), 0), (0,)),
    ],
)
def test_what_must_see_the_whole(target, args, axes):
    assert along(target, args, axes) is None


class Gated(nn.Module):
    """A norm by hand and a gated MLP around a residual, as decoders have them."""

    def __init__(self, width=8, wide=32):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width))
        self.gate, self.up, self.down = nn.Linear(width, wide), nn.Linear(width, wide), nn.Linear(wide, width)

    def forward(self, x):
        normal = self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        return x + self.down(nn.functional.silu(self.gate(normal)) * self.up(normal))


class Attention(nn.Module):
    """Attention with positions that are turned, and a mask."""

    def __init__(self, width=8):
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, angles):
        samples, tokens, width = x.shape
        heads = self.into(self.norm(x)).view(samples, tokens, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        q, k, v = heads[0] * angles.cos(), heads[1] * angles.sin(), heads[2]
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(found.transpose(1, 2).reshape(samples, tokens, width))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.attention, self.gated, self.head = nn.Embedding(20, 8), Attention(), Gated(), nn.Linear(8, 3)

    def forward(self, ids):
        angles = torch.arange(ids.shape[1], device=ids.device).float().view(1, 1, -1, 1)
        return self.head(self.gated(self.attention(self.words(ids), angles)))


def test_blocks_of_a_decoder_are_sliced_along_samples_or_tokens():
    model, ids = Decoder(), torch.randint(20, (4, 12))
    graph = ogc.parse(model, ids)
    by_name = {op.name: op for op in graph.operations}
    assert [by_name[first].module for first, _ in graph.regions] == ["attention.norm", "gated"]
    chunked = ogc.parse(model, ids, rewrite=Chunks(graph.regions, 3))
    attention, gated = (node.target for node in chunked.program.operations if isinstance(node.target, Chunked))
    assert attention.axis == 0 and gated.axis == 1  # tokens look at one another in attention alone
    plan = ogc.make_plan(chunked, [ogc.saved(0, len(chunked))])
    plain = gradients(model, model, ids)
    optimised = ogc.apply(model, chunked, plan)
    torch.testing.assert_close(gradients(optimised, model, ids), plain)
    assert plan.peak_bytes == pytest.approx(measured_peak(optimised, (ids,)), rel=0.03)


def test_what_draws_is_in_no_block():
    model, ids = Decoder(), torch.randint(20, (4, 12))
    model.gated.gate = nn.Sequential(model.gated.gate, nn.Dropout(0.5))
    modules = {op.name: op.module for op in ogc.parse(model, ids).operations}
    assert "gated" not in [modules[first] for first, _ in ogc.parse(model, ids).regions]


def test_a_plan_that_saves_everything_runs_its_slices():
    """It is not that of the plain model, though nothing in it runs again by itself."""
    model, ids = Decoder(), torch.randint(20, (4, 12))
    regions = ogc.parse(model, ids).regions
    chunked = ogc.parse(model, ids, rewrite=Chunks(regions, 3))
    plan = ogc.solve(chunked, memory_budget="least")
    assert (
        not plan.is_plain
        and plan.plain_peak_bytes == ogc.solve(ogc.parse(model, ids), memory_budget="least").plain_peak_bytes
    )
    assert plan.peak_bytes == pytest.approx(measured_peak(ogc.apply(model, chunked, plan), (ids,)), rel=0.03)


def test_bad_input(wide):
    model, x = wide
    for chunks in (0, -1, True, 2.5, "2"):
        with pytest.raises(ogc.InputError, match="chunks must be a number of chunks"):
            ogc.optimize(model, x, chunks=chunks, memory_budget="least")
    with pytest.raises(ogc.InputError, match="no region from nowhere to relu"):
        ogc.parse(model, x, rewrite=Chunks([("nowhere", "relu")], 2))
    with pytest.raises(ogc.InputError, match="chunks must be"):
        ogc.parse(model, x, rewrite=Chunks(ogc.parse(model, x).regions, 0))


def test_slice_stretches_leaves_other_operations_alone():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    one = graph.call_function(aten.relu.default, (x,))
    two = graph.call_function(aten.tanh.default, (one,))
    graph.output(graph.call_function(aten.mean.default, (two,)))
    Chunks([(one.name, two.name)], 2)(graph, torch.device("cpu"))
    assert [n.name for n in graph.nodes if n.op == "call_function"] == ["chunked", "mean_default"]


@pytest.mark.full
def test_equal_layers_are_sliced_together(monkeypatch):
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.layers = nn.Embedding(20, 8), nn.Sequential(*(Gated() for _ in range(6)))

        def forward(self, ids):
            return self.layers(self.words(ids))

    parsed, parse = [], chunking.parsed
    monkeypatch.setattr(chunking, "parsed", lambda *args: (parsed.append(1), parse(*args))[1])
    model, ids = Stack(), torch.randint(20, (4, 64))
    optimised = ogc.optimize(model, ids, chunks=8, memory_budget="least")
    assert len(parsed) <= 2 < sum(op.target == "chunked" for op in optimised.graph.operations)
    assert optimised.plan.peak_bytes < ogc.optimize(model, ids, memory_budget="least").plan.peak_bytes
