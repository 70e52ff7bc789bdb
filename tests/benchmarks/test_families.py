"""The eight families: each trains as the plain model in a small size, and its subject is what it says."""

import pytest
import torch
from helpers import assert_same_training

import ogc
from benchmarks.families import OVERHEADS, SUBJECTS, loss_of, ways_of
from benchmarks.networks.mixer import Mixer
from benchmarks.networks.neural_operators import FourierNeuralOperator, SpectralConvolution

SMALL = {
    "mixer": (lambda: Mixer(size=32, patch=8, width=16, depth=3), (2, 3, 32, 32)),
    "fno_1d": (lambda: FourierNeuralOperator(1, 2, width=4, modes=3, hidden=2, depth=3), (2, 2, 16)),
    "fno_3d": (lambda: FourierNeuralOperator(3, 5, width=4, modes=2, hidden=4, depth=3), (2, 5, 8, 8, 6)),
}


@pytest.mark.parametrize("name", SMALL)
def test_small_ones_train_as_the_plain_model(name):
    make, shape = SMALL[name]
    model, x = make(), torch.randn(shape)
    assert_same_training(model, ogc.optimize(model, x), (x,))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_spectral_convolution_keeps_low_frequencies_alone(dims):
    layer = SpectralConvolution(1, 2, dims)
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[..., 0] = 1  # each frequency as it is
    points = torch.arange(16) / 16 * 2 * torch.pi
    low, high = (wave.view(1, 1, 16, *(1,) * (dims - 1)).expand(1, 1, *(16,) * dims) for wave in waves(points))
    assert torch.allclose(layer(low + high), low, atol=1e-5)


def waves(points):
    return 1 + points.sin(), (5 * points).sin()


def test_subjects_are_the_eight_families_and_ways_are_overheads():
    assert len(SUBJECTS) == 8
    model = torch.nn.Linear(4, 4)
    inputs = (torch.randn(2, 4),)
    ways = ways_of(model, inputs)
    assert list(ways) == ["plain", "ogc, +10%", "ogc, +15%", "ogc, +20%"]
    forward, plan = ways["ogc, +10%"]()
    assert plan.overhead <= OVERHEADS[0]
    assert torch.equal(forward().loss, loss_of(model, inputs)(model(*inputs)))
