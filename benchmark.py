"""Plain model against optimised model: peak activation memory, step time, equality; beside the paper.

    python benchmark.py --arch resnet101 --device cuda:0
    python benchmark.py --arch resnet50 densenet121 --device cpu --batch-size 8 --json out.json
    python benchmark.py --arch resnet50 --solver optimal chen feng-huang
    python benchmark.py --arch resnet18 --solver optimal chen --plot pictures

One step is a forward, ``sum().backward()``, with the parameters' gradients already allocated. Memory is the
allocator's peak during a step less what was allocated before it. Published figures: Feng & Huang, "Optimal
Gradient Checkpoint Search for Arbitrary Computation Graphs", CVPR 2021.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import platform
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

import ogc
from networks import NETWORKS
from ogc.allocator import peak_bytes
from ogc.graph import table
from ogc.solver import SOLVERS

MIB = 2**20
CPU_BATCH_SIZE = 4

SLICED_TOLERANCE = 1e-2
"""Most by which a tensor may differ from the plain model's where the batch is sliced, relative to its largest entry."""


@dataclass(frozen=True)
class Published:
    """A row of the paper's table: sizes in MiB, overhead as a share of the plain step."""

    batch_size: int
    image_size: int
    plain: int
    theirs: int
    overhead: float


ARCHITECTURES = {
    "alexnet": Published(1024, 224, 4955, 3287, 0.34),
    "vgg11": Published(64, 224, 3577, 2781, 0.34),
    "vgg13": Published(64, 224, 5136, 3565, 0.33),
    "vgg16": Published(64, 224, 5136, 3565, 0.32),
    "vgg19": Published(64, 224, 5189, 3565, 0.33),
    "resnet18": Published(256, 224, 5635, 3677, 0.30),
    "resnet34": Published(128, 224, 4079, 1838, 0.35),
    "resnet50": Published(64, 224, 5323, 1973, 0.31),
    "resnet101": Published(32, 224, 3934, 1024, 0.35),
    "resnet152": Published(16, 224, 2767, 526, 0.37),
    "densenet121": Published(32, 224, 4027, 898, 0.34),
    "densenet161": Published(16, 224, 3751, 666, 0.36),
    "densenet169": Published(32, 224, 4862, 897, 0.32),
    "densenet201": Published(16, 224, 3146, 474, 0.53),
    "inception_v3": Published(32, 300, 3074, 881, 0.29),
    "nasnet_cifar10": Published(64, 32, 5832, 1129, 0.31),
    "amoebanet_cifar10": Published(64, 32, 4944, 1058, 0.36),
    "darts_cifar10": Published(64, 32, 5627, 1115, 0.55),
}


@dataclass(frozen=True)
class Row:
    """One architecture's result with one solver. Bytes, seconds, shares of the plain step."""

    arch: str
    solver: str
    device: str
    batch_size: int
    image_size: int
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
    published: dict[str, Any]

    @property
    def cut(self) -> float:
        return 1 - self.ogc_bytes / self.plain_bytes

    @property
    def overhead(self) -> float:
        return self.ogc_seconds / self.plain_seconds - 1

    @property
    def flops_overhead(self) -> float:
        return self.ogc_flops / self.plain_flops - 1


class CheckFailed(Exception):
    """The optimised model computed something else than the plain one."""


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
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
            from ogc import plots  # noqa: F401
        except ogc.DependencyError as error:
            print(f"--plot: {error}", file=sys.stderr)
            return 2
    torch.use_deterministic_algorithms(True)
    rows = []
    for name in tqdm(options.arch, desc="architectures", disable=len(options.arch) == 1):
        try:
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
            _write_json(options.json, rows, device, options, arguments)
    if device.type == "cpu" and options.batch_size is None:
        print(f"CPU run: batch size {CPU_BATCH_SIZE} instead of the published ones (--batch-size published)")
    print(_table(rows))
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = "'all', or any of: " + ", ".join(ARCHITECTURES)
    parser.add_argument("--arch", nargs="+", required=True, metavar="NAME", help=names)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-size", type=_batch_size, help="a number, or 'published' (the default on CUDA)")
    parser.add_argument("--image-size", type=_positive, help="default: the published one")
    parser.add_argument("--iterations", type=_positive, default=3, help="timed steps of each model, interleaved")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", choices=["auto", "estimate", "measure"], default="measure")
    parser.add_argument(
        "--solver", nargs="+", default=["optimal"], choices=SOLVERS, metavar="NAME",
        help="a row for each of: " + ", ".join(SOLVERS) + "; budget and overhead hold for 'optimal' alone",
    )  # fmt: skip
    wish = parser.add_mutually_exclusive_group()
    wish.add_argument("--memory-budget", type=_budget, help="bytes, '2GB', '512MiB' or a share of the plain peak")
    wish.add_argument("--max-overhead", type=float, help="default: the published overhead of the architecture")
    parser.add_argument(
        "--batch-slices", type=_positive, default=1, help="let stretches run slice by slice: equal up to rounding"
    )
    parser.add_argument(
        "--plot", metavar="DIR", type=Path, help="also draw memory over a step, the frontier and the graph (PNG, SVG)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the results, with command, versions and machine")
    options = parser.parse_args(arguments)
    if options.arch == ["all"]:
        options.arch = list(ARCHITECTURES)
    if "optimal" not in options.solver and (options.memory_budget, options.max_overhead) != (None, None):
        parser.error("--memory-budget and --max-overhead need 'optimal' among the solvers")
    return options


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return number


def _batch_size(text: str) -> int | str:
    return text if text == "published" else _positive(text)


def _input_size(name: str, device: torch.device, options: argparse.Namespace) -> tuple[int, int]:
    published = ARCHITECTURES[name]
    batch_size = options.batch_size or (CPU_BATCH_SIZE if device.type == "cpu" else "published")
    return (
        published.batch_size if batch_size == "published" else int(batch_size),
        options.image_size or published.image_size,
    )


def _bench(name: str, device: torch.device, options: argparse.Namespace) -> list[Row]:
    """A row for each solver, all with the same model and graph."""
    batch_size, image_size = _input_size(name, device, options)
    torch.manual_seed(options.seed)
    model = _build(name).to(device).train()
    images = torch.randn(batch_size, 3, image_size, image_size, device=device)
    total = 1 + len(options.solver) * (2 + options.iterations) + bool(options.plot)
    with tqdm(total=total, desc=f"{name}: parse", leave=False) as progress:

        def stage(what: str) -> None:
            progress.update()
            progress.set_description(f"{name}: {what}")

        start = time.perf_counter()
        graph = ogc.parse(model, images, profile=options.profile)
        parse_seconds = time.perf_counter() - start
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        rows, plans = [], {}
        for solver in options.solver:
            row, plans[solver] = _row(name, solver, model, images, graph, parse_seconds, options, stage)
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
    images: torch.Tensor,
    graph: ogc.Graph,
    parse_seconds: float,
    options: argparse.Namespace,
    stage: Callable[[str], None],
) -> tuple[Row, ogc.Plan]:
    """Plan, check and time one solver's model beside the plain one."""
    device, batch_size, image_size = images.device, images.shape[0], images.shape[-1]
    stage(f"solve ({solver})")
    start = time.perf_counter()
    planned, plan = _solve(model, images, graph, name, solver, options)
    solve_seconds = time.perf_counter() - start
    at_theirs: ogc.Plan | None = None
    if solver == "optimal" and _is_published(name, batch_size, image_size):
        at_theirs = ogc.solve(graph, memory_budget=ARCHITECTURES[name].theirs * MIB)
    stage("check and memory")
    optimised = ogc.apply(model, planned, plan)
    tolerance = SLICED_TOLERANCE if planned is not graph else 0.0
    checked = _check(model, optimised, images, options.seed, tolerance)
    plain_times, ogc_times = [], []
    for number in range(options.iterations):
        stage(f"timed step {number + 1}")
        plain_times.append(_timed(model, images, device))
        ogc_times.append(_timed(optimised, images, device))
    row = Row(
        arch=name,
        solver=solver,
        device=_device_name(device),
        batch_size=batch_size,
        image_size=image_size,
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
        published=asdict(ARCHITECTURES[name]),
    )
    return row, plan


def _solve(
    model: torch.nn.Module,
    images: torch.Tensor,
    graph: ogc.Graph,
    name: str,
    solver: str,
    options: argparse.Namespace,
) -> tuple[ogc.Graph, ogc.Plan]:
    """The plan that the options ask for, and its graph; by default our least peak at the published overhead."""

    def plan(**wish: Any) -> tuple[ogc.Graph, ogc.Plan]:
        if options.batch_slices > 1:
            return ogc.slice_batch(model, images, graph, slices=options.batch_slices, **wish)
        return graph, ogc.solve(graph, **wish)

    if solver != "optimal":
        return graph, ogc.solve(graph, solver=solver)
    if options.memory_budget is not None or options.max_overhead is not None:
        return plan(memory_budget=options.memory_budget, max_overhead=options.max_overhead)
    published = limit = ARCHITECTURES[name].overhead
    for _ in range(4):  # counted in time and in FLOPs
        found = plan(max_overhead=limit)
        if found[1].flops_overhead <= published:
            break
        limit *= 0.97 * published / found[1].flops_overhead
    return found


def _is_published(name: str, batch_size: int, image_size: int) -> bool:
    published = ARCHITECTURES[name]
    return (batch_size, image_size) == (published.batch_size, published.image_size)


def _build(name: str) -> torch.nn.Module:
    if name in NETWORKS:
        return NETWORKS[name]()
    import torchvision

    keywords = {"init_weights": True} if name == "inception_v3" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torchvision.models.get_model(name, weights=None, **keywords)


def _step(model: torch.nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    """One forward and backward; the outputs, detached."""
    result = model(images)
    outputs = [result] if isinstance(result, torch.Tensor) else list(result)
    sum(output.sum() for output in outputs).backward()  # type: ignore[union-attr]
    return [output.detach() for output in outputs]


@dataclass(frozen=True)
class Checked:
    """Peak bytes and FLOPs of the plain and the optimised step, and the most by which their tensors differ.

    The difference is a share of the tensor's largest entry.
    """

    peaks: tuple[int, ...]
    flops: tuple[int, ...]
    deviation: float


def _check(
    model: torch.nn.Module, optimised: torch.nn.Module, images: torch.Tensor, seed: int, tolerance: float
) -> Checked:
    """One step of each from the same state; raises CheckFailed where they differ by more than the tolerance."""
    device = images.device
    buffers = [buffer.clone() for buffer in model.buffers()]
    if device.type == "cuda":
        _step(model, images)  # libraries take their workspaces
    found, peaks, flops = [], [], []
    for candidate in (model, optimised):
        _restore(model, buffers)
        torch.manual_seed(seed)
        outputs: list[torch.Tensor] = []
        counter = FlopCounterMode(display=False)
        with counter:
            peaks.append(peak_bytes(lambda: outputs.extend(_step(candidate, images)), device))  # noqa: B023
        flops.append(counter.get_total_flops())
        found.append(dict(_everything(model, outputs)))
    plain, ours = found
    deviation = 0.0
    for name, value in plain.items():
        if torch.equal(value, ours[name]):
            continue
        distance = (value.double() - ours[name].double()).abs().max().item()
        share = distance / max(value.double().abs().max().item(), 1e-300)
        deviation = max(deviation, share)
        if not share <= tolerance:
            raise CheckFailed(f"{name} differs by at most {distance:.3g}, {share:.3g} of its largest entry")
    return Checked(tuple(peaks), tuple(flops), deviation)


def _restore(model: torch.nn.Module, buffers: list[torch.Tensor]) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()
    for buffer, copy in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(copy)


def _everything(model: torch.nn.Module, outputs: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((f"output {number}", output) for number, output in enumerate(outputs))
    yield from ((f"gradient of {name}", p.grad.clone()) for name, p in model.named_parameters() if p.grad is not None)
    yield from ((f"buffer {name}", buffer.clone()) for name, buffer in model.named_buffers())
    yield "random state", torch.get_rng_state()


def _budget(text: str) -> int | float | str:
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text


def _timed(model: torch.nn.Module, images: torch.Tensor, device: torch.device) -> float:
    synchronize: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    _step(model, images)
    synchronize()
    return time.perf_counter() - start


def _table(rows: list[Row]) -> str:
    header = [
        "arch", "solver", "batch", "plain MiB", "ogc MiB", "cut", "plain s", "ogc s", "overhead", "by FLOPs",
        "predicted MiB", "error", "predicted overhead", "segments", "planning s",
        "published: plain", "theirs", "overhead",
    ]  # fmt: skip
    return table(header, [_cells(row) for row in rows])


def _cells(row: Row) -> list[str]:
    published = row.published
    comparable = _is_published(row.arch, row.batch_size, row.image_size)
    return [
        row.arch,
        row.solver,
        f"{row.batch_size}",
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
        f"{published['plain']}" if comparable else f"{published['plain']} (batch {published['batch_size']})",
        f"{published['theirs']}",
        f"{published['overhead']:.0%}",
    ]


def _write_json(
    path: str, rows: list[Row], device: torch.device, options: argparse.Namespace, arguments: list[str] | None
) -> None:
    data = {
        "command": shlex.join(["python", "benchmark.py", *(sys.argv[1:] if arguments is None else arguments)]),
        "versions": {"ogc": ogc.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": {"device": _device_name(device), "cores": os.cpu_count(), "system": platform.system()},
        "seed": options.seed,
        "rows": [asdict(row) for row in rows],
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump(data, file, indent=1)
        file.write("\n")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def _out_of_memory(name: str, device: torch.device, options: argparse.Namespace) -> str:
    """What would fit, from a plan for a small batch: activations grow with it."""
    batch_size, image_size = _input_size(name, device, options)
    model = _build(name)
    plan = ogc.solve(ogc.parse(model, torch.randn(2, 3, image_size, image_size), profile="estimate"))
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
