"""Ways to call an optimized module: whatever is not planned for runs plain, and never gives other numbers."""

import threading

import pytest
import torch
from helpers import loss_of, measured_peak
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap

import ogc
from ogc.errors import ReplayError

pytestmark = pytest.mark.filterwarnings(  # forward-mode derivatives load functions of torch's in this way
    "ignore:`torch.jit.script` is deprecated:FutureWarning"
)


class Tall(nn.Module):
    def __init__(self, drop=0.0):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.drop = nn.Dropout(drop)

    def forward(self, x, scale=1.0):
        for layer in self.layers:
            x = torch.tanh(torch.nn.functional.softplus(layer(x))) * scale
        return self.drop(x)


@pytest.fixture
def tall():
    torch.manual_seed(0)
    return Tall()


def weights_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_equal(ours, plain):
    ours, plain = torch.utils._pytree.tree_leaves(ours), torch.utils._pytree.tree_leaves(plain)
    assert len(ours) == len(plain) and all(map(torch.equal, ours, plain))


TRANSFORMS = {
    "grad": lambda f, w, x: grad(lambda weights: f(weights, x).square().mean())(w),
    "vjp": lambda f, w, x: vjp(lambda weights: f(weights, x), w)[1](torch.ones_like(x)),
    "jvp": lambda f, w, x: jvp(lambda y: f(w, y), (x,), (torch.ones_like(x),)),
    "jacrev": lambda f, w, x: jacrev(lambda y: f(w, y))(x[:2]),
    "hessian": lambda f, w, x: hessian(lambda y: f(w, y).sum())(x[:1]),
    "vmap": lambda f, w, x: vmap(lambda y: f(w, y))(x),
    "gradients of each sample": lambda f, w, x: vmap(grad(lambda weights, y: f(weights, y).sum()), (None, 0))(w, x),
    "an ensemble": lambda f, w, x: vmap(f, (0, None))({k: torch.stack([v, v * 2]) for k, v in w.items()}, x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_torch_func(name, tall):
    x = torch.randn(32, 16)
    optimised = ogc.optimize(tall, x, memory_budget="least")
    weights = weights_of(tall)

    def of(module):
        return TRANSFORMS[name](lambda w, y: functional_call(module, w, (y,)), weights, x)

    assert_equal(of(optimised), of(tall))
    assert_equal(of(optimised), of(tall))


def test_forward_mode_by_dual_numbers(tall):
    x = torch.randn(32, 16)
    optimised = ogc.optimize(tall, x, memory_budget="least")

    def tangent(module):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            return torch.autograd.forward_ad.unpack_dual(module(dual)).tangent.clone()

    assert_equal(tangent(optimised), tangent(tall))


def test_functional_call_with_a_backward_keeps_the_saving(tall):
    x = torch.randn(256, 16)
    optimised = ogc.optimize(tall, x, memory_budget="least")
    weights = {name: w.requires_grad_() for name, w in weights_of(tall).items()}

    def gradients(module):
        output = functional_call(module, weights, (x,))
        return torch.autograd.grad(output.square().mean(), list(weights.values()))

    for _ in range(2):
        assert_equal(gradients(optimised), gradients(tall))

    class Called(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.__dict__["module"] = module

        def parameters(self):
            return iter(weights.values())

        def forward(self, x):
            return functional_call(self.__dict__["module"], weights, (x,))

    assert measured_peak(Called(optimised), (x,)) < 0.7 * measured_peak(Called(tall), (x,))


def test_numbers_that_change_each_step_need_no_search(tall, monkeypatch):
    x = torch.randn(256, 16)
    optimised = ogc.optimize(tall, (x, 0.5), memory_budget="least")
    monkeypatch.setattr("ogc.planned.solve", lambda *_, **__: pytest.fail("planned anew"))
    for step in range(20):
        scale = 0.9**step
        for module in (tall, optimised):
            tall.zero_grad()
            module(x, scale).sum().backward()
            gradients = [p.grad.clone() for p in tall.parameters()]
            if module is tall:
                expected = gradients
        assert_equal(gradients, expected)
    assert optimised.report().planned == 20
    assert measured_peak(optimised, (x, 0.1)) < 0.7 * measured_peak(tall, (x, 0.1))


@pytest.mark.parametrize("goal", [{"max_overhead": 0.5}, {"memory_budget": 0.6}, {"memory_budget": 60_000}])
def test_numbers_keep_the_goal(tall, goal, monkeypatch):
    x = torch.randn(128, 16)
    optimised = ogc.optimize(tall, (x, 0.5), **goal)
    monkeypatch.setattr("ogc.planned.solve", lambda *_, **__: pytest.fail("planned anew"))
    for scale in (0.3, 0.7):
        assert_equal(optimised(x, scale), tall(x, scale))
    assert optimised.report().planned == 2


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = (
            nn.GRU(8, 16),
            nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Softplus(), nn.Linear(64, 8)),
        )

    def forward(self, packed):
        return self.out(self.cell(packed)[0].data).square()


@pytest.mark.full
def test_packed_sequences_of_any_lengths():
    torch.manual_seed(0)
    model = Recurrent()

    def packed(lengths):
        return nn.utils.rnn.pack_padded_sequence(torch.randn(max(lengths), len(lengths), 8), lengths)

    optimised = ogc.optimize(model, (packed([50, 30, 20]),), memory_budget="least")
    for lengths in ([50, 30, 20], [60, 20, 5], [40, 40, 40], [7, 1, 1, 1]):
        batch, found = packed(lengths), []
        for module in (model, optimised):
            model.zero_grad()
            module(batch).mean().backward()
            found.append([p.grad.clone() for p in model.parameters()])
        assert_equal(*found)
    assert not optimised.report().plain


def test_numbers_drawn_by_another_thread_change_no_mask():
    model, x = Tall(drop=0.5), torch.randn(64, 16)
    optimised = ogc.optimize(model, x, memory_budget="least")

    def step(module):
        model.zero_grad()
        torch.manual_seed(1)
        output = module(x)
        thread = threading.Thread(target=torch.rand, args=(1000,))
        thread.start()
        thread.join()
        output.square().mean().backward()
        return [output.detach(), *(p.grad.clone() for p in model.parameters()), torch.rand(5)]

    assert_equal(step(optimised), step(model))


def test_an_input_that_is_written_is_refused(tall):
    x = torch.randn(256, 16)
    optimised = ogc.optimize(tall, x, memory_budget="least")
    output = optimised(x)
    x.mul_(2)
    with pytest.raises(ReplayError, match="an input of the model was modified in place"):
        output.sum().backward()


def test_threads_may_train_one_model(tall):
    """As DataParallel does, each with a batch of its own."""
    x = torch.randn(8, 64, 16)
    optimised = ogc.optimize(tall, x[0], memory_budget="least")
    found = {}

    def run(number):
        for _ in range(5):
            found[number] = torch.autograd.grad(loss_of(optimised(x[number])), list(tall.parameters()))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(8):
        assert_equal(found[number], torch.autograd.grad(loss_of(tall(x[number])), list(tall.parameters())))
