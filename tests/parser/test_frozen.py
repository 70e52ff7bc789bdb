"""Models without trainable parameters, or with few: what their inputs' gradients take is planned like anything else."""

import pytest
import torch
from torch import nn

import ogc
from ogc.errors import InputError
from ogc.torch_state.allocator import peak_bytes


class Features(nn.Module):
    """Convolutions of which features are compared, as in a perceptual loss."""

    def __init__(self, width=32):
        super().__init__()
        layers = [nn.Conv2d(3, width, 3, padding=1), nn.GELU()]
        for _ in range(5):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.GELU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)


def loss(features):
    return features.square().mean()


def measured(model, x):
    def step():
        x.grad = torch.zeros_like(x)
        loss(model(x)).backward()

    step()
    return peak_bytes(step, "cpu")


def images():
    return torch.randn(4, 3, 32, 32, requires_grad=True)


def test_a_frozen_model_whose_input_requires_grad_is_planned():
    model, x = Features().requires_grad_(False), images()
    optimised = ogc.optimize(model, x, loss=loss, holds_outputs=False, memory_budget="least")
    assert optimised.plan.peak_bytes < 0.6 * optimised.plan.plain_peak_bytes
    for run, promised in ((model, optimised.plan.plain_peak_bytes), (optimised, optimised.plan.peak_bytes)):
        x.grad = None
        assert measured(run, x) - 4 * x.numel() == pytest.approx(promised, rel=0.02)
    gradients = []
    for run in (model, optimised):
        x.grad = None
        loss(run(x)).backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
    assert all(p.grad is None for p in model.parameters())
    ogc.check(model, optimised, x).raise_if_different()


def test_a_model_without_parameters_is_planned():
    model = nn.Sequential(*[nn.Sequential(nn.Sigmoid(), nn.GELU(), nn.Softmax(-1)) for _ in range(4)])
    x = torch.randn(32, 200, requires_grad=True)
    optimised = ogc.optimize(model, x, memory_budget=0.8)
    assert not optimised.plan.is_plain
    ogc.check(model, optimised, x).raise_if_different()


@pytest.mark.full
def test_a_frozen_model_behind_a_projector_is_planned_in_one():
    class Projected(nn.Module):
        def __init__(self):
            super().__init__()
            self.projector, self.frozen = nn.Conv2d(3, 3, 1), Features().requires_grad_(False)

        def forward(self, x):
            return self.frozen(self.projector(x))

    model, x = Projected(), torch.randn(4, 3, 32, 32)
    optimised = ogc.optimize(model, x, loss=loss, memory_budget="least")
    assert optimised.plan.peak_bytes < 0.7 * optimised.plan.plain_peak_bytes
    ogc.check(model, optimised, x).raise_if_different()


def test_frozen_weights_keep_nothing_that_only_their_gradient_needs():
    def saved_bytes(model):
        graph = ogc.parse(model, torch.randn(64, 32, requires_grad=True))
        return sum(graph.values[v].bytes for v in {v for op in graph.operations for v in op.saves})

    layers = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)])
    assert saved_bytes(layers.requires_grad_(False)) < 0.6 * saved_bytes(layers.requires_grad_(True))


def test_nothing_that_requires_grad_is_refused():
    with pytest.raises(InputError, match="no parameter of the model requires grad, and no tensor of sample_input"):
        ogc.optimize(Features().requires_grad_(False), images().detach(), memory_budget="least")
