"""Training in which nothing runs by a plan is told so once, and counted."""

import inspect
from types import MethodType

import pytest
import torch
from torch import nn

import ogc


class Net(nn.Module):
    """It has a loss that calls its forward, and one that goes past it."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(6)))

    def forward(self, x):
        return self.body(x)

    def past_it(self, x):
        return {"loss": self.inner(x).square().mean()}

    def inner(self, x):
        for block in self.body:
            x = block(x)
        return x

    def through_it(self, x):
        return {"loss": self(x).square().mean()}

    def embed(self, x):
        return self.body[0](x)


class Opaque(Net):
    """It is planned in parts."""

    def forward(self, x):
        x = self.body(x)
        return x * float(x.detach().max() > 0) if x.numel() > x.sum().item() else x


def optimized(kind=Net, images=None):
    torch.manual_seed(0)
    return ogc.optimize(
        kind(), torch.randn(64, 16) if images is None else images, profile="estimate", memory_budget="least"
    )


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if "nothing that ogc planned has run" in record.message]


def assigned(model):
    model.forward = MethodType(lambda self, x: self.inner(x) * 2, model)
    return model


WAYS = {
    "another method": (Net, lambda model, x: model.past_it(x)["loss"], "the method past_it"),
    "in parts": (Opaque, lambda model, x: model.past_it(x)["loss"], "the method past_it"),
    "a forward that was assigned": (Net, lambda model, x: assigned(model)(x).sum(), "a forward that was assigned"),
}


@pytest.mark.parametrize("way", WAYS)
def test_training_past_the_forward_is_told_once(way, caplog):
    kind, run, words = WAYS[way]
    model = optimized(kind)
    images = torch.randn(64, 16)
    for _ in range(5):
        run(model, images).backward()
    (told,) = warnings_of(caplog)
    assert words in told and "optimize the submodules" in told
    assert (model.report().planned, model.report().plain) == (0, 5)
    assert words in " ".join(str(model.report()).split())


def wrapped(model):
    if "wrapped" not in vars(model):
        model.wrapped, own = True, model.forward
        model.forward = lambda x: own(x) * 2
    return model


USUAL = {
    "a method that calls the model": lambda model, x: model.through_it(x)["loss"],
    "a method before the model": lambda model, x: model(model.embed(x)).sum(),
    "a forward that calls the planned one": lambda model, x: wrapped(model)(x).sum(),
}


@pytest.mark.parametrize("way", USUAL)
def test_training_that_calls_the_forward_is_not(way, caplog):
    model = optimized()
    for _ in range(5):
        USUAL[way](model, torch.randn(64, 16)).backward()
    assert not warnings_of(caplog)
    assert model.report().planned == 5


def test_evaluation_past_the_forward_is_not(caplog):
    model = optimized()
    for _ in range(5):
        with torch.no_grad():
            model.past_it(torch.randn(64, 16))
    assert not warnings_of(caplog) and not model.report().calls


def test_methods_stay_what_they_are():
    model, plain = optimized(), Net()
    assert type(model).past_it is Net.past_it
    assert inspect.signature(model.past_it) == inspect.signature(plain.past_it)
    assert inspect.ismethod(model.past_it) and model.past_it.__wrapped__ is Net.past_it
    model(torch.randn(64, 16))
    assert model.past_it == MethodType(Net.past_it, model)


def test_a_method_that_fails_is_looked_at_again(caplog):
    model = optimized()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model.past_it(torch.randn(64, 15))
    assert not warnings_of(caplog)
    for _ in range(3):
        model.past_it(torch.randn(64, 16))
    assert len(warnings_of(caplog)) == 1
