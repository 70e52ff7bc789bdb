"""What no trace can hold is called as it is, in one piece, and the numbers are the plain model's."""

import gc
import logging
import random
import warnings
import weakref

import pytest
import torch
from helpers import assert_same_training, forced, loss_of, measured_peak, random_plans
from torch import nn
from torch.utils.checkpoint import checkpoint

import ogc
from ogc.errors import InputError, ParseError, ReplayError


class Branch(nn.Module):
    """Takes one way or the other, and saves differently many tensors on each."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        y = self.layer(x).tanh()
        if y.sum() > 0:
            y = y.sin() * y.exp()
        return y * x


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


class Custom(nn.Module):
    def forward(self, x):
        return Cube.apply(x)


class Reentrant(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=True)


class NotReentrant(Reentrant):
    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=False)


class Drops(Branch):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.4)


class Norms(Branch):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return self.norm(super().forward(x))


class Counts(nn.Module):
    """Assigns its buffer anew."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.mean = self.mean * 0.9 + x.mean(0).detach() * 0.1
        return x - self.mean


class WritesWithoutGrad(nn.Module):
    def forward(self, x):
        x = x.sin()
        with torch.no_grad():
            x.mul_(2)
        return x


class Cumulative(nn.BatchNorm1d):
    def __init__(self):
        super().__init__(6, momentum=None)


def sine_or_not(x):
    if bool(x.sum() > 0):
        x = x.sin()
    return x.cos()


def script(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(module)


class CallsScript(nn.Module):
    def __init__(self):
        super().__init__()
        self.function = script(sine_or_not)

    def forward(self, x):
        return self.function(x)


class PenalizedInside(nn.Module):
    """Runs a backward pass in its forward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(self.layer(x).tanh().square().sum(), x, create_graph=True)
        if gradient.sum() > 1e9:
            gradient = gradient * 2
        return x + gradient


def hooked(module=None):
    module = module or nn.Linear(6, 6)
    module.register_forward_hook(lambda module, given, result: result * 1.5)
    return module


def hooked_before():
    module = nn.Linear(6, 6)
    module.register_full_backward_pre_hook(lambda module, gradient: (gradient[0] * 2,))
    return module


class Net(nn.Module):
    """The part between operators that can be recomputed."""

    def __init__(self, part, twice=False):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Sigmoid())
        self.body = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), part)])
        self.last = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Sigmoid())
        self.twice = twice

    def forward(self, x):
        x = self.first(x)
        for _ in range(1 + self.twice):
            x = self.body[0](x) + x
        return self.last(x.sin())


PARTS = {
    "branch": Branch,
    "custom function": Custom,
    "reentrant checkpoint": Reentrant,
    "checkpoint": NotReentrant,
    "dropout inside": Drops,
    "batch norm inside": Norms,
    "assigned buffer": Counts,
    "write without grad": WritesWithoutGrad,
    "cumulative batch norm": Cumulative,
    "scripted function": CallsScript,
    "scripted module": lambda: script(nn.Sequential(nn.Linear(6, 6), nn.Tanh())),
    "forward hook": hooked,
    "hook on an in-place module": lambda: hooked(nn.ReLU(inplace=True)),
    "hook on a module that does nothing": lambda: hooked(nn.Identity()),
    "backward hook": hooked_before,
    "backward inside": PenalizedInside,
}
X = torch.randn(5, 6, generator=torch.Generator().manual_seed(2))


def opaque_calls(graph):
    return [op for op in graph.operations if op.target.startswith("opaque ")]


def plans(graph, count):
    """Random plans that recompute something."""
    rng, found = random.Random(3), []
    while len(found) < count:
        found += [plan for plan in random_plans(graph, rng, 1) if not plan.is_plain]
    return found


@pytest.mark.full
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("name", PARTS)
def test_training_is_bitwise_the_plain_models(name, twice):
    model = Net(PARTS[name](), twice)
    graph = ogc.parse(model, X)
    if name != "checkpoint":
        assert {op.module for op in opaque_calls(graph)} == {"body.0.1"}
        assert len(opaque_calls(graph)) == 1 + twice
    assert_same_training(model, ogc.optimize(model, X, memory_budget="least"), (X,))
    for plan in plans(graph, 8):
        assert_same_training(model, ogc.apply(model, graph, plan), (X,), steps=2)


class Pytrees(nn.Module):
    """Takes and returns tensors in dicts and tuples, and constants beside them."""

    def forward(self, pair, *, scale, named, size):
        x, y = pair
        assert type(size) is int
        return {"sum": x * scale + named["z"], "rest": (y.tanh(), None, "text"), "given": named["z"]}


class TakesPytrees(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.part = Pytrees()
        self.last = nn.Linear(6, 6)

    def forward(self, x):
        y = self.first(x).sigmoid()
        found = self.part((y.sin(), y), scale=2.0, named={"z": y.cos()}, size=x.shape[0])
        assert found["rest"][1:] == (None, "text")
        return self.last((found["sum"] * found["rest"][0]).sigmoid() + found["given"].tanh())


def test_arguments_and_results_may_be_nested():
    model = TakesPytrees()
    graph = ogc.parse(model, X, opaque_modules=["part"])
    assert [op.module for op in opaque_calls(graph)] == ["part"]
    for plan in plans(graph, 4):
        assert_same_training(model, ogc.apply(model, graph, plan), (X,))


class Views(nn.Module):
    """A hooked module whose result is a view of what it is given, in the middle of what is recomputed."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.flatten = nn.Flatten(0)
        self.flatten.register_forward_hook(lambda module, given, result: None)

    def forward(self, x):
        for layer in self.layers:
            x = torch.sigmoid(self.flatten(layer(x).tanh()).view(5, 6).exp())
        return x


def test_a_view_that_an_opaque_module_returns_is_made_anew_with_its_base():
    model = Views()
    graph = ogc.parse(model, X)
    assert len(opaque_calls(graph)) == 4
    assert_same_training(model, ogc.apply(model, graph, ogc.make_plan(graph, [ogc.recomputed(0, len(graph))])), (X,))


def test_a_hook_runs_once_for_each_call_and_sees_what_it_saw():
    model = Net(nn.Linear(6, 6), twice=True)
    seen = []
    model.body[0][1].register_forward_hook(lambda module, given, result: seen.append(result.detach().clone()))
    graph = ogc.parse(model, X)
    (plan,) = plans(graph, 1)
    results = []
    for run in (model, ogc.apply(model, graph, plan)):
        seen.clear()
        loss_of(run(X)).backward()
        results.append(list(seen))
    assert len(results[0]) == len(results[1]) == 2
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class CallsForNothing(nn.Module):
    """Calls modules whose results nobody needs, or are what they were given."""

    def __init__(self):
        super().__init__()
        self.first, self.probe, self.last = nn.Linear(6, 6), nn.Identity(), nn.Linear(6, 6)

    def forward(self, x):
        x = self.probe(self.first(x).sigmoid()).sin()
        self.probe(x.exp())
        return self.last(x.tanh())


def test_a_hook_runs_where_nothing_depends_on_it():
    model = CallsForNothing()
    seen = []
    model.probe.register_forward_hook(lambda module, given, result: seen.append(float(result.detach().sum())))
    graph = ogc.parse(model, X)
    for plan in plans(graph, 3):
        results = []
        for run in (model, ogc.apply(model, graph, plan)):
            seen.clear()
            loss_of(run(X)).backward()
            results.append(list(seen))
        assert results[0] == results[1] and len(seen) == 2


def test_a_step_with_an_opaque_module_leaves_nothing_behind():
    model = Net(Branch())
    graph = ogc.parse(model, X)
    decisions = plans(graph, 1)[0].decisions
    optimised = ogc.apply(model, graph, ogc.make_plan(graph, decisions, low_memory=graph.low_memory))
    gc.disable()
    try:
        result = optimised(X)
        ref = weakref.ref(result.grad_fn)
        loss_of(result).backward()
        del result
        assert ref() is None, "a reference cycle keeps the graph"
    finally:
        gc.enable()


def assert_same_higher_gradients(model, optimised, x):
    """Bitwise the plain model's, of a graph that is kept and of gradients' gradients."""
    results = []
    for run in (model, optimised):
        loss = loss_of(run(x))
        kept = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        again = torch.autograd.grad(loss, list(model.parameters()))
        (gradient,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        results.append([*kept, *again, *torch.autograd.grad(gradient.square().sum(), model.first[0].weight)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_double_backward_and_a_graph_that_is_kept():
    model = Net(Branch())
    x = X.clone().requires_grad_()
    graph = ogc.parse(model, x)
    for plan in plans(graph, 4):
        assert_same_higher_gradients(model, ogc.apply(model, graph, plan), x)


def test_batch_norm_in_an_opaque_module_counts_each_step_once():
    model = Net(Norms())
    optimised = forced(model, X)
    for _ in range(3):
        loss_of(optimised(X)).backward()
    assert model.body[0][1].norm.num_batches_tracked == 3


class Remembers(nn.Module):
    """Counts its calls in Python and scales by the count."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return Cube.apply(x) * self.calls


def test_python_state_is_as_before():
    model = Net(Remembers())
    optimised = ogc.optimize(model, X, memory_budget="least")
    assert model.body[0][1].calls == 0
    results = [optimised(X) for _ in range(2)]
    model.body[0][1].calls = 0
    assert all(torch.equal(model(X), result) for result in results)


@pytest.mark.full
def test_opaque_modules_are_named_once_with_the_reason(caplog):
    model = nn.Sequential(Net(Branch()), Net(Custom()), Net(hooked()))
    with caplog.at_level(logging.WARNING):
        ogc.parse(model, X)
    again, never = (record.getMessage() for record in caplog.records)
    text = never + again
    assert "never recomputes" in never and "never recomputes" not in again
    assert "0.body.0.1 (bool() of a tensor at " in text and "test_opaque.py:" in text
    assert "1.body.0.1" not in text  # the custom function alone is an opaque module
    assert "2.body.0.1 (has forward or backward hooks)" in text


def test_autocast_and_no_grad_around_an_opaque_module():
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.part, self.frozen, self.last = nn.Linear(6, 6), Branch(), Branch(), nn.Linear(6, 6)

        def forward(self, x):
            x = self.first(x).sigmoid()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.part(x.tanh())
            with torch.no_grad():
                goal = self.frozen(x)
            return self.last((y.float() * goal).sigmoid())

    model = Around()
    graph = ogc.parse(model, X)
    assert [op.module for op in opaque_calls(graph)] == ["part", "frozen"]
    for plan in plans(graph, 4):
        assert_same_training(model, ogc.apply(model, graph, plan), (X,))


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.full
def test_an_opaque_module_under_the_callers_autocast(twice):
    model = Net(Branch(), twice)

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.head = model, nn.Linear(6, 6)

        def forward(self, x):
            return self.head(self.net(x))

    whole = Scaled()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph = ogc.parse(whole, X)
    assert {op.module for op in opaque_calls(graph)} == {"net" if twice else "net.body.0.1"}
    for plan in plans(graph, 4):
        results = []
        for run in (whole, ogc.apply(whole, graph, plan)):
            whole.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(run(X))
            loss.backward()
            results.append([p.grad.clone() for p in whole.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# -- what leaks out of an opaque module ------------------------------------------------------------------------------


class KeepsAside(Branch):
    """Leaves a tensor behind for others."""

    def forward(self, x):
        result = super().forward(x)
        self.aside = result.square().mean()
        return result


class ReadsAside(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), KeepsAside())

    def forward(self, x):
        return self.inner(x) + self.inner[1].aside


class ReadsAsideAtRoot(ReadsAside):
    def forward(self, x):
        self.inner(x)
        return x * self.inner[1].aside


class GivesAside(nn.Module):
    """Hands a tensor over as an attribute."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), UsesAside())

    def forward(self, x):
        self.inner[1].aside = x.sin()
        return self.inner(x)


class UsesAside(Branch):
    def forward(self, x):
        return super().forward(x) * self.aside


class ReturnsNumber(nn.Module):
    def forward(self, x):
        return x.sin(), float(x.sum())


class UsesNumber(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = ReturnsNumber()

    def forward(self, x):
        y, number = self.inner(x)
        return y * number


class Box:
    def __init__(self, tensor):
        self.tensor = tensor


class ReturnsBox(Branch):
    def forward(self, x):
        return Box(super().forward(x))


class UsesBox(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = ReturnsBox()

    def forward(self, x):
        return self.inner(x).tensor.exp()


class MaybeItself(nn.Module):
    def forward(self, x):
        return x if x.sum() < 1e9 else x * 2


class UsesMaybe(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = MaybeItself()

    def forward(self, x):
        return self.inner(x.sin()) * 2


@pytest.mark.parametrize("make", [ReadsAside, GivesAside, UsesNumber, UsesMaybe])
def test_an_opaque_module_grows_until_nothing_leaks(make):
    model = Net(make())
    graph = ogc.parse(model, X)
    assert [op.module for op in opaque_calls(graph)] == ["body.0.1"]
    for plan in plans(graph, 4):
        assert_same_training(model, ogc.apply(model, graph, plan), (X,))


def test_an_object_that_holds_tensors_is_taken_apart():
    model = Net(UsesBox())
    graph = ogc.parse(model, X)
    assert [op.module for op in opaque_calls(graph)] == ["body.0.1.inner"]
    for plan in plans(graph, 4):
        assert_same_training(model, ogc.apply(model, graph, plan), (X,))


class Cache:
    """What layers hand on to one another, and the caller gets back."""

    def __init__(self):
        self.count = 0
        self.held = []
        self.last = None


class Caches(Branch):
    def forward(self, x, cache):
        cache.count += 1
        cache.last = super().forward(x)
        cache.held.append(cache.last.sin())
        return x + sum(cache.held)


class UsesCache(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = Caches(), Caches(), nn.Linear(6, 6)

    def forward(self, x, cache=None):
        cache = Cache() if cache is None else cache
        x = self.second(self.first(x, cache), cache)
        return {"result": self.last(x) + cache.held[0], "cache": cache}


@pytest.mark.parametrize("given", [False, True])
def test_what_an_opaque_module_changes_in_an_object_is_seen_outside(given):
    model = UsesCache()
    optimised = ogc.optimize(model, (X, Cache()) if given else X, memory_budget="least")
    assert [op.module for op in opaque_calls(optimised.graph)] == ["first", "second"]
    for seed in range(3):
        x, results = X + seed, []
        for run in (model, optimised):
            model.zero_grad()
            cache = Cache()
            found = run(x, cache) if given else run(x)
            assert not given or found["cache"] is cache
            (found["result"].sum() + found["cache"].last.sum() + found["cache"].held[1].sum()).backward()
            kept = found["cache"]
            results.append([found["result"], *kept.held, kept.last, *(p.grad.clone() for p in model.parameters())])
            assert kept.count == 2
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Branch, r"bool\(\) of a tensor at .*test_opaque.py:\d+.*submodule of its own"),
        (ReadsAsideAtRoot, "leaves the modules that would hide it: inner shares tensors"),
    ],
)
def test_what_only_the_whole_model_hides_is_no_opaque_module(make, message):
    with pytest.raises(ParseError, match=message):
        ogc.parse(make(), X)


def test_a_result_of_another_kind_is_an_error_and_not_a_wrong_number():
    class Shrinks(nn.Module):
        def forward(self, x):
            return x.sin() if x.sum() < 50 else x.sin()[:1]

    model = Net(Shrinks())
    optimised = forced(model, X)
    with torch.no_grad():
        model.body[0][0].bias.fill_(100)
    with pytest.raises(ReplayError, match=r"opaque module body.0.1 returned \(torch.float32 of shape \[1, 6\]"):
        optimised(X)


# -- opaque modules that are asked for -----------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [["body.0"], [nn.Sequential], ["first", nn.Linear]])
def test_opaque_modules_by_name_and_by_type(chosen, caplog):
    model = Net(nn.Tanh())
    optimised = ogc.optimize(model, X, opaque_modules=chosen, memory_budget="least")
    names = {op.module for op in opaque_calls(optimised.graph)}
    expected = {"body.0": {"body.0"}}.get(chosen[0], {"first", "body.0", "last"})
    if len(chosen) == 2:
        expected = {"first", "body.0.0", "last.0", "last.2"}
    assert names == expected
    assert "as they are" not in caplog.text
    assert_same_training(model, optimised, (X,))


cube = Cube.apply  # which nothing that is put in the place of ``apply`` is seen by


class Called(nn.Module):
    def forward(self, x):
        return cube(x.tanh()).exp()


class Through(torch.autograd.Function):
    """Calls a module, whose backward is its own."""

    @staticmethod
    def forward(ctx, x, module):
        with torch.enable_grad():
            ctx.ends = [x := x.detach().requires_grad_(), module(x)]
        return ctx.ends[1].detach()

    @staticmethod
    def backward(ctx, gradient):
        return torch.autograd.grad(ctx.ends[1], ctx.ends[0], gradient)[0], None


through = Through.apply


class CalledThrough(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x):
        return through(x, self.inner).tanh()


@pytest.mark.parametrize("part", [Called, CalledThrough])
def test_a_function_called_by_a_name_makes_an_opaque_module_of_the_module_that_calls_it(part):
    model = Net(part())
    optimised = forced(model, X)
    assert {op.module for op in opaque_calls(optimised.graph)} == {"body.0.1"}
    assert_same_training(model, optimised, (X,))


class Experts(nn.ModuleDict):
    """Sends each row to the expert that it asks for, as mixtures of experts do."""

    def __init__(self):
        super().__init__({str(n): nn.Sequential(nn.Linear(6, 6), nn.GELU()) for n in range(3)})

    def forward(self, x, chosen):
        y = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            (rows,) = torch.where(chosen == number)
            y.index_add_(0, rows, self[str(number)](x[rows]))
        return y


class ExpertList(nn.ModuleList):
    def __init__(self):
        super().__init__(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x, chosen):
        return torch.stack([self[number](row) for row, number in zip(x, chosen.tolist(), strict=True)])


class Routed(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.router, self.experts = nn.Linear(6, 3), experts

    def forward(self, x):
        return self.experts(x, self.router(x.tanh()).argmax(-1)).sigmoid()


@pytest.mark.full
@pytest.mark.parametrize("experts", [Experts, ExpertList])
def test_a_list_or_dict_with_a_forward_is_an_opaque_module_like_any_other(experts):
    model = Net(Routed(experts()))
    optimised = forced(model, X)
    assert {op.module for op in opaque_calls(optimised.graph)} == {"body.0.1.experts"}
    assert_same_training(model, optimised, (X,))
    asked = ogc.optimize(model, X, opaque_modules=[experts], memory_budget="least")
    assert {op.module for op in opaque_calls(asked.graph)} == {"body.0.1.experts"}


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (["body"], "'body' is a ModuleList, which is never called"),
        (["body.1"], "no submodule 'body.1'; the nearest are body.0"),
        ([nn.LSTM], "is a 'LSTM'; the nearest are "),
        (["first", 3], "names and types, not 3"),
        ("first", "must be a list of module names and types, not 'first'"),
        ([""], "no submodule ''"),
        (7, "must be a list"),
    ],
)
@pytest.mark.parametrize("argument", ["opaque_modules", "recompute_opaque"])
def test_bad_choices_of_opaque_modules(argument, chosen, message):
    with pytest.raises(InputError, match=f"^{argument}.* {message}"):
        ogc.optimize(Net(nn.Tanh()), X, **{argument: chosen})


# -- memory ------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Large activations, around and in an opaque module."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(*(self.block() for _ in range(4)))
        self.opaque = nn.Sequential(self.block(), nn.Conv2d(16, 16, 1), nn.Sigmoid(), nn.Conv2d(16, 16, 3, padding=1))
        self.last = nn.Sequential(*(self.block() for _ in range(4)))
        self.head = nn.Linear(16, 4)

    @staticmethod
    def block():
        return nn.Sequential(nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Conv2d(16, 16, 3, padding=1))

    def forward(self, x):
        x = self.first(x.expand(-1, 16, -1, -1).contiguous())
        x = self.last(self.opaque(x) + x)
        return self.head(x.mean((2, 3)))


@pytest.mark.full
@pytest.mark.parametrize("profile", ["estimate", "measure"])
def test_the_allocator_agrees(profile):
    model, x = Wide(), torch.randn(4, 1, 64, 64)
    graph = ogc.parse(model, x, profile=profile, opaque_modules=["opaque"])
    plain = ogc.solve(graph, solver="none")
    assert measured_peak(model, (x,)) == pytest.approx(plain.peak_bytes, rel=0.03)
    plan = ogc.solve(graph, memory_budget="least")
    assert plan.peak_bytes < 0.8 * plan.plain_peak_bytes
    assert measured_peak(ogc.apply(model, graph, plan), (x,)) == pytest.approx(plan.peak_bytes, rel=0.03)
    for plan in plans(graph, 5):
        assert measured_peak(ogc.apply(model, graph, plan), (x,)) == pytest.approx(plan.peak_bytes, rel=0.03)


def test_slicing_the_batch_beside_an_opaque_module():
    model, x = Wide(), torch.randn(4, 1, 64, 64)
    optimised = ogc.optimize(model, x, chunks=2, opaque_modules=["opaque"], memory_budget="least")
    assert [op.module for op in opaque_calls(optimised.graph)] == ["opaque"]
    loss_of(optimised(x)).backward()


class ByHand(nn.Module):
    """A model whose graph by hand calls its hooked module, or does its work without it."""

    def __init__(self, calls):
        super().__init__()
        self.first, self.last = hooked(nn.Identity()), nn.Linear(6, 6)
        self.calls = calls

    def forward(self, x):
        return self.last(self.first(x.sin()).tanh())

    def parse_graph(self, x):
        graph = torch.fx.Graph()
        node = graph.call_function(torch.sin, (graph.placeholder("x"),))
        node = graph.call_module("first", (node,)) if self.calls else graph.call_function(torch.mul, (node, 1.5))
        graph.output(graph.call_module("last", (graph.call_function(torch.tanh, (node,)),)))
        return graph


def test_graphs_by_hand_call_what_has_hooks():
    model = ByHand(calls=True)
    optimised = ogc.optimize(model, X, memory_budget="least")
    assert [op.module for op in opaque_calls(optimised.graph)] == ["first"]
    assert_same_training(model, optimised, (X,))
    with pytest.raises(ParseError, match="module first has forward or backward hooks, and the graph does not call it"):
        ogc.parse(ByHand(calls=False), X)


class FailsAtFirst(torch.autograd.Function):
    """Its backward fails in planning, and never again."""

    fails = True

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        if FailsAtFirst.fails:
            raise RuntimeError("not now")
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class Fickle(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.register_forward_hook(lambda *_: None)  # which makes it an opaque module

    def forward(self, x):
        return FailsAtFirst.apply(x, self.weight)


def test_parameters_get_gradients_after_a_backward_that_failed_in_planning():
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), Fickle()), torch.randn(3, 4)
    FailsAtFirst.fails = True
    with pytest.raises(RuntimeError, match="not now"):
        ogc.optimize(model, x, memory_budget="least")
    FailsAtFirst.fails = False
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
