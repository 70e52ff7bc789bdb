"""Calls of another size take one forward; whatever a size decides, each step has the plain model's bits."""

import cProfile
import gc
import importlib
import sys
import weakref
from dataclasses import replace

import pytest
import torch
from helpers import assert_same_step, runner_of
from torch import nn
from torch.nn import functional as F

import ogc
from ogc.graph import RuntimeCosts
from ogc.plan import simulate

runner = importlib.import_module("ogc.runtime.runner")
reuse = importlib.import_module("ogc.parser.reuse")
planning = importlib.import_module("ogc.planning")


class Net(nn.Module):
    """Applies ``use`` to features of shape (batch, length, 8), between layers that are worth a plan."""

    def __init__(self, use):
        super().__init__()
        self.first, self.last, self.use = nn.Linear(8, 8), nn.Linear(8, 8), use
        self.norm, self.scale, self.other = nn.BatchNorm1d(8), 1.5, 0.5
        self.table, self.cache = torch.arange(4.0), {}
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        h = self.norm(torch.tanh(self.first(x)).transpose(1, 2)).transpose(1, 2)
        return self.last(self.drop(torch.tanh(self.use(self, F.gelu(h)))))


def attention(model, h):
    q = h.view(*h.shape[:2], 2, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.1).transpose(1, 2).reshape(h.shape)


def chosen(model, h):
    return h * model.scale if h.shape[1] > 7 else h * model.other


def padded(model, h):
    padded = F.pad(h, (0, 0, 0, -h.shape[1] % 4))
    return padded.view(len(h), -1, 4, 8).mean(2).repeat_interleave(4, 1)[:, : h.shape[1]]


def grown(model, h):
    if h.shape[1] > len(model.table):
        model.table = torch.arange(float(h.shape[1]))
    return h + model.table[: h.shape[1], None]


def cached(model, h):
    n = h.shape[1]
    if n not in model.cache:
        model.cache[n] = torch.arange(float(n))[:, None]
    return h + model.cache[n]


def repeated(model, h):
    for _ in range(h.shape[1] // 4):
        h = torch.sin(h)
    return h


def masked(model, h):
    mask = (h.detach().abs().sum() >= 0).view(1, 1, 1)
    return h.masked_fill(~mask.expand_as(h), 0.0)


USES = {  # whether all sizes take one forward each
    "nothing": (lambda model, h: h, True),
    "views": (lambda model, h: h.reshape(-1, 4).flip(0).view(h.shape), True),
    "integer division": (lambda model, h: torch.cat([h[:, h.shape[1] // 2 :], h[:, : h.shape[1] // 2]], 1), True),
    "the larger": (lambda model, h: h / max(h.shape[1], 9), False),
    "positions": (lambda model, h: h + torch.arange(h.shape[1])[:, None] / h.shape[1], False),
    "a causal mask": (lambda model, h: torch.ones(h.shape[1], h.shape[1]).tril() @ h, True),
    "attention with dropout": (attention, True),
    "padding": (padded, False),
    "a branch": (chosen, False),
    "a loop": (repeated, False),
    "a table that grows": (grown, False),
    "a cache by length": (cached, False),
    "a mask": (masked, True),
}
SIZES = (16, 12, 10, 7, 9, 1, 14, 10, 20, 5, 16)


@pytest.fixture
def looks(monkeypatch):
    """How often the memory of a program is looked at, operation by operation."""
    seen = []
    lower = reuse.lower
    monkeypatch.setattr(reuse, "lower", lambda *args: seen.append(args) or lower(*args))
    return seen


def optimised(model, x):
    made = ogc.optimize(model, x, memory_budget="least")
    assert not made.plan.is_plain
    return made


QUICK = ("views", "attention with dropout", "a branch", "a cache by length")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in USES])
def test_each_size_gives_what_the_model_gives(name, looks):
    use, are_quick = USES[name]
    torch.manual_seed(0)
    model = Net(use)
    model(torch.randn(3, SIZES[0], 8))
    made = optimised(model, torch.randn(3, SIZES[0], 8))
    for size in SIZES:
        assert_same_step(made, model, torch.randn(3, size, 8))
    if are_quick:
        assert len(looks) <= 1  # of one, at which PyTorch itself decides
        assert made.report().planned == len(SIZES)


@pytest.mark.full
def test_the_code_is_written_once_for_all_sizes(monkeypatch):
    written = []
    generate = runner.generate
    monkeypatch.setattr(runner, "generate", lambda *args: written.append(args) or generate(*args))
    model = Net(attention)
    made = optimised(model, torch.randn(3, 16, 8))
    for size in range(5, 30):
        assert_same_step(made, model, torch.randn(3, size, 8))
    assert len(written) <= 4


def test_a_profiler_goes_on_where_a_size_is_new():
    model = Net(lambda model, h: h)
    made = optimised(model, torch.randn(3, 16, 8))
    assert_same_step(made, model, torch.randn(3, 12, 8))
    with cProfile.Profile() as profiler:
        assert_same_step(made, model, torch.randn(3, 10, 8))
        assert sys.getprofile() is profiler


def test_data_may_decide_on_sizes(looks):
    """As many rows as there are hits, another number in each batch."""
    model = Net(lambda model, h: h[:, torch.arange(h.shape[1]) % 3 > 0].sin())
    made = optimised(model, torch.randn(3, 16, 8))
    for size in (12, 9, 14, 10):
        assert_same_step(made, model, torch.randn(3, size, 8))


@pytest.mark.full
def test_the_batch_too_may_be_another(looks):
    model = Net(attention)
    made = optimised(model, torch.randn(4, 16, 8))
    for batch, size in ((3, 12), (2, 16), (5, 9), (7, 30), (3, 12)):
        assert_same_step(made, model, torch.randn(batch, size, 8))
    assert not looks


def test_what_is_read_by_a_size_is_a_condition():
    """A branch that is first taken at a third size reads an attribute of its own, which may change later."""
    model = Net(chosen)
    made = optimised(model, torch.randn(3, 16, 8))
    for size, other in ((12, 0.5), (10, 0.5), (5, 0.5), (6, 0.5), (4, 0.5), (4, 0.7), (6, 0.7)):
        model.other = other
        assert_same_step(made, model, torch.randn(3, size, 8))


class Settings:
    """Handed around in every size, and read in some."""

    def __init__(self):
        self.factor = 3.0


def multiplied(h, factor=3.0):
    return h * factor


def multiplier(factor):
    return lambda h: h * factor


SETTINGS, FACTOR, MULTIPLIERS = Settings(), 3.0, [multiplier(3.0), multiplier(5.0)]


def by_settings(model, h):
    settings = SETTINGS
    return h * settings.factor if h.shape[1] < 8 else h * 3.0


def by_default(model, h):
    return multiplied(h) if h.shape[1] < 8 else h * 3.0


def by_global(model, h):
    return by_factor(h) if h.shape[1] < 8 else h * 3.0


def by_factor(h):
    return h * FACTOR


def by_closure(model, h):
    return MULTIPLIERS[h.shape[1] < 8](h)


def set_factor(factor):
    global FACTOR
    FACTOR = factor


CHANGES = {
    by_settings: lambda: setattr(SETTINGS, "factor", 4.0),
    by_default: lambda: setattr(multiplied, "__defaults__", (4.0,)),
    by_global: lambda: set_factor(4.0),
    by_closure: lambda: setattr(MULTIPLIERS[1].__closure__[0], "cell_contents", 4.0),
}
BACK = {
    by_settings: lambda: setattr(SETTINGS, "factor", 3.0),
    by_default: lambda: setattr(multiplied, "__defaults__", (3.0,)),
    by_global: lambda: set_factor(3.0),
    by_closure: lambda: setattr(MULTIPLIERS[1].__closure__[0], "cell_contents", 5.0),
}


@pytest.mark.parametrize(
    "use", [use if use in (by_settings, by_closure) else pytest.param(use, marks=pytest.mark.full) for use in CHANGES]
)
def test_what_some_sizes_alone_read_is_a_condition_for_them(use, looks):
    """What all others read is known by then: the same functions, and what was found in what they read."""
    model = Net(use)
    made = optimised(model, torch.randn(3, 16, 8))
    for size in (12, 10, 9, 6, 5):
        assert_same_step(made, model, torch.randn(3, size, 8))
    assert not looks
    found = {entry.sizes[0][1]: entry.reads for entry in runner_of(made).entries}
    assert found[9] is found[10] is found[16] and found[5] is not found[6] is not found[16]
    CHANGES[use]()
    try:
        for size in (6, 5, 10, 7):
            assert_same_step(made, model, torch.randn(3, size, 8))
    finally:
        BACK[use]()


@pytest.mark.full
def test_a_plan_that_gives_something_else_is_thrown_away(monkeypatch, caplog):
    """The first call of a size is held against the plain model, whatever led to the wrong reuse."""
    known = reuse.numbers_of

    def wrong(*args):
        return {place: number if isinstance(number, float) else number - 1 for place, number in known(*args).items()}

    model = Net(lambda model, h: F.pad(h, (0, 0, 0, 32 - h.shape[1]))[:, : h.shape[1]] + 0.0)
    made = optimised(model, torch.randn(3, 16, 8))
    assert_same_step(made, model, torch.randn(3, 12, 8))
    monkeypatch.setattr(reuse, "numbers_of", wrong)
    for _ in range(2):
        assert_same_step(made, model, torch.randn(3, 10, 8))
    assert caplog.text.count("did not give what the model gives") == 1
    monkeypatch.setattr(reuse, "numbers_of", lambda *args: pytest.fail("used again"))
    assert_same_step(made, model, torch.randn(3, 8, 8))
    assert made.report().planned == 2 and made.report().plain == 2


@pytest.mark.full
def test_a_forward_of_another_program_takes_a_plan_of_its_own(caplog):
    model = Net(repeated)
    made = optimised(model, torch.randn(3, 16, 8))
    with caplog.at_level("INFO"):
        for size in (17, 18, 20, 19, 21):
            assert_same_step(made, model, torch.randn(3, size, 8))
    assert caplog.text.count("not reused by numbers alone") == 2  # once a plan


@pytest.mark.full
def test_a_budget_in_bytes_holds_for_each_size(looks):
    model = Net(attention)
    with torch.no_grad():
        model(torch.randn(3, 24, 8))
    graph = ogc.parse(model, torch.randn(3, 24, 8))
    budget = ogc.solve(graph, memory_budget="least").peak_bytes * 5 // 4
    made = ogc.optimize(model, torch.randn(3, 24, 8), memory_budget=budget)
    for size in (20, 12, 8, 16):
        assert_same_step(made, model, torch.randn(3, size, 8))
    assert not looks  # smaller ones take fewer bytes
    assert_same_step(made, model, torch.randn(3, 30, 8))
    plans = [entry.plan for entry in runner_of(made).entries if entry.kind.inputs.tensors[0].shape[1] == 30]
    assert plans and plans[0] is not made.plan


@pytest.mark.full
def test_a_share_is_looked_at_where_weights_in_proportion_to_sizes_miss_it(looks, monkeypatch):
    model = Net(attention)
    made = ogc.optimize(model, torch.randn(3, 24, 8), max_overhead=3.0)
    for size in (20, 40, 30):
        assert_same_step(made, model, torch.randn(3, size, 8))
    assert not looks and not made.plan.is_plain
    monkeypatch.setattr(planning, "at_shapes", lambda graph, _: replace(graph, runtime=RuntimeCosts(run=1e3)))
    assert_same_step(made, model, torch.randn(3, 46, 8))
    assert len(looks) == 1
    monkeypatch.undo()
    assert_same_step(made, model, torch.randn(3, 100, 8))  # more than twice as many
    assert made.report().plain == 0


@pytest.mark.full
@pytest.mark.parametrize("size", [400, 900])
def test_times_in_proportion_to_sizes_are_about_those_that_are_found(size):
    model, (small, other) = Net(lambda model, h: h), (torch.randn(16, n, 8) for n in (600, size))
    known, found = (ogc.parse(model, x, profile="estimate") for x in (small, other))
    plan = ogc.solve(known, memory_budget="least")
    guessed = reuse.at_shapes(known, reuse.shapes_of(found.program.recorded.graph))
    for of in (lambda graph: graph.step_seconds, lambda graph: simulate(graph, plan).added_seconds):
        assert of(guessed) == pytest.approx(of(found), rel=0.1)
        assert of(guessed) != pytest.approx(of(known), rel=0.2)


@pytest.mark.full
def test_many_sizes_are_forgotten_and_found_again(monkeypatch):
    monkeypatch.setattr(runner, "SHAPES", 4)
    model = Net(lambda model, h: h)
    made = optimised(model, torch.randn(3, 16, 8))
    for _ in range(2):
        for size in range(4, 14):
            assert_same_step(made, model, torch.randn(3, size, 8))
            assert len(runner_of(made).entries) <= 5
    assert made.report().plain == 0


@pytest.mark.full
def test_nothing_holds_what_a_size_left():
    model = Net(attention)
    made = optimised(model, torch.randn(3, 16, 8))
    gc.disable()
    try:
        for size in (12, 10, 9, 8):
            x = torch.randn(3, size, 8)
            output = made(x)
            dead = [weakref.ref(output), weakref.ref(x)]
            output.square().mean().backward()
            del output, x
            assert not any(reference() for reference in dead)
        held = weakref.ref(model)
        del made, model
        gc.collect()
        assert held() is None
    finally:
        gc.enable()


@pytest.mark.full
def test_a_size_that_was_recorded_anew_leads_on_to_others(looks):
    """What is planned in another form, as in-place operators, must be given what is alike; a size of one is not."""
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(True), nn.Conv2d(4, 4, 3, padding=1), nn.Hardswish(True)
    )
    made = optimised(model, torch.randn(2, 2, 8, 8))
    for size in ((6, 8), (8, 1), (6, 1), (4, 1), (5, 7)):
        assert_same_step(made, model, torch.randn(2, 2, *size))
    assert len(looks) == 1 and made.report().plain == 0
