"""Parsing, optimizing, checking and planning amid training leave no trace of what the forward does."""

import contextlib
import random
import warnings

import numpy
import pytest
import torch
from helpers import forced, runner_of
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import ogc
from ogc.errors import OgcError
from ogc.torch_state.no_trace import untouched
from ogc.torch_state.private import saved_tensors_hooks_in_use


class Restless(nn.Module):
    """Blocks, of which one changes something in its forward once it is asked to."""

    def __init__(self, change):
        super().__init__()
        self.change = None
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        self.state = nn.Module()
        self.state.register_buffer("mean", torch.zeros(3))
        self.state.register_buffer("empty", None)
        self.state.generator = torch.Generator().manual_seed(5)
        self.state.log, self.state.table, self.state.seen = [1], {"a": [2]}, {3}
        self.state.count = 0
        self.hook = self.state.register_forward_hook(print)
        self.body[0][0].weight.grad = torch.ones(8, 8)
        self.asked_for = change

    def forward(self, x, generator=None):
        if self.change is not None:
            self.change(self, self.state, generator)
        return self.body(x)


def cast_under_autocast(model, state, generator):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.body(torch.ones(1, 8))
    torch.set_autocast_enabled("cpu", True)
    model.body(torch.ones(1, 8))


CHANGES = {
    "a gradient that was there": lambda m, s, g: setattr(m.body[0][0].weight, "grad", None),
    "a gradient that was not": lambda m, s, g: setattr(m.body[1][0].weight, "grad", torch.ones(8, 8)),
    "what a buffer holds": lambda m, s, g: s.mean.add_(1),
    "the sign of a zero in a buffer": lambda m, s, g: s.mean.data.neg_(),
    "a buffer": lambda m, s, g: setattr(s, "mean", s.mean + 1),
    "a buffer that was none": lambda m, s, g: setattr(s, "empty", torch.ones(2)),
    "another buffer": lambda m, s, g: s.register_buffer("more", torch.ones(2)),
    "no buffer": lambda m, s, g: s._buffers.pop("mean", None),
    "a parameter": lambda m, s, g: setattr(m.body[2][0], "bias", nn.Parameter(torch.ones(8))),
    "a submodule": lambda m, s, g: m.body[2].add_module("2", nn.Identity()),
    "a hook": lambda m, s, g: s.register_forward_pre_hook(print),
    "no hook": lambda m, s, g: m.hook.remove(),
    "an attribute": lambda m, s, g: setattr(s, "count", s.count + 1),
    "another attribute": lambda m, s, g: setattr(s, "last", 1),
    "no attribute": lambda m, s, g: vars(s).pop("count", None),
    "a flag": lambda m, s, g: s.eval(),
    "a list": lambda m, s, g: s.log.append(1),
    "a list in a dict": lambda m, s, g: s.table["a"].clear(),
    "a set": lambda m, s, g: s.seen.add(len(s.seen)),
    "Python's random state": lambda m, s, g: random.random(),
    "numpy's random state": lambda m, s, g: numpy.random.rand(),
    "torch's random state": lambda m, s, g: torch.rand(1),
    "the model's generator": lambda m, s, g: torch.rand(1, generator=s.generator),
    "a generator among the arguments": lambda m, s, g: torch.rand(1, generator=g),
    "whether autocast is on": lambda m, s, g: torch.set_autocast_enabled("cpu", True),
    "autocast's type": lambda m, s, g: torch.set_autocast_dtype("cuda", torch.bfloat16),
    "whether autocast caches": lambda m, s, g: torch.set_autocast_cache_enabled(False),
    "what autocast has cached": cast_under_autocast,
    "whether gradients are computed": lambda m, s, g: torch._C._set_grad_enabled(False),
}


def state_of(model, generator):
    """All that may change: objects by identity, contents as text or numbers."""
    found = []
    for module in model.modules():
        for key, value in vars(module).items():
            found.append((key, id(value), repr(value) if isinstance(value, (list, dict, set, int)) else ""))
            if isinstance(value, dict):
                found += [(name, id(item)) for name, item in value.items()]
    found += [(id(p), id(p.grad)) for p in model.parameters()]
    found += [(id(b), b.signbit().tolist(), b.tolist()) for b in model.buffers()]
    states = [torch.get_rng_state(), model.state.generator.get_state(), generator.get_state()]
    found += [state.tolist() for state in states]
    found += [random.getstate(), numpy.random.get_state(legacy=False)["state"]["key"].tolist()]
    found += [numpy.random.get_state(legacy=False)["state"]["pos"]]
    found += [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    return [*found, torch.is_autocast_cache_enabled(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()]


def first_change(before, after):
    return next(((a, b) for a, b in zip(before, after, strict=False) if a != b), None) or len(after) - len(before)


def parse(model, optimised, call):
    ogc.parse(model, call)


def optimize(model, optimised, call):
    ogc.optimize(model, call, memory_budget="least")


def check(model, optimised, call):
    ogc.check(model, optimised, *call)


def plan_in_a_call(model, optimised, call):
    x, generator = call
    runner = runner_of(optimised)
    for other in (x[:3], x.double()):
        runner.select(optimised, (other, generator), {})


@pytest.fixture
def settings():
    """Puts back by hand what a test that fails would leave to others."""
    before = torch.is_autocast_cache_enabled(), *map(torch.get_autocast_dtype, ("cpu", "cuda"))
    yield
    torch.set_autocast_cache_enabled(before[0])
    for kind, dtype in zip(("cpu", "cuda"), before[1:], strict=True):
        torch.set_autocast_enabled(kind, False)
        torch.set_autocast_dtype(kind, dtype)
    torch._C._set_grad_enabled(True)
    torch.clear_autocast_cache()


@pytest.mark.full
@pytest.mark.parametrize("act", [parse, optimize, check, plan_in_a_call])
@pytest.mark.parametrize("change", CHANGES)
def test_no_trace_is_left(change, act, settings):
    model, generator = Restless(change), torch.Generator().manual_seed(7)
    call = torch.randn(6, 8), generator
    optimised = forced(model, call)
    model.change = CHANGES[change]
    before = state_of(model, generator)
    with contextlib.suppress(OgcError, RuntimeError):
        act(model, optimised, call)
    assert not first_change(before, state_of(model, generator))


def test_no_cast_weight_outlives_a_forward(settings):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer = nn.Linear(8, 8)
        old = layer(torch.ones(1, 8))
        with untouched(layer):
            layer.weight.data.zero_()
            assert not torch.equal(layer(torch.ones(1, 8)), old)  # else a cast of the old weight was there
        layer.weight.data.fill_(1)
        assert torch.equal(layer(torch.ones(1, 8)), old)  # by the cast that autocast had before, as without all this


@pytest.mark.parametrize("attributes_stay", [False, True])
def test_what_is_put_back_does_not_depend_on_how_the_inside_ends(attributes_stay):
    model = Restless("")
    before = state_of(model, torch.Generator())
    with pytest.raises(KeyError), untouched(model, attributes_stay=attributes_stay):
        model.state.count = 1
        model.state.mean.add_(1)
        model.body[0][0].weight.grad = None
        torch.rand(1)
        raise KeyError
    assert model.state.count == attributes_stay
    model.state.count = 0
    assert not first_change(before, state_of(model, torch.Generator()))


def test_hooks_for_saved_tensors_that_an_interrupt_left_are_taken_off():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 4)
    seen = []
    with saved_tensors_hooks(lambda t: (seen.append(1), t)[1], lambda t: t):
        with pytest.raises(KeyboardInterrupt), untouched(model):
            for _ in range(2):
                saved_tensors_hooks(lambda t: None, lambda _: None).__enter__()  # and never comes to its end
            raise KeyboardInterrupt
        model(x).sum().backward()
    assert seen and model[0].weight.grad.any()
    assert saved_tensors_hooks_in_use() is None


def test_models_that_share_modules_are_put_back_together():
    first = Restless("")
    second = nn.Sequential(first.body, first.state)
    before = state_of(first, torch.Generator())
    with untouched(second, first):
        first.state.mean.add_(1)
        second[1].count = 3
        torch.rand(1, generator=first.state.generator)
    assert not first_change(before, state_of(first, torch.Generator()))


def test_buffers_of_scripted_modules_are_put_back():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.BatchNorm1d(8))
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), scripted, nn.Linear(8, 8), nn.Tanh()), torch.randn(6, 8)
    graph = ogc.parse(model, x)
    assert any("opaque" in op.target for op in graph.operations)
    assert not scripted.num_batches_tracked and not scripted.running_mean.any()


def test_an_opaque_module_that_draws_from_a_generator_of_its_own_is_not_called_again():
    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.generator = nn.Linear(8, 8), torch.Generator().manual_seed(1)

        def forward(self, x):
            torch.rand(1, generator=self.generator)
            return torch.tanh(self.layer(x))

    opaque = Drops()
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), opaque, nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    x, state = torch.randn(6, 8), opaque.generator.get_state()
    optimised = ogc.optimize(model, x, opaque_modules=[Drops], memory_budget="least")
    assert torch.equal(opaque.generator.get_state(), state)
    assert ogc.check(model, optimised, x)
    assert torch.equal(opaque.generator.get_state(), state)
