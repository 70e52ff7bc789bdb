"""Buffers that a forward resizes, as those that are sized by the first batch, and observers of quantization."""

import copy

import pytest
import torch
from helpers import forced
from torch import nn
from torch.ao.quantization import fake_quantize, observer

import ogc

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

XS = [torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows)) for rows in (4, 5, 4, 6)]


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))


class Mean(nn.Module):
    """Its buffer gets its size by the first batch."""

    def __init__(self, size):
        super().__init__()
        self.layer, self.size = nn.Linear(8, 8), size
        self.register_buffer("mean", torch.empty(0))

    def forward(self, x):
        x = self.layer(x)
        with torch.no_grad():
            if self.mean.numel() == 0:
                self.size(self)
            self.mean.mul_(0.9).add_(x.mean(0))
        return x * (1 + self.mean.to(x.dtype))


def resize(module):
    module.mean.resize_(8).zero_()


def resize_as(module):
    module.mean.resize_as_(module.layer.bias).zero_()


def set_data(module):
    module.mean.data = torch.zeros(8)


def set_memory(module):
    module.mean.set_(torch.zeros(8))


def another_type(module):
    module.mean.data = torch.zeros(8, dtype=torch.float64)


class Last(nn.Module):
    """Its buffer has the size of the last batch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("last", torch.empty(0))

    def forward(self, x):
        x = self.layer(x)
        with torch.no_grad():
            self.last.resize_(x.shape).copy_(x)
        return x


class Observed(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.observer = nn.Linear(8, 8), kind()

    def forward(self, x):
        return x @ self.observer(self.layer.weight) + self.layer.bias


def fake(kind, **options):
    moving = observer.MovingAveragePerChannelMinMaxObserver
    return kind(moving, ch_axis=0, quant_min=-128, quant_max=127, dtype=torch.qint8, **options)


OBSERVERS = {
    "per channel": lambda: observer.PerChannelMinMaxObserver(ch_axis=0),
    "moving": lambda: observer.MovingAveragePerChannelMinMaxObserver(ch_axis=0),
    "fake": lambda: fake(fake_quantize.FakeQuantize),
    "fused": lambda: fake(fake_quantize.FusedMovingAvgObsFakeQuantize),
}
MAKE = {
    **{size.__name__: lambda size=size: Mean(size) for size in (resize, resize_as, set_data, set_memory, another_type)},
    "each batch": Last,
    **{name: lambda kind=kind: Observed(kind) for name, kind in OBSERVERS.items()},
}


def steps(model, run):
    seen, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.05)
    for x in XS:
        optimizer.zero_grad()
        y = run(x)
        y.square().mean().backward()
        optimizer.step()
        seen += [y.detach(), *(p.grad.clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]
    return seen


@pytest.mark.full
@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("name", MAKE)
def test_buffers_that_a_forward_resizes_are_as_in_the_plain_model(name, is_warm):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), MAKE[name](), Block())
    if is_warm:
        model(XS[0])
    plain, before = copy.deepcopy(model), {n: (b, b.clone()) for n, b in model.named_buffers()}
    optimized = ogc.optimize(model, XS[0], memory_budget="least")
    for key, buffer in model.named_buffers():
        same, content = before[key]
        assert buffer is same and buffer.dtype == content.dtype and torch.equal(buffer, content), key
    assert all(map(torch.equal, steps(plain, plain), steps(model, optimized)))


@pytest.mark.full
def test_what_a_resized_buffer_is_put_back_to_is_its_own_memory():
    module, other = Mean(lambda module: module.mean.set_(other)), torch.zeros(8)
    memory = module.mean.untyped_storage().data_ptr(), module.mean.untyped_storage()._cdata
    ogc.optimize(nn.Sequential(Block(), module, Block()), XS[0], memory_budget="least")
    assert (module.mean.untyped_storage().data_ptr(), module.mean.untyped_storage()._cdata) == memory


@pytest.mark.parametrize("is_warm", [False, True])
def test_what_is_written_uncounted_is_never_written_twice(is_warm):
    """The kernel updates its running minimum and maximum, whose version counters stay."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Observed(OBSERVERS["fused"]), Block())
    if is_warm:
        model(XS[0])
    plain, optimized = copy.deepcopy(model), forced(model, XS[0])
    assert all(map(torch.equal, steps(plain, plain), steps(model, optimized)))
