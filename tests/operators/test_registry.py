"""The registry of operators: the one place where anything is said of one, and all there is to adding another."""

import ast
from pathlib import Path

import pytest
import torch
from helpers import assert_same_training, measured_peak
from torch import nn
from torch.nn import functional as F

import ogc
from ogc.errors import InputError
from ogc.operators.low_memory import LowMemory, is_ours, plain_operator
from ogc.operators.registry import Operator, live_arguments, low_memory_variant, of, register, registered, unregister
from ogc.operators.weights import InputGradient, Use, Weights
from ogc.program.program import WithoutGrad

aten = torch.ops.aten
ROOT = Path(ogc.__file__).parent

FAMILIES = ("operators/", "sizing/cuda/", "rewrites/rules.py", "compiling/kernels.py", "parser/doors/")
"""Where operators are told by their families: their own, what CUDA runs, how they are chunked and fused, how other
tracers write them."""

ELSEWHERE = {
    "parser/weigh/backward.py": {"add"},  # what autograd's engine calls by itself
    "sizing/optimizers.py": {"_local_scalar_dense"},  # numbers that an optimizer reads
    "parser/traced.py": {"lift_fresh", "detach_"},  # what recording is about: data that become tensors
    "parser/recorder/recorder.py": {"lift_fresh", "requires_grad_", "to"},  # and casts of autocast's
    # Calls that a pass or the recorder puts into a program.
    "parser/recorder/record.py": {"_pack_padded_sequence", "clone", "count_nonzero", "stack", "sum"},
    "parser/recorder/tensors.py": {"as_strided", "detach"},
    "parser/passes/writes.py": {"clone"},
    "rewrites/losses.py": {"reshape"},
}
"""Operators that are named in other packages, where they are the room's own subject."""


def names_in(path):
    """The operators of PyTorch that a file names, as attributes of ``torch.ops.aten``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Attribute) and not isinstance(node.value, ast.Constant):
            owner = node.value
            is_aten = isinstance(owner, ast.Name) and owner.id == "aten"
            if is_aten or (isinstance(owner, ast.Attribute) and owner.attr == "aten"):
                found.add(node.attr)
    return found


@pytest.mark.full
def test_operators_are_named_in_the_rooms_of_their_families_alone():
    found = {}
    for path in ROOT.rglob("*.py"):
        place = path.relative_to(ROOT).as_posix()
        if not place.startswith(FAMILIES) and (names := names_in(path)):
            found[place] = names
    assert found == ELSEWHERE


def test_nobody_outside_asks_which_operator_it_is():
    """But whether something is true of it."""
    for path in ROOT.rglob("*.py"):
        place, text = path.relative_to(ROOT).as_posix(), path.read_text("utf-8")
        if not place.startswith(("operators/", "parser/recorder/")):
            assert "operator_name(" not in text or place == "program/program.py", place
            classes = {type(operator.low_memory).__name__ for operator in registered()} - {"NoneType"}
            assert not [name for name in classes if f"{name})" in text or f"import {name}" in text], place


def test_every_form_says_what_it_takes():
    for operator in registered():
        variant = operator.low_memory
        if variant is not None:
            assert variant.operator is operator.target
            assert of(variant) is operator
            assert plain_operator(variant) is operator.target


def test_what_is_not_registered_is_ordinary():
    assert of(aten.addcmul.default) is of(len)
    assert low_memory_variant(aten.addcmul.default, torch.device("cpu")) is None
    assert live_arguments(aten.addcmul.default, (1, 2)) == []


def test_statistics_are_live_under_no_grad_too():
    args = ("x", "weight", "bias", "mean", "variance", True)
    operator = aten.batch_norm.default
    for target in (operator, WithoutGrad(operator), of(operator).low_memory):
        assert live_arguments(target, args) == ["mean", "variance"]
        assert live_arguments(target, (*args[:5], False)) == []  # its result depends on them


def test_an_operator_is_registered_once():
    with pytest.raises(InputError, match=r"aten.relu.default is registered already"):
        register(Operator(aten.relu.default))


class Masked(torch.autograd.Function):
    """``aten.threshold``, which saves a byte for each number instead of the number."""

    @staticmethod
    def forward(ctx, x, threshold, value):
        ctx.save_for_backward(x <= threshold)
        return aten.threshold.default(x, threshold, value)

    @staticmethod
    def backward(ctx, gradient):
        in_place = is_ours(gradient)
        (below,) = ctx.saved_tensors
        fill = gradient.masked_fill_ if in_place and not torch.is_grad_enabled() else gradient.masked_fill
        return fill(below, 0), None, None


class Threshold(LowMemory):
    writes_over = saves_less = True

    def suits(self, *args):
        return args[0].dtype == torch.float32

    def weights(self, use, plain):
        return plain.written_over()


class Thresholds(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = F.threshold(layer(x), 0.1, 0.0)
        return x.mean(1)


@pytest.fixture
def threshold():
    register(Operator(aten.threshold.default, Threshold(aten.threshold.default, Masked)))
    yield aten.threshold.default
    unregister(aten.threshold.default)


@pytest.mark.full
@pytest.mark.parametrize("profile", ["estimate", "measure"])
def test_an_operator_with_a_low_memory_form_is_added_by_registering_it(threshold, profile):
    model, x = Thresholds(), torch.randn(2048, 256)
    graph = ogc.parse(model, x, profile=profile)
    found = [op for op in graph.operations if op.target == str(threshold)]
    assert len(found) == 8
    assert {op.low_memory.internal_bytes for op in found} == {x.numel()}  # a byte for each number
    assert {op.internal_bytes for op in found} == {0}
    saved = [ogc.saved(0, len(graph))]
    assert graph.low_memory
    # the local search finds plans that peak at less without any
    least = ogc.solve(graph, memory_budget="least", effort=0)
    for plan in (ogc.make_plan(graph, saved, low_memory=graph.low_memory), least):
        optimised = ogc.apply(model, graph, plan)
        assert "low_memory.threshold(" in optimised.code
        assert_same_training(model, optimised, (x,))
        assert measured_peak(optimised, (x,)) == pytest.approx(plan.peak_bytes, rel=0.01)
        assert measured_peak(model, (x,)) == pytest.approx(plan.plain_peak_bytes, rel=0.01)


def test_both_forms_of_a_use_can_be_weighed(threshold):
    x = torch.empty(10, 10)
    use = Use((x, 0.1, 0.0), 400, Weights(working_bytes=400, gradients=(InputGradient(0, 400, None),)))
    plain, variant = of(threshold).weigh(use), of(threshold).low_memory
    assert plain is use.weights
    assert variant.weights(use, plain).gradients[0].reuses == 0


def test_an_operator_that_is_taken_back_is_ordinary_again():
    assert of(aten.threshold.default) is of(len)
    graph = ogc.parse(Thresholds(), torch.randn(4, 256))
    assert not graph.low_memory
