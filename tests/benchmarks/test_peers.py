"""Other ways to save memory: what each of them is, who dominates whom, and rows of those that cannot run."""

import json
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import benchmark
import ogc
from benchmarks import measuring
from benchmarks.networks import ARCHITECTURES, Tokens
from benchmarks.networks.densenet_cifar import densenet_cifar
from benchmarks.networks.transformers import Gpt2
from benchmarks.peers import Comparison, PeerRow, compare, ours, ways, with_verdicts
from benchmarks.peers.comparing import differences
from benchmarks.peers.ways import Impossible, Split
from benchmarks.suites import RESULTS
from benchmarks.summaries import beating
from ogc.torch_state.allocator import peak_bytes


def gpt():
    return Gpt2(50, 32, 64, 4, depth=2).train(), torch.randint(50, (32, 32))


def vgg():
    first = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(OrderedDict(features=nn.Sequential(*first, *second, nn.Conv2d(8, 8, 1))))


def row(name, peak, flops, **fields):
    return PeerRow(name, peak_bytes=peak, flops=flops, **fields)


@pytest.fixture(autouse=True)
def few_points(monkeypatch):
    monkeypatch.setattr(ours, "POINTS", 6)


# -- verdicts -------------------------------------------------------------------------------------------


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
    assert {r.name: r.dominated_by for r in rows} == verdicts


def test_a_row_that_did_not_run_dominates_nobody_and_is_dominated_by_nobody():
    rows = with_verdicts([row("a", 10, 5), PeerRow("b", reason="no compiler")])
    assert [r.dominated_by for r in rows] == ["", ""]


# -- the ways -------------------------------------------------------------------------------------------


def test_checkpointed_blocks_are_those_made_by_hand():
    model, tokens = gpt()
    measuring.allocate_gradients(model)
    found = measuring.measure(
        model, ways.around_blocks(ARCHITECTURES["gpt2_small"], model, ways.checkpointed), tokens, 0
    )

    def by_hand(x):
        x = model.embed(x)
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return model.predict(x)

    expected = peak_bytes(lambda: measuring.step(by_hand, tokens), "cpu")
    plain = measuring.measure(model, model, tokens, 0)
    assert found.peak == expected < plain.peak
    assert found.flops > plain.flops
    assert differences(plain, found) == (0.0, ())
    assert not any("forward" in vars(module) for module in model.modules())


def test_selective_checkpoints_recompute_no_flops():
    model, tokens = gpt()
    measuring.allocate_gradients(model)
    run = ways.around_blocks(ARCHITECTURES["gpt2_small"], model, ways.selectively_checkpointed)
    plain, found = (measuring.measure(model, r, tokens, 0) for r in (model, run))
    assert found.flops == plain.flops
    assert found.peak < plain.peak
    assert differences(plain, found) == (0.0, ())


def test_stages_end_with_a_pool():
    model, images = vgg(), torch.randn(2, 3, 16, 16)
    seen = []

    def noted(layer):
        seen.append(layer)
        return layer

    run = ways.around_blocks(ARCHITECTURES["vgg11"], model, noted)
    assert torch.equal(run(images), model(images))
    assert [[type(child).__name__ for child in stage] for stage in seen] == [
        ["Conv2d", "ReLU", "MaxPool2d"],
        ["Conv2d", "ReLU", "MaxPool2d"],
        ["Conv2d"],
    ]


def test_the_best_split_is_the_one_with_the_least_peak():
    architecture, model, x = ARCHITECTURES["linear_relu_100"], nn.Sequential(), torch.randn(256, 16)
    model.extend(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(9))
    measuring.allocate_gradients(model)
    best = ways.best_sequential(architecture, model, x)
    peaks = {n: peak_bytes(lambda: measuring.step(Split(best.layers, n), x), "cpu") for n in range(2, 10)}  # noqa: B023
    assert len(best.layers) == 9
    assert best.detail == f"{best.number} splits of 9 layers"
    assert peaks[best.number] == min(peaks.values())


def test_what_writes_over_its_input_stays_with_the_layer_before():
    layers = [nn.Conv2d(3, 3, 1), nn.ReLU(inplace=True), nn.ReLU(), nn.Flatten()]
    assert [type(layer).__name__ for layer in ways.joined(layers)] == ["Sequential", "ReLU", "Flatten"]


def test_the_models_own_switch_is_off_again():
    model, images = densenet_cifar(22).train(), torch.randn(2, 3, 32, 32)
    measuring.allocate_gradients(model)
    plain, found = (measuring.measure(model, r, images, 0) for r in (model, ways.memory_efficient(model)))
    assert found.peak < plain.peak
    assert differences(plain, found) == (0.0, ("buffers",))  # statistics move twice
    assert not any(getattr(module, "memory_efficient", False) for module in model.modules())


@pytest.mark.filterwarnings("ignore")
def test_compiled_with_less_for_activations_computes_more():
    model, tokens = gpt()
    measuring.allocate_gradients(model)
    plain = measuring.measure(model, model, tokens, 0)
    flops = [
        measuring.measure(model, ways.compiled(model, tokens, budget, "aot_eager"), tokens, 0).flops
        for budget in (0.0, 1.0)
    ]
    assert flops[0] > flops[1] == plain.flops


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        (
            "additions_100000",
            lambda known, model, x: ways.around_blocks(known, model, ways.checkpointed),
            "no submodules that are its blocks",
        ),
        ("unet", ways.best_sequential, "no sequence: features are read across"),
    ],
)
def test_what_does_not_apply_says_why(name, make, message):
    with pytest.raises(Impossible, match=message):
        make(ARCHITECTURES[name], nn.Identity(), torch.zeros(1))


# -- measuring ------------------------------------------------------------------------------------------


def test_flops_are_those_of_torchs_own_counter():
    model, tokens = gpt()
    measuring.allocate_gradients(model)
    counter = FlopCounterMode(display=False)
    with counter:
        measuring.step(model, tokens)
    assert measuring.measure(model, model, tokens, 0).flops == counter.get_total_flops() > 0


def test_attention_on_a_cpu_is_counted():
    q = torch.randn(1, 2, 8, 4, requires_grad=True)
    with measuring.FlopCounter() as counter:
        nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
    products = 2 * (2 * 8 * 8 * 4)  # two matrices of 8×8 by 4, each product and sum a FLOP
    assert counter.total == (2 + 5) * products


def test_a_gradient_that_differs_is_told_from_other_tensors():
    tensors = {"output 0": torch.ones(2), "gradient of w": torch.tensor([1.0, -4.0]), "buffer b": torch.zeros(1)}
    plain = measuring.Measured(1, 1, tensors)
    other = replace(plain, tensors=tensors | {"gradient of w": torch.tensor([2.0, -4.0]), "buffer b": torch.ones(1)})
    assert differences(plain, other) == (0.25, ("buffers",))


# -- ours -----------------------------------------------------------------------------------------------


def test_the_smallest_plan_with_no_more_flops_recomputes_whatever_has_none():
    layers = [(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Tanh(), nn.Sigmoid()) for _ in range(6)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *(layer for group in layers for layer in group))
    graph = ogc.parse(model, torch.randn(2, 3, 32, 32), profile="estimate")
    plain = ogc.solve(graph, solver="none")
    rows = [row(name, plain.peak_bytes, plain.step_flops) for name in ("plain", "peer")]
    plans = {name: plan for name, plan, _ in ours.our_plans(graph, rows)}
    (found,) = [plan for name, plan in plans.items() if "FLOPs of peer" in name]
    assert found.recomputed_flops == 0
    by_time = [plan.peak_bytes for plan in ogc.frontier(graph).plans if not plan.recomputed_flops]
    assert found.peak_bytes < 0.8 * min(by_time)


def test_a_graph_without_flops_has_no_frontier_by_flops():
    assert ours.frontier_by_flops(ogc.parse(nn.Sequential(nn.Tanh(), nn.PReLU()), torch.randn(2, 3))) == []


# -- all of it ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_a_comparison():
    model, tokens = gpt()
    found = compare(
        "gpt2_small", ARCHITECTURES["gpt2_small"], model, tokens,
        iterations=1, profile="estimate", compile_budgets=[0.5], compile_backend="no_such_backend",
    )  # fmt: skip
    rows = {r.name: r for r in found.rows}
    assert list(rows)[:9] == [
        "plain", "blocks", "sequential", "selective", "compile 0.5", "chen", "uniform", "binomial", "feng-huang",
    ]  # fmt: skip
    assert "no_such_backend" in rows["compile 0.5"].reason
    planned = [r for r in found.rows if r.is_ours and not r.reason]
    assert any(r.name.startswith("ogc: least peak") for r in planned)
    for r in planned:
        assert (r.deviation, r.differs) == (0.0, ())
        assert r.predicted_bytes == pytest.approx(r.peak_bytes, rel=0.03)
    for peer in ("blocks", "sequential"):
        (at_its_memory,) = [r for r in planned if "memory of" in r.name and peer in r.name.split("memory of")[1]]
        assert at_its_memory.peak_bytes <= rows[peer].peak_bytes
        assert at_its_memory.flops <= rows[peer].flops
    text = str(found)
    assert "gpt2_small, input 32×32" in text
    assert "did not run, see below" in text and "compile 0.5: " in text


def test_other_numbers_from_a_plan_are_a_row_that_failed_beside_the_others(monkeypatch):
    model, tokens = gpt()
    apply, seen = ogc.apply, []

    def wrong_once(*arguments):
        right = apply(*arguments)
        seen.append(1)
        return (lambda x: 2 * right(x)) if len(seen) == 1 else right

    monkeypatch.setattr(ogc, "apply", wrong_once)
    found = compare("gpt2_small", ARCHITECTURES["gpt2_small"], model, tokens, iterations=1)
    (failed,) = [r for r in found.rows if r.failed]
    assert (failed.name, failed.reason) == ("chen", "CheckFailed: not the plain model's outputs")
    assert {"uniform", "binomial", "feng-huang"} <= {r.name for r in found.rows if r.peak_bytes}


def test_a_gradient_that_is_not_a_number_is_a_difference():
    plain, other = ({"gradient of a": torch.tensor([1.0, x])} for x in (2.0, float("nan")))
    assert differences(measuring.Measured(1, 1, plain), measuring.Measured(1, 1, other)) == (float("inf"), ())


def test_what_two_plain_steps_differ_in_is_not_compared_and_the_comparison_says_so(monkeypatch):
    plain, other = ({"gradient of a": torch.tensor([x]), "output 0": torch.tensor([x])} for x in (1.0, 2.0))
    both = measuring.Measured(1, 1, plain), measuring.Measured(1, 1, other)
    assert differences(*both, left_out=["gradient of a"]) == (0.0, ("outputs",))
    said = str(Comparison("net", (1,), (row("plain", 8, 4, seconds=1.0, plain_seconds=1.0),), ("gradient of a",)))
    assert said.endswith("not compared, as two plain steps differ there: gradient of a")


def test_a_comparison_that_fails_in_one_row_is_written_and_the_status_says_so(monkeypatch, capsys, tmp_path):
    model, _ = gpt()
    small = replace(ARCHITECTURES["gpt2_small"], build=lambda: model, input=Tokens(16, 50))
    monkeypatch.setitem(ARCHITECTURES, "gpt2_small", small)
    solve = ogc.solve

    def fails(graph, **wish):
        if wish.get("solver") == "uniform":
            raise RuntimeError("no plan today")
        return solve(graph, **wish)

    monkeypatch.setattr(ogc, "solve", fails)
    path = tmp_path / "out.json"
    options = ["--device", "cpu", "--batch-size", "2", "--iterations", "1", "--compile-budgets", "--json", str(path)]
    assert benchmark.main(["--arch", "gpt2_small", "--compare", *options]) == 1
    assert "gpt2_small, uniform: RuntimeError: no plan today" in capsys.readouterr().err
    data = json.loads(path.read_text())
    assert data["failed"] == [{"name": "gpt2_small, uniform", "reason": "RuntimeError: no plan today", "status": 1}]
    assert {"blocks", "binomial"} <= {r["name"] for r in data["rows"][0]["rows"] if r["peak_bytes"]}


def test_the_command(capsys, tmp_path, monkeypatch):
    model, _ = gpt()
    small = replace(ARCHITECTURES["gpt2_small"], build=lambda: model, input=Tokens(16, 50))
    monkeypatch.setitem(ARCHITECTURES, "gpt2_small", small)
    path = tmp_path / "out.json"
    options = ["--device", "cpu", "--batch-size", "8", "--iterations", "1", "--compile-budgets", "--json", str(path)]
    assert benchmark.main(["--arch", "gpt2_small", "--compare", *options]) == 0
    assert "gpt2_small, input 8×16" in capsys.readouterr().out
    data = json.loads(path.read_text())
    assert data["command"].startswith("python benchmark.py --arch gpt2_small --compare")
    (comparison,) = data["rows"]
    assert comparison["input_shape"] == [8, 16]
    assert {"plain", "blocks", "sequential", "selective", "feng-huang"} <= {r["name"] for r in comparison["rows"]}


def test_an_unknown_architecture_is_refused(capsys):
    assert benchmark.main(["--arch", "gpt2", "--compare", "--device", "cpu"]) == 2
    assert "unknown architecture 'gpt2'; the nearest are gpt2_small" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--solver", "chen"], "--compare runs every solver by itself"),
        (["--batch-slices", "2"], "--compare runs every solver by itself"),
        (["--memory-budget", "0.5"], "leave out the wish"),
        (["--compile-budgets", "1.5"], "must be between 0 and 1, not 1.5"),
    ],
)
def test_options_that_do_not_go_with_it(options, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        benchmark.main(["--arch", "resnet18", "--compare", *options])
    assert message in capsys.readouterr().err


COMPARISONS = [
    pytest.param(comparison["rows"], id=f"{path.stem}-{comparison['arch']}")
    for path in sorted(RESULTS.glob("compare/*.json"))
    for comparison in json.loads(path.read_text())["rows"]
]

committed = pytest.mark.parametrize("data", COMPARISONS)


def rows_of(data):
    return [PeerRow(**r | {"differs": tuple(r["differs"])}) for r in data]


@committed
def test_committed_comparisons_are_consistent(data):
    """No method is missing, our rows are bitwise, and the verdicts are those of the figures."""
    rows = rows_of(data)
    assert {"plain", "blocks", "sequential", "selective", "chen", "uniform", "binomial"} <= {r.name for r in rows}
    assert list(with_verdicts(rows)) == rows
    assert all((r.deviation, r.differs) == (0.0, ()) for r in rows if r.is_ours)


@committed
def test_committed_peaks_are_as_predicted(data):
    for r in rows_of(data):
        if r.predicted_bytes is not None:
            assert r.predicted_bytes == pytest.approx(r.peak_bytes, rel=0.03)


@committed
def test_checkpointed_blocks_and_sequences_are_dominated_by_ours(data):
    rows = {r.name: r for r in rows_of(data)}
    for name in ("blocks", "sequential"):
        peer = rows[name]
        planned = [r for r in rows.values() if r.is_ours]
        dominated = any(r.peak_bytes <= peer.peak_bytes and r.flops <= peer.flops for r in planned)
        assert dominated if peer.peak_bytes else peer.reason


@committed
def test_no_peer_dominates_ours(data):
    assert not beating(data)
