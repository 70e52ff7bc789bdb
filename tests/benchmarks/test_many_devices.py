"""The table of many devices: three ways to train, in two processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks import tables

ROOT = Path(__file__).resolve().parents[2]


def test_ways_on_two_ranks(tmp_path):
    path = tmp_path / "devices.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "benchmark.py", "--device", "cpu"]
    small = ["--arch", "resnet18", "--size", "128", "--batch-size", "4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, *small, "--json", str(path)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert not done.returncode, done.stderr
    plain, checkpointed, ours = json.loads(path.read_text())["rows"]
    assert len(ours["losses"]) >= 5 and len(set(ours["losses"])) > 1
    for row in (plain, checkpointed, ours):
        assert row["losses"] == plain["losses"] and row["is_plain"]
        assert len(row["peak_bytes"]) == len(row["seconds"]) == row["ranks"] == 2
        assert row["way"] in done.stdout
    assert max(ours["peak_bytes"]) < 0.8 * min(plain["peak_bytes"])


def test_the_page_has_what_was_measured():
    page = (ROOT / "docs" / "devices.md").read_text()
    rows = json.loads((ROOT / "benchmarks" / "results" / "devices.json").read_text())["rows"]
    assert tables.inserted(page, tables.on_many_devices()) == page, "run python -m benchmarks.tables"
    assert len(rows) == 3 and all(row["is_plain"] and row["batch_size"] == 8 for row in rows)
