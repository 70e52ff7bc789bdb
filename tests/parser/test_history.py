"""Modules that keep what they computed, with its history, for their next call: spiking neurons, hidden states."""

import copy

import pytest
import torch
from torch import nn

import ogc

XS = [torch.randn(4, 8, generator=torch.Generator().manual_seed(n)) for n in range(4)]


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))


class Attribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.kept = nn.Linear(8, 8), None

    def held(self):
        return self.kept

    def hold(self, value):
        self.kept = value

    def forward(self, x):
        last, now = self.held(), torch.tanh(self.layer(x))
        self.hold(now if last is None else torch.sigmoid(last) * now)
        return self.held() * x


class Spikes(Attribute):
    def forward(self, x):
        last = 0.0 if self.kept is None else self.kept
        voltage = 0.5 * last + self.layer(x)
        self.kept = voltage - (voltage > 0).float()
        return voltage * x


class InList(Attribute):
    def __init__(self):
        super().__init__()
        self.kept = []

    def held(self):
        return self.kept[-1] if self.kept else None

    def hold(self, value):
        self.kept[:] = [] if value is None else [value]


class InDict(InList):
    def __init__(self):
        super().__init__()
        self.kept = {}

    def held(self):
        return self.kept.get("last")

    def hold(self, value):
        self.kept["last"] = value


class InBuffer(Attribute):
    def __init__(self):
        super().__init__()
        del self.kept
        self.register_buffer("kept", None)


class Cell(Attribute):
    """Whose state is a tuple."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(8, 8)

    def held(self):
        return None if self.kept is None else self.kept[0]

    def hold(self, value):
        self.kept = None if value is None else (value, value)

    def forward(self, x):
        self.kept = self.cell(x, self.kept)
        return self.kept[0] * x


class Around(nn.Module):
    """Calls it several times in each forward."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.neuron, self.last = Block(), kind(), Block()

    def forward(self, x):
        return sum(self.last(self.neuron(self.first(x))) for _ in range(3))


class Itself(Attribute):
    """The model itself keeps it, between its blocks."""

    def __init__(self, kind=None):
        torch.manual_seed(0)
        super().__init__()
        self.first, self.last = Block(), Block()

    def forward(self, x):
        return self.last(super().forward(self.first(x)))


def forget(neuron):
    neuron.hold(None)


def detach(neuron):
    if neuron.held() is not None:
        neuron.hold(neuron.held().detach())


def steps(model, run, between):
    """What some steps give; ``run`` runs the model."""
    neuron, seen = getattr(model, "neuron", model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x in XS:
        between(neuron)
        optimizer.zero_grad()
        y = run(x)
        y.square().mean().backward()
        optimizer.step()
        seen += [
            y.detach(),
            neuron.held().detach().clone(),
            *(p.grad.clone() for p in model.parameters() if p.requires_grad and p.grad is not None),
        ]
    return seen


def assert_equal(plain, ours):
    assert len(plain) == len(ours)
    assert all(map(torch.equal, plain, ours))


@pytest.mark.full
@pytest.mark.parametrize("between", [forget, detach])
@pytest.mark.parametrize("kind", [Attribute, Spikes, InList, InDict, InBuffer, Cell])
def test_a_module_that_keeps_its_history_is_an_opaque_module(kind, between):
    model = Around(kind)
    plain = copy.deepcopy(model)
    optimized = ogc.optimize(model, XS[0], memory_budget="least")
    assert {op.module for op in optimized.graph.operations if op.target.startswith("opaque")} == {"neuron"}
    assert_equal(steps(plain, plain, between), steps(model, optimized, between))


@pytest.mark.parametrize("between", [forget, detach])
def test_a_model_that_keeps_its_history_is_planned_in_parts(between):
    model = Itself()
    plain = copy.deepcopy(model)
    optimized = ogc.optimize(model, XS[0], memory_budget="least")
    assert {part.name for part in optimized.plan.parts} == {"first", "last"}
    assert_equal(steps(plain, plain, between), steps(model, optimized, between))


def amid(model, optimize):
    """A model is planned while a backward is to come that goes through what it keeps."""
    first = model(XS[0])
    run = optimize(model, XS[1])
    (first.square().mean() + run(XS[1]).square().mean()).backward()
    return [first.detach(), *(p.grad.clone() for p in model.parameters())]


def through_time(model, optimize):
    """One backward goes through several calls, and a second one through them again."""
    run = optimize(model, XS[0])
    total = sum(run(x).square().mean() for x in XS)
    total.backward(retain_graph=True)
    total.backward()
    return [total.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.full
@pytest.mark.parametrize("train", [amid, through_time])
@pytest.mark.parametrize("kind", [Attribute, InBuffer, None])
def test_backwards_through_earlier_calls(kind, train):
    model = Itself() if kind is None else Around(kind)
    plain = copy.deepcopy(model)
    assert_equal(train(plain, lambda module, x: module), train(model, ogc.optimize))


@pytest.mark.full
@pytest.mark.parametrize("profile", ["estimate", "time", "measure"])
def test_each_call_is_weighed_from_the_same_state(profile):
    model = Around(Attribute)
    model(XS[0])
    kept = model.neuron.kept
    ogc.parse(model, XS[0], profile=profile)
    assert model.neuron.kept is kept
    kept.sum().backward()  # which planning has left its graph
