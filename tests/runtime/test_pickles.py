"""An optimized module is saved and loaded like any other; where it is loaded it is planned at its first call."""

import copy
import io
import pickle
import sys

import pytest
import torch
from helpers import assert_same_training, measured_peak
from models import Residual, images

import ogc


def plain_of(module):
    """The plain model of what was loaded: it shares everything with that."""
    plain = object.__new__(type(module).__mro__[1])
    object.__setattr__(plain, "__dict__", vars(module))
    return plain


@pytest.fixture
def saved():
    torch.manual_seed(0)
    model = Residual()
    return model, ogc.optimize(model, images(), memory_budget=0.7)


def test_what_is_loaded_is_planned_by_the_same_goal(saved, opened):
    model, optimised = saved
    again = pickle.loads(pickle.dumps(optimised))
    assert type(again).__name__ == "Residual" and isinstance(again, Residual)
    assert again.plan is None and again.report().calls == () and again.state_dict().keys() == model.state_dict().keys()
    with torch.no_grad():
        again(images())  # nothing to plan for
    assert again.plan is None
    assert_same_training(plain_of(again), again, (images(),))
    assert opened and again.plan.decisions == optimised.plan.decisions
    assert again.plan.peak_bytes == pytest.approx(measured_peak(again, (images(),)), rel=0.01)
    once_more = pickle.loads(pickle.dumps(again))
    assert_same_training(plain_of(once_more), once_more, (images(),))


def test_saved_by_torch(saved):
    _, optimised = saved
    file = io.BytesIO()
    torch.save(optimised, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert_same_training(plain_of(again), again, (images(),))
    again.eval()
    assert torch.equal(again(images()), copy.deepcopy(again)(images()))


def test_the_plain_model_is_none_the_wiser(saved):
    model, _ = saved
    assert type(pickle.loads(pickle.dumps(model))) is Residual
    assert "plan" not in vars(model) and type(model) is Residual


@pytest.fixture
def unsolved(monkeypatch):
    """From where a test calls it on, nothing is searched for."""

    def refuse(graph):
        raise AssertionError("the solver was called")

    return lambda: monkeypatch.setattr(sys.modules["ogc.solver.solve"], "search_of", refuse)


class Between(torch.nn.Module):
    """Its own forward goes by the data: its blocks are planned one by one."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16)) for _ in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x) if x.detach().sum().item() != 0.125 else x
        return x


@pytest.mark.full
@pytest.mark.parametrize(
    ("make", "given", "goal"),
    [
        (Residual, images(), {"memory_budget": 0.7}),
        (Residual, images(16, 32), {"chunks": 4, "memory_budget": "least"}),
        (Between, torch.randn(64, 16), {}),
    ],
)
def test_what_is_loaded_starts_from_the_plan(unsolved, make, given, goal):
    if "chunks" in goal:
        layers = [torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3), torch.nn.ReLU()]
        make = lambda: torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1))  # noqa: E731
    optimised = ogc.optimize(make(), given, **goal)
    again = pickle.loads(pickle.dumps(optimised))
    unsolved()
    again(given).square().sum().backward()
    assert "chunks" not in goal or any(op.target == "chunked" for op in again.graph.operations)
    assert again.plan.peak_bytes == pytest.approx(optimised.plan.peak_bytes, rel=0.01)
    once_more = pickle.loads(pickle.dumps(again))
    once_more(given).square().sum().backward()
    assert once_more.plan.peak_bytes == pytest.approx(optimised.plan.peak_bytes, rel=0.01)


def test_what_is_loaded_and_called_otherwise_is_planned_anew(saved, caplog):
    _, optimised = saved
    again = pickle.loads(pickle.dumps(optimised))
    given = images(8)
    with caplog.at_level("INFO", "ogc.planning"):
        again(given)
    assert (
        "a plan is made anew, as the saved one does not do: the plan does not fit the graph, which has other sizes"
        in (caplog.text)
    )
    assert again.plan.budget_bytes > optimised.plan.budget_bytes
    assert_same_training(plain_of(again), again, (given,))


class Planned(Residual):
    """It has a plan of its own."""

    def __init__(self):
        super().__init__()
        self.plan = "mine"


@pytest.mark.filterwarnings("ignore")
def test_attributes_of_the_models_own_are_kept():
    again = pickle.loads(pickle.dumps(ogc.optimize(Planned(), images(), memory_budget=0.7)))
    assert_same_training(plain_of(again), again, (images(),))
    assert again.plan == "mine" and again.graph is not None
