"""An optimized module is saved and loaded like any other; where it is loaded it is planned at its first call."""

import copy
import io
import pickle

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


def test_what_is_loaded_is_planned_by_the_same_wish(saved, opened):
    model, optimised = saved
    again = pickle.loads(pickle.dumps(optimised))
    assert type(again).__name__ == "Residual" and isinstance(again, Residual)
    assert not hasattr(again, "plan") and again.state_dict().keys() == model.state_dict().keys()
    with torch.no_grad():
        again(images())  # nothing to plan for
    assert not hasattr(again, "plan")
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
