"""The tables of docs/results.md: one for each question, made of the rows that the runs wrote."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean, median
from textwrap import shorten

from .cells import MIB, Data, cut, error, in_order, mib, more_flops, more_time, ratio, table
from .hollow import HollowRow
from .timing.aims import findings
from .timing.row import Items, TimeRow


def published(runs: Sequence[Data]) -> str:
    header = (
        "model | batch | plain | ogc | more FLOPs | recomputed | published | ours / published "
        "| published overhead | recomputed at the published memory"
    )
    found = in_order(runs)
    cells = [
        [
            *(row["arch"], row["batch_size"], mib(row["plain_bytes"]), mib(row["ogc_bytes"])),
            *(more_flops(row), f"{row['predicted_overhead']:.1%}", row["published"]["theirs"]),
            f"{row['ogc_bytes'] / MIB / row['published']['theirs']:.2f}",
            *(f"{row['published']['overhead']:.0%}", f"{row['overhead_at_theirs']:.1%}"),
        ]
        for row in found
    ]
    if not found:
        return ""
    return (
        f"{table(header, cells)}\nGeometric mean of ours over published: {ratio(found):.2f}. Within the published "
        f"memory, of our overhead over the published one (at least 1 % each): {_overhead_ratio(found, 'overhead')} by "
        f"recomputed time, {_overhead_ratio(found, 'flops')} by FLOPs. The largest error of a predicted peak: "
        f"{max(map(error, found)):.2%}.\n"
    )


def _overhead_ratio(found: Sequence[Data], kind: str) -> str:
    key = f"{kind}_at_theirs"
    shares = [max(0.01, row[key]) / row["published"]["overhead"] for row in found if row.get(key) is not None]
    return f"{geometric_mean(shares):.2f} over {len(shares)} models" if shares else "not counted"


def solvers(runs: Sequence[Data]) -> str:
    """A row for each network, with its plans side by side."""
    found = in_order(runs)
    names = list(dict.fromkeys(row["solver"] for row in found))
    by_name: dict[str, dict[str, Data]] = {}
    for row in found:
        by_name.setdefault(row["arch"], {})[row["solver"]] = row

    def cell(of: dict[str, Data], solver: str) -> str:
        if solver not in of:
            return "–"
        row = of[solver]
        return mib(row["ogc_bytes"]) + ("" if solver == "none" else f" at {more_flops(row, digits=0)}")

    cells = [[name, *(cell(of, solver) for solver in names)] for name, of in by_name.items()]
    return table(" | ".join(["model", *names]), cells)


def compared(runs: Sequence[Data]) -> str:
    """A row for each network: the best of the others, and ours."""
    header = "model | input | plain | other tool | its peak | ogc with no more FLOPs | ogc, least peak"
    cells, better, quicker = [], [], []
    for comparison in (comparison for run in runs for comparison in run["rows"]):
        rows = [row for row in comparison["rows"] if not row["reason"]]
        ours = [row for row in rows if row["is_ours"]]
        peer = min((row for row in rows[1:] if row["recomputed_share"] is None), key=_peak, default=None)
        within = min((row for row in ours if peer and row["flops"] <= peer["flops"]), key=_peak, default=None)
        better += [f"{name} of {comparison['arch']}" for name in sorted(beating(rows))]
        if ahead := quicker_within(rows):
            quicker.append(f"{', '.join(ahead)} of {comparison['arch']}")
        cells.append([
            *(comparison["arch"], "×".join(map(str, comparison["input_shape"])), mib(rows[0]["peak_bytes"])),
            *(peer["name"] if peer else "–", _measured(peer), _measured(within)),
            _measured(min(ours, key=_peak, default=None)),
        ])  # fmt: skip
    said = "**Plans of ours are beaten by a peer**: " + ", ".join(better) if better else "No peer beats a plan of ours"
    clock = f"these are {'; '.join(quicker)}" if quicker else "none is"
    text = (
        f"{said} in bytes and FLOPs. By the clock a peer is ahead where no plan of ours takes as little memory and, "
        f"but for {NOISE:.0%}, as little time: {clock}."
    )
    return f"{table(header, cells)}\n{text}\n" if cells else ""


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


def _peak(row: Data) -> int:
    return int(row["peak_bytes"])


def _measured(row: Data | None) -> str:
    if row is None:
        return "–"
    return mib(row["peak_bytes"]) + (
        f" at {row['seconds'] / row['plain_seconds']:.2f}×" if row["plain_seconds"] else ""
    )


def beating(rows: Sequence[Data]) -> set[str]:
    """Peers that dominate a plan of ours, by their names in a comparison."""
    theirs = {row["name"] for row in rows if not row["is_ours"]}
    return {row["dominated_by"] for row in rows if row["is_ours"]} & theirs


NOISE = 0.02
"""Of a step's time."""


def quicker_within(rows: Sequence[Data]) -> list[str]:
    """Peers, by their names, that no plan of ours is as quick as within their memory."""

    def time(row: Data) -> float:
        return float(row["seconds"] / row["plain_seconds"])

    ours = [row for row in rows if row["is_ours"]]
    found = []
    for peer in (row for row in rows[1:] if row["recomputed_share"] is None):
        times = [time(row) for row in ours if row["peak_bytes"] <= peer["peak_bytes"]]
        if min(times, default=float("inf")) > (1 + NOISE) * time(peer):
            found.append(peer["name"])
    return found


def sliced(runs: Sequence[Data], whole: Sequence[Data]) -> str:
    at_once = {row["arch"]: row for row in whole}
    header = (
        "model | batch | slices | plain | ogc, whole batch | ogc, sliced | cut | more FLOPs | recomputed "
        "| published | most a tensor is off"
    )
    cells = [
        [
            *(row["arch"], row["batch_size"], row["batch_slices"], mib(row["plain_bytes"])),
            mib(at_once[row["arch"]]["ogc_bytes"]) if _is_same(at_once.get(row["arch"]), row) else "–",
            *(mib(row["ogc_bytes"]), cut(row), more_flops(row), f"{row['predicted_overhead']:.1%}"),
            *(row["published"]["theirs"], f"{row['deviation']:.1e}"),
        ]
        for row in in_order(runs)
    ]
    return table(header, cells)


def side_by_side(runs: Sequence[Data]) -> str:
    """A row for each way to train, with the figures of each subject side by side."""
    found = [row for run in runs for row in run["rows"]]
    subjects = list(dict.fromkeys(row["subject"] for row in found))
    of = {(row["subject"], row["way"]): row for row in found}
    header = " | ".join(["way", *subjects, "most a gradient is off"])
    cells = []
    for way in dict.fromkeys(row["way"] for row in found):
        each = [of[subject, way] for subject in subjects if (subject, way) in of]
        cells.append([way, *map(_figures, each), f"{max(row['distance'] for row in each):.0e}"])
    return table(header, cells) if cells else ""


def families(runs: Sequence[Data]) -> str:
    """A row for each subject, with what each way leaves of the plain peak, and what it paid."""
    ways = _shares_and_paid(runs)
    plain = {row["subject"]: row["peak_bytes"] for run in runs for row in run["rows"] if row["way"] == "plain"}
    cells: list[list[object]] = [[subject, mib(peak)] for subject, peak in plain.items()]
    for of_way in ways.values():
        for cell, peak, (share, paid) in zip(cells, plain.values(), of_way, strict=True):
            cell.append(f"{mib(share * peak)} ({share - 1:.0%}), {paid - 1:+.0%}")
    means = (f"**{share:.0%}**, {paid:+.1%}" for share, paid in family_means(runs).values())
    return table(" | ".join(["model", "plain", *ways]), [*cells, ["geometric mean", "", *means]]) if cells else ""


def family_means(runs: Sequence[Data]) -> dict[str, tuple[float, float]]:
    """For each way but the plain one: what it takes more than the plain peak, and what it paid; geometric means."""
    return {
        way: (geometric_mean(share for share, _ in of_way) - 1, geometric_mean(paid for _, paid in of_way) - 1)
        for way, of_way in _shares_and_paid(runs).items()
    }


def _shares_and_paid(runs: Sequence[Data]) -> dict[str, list[tuple[float, float]]]:
    """For each way but the plain one, subject by subject: its peak and its time, by those of the plain model."""
    found = [row for run in runs for row in run["rows"]]
    plain = {row["subject"]: row["peak_bytes"] for row in found if row["way"] == "plain"}
    ways: dict[str, list[tuple[float, float]]] = {}
    for row in found:
        if row["way"] != "plain":
            ways.setdefault(row["way"], []).append((row["peak_bytes"] / plain[row["subject"]], 1 + row["paid"]))
    return ways


def predicted(runs: Sequence[Data]) -> str:
    """A row for each network on a GPU that was not there, and how far its plans are from hollow runs."""
    header = (
        "model | batch | plain | published | off | least | ogc | more time | more FLOPs | published | ogc / published"
    )
    cells, ratios, errors = [], [], list[float]()
    for row in (row for run in runs for row in run["rows"]):
        known = row["published"]
        errors += HollowRow(**row).errors
        ratios += [row["ours_bytes"] / MIB / known["theirs"]] if known else []
        off = f"{row['plain_bytes'] / MIB / known['plain'] - 1:+.1%}" if known else "–"
        cells.append(
            [
                *(row["arch"], row["batch_size"], mib(row["plain_bytes"]), known["plain"] if known else "–", off),
                *(
                    mib(row["least_bytes"]),
                    mib(row["ours_bytes"]),
                    f"{row['overhead']:.1%}",
                    f"{row['flops_overhead']:.1%}",
                ),
                *(known["theirs"] if known else "–", f"{ratios[-1]:.2f}" if known else "–"),
            ]
        )
    if not cells:
        return ""
    mean = f"Geometric mean of ours over published: {geometric_mean(ratios):.2f}. " if ratios else ""
    return (
        f"{table(header, cells)}\n{mean}Of {len(errors)} plans the largest difference from a hollow run is "
        f"{max(errors, key=abs):+.2%}, the median {median(map(abs, errors)):.4%}.\n"
    )


def _figures(row: Data) -> str:
    if row["reason"]:
        return str(row["reason"])
    promised = "" if row["promised"] is None else f" ({row['promised']:.1%})"
    return f"{mib(row['peak_bytes'])}, {row['paid']:+.1%}{promised}"


def _is_same(whole: Data | None, row: Data) -> bool:
    return whole is not None and whole["input_shape"] == row["input_shape"]


def ablation(runs: Sequence[Data]) -> str:
    """A row for each part that is left out; a column for each wish."""
    found = [row for run in runs for row in run["rows"]]
    whole = {(row["arch"], row["wish"]): row["peak_bytes"] for row in found if row["without"] == "nothing"}
    wishes = list(dict.fromkeys(row["wish"] for row in found))
    more: dict[str, dict[str, list[float]]] = {}
    for row in found:
        share = row["peak_bytes"] / whole[row["arch"], row["wish"]] - 1
        more.setdefault(row["without"], {}).setdefault(row["wish"], []).append(share)
    more.pop("nothing", None)

    def cell(shares: list[float]) -> str:
        return f"{min(shares):+.0%} to {max(shares):+.0%}, {median(shares):+.0%}" if shares else "–"

    names = {"program order": "in another order"}
    cells = [
        [names.get(part, f"without {part}"), *(cell(of.get(wish, [])) for wish in wishes)] for part, of in more.items()
    ]
    networks = list(dict.fromkeys(row["arch"] for row in found))
    return table(" | ".join(["search", *wishes]), cells) + (f"\nOf {', '.join(networks)}.\n" if cells else "")


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
"""Characters: what a leaf returned may be a list of forty tensors. The rows have all of it."""

KINDS = ("equal", "different", "refused", "error", "not tried", "plain cannot")


def reason(error: str) -> str:
    """The first sentence, the first place of many, not all of a long list, paths without the machine's folders."""
    text = re.sub(r"\S*site-packages/", "", error.split(". ")[0]).replace("|", "/").rstrip(".")
    text = shorten(text, REASON_WIDTH, placeholder=" …")
    places = text.split("; ")
    if len(places) > 1 and " of a tensor at " in places[1]:
        return f"{places[0]} and {len(places) - 1} more place{'s' if len(places) > 2 else ''}"
    return text


def timing(runs: Sequence[Data]) -> str:
    """A row for each question; in it what misses the aim."""
    cells = []
    for run in runs:
        items = run.get("items")
        answers = findings([TimeRow.read(row) for row in run["rows"]], items and Items.read(items))
        cells += [[a.question, a.of, a.found, a.aim or "–", _first(a.missed)] for a in answers]
    return table("question | of | found | aim | misses it", cells)


MISSES = 4
"""Networks that are named in a cell; the run prints all of them, and all of their rows."""


def _first(missed: Sequence[str]) -> str:
    worst: dict[str, str] = {}
    for text in missed:
        worst.setdefault(re.split(r"[, ]", text)[0], text.replace("|", "/"))
    more = f" and {len(worst) - MISSES} more" if len(worst) > MISSES else ""
    return ("; ".join(list(worst.values())[:MISSES]) + more) or "–"


CLOSE = 0.05
"""Most by which a promised overhead is off that counts as kept, of the plain step."""


def on_cuda(runs: Sequence[Data]) -> str:
    """A row for each network that was measured on a GPU."""
    header = (
        "model | batch | plain | ogc | cut | published | ours / published | more time, promised | paid | more FLOPs "
        "| promised at the published memory"
    )
    found, cells = [row for run in runs for row in run["rows"]], []
    for row in found:
        known = row["published"]
        theirs = (known["theirs"], f"{row['ogc_bytes'] / MIB / known['theirs']:.2f}") if known else ("–", "–")
        at_theirs = "–" if row["overhead_at_theirs"] is None else f"{row['overhead_at_theirs']:.1%}"
        cells.append(
            [
                *(row["arch"], row["batch_size"], mib(row["plain_bytes"]), mib(row["ogc_bytes"]), cut(row), *theirs),
                *(f"{row['predicted_overhead']:.1%}", f"{more_time(row):.1%}", more_flops(row), at_theirs),
            ]
        )
    if not found:
        return ""
    off = [
        row[f"predicted_{k}bytes"] - row[f"{o}_bytes"] for row in found for k, o in (("", "ogc"), ("plain_", "plain"))
    ]
    against = ratio([row for row in found if row["published"]])
    kept = sum(abs(row["predicted_overhead"] - more_time(row)) <= CLOSE for row in found)
    return (
        f"{table(header, cells)}\nGeometric mean of ours over published: {against:.2f}. "
        f"Of {len(off)} peaks the largest difference from what is simulated is {max(map(abs, off)) / 1e3:.0f} kB, the "
        f"median {median(map(abs, off)):.0f} bytes. {kept} of {len(found)} promises are kept within {CLOSE * 100:.0f} "
        "points.\n"
    )
