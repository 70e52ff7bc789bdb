"""Writes docs/results.md and the documents' other tables from benchmarks/results: ``python -m benchmarks.tables``."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean

from . import summaries
from .row import Data, Row
from .suites import RESULTS, ROOT, SUITES
from .summaries import cut, in_order, mib, ratio, rows_of, table, theirs
from .timing import over_blocks

START, END = "<!-- results -->\n", "<!-- end of results -->"


def files(pattern: str, folder: Path = RESULTS) -> list[Data]:
    """The committed files whose paths in the folder match, with their paths."""
    found = [(path.relative_to(folder).as_posix(), path) for path in sorted(folder.glob(pattern))]
    return [{**json.loads(path.read_text(encoding="utf-8")), "file": name} for name, path in found]


def rows(pattern: str = "cpu_published*.json") -> list[Row]:
    """Those of committed files, in the order of the published table's families."""
    return in_order(files(pattern))


IN_README = ("densenet201", "inception_v3", "nasnet_cifar10", "resnet50", "resnet152", "vgg16")
"""One of each family, and the deepest."""


def markdown() -> str:
    """The README's table and what it was measured with."""
    header = "model | batch | plain MiB | ogc MiB | cut | recomputed | Feng & Huang 2021 | its overhead"
    cells = [
        [
            *(row.arch, row.input_shape[0], mib(row.plain_bytes), mib(row.peak_bytes), cut(row)),
            *(f"{row.promised:.0%}", f"{theirs(row)} MiB", f"{row.published['overhead']:.0%}"),
        ]
        for row in rows()
        if row.arch in IN_README and row.published
    ]
    return (
        f"{table(header, cells)}\nPeaks of activation memory in a step, {_devices(rows())}: the plain model's, and our "
        "lowest within the published overhead. *Recomputed* is the time of recomputation over a plain step's. Over "
        f"{len(rows())} networks our peak is {ratio(rows()):.2f} of the published one (geometric mean).{_on_gpus()}"
        f"{_at_small_overheads()} "
        "[All results](docs/results.md): other tools and solvers, time promised and paid, hundreds of models, and the "
        "commands.\n"
    )


def _on_gpus() -> str:
    found = [row for row in rows("cuda_published*.json") if row.published]
    if not found:
        return ""
    devices = " and ".join(sorted({row.device for row in found}))
    beside = ""
    if over := over_blocks(_timed_on_gpus()):
        mean = geometric_mean(over.values())
        beside = f"; in as much memory as checkpointed blocks, our plans add {mean:.2f} of the time that these add"
    return (
        f" On an {devices} it is [{ratio(found):.2f}](docs/cuda.md), and measured peaks are the promised ones{beside}."
    )


def _at_small_overheads() -> str:
    means = summaries.family_means(files("families.json")).values()
    told = ", and by ".join(f"{-share:.0%} where a step takes {paid:.0%} longer" for share, paid in (*means,)[:2])
    return f" In the mean of eight families of models, memory falls by {told}." if told else ""


def _devices(found: Sequence[Row]) -> str:
    return ", ".join(sorted({row.device.replace("cpu", "on a CPU") for row in found}))


def inserted(text: str, *tables: str) -> str:
    """A page with the tables in their places, in this order."""
    before, *places = text.split(START)
    each = zip(tables, places, strict=True)
    return before + "".join(f"{START}{table}{END}{place.split(END)[1]}" for table, place in each)


NEW = (
    *("Against the published figures", "How good plans are", "Equal layers", "At small overheads"),
    "Time: promised and paid",
)
BEFORE = f"By an earlier search: all but *{'*, *'.join(NEW)}*."
"""What is not yet made again by the search of today, which needs no more memory or time."""


def document(folder: Path = RESULTS, suite: str = "full") -> str:
    """docs/results.md, whole: of results that this suite makes, or the one for CUDA."""
    parts = [(title, text, writer, files(pattern, folder)) for title, pattern, text, writer in PARTS]
    common = _common_versions([run for *_, runs in parts for run in runs])
    machines = list(dict.fromkeys(_machine(run) for *_, runs in parts for run in runs))
    lines = [
        "# Results",
        "",
        "By `python -m benchmarks.tables` from the rows in `benchmarks/results`.",
        f"`{_command(suite)}` makes all again, with what stands below a section that one.",
        "Memory is the allocator's peak over one step (forward, `sum().backward()`, gradients already there) above",
        "what was allocated before it, in MiB. *More FLOPs* are those of the whole step, by",
        "PyTorch's counter; *recomputed* is the simulator's share of a plain step's time. In every row outputs,",
        "gradients, buffers and the random stream were compared with the plain model's, bit by bit unless it says",
        "otherwise.",
        "",
        _cuda([run for *_, runs in parts for run in runs]),
        *([f"All on {machines[0]}, by {_versions(common)}."] if len(machines) == 1 else []),
        *([BEFORE] if folder == RESULTS else []),
        "",
    ]
    for title, text, writer, runs in parts:
        if not runs and title.endswith("on CUDA"):
            continue
        lines += [f"## {title}", "", text, "", writer(runs) or "Not measured yet.\n"]
        left_out = common if len(machines) == 1 else {}
        made_by = _made_by(runs, suite, len(machines) > 1, left_out).replace(f"`{_command(suite)} ", "`")
        lines += [*_notes(runs), made_by, ""] if runs else []
    return "\n".join(lines).rstrip() + "\n"


def _cuda(runs: Sequence[Data]) -> str:
    devices = {row["device"] for run in runs for row in run["rows"] if "device" in row}
    devices |= {run["machine"]["device"] for run in runs if isinstance(run.get("machine"), dict)}
    others = sorted(devices - {"cpu"})
    return f"Measured on {', '.join(['CPU', *others])}." if others else "Measured on CPUs; [on a GPU](cuda.md)."


def _notes(runs: Sequence[Data]) -> list[str]:
    """Rows that failed, and tensors that were not compared."""
    failed = [f"* {failure['name']} failed: {failure['reason']}" for run in runs for failure in run.get("failed", [])]
    unrepeatable = [
        f"* {row['arch']}: {len(row['unrepeatable'])} tensors differ between two plain steps and were not compared"
        for run in runs
        for row in run["rows"]
        if row.get("unrepeatable")
    ]
    return [*failed, *unrepeatable, ""] if failed or unrepeatable else []


def _command(suite: str) -> str:
    return f"python benchmark.py --suite {suite}"


def _common_versions(runs: Sequence[Data]) -> dict[str, str]:
    """What all were made with, but for Python."""
    every = [{*run["versions"].items()} for run in runs]
    return {name: found for name, found in sorted(set.intersection(*every)) if name != "python"} if every else {}


def _versions(found: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _made_by(runs: Sequence[Data], suite: str, names_machines: bool, left_out: Container[str] = ()) -> str:
    """The command that makes the files again, and what they were measured with."""
    told = []
    for name in dict.fromkeys((suite, "cuda")):
        names = {run.file: run.name for run in SUITES[name].runs}
        if known := [names[run["file"]] for run in runs if run["file"] in names]:
            told.append(f"`{_command(name)} --only {' '.join(known)}`")
    versions: dict[str, list[str]] = {}
    for run in runs:
        for name, version in run["versions"].items():
            versions.setdefault(name, []).append(version)
    shown = ((name, found) for name, found in versions.items() if name != "python" and name not in left_out)
    told += [f"{name} {', '.join(dict.fromkeys(found))}" for name, found in shown]
    told += dict.fromkeys(_machine(run) for run in runs if names_machines)
    return f"{'; '.join(told)}."


def _machine(run: Data) -> str:
    machine = run["machine"]
    if not isinstance(machine, dict):  # an earlier form
        machine = {"device": "cpu", **{key: run[key] for key in ("cores", "threads") if key in run}}
    threads = machine.get("threads")
    said = "" if threads is None else f", {threads} thread{'s' * (threads != 1)}"
    return f"{machine['device']}, {machine['cores']} cores{said}"


PARTS: tuple[tuple[str, str, str, Callable[[Sequence[Data]], str]], ...] = (
    (
        "Against the published figures",
        "cpu_published*.json",
        "Feng & Huang's eighteen rows (CVPR 2021) at their batch sizes: our least peak within their overhead, theirs "
        "measured on a GPU, ours in FLOPs or in simulated time, whichever is more. Last: what "
        "our fastest plan within the published memory recomputes.",
        summaries.published,
    ),
    (
        "How good plans are",
        "polished.json",
        "Plans of the default effort beside the best that all six goals together find with more moves: in step time "
        "within a budget, else in peak. *Proven*: at most so far from any plan. Times are estimated.",
        summaries.polished,
    ),
    (
        "Equal layers",
        "layers.json",
        "A Llama of width 128 on 4×256 tokens, at +10%; CPU seconds.",
        summaries.layers,
    ),
    (
        "Solvers side by side",
        "cpu_solvers.json",
        "Peak and more FLOPs of the same networks at batch 4, where single operations bound it; `optimal` is within "
        "the published overhead.",
        summaries.solvers,
    ),
    (
        "Other tools side by side",
        "compare/cpu*.json",
        "Of `--compare`: the way people save activation memory that peaks least, the plan of ours with no more FLOPs "
        "that peaks least, and our least peak; with step times over a plain step's.",
        summaries.compared,
    ),
    (
        "In chunks of the batch",
        "cpu_chunked*.json",
        "With `chunks=`, where single operations bound the peak. The last column is a share of a "
        "tensor's largest entry.",
        lambda runs: summaries.chunked(runs, rows()),
    ),
    (
        "Where logits are the widest tensor",
        "logits.json",
        "A Llama of 8 layers and width 256, with labels, on 2×512 tokens: the peak, and what a step paid (a plan "
        'promised). Chunks are an eighth of the tokens (`outputs="loss"`); `linear_cross_entropy` is PyTorch\'s own.',
        summaries.side_by_side,
    ),
    (
        "At small overheads",
        "families.json",
        "Eight families of models (those of HiRemate, ICML 2025, which reports 50 to 70 % less at 10 to 15 %), by the "
        "overhead that a plan may promise: the peak, and what a step paid. U-Net and FNO are bound by their widest "
        "operations, GPT-2 by its logits.",
        summaries.families,
    ),
    (
        "What compiles",
        "compiled.json",
        "torch.compile, with its own budgets, beside plans for half of the plain peak, as they are and compiled. Where "
        "other rounding flips a ReLU, gradients differ by more.",
        summaries.side_by_side,
    ),
    (
        "The largest batch",
        "largest/cpu*.json",
        "What fits into so much memory, of a step with SGD and cross-entropy: the plain model, "
        "`torch.utils.checkpoint` around every block, and ours by how much more time a plan may promise. In brackets: "
        "MiB by the allocator; how much longer a sample takes.",
        summaries.largest,
    ),
    (
        "What each part of the search gains",
        "ablation.json",
        "How much higher the allocator's peak is without it: least to most, median. The last row: the best of six "
        "other orders.",
        summaries.ablation,
    ),
    (
        "Other people's models",
        "zoo/*.json",
        "The least peak of models built from their configurations, with small inputs; three training steps compared "
        "bit by bit. *Plain cannot*: the plain model does not train, or differs from itself.",
        summaries.zoo,
    ),
    (
        "Time: promised and paid",
        "time/cpu*.json",
        "Shares of the plain step: CPU seconds, all ways in turn, the median of ratios within a round. *Blocks* and "
        "*selective*: torch's checkpoints on every block.",
        summaries.timing,
    ),
    (
        "Other tools on CUDA",
        "compare/cuda*.json",
        "By `python benchmark.py --suite cuda --only compare`.",
        summaries.compared,
    ),
)
"""Title, files, what they are, and who writes the table."""


def write(folder: Path = RESULTS, suite: str = "full") -> Iterable[Path]:
    """The documents, and where they are: beside the results if these are not the committed ones."""
    if folder != RESULTS:
        (folder / "results.md").write_text(document(folder, suite), encoding="utf-8")
        return [folder / "results.md"]
    results = ROOT / "docs" / "results.md"
    results.write_text(document(), encoding="utf-8")
    pages = {
        ROOT / "docs" / "cuda.md": on_gpus(),
        ROOT / "docs" / "devices.md": (on_many_devices(),),
        ROOT / "docs" / "training.md": (of_many_sizes(),),
        ROOT / "docs" / "offload.md": (with_offloads(),),
    }
    if rows():  # without one every run of it failed
        pages[ROOT / "README.md"] = (markdown(),)
    for page, tables in pages.items():
        page.write_text(inserted(page.read_text(encoding="utf-8"), *tables), encoding="utf-8")
    return [results, *pages]


def on_gpus() -> tuple[str, ...]:
    """The tables of docs/cuda.md: least peaks, others beside, what is predicted, and published budgets."""
    measured = files("cuda_published*.json")
    made_by = f"\n{_made_by(measured, 'cuda', True)}\n" if measured else "Not measured yet.\n"
    timed = _timed_on_gpus()
    beside = summaries.beside_others(timed) if timed else "Not measured yet.\n"
    budgets = summaries.instances(files("instances.json"))
    return summaries.on_cuda(measured) + made_by, beside, summaries.predicted(files("hollow.json")), budgets


def on_many_devices() -> str:
    return summaries.on_many_devices(files("devices.json"))


def of_many_sizes() -> str:
    return summaries.sizes(files("sizes.json"))


def with_offloads() -> str:
    return summaries.offloaded(files("offloaded.json"))


def _timed_on_gpus() -> list[Row]:
    return rows_of(files("time/cuda*.json"))


if __name__ == "__main__":
    write()
