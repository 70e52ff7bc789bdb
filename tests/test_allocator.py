"""The allocator verifies the simulator."""

import random
from functools import partial

import pytest
import torch
from helpers import assert_same_training, forced, measured_peak, random_tree, random_values
from models import CASES
from torch import nn

import ogc
from benchmarks.cases import PUBLISHED
from ogc.torch_state.allocator import allocated_bytes, peak_bytes


def test_the_peak_of_known_allocations():
    def step():
        first = torch.empty(1000, dtype=torch.uint8)
        second = torch.empty(500, dtype=torch.uint8)
        del first
        return torch.empty(700, dtype=torch.uint8), second

    assert peak_bytes(step, "cpu") == 1500


def test_memory_from_before_a_measurement_is_not_taken_off_it():
    older = []
    peak_bytes(lambda: older.append(torch.empty(4096, dtype=torch.uint8)), "cpu")  # so the profiler knows its size

    def step():
        older.clear()
        torch.empty(500, dtype=torch.uint8)

    assert allocated_bytes(step, "cpu") == (500, 0)


class Wide(nn.Module):
    """Large activations between small operations, so that loss and bookkeeping do not count."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Conv2d(16, 16, 3, padding=1)) for _ in range(6)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(torch.cat([x, x.relu()], 2).mean((2, 3)))


def wide_images():
    return torch.randn(4, 3, 64, 64)


@pytest.mark.full
@pytest.mark.parametrize("profile", ["estimate", "measure"])
def test_plain_and_optimal_peaks_are_as_simulated(profile):
    model, x = PUBLISHED["resnet18"].build(), torch.randn(4, 3, 96, 96)
    optimised = ogc.optimize(model, x, profile=profile, memory_budget="least")
    plan = optimised.plan
    assert plan.peak_bytes < 0.75 * plan.plain_peak_bytes
    assert measured_peak(model, (x,)) == pytest.approx(plan.plain_peak_bytes, rel=0.03)
    assert measured_peak(optimised, (x,)) == pytest.approx(plan.peak_bytes, rel=0.03)


class Permuted(nn.Module):
    """Operators whose kernels copy what is laid out as the result of attention is: channels last, and not said so."""

    def __init__(self, body):
        super().__init__()
        self.first, self.body = nn.Linear(32, 32), body

    def forward(self, x):
        x = self.first(x.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, (16, 16))
        return self.body(x)


@pytest.mark.parametrize(
    "body",
    [
        nn.GroupNorm(8, 32),
        nn.Upsample(scale_factor=2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
    ],
    ids=["group norm", "nearest", "bilinear"],
)
def test_operators_over_windows_need_what_is_simulated(body):
    model, x = Permuted(body), torch.randn(4, 32, 16, 16)
    plain = ogc.solve(ogc.parse(model, x, loss="outputs"), solver="none").peak_bytes
    model(x).sum().backward()  # the gradients of parameters
    seed = torch.ones_like(model(x))
    measured = peak_bytes(lambda: model(x).backward(seed.clone()), "cpu")
    assert plain == pytest.approx(measured, rel=0.01)


class Recurrent(nn.Module):
    def __init__(self, kind, **settings):
        super().__init__()
        self.layers = nn.ModuleList(kind(64, 64, **settings) for _ in range(3))
        self.last = nn.Linear(64, 100)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)[0].tanh()
        return self.last(x)


@pytest.mark.full
@pytest.mark.parametrize(
    "settings", [{}, {"batch_first": True}, {"batch_first": True, "num_layers": 2, "dropout": 0.1}]
)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_need_what_is_simulated_or_a_little_less(kind, settings):
    model, x = Recurrent(kind, **settings), torch.randn(16, 10, 64)
    optimised = ogc.optimize(model, x, memory_budget="least")
    plan = optimised.plan
    assert plan.peak_bytes < 0.7 * plan.plain_peak_bytes
    for run, promised in ((model, plan.plain_peak_bytes), (optimised, plan.peak_bytes)):
        run(x).sum().backward()  # the gradients of parameters
        measured = peak_bytes(partial(summed_step, run, x), "cpu")
        assert 0.9 * promised <= measured <= promised + 8  # the sum and its gradient


def summed_step(run, x):
    outputs = run(x)
    outputs.sum().backward()


def test_random_states_are_no_tensors_memory():
    layers = (layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1)))
    model, x = nn.Sequential(*layers), torch.randn(64, 32)
    optimised = forced(model, x, pieces=1)
    assert sum("frame.random" in line for line in optimised.code.splitlines()) >= 10
    assert measured_peak(optimised, (x,)) < optimised.plan.peak_bytes + 5000  # a state has as many


def test_gradients_that_share_storage_are_as_simulated():
    model, x = Wide(), wide_images()
    plan = ogc.optimize(model, x, memory_budget="least").plan
    assert measured_peak(model, (x,)) == pytest.approx(plan.plain_peak_bytes, rel=0.005)
    assert measured_peak(ogc.apply(model, ogc.parse(model, x), plan), (x,)) == pytest.approx(plan.peak_bytes, rel=0.005)


def random_plan(graph, seed):
    rng = random.Random(seed)
    return ogc.make_plan(graph, random_tree(graph, rng), recomputed_values=random_values(graph, rng))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(8))
def test_any_plan_peaks_as_simulated(seed):
    model, x = Wide(), wide_images()
    graph = ogc.parse(model, x, profile="measure")
    plan = random_plan(graph, seed)
    assert measured_peak(ogc.apply(model, graph, plan), (x,)) == pytest.approx(plan.peak_bytes, rel=0.03)


class KeepsWithin(nn.Module):
    """Operators that save what is no value of the program: places in windows, noise."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.2))
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())

    def forward(self, x):
        return self.second(self.first(x)).square().mean((1, 2, 3))


@pytest.mark.parametrize("profile", ["estimate", "measure"])
@pytest.mark.parametrize("part", ["max_pool2d", "dropout"])
def test_a_segment_that_keeps_a_result_keeps_what_its_operator_saved(part, profile):
    model, x = KeepsWithin(), torch.randn(4, 3, 32, 32)
    graph = ogc.parse(model, x, profile=profile)
    place = next(t for t, op in enumerate(graph.operations) if part in op.target)
    assert graph.operations[place].internal_bytes and not graph.keeps_internals[place]
    plan = ogc.make_plan(graph, [ogc.recomputed(0, len(graph), saved_values=graph.operations[place].writes)])
    assert plan.recomputed_seconds <= sum(graph.repeat_seconds) - graph.repeat_seconds[place]
    optimised = ogc.apply(model, graph, plan)
    assert measured_peak(optimised, (x,)) == pytest.approx(plan.peak_bytes, rel=0.01)
    assert_same_training(model, optimised, (x,))


def count(segments):
    """Segments with those inside them."""
    return sum(1 + (count(segment.parts) if len(segment.parts) > 1 else 0) for segment in segments)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_optimising_never_needs_more_than_the_plain_model(name):
    make, inputs = CASES[name]
    model, given = make(), inputs()
    optimised = ogc.optimize(model, given, profile="measure", memory_budget="least")
    # At these sizes the random state kept for a dropout (5 kB on CPU) is of the activations' order.
    assert measured_peak(optimised, given) <= measured_peak(model, given) + 6000 * count(optimised.plan.segments)


class Joined(nn.Module):
    """A tensor that is used twice: the first gradient that it gets is a chunk of a larger one, or one of its own."""

    def __init__(self, join):
        super().__init__()
        self.first, self.join = nn.Linear(8, 8), join

    def forward(self, x):
        a = self.first(x).exp()
        return self.join(a * 3, a).mul_(2).sum()


@pytest.mark.parametrize(
    ("join", "tensors"),
    [
        (lambda a, b: torch.cat([b, a]), 5),  # dense, but a view: the sum is a third storage
        (lambda a, b: torch.cat([b, a], 1), 5),
        (lambda a, b: torch.cat([a.sum(1), (b * 5).sum(1)]), 3.25),  # the first gradient takes the second in
    ],
    ids=["rows", "columns", "own"],
)
def test_gradients_that_are_added_in_place_or_not(join, tensors):
    model, x = Joined(join), torch.randn(4096, 8)
    plain = ogc.solve(ogc.parse(model, x), solver="none").peak_bytes
    assert plain == pytest.approx(tensors * x.nbytes, rel=0.01)
    assert measured_peak(model, (x,)) == pytest.approx(plain, rel=0.001)


class Dense(nn.Module):
    """Layers that each add to a concatenation, as in a dense block: their gradients are chunks of a large one."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.squeeze = nn.ModuleList(nn.Conv2d(32 + 16 * k, 32, 1) for k in range(4))
        self.grow = nn.ModuleList(nn.Conv2d(32, 16, 3, padding=1) for _ in range(4))

    def forward(self, x):
        x = self.stem(x)
        for squeeze, grow in zip(self.squeeze, self.grow, strict=True):
            x = torch.cat([x, grow(squeeze(x.relu()).relu())], 1)
        return x.mean((2, 3))


@pytest.mark.full
@pytest.mark.parametrize("threads", [1, 2, 4], indirect=True)
@pytest.mark.parametrize("batch_size", [4, 16])
@pytest.mark.parametrize("profile", ["estimate", "measure"])
def test_every_solvers_checkpoints_of_a_dense_block_are_as_simulated(threads, batch_size, profile):
    """One thread and a small batch take another kernel for pointwise convolutions, with fewer copies."""
    model, x = Dense(), torch.randn(batch_size, 3, 32, 32)
    graph = ogc.parse(model, x, profile=profile)
    for solver in set(ogc.solver.SOLVERS) - {"none"}:
        plan = ogc.solve(graph, solver=solver)
        measured = measured_peak(ogc.apply(model, graph, plan), (x,))
        assert plan.peak_bytes == pytest.approx(measured, rel=0.01), solver


@pytest.mark.full
@pytest.mark.parametrize("threads", [1, 2, 4, 8], indirect=True)
@pytest.mark.parametrize(
    ("batch", "channels", "size", "kernel"), [(8, (16, 16), 64, 3), (16, (64, 64), 28, 3), (12, (256, 64), 28, 1)]
)
def test_threads_that_sum_the_gradient_of_a_weight_by_themselves_are_simulated(threads, batch, channels, size, kernel):
    """The fewer images and the more threads, the more their sums are beside the images."""
    layers = [nn.Conv2d(*way, kernel, padding=kernel // 2) for way in (channels, channels[::-1])]
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.AdaptiveAvgPool2d(1))
    x = torch.randn(batch, channels[0], size, size)
    optimised = ogc.optimize(model, x, profile="estimate", memory_budget="least")
    assert measured_peak(model, (x,)) == pytest.approx(optimised.plan.plain_peak_bytes, rel=0.005)
    assert measured_peak(optimised, (x,)) == pytest.approx(optimised.plan.peak_bytes, rel=0.005)


class Attention(nn.Module):
    """Attention with dropout, which a CPU computes by several operators whose results go one by one in the backward."""

    def __init__(self, needs_weights):
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True) for _ in range(3))
        self.needs_weights = needs_weights

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=self.needs_weights)[0]
        return x.mean((1, 2))


@pytest.mark.full
@pytest.mark.parametrize("needs_weights", [False, True])
@pytest.mark.parametrize("profile", ["estimate", "measure"])
def test_attention_with_dropout_peaks_as_simulated(profile, needs_weights):
    model, x = Attention(needs_weights), torch.randn(4, 96, 32)
    optimised = ogc.optimize(model, x, profile=profile, memory_budget="least")
    assert measured_peak(model, (x,)) == pytest.approx(optimised.plan.plain_peak_bytes, rel=0.01)
    assert measured_peak(optimised, (x,)) == pytest.approx(optimised.plan.peak_bytes, rel=0.01)


TRANSFORMS = {
    "matrix exponential": torch.matrix_exp,
    "spectrum of a transposed signal": lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * 2, n=x.shape[1], dim=1),
    "spectrum of an image": lambda x: torch.fft.fft2(x.transpose(1, 2)).real.transpose(1, 2) * 0.01,
}


class Transformed(nn.Module):
    def __init__(self, transform):
        super().__init__()
        self.layers, self.transform = nn.ModuleList(nn.Linear(48, 48) for _ in range(3)), transform

    def forward(self, x):
        for layer in self.layers:
            x = self.transform(layer(x) * 0.01).tanh()
        return x.mean()


@pytest.mark.full
@pytest.mark.parametrize("profile", ["estimate", "measure"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_whole_matrices_and_signals_peak_as_simulated(name, profile):
    model, x = Transformed(TRANSFORMS[name]), torch.randn(16, 48, 48)
    optimised = ogc.optimize(model, x, profile=profile, memory_budget="least")
    assert measured_peak(model, (x,)) == pytest.approx(optimised.plan.plain_peak_bytes, rel=0.01)
    assert measured_peak(optimised, (x,)) == pytest.approx(optimised.plan.peak_bytes, rel=0.01)
    assert_same_training(model, optimised, (x,), steps=1)
