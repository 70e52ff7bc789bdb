"""Sizes that data decide: seen whatever the operator, and a guard, or the reason for an opaque module or for parts."""

import logging

import pytest
import torch
import torchvision  # noqa: F401 - for its operators
from helpers import assert_same_training
from torch import nn
from torch.nn import functional as F

import ogc
from ogc.parser.recorder.operators import deciding, sizes_of
from ogc.torch_state.dispatch import Call

aten = torch.ops.aten


@torch.library.custom_op("ogc_tests::hits", mutates_args=())
def hits(x: torch.Tensor) -> torch.Tensor:
    return torch.nonzero(x > 0)[:, 0]


@hits.register_fake
def _(x):
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.long)


@torch.library.custom_op("ogc_tests::unknown_hits", mutates_args=())
def unknown_hits(x: torch.Tensor) -> torch.Tensor:
    return torch.nonzero(x > 0)[:, 0]


@torch.library.custom_op("ogc_tests::misdescribed_hits", mutates_args=())
def misdescribed_hits(x: torch.Tensor) -> torch.Tensor:
    return torch.nonzero(x > 0)[:, 0]


@misdescribed_hits.register_fake
def _(x):
    return torch.empty_like(x, dtype=torch.long)


@torch.library.custom_op("ogc_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy() * 2)


@torch.library.custom_op("ogc_tests::count", mutates_args=())
def count(x: torch.Tensor) -> int:
    return int((x > 0).sum())


@torch.library.custom_op("ogc_tests::doubled_and_count", mutates_args=())
def doubled_and_count(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return x * 2, int((x > 0).sum())


torch.library.define("ogc_tests::composite", "(Tensor x, Tensor y) -> Tensor")
torch.library.impl("ogc_tests::composite", "CompositeImplicitAutograd", lambda x, y: x[y > 0])
ops = torch.ops.ogc_tests


class Net(nn.Module):
    """``loss`` of the features and of what is known of each row decides."""

    def __init__(self, loss):
        super().__init__()
        self.loss = loss
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)) for _ in range(4)))

    def forward(self, x, y):
        return self.loss(self.layers(x), y)


def classes(y):
    return (2 * y).long().abs()


def bounds(y):
    return torch.stack([(y > 0).sum(), (y > 0).sum() + 1])


LOSSES = {
    "where": lambda h, y: h[torch.where(y > 0)].sum() / torch.where(y > 0)[0].shape[0],
    "argwhere": lambda h, y: h.sum() / len(torch.argwhere(y > 0)),
    "nms": lambda h, y: h.sum() / len(torch.ops.torchvision.nms(y.view(4, 4).abs().cumsum(1), y[:4], 0.3)),
    "a custom operator": lambda h, y: h[ops.hits(y)].sum() / ops.hits(y).numel(),
    "one without fake kernel": lambda h, y: h[ops.unknown_hits(y)].sum() / ops.unknown_hits(y).numel(),
    "one with a wrong fake kernel": lambda h, y: h.sum() / len(ops.misdescribed_hits(y)),
    "a composite of a library": lambda h, y: h.sum() / len(ops.composite(y, y)),
    "a number of a custom operator": lambda h, y: h.sum() / ops.count(y),
    "a number among its results": lambda h, y: h.sum() / ops.doubled_and_count(y)[1],
    "unique": lambda h, y: h.sum() / len(torch.unique(y.round())),
    "counts": lambda h, y: h.sum() / torch.unique(y.round(), return_counts=True)[1].shape[0],
    "bincount": lambda h, y: h.sum() / len(torch.bincount(classes(y))),
    "bincount of activations": lambda h, y: h.sum() / len(torch.bincount(classes(y), h.detach()[:, 0])),
    "one_hot": lambda h, y: h.sum() / F.one_hot(classes(y)).shape[1],
    "repeats": lambda h, y: torch.repeat_interleave(h, classes(y), 0).sum() / len(torch.repeat_interleave(classes(y))),
    "tensor_split": lambda h, y: sum(part.sum() / max(1, len(part)) for part in torch.tensor_split(h, bounds(y))),
    "combinations": lambda h, y: h.sum() / len(torch.combinations(y[y > 0])),
}


def given(above, seed=0):
    """Rows of which so many are above zero."""
    x, y = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(seed)).unbind()
    y = y.flatten()[:16].abs().add(0.1)
    return x, torch.where(torch.arange(16) < above, y, -y)[torch.randperm(16)]


@pytest.mark.full
@pytest.mark.parametrize("name", LOSSES)
def test_each_number_of_hits_gives_what_the_model_gives(name):
    model = Net(LOSSES[name])
    optimised = ogc.optimize(model, given(6), memory_budget="least")
    assert not isinstance(optimised.plan, ogc.PartsPlan) and not optimised.plan.is_plain
    assert optimised.graph.program.guards is not None
    for seed, above in enumerate((6, 2, 16, 6)):
        assert_same_training(model, optimised, given(above, seed), steps=1)


SEEN = {
    "a shape": lambda h, y: h.view(4, -1).sum(),
    "a mask that is filled": lambda h, y: h.masked_fill((y > 0)[:, None], 0).sum(),
    "a mask that is written": lambda h, y: torch.zeros(16).index_put((y > 0,), torch.ones(())).dot(h[:, 0]),
    "a length that is given": lambda h, y: F.one_hot(classes(y), 99).sum() * h.sum(),
    "repeats whose sum is given": lambda h, y: torch.repeat_interleave(h, (y > 9).long() + 1, 0, output_size=16).sum(),
    "a custom operator without fake kernel": lambda h, y: (h * ops.doubled(y)[:, None]).sum(),
    "that of activations": lambda h, y: (h * ops.doubled(h.detach())).sum(),
    "a loss of sequences": lambda h, y: F.ctc_loss(
        h[:, None].log_softmax(2), classes(y)[None, :3] % 7 + 1, torch.tensor([16]), (y[:1] > 0).long() + 1
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", SEEN)
def test_what_no_data_decide_is_no_guard(name, caplog):
    model = Net(SEEN[name])
    with caplog.at_level(logging.WARNING):
        optimised = ogc.optimize(model, given(6), memory_budget="least")
    assert optimised.graph.program.guards is None and "as they are" not in caplog.text
    for seed, above in enumerate((6, 0, 16)):
        assert_same_training(model, optimised, given(above, seed), steps=1)
    assert len(optimised.report().calls) == 1


@pytest.mark.full
@pytest.mark.parametrize(
    "loss",
    [
        lambda h, y: h[torch.where(h[:, 0] > 0)].sum(),
        lambda h, y: ops.composite(h, h[:, 0]).sum(),
        lambda h, y: ops.unknown_hits(h[:, 0].detach()).float().sum() * h.sum(),
    ],
)
def test_activations_that_decide_leave_the_model_to_its_parts(loss, caplog):
    model = Net(loss)
    with caplog.at_level(logging.WARNING):
        optimised = ogc.optimize(model, given(6), memory_budget="least")
    assert isinstance(optimised.plan, ogc.PartsPlan)
    assert "whose result has a shape that depends on the data" in caplog.text
    for seed in range(3):
        assert_same_training(model, optimised, given(6, seed), steps=1)


class Hits(torch.autograd.Function):
    """An opaque module whose result is as long as there are hits."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x[y > 0]

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        result = torch.zeros_like(x)
        result[y > 0] = gradient
        return result, None


class Head(nn.Module):
    def forward(self, h, y):
        return Hits.apply(h, y).sum() / max(1, len(Hits.apply(h, y)))


def test_an_opaque_module_that_gives_other_sizes_for_other_data_is_found_before_training():
    model = Net(Head())
    optimised = ogc.optimize(model, given(6), memory_budget="least")
    for seed, above in enumerate((6, 2, 0, 16)):
        assert_same_training(model, optimised, given(above, seed), steps=1)


class Hidden(nn.Module):
    """Bakes a size that nobody can see: PyTorch is told nothing of it."""

    def forward(self, h, y):
        (y > 0).nonzero()
        return h.sum() / len([one for one in memoryview(bytearray(bits(y))) if one])


def bits(y):
    import ctypes

    mask = (y > 0).contiguous()
    return ctypes.string_at(mask.data_ptr(), mask.numel())


@pytest.mark.full
def test_a_size_that_nobody_sees_is_found_on_other_inputs():
    """It leaves the module to itself, an opaque module."""
    model = WithHidden()
    optimised = ogc.optimize(model, given(6), memory_budget="least")
    for seed, above in enumerate((6, 2, 16)):
        assert_same_training(model, optimised, given(above, seed), steps=1)


class WithHidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.hidden = Net(lambda h, y: h), Hidden()

    def forward(self, x, y):
        return self.hidden(self.net(x, y), y)


def call(operator, *args, **kwargs):
    return Call(operator, args, kwargs, None)


def test_operators_decide_by_some_of_what_they_are_given():
    x, mask = torch.randn(5, 4), torch.tensor([True, False, True, False, False])
    for one, decisive in (
        (call(aten.index.Tensor, x, [mask, None]), [mask]),
        (call(aten.masked_select.default, x, mask[:, None]), [mask[:, None]]),
        (call(aten.nonzero.default, mask), [mask]),
        (call(torch.ops.torchvision.nms.default, x, x[:, 0], 0.5), [x, x[:, 0]]),
    ):
        assert sizes_of(one, [one.operator(*one.args)]).are_decided
        assert [tensor.shape for tensor in deciding(one)] == [tensor.shape for tensor in decisive]
    for one in (call(aten.index.Tensor, x, [mask.long()]), call(aten.sort.default, x)):
        assert not sizes_of(one, []).are_decided


def test_trying_draws_no_random_numbers():
    before = torch.get_rng_state()
    x = torch.rand(4)
    after = torch.get_rng_state()
    sizes_of(call(aten.dropout.default, x, 0.3, True), [x])
    sizes_of(call(aten.bernoulli.default, x), [x])
    assert torch.equal(torch.get_rng_state(), after) and not torch.equal(before, after)
