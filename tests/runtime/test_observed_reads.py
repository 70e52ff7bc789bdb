"""What a forward reads and writes outside of tensors: each kind of place by itself, whoever else watches the code."""

import cProfile
import gc
import random
import sys
import threading
from itertools import count

import pytest
import torch
from python_worlds import SOURCE, World
from torch import nn

import ogc

READ_AND_CHANGED = {
    "item of a dict": ("x = x * self.table['default']", "b.table['default'] = r"),
    "item of a list in a dict": ("x = x * self.table['list'][1]", "b.table['list'][1] = r"),
    "another dict": ("x = x * self.table['default']", "b.table = {'default': r, 'list': []}"),
    "key of a dict": ("x = x if 'late' in self.table else 0.7 * x", "b.table['late'] = r"),
    "computed name": ("x = x * getattr(self, f'scale{self.which}')", "b.scale1 = r"),
    "name of a method's argument": ("x = self.method(x, 'sca' + 'le')", "b.scale = r"),
    "attribute read by a helper": ("x = helper(self, x, 'scale0')", "b.scale0 = r"),
    "all attributes": ("x = x * vars(self)['scale0']", "b.scale0 = r"),
    "attribute that is not there": ("x = 1.5 * x if hasattr(self, 'late') else x", "b.late = r"),
    "attribute of a class": ("x = x * type(self).K", "Base.K = r"),
    "attribute of a class, hidden by the instance's": ("x = x * self.K", "b.K = r"),
    "attribute of a class, hidden by a subclass's": ("x = x * type(self).K", "Block.K = r"),
    "dict of a class": ("x = self.of_class(x)", "Base.TABLE['a'] = r"),
    "method of a class": ("x = self.method(x)", "Block.method = lambda self, x, r=r: x * r"),
    "class method": ("x = self.of_class(x)", "Block.of_class = classmethod(lambda cls, x, r=r: x * r)"),
    "method called through a class": ("x = Block.of_static(x)", "Block.of_static = staticmethod(lambda x, r=r: x * r)"),
    "another property": ("x = x * self.prop", "Block.prop = property(lambda self, r=r: r)"),
    "global function": ("x = helper(self, x, 'scale')", "globals()['helper'] = lambda module, x, name, r=r: x * r"),
    "property": ("x = x * self.prop", "b._hidden = r"),
    "global": ("x = x * SCALE", "globals()['SCALE'] = r"),
    "global of a static method": ("x = self.of_static(x)", "globals()['SCALE'] = r"),
    "nested global": ("x = x * BOX['deep']['b'][1][0]", "BOX['deep']['b'][1][0] = r"),
    "attribute of a Python module": ("x = x * getattr(other.inner, 'GAIN')", "other.inner.GAIN = r"),
    "cell of a closure": ("x = read_closure(x)", "put_cell(r)"),
    "list in a cell": ("x = read_closure(x)", "put_box(r)"),
    "default argument": ("x = with_default(x)", "with_default.__defaults__ = (r, {'a': r})"),
    "dict as a default argument": ("x = with_default(x)", "with_default.__defaults__[1]['a'] = r"),
    "attribute of a function": ("x = with_attribute(x)", "with_attribute.gain = r"),
    "dataclass two levels down": ("x = x * self.config.inner.gain", "b.config.inner.gain = r"),
    "slot": ("x = x * self.slotted.value", "b.slotted.value = r"),
    "object that finds its attributes itself": ("x = x * self.magic.gain", "b.magic._content['gain'] = r"),
    "namespace": ("x = x * SPACE.gain", "SPACE.gain = r"),
    "array": ("x = x * float(self.array[1])", "b.array[1] = r"),
    "partial": ("x = self.partial(x)", "b.partial = functools.partial(scaled, scale=r)"),
    "tensor": ("x = x * self.shift", "b.shift = torch.full((8,), r)"),
    "identity": ("x = x * (3.0 if self.table is self.config.table else 0.5)", "b.table = b.config.table"),
}
IMAGES = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))


def source(statement, around=""):
    indented = ("        " + line for line in statement.split("\n"))
    return SOURCE.format(statements="\n".join(indented), around=f"        {around}" if around else "")


def worlds(statement, around=""):
    """The same program twice."""
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        found.append(World(source(statement, around)))
    return found


def step(world, run):
    world.model.zero_grad()
    output = run(IMAGES)
    output.square().mean().backward()
    return [output.detach(), *(p.grad for p in world.model.parameters() if p.grad is not None)]


def assert_alike(plain, other, optimised):
    results = step(plain, plain.model), step(other, optimised)
    assert all(map(torch.equal, *results)) and plain.state() == other.state()
    return results[0]


@pytest.mark.full
@pytest.mark.parametrize("place", READ_AND_CHANGED)
def test_a_change_is_seen_wherever_it_was_read(place, opened):
    statement, change = READ_AND_CHANGED[place]
    plain, other = worlds(statement)
    optimised = ogc.optimize(other.model, IMAGES, profile="estimate", memory_budget="least")
    before = assert_alike(plain, other, optimised)
    for world in (plain, other):
        world.change(change, 1, 0.31)
    opened.clear()
    after = assert_alike(plain, other, optimised)
    assert not torch.equal(before[0], after[0]) and opened  # it makes a difference, and a plan runs all the same
    assert_alike(plain, other, optimised)
    assert optimised.report().plain == 0


@pytest.mark.full
@pytest.mark.parametrize("change", ["b.notes = r", "CONFIG.notes = r", "globals()['NEW'] = r", "b.scale0 = r"])
def test_what_was_not_read_may_change(change):
    _, other = worlds("x = x * self.scale * CONFIG.gain * SCALE")
    optimised = ogc.optimize(other.model, IMAGES, profile="estimate", memory_budget="least")
    for number in range(5):
        other.change(change, 0, float(number))
        step(other, optimised)
    assert [calls.kind for calls in optimised.report().calls] == ["like the sample"]


def profiled(function):
    return cProfile.Profile().runcall(function)


def with_a_hook(set_hook):
    def run(function):
        set_hook(lambda *_: None)
        try:
            return function()
        finally:
            set_hook(None)

    return run


def with_both(function):
    return with_a_hook(sys.settrace)(lambda: with_a_hook(sys.setprofile)(function))


WATCHERS = {
    "profiler": with_a_hook(sys.setprofile),
    "cProfile": profiled,
    "debugger": with_a_hook(sys.settrace),
    "profiler and debugger": with_both,
}


@pytest.mark.full
@pytest.mark.parametrize("watcher", WATCHERS)
@pytest.mark.parametrize("place", ["item of a dict", "global", "cell of a closure", "attribute read by a helper"])
def test_reads_are_seen_under_whoever_watches(place, watcher):
    statement, change = READ_AND_CHANGED[place]
    plain, other = worlds(statement)
    traced, profiling = sys.gettrace(), sys.getprofile()
    optimised = WATCHERS[watcher](lambda: ogc.optimize(other.model, IMAGES, profile="estimate", memory_budget="least"))
    sys.settrace(traced)
    assert sys.getprofile() is profiling
    for world in (plain, other):
        world.change(change, 1, 0.31)
    assert_alike(plain, other, optimised)


@pytest.mark.full
def test_other_threads_read_what_they_like():
    plain, other = worlds("x = x * self.table['default']")
    stop, seen = threading.Event(), []

    def read():
        while not stop.is_set():
            seen.append(other.model.blocks[0].scale1 + other.model.blocks[0].config.gain)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        optimised = ogc.optimize(other.model, IMAGES, profile="estimate", memory_budget="least")
    finally:
        stop.set()
        thread.join()
    names = {key for owner in optimised.graph.program.reads.owners for key in owner.names}
    assert seen and "table" in names and "scale1" not in names
    assert_alike(plain, other, optimised)


@pytest.mark.full
def test_what_the_garbage_collector_calls_is_none_of_the_forwards():
    numbers = count()

    def collected(phase, info):
        collected.number = next(numbers)

    plain, other = worlds("x = x * self.scale\n" + "\n".join("x = [x, [[]] * 50][0]" for _ in range(5)))
    before = gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(10)
    try:
        optimised = ogc.optimize(other.model, IMAGES, profile="estimate", memory_budget="least")
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(collected)
    assert next(numbers) > 0
    assert_alike(plain, other, optimised)


def test_classes_and_python_modules_are_afterwards_what_they_were():
    _, other = worlds("x = x * self.prop * other.SCALE * self.slotted.value")
    kinds = [torch.nn.Module, *(getattr(other.module, name) for name in ("Net", "Block", "Config", "Slotted", "Magic"))]
    before = [dict(vars(kind)) for kind in kinds]
    ogc.optimize(other.model, IMAGES, profile="estimate", memory_budget="least")
    assert [dict(vars(kind)) for kind in kinds] == before
    assert type(other.module.other) is type(random)


WRITTEN = {
    "most seen": "self.seen = max(self.seen, x.shape[0])",
    "shape of the last": "self.last = x.shape[0]\nself.stash = x.shape",
    "mask in a dict": "x = x * self.cache.setdefault('mask', torch.full((8,), 0.5))",
    "attribute of an object": "CONFIG.last = x.shape[0]",
    "global": "global COUNT\nCOUNT = 7",
    "attribute of a class": "type(self).K = 1.5",
    "variable of a closure": "x = count_cell(x)",
    "nested global": "BOX['deep']['b'][1][0] = 0.6",
    "slot": "self.slotted.other = x.shape[1]",
    "list that fills": "if len(self.items) < 4:\n    self.items.append(1.0)",
    "counter": "self.calls += 1",
    "counter that counts": "self.calls += 1\nx = x * self.calls",
    "global counter": "global COUNT\nCOUNT += 1",
    "activation": "self.kept = x.detach()",
}


@pytest.mark.full
@pytest.mark.parametrize("written", WRITTEN)
def test_what_a_forward_writes_is_there_for_the_caller(written):
    plain, other = worlds(WRITTEN[written])
    before = other.state()
    optimised = ogc.optimize(other.model, IMAGES, profile="estimate", memory_budget="least")
    assert other.state() == before
    for _ in range(4):
        assert_alike(plain, other, optimised)
    for world in (plain, other):
        world.change("b.seen, b.last, b.calls = 0, None, 0", 1, 0.0)
    assert_alike(plain, other, optimised)


@pytest.mark.full
@pytest.mark.parametrize("written", ["most seen", "shape of the last", "mask in a dict", "global", "slot"])
def test_what_is_settled_in_a_first_call_costs_no_plan(written, opened):
    _, other = worlds(WRITTEN[written])
    optimised = ogc.optimize(other.model, IMAGES, profile="estimate", memory_budget="least")
    for _ in range(4):
        step(other, optimised)
    assert optimised.report().plain <= 1 and optimised.report().planned >= 3
    assert not any("opaque" in op.target for op in optimised.graph.operations)


class Counts(nn.Module):
    """An opaque module, as it reads a number out of an activation, which it leaves for others."""

    def __init__(self, board):
        super().__init__()
        self.board = board

    def forward(self, x):
        self.board["positive"] = int((x > 0).sum())
        return x


class Scales(nn.Module):
    def __init__(self, board):
        super().__init__()
        self.board = board

    def forward(self, x):
        return x * self.board["positive"]


def test_a_module_that_reads_what_an_opaque_module_writes_is_one_too():
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        board = {"positive": 0}
        layers = [nn.Linear(8, 8), nn.Tanh(), Counts(board), nn.Linear(8, 8), nn.Sigmoid(), Scales(board)]
        models.append(nn.Sequential(*layers, nn.Linear(8, 8)))
    plain, other = models
    optimised = ogc.optimize(other, IMAGES, profile="estimate", memory_budget="least")
    assert [op.target for op in optimised.graph.operations if "opaque" in op.target] == [
        "opaque Counts",
        "opaque Scales",
    ]
    for scale in (1.0, -1.0, 0.5):
        for model, run in ((plain, plain), (other, optimised)):
            run(IMAGES * scale).square().mean().backward()
            assert model[2].board["positive"] > 0
        ours, theirs = ([p.grad for p in model.parameters()] for model in (other, plain))
        assert all(map(torch.equal, ours, theirs)) and plain[2].board == other[2].board


class Bare:
    """Has no table of attributes, but what its class has."""

    __slots__ = ("value",)
    gain = 2.0

    def __init__(self):
        self.value = 1.5

    def scale(self, x):
        return x if hasattr(self, "late") else x * self.value * self.gain


class Holds(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.bare = Bare()

    def forward(self, x):
        return self.bare.scale(torch.tanh(super().forward(x)))


def test_objects_without_a_table_are_read_too(monkeypatch):
    model = nn.Sequential(Holds(), Holds(), Holds())
    optimised = ogc.optimize(model, IMAGES, profile="estimate", memory_budget="least")
    results = [model(IMAGES)]
    for change in (lambda: setattr(model[0].bare, "value", 3.0), lambda: monkeypatch.setattr(Bare, "gain", 0.5)):
        change()
        results.append(model(IMAGES))
        assert torch.equal(optimised(IMAGES), results[-1]) and not torch.equal(*results[-2:])
    assert optimised.report().plain == 0
