"""Lists of runs that make all results again from nothing, and what runs them: a few at a time, then the documents.

A run is one process that writes one file. ``full`` writes what is committed in ``benchmarks/results``, docs/results.md
and the README's table, in three to five hours on two cores. ``quick`` makes a little of every kind of result in
``build/quick``, in less than ten minutes. ``cuda`` is for a machine with a GPU. ``time`` is the run of ``full`` that
holds promised time against the clock.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Run:
    """Attributes: ``name``; ``arguments`` of Python, without --json; the ``file`` that it writes into the results;
    whether what it says is shown while it runs, or only where it fails; whether it is alone, as what steps take is
    measured.
    """

    name: str
    arguments: str
    file: str
    is_shown: bool = False
    is_alone: bool = False

    def command(self, folder: Path) -> list[str]:
        path = folder / self.file
        shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        return [sys.executable, *shlex.split(self.arguments), "--json", str(shown)]


@dataclass(frozen=True)
class Suite:
    """Attributes: ``runs``, the longest first; how many of those that are not alone run ``at_once``; the ``folder``."""

    runs: tuple[Run, ...]
    at_once: int = 2
    folder: Path = RESULTS


SMALL = "benchmark.py --device cpu --iterations 0 --arch"
PUBLISHED = "benchmark.py --device cpu --iterations 0 --batch-size published --arch"
COMPARE = "benchmark.py --device cpu --iterations 3 --compare --arch"
SOLVERS = "--solver optimal none chen uniform binomial feng-huang"
LARGEST = (
    "benchmark.py --device cpu --device-memory 2GiB --optimizer SGD --loss cross-entropy --largest-batch "
    "--profile estimate --arch"
)
ZOO = "-m benchmarks.zoo --again --seconds 300 --family"

TORCHVISION = """
    alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3 maxvit_t mnasnet1_0
    mobilenet_v2 mobilenet_v3_large mobilenet_v3_small regnet_x_400mf regnet_x_3_2gf regnet_y_400mf regnet_y_3_2gf
    resnet18 resnet34 resnet50 resnet101 resnext50_32x4d shufflenet_v2_x0_5 shufflenet_v2_x1_0 squeezenet1_0
    squeezenet1_1 swin_t swin_v2_t vgg11 vgg11_bn vit_b_16 vit_b_32 wide_resnet50_2 quantized_googlenet
    quantized_inception_v3 quantized_mobilenet_v2 quantized_mobilenet_v3_large quantized_resnet18 quantized_resnet50
    quantized_shufflenet_v2_x1_0 deeplabv3_mobilenet_v3_large deeplabv3_resnet50 fcn_resnet50
    lraspp_mobilenet_v3_large mc3_18 mvit_v1_b r2plus1d_18 r3d_18 s3d swin3d_t raft_small
    fasterrcnn_mobilenet_v3_large_320_fpn fasterrcnn_resnet50_fpn fcos_resnet50_fpn keypointrcnn_resnet50_fpn
    maskrcnn_resnet50_fpn retinanet_resnet50_fpn ssd300_vgg16 ssdlite320_mobilenet_v3_large
"""
"""Every family of torchvision, by its smaller models."""

ON_CUDA = (
    "alexnet vgg11 vgg13 vgg16 vgg19 resnet18 resnet34 resnet50 resnet101 resnet152 densenet121 densenet161 "
    "densenet169 densenet201 inception_v3 nasnet_cifar10 amoebanet_cifar10 darts_cifar10 bert_base gpt2_small"
)
"""The published rows, and two transformers."""

alone = partial(Run, is_alone=True)

TIME = alone("time", "-m benchmarks time --device cpu", "time/cpu.json")

FULL = (
    TIME,
    Run("solvers", f"{SMALL} all {SOLVERS}", "cpu_solvers.json"),
    Run("published_2", f"{PUBLISHED} densenet121 densenet169 densenet161 alexnet vgg11 vgg13", "cpu_published_2.json"),
    Run(
        "published_3", f"{PUBLISHED} vgg16 vgg19 nasnet_cifar10 amoebanet_cifar10 darts_cifar10", "cpu_published_3.json"
    ),
    Run("polished", "-m benchmarks polished", "polished.json"),
    Run("ablation", "-m benchmarks ablation", "ablation.json"),
    Run(
        "published_1",
        f"{PUBLISHED} resnet18 resnet34 resnet50 resnet101 resnet152 inception_v3 densenet201",
        "cpu_published_1.json",
    ),
    Run("largest_resnet101", f"{LARGEST} resnet101", "largest/cpu_resnet101.json"),
    Run("largest_swin_t", f"{LARGEST} swin_t", "largest/cpu_swin_t.json"),
    Run("largest_gpt2_small", f"{LARGEST} gpt2_small --size 512", "largest/cpu_gpt2_small.json"),
    Run("largest_gpt2_small_128", f"{LARGEST} gpt2_small --size 128", "largest/cpu_gpt2_small_128.json"),
    Run("zoo_transformers", f"{ZOO} transformers", "zoo/transformers.json"),
    Run("chunked", f"{PUBLISHED} vgg11 vgg16 --chunks 8", "cpu_chunked.json"),
    Run("chunked_2", f"{PUBLISHED} vgg13 --chunks 8", "cpu_chunked_2.json"),
    alone("logits", "-m benchmarks logits", "logits.json"),
    alone("compiled", "-m benchmarks compiled --rounds 41", "compiled.json"),
    alone("families", "-m benchmarks families --rounds 5", "families.json"),
    alone("sizes", "-m benchmarks sizes", "sizes.json"),
    Run("hollow", "-m benchmarks hollow", "hollow.json"),
    Run("instances", "-m benchmarks instances", "instances.json"),
    Run("layers", "-m benchmarks layers", "layers.json"),
    Run("offloaded", "-m benchmarks offloaded", "offloaded.json"),
    alone(
        "devices",
        "-m torch.distributed.run --nproc-per-node 2 benchmark.py --device cpu --batch-size 8 --arch densenet_cifar",
        "devices.json",
    ),
    Run("zoo_torchvision", f"{ZOO} torchvision {' '.join(TORCHVISION.split())}", "zoo/torchvision.json"),
    alone("compare_resnet50", f"{COMPARE} resnet50 --batch-size 8", "compare/cpu_resnet50.json"),
    Run("zoo_timm", f"{ZOO} timm", "zoo/timm.json"),
    alone("compare_gpt2_small", f"{COMPARE} gpt2_small --batch-size 4 --size 128", "compare/cpu_gpt2_small.json"),
    alone("compare_unet", f"{COMPARE} unet --batch-size 1", "compare/cpu_unet.json"),
    alone("compare_convnext_tiny", f"{COMPARE} convnext_tiny --batch-size 2", "compare/cpu_convnext_tiny.json"),
    Run("zoo_others", f"{ZOO} others", "zoo/others.json"),
    alone("compare_resnet18", f"{COMPARE} resnet18 --batch-size 8", "compare/cpu_resnet18.json"),
    Run("zoo_diffusers", f"{ZOO} diffusers", "zoo/diffusers.json"),
    alone(
        "compare_mobilenet_v3_large",
        f"{COMPARE} mobilenet_v3_large --batch-size 4",
        "compare/cpu_mobilenet_v3_large.json",
    ),
    Run("zoo_peft", f"{ZOO} peft", "zoo/peft.json"),
)

QUICK = (
    Run("compare", f"{COMPARE} resnet18 --batch-size 2 --size 96 --compile-backend aot_eager", "compare/cpu.json"),
    Run("zoo", f"{ZOO} torchvision resnet18 mobilenet_v3_small quantized_resnet18 r3d_18", "zoo/torchvision.json"),
    Run("polished", "-m benchmarks polished resnet18", "polished.json"),
    Run("ablation", "-m benchmarks ablation resnet18", "ablation.json"),
    Run("instances", "-m benchmarks instances vgg16", "instances.json"),
    Run("layers", "-m benchmarks layers 12", "layers.json"),
    Run("published", f"{PUBLISHED} darts_cifar10", "cpu_published.json"),
    Run("solvers", f"{SMALL} resnet18 vgg11 densenet121 {SOLVERS}", "cpu_solvers.json"),
    Run("chunked", f"{SMALL} alexnet --chunks 4", "cpu_chunked.json"),
    Run("logits", "-m benchmarks logits 500 --rounds 1", "logits.json"),
    Run("compiled", "-m benchmarks compiled pointwise --rounds 1", "compiled.json"),
    Run("families", "-m benchmarks families fno_3d --rounds 1", "families.json"),
    Run("sizes", "-m benchmarks sizes messages", "sizes.json"),
    Run("offloaded", "-m benchmarks offloaded unet", "offloaded.json"),
    Run("hollow", "-m benchmarks hollow resnet18", "hollow.json"),
    Run("largest", f"{LARGEST} resnet18 --size 64".replace("2GiB", "128MiB"), "largest/cpu.json"),
    Run("time", "-m benchmarks time --device cpu --seconds 2 small_blocks lstm", "time/cpu.json"),
)

CUDA = (
    Run(
        "published",
        f"benchmark.py --device cuda:0 --iterations 7 --batch-size published --arch {ON_CUDA}",
        "cuda_published.json",
    ),
    Run(
        "compare",
        "benchmark.py --device cuda:0 --compare --arch resnet50 densenet121 gpt2_small unet",
        "compare/cuda.json",
    ),
    Run("time", "-m benchmarks time --device cuda:0 --batch-factor 32", "time/cuda.json"),
)

SUITES = {
    "quick": Suite(QUICK, folder=ROOT / "build" / "quick"),
    "full": Suite(FULL),
    "cuda": Suite(CUDA, at_once=1),
    "time": Suite((replace(TIME, is_shown=True),), at_once=1),
}


# -- running them ------------------------------------------------------------------------------------------------


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
    from .tables import write

    for path in write(folder, name):
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
