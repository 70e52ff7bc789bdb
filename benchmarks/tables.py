"""Writes docs/results.md and the README's table from benchmarks/results: ``python -m benchmarks.tables``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
START, END = "<!-- results -->\n", "<!-- end of results -->"
MIB = 2**20

Data = dict[str, Any]


def files(pattern: str, folder: Path = RESULTS) -> list[Data]:
    """The committed files whose names match, with their names."""
    paths = sorted(folder.glob(pattern))
    return [{"file": path.name, **json.loads(path.read_text(encoding="utf-8"))} for path in paths]


def rows(pattern: str = "cpu_published*.json") -> list[Data]:
    """Their rows, in the order of the published table's families."""
    found = [row for run in files(pattern) for row in run["rows"]]
    return sorted(found, key=lambda row: (row["arch"][:3], len(row["arch"]), row["arch"]))


# -- the README's ---------------------------------------------------------------------------------------------


def markdown() -> str:
    """The README's table and what it was measured with."""
    header = "model | batch | plain MiB | ogc MiB | cut | more FLOPs | published: ogc's predecessor | its overhead"
    cells = [
        [
            *(row["arch"], row["batch_size"], _mib(row["plain_bytes"]), _mib(row["ogc_bytes"]), _cut(row), _flops(row)),
            *(f"{row['published']['theirs']} MiB", f"{row['published']['overhead']:.0%}"),
        ]
        for row in rows()
    ]
    return (
        f"{_table(header, cells)}\nPeak of the allocator over one step, {_devices(rows())}, torch "
        f"{files('cpu_published*.json')[0]['versions']['torch']}, float32, all outputs, gradients and buffers equal "
        f"bit by bit. Geometric mean of ours over published: {_ratio(rows()):.2f}. The published figures were measured "
        "on a GPU; CPU kernels add temporaries of their own (see Limits). [docs/results.md](docs/results.md) has the "
        "rest: solvers side by side, slices, small batches, a hundred other models, and the commands.\n"
    )


def inserted(text: str) -> str:
    """The README with the table in its place."""
    before, rest = text.split(START)
    _, after = rest.split(END)
    return f"{before}{START}{markdown()}{END}{after}"


# -- docs/results.md -----------------------------------------------------------------------------------------------


def document(folder: Path = RESULTS) -> str:
    """docs/results.md, whole."""
    parts = [(title, text, writer, files(pattern, folder)) for title, pattern, text, writer in PARTS]
    everything = [run for *_, runs in parts for run in runs]
    lines = [
        "# Results",
        "",
        "Written by `python -m benchmarks.tables` from `benchmarks/results`; nothing here is typed by hand. Memory is",
        "the allocator's peak over one step (forward, `sum().backward()`, gradients of parameters already there)",
        "above what was allocated before it, in MiB (2^20 bytes). *More FLOPs* counts those of the whole step, by",
        "PyTorch's own counter; *recomputed* is the simulator's share of a plain step's time. In every row outputs,",
        "gradients, buffers and the random stream were compared with the plain model's, bit by bit unless the table",
        "says otherwise.",
        "",
        _cuda(everything),
        "",
    ]
    for title, text, writer, runs in parts:
        lines += [f"## {title}", "", text, "", writer(runs) or "Not measured yet.\n"]
        lines += [_made_by(run) for run in runs] + ([""] if runs else [])
    return "\n".join(lines).rstrip() + "\n"


def _cuda(runs: Sequence[Data]) -> str:
    devices = {row["device"] for run in runs for row in run["rows"] if "device" in row}
    devices |= {run["machine"]["device"] for run in runs if isinstance(run.get("machine"), dict)}
    others = sorted(devices - {"cpu"})
    return f"Measured on {', '.join(['CPU', *others])}." if others else "Measured on CPUs; not measured on CUDA yet."


def _made_by(run: Data) -> str:
    """Command, versions, machine, seed: what the file says."""
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    machine = run["machine"]
    if isinstance(machine, dict):
        kept = ", freed memory kept" if machine.get("keeps_freed_memory") else ""
        kernels = f" ({machine['cpu_capability']})" if "cpu_capability" in machine else ""
        machine = f"{machine['device']}, {_cores(machine)}{kernels}, {machine['system']}{kept}"
    else:  # the zoo's form
        machine = f"cpu ({machine}), {_cores(run)}"
    seed = f"; seed {run['seed']}" if "seed" in run else ""
    note = f"; {run['note']}" if run.get("note", "whole") != "whole" else ""
    return f"* `{run['file']}`: `{run['command']}`; {versions}; {machine}{seed}{note}"


def _cores(described: Data) -> str:
    threads = described.get("threads")
    named = "" if threads is None else f", {threads} thread{'s' * (threads != 1)}"
    return f"{described['cores']} cores{named}"


def _published(runs: Sequence[Data]) -> str:
    header = (
        "model | batch | plain | ogc | cut | more FLOPs | recomputed | predicted peak, off by | solve s "
        "| published plain | published | ours / published | published overhead | recomputed at the published memory "
        "| more FLOPs there"
    )
    found = _sorted(runs)
    cells = [
        [
            *(row["arch"], row["batch_size"], _mib(row["plain_bytes"]), _mib(row["ogc_bytes"]), _cut(row), _flops(row)),
            *(f"{row['predicted_overhead']:.1%}", _error(row), f"{row['solve_seconds']:.1f}"),
            *(row["published"]["plain"], row["published"]["theirs"]),
            f"{row['ogc_bytes'] / MIB / row['published']['theirs']:.2f}",
            *(f"{row['published']['overhead']:.0%}", f"{row['overhead_at_theirs']:.1%}"),
            f"{row['flops_at_theirs']:.1%}" if "flops_at_theirs" in row else "–",
        ]
        for row in found
    ]
    return (
        f"{_table(header, cells)}\nGeometric mean of ours over published: {_ratio(found):.2f}. Within the published "
        f"memory, of our overhead over the published one (at least 1 % each): {_overhead_ratio(found, 'overhead')} by "
        f"recomputed time, {_overhead_ratio(found, 'flops')} by FLOPs.\n"
    )


def _overhead_ratio(found: Sequence[Data], kind: str) -> str:
    key = f"{kind}_at_theirs"
    shares = [max(0.01, row[key]) / row["published"]["overhead"] for row in found if key in row]
    return f"{geometric_mean(shares):.2f} over {len(shares)} models" if shares else "not counted"


def _sliced(runs: Sequence[Data]) -> str:
    whole = {row["arch"]: row for row in rows()}
    header = (
        "model | batch | slices | plain | ogc, whole batch | ogc, sliced | cut | more FLOPs | recomputed "
        "| published | published overhead | most a tensor is off"
    )
    cells = [
        [
            *(row["arch"], row["batch_size"], row["batch_slices"], _mib(row["plain_bytes"])),
            _mib(whole[row["arch"]]["ogc_bytes"]) if row["arch"] in whole else "–",
            *(_mib(row["ogc_bytes"]), _cut(row), _flops(row), f"{row['predicted_overhead']:.1%}"),
            *(row["published"]["theirs"], f"{row['published']['overhead']:.0%}", f"{row['deviation']:.1e}"),
        ]
        for row in _sorted(runs)
    ]
    return _table(header, cells)


def _solvers(runs: Sequence[Data]) -> str:
    found = _sorted(runs)
    solvers = list(dict.fromkeys(row["solver"] for row in found))
    by_name: dict[str, dict[str, Data]] = {}
    for row in found:
        by_name.setdefault(row["arch"], {})[row["solver"]] = row

    def cell(of: dict[str, Data], solver: str) -> str:
        if solver not in of:
            return "–"
        row = of[solver]
        return f"{_mib(row['ogc_bytes'])}" + ("" if solver == "none" else f" at {_flops(row)}")

    cells = [
        [name, next(iter(of.values()))["batch_size"], *(cell(of, s) for s in solvers)] for name, of in by_name.items()
    ]
    return _table(" | ".join(["model", "batch", *solvers]), cells)


def _small(runs: Sequence[Data]) -> str:
    header = "model | batch | plain | ogc | cut | more FLOPs | recomputed | predicted peak, off by | solve s"
    cells = [
        [
            *(row["arch"], row["batch_size"], _mib(row["plain_bytes"]), _mib(row["ogc_bytes"]), _cut(row), _flops(row)),
            *(f"{row['predicted_overhead']:.1%}", _error(row), f"{row['solve_seconds']:.1f}"),
        ]
        for row in _sorted(runs)
    ]
    return _table(header, cells)


def _on_cuda(runs: Sequence[Data]) -> str:
    header = (
        "model | batch | device | plain | ogc | cut | more FLOPs | predicted peak, off by | more time | predicted "
        "| solve s | published | ours / published | published overhead"
    )
    found = _sorted(runs)
    cells = [
        [
            *(row["arch"], row["batch_size"], row["device"], _mib(row["plain_bytes"]), _mib(row["ogc_bytes"])),
            *(_cut(row), _flops(row), _error(row), f"{more_time(row):.1%}", f"{row['predicted_overhead']:.1%}"),
            *(f"{row['solve_seconds']:.1f}", row["published"]["theirs"]),
            f"{row['ogc_bytes'] / MIB / row['published']['theirs']:.2f}",
            f"{row['published']['overhead']:.0%}",
        ]
        for row in found
    ]
    mean = f"\nGeometric mean of ours over published: {_ratio(found):.2f}.\n" if found else ""
    return _table(header, cells) + mean


def more_time(row: Data) -> float:
    """Measured overhead, as a share of the plain step."""
    return float(row["ogc_seconds"] / row["plain_seconds"] - 1)


def _compared(runs: Sequence[Data]) -> str:
    """A table per architecture of ``benchmark.py --compare``, the plain model first."""
    parts = []
    header = "method | peak | of plain | more FLOPs | step time | gradients off by | recomputed | beaten by"
    for comparison in (comparison for run in runs for comparison in run["rows"]):
        plain, *_ = comparison["rows"]
        cells = []
        for row in comparison["rows"]:
            name = f"**{row['name']}**" if row["is_ours"] else row["name"]
            name += f", {row['detail']}" if row["detail"] else ""
            if row["reason"]:
                cells.append([name, f"not run: {row['reason'].replace('|', '/')}", *[""] * 6])
                continue
            share = row["recomputed_share"]
            cells.append([
                *(name, _mib(row["peak_bytes"]), f"{row['peak_bytes'] / plain['peak_bytes']:.0%}"),
                f"{row['flops'] / plain['flops'] - 1:.1%}",
                f"{row['seconds'] / row['plain_seconds']:.2f}×" if row["plain_seconds"] else "–",
                "0" if not row["deviation"] else f"{row['deviation']:.1e}",
                *("–" if share is None else f"{share:.1%}", row["dominated_by"] or "–"),
            ])  # fmt: skip
        shape = "×".join(map(str, comparison["input_shape"]))
        better = ", ".join(sorted(beating(comparison["rows"])))
        note = f"\n**Plans of ours are beaten here by a peer**: {better}.\n" if better else ""
        parts.append(f"### {comparison['arch']}, input {shape}\n\n{_table(header, cells)}{note}")
    return "\n".join(parts)


def beating(found: Sequence[Data]) -> set[str]:
    """Peers that dominate a plan of ours, by their names in a comparison."""
    theirs = {row["name"] for row in found if not row["is_ours"]}
    return {row["dominated_by"] for row in found if row["is_ours"]} & theirs


def _ablation(runs: Sequence[Data]) -> str:
    """A row for each network and wish; a column for each part that is left out."""
    found = [row for run in runs for row in run["rows"]]
    by_question: dict[Any, dict[str, Data]] = {}
    for row in found:
        shape = "×".join(map(str, row["input_shape"]))
        by_question.setdefault((row["arch"], shape, row["wish"], row["plain_bytes"]), {})[row["without"]] = row
    parts = list(dict.fromkeys(row["without"] for row in found))

    def cell(of: dict[str, Data], part: str) -> str:
        return f"{of[part]['peak_bytes'] / MIB:.1f} at {of[part]['overhead']:.1%}" if part in of else "–"

    cells = [
        [name, shape, wish, _mib(plain), *(cell(of, part) for part in parts)]
        for (name, shape, wish, plain), of in by_question.items()
    ]
    names = {"nothing": "ogc", "program order": "in other orders"}
    heads = [names.get(part, f"without {part}") for part in parts]
    header = " | ".join(["model", "input", "wish", "plain", *heads])
    return _table(header, cells)


def _zoo(runs: Sequence[Data]) -> str:
    """How many models of each family come out bitwise, and what becomes of the others."""
    header = (
        "family | models | equal | different | refused | failed | not tried | plain cannot | half in one leaf "
        "| cut of at least 25% | median cut | least cut | above the plain peak | median recomputed | median planning s"
    )
    cells, others, parts = [], [], []
    for run in runs:
        family = run["file"].removeprefix("zoo_").removesuffix(".json")
        parts += [f"{row['name']} (`{row['part']}`)" for row in run["rows"] if row.get("part")]
        measured = [row for row in run["rows"] if "ogc_bytes" in row]
        cuts = [1 - row["ogc_bytes"] / row["plain_bytes"] for row in measured]
        kinds = [row["verdict"] for row in run["rows"]]
        unknown = {kind for kind in kinds if kind not in KINDS}
        assert not unknown, f"{run['file']} has rows that are {unknown}: say so in docs/results.md"
        cells.append([
            *(family, len(kinds), *(kinds.count(kind) for kind in KINDS)),
            sum(row.get("leaf_share", 0) >= 0.5 for row in measured),
            *(f"{sum(cut >= 0.25 for cut in cuts)} of {len(cuts)}", f"{median(cuts):.0%}", f"{min(cuts):.0%}"),
            sum(cut < 0 for cut in cuts),
            f"{median(row['overhead'] for row in measured):.0%}",
            f"{median(row['plan_seconds'] for row in measured):.1f}",
        ])  # fmt: skip
        others += [
            f"| {family} | {row['name']} | {row['verdict']}: {_reason(row['detail'])} |"
            for row in run["rows"]
            if row["verdict"] not in ("equal", "plain cannot")
        ]
    reasons = ["| family | model | what became of it |", "|---|---|---|", *others]
    split = f"\nOf these the named part was optimised: {', '.join(parts)}.\n" if parts else ""
    return f"{_table(header, cells)}\n" + "\n".join(reasons) + f"\n{split}" if runs else ""


KINDS = ("equal", "different", "refused", "error", "not tried", "plain cannot")


def _reason(error: str) -> str:
    """The first sentence, the first place of many, paths without the machine's folders."""
    text = re.sub(r"\S*site-packages/", "", error.split(". ")[0]).replace("|", "/").rstrip(".")
    places = text.split("; ")
    if len(places) > 1 and " of a tensor at " in places[1]:
        return f"{places[0]} and {len(places) - 1} more place{'s' if len(places) > 2 else ''}"
    return text


PARTS: tuple[tuple[str, str, str, Callable[[Sequence[Data]], str]], ...] = (
    (
        "The published table",
        "cpu_published*.json",
        "Feng & Huang's eighteen rows (CVPR 2021) at their batch sizes: our least peak within their overhead, which "
        "was measured on a GPU and which we count in FLOPs and in simulated time, whichever is more.",
        _published,
    ),
    (
        "In slices of the batch",
        "cpu_sliced.json",
        "With `batch_slices=`, where single operations bound the peak. Equal up to rounding: the last column is the "
        "most by which any tensor differs, as a share of its largest entry.",
        _sliced,
    ),
    (
        "Solvers side by side",
        "cpu_solvers.json",
        "Peak and more FLOPs of each solver's plan, run by the same runtime on the same model. `optimal` plans within "
        "the published overhead; `none` is the plain model; the others are in the README.",
        _solvers,
    ),
    (
        "Other tools side by side",
        "cpu_compare_*.json",
        "Rows of `python benchmark.py --compare`: what people use to save activation memory, beside ours (bold). "
        "*Beaten by* counts bytes and FLOPs; in step time a compiled model may be ahead, for it fuses operations.",
        _compared,
    ),
    (
        "On CUDA",
        "cuda_published*.json",
        "The published table where it was measured, by `python benchmark.py --arch all --device cuda:0 --batch-size "
        "published --json benchmarks/results/cuda_published.json`: what the simulator and the profiler predict, and "
        "what the allocator and the clock say.",
        _on_cuda,
    ),
    (
        "Other tools on CUDA",
        "cuda_compare*.json",
        "By `python benchmark.py --arch resnet50 densenet121 gpt2_small unet --device cuda:0 --compare --json "
        "benchmarks/results/cuda_compare.json`.",
        _compared,
    ),
    ("At batch 4", "cpu_batch_4.json", "The same as the published table, where activations are small.", _small),
    (
        "What each part of the search gains",
        "ablation.json",
        "The allocator's peak, and the recomputed share of a step, of the plan for a wish where the search lacks one "
        "part: plans within plans; values that a recomputed segment keeps; values that are made again from a cheaper "
        "one although a cut would keep them, tried for the least peak of small programs. The last column is the best "
        "of six other orders of the operations, which ogc leaves as they are: gradients would be added up in another "
        "order, and not be the plain model's bit by bit.",
        _ablation,
    ),
    (
        "Other people's models",
        "zoo_*.json",
        "The least peak, without any limit to what is recomputed, of models built from their configurations with small "
        "inputs; training steps compared bit by bit. *Refused* is an error of ours that says what to do, *failed* any "
        "other, *not tried* took too long, *plain cannot* says nothing of us; *half in one leaf* are models with half "
        "of their parameters or more in a single leaf.",
        _zoo,
    ),
)
"""Title, files, what they are, and who writes the table."""


# -- cells ----------------------------------------------------------------------------------------------------


def _sorted(runs: Sequence[Data]) -> list[Data]:
    found = [row for run in runs for row in run["rows"]]
    return sorted(found, key=lambda row: (row["arch"][:3], len(row["arch"]), row["arch"]))


def _table(header: str, cells: Iterable[Sequence[object]]) -> str:
    names = header.split(" | ")
    lines = [f"| {header} |", "|" + "---|" * len(names)]
    for row in cells:
        assert len(row) == len(names), row
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines) + "\n" if len(lines) > 2 else ""


def _mib(size: float) -> str:
    return f"{size / MIB:.0f}"


def _cut(row: Data) -> str:
    return f"{1 - row['ogc_bytes'] / row['plain_bytes']:.0%}"


def _flops(row: Data) -> str:
    return f"{row['ogc_flops'] / row['plain_flops'] - 1:.1%}"


def _error(row: Data) -> str:
    found = f"{row['predicted_bytes'] / row['ogc_bytes'] - 1:+.2%}"
    return found if found.strip("+-0.%") else "0"


def _ratio(found: Sequence[Data]) -> float:
    """Geometric mean of ours over published."""
    return geometric_mean(row["ogc_bytes"] / MIB / row["published"]["theirs"] for row in found)


def _devices(found: Sequence[Data]) -> str:
    return ", ".join(sorted({row["device"].replace("cpu", "on a CPU") for row in found}))


def main() -> None:
    readme = ROOT / "README.md"
    readme.write_text(inserted(readme.read_text(encoding="utf-8")), encoding="utf-8")
    (ROOT / "docs" / "results.md").write_text(document(), encoding="utf-8")


if __name__ == "__main__":
    main()
