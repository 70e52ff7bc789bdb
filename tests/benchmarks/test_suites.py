"""Suites: what they list is what is committed, and a run that fails loses no other."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import benchmark
from benchmarks import devices
from benchmarks.cases import CASES
from benchmarks.results import environment
from benchmarks.suites import FULL, QUICK, RESULTS, ROOT, SUITES, Run, Suite
from benchmarks.tables import PARTS


def test_names_and_files_are_told_apart():
    for suite in SUITES.values():
        assert len({run.name for run in suite.runs}) == len({run.file for run in suite.runs}) == len(suite.runs)


def test_quick_makes_every_kind_of_result_that_full_makes(tmp_path):
    for run in QUICK:
        path = tmp_path / run.file
        path.parent.mkdir(exist_ok=True)
        path.touch()
    for title, pattern, _, _ in PARTS:
        if "CUDA" not in title:
            assert list(tmp_path.glob(pattern)), title


ROW = {"arch": "luck", "operations": 7, "peak_bytes": 2, "plain_bytes": 3, "overhead": 0.1}
MEASURED = json.dumps({
    **environment(["it"], torch.device("cpu"), 0), "rows": [{**ROW, "parse_seconds": 1, "plan_seconds": 2}]
})  # fmt: skip
WRITES = f"import sys; open(sys.argv[2], 'w').write({MEASURED!r})"


@pytest.fixture
def suite(monkeypatch, tmp_path):
    runs = (
        Run("fails", "-c 'raise SystemExit(\"there is no luck\")'", "zoo/luck.json"),
        Run("layers", f"-c {shlex.quote(WRITES)}", "layers.json"),
    )
    monkeypatch.setitem(SUITES, "full", Suite(runs, folder=tmp_path / "results"))
    return tmp_path / "results"


@pytest.mark.full
def test_a_run_that_fails_loses_no_other_and_what_it_wrote_earlier_is_gone(suite, capsys):
    old = suite / "zoo" / "luck.json"
    old.parent.mkdir(parents=True)
    old.write_text("measured long ago")
    assert benchmark.main(["--suite", "full"]) == 1
    said = capsys.readouterr().out
    assert "fails: failed with status 1:\n  there is no luck" in said and "failed: fails" in said
    assert not old.exists()
    text = (suite / "results.md").read_text()
    assert "| luck | 0.6667 | 1.0 | 2.0 |" in text
    assert "`--only layers`" in text


def test_what_is_timed_runs_alone(monkeypatch, tmp_path, capsys):
    after = f"import os; assert os.path.exists({str(tmp_path / 'done')!r})"
    timed = f"import time; time.sleep(0.5); open({str(tmp_path / 'done')!r}, 'x')"
    runs = (
        Run("other", f"-c {shlex.quote(after)}", "other.json"),
        Run("timed", f"-c {shlex.quote(timed)}", "timed.json", is_alone=True),
    )
    monkeypatch.setitem(SUITES, "full", Suite(runs, folder=tmp_path))
    assert benchmark.main(["--suite", "full"]) == 0, capsys.readouterr().out
    alone = {run.name for run in FULL if run.is_alone}
    assert {"time", "families", "logits", "compiled"} < alone and "zoo_timm" not in alone


@pytest.mark.full
def test_single_runs(suite, capsys, tmp_path):
    assert benchmark.main(["--only", "layers", "--results", str(tmp_path / "elsewhere")]) == 0
    assert (tmp_path / "elsewhere" / "layers.json").exists() and not suite.exists()
    assert benchmark.main(["--only", "layres"]) == 2
    assert "the suite 'full' has no run named layres; it has fails, layers" in capsys.readouterr().err


def test_a_suite_runs_with_one_thread_and_says_where_its_files_belong():
    command = FULL[0].command(RESULTS)
    assert command[-2:] == ["--json", f"benchmarks/results/{FULL[0].file}"]
    assert SUITES["full"].at_once == 2


def assert_trained(path, ranks):
    plain, checkpointed, ours = json.loads(path.read_text())["rows"]
    assert len(ours["losses"]) >= 5 and len(set(ours["losses"])) > 1
    for row in (plain, checkpointed, ours):
        assert row["losses"] == plain["losses"] and row["is_plain"]
        assert len(row["peak_bytes"]) == len(row["seconds"]) == row["ranks"] == ranks
    assert max(ours["peak_bytes"]) < 0.9 * min(plain["peak_bytes"])


def test_three_ways_to_train_in_distributed_data_parallel(tmp_path, monkeypatch, capsys):
    """In this process, as the only rank."""
    layers = (layer for _ in range(4) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.Tanh(), nn.Sigmoid()))
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Sequential(*layers), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    monkeypatch.setitem(CASES, "resnet18", replace(CASES["resnet18"], build=lambda: model))
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(devices, "is_one_of_several", lambda: True)
    path = tmp_path / "devices.json"
    options = ["--device", "cpu", "--arch", "resnet18", "--size", "32", "--batch-size", "8", "--json", str(path)]
    assert benchmark.main(options) == 0
    assert_trained(path, ranks=1)
    assert "torch's checkpoint on each layer" in capsys.readouterr().out


@pytest.mark.slow
def test_three_ways_to_train_on_two_ranks(tmp_path):
    path = tmp_path / "devices.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "benchmark.py", "--device", "cpu"]
    options = ["--arch", "resnet18", "--size", "64", "--batch-size", "8", "--json", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, *options], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert not done.returncode, done.stderr
    assert_trained(path, ranks=2)
    assert "torch's checkpoint on each layer" in done.stdout
