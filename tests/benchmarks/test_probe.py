"""The probe of a device: each step by itself, and what is asked."""

import itertools
import json

import pytest
import torch

from benchmarks import probe
from benchmarks.cases import CASES
from benchmarks.experiments import TIME
from benchmarks.probe import Step, questions, steps_on


@pytest.fixture
def cpu():
    return torch.device("cpu")


def test_a_step_that_fails_or_hangs_loses_no_other(monkeypatch, tmp_path, cpu, capsys):
    steps = (
        Step("bad", "-c 'print(1); raise SystemExit(3)'", 1),
        Step("hangs", "-c 'import time; time.sleep(100)'", 0.02),
        Step("memory", "-m benchmarks.probe graphs", 2),
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
    assert steps["memory"]["found"]["rows"] == [{"captured": None, "why": "only CUDA has graphs"}]
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


def test_settings_give_the_plain_models_bits(cpu):
    rows, is_right = questions.settings(cpu)
    assert is_right and len(rows) == 9
    assert all(row["compared"] == row["of"] and "1 calls by a plan" in row["report"] for row in rows)


def test_other_bits_are_found(cpu, monkeypatch):
    own = questions._step

    def step(run, *args):
        found = own(run, *args)
        return {name: t + (run is not args[0]) for name, t in found.items()}

    monkeypatch.setattr(questions, "_step", step)
    rows, is_right = questions.settings(cpu)
    assert not is_right and all(row["differs"] for row in rows)


def test_memory_is_as_simulated(cpu):
    rows, is_right = questions.memory(cpu)
    assert is_right
    assert [row["run"] for row in rows] == ["plain", "planned"] * 2


def test_weights_are_estimated_and_measured(cpu):
    rows, _ = questions.weights(cpu)
    assert any(row["target"].startswith("aten.convolution") and row["forward_seconds"][1] > 0 for row in rows)
