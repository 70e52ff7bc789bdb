"""Leaves and calls unlike the sample: planned for anew or run plain, never with other numbers."""

import logging

import pytest
import torch
from helpers import assert_same_training, forced, loss_of
from test_opaque import PARTS, Net, X, hooked, opaque_calls
from torch import nn

import ogc
from ogc.errors import ParseError


def batch(size):
    return torch.randn(size, 6, generator=torch.Generator().manual_seed(size))


class BySize(nn.Module):
    """Takes another way for another size, out of sight of the tracer."""

    def forward(self, x):
        return x.sin() if x.shape[0] == 5 else x.cos()


class GivenSize(nn.Module):
    """An opaque module that is given a size, as a number."""

    def __init__(self):
        super().__init__()
        self.scale = hooked(Scale())

    def forward(self, x):
        return self.scale(x, x.shape[0])


class Scale(nn.Module):
    def forward(self, x, number):
        assert type(number) is int
        return x * number


class LikeSyncBatchNorm(nn.BatchNorm1d):
    """A norm with a function of its own, which is given a size as a number."""

    def forward(self, x):
        return Normalize.apply(x, x.shape[0])


class Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, size):
        ctx.size = size
        return x / size

    @staticmethod
    def backward(ctx, gradient):
        return gradient / ctx.size, None


GUARDED = {
    **{name: PARTS[name] for name in ("branch", "custom function", "cumulative batch norm", "batch norm inside")},
    "by size": BySize,
    "given size": GivenSize,
    "like a synchronised batch norm": lambda: LikeSyncBatchNorm(6),
}


@pytest.mark.full
@pytest.mark.parametrize("make", [ogc.optimize, forced], ids=["optimize", "by hand"])
@pytest.mark.parametrize("name", GUARDED)
def test_a_plan_with_an_opaque_module_is_carried_over_where_the_program_is_the_same(name, make, caplog):
    model = Net(GUARDED[name]())
    kwargs = {"opaque_modules": ["body.0.1"]} if make is ogc.optimize and name == "by size" else {}
    optimised = make(model, X, **kwargs)
    with caplog.at_level(logging.INFO, logger="ogc.runtime.runner"):
        for size in (3, 8, 5, 3):
            assert_same_training(model, optimised, (batch(size),), steps=1)
    assert caplog.text.count("reused for") == 2 or "size" in name


def test_another_size_is_planned_for_with_its_opaque_modules(opened):
    model = Net(PARTS["branch"]())
    optimised = ogc.optimize(model, X, memory_budget=0.9)
    opened.clear()
    assert_same_training(model, optimised, (batch(8),), steps=1)
    assert opened


# -- shapes that depend on data ------------------------------------------------------------------------------


class Fills(nn.Module):
    """Works on the chosen rows alone; its result has the shape of its input."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        chosen = x.sum(1) > 0
        result = torch.zeros_like(x)
        result[chosen] = self.layer(x[chosen]).tanh()
        return result


class Averages(nn.Module):
    def forward(self, x):
        return x * x[x > 0].mean()


class Picks(nn.Module):
    def forward(self, x):
        return x[x.sum(1) > 0]


class Summarises(nn.Module):
    """A part whose shape depends on data, in a module whose shape does not."""

    def __init__(self):
        super().__init__()
        self.picks = Picks()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return x + self.layer(self.picks(x)).sum() / 9


class Counts(Summarises):
    """Python sees how many there are."""

    def forward(self, x):
        return x * self.picks(x).shape[0] if len(self.picks(x)) < 100 else x


@pytest.mark.full
@pytest.mark.parametrize("make", [Fills, Averages, Summarises, Counts])
def test_the_smallest_module_whose_results_have_fixed_shapes_is_the_opaque_module(make, caplog):
    model = Net(make())
    optimised = ogc.optimize(model, X, memory_budget="least")
    assert {op.module for op in opaque_calls(optimised.graph)} == {"body.0.1"}
    (record,) = (r for r in caplog.records if "as they are" in r.getMessage())
    assert "whose result has a shape that depends on the data, at test_opaque_guard.py:" in record.getMessage()
    for data in (X, -X, X.flip(0) * 3, batch(5), batch(7)):
        assert_same_training(model, optimised, (data,), steps=1)
        assert_same_training(model, forced(model, X), (data,), steps=1)


class PicksAtRoot(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.picks = nn.Linear(6, 6), Picks()

    def forward(self, x):
        return self.layer(self.picks(self.layer(x)))


def test_shapes_of_data_that_leave_every_submodule_are_refused():
    with pytest.raises(
        ParseError, match=r"aten::index, whose result has a shape that depends on the data.*fixed shapes"
    ):
        ogc.optimize(PicksAtRoot(), X, memory_budget="least")


def test_an_opaque_module_by_hand_whose_result_changes_its_shape_is_found_before_training():
    """Other inputs than the sample's show it."""
    with pytest.raises(ParseError, match=r"opaque module picks returned .* where it returned"):
        forced(PicksAtRoot(), X, opaque_modules=["picks"])


# -- hooks ---------------------------------------------------------------------------------------------------


def test_a_hook_that_comes_later_runs_the_plain_model_and_once(opened, caplog):
    model = Net(hooked())
    optimised = ogc.optimize(model, X, memory_budget=0.9)
    seen = []
    handle = model.last[1].register_forward_hook(lambda module, given, result: seen.append(1))
    opened.clear()
    assert_same_training(model, optimised, (X,), steps=1)
    assert len(seen) == 2 and not opened
    assert "module last.1 has got hooks since the model was optimized" in caplog.text
    handle.remove()
    assert_same_training(model, optimised, (X,), steps=1)
    assert len(seen) == 2 and opened


def test_a_hook_that_goes_is_not_missed(opened):
    model = Net(nn.Tanh())
    handle = model.body[0][1].register_forward_hook(lambda module, given, result: result * 1.5)
    optimised = ogc.optimize(model, X, memory_budget="least")
    handle.remove()
    assert_same_training(model, optimised, (X,), steps=1)


# -- what is handed on ---------------------------------------------------------------------------------------


class HandsOn(nn.Module):
    """An opaque module that returns what it is given as another function of it sees the same memory."""

    def __init__(self, seen_as):
        super().__init__()
        self.seen_as = seen_as

    def forward(self, *given):
        return self.seen_as(*given)


WIDE = torch.rand(20, 8)


@pytest.mark.parametrize("sample", [WIDE[:5, :7], WIDE[5:10, 1:], torch.rand(5, 7)], ids=["first", "later", "alone"])
@pytest.mark.parametrize("rows", [0, 5, 10])
def test_a_part_of_the_input_is_handed_on_wherever_the_input_lies(sample, rows):
    model = nn.Sequential(HandsOn(lambda x: x[:, 1:]), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
    optimised = forced(model, sample, opaque_modules=["0"])
    given = WIDE[rows : rows + 5, :7] if sample.stride(0) == 8 else torch.rand(20, 7)[rows : rows + 5]
    assert_same_training(model, optimised, (given,))


class Complex(nn.Module):
    def __init__(self, seen_as):
        super().__init__()
        self.real, self.imaginary, self.handed = nn.Linear(6, 6), nn.Linear(6, 6), HandsOn(seen_as)

    def forward(self, x):
        given = torch.complex(self.real(x).tanh(), self.imaginary(x).tanh())
        seen = self.handed(given)
        return torch.view_as_real(seen.exp() * given).sin() if seen.is_complex() else (seen.exp() * seen).sin()


@pytest.mark.parametrize("seen_as", [torch.conj, torch.view_as_real, lambda x: x.T], ids=["conj", "real", "transposed"])
def test_memory_that_is_taken_for_something_else_is_not_handed_on_as_it_is(seen_as):
    model, x = Complex(seen_as), torch.rand(6, 6)
    graph = ogc.parse(model, x, opaque_modules=["handed"])
    plan = ogc.make_plan(graph, [ogc.recomputed(0, len(graph))])
    assert_same_training(model, ogc.apply(model, graph, plan), (x,))


class Handed(nn.Module):
    """An opaque module that is given something and a part of it, and hands on a part of the part."""

    def __init__(self):
        super().__init__()
        self.first, self.opaque, self.last = nn.Linear(8, 8), HandsOn(lambda x, y: y[:, 1:]), nn.Linear(6, 6)

    def forward(self, x):
        x = self.first(x).sigmoid()
        return self.last(self.opaque(x, x[:, 1:])).tanh()


class WritesOne(nn.Module):
    """Reads one input, and then writes another one, which may share its memory."""

    def __init__(self):
        super().__init__()
        self.first, self.last = wide_layers(), wide_layers()

    def forward(self, x, y):
        found = self.first(y.sigmoid())
        x.mul_(2)
        return found + self.last(x.sigmoid())


def wide_layers():
    return nn.Sequential(*(module for _ in range(6) for module in (nn.Linear(8, 8), nn.Tanh())))


def test_what_is_given_as_a_whole_and_as_a_part_of_it_is_so_in_planning():
    model = Handed()
    assert_same_training(model, forced(model, torch.rand(5, 8), opaque_modules=["opaque"]), (torch.rand(20, 8)[5:10],))


def overlapping(kind):
    rows = torch.linspace(0, 1, 9600).view(1200, 8)
    numbers = rows.numpy()
    return {
        "apart": (rows[:800].clone(), rows[400:].clone()),
        "views": (rows[:800], rows[400:]),
        "the same": (rows[:800], rows[:800]),
        "numpy's": (torch.from_numpy(numbers[:800]), torch.from_numpy(numbers[400:])),
    }[kind]


@pytest.mark.parametrize("sample", ["apart", "views"])
def test_inputs_that_are_written_may_share_memory_in_some_calls(sample):
    model = WritesOne()
    optimised = ogc.optimize(model, overlapping(sample), memory_budget="least")
    assert hasattr(optimised, "report")
    for kind in ("apart", "views", "the same", "numpy's"):
        losses = [loss_of(run(*overlapping(kind))) for run in (model, optimised)]
        gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
        assert all(map(torch.equal, *gradients)) and torch.equal(*losses), kind
