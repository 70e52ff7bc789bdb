"""Ways timed in turn: the arithmetic, what misses an aim, runs of a few networks, and questions without timing."""

import json
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import ogc
from benchmarks import __main__ as command
from benchmarks import hollow, items, measuring, offloaded, sizes
from benchmarks.ablation import in_another_order, without
from benchmarks.cases import CASES, Numbers, Tokens, llama, with_labels
from benchmarks.experiments import (
    BLOCKS,
    DEFAULT,
    EXPERIMENTS,
    LOGITS,
    NOT_INSTALLED,
    NOTHING,
    OF_BLOCKS,
    OF_SELECTIVE,
    PARTITIONED,
    PLAIN,
    SELECTIVE,
    TIME,
    TINY,
)
from benchmarks.losses import mean_square
from benchmarks.measuring import Seconds, in_turn
from benchmarks.networks.transformers import Gpt2
from benchmarks.results import CheckFailed, Impossible, Results
from benchmarks.row import Row
from benchmarks.summaries import timing
from benchmarks.timing import draw, findings, summary
from benchmarks.trial import Trial


def row(arch, way, paid, promised=None, **fields):
    return Row(arch, way, paid=paid, promised=promised, **{"peak_bytes": 6, "plain_bytes": 10, **fields})


ITEMS = {
    "arch": TINY, "more_seconds": {"1": 0.5, "16": 0.65}, "us_per_segment": 10.0, "us_per_saved_tensor": 3.0,
    "over_checkpoint": 0.7, "differs": [],
}  # fmt: skip


def missed(rows, question, items=None):
    (found,) = [f for f in findings(rows, items) if question in f.question]
    return found.found, found.missed


# -- rounds -------------------------------------------------------------------------------------------------------


def test_the_median_of_ratios_is_not_the_ratio_of_medians():
    found = Seconds(own=[2.0, 30.0, 3.0], plain=[1.0, 10.0, 2.5])
    assert found.paid == pytest.approx(1.0)  # of 2, 3 and 1.2; medians are 3 and 2.5
    assert found.quartiles == pytest.approx((0.6, 1.5))
    assert Seconds([1.5], [1.0]).quartiles == (0.5, 0.5)


@pytest.mark.full
@pytest.mark.parametrize("name", PARTITIONED.sizes)
def test_what_is_partitioned_takes_a_step(name):
    case_name, batch, size = PARTITIONED.sizes[name]
    case = PARTITIONED.case_of(case_name)
    inputs, model = case.sample(batch, size, torch.device("cpu")), case.build().train()
    measuring.step(model, inputs, PARTITIONED.loss(case_name, inputs))
    assert all(parameter.grad is not None for parameter in list(model.parameters())[:3])
    assert case.blocks(model) or name == "pointwise"


@pytest.mark.full
def test_offloading_stands_beside_checkpointed_blocks_in_as_much_memory():
    def blocks():
        return nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6)))

    network = offloaded.Network(blocks, lambda: torch.zeros(4096, 256, dtype=torch.bfloat16), r"\d+")
    row = offloaded.row_of(network, "H100")
    assert row["overhead"] <= row["alone_overhead"] <= row["blocks_overhead"] and row["blocks_overhead"] > 0.2
    assert max(row["peak_bytes"], row["alone_bytes"]) <= row["blocks_bytes"] < 0.5 * row["plain_bytes"]
    assert row["hollow_bytes"] == pytest.approx(row["peak_bytes"], rel=0.005)
    with pytest.raises(Impossible, match="no module is named like layers"):
        offloaded.row_of(replace(network, blocks="layers"), "H100")


def test_sizes_are_held_against_the_plain_model_bit_by_bit(monkeypatch):
    """One that computes something else is an error; a call that is plain is told."""
    monkeypatch.setitem(sizes.NETWORKS, "few", partial(few_sizes, nn.Sequential(nn.Linear(4, 4), nn.Dropout())))
    monkeypatch.setitem(sizes.NETWORKS, "draws", partial(few_sizes, Draws()))
    results = Results(None, {})
    sizes.add_row("few", results)
    (row,) = results.rows
    assert row["sizes"] == 4 and row["planned_calls"] + row["plain_calls"] == 16
    assert 0 < row["first"] <= row["most"] and len(row["first_two"]) == 2
    with pytest.raises(CheckFailed, match=r"^draws: output 0"):
        sizes.add_row("draws", results)


class Draws(nn.Linear):
    """Each call is another."""

    def __init__(self):
        super().__init__(4, 4)
        self.draw = random.Random(0)

    def forward(self, x):
        return super().forward(x) * self.draw.random()


def few_sizes(model):
    return model, ((torch.randn(n, 4),) for n in (3, 5, 4, 7)), torch.sum


def test_steps_take_turns_after_one_that_does_not_count():
    seen = []
    steps = {name: lambda name=name: seen.append(name) or float(len(seen)) for name in "abc"}
    found = in_turn(steps, rounds=20, seconds=0.0)
    first, *orders = ("".join(seen[n : n + 3]) for n in range(0, len(seen), 3))
    assert first == "abc" and len(orders) == 20 and {"".join(sorted(order)) for order in orders} == {"abc"}
    assert len(set(orders)) == 6  # so that none always follows the same one
    assert found["a"] == [4.0 + 3 * n + order.index("a") for n, order in enumerate(orders)]


def test_rounds_in_which_twins_are_apart_are_replaced():
    """They are verified by the twins alone; where no round is steady the steadiest count."""
    seconds, taken = iter([1.0, 1.3, 0.7, 1.0, 1.02, 1.0, 1.5, 1.0, 1.0]), iter(range(9))
    steps = {"plain": lambda: 1.0, "again": lambda: next(seconds), "ours": lambda: next(taken)}
    found = in_turn(steps, rounds=3, seconds=0.0, twins=("plain", "again"))  # the first of them does not count
    assert sorted(zip(found["again"], found["ours"], strict=True)) == [(1.0, 3), (1.0, 5), (1.02, 4)]
    seconds = iter([1.0, 1.5, 1.2, 1.4, 1.1, 1.3, 1.6])
    steps = {"plain": lambda: 1.0, "again": lambda: next(seconds)}
    assert sorted(in_turn(steps, rounds=2, seconds=0.0, twins=("plain", "again"))["again"]) == [1.1, 1.2]


def test_quick_steps_have_more_rounds_but_not_any_number(monkeypatch):
    monkeypatch.setattr(measuring, "MOST_ROUNDS", 20)
    assert len(in_turn({"a": lambda: 1.0}, rounds=7, seconds=5.0)["a"]) == 20
    before = torch.get_num_threads()
    with measuring.one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_the_backend_runs_within_its_budget_or_says_that_nothing_fits():
    torch._dynamo.reset()
    trial = Trial(
        "pointwise", CASES["pointwise"], torch.device("cpu"), Results(None, {}), batch_size=2048,
        loss_of=lambda inputs: mean_square,
    )  # fmt: skip
    make = PARTITIONED.ways["ogc, operators, 0.5"].make
    half = trial.measured("half", partial(make, trial))
    assert half.peak_bytes <= 0.55 * half.plain_bytes and not half.reason
    least = trial.measured("too little", partial(make, trial, memory_budget=0.01))
    assert "no plan found peaks at or below" in least.reason and not least.failed


# -- aims ---------------------------------------------------------------------------------------------------------


def test_promises():
    rows = [row("a", "w", 0.11, 0.1), row("b", "w", 0.12, 0.1), row("c", "w", 0.2, 0.1), row("c", PLAIN, 0.5)]
    found = {f.question.split(": ")[-1]: f for f in findings(rows, None)[:2]}
    assert (found["median"].found, found["median"].missed) == ("2.0", ("the median",))
    assert found["worst"].missed == ("c, w (10.0%, paid 20.0%)",) and found["worst"].found == "10.0"
    assert "| ≤ 5.0 | c, w (10.0%, paid 20.0%) |" in timing([{"rows": [r.written() for r in rows], "items": ITEMS}])
    rows = [row(TINY, NOTHING, 0.02, 0.0), row("a", NOTHING, 0.005, 0.0)]
    assert missed(rows, "nothing recomputed: worst") == ("+2.0%", (f"{TINY} (+2.0%)",))
    assert missed(rows, "over plain") == ("1.02", (f"{TINY} (1.02)",))


def test_at_the_memory_of_others():
    rows = [
        *(row("a", BLOCKS, 0.3), row("a", OF_BLOCKS, 0.06, 0.06)),
        *(row("b", BLOCKS, 0.3), row("b", OF_BLOCKS, 0.24, 0.24)),
        *(row("c", BLOCKS, 0.3), row("c", OF_BLOCKS, None, reason="no plan")),
        *(row("d", BLOCKS, 0.3, peak_bytes=11), row("d", OF_BLOCKS, 0.0, 0.0)),
    ]
    assert missed(rows, "over that of blocks, where these save memory: worst") == ("0.80", ("b (0.80)", "c (no plan)"))
    assert missed(rows, "geometric mean") == ("0.40", ())
    assert missed([row("a", BLOCKS, -0.01), row("a", OF_BLOCKS, 0.0)], "geometric mean")[0] == "1.00"
    rows = [row("a", BLOCKS, 0.3, peak_bytes=2**20), row("a", OF_BLOCKS, 0.1, 0.1, peak_bytes=2**21)]
    rows = [replace(r, plain_bytes=2**22) for r in rows]
    assert missed(rows, "save memory: worst") == ("0.33", ("a (needs 2.00 MiB, not 1.00)",))
    rows = [row("a", SELECTIVE, 0.2), row("a", OF_SELECTIVE, 0.203, 0.2)]
    assert missed(rows, "memory of selective") == ("+0.3", ("a (+0.3)",))


def test_the_default_beside_blocks():
    rows = [
        *(row("a", BLOCKS, 0.3, peak_bytes=4), row("a", DEFAULT, 0.4, 0.4, peak_bytes=1)),
        *(row("b", BLOCKS, 0.3, peak_bytes=4), row("b", DEFAULT, 0.4, 0.4, peak_bytes=4)),
        *(row("c", BLOCKS, 0.3, peak_bytes=4), row("c", DEFAULT, 0.2, 0.2, peak_bytes=16)),
    ]
    assert missed(rows, "more memory and more time") == ("0", ())
    assert missed(rows, "over that of blocks: geometric mean")[0] == "1.00"
    rows += [row("d", BLOCKS, 0.3, peak_bytes=4), row("d", DEFAULT, 0.4, 0.4, peak_bytes=5)]
    assert missed(rows, "more memory and more time") == ("1", ("d (1.25 of the peak at +40%, not +30%)",))


def test_other_bits_and_items():
    rows = [row("a", "w", 0.1, 0.1, differs=("outputs",))]
    assert missed(rows, "other bits") == ("1", ("a, w (outputs)",))
    assert missed(rows, "16 segments", ITEMS) == ("0.70", (f"{TINY} (0.70)",))
    text = summary(findings(rows, ITEMS))
    assert f"misses a step in 16 segments, over torch's checkpoint on the same blocks: {TINY} (0.70)" in text
    line = {n: 0.5 + 20e-6 * n for n in (1, 2, 4, 8, 16)}
    assert items.fitted(line, forward_seconds=0.4999, saved_tensors=50) == pytest.approx((20.0, 2.0))


def test_the_same_rows_make_the_same_picture(tmp_path):
    rows = [row("a", "w", 0.2, 0.1), row("a", NOTHING, 0.0, 0.0), row("b", "w", None, reason="why")]
    for name in ("a.svg", "b.svg"):
        draw(rows, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


# -- runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_run(monkeypatch, tmp_path, capsys):
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(16)]
    smaller = replace(CASES[TINY], build=lambda: nn.Sequential(*blocks), input=Numbers((64,)))
    monkeypatch.setitem(CASES, TINY, smaller)
    path = tmp_path / "time" / "cpu.json"
    given = ["--device", "cpu", "--rounds", "1", "--seconds", "0", "--profile", "estimate", "--json", str(path)]
    assert command.main(["time", TINY, *given, "--batch-factor", "2"]) == 0
    data = json.loads(path.read_text())
    assert (data["machine"]["threads"], data["failed"]) == (1, [])
    found = [Row.read(values) for values in data["rows"]]
    assert {r.input_shape for r in found} == {(4, 64)} and [r.way for r in found] == list(TIME.ways)
    for planned in (r for r in found if r.promised is not None):
        assert planned.differs == () and planned.paid is not None and planned.rounds == 1
        assert planned.predicted_bytes == pytest.approx(planned.peak_bytes, rel=0.03)
    assert (list(data["items"]["more_seconds"]), data["items"]["differs"]) == (["1", "2", "4", "8", "16"], [])
    assert (tmp_path / "time" / "cpu_promised_paid.svg").exists()
    assert "nothing recomputed: the step of small_blocks over plain" in capsys.readouterr().out


def test_segments_are_those_that_were_asked_for():
    trial = Trial(TINY, CASES[TINY], torch.device("cpu"), Results(None, {}), batch_size=2, profile="estimate")
    plan = items.in_segments(trial.graph, 4)
    assert len(plan.segments) == 4 and all(segment.parts for segment in plan.segments)
    names = {trial.graph.operations[segment.start].module.split(".")[0] for segment in plan.segments}
    assert names == {"0", "4", "8", "12"}


@pytest.mark.full
def test_other_experiments(monkeypatch, tmp_path, capsys):
    """Families at small overheads, and a language model with labels by all of its ways but the compiled ones."""
    families, path = EXPERIMENTS["families"], tmp_path / "out.json"
    assert len(families.sizes) == 8
    few = replace(CASES["gpt2_small"], build=lambda: Gpt2(50, 32, 32, 4, depth=2), input=Tokens(16, 50))
    monkeypatch.setitem(CASES, "gpt2_small", few)
    monkeypatch.setitem(families.sizes, "gpt2_small", ("gpt2_small", 2, 16))
    assert command.main(["families", "gpt2_small", "--rounds", "1", "--json", str(path)]) == 0
    rows = [Row.read(found) for found in json.loads(path.read_text())["rows"]]
    assert [r.way for r in rows] == ["plain", "ogc, +10%", "ogc, +15%", "ogc, +20%"]
    assert rows[1].promised <= 0.1 and all(r.peak_bytes <= r.plain_bytes and not r.differs for r in rows)
    for way in [way for way in LOGITS.ways if "compiled" in way or "overhead" in way or "half" in way]:
        monkeypatch.delitem(LOGITS.ways, way)
    small = replace(with_labels(60), build=partial(llama, 60, 32, 64, 2, 2, False, 1), input=Tokens(32, 60, True))
    monkeypatch.setitem(EXPERIMENTS, "logits", replace(LOGITS, case_of=lambda words: small))
    pytest.importorskip("transformers", reason="its Llama is what is trained")
    assert command.main(["logits", "60", "--rounds", "1", "--profile", "estimate", "--json", str(path)]) == 0
    rows = {found["way"]: Row.read(found) for found in json.loads(path.read_text())["rows"]}
    assert rows.keys() == LOGITS.ways.keys() and rows["ogc"].arch == "60 words"
    assert rows["ogc"].peak_bytes <= rows["ogc"].plain_bytes and not rows["ogc"].differs
    assert rows["ogc, 8 chunks"].deviation < 1e-4


def test_what_cannot_be_run(monkeypatch, tmp_path, capsys):
    assert command.main(["time", "resnet5", "--device", "cpu"]) == 2
    assert "unknown network 'resnet5'; the nearest are resnet50" in capsys.readouterr().err
    monkeypatch.setitem(CASES, "lstm", replace(CASES["lstm"], package="no_such_package"))
    monkeypatch.setitem(CASES, "llama", replace(CASES["llama"], build=lambda: 1 / 0, package="torch"))
    path = tmp_path / "cpu.json"
    assert command.main(["time", "llama", "lstm", "--device", "cpu", "--json", str(path)]) == 4
    data = json.loads(path.read_text())
    assert data["failed"][0]["reason"] == "ZeroDivisionError: division by zero"
    assert [found["reason"] for found in data["rows"]] == ["no_such_package is not installed"]


@pytest.fixture
def lstm_and_llama(monkeypatch, tmp_path):
    """The command for a few networks, of which each is said to take as long as the plain one; its file."""
    path = tmp_path / "cpu.json"
    monkeypatch.setattr(command, "_measure", lambda name, *given: given[-1].add(row(name, PLAIN, 0.0)))
    given = ["time", "lstm", "llama", "--device", "cpu", "--json", str(path)]
    return (lambda *more: command.main([*given, *more])), path


def test_a_run_that_was_interrupted_goes_on(lstm_and_llama):
    run, path = lstm_and_llama
    assert run("--resume") == 0  # there is nothing yet
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({**whole, "rows": [row("lstm", PLAIN, 0.7).written()]}))
    assert run("--resume") == 0
    data = json.loads(path.read_text())
    assert [(found["arch"], found["paid"]) for found in data["rows"]] == [("lstm", 0.7), ("llama", 0.0)]
    assert data["command"] == whole["command"]


def test_what_failed_or_was_not_installed_or_is_not_whole_is_measured_again(tmp_path):
    results = Results(tmp_path / "cpu.json", {})
    results.add(row("a", PLAIN, 0.0), row("b", PLAIN, 0.0), row("b", BLOCKS, None, reason="why", failed=True))
    results.add(row("c", NOT_INSTALLED, None, reason="why"), row(TINY, PLAIN, 0.0))
    resumed = Results(results.path, {})
    assert resumed.resume(command._incomplete) == "" and [found.arch for found in resumed.rows] == ["a"]
    results.data["items"] = ITEMS
    results.write()
    assert resumed.resume(command._incomplete) == "" and [found.arch for found in resumed.rows] == ["a", TINY]
    assert resumed.data["items"] == ITEMS and not resumed.failures


def test_a_file_of_another_run_is_not_gone_on_with(lstm_and_llama, monkeypatch, capsys):
    run, path = lstm_and_llama
    assert run("--rounds", "3") == 0
    before = path.read_bytes()
    assert run("--resume") == 2 and path.read_bytes() == before
    assert "is of another command; move it away" in capsys.readouterr().err
    monkeypatch.setattr(command, "code_digest", lambda: "changed")
    assert run("--rounds", "3", "--resume") == 2 and path.read_bytes() == before
    assert "is of another code; move it away" in capsys.readouterr().err
    assert command.main(["time", "lstm", "--device", "cpu", "--resume"]) == 2
    assert "--json, which is not given" in capsys.readouterr().err


# -- without timing -----------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Three ways from one tensor to a sum: one writes in place, two draw random numbers, one is a view."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        x = x.tanh()
        a = nn.functional.dropout(self.first(x).relu_(), 0.5)
        b = nn.functional.dropout(self.second(x), 0.5).t()
        c = self.third(x)
        c += b.sum()
        return a * b.t() + c


def test_another_order_computes_the_same_with_the_same_random_numbers():
    model, x = Branches(), torch.randn(4, 8)
    graph = ogc.parse(model, x)
    others = [other for seed in range(20) if (other := in_another_order(model, graph, seed)) is not None]
    assert len({str(other.graph) for other in others}) > 3
    for other in others:
        torch.manual_seed(3)
        expected = model(x)
        torch.manual_seed(3)
        (found,) = other(x)
        assert torch.equal(found, expected)
    chain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    assert in_another_order(chain, ogc.parse(chain, torch.randn(4, 8)), 0) is None


@pytest.mark.full
def test_each_part_of_the_search_is_left_out():
    block = (nn.Linear(32, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 32), nn.LayerNorm(32))
    model = nn.Sequential(*(layer for _ in range(12) for layer in block))
    graph = ogc.parse(model, torch.randn(2048, 32), profile="estimate")
    plans = {}
    for name, context in without():
        with context:
            plans[name] = [
                ogc.solve(replace(graph), effort=0, **goal)
                for goal in ({"memory_budget": "least"}, {"max_overhead": 0.15})
            ]
    least, quick = plans["nothing"]
    assert plans["nested plans"][0].peak_bytes > 1.2 * least.peak_bytes
    assert quick.decisions.saved_values and not plans["saved values"][1].decisions.saved_values
    assert plans["saved values"][1].peak_bytes > 1.2 * quick.peak_bytes
    assert not any(plan.recomputed_values for plan in plans["recomputed values"])


@pytest.mark.full
def test_questions(monkeypatch, tmp_path, capsys):
    path = tmp_path / "out.json"
    monkeypatch.setitem(CASES, "unet", replace(CASES["unet"], build=Branches, input=Numbers((8,))))
    assert command.main(["ablation", "unet", "--json", str(path)]) == 0
    found = json.loads(path.read_text())["rows"]
    assert {r["without"] for r in found} == {"nothing", *(name for name, _ in without()), "program order"}
    monkeypatch.setattr(hollow, "TRANSFORMERS", ())
    row = hollow.row_of("vgg11")
    assert max(map(abs, hollow.errors(row))) < 0.01 and row["ours_bytes"] <= row["plain_bytes"]
