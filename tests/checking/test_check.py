"""``ogc.check`` finds what differs, says by how much, and leaves everything as it was."""

import copy
import importlib
import math

import pytest
import torch
from helpers import forced
from models import Residual, images
from torch import nn

import ogc


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.dropout = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x, scale=1.0):
        y = self.dropout(self.norm(torch.tanh(self.first(x)))) * self.frozen
        return {"y": y * scale, "mean": y.mean()}


def sample():
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()


def changed(model, change):
    """The same model, parameters and all, with ``change(model, x, result)`` after its forward."""

    def forward(self, x, scale=1.0):
        result = type(model).forward(self, x, scale)
        return change(self, x, result) or result

    twin = object.__new__(type("Changed", (type(model),), {"forward": forward}))
    object.__setattr__(twin, "__dict__", vars(model))
    return twin


def an_output(model, x, result):
    return {**result, "mean": result["mean"] + 0.5}


def a_shape(model, x, result):
    return {**result, "mean": result["mean"][None]}


def the_structure(model, x, result):
    return list(result.values())


def a_gradient(model, x, result):
    y = result["y"]
    return {**result, "y": y.detach() + 3 * (y - y.detach())}


def no_gradient(model, x, result):
    return {**result, "y": result["y"].detach()}


def a_buffer(model, x, result):
    model.norm.running_mean.data += 0.25  # past autograd, which would notice


def a_parameter(model, x, result):
    model.frozen.data += 2


def an_input(model, x, result):
    x.data += 1


def the_random_stream(model, x, result):
    torch.rand(())


@pytest.mark.parametrize(
    ("change", "name", "distance"),
    [
        (an_output, "output 1", 0.5),
        (a_shape, "output 1", math.inf),
        (the_structure, "structure of the output", math.inf),
        (a_gradient, "gradient of input 0", None),
        (no_gradient, "requires_grad of output 0", math.inf),
        (a_buffer, "buffer norm.running_mean", 0.25),
        (a_parameter, "parameter frozen", 2.0),
        (an_input, "input 0 after the step", 1.0),
        (the_random_stream, "random state of cpu", None),
    ],
)
def test_a_planted_difference_is_found_and_named(change, name, distance):
    model, x = Plain(), sample()
    report = ogc.check(model, changed(model, change), x)
    assert not report and not report.ok and report.is_deterministic
    found = {difference.name: difference for difference in report.differences if difference.found_in == "seed 1"}
    assert name in found
    assert distance is None or found[name].distance == pytest.approx(distance)
    assert {difference.found_in for difference in report.differences} == set(report.tried)
    assert f"results differ from the plain model's, first {report.first}" in str(report)
    with pytest.raises(ogc.CheckError, match=f"first {report.first.name}: "):
        report.raise_if_different()


def test_gradients_of_parameters_are_compared():
    model, x = Plain(), sample().detach()
    assert ogc.check(model, changed(model, a_gradient), x).first.name == "gradient of first.weight"


def test_the_same_is_the_same():
    model = Residual()
    report = ogc.check(model, forced(model, images()), images())
    assert report and report.first is None
    assert str(report).splitlines() == [
        f"the same as the plain model: {report.compared} results compared bit by bit",
        "tried: seed 1, seed 2, seed 3, another input, a smaller batch, after an optimizer step",
    ]
    report.raise_if_different()


def test_keyword_arguments_and_copies_of_the_model():
    model, x = Plain(), sample()
    optimised = forced(model, {"x": x, "scale": 2.0})
    assert ogc.check(model, optimised, x=x, scale=2.0)
    assert ogc.check(model, copy.deepcopy(optimised), x=x, scale=2.0)
    other = copy.deepcopy(optimised)
    nn.init.zeros_(other.first.bias)
    assert "parameter first.bias" in [d.name for d in ogc.check(model, other, x=x, scale=2.0).differences]


def test_values_that_are_no_numbers_are_equal_to_themselves():
    model, x = Plain(), torch.full((6, 4), math.nan)
    assert ogc.check(model, forced(model, x), x)


def test_strides_and_shared_memory_of_inputs_are_kept():
    model = Plain()
    for x in (torch.randn(4, 6).t(), torch.randn(6, 8)[:, ::2], torch.randn(1, 4).expand(6, 4)):
        seen = []
        assert ogc.check(model, changed(model, lambda model, x, result: seen.append(x.stride())), x)  # noqa: B023
        assert set(seen) == {x.stride()}


@pytest.mark.parametrize("change", [a_buffer, a_parameter, an_input, the_random_stream])
def test_nothing_is_left_behind(change):
    model, x = Plain(), sample()
    model(x)["y"].sum().backward()
    gradients = {p: (p.grad, None if p.grad is None else p.grad.clone()) for p in (x, *model.parameters())}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random, data = torch.get_rng_state(), x.detach().clone()
    ogc.check(model, changed(model, change), x)
    for parameter, (gradient, values) in gradients.items():
        assert parameter.grad is gradient
        assert gradient is None or torch.equal(gradient, values)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state()) and torch.equal(x, data)


def test_everything_is_restored_after_an_error():
    def fail(model, x, result):
        a_parameter(model, x, result)
        raise KeyError("mine")

    model = Plain()
    with pytest.raises(KeyError, match="mine"):
        ogc.check(model, changed(model, fail), sample())
    assert torch.equal(model.frozen, torch.ones(4)) and not model.norm.num_batches_tracked


def test_a_model_that_differs_from_itself_is_recognised():
    class Restless(Plain):
        calls = 0

        def forward(self, x, scale=1.0):
            Restless.calls += 1
            return super().forward(x, scale + Restless.calls)

    model = Restless()
    report = ogc.check(model, changed(model, lambda *given: None), sample())
    assert not report.ok and not report.is_deterministic
    assert "the plain model differs from itself" in str(report)


def test_what_cannot_be_compared_is_refused():
    model = Plain()
    with pytest.raises(ogc.InputError, match="not function"):
        ogc.check(model, lambda x: x, sample())
    with pytest.raises(ogc.InputError, match="only one of the two models has"):
        ogc.check(model, nn.Linear(4, 4), sample())


def test_optimize_verifies_on_request(monkeypatch):
    model, x = Plain(), sample()
    assert ogc.optimize(model, x, verify=True, memory_budget="least").plan
    planned = importlib.import_module("ogc.planned")
    apply = planned._apply
    monkeypatch.setattr(planned, "_apply", lambda *given: changed(apply(*given), a_gradient))
    with pytest.raises(ogc.CheckError, match=r"differ from the plain model's, first gradient of input 0: off by up to"):
        ogc.optimize(model, x, verify=True, memory_budget="least")
    with pytest.raises(ogc.InputError, match="verify=True compares bit by bit"):
        ogc.optimize(model, x, verify=True, chunks=2, memory_budget="least")


def test_verify_finds_gradients_that_a_graph_made_by_hand_gets_wrong():
    def parse_graph(model, x):
        build = ogc.GraphBuilder(model)
        x = build.input("x")
        y = build.call(torch.tanh, build.call(model.first, x))
        y = build.call(torch.add, build.call(torch.Tensor.detach, y), build.call(torch.mul, y, 0))
        y = build.call(torch.mul, build.call(model.dropout, build.call(model.norm, y)), model.frozen)
        return build.output({"y": build.call(torch.mul, y, 1.0), "mean": build.call(torch.mean, y)})

    model, x = Plain(), sample()
    ogc.optimize(model, x, parse_graph=parse_graph, memory_budget="least")
    with pytest.raises(ogc.CheckError, match="gradient of input 0"):
        ogc.optimize(model, x, parse_graph=parse_graph, verify=True, memory_budget="least")
