"""One experiment: networks by many ways, timed in turn, or questions about plans without timing.

    OMP_NUM_THREADS=1 python -m benchmarks time --json out.json
    python -m benchmarks time resnet50 small_blocks --device cuda:0
    python -m benchmarks families fno_3d --rounds 1

All ways to run a network take turns, on one thread, in CPU seconds of the process (on CUDA in seconds of the wall,
synchronized); paid is the median over the rounds of the time over that of the plain step in the same round, less 1. The
file has a network's rows as soon as its rounds are over, a picture of ``time`` lies beside it, and ``--resume`` goes on
where the same command was interrupted. A row that fails is reported and written with its reason, the others are
measured all the same, and the exit status is not 0.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch

import ogc

from . import ablation, doors, hollow, instances, layers, offloaded, polished, sizes, summaries
from .arguments import positive
from .experiments import EXPERIMENTS, NOT_INSTALLED, TINY, Experiment, measured
from .items import items_of
from .measuring import clock_of, deterministic, give_back_freed_memory, keep_freed_memory, one_thread
from .results import Results, code_digest, device_name, environment, plain_progress, quiet, refusal_of
from .row import Data, Row
from .running import refused
from .timing import draw, findings, summary
from .trial import Trial

QUESTIONS: dict[str, tuple[Sequence[str], Callable[[str, Results], None], Callable[[Sequence[Data]], str]]] = {
    "ablation": (list(ablation.NETWORKS), ablation.add_rows, summaries.ablation),
    "doors": (doors.NETWORKS, doors.add_row, summaries.doors),
    "hollow": (hollow.NAMES, hollow.add_row, summaries.predicted),
    "instances": (list(instances.INSTANCES), instances.add_row, summaries.instances),
    "layers": (layers.LAYERS, layers.add_row, summaries.layers),
    "offloaded": (list(offloaded.NETWORKS), offloaded.add_row, summaries.offloaded),
    "polished": (list(polished.NETWORKS), polished.add_rows, summaries.polished),
    "sizes": (list(sizes.NETWORKS), sizes.add_row, summaries.sizes),
}
"""Of plans, without timing: the networks, what adds their rows, and the table of these."""


def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else list(arguments)
    given = options_of(words)
    is_time = given.experiment == "time"
    device = torch.device(given.device or ("cuda:0" if is_time and torch.cuda.is_available() else "cpu"))
    experiment = EXPERIMENTS.get(given.experiment)
    known = list(experiment.sizes if experiment else QUESTIONS[given.experiment][0])
    if refusal := refusal_of([n for n in given.names if not n.isdigit()], known, device):
        return refused(refusal)
    if given.resume and not given.json:
        return refused("--resume goes on with the file of --json, which is not given")
    if given.resume and not experiment:
        return refused(f"{given.experiment} takes minutes; leave --resume out")
    keeps = device.type == "cuda" or (is_time and keep_freed_memory())
    with quiet(), one_thread(), plain_progress(), deterministic(device) if is_time else nullcontext():
        command = ["-m", "benchmarks", *(word for word in words if word != "--resume")]
        results = Results(given.json, {**environment(command, device, 0, keeps), "code": code_digest()})
        if given.resume and (refusal := results.resume(_incomplete)):
            return refused(refusal)
        for name in given.names or known:
            if name in results:
                continue
            give_back_freed_memory()
            if experiment:
                results.tried(name, partial(_measure, name, experiment, given, device, results))
            else:
                results.tried(name, partial(QUESTIONS[given.experiment][1], name, results))
    print(results)
    if is_time:
        _conclude(given, results)
    elif not experiment:
        print(QUESTIONS[given.experiment][2]([{"rows": results.rows}]))
    return results.status


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("experiment", choices=[*EXPERIMENTS, *QUESTIONS])
    add("names", nargs="*", metavar="NETWORK", help="default: all of the experiment's; of logits, numbers of words")
    add("--json", type=Path, metavar="FILE", help="also write the rows, with command, versions and machine")
    add("--resume", action="store_true", help="measure only what FILE, begun by the same command, lacks or failed")
    add("--device", help="default: cpu, but for time a GPU if there is one")
    add("--profile", choices=["auto", "estimate", "measure"], default="auto", help="how graphs are weighed")
    add("--batch-factor", type=positive, default=1, metavar="N", help="more samples, for a large device")
    add("--rounds", type=positive, help="how often each way is timed at least")
    add("--seconds", type=float, help="more rounds until these are over")
    return parser.parse_args(arguments)


def _measure(
    name: str, experiment: Experiment, given: argparse.Namespace, device: torch.device, results: Results
) -> None:
    """Rows of one network, and what single items cost where it is the network for that."""
    name = f"{int(name):,} words" if name.isdigit() else name
    case_name, batch_size, size = experiment.sizes.get(name, (name.replace(",", "").split()[0], 2, None))
    case = experiment.case_of(case_name)
    if importlib.util.find_spec(case.package) is None:
        reason = f"{case.package} is not installed"
        results.add(Row(name, NOT_INSTALLED, device_name(device), reason=reason))
        return
    trial = Trial(
        name, case, device, results, batch_size=batch_size * given.batch_factor, size=size, profile=given.profile,
        loss_of=partial(experiment.loss, case_name),
    )  # fmt: skip
    ways = list(measured(trial, experiment.ways))
    rounds = given.rounds or experiment.rounds
    seconds = experiment.seconds if given.seconds is None else given.seconds
    rows = trial.timed(ways, rounds, seconds, clock_of(device), experiment.has_twin)
    trial.progress.close()
    results.add(*rows)
    if given.experiment == "time" and name == TINY:
        results.data["items"] = items_of(trial, rounds, seconds)
        results.write()


def _incomplete(rows: Sequence[Row], found: Data) -> set[str]:
    """Networks that failed, were not installed, or lack what single items cost."""
    missing = {row.arch for row in rows if row.failed or row.way == NOT_INSTALLED}
    return missing if "items" in found else {*missing, TINY}


def _conclude(given: argparse.Namespace, results: Results) -> None:
    """What misses the aims; and the picture, if anything was measured and matplotlib is there."""
    rows = [row for row in results.rows if isinstance(row, Row)]
    print(summary(findings(rows, results.data.get("items"))))
    if given.json and any(row.promised is not None for row in rows):
        try:
            draw(rows, given.json.with_name(f"{given.json.stem}_promised_paid.svg"))
        except ogc.DependencyError as error:
            print(f"no picture: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
