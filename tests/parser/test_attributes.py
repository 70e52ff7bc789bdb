"""What a forward leaves in plain attributes and in hooks on tensors happens as in the plain model, or is refused."""

import pytest
import torch
from helpers import assert_same_training
from torch import nn

import ogc
from ogc.errors import ParseError

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(2))


class Part(nn.Module):
    """A layer that does something on the side."""

    def __init__(self, aside):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.aside = aside
        self.calls = 0
        self.kept = None
        self.seen = []
        self._table = {"names": set()}

    def left_behind(self):
        return self.calls, self.kept, self.seen, self._table

    def forward(self, x):
        return self.aside(self, torch.tanh(self.layer(x)))


class Net(nn.Module):
    def __init__(self, aside):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.part, self.last = nn.Linear(6, 6), Part(aside), nn.Linear(6, 6)

    def forward(self, x):
        for _ in range(2):
            x = torch.tanh(self.first(x))
        return self.last(torch.sin(self.part(x)))


def counts(part, x):
    part.calls += 1
    return x * part.calls


def keeps(part, x):
    part.kept = x.square().mean()
    return x


def collects(part, x):
    part.seen.append(x.detach())
    return x


def tabulates(part, x):
    part._table["names"].add(len(part._table["names"]))
    return x


def is_another_at_first(part, x):
    is_first, part.calls = part.calls == 0, 1
    return 2 * x if is_first else x


def doubles_its_gradient(part, x):
    x.register_hook(lambda gradient: 2 * gradient)
    return x


def settles(part, x):
    part.calls = 7
    return x


def hooks_itself_once(part, x):
    if not part.calls:
        part.calls = 1
        part.layer.register_forward_hook(lambda module, args, result: None)
    return x


def starts_at_what_it_is_given(part, x):
    with torch.no_grad():
        start = torch.sin(x)
    start.requires_grad = True
    return x * torch.cos(start)


@pytest.mark.parametrize("aside", [counts, keeps, collects, tabulates, is_another_at_first, doubles_its_gradient])
def test_a_module_that_leaves_something_behind_is_an_opaque_module(aside, caplog):
    model = Net(aside)
    optimised = ogc.optimize(model, X, memory_budget="least")
    assert [op.target for op in optimised.graph.operations].count("opaque Part") == 1
    assert caplog.text.count("part (") == 1
    assert model.part.left_behind() == Net(aside).part.left_behind()
    plain = Net(aside)
    for run, theirs in ((plain, plain), (optimised, model)):
        for _ in range(3):
            loss = run(X).sum()
            (loss if theirs.part.kept is None else loss + theirs.part.kept).backward()
    assert (model.part.calls, model.part._table) == (plain.part.calls, plain.part._table)
    assert len(model.part.seen) == len(plain.part.seen)
    assert (model.part.kept is None) == (plain.part.kept is None)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


class ByMethod(Net):
    """Its part is never called as a module."""

    def forward(self, x):
        return self.last(torch.sin(self.part.forward(torch.tanh(self.first(x)))))


@pytest.mark.parametrize(
    ("aside", "what"),
    [
        (keeps, "part changes its attribute kept"),
        (counts, "part changes its attribute calls"),
        (collects, "the model changes its attribute part.seen"),
    ],
)
def test_a_module_of_which_only_methods_are_called_is_no_opaque_module_that_would_write(aside, what):
    with pytest.raises(ParseError, match=f"{what} in each call"):
        ogc.optimize(ByMethod(aside), X, memory_budget="least")


@pytest.mark.parametrize("aside", [hooks_itself_once, starts_at_what_it_is_given])
def test_what_nobody_outside_sees_is_no_reason_to_refuse(aside):
    model = Net(aside)
    assert_same_training(model, ogc.optimize(model, X, memory_budget="least"), (X,), steps=2)


def test_an_attribute_that_the_first_call_settles_is_no_reason_for_an_opaque_module(caplog):
    model = Net(settles)
    optimised = ogc.optimize(model, X, memory_budget="least")
    assert not any("opaque" in op.target for op in optimised.graph.operations)
    assert not caplog.text
    assert model.part.calls == 0
    assert_same_training(model, optimised, (X,), steps=2)


@pytest.mark.parametrize(
    ("aside", "message"),
    [
        (counts, "the model changes its attribute calls in each call. Return what others are to have"),
        (keeps, "the model changes its attribute kept in each call"),
        (collects, "the model changes its attribute seen in each call"),
        (tabulates, "the model changes its attribute _table in each call"),
        (is_another_at_first, "the model changes its attribute calls in its first call.*, call the model before"),
        (doubles_its_gradient, "the model calls register_hook of a tensor at .*test_attributes.py:"),
    ],
)
def test_a_model_that_leaves_something_behind_is_refused(aside, message):
    model = Part(aside)
    with pytest.raises(ParseError, match=message):
        ogc.optimize(model, X, memory_budget="least")
    assert model.left_behind() == Part(aside).left_behind()
