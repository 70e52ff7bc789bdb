"""What people put around an optimized module's forward, and what they read off it."""

import copy
import inspect
from functools import wraps

import pytest
import torch
from torch import nn

import ogc


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x, scale: float = 1.0, *, shift=0.0):
        return self.last(torch.relu(self.first(x)).square() * scale + shift)


class Split(Net):
    """Planned in parts: its own Python runs each time."""

    def forward(self, x, scale: float = 1.0, *, shift=0.0):
        hidden = nn.Sequential(self.first, nn.ReLU())(x) if x.sum() > -1e9 else x
        return self.last(hidden)


def step(run, model, *args):
    model.zero_grad()
    output = run(*args)
    output.float().square().mean().backward()
    return [output.detach(), *(p.grad.clone() for p in model.parameters())]


def in_bfloat16(forward):
    @wraps(forward)
    def wrapped(*args, **kwargs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return forward(*args, **kwargs)

    return wrapped


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


def test_a_wrapper_is_the_optimized_modules_alone(net):
    x = torch.randn(16, 8)
    plain = step(net, net, x)
    expected = step(in_bfloat16(net), net, x)
    optimised = ogc.optimize(net, x, memory_budget="least")
    optimised.forward = in_bfloat16(optimised.forward)
    for _ in range(2):  # the first call is planned for
        assert all(map(torch.equal, step(optimised, net, x), expected))
        assert not torch.is_autocast_enabled("cpu")
    assert "forward" not in vars(net)
    assert all(map(torch.equal, step(net, net, x), plain))
    assert not torch.is_autocast_enabled("cpu")
    del optimised.forward
    assert all(map(torch.equal, step(optimised, net, x), plain))
    with pytest.raises(AttributeError, match="forward"):
        del optimised.forward


def test_a_wrapper_is_called_once_a_call(net):
    calls = []

    def counted(forward):
        @wraps(forward)
        def wrapped(*args, **kwargs):
            calls.append(1)
            return 2 * forward(*args, **kwargs)

        return wrapped

    x = torch.randn(16, 8)
    optimised = ogc.optimize(net, x, memory_budget="least")
    optimised.forward = counted(optimised.forward)
    for size in (16, 5, 5):  # another size is planned for inside the call
        assert torch.equal(optimised(x[:size]), 2 * net(x[:size]))
    assert len(calls) == 3


def test_another_optimized_module_of_the_model_has_a_forward_of_its_own(net):
    x = torch.randn(16, 8)
    one, other = ogc.optimize(net, x, memory_budget="least"), ogc.optimize(net, x, memory_budget="least")
    one.forward = in_bfloat16(one.forward)
    assert one(x).dtype == torch.bfloat16 and other(x).dtype == net(x).dtype == torch.float32
    again = ogc.optimize(one, x, memory_budget="least")
    assert again(x).dtype == torch.float32  # of the model, not of what was wrapped around another one


def test_signature_and_name_are_the_models(net):
    optimised = ogc.optimize(net, torch.randn(16, 8), memory_budget="least")
    assert inspect.signature(optimised.forward) == inspect.signature(net.forward)
    assert type(optimised).__name__ == type(optimised).__qualname__ == "Net" and isinstance(optimised, Net)
    assert type(optimised) is not Net and optimised.plan is not None
    assert type(copy.deepcopy(optimised)).__name__ == "Net"


def test_a_model_in_parts_is_wrapped_alike():
    model = Split()
    x = torch.randn(16, 8)
    expected = step(in_bfloat16(model), model, x)
    optimised = ogc.optimize(model, x, memory_budget="least")
    optimised.forward = in_bfloat16(optimised.forward)
    assert all(map(torch.equal, step(optimised, model, x), expected))
    assert inspect.signature(ogc.optimize(model, x, memory_budget="least").forward) == inspect.signature(model.forward)
    assert "forward" not in vars(model)


def test_a_forward_that_was_wrapped_before_is_planned_as_it_is(net):
    x = torch.randn(16, 8)
    net.forward = in_bfloat16(net.forward)
    plain = step(net, net, x)
    optimised = ogc.optimize(net, x, memory_budget="least")
    assert not optimised.plan.is_plain and plain[0].dtype == torch.bfloat16
    assert all(map(torch.equal, step(optimised, net, x), plain))
    assert inspect.signature(optimised.forward) == inspect.signature(net.forward)
    twin = copy.deepcopy(optimised)
    assert all(map(torch.equal, step(twin, twin, x), plain))
    del net.forward  # as trainers do at the end: what was planned is not what the model is now
    assert optimised(x).dtype == torch.float32
    assert all(map(torch.equal, step(optimised, net, x), step(net, net, x)))


def test_it_may_be_wrapped_again_on_top(net):
    x = torch.randn(16, 8)
    net.forward = in_bfloat16(net.forward)
    optimised = ogc.optimize(net, x, memory_budget="least")
    inner = optimised.forward
    optimised.forward = lambda x: 2 * inner(x)
    assert torch.equal(optimised(x), 2 * net(x)) and net(x).dtype == torch.bfloat16


def test_a_wrapped_model_gets_no_loss_behind_it(net):
    net.forward = in_bfloat16(net.forward)
    with pytest.raises(ogc.InputError, match="or a loss behind it"):
        ogc.optimize(
            net, torch.randn(16, 8), loss=lambda out: out.float().mean(), outputs="loss", memory_budget="least"
        )
