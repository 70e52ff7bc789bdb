"""Whatever container a forward writes into, it holds afterwards what it held before, and is usable."""

from collections import Counter, OrderedDict, defaultdict, deque

import pytest
import torch
from torch import nn

import ogc
from ogc.torch_state.reads.objects import Before, Held, held_by


class Loud(OrderedDict):
    """It does something of its own when it is written."""

    def __setitem__(self, key, value):
        raise AssertionError("nobody asked for this")


class Longer(list):
    """Nobody asks it to grow."""

    def extend(self, items):
        raise AssertionError("nobody asked for this")


def loud():
    found = Loud()
    OrderedDict.__setitem__(found, "a", 1)
    OrderedDict.__setitem__(found, "b", 2)
    return found


MADE = {
    "dict": lambda: {"a": 1, "b": 2},
    "ordered dict": lambda: OrderedDict(a=1, b=2),
    "default dict": lambda: defaultdict(int, a=1, b=2),
    "counter": lambda: Counter(a=1, b=2),
    "ordered dict of its own class": loud,
    "list": lambda: [1, 2],
    "list of its own class": lambda: Longer([1, 2]),
    "deque": lambda: deque([1, 2], maxlen=2),
    "set": lambda: {1, 2},
}


def write(thing):
    if isinstance(thing, dict):
        kind = OrderedDict if isinstance(thing, OrderedDict) else dict
        kind.pop(thing, "a")
        kind.__setitem__(thing, "c", 3)
    elif isinstance(thing, set):
        thing.add(3)
    else:
        thing.append(3)


@pytest.mark.parametrize("is_among_others", [False, True])
@pytest.mark.parametrize("kind", MADE)
def test_containers_are_put_back(kind, is_among_others):
    thing, other = MADE[kind](), MADE[kind]()
    before, held = Before(thing), Held([{}, thing, [3]])
    write(thing)
    assert thing != other
    if is_among_others:
        held.put_back()
    else:
        before.put_back(thing)
    assert thing == other and list(thing) == list(other) and type(thing) is type(other)
    write(thing)
    write(other)
    assert thing == other and list(thing) == list(other)


def test_the_order_of_an_ordered_dict_is_put_back():
    thing = OrderedDict(a=1, b=2, c=3)
    before = Before(thing)
    thing.move_to_end("a")
    assert list(before.changed(thing))
    before.put_back(thing)
    assert list(thing) == ["a", "b", "c"]


def test_what_modules_hold_is_put_back():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    net.sizes, net.names = [1, 2], {"a": [3]}
    held = Held([thing for module in net.modules() for thing in held_by(module)])
    linear, relu = net
    sizes, inner = net.sizes, net.names["a"]
    held.put_back()
    net.sizes.append(3)
    net.names["a"].clear()
    net.names["b"] = net.sizes = 4
    del relu.inplace
    linear.weight, linear.new = None, 5
    net._forward_hooks["hook"] = print
    net._modules.move_to_end("0") if hasattr(net._modules, "move_to_end") else net._modules.update({"2": relu})
    held.put_back()
    assert net.sizes is sizes == [1, 2] and net.names == {"a": [3]} and net.names["a"] is inner
    assert relu.inplace is False and not hasattr(linear, "new") and not net._forward_hooks
    assert [*net] == [linear, relu] and isinstance(linear.weight, nn.Parameter)


class Cached(nn.Module):
    """It keeps the masks of the last two lengths, as caches do that forget what was used least."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        self.masks = OrderedDict()

    def forward(self, x):
        length = x.shape[0]
        if length not in self.masks:
            self.masks[length] = torch.arange(length)[:, None] % 2
        self.masks.move_to_end(length)
        while len(self.masks) > 2:
            self.masks.popitem(last=False)
        return self.layers(x) * self.masks[length]


def test_a_cache_that_forgets_is_the_plain_models():
    torch.manual_seed(0)
    plain, other = Cached(), Cached()
    other.load_state_dict(plain.state_dict())
    optimised = ogc.optimize(other, torch.randn(16, 8), profile="estimate", memory_budget="least")
    assert not other.masks
    for length in (16, 12, 16, 20, 12, 12, 16):
        x = torch.randn(length, 8)
        results = [run(x) for run in (plain, optimised)]
        assert torch.equal(*results)
        assert list(other.masks) == list(plain.masks)
        grads = [
            torch.autograd.grad(result.square().sum(), list(m.parameters()))
            for result, m in zip(results, (plain, other), strict=True)
        ]
        assert all(map(torch.equal, *grads))
