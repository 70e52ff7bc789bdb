"""Small modules in which each byte counts: what is simulated, the allocator gives."""

from contextlib import suppress

import pytest
import torch
from helpers import Function, assert_same_training, loss_of, measured_peak
from torch import nn
from torch.nn import functional as F

import ogc
from ogc.plan.decisions import cut_into_segments
from ogc.torch_state.allocator import peak_bytes


def assert_as_simulated(model, inputs, rel=0.01, shares=(0.7,), **settings):
    """The plain model, the least peak and peaks within shares of the plain one are what the allocator gives."""
    graph = ogc.parse(model, inputs, loss=loss_of, holds_outputs=False, **settings)
    plain = ogc.solve(graph, solver="none")
    assert plain.peak_bytes == pytest.approx(measured_peak(model, inputs), rel=rel)
    plans = [ogc.solve(graph, memory_budget="least"), *(ogc.solve(graph, memory_budget=share) for share in shares)]
    for plan in plans:
        assert plan.peak_bytes == pytest.approx(measured_peak(ogc.apply(model, graph, plan), inputs), rel=rel)


class InOneMatrix(nn.Module):
    """A linear layer whose weights are chunks of one parameter, as in attention: these get gradients of their own."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(3, 64, 64) / 8)

    def forward(self, x):
        first, second, third = self.matrix.unbind()
        return (x @ first).tanh() @ second.t() + x @ third.transpose(0, 1).contiguous()


def test_gradients_of_parts_of_a_parameter_wait_for_each_other():
    assert_as_simulated(nn.Sequential(InOneMatrix(), nn.Tanh(), InOneMatrix()), (torch.randn(8, 64),), shares=())


class StartsAnew(nn.Module):
    """Goes on from zeros that require grad: autograd's graph holds these and their gradients, and nothing before."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        start = torch.zeros_like(self.first(x).sigmoid()).requires_grad_()
        return x + self.last(start + 1).tanh()


def test_what_starts_autograds_graph_stays_and_what_is_before_it_goes():
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(64, 64), *(StartsAnew() for _ in range(3))), (torch.randn(32, 64),)
    assert_as_simulated(model, inputs, shares=())
    optimised = ogc.optimize(model, inputs, memory_budget="least")
    assert_same_training(model, optimised, inputs)


class Rows(nn.Module):
    """A layer of tokens around one of images: what images get are gradients whose channels come last."""

    def __init__(self, body, channels=32, size=16):
        super().__init__()
        self.first, self.body, self.last = nn.Linear(channels, channels), body, nn.Linear(channels, 64)
        self.size = size

    def forward(self, x):
        images = self.first(x).tanh().transpose(1, 2).unflatten(2, (self.size, self.size)).contiguous()
        return self.last(self.body(images).flatten(2).transpose(1, 2)).mean(1)


class Unfolded(nn.Module):
    """Windows of images, as in convolutions that attention makes."""

    def forward(self, x):
        windows = nn.functional.unfold(x, (3, 3), padding=1).transpose(1, 2).reshape(len(x), -1, x.shape[1], 9)
        return (
            (windows @ windows.softmax(-1)[:, :, :9].transpose(2, 3)).mean(3).transpose(1, 2).unflatten(2, x.shape[2:])
        )


@pytest.mark.full
@pytest.mark.parametrize("profile", ["estimate", "measure"])
@pytest.mark.parametrize(
    "body",
    [
        nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)),
        nn.Conv2d(32, 32, 3, padding=1, groups=4),
        nn.Conv2d(32, 32, 1),
        nn.BatchNorm2d(32),
        nn.AvgPool2d(2),
        nn.MaxPool2d(2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.GroupNorm(4, 32),
        Unfolded(),
    ],
    ids=["convolution", "grouped", "pointwise", "batch norm", "mean", "max", "bilinear", "group norm", "windows"],
)
def test_gradients_that_are_laid_out_otherwise_are_copied_where_kernels_do(body, profile):
    assert_as_simulated(Rows(body), (torch.randn(4, 256, 32),), shares=(), profile=profile)


class Columns(nn.Module):
    """A layer that gets the gradients of columns."""

    def __init__(self, body):
        super().__init__()
        self.body, self.last = body, nn.Linear(48, 8)

    def forward(self, x):
        return self.last(self.body(x.tanh()).transpose(1, 2)).sum((1, 2))


@pytest.mark.full
@pytest.mark.parametrize(
    "body", [nn.LayerNorm(64), nn.Linear(64, 64), nn.Softmax(-1)], ids=["norm", "linear", "softmax"]
)
def test_gradients_of_columns_are_copied_where_kernels_do(body):
    assert_as_simulated(Columns(nn.Sequential(nn.Linear(64, 64), body)), (torch.randn(16, 48, 64),), shares=())


class Tables(nn.Module):
    """Makes large numbers without gradients, and holds them in variables, arguments and lists longer than needed."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        tables = [torch.arange(20000.0).reshape(100, 200) for _ in range(2)]
        square = self.scaled(tables[0] @ tables[1].t())
        x = self.first(x) * square.mean()
        del square
        wide = torch.ones(100, 300)
        x = x * wide.mean()
        return self.last(x.tanh())

    def scaled(self, given):
        total = given / 1e6
        return total.softmax(1) + total.abs().sum()


@pytest.mark.full
def test_what_frames_of_the_plain_forward_hold_counts_there_alone():
    model, inputs = Tables(), (torch.randn(4, 16),)
    assert_as_simulated(model, inputs, shares=(0.8,))
    plan = ogc.solve(ogc.parse(model, inputs, loss=loss_of), memory_budget="least")
    assert not plan.is_plain and not plan.recomputed_flops and plan.peak_bytes < 0.9 * plan.plain_peak_bytes


class TwoStreams(nn.Module):
    """Layers with a stream beside the main one; nothing comes of what the last layer does to it."""

    def __init__(self):
        super().__init__()
        self.main = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.side = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        side = x.sin()
        for main, beside in zip(self.main, self.side, strict=True):
            scores = beside(side)
            x = x + main(x + side).tanh()
            side = nn.functional.dropout(scores.sigmoid().exp() * side.exp(), 0.1).tanh() * 0.1
        return x


@pytest.mark.full
def test_what_nothing_comes_of_holds_what_it_saves_as_long_as_its_results():
    torch.manual_seed(0)
    model, inputs = TwoStreams(), (torch.randn(64, 64),)
    assert_as_simulated(model, inputs, shares=(0.8,))
    optimised = ogc.optimize(model, inputs, memory_budget="least")
    assert_same_training(model, optimised, inputs)
    graph = ogc.parse(model, inputs)
    assert "dropped" in ogc.apply(model, graph, ogc.make_plan(graph, [ogc.saved(0, len(graph))])).code


class Ghost(nn.Module):
    """Adds in place to a full slice of a concatenation, as networks with cheap features do."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()) for _ in range(2))
        self.last = nn.Linear(64, 64)

    def forward(self, x):
        half = self.first(x[:, :32])
        out = torch.cat([half, self.second(half)], 1)[:, :64]
        out += self.last(x)
        return out


@pytest.mark.full
def test_a_view_that_is_made_before_a_write_keeps_no_cut_away():
    torch.manual_seed(0)
    model, inputs = nn.Sequential(*(Ghost() for _ in range(8))), (torch.randn(256, 64),)
    graph = ogc.parse(model, inputs, loss=loss_of, holds_outputs=False)
    assert len(graph.cuts) > 8 * 6
    assert_as_simulated(model, inputs, shares=(0.8, 0.5))
    for share in (0.8, 0.6, 0.4):
        assert_same_training(model, ogc.optimize(model, inputs, memory_budget=share), inputs)


class KeepsAside(torch.autograd.Function):
    """Keeps in attributes of its context what it should have autograd save."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.x, ctx.y, ctx.z = x.detach(), y, (x * y).tanh()
        return ctx.z.sin()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient * ctx.z.cos() * (1 - ctx.z * ctx.z)
        return gradient * ctx.y, gradient * ctx.x


class KeepsArgumentsAside(KeepsAside):
    """The same of its arguments alone."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.x, ctx.y = x.detach(), y
        return x * y

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.y, gradient * ctx.x


class KeepsResultAside(KeepsAside):
    """The same of its result, and of what its gradient is computed from."""

    @staticmethod
    def forward(ctx, x, y):
        result = (x * y).tanh()
        ctx.x, ctx.y, ctx.z = x.cos(), y.cos(), result.detach()
        return result

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient * (1 - ctx.z * ctx.z)
        return gradient * ctx.y, gradient * ctx.x


class Custom(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.first, self.second = function, nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return x + self.function.apply(self.first(x), self.second(x)).tanh()


@pytest.mark.full
@pytest.mark.parametrize("function", [KeepsAside, KeepsArgumentsAside, KeepsResultAside])
def test_what_a_custom_function_keeps_past_autograd_counts(function):
    torch.manual_seed(0)
    model, inputs = nn.Sequential(*(Custom(function) for _ in range(4))), (torch.randn(256, 64),)
    assert_as_simulated(model, inputs, shares=())
    assert_same_training(model, ogc.optimize(model, inputs, memory_budget="least"), inputs)


class WritesWhatIsKeptAside(nn.Module):
    """In place, after a custom function has kept it."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        hidden = self.first(x)
        y = KeepsArgumentsAside.apply(hidden, x)
        hidden.relu_()
        return self.last(hidden).tanh() + 0.01 * y


def test_what_a_custom_function_keeps_past_autograd_is_written_where_the_model_writes_it():
    torch.manual_seed(0)
    model, inputs = nn.Sequential(*(WritesWhatIsKeptAside() for _ in range(3))), (0.1 * torch.randn(64, 64),)
    graph = ogc.parse(model, inputs, loss=loss_of, holds_outputs=False)
    written = [v for v, name in enumerate(value.name for value in graph.values) if name.startswith("relu")]
    written += [v for op in graph.operations if op.target == "aten.relu_.default" for v in op.writes]
    segments = cut_into_segments(graph.cuts, [False] + [True] * (len(graph.cuts) - 3) + [False])
    with suppress(ogc.PlanError):  # as the custom function must not run twice
        plan = ogc.make_plan(graph, segments, recomputed_values=written)
        assert_same_training(model, ogc.apply(model, graph, plan), inputs)
    assert not any(op.takes_over is not None for op in graph.operations)
    for share in (0.9, 0.8):
        assert_same_training(model, ogc.optimize(model, inputs, memory_budget=share), inputs)


class Gathered(nn.Module):
    """Small numbers picked from a large product."""

    def __init__(self, pick):
        super().__init__()
        self.pick, self.first = pick, nn.Linear(32, 256)

    def forward(self, x):
        return self.pick(self.first(x)).square()


@pytest.mark.full
@pytest.mark.parametrize(
    "pick",
    [lambda x: x.gather(1, torch.zeros(256, 8, dtype=torch.long)), lambda x: x.index_select(1, torch.arange(8))],
    ids=["gather", "index_select"],
)
def test_gradients_of_what_is_picked_are_made_once(pick):
    assert_as_simulated(Gathered(pick), (torch.randn(256, 32),), shares=())


class Turned(nn.Module):
    """Works along the other axis of what it is given, which its kernel copies first; nothing of it needs a gradient."""

    def __init__(self, body):
        super().__init__()
        self.body, self.last = body, nn.Linear(32, 4)

    def forward(self, x):
        return self.last(self.body(x.transpose(1, 3)).flatten(1)[:, :32])


@pytest.mark.full
@pytest.mark.parametrize(
    "body",
    [
        lambda x: x.softmax(-1),
        lambda x: x.log_softmax(1),
        lambda x: nn.functional.layer_norm(x, x.shape[-1:]),
        lambda x: nn.functional.max_pool2d(x, 2),
        lambda x: nn.functional.avg_pool2d(x, 2),
        lambda x: nn.functional.pad(x, (1, 1, 1, 1), mode="reflect"),
        lambda x: x.tril(),
    ],
    ids=["softmax", "log_softmax", "layer norm", "max", "mean", "pad", "tril"],
)
@pytest.mark.parametrize("profile", ["estimate", "measure"])
def test_operands_that_kernels_first_make_contiguous_are_there_twice(body, profile):
    assert_as_simulated(Turned(body), (torch.randn(4, 32, 16, 16),), rel=0.001, shares=(), profile=profile)


class Positions(nn.Module):
    """Attention whose scores are sums: of a plain product, and of one with positions that einsum is made of."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x, positions):
        query, key, value = (
            layer(x).unflatten(2, (4, 8)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(2, 3) + torch.einsum("bnid,bijd->bnij", query, positions)
        return x + (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


class InPositions(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.places, self.layers = nn.Linear(4, 8), nn.ModuleList(Positions() for _ in range(depth))

    def forward(self, x, places):
        positions = self.places(places).permute(2, 0, 1, 3)
        for layer in self.layers:
            x = layer(x, positions)
        return x


@pytest.mark.full
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_gradient_that_is_copied_stays_while_others_wait_for_it(depth):
    torch.manual_seed(0)
    model, inputs = InPositions(depth), (torch.randn(2, 48, 32), torch.randn(48, 48, 2, 4))
    assert_as_simulated(model, inputs, rel=0.001, shares=())


class AddsInPlace(nn.Module):
    """Adds a convolution to a product in place; the gradient of both has its heads next to last."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.mix = nn.Conv2d(4, 4, (33, 1), padding=(16, 0), groups=4, bias=False)

    def forward(self, x):
        heads = self.first(x).unflatten(2, (4, 16)).transpose(1, 2)
        scores = (heads / 4 @ heads.transpose(2, 3)).softmax(-1) @ heads
        scores += self.mix(heads)
        return x + self.last(scores.transpose(1, 2).flatten(2))


def test_gradients_keep_their_layout_through_what_is_written_in_place():
    torch.manual_seed(0)
    model, inputs = nn.Sequential(AddsInPlace(), AddsInPlace()), (torch.randn(2, 48, 64),)
    assert_as_simulated(model, inputs, rel=0.001)


class Unused(nn.Module):
    """Computes what nothing uses, with and without a history, and goes on while some of it is there."""

    def __init__(self, has_history):
        super().__init__()
        self.first, self.last, self.has_history = nn.Linear(16, 16), nn.Linear(16, 16), has_history

    def forward(self, x):
        x = self.first(x)
        if self.has_history:
            wide = x.repeat(1, 512)
            unused = wide.exp().sin() * 2  # autograd holds three of these
            del wide
        else:
            unused = torch.arange(60000.0).reshape(200, 300).flip(0)
            unused.square().cos().sum()
        return self.last(x.tanh()) * 2


@pytest.mark.full
@pytest.mark.parametrize("has_history", [False, True])
def test_what_the_plain_forward_makes_and_nothing_uses_counts_there_alone(has_history):
    torch.manual_seed(0)
    model, inputs = Unused(has_history), (torch.randn(16, 16),)
    assert_as_simulated(model, inputs, rel=0.001, shares=())
    plan = ogc.solve(ogc.parse(model, inputs, loss=loss_of), memory_budget="least")
    assert not plan.is_plain and plan.peak_bytes < 0.1 * plan.plain_peak_bytes
    assert_same_training(model, ogc.optimize(model, inputs, memory_budget="least"), inputs)


class SavesSlices(nn.Module):
    """Saves chunks of what is wider; comparing them with those of another call takes a copy."""

    def forward(self, x):
        if x.tolist():  # so that it is no part of any program
            wide = x.exp()
            return wide[:, :128].t() @ wide[:, :128]


def test_what_comparing_the_calls_of_an_opaque_module_takes_counts():
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(16, 256), SavesSlices(), nn.Linear(128, 8)), (torch.randn(256, 16),)
    graph = ogc.parse(model, inputs, opaque_modules=["1"], recompute_opaque=["1"])
    plain = ogc.solve(graph, solver="none")
    assert plain.peak_bytes == pytest.approx(measured_peak(model, inputs, holds_outputs=True), rel=0.001)
    plan = ogc.make_plan(graph, [ogc.recomputed(0, len(graph))])
    forward = max(event.bytes for event in ogc.simulate(graph, plan).timeline if event.phase == "forward")
    run = ogc.apply(model, graph, plan)
    assert forward == pytest.approx(peak_bytes(lambda: run(*inputs), "cpu"), rel=0.001)


OTHERS = torch.rand(64, 96)
KERNELS = {
    "distances": lambda x: F.mse_loss(x, OTHERS) + F.smooth_l1_loss(x, OTHERS),
    "cosines": lambda x: F.cosine_similarity(x, OTHERS),
    "cosines of pairs": lambda x: F.cosine_embedding_loss(x, OTHERS, torch.ones(64)),
    "triplets": lambda x: F.triplet_margin_loss(x, OTHERS, OTHERS.flip(0)),
    "mish": F.mish,
    "larger": lambda x: torch.maximum(x, OTHERS) * torch.minimum(x, OTHERS),
    "product": lambda x: x.prod(1),
    "products": lambda x: x.cumprod(1),
    "order": lambda x: x.kthvalue(3, 1)[0] + x.quantile(0.3, 1),
    "bilinear": lambda x: F.bilinear(x, x, torch.ones(8, 96, 96)),
}


@pytest.mark.full
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_that_take_more_or_less_than_shapes_tell(name):
    model = Function(KERNELS[name])
    assert_as_simulated(nn.Sequential(nn.Linear(48, 96), model), (torch.rand(64, 48),), shares=())
