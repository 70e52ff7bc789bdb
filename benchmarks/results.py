"""Where results go: printed as they come, and in the file after each of them; what fails loses no other."""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import os
import platform
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partialmethod
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

import torch
from tqdm import tqdm

import ogc

from .row import Data, Row, printed

T = TypeVar("T")


class CheckFailed(Exception):
    """A model of ours computed something else than the plain one."""


class Impossible(Exception):
    """Why a way to save memory does not apply to a model."""


@dataclass(frozen=True)
class Failure:
    """A row that is not there, and why.

    Attributes:
        name: the network, with the way if only that one failed.
        status: the exit status that it makes: 1 for other numbers than the plain model's, 2 for what cannot be
            planned, 3 for too little memory, 4 for anything else.
    """

    name: str
    reason: str
    status: int

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def failure_of(name: str, error: Exception) -> Failure:
    """Why something failed."""
    if isinstance(error, CheckFailed):
        return Failure(name, f"CHECK FAILED: {error}", status=1)
    if isinstance(error, (ogc.SolveError, ogc.InputError, Impossible)):
        return Failure(name, str(error), status=2)
    full = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
    said = (str(error).strip().splitlines() or ["no message"])[0]
    return Failure(name, f"{type(error).__name__}: {said}", status=3 if full else 4)


class Results:
    """The rows so far, and the failures.

    Attributes:
        data: what the file has beside these.
        rows: as they are written; those of ways to run a network are :class:`Row`.
    """

    def __init__(self, path: Path | None, data: Data) -> None:
        self.path, self.data = path, data
        self.rows: list[Row | Data] = []
        self.failures: list[Failure] = []

    def resume(self, is_missing: Callable[[list[Row], Data], set[str]]) -> str:
        """Take over the networks that the file has whole; returns why that cannot be, or ""."""
        if not self.path or not self.path.exists():
            return ""
        found = json.loads(self.path.read_text(encoding="utf-8"))
        if other := [key for key, value in self.data.items() if found.get(key) != value]:
            return f"{self.path} is of another {', '.join(other)}; move it away, or leave --resume out to replace it"
        rows = [Row.read(row) for row in found["rows"]]
        missing = is_missing(rows, found)
        self.rows = [row for row in rows if row.arch not in missing]
        self.data |= {key: value for key, value in found.items() if key not in ("rows", "failed")}
        return ""

    def __contains__(self, name: str) -> bool:
        return any((row.arch if isinstance(row, Row) else row.get("arch")) == name for row in self.rows)

    def add(self, *rows: Row | Data) -> None:
        """Rows in the place of those of the same network and way, if there are any."""
        for row in rows:
            names = [(one.arch, one.way) if isinstance(one, Row) else None for one in self.rows]
            if isinstance(row, Row) and (row.arch, row.way) in names:
                self.rows[names.index((row.arch, row.way))] = row
            else:
                self.rows.append(row)
                self.say(row)
        self.write()

    def fail(self, failure: Failure) -> None:
        self.failures.append(failure)
        print(failure, file=sys.stderr, flush=True)
        self.write()

    def say(self, row: object) -> None:
        """A line, where no bar shows how far it is."""
        if not sys.stderr.isatty():
            print(row, file=sys.stderr, flush=True)

    def tried(self, name: str, make: Callable[[], T], hint: Callable[[], str] | None = None) -> T | None:
        """What ``make`` returns; None where it fails, which is then among the results.

        Where the memory is not enough, ``hint`` says what would fit.
        """
        try:
            return make()
        except Exception as error:  # a model may fail in any way, and the others are measured all the same
            failure = failure_of(name, error)
            if failure.status == 4:
                traceback.print_exc()
        if failure.status == 3 and hint:  # the traceback holds no tensors any more
            failure = replace(failure, reason=hint())
        self.fail(failure)
        return None

    def write(self) -> None:
        if self.path:
            rows = [row.written() if isinstance(row, Row) else row for row in self.rows]
            write_json(self.path, {**self.data, "failed": [*map(asdict, self.failures)], "rows": rows})

    @property
    def status(self) -> int:
        return self.failures[0].status if self.failures else 0

    def __str__(self) -> str:
        rows = [row for row in self.rows if isinstance(row, Row)]
        failed = "\n".join(["failed:", *map(str, self.failures)]) if self.failures else ""
        return "\n\n".join(filter(None, [printed(rows) if rows else "", failed]))


# -- files --------------------------------------------------------------------------------------------------------


def environment(command: Sequence[str], device: torch.device, seed: int, keeps_freed_memory: bool = False) -> Data:
    """What results are written with."""
    return {
        "command": shlex.join(["python", *command]),
        "versions": {"ogc": ogc.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": {
            "device": device_name(device),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),  # decides which kernels run there
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "system": platform.system(),
            "keeps_freed_memory": keeps_freed_memory,
        },
        "seed": seed,
    }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def code_digest() -> str:
    """What the library's files say, and which torch runs them, in short."""
    content = hashlib.sha256(torch.__version__.encode())
    for path in sorted(Path(ogc.__file__).parent.rglob("*.py")):
        content.update(path.read_bytes())
    return content.hexdigest()[:10]


def write_json(path: Path, data: Data) -> None:
    """Whole or not at all; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


# -- the terminal -------------------------------------------------------------------------------------------------


@contextmanager
def plain_progress() -> Iterator[None]:
    """No bars where stderr is no terminal, those of ogc among them."""
    with patch.object(tqdm, "__init__", partialmethod(tqdm.__init__, disable=None)):
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings and what is logged below errors, such as opaque modules that a network has."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def refusal_of(names: Sequence[str], known: Sequence[str], device: torch.device) -> str:
    """Why nothing can be run; empty if it can."""
    if unknown := [name for name in names if name not in known]:
        near = difflib.get_close_matches(unknown[0], known, n=3, cutoff=0.0)
        return f"unknown network {unknown[0]!r}; the nearest are {', '.join(near)}"
    if device.type == "cuda" and not torch.cuda.is_available():
        return f"--device {device} was asked for, but torch finds no CUDA device; use --device cpu"
    return ""
