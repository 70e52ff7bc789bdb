"""The page of a plan: its numbers are the simulator's, its tables those of print(plan), and names are only text."""

import json
import random
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
import torchvision
from helpers import chain, random_graph, random_plans
from test_chunking import Wide
from torch import nn

import ogc
from ogc.looking.page import MOST_BYTES, page, rows_of
from ogc.plan.schedule import FORWARD, Schedule

HOST = ogc.Host(out=4.0, back=2.0)


class Reader(HTMLParser):
    """What a browser would find: tables by their captions, the numbers, and every address; tags have to match."""

    VOID = ("meta", "input", "br")

    def __init__(self, text):
        super().__init__()
        self.open, self.tables, self.scripts, self.addresses, self.title = [], {}, [], [], ""
        self.feed(text)
        self.close()
        assert not self.open
        self.data = json.loads(self.scripts[0])

    def handle_starttag(self, tag, attributes):
        self.addresses += [value for name, value in attributes if name in ("src", "href", "action", "data")]
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "table":
            self.rows = []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.scripts.append(data)
        elif self.open[-1:] == ["h1"]:
            self.title = data
        elif self.open[-1:] == ["caption"]:
            self.tables[data] = self.rows
        elif self.open[-1:] in (["td"], ["th"]):
            self.rows[-1][-1] += data


def page_of(plan):
    text = page(plan.graph, plan)
    assert len(text.encode()) <= MOST_BYTES
    assert "http:" not in text and "https:" not in text and "default-src 'none'" in text
    found = Reader(text)
    assert not found.addresses
    return found


def totals(data):
    return [sum(sizes) for sizes in zip(*data["bytes"], strict=True)]


def test_curves_are_the_simulators():
    for seed in range(30):
        graph = random_graph(seed, 14)
        for plan in random_plans(graph, random.Random(seed), 2):
            data = page_of(plan).data
            simulated = ogc.simulate(graph, plan)
            assert totals(data) == [event.bytes for event in simulated.timeline]
            assert data["events"] == [[event.phase, event.operation] for event in simulated.timeline]
            assert max(data["plain"]["bytes"]) == plan.plain_peak_bytes == data["plainPeak"]
            assert len(data["edges"]) == len(data["events"]) + 1
            assert data["edges"] == sorted(data["edges"])
            assert max(totals(data)) == plan.peak_bytes == data["peak"]


def test_values_are_kept_recomputed_or_offloaded():
    graph = replace(chain([10, 20, 30, 40, 50, 60]), host=HOST)
    plan = ogc.make_plan(graph, [ogc.recomputed(0, 3), ogc.saved(3, 6)], offloaded=[ogc.Offload(3, gone=5, back=4)])
    schedule = Schedule(graph, plan.decisions)
    assert [(row.state, row.times, row.name) for row in rows_of(schedule)] == [
        ("recomputed", 1, "v0"), ("recomputed", 1, "v1"), ("kept", 0, "v2"), ("offloaded", 0, "v3"),
        ("kept", 0, "v4"), ("kept", 0, "v5"),
    ]  # fmt: skip
    found = page_of(plan)
    assert [row[0] for row in found.tables["Values"]] == ["what", *(row.state for row in rows_of(schedule))]
    copies = [(is_out, name, size) for is_out, _, _, name, size, _, _ in found.data["copies"]]
    assert copies == [(True, "v3", 40), (False, "v3", 40)]
    assert [row[:4] for row in found.tables["Offloaded values"][1:]] == [["v3", "", "", "0.00"]]


def test_what_is_kept_is_there_when_the_backward_begins():
    """Beside what is returned and let go of, the simulator's first backward finds what the page says is kept."""
    seen = 0
    for seed in range(60):
        graph = random_graph(seed, 14)
        for plan in random_plans(graph, random.Random(seed), 2):
            schedule = Schedule(graph, plan.decisions)
            rows = rows_of(schedule)
            there = {v for (run, v), last in schedule.last_needs.items() if run == FORWARD and last >= len(graph)}
            there |= {v for v, value in enumerate(graph.values) if value.is_output}
            kept = sum(row.bytes for row in rows if row.state == "kept" and not row.name.startswith("internal"))
            assert kept == sum(graph.values[v].bytes for v in there)
            again = {(run, v) for run, v in schedule.last_needs if run != FORWARD}
            by_name = {row.name: row.times for row in rows}
            for v, value in enumerate(graph.values):
                assert by_name.get(value.name, 0) == sum(w == v for _, w in again if value.bytes)
            seen += 1
    assert seen > 50


@pytest.mark.full
def test_a_network_folds_equal_layers_as_it_is_printed(tmp_path):
    block = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    model = nn.Sequential(nn.Linear(32, 32), nn.TransformerEncoder(block, 8, enable_nested_tensor=False))
    graph = ogc.parse(model, torch.randn(4, 16, 32), profile="estimate")
    plan = ogc.solve(graph)
    plan.html(tmp_path / "plan.html")
    found = Reader((tmp_path / "plan.html").read_text("utf-8"))
    assert found.title == plan.summary
    printed = [re.split(r"\s{2,}", line.strip()) for line in str(plan).splitlines()]
    for row in found.tables["Segments"]:
        assert [cell for cell in row if cell] in printed
    rows = found.tables["Values"][1:]
    assert max(int(row[2]) for row in rows) > 2
    assert sum(found.data["sizes"]) == sum(row.bytes for row in rows_of(Schedule(graph, plan.decisions)))
    assert all(re.fullmatch(r"\w+\.py:\d+", row[-1]) for row in rows)


@pytest.mark.full
def test_a_network_with_copies(tmp_path):
    model, images = torchvision.models.resnet18(num_classes=10), torch.randn(4, 3, 64, 64)
    plan = ogc.optimize(model, images, memory_budget=0.75, offload=str(tmp_path), bandwidth=1e12).plan
    assert plan.offloaded
    found = page_of(plan)
    assert len(found.data["copies"]) == 2 * len(plan.offloaded)
    offloaded = [row for row in found.tables["Values"] if row[0] == "offloaded"]
    assert sum(int(row[2]) for row in offloaded) == len(plan.offloaded)
    assert found.data["budget"] == plan.budget_bytes


HOSTILE = "</script><script>alert('@@DATA@@')</script><b>&amp;\"'"


def test_names_are_only_text():
    graph = chain([10, 20, 30])
    values = tuple(replace(value, name=HOSTILE) for value in graph.values)
    operations = (replace(op, name=HOSTILE, module=HOSTILE, source=HOSTILE) for op in graph.operations)
    plan = ogc.solve(replace(graph, operations=tuple(operations), values=values))
    found = page_of(plan)
    assert len(found.scripts) == 2
    assert {row[5] for row in found.tables["Values"][1:]} == {HOSTILE}
    assert found.data["operations"]["0"] == [HOSTILE] * 3


@pytest.mark.full
def test_a_page_stays_small_whatever_the_model():
    graph = chain(list(range(1, 6001)))
    operations = (
        replace(op, module=f"{'a_long_name.' * 30}{t * t % 9973}", source=f"{t % 97}.py:{t}")
        for t, op in enumerate(graph.operations)
    )
    plan = ogc.solve(replace(graph, operations=tuple(operations)), solver="chen")
    text = page(plan.graph, plan)
    assert len(text.encode()) <= MOST_BYTES
    found = Reader(text)
    assert max(totals(found.data)) == plan.peak_bytes
    assert max(found.data["plain"]["bytes"]) == plan.plain_peak_bytes
    assert "more rows are left out" in text
    assert len(found.data["edges"]) == len(found.data["events"]) + 1 and found.data["edges"][-1] > 12_000


def test_plain_plans_and_chunks():
    graph = chain([10, 20, 30])
    found = page_of(ogc.solve(graph, solver="none"))
    assert found.data["plain"] is None and {row[0] for row in found.tables["Values"][1:]} == {"kept"}
    model, x = Wide(), torch.randn(10, 3, 32, 32)
    graph, plan = ogc.chunk_batch(model, x, ogc.parse(model, x), chunks=4)
    found = page_of(plan)
    assert found.data["plain"] is None and found.data["plainPeak"] == plan.plain_peak_bytes
    with pytest.raises(ogc.PlanError, match="runs chunk by chunk"):
        ogc.solve(graph, solver="none").html("never.html")


def test_an_empty_graph_has_a_page():
    assert page_of(ogc.solve(ogc.Graph((), ()))).data["bytes"] == [[]] * 5


@pytest.mark.parametrize("write", [ogc.Plan.html, ogc.Plan.snapshot])
def test_what_cannot_be_written_is_an_error(write, tmp_path):
    plan = ogc.solve(chain([100, 200]))
    with pytest.raises(OSError):
        write(plan, tmp_path / "no folder" / "plan")
    with pytest.raises(ogc.PlanError, match="does not know its graph"):
        write(replace(plan, graph=None), tmp_path / "plan")
    assert not list(tmp_path.iterdir())


class Routes(nn.Module):
    """Reads a number between its blocks, so that these are planned one by one."""

    def __init__(self):
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Tanh()) for _ in range(3))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            x = x * 2 if x.sum().item() > 0 else x * 3
        return x


@pytest.mark.full
def test_each_part_of_a_model_has_a_plan_to_look_at(tmp_path):
    plans = ogc.optimize(Routes(), torch.randn(256, 64), memory_budget="least").plan
    assert isinstance(plans, ogc.PartsPlan) and plans.parts
    for part in plans.parts:
        assert max(totals(page_of(part.plan).data)) == part.plan.peak_bytes
        part.plan.snapshot(tmp_path / "part.pickle")
