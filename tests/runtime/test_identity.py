"""Arguments that are one object stay one object: what a forward makes of that, a plan makes of it too."""

import copy
import gc
import weakref
from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from helpers import forced, runner_of
from torch import nn

import ogc
from ogc.program.structures import Given, InputSpec, OutputSpec

Pair = namedtuple("Pair", ("left", "right"))


class Asks(nn.Module):
    """Goes on with two tensors in another way if ``is_one`` says so of what it is given."""

    def __init__(self, is_one, tensors):
        super().__init__()
        self.is_one, self.tensors = is_one, tensors
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, *args, **kwargs):
        one, other = self.tensors(*args, **kwargs)
        z = self.first(one)
        z = z.sin() * 2 if self.is_one(*args, **kwargs) else z + self.second(other)
        for layer in self.layers:
            z = torch.tanh(layer(z)).sin()
        return z


@dataclass
class Box:
    content: object
    other: object = None


def new():
    return torch.randn(4, 8, requires_grad=True)


def both(x, y):
    return x is y


PLACES = {  # how two tensors are given, how the forward finds them, and what it asks
    "arguments": (lambda x, y: ((x, y), {}), lambda a, b: (a, b), both),
    "by name": (lambda x, y: ((x,), {"y": y}), lambda a, y: (a, y), both),
    "in a list": (lambda x, y: (([x, y],), {}), lambda a: a, lambda a: a[0] is a[1]),
    "in a dict": (
        lambda x, y: (({"a": x},), {"b": {"c": y}}),
        lambda a, b: (a["a"], b["c"]),
        lambda a, b: a["a"] is b["c"],
    ),
    "in an object": (lambda x, y: ((x, Box(y)), {}), lambda a, b: (a, b.content), lambda a, b: a is b.content),
    "in two objects": (
        lambda x, y: ((Box([x]), SimpleNamespace(a=y)), {}),
        lambda a, b: (a.content[0], b.a),
        lambda a, b: a.content[0] is b.a,
    ),
    "in a named tuple": (lambda x, y: ((Pair(x, y),), {}), lambda a: a, lambda a: a.left is a.right),
}


def stepped(model, args, kwargs):
    """The output, and the gradients of parameters and of given tensors, of one step."""
    spec, tensors = InputSpec.of(args, kwargs)
    tensors = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    args, kwargs = spec.rebuild(tensors)
    torch.manual_seed(3)
    out = model(*args, **kwargs)
    ends = [*model.parameters(), *tensors]
    gradients = torch.autograd.grad(out.square().sum(), ends, allow_unused=True)
    return [out.detach(), *(torch.zeros(()) if gradient is None else gradient for gradient in gradients)]


def assert_same(plain, optimised, calls):
    for args, kwargs in calls:
        for ours, theirs in zip(stepped(optimised, args, kwargs), stepped(plain, args, kwargs), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("is_twice", [True, False])
def test_a_tensor_that_is_given_twice(place, is_twice):
    given, tensors, is_one = PLACES[place]
    torch.manual_seed(0)
    model, (x, y) = Asks(is_one, tensors), (new(), new())
    args, kwargs = given(x, x if is_twice else y)
    optimised = ogc.optimize(copy.deepcopy(model), ogc.program.structures.Call(args, kwargs), memory_budget="least")
    assert not optimised.plan.is_plain
    assert_same(model, optimised, [given(x, x), given(x, y), given(y, y), given(y, x), given(x, x.detach())])
    assert optimised.report().plain == 0


CONTAINERS = {
    "lists": (lambda x: [x], lambda a: a[0]),
    "dicts": (lambda x: {"x": x}, lambda a: a["x"]),
    "tuples": (lambda x: (x,), lambda a: a[0]),
    "objects": (lambda x: Box(x), lambda a: a.content),
    "lists in objects": (lambda x: Box([x], [1]), lambda a: a.content[0]),
}


@pytest.mark.full
@pytest.mark.parametrize("is_twice", [True, False])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_container_that_is_given_twice(kind, is_twice):
    make, find = CONTAINERS[kind]
    torch.manual_seed(0)
    model = Asks(both, lambda a, b: (find(a), find(b)))
    one = make(new())
    other = make(find(one))  # with the same tensor in it
    optimised = ogc.optimize(copy.deepcopy(model), (one, one if is_twice else other), memory_budget="least")
    assert_same(model, optimised, [((one, one), {}), ((one, other), {}), ((other, make(new())), {})])
    assert optimised.report().plain == 0


def test_the_pattern_is_kept_where_the_arguments_are_put_together_again():
    x, y, inner = new(), new(), [1]
    box, shared = Box(x, inner), [y, inner]
    spec, tensors = InputSpec.of((x, box, shared, x), {"a": shared, "b": {"c": [box, y]}})
    assert len(tensors) == len(spec.tensors) == 2 and tensors[0] is x and tensors[1] is y
    (one, first, many, again), named = spec.rebuild([y, x])
    assert one is again is first.content is y and many is named["a"] and many[0] is named["b"]["c"][1] is x
    assert first is named["b"]["c"][0] and first is not box and many is not shared and many[1] is first.other == [1]
    assert not any(leaf is inner for leaf in spec.constants)


def test_nothing_is_held_of_arguments_that_were_looked_at():
    tensor, kept = new(), []
    arguments = [tensor], {"a": tensor, "b": Box({"c": tensor})}
    gone, gc_was_on = weakref.ref(tensor), gc.isenabled()
    gc.disable()
    try:
        kept.append(InputSpec.of(arguments, {})[0])
        kept.append(OutputSpec.of(arguments, Given(arguments, {}))[0])
        del tensor, arguments
        assert gone() is None
    finally:
        if gc_was_on:
            gc.enable()


@pytest.mark.parametrize(
    ("some", "others"),
    [
        (lambda x, y: (x, x), lambda x, y: (x, y)),
        (lambda x, y: (x, y, x), lambda x, y: (x, y, y)),
        (lambda x, y: ([x], [x, 1]), lambda x, y: ([y], [x, 1])),
        (lambda x, y: (x, Box(x)), lambda x, y: (x, Box(y))),
        (lambda x, y: (lambda a: (a, a))([x]), lambda x, y: ([x], [x])),
    ],
)
def test_another_pattern_is_another_kind_of_call(some, others):
    x, y = new(), new()
    specs = [InputSpec.of(make(x, y), {})[0] for make in (some, some, others)]
    assert specs[0].fits(specs[1]) and specs[0].fits(specs[1], size=False)
    assert not specs[0].fits(specs[2]) and not specs[0].fits(specs[2], size=False)


def test_constants_that_are_one_object_make_no_pattern():
    size, empty = (2, 2), ()
    some, _ = InputSpec.of((new(), size, size, empty, empty, None), {"flag": True})
    others, _ = InputSpec.of((new(), (2, 2), (2, 2), (), (), None), {"flag": True})
    assert some.fits(others)


class Attends(nn.Module):
    """Attention that packs its projections into one where query, key and value are one tensor."""

    def __init__(self, drop=0.1):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, drop, batch_first=True)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, query, key, value):
        x, _ = self.attention(query, key, value)
        for layer in self.layers:
            x = torch.tanh(layer(x)).sin()
        return x


def test_attention_of_one_tensor_or_of_several():
    x, y = (torch.randn(2, 6, 8, requires_grad=True) for _ in range(2))
    model = Attends()
    for sample in ((x, x, x), (x, y, y)):
        optimised = forced(copy.deepcopy(model), sample)
        assert_same(model, optimised, [((x, x, x), {}), ((x, y, y), {}), ((x, y, x), {})])


def test_attention_that_is_an_opaque_module():
    x, y = (torch.randn(2, 6, 8, requires_grad=True) for _ in range(2))
    model = Attends()
    optimised = ogc.optimize(copy.deepcopy(model), (x, x, x), opaque_modules=["attention"], memory_budget="least")
    assert_same(model, optimised, [((x, x, x), {}), ((x, y, y), {}), ((x, x, x), {})])


class InParts(nn.Module):
    """Blocks that are planned one by one, as rows are picked in between; each is given one tensor three times."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Attends() for _ in range(3))

    def forward(self, x, others):
        for block in self.blocks:
            x = block(x, x, x) + block(x, others, others)
            x = x[x.sum((1, 2)) > -1e9]
        return x


@pytest.mark.full
def test_what_parts_are_given():
    x, y = (torch.randn(2, 6, 8, requires_grad=True) for _ in range(2))
    model = InParts()
    optimised = ogc.optimize(copy.deepcopy(model), (x, y), memory_budget="least")
    assert isinstance(optimised.plan, ogc.PartsPlan)
    assert_same(model, optimised, [((x, y), {}), ((x, x), {})])
    assert optimised.report().plain == 0 and optimised.report().planned


def test_the_check_gives_one_object_where_it_is_given_one():
    x = new()
    seen = []

    def is_one(a, b):
        seen.append(a is b)
        return a is b

    model = Asks(is_one, lambda a, b: (a, b))
    assert ogc.check(model, copy.deepcopy(model), x, x) and all(seen)


def test_carried_over_to_other_sizes():
    model = Asks(both, lambda a, b: (a, b))
    x, (y, z) = new(), (torch.randn(2, 8, requires_grad=True) for _ in range(2))
    optimised = ogc.optimize(copy.deepcopy(model), (x, x), memory_budget="least")
    assert_same(model, optimised, [((y, y), {}), ((y, z), {}), ((x, x), {})])
    assert [variant.is_reused for variant in runner_of(optimised).entries].count(True) == 1
