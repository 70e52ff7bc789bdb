"""Gradients that a forward takes inside: its module is an opaque module, or stays plain, and the rest is planned."""

import copy
import logging

import pytest
import torch
from helpers import forced, trace_of_training
from torch import func, nn

import ogc

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:FutureWarning")  # torch's, of its own decompositions

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))


def energy(module, x):
    return torch.tanh(module.layer(x)).square().sum()


def by_grad(module, x):
    return func.grad(lambda t: energy(module, t))(x)


def by_grad_of_each(module, x):
    return func.vmap(func.grad(lambda t: energy(module, t)))(x)


def by_jacrev(module, x):
    return func.vmap(func.jacrev(lambda t: torch.tanh(module.layer(t))))(x).sum(1)


def by_hessian(module, x):
    return func.vmap(func.hessian(lambda t: energy(module, t)))(x).sum(1)


def by_vjp(module, x):
    y, back = func.vjp(lambda t: torch.tanh(module.layer(t)), x)
    return y + back(torch.ones_like(y))[0]


def by_functional_call(module, x):
    parameters = dict(module.layer.named_parameters())
    found = func.grad(lambda p: func.functional_call(module.layer, p, (x,)).square().sum())(parameters)
    return found["weight"].sum(0) + x


def by_autograd(module, x):
    x = x if x.requires_grad else x.detach().requires_grad_()
    return torch.autograd.grad(energy(module, x), x, create_graph=True)[0]


def by_backward(module, x):
    x = x.detach().requires_grad_()
    (given,) = torch.autograd.grad(energy(module, x), x)
    return module.layer(given)


WAYS = [by_grad, by_grad_of_each, by_jacrev, by_hessian, by_vjp, by_functional_call, by_autograd, by_backward]


class Inside(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.layer, self.way = nn.Linear(8, 8), way

    def forward(self, x):
        return x + self.way(self, x)


class Root(nn.Module):
    """It takes the gradient itself, behind a block."""

    def __init__(self, way):
        super().__init__()
        self.block, self.layer, self.way = nn.Sequential(Block(), Block()), nn.Linear(8, 8), way

    def forward(self, x):
        x = self.block(x)
        return x + self.way(self, x)


def fused(way):
    """A loss that makes its gradients in its forward."""

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            def loss(x, weight):
                return torch.tanh(x @ weight.t()).square().sum()

            if way == "func":
                found, value = func.grad_and_value(loss, (0, 1))(x, weight)
            else:
                with torch.enable_grad():
                    given = x.detach().requires_grad_(), weight.detach().requires_grad_()
                    value = loss(*given)
                    found = torch.autograd.grad(value, given)
            ctx.save_for_backward(*found)
            return value.detach()

        @staticmethod
        def backward(ctx, gradient):
            return tuple(gradient * found for found in ctx.saved_tensors)

    return Fused


class Loss(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(8, 8)), fused(way)

    def forward(self, x):
        return self.function.apply(x, self.weight)


class Counted(Loss):
    """Whose module is an opaque module for another reason, too."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


class RootWithLoss(Loss):
    """Which calls the function itself, behind blocks and what no program can hold."""

    def __init__(self, way):
        super().__init__(way)
        self.block = nn.Sequential(Block(), Block())

    def forward(self, x):
        x = self.block(x)
        return super().forward(x if x.sum() > 0 else -x)


def made(make):
    torch.manual_seed(0)
    model = make()
    return model, copy.deepcopy(model)


def assert_same(plain, model, optimized, steps=3):
    expected, ours = trace_of_training(plain, plain, (X,), steps), trace_of_training(model, optimized, (X,), steps)
    assert len(expected) == len(ours)
    assert all(map(torch.equal, expected, ours))


def opaque_of(graph):
    return {op.module for op in graph.operations if op.target.startswith("opaque")}


@pytest.mark.full
@pytest.mark.parametrize("plan", [ogc.optimize, forced])
@pytest.mark.parametrize("way", WAYS)
def test_a_module_that_takes_gradients_is_an_opaque_module(way, plan):
    model, plain = made(lambda: nn.Sequential(Block(), Inside(way), Block()))
    optimized = plan(model, X)
    assert opaque_of(optimized.graph) == {"1"}
    assert_same(plain, model, optimized)


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_takes_gradients_is_planned_in_parts(way):
    model, plain = made(lambda: Root(way))
    optimized = ogc.optimize(model, X, memory_budget="least")
    assert {part.name for part in optimized.plan.parts} == {"block"}
    assert_same(plain, model, optimized)


@pytest.mark.full
@pytest.mark.parametrize("plan", [ogc.optimize, forced])
@pytest.mark.parametrize("kind", [Loss, Counted])
@pytest.mark.parametrize("way", ["func", "autograd"])
def test_a_custom_function_that_takes_gradients_is_an_opaque_module(way, kind, plan):
    model, plain = made(lambda: nn.Sequential(Block(), Block(), kind(way)))
    optimized = plan(model, X)
    assert opaque_of(optimized.graph) == {"2"}
    assert_same(plain, model, optimized)


@pytest.mark.parametrize("way", ["func", "autograd"])
def test_a_custom_function_that_takes_gradients_beside_parts(way):
    model, plain = made(lambda: RootWithLoss(way))
    optimized = ogc.optimize(model, X, memory_budget="least")
    assert {part.name for part in optimized.plan.parts} == {"block"}
    assert_same(plain, model, optimized)


def test_an_opaque_module_that_takes_no_hooks_is_never_called_again(caplog):
    model, plain = made(lambda: nn.Sequential(Block(), Inside(by_grad), Block()))
    with caplog.at_level(logging.WARNING, "ogc"):
        optimized = ogc.optimize(model, X, recompute_opaque=["1"], memory_budget="least")
    assert "1 (differentiates by torch.func, and keeps what it saves for that)" in caplog.text
    assert_same(plain, model, optimized)


class OnlyByItself(nn.Module):
    """Nothing is wrong with it, but where somebody looks."""

    def __init__(self, watched):
        super().__init__()
        self.block, self.watched = nn.Sequential(Block(), Block()), watched

    def forward(self, x):
        x = self.block(x)
        if self.watched():
            raise RuntimeError("somebody looks")
        return x


def under_hooks():
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def under_a_mode():
    return torch._C._len_torch_dispatch_stack() > 0


def test_an_error_is_the_models_own_only_where_the_plain_forward_raises_it():
    model, plain = made(lambda: OnlyByItself(under_hooks))
    plain(X)
    with pytest.raises(ogc.ParseError, match=r"fails while it is.*somebody looks") as caught:
        ogc.optimize(model, X, memory_budget="least")
    assert not getattr(caught.value, "__notes__", [])
    model, _ = made(lambda: OnlyByItself(lambda: True))
    with pytest.raises(RuntimeError, match="somebody looks") as caught:
        ogc.optimize(model, X, memory_budget="least")
    assert caught.value.__notes__ == ["ogc: this error was raised by the model's own forward on the sample input."]


def test_what_fails_only_while_it_is_watched_is_planned_in_parts():
    model, plain = made(lambda: OnlyByItself(under_a_mode))
    optimized = ogc.optimize(model, X, memory_budget="least")
    assert {part.name for part in optimized.plan.parts} == {"block"}
    assert_same(plain, model, optimized)
