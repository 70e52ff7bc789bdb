"""Calls in which Python's numbers alone are others take one forward where nothing depends on them but arithmetic."""

import importlib
import math

import pytest
import torch
from helpers import tensors_of
from torch import nn
from torch.nn import functional as F

import ogc


class Scaled(nn.Module):
    """Applies ``use`` to the features and a number."""

    def __init__(self, use):
        super().__init__()
        self.first, self.last, self.use = nn.Linear(8, 8), nn.Linear(8, 8), use
        self.norm = nn.LayerNorm(8)

    def forward(self, x, number):
        return self.last(self.norm(torch.tanh(self.use(torch.tanh(self.first(x)), number))))


def chosen(x, number):
    return x.sin() if number > 0.5 else x.cos()


def attention(x, number):
    q = x.view(2, 3, 2, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=number).transpose(1, 2).reshape(6, 8)


USES = {  # with whether one forward is enough
    "product": (lambda x, number: x * number, True),
    "expression": (lambda x, number: x * math.exp(-number) + (1 - number), True),
    "leaky ReLU": (lambda x, number: F.leaky_relu(x, number), True),
    "dropout": (lambda x, number: F.dropout(x, number), True),
    "clamp": (lambda x, number: x.clamp(-number, number), True),
    "power": (lambda x, number: x.abs() ** number, True),
    "filled": (lambda x, number: x + torch.full((8,), number), True),
    "a branch": (chosen, False),
    "a constant": (lambda x, number: x + torch.tensor([number] * 8), False),
    "a size": (lambda x, number: F.interpolate(x[None], scale_factor=number)[0].mean(-1, keepdim=True) + x, True),
    "an integer": (lambda x, number: x.roll(int(10 * number), 0), True),
    "within attention": (attention, False),
}


@pytest.fixture
def looks(monkeypatch):
    """How often the memory of a program is looked at."""
    seen = []
    module = importlib.import_module("ogc.parser.reuse")
    lower = module.lower
    monkeypatch.setattr(module, "lower", lambda *args: seen.append(args) or lower(*args))
    return seen


def run(module, model, *args):
    model.zero_grad()
    torch.manual_seed(2)
    output = module(*args)
    output.square().mean().backward()
    return [*tensors_of(output), *(p.grad.clone() for p in model.parameters()), torch.rand(2)]


@pytest.mark.full
@pytest.mark.parametrize("name", USES)
def test_other_numbers(name, looks):
    use, is_quick = USES[name]
    torch.manual_seed(0)
    model, x = Scaled(use), torch.randn(6, 8)
    optimised = ogc.optimize(model, (x, 0.3), memory_budget="least")
    for number in (0.7, 0.4, 0.9, 0.3):
        ours, plain = run(optimised, model, x, number), run(model, model, x, number)
        assert all(map(torch.equal, ours, plain)), number
    assert bool(looks) is not is_quick


@pytest.mark.parametrize(
    "name, special",
    [("product", None), ("dropout", 0.0), ("dropout", 1.0), ("power", 2.0), ("power", 1.0), ("power", 0.5)],
)
def test_numbers_that_operators_take_for_special_are_looked_at(name, special, looks):
    """x ** 2 saves something else than x ** 1.9, and no dropout saves no mask."""
    model, x = Scaled(USES[name][0]), torch.randn(6, 8)
    optimised = ogc.optimize(model, (x, 0.3), memory_budget="least")
    for number in (1.0, 0.0) if special is None else (special, 0.4):
        assert all(map(torch.equal, run(optimised, model, x, number), run(model, model, x, number)))
    assert bool(looks) is (special is not None)


def test_a_schedule_of_an_attribute(looks):
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 8))
    x = torch.randn(6, 8)
    optimised = ogc.optimize(model, x, memory_budget="least")
    for step in range(1, 6):
        model[1].p, model[3].eps = 0.1 + step / 20, 1e-5 * step
        assert all(map(torch.equal, run(optimised, model, x), run(model, model, x)))
    assert not looks
    assert optimised.report().planned == 5


def test_a_forward_that_changes_attributes_is_looked_at(looks):
    class Counting(Scaled):
        def forward(self, x, number):
            self.last_number = number
            return super().forward(x, number)

    model, x = Counting(USES["product"][0]), torch.randn(6, 8)
    model(x, 0.1)
    optimised = ogc.optimize(model, (x, 0.3), memory_budget="least")
    for number in (0.7, 0.4):
        assert all(map(torch.equal, run(optimised, model, x, number), run(model, model, x, number)))


def test_a_returned_number_is_that_of_the_call():
    class Returning(Scaled):
        def forward(self, x, number):
            return super().forward(x, number), number * 2

    model, x = Returning(USES["product"][0]), torch.randn(6, 8)
    optimised = ogc.optimize(model, (x, 0.3), memory_budget="least")
    assert [optimised(x, number)[1] for number in (0.3, 0.4, 0.5)] == [0.6, 0.8, 1.0]
