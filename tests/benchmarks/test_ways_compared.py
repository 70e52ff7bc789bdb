"""Ways to save memory: what each of them is, who dominates whom, what is compared, and rows of what cannot run."""

import itertools
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import benchmark
import ogc
from benchmarks import measuring, running, ways
from benchmarks.cases import CASES, Tokens
from benchmarks.measuring import Measured, differing, distances
from benchmarks.networks.others import densenet_cifar
from benchmarks.networks.transformers import Gpt2
from benchmarks.results import Impossible, Results
from benchmarks.row import Row, printed, with_verdicts
from benchmarks.trial import Planned, Trial
from ogc.torch_state.allocator import peak_bytes

CPU = torch.device("cpu")


def gpt():
    return Gpt2(50, 32, 64, 4, depth=2).train(), torch.randint(50, (32, 32))


@pytest.fixture
def case(monkeypatch):
    """A small GPT-2 in the place of the large one."""
    small = replace(CASES["gpt2_small"], build=lambda: gpt()[0], input=Tokens(16, 50))
    monkeypatch.setitem(CASES, "gpt2_small", small)
    monkeypatch.setattr(ways, "POINTS", 6)
    return small


@pytest.fixture
def trial(case):
    return Trial("gpt2_small", case, CPU, Results(None, {}), batch_size=32, size=32, profile="estimate")


def row(way, peak, flops, **fields):
    return Row("net", way, peak_bytes=peak, flops=flops, **fields)


@pytest.mark.parametrize(
    ("figures", "verdicts"),
    [
        ({"a": (10, 5), "b": (9, 6)}, {"a": "", "b": ""}),
        ({"a": (10, 5), "b": (9, 5)}, {"a": "b", "b": ""}),
        ({"a": (10, 5), "b": (10, 6)}, {"a": "", "b": "a"}),
        ({"a": (10, 5), "b": (10, 5)}, {"a": "", "b": ""}),
        ({"a": (10, 5), "b": (9, 4), "c": (8, 5)}, {"a": "b", "b": "", "c": ""}),
        ({"a": (1000000001, 7), "b": (1000000000, 7)}, {"a": "b", "b": ""}),
    ],
)
def test_who_dominates_whom(figures, verdicts):
    rows = with_verdicts([row(name, *pair) for name, pair in figures.items()])
    assert {r.way: r.dominated_by for r in rows} == verdicts
    did_not_run = with_verdicts([row("a", 10, 5), row("b", 0, 0, reason="no compiler")])
    assert [r.dominated_by for r in did_not_run] == ["", ""]


def test_checkpointed_blocks_are_those_made_by_hand(trial):
    model, tokens = trial.model, trial.inputs
    found = trial.measured("blocks", lambda: ways.around_blocks(trial.case, model, ways.checkpointed))
    selective = trial.measured("s", lambda: ways.around_blocks(trial.case, model, ways.selectively_checkpointed))

    def by_hand(x):
        x = model.embed(x)
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return model.predict(x)

    expected = peak_bytes(lambda: measuring.step(by_hand, tokens), "cpu")
    assert found.peak_bytes == expected < selective.peak_bytes < found.plain_bytes
    assert found.flops > found.plain_flops == selective.flops
    assert found.differs == selective.differs == ()
    assert not any("forward" in vars(module) for module in model.modules())


def test_stages_end_with_a_pool():
    def stage():
        return nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)

    model = nn.Sequential(OrderedDict(features=nn.Sequential(*stage(), *stage(), nn.Conv2d(3, 8, 1))))
    images, seen = torch.randn(2, 3, 16, 16), []
    run = ways.around_blocks(CASES["vgg11"], model, lambda layer: seen.append(layer) or layer)
    assert torch.equal(run(images), model(images))
    whole = ["Conv2d", "ReLU", "MaxPool2d"]
    assert [[type(child).__name__ for child in stage] for stage in seen] == [whole, whole, ["Conv2d"]]


def test_the_best_split_is_the_one_with_the_least_peak():
    model, x = nn.Sequential(), torch.randn(256, 16)
    model.extend(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(9))
    measuring.allocate_gradients(model)
    best = ways.best_sequential(CASES["linear_relu_100"], model, x)
    splits = {n: ways.Split(best.layers, n) for n in range(2, 10)}
    peaks = {n: peak_bytes(lambda split=split: measuring.step(split, x), "cpu") for n, split in splits.items()}
    assert best.detail == f"{best.number} splits of 9 layers" and peaks[best.number] == min(peaks.values())
    layers = [nn.Conv2d(3, 3, 1), nn.ReLU(inplace=True), nn.ReLU(), nn.Flatten()]
    assert [type(layer).__name__ for layer in ways.joined(layers)] == ["Sequential", "ReLU", "Flatten"]


def test_the_models_own_switch_is_off_again():
    case = replace(CASES["densenet_cifar"], build=lambda: densenet_cifar(22))
    trial = Trial("net", case, CPU, Results(None, {}), batch_size=2)
    found = trial.measured("memory_efficient", lambda: ways.memory_efficient(trial.model))
    assert found.peak_bytes < found.plain_bytes and found.differs == ("buffers",)  # statistics move twice
    assert not any(getattr(module, "memory_efficient", False) for module in trial.model.modules())


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_compiled_with_less_for_activations_computes_more(trial):
    def make(budget):
        return lambda: ways.compiled(trial.model, trial.inputs, budget, backend="aot_eager")

    found = [trial.measured(f"compile {budget}", make(budget)) for budget in (0.0, 1.0)]
    assert found[0].flops > found[1].flops == found[1].plain_flops, found
    assert all(r.paid is not None for r in trial.timed([r.way for r in found], 1, 0.0, measuring.time.perf_counter))


def test_what_does_not_apply_says_why():
    with pytest.raises(Impossible, match="no submodules that are its blocks"):
        ways.around_blocks(CASES["additions_100000"], nn.Identity(), ways.checkpointed)
    with pytest.raises(Impossible, match="no sequence: features are read across"):
        ways.best_sequential(CASES["unet"], nn.Identity(), torch.zeros(1))


# -- measuring ----------------------------------------------------------------------------------------------------


def test_flops_are_those_of_torchs_own_counter():
    model, tokens = gpt()
    measuring.allocate_gradients(model)
    counter = FlopCounterMode(display=False)
    with counter:
        measuring.step(model, tokens)
    assert measuring.measure(model, model, tokens, 0).flops == counter.get_total_flops() > 0
    q = torch.randn(1, 2, 8, 4, requires_grad=True)
    with measuring.FlopCounter() as own:  # attention on a CPU, which torch does not count there
        nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
    assert own.total == (2 + 5) * 2 * (2 * 8 * 8 * 4)  # two matrices of 8×8 by 4, each product and sum a FLOP


def test_what_differs():
    tensors = {"output 0": torch.ones(2), "gradient of w": torch.tensor([1.0, -4.0]), "buffer b": torch.zeros(1)}
    plain = Measured(1, 1, tensors)
    other = replace(plain, tensors=tensors | {"gradient of w": torch.tensor([2.0, -4.0]), "buffer b": torch.ones(1)})
    assert distances(plain, other) == {"gradient of w": 1.0, "buffer b": 1.0}
    assert differing(distances(plain, other, left_out=["gradient of w"])) == ("buffers",)
    nan = replace(plain, tensors=tensors | {"gradient of w": torch.tensor([1.0, float("nan")])})
    lacks = replace(plain, tensors={name: t for name, t in tensors.items() if name != "output 0"})
    assert distances(plain, nan) == {"gradient of w": float("inf")}
    assert distances(plain, lacks) == {"output 0": float("inf")}


@pytest.mark.full
def test_ours_must_have_the_plain_bits_and_others_may_differ(trial, capsys):
    def wrong():
        planned = trial.planned(lambda: ogc.solve(trial.graph, memory_budget="least"))
        return Planned(lambda x: 1.5 * planned.run(x), planned.plan)

    theirs = trial.measured("peer", lambda: lambda x: 1.5 * trial.model(x))
    assert theirs.differs == ("outputs", "gradients") and theirs.deviation == pytest.approx(0.5) and not theirs.failed
    ours = trial.measured("ogc", wrong, is_ours=True)
    assert ours.failed and ours.reason.startswith("CHECK FAILED: output 0 differs by at most")
    assert not trial.measured("ogc, chunked", wrong, is_ours=True, tolerance=1.0).failed
    assert [failure.status for failure in trial.results.failures] == [1]
    assert ours.reason in printed([ours])


# -- ours ---------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_smallest_plan_with_no_more_flops_recomputes_whatever_has_none(monkeypatch):
    monkeypatch.setattr(ways, "POINTS", 6)
    layers = [(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Tanh(), nn.Sigmoid()) for _ in range(6)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *(layer for group in layers for layer in group))
    graph = ogc.parse(model, torch.randn(2, 3, 32, 32), profile="estimate")
    plain = ogc.solve(graph, solver="none")
    rows = [row(name, plain.peak_bytes, plain.step_flops) for name in ("plain", "peer")]
    (found,) = (plan for name, plan, _ in ways.our_plans(graph, rows) if "FLOPs of peer" in name)
    assert found.recomputed_flops == 0
    by_time = [plan.peak_bytes for plan in ogc.frontier(graph).plans if not plan.recomputed_flops]
    assert found.peak_bytes < 0.8 * min(by_time)
    assert ways.frontier_by_flops(ogc.parse(nn.Sequential(nn.Tanh(), nn.PReLU()), torch.randn(2, 3))) == []


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_a_comparison(case, capsys, monkeypatch, tmp_path):
    """What fails is a row that says so, beside the others; a plan with other bits, and one that is not found."""
    solve, apply, calls = ogc.solve, ogc.apply, itertools.count()

    def fails(graph, **goal):
        if goal.get("solver") == "uniform":
            raise RuntimeError("no plan today")
        return solve(graph, **goal)

    def wrong_once(*arguments):
        right = apply(*arguments)
        return right if next(calls) else lambda x: 2 * right(x)

    monkeypatch.setattr(ogc, "solve", fails)
    monkeypatch.setattr(ogc, "apply", wrong_once)
    seen = []
    monkeypatch.setattr(running.Results, "__str__", lambda results: seen.append(results) or "")
    options = ["--device", "cpu", "--batch-size", "8", "--iterations", "1", "--profile", "estimate"]
    compiling = ["--compile-budgets", "0.5", "--compile-backend", "no_such_backend", "--json", str(tmp_path / "o.json")]
    assert benchmark.main(["--arch", "gpt2_small", "--compare", *options, *compiling]) == 1
    (results,) = seen
    rows = {r.way: r for r in results.rows}
    named = ["plain", "blocks", "sequential", "selective", "compile 0.5", "chen", "uniform", "binomial", "feng-huang"]
    assert list(rows)[:9] == named
    assert "no_such_backend" in rows["compile 0.5"].reason and not rows["compile 0.5"].failed
    assert rows["chen"].reason.startswith("CHECK FAILED") and rows["uniform"].reason == "RuntimeError: no plan today"
    assert [failure.status for failure in results.failures] == [1, 4]
    planned = [r for r in rows.values() if r.is_ours and not r.reason]
    assert any(r.way.startswith("ogc: least peak") for r in planned)
    assert all((r.deviation, r.differs) == (0.0, ()) and r.paid is not None for r in planned)
    measured = {r.way: r.peak_bytes for r in planned}
    assert {r.way: r.predicted_bytes for r in planned} == pytest.approx(measured, rel=0.03)
    for peer in ("blocks", "sequential"):
        (at_its_memory,) = (r for r in planned if "memory of" in r.way and peer in r.way.split("memory of")[1])
        assert at_its_memory.peak_bytes <= rows[peer].peak_bytes and at_its_memory.flops <= rows[peer].flops
