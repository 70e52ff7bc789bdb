"""Models that are told what to keep, to recompute and to run once: bits, what runs again, and what is held."""

from __future__ import annotations

import gc
import pickle

import pytest
import torch
from helpers import trace_of_training
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import ogc


class Sine(torch.nn.Module):
    def forward(self, x):
        return torch.sin(x)


class Bend(torch.nn.Module):
    def forward(self, x):
        return torch.atan(x)


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up = torch.nn.LayerNorm(width), torch.nn.Linear(width, 2 * width)
        self.act, self.down, self.drop = Sine(), torch.nn.Linear(2 * width, width), torch.nn.Dropout(0.1)
        self.bend = Bend()

    def forward(self, x):
        return x + self.bend(self.drop(self.down(self.act(self.up(self.norm(x))))))


class Net(torch.nn.Module):
    def __init__(self, layers=4, width=64):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block(width) for _ in range(layers))
        self.head = torch.nn.Linear(width, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Watched(TorchDispatchMode):
    """Counts calls of operators, and knows the memory that each gave."""

    only_looks = True

    def __init__(self):
        super().__init__()
        self.counts, self.given = {}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        if isinstance(result, torch.Tensor):
            self.given.setdefault(name, []).append(StorageWeakRef(result.untyped_storage()))
        return result


def watched_step(model, x):
    """Calls of each operator in the backward of one step, and how many of its results the forward left."""
    with Watched() as forward:
        loss = model(x).square().sum()
    gc.collect()
    held = {name: sum(not one.expired() for one in refs) for name, refs in forward.given.items()}
    with Watched() as backward:
        loss.backward()
    return backward.counts, held


def net():
    torch.manual_seed(0)
    return Net(), torch.randn(64, 64)


def assert_same(model, run, x):
    plain = trace_of_training(model, model, (x,))
    assert all(map(torch.equal, plain, trace_of_training(model, run, (x,))))


GOALS = [{}, {"memory_budget": "least"}, {"memory_budget": 0.7}, {"max_overhead": 1.0}]
FEW = [GOALS[0], *(pytest.param(goal, marks=pytest.mark.full) for goal in GOALS[1:])]


@pytest.mark.parametrize("goal", FEW)
def test_a_model_runs_as_it_is_told(goal):
    model, x = net()
    graph = ogc.parse(model, x, profile="estimate")
    run = ogc.apply(model, graph, ogc.solve(graph, **goal, recompute=[Block], keep=[Bend], once=["layers.0.up"]))
    again, held = watched_step(run, x)
    # The last block's backward comes first, and its memory is what the allocator gives next.
    assert "atan" not in again and again["sin"] >= 4 and again["addmm"] >= 3 and not held["sin"]
    assert_same(model, run, x)


@pytest.mark.full
def test_what_it_is_not_told_is_free():
    model, x = net()
    graph = ogc.parse(model, x, profile="estimate")
    again, held = watched_step(ogc.apply(model, graph, ogc.solve(graph, keep=["*.act"], memory_budget="least")), x)
    assert "sin" not in again and held["sin"] == 4 and again["atan"] >= 1
    again, held = watched_step(ogc.apply(model, graph, ogc.solve(graph, memory_budget="least")), x)
    assert again["sin"] >= 1 and held["sin"] < 4
    plain, held = watched_step(model, x)
    assert "sin" not in plain and held["sin"] == 4


def optimized(model, x=None, **told):
    return ogc.optimize(model, x, profile="estimate", **told)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.full
def test_optimize_is_told_the_same(is_late):
    model, x = net()
    told = {"recompute": [Block], "keep": [Bend], "once": ["layers.0.up"]}
    run = optimized(model, None if is_late else x, **told)
    assert_same(model, run, x)
    again, held = watched_step(run, x)
    assert "atan" not in again and again["sin"] >= 4 and not held["sin"]
    assert "what was told costs" in run.plan.summary and run.plan.free is not None


@pytest.mark.full
def test_what_is_told_holds_for_other_sizes_budgets_and_copies():
    model, x = net()
    run = optimized(model, x, keep=["*.act"], memory_budget=0.6)
    for sizes in (32, 96, 64, 7):
        other = torch.randn(sizes, 64)
        assert_same(model, run, other)
        again, held = watched_step(run, other)
        assert "sin" not in again and held["sin"] == 4
    copy = pickle.loads(pickle.dumps(run))
    copy(x).sum().backward()  # plans it again
    again, held = watched_step(copy, x)
    assert "sin" not in again and held["sin"] == 4


@pytest.mark.full
def test_saved_plans_keep_to_what_is_told(tmp_path):
    model, x = net()
    path, free = tmp_path / "told.json", tmp_path / "free.json"
    optimized(model, x, recompute=["*.act"]).plan.save(path)
    optimized(model, x, memory_budget=1.0).plan.save(free)
    for plan, told in ((path, {}), (path, {"recompute": ["*.act"]}), (free, {"keep": ["*.act"]})):
        run = optimized(model, x, plan=plan, **told)
        again, held = watched_step(run, x)
        assert (held["sin"] == 0) == (plan == path) and ("sin" in again) == (plan == path)
        assert_same(model, run, x)
    with pytest.raises(ogc.PlanError, match=r"saves all of operation \w+, which recompute=\['\*.act'\] forbids"):
        optimized(model, x, plan=free, recompute=["*.act"])


@pytest.mark.full
def test_plans_in_a_folder_are_found_by_what_is_told(tmp_path):
    model, x = net()
    plans = [
        optimized(model, x, cache_dir=tmp_path, **told).plan
        for told in ({}, {"keep": ["*.act"]}, {"recompute": ["*.act"]}, {"keep": ["*.act"]})
    ]
    assert plans[1].decisions == plans[3].decisions and len({plan.decisions for plan in plans}) == 3
    assert len([*tmp_path.glob("plan-*.json")]) == 3


class Unplannable(Net):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if x.sum().item() > 1e9:
                x = x.tolist()
        return self.head(x)


@pytest.mark.parametrize("goal", FEW)
@pytest.mark.full
def test_parts_are_told_by_their_names_in_the_model(goal):
    torch.manual_seed(0)
    model, x = Unplannable(), torch.randn(256, 64)
    run = optimized(model, x, **goal, keep=["layers.*.bend", "layers.0.act"], recompute=["layers.[123]", "head"])
    assert isinstance(run.plan, ogc.PartsPlan)
    again, held = watched_step(run, x)
    assert "atan" not in again and again["sin"] >= 3 and held["sin"] == 1
    assert_same(model, run, x)


@pytest.mark.full
def test_a_model_in_parts_says_what_cannot_be_recomputed(caplog):
    torch.manual_seed(0)
    optimized(Unplannable(), torch.randn(256, 64), recompute=["", "layers.*"])
    assert "so that recompute=['', 'layers.*'] holds for its parts alone" in caplog.text


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"keep": "head"}, "keep= must be a list of module names, patterns and types, not 'head'"),
        ({"once": ["layer.*.act"]}, r"once= no submodule is called 'layer.\*.act'; the nearest are layers"),
        ({"recompute": [torch.nn.Conv2d]}, "recompute= no submodule is a 'Conv2d'; the nearest are"),
        ({"keep": [Sine], "recompute": ["*.act"]}, "keep= and recompute= both name layers.0.act; leave one"),
        ({"keep": ["head"], "chunks": 2}, r"chunks= and compile= go across modules, so that keep=\['head'\] does not"),
        ({"keep": ["head"], "solver": "chen"}, r"solver='chen' cannot be told keep=\['head'\]; only 'optimal' can"),
    ],
)
@pytest.mark.parametrize("is_late", [False, True])
def test_what_means_nothing_is_refused_at_once(told, message, is_late):
    model, x = net()
    with pytest.raises(ogc.InputError, match=message):
        ogc.optimize(model, None if is_late else x, **told)


def test_an_error_names_what_stands_in_the_way():
    model, x = net()
    with pytest.raises(ogc.SolveError, match=r"with keep=\['layers.\*'\] no plan found peaks at or below"):
        optimized(model, x, memory_budget=0.4, keep=["layers.*"])
