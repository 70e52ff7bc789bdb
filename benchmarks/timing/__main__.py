"""What a plan promises and what a step pays, in time, for many networks and wishes; and what misses the aims.

    OMP_NUM_THREADS=1 python -m benchmarks.timing --json out.json
    python -m benchmarks.timing resnet50 small_blocks --device cuda:0

One step is a forward and ``sum().backward()``, on one thread, in CPU seconds of the process (on CUDA in seconds of the
wall, synchronized). All ways to run a network take turns; paid is the median over the rounds of the time over that of
the plain step in the same round, less 1. The file has a network's rows as soon as its rounds are over, and the picture
lies beside it; ``--resume`` goes on where the same command was interrupted. A row that fails is reported and written
with its reason, the others are measured all the same, and the exit status is not 0.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import json
import logging
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

import ogc
from benchmarks.arguments import positive
from benchmarks.measuring import (
    code_digest,
    deterministic,
    device_name,
    environment,
    give_back_freed_memory,
    keep_freed_memory,
    write_json,
)
from benchmarks.row import Failure

from .aims import findings, summary
from .items import items_of
from .measured import Options, Timing
from .networks import SUBJECTS, TINY
from .picture import draw
from .rounds import LEAST_ROUNDS, SECONDS, one_thread
from .row import NOT_INSTALLED, Items, TimeRow, printed


def main(arguments: Sequence[str] | None = None) -> int:
    given = options_of(arguments)
    device = torch.device(given.device)
    if refusal := _refusal(given, device):
        print(refusal, file=sys.stderr)
        return 2
    keeps = device.type == "cuda" or keep_freed_memory()
    words = [word for word in (sys.argv[1:] if arguments is None else arguments) if word != "--resume"]
    command = shlex.join(["python", "-m", "benchmarks.timing", *words])
    options = Options(device, given.profile, given.rounds, given.seconds, given.batch_factor)
    with _quiet(), one_thread(), deterministic(device):
        environ = environment(command, device, options.seed, keeps)
        results = Results(given.json, {**environ, "profile": given.profile, "code": code_digest()})
        if given.resume and (refusal := results.resume()):
            print(refusal, file=sys.stderr)
            return 2
        for name in given.names or SUBJECTS:
            if name in results:
                continue
            give_back_freed_memory()
            measure_network(name, options, results)
    print(results)
    if given.json:
        results.draw(given.json.with_name(f"{given.json.stem}_promised_paid.svg"))
    return results.failures[0].status if results.failures else 0


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help=f"default: {' '.join(SUBJECTS)}")
    add("--json", type=Path, metavar="FILE", help="also write the rows, with command, versions and machine")
    add("--resume", action="store_true", help="measure only what FILE, begun by the same command, lacks or failed")
    add("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    add("--profile", choices=["auto", "estimate", "measure"], default="auto", help="how graphs are weighed")
    add("--batch-factor", type=positive, default=1, metavar="N", help="more samples, for a large device")
    add("--rounds", type=positive, default=LEAST_ROUNDS, help="at least; default: %(default)s")
    add("--seconds", type=float, default=SECONDS, help="more rounds until these are over; default: %(default)s")
    return parser.parse_args(arguments)


def _refusal(given: argparse.Namespace, device: torch.device) -> str:
    """Why nothing can be run; empty if it can."""
    unknown = [name for name in given.names if name not in SUBJECTS]
    if unknown:
        near = difflib.get_close_matches(unknown[0], SUBJECTS, n=3, cutoff=0.0)
        return f"unknown network {unknown[0]!r}; the nearest are {', '.join(near)}"
    if device.type == "cuda" and not torch.cuda.is_available():
        return f"--device {device} was asked for, but torch finds no CUDA device; use --device cpu"
    if given.resume and not given.json:
        return "--resume goes on with the file of --json, which is not given"
    return ""


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings and what is logged below errors, such as leaves that a network has."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class Results:
    """The rows so far, and the failures; in the file after each network."""

    def __init__(self, path: Path | None, data: dict[str, object]) -> None:
        self.path, self.data = path, data
        self.rows: list[TimeRow] = []
        self.items: Items | None = None
        self.failures: list[Failure] = []

    def resume(self) -> str:
        """Take over the networks that the file has whole and without a failure; returns why that cannot be, or ""."""
        if not self.path or not self.path.exists():
            return ""
        found = json.loads(self.path.read_text(encoding="utf-8"))
        if other := [key for key, value in self.data.items() if found.get(key) != value]:
            return f"{self.path} is of another {', '.join(other)}; move it away, or leave --resume out to replace it"
        rows = [TimeRow.read(row) for row in found["rows"]]
        missing = {row.arch for row in rows if row.failed or row.way == NOT_INSTALLED}
        if found["items"]:
            self.items = Items.read(found["items"])
        else:
            missing.add(TINY)
        self.rows = [row for row in rows if row.arch not in missing]
        return ""

    def __contains__(self, name: str) -> bool:
        return any(row.arch == name for row in self.rows)

    def add(self, rows: Sequence[TimeRow]) -> None:
        for row in rows:
            self.rows.append(row)
            print(row.said, file=sys.stderr, flush=True)
            if row.failed:
                self.fail(Failure(f"{row.arch}, {row.way}", row.reason, status=1 if row.differs else 4))
        self.write()

    def fail(self, failure: Failure) -> None:
        self.failures.append(failure)
        print(failure, file=sys.stderr, flush=True)
        self.write()

    def write(self) -> None:
        if self.path:
            failed = [asdict(failure) for failure in self.failures]
            items = self.items and asdict(self.items)
            write_json(self.path, {**self.data, "failed": failed, "items": items, "rows": [*map(asdict, self.rows)]})

    def draw(self, path: Path) -> None:
        """The picture, if anything was measured and matplotlib is there."""
        if not any(row.promised is not None for row in self.rows):
            return
        try:
            draw(self.rows, path)
            print(f"drawn: {path}")
        except ogc.DependencyError as error:
            print(f"no picture: {error}", file=sys.stderr)

    def __str__(self) -> str:
        failed = ["failed:", *map(str, self.failures)] if self.failures else []
        return "\n\n".join([printed(self.rows), summary(findings(self.rows, self.items)), *failed])


def measure_network(name: str, options: Options, results: Results) -> None:
    """Its rows, and what single items cost where it is the network for that; a failure where it cannot be planned."""
    subject = SUBJECTS[name]
    if importlib.util.find_spec(subject.package) is None:
        reason = f"{subject.package} is not installed"
        results.add([TimeRow(name, (), device_name(options.device), NOT_INSTALLED, reason=reason)])
        return
    try:
        timing = Timing(name, subject, options)
        results.add(timing.measured())
        if name == TINY:
            results.items = items_of(timing)
            results.write()
    except Exception as error:  # the other networks are measured all the same
        results.fail(Failure(name, f"{type(error).__name__}: {error}", status=4))


if __name__ == "__main__":
    sys.exit(main())
