"""Plain model against optimised model: peak activation memory, step time, equality; beside the paper.

    python benchmark.py --arch resnet101 --device cuda:0
    python benchmark.py --arch resnet50 densenet121 --device cpu --batch-size 8 --json out.json
    python benchmark.py --arch resnet50 --solver optimal chen feng-huang
    python benchmark.py --arch resnet18 --solver optimal chen --plot pictures
    python benchmark.py --arch gpt2_small --compare --size 128
    python benchmark.py --arch list

One step is a forward, ``sum().backward()``, with the parameters' gradients already allocated. Memory is the
allocator's peak during a step less what was allocated before it. Published figures: Feng & Huang, "Optimal
Gradient Checkpoint Search for Arbitrary Computation Graphs", CVPR 2021. With ``--compare``: other ways to save
activation memory beside ours, see peers.py.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

import ogc
from measuring import (
    MIB,
    CheckFailed,
    allocate_gradients,
    device_name,
    environment,
    give_back_freed_memory,
    keep_freed_memory,
    measure,
    timed,
)
from networks import ARCHITECTURES, PUBLISHED
from ogc.graph import table
from ogc.solver import SOLVERS
from peers import Comparison, compare

CPU_BATCH_SIZE = 4

SLICED_TOLERANCE = 1e-2
"""Most by which a tensor may differ from the plain model's where the batch is sliced, relative to its largest entry."""


@dataclass(frozen=True)
class Row:
    """One architecture's result with one solver. Bytes, seconds, shares of the plain step."""

    arch: str
    solver: str
    device: str
    batch_size: int
    input_shape: tuple[int, ...]
    plain_bytes: int
    ogc_bytes: int
    predicted_plain_bytes: int
    predicted_bytes: int
    plain_seconds: float
    ogc_seconds: float
    predicted_overhead: float
    plain_flops: int
    ogc_flops: int
    segments: int
    recomputed_segments: int
    parse_seconds: float
    solve_seconds: float
    overhead_at_theirs: float | None  # recomputed time of our plan that fits into the published memory
    flops_at_theirs: float | None  # its recomputed FLOPs
    batch_slices: int
    deviation: float  # most by which a tensor differs from the plain model's, as a share of its largest entry
    published: dict[str, Any] | None  # the row of the published table, for the batch size that it names

    @property
    def cut(self) -> float:
        return 1 - self.ogc_bytes / self.plain_bytes

    @property
    def overhead(self) -> float:
        return self.ogc_seconds / self.plain_seconds - 1

    @property
    def flops_overhead(self) -> float:
        return self.ogc_flops / self.plain_flops - 1


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    if options.arch == ["list"]:
        print(_list())
        return 0
    unknown = [name for name in options.arch if name not in ARCHITECTURES]
    if unknown:
        near = difflib.get_close_matches(unknown[0], ARCHITECTURES, n=3, cutoff=0.0)
        print(f"unknown architecture {unknown[0]!r}; the nearest are {', '.join(near)}", file=sys.stderr)
        return 2
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(
            f"--device {options.device} was asked for, but torch finds no CUDA device; use --device cpu",
            file=sys.stderr,
        )
        return 2
    try:
        import torchvision  # noqa: F401
    except ImportError:
        print("benchmark.py needs torchvision: pip install torchvision", file=sys.stderr)
        return 2
    if options.plot:
        try:
            from ogc.plan.pictures import canvas  # noqa: F401
        except ogc.DependencyError as error:
            print(f"--plot: {error}", file=sys.stderr)
            return 2
    torch.use_deterministic_algorithms(True)
    options.keeps_freed_memory = device.type == "cuda" or keep_freed_memory()
    rows: list[Row] = []
    comparisons: list[Comparison] = []
    for name in tqdm(options.arch, desc="architectures", disable=len(options.arch) == 1):
        give_back_freed_memory()
        try:
            if options.compare:
                comparisons.append(_compare(name, device, options))
            else:
                rows += _bench(name, device, options)
        except CheckFailed as failure:
            print(f"{name}: CHECK FAILED: {failure}", file=sys.stderr)
            return 1
        except (ogc.SolveError, ogc.InputError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 2
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            print(_out_of_memory(name, device, options), file=sys.stderr)
            return 3
        if options.json:
            _write_json(options.json, rows or comparisons, device, options, arguments)
    if device.type == "cpu" and options.batch_size is None:
        print(f"CPU run: batch size {CPU_BATCH_SIZE} instead of the published ones (--batch-size published)")
    print("\n\n".join(map(str, comparisons)) if options.compare else _table(rows))
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = "'list' to see them all, 'all' for the published ones, or any of: " + ", ".join(ARCHITECTURES)
    parser.add_argument("--arch", nargs="+", required=True, metavar="NAME", help=names)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--batch-size",
        type=_batch_size,
        help="a number, or 'published' (the default on CUDA), which is the usual one where none is published",
    )
    parser.add_argument(
        "--size",
        "--image-size",
        type=_positive,
        metavar="N",
        help="height and width of images, or tokens in a sequence; default: see --arch list",
    )
    parser.add_argument("--iterations", type=_positive, default=3, help="timed steps of each model, interleaved")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", choices=["auto", "estimate", "measure"], default="measure")
    parser.add_argument(
        "--solver", nargs="+", default=["optimal"], choices=SOLVERS, metavar="NAME",
        help="a row for each of: " + ", ".join(SOLVERS) + "; budget and overhead hold for 'optimal' alone",
    )  # fmt: skip
    wish = parser.add_mutually_exclusive_group()
    wish.add_argument("--memory-budget", type=_budget, help="bytes, '2GB', '512MiB' or a share of the plain peak")
    wish.add_argument(
        "--max-overhead", type=float,
        help="a share of a plain step; default: the published overhead of the architecture, if there is one",
    )  # fmt: skip
    parser.add_argument(
        "--batch-slices", type=_positive, default=1, help="let stretches run slice by slice: equal up to rounding"
    )
    parser.add_argument(
        "--plot", metavar="DIR", type=Path, help="also draw memory over a step, the frontier and the graph (PNG, SVG)"
    )
    parser.add_argument("--compare", action="store_true", help="beside other ways to save activation memory")
    parser.add_argument(
        "--compile-budgets", nargs="*", type=_share, default=[0.1, 0.3, 0.5, 0.7, 1.0], metavar="SHARE",
        help="activation_memory_budget of torch.compile, for --compare; default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--compile-backend", default="inductor",
        help="of torch.compile, for --compare: 'inductor' (needs a C++ compiler on a CPU) or 'aot_eager'",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="also write the results, with command, versions and machine")
    options = parser.parse_args(arguments)
    if options.arch == ["all"]:
        options.arch = list(PUBLISHED)
    if options.compare and (options.solver, options.batch_slices) != (["optimal"], 1):
        parser.error("--compare runs every solver by itself, and no slices; leave out --solver and --batch-slices")
    if options.compare and (options.memory_budget, options.max_overhead) != (None, None):
        parser.error("--compare plans at the memory and at the overhead of each peer; leave out the wish")
    if "optimal" not in options.solver and (options.memory_budget, options.max_overhead) != (None, None):
        parser.error("--memory-budget and --max-overhead need 'optimal' among the solvers")
    return options


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return number


def _share(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, not {text}")
    return number


def _batch_size(text: str) -> int | str:
    return text if text == "published" else _positive(text)


def _list() -> str:
    header = ["name", "published", "input", "batch size", "description"]
    rows = [
        [name, "yes" if known.published else "no", str(known.input), str(known.batch_size), known.description]
        for name, known in ARCHITECTURES.items()
    ]
    return table(header, rows)


def _batch_size_of(name: str, device: torch.device, options: argparse.Namespace) -> int:
    batch_size = options.batch_size or (CPU_BATCH_SIZE if device.type == "cpu" else "published")
    return ARCHITECTURES[name].batch_size if batch_size == "published" else int(batch_size)


def _build(name: str, device: torch.device, options: argparse.Namespace) -> tuple[torch.nn.Module, torch.Tensor]:
    """The model, its gradients allocated, and a batch."""
    architecture = ARCHITECTURES[name]
    torch.manual_seed(options.seed)
    model = architecture.build().to(device).train()
    return model, architecture.input.sample(_batch_size_of(name, device, options), options.size).to(device)


def _compare(name: str, device: torch.device, options: argparse.Namespace) -> Comparison:
    """Every way to save activation memory, with the same model."""
    model, inputs = _build(name, device, options)
    return compare(
        name,
        ARCHITECTURES[name],
        model,
        inputs,
        seed=options.seed,
        iterations=options.iterations,
        profile=options.profile,
        compile_budgets=options.compile_budgets,
        compile_backend=options.compile_backend,
    )


def _bench(name: str, device: torch.device, options: argparse.Namespace) -> list[Row]:
    """A row for each solver, all with the same model and graph."""
    model, inputs = _build(name, device, options)
    total = 1 + len(options.solver) * (2 + options.iterations) + bool(options.plot)
    with tqdm(total=total, desc=f"{name}: parse", leave=False) as progress:

        def stage(what: str) -> None:
            progress.update()
            progress.set_description(f"{name}: {what}")

        start = time.perf_counter()
        graph = ogc.parse(model, inputs, profile=options.profile)
        parse_seconds = time.perf_counter() - start
        allocate_gradients(model)
        rows, plans = [], {}
        for solver in options.solver:
            row, plans[solver] = _row(name, solver, model, inputs, graph, parse_seconds, options, stage)
            rows.append(row)
        if options.plot:
            stage("pictures")
            _plot(options.plot, name, graph, plans)
        progress.update()
    return rows


def _plot(folder: Path, name: str, graph: ogc.Graph, plans: dict[str, ogc.Plan]) -> None:
    """The first solver's memory over a step and graph, and the frontier with all other solvers' plans."""
    folder.mkdir(parents=True, exist_ok=True)
    first = plans[next(iter(plans))]
    curve = ogc.frontier(graph)
    peers = {solver: (plan.peak_bytes, plan.overhead) for solver, plan in plans.items() if solver != "none"}
    if "optimal" in peers:
        peers = {"this plan": peers.pop("optimal"), **peers}
    for ending in ("png", "svg"):
        first.plot(folder / f"{name}_timeline.{ending}")
        curve.plot(folder / f"{name}_frontier.{ending}", peers=peers)
        first.draw(folder / f"{name}_graph.{ending}")


def _row(
    name: str,
    solver: str,
    model: torch.nn.Module,
    inputs: torch.Tensor,
    graph: ogc.Graph,
    parse_seconds: float,
    options: argparse.Namespace,
    stage: Callable[[str], None],
) -> tuple[Row, ogc.Plan]:
    """Plan, check and time one solver's model beside the plain one."""
    architecture = ARCHITECTURES[name]
    stage(f"solve ({solver})")
    start = time.perf_counter()
    planned, plan = _solve(model, inputs, graph, name, solver, options)
    solve_seconds = time.perf_counter() - start
    at_theirs: ogc.Plan | None = None
    if solver == "optimal" and architecture.published and architecture.is_published(len(inputs), inputs.shape[-1]):
        at_theirs = ogc.solve(graph, memory_budget=architecture.published.theirs * MIB)
    stage("check and memory")
    optimised = ogc.apply(model, planned, plan)
    tolerance = SLICED_TOLERANCE if planned is not graph else 0.0
    checked = _check(model, optimised, inputs, options.seed, tolerance)
    plain_times, ogc_times = [], []
    for number in range(options.iterations):
        stage(f"timed step {number + 1}")
        plain_times.append(timed(model, inputs))
        ogc_times.append(timed(optimised, inputs))
    row = Row(
        arch=name,
        solver=solver,
        device=device_name(inputs.device),
        batch_size=len(inputs),
        input_shape=tuple(inputs.shape),
        plain_bytes=checked.peaks[0],
        ogc_bytes=checked.peaks[1],
        predicted_plain_bytes=plan.plain_peak_bytes,
        predicted_bytes=plan.peak_bytes,
        plain_seconds=median(plain_times),
        ogc_seconds=median(ogc_times),
        predicted_overhead=plan.overhead,
        plain_flops=checked.flops[0],
        ogc_flops=checked.flops[1],
        segments=len(plan.rows),
        recomputed_segments=sum(row[3] == "recomputed" for row in plan.rows),
        parse_seconds=parse_seconds,
        solve_seconds=solve_seconds,
        overhead_at_theirs=at_theirs.overhead if at_theirs else None,
        flops_at_theirs=at_theirs.flops_overhead if at_theirs else None,
        batch_slices=options.batch_slices,
        deviation=checked.deviation,
        published=asdict(architecture.published) if architecture.published else None,
    )
    return row, plan


def _solve(
    model: torch.nn.Module,
    inputs: torch.Tensor,
    graph: ogc.Graph,
    name: str,
    solver: str,
    options: argparse.Namespace,
) -> tuple[ogc.Graph, ogc.Plan]:
    """The plan that the options ask for, and its graph; by default our least peak at the published overhead, if any."""

    def plan(**wish: Any) -> tuple[ogc.Graph, ogc.Plan]:
        if options.batch_slices > 1:
            return ogc.slice_batch(model, inputs, graph, slices=options.batch_slices, **wish)
        return graph, ogc.solve(graph, **wish)

    if solver != "optimal":
        return graph, ogc.solve(graph, solver=solver)
    if options.memory_budget is not None or options.max_overhead is not None:
        return plan(memory_budget=options.memory_budget, max_overhead=options.max_overhead)
    row = ARCHITECTURES[name].published
    if row is None:
        return plan()
    published = limit = row.overhead
    for _ in range(4):  # counted in time and in FLOPs
        found = plan(max_overhead=limit)
        if found[1].flops_overhead <= published:
            break
        limit *= 0.97 * published / found[1].flops_overhead
    return found


@dataclass(frozen=True)
class Checked:
    """Peak bytes and FLOPs of the plain and the optimised step, and the most by which their tensors differ.

    The difference is a share of the tensor's largest entry.
    """

    peaks: tuple[int, ...]
    flops: tuple[int, ...]
    deviation: float


def _check(
    model: torch.nn.Module, optimised: torch.nn.Module, inputs: torch.Tensor, seed: int, tolerance: float
) -> Checked:
    """One step of each from the same state; raises CheckFailed where they differ by more than the tolerance."""
    plain, ours = measure(model, model, inputs, seed), measure(model, optimised, inputs, seed)
    deviation = 0.0
    for name, value in plain.tensors.items():
        other = ours.tensors[name]
        if torch.equal(value, other):
            continue
        distance = (value.double() - other.double()).abs().max().item()
        share = distance / max(value.double().abs().max().item(), 1e-300)
        deviation = max(deviation, share)
        if not share <= tolerance:
            raise CheckFailed(f"{name} differs by at most {distance:.3g}, {share:.3g} of its largest entry")
    return Checked((plain.peak, ours.peak), (plain.flops, ours.flops), deviation)


def _budget(text: str) -> int | float | str:
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text


def _table(rows: list[Row]) -> str:
    header = [
        "arch", "solver", "input", "plain MiB", "ogc MiB", "cut", "plain s", "ogc s", "overhead", "by FLOPs",
        "predicted MiB", "error", "predicted overhead", "segments", "planning s",
        "published: plain", "theirs", "overhead",
    ]  # fmt: skip
    return table(header, [_cells(row) for row in rows])


def _cells(row: Row) -> list[str]:
    return [
        row.arch,
        row.solver,
        "×".join(map(str, row.input_shape)),
        f"{row.plain_bytes / MIB:.1f}",
        f"{row.ogc_bytes / MIB:.1f}",
        f"{row.cut:.1%}",
        f"{row.plain_seconds:.3f}",
        f"{row.ogc_seconds:.3f}",
        f"{row.overhead:.1%}",
        f"{row.flops_overhead:.1%}",
        f"{row.predicted_bytes / MIB:.1f}",
        f"{row.predicted_bytes / row.ogc_bytes - 1:+.2%}",
        f"{row.predicted_overhead:.1%}",
        f"{row.segments}",
        f"{row.parse_seconds + row.solve_seconds:.1f}",
        *_published_cells(row),
    ]


def _published_cells(row: Row) -> list[str]:
    published = row.published
    if published is None:
        return ["-", "-", "-"]
    comparable = (row.input_shape[0], row.input_shape[-1]) == (published["batch_size"], published["image_size"])
    plain = f"{published['plain']}" if comparable else f"{published['plain']} (batch {published['batch_size']})"
    return [plain, f"{published['theirs']}", f"{published['overhead']:.0%}"]


def _write_json(
    path: str,
    results: Sequence[Row] | Sequence[Comparison],
    device: torch.device,
    options: argparse.Namespace,
    arguments: list[str] | None,
) -> None:
    command = shlex.join(["python", "benchmark.py", *(sys.argv[1:] if arguments is None else arguments)])
    data = environment(command, device, options.seed, options.keeps_freed_memory)
    data["rows"] = [asdict(result) for result in results]
    with open(path, "w", encoding="utf-8") as file:
        json.dump(data, file, indent=1)
        file.write("\n")


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def _out_of_memory(name: str, device: torch.device, options: argparse.Namespace) -> str:
    """What would fit, from a plan for a small batch: activations grow with it."""
    architecture, batch_size = ARCHITECTURES[name], _batch_size_of(name, device, options)
    model = architecture.build()
    plan = ogc.solve(ogc.parse(model, architecture.input.sample(2, options.size), profile="estimate"))
    fixed = 2 * sum(p.numel() * p.element_size() for p in model.parameters())
    memory = (
        torch.cuda.get_device_properties(device).total_memory
        if device.type == "cuda"
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    fits = {
        what: max(0, int(2 * (memory - fixed) * 0.9 / peak))
        for what, peak in (("plain", plan.plain_peak_bytes), ("optimised", plan.peak_bytes))
    }
    return (
        f"{name}: out of memory at batch size {batch_size} on {device} ({memory / MIB:.0f} MiB). About "
        f"{fits['plain']} samples would fit the plain model, {fits['optimised']} the optimised one; both are "
        f"run, so try --batch-size {max(1, fits['plain'])}"
    )


if __name__ == "__main__":
    sys.exit(main())
