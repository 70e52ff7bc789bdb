"""The probe of a device: each step by itself, and what is asked."""

import contextlib
import itertools
import json
import shlex
from functools import partial

import pytest
import torch

from benchmarks import probe
from benchmarks.cases import CASES
from benchmarks.experiments import TIME
from benchmarks.probe import Step, questions, steps_on
from benchmarks.probe.__main__ import main as step_main


@pytest.fixture
def cpu(monkeypatch):
    """The device, on which small networks are tried."""
    for name in ("convolutions", "encoder"):
        monkeypatch.setattr(questions, name, partial(getattr(questions, name), 2))
    return torch.device("cpu")


WRITES = "import json, sys; json.dump({'rows': [sys.argv[2]]}, open(sys.argv[4], 'w'))"


@pytest.mark.full
def test_a_step_that_fails_or_hangs_loses_no_other(monkeypatch, tmp_path, cpu, capsys):
    steps = (
        Step("bad", "-c 'print(1); raise SystemExit(3)'", 1),
        Step("hangs", "-c 'import time; time.sleep(100)'", 0.02),
        Step("graphs", f"-c {shlex.quote(WRITES)}", 2),
        Step("late", "-c 'pass'", 1),
    )
    monkeypatch.setattr(probe, "steps_on", lambda device: steps)
    clock = iter([0.0, *[0.0] * 9, 70.0, 70.0])
    monkeypatch.setattr(probe.time, "perf_counter", lambda: next(clock))
    path = tmp_path / "probe.json"
    assert probe.probe(cpu, path, ["the command"], minutes=1) == 1
    found = json.loads(path.read_text())
    steps = found["steps"]
    assert found["command"] == "python 'the command'" and found["versions"]["torch"] == torch.__version__
    assert [steps[name]["status"].partition(" ")[0] for name in steps] == ["failed", "stopped", "done", "not"]
    assert steps["bad"]["said"] == ["1"]
    assert steps["graphs"]["found"] == {"rows": ["cpu"]}
    assert "not done: bad, hangs, late" in capsys.readouterr().out


def test_all_steps_fit_in_the_time():
    for device in ("cpu", "cuda:0"):
        steps = steps_on(torch.device(device))
        assert len({step.name for step in steps}) == len(steps)
        assert {"tests", "published", "compare", "times", *questions.QUESTIONS} == {step.name for step in steps}
        arguments = {step.name: step.arguments.split() for step in steps}
        assert set(arguments["times"][5:]) <= set(TIME.sizes)
        for name in ("published", "compare"):
            named = itertools.takewhile(
                lambda word: not word.startswith("-"), arguments[name][arguments[name].index("--arch") + 1 :]
            )
            assert set(named) <= {"all", *CASES}


@pytest.mark.full
def test_settings_give_the_plain_models_bits(cpu):
    rows, is_right = questions.settings(cpu)
    assert is_right and len(rows) == 9
    assert all(row["compared"] == row["of"] and "1 calls by a plan" in row["report"] for row in rows)


@pytest.mark.full
def test_other_bits_are_found(monkeypatch):
    own = questions._step

    def step(run, *args):
        found = own(run, *args)
        return {name: t + (run is not args[0]) for name, t in found.items()}

    monkeypatch.setattr(questions, "_step", step)
    row = questions._bits(questions.convolutions(), torch.randn(2, 8, 8, 8), contextlib.nullcontext)
    assert len(row["differs"]) == row["compared"] == row["of"]


@pytest.mark.full
def test_memory_is_as_simulated(cpu):
    rows, is_right = questions.memory(cpu)
    assert is_right
    assert [row["run"] for row in rows] == ["plain", "planned"] * 2


@pytest.mark.full
def test_weights_are_estimated_and_measured(cpu, monkeypatch):
    monkeypatch.setattr(questions, "examples", lambda _: [(questions.convolutions(), torch.randn(2, 8, 16, 16))])
    rows, _ = questions.weights(cpu)
    assert any(row["target"].startswith("aten.convolution") and row["forward_seconds"][1] > 0 for row in rows)


def test_a_step_by_itself(tmp_path, capsys):
    path = tmp_path / "graphs.json"
    assert step_main(["graphs", "--device", "cpu", "--json", str(path)]) == 0
    assert json.loads(path.read_text())["rows"] == [{"captured": None, "why": "only CUDA has graphs"}]
