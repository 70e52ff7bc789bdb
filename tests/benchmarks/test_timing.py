"""Time, promised and paid: the arithmetic, what misses an aim, and one run of a network of next to no work."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from benchmarks import summaries
from benchmarks.timing import __main__ as command
from benchmarks.timing import rounds
from benchmarks.timing.aims import findings, summary
from benchmarks.timing.items import fitted, in_segments
from benchmarks.timing.measured import Options, Timing
from benchmarks.timing.networks import SUBJECTS, TINY
from benchmarks.timing.picture import draw
from benchmarks.timing.rounds import Seconds, in_turn
from benchmarks.timing.row import (
    BLOCKS,
    NOT_INSTALLED,
    NOTHING,
    OF_BLOCKS,
    OF_SELECTIVE,
    PLAIN,
    SELECTIVE,
    Items,
    TimeRow,
    printed,
)


def row(arch, way, paid, promised=None, **fields):
    fields = {"peak_bytes": 6, "plain_bytes": 10, **fields}
    return TimeRow(arch, (2, 3), "cpu", way, promised, paid, **fields)


ITEMS = Items(TINY, (2, 4, 4, 4), "cpu", 1.0, 0.2, {1: 0.5, 16: 0.65}, 100, 10.0, 3.0, 0.7, (), 7)


def missed(rows, question, items=None):
    (found,) = [f for f in findings(rows, items) if question in f.question]
    return found.found, found.missed


def test_the_median_of_ratios_is_not_the_ratio_of_medians():
    found = Seconds(own=[2.0, 30.0, 3.0], plain=[1.0, 10.0, 2.5])
    assert found.paid == pytest.approx(1.0)  # of 2, 3 and 1.2; medians are 3 and 2.5
    assert found.quartiles == pytest.approx((0.6, 1.5))
    assert Seconds([1.5], [1.0]).quartiles == (0.5, 0.5)


def test_steps_take_turns_after_one_that_does_not_count():
    seen = []
    steps = {name: lambda name=name: seen.append(name) or float(len(seen)) for name in "abc"}
    found = in_turn(steps, rounds=20, seconds=0.0)
    first, *orders = ("".join(seen[n : n + 3]) for n in range(0, len(seen), 3))
    assert first == "abc" and len(orders) == 20 and {"".join(sorted(order)) for order in orders} == {"abc"}
    assert len(set(orders)) == 6  # so that none always follows the same one
    assert found["a"] == [4.0 + 3 * n + order.index("a") for n, order in enumerate(orders)]


def test_rounds_in_which_twins_are_apart_are_replaced():
    """They are judged by the twins alone: what the others take in the rounds that count is what they took."""
    seconds = iter([1.0, 1.3, 0.7, 1.0, 1.02, 1.0, 1.5, 1.0, 1.0])
    taken = iter(range(9))
    steps = {"plain": lambda: 1.0, "again": lambda: next(seconds), "ours": lambda: next(taken)}
    found = in_turn(steps, rounds=3, seconds=0.0, twins=("plain", "again"))  # the first of them does not count
    assert sorted(zip(found["again"], found["ours"], strict=True)) == [(1.0, 3), (1.0, 5), (1.02, 4)]


def test_where_no_round_is_steady_the_steadiest_count():
    seconds = iter([1.0, 1.5, 1.2, 1.4, 1.1, 1.3, 1.6])
    steps = {"plain": lambda: 1.0, "again": lambda: next(seconds)}
    assert sorted(in_turn(steps, rounds=2, seconds=0.0, twins=("plain", "again"))["again"]) == [1.1, 1.2]


def test_quick_steps_have_more_rounds_but_not_any_number(monkeypatch):
    monkeypatch.setattr(rounds, "MOST_ROUNDS", 20)
    assert len(in_turn({"a": lambda: 1.0}, rounds=7, seconds=5.0)["a"]) == 20


def test_threads_are_put_back():
    before = torch.get_num_threads()
    with rounds.one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_promises():
    rows = [row("a", "w", 0.11, 0.1), row("b", "w", 0.12, 0.1), row("c", "w", 0.2, 0.1), row("c", PLAIN, 0.5)]
    found = {f.question.split(": ")[-1]: f for f in findings(rows, None)[:2]}
    assert (found["median"].found, found["median"].missed) == ("2.0", ("the median",))
    assert found["worst"].missed == ("c, w (10.0%, paid 20.0%)",) and found["worst"].found == "10.0"


def test_nothing_recomputed():
    rows = [row(TINY, NOTHING, 0.02, 0.0), row("a", NOTHING, 0.005, 0.0)]
    assert missed(rows, "nothing recomputed: worst") == ("+2.0%", (f"{TINY} (+2.0%)",))
    assert missed(rows, "over plain") == ("1.02", (f"{TINY} (1.02)",))


def test_at_the_memory_of_blocks():
    rows = [
        *(row("a", BLOCKS, 0.3), row("a", OF_BLOCKS, 0.06, 0.06)),
        *(row("b", BLOCKS, 0.3), row("b", OF_BLOCKS, 0.24, 0.24)),
        *(row("c", BLOCKS, 0.3), row("c", OF_BLOCKS, None, reason="no plan")),
        *(row("d", BLOCKS, 0.3, peak_bytes=11), row("d", OF_BLOCKS, 0.0, 0.0)),
    ]
    assert missed(rows, "blocks, over theirs, where these save memory: worst") == ("0.80", ("b (0.80)", "c (no plan)"))
    assert missed(rows, "geometric mean") == ("0.40", ())
    assert missed([row("a", BLOCKS, -0.01), row("a", OF_BLOCKS, 0.0)], "geometric mean")[0] == "1.00"


def test_a_plan_that_needs_more_than_the_peer_is_named():
    rows = [row("a", BLOCKS, 0.3, peak_bytes=2**20), row("a", OF_BLOCKS, 0.1, 0.1, peak_bytes=2**21)]
    rows = [replace(r, plain_bytes=2**22) for r in rows]
    assert missed(rows, "save memory: worst") == ("0.33", ("a (needs 2.00 MiB, not 1.00)",))


def test_at_the_memory_of_selective():
    rows = [row("a", SELECTIVE, 0.2), row("a", OF_SELECTIVE, 0.203, 0.2)]
    assert missed(rows, "memory of selective") == ("+0.3", ("a (+0.3)",))


def test_other_bits_and_items():
    rows = [row("a", "w", 0.1, 0.1, differs=("outputs",))]
    assert missed(rows, "other bits") == ("1", ("a, w (outputs)",))
    assert missed(rows, "16 segments", ITEMS) == ("0.70", (f"{TINY} (0.70)",))
    text = summary(findings(rows, ITEMS))
    assert f"misses a step in 16 segments, over torch's checkpoint on the same blocks: {TINY} (0.70)" in text


def test_what_an_item_costs_is_read_off_a_line():
    line = {n: 0.5 + 20e-6 * n for n in (1, 2, 4, 8, 16)}
    assert fitted(line, forward_seconds=0.4999, saved_tensors=50) == pytest.approx((20.0, 2.0))


def test_rows_come_back_from_json_into_the_table_of_results():
    rows = [row("a", "w", 0.2, 0.1, differs=("outputs",)), row("b", "w", 0.1, 0.1)]
    data = json.loads(json.dumps({"rows": [*map(asdict, rows)], "items": asdict(ITEMS), "machine": {"device": "cpu"}}))
    assert [TimeRow.read(found) for found in data["rows"]] == rows and Items.read(data["items"]) == ITEMS
    assert "| ≤ 5.0 | a, w (10.0%, paid 20.0%) |" in summaries.timing([data])


def test_a_row_without_figures_says_why():
    assert "a, blocks: it has none" in printed([row("a", BLOCKS, None, reason="it has none"), row("b", "w", 0.1, 0.1)])


def test_segments_are_those_that_were_asked_for():
    timing = Timing(TINY, SUBJECTS[TINY], Options(torch.device("cpu"), "estimate", 1, 0.0))
    plan = in_segments(timing.graph, 4)
    assert len(plan.segments) == 4 and all(segment.parts for segment in plan.segments)
    names = {timing.graph.operations[segment.start].module.split(".")[0] for segment in plan.segments}
    assert names == {"0", "4", "8", "12"}


def test_an_unknown_network_is_refused(capsys):
    assert command.main(["resnet5", "--device", "cpu"]) == 2
    assert "unknown network 'resnet5'; the nearest are resnet50" in capsys.readouterr().err


def test_a_network_that_is_not_installed_is_a_row_and_one_that_fails_loses_no_other(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(SUBJECTS, "lstm", replace(SUBJECTS["lstm"], package="no_such_package"))
    broken = replace(SUBJECTS["llama"].architecture, build=lambda: 1 / 0)
    monkeypatch.setitem(SUBJECTS, "llama", replace(SUBJECTS["llama"], architecture=broken, package="torch"))
    path = tmp_path / "cpu.json"
    assert command.main(["llama", "lstm", "--device", "cpu", "--json", str(path)]) == 4
    data = json.loads(path.read_text())
    assert data["failed"][0]["reason"] == "ZeroDivisionError: division by zero"
    assert [found["reason"] for found in data["rows"]] == ["no_such_package is not installed"]


def test_a_run(tmp_path, capsys):
    path = tmp_path / "time" / "cpu.json"
    given = ["--device", "cpu", "--rounds", "1", "--seconds", "0", "--profile", "estimate", "--json", str(path)]
    assert command.main([TINY, *given, "--batch-factor", "2"]) == 0
    data = json.loads(path.read_text())
    assert {"command", "versions", "machine", "profile", "failed", "items", "rows"} <= data.keys()
    assert (data["machine"]["threads"], data["failed"]) == (1, [])
    found = [TimeRow.read(values) for values in data["rows"]]
    assert {r.input_shape for r in found} == {(4, 4, 4, 4)}
    ways = {r.way for r in found if r.arch == TINY}
    assert ways == {
        *(PLAIN, NOTHING, "memory 0.7", "memory 0.45", "overhead 0.2", BLOCKS, SELECTIVE, OF_BLOCKS, OF_SELECTIVE)
    }
    for planned in (r for r in found if r.promised is not None):
        assert planned.is_bitwise and planned.paid is not None and planned.rounds == 1
        assert planned.predicted_bytes == pytest.approx(planned.peak_bytes, rel=0.03)
    items = Items.read(data["items"])
    assert (sorted(items.more_seconds), items.differs) == ([1, 2, 4, 8, 16], ()) and items.saved_tensors > 48
    assert (tmp_path / "time" / "cpu_promised_paid.svg").exists()
    assert "nothing recomputed: the step of small_blocks over plain" in capsys.readouterr().out


@pytest.fixture
def lstm_and_llama(monkeypatch, tmp_path):
    """The command for a few networks, of which each is said to take as long as the plain one; its file."""
    path = tmp_path / "cpu.json"
    monkeypatch.setattr(command, "measure_network", lambda name, _, results: results.add([row(name, PLAIN, 0.0)]))
    given = ["lstm", "llama", "--device", "cpu", "--json", str(path)]
    return (lambda *more: command.main([*given, *more])), path


def test_a_run_that_was_interrupted_goes_on(lstm_and_llama):
    run, path = lstm_and_llama
    assert run("--resume") == 0  # there is nothing yet
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({**whole, "rows": [asdict(row("lstm", PLAIN, 0.7))]}))
    assert run("--resume") == 0
    data = json.loads(path.read_text())
    assert [(found["arch"], found["paid"]) for found in data["rows"]] == [("lstm", 0.7), ("llama", 0.0)]
    assert data["command"] == whole["command"]


def test_what_failed_or_was_not_installed_or_is_not_whole_is_measured_again(tmp_path):
    path = tmp_path / "cpu.json"
    results = command.Results(path, {})
    results.add(
        [
            *(row("a", PLAIN, 0.0), row("b", PLAIN, 0.0), row("b", BLOCKS, None, reason="why", failed=True)),
            *(row("c", NOT_INSTALLED, None, reason="why"), row(TINY, PLAIN, 0.0)),
        ]
    )
    resumed = command.Results(path, {})
    assert resumed.resume() == "" and [found.arch for found in resumed.rows] == ["a"] and not resumed.failures
    results.items = ITEMS
    results.write()
    assert resumed.resume() == "" and [found.arch for found in resumed.rows] == ["a", TINY]
    assert resumed.items == ITEMS


def test_a_file_of_another_run_is_not_gone_on_with(lstm_and_llama, monkeypatch, capsys):
    run, path = lstm_and_llama
    assert run("--rounds", "3") == 0
    before = path.read_bytes()
    assert run("--resume") == 2 and path.read_bytes() == before
    assert "is of another command; move it away" in capsys.readouterr().err
    monkeypatch.setattr(command, "code_digest", lambda: "changed")
    assert run("--rounds", "3", "--resume") == 2 and path.read_bytes() == before
    assert "is of another code; move it away" in capsys.readouterr().err
    assert command.main(["lstm", "--device", "cpu", "--resume"]) == 2
    assert "--json, which is not given" in capsys.readouterr().err


def test_the_same_rows_make_the_same_picture(tmp_path):
    rows = [row("a", "w", 0.2, 0.1), row("a", NOTHING, 0.0, 0.0), row("b", "w", None, reason="why")]
    for name in ("a.svg", "b.svg"):
        draw(rows, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
