"""Suites: what they list is what is committed, and a run that fails loses no other."""

import json
import os
import shlex
import subprocess
import sys

import pytest

import benchmark
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


ROW = {"arch": "net", "wish": "least peak", "without": "nothing", "peak_bytes": 2, "plain_bytes": 3}
WRITES = f"""
import json, sys
from benchmarks.results import environment, write_json
from pathlib import Path
import torch
data = environment(["it"], torch.device("cpu"), 0, False)
write_json(Path(sys.argv[2]), {{**data, "rows": [{ROW}, {{**{ROW}, "without": "luck", "peak_bytes": 3}}]}})
"""


@pytest.fixture
def suite(monkeypatch, tmp_path):
    runs = (
        Run("fails", "-c 'raise SystemExit(\"there is no luck\")'", "zoo/luck.json"),
        Run("ablation", f"-c {shlex.quote(WRITES)}", "ablation.json"),
    )
    monkeypatch.setitem(SUITES, "full", Suite(runs, folder=tmp_path / "results"))
    return tmp_path / "results"


def test_a_run_that_fails_loses_no_other_and_what_it_wrote_earlier_is_gone(suite, capsys):
    old = suite / "zoo" / "luck.json"
    old.parent.mkdir(parents=True)
    old.write_text("measured long ago")
    assert benchmark.main(["--suite", "full"]) == 1
    said = capsys.readouterr().out
    assert "fails: failed with status 1:\n  there is no luck" in said and "failed: fails" in said
    assert not old.exists()
    text = (suite / "results.md").read_text()
    assert "| without luck | +50% to +50%, +50% |" in text
    assert "`python benchmark.py --suite full --only ablation`" in text


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


def test_single_runs(suite, capsys, tmp_path):
    assert benchmark.main(["--only", "ablation", "--results", str(tmp_path / "elsewhere")]) == 0
    assert (tmp_path / "elsewhere" / "ablation.json").exists() and not suite.exists()
    assert benchmark.main(["--only", "ablatoin"]) == 2
    assert "the suite 'full' has no run named ablatoin; it has fails, ablation" in capsys.readouterr().err


def test_a_suite_runs_with_one_thread_and_says_where_its_files_belong():
    command = FULL[0].command(RESULTS)
    assert command[-2:] == ["--json", f"benchmarks/results/{FULL[0].file}"]
    assert SUITES["full"].at_once == 2


def test_three_ways_to_train_on_two_ranks(tmp_path):
    path = tmp_path / "devices.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "benchmark.py", "--device", "cpu"]
    options = ["--arch", "resnet18", "--size", "64", "--batch-size", "8", "--json", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, *options], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert not done.returncode, done.stderr
    plain, checkpointed, ours = json.loads(path.read_text())["rows"]
    assert len(ours["losses"]) >= 5 and len(set(ours["losses"])) > 1
    for row in (plain, checkpointed, ours):
        assert row["losses"] == plain["losses"] and row["is_plain"]
        assert len(row["peak_bytes"]) == len(row["seconds"]) == row["ranks"] == 2
        assert row["way"] in done.stdout
    assert max(ours["peak_bytes"]) < 0.9 * min(plain["peak_bytes"])
