"""What training calls of an optimized model beside its forward is planned with its first call, and counted by name."""

import copy
import gc
import inspect
import pickle
from types import MethodType

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ogc
from ogc.torch_state.allocator import peak_bytes
from ogc.torch_state.private import CALL


def block():
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32))


class Codes(nn.Module):
    """An autoencoder as people write them: its two halves are called by methods of their own."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = (nn.Sequential(*(block() for _ in range(3))) for _ in range(2))
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.project = nn.Linear(32, 32)

    def forward(self, x):
        return self.decode(self.encode(x))

    def encode(self, x):
        return self.project(self.encoder(x))

    def decode(self, x):
        return self.decoder(x)

    def features(self, x):
        for one in self.blocks:
            x = x + one(x)
        return {"features": self.project(x)}


def loss_of(result):
    return sum(t.float().square().sum() for t in (result.values() if isinstance(result, dict) else [result]))


X = torch.randn(256, 32)


def assigned(model, forward):
    if "assigned" not in vars(model):
        model.assigned, model.forward = True, MethodType(forward, model)
    return model


WAYS = {
    "methods": (lambda model: model.decode(model.encode(X)), {"encoder", "decoder"}),
    "many submodules in a method": (lambda model: model.features(X), {f"blocks.{n}" for n in range(4)}),
    "a submodule": (lambda model: model.encoder(X), {"encoder"}),
    "a forward that was assigned": (lambda model: assigned(model, lambda self, x: self.encoder(x) * 2)(X), {"encoder"}),
}


def results(model, run, steps=3):
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        model.zero_grad()
        result = run(model)
        loss_of(result).backward()
        found += [loss_of(result).detach(), torch.get_rng_state()]
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found


def pair(sample=None, **goal):
    goal = goal or {"memory_budget": "least"}
    torch.manual_seed(0)
    model = Codes()
    return copy.deepcopy(model), ogc.optimize(model, sample, **goal)


@pytest.mark.parametrize("sample", [None, X], ids=["without a sample", "with one"])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_called_runs_by_a_plan(way, sample, caplog):
    run, names = WAYS[way]
    plain, model = pair(sample)
    assert all(map(torch.equal, results(plain, run), results(model, run)))
    report = model.report()
    assert report.plain == 0 and {calls.module for calls in report.calls} == names
    assert report.planned == 3 * len(names) and not [r for r in caplog.records if r.levelname == "WARNING"]
    plain, model = pair(sample)
    run(model)

    def peak(model):
        return peak_bytes(lambda: loss_of(run(model)).backward(), "cpu")

    peak(plain), peak(model)
    assert peak(model) < 0.6 * peak(plain)


def test_a_budget_holds_for_each():
    _, model = pair(memory_budget=0.5)
    model.decode(model.encode(X)).sum().backward()
    (calls, _) = model.report().calls
    assert "plan: peak" in calls.runs
    model(X).sum().backward()
    assert model.plan.budget_bytes is not None and model.report().planned == 3


def test_calls_within_a_run_are_not_planned_apart():
    _, model = pair()
    model(X).sum().backward()
    assert [calls.module for calls in model.report().calls] == [""]


class Plain:
    """How somebody runs the plain model of an optimized one."""

    def call(plain, model):
        return plain(X)

    def through_a_larger_one(plain, model):
        return nn.Sequential(plain, nn.Tanh())(X)

    def check(plain, model):
        model(X)
        ogc.check(plain, model, X)
        return plain(X)


@pytest.mark.parametrize("way", ["call", "through_a_larger_one", "check"])
def test_the_plain_model_stays_plain(way):
    plain = Codes()
    model = ogc.optimize(plain)
    peak = peak_bytes(lambda: loss_of(getattr(Plain, way)(plain, model)).backward(), "cpu") if way == "call" else 0
    getattr(Plain, way)(plain, model)
    assert all(not calls.module for calls in model.report().calls)
    assert peak == 0 or peak >= 0.85 * peak_bytes(lambda: loss_of(Codes()(X)).backward(), "cpu")


@pytest.mark.full
def test_the_plain_model_is_what_it_was_beside_one_with_a_loss():
    plain = Codes().eval()
    expected = plain(X)
    model = ogc.optimize(plain, loss=lambda output: output.mean(), outputs="loss")
    again = ogc.optimize(model)
    assert torch.equal(plain(X), expected) and type(plain) is Codes
    assert torch.equal(model(X), expected.mean()) and torch.equal(again(X), expected.mean())
    del model, again
    gc.collect()
    assert torch.equal(plain(X), expected)


def test_evaluation_plans_nothing():
    _, model = pair()
    with torch.no_grad():
        model.encode(X)
    model.eval()
    model.encode(X)
    assert not model.report().calls


def test_a_checkpoint_around_runs_it_as_it_is(caplog):
    plain, model = pair()
    run = lambda m: checkpoint(m.encoder, X.clone().requires_grad_(), use_reentrant=False)  # noqa: E731
    assert all(map(torch.equal, results(plain, run), results(model, run)))
    assert model.report().planned == 0 and model.report().plain == 3 and "switch gradient checkpointing" in caplog.text
    reentrant = lambda m: checkpoint(m.decoder, X.clone().requires_grad_(), use_reentrant=True)  # noqa: E731
    assert all(map(torch.equal, results(plain, reentrant), results(model, reentrant)))
    assert model.report().planned == 0


def test_hooks_see_the_submodule_as_often_as_plain():
    plain, model = pair()
    seen = {id(one): [] for one in (plain, model)}
    for one in (plain, model):
        for register in (one.encoder.register_forward_hook, one.encoder.register_full_backward_hook):
            register(lambda module, *_, one=one: seen[id(one)].append(module is one.encoder))
    given = X.clone().requires_grad_()
    model.encode(given).sum().backward()
    seen[id(model)].clear()
    for one in (plain, model):
        one.encode(given).sum().backward()
    assert seen[id(plain)] == seen[id(model)] == [True, True]


def test_copies_and_pickles_plan_for_themselves():
    _, model = pair()
    model.encode(X).sum().backward()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.report().planned == 0 or type(other) is type(model)
        before = other.report().planned
        other.encode(X).sum().backward()
        assert other.report().planned == before + 1
        assert other.encoder[0][0].weight is not model.encoder[0][0].weight


def test_it_goes_with_the_optimized_model():
    plain = Codes()
    model = ogc.optimize(plain)
    model.encode(X).sum().backward()
    assert vars(plain.encoder)[CALL] is not None and vars(plain)[CALL] is not None
    del model
    gc.collect()
    assert CALL not in vars(plain.encoder) and CALL not in vars(plain)
    plain.encode(X).sum().backward()


def test_what_cannot_be_planned_runs_as_it_is(caplog):
    class ByData(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(32, 32)

        def forward(self, x):
            x = self.inner(x)
            return x * 2 if x.detach().sum().item() > -1e9 else x

    class Net(Codes):
        def __init__(self):
            super().__init__()
            self.encoder = ByData()

    model = ogc.optimize(Net())
    for _ in range(4):
        model.encode(X).sum().backward()
    texts = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(texts) == 2 and "ogc runs encoder as it is" in texts[0] and "the method encode" in texts[1]
    assert model.report().planned == 0 and model.report().plain == 4 + 4


def test_a_submodule_that_is_an_optimized_model_itself():
    plain, model = pair()
    inner = ogc.optimize(model.encoder, X)
    assert all(map(torch.equal, results(plain, lambda m: plain.encoder(X)), results(model, lambda m: inner(X))))
    assert inner.report().planned == 3 and model.report().planned == 0
    model.encode(X).sum().backward()
    assert inner.report().planned == 3 and model.report().planned == 1


def test_the_model_that_was_optimized_last_counts():
    _, first = pair()
    second = ogc.optimize(first, memory_budget="least")
    second.encode(X).sum().backward()
    assert first.report().planned == 0 and second.report().planned == 1


def test_methods_stay_what_they_are():
    plain, model = pair()
    assert inspect.signature(model.encode) == inspect.signature(plain.encode) and type(model).encode is Codes.encode
    assert type(model.encoder) is nn.Sequential and "forward" not in vars(model.encoder)


SEEN_BY = {
    "script": torch.jit.script,
    "trace": lambda module: torch.jit.trace(module, X, check_trace=False),
    "symbolic trace": torch.fx.symbolic_trace,
    "export": lambda module: torch.export.export(module, (X,)).module(),
    "compile": lambda module: torch.compile(module, backend="eager", fullgraph=True),
}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tool", SEEN_BY)
def test_tools_see_the_plain_submodule_and_model(tool):
    plain, _ = pair()
    model = ogc.optimize(plain)
    model.encode(X).sum().backward()
    for module in (plain.decoder, plain):
        module.requires_grad_(tool != "trace")
        torch.manual_seed(0)
        expected = module(X)
        made = SEEN_BY[tool](module)
        torch.manual_seed(0)
        assert torch.equal(made(X), expected)


def test_a_copy_of_the_plain_model_and_what_shares_its_attributes_are_called_themselves():
    class Scaled(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(8, 8), nn.Tanh())
            self.scale = 2.0

        def forward(self, x):
            return super().forward(x) * self.scale

    class Doubled(Scaled):
        def forward(self, x):
            return 2 * super().forward(x)

    model, x = Scaled(), torch.randn(4, 8)
    optimised = ogc.optimize(model)
    expected = model(x)
    shallow = copy.copy(model)
    shallow.scale = 3.0
    assert torch.equal(shallow(x), expected / 2 * 3)
    other = Doubled()
    other.__dict__ = model.__dict__
    assert torch.equal(other(x), 2 * expected)
    assert torch.equal(model(x), expected) and torch.equal(optimised(x), expected)
