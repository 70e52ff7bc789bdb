"""Reports about what a model is called with, what it returns, and what is done with that."""

from __future__ import annotations

import copy
from collections import namedtuple
from dataclasses import dataclass

import torch
from reported import Report, learn, mean_square, registering
from torch import nn
from trained import BATCH, Images, layers, sgd

REPORTS: dict[str, Report] = {}
report = registering(REPORTS)


class Named(nn.Module):
    """Blocks that take a state and flags by name alone."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(layers(2, out=32) for _ in range(3))
        self.bias = nn.Embedding(4, 32)

    def forward(self, *, hidden, position, scale=1.0, returns_all=False):
        seen = []
        for block in self.blocks:
            hidden = self.add(block, state=hidden, bias=self.bias(position), scale=scale)
            seen.append(hidden)
        return {"last": hidden, "all": tuple(seen) if returns_all else None}

    @staticmethod
    def add(block, *, state, bias, scale):
        return state + scale * block(state + bias)


@report("pytorch/pytorch#79887", 0.8)
def blocks_that_are_called_by_names(training):
    named = {"hidden": torch.randn(BATCH, 32), "position": torch.randint(4, (BATCH,)), "scale": 0.5}
    run = training.optimize(Named(), named)
    learn(training, run, (), **named)
    learn(training, run, (), returns_all=True, **named)


@dataclass
class Both:
    state: torch.Tensor
    score: torch.Tensor | None
    name: str = ""


Pair = namedtuple("Pair", "first second")


class ReturnsADataclass(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = layers(4, out=32), layers(4, out=32)

    def forward(self, x):
        both = self.score(self.first(x))
        return Both(self.second(both.state), both.score, both.name)

    @staticmethod
    def score(x):
        return Both(x, x.mean(1), "mean")


@report("pytorch/pytorch#124725", 0.8)
def a_dataclass_that_a_region_returns(training):
    x = torch.randn(BATCH, 32)
    run = training.optimize(ReturnsADataclass(), x)
    optimizer = sgd(run)
    for _ in range(3):
        optimizer.zero_grad()
        both = training.measured(lambda: step(run(x)))
        assert isinstance(both, Both) and both.name == "mean" and both.state.requires_grad and both.score.requires_grad
        training.same(both.state, both.score)
        optimizer.step()


def step(both):
    (both.state.square().mean() + both.score.square().mean()).backward()
    return both


class TakesAPair(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = layers(4, out=32)

    def forward(self, pair):
        return Pair(self.body(pair.first) + pair.second, pair.second)


@report("pytorch/pytorch#85088", 0.8)
def named_tuples_that_go_in_and_out(training):
    pair = Pair(torch.randn(BATCH, 32), torch.randn(BATCH, 32))
    run = training.optimize(TakesAPair(), (pair,))
    assert type(run(pair)) is Pair
    learn(training, run, (pair,))


class Mask:
    """Which keys a query sees: tensors and a function, in an object of its own."""

    def __init__(self, length):
        self.rows = torch.arange(length)
        self.blocks = (self.rows[:, None] >= self.rows).view(1, length, length)
        self.rule = torch.ge

    def bias(self):
        return torch.zeros(self.blocks.shape).masked_fill(~self.blocks, -1e9)


class Masked(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(16, 48) for _ in range(depth))
        self.mlp = nn.ModuleList(layers(1, 16, 16) for _ in range(depth))

    def forward(self, x, mask):
        for qkv, mlp in zip(self.qkv, self.mlp, strict=True):
            q, k, v = qkv(x).chunk(3, -1)
            x = x + mlp(torch.softmax(q @ k.mT / 4 + mask.bias(), -1) @ v)
        return x


@report("meta-pytorch/attention-gym#53", 0.8)
def a_mask_that_is_an_object(training):
    x, mask = torch.randn(4, 32, 16), Mask(32)
    learn(training, training.optimize(Masked(), (x, mask)), (x, mask))


@report("lucidrains/memory-efficient-attention-pytorch#3", 0.8)
def gradients_by_grad_and_of_some_inputs(training):
    x = torch.randn(BATCH, 32, requires_grad=True)
    run = training.optimize(layers(), x)
    weights = list(run.parameters())

    def both():
        training.same(*torch.autograd.grad(mean_square(run(x)), [x, *weights[:4]]))
        mean_square(run(x)).backward(inputs=[x, weights[-1]])

    for _ in range(2):
        training.measured(both)
    training.same(x.grad)


@report("openai/guided-diffusion#144")
def a_gradient_within_the_loss_and_a_second_backward(training):
    x = torch.randn(BATCH, 32, requires_grad=True)
    run = training.optimize(layers(), x)
    for _ in range(2):
        out = run(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        loss = out.square().mean() + slope.square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        training.same(out, slope)


class Energy(nn.Module):
    """The energy of atoms by their distances, as smooth as forces and a Hessian need it."""

    def __init__(self):
        super().__init__()
        self.embed, self.body, self.out = nn.Linear(8, 16), layers(4, 16, 16, drop=0.0), nn.Linear(16, 1)

    def forward(self, positions):
        apart = positions[:, None] - positions[None] + 1e-2
        distances = apart.square().sum(-1, keepdim=True).sqrt()
        features = torch.exp(-(distances - torch.linspace(0, 2, 8)).square())
        return self.out(self.body(self.embed(features)).sum(1)).sum()


@report("facebookresearch/fairchem#1975")
def energy_forces_and_hessian(training):
    positions = torch.rand(8, 3, requires_grad=True)
    run = training.optimize(Energy(), positions)
    for _ in range(2):
        energy = run(positions)
        (forces,) = torch.autograd.grad(energy, positions, create_graph=True)
        hessian = [torch.autograd.grad(f, positions, retain_graph=True)[0] for f in forces.flatten()[:4]]
        training.same(energy, forces, *hessian)
        (energy + forces.square().mean()).backward()


@report(
    "pytorch/pytorch#165880",
    says="it runs in a transform of torch.func or with forward-mode derivatives, which recompute nothing",
)
def gradients_of_each_sample(training):
    x = torch.randn(16, 32)
    run = training.optimize(layers(drop=0.0), torch.randn(BATCH, 32))
    weights = {name: p.detach() for name, p in run.named_parameters()}

    def loss(weights, x):
        return torch.func.functional_call(run, weights, (x[None],)).square().mean()

    training.same(*torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x).values())


class SomeNeedNone(nn.Module):
    """Two heads; one has no trained weights and gets no gradients."""

    def __init__(self):
        super().__init__()
        self.open, self.closed = layers(4, out=32), layers(4, out=32).requires_grad_(False)

    def forward(self, x):
        return self.open(x), self.closed(x)


@report("facebookresearch/fairscale#787", 0.8)
def outputs_that_need_no_gradients(training):
    x = torch.randn(BATCH, 32)
    learn(training, training.optimize(SomeNeedNone(), x), (x,))


@report("pytorch/pytorch#7617", 0.8)
def inputs_that_need_no_gradients(training):
    """The first layer's input needs none, and neither does an integer beside it; the outputs do."""
    learn(training, training.optimize(Named(), named()), (), **named())


def named():
    g = torch.Generator().manual_seed(3)
    return {"hidden": torch.randn(BATCH, 32, generator=g), "position": torch.randint(4, (BATCH,), generator=g)}


@report("huggingface/transformers#23170", 0.8)
def weights_that_are_frozen_below_those_that_are_trained(training):
    x, model = torch.randn(BATCH, 32), layers(8)
    model[:5].requires_grad_(False)
    model[6].requires_grad_(False)
    learn(training, training.optimize(model, x), (x,))


@report("huggingface/trl#1066", 0.8)
def gradients_in_eval_mode(training):
    x = torch.randn(BATCH, 32)
    run = training.optimize(layers().eval(), x)
    learn(training, run, (x,))
    learn(training, run.train(), (x,), count=1)


class Wrapped(nn.Module):
    """With attributes, a property and a method that callers use."""

    def __init__(self):
        super().__init__()
        self.body, self.width, self.names = layers(out=32), 32, ["a", "b"]

    @property
    def depth(self):
        return len(self.body) - 1

    def features(self, x):
        return self.body[:2](x)

    def forward(self, x):
        return self.body(x)


@report("pytorch/pytorch#78854", 0.8)
def attributes_of_a_wrapped_module(training):
    x, model = torch.randn(BATCH, 32), Wrapped()
    run = training.optimize(model, x)
    assert isinstance(run, Wrapped) and (run.depth, run.width, run.names) == (8, 32, ["a", "b"])
    run.names.append("c")
    assert model.names == ["a", "b", "c"] and len(run.body) == 9
    training.same(run.features(x))
    learn(training, run, (x,))


@report("pytorch/pytorch#77224")
def keys_of_a_wrapped_modules_state(training):
    x, model = torch.randn(BATCH, 32), Wrapped()
    run = training.optimize(model, x)
    assert list(run.state_dict()) == list(Wrapped().state_dict())
    assert [*dict(run.named_modules())] == [*dict(Wrapped().named_modules())]
    learn(training, run, (x,))
    other = Wrapped()
    other.load_state_dict(run.state_dict())
    run.load_state_dict(copy.deepcopy(other.state_dict()))
    learn(training, run, (x,))


@report("facebookresearch/fairscale#660", 0.8)
def layers_that_are_converted_afterwards(training):
    """Other modules are put in the place of the batch norms, in the optimized model, between steps."""
    x = torch.randn(8, 3, 16, 16)
    run = training.optimize(Images(), x)
    learn(training, run, (x,), count=1)
    for block in run.body:
        norm = nn.GroupNorm(2, block[1].num_features)
        norm.weight.data.copy_(block[1].weight.data)
        block[1] = norm
    learn(training, run, (x,))


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.gru, self.head = nn.Embedding(40, 16), nn.GRU(16, 16, batch_first=True), layers(2, 16, 16)

    def forward(self, ids, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        padded, _ = nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        return self.head(padded)


@report("pytorch/pytorch#47439")
def packed_sequences_in_a_region(training):
    ids, lengths = torch.randint(40, (8, 16)), torch.tensor([16, 9, 12, 3, 16, 5, 7, 11])
    run = training.optimize(Packed(), (ids, lengths))
    learn(training, run, (ids, lengths), count=1)
    learn(training, run, (ids, lengths.clamp(max=10)), count=1)


class ManyInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.each, self.all = layers(1, 16, 16), layers(1, 16, 4)

    def forward(self, inputs):
        return self.all(torch.stack([self.each(x) for x in inputs]).mean(0))


@report("pytorch/pytorch#6959", 0.8)
def dozens_of_regions_side_by_side(training):
    inputs = [torch.randn(16, 16) for _ in range(60)]
    learn(training, training.optimize(ManyInputs(), (inputs,)), (inputs,), count=2)
