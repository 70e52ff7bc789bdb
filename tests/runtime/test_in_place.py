"""Activations in place after norms: whatever the plan runs out of place has the gradients of the plain model's."""

import random
from functools import partial

import pytest
import torch
from helpers import (
    Function,
    assert_same_training,
    measured_peak,
    random_decisions,
    random_plans,
    random_tree,
    random_values,
)
from torch import nn

import ogc
from ogc.torch_state.allocator import peak_bytes

X = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(2))


ACTIVATIONS = {
    "relu": nn.ReLU(inplace=True),
    "relu6": nn.ReLU6(inplace=True),
    "leaky relu": nn.LeakyReLU(0.1, inplace=True),
    "elu": nn.ELU(inplace=True),
    "selu": nn.SELU(inplace=True),
    "celu": nn.CELU(inplace=True),
    "silu": nn.SiLU(inplace=True),
    "mish": nn.Mish(inplace=True),
    "hardswish": nn.Hardswish(inplace=True),
    "hardsigmoid": nn.Hardsigmoid(inplace=True),
    "threshold": nn.Threshold(0.1, 20.0, inplace=True),
    "random relu": nn.RReLU(inplace=True),
    "dropout": nn.Dropout(inplace=True),
    "square": Function(lambda x: x.pow_(2)),
    "power": Function(lambda x: x.abs_().add_(1).pow_(0.3)),
    "sigmoid": Function(lambda x: x.sigmoid_()),
    "several": Function(lambda x: x.mul_(0.1).add_(2).div_(3).abs_().tanh_()),
}


@pytest.mark.full
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_are_those_of_the_plain_model_under_any_plan(norm, name):
    torch.manual_seed(0)
    blocks = [(nn.Conv2d(4, 4, 3, padding=1), norm(4), ACTIVATIONS[name]) for _ in range(2)]
    model = nn.Sequential(*(layer for block in blocks for layer in block), nn.Conv2d(4, 4, 3))
    graph = ogc.parse(model, X)
    for seed in range(6):
        rng = random.Random(seed)
        plan = ogc.make_plan(graph, random_tree(graph, rng), recomputed_values=random_values(graph, rng))
        assert_same_training(model, ogc.apply(model, graph, plan), (X,), steps=1)


class Branches(nn.Module):
    """Instance norms whose results are used again after an activation, before it, or returned."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)

    def forward(self, x):
        first = self.norm(self.layers[0](x))
        x = nn.functional.relu_(first) + first
        second = self.norm(self.layers[1](x))
        part = second[:, :2].mul(2)
        x = nn.functional.silu(second, inplace=True) + part.sum()
        third = self.norm(self.layers[2](x))
        third.add_(x)
        return nn.functional.relu_(third), first


@pytest.mark.parametrize("seed", range(4))
def test_views_of_norms_that_others_use(seed):
    model, rng = Branches(), random.Random(seed)
    graph = ogc.parse(model, X)
    plan = ogc.make_plan(graph, random_tree(graph, rng), recomputed_values=random_values(graph, rng))
    assert_same_training(model, ogc.apply(model, graph, plan), (X,), steps=2)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.LeakyReLU])
@pytest.mark.parametrize("profile", ["estimate", "measure"])
def test_activations_in_place_after_instance_norm_peak_as_simulated(profile, activation):
    """Written in place, the norm's result is a view, whose gradient autograd copies three times."""
    layers = [(nn.Conv2d(16, 16, 3, padding=1), nn.InstanceNorm2d(16), activation(inplace=True)) for _ in range(4)]
    model = nn.Sequential(*(layer for block in layers for layer in block), nn.AdaptiveAvgPool2d(1))
    x = torch.randn(2, 16, 64, 64)
    optimised = ogc.optimize(model, x, profile=profile, memory_budget="least")
    plan = optimised.plan
    assert measured_peak(model, (x,)) == pytest.approx(plan.plain_peak_bytes, rel=0.01)
    assert measured_peak(optimised, (x,)) == pytest.approx(plan.peak_bytes, rel=0.01)


def write_through(x):
    part = x[:, 1:, 1:]
    part.mul_(part.detach().cos())
    return x, part


def write_twice(x):
    part = x[:, 1:, 1:].add_(1)
    part.mul_(2)
    return x, part


def add_to(x, weight):
    x[:, 1:, 1:] += weight
    return x


def put_into(x, weight):
    x[:, :, :8] = x[:, :, 8:16] + weight
    return x


def clamp(x, weight):
    with torch.no_grad():
        x[:, 1:, 1:].clamp_(-1, 1)
    return x * weight


WRITES = {
    "a sum": add_to,
    "a part of its own": put_into,
    "another's gradient": lambda x, weight: add_to(x, x.mean(2, keepdim=True)[:, 1:] * weight),
    "written twice": lambda x, weight: write_twice(x)[0] * weight,
    "the view read": lambda x, weight: write_twice(x)[1] * weight,
    "both read": lambda x, weight: (lambda whole, part: whole[:, 1:, 1:] + part * weight)(*write_through(x)),
    "without gradients": clamp,
    "shaped otherwise": lambda x, weight: x.view(8, -1).mul_(weight).view_as(x),
}


class Written(nn.Module):
    """Writes to a view of what a product makes: autograd copies the whole gradient, and the view's part of it."""

    def __init__(self, write):
        super().__init__()
        self.write = write
        self.scale, self.weight = nn.Parameter(torch.ones(8)), nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        for _ in range(2):
            x = (x * self.scale).tanh()
            x = self.write(x @ x.transpose(1, 2), self.weight).softmax(-1)[:, :, :8]
        return x.mean()


@pytest.mark.full
@pytest.mark.parametrize("profile", ["estimate", "measure"])
@pytest.mark.parametrize("name", WRITES)
def test_writes_to_views_peak_as_simulated(name, profile):
    model, x = Written(WRITES[name]), torch.randn(8, 128, 8)
    optimised = ogc.optimize(model, x, profile=profile, memory_budget="least")
    assert measured_peak(model, (x,)) == pytest.approx(optimised.plan.plain_peak_bytes, rel=0.01)
    assert measured_peak(optimised, (x,)) == pytest.approx(optimised.plan.peak_bytes, rel=0.01)
    assert_same_training(model, optimised, (x,))


class Returned(nn.Module):
    """What was written through a view is returned, with the view."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return write_through(torch.tanh((x * self.scale) @ x.transpose(1, 2)) * 2)


def test_what_is_returned_has_its_gradient_after_the_write():
    model, x = Returned(), torch.randn(8, 128, 8)
    optimised = ogc.optimize(model, x, memory_budget="least")
    for run, predicted in ((model, optimised.plan.plain_peak_bytes), (optimised, optimised.plan.peak_bytes)):

        def step(run=run):
            results = run(x)
            ones = [torch.ones_like(result) for result in results]  # held here, not by autograd
            torch.autograd.backward(results, ones)
            return results

        held = sum(result.nbytes for result in step())
        assert peak_bytes(step, "cpu") - held == pytest.approx(predicted, rel=0.01)
    assert_same_training(model, optimised, (x,))


def into_rows(rows, net, h):
    for t in range(len(rows)):
        h = h + 0.1 * net(h)
        rows[t] = h
    return rows


def into_columns(rows, net, h):
    for t in range(len(rows)):
        h = net(h) + h
        rows[:, t % rows.shape[1], : h.shape[-1]] += h[: len(rows)]
    return rows


def by_index(rows, net, h):
    where = torch.arange(len(rows))
    for t in range(len(rows)):
        h = net(h) + h
        rows = rows.index_put_((where[t],), h)
    return rows * 2


def both_ways(rows, net, h):
    return torch.cat([into_rows(rows, net, h), into_rows(rows.new_empty(rows.shape), net, h.flip(0))], -1)


FILLED = {"rows": into_rows, "columns": into_columns, "an index": by_index, "both ways": both_ways}


class Filled(nn.Module):
    """Results of a loop are written one by one into memory that is there before."""

    def __init__(self, fill):
        super().__init__()
        self.fill, self.net = fill, nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32), nn.Sigmoid())
        self.head = nn.LazyLinear(4)

    def forward(self, x):
        return self.head(self.fill(x.new_zeros(20, *x.shape), self.net, x)).mean()


@pytest.mark.full
@pytest.mark.parametrize("profile", ["estimate", "measure"])
@pytest.mark.parametrize("name", FILLED)
def test_a_loop_that_fills_a_tensor_is_cut_between_its_writes(name, profile):
    torch.manual_seed(0)
    model, x = Filled(FILLED[name]), torch.randn(48, 32)
    model(x)
    optimised = ogc.optimize(model, x, profile=profile, memory_budget="least")
    plan = optimised.plan
    assert plan.peak_bytes < 0.75 * plan.plain_peak_bytes
    assert measured_peak(model, (x,)) == pytest.approx(plan.plain_peak_bytes, rel=0.03)
    assert measured_peak(optimised, (x,)) == pytest.approx(plan.peak_bytes, rel=0.03)
    assert_same_training(model, optimised, (x,))


def gates(x, h, weight):
    """As ``nn.GRUCell`` computes them."""
    of_x, of_h = (x @ weight).unsafe_chunk(3, 1), (h @ weight).unsafe_chunk(3, 1)
    keep = of_h[1].add_(of_x[1]).sigmoid_()
    new = of_x[2].add(of_h[2].mul_(of_h[0].add_(of_x[0]).sigmoid_())).tanh_()
    return (h - new).mul_(keep).add_(new)


def split(x, h, weight):
    first, rest = (x @ weight).unsafe_split_with_sizes((32, 64), 1)
    rest = rest.sin_().unsafe_chunk(2, 1)
    return first.exp_() * 0.01 + rest[0].tanh_() * rest[1].sigmoid_() + h


class Unrolled(nn.Module):
    """A cell, step by step; what it writes in place are parts with versions of their own."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell(32, 32) if isinstance(cell, type) else cell
        self.weight = nn.Parameter(0.1 * torch.randn(32, 96))

    def forward(self, x):
        h = torch.zeros_like(x[0])
        h = (h, h) if isinstance(self.cell, nn.LSTMCell) else h
        for step in x:
            h = self.cell(step, h) if isinstance(self.cell, nn.Module) else self.cell(step, h, self.weight)
        return (h[0] if isinstance(h, tuple) else h).mean()


CELLS = {"gru": nn.GRUCell, "lstm": nn.LSTMCell, "rnn": nn.RNNCell, "gates": gates, "split": split}


@pytest.mark.full
@pytest.mark.parametrize("profile", ["estimate", "measure"])
@pytest.mark.parametrize("name", CELLS)
def test_a_loop_of_cells_is_planned(name, profile):
    torch.manual_seed(0)
    model, x = Unrolled(CELLS[name]), torch.randn(16, 64, 32)
    optimised = ogc.optimize(model, x, profile=profile, memory_budget="least")
    plan = optimised.plan
    assert plan.peak_bytes < 0.6 * plan.plain_peak_bytes
    assert measured_peak(model, (x,)) == pytest.approx(plan.plain_peak_bytes, rel=0.03)
    assert measured_peak(optimised, (x,)) == pytest.approx(plan.peak_bytes, rel=0.03)
    assert_same_training(model, optimised, (x,))


@pytest.mark.full
@pytest.mark.parametrize(
    "make", [*(partial(Unrolled, cell) for cell in CELLS.values()), *map(partial, [Filled] * 4, FILLED.values())]
)
def test_any_plan_of_what_is_written_part_by_part_is_bitwise(make):
    torch.manual_seed(0)
    model, rng = make(), random.Random(1)
    x = torch.randn(24, 32) if isinstance(model, Filled) else torch.randn(5, 8, 32)
    model(x)
    graph = ogc.parse(model, x, profile="estimate")
    for plan in random_plans(graph, rng, 4) + random_plans(graph, rng, 4, random_decisions):
        assert_same_training(model, ogc.apply(model, graph, plan), (x,), steps=1)


class WritesSavedPart(nn.Module):
    """Parts with versions of their own, one of which is written after it was saved."""

    def __init__(self, overlaps):
        super().__init__()
        self.layer, self.overlaps = nn.Linear(8, 8), overlaps

    def forward(self, x):
        first, second = self.layer(x).unsafe_chunk(2, 1)
        saved = first.exp_()
        (first[:, 1:] if self.overlaps else second).mul_(2)
        return saved.sum() + second.sum()


def test_only_what_was_saved_must_not_be_written():
    with pytest.raises(ogc.ParseError, match=r"mul_.* in place after exp_.* saved it for its backward, which autograd"):
        ogc.parse(WritesSavedPart(True), torch.randn(3, 8))
    graph = ogc.parse(WritesSavedPart(False), torch.randn(3, 8))
    plan = ogc.make_plan(graph, [ogc.recomputed(0, len(graph))])
    model = WritesSavedPart(False)
    assert_same_training(model, ogc.apply(model, graph, plan), (torch.randn(3, 8),))
