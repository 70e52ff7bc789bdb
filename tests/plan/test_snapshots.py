"""Snapshots of plans: the viewers of torch take them, live bytes peak where the plan does, and no block overlaps."""

import pickle
import pickletools
import random
from dataclasses import replace

import pytest
import torch
import torchvision
from helpers import chain, random_graph, random_plans
from test_chunking import Wide
from test_offload_plans import random_offloads
from torch import nn
from torch.cuda import _memory_viz as viewer

import ogc
from ogc.sizing.snapshots import snapshot


def snapshot_of(plan):
    return snapshot(plan.graph, plan.decisions)


def peaks_of(found):
    """The most bytes alive on each device; each block is allocated where nothing else is, and freed as it was made."""
    peaks = []
    for trace in found["device_traces"]:
        alive, segments, total, most = {}, {}, 0, 0
        for event in trace:
            address, size = event["addr"], event["size"]
            if event["action"] == "segment_alloc":
                assert not any(a < address + size and address < a + s for a, s in segments.items())
                segments[address] = size
            elif event["action"] == "alloc":
                assert not any(a < address + size and address < a + s for a, s in alive.items())
                assert any(a <= address and address + size <= a + s for a, s in segments.items())
                alive[address] = size
                total += size
            elif event["action"] == "free_completed":
                assert alive.pop(address) == size
                total -= size
            else:
                assert event["action"] == "free_requested" and alive[address] == size
            most = max(most, total)
        peaks.append(most)
        assert sum(alive.values()) == sum(
            segment["requested_size"] for segment in found["segments"] if segment["device"] == len(peaks) - 1
        )
    return peaks


def assert_torch_shows(found):
    for shown in (
        viewer.trace_plot(found),
        viewer.trace_plot(found, plot_segments=True),
        viewer.segment_plot(found),
    ):
        assert "MemoryViz.js" in shown
    assert "cudaMalloc" in viewer.trace(found)
    assert "total_reserved" in viewer.segsum(found)
    for lines in (viewer.segments(found, str), viewer.memory(found, str)):
        assert all(line.rpartition(" ")[2].isdecimal() for line in lines.splitlines())
    left = viewer.filter_alloc_free_pairs(found)
    assert {event["action"] for trace in left["device_traces"] for event in trace} <= {"segment_alloc", "alloc"}


def test_live_bytes_of_random_plans_peak_where_they_do():
    for seed in range(40):
        graph = random_graph(seed, 12)
        for plan in random_plans(graph, random.Random(seed), 2):
            assert peaks_of(snapshot_of(plan)) == [plan.peak_bytes, plan.plain_peak_bytes]


def test_live_bytes_of_plans_that_offload_peak_where_they_do():
    fetched = 0
    for graph, decisions in random_offloads(60):
        plan = ogc.make_plan(graph, decisions)
        found = snapshot_of(plan)
        assert peaks_of(found) == [plan.peak_bytes, plan.plain_peak_bytes]
        times = [event["time_us"] for event in found["device_traces"][0]]
        assert times == sorted(times)
        fetched += sum(event["category"] == "fetched value" for event in found["device_traces"][0])
    assert fetched > 20


class Words(nn.Module):
    """Causal attention over embedded words, as in GPT-2."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(3))
        self.head = nn.Linear(32, 50)

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


NETWORKS = {
    "resnet18": (lambda: torchvision.models.resnet18(num_classes=10), lambda: torch.randn(2, 3, 64, 64)),
    "words": (Words, lambda: torch.randint(50, (2, 16))),
}


@pytest.mark.parametrize("name", ["words", pytest.param("resnet18", marks=pytest.mark.full)])
def test_torch_shows_a_snapshot_of_a_network(name, tmp_path):
    make, sample = NETWORKS[name]
    graph = ogc.parse(make(), sample(), profile="estimate")
    plan = ogc.solve(graph, memory_budget="least")
    plan.snapshot(tmp_path / "plan.pickle")
    found = pickle.loads((tmp_path / "plan.pickle").read_bytes())
    assert peaks_of(found) == [plan.peak_bytes, plan.plain_peak_bytes]
    assert_torch_shows(found)


@pytest.mark.full
def test_a_snapshot_of_a_plan_that_offloads(tmp_path):
    folder = str(tmp_path)
    model = ogc.optimize(
        nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6))),
        torch.randn(512, 64), memory_budget=0.6, offload=folder, bandwidth=1e12,
    )  # fmt: skip
    assert model.plan.offloaded
    found = snapshot_of(model.plan)
    assert peaks_of(found)[0] == model.plan.peak_bytes
    fetched = [event for event in found["device_traces"][0] if event["category"] == "fetched value"]
    assert len(fetched) == len(model.plan.offloaded)
    assert_torch_shows(found)


def test_frames_say_line_modules_and_phase():
    graph = chain([100, 200, 300], internal_bytes=7)
    operations = (replace(op, module="body.0.fc", source="net.py:12") for op in graph.operations)
    plan = ogc.make_plan(replace(graph, operations=tuple(operations)), [ogc.recomputed(0, 2), ogc.saved(2, 3)])
    trace = snapshot_of(plan)["device_traces"][0]
    assert [event["action"] for event in trace[:3]] == ["segment_alloc", "alloc", "alloc"]
    frames = trace[1]["frames"]
    assert frames[0] == {"filename": "net.py", "line": 12, "name": "body.0.fc: op0, value"}
    assert [frame["name"] for frame in frames[1:]] == ["body.0.fc", "body.0", "body", "forward"]
    again = [event for event in trace if event["action"] == "alloc" and event["category"] == "recomputed value"]
    assert [event["size"] for event in again] == [100, 200]
    assert {event["frames"][-1]["name"] for event in again} == {"recomputation"}
    times = [event["time_us"] for event in trace]
    assert times == sorted(times) and times[-1] > 6e6


OPCODES = {
    *("PROTO", "FRAME", "MEMOIZE", "STOP", "MARK", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "NONE", "NEWTRUE"),
    *("NEWFALSE", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINGET", "LONG_BINGET"),
}
"""What torch/utils/viz/MemoryViz.js reads of a pickle."""


def test_the_viewer_on_the_web_can_read_the_file(tmp_path):
    """It wants a category of that name where there are any, and its numbers are doubles."""
    graph = ogc.parse(Words(), torch.randint(50, (2, 16)), profile="estimate")
    ogc.solve(graph, memory_budget="least").snapshot(tmp_path / "plan.pickle")
    written = (tmp_path / "plan.pickle").read_bytes()
    assert {opcode.name for opcode, _, _ in pickletools.genops(written)} <= OPCODES
    assert written[:2] == b"\x80\x04"
    events = [event for trace in pickle.loads(written)["device_traces"] for event in trace]
    assert "unknown" in {event["category"] for event in events}
    assert max(event["addr"] for event in events) < 2**53


def test_a_plain_plan_is_one_step_and_chunks_hide_the_plain_one():
    graph = chain([100, 200, 300])
    found = snapshot_of(ogc.solve(graph, solver="none"))
    assert peaks_of(found) == [ogc.solve(graph).plain_peak_bytes]
    model, x = Wide(), torch.randn(10, 3, 32, 32)
    graph, plan = ogc.chunk_batch(model, x, ogc.parse(model, x), chunks=4)
    assert peaks_of(snapshot_of(plan)) == [plan.peak_bytes]
    with pytest.raises(ogc.PlanError, match="runs chunk by chunk"):
        snapshot_of(ogc.solve(graph, solver="none"))
