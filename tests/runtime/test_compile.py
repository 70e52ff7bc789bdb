"""torch.compile on, around and inside of optimized modules: the plan is kept, and the numbers."""

import copy
import logging
import pickle

import pytest
import torch
from helpers import forced, measured_peak, run_apart, tensors_of
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import ogc
from ogc.runtime import module as compiling

# torch's own, where compiled code goes on from a tensor that is no leaf
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

X = torch.randn(256, 64)
TOLD = "leaves Tower as it is"


def layers(count=6):
    return [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(count)]


class Tower(nn.Sequential):
    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x


class Around(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.before, self.part, self.after = nn.Linear(64, 64), part, nn.Linear(64, 64)

    def forward(self, x):
        return self.after(self.part(self.before(x).tanh()).relu())


class Rows(nn.Module):
    """Planned in parts: how many rows there are, the data decides."""

    def __init__(self):
        super().__init__()
        self.first, self.last = Tower(*layers()), Tower(*layers())

    def forward(self, x):
        hidden = self.first(x)
        return self.last(hidden[hidden.sum(1) > -1e9])


@pytest.fixture(autouse=True)
def nothing_compiled(caplog):
    torch._dynamo.reset()
    compiling._tell_once.cache_clear()
    caplog.set_level(logging.WARNING, "ogc")


@pytest.fixture
def tower():
    return Tower(*layers())


def counting():
    return CompileCounterWithBackend("aot_eager")


def step(run, model, x=X):
    model.zero_grad()
    result = run(x)
    result.square().mean().backward()
    return [*(t.detach() for t in tensors_of(result)), *(p.grad.clone() for p in model.parameters())]


def assert_equal(ours, plain):
    assert len(ours) == len(plain) and all(map(torch.equal, ours, plain))


def told(caplog):
    return [record.getMessage() for record in caplog.records if "torch.compile leaves" in record.getMessage()]


def by_wrapper(optimised, **options):
    return torch.compile(optimised, **options)


def by_method(optimised, **options):
    optimised.compile(**options)
    return optimised


@pytest.mark.parametrize("by", [by_wrapper, by_method])
@pytest.mark.parametrize("make", [lambda model: model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_what_is_compiled_runs_by_its_plan(tower, caplog, by, make):
    optimised = make(ogc.optimize(tower, X, memory_budget="least"))
    peak = measured_peak(optimised, (X,))
    compiled, expected = by(optimised, backend="aot_eager"), step(optimised, optimised)
    for _ in range(3):
        assert_equal(step(compiled, optimised), expected)
    assert measured_peak(compiled, (X,)) == peak < 0.7 * measured_peak(tower, (X,))
    assert len(told(caplog)) == 1 and TOLD in told(caplog)[0]


@pytest.mark.full
@pytest.mark.parametrize("compiles_first", [True, False])
def test_the_plain_model_compiles_apart_from_the_optimized_one(tower, compiles_first):
    optimised = ogc.optimize(tower, X, memory_budget="least")
    plain, peak = measured_peak(tower, (X,)), measured_peak(optimised, (X,))
    expected, counter = step(tower, tower), counting()
    if not compiles_first:
        optimised.compile(backend="aot_eager")
        assert_equal(step(tower, tower), expected)
        assert measured_peak(tower, (X,)) == plain  # the optimized one alone was compiled
    tower.compile(backend=counter)
    assert measured_peak(optimised, (X,)) == peak and counter.frame_count == 0
    assert_equal(step(optimised, tower), expected)
    assert_equal(step(tower, tower), expected)
    assert counter.frame_count == 1


def whole_graphs():
    optimised = ogc.optimize(nn.Sequential(*layers()), X, profile="estimate", memory_budget="least")
    for compiled in (by_wrapper, by_method):
        with pytest.raises(Exception, match=r"(?s)ogc optimized runs by its plan.*leave out.*fullgraph=True"):
            compiled(optimised, fullgraph=True, backend="aot_eager")(X)


@pytest.mark.full
def test_a_whole_graph_is_refused():
    run_apart(whole_graphs)


def test_nothing_is_compiled_twice(tower):
    optimised = ogc.optimize(tower, X, memory_budget="least")
    around, counter = Around(optimised), counting()
    compiled, expected = torch.compile(around, backend=counter), step(around, around)
    assert_equal(step(compiled, around), expected)
    frames = counter.frame_count
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(3):
            assert_equal(step(compiled, around), expected)
    assert counter.frame_count == frames == 2  # before the part and behind it


def test_a_model_around_it_is_compiled_without_it(tower, caplog):
    optimised = ogc.optimize(tower, torch.randn(256, 64, requires_grad=True), memory_budget="least")
    around = Around(optimised)
    compiled, expected = torch.compile(around, backend="aot_eager"), step(around, around)
    assert_equal(step(compiled, around), expected)
    plain = Around(tower)
    plain.load_state_dict(around.state_dict())
    assert_equal(step(plain, plain), expected)
    saved = measured_peak(plain, (X,)) - measured_peak(around, (X,))
    assert measured_peak(plain, (X,)) - measured_peak(compiled, (X,)) >= saved > 0
    assert len(told(caplog)) == 1


@pytest.mark.full
def test_many_optimized_modules_meet_no_limit(caplog):
    caplog.set_level(logging.WARNING)
    blocks = nn.Sequential(*(ogc.optimize(Tower(*layers(2)), X, memory_budget="least") for _ in range(12)))
    compiled, expected = torch.compile(blocks, backend="aot_eager"), step(blocks, blocks)
    for _ in range(2):
        assert_equal(step(compiled, blocks), expected)
    assert len(told(caplog)) == 1
    assert not [record for record in caplog.records if "recompile_limit" in record.getMessage()]


@pytest.mark.full
def test_a_model_in_parts_keeps_its_plans(caplog):
    model = Rows()
    optimised = ogc.optimize(model, X, memory_budget="least")
    assert isinstance(optimised.plan, ogc.PartsPlan)
    peak, expected, counter = measured_peak(optimised, (X,)), step(model, model), counting()
    compiled = torch.compile(optimised, backend=counter)
    assert_equal(step(compiled, model), expected)
    assert measured_peak(compiled, (X,)) == peak < 0.7 * measured_peak(model, (X,))
    assert counter.frame_count == 0 and len(told(caplog)) == 1
    assert_equal(step(torch.compile(model, backend=counter), model), expected)
    assert counter.frame_count == 2  # the plain model knows nothing of it


def low_memory():
    """Every operator that has a low-memory variant runs in it."""
    return nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(4)))


def with_leaves():
    part = nn.Sequential(nn.Conv2d(4, 4, 3), nn.GELU())
    part.compile(backend="eager")
    return nn.Sequential(nn.Conv2d(4, 4, 3), nn.SiLU(), part, nn.Dropout(), nn.Conv2d(4, 4, 3), nn.GELU())


@pytest.mark.full
@pytest.mark.parametrize("make", [low_memory, with_leaves])
def test_a_whole_step_may_be_compiled(make):
    model, images, counter = make(), torch.randn(4, 4, 16, 16), counting()

    def loss_of(model):
        loss = model(images).square().mean()
        loss.backward()
        return loss

    def gradients(run, *args):
        torch.manual_seed(1)
        model.zero_grad()
        return [run(*args).detach(), *(p.grad.clone() for p in model.parameters()), torch.get_rng_state()]

    expected, optimised = gradients(loss_of, model), forced(model, images)
    compiled = torch.compile(loss_of, backend=counter)
    for _ in range(2):
        assert_equal(gradients(compiled, optimised), expected)
    assert counter.op_count == 2  # of the loss: nothing of a hook, nor of a backward


def test_without_gradients_the_plain_forward_is_compiled(tower):
    optimised, counter = ogc.optimize(tower, X, memory_budget="least"), counting()
    compiled = torch.compile(optimised, backend=counter, fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(X), tower(X))
    assert counter.frame_count == 1 and counter.op_count == 12


def test_a_wrapped_forward_is_compiled_around_it(tower):
    optimised = ogc.optimize(tower, X, memory_budget="least")
    inner, expected = optimised.forward, step(lambda x: 2 * tower(x).relu(), tower)
    optimised.forward = lambda x: 2 * inner(x).relu()
    peak = measured_peak(optimised, (X,))
    compiled = torch.compile(optimised, backend="aot_eager")
    assert_equal(step(compiled, tower), expected)
    assert measured_peak(compiled, (X,)) <= peak


@pytest.mark.parametrize("strict", [False, True])
def test_the_plain_forward_is_exported(tower, strict):
    batch = torch.export.Dim("batch", min=2, max=1024)
    exported = torch.export.export(
        ogc.optimize(tower, X, memory_budget="least"), (X,), dynamic_shapes=({0: batch},), strict=strict
    )
    assert torch.equal(exported.module()(X[:7]), tower(X[:7]))
    assert sum(node.op == "call_function" for node in exported.graph.nodes) == 12


@pytest.mark.parametrize("strict", [False, True])
def test_a_model_in_parts_is_exported_plain(strict):
    model = Rows()
    exported = torch.export.export(ogc.optimize(model, X, memory_budget="least"), (X,), strict=strict)
    assert torch.equal(exported.module()(X), model(X))


@pytest.mark.full
@pytest.mark.parametrize("by", [by_wrapper, by_method])
def test_around_a_compiled_submodule_the_saving_stays(by):
    part = by(nn.Sequential(nn.Linear(64, 64), nn.GELU()), backend="aot_eager")
    model = nn.Sequential(*layers(5), part, *layers(5))
    expected, plain = step(model, model), measured_peak(model, (X,))
    optimised = ogc.optimize(model, X, memory_budget="least")
    assert [op.module for op in optimised.graph.operations if op.target.startswith("opaque")] == ["5"]
    for _ in range(2):
        assert_equal(step(optimised, model), expected)
    assert measured_peak(optimised, (X,)) < 0.7 * plain
    assert_equal(step(torch.compile(optimised, backend="aot_eager"), model), expected)
