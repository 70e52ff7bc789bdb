"""Optimises published architectures and compares two training steps with the plain model's, bit by bit.

    python tests/zoo.py --family torchvision resnet18 vit_b_16
    OMP_NUM_THREADS=1 python tests/zoo.py --family transformers

Each model is built from its configuration, with a small input, on the CPU, and tried in a process of its own
that is ended after --seconds. Rows of models tried before stay in the table. It needs torchvision, timm or
transformers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import multiprocessing
import os
import platform
import sys
import tempfile
import time
import warnings
from collections import Counter
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ogc
from ogc.allocator import peak_bytes
from ogc.graph import table
from ogc.parser.parse import call_arguments
from ogc.program import Call, OutputSpec
from tests.zoo_models import Build, family, part_of

STEPS = 2
SEED = 3
SPREAD = "within the plain model's own run-to-run spread"


class Bits(NamedTuple):
    """What stands for a tensor in comparisons."""

    digest: str
    finite: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> Bits:
        tensor = tensor.detach().contiguous()
        content = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        content.update(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
        return Bits(content.hexdigest(), not tensor.is_floating_point() or bool(tensor.isfinite().all()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: the whole family")
    parser.add_argument("--family", choices=["torchvision", "timm", "transformers"], default="torchvision")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: tests/results/zoo_<family>.json")
    parser.add_argument("--seconds", type=float, default=300.0, help="a model that takes longer is not tried")
    parser.add_argument("--missing", action="store_true", help="only models without a row that says equal")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.use_deterministic_algorithms(True, warn_only=True)
    path = options.json or Path(__file__).parent / "results" / f"zoo_{options.family}.json"
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}
    builds = family(options.family)
    names = options.names or list(builds)
    for name in names:
        if options.missing and rows.get(name, {}).get("equal", "").startswith("yes"):
            continue
        rows[name] = {"name": name, **_in_own_process(builds[name], part_of(name), options.seconds)}
        print(f"{name}: {_brief(rows[name])}", flush=True)
        _write(path, options.family, [rows[n] for n in builds if n in rows])
    print(_table([rows[n] for n in names if n in rows]))


def _in_own_process(build: Build, part: str, seconds: float) -> dict[str, Any]:
    """The row of a model, or why there is none."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_try, args=(build, part, theirs))
    process.start()
    theirs.close()
    try:
        row = ours.recv() if ours.poll(seconds) else {"equal": "not tried", "error": f"took more than {seconds:g} s"}
    except EOFError:
        process.join()
        row = {"equal": "error", "error": f"the process ended with exit code {process.exitcode}"}
    process.kill()
    process.join()
    return dict(row)


def _try(build: Build, part: str, pipe: Connection) -> None:
    try:
        pipe.send(_row(build, part))
    except Exception as error:  # any model may fail in any way: that is what is found out here
        lines = str(error).strip().splitlines() or [""]
        pipe.send({"equal": "error", "error": f"{type(error).__name__}: {lines[0]}"})


def _row(build: Build, part: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model, inputs = build()
    model.train()
    shapes = [list(leaf.shape) for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    original = model.get_submodule(part)
    sample = _call_of(original, model, inputs) if part else inputs
    start = time.perf_counter()
    optimised = ogc.optimize(original, sample, profile="estimate")
    seconds = time.perf_counter() - start
    plan: Any = optimised.plan
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"  # large models are too large to be held twice
        torch.save(list(_tensors_of(model).values()), state)
        plain, plain_bytes = _training(model, model, inputs, state)
        run = _with(model, part, optimised)
        _step(run, inputs)  # plans again, before anything is measured, where the model now has hooks of its own
        ours, ogc_bytes = _training(model, run, inputs, state)
        _with(model, part, original)
        difference = _difference(plain, ours)
        if difference is not None and _difference(plain, _training(model, model, inputs, state)[0]) is not None:
            difference = SPREAD
    finite = all(bits.finite for bits in plain.values())
    return {
        **({"part": part} if part else {}),
        "equal": difference or ("yes" if finite else "yes (not all finite)"),
        "inputs": shapes,
        "operations": len(optimised.graph.operations),  # type: ignore[arg-type, union-attr]
        "plain_bytes": plain_bytes,
        "ogc_bytes": ogc_bytes,
        "predicted_plain_bytes": plan.plain_peak_bytes,
        "predicted_bytes": plan.peak_bytes,
        "lower_bound": plan.lower_bound,
        "overhead": plan.overhead,
        "plan_seconds": seconds,
    }


def _call_of(part: torch.nn.Module, model: torch.nn.Module, inputs: Any) -> Call:
    """How the model calls one of its submodules."""
    calls: list[Call] = []
    hook = part.register_forward_pre_hook(lambda _, args, kwargs: calls.append(Call(args, kwargs)), with_kwargs=True)
    args, kwargs = call_arguments(inputs)
    with torch.no_grad():
        model(*args, **kwargs)
    hook.remove()
    return calls[0]


def _with(model: torch.nn.Module, part: str, replacement: torch.nn.Module) -> torch.nn.Module:
    """The model with another submodule in the place of one, or that itself where it stands for all."""
    if not part:
        return replacement
    around, _, name = part.rpartition(".")
    setattr(model.get_submodule(around), name, replacement)
    return model


def _tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


def _step(run: torch.nn.Module, inputs: Any) -> list[torch.Tensor]:
    """One forward and backward; the outputs, detached."""
    args, kwargs = call_arguments(inputs)
    outputs = OutputSpec.of(run(*args, **kwargs))[1]
    _Loss.apply(*(t for t in outputs if t.requires_grad)).backward()
    return [t.detach() for t in outputs]


class _Loss(torch.autograd.Function):
    """The mean of squares, with no more memory than the gradients of the outputs take."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*outputs)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(t * (2 / t.numel()) for t in ctx.saved_tensors)


def _into(outputs: list[torch.Tensor], run: torch.nn.Module, inputs: Any) -> None:
    outputs += _step(run, inputs)


def _training(model: torch.nn.Module, run: torch.nn.Module, inputs: Any, state: Path) -> tuple[dict[str, Bits], int]:
    """What a few SGD steps of ``run`` give, by name, and the peak of the first, which finds gradients allocated."""
    with torch.no_grad():
        for tensor, value in zip(_tensors_of(model).values(), torch.load(state, mmap=True), strict=True):
            tensor.copy_(value)
    torch.manual_seed(SEED)
    numpy.random.seed(SEED)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seen: dict[str, Bits] = {}
    outputs: list[torch.Tensor] = []
    peak = 0
    for number in range(STEPS):
        if number == 0:
            peak = peak_bytes(partial(_into, outputs, run, inputs), "cpu")
        else:
            optimizer.zero_grad()
            outputs = _step(run, inputs)
        seen |= {f"output {n} of step {number}": Bits.of(t) for n, t in enumerate(outputs)}
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        seen |= {f"gradient of {name} in step {number}": Bits.of(gradient) for name, gradient in gradients.items()}
        optimizer.step()
    seen |= {f"{name} at the end": Bits.of(tensor) for name, tensor in _tensors_of(model).items()}
    seen["random state"] = Bits.of(torch.get_rng_state())
    model.zero_grad()
    return seen, peak


def _difference(plain: dict[str, Bits], ours: dict[str, Bits]) -> str | None:
    if plain.keys() != ours.keys():
        return f"no: only one of them has {sorted(plain.keys() ^ ours.keys())[0]}"
    return next((f"no: {name} differs" for name, bits in plain.items() if bits != ours[name]), None)


def _cut(row: dict[str, Any]) -> float:
    return 1 - float(row["ogc_bytes"]) / float(row["plain_bytes"])


def _brief(row: dict[str, Any]) -> str:
    if "plain_bytes" not in row:
        return f"{row['equal']}, {row['error']}"
    return (
        f"{row['equal']}, {row['plain_bytes'] / 1e6:.1f} -> {row['ogc_bytes'] / 1e6:.1f} MB "
        f"({row['predicted_plain_bytes'] / 1e6:.1f} -> {row['predicted_bytes'] / 1e6:.1f}, "
        f"bound {row['lower_bound'] / 1e6:.1f}), cut {_cut(row):.0%}, overhead {row['overhead']:.0%}, "
        f"planned in {row['plan_seconds']:.1f} s"
    )


def _table(rows: list[dict[str, Any]]) -> str:
    heads = ["name", "equal", "plain MB", "ogc MB", "cut", "overhead", "plan s"]
    cells = []
    for row in rows:
        if "plain_bytes" not in row:
            cells.append([row["name"], f"{row['equal']}: {row['error'][:90]}", *[""] * 5])
            continue
        sizes = [f"{row[key] / 1e6:.1f}" for key in ("plain_bytes", "ogc_bytes")]
        shares = [f"{_cut(row):.0%}", f"{row['overhead']:.0%}", f"{row['plan_seconds']:.1f}"]
        cells.append([row["name"], row["equal"], *sizes, *shares])
    measured = [row for row in rows if "plain_bytes" in row]
    counts = Counter(row["equal"].split(":")[0] for row in rows)
    return (
        f"{table(heads, cells)}\n{len(rows)} models: {', '.join(f'{n} {kind}' for kind, n in counts.items())}; "
        f"cut of at least 25 %: {sum(_cut(row) >= 0.25 for row in measured)} of {len(measured)}; "
        f"above the plain peak: {sum(_cut(row) < 0 for row in measured)}"
    )


def _write(path: Path, name: str, rows: list[dict[str, Any]]) -> None:
    library = __import__(name)
    environment = {
        "command": f"python tests/zoo.py --family {name}",  # perhaps in groups of models
        "versions": {"torch": torch.__version__, name: library.__version__, "python": platform.python_version()},
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }
    path.write_text(json.dumps({**environment, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
