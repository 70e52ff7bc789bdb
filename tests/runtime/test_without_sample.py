"""Without a sample input a model is planned at its first call in training, and that step is the plain model's."""

import copy
import pickle

import pytest
import torch
from helpers import loss_of
from models import Residual, images
from torch import nn

import ogc
from ogc.parser import arguments
from ogc.torch_state.allocator import peak_bytes


def layers(width=64, depth=6):
    blocks = (nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.2)) for _ in range(depth))
    return nn.Sequential(*blocks)


class ByData(nn.Module):
    """Planned in parts."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x) if x.detach().sum().item() != 0.125 else x
        return x


class Unplannable(nn.Module):
    """One stretch of Python that goes by the data, without parts."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        x = x @ self.weight
        return x * 2 if x.detach().sum().item() > -1e9 else x


def planned(model, **goal):
    return ogc.optimize(model, **goal)


def steps(model, x, count=2):
    """Everything that some steps leave behind, each step by itself."""
    found = []
    torch.manual_seed(1)
    for _ in range(count):
        model.zero_grad()
        output = model(x)
        loss_of(output).backward()
        found.append([output.detach().clone(), torch.get_rng_state()])
        found[-1] += [p.grad.clone() for p in model.parameters()]
        found[-1] += [b.clone() for b in model.buffers()]
    return found


def assert_alike(make, x, goal=None, context=torch.enable_grad):
    torch.manual_seed(0)
    plain = make().train()
    model = copy.deepcopy(plain)
    optimized = planned(model, **(goal or {}))
    with context():
        expected, ours = steps(plain, x), steps(optimized, x)
    for a, b in zip(expected, ours, strict=True):
        assert all(map(torch.equal, a, b))
    return optimized


CASES = {
    "batch norm": (Residual, images(), {"memory_budget": 0.7}),
    "dropout": (layers, torch.randn(64, 64), {}),
    "in parts": (ByData, torch.randn(512, 16), {"memory_budget": 0.7}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_first_step_is_the_plain_one(case):
    make, x, goal = CASES[case]
    optimized = assert_alike(make, x, goal)
    assert optimized.report().planned and not optimized.report().plain


def test_it_is_planned_as_it_is_called():
    context = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    optimized = assert_alike(layers, torch.randn(64, 64), context=context)
    assert optimized.report().planned == 2 and len(optimized.report().calls) == 1  # not planned anew for autocast


@pytest.mark.parametrize("profile", ["estimate", "time"])
@pytest.mark.parametrize("case", CASES)
def test_the_first_step_takes_no_more_memory_than_a_plain_one(case, profile, monkeypatch):
    monkeypatch.setitem(arguments.AUTO, "cpu", profile)
    make, x, goal = CASES[case]
    torch.manual_seed(0)
    plain, model = make(), make()
    optimized = planned(model, **(goal or {"memory_budget": "least"}))  # what is fair goes by times, which vary

    def peak(run):
        return peak_bytes(lambda: loss_of(run(x)).backward(), "cpu")

    most = peak(plain)
    assert peak(optimized) <= most, "planning takes more than the step"
    assert optimized.report().planned


def test_evaluation_plans_nothing():
    model, x = planned(layers()), torch.randn(64, 64)
    with torch.no_grad():
        model(x)
    model.eval()
    model(x)
    assert model.plan is None and model.graph is None and model.report().planned == 0
    model.train()(x).sum().backward()
    assert not model.plan.is_plain and model.report().planned == 1


def test_nothing_to_train_is_not_planned(caplog):
    model, x = planned(layers().requires_grad_(False)), torch.randn(64, 64)
    model(x)
    assert model.plan is None and "requires grad" in str(model.report()) and not caplog.records
    model(x.requires_grad_()).sum().backward()
    assert model.report().planned == 1


WRONG = {
    "budget": ({"memory_budget": 1.5}, "memory_budget must be bytes"),
    "solver": ({"solver": "best"}, "solver must be one of"),
    "profile": ({"profile": "guess"}, "profile must be"),
    "opaque modules": ({"opaque_modules": ["9"]}, "no submodule '9'"),
    "outputs": ({"outputs": "some"}, 'outputs must be "all" or "loss"'),
    "loss": ({"loss": 3}, "loss must be a function"),
    "device memory": ({"device_memory": "much"}, "device_memory must be bytes"),
    "both": ({"device_memory": "1GB", "memory_budget": 0.5}, "not both"),
}


@pytest.mark.parametrize("what", WRONG)
def test_arguments_are_checked_at_once(what):
    options, words = WRONG[what]
    with pytest.raises(ogc.InputError, match=words):
        ogc.optimize(layers(), **options)


def test_what_cannot_be_planned_runs_plain_and_says_so_once(caplog):
    model, plain = Unplannable(), Unplannable()
    plain.load_state_dict(model.state_dict())
    optimized, x = planned(model), torch.randn(4, 8)
    for a, b in zip(steps(plain, x, 3), steps(optimized, x, 3), strict=True):
        assert all(map(torch.equal, a, b))
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "ogc runs the plain model" in told and "item()" in told
    assert optimized.report().plain == 3 and "item()" in str(optimized.report())


@pytest.mark.parametrize("goal", [{"memory_budget": 1000}, {"device_memory": "1kB"}], ids=str)
@pytest.mark.parametrize("make", [layers, lambda: ByData().double()], ids=["whole", "in parts"])
def test_a_budget_that_no_plan_meets_gives_the_least_peak(make, goal, caplog):
    """With a sample it is an error; a training goes on with what there is, and the bits are the plain model's."""
    model = make()
    dtype, width = next((p.dtype, p.shape[1]) for p in model.parameters())
    x = torch.randn(256, width, dtype=dtype)
    with pytest.raises(ogc.SolveError):
        planned(model, sample_input=x, **goal)
    optimised, least = planned(copy.deepcopy(model), **goal), planned(model, sample_input=x, memory_budget="least")
    for ours, expected in zip(steps(optimised, x), steps(model, x), strict=True):
        assert all(map(torch.equal, ours, expected))
    assert optimised.plan.peak_bytes == least.plan.peak_bytes
    assert [message for message in caplog.messages if message.startswith("taking the least peak instead: ")]
    assert optimised.report().plain == 0


def test_a_call_that_fails_is_the_plain_models_and_another_is_planned():
    model = planned(layers())
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(torch.randn(64, 3))
    model(torch.randn(64, 64)).sum().backward()
    assert model.report().planned == 1


@pytest.mark.parametrize("is_called", [False, True])
@pytest.mark.parametrize("make", [layers, ByData])
def test_copies_and_pickles(is_called, make):
    torch.manual_seed(0)
    width = 16 if make is ByData else 64
    model, x = planned(make(), memory_budget="least"), torch.randn(64, width)
    if is_called:
        model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        plain = object.__new__(type(other).__mro__[1])
        vars(plain).update(copy.deepcopy(vars(other)))
        for a, b in zip(steps(plain, x), steps(other, x), strict=True):
            assert all(map(torch.equal, a, b))
        assert other.report().planned and other.training
        other.eval()
        assert not other.training and model.training
        other[0][0].weight.data.zero_() if make is layers else None
        assert not (make is layers and model[0][0].weight.eq(0).all())


def test_a_copy_of_a_planned_model_has_its_plan(caplog):
    model, x = planned(layers()), torch.randn(64, 64)
    model(x)
    twin = copy.deepcopy(model)
    assert twin.plan is model.plan
    caplog.clear()
    twin(x).sum().backward()
    assert not caplog.records and all(p.grad is not None for p in twin.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_a_shallow_copy_has_attributes_of_its_own():
    model, x = planned(layers()), torch.randn(64, 64)
    twin = copy.copy(model)
    twin.name = "twin"
    twin(x).sum().backward()
    assert twin.report().planned == 1 and model.report().planned == 0 and not hasattr(model, "name")
    assert twin[0][0].weight is model[0][0].weight


def test_it_is_verified_at_its_first_call(monkeypatch):
    model = planned(layers(), verify=True)
    seen = []
    monkeypatch.setattr("ogc.planned.check_two_steps", lambda *given: seen.append(given) or ogc.CheckReport(0, ()))
    model(torch.randn(64, 64))
    model(torch.randn(64, 64))
    assert len(seen) == 1
    assert_alike(layers, torch.randn(64, 64), {"verify": True})


def test_a_difference_that_is_found_then_is_an_error(monkeypatch):
    model = planned(layers(), verify=True)
    wrong = ogc.CheckReport(1, (ogc.Difference("output 0", 1.0, "differs"),))
    monkeypatch.setattr("ogc.planned.check_two_steps", lambda *given: wrong)
    with pytest.raises(ogc.CheckError, match="output 0"):
        model(torch.randn(64, 64))


def test_a_device_that_is_to_hold_the_step():
    model = planned(layers(), device_memory="1MB", optimizer=torch.optim.SGD)
    model(torch.randn(64, 64)).sum().backward()
    assert model.plan.budget_bytes is not None and model.plan.budget_bytes < 10**6


def test_a_loss_behind_it():
    model, x, y = layers(), torch.randn(64, 64), torch.randn(64, 64)
    plain = copy.deepcopy(model)
    optimized = planned(model, loss=nn.functional.mse_loss, outputs="loss")
    torch.manual_seed(2)
    nn.functional.mse_loss(plain(x), y).backward()
    torch.manual_seed(2)
    optimized(x, targets=y).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), optimized.parameters(), strict=True))
    assert optimized.report().planned == 1


def test_a_forward_that_is_wrapped_before_its_first_call():
    model, x = layers(), torch.randn(64, 64)
    plain, optimized = copy.deepcopy(model), planned(model)
    own, of_plain = optimized.forward, plain.forward

    def wrapped(forward):
        def call(x):
            with torch.autocast("cpu", torch.bfloat16):
                return forward(x).float()

        return call

    optimized.forward, plain.forward = wrapped(own), wrapped(of_plain)
    for a, b in zip(steps(plain, x), steps(optimized, x), strict=True):
        assert all(map(torch.equal, a, b))
    assert optimized.report().planned == 2 and not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("sample", [None, torch.randn(64, 64)], ids=["without a sample", "with one"])
@pytest.mark.parametrize("make", [layers, lambda: ByData().double()], ids=["whole", "in parts"])
def test_a_backward_in_eval_mode_is_planned_for(make, sample):
    x = torch.randn(256, 64) if make is layers else torch.randn(256, 16).double()
    sample = sample if sample is None else x
    torch.manual_seed(0)
    plain = make()
    model = ogc.optimize(copy.deepcopy(plain), sample, memory_budget="least")
    plain.eval(), model.eval()
    model(x)
    model(x)  # evaluation without no_grad()
    assert model.report().planned == 0
    for a, b in zip(steps(plain, x, 3), steps(model, x, 3), strict=True):
        assert all(map(torch.equal, a, b))
    assert model.report().planned > 0
