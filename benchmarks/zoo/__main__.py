"""Optimises other people's models and compares three training steps with the plain model's, bit by bit.

    python -m benchmarks.zoo --family torchvision resnet18 vit_b_16
    OMP_NUM_THREADS=1 python -m benchmarks.zoo --family transformers
    python -m benchmarks.zoo --family others --plain-only

Each model is built small from its configuration, on the CPU, and tried in a process of its own that has --seconds and
--gigabytes. A row is written as soon as it is there; one that the same code gave before stays, but for --again.
What a family needs is said in benchmarks/zoo/models/; the largest of torchvision's models take --gigabytes 14.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import resource
import sys
import warnings
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks.results import code_digest, environment, write_json
from benchmarks.row import Data
from benchmarks.suites import RESULTS
from benchmarks.summaries import zoo
from benchmarks.zoo.models import FAMILIES, Build, family
from benchmarks.zoo.training import SEED, STEPS, row_of


def main() -> int:
    options = _options()
    _quiet()
    builds = family(options.family)
    names = options.names or list(builds)
    if unknown := [name for name in names if name not in builds]:
        raise SystemExit(f"{options.family} has no model named {', '.join(unknown)}; --list shows those it has")
    if options.list:
        print("\n".join(names))
        return 0
    path = options.json or (None if options.plain_only else RESULTS / "zoo" / f"{options.family}.json")
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]} if path and path.exists() else {}
    code = code_digest()
    for name in names:
        if not options.again and _is_done(rows.get(name, {}), code, options.plain_only):
            continue
        rows[name] = {"name": name, "code": code, **_in_own_process(builds[name], options)}
        print(_said(rows[name]), flush=True)
        if path:
            _write(path, options.family, (rows[n] for n in builds if n in rows))
    found = [rows[name] for name in names if name in rows]
    tried = [row for row in found if row["verdict"] != "plain"]
    print(zoo([{"rows": tried, "file": f"{options.family}.json"}]) if tried else f"{len(found)} models")
    return 1 if any(row["verdict"] in ("different", "error") for row in found) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: the whole family")
    parser.add_argument("--family", choices=FAMILIES, default="torchvision")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: benchmarks/results/zoo/<family>.json")
    parser.add_argument("--seconds", type=float, default=120.0, help="a model that takes longer is not tried")
    parser.add_argument("--gigabytes", type=float, default=6.0, help="memory that a model may take")
    parser.add_argument("--plain-only", action="store_true", help="only see which models can be built and trained")
    parser.add_argument("--again", action="store_true", help="also models that have a row of the same code")
    parser.add_argument("--list", action="store_true", help="only the names")
    return parser.parse_args()


def _said(row: Data) -> str:
    """One line."""
    told = [f"{row['name']}: {row['verdict']}"]
    if "ogc_bytes" in row:
        sizes = " -> ".join(f"{row[key] / 1e6:.2f}" for key in ("plain_bytes", "ogc_bytes"))
        told.append(f"{sizes} MB (predicted {row['predicted_bytes'] / 1e6:.2f})")
        told.append(f"{row['operations']} operations in {row['parts']} parts, {row['opaque_modules']} opaque modules")
        told.append(f"planned in {row['plan_seconds']:.1f} s")
    elif "plain_bytes" in row:
        told.append(f"{row['plain_bytes'] / 1e6:.2f} MB")
    return ", ".join(told) + (f"; {row['detail'][:200]}" if row["detail"] else "")


def _is_done(row: Data, code: str, plain_only: bool) -> bool:
    return row.get("code") == code and (plain_only or row["verdict"] != "plain")


def _quiet() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # whatever wants to be downloaded fails at once
    torch.use_deterministic_algorithms(True, warn_only=True)


def _in_own_process(build: Build, options: argparse.Namespace) -> Data:
    """The row of a model, or why there is none."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_try, args=(build, options.plain_only, options.gigabytes, theirs))
    process.start()
    theirs.close()
    try:
        late = {"verdict": "not tried", "detail": f"it took more than {options.seconds:g} s"}
        row = ours.recv() if ours.poll(options.seconds) else late
    except EOFError:
        process.join()
        row = {"verdict": "error", "detail": f"the process ended with exit code {process.exitcode}"}
    process.kill()
    process.join()
    return dict(row)


def _try(build: Build, plain_only: bool, gigabytes: float, pipe: Connection) -> None:
    limit = int(gigabytes * 1e9)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # models and the profiler say much
        os.dup2(nowhere, stream)
    pipe.send(row_of(build, plain_only))


def _write(path: Path, name: str, rows: Iterable[Data]) -> None:
    data = environment(["-m", "benchmarks.zoo", *sys.argv[1:]], torch.device("cpu"), SEED)
    for package in sorted({name.split("_")[0], "transformers" if name == "peft" else name}):
        with suppress(PackageNotFoundError):
            data["versions"][package] = version(package)
    write_json(path, {**data, "steps": STEPS, "rows": list(rows)})


if __name__ == "__main__":
    sys.exit(main())
