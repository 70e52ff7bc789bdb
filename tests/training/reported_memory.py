"""Reports where nothing was saved, or what was saved never went."""

from __future__ import annotations

import gc
import weakref

import torch
from reported import Report, learn, mean_square, registering
from torch import nn
from torch.nn import functional as F
from trained import BATCH, layers

REPORTS: dict[str, Report] = {}
report = registering(REPORTS)


@report("pytorch/pytorch#77284", 0.5)
def a_plan_that_keeps_less_than_the_plain_model(training):
    x = torch.randn(2 * BATCH, 32)
    learn(training, training.optimize(layers(12), x), (x,))


class Remembers(nn.Module):
    """Its forward returns a table whose function holds the table itself, and with it the result."""

    def __init__(self):
        super().__init__()
        self.body = layers(4, out=32)

    def forward(self, x):
        table = {}
        table["out"] = self.again(lambda x: self.body(x) + 0 * len(table), x)
        return table

    @staticmethod
    def again(function, x):
        return function(x)


@report("pytorch/pytorch#84413")
def results_that_go_without_the_garbage_collector(training):
    """With and without a backward, what a step made goes with its results."""
    x = torch.randn(BATCH, 32)
    run = training.optimize(Remembers(), x)
    learn(training, run, (x,))
    gc.collect()
    gc.disable()
    try:
        for ends in (True, False):
            out = run(x)["out"]
            if ends:
                mean_square(out).backward()
            result = weakref.ref(out)
            del out
            assert result() is None
    finally:
        gc.enable()


class Leaky(torch.autograd.Function):
    """Saves results of its own, of which one is never used."""

    @staticmethod
    def forward(ctx, x):
        first, second = torch.sin(x), torch.cos(x)
        ctx.save_for_backward(first, second)
        return first, second

    @staticmethod
    def backward(ctx, g, h):
        first, second = ctx.saved_tensors
        return g * second - h * first


class EndsInAFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        return Leaky.apply(F.softplus(self.linear(x)))[0]


@report("pytorch/pytorch#161186", 0.8)
def a_region_that_ends_in_a_custom_function(training):
    x = torch.randn(BATCH, 32)
    run = training.optimize(nn.Sequential(*(EndsInAFunction() for _ in range(6))), x)
    learn(training, run, (x,))
    made = weakref.WeakSet()
    for _ in range(3):
        out = run(x)
        made.add(out.grad_fn)
        mean_square(out).backward()
        del out
    assert not made


class Flow(nn.Module):
    """An ODE integrated by the classic method of Runge and Kutta, in steps whose number is an attribute."""

    def __init__(self, steps=8):
        super().__init__()
        self.field, self.steps = nn.Sequential(nn.Linear(17, 32), nn.Tanh(), nn.Linear(32, 16)), steps

    def slope(self, t, y):
        return self.field(torch.cat([y, torch.full_like(y[:, :1], t)], 1))

    def forward(self, y):
        h = 1 / self.steps
        for n in range(self.steps):
            t = n * h
            a = self.slope(t, y)
            b = self.slope(t + h / 2, y + h / 2 * a)
            c = self.slope(t + h / 2, y + h / 2 * b)
            d = self.slope(t + h, y + h * c)
            y = y + h / 6 * (a + 2 * b + 2 * c + d)
        return y


@report("rtqichen/torchdiffeq#259", 0.4)
def an_ode_in_little_memory(training):
    y = torch.randn(64, 16)
    learn(training, training.optimize(Flow(), y), (y,))


@report("rtqichen/torchdiffeq#29")
def gradients_of_gradients_of_an_ode(training):
    y = torch.randn(64, 16, requires_grad=True)
    run = training.optimize(Flow(4), y)
    for _ in range(2):
        (slope,) = torch.autograd.grad(run(y).square().sum(), y, create_graph=True)
        slope.square().mean().backward()
        training.same(slope)


class Spectral(nn.Module):
    """A Fourier layer with complex weights, whose low modes are written into an empty spectrum."""

    def __init__(self, width=8, modes=5):
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(width, width, modes, modes, dtype=torch.cfloat))
        self.skip, self.modes = nn.Conv2d(width, width, 1), modes

    def forward(self, x):
        spectrum = torch.fft.rfft2(x)
        out = torch.zeros_like(spectrum)
        m = self.modes
        out[..., :m, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[..., :m, :m], self.weight)
        return F.gelu(torch.fft.irfft2(out, s=x.shape[-2:]) + self.skip(x))


@report("neuraloperator/pino-closure-models#1", 0.8)
def fourier_layers(training):
    x = torch.randn(4, 8, 16, 16)
    learn(training, training.optimize(nn.Sequential(*(Spectral() for _ in range(4))), x), (x,))


class Messages(nn.Module):
    """Weights for each edge made by a small network, as in NNConv: most of the memory."""

    def __init__(self, width=8):
        super().__init__()
        self.of_edge = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, width * width))
        self.root, self.width = nn.Linear(width, width), width

    def forward(self, x, edges, features):
        weights = self.of_edge(features).view(-1, self.width, self.width)
        sent = torch.einsum("ei,eij->ej", x[edges[0]], weights)
        got = torch.zeros_like(x).index_add_(0, edges[1], sent)
        count = torch.zeros(len(x), 1).index_add_(0, edges[1], torch.ones(len(sent), 1))
        return torch.relu(self.root(x) + got / count.clamp(min=1))


class Molecules(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(Messages() for _ in range(depth))

    def forward(self, x, edges, features):
        for layer in self.layers:
            x = x + layer(x, edges, features)
        return x.mean(0)


@report("pyg-team/pytorch_geometric#1415", 0.7)
def weights_of_each_edge(training):
    given = torch.randn(40, 8), torch.randint(40, (2, 240)), torch.randn(240, 4)
    learn(training, training.optimize(Molecules(), given), given)


@report("neuraloperator/neuraloperator#726", 0.8)
def messages_that_are_added_up_in_chunks(training):
    given = torch.randn(40, 8), torch.randint(40, (2, 160)), torch.randn(160, 4)
    learn(training, training.optimize(Chunked(), given), given)


class Chunked(Molecules):
    def forward(self, x, edges, features):
        for layer in self.layers:
            parts = zip(edges.split(90, 1), features.split(90), strict=True)
            x = x + torch.stack([layer(x, part, known) for part, known in parts]).sum(0)
        return x.mean(0)


class SkipsAcross(nn.Module):
    """A small U-Net with adapters of low rank beside frozen convolutions."""

    def __init__(self, width=8):
        super().__init__()
        self.down = nn.ModuleList(self.block(w, w) for w in (width,) * 3)
        self.up = nn.ModuleList(self.block(2 * width, width) for _ in range(3))
        self.adapters = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, 2, 1, bias=False), nn.Conv2d(2, width, 1, bias=False)) for _ in range(3)
        )

    @staticmethod
    def block(a, b):
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.SiLU()).requires_grad_(False)

    def forward(self, x):
        seen = []
        for block, adapter in zip(self.down, self.adapters, strict=True):
            x = block(x) + adapter(x)
            seen.append(x)
            x = F.avg_pool2d(x, 2)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), seen.pop()], 1))
        return x


@report("huggingface/diffusers#6388", 0.8)
def adapters_in_a_frozen_unet(training):
    x = torch.randn(4, 8, 16, 16)
    learn(training, training.optimize(SkipsAcross(), x), (x,))


class Dense(nn.Module):
    """Layers that each take all results before, concatenated."""

    def __init__(self, depth=6, growth=4):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(4 + n * growth), nn.ReLU(), nn.Conv2d(4 + n * growth, growth, 3, padding=1))
            for n in range(depth)
        )

    def forward(self, x):
        seen = [x]
        for layer in self.layers:
            seen.append(layer(torch.cat(seen, 1)))
        return torch.cat(seen, 1)


@report("gpleiss/efficient_densenet_pytorch#73", 0.75)
def concatenations_and_their_statistics(training):
    x = torch.randn(8, 4, 12, 12)
    learn(training, training.optimize(Dense(), x), (x,))


class Recycled(nn.Module):
    """Passes without gradients before the one that is trained, over a pair of representations."""

    def __init__(self, passes=3):
        super().__init__()
        self.blocks, self.passes = nn.ModuleList(layers(2, out=32) for _ in range(4)), passes

    def forward(self, x):
        state = torch.zeros_like(x)
        for number in range(self.passes):
            with torch.set_grad_enabled(number == self.passes - 1):
                state = self.one(x, state)
        return state

    def one(self, x, state):
        x = x + state.detach()
        for block in self.blocks:
            x = x + block(x)
        return x


@report("aqlaboratory/openfold#109", 0.6)
def passes_without_gradients_before_the_one_that_has_them(training):
    x = torch.randn(BATCH, 32)
    learn(training, training.optimize(Recycled(), x), (x,))
