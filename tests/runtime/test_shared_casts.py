"""Autocast casts a parameter once for all who use it in a region; so do plans, with whatever else runs there."""

import pytest
import torch
from helpers import measured_peak
from torch import nn

import ogc
from ogc.program.autocast import cast


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 16)
        self.image = nn.Conv2d(1, 4, 3, padding=1)

    def forward(self, x):
        x = x + self.image(x.view(-1, 1, 4, 4)).mean(1).flatten(1)
        return self.last(torch.relu(self.first(torch.tanh(self.last(torch.relu(self.first(x))))).square()))


STEPS = {
    "one forward": lambda run, net, x: run(x),
    "two forwards": lambda run, net, x: run(x) + run(2 * x),
    "a weight outside": lambda run, net, x: run(x) + net.last(net.first(x)),
    "a weight outside before": lambda run, net, x: net.last(net.first(x)) + run(x),
    "another size": lambda run, net, x: run(x) + run(x[:5]).sum(),
}


def gradients(step, run, net, x, **settings):
    net.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, **settings):
        output = step(run, net, x)
    output.float().square().mean().backward()
    return [output.detach(), *(p.grad.clone() for p in net.parameters())]


@pytest.mark.full
@pytest.mark.parametrize("is_sample", [True, False], ids=["optimized under autocast", "without"])
@pytest.mark.parametrize("settings", [{}, {"cache_enabled": False}], ids=["shared", "each by itself"])
@pytest.mark.parametrize("step", STEPS)
def test_gradients_are_the_plain_models(step, settings, is_sample):
    torch.manual_seed(0)
    net, x = Net(), torch.randn(32, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_sample):
        optimised = ogc.optimize(net, x, memory_budget="least")
    expected = gradients(STEPS[step], net, net, x, **settings)
    for _ in range(2):  # of the first, calls are planned for
        assert all(map(torch.equal, gradients(STEPS[step], optimised, net, x, **settings), expected))


def test_the_region_of_a_wrapper_or_of_the_model_is_its_own():
    class Own(Net):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x)

    torch.manual_seed(0)
    net, x = Own(), torch.randn(32, 16)
    optimised = ogc.optimize(net, x, memory_budget="least")
    found = []
    for run in (net, optimised):
        net.zero_grad()
        (run(x).float().square().mean() + run(2 * x).float().mean()).backward()
        found.append([p.grad.clone() for p in net.parameters()])
    assert all(map(torch.equal, *found))


def test_what_is_shared_is_there_until_the_region_ends():
    """As many bytes as the weights have are held by autocast through the forward, whatever a plan does."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(12)))
    x = torch.randn(64, 256)

    class Wrapped(nn.Module):
        def __init__(self, run):
            super().__init__()
            self.run = run

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.run(x)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        optimised = ogc.optimize(net, x, memory_budget="least", effort=0)
    assert optimised.plan.peak_bytes == pytest.approx(measured_peak(Wrapped(optimised), (x,)), rel=0.02)
    assert optimised.plan.plain_peak_bytes == pytest.approx(measured_peak(Wrapped(net), (x,)), rel=0.02)


@pytest.mark.parametrize("shape", [(5, 4), (6,), (6, 4, 3, 3), (1, 7), (4, 1, 1, 1), (2, 3, 4, 5, 2)])
def test_a_cast_is_autocasts_own(shape):
    weight = torch.randn(shape, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        one, other = cast(weight, torch.bfloat16), cast(weight, torch.bfloat16)
    assert one.data_ptr() == other.data_ptr() and one.grad_fn is other.grad_fn
    assert torch.equal(one, weight.to(torch.bfloat16))
    assert not torch.is_autocast_enabled("cpu")
    assert cast(weight.detach(), torch.bfloat16).dtype == torch.bfloat16
    assert cast(torch.ones((), requires_grad=True), torch.bfloat16).dtype == torch.bfloat16
