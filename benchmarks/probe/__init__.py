"""What is to be known of a device: steps one after another, each in a process of its own, and what they found."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ..results import environment, write_json
from ..suites import ROOT
from .questions import QUESTIONS

MINUTES = 25
"""What all steps may take; what is left when it is over is reported as not run."""


@dataclass(frozen=True)
class Step:
    """A process; ``arguments`` of Python, without --device and --json, and the most ``minutes`` that it may take."""

    name: str
    arguments: str
    minutes: float


def steps_on(device: torch.device) -> tuple[Step, ...]:
    """What is asked of a device; of a CPU the same, in a size that it can take."""
    is_cuda = device.type == "cuda"
    sizes = "--batch-size published" if is_cuda else "--batch-size 1 --size 64"
    rows = "all" if is_cuda else "resnet18 vgg11 densenet121"
    compared = "resnet50 densenet121 gpt2_small unet" if is_cuda else "resnet18 --batch-size 2 --size 64"
    return (
        Step("tests", "-m benchmarks.probe tests", 4),
        *(Step(name, f"-m benchmarks.probe {name}", 2) for name in QUESTIONS if name != "longest"),
        Step("longest", "-m benchmarks.probe longest", 4),
        Step("published", f"benchmark.py --iterations 3 {sizes} --arch {rows}", 8),
        Step("times", f"-m benchmarks time --seconds {8 if is_cuda else 2} resnet50 bert_base small_blocks", 4),
        Step("compare", f"benchmark.py --iterations 1 --compare --compile-backend aot_eager --arch {compared}", 5),
    )


def probe(device: torch.device, path: Path, command: Sequence[str], minutes: float = MINUTES) -> int:
    """Run all steps and write what they found, after each; the exit status, 1 if one of them failed.

    Args:
        device: what is asked about.
        path: the file to write: machine and versions, and for each step its status, its seconds, what it wrote, and
            the last lines that it said where it failed.
        command: what the user typed.
        minutes: for all of them.
    """
    start, found = time.perf_counter(), dict[str, Any]()
    with TemporaryDirectory() as folder:
        for step in steps_on(device):
            left = 60 * minutes - (time.perf_counter() - start)
            found[step.name] = _run(step, device, Path(folder, f"{step.name}.json"), min(60 * step.minutes, left))
            print(f"{step.name}: {found[step.name]['status']} ({found[step.name]['seconds']:.0f} s)", flush=True)
            write_json(path, {**environment(command, device, 0), "steps": found})
    failed = [name for name, one in found.items() if one["status"] != "done"]
    print(f"written: {path}{', not done: ' if failed else ''}{', '.join(failed)}")
    return 1 if failed else 0


def _run(step: Step, device: torch.device, path: Path, seconds: float) -> dict[str, Any]:
    if seconds <= 0:
        return {"status": "not run: the time is over", "seconds": 0.0}
    command = [sys.executable, *shlex.split(step.arguments), "--device", str(device), "--json", str(path)]
    start = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=seconds)
        status = "done" if process.returncode == 0 else f"failed with status {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # and what it has started
        said, _ = process.communicate()
        status = f"stopped after {seconds:.0f} s"
    result: dict[str, Any] = {"status": status, "seconds": time.perf_counter() - start}
    if path.exists():
        result["found"] = json.loads(path.read_text(encoding="utf-8"))
    if status != "done":
        result["said"] = said.rstrip().splitlines()[-25:]
    return result
