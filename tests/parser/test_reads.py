"""Numbers that Python reads out of tensors: guards where inputs and buffers decide on them, else opaque modules."""

import logging

import pytest
import torch
from helpers import assert_same_training
from torch import nn

import ogc
from ogc.errors import ParseError
from ogc.runtime import runner


class Net(nn.Module):
    """``read`` turns the mask into whatever Python does with it; the layers around are planned."""

    def __init__(self, read):
        super().__init__()
        self.read = read
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("limit", torch.tensor([2.0, 7.0]))

    def forward(self, x, mask):
        x = torch.tanh(self.first(x))
        x = self.read(self, x, mask)
        return self.second(torch.sigmoid(x)).tanh()


def of_item(net, x, mask):
    return x * mask.sum().item()


def of_bool(net, x, mask):
    return x * 2 if mask.all() else x.sin()


def of_int(net, x, mask):
    for _ in range(int(mask.sum())):
        x = x * 1.5
    return x


def of_float(net, x, mask):
    return x.clamp(max=float(mask.float().mean()))


def of_list(net, x, mask):
    return x[:, mask.long().tolist()]


def of_nonzero(net, x, mask):
    return x[:, mask.nonzero()[:, 0]]


def of_unique(net, x, mask):
    return x * mask.unique().shape[0]


def of_boolean_index(net, x, mask):
    return x[:, mask]


def of_masked_select(net, x, mask):
    return x + torch.masked_select(x, mask).mean()


def of_repeats(net, x, mask):
    return torch.repeat_interleave(x, mask.long() + 1, dim=1).mean(1, keepdim=True) * x


def of_numpy(net, x, mask):
    return x * 2 if (mask.numpy() > 0).mean() > 0.5 else x.sin()


def of_equal(net, x, mask):
    return x * 2 if torch.equal(mask, torch.ones_like(mask)) else x.sin()


def of_a_check(net, x, mask):
    if mask.sum() > 100:
        raise ValueError("too many")
    return x * mask


def of_what_is_written_first(net, x, mask):
    known = torch.zeros(6)
    known[:2] = 1
    known[2:] = mask[2:].float()
    return x * 2 if known.sum() > 3 else x.sin()


READS = [
    of_item, of_bool, of_int, of_float, of_list, of_nonzero, of_unique, of_boolean_index, of_masked_select, of_repeats,
    of_numpy, of_equal, of_a_check, of_what_is_written_first,
]  # fmt: skip
SIZED = {of_nonzero, of_boolean_index}
X = torch.randn(5, 6)
MASKS = [
    torch.tensor([True, True, False, False, False, False]),
    torch.tensor([True] * 6),
    torch.tensor([False, True, False, True, True, True]),
]


class Sized(Net):
    def forward(self, x, mask):
        x = self.read(self, torch.tanh(self.first(x)), mask)
        return torch.sigmoid(x).exp().sum() * self.second.weight.tanh().sum()


@pytest.mark.full
@pytest.mark.parametrize("read", READS)
def test_what_the_inputs_decide_on_is_a_guard(read, caplog):
    model = (Sized if read in SIZED else Net)(read)
    with caplog.at_level(logging.WARNING):
        optimised = ogc.optimize(model, (X, MASKS[0]), memory_budget="least")
    assert "as they are" not in caplog.text
    guards = optimised.graph.program.guards
    assert guards is not None and all("test_reads.py:" in what for what in guards.what)
    for mask in (MASKS[0], *MASKS, *MASKS):
        assert_same_training(model, optimised, (X, mask), steps=1)


@pytest.mark.full
@pytest.mark.parametrize("read", READS)
def test_no_plan_is_made_twice(read, monkeypatch):
    made = []
    original = runner.Runner._make
    monkeypatch.setattr(runner.Runner, "_make", lambda *args: (made.append(1), original(*args))[1])
    model = (Sized if read in SIZED else Net)(read)
    optimised = ogc.optimize(model, (X, MASKS[0]), memory_budget="least")
    optimised(X, MASKS[0].clone())
    assert not made
    for _ in range(3):
        for mask in MASKS:
            optimised(X + 1, mask)
    assert len(made) <= 2


def test_the_log_says_what_was_read_and_where(caplog):
    optimised = ogc.optimize(Net(of_int), (X, MASKS[0]), memory_budget="least")
    with caplog.at_level(logging.INFO, logger="ogc.runtime.runner"):
        optimised(X, MASKS[1])
    assert "item() of a tensor at test_reads.py:" in caplog.text and "gives 6 where it gave 2" in caplog.text


@pytest.mark.full
def test_a_buffer_that_the_forward_leaves_alone_is_a_guard():
    def read(net, x, mask):
        return x * 2 if net.limit[0] > 1 else x.sin()

    model = Net(read)
    optimised = ogc.optimize(model, (X, MASKS[0]), memory_budget="least")
    for limit in (2.0, 0.0, 3.0):
        model.limit.fill_(limit)
        assert_same_training(model, optimised, (X, MASKS[0]), steps=1)


# -- what is no guard ------------------------------------------------------------------------------------------


class Part(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.read = read
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        return self.read(self, x * self.scale)


def activation(part, x):
    return x * 2 if x.sum() > 0 else x.sin()


def parameter(part, x):
    return x * part.scale * 2 if part.scale.sum() > 0 else x.sin() * part.scale


def counter(part, x):
    part.count += 1
    return x * float(part.count)


def chance(part, x):
    return x * 2 if torch.rand([]) < 0.5 else x.sin()


def chance_in_place(part, x):
    return x * 2 if torch.empty(1).uniform_() < 0.5 else x.sin()


def bernoulli(part, x):
    return x * 2 if torch.bernoulli(torch.tensor(0.5)) else x.sin()


def order(part, x):
    for k in torch.randperm(3).tolist():
        x = x * (k + 1) + k
    return x


def chance_of_numpy(part, x):
    return x * torch.rand(6).numpy().sum()


NO_GUARDS = [activation, parameter, counter, chance, chance_in_place, bernoulli, order, chance_of_numpy]


@pytest.mark.full
@pytest.mark.parametrize("read", NO_GUARDS)
def test_what_else_decides_makes_an_opaque_module(read):
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Part(read), nn.Linear(6, 6), nn.Sigmoid(), nn.Linear(6, 6))
    optimised = ogc.optimize(model, X, memory_budget="least")
    assert optimised.graph.program.guards is None
    assert [op.module for op in optimised.graph.operations if op.target.startswith("opaque")] == ["2"]
    for _ in range(2):
        assert_same_training(model, optimised, (X,), steps=3)
        assert_same_training(model, optimised, (-X,), steps=3)


@pytest.mark.parametrize("read", NO_GUARDS)
def test_at_the_root_it_is_refused(read):
    with pytest.raises(ParseError, match=r"test_reads.py:\d+.*(depends on|no program can hold)"):
        ogc.parse(Part(read), X)


@pytest.mark.full
def test_a_number_that_only_a_message_names_is_not_read():
    def read(part, x):
        return x * part.scale if len(f"{x.sum():.1f} {x}") else x

    model = Part(read)
    optimised = ogc.optimize(model, X, memory_budget="least")
    assert optimised.graph.program.guards is None
    assert_same_training(model, optimised, (X,))


class DropsLayers(nn.Module):
    """What it returns depends on chance, as where dropped layers leave no attention behind."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 60), nn.GELU(), nn.LayerNorm(60), nn.Linear(60, 6)) for _ in range(3)
        )

    def forward(self, x):
        seen = []
        for layer in self.layers:
            if torch.rand([]) < 0.7:
                x = layer(x)
                seen.append(x)
        return x, seen


class UsesLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drops, self.last = nn.Linear(6, 6), DropsLayers(), nn.Linear(6, 6)

    def forward(self, x):
        x, seen = self.drops(self.first(x).sin())
        return self.last(x + sum(seen)).sin().exp()


def test_results_that_are_left_to_chance_stay_with_what_uses_them():
    model, x = UsesLayers(), X.repeat(20, 1)
    with pytest.raises(ParseError, match="returns something else by chance"):
        ogc.parse(model, x)
    assert_same_training(model, ogc.optimize(model, x, memory_budget="least"), (x,), steps=5)  # in parts
