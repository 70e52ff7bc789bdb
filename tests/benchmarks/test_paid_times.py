"""What was measured of promised and paid times holds what the documents say."""

import json
import re
from statistics import geometric_mean, median

import pytest

from benchmarks.suites import RESULTS, ROOT
from benchmarks.timing.aims import MEDIAN_OFF, OF_BLOCKS_MEAN, WORST_OFF, over_blocks
from benchmarks.timing.networks import SUBJECTS, TINY
from benchmarks.timing.row import BLOCKS, NOTHING, OF_BLOCKS, OF_SELECTIVE, SELECTIVE, TimeRow

ROWS = {
    device: [TimeRow.read(row) for row in json.loads((RESULTS / "time" / f"{device}.json").read_text())["rows"]]
    for device in ("cpu", "cuda")
}

MISSED = {
    "cpu": {TINY, "gpt2_small", "resnext50_32x4d", "shufflenet_v2_x1_0"},
    "cuda": {"swin_t", "llama", "regnet_y_400mf", "mobilenet_v3_large"},
}
"""Where a promise is further off than it may be: expected to fail. Of the tiny network, what Python finds in the caches
decides. The others on a CPU were timed on a virtual machine on which two plain steps are up to 3.0 points apart; on the
GPU the middle half of their plans' rounds is up to 23 points wide."""

NETWORKS = {"cpu": len(SUBJECTS), "cuda": 15}

on_both = pytest.mark.parametrize("device", ROWS)


def by_network(device, way):
    return {row.arch: row for row in ROWS[device] if row.way == way and row.paid is not None}


@on_both
def test_every_network_was_measured(device):
    found = set(by_network(device, NOTHING))
    assert found <= set(SUBJECTS) and len(found) == NETWORKS[device]


@on_both
def test_a_step_pays_what_its_plan_promises_in_the_median(device):
    planned = [row for row in ROWS[device] if row.promised is not None]
    assert len(planned) > 5 * NETWORKS[device] and all(row.is_bitwise for row in planned)
    assert median(abs(row.off) for row in planned) <= MEDIAN_OFF


@pytest.mark.parametrize(
    ("device", "name"),
    [
        pytest.param(device, name, marks=pytest.mark.xfail(strict=True) if name in MISSED[device] else ())
        for device in ROWS
        for name in by_network(device, NOTHING)
    ],
)
def test_the_worst_promise_of_a_network_is_kept(device, name):
    assert all(abs(row.off) <= WORST_OFF for row in ROWS[device] if row.arch == name)


@on_both
def test_at_the_memory_of_others_plans_pay_less(device):
    for our_way, their_way in ((OF_BLOCKS, BLOCKS), (OF_SELECTIVE, SELECTIVE)):
        ours, theirs = by_network(device, our_way), by_network(device, their_way)
        assert len(ours) > 0.7 * NETWORKS[device] and all(row.paid < theirs[arch].paid for arch, row in ours.items())
    assert geometric_mean(over_blocks(ROWS[device]).values()) <= OF_BLOCKS_MEAN


@pytest.mark.parametrize("row", [*ROWS["cpu"], *ROWS["cuda"]], ids=lambda row: f"{row.arch}, {row.device}: {row.way}")
def test_a_plan_needs_what_it_promises(row):
    assert not row.predicted_bytes or row.peak_bytes == pytest.approx(row.predicted_bytes, rel=0.03)


def test_the_docs_name_the_networks_whose_promises_a_gpu_does_not_keep():
    page = " ".join((ROOT / "docs" / "cuda.md").read_text(encoding="utf-8").split())
    assert set(re.findall(r"`(\w+)`", page.split("More than five are plans of")[1].split(":")[0])) == MISSED["cuda"]
