"""What a forward computes under ``no_grad`` saves nothing, so its operands and results may be written afterwards."""

import random

import pytest
import torch
from helpers import assert_same_training, forced, random_plans
from torch import nn

import ogc
from ogc.errors import ParseError
from ogc.program.program import WithoutGrad

X = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """``part`` between two layers, twice."""

    def __init__(self, part):
        super().__init__()
        torch.manual_seed(0)
        self.part = part
        self.first, self.second, self.other = (nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.BatchNorm1d(6)
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.25)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        for _ in range(2):
            x = self.part(self, self.first(torch.tanh(x)) + 1)
        return x


def writes_its_result(net, v):
    with torch.no_grad():
        t = torch.sigmoid(v)
    t.mul_(2)
    return net.second(v) * t


def writes_its_operand(net, v):
    with torch.no_grad():
        t = torch.sin(v)
    v.mul_(2)
    return net.second(v) * t


def writes_both(net, v):
    with torch.no_grad():
        t = torch.exp(v)
    v.mul_(0.1)
    t.add_(1)
    return net.second(v) * t


def writes_there(net, v):
    with torch.no_grad():
        t = torch.exp(v).add_(1).mul_(0.1)
    return net.second(v) * t


def writes_there_what_requires_grad(net, v):
    t = torch.zeros_like(v)
    with torch.no_grad():
        t.copy_(v).mul_(v).addcmul_(v, v)
    v.mul_(3)
    return net.second(v) * t


def writes_a_part_of_its_result(net, v):
    with torch.no_grad():
        t = torch.softmax(v, -1)
        t[:, 0] = 0
    v.mul_(3)
    return net.second(v) * t


def calls_a_layer(net, v):
    with torch.no_grad():
        t = net.other(v)
    t.mul_(2)
    v.mul_(3)
    return net.second(v) * t


def calls_a_norm(net, v):
    with torch.no_grad():
        t = net.norm(v)
    t.mul_(2)
    v.mul_(0.5)
    return net.second(v) * t


def draws(net, v):
    with torch.no_grad():
        t = nn.functional.dropout(v, 0.5)
    t.mul_(2)
    v.mul_(0.5)
    return net.second(v) * t


def attends(net, v):
    with torch.no_grad():
        t, _ = net.attention(v, v, v, need_weights=False)
    t.mul_(2)
    v.mul_(0.5)
    return net.second(v) * t


def takes_a_moving_average(net, v):
    with torch.no_grad():
        net.mean.mul_(0.9).add_(v.square().mean(0), alpha=0.1)
    v.mul_(0.1)
    return net.second(v)


def takes_one_of_several_results(net, v):
    with torch.no_grad():
        t, _ = v.sort(-1)
    t.mul_(0.1)
    v.mul_(3)
    return net.second(v) * t


def writes_into_a_given_tensor(net, v):
    t = torch.empty_like(v)
    with torch.no_grad():
        torch.mul(v, v, out=t)
    v.mul_(3)
    return net.second(v) * t


def writes_a_part_of_what_requires_grad(net, v):
    with torch.no_grad():
        v[:, 0] = 0
    return net.second(v)


PARTS = [
    writes_its_result,
    writes_its_operand,
    writes_both,
    writes_there,
    writes_there_what_requires_grad,
    writes_a_part_of_its_result,
    calls_a_layer,
    calls_a_norm,
    draws,
    attends,
    takes_a_moving_average,
    takes_one_of_several_results,
    writes_into_a_given_tensor,
    writes_a_part_of_what_requires_grad,
]


@pytest.mark.full
@pytest.mark.parametrize("profile", ["estimate", "measure"])
@pytest.mark.parametrize("part", PARTS)
def test_training_is_that_of_the_plain_model(part, profile):
    model = Net(part)
    graph = ogc.parse(model, X, profile=profile)
    assert any(isinstance(node.target, WithoutGrad) for node in graph.program.operations)
    assert_same_training(model, forced(model, X, profile=profile), (X,), steps=2)
    rng = random.Random(part.__name__)
    for plan in random_plans(graph, rng, 3):
        assert_same_training(model, ogc.apply(model, graph, plan), (X,), steps=2)


CONVOLUTIONS = {
    "conv2d": lambda x, w: torch.conv2d(x, w, None, 1, 1),
    "same": lambda x, w: torch.conv2d(x, w, None, 1, "same"),
    "same, dilated": lambda x, w: torch.conv2d(x, w, None, 1, "same", 2),
    "same, of even size": lambda x, w: torch.conv2d(x, w[..., :2, :2], None, 1, "same"),
    "valid": lambda x, w: torch.conv2d(x, w, None, 1, "valid"),
    "transposed": lambda x, w: torch.conv_transpose2d(x, w, None, 1, 1),
    "of one dimension": lambda x, w: torch.conv1d(x[:, :, 0], w[..., 0], None, 1, "same")[:, :, None] + x,
    "convolution": lambda x, w: torch.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    "overload": lambda x, w: torch.ops.aten.convolution.default(
        x, w, None, [1] * 2, [1] * 2, [1] * 2, False, [0] * 2, 1
    ),
    "complex": lambda x, w: torch.conv2d(torch.complex(x, x), torch.complex(w, w), None, 1, 1).real,
}


class Convolutions(nn.Module):
    """One whose result is used, one whose result is not, one under ``no_grad``, one more."""

    def __init__(self, convolution):
        super().__init__()
        torch.manual_seed(0)
        self.convolution = convolution
        self.first, self.unused, self.second = (nn.Parameter(torch.randn(4, 4, 3, 3) / 6) for _ in range(3))

    def forward(self, x):
        x = torch.tanh(self.convolution(x, self.first))
        self.convolution(x, self.unused)
        with torch.no_grad():
            scale = self.convolution(x, self.unused).sum()
        return torch.tanh(self.convolution(x, self.second) + scale)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_under_no_grad_are_not_taken_for_others(name):
    model, images = Convolutions(CONVOLUTIONS[name]), torch.randn(2, 4, 8, 8)
    assert_same_training(model, forced(model, images), (images,), steps=2)


@pytest.mark.parametrize("name", ["same", "same, dilated", "valid", "of one dimension"])
def test_padding_by_name_is_padding_by_number(name):
    """Which has a low-memory variant, and a rule for what it allocates."""
    graph = ogc.parse(Convolutions(CONVOLUTIONS[name]), torch.randn(2, 4, 8, 8))
    assert [op.target for op in graph.operations if "conv" in op.target] == ["aten.convolution.default"] * 3


def test_nothing_is_saved_under_no_grad():
    """Else plans would count what is gone, and run again what nobody asks for."""

    def part(net, v):
        with torch.no_grad():
            t = torch.sin(v).sigmoid()
        return net.second(v) * t

    graph = ogc.parse(Net(part), X)
    inside = [op for op in graph.operations if "sin" in op.name or "sigmoid" in op.name]
    assert len(inside) == 4
    assert not any(op.saves or op.backward_flops or op.backward_seconds for op in inside)
    assert not any("detach" in op.name for op in graph.operations)


def test_the_plan_holds_for_other_sizes():
    model = Net(writes_both)
    optimised = forced(model, X)
    assert "with torch.no_grad(): " in optimised.code
    assert_same_training(model, optimised, (X[:3],), steps=2)


def writes_what_requires_grad(net, v):
    with torch.no_grad():
        v.mul_(2)
    return net.second(v)


def writes_what_was_saved_before(net, v):
    u = torch.exp(v)
    with torch.no_grad():
        t = torch.sin(v)
    v.mul_(2)
    u.mul_(2)
    return net.second(v) * t * u


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (writes_what_requires_grad, "in place, under no_grad, a tensor that requires grad: mul_ at"),
        (writes_what_was_saved_before, "after exp_default .* saved it for its backward, which autograd refuses"),
    ],
)
def test_other_writes_are_refused(part, message):
    with pytest.raises(ParseError, match=message):
        ogc.optimize(Net(part), X, memory_budget="least")
