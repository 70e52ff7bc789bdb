"""What happens to a model between a forward and its backward: gradients are the plain model's, or it is an error."""

import copy

import pytest
import torch
from helpers import forced
from torch import nn

from ogc.errors import ReplayError
from ogc.runtime.held import ALIGNED, SMALL, Places, Seen


class Layers(nn.Module):
    """Layers whose biases and weights of norms autograd does not hold, such as runs again read."""

    def __init__(self, width=16):
        super().__init__()
        kinds = (nn.Linear(width, width), nn.LayerNorm(width), nn.Tanh())
        self.layers = nn.ModuleList(copy.deepcopy(kind) for _ in range(4) for kind in kinds)
        self.register_buffer("shift", torch.randn(width))

    def forward(self, x):
        for layer in self.layers:
            x = torch.sin(layer(x) + self.shift)
        return x


def gradients(model, x, between):
    out = model(x).square().sum()
    between(model)
    out.backward()
    return [parameter.grad for parameter in model.parameters()]


def data_added(model, name, value=1.0):
    model.get_parameter(name).data.add_(value)


def numpy_written(model, name):
    model.get_parameter(name).detach().numpy()[:] = 0.5


def data_replaced(model, name):
    parameter = model.get_parameter(name)
    parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))


CHANGES = {
    "a bias through .data": lambda model: data_added(model, "layers.3.bias"),
    "a bias through numpy": lambda model: numpy_written(model, "layers.6.bias"),
    "a norm's bias through .data": lambda model: data_added(model, "layers.4.bias"),
    "a buffer through .data": lambda model: model.shift.data.mul_(3),
    "another .data of a bias": lambda model: data_replaced(model, "layers.3.bias"),
    "another .data of a weight": lambda model: data_replaced(model, "layers.3.weight"),
    "frozen": lambda model: model.requires_grad_(False),
    "one bias frozen": lambda model: model.layers[3].bias.requires_grad_(False),
    "one weight frozen": lambda model: model.layers[6].weight.requires_grad_(False),
    "biases in half precision": lambda model: [
        setattr(p, "data", p.data.half()) for name, p in model.named_parameters() if name in ("layers.0.bias",)
    ],
    "a parameter taken out": lambda model: model.layers[3].register_parameter("bias", None),
    "a buffer replaced": lambda model: setattr(model, "shift", torch.zeros(16)),
}


def outcome(model, x, between):
    """The gradients; if there are none, that there are none."""
    try:
        return gradients(model, x, between)
    except RuntimeError as error:
        return type(error)


@pytest.mark.full
@pytest.mark.parametrize("pieces", [2, 4])
@pytest.mark.parametrize("change", CHANGES)
def test_runs_again_see_what_the_forward_saw(change, pieces):
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(8, 16)
    optimised = forced(copy.deepcopy(model), x, pieces=pieces)
    plain, ours = (outcome(one, x, CHANGES[change]) for one in (model, optimised))
    assert isinstance(plain, list) and isinstance(ours, list)
    for mine, theirs in zip(ours, plain, strict=True):
        assert (mine is None and theirs is None) or (mine.dtype == theirs.dtype and torch.equal(mine, theirs))


def test_a_model_in_half_precision():
    model, x = Layers(), torch.randn(8, 16)
    optimised = forced(copy.deepcopy(model), x)
    messages = []
    for one in (model, optimised):
        with pytest.raises(RuntimeError) as raised:
            gradients(one, x, lambda one: one.half())
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("write", [data_added, numpy_written])
def test_a_large_weight_that_is_written_unseen_is_an_error(write):
    model, x = Layers(width=96), torch.randn(8, 96)
    optimised = forced(copy.deepcopy(model), x)
    with pytest.raises(ReplayError, match=r"layers\.\d\.weight was modified in place"):
        gradients(optimised, x, lambda one: [write(one, f"layers.{n}.weight") for n in (0, 3, 6, 9)])


def test_a_weight_that_is_not_a_number_was_not_written():
    model, x = Layers(width=96), torch.randn(8, 96)
    with torch.no_grad():
        model.layers[3].weight.fill_(float("nan"))
    forced(model, x)(x).sum().backward()
    assert model.layers[3].weight.grad.isnan().all()


def test_two_forwards_before_a_backward():
    model, x = Layers(), torch.randn(8, 16)
    optimised = forced(copy.deepcopy(model), x)
    found = []
    for one in (model, optimised):
        first = one(x).square().sum()
        data_added(one, "layers.3.bias")
        second = one(x).square().sum()
        data_added(one, "layers.3.bias")
        (first + second).backward()
        found.append([parameter.grad for parameter in one.parameters()])
    assert all(map(torch.equal, *found))


def test_what_is_noted_of_parameters_of_all_kinds_is_what_they_were():
    """Vectors of any length and type, numbers, matrices, what has no entries, lies otherwise or is of a class."""

    class Own(torch.Tensor):
        pass

    tensors = [torch.randn(n) for n in (1, 3, 16, 33)] + [torch.randn(n).bfloat16() for n in (5, 32)]
    tensors += [torch.tensor(7), torch.tensor(True), torch.randn(()), torch.randn(40, 30), torch.randn(3, 50).t()]
    tensors += [torch.randn(0), torch.randn(9, 2)[:, 0], torch.randn(4).as_subclass(Own), torch.zeros(1 << 13)]
    tensors = [nn.Parameter(t) if t.is_floating_point() and n % 2 else t for n, t in enumerate(tensors)]
    before = [tensor.detach().clone() for tensor in tensors]
    given = {3 * n: tensor for n, tensor in enumerate(tensors)}
    seen = Seen(Places(given), given)
    found = [seen.tensor(place) for place in given]
    assert seen.written() == [] and seen.tensor(0) is found[0]
    vectors = [tensor.dim() <= 1 and tensor.is_contiguous() and type(tensor) is not Own for tensor in tensors]
    for tensor in tensors:
        tensor.data.fill_(3)
    for tensor, then, mine, is_copy in zip(tensors, before, found, vectors, strict=True):
        assert (type(mine), mine.requires_grad, mine.shape) == (type(tensor), tensor.requires_grad, tensor.shape)
        assert torch.equal(mine, then if is_copy and tensor.nbytes <= SMALL else tensor)
        assert not is_copy or tensor.nbytes > SMALL or mine.data_ptr() % ALIGNED == 0
    assert seen.written() == [3 * n for n, t in enumerate(tensors) if t.nbytes > SMALL or t.shape == (40, 30)]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_an_argument_that_gets_another_flag(requires_grad):
    model = Layers()
    plain = copy.deepcopy(model)
    sample = torch.randn(8, 16).requires_grad_(requires_grad)
    optimized = forced(model, sample)

    def found(module, run):
        x = sample.detach().clone().requires_grad_(requires_grad)
        result = gradients(run, x, lambda _: x.requires_grad_(not requires_grad))
        return [*result, *([] if x.grad is None else [x.grad])]

    expected, ours = found(plain, plain), found(model, optimized)
    assert optimized.report().planned
    assert len(expected) == len(ours)
    assert all(map(torch.equal, expected, ours))
