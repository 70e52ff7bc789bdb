"""What callers put around a forward: modes that functions of torch are handed to, and hooks for saved tensors."""

import pytest
import torch
from helpers import loss_of
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ogc


class Sines(TorchFunctionMode):
    """Has a sine be computed for each hyperbolic tangent."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return torch.sin(*args) if function is torch.tanh else function(*args, **(kwargs or {}))


class SinesBelow(TorchDispatchMode):
    """Has a sine be computed for each hyperbolic tangent, below autograd."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return torch.sin(*args) if operator is torch.ops.aten.tanh.default else operator(*args, **(kwargs or {}))


class Looks(TorchDispatchMode):
    """Looks at operators."""

    only_looks = True

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return operator(*args, **(kwargs or {}))


class Tanhs(nn.Module):
    def __init__(self, picks=False):
        super().__init__()
        self.layers, self.picks = nn.ModuleList(Tanh() for _ in range(6)), picks

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            x = x[x.sum(1) > -1e9] if self.picks else x
        return x


class Tanh(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return torch.tanh(self.second(torch.sigmoid(torch.tanh(self.first(x)))))


def rounding():
    return saved_tensors_hooks(
        lambda t: t.bfloat16() if t.dtype == torch.float32 else t,
        lambda t: t.float() if t.dtype == torch.bfloat16 else t,
    )


CHANGES = {"TorchFunctionMode": Sines, "TorchDispatchMode": SinesBelow, "hooks for saved tensors": rounding}


def gradients(model, run, x, around):
    model.zero_grad()
    torch.manual_seed(1)
    with around():
        out = run(x)
    loss_of(out).backward()
    return [out.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.full
@pytest.mark.parametrize("words", CHANGES)
@pytest.mark.parametrize("picks", [False, True], ids=["whole", "in parts"])
def test_what_may_change_something_runs_the_plain_model(picks, words, caplog):
    model, x = Tanhs(picks), torch.randn(256, 32)
    optimised = ogc.optimize(model, x, memory_budget="least")
    assert isinstance(optimised.plan, ogc.PartsPlan) is picks and not optimised.plan.is_plain
    caplog.clear()
    before = optimised.report().planned
    for _ in range(2):
        found = [gradients(model, run, x, CHANGES[words]) for run in (model, optimised)]
        assert all(map(torch.equal, *found))
    assert optimised.report().planned == before and words in " ".join(str(optimised.report()).split())
    told = [record.getMessage() for record in caplog.records if words in record.getMessage()]
    assert len(told) == 1
    other = gradients(model, model, x, torch.enable_grad)
    assert not all(map(torch.equal, found[0], other))  # it does change something
    assert all(map(torch.equal, gradients(model, optimised, x, torch.enable_grad), other))
    assert optimised.report().planned > before


def on_the_cpu():
    return torch.device("cpu")


@pytest.mark.full
@pytest.mark.parametrize("around", [save_on_cpu, on_the_cpu, Looks])
def test_what_changes_nothing_is_planned_for(around):
    model, x = Tanhs(), torch.randn(256, 32)
    with around():
        optimised = ogc.optimize(model, x, memory_budget="least")
    found = [gradients(model, run, x, around) for run in (model, optimised)]
    assert all(map(torch.equal, *found))
    assert optimised.report().plain == 0


def test_a_checkpoint_of_torch_around_it_is_planned_for():
    model, x = Tanhs(), torch.randn(256, 32, requires_grad=True)
    optimised = ogc.optimize(model, x, memory_budget="least")
    runs = (model, lambda x: checkpoint(optimised, x, use_reentrant=False))
    assert all(map(torch.equal, *(gradients(model, run, x, torch.enable_grad) for run in runs)))
    assert optimised.report().plain == 0


def test_what_is_optimized_in_a_mode_is_planned_as_outside_of_it():
    model, x = Tanhs(), torch.randn(256, 32)
    with Sines() as mode, torch.device("cpu"):
        optimised = ogc.optimize(model, x, memory_budget="least")
        inside = optimised(x)
        assert torch.overrides._get_current_function_mode_stack()[0] is mode
        assert torch.equal(inside, model(x))
    assert torch.equal(optimised(x), model(x)) and not torch.equal(inside, model(x))
    assert (optimised.report().planned, optimised.report().plain) == (1, 1)


def test_nothing_is_parsed_in_a_mode():
    with Sines(), pytest.raises(ogc.InputError, match="a TorchFunctionMode is on, which"):
        ogc.parse(Tanhs(), torch.randn(256, 32))


class Rounds(nn.Module):
    """Rounds what its layers save."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(Tanh() for _ in range(2))

    def forward(self, x):
        with rounding():
            for layer in self.inner:
                x = layer(x)
        return x


class RoundsInside(Tanhs):
    """Is a module with hooks of its own, and has its parts on both sides of them."""

    def forward(self, x):
        for layer in self.layers[:2]:
            x = layer(x)
        with rounding():
            x = self.layers[2](x)
        for layer in self.layers[3:]:
            x = layer(x)
        return x


@pytest.mark.parametrize("make", [lambda: nn.Sequential(Tanhs(), Rounds(), Tanhs()), RoundsInside])
def test_hooks_in_a_forward_are_its_own(make, caplog):
    model, x = make(), torch.randn(256, 32)
    optimised = ogc.optimize(model, x, memory_budget="least")
    assert not optimised.plan.is_plain
    assert "has hooks of its own for what is saved" in caplog.text
    for _ in range(2):
        assert all(map(torch.equal, *(gradients(model, run, x, torch.enable_grad) for run in (model, optimised))))
