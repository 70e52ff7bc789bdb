"""The page of :meth:`ogc.Plan.html`: numbers as JSON and tables, put into ``page.html``, which draws them."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..graph import MIB, Graph, Operation
from ..plan.plan import Plan, Table, fold, tables_of
from ..plan.schedule import FORWARD, Schedule
from ..plan.simulate import Event
from ..plan.timeline import LAYERS, Timeline

TEMPLATE = Path(__file__).with_name("page.html")

MOST_BYTES = 10**6
"""Of a page."""

MOST_ENTRIES = 4000
"""Events of a curve, and rows of a table, that are shown at first; fewer where the page would get too large."""

MOST_LETTERS = 160
"""Of a name; the middle of a longer one is left out."""


def write_page(graph: Graph, plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write what :meth:`ogc.Plan.html` promises."""
    text = page(graph, plan)
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)


def page(graph: Graph, plan: Plan) -> str:
    """The text of the page, of at most ``MOST_BYTES``: where it is larger, events are joined and rows left out.

    Raises:
        PlanError: the plan is plain, and the graph's operations are not the plain model's.
    """
    template, timeline = TEMPLATE.read_text("utf-8"), Timeline.of(graph, plan.decisions)
    texts = {"SUMMARY": escape(plan.summary), "ABOUT": escape(_about(graph, plan))}
    tables, rows = _tables(graph, plan), _folded_rows(graph, plan)
    entries = MOST_ENTRIES
    while True:
        texts["TABLES"] = "".join(_html(title, *table, entries) for title, table in tables)
        texts["VALUES"] = _html("Values", VALUE_COLUMNS, [_cells_of(graph, *each) for each in rows], entries)
        sizes = [row.bytes * layers for row, layers in rows[:entries]]
        texts["DATA"] = _json({**_curves(graph, plan, timeline, entries), "sizes": sizes})
        text = _filled(template, texts)
        if len(text.encode()) <= MOST_BYTES or entries == 1:
            return text
        entries //= 2


def _filled(template: str, texts: Mapping[str, str]) -> str:
    """The template with a text in each place, in one pass: names within the texts are none of its places."""
    return re.sub(r"@@(\w+)@@", lambda found: texts[found[1]], template)


# -- the curves --------------------------------------------------------------------------------------------------


def _curves(graph: Graph, plan: Plan, timeline: Timeline, most: int) -> dict[str, Any]:
    """What the page draws: sizes in bytes, places in operations run."""
    planned = _joined(timeline.edges, timeline.total, most)
    operations = graph.operations
    curves: dict[str, Any] = {
        "backward": timeline.backward,
        "peak": plan.peak_bytes,
        "plainPeak": timeline.plain_peak,
        "budget": plan.budget_bytes,
        "kinds": [[label, colour] for label, colour in LAYERS.values()],
        "edges": _rounded(timeline.edges, planned),
        "bytes": [timeline.layers[name][planned].tolist() for name in LAYERS],
        "events": _told(timeline.events, planned),
        "plain": None,
        "copies": _copies(graph, timeline)[: 2 * most],
    }
    used = {operation for _, operation in curves["events"]}
    if timeline.plain is not None and not timeline.is_plain:
        edges, sizes = timeline.plain
        chosen = _joined(edges, sizes, most)
        curves["plain"] = {
            "edges": _rounded(edges, chosen),
            "bytes": sizes[chosen].tolist(),
            "events": _told(timeline.plain_events, chosen),
        }
        used.update(operation for _, operation in curves["plain"]["events"])
    curves["operations"] = {t: _names(operations[t]) for t in sorted(used)}
    return curves


def _joined(edges: NDArray[np.float64], sizes: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Of events that follow one another the largest, so that at most so many are left: the peak is among them."""
    size = -(-len(sizes) // most) or 1
    starts = range(0, len(sizes), size)
    return np.array([start + int(sizes[start : start + size].argmax()) for start in starts], np.int64)


def _rounded(edges: NDArray[np.float64], chosen: NDArray[np.int64]) -> list[float]:
    """Where each of the chosen events begins, those before it in its stretch included, and the last ends."""
    size = -(-(len(edges) - 1) // len(chosen)) if len(chosen) else 1
    return [round(float(edge), 3) for edge in (*edges[:-1:size], edges[-1])]


def _told(events: Sequence[Event], chosen: NDArray[np.int64]) -> list[tuple[str, int]]:
    return [(events[number].phase, events[number].operation) for number in chosen.tolist()]


def _names(op: Operation) -> list[str]:
    return [_short(text) for text in (op.target or op.name, op.module, op.source)]


def _copies(graph: Graph, timeline: Timeline) -> list[list[Any]]:
    """Each copy: whether it goes out, from where to where, and its value, bytes and seconds."""
    found = []
    for one, start, stop in timeline.copies:
        value = graph.values[one.value]
        place = round(start, 3), round(stop, 3)
        found.append([one.is_out, *place, _short(value.name), value.bytes, one.start, one.stop])
    return found


def _json(data: object) -> str:
    """JSON that ends no script, whatever is in it."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


# -- the tables --------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """What becomes of a value, or of the internal tensors of an operation."""

    state: str  # "kept", "recomputed" or "offloaded"
    times: int  # that it is recomputed
    name: str
    bytes: int
    operation: int


def rows_of(schedule: Schedule) -> list[Row]:
    """A row for each value, and for the internal tensors of each operation, that is needed behind the forward."""
    graph, last = schedule.graph, schedule.last_needs
    times = Counter(v for run, v in last if run != FORWARD)
    rows = []
    for v, value in enumerate(graph.values):
        is_kept = value.is_output or last.get((FORWARD, v), -1) >= len(graph)
        state = "offloaded" if v in schedule.trips else "kept" if is_kept else "recomputed" if times[v] else ""
        if state and value.bytes:
            rows.append(Row(state, times[v], value.name, value.bytes, graph.producers[v]))
    for t, op in enumerate(graph.operations):
        if op.internal_bytes:
            state = "recomputed" if (is_again := schedule.keepers[t] != FORWARD) else "kept"
            rows.append(Row(state, int(is_again), f"internal tensors of {op.name}", op.internal_bytes, t))
    return sorted(rows, key=lambda row: row.operation)


VALUE_COLUMNS = ("what", "MiB each", "layers alike", "recomputed", "value", "module", "operator", "source")


def _folded_rows(graph: Graph, plan: Plan) -> list[tuple[Row, int]]:
    """A row for each value, and how many follow one another that are the same value of equal layers."""
    schedule = Schedule.of_step(graph, plan, "its values are not the plain model's")

    def look(row: Row) -> object:
        op = schedule.graph.operations[row.operation]
        return row.state, row.times, row.bytes, op.target, op.source, re.sub(r"\d+", "", op.module)

    return [(row, layers) for stretch, layers in fold(rows_of(schedule), look) for row in stretch]


def _cells_of(graph: Graph, row: Row, layers: int) -> tuple[str, ...]:
    op = graph.operations[row.operation]
    numbers = f"{row.bytes / MIB:.3f}", str(layers), str(row.times)
    return (row.state, *numbers, row.name, op.module, op.target or op.name, op.source)


def _tables(graph: Graph, plan: Plan) -> list[tuple[str, Table]]:
    shown_graph = graph.of_the_plain_model if plan.is_plain else graph
    titles = {"segment": "Segments", "low-memory": "Low-memory operators", "offloaded": "Offloaded values"}
    return [(titles[table[0][0]], table) for table in tables_of(shown_graph, plan.decisions)]


def _html(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], most: int) -> str:
    shown = rows[:most]
    right = [all(_NUMBER.fullmatch(row[column]) for row in shown) for column in range(len(header))]
    lines = chain(
        [f"<table><caption>{escape(title)}</caption><thead>", _line("th", header, right), "</thead><tbody>"],
        (_line("td", row, right) for row in shown),
        ["</tbody></table>\n", _left_out(len(rows) - most)],
    )
    return "".join(lines)


_NUMBER = re.compile(r"[+-]?[\d.,]*%?")


def _left_out(count: int) -> str:
    return f"<p>{count} more rows are left out; print(plan) has all segments.</p>\n" if count > 0 else ""


def _line(tag: str, cells: Sequence[str], right: Sequence[bool]) -> str:
    return f"<tr>{''.join(_cells(tag, cells, right))}</tr>\n"


def _cells(tag: str, cells: Sequence[str], right: Sequence[bool]) -> Iterator[str]:
    for cell, is_number in zip(cells, right, strict=True):
        yield f"<{tag}{' class=n' if is_number else ''}>{escape(_short(cell))}</{tag}>"


def _short(text: str) -> str:
    if len(text) <= MOST_LETTERS:
        return text
    half = MOST_LETTERS // 2
    return f"{text[:half]}…{text[1 - half :]}"


def _about(graph: Graph, plan: Plan) -> str:
    return (
        f"{len(graph)} operations on {graph.device}, weighed by profile {graph.profile!r}; solver {plan.solver!r}; "
        f"no plan of any kind below {plan.lower_bound / MIB:.1f} MiB"
    )
