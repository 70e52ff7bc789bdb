"""``ogc.check`` finds what is right for the sample only, says where, and what it could not try."""

import copy
import random

import numpy as np
import pytest
import torch
from helpers import forced
from test_check import Plain, changed, sample
from torch import nn
from torch.nn import functional as F

import ogc
from ogc.checking.check import check_two_steps
from ogc.checking.step import NotVaried, another_input, smaller_batch

ALL = ("seed 1", "seed 2", "seed 3", "another input", "a smaller batch", "after an optimizer step")


def twin(model, forward):
    """A module with the same parameters and buffers, and a forward of its own."""
    found = object.__new__(type("PlannedPart", (type(model),), {"forward": forward}))
    object.__setattr__(found, "__dict__", vars(model))
    return found


def found_in(model, optimized, *inputs, **named):
    report = ogc.check(model, optimized, *inputs, **named)
    assert report.is_deterministic
    return {difference.found_in for difference in report.differences}


class Branches(nn.Module):
    """Goes one of two ways by its input."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.way(x, bool(x.sum() > 0))

    def way(self, x, positive):
        return self.layer(x) if positive else torch.tanh(self.layer(x))


# -- right for the sample only -----------------------------------------------------------------------------


def test_a_branch_that_was_baked_is_found_by_another_input():
    model, x = Branches(), torch.randn(2, 4)
    way = bool(x.sum() > 0)
    while (x[:1].sum() > 0) != way:  # the half batch goes the same way
        x = torch.randn(2, 4)
        way = bool(x.sum() > 0)
    assert found_in(model, twin(model, lambda self, x: self.way(x, way)), x) == {"another input"}


def test_a_branch_on_ids_is_found_by_another_input():
    class ByFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(9, 4)

        def forward(self, ids):
            return self.table(ids) * (2.0 if int(ids[0, 0]) == 3 else 1.0)

    model, ids = ByFirst(), torch.tensor([[3, 1], [4, 1]])
    baked = twin(model, lambda self, ids: self.table(ids) * 2.0)
    assert found_in(model, baked, ids) == {"another input"}
    assert found_in(model, baked, ids[:1]) == {"another input"}  # a batch of one: its entries change places


def test_a_frozen_dropout_mask_is_found_by_another_seed():
    model = Plain()
    x = sample()
    mask = {}

    def remember(self, x, scale=1.0):
        y = self.norm(torch.tanh(self.first(x)))
        drawn = F.dropout(torch.ones_like(y))
        y = y * mask.setdefault(y.shape, drawn) * self.frozen
        return {"y": y * scale, "mean": y.mean()}

    with torch.random.fork_rng():
        torch.manual_seed(1)
        assert "seed 1" not in found_in(model, twin(model, remember), x)
    assert {"seed 2", "seed 3"} <= found_in(model, twin(model, remember), x)


def test_what_holds_for_the_batch_only_is_found_by_a_smaller_one():
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(6, 4)
    baked = twin(model, lambda self, x: self[0](x) * (x.shape[0] / 6))
    assert found_in(model, baked, x) == {"a smaller batch"}


def test_an_error_for_the_smaller_batch_alone_is_a_difference():
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(6, 4)
    report = ogc.check(model, twin(model, lambda self, x: self[0](x).view(6, 4)), x)
    assert [str(difference) for difference in report.differences] == [
        "the call: raises RuntimeError: shape '[6, 4]' is invalid for input of size 12 where the plain model does not "
        "(a smaller batch)"
    ]
    assert report.tried == ALL


def test_parameters_that_were_baked_are_found_after_an_optimizer_step():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(6, 4)
    weight = model[1].weight.detach().clone()

    def forward(self, x):
        y = self[0](x)
        return F.linear(y, self[1].weight + (weight - self[1].weight).detach(), self[1].bias)

    assert found_in(model, twin(model, forward), x) == {"after an optimizer step"}


def test_a_gradient_that_is_off_by_the_last_bit_is_found_everywhere():
    class OffByOne(torch.autograd.Function):
        @staticmethod
        def forward(ctx, bias):
            return bias.view_as(bias)

        @staticmethod
        def backward(ctx, gradient):
            gradient = gradient.clone()
            gradient[0] = torch.nextafter(gradient[0], gradient.new_tensor(torch.inf))
            return gradient

    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(6, 4)
    off = twin(model, lambda self, x: F.linear(x, self[0].weight, OffByOne.apply(self[0].bias)))
    report = ogc.check(model, off, x)
    expected = [("gradient of 0.bias", name) for name in ALL]
    assert [pair for pair in expected if pair not in [(d.name, d.found_in) for d in report.differences]] == []
    assert 0 < report.first.distance < 1e-5
    assert f"found in: {', '.join(f'{name} (1)' for name in ALL[:-1])}" in str(report)


def test_what_is_right_is_right_in_everything_that_is_tried():
    model, x = Plain(), sample()
    report = ogc.check(model, forced(model, x), x)
    assert report and report.tried == ALL and not report.skipped
    assert (
        report.compared
        == 6
        * ogc.Checker(seeds=1, another_input=False, smaller_batch=False, second_step=False)
        .check(model, model, x)
        .compared
    )


def test_sparse_gradients_are_compared():
    model, ids = nn.Sequential(nn.Embedding(9, 4, sparse=True)), torch.tensor([[1, 2], [3, 4]])
    assert ogc.check(model, twin(model, lambda self, ids: self[0](ids)), ids)
    assert found_in(model, twin(model, lambda self, ids: self[0](ids) + self[0].weight[0] * 0), ids) == set(ALL)
    wrong = twin(model, lambda self, ids: F.embedding(ids, self[0].weight))
    assert ogc.check(model, wrong, ids).first.text == (
        "a tensor of shape (9, 4) instead of a torch.sparse_coo tensor of shape (9, 4)"
    )


# -- what cannot be tried ----------------------------------------------------------------------------------


def skipped(model, *inputs, **named):
    return dict(ogc.check(model, model, *inputs, **named).skipped)


def test_a_batch_of_one_has_no_half():
    assert skipped(nn.Linear(4, 4), torch.randn(1, 4)) == {"a smaller batch": "the batch has 1 sample"}


def test_samples_that_are_alike_give_no_other_input():
    why = {"another input": "no other input could be made of the given one, whose samples are alike"}
    assert skipped(nn.Linear(4, 4), torch.ones(2, 4)) == why


def test_what_the_plain_model_refuses_is_skipped_and_said():
    class Fussy(nn.Linear):
        def forward(self, x):
            if len(x) != 2 or x[0, 0] != 1.0:
                raise ValueError("not\nthis")
            return super().forward(x)

    report = ogc.check(model := Fussy(4, 4), model, torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]]))
    assert report and report.tried == (*ALL[:3], ALL[-1])
    assert str(report).splitlines()[2:] == [
        "skipped: another input, as the plain model raises ValueError: not",
        "skipped: a smaller batch, as the plain model raises ValueError: not",
    ]


def test_without_gradients_there_is_no_optimizer_step():
    model = nn.Linear(4, 4).requires_grad_(False)
    assert skipped(model, torch.randn(2, 4)) == {"after an optimizer step": "no parameter gets a gradient"}


def test_inputs_that_cannot_be_varied_are_left_as_they_are():
    class Stiff(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function is torch.Tensor.roll:
                raise RuntimeError("stiff\nand long")
            return super().__torch_function__(function, types, args, kwargs)

    x = torch.arange(8.0).view(2, 4).as_subclass(Stiff)
    assert skipped(nn.Linear(4, 4), x) == {"another input": "the input cannot be varied: RuntimeError: stiff"}


def test_what_either_model_raises_on_the_given_input_is_raised():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ogc.check(model := nn.Linear(4, 4), model, torch.randn(2, 5))


# -- less, and more ----------------------------------------------------------------------------------------


def test_a_checker_tries_what_it_is_told():
    model, x = Plain(), sample()
    assert ogc.Checker(seeds=5, smaller_batch=False).check(model, model, x).tried == (
        *(f"seed {n}" for n in range(1, 6)),
        "another input",
        "after an optimizer step",
    )
    few = ogc.Checker(seeds=1, another_input=False, smaller_batch=False, second_step=False)
    assert few.check(model, model, x=x, scale=2.0).tried == ("seed 1",)


@pytest.mark.parametrize("seeds", [0, -1, True, 1.0, "3"])
def test_seeds_are_how_many(seeds):
    with pytest.raises(ogc.InputError, match=f"at least 1, not {seeds!r}"):
        ogc.Checker(seeds=seeds)


def test_the_cost_is_as_documented():
    model, x, sizes = nn.Linear(4, 4), torch.randn(6, 4), []
    ogc.check(model, twin(model, lambda self, x: (sizes.append(len(x)), nn.Linear.forward(self, x))[1]), x)
    assert sizes == [6, 6, 6, 6, 3, 6, 6]


# -- nothing is left behind --------------------------------------------------------------------------------


class Draws(nn.Module):
    """Draws from generators of its own and of others, has zeros of both signs, and changes its buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.signs = nn.Parameter(torch.tensor([0.0, -0.0, torch.nan, 1.0]))
        self.register_buffer("moving", torch.tensor([0.0, -0.0, 1.0, 2.0]))
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x, generator):
        self.moving.data.neg_()
        noise = torch.rand(4, generator=self.generator) + torch.rand(4, generator=generator)
        return self.layer(x) * noise * random.random() * float(np.random.rand()) + self.signs


def bits(tensor):
    return tensor.detach().view(torch.uint8).tolist()


def test_everything_is_as_before_bit_by_bit():
    model, generator, x = Draws(), torch.Generator().manual_seed(6), torch.randn(6, 4)
    model(x, generator).nansum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def seen():
        gradients = [(id(p.grad), bits(p.grad)) for p in model.parameters()]
        states = [torch.get_rng_state(), model.generator.get_state(), generator.get_state()]
        others = random.getstate(), str(np.random.get_state()), optimizer.state_dict()
        return gradients, [*map(bits, model.state_dict().values())], [*map(bits, states)], others, bits(x)

    def wrong(self, x, generator):
        self.layer.weight.grad.add_(1)
        self.layer.bias.grad = None
        self.signs.data.neg_()
        return Draws.forward(self, x, generator) + torch.rand(4, generator=generator)

    before = seen()
    assert ogc.check(model, model, x, generator=generator)
    assert seen() == before
    report = ogc.check(model, twin(model, wrong), x, generator=generator)
    assert {"state of generator 1", "parameter signs"} <= {difference.name for difference in report.differences}
    assert seen() == before


def test_everything_is_as_before_after_an_error_in_the_second_step():
    model, x, calls = Plain(), sample(), []

    def fail(self, x, result):
        calls.append(1)
        if len(calls) == 7:
            raise KeyError("mine")

    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    report = ogc.check(model, changed(model, fail), x)
    assert [(d.name, d.found_in) for d in report.differences] == [("the call", "after an optimizer step")]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_an_unused_cuda_is_not_seeded_for_later():
    queued = len(torch.cuda._queued_calls)
    ogc.check(model := nn.Linear(4, 4), model, torch.randn(2, 4))
    assert len(torch.cuda._queued_calls) == queued


# -- other inputs ------------------------------------------------------------------------------------------


def another(*inputs, **named):
    return another_input((inputs, named))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_floating_values_keep_their_mean_spread_and_limits(dtype):
    x = torch.rand(64, 100).to(dtype).requires_grad_()
    (y,), _ = another(x)
    assert y.dtype == dtype and y.requires_grad and not torch.equal(x, y)
    x, y = x.detach().float(), y.detach().float()
    assert float(y.min()) >= float(x.min()) and float(y.max()) <= float(x.max())
    assert abs(float(y.mean()) - float(x.mean())) < 0.02
    assert abs(float(y.std()) - float(x.std())) < 0.05


@pytest.mark.parametrize("seed", range(10))
def test_a_sum_around_zero_changes_its_sign(seed):
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
    assert (another(x)[0][0].sum() > 0) != (x.sum() > 0)
    assert another(x.abs() + 0.1)[0][0].min() > 0


def test_complex_values_are_drawn_too():
    x = torch.randn(8, 4, dtype=torch.complex64)
    (y,), _ = another(x)
    assert y.dtype == x.dtype and not torch.equal(x, y)


def test_samples_change_places_together():
    ids, mask = torch.arange(12).view(4, 3), torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 0]])
    weights = torch.tensor([1.0, 0.0, 0.0, 1.0])
    positions, table = torch.arange(3), torch.randn(7, 2)
    (new_ids, new_mask), named = another(ids, mask.bool(), weights=weights, positions=positions, table=table, n=3)
    assert torch.equal(new_ids, ids.roll(1, 0)) and torch.equal(new_mask, mask.bool().roll(1, 0))
    assert torch.equal(named["weights"], weights.roll(1)) and torch.equal(named["positions"], positions)
    assert not torch.equal(named["table"], table) and named["n"] == 3


def test_infinite_masks_change_places():
    mask = torch.tensor([[0.0, 0.0], [0.0, -torch.inf]])
    assert torch.equal(another(mask)[0][0], mask.flip(0))


@pytest.mark.parametrize(
    "x", [torch.randn(4, 6).t(), torch.randn(6, 8)[:, ::2], torch.randn(1, 4).expand(6, 4)], ids=["t", "step", "expand"]
)
def test_layouts_are_kept(x):
    (y,), _ = another(x)
    assert (y.shape, y.stride()) == (x.shape, x.stride()) and not torch.equal(x, y)


def test_half_of_what_shares_the_batch():
    x, labels, table = torch.randn(5, 3, requires_grad=True), torch.arange(5), torch.randn(7, 2)
    (half, of_labels, same), named = smaller_batch(((x, labels, table), {"scale": torch.tensor(2.0)}))
    assert torch.equal(half, x[:2]) and half.requires_grad and half.is_leaf
    assert torch.equal(of_labels, labels[:2]) and same is table and named["scale"] == 2.0


@pytest.mark.parametrize("inputs", [(), (torch.tensor(1.0),), (3, "text")])
def test_without_a_batch_there_is_no_half(inputs):
    with pytest.raises(NotVaried, match="the inputs have no batch"):
        smaller_batch((inputs, {}))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_positions_in_a_batch_on_the_gpu_are_not_left_without_it():
    nodes, edges = torch.randn(6, 4, device="cuda"), torch.tensor([[0, 5], [1, 2]], device="cuda")
    with pytest.raises(NotVaried, match="may hold positions"):
        smaller_batch(((nodes, edges), {}))


class Remembers(nn.Linear):
    """Has what it computes wrong in one way: ``when`` says so of its second step in a plan."""

    when = None
    seen = 0

    def forward(self, x):
        self.seen += 1
        return super().forward(x) * (1 + (self.when is not None and self.when(self, x)))


SECOND_STEP = {
    "other values": lambda model, x: not torch.equal(x, SAMPLE),
    "another seed": lambda model, x: torch.initial_seed() != 1,
    "moved parameters": lambda model, x: not torch.equal(model.weight, model.first),
}
SAMPLE = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("what", SECOND_STEP)
def test_two_steps_find_what_is_wrong_after_the_first(what):
    model = Remembers(8, 8)
    broken = copy.deepcopy(model)
    broken.when, broken.first = SECOND_STEP[what], model.weight.detach().clone()
    report = check_two_steps(model, broken, ((SAMPLE,), {}))
    assert not report and {one.found_in for one in report.differences} == {"another input, after an optimizer step"}
    assert (model.seen, broken.seen) == (0, 0)  # as attributes are put back
    assert check_two_steps(model, copy.deepcopy(model), ((SAMPLE,), {}))


def test_two_steps_where_there_is_no_other_input():
    model = nn.Linear(8, 8)
    report = check_two_steps(model, copy.deepcopy(model), ((torch.ones(3, 8),), {}))
    assert report and report.tried == ("seed 1", "after an optimizer step") and len(report.skipped) == 1


def test_two_steps_cost_two_steps():
    calls = []
    model = nn.Sequential(nn.Linear(8, 8))
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    assert check_two_steps(model, copy.deepcopy(model), ((SAMPLE,), {})) and len(calls) == 4
