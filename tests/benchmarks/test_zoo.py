"""The verifier of the zoo: what it calls equal, different, refused and an error."""

import itertools

import pytest
import torch
from torch import nn

import ogc
from benchmarks.zoo.__main__ import _said
from benchmarks.zoo.models import Subject, seeded
from benchmarks.zoo.training import difference, row_of, tensors_in, train


class Small(nn.Module):
    """A layer, statistics, a mask and a layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 4))

    def forward(self, x):
        return {"loss": self.layers(x).square().mean(), "logits": self.layers(x)}


def build(model=Small):
    return Subject(model(), lambda step: {"x": torch.randn(16, 8, generator=seeded(step))})


def test_an_optimized_model_is_equal_and_has_its_figures():
    row = row_of(build)
    assert (row["verdict"], row["detail"], row["opaque_modules"]) == ("equal", "", 0)
    assert row["inputs"] == ["x [16, 8]"] and row["ogc_bytes"] <= row["plain_bytes"]
    said = _said({"name": "small", **row})
    assert said.startswith("small: equal, ") and "operations in 1 parts, 0 opaque modules, planned in" in said


def test_the_plain_model_can_be_tried_alone():
    assert row_of(build, plain_only=True).keys() == {
        *("verdict", "detail", "model", "parameters", "inputs", "plain_bytes"),
    }


def _draw(*_):
    torch.rand(1)


def _count(norm):
    norm.num_batches_tracked += 1


@pytest.mark.parametrize(
    ("spoil", "first"),
    [
        (lambda model: model.layers[4].bias.data.add_(1e-7), "layers.4.bias at the start"),
        (lambda model: model.register_forward_pre_hook(_draw), "loss of step 0"),
        (
            lambda model: model.layers[0].weight.register_hook(lambda gradient: gradient * 1.0000002),
            "gradient of layers.0.weight in step 0",
        ),
        (
            lambda model: model.layers[4].register_forward_hook(lambda *_: _count(model.layers[1])),
            "layers.1.num_batches_tracked after step 0",
        ),
        (
            lambda model: model.register_forward_hook(_draw),
            "random state of torch after step 0",
        ),
    ],
    ids=["parameter", "draws before", "gradient", "buffer", "draws after"],
)
def test_the_first_difference_is_named(spoil, first):
    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    other = build()
    spoil(other.model)
    assert difference(train(plain, plain.model), train(other, other.model)) == first


@pytest.mark.parametrize(("error", "verdict"), [(ogc.ParseError, "refused"), (RuntimeError, "error")])
def test_a_refusal_is_told_from_an_error(monkeypatch, error, verdict):
    def fails(*_, **__):
        raise error("not this one")

    monkeypatch.setattr(ogc, "optimize", fails)
    row = row_of(build)
    assert (row["verdict"], row["detail"]) == (verdict, f"{error.__name__}: not this one")


def test_what_says_nothing_of_us_is_no_difference():
    numbers = itertools.count()

    class Fails(Small):
        def forward(self, x):
            raise ValueError("no")

    class Moves(Small):
        def forward(self, x):
            return super().forward(x + next(numbers))

    assert row_of(lambda: build(Fails)) == {"verdict": "plain cannot", "detail": "ValueError: no"}
    row = row_of(lambda: build(Moves))
    assert row["verdict"] in ("plain cannot", "refused")


def test_an_opaque_module_is_held_against_the_whole(monkeypatch):
    monkeypatch.setattr("ogc.in_parts.make.HEAVY", 2.0)  # nothing is planned inside of it

    class Branches(Small):
        def forward(self, x):
            y = self.layers(x)
            return y if y.sum().item() > -1e9 else x

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.last = Branches(), nn.Linear(4, 4)

        def forward(self, x):
            return self.last(self.inner(x))

    row = row_of(lambda: build(Whole))
    assert (row["verdict"], row["opaque_modules"], row["largest_opaque"]) == ("equal", 1, "inner")
    assert row["opaque_share"] == pytest.approx(964 / 984)


def test_tensors_of_objects_are_found():
    class Cache:
        def __init__(self):
            self.keys, self.again = [torch.ones(2)], self

    found = dict(tensors_in((Cache(), {"a": torch.zeros(1)}), "output"))
    assert list(found) == ["output.0.keys.0", "output.1.a"]
