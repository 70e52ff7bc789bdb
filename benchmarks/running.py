"""Runs the benchmark over architectures: results are on disk after each row, and a row that fails loses no other."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial, partialmethod
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

import torch
from tqdm import tqdm

import ogc

from .bench import CPU_BATCH_SIZE, Bench, batch_size_of, build, draw
from .largest import Largest, largest, summary
from .measuring import (
    MIB,
    CheckFailed,
    deterministic,
    environment,
    give_back_freed_memory,
    keep_freed_memory,
    write_json,
)
from .networks import ARCHITECTURES
from .peers import Comparison, compare
from .row import Failure, Row, printed

T = TypeVar("T")


def run(options: argparse.Namespace, command: str) -> int:
    """Measure and print what the options ask for; the exit status, which is that of the first failure."""
    device = torch.device(options.device)
    if refusal := _refusal(options, device):
        print(refusal, file=sys.stderr)
        return 2
    keeps = device.type == "cuda" or keep_freed_memory()
    results = Results(options.json, environment(command, device, options.seed, keeps))
    runner = Runner(device, options, results)
    with deterministic(device), plain_progress():
        for name in tqdm(options.arch, desc="architectures", disable=True if len(options.arch) == 1 else None):
            give_back_freed_memory()
            (runner.compare if options.compare else runner.largest if options.largest_batch else runner.bench)(name)
    if device.type == "cpu" and options.batch_size is None:
        print(f"CPU run: batch size {CPU_BATCH_SIZE} instead of the published ones (--batch-size published)")
    print(results)
    return results.failures[0].status if results.failures else 0


def _refusal(options: argparse.Namespace, device: torch.device) -> str:
    """Why nothing can be run; empty if it can."""
    unknown = [name for name in options.arch if name not in ARCHITECTURES]
    if unknown:
        near = difflib.get_close_matches(unknown[0], ARCHITECTURES, n=3, cutoff=0.0)
        return f"unknown architecture {unknown[0]!r}; the nearest are {', '.join(near)}"
    if device.type == "cuda" and not torch.cuda.is_available():
        return f"--device {options.device} was asked for, but torch finds no CUDA device; use --device cpu"
    try:
        import torchvision  # noqa: F401
    except ImportError:
        return "benchmark.py needs torchvision: pip install torchvision"
    if options.plot:
        try:
            from ogc.plan.pictures import canvas  # noqa: F401
        except ogc.DependencyError as error:
            return f"--plot: {error}"
    return ""


@contextmanager
def plain_progress() -> Iterator[None]:
    """No bars where stderr is no terminal, those of ogc among them."""
    with patch.object(tqdm, "__init__", partialmethod(tqdm.__init__, disable=None)):
        yield


class Results:
    """The rows so far, and the failures; in the file after each of them, and as a line where stderr is no terminal.

    Attributes:
        rows: by architecture and solver; comparisons by architecture.
        failures: in the order in which they came.
    """

    def __init__(self, path: Path | None, data: dict[str, object]) -> None:
        self.path, self.data = path, data
        self.rows: dict[tuple[str, str], Row | Comparison | Largest] = {}
        self.failures: list[Failure] = []

    def add(self, found: Row | Comparison | Largest) -> None:
        """A row, or a comparison with one more row."""
        if isinstance(found, Row):
            self.rows[found.arch, found.solver] = found
            self._say(f"{found.arch}, {found.solver}: {found.ogc_bytes / MIB:.1f} of {found.plain_bytes / MIB:.1f} MiB")
        elif isinstance(found, Largest):
            self.rows[found.arch, ""] = found
            self._say(str(found))
        else:
            self.rows[found.arch, ""] = found
            self._say(f"{found.arch}, {found.rows[-1].name}: {found.rows[-1].said}")
        self._write()

    def fail(self, failure: Failure) -> None:
        self.failures.append(failure)
        print(failure, file=sys.stderr)
        self._write()

    def _say(self, line: str) -> None:
        if not sys.stderr.isatty():
            print(line, file=sys.stderr, flush=True)

    def _write(self) -> None:
        if self.path:
            rows = [asdict(row) for row in self.rows.values()]
            write_json(self.path, {**self.data, "failed": [asdict(f) for f in self.failures], "rows": rows})

    def __str__(self) -> str:
        rows = [row for row in self.rows.values() if isinstance(row, Row)]
        comparisons = [str(row) for row in self.rows.values() if isinstance(row, (Comparison, Largest))]
        means = summary([row for row in self.rows.values() if isinstance(row, Largest)])
        failed = "\n".join(["failed:", *map(str, self.failures)]) if self.failures else ""
        return "\n\n".join(filter(None, [printed(rows) if rows else "", *comparisons, means, failed]))


class Runner:
    """Measures architectures one after another, and hands on what comes out."""

    def __init__(self, device: torch.device, options: argparse.Namespace, results: Results) -> None:
        self.device, self.options, self.results = device, options, results

    def bench(self, name: str) -> None:
        """A row for each solver, all with the same model and graph."""
        bench = self._tried(name, "", lambda: Bench(name, self.device, self.options))
        if bench is None:
            return
        for solver in self.options.solver:
            row = self._tried(name, solver, partial(bench.row, solver))
            if row is not None:
                self.results.add(row)
        if self.options.plot and bench.plans:
            self._tried(name, "pictures", lambda: draw(self.options.plot, name, bench.graph, bench.plans))
        bench.progress.close()

    def compare(self, name: str) -> None:
        """Every way to save activation memory, with the same model."""
        comparison = self._tried(name, "", lambda: self._compared(name))
        for row in comparison.rows if comparison else ():
            if row.failed:
                self.results.fail(Failure(f"{name}, {row.name}", row.reason, status=1))

    def largest(self, name: str) -> None:
        """How many samples fit on a device, by each way of training."""
        found = self._tried(name, "", lambda: self._largest(name))
        if found is not None:
            self.results.add(found)

    def _largest(self, name: str) -> Largest:
        model, inputs = build(name, self.device, self.options)
        return largest(name, model, inputs, self.options)

    def _compared(self, name: str) -> Comparison:
        model, inputs = build(name, self.device, self.options)
        return compare(
            name,
            ARCHITECTURES[name],
            model,
            inputs,
            seed=self.options.seed,
            iterations=self.options.iterations,
            profile=self.options.profile,
            compile_budgets=self.options.compile_budgets,
            compile_backend=self.options.compile_backend,
            report=self.results.add,
        )

    def _tried(self, name: str, part: str, make: Callable[[], T]) -> T | None:
        """What ``make`` returns; None where it fails, which is then among the results."""
        what = f"{name}, {part}" if part else name
        try:
            return make()
        except CheckFailed as error:
            failure = Failure(what, f"CHECK FAILED: {error}", status=1)
        except (ogc.SolveError, ogc.InputError) as error:
            failure = Failure(what, str(error), status=2)
        except Exception as error:  # a model may fail in any way, and the others are measured all the same
            failure = Failure(what, f"{type(error).__name__}: {error}", status=3 if _is_out_of_memory(error) else 4)
            if failure.status == 4:
                traceback.print_exc()
        if failure.status == 3:  # the traceback holds no tensors any more
            failure = replace(failure, reason=_out_of_memory(name, self.device, self.options))
        self.results.fail(failure)
        return None


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def _out_of_memory(name: str, device: torch.device, options: argparse.Namespace) -> str:
    """What did not fit, and what would: from a plan for a small batch, as activations grow with it."""
    give_back_freed_memory()
    memory = (
        torch.cuda.get_device_properties(device).total_memory
        if device.type == "cuda"
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    said = f"out of memory at batch size {batch_size_of(name, device, options)} on {device} ({memory / MIB:.0f} MiB)"
    try:
        plain, optimised = _samples_that_fit(name, memory, options)
    except Exception:  # it is a hint, and there is little memory
        return said
    return (
        f"{said}. About {plain} samples would fit the plain model, {optimised} the optimised one; both are run, so try "
        f"--batch-size {max(1, plain)}"
    )


def _samples_that_fit(name: str, memory: int, options: argparse.Namespace) -> tuple[int, int]:
    """Into the plain and into the optimised model, within nine tenths of the memory."""
    architecture = ARCHITECTURES[name]
    model = architecture.build()
    plan = ogc.solve(ogc.parse(model, architecture.input.sample(2, options.size), profile="estimate"))
    fixed = 2 * sum(p.numel() * p.element_size() for p in model.parameters())
    plain, optimised = (
        max(0, int(2 * (memory - fixed) * 0.9 / peak)) for peak in (plan.plain_peak_bytes, plan.peak_bytes)
    )
    return plain, optimised
