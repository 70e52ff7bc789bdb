"""Runs a suite: its processes, a few at a time, and then the documents made of what they wrote."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import tables
from .suites import ROOT, SUITES, Run


def make(name: str, only: Sequence[str] | None = None, folder: Path | None = None) -> int:
    """Run a suite, or these runs of it, and write the documents; the exit status, 1 if any run failed.

    A run's earlier file is removed first: what is there afterwards was measured now. A run that fails loses no other.
    """
    suite = SUITES[name]
    runs = [run for run in suite.runs if not only or run.name in only]
    if unknown := sorted(set(only or ()) - {run.name for run in runs}):
        names = ", ".join(run.name for run in suite.runs)
        print(f"the suite {name!r} has no run named {', '.join(unknown)}; it has {names}", file=sys.stderr)
        return 2
    folder = (folder or suite.folder).resolve()
    start = time.perf_counter()
    failed = _failed([run for run in runs if run.is_alone], folder, at_once=1)
    failed += _failed([run for run in runs if not run.is_alone], folder, suite.at_once)
    for path in tables.write(folder, name):
        print(f"written: {path}")
    print(f"{len(runs)} runs in {time.perf_counter() - start:.0f} s{', failed: ' if failed else ''}{', '.join(failed)}")
    return 1 if failed else 0


def _failed(runs: Sequence[Run], folder: Path, at_once: int) -> list[str]:
    """Run them, so many at once; the names of those that failed."""
    with ThreadPoolExecutor(at_once) as pool:
        statuses = list(pool.map(lambda run: _run(run, folder), runs))
    return [run.name for run, status in zip(runs, statuses, strict=True) if status]


def _run(run: Run, folder: Path) -> int:
    """One process; a line when it is done, and what it said last if it failed."""
    path = folder / run.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    start = time.perf_counter()
    done = subprocess.run(
        run.command(folder),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=None if run.is_shown else subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    said = f"failed with status {done.returncode}:\n{_tail(done.stdout or '')}" if done.returncode else "done"
    print(f"{run.name}: {said} ({time.perf_counter() - start:.0f} s)", flush=True)
    return done.returncode


def _tail(text: str, lines: int = 15) -> str:
    return "\n".join(f"  {line}" for line in text.rstrip().splitlines()[-lines:])
