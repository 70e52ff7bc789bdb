"""Operators in place that save a copy of what they write over run without underscore: as many bytes, and no copy."""

import pytest
import torch
from helpers import assert_same_training, forced, measured_peak
from models import Doubled
from torch import nn

import ogc

ACTIVATIONS = [nn.SiLU, nn.Hardswish, nn.Mish, nn.ReLU6]


def images():
    return torch.randn(2, 3, 24, 24)


class Network(nn.Module):
    """Two convolutions with an activation in place between them."""

    def __init__(self, activation=nn.SiLU):
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)
        self.activation = activation(inplace=True)

    def forward(self, x):
        return self.last(self.activate(self.norm(self.first(x))))

    def activate(self, x):
        return self.activation(x)


class WithView(Network):
    """The activation writes what somebody sees through a view."""

    def activate(self, x):
        view = x.flatten(1)
        return self.activation(x) * view.mean()


class WithWhole(Network):
    """The activation writes a part of a tensor."""

    def activate(self, x):
        self.activation(x[:, :4])
        return x


class OfLeaf(Network):
    """The activation writes what came from a module that is called as it is, which may have kept it."""

    def __init__(self):
        super().__init__()
        self.norm = Kept(8)


class Kept(nn.BatchNorm2d):
    def forward(self, x):
        return Doubled.apply(super().forward(x))


class WithoutGradients(Network):
    def activate(self, x):
        with torch.no_grad():
            return self.activation(x.detach())


class Returned(Network):
    """What is written is returned, under both names."""

    def forward(self, x):
        made = self.norm(self.first(x))
        return self.last(self.activate(made)), made


class Added(Network):
    """What is written comes from no module."""

    def activate(self, x):
        return self.activation(x + 1)


def targets(graph):
    return [op.target for op in graph.operations]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_operand_is_saved_in_the_place_of_a_copy(activation):
    model = Network(activation)
    graph = ogc.parse(model, images())
    (act,) = (op for op in graph.operations if op.reads and op.module == "activation")
    assert not act.target.endswith("_.default") and act.takes_over is None
    assert act.saves == act.reads and not act.internal_bytes
    plain = measured_peak(model, (images(),), loss=torch.sum, holds_outputs=True)
    assert abs(ogc.solve(graph, solver="none").peak_bytes - plain) <= 1024
    assert_same_training(model, forced(model, images()), (images(),))
    assert_same_training(model, ogc.optimize(model, images(), memory_budget="least"), (images(),))


@pytest.mark.parametrize("kind", [WithView, WithWhole, WithoutGradients, OfLeaf])
def test_what_others_see_is_written_in_place(kind):
    model = kind()
    assert "aten.silu_.default" in targets(ogc.parse(model, images()))
    assert_same_training(model, forced(model, images()), (images(),))


@pytest.mark.parametrize("kind", [Added, Returned])
def test_what_nothing_else_uses_is_not_written(kind):
    model = kind()
    assert "aten.silu.default" in targets(ogc.parse(model, images()))
    assert_same_training(model, forced(model, images()), (images(),))


@pytest.mark.full
@pytest.mark.usefixtures("measured_times")
@pytest.mark.parametrize("profile", ["time", "measure"])
def test_the_plain_models_copies_are_left_out(profile):
    x = torch.randn(8, 3, 128, 128)
    alike = Network()
    alike.activation = nn.SiLU()
    copied, other = (ogc.parse(model, x, profile=profile).runtime.left_out for model in (Network(), alike))
    assert copied > other + 1e-4  # a copy of 4 MB
