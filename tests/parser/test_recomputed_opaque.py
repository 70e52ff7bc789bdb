"""Opaque modules that the user lets be recomputed are, and every such call is verified."""

import gc
import json
import os
import random
import re
import weakref

import pytest
import torch
from helpers import assert_same_training, loss_of, measured_peak, random_tree
from test_opaque import (
    PARTS,
    Branch,
    Cube,
    Drops,
    Net,
    Pytrees,
    TakesPytrees,
    Wide,
    X,
    assert_same_higher_gradients,
    opaque_calls,
)
from torch import nn

import ogc
from ogc.errors import ReplayError
from ogc.parser import opaque
from ogc.torch_state.allocator import peak_bytes
from ogc.torch_state.compare import fingerprint

CALLED_ONCE = {
    "batch norm inside": "writes a buffer, or what it is given",
    "assigned buffer": "writes a buffer, or what it is given",
    "cumulative batch norm": "writes a buffer, or what it is given",
    "forward hook": "has hooks, which would be called again",
    "hook on an in-place module": "has hooks, which would be called again",
    "hook on a module that does nothing": "has hooks, which would be called again",
    "backward hook": "has hooks, which would be called again",
    "reentrant checkpoint": "keeps 0.0048",  # the random state, some bytes more or less
}


def called_again(optimised):
    return "frame.recompute(" in optimised.code


def plans_that_recompute_it(model, graph, count):
    """Random plans, as modules, that call an opaque module again."""
    rng, found = random.Random(5), []
    while len(found) < count:
        optimised = ogc.apply(model, graph, ogc.make_plan(graph, random_tree(graph, rng)))
        found += [optimised] if not optimised.plan.is_plain and called_again(optimised) else []
    return found


@pytest.mark.full
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("name", PARTS)
def test_training_is_bitwise_the_plain_models(name, twice, caplog):
    model = Net(PARTS[name](), twice)
    graph = ogc.parse(model, X, recompute_opaque=True)
    assert_same_training(model, ogc.optimize(model, X, recompute_opaque=True, memory_budget="least"), (X,))
    if name in CALLED_ONCE:
        assert not any(op.replayable for op in opaque_calls(graph))
        assert f"cannot recompute these opaque modules: body.0.1 ({CALLED_ONCE[name]}" in caplog.text
    elif name != "checkpoint":  # which is no opaque module
        assert all(op.replayable for op in opaque_calls(graph))
        assert "never recomputes" not in caplog.text
        for optimised in plans_that_recompute_it(model, graph, 8):
            assert_same_training(model, optimised, (X,), steps=2)


def wholly(model, x, **kwargs):
    """The model with a plan that runs all of it again."""
    graph = ogc.parse(model, x, **kwargs)
    return ogc.apply(model, graph, ogc.make_plan(graph, [ogc.recomputed(0, len(graph))], low_memory=graph.low_memory))


class OneWayOrTheOther(nn.Module):
    """Saves differently many tensors on each."""

    def forward(self, x):
        y = x.tanh()
        return (y.sin() * y.exp() if x.sum() > 0 else y) * x


class Scales(nn.Module):
    """What comes after it depends on a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return x * self.scale


def test_the_data_may_take_another_way_in_each_step():
    x = X.abs().requires_grad_()
    model = nn.Sequential(Scales(), OneWayOrTheOther(), nn.Linear(6, 6), nn.Tanh(), Branch())
    optimised = wholly(model, x, recompute_opaque=["1"])
    assert called_again(optimised)
    for _ in range(2):
        for given in (x, (-X.abs()).requires_grad_(), 3 * x.detach()):
            assert_same_training(model, optimised, (given,), steps=1)


class Ends(nn.Module):
    """Its results are saved by itself; one of them stays in memory, as the model returns it."""

    def forward(self, x):
        if x.sum() > 1e9:
            return x, x
        y = x.tanh()
        return y, y.exp().sigmoid()


class ReturnsResults(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.ends, self.last = nn.Linear(6, 6), Ends(), nn.Linear(6, 6)

    def forward(self, x):
        y, z = self.ends(self.first(x).sigmoid())
        return y, self.last((y * z).sin())


def test_results_that_stay_in_memory_are_not_made_twice():
    model = ReturnsResults()
    optimised = wholly(model, X, recompute_opaque=[Ends])
    assert "results=[0]" in optimised.code
    assert_same_training(model, optimised, (X,))
    wide = torch.randn(1000, 6)
    optimised = wholly(model, wide, recompute_opaque=[Ends])
    returned = []

    def step():
        returned[:] = optimised(wide)
        loss_of(returned).backward()

    step()
    returned.clear()
    assert peak_bytes(step, "cpu") == pytest.approx(optimised.plan.peak_bytes, rel=0.03)


def test_arguments_and_results_may_be_nested():
    model = TakesPytrees()
    graph = ogc.parse(model, X, opaque_modules=[Pytrees], recompute_opaque=["part"])
    for optimised in plans_that_recompute_it(model, graph, 4):
        assert_same_training(model, optimised, (X,))


def test_double_backward_and_a_graph_that_is_kept():
    model = Net(Branch())
    x = X.clone().requires_grad_()
    graph = ogc.parse(model, x, recompute_opaque=True)
    for optimised in plans_that_recompute_it(model, graph, 4):
        assert_same_higher_gradients(model, optimised, x)


def test_a_step_leaves_nothing_behind():
    model = Net(Branch())
    optimised = wholly(model, X, recompute_opaque=True)
    gc.disable()
    try:
        for backward in (True, False):
            result = optimised(X)
            ref = weakref.ref(result.grad_fn)
            if backward:
                loss_of(result).backward()
            del result
            assert ref() is None, "a reference cycle keeps the graph"
    finally:
        gc.enable()


class DrawsRarely(nn.Module):
    """Draws random numbers for some data alone, not for that of the sample."""

    def forward(self, x):
        return nn.functional.dropout(x, 0.5) if x.sum() < 0 else x.sin().exp()


def test_random_numbers_that_only_some_data_call_for():
    model = nn.Sequential(DrawsRarely(), nn.Linear(6, 6), nn.Tanh(), Drops())
    x = X.abs().requires_grad_()
    optimised = wholly(model, x, recompute_opaque=True)
    assert called_again(optimised)
    for given in (x, (-X.abs()).requires_grad_()):
        assert_same_training(model, optimised, (given,), steps=2)


class DropsByData(nn.Module):
    """Branches on what it computes, and draws random numbers on either way."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        y = nn.functional.dropout(self.layer(x).tanh(), 0.4)
        return nn.functional.dropout(y.exp(), 0.3) * x if y.sum() > 0 else y.sin() * torch.rand_like(x)


class SkipsByChance(nn.Module):
    """How much of it is computed is drawn, and so is what that gives."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        y = x.tanh().exp()
        return y + (self.layer(y).sigmoid() * torch.randn(6) if torch.rand(()) < 0.5 else 0)


@pytest.mark.parametrize("make", [DropsByData, SkipsByChance])
@pytest.mark.full
def test_opaque_modules_that_draw_torchs_random_numbers_are_called_again_unasked(make, caplog):
    model = Net(make())
    optimised = wholly(model, X)
    assert called_again(optimised) and "never recomputes" not in caplog.text
    assert_same_training(model, optimised, (X,), steps=8)
    loss = loss_of(optimised(X))
    weights = [model.first[0].weight, model.body[0][0].weight]
    first, again = (torch.autograd.grad(loss, weights, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, again))
    assert not any(op.replayable for op in opaque_calls(ogc.parse(model, X, recompute_opaque=False)))


@pytest.mark.full
@pytest.mark.parametrize("inside", [torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_autocast_and_no_grad_around_an_opaque_module(inside):
    class Within(Net):
        def forward(self, x):
            x = self.first(x)
            with inside():
                y = self.body[0](x)
            return self.last((y + x).sin())

    model = Within(Branch())
    graph = ogc.parse(model, X, recompute_opaque=True)
    assert_same_training(model, wholly(model, X, recompute_opaque=True), (X,))
    for optimised in plans_that_recompute_it(model, graph, 3):
        assert_same_training(model, optimised, (X,), steps=2)


def test_another_size_is_planned_for():
    model = Net(Branch())
    optimised = ogc.optimize(model, X, recompute_opaque=True, memory_budget="least", effort=0)
    assert called_again(optimised)
    for size in (5, 3, 8):
        assert_same_training(model, optimised, (torch.randn(size, 6),), steps=1)


# -- calls that are not repeatable -------------------------------------------------------------------------

AT_FIRST = {"order": [0, 1, 2, 3, 4, 5], "calls": 0, "scale": 1.0}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("OUTSIDE", json.dumps(AT_FIRST))


def outside(**changes):
    """What the environment holds, which nobody can watch, after a change."""
    found = json.loads(os.environ["OUTSIDE"]) | changes
    os.environ["OUTSIDE"] = json.dumps(found)
    return found


class Leans(nn.Module):
    """Depends on what is neither its own nor given."""

    def __init__(self, on):
        super().__init__()
        self.on = on

    def forward(self, x):
        found = outside(calls=outside()["calls"] + 1)
        if x.sum() > 1e9:
            return x
        if self.on == "order":
            x = x[:, found["order"]]
        elif self.on == "number":
            x = x.sin() if found["calls"] > 100 else x
        else:
            x = x * found["scale"]
        return x.cos()


@pytest.mark.parametrize(
    ("on", "change"), [("order", {"order": [1, 0, 2, 3, 5, 4]}), ("number", {"calls": 200}), ("scale", {"scale": 2.0})]
)
def test_a_call_that_differs_from_the_first_is_an_error(on, change):
    model = Net(Leans(on))
    optimised = wholly(model, X, recompute_opaque=True)
    assert_same_training(model, optimised, (X,))
    loss = loss_of(optimised(X))
    outside(**change)
    with pytest.raises(
        ReplayError, match=r"opaque module body.0.1 saved or returned something else when it was recomputed"
    ):
        loss.backward()


def test_a_parameter_that_changes_before_the_backward_is_an_error():
    model = Net(Branch())
    optimised = wholly(model, X, recompute_opaque=True)
    loss = loss_of(optimised(X))
    with torch.no_grad():
        model.body[0][1].layer.weight.mul_(2)
    with pytest.raises(ReplayError, match=r"body\.0\.1\.layer\.weight was modified in place"):
        loss.backward()


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x.sin() if x.sum() < 1e9 else x


class DrawsPython(nn.Module):
    def forward(self, x):
        return (x.sin() if x.sum() < 1e9 else x) * (1 + random.random())


class Writes(nn.Module):
    def forward(self, x):
        return x.mul_(3) * 2 if x.sum() < 1e9 else x


class Hides(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.held = x.sin()
        return x.exp()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.held


class HoldsPastAutograd(nn.Module):
    def forward(self, x):
        return Hides.apply(x)


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (Remembers, "changes its attribute calls"),
        (DrawsPython, "draws random numbers of Python or numpy"),
        (Writes, "writes a buffer, or what it is given"),
        (HoldsPastAutograd, r"keeps 0\.0229 MiB for its backward that autograd does not know of"),
    ],
)
def test_what_is_seen_not_to_be_repeatable_is_called_once(part, why, caplog):
    model = nn.Sequential(nn.Tanh(), nn.Linear(6, 6), part(), nn.Linear(6, 6))
    graph = ogc.parse(model, torch.randn(1000, 6), opaque_modules=[part], recompute_opaque=[part])
    assert [op.replayable for op in opaque_calls(graph)] == [False]
    assert re.search(rf"ogc cannot recompute these opaque modules: 2 \({why}\)", caplog.text)


def test_a_second_call_that_computes_something_else_is_seen(monkeypatch, caplog):
    states = opaque.python_random_state

    def and_change():  # it is asked for before and after the first call
        outside(scale=outside()["scale"] + 1)
        return states()

    monkeypatch.setattr(opaque, "python_random_state", and_change)
    model = Net(nn.Sequential(nn.Tanh(), nn.Linear(6, 6), Leans("scale")))
    graph = ogc.parse(model, X, opaque_modules=[Leans], recompute_opaque=[Leans])
    assert not any(op.replayable for op in opaque_calls(graph))
    assert "computes something else when it is recomputed" in caplog.text


def test_an_opaque_module_that_returns_a_view_is_called_once(caplog):
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Flatten(0))
    graph = ogc.parse(model, X, opaque_modules=["2"], recompute_opaque=["2"])
    assert [op.replayable for op in opaque_calls(graph)] == [False]
    assert "2 (returns a view of what it is given)" in caplog.text


def test_the_model_is_as_before_an_opaque_module_was_tried():
    model = nn.Sequential(nn.Linear(6, 6), Remembers(), Drops())
    state = torch.get_rng_state()
    ogc.parse(model, X, opaque_modules=["1"], recompute_opaque=True)
    assert model[1].calls == 0
    assert torch.equal(torch.get_rng_state(), state)


# -- which modules are meant --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ([], [False, False]),
        (False, [False, False]),
        (["1"], [True, False]),
        ([Branch], [True, True]),
        (["2"], [False, True]),
        (["2.1", "1"], [True, True]),
        (True, [True, True]),
    ],
)
def test_opaque_modules_are_chosen_by_name_and_by_type_with_what_is_in_them(chosen, expected):
    model = nn.Sequential(nn.Linear(6, 6), Branch(), nn.Sequential(nn.Tanh(), Branch()))
    graph = ogc.parse(model, X, recompute_opaque=chosen)
    assert [op.replayable for op in opaque_calls(graph)] == expected


# -- memory ------------------------------------------------------------------------------------------------


class Routes(nn.Module):
    """One of two ways, with large activations inside."""

    def __init__(self):
        super().__init__()
        self.ways = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2))

    def forward(self, x):
        return x + self.ways[int(x.sum() > 0)](x)


@pytest.mark.full
@pytest.mark.parametrize("profile", ["estimate", "measure"])
def test_calling_again_saves_what_opaque_modules_keep_and_the_allocator_agrees(profile):
    model, x = nn.Sequential(*(Routes() for _ in range(8)), nn.Linear(64, 1)), torch.randn(2000, 64)
    peaks = []
    for chosen in ((), [Routes]):
        graph = ogc.parse(model, x, profile=profile, recompute_opaque=chosen)
        plan = ogc.solve(graph, memory_budget="least")
        optimised = ogc.apply(model, graph, plan)
        assert measured_peak(optimised, (x,)) == pytest.approx(plan.peak_bytes, rel=0.03)
        peaks.append(plan.peak_bytes / plan.plain_peak_bytes)
    assert peaks[0] > 0.8 and peaks[1] < 0.45
    assert_same_training(model, optimised, (x,), steps=1)


@pytest.mark.full
@pytest.mark.parametrize("profile", ["estimate", "measure"])
def test_the_allocator_agrees_on_random_plans(profile):
    model, x = Wide(), torch.randn(4, 1, 64, 64)
    model.opaque[0][0] = nn.GroupNorm(2, 16)
    graph = ogc.parse(model, x, profile=profile, opaque_modules=["opaque"], recompute_opaque=["opaque"])
    assert [op.replayable for op in opaque_calls(graph)] == [True]
    for optimised in plans_that_recompute_it(model, graph, 6):
        assert measured_peak(optimised, (x,)) == pytest.approx(optimised.plan.peak_bytes, rel=0.03)


def test_slicing_the_batch_beside_an_opaque_module_that_is_recomputed():
    model, x = Wide(), torch.randn(4, 1, 64, 64)
    model.opaque[0][0] = nn.GroupNorm(2, 16)
    chosen = {"opaque_modules": ["opaque"], "recompute_opaque": ["opaque"]}
    optimised = ogc.optimize(model, x, chunks=2, **chosen)
    assert [op.replayable for op in opaque_calls(optimised.graph)] == [True]
    loss_of(optimised(x)).backward()


# -- fingerprints ------------------------------------------------------------------------------------------

KINDS = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int16, torch.int64, torch.float8_e4m3fn),
]


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 5), (1, 4, 2), (300, 1200)])
def test_a_fingerprint_is_of_the_contents_alone(shape, dtype):
    tensor = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    mark = fingerprint(tensor)
    assert mark.dtype == torch.int64 and mark.shape == ()
    assert fingerprint(tensor.clone()) == mark
    if len(shape) == 2:
        assert fingerprint(tensor.repeat(1, 2)[:, : shape[1]]) == mark
        assert fingerprint(torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(shape)) == mark  # elsewhere


def test_a_fingerprint_tells_bits_and_their_order():
    x = torch.arange(40000, dtype=torch.float32).view(200, 200)
    others = [
        x.t().contiguous(),
        x.flip(0),
        x.flip(1),
        x[torch.randperm(200)],
        x.roll(1, 1),
        x.view(100, 400).roll(200, 1),
    ]
    others += [x.nextafter(x + 1), -x, x.view(400, 100)[:, torch.randperm(100)].view(200, 200)]
    marks = {int(fingerprint(tensor)) for tensor in (x, *others)}
    assert len(marks) == len(others) + 1
    nan, zero = torch.tensor([float("nan"), 0.0]), torch.tensor([float("nan"), -0.0])
    assert fingerprint(nan) == fingerprint(nan.clone()) != fingerprint(zero)


def test_a_custom_function_whose_result_is_saved():
    class Saves(nn.Module):
        def forward(self, x):
            return Cube.apply(Cube.apply(x.sin()))

    model = nn.Sequential(nn.Linear(6, 6), Saves(), nn.Linear(6, 6))
    assert_same_training(model, wholly(model, X, recompute_opaque=True), (X,))


class HandedOn(nn.Module):
    """A layer that also returns what it is given: a part of something wider, as layers that share keys do."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(7, 7)

        def forward(self, x):
            return self.linear(x).tanh(), x

    def __init__(self):
        super().__init__()
        self.layer = self.Layer()

    def forward(self, x):
        result, given = self.layer(x.sigmoid()[:, 1:])
        return result * given


def test_parts_of_tensors_are_handed_on_as_they_lie():
    model, x = HandedOn(), torch.randn(4, 8)
    optimised = ogc.optimize(model, x, opaque_modules=["layer"], memory_budget="least")
    assert_same_training(model, optimised, (x,))
