"""Plain model against optimised model: peak activation memory, step time, equality; beside the paper.

    python benchmark.py --arch resnet101 --device cuda:0
    python benchmark.py --arch resnet50 densenet121 --device cpu --batch-size 8 --json out.json
    python benchmark.py --arch resnet50 --solver optimal chen feng-huang
    python benchmark.py --arch resnet18 --solver optimal chen --plot pictures
    python benchmark.py --arch gpt2_small --compare --size 128
    python benchmark.py --arch resnet50 --device-memory 2GB --optimizer AdamW --loss cross-entropy --largest-batch
    torchrun --nproc-per-node 2 benchmark.py --arch densenet_cifar --device cpu
    python benchmark.py --arch list
    python benchmark.py --suite quick
    python benchmark.py --probe --device cuda:0 --json probe.json

One step is a forward and ``sum().backward()``, or that of a ``--loss``, with the parameters' gradients already
allocated. Memory is the allocator's peak during a step less what was allocated before it. Published figures: Feng &
Huang, "Optimal Gradient Checkpoint Search for Arbitrary Computation Graphs", CVPR 2021. With ``--compare``: other ways
to save activation memory beside ours, see benchmarks/ways.py. With ``--suite``: all committed results again, or the
time that plans promise and steps pay, see benchmarks/suites.py. With ``--probe``: in at most 25 minutes all that is to
be known of a device, see benchmarks/probe. Started by torchrun: on many devices, see benchmarks/devices.py. A row that
fails is reported, the others are measured all the same, and the exit status is not 0.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from benchmarks import devices
from benchmarks.arguments import batch_size, budget, not_negative, optimizer, positive, share
from benchmarks.cases import CASES, PUBLISHED, listed
from benchmarks.losses import LOSSES
from benchmarks.probe import probe
from benchmarks.running import run
from benchmarks.suites import SUITES, make
from ogc.solver import SOLVERS


def main(arguments: list[str] | None = None) -> int:
    options = options_of(arguments)
    command = ["benchmark.py", *(sys.argv[1:] if arguments is None else arguments)]
    if options.probe:
        return probe(torch.device(options.device), options.json, command)
    if options.suite or options.only:
        return make(options.suite or "full", options.only, options.results)
    if options.arch == ["list"]:
        print(listed())
        return 0
    if devices.is_one_of_several():
        return devices.run(options, command)
    return run(options, command)


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    names = "'list' to see them all, 'all' for the published ones, or any of: " + ", ".join(CASES)
    add("--arch", nargs="+", metavar="NAME", help=names)
    add("--suite", choices=SUITES, help="all runs of a list, and the documents made of their results")
    add("--only", nargs="+", metavar="RUN", help="only these runs of the suite, by default of 'full'")
    add(
        "--probe",
        action="store_true",
        help="tests, benchmarks and questions on the device, each by itself; with --json",
    )
    add("--results", type=Path, metavar="DIR", help="where the suite writes; default: where its results belong")
    add("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    add(
        "--batch-size", type=batch_size,
        help="a number, or 'published' (the default on CUDA), which is the usual one where none is published",
    )  # fmt: skip
    add(
        "--size", "--image-size", type=positive, metavar="N",
        help="height and width of images, or tokens in a sequence; default: see --arch list",
    )  # fmt: skip
    add("--iterations", type=not_negative, default=3, help="timed steps of each model, interleaved; 0: none")
    add("--seed", type=int, default=0)
    add("--profile", choices=["auto", "estimate", "measure"], default="measure")
    add(
        "--solver", nargs="+", default=["optimal"], choices=SOLVERS, metavar="NAME",
        help="a row for each of: " + ", ".join(SOLVERS) + "; budget and overhead hold for 'optimal' alone",
    )  # fmt: skip
    goal = parser.add_mutually_exclusive_group()
    goal.add_argument("--memory-budget", type=budget, help="bytes, '2GB', '512MiB' or a share of the plain peak")
    goal.add_argument(
        "--max-overhead", type=float,
        help="a share of a plain step; default: the published overhead of the architecture, if there is one",
    )  # fmt: skip
    goal.add_argument("--device-memory", type=budget, help="of the whole step, such as '8GB'; with --optimizer")
    add("--optimizer", type=optimizer, help="a class of torch.optim, for --device-memory; default: none")
    add("--loss", choices=LOSSES, default="sum", help="what a step ends with; default: %(default)s of all outputs")
    add(
        "--largest-batch",
        action="store_true",
        help="how many samples fit into --device-memory, by each way of training",
    )
    add("--chunks", type=positive, default=1, help="let regions run chunk by chunk: equal up to rounding")
    add("--plot", metavar="DIR", type=Path, help="also draw memory over a step, the frontier and the graph (PNG, SVG)")
    add("--compare", action="store_true", help="beside other ways to save activation memory")
    add(
        "--compile-budgets", nargs="*", type=share, default=[0.1, 0.3, 0.5, 0.7, 1.0], metavar="SHARE",
        help="activation_memory_budget of torch.compile, for --compare; default: %(default)s",
    )  # fmt: skip
    add(
        "--compile-backend", default="inductor",
        help="of torch.compile, for --compare: 'inductor' (needs a C++ compiler on a CPU) or 'aot_eager'",
    )  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="also write the results, with command, versions and machine")
    options = parser.parse_args(arguments)
    _judge(parser, options)
    if options.arch == ["all"]:
        options.arch = list(PUBLISHED)
    return options


def _judge(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Errors of options that do not go together."""
    goals = (options.memory_budget, options.max_overhead, options.device_memory) != (None, None, None)
    if options.largest_batch and options.device_memory is None:
        parser.error("--largest-batch needs --device-memory")
    if sum(map(bool, (options.arch, options.suite or options.only, options.probe))) != 1:
        parser.error("say one of --arch, --suite or --only, and --probe")
    if options.probe and options.json is None:
        parser.error("--probe needs --json, where to write what it finds")
    if options.compare and (options.solver, options.chunks) != (["optimal"], 1):
        parser.error("--compare runs every solver by itself, and no chunks; leave out --solver and --chunks")
    if options.compare and not options.iterations:
        parser.error("--compare verifies by time, too; let --iterations be at least 1")
    if options.compare and goals:
        parser.error("--compare plans at the memory and at the overhead of each peer; leave out the goal")
    if "optimal" not in options.solver and goals:
        parser.error("--memory-budget, --max-overhead and --device-memory need 'optimal' among the solvers")


if __name__ == "__main__":
    sys.exit(main())
