"""The tables of the documents: one for each question, made of the rows that runs wrote."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from textwrap import shorten

from .experiments import BLOCKS, OF_BLOCKS, OF_SELECTIVE, PLAIN, SELECTIVE
from .hollow import errors
from .measuring import MIB
from .polished import GOALS, above
from .row import Data, Row
from .timing import findings


def rows_of(runs: Iterable[Data]) -> list[Row]:
    """Ways to run a network, but for those that failed."""
    rows = [row if isinstance(row, Row) else Row.read(row) for run in runs for row in run["rows"]]
    return [row for row in rows if not row.failed]


def in_order(runs: Iterable[Data]) -> list[Row]:
    return sorted(rows_of(runs), key=lambda row: (row.arch[:3], len(row.arch), row.arch))


# -- cells --------------------------------------------------------------------------------------------------------


def table(header: str, cells: Iterable[Sequence[object]]) -> str:
    """Markdown; empty without rows."""
    names = header.split(" | ")
    lines = [f"| {header} |", "|" + "---|" * len(names)]
    for row in cells:
        assert len(row) == len(names), row
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines) + "\n" if len(lines) > 2 else ""


def mib(size: float) -> str:
    return f"{size / MIB:.0f}"


def cut(row: Row) -> str:
    return f"{1 - row.peak_bytes / row.plain_bytes:.0%}"


def theirs(row: Row) -> int:
    """The published peak in MiB."""
    return int(row.published["theirs"]) if row.published else 0


def of_theirs(row: Row) -> float:
    return row.peak_bytes / MIB / theirs(row)


def ratio(found: Sequence[Row]) -> float:
    """Geometric mean of ours over published."""
    return geometric_mean(map(of_theirs, found))


# -- against the published figures --------------------------------------------------------------------------------


def published(runs: Sequence[Data]) -> str:
    header = (
        "model | batch | plain | ogc | more FLOPs | recomputed | published | ours / published "
        "| published overhead | recomputed at the published memory"
    )
    found = [row for row in in_order(runs) if row.published]
    cells = [
        [
            *(row.arch, row.input_shape[0], mib(row.plain_bytes), mib(row.peak_bytes), f"{row.more_flops:.1%}"),
            *(f"{row.promised:.1%}", theirs(row), f"{of_theirs(row):.2f}", f"{row.published['overhead']:.0%}"),
            "–" if row.overhead_at_theirs is None else f"{row.overhead_at_theirs:.1%}",
        ]
        for row in found
        if row.published
    ]
    if not found:
        return ""
    error = max(abs(row.predicted_bytes / row.peak_bytes - 1) for row in found)
    return (
        f"{table(header, cells)}\nGeometric mean of ours over published: {ratio(found):.2f}. Within the published "
        f"memory, of our overhead over the published one (at least 1 % each): {_overhead_ratio(found, 'overhead')} by "
        f"recomputed time, {_overhead_ratio(found, 'flops')} by FLOPs. The largest error of a predicted peak: "
        f"{error:.2%}.\n"
    )


def _overhead_ratio(found: Sequence[Row], kind: str) -> str:
    known = [(getattr(row, f"{kind}_at_theirs"), row.published["overhead"]) for row in found if row.published]
    shares = [max(0.01, ours) / most for ours, most in known if ours is not None]
    return f"{geometric_mean(shares):.2f} over {len(shares)} models" if shares else "not counted"


def solvers(runs: Sequence[Data]) -> str:
    """A row for each network, with its plans side by side."""
    found = in_order(runs)
    names = list(dict.fromkeys(row.way for row in found if row.way != "none"))
    of = {(row.arch, row.way): row for row in found}

    def cell(row: Row | None) -> str:
        return "–" if row is None else f"{mib(row.peak_bytes)}, {row.more_flops:.0%}"

    plain = {row.arch: mib(row.plain_bytes) for row in found}
    cells = [[arch, size, *(cell(of.get((arch, way))) for way in names)] for arch, size in plain.items()]
    return table(" | ".join(["model", "plain", *names]), cells)


def chunked(runs: Sequence[Data], whole: Sequence[Row]) -> str:
    at_once = {(row.arch, row.input_shape): row for row in whole}
    header = (
        "model | batch | chunks | plain | ogc, whole batch | ogc, chunked | cut | more FLOPs | recomputed "
        "| published | most a tensor is off"
    )
    cells = []
    for row in in_order(runs):
        other = at_once.get((row.arch, row.input_shape))
        cells.append([
            *(row.arch, row.input_shape[0], row.chunks, mib(row.plain_bytes)),
            *(mib(other.peak_bytes) if other else "–", mib(row.peak_bytes), cut(row), f"{row.more_flops:.1%}"),
            *(f"{row.promised:.1%}", theirs(row) or "–", f"{row.deviation:.1e}"),
        ])  # fmt: skip
    return table(header, cells)


CLOSE = 0.05
"""Most by which a promised overhead is off that counts as kept, of the plain step."""


def on_cuda(runs: Sequence[Data]) -> str:
    """A row for each network that was measured on a GPU."""
    header = (
        "model | batch | plain | ogc | cut | published | ours / published | more time, promised | paid | more FLOPs "
        "| promised at the published memory"
    )
    found = rows_of(runs)
    cells = [
        [
            *(row.arch, row.input_shape[0], mib(row.plain_bytes), mib(row.peak_bytes), cut(row)),
            *((theirs(row), f"{of_theirs(row):.2f}") if row.published else ("–", "–")),
            *(f"{row.promised:.1%}", f"{row.paid:.1%}", f"{row.more_flops:.1%}"),
            "–" if row.overhead_at_theirs is None else f"{row.overhead_at_theirs:.1%}",
        ]
        for row in found
    ]
    if not found:
        return ""
    off = [
        abs(apart)
        for row in found
        for apart in (row.predicted_bytes - row.peak_bytes, row.predicted_plain_bytes - row.plain_bytes)
    ]
    kept = sum(abs(row.off) <= CLOSE for row in found)
    return (
        f"{table(header, cells)}\nGeometric mean of ours over published: "
        f"{ratio([row for row in found if row.published]):.2f}. Of {len(off)} peaks the largest difference from what "
        f"is simulated is {max(off) / 1e3:.0f} kB, the median {median(off):.0f} bytes. {kept} of {len(found)} promises "
        f"are kept within {CLOSE * 100:.0f} points.\n"
    )


def predicted(runs: Sequence[Data]) -> str:
    """A row for each network on a GPU that was not there, and how far its plans are from hollow runs."""
    header = (
        "model | batch | plain | published | off | least | ogc | more time | more FLOPs | published | ogc / published"
    )
    cells, ratios, off = [], list[float](), list[float]()
    for row in (row for run in runs for row in run["rows"]):
        known = row["published"]
        off += errors(row)
        ratios += [row["ours_bytes"] / MIB / known["theirs"]] if known else []
        cells.append([
            *(row["arch"], row["batch_size"], mib(row["plain_bytes"])),
            *((known["plain"], f"{row['plain_bytes'] / MIB / known['plain'] - 1:+.1%}") if known else ("–", "–")),
            *(mib(row["least_bytes"]), mib(row["ours_bytes"])),
            *(f"{row['overhead']:.1%}", f"{row['flops_overhead']:.1%}"),
            *((known["theirs"], f"{ratios[-1]:.2f}") if known else ("–", "–")),
        ])  # fmt: skip
    if not cells:
        return ""
    mean = f"Geometric mean of ours over published: {geometric_mean(ratios):.2f}. " if ratios else ""
    return (
        f"{table(header, cells)}\n{mean}Of {len(off)} plans the largest difference from a hollow run is "
        f"{max(off, key=abs):+.2%}, the median {median(map(abs, off)):.4%}.\n"
    )


# -- other tools --------------------------------------------------------------------------------------------------

NOISE = 0.02
"""Of a step's time."""


def compared(runs: Sequence[Data]) -> str:
    """A row for each network: the best of the others, and ours."""
    header = "model | input | plain | other tool | its peak | ogc with no more FLOPs | ogc, least peak"
    by_network: dict[str, list[Row]] = {}
    for row in rows_of(runs):
        by_network.setdefault(row.arch, []).append(row)
    cells, better, quicker = [], list[str](), list[str]()
    for arch, (plain, *others) in by_network.items():
        ran = [row for row in others if not row.reason]
        ours = [row for row in ran if row.is_ours]
        peer = min((row for row in ran if row.promised is None), key=_peak, default=None)
        within = min((row for row in ours if peer and row.flops <= peer.flops), key=_peak, default=None)
        better += [f"{name} of {arch}" for name in sorted(beating(ran))]
        if ahead := quicker_within(ran):
            quicker.append(re.sub(r"(?<=\d), compile ", ", ", f"{', '.join(ahead)} of {arch}"))
        cells.append([
            *(arch, plain.size, mib(plain.peak_bytes), peer.way if peer else "–"),
            *map(_measured, (peer, within, min(ours, key=_peak, default=None))),
        ])  # fmt: skip
    said = "**Plans of ours are beaten by a peer**: " + ", ".join(better) if better else "No peer beats a plan of ours"
    clock = f"these are {'; '.join(quicker)}" if quicker else "none is"
    text = (
        f"{said} in bytes and FLOPs. By the clock a peer is ahead where no plan of ours takes as little memory and, "
        f"but for {NOISE:.0%}, as little time: {clock}."
    )
    return f"{table(header, cells)}\n{text}\n" if cells else ""


def _peak(row: Row) -> int:
    return row.peak_bytes


def _measured(row: Row | None) -> str:
    if row is None:
        return "–"
    return mib(row.peak_bytes) + ("" if row.paid is None else f" at {1 + row.paid:.2f}×")


def beating(found: Sequence[Row]) -> set[str]:
    """Others that dominate a plan of ours, by their ways."""
    return {row.dominated_by for row in found if row.is_ours} & {row.way for row in found if not row.is_ours}


def quicker_within(found: Sequence[Row]) -> list[str]:
    """Peers, by their ways, that no plan of ours is as quick as within their memory."""
    ahead = []
    for peer in (row for row in found if row.promised is None and row.paid is not None):
        ours = (row for row in found if row.is_ours and row.peak_bytes <= peer.peak_bytes)
        least = min((1 + row.paid for row in ours if row.paid is not None), default=float("inf"))
        if least > (1 + NOISE) * (1 + (peer.paid or 0.0)):
            ahead.append(peer.way)
    return ahead


def side_by_side(runs: Sequence[Data]) -> str:
    """A row for each way, with the figures of each network side by side."""
    found = rows_of(runs)
    networks = list(dict.fromkeys(row.arch for row in found))
    of = {(row.arch, row.way): row for row in found}

    def cell(row: Row) -> str:
        promised = "" if row.promised is None else f" ({row.promised:.1%})"
        return row.reason or f"{mib(row.peak_bytes)}, {row.paid:+.1%}{promised}"

    cells = []
    for way in dict.fromkeys(row.way for row in found):
        each = [of[arch, way] for arch in networks if (arch, way) in of]
        cells.append([way, *map(cell, each), f"{max(row.deviation for row in each):.0e}"])
    return table(" | ".join(["way", *networks, "most a gradient is off"]), cells) if cells else ""


def families(runs: Sequence[Data]) -> str:
    """A row for each network, with what each way leaves of the plain peak, and what it paid."""
    found = rows_of(runs)
    cells: dict[str, list[object]] = {row.arch: [row.arch, mib(row.plain_bytes)] for row in found}
    for row in found:
        if row.way != "plain":
            cells[row.arch].append(f"{mib(row.peak_bytes)} (-{cut(row)}), {row.paid:+.0%}")
    means = family_means(runs)
    said = (f"**{share:.0%}**, {paid:+.1%}" for share, paid in means.values())
    last = ["geometric mean", "", *said]
    return table(" | ".join(["model", "plain", *means]), [*cells.values(), last]) if cells else ""


def family_means(runs: Sequence[Data]) -> dict[str, tuple[float, float]]:
    """For each way but the plain one: what it takes more than the plain peak, and what it paid; geometric means."""
    by_way: dict[str, list[Row]] = {}
    for row in rows_of(runs):
        if row.way != "plain":
            by_way.setdefault(row.way, []).append(row)
    return {
        way: (
            geometric_mean(row.peak_bytes / row.plain_bytes for row in found) - 1,
            geometric_mean(1 + (row.paid or 0.0) for row in found) - 1,
        )
        for way, found in by_way.items()
    }


SHOWN = (BLOCKS, OF_BLOCKS, SELECTIVE, OF_SELECTIVE)


def beside_others(found: Sequence[Row]) -> str:
    """Peaks in MiB and what a step paid; of all plans, also those with other goals, how far promises were off."""
    by_network: dict[str, dict[str, Row]] = {}
    for row in found:
        by_network.setdefault(row.arch, {})[row.way] = row

    def cell(row: Row | None) -> str:
        return "–" if row is None or row.paid is None else f"{mib(row.peak_bytes)}, {row.paid:+.1%}"

    cells = []
    for arch, ways in by_network.items():
        plain = ways[PLAIN]
        step = f"{plain.plain_seconds * 1e3:.0f} ms"
        cells.append([arch, plain.size, step, mib(plain.plain_bytes), *(cell(ways.get(way)) for way in SHOWN)])
    off = [abs(row.off) * 100 for row in found if row.promised is not None]
    return (
        f"{table('model | input | plain step | plain | blocks | ogc in no more | selective | ogc in no more', cells)}\n"
        f"Of {len(off)} plans of {len(cells)} networks, promised and paid are {median(off):.1f} points apart in the "
        f"median, {max(off):.1f} at worst.\n"
    )


MISSES = 4
"""Networks that are named in a cell; the run prints all of them, and all of their rows."""


def timing(runs: Sequence[Data]) -> str:
    """A row for each question; in it what misses the aim."""

    def first(missed: Sequence[str]) -> str:
        worst: dict[str, str] = {}
        for text in missed:
            worst.setdefault(re.split(r"[, ]", text)[0], text.replace("|", "/"))
        more = f" and {len(worst) - MISSES} more" if len(worst) > MISSES else ""
        return ("; ".join(list(worst.values())[:MISSES]) + more) or "–"

    answers = [answer for run in runs for answer in findings(rows_of([run]), run.get("items"))]
    cells = [[one.question, one.of, one.found, one.aim or "–", first(one.missed)] for one in answers]
    return table("question | of | found | aim | misses it", cells)


# -- batches, the search, other people's models, many devices -----------------------------------------------------


def largest(runs: Sequence[Data]) -> str:
    """What fits by each way of training, and the means of that over what the plain model takes."""
    rows = [row for run in runs for row in run["rows"]]
    shares = list(dict.fromkeys(share for row in rows for share in row["ours"]))
    header = " | ".join(["model", "input", "MiB", "plain", "blocks", *(f"ours, {share} more" for share in shares)])
    cells = []
    for row in rows:
        plain = row["plain_step"]
        ours = [row["ours"][share] for share in shares]
        cells.append([
            *(row["arch"], "×".join(map(str, row["input_shape"][1:])), mib(row["device_memory"])),
            _fitting(row["plain"], plain and plain["bytes"], plain, plain),
            *(_fitting(row["blocks"], (row["blocks_step"] or {}).get("bytes"), row["blocks_step"], plain),),
            *(_fitting(one["size"], one["measured_bytes"], one, plain) for one in ours),
        ])  # fmt: skip
    if not cells:
        return ""
    known = [row for row in rows if row["plain"]]
    means = {f"ours at {share}": [row["ours"][share]["size"] / row["plain"] for row in known] for share in shares}
    means["blocks"] = [row["blocks"] / row["plain"] for row in known if row["blocks"]]
    said = ", ".join(f"{name} {geometric_mean(found):.1f}" for name, found in means.items() if found)
    seconds = ", ".join(f"{row['search_seconds']:.0f}" for row in rows)
    return (
        f"{table(header, cells)}\nGeometric mean over the plain batch, of {len(known)} rows where that is not 0: "
        f"{said}. Plain and ours were found in {seconds} CPU seconds.\n"
    )


def _fitting(batch: int | None, size: int | None, step: Data | None, plain: Data | None) -> str:
    """A batch, the bytes of its step, and its time over that of the plain one, as far as they are known."""
    if batch is None or step is None or size is None:
        return "–" if batch is None else str(batch)
    more = "" if plain is None or step is plain else f", {step['seconds'] / plain['seconds'] - 1:+.0%}"
    return f"{batch} ({mib(size)}{more})"


def ablation(runs: Sequence[Data]) -> str:
    """A row for each part that is left out; a column for each goal."""
    found = [row for run in runs for row in run["rows"]]
    whole = {(row["arch"], row["goal"]): row["peak_bytes"] for row in found if row["without"] == "nothing"}
    goals = list(dict.fromkeys(row["goal"] for row in found))
    more: dict[str, dict[str, list[float]]] = {}
    for row in found:
        share = row["peak_bytes"] / whole[row["arch"], row["goal"]] - 1
        more.setdefault(row["without"], {}).setdefault(row["goal"], []).append(share)
    more.pop("nothing", None)

    def cell(shares: list[float]) -> str:
        return f"{min(shares):+.0%} to {max(shares):+.0%}, {median(shares):+.0%}" if shares else "–"

    names = {"program order": "in another order"}
    cells = [
        [names.get(part, f"without {part}"), *(cell(of.get(goal, [])) for goal in goals)] for part, of in more.items()
    ]
    networks = list(dict.fromkeys(row["arch"] for row in found))
    return table(" | ".join(["search", *goals]), cells) + (f"\nOf {', '.join(networks)}.\n" if cells else "")


def instances(runs: Sequence[Data]) -> str:
    """A row for each network with published budgets, then what fits on a card."""
    rows = [row for run in runs for row in run["rows"]]
    cells = []
    for row in rows:
        points = row.get("points", ())
        budgets, theirs, ours = ([*one] for one in zip(*map(_point, points), strict=True)) if points else ([], [], [])
        if points:
            size = f"{row['plain_bytes'] / 2**30:.2f} ({row['published_plain']:.2f})"
            cells.append([row["arch"], row["batch_size"], size, *map(" / ".join, (budgets, theirs, ours))])
    fits = [
        f"{row['arch']} {row['batch_size']} ({row['published_batch']}; plain {row['plain_batch']}; at "
        f"{row['overhead']:.0%})"
        for row in rows
        if "published_batch" in row
    ]
    said = f"In 16 GiB at one forward more fit, of batches, ours (theirs): {', '.join(fits)}.\n" if fits else ""
    header = "model | batch | plain GiB, ours (theirs) | within GiB | theirs, % more time | ours, % more time"
    return f"{table(header, cells)}\n{said}" if rows else ""


def _point(point: Data) -> tuple[str, str, str]:
    """A budget, and what each takes within it."""
    ours = f"{point['overhead'] * 100:.1f}"
    if "least_bytes" in point:
        ours = f"– (least {point['least_bytes'] / 2**30:.2f})"
    elif point["overhead"] < point["published"]:
        ours = f"**{ours}**"
    return f"{point['budget']:.2f}", f"{point['published'] * 100:.1f}", ours


def layers(runs: Sequence[Data]) -> str:
    """A row for each number of layers."""
    cells = [
        [
            *(row["arch"], f"{row['peak_bytes'] / row['plain_bytes']:.4f}"),
            *(f"{row['parse_seconds']:.1f}", f"{row['plan_seconds']:.1f}"),
        ]
        for run in runs
        for row in run["rows"]
    ]
    return table("model | peak over plain | parsing s | planning s", cells)


def sizes(runs: Sequence[Data]) -> str:
    """A row for each model, in plain steps of the same size."""
    cells = [
        [
            *(row["arch"], row["sizes"], ", ".join(f"{each:.1f}" for each in row["first_two"])),
            *(f"{row['first']:.2f} (at most {row['most']:.2f})", f"{row['known']:.2f}", f"{row['of_training']:+.1%}"),
        ]
        for run in runs
        for row in run["rows"]
    ]
    return table("model | sizes | first two | first call at a later size | next calls | of 200 steps", cells)


def offloaded(runs: Sequence[Data]) -> str:
    """A row for each network, with the time that each GPU adds in as much memory as checkpointed blocks."""
    rows = [row for run in runs for row in run["rows"]]
    gpus = list(dict.fromkeys(row["gpu"] for row in rows))
    cells = []
    for name in dict.fromkeys(row["arch"] for row in rows):
        found = {row["gpu"]: row for row in rows if row["arch"] == name}
        first = found[gpus[0]]
        cells.append([
            *(name, mib(first["plain_bytes"]), mib(first["blocks_bytes"])),
            *(
                f"{row['blocks_overhead']:+.0%} / {row['alone_overhead']:+.0%} / **{row['overhead']:+.0%}**"
                f", {mib(row['offloaded_bytes'])} MiB"
                for row in map(found.__getitem__, gpus)
            ),
        ])  # fmt: skip
    apart = max((abs(row["hollow_bytes"] / row["peak_bytes"] - 1) for row in rows), default=0.0)
    told = f"\nHollow runs of the plans with offloading peak as promised, within {apart:.2%}.\n" if rows else ""
    return table(f"model | plain MiB | blocks | {' | '.join(gpus)}", cells) + told


def doors(runs: Sequence[Data]) -> str:
    """How many networks come through each front end, and which are refused or differ."""
    rows = [row for run in runs for row in run["rows"] if "jit" in row]
    cells = []
    for door in ("jit", "export", "dynamo"):
        found = {row["arch"]: row[door] for row in rows}
        refused = [name for name, one in found.items() if "refused" in one]
        through = {name: one for name, one in found.items() if "refused" not in one}
        counts = [sum(one[f"same_{what}"] for one in through.values()) for what in ("graph", "modules", "plan", "bits")]
        cells.append([door, len(found), len(through), *counts, "; ".join(refused) or "none"])
    return table("front end | networks | through | same graph | modules | plan | bits | refused", cells)


def polished(runs: Sequence[Data]) -> str:
    """A row for each goal, and which plans are furthest from the best known."""
    rows = [row for run in runs for row in run["rows"]]
    found = [row for row in rows if "peak_bytes" in row]
    cells = []
    for goal in GOALS:
        of_goal = [row for row in found if row["goal"] == goal]
        if not of_goal:
            continue
        worse = [above(row) for row in of_goal]
        cells.append([
            *(goal, len(of_goal), f"{median(worse):.1%}", f"{max(worse):.1%}", sum(one <= 0.02 for one in worse)),
            *(f"{median(row[kind] for row in of_goal):.1%}" for kind in ("gap_time", "gap_bytes")),
            f"{median(row['plan_seconds'] for row in of_goal):.1f}",
        ])  # fmt: skip
    if not cells:
        return ""
    far = [f"{row['arch']}, {row['goal']} (+{above(row):.1%})" for row in found if above(row) > 0.02]
    gaps = [row["gap_time" if row["goal"] in ("0.7", "0.5") else "gap_bytes"] for row in found]
    header = "goal | plans | above best | most | within 2 % | proven time | proven peak | planning s"
    return (
        f"{table(header, cells)}\nOf {', '.join(dict.fromkeys(row['arch'] for row in rows))}. Above by more: "
        f"{'; '.join(far) or 'none'}. What is asked for is proven within {median(gaps):.1%} in the median.\n"
    )


def zoo(runs: Sequence[Data]) -> str:
    """How many models of each family come out bitwise, and what becomes of the others."""
    header = (
        "family | models | equal | plain cannot | not equal | cut of at least 25% | median cut | above the plain peak "
        "| median recomputed | median planning s"
    )
    cells, others = [], []
    for run in runs:
        family = Path(run["file"]).stem
        measured = [row for row in run["rows"] if "ogc_bytes" in row]
        cuts = [1 - row["ogc_bytes"] / row["plain_bytes"] for row in measured]
        kinds = [row["verdict"] for row in run["rows"]]
        unknown = {kind for kind in kinds if kind not in KINDS}
        assert not unknown, f"{run['file']} has rows that are {unknown}: say so in docs/results.md"
        counts = [kinds.count("equal"), kinds.count("plain cannot")]
        cells.append([
            *(family, len(kinds), *counts, len(kinds) - sum(counts)),
            *(f"{sum(cut >= 0.25 for cut in cuts)} of {len(cuts)}", f"{median(cuts):.0%}" if cuts else "–"),
            sum(cut < 0 for cut in cuts),
            f"{median(row['overhead'] for row in measured):.0%}" if cuts else "–",
            f"{median(row['plan_seconds'] for row in measured):.1f}" if cuts else "–",
        ])  # fmt: skip
        others += [
            f"* {family}, {row['name']}: {row['verdict']}: {reason(row['detail'])}"
            for row in run["rows"]
            if row["verdict"] not in ("equal", "plain cannot")
        ]
    listed = "\n".join(["\nNot equal:\n", *others]) + "\n" if others else ""
    return f"{table(header, cells)}{listed}" if cells else ""


REASON_WIDTH = 200
"""Characters: what an opaque module returned may be a list of forty tensors. The rows have all of it."""

KINDS = ("equal", "different", "refused", "error", "not tried", "plain cannot")


def reason(error: str) -> str:
    """The first sentence, the first place of many, not all of a long list, paths without the machine's folders."""
    text = re.sub(r"\S*site-packages/", "", error.split(". ")[0]).replace("|", "/").rstrip(".")
    text = shorten(text, REASON_WIDTH, placeholder=" …")
    places = text.split("; ")
    if len(places) > 1 and " of a tensor at " in places[1]:
        return f"{places[0]} and {len(places) - 1} more place{'s' if len(places) > 2 else ''}"
    return text


def on_many_devices(runs: Sequence[Data]) -> str:
    """Of each way, the rank with most memory and the slowest one."""
    return table(
        "way | MiB per rank | seconds per step",
        (
            (row["way"], f"{max(row['peak_bytes']) / MIB:.1f}", f"{max(row['seconds']):.2f}")
            for run in runs
            for row in run["rows"]
        ),
    )
