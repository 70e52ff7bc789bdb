"""Regions between cuts run compiled: the plan's memory, and one set of numbers for forward and recomputation."""

import copy
import logging
import pickle
import shutil
from dataclasses import replace
from itertools import product
from unittest.mock import patch

import pytest
import torch
from helpers import measured_peak, run_apart, tensors_of
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import ogc
from ogc.rewrites import compiled
from ogc.rewrites.compiled import Compilation, Compiled, Compiler

THOSE_THAT_GAIN = compiled.those_that_gain

# torch's own, where compiled code goes on from a tensor that is no opaque module
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def blocks(count=6):
    return nn.Sequential(*(Block(32) for _ in range(count))), torch.randn(1024, 32)


def convolutions():
    """Statistics, a step counter, dropout, writes in place and an opaque module."""
    opaque = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Softplus())
    opaque.register_forward_hook(lambda module, args, result: None)

    def layers():
        return (
            nn.Conv2d(4, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Tanh(),
            nn.Dropout(),
            nn.GELU(),
        )

    return nn.Sequential(*layers(), *layers(), opaque, *layers(), *layers()), torch.randn(4, 4, 16, 16)


def several_results():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 32) for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                one, other = layer(x).tanh().chunk(2, -1)
                x = one * other.sigmoid() + x
            return {"first": x, "last": x.exp().sum(0)}

    return Net(), torch.randn(256, 16)


def attention():
    """Which is unfolded on a CPU, as it drops."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.make, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

        def forward(self, x):
            for _ in range(2):
                given = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.make(x).chunk(3, -1))
                x = x + self.out(scaled_dot_product_attention(*given, dropout_p=0.2).transpose(1, 2).flatten(2)).tanh()
            return x

    return Net(), torch.randn(64, 9, 24)


MODELS = [blocks, convolutions, several_results, attention]


@pytest.fixture(autouse=True)
def everything_gains(monkeypatch, request):
    """A backend that computes as eager does takes as long, or longer."""
    if "slow" not in request.keywords:
        monkeypatch.setattr(compiled, "those_that_gain", lambda regions, *graphs: regions)


def step(run, model, x):
    torch.manual_seed(3)
    model.zero_grad()
    result = run(x)
    outputs = list(result.values()) if isinstance(result, dict) else [result]
    sum(output.square().mean() for output in outputs).backward()
    found = [*outputs, *(p.grad for p in model.parameters()), *model.buffers(), torch.get_rng_state()]
    return [tensor.detach().clone() for tensor in found]


def steps(run, model, x, count=2):
    start = copy.deepcopy(model.state_dict())
    found = [step(run, model, x) for _ in range(count)]
    model.load_state_dict(start)
    return found


def assert_equal(ours, plain):
    for one, other in zip(ours, plain, strict=True):
        assert len(one) == len(other) and all(map(torch.equal, one, other))


def total(result):
    """A loss that adds no memory to a step; plans made without one count what the gradients of outputs take."""
    return sum(output.sum() for output in tensors_of(result))


def regions(optimised):
    return [node.target for node in optimised.graph.program.operations if isinstance(node.target, Compiled)]


GOALS = [{"memory_budget": "least"}, {"memory_budget": 0.6}]


@pytest.mark.full
@pytest.mark.parametrize("make, goal", [*product(MODELS, GOALS), (blocks, {"memory_budget": 1.0})])
def test_numbers_and_memory_are_the_plans(make, goal):
    model, x = make()
    optimised = ogc.optimize(model, x, compile="aot_eager", **goal)
    assert regions(optimised)
    assert_equal(steps(optimised, model, x), steps(model, model, x))  # that backend computes as eager does
    assert measured_peak(optimised, (x,), total) <= 1.03 * optimised.plan.peak_bytes
    if goal["memory_budget"] != "least":
        assert optimised.plan.peak_bytes <= goal["memory_budget"] * optimised.plan.plain_peak_bytes
    else:
        assert optimised.plan.peak_bytes < 0.75 * optimised.plan.plain_peak_bytes


@pytest.mark.full
def test_where_only_smaller_stretches_fit_less_is_compiled(caplog):
    caplog.set_level(logging.WARNING, "ogc")
    model, x = several_results()
    optimised = ogc.optimize(model, x, compile="aot_eager", memory_budget=1.0)
    assert optimised.plan.peak_bytes <= optimised.plan.plain_peak_bytes
    assert bool(regions(optimised)) != ("nothing is compiled" in caplog.text)
    assert_equal(steps(optimised, model, x), steps(model, model, x))


@pytest.mark.full
@pytest.mark.parametrize("make", MODELS)
def test_nothing_is_compiled_while_it_trains(make):
    model, x = make()
    optimised = ogc.optimize(model, x, compile="aot_eager", memory_budget="least")
    expected = steps(optimised, model, x)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert_equal(steps(optimised, model, x), expected)
        assert_equal(steps(copy.copy(optimised), model, x), expected)


@pytest.mark.full
def test_equal_stretches_are_compiled_once():
    model, x = blocks()
    found = regions(ogc.optimize(model, x, compile="aot_eager", memory_budget="least"))
    assert len({region.code for region in found}) <= len(found) / 2


@pytest.mark.full
def test_what_draws_or_is_an_opaque_module_runs_as_it_is():
    model, x = convolutions()
    optimised = ogc.optimize(model, x, compile="aot_eager", memory_budget="least")
    inside = {str(node.target) for region in regions(optimised) for node in region.graph.nodes}
    outside = {op.target for op in optimised.graph.operations}
    assert {"aten.dropout.default", "opaque Sequential"} <= outside
    assert not inside & {"aten.dropout.default", "aten.convolution.default"}
    assert "aten.batch_norm.default" in inside


@pytest.mark.full
def test_gradients_of_parameters_are_kept_few():
    model, x = blocks()
    optimised = ogc.optimize(model, x, compile="aot_eager", memory_budget=1.0)
    large = [[n for n in region.graph.nodes if "linear" in str(n.target)] for region in regions(optimised)]
    assert max(map(len, large)) < 12  # not all of them, though nothing is cut


@pytest.mark.full
def test_other_calls_are_planned_for_and_what_is_loaded_too():
    model, x = blocks(3)
    optimised = ogc.optimize(model, x, compile="aot_eager", memory_budget="least")
    for run in (optimised, pickle.loads(pickle.dumps(optimised)), copy.deepcopy(optimised)):
        again = [step(run, run, rows) for rows in (x, x[:512])]
        assert_equal(again, [step(model, model, rows) for rows in (x, x[:512])])


def backward_twice(run, model, x):
    loss = run(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def backward_through_gradients(run, model, x):
    weight = next(p for p in model.parameters() if p.dim() > 1)
    (gradient,) = torch.autograd.grad(run(x).square().sum(), weight, create_graph=True)
    gradient.square().sum().backward()


@pytest.mark.full
@pytest.mark.parametrize("make", [blocks, convolutions])
@pytest.mark.parametrize(
    "backward, refused", [(backward_twice, "retain_graph"), (backward_through_gradients, "double")]
)
def test_a_second_backward_is_right_or_an_error(make, backward, refused):
    model, x = make()
    optimised, found = ogc.optimize(model, x, compile="aot_eager", memory_budget="least"), []
    for run in (model, optimised):
        torch.manual_seed(3)
        model.zero_grad()
        try:
            backward(run, model, x)
        except RuntimeError as error:
            assert run is optimised and refused in str(error)
            return
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert_equal(*([gradients] for gradients in found))


@pytest.mark.full
def test_in_evaluation_nothing_is_compiled():
    model, x = blocks(2)
    optimised = ogc.optimize(model, x, compile="aot_eager", memory_budget="least")
    with torch.no_grad():
        assert torch.equal(optimised(x), model(x))


def fails(module, inputs):
    raise RuntimeError("no compiler here")


def refused():
    torch._dynamo.register_backend(name="failing", compiler_fn=fails)
    model, x = blocks(2)
    before = set(vars(model)), {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    with pytest.raises(ogc.InputError, match=r"backend of torch.compile, not 'nonsense': .*inductor"):
        ogc.optimize(model, x, compile="nonsense", memory_budget="least")
    with pytest.raises(ogc.DependencyError, match=r"(?s)cannot compile with backend 'failing' here .*a C\+\+ compiler"):
        ogc.optimize(model, x, compile="failing", memory_budget="least")
    with (
        patch("ogc.rewrites.compiled.check_backend", lambda *args: None),
        pytest.raises(ogc.ParseError, match=r"(?s)operations from .* cannot be compiled: .*leave out compile="),
    ):
        ogc.optimize(model, x, compile="failing", memory_budget="least")
    assert before == (set(vars(model)), {n: id(tensor) for n, tensor in model.state_dict(keep_vars=True).items()})


@pytest.mark.full
def test_what_cannot_compile_is_refused_before_anything_is_changed():
    run_apart(refused)


@pytest.mark.parametrize("wrong", [{"compile": 1}, {"verify": True}, {"chunks": 2}, {"solver": "uniform"}])
def test_what_does_not_go_with_it_is_refused(wrong):
    model, x = blocks(2)
    with pytest.raises(ogc.InputError, match="compile"):
        ogc.optimize(model, x, **{"compile": "aot_eager", **wrong})


def test_stretches_end_at_cuts():
    model, x = blocks(3)
    graph = ogc.parse(model, x)
    cut = graph.cuts[len(graph.cuts) // 2]
    plan = ogc.make_plan(graph, (ogc.recomputed(0, cut), ogc.saved(cut, len(graph))))
    names = [op.name for op in graph.operations]
    cuts = compiled.cuts_of(plan.segments)
    found = [[names.index(name) for name in region] for region in compiled.regions_between(model, graph, cuts, 10**9)]
    assert found and all(max(places) < cut or min(places) >= cut for places in found)


@pytest.mark.full
@pytest.mark.parametrize("gains", [True, False])
def test_a_stretch_gains_where_its_operations_take_longer(gains):
    model, x = blocks(2)
    graph = ogc.parse(model, x)
    regions = tuple(compiled.regions_between(model, graph, (), 10**9))
    code = ogc.parse(model, x, rewrite=Compilation(regions, Compiler("aot_eager")))
    operations = tuple(replace(op, forward_seconds=1.0, backward_seconds=2.0) for op in graph.operations)
    seconds = 3 * min(map(len, regions)) - gains
    others = tuple(replace(op, forward_seconds=seconds - 0.5, backward_seconds=0.5) for op in code.operations)
    graph, code = replace(graph, operations=operations), replace(code, operations=others)
    assert tuple(THOSE_THAT_GAIN(regions, graph, code)) == (regions if gains else regions[:-1])


@pytest.mark.full
@pytest.mark.parametrize("goal", [{}, {"memory_budget": 0.7}])
@pytest.mark.parametrize("is_better", [True, False])
def test_what_gains_nothing_runs_as_it_is_where_the_plan_is_better_so(is_better, goal, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "ogc")
    costs = iter([1, 1 - is_better])
    monkeypatch.setattr(compiled, "those_that_gain", lambda regions, *graphs: ())
    monkeypatch.setattr(compiled, "_cost", lambda plan: next(costs))
    model, x = blocks()
    optimised = ogc.optimize(model, x, compile="aot_eager", **goal)
    assert bool(regions(optimised)) != is_better
    assert_equal(steps(optimised, model, x), steps(model, model, x))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("make", MODELS)
def test_inductor_is_equal_up_to_rounding(make):
    model, x = make()
    optimised = ogc.optimize(model, x, compile=True, memory_budget=0.7)
    ours, plain = steps(optimised, model, x), steps(model, model, x)
    for one, other in zip(ours[0], plain[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert_equal(steps(optimised, model, x), ours)
    assert measured_peak(optimised, (x,)) <= 1.05 * optimised.plan.peak_bytes
    assert optimised.plan.peak_bytes <= 0.7 * optimised.plan.plain_peak_bytes
