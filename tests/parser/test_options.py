"""What a model is parsed by, handed on as one."""

import inspect
from dataclasses import fields

import pytest
import torch
from torch import nn

import ogc
from ogc.parser import ParseOptions, parse

OTHER = {
    "loss": "outputs",
    "holds_outputs": False,
    "outputs": "loss",
    "gradients": "none",
    "parse_graph": False,
    "profile": "estimate",
    "device": "cuda",
    "rewrite": print,
    "plain_peak_bytes": 7,
    "gpu": "H100",
    "opaque_modules": ["0"],
    "recompute_opaque": True,
    "front_end": "jit",
}


def test_they_are_the_arguments_of_parse(monkeypatch):
    names = {name: of.default for name, of in list(inspect.signature(parse).parameters.items())[2:]}
    own = {field.name: field.default for field in fields(ParseOptions) if field.name != "told"}
    assert names == own and list(OTHER) == list(names)
    monkeypatch.setitem(parse.__globals__, "parsed", lambda model, sample, options: options)
    assert parse(None, None) == ParseOptions() and parse(None, None, **OTHER) == ParseOptions(**OTHER)


class Inner(nn.Sequential):
    """A kind of its own."""


def model():
    return nn.Sequential(Inner(nn.Linear(2, 2), nn.ReLU()), nn.ModuleDict({"a": Inner(nn.Tanh())}))


def of(name, **options):
    module = model()
    return ParseOptions(**options).of_submodule(name, module.get_submodule(name))


def test_those_of_a_submodule():
    found = of("0", **OTHER)
    ends = (found.loss, found.holds_outputs, found.outputs, found.gradients)
    assert ends == ("outputs", True, "all", "kept") and found.profile == "estimate"
    assert of("0").parse_graph is None and of("0", parse_graph=len).parse_graph is False


@pytest.mark.parametrize(
    "name, wanted, inside, recomputed",
    [
        ("0", ["0.1", "1.a", nn.Linear, nn.Tanh], ["1", nn.Linear], ["1", nn.Linear]),
        ("1.a", ["1", "10"], [], True),
        ("1.a", ["1.a"], [], True),
        ("1.a", [Inner], [], True),
        ("1.a", ["1.ab", "0"], [], []),
    ],
)
def test_names_and_types_within_a_submodule(name, wanted, inside, recomputed):
    assert of(name, opaque_modules=wanted).opaque_modules == inside
    assert of(name, recompute_opaque=wanted).recompute_opaque == recomputed


@pytest.mark.parametrize("all_or_none", [None, True, False])
def test_all_and_none_hold_in_submodules_too(all_or_none):
    assert of("0", recompute_opaque=all_or_none).recompute_opaque is all_or_none


def test_modules_that_are_asked_for():
    assert ParseOptions(opaque_modules=["1.a.0", Inner]).asked_for(model()) == ["0", "1.a", "1.a.0"]
    assert ParseOptions().asked_for(model()) == []


@pytest.mark.parametrize(
    "options, message",
    [
        ({"profile": "guess"}, "profile must be"),
        ({"outputs": "some"}, "outputs must be"),
        ({"parse_graph": 3}, "parse_graph must be a function"),
        ({"opaque_modules": ["2"]}, "opaque_modules: the model has no submodule '2'"),
        ({"recompute_opaque": [nn.Conv2d]}, "recompute_opaque: no submodule of the model is a 'Conv2d'"),
    ],
)
def test_bad_ones_are_refused_before_a_call(options, message):
    ParseOptions().check(model())
    with pytest.raises(ogc.InputError, match=message):
        ParseOptions(**options).check(model())


def test_a_model_is_parsed_again_as_it_was():
    x = torch.randn(3, 2)
    graph = ogc.parse(nn.Sequential(Inner(nn.Linear(2, 2)), nn.Tanh()), x, opaque_modules=[Inner], profile="estimate")
    again = ParseOptions(gradients="none").as_for(graph)
    assert again == ParseOptions(gradients="none", opaque_modules={"0"}, profile="estimate")
