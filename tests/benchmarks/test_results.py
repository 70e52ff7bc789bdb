"""Committed results are those that a suite makes, hold what is said of them, and are what the documents show."""

import json
import re
from collections import defaultdict
from dataclasses import replace
from statistics import geometric_mean, median

import pytest
import torch

import benchmark
import ogc
from benchmarks.cases import CASES, PUBLISHED
from benchmarks.experiments import BLOCKS, NOTHING, OF_BLOCKS, OF_SELECTIVE, SELECTIVE, TIME, TINY
from benchmarks.hollow import errors
from benchmarks.instances import CARD, GIB
from benchmarks.layers import OVERHEAD
from benchmarks.measuring import MIB
from benchmarks.networks.search_space import NETWORKS
from benchmarks.offloaded import GPUS
from benchmarks.offloaded import NETWORKS as OFFLOADED
from benchmarks.polished import GOALS, above
from benchmarks.results import write_json
from benchmarks.row import Row, with_verdicts
from benchmarks.running import CPU_BATCH_SIZE
from benchmarks.sizes import NETWORKS as SIZES
from benchmarks.suites import FULL, RESULTS, ROOT, SUITES
from benchmarks.summaries import beating, families, of_theirs, quicker_within, reason, rows_of, zoo
from benchmarks.tables import document, files, inserted, of_many_sizes, on_gpus, on_many_devices, rows, with_offloads
from benchmarks.timing import MEDIAN_OFF, OF_BLOCKS_MEAN, WORST_OFF, over_blocks
from ogc.plan.simulate import plain_peak

TEXT, DEVICES, CUDA, PLANS, TRAINING, OFFLOAD = (
    (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("results", "devices", "cuda", "plans", "training", "offload")
)
BY_FILE = {run["file"]: run for run in files("**/*.json")}
OF_WAYS = ("cpu_", "cuda_", "compare/", "time/", "families", "compiled", "logits")
ON_CUDA = rows_of([BY_FILE["cuda_published.json"]])


def test_the_documents_are_those_of_the_results():
    for found, page in (
        (document(), TEXT),
        (inserted(CUDA, *on_gpus()), CUDA),
        (inserted(DEVICES, on_many_devices()), DEVICES),
        (inserted(TRAINING, of_many_sizes()), TRAINING),
        (inserted(OFFLOAD, with_offloads()), OFFLOAD),
    ):
        assert found == page, "run python -m benchmarks.tables"
    assert len(TEXT.encode()) <= 15_000
    for block in re.findall(r"(?:^\|.*\n)+", TEXT, re.MULTILINE):
        assert len({line.count("|") for line in block.splitlines()}) == 1, block
    for name in {row.arch for row in rows()}:
        assert TEXT.count(f"\n| {name} |") >= 2  # published, and solvers at batch 4


def test_every_file_is_one_that_a_suite_writes_and_that_a_document_says_how_to_make():
    full, cuda = ({run.file for run in SUITES[name].runs} for name in ("full", "cuda"))
    assert full <= BY_FILE.keys() <= full | cuda
    for run in FULL:
        said = rf"`(python benchmark.py --suite full )?--only[^`]* {run.name}\b"
        assert re.search(said, TEXT + DEVICES + CUDA + TRAINING + OFFLOAD), run.name


def test_every_file_has_what_its_run_measures():
    """Where the run names networks, these; peaks of plans as simulated, and the bits of ogc's rows plain ones."""
    for run in FULL:
        data = BY_FILE[run.file]
        if run.arguments.startswith("benchmark.py"):
            options = benchmark.options_of(run.arguments.split()[1:])
            assert {row["arch"] for row in data["rows"]} == set(options.arch), run.name
            for row in data["rows"]:
                size = PUBLISHED[row["arch"]].batch_size if options.batch_size == "published" else None
                assert row["input_shape"][0] == (size or options.batch_size or CPU_BATCH_SIZE)
                assert row.get("chunks", 1) == options.chunks
        if " torchvision " in run.arguments:
            named = run.arguments.split(" torchvision ")[1].split()
            assert {row["name"] for row in data["rows"]} == set(named)
    for name, data in BY_FILE.items():
        for row in rows_of([data]) if name.startswith(OF_WAYS) else ():
            if row.predicted_bytes:
                # what compiles is planned with temporaries of its own
                assert row.predicted_bytes == pytest.approx(row.peak_bytes, rel=0.1 if "compile" in row.way else 0.03)
            if row.promised is not None and row.chunks == 1 and not re.search("chunks|compile", row.way):
                assert (row.deviation, row.differs) == (0.0, ()), (name, row)


def test_published_rows():
    """Peaks below the published ones, and overheads by profile and by FLOPs within them."""
    assert len(rows()) == 18
    for row in rows():
        assert max(row.more_flops, row.promised) <= row.published["overhead"] and of_theirs(row) < 1
    whole = {row.arch: row for row in rows()}
    chunked = {row.arch: row for row in rows("cpu_chunked*.json")}
    for found, most, without_cells in ((whole, 0.55, 0.60), (whole | chunked, 0.48, 0.50)):
        ratios = {name: of_theirs(row) for name, row in found.items()}
        assert geometric_mean(ratios.values()) <= most
        assert geometric_mean(ratio for name, ratio in ratios.items() if name not in NETWORKS) <= without_cells
    # What is run again in the published memory has few FLOPs. DenseNet-121 runs all norms, ReLUs and concatenations
    # again: 2 % of the FLOPs, and 15 % of the time. It was promised 16 % and paid 15 %.
    for kind, most in (("overhead", 0.19), ("flops", 0.08)):
        ratios = [max(0.01, getattr(row, f"{kind}_at_theirs")) / row.published["overhead"] for row in rows()]
        assert max(ratios) <= 0.60 and geometric_mean(ratios) <= most
    page, (found, instead) = " ".join(PLANS.split()), (round(of["vgg16"].peak_bytes / MIB) for of in (chunked, whole))
    assert f"VGG-16 at batch 64 then peaks at {found} MiB instead of {instead}, within" in page
    assert "no gradient is off by more than 4e-5 of" in page and chunked["vgg16"].deviation <= 4e-5


def test_comparisons():
    """No method is missing, verdicts are those of the figures, and ours are beaten by none."""
    for name in (name for name in BY_FILE if name.startswith("compare/")):
        found = rows_of([BY_FILE[name]])
        by_way = {row.way: row for row in found}
        assert {"plain", "blocks", "sequential", "selective", "chen", "uniform", "binomial"} <= by_way.keys()
        assert with_verdicts(found) == found and not beating(found)
        for peer in (by_way["blocks"], by_way["sequential"]):
            ours = [row for row in found if row.is_ours]
            is_beaten = any(row.peak_bytes <= peer.peak_bytes and row.flops <= peer.flops for row in ours)
            assert is_beaten if peer.peak_bytes else peer.reason


def test_each_part_of_the_search_gains_somewhere():
    by_part = defaultdict(dict)
    for row in BY_FILE["ablation.json"]["rows"]:
        assert row["predicted_bytes"] == pytest.approx(row["peak_bytes"], rel=0.03)
        by_part[row["without"]][row["arch"], row["goal"]] = row["peak_bytes"]
    whole = by_part.pop("nothing")
    gains = {part: max(1 - whole[key] / peak for key, peak in found.items()) for part, found in by_part.items()}
    assert gains["nested plans"] > 0.4 and gains["saved values"] > 0.15 and gains["recomputed values"] > 0.02


def test_published_instances():
    """Ours fit more than Checkmate's, and within MONeT's budgets as hollow runs do."""
    by_name = {row["arch"]: row for row in BY_FILE["instances.json"]["rows"]}
    for row in by_name.values():
        if "points" in row:
            assert len(row["points"]) == 6 and 0.9 < row["plain_bytes"] / GIB / row["published_plain"] < 1.45
        for point in row.get("points", ()):
            assert point["hollow_bytes"] == pytest.approx(point["bytes"], rel=5e-3)
            assert "least_bytes" in point or point["bytes"] <= point["budget"] * GIB
    for name in ("vgg_unet", "mobilenet_v1"):
        row = by_name[name]
        assert row["batch_size"] > 1.3 * row["published_batch"] and row["overhead"] <= 0.34 and row["bytes"] <= CARD
    assert all(point["overhead"] < point["published"] for point in by_name["googlenet"]["points"])


def test_more_layers_leave_a_smaller_share_of_the_peak():
    shares = [row["peak_bytes"] / row["plain_bytes"] for row in BY_FILE["layers.json"]["rows"]]
    assert len(shares) == 4 and shares == sorted(shares, reverse=True)
    assert all(row["overhead"] <= OVERHEAD for row in BY_FILE["layers.json"]["rows"])


def test_plans_of_the_default_effort_are_near_the_best_known():
    found = BY_FILE["polished.json"]["rows"]
    assert {row["goal"] for row in found} == {*GOALS}
    worse = sorted(above(row) for row in found if "peak_bytes" in row)
    assert median(worse) <= 0.005 and worse[9 * len(worse) // 10] <= 0.05


def test_what_fits_was_measured_to_stay_within_the_device():
    fitting = [row for run in files("largest/cpu*.json") for row in run["rows"]]
    for row in fitting:
        ours = row["ours"].values()
        steps = [step["bytes"] for step in (row["plain_step"], row["blocks_step"]) if step]
        assert len(steps) == bool(row["plain"]) + bool(row["blocks"])
        assert max(*steps, *(one["measured_bytes"] for one in ours)) <= row["device_memory"]
        for share, one in row["ours"].items():
            assert one["next_does_not_fit"] == one["size"] + 1 and one["overhead"] <= float(share.strip("%")) / 100
            assert one["factor"] == (one["size"] / row["plain"] if row["plain"] else None)
        assert row["plain"] <= row["ours"]["20%"]["size"] <= row["ours"]["50%"]["size"] >= row["blocks"]
        assert row["search_seconds"] < 300
    assert geometric_mean([row["ours"]["50%"]["factor"] for row in fitting if row["plain"]]) > 4


def test_many_devices():
    found = BY_FILE["devices.json"]["rows"]
    assert len(found) == 3 and all(row["is_plain"] and row["batch_size"] == 8 for row in found)


def test_offloading_never_takes_longer_and_long_sequences_gain_the_most():
    found = BY_FILE["offloaded.json"]["rows"]
    assert {(row["arch"], row["gpu"]) for row in found} == {(n, gpu) for n in OFFLOADED for gpu in GPUS}
    for row in found:
        assert row["overhead"] <= row["alone_overhead"] <= row["blocks_overhead"]
        assert row["peak_bytes"] <= row["blocks_bytes"]
        assert row["hollow_bytes"] == pytest.approx(row["peak_bytes"], rel=0.005)
    share = {row["arch"]: row["overhead"] / row["alone_overhead"] for row in found}
    assert max(share[name] for name in ("llama_8b, 8k", "llama_8b, 128k")) < 0.5


def test_a_new_size_takes_less_than_a_plain_step_more_than_a_known_one():
    """All calls of 40 lengths, 12 sizes of images and of graphs run by plans; narrow models have the most Python."""
    found = {row["arch"]: row for row in BY_FILE["sizes.json"]["rows"]}
    assert found.keys() == SIZES.keys() and not any(row["plain_calls"] for row in found.values())
    more = {name: row["first"] - row["known"] for name, row in found.items()}
    assert all(extra < 1.1 for extra in more.values()) and sum(extra < 0.7 for extra in more.values()) >= 3


# -- promised and paid --------------------------------------------------------------------------------------------

MISSED = {
    "cpu": {TINY, "lstm"},
    "cuda": {"swin_t", "llama", "regnet_y_400mf", "mobilenet_v3_large"},
}
"""Where a promise is further off than it may be. Of the tiny network, what Python finds in the caches decides, as its
operations are timed with emptied ones; an LSTM's backward is one operation, which finds others there, too. On the GPU
the middle half of their plans' rounds is up to 23 points wide."""


@pytest.mark.parametrize(("device", "networks"), [("cpu", len(TIME.sizes)), ("cuda", 15)])
def test_a_step_pays_what_its_plan_promises(device, networks):
    found = rows_of([BY_FILE[f"time/{device}.json"]])
    by_way = defaultdict(dict)
    for row in found:
        if row.paid is not None:
            by_way[row.way][row.arch] = row
    assert by_way[NOTHING].keys() <= TIME.sizes.keys() and len(by_way[NOTHING]) == networks
    planned = [row for row in found if row.promised is not None]
    assert len(planned) > 5 * networks and median(abs(row.off) for row in planned) <= MEDIAN_OFF
    assert {row.arch for row in planned if abs(row.off) > WORST_OFF} == MISSED[device]
    for ours, theirs in ((OF_BLOCKS, BLOCKS), (OF_SELECTIVE, SELECTIVE)):
        assert len(by_way[ours]) > 0.7 * networks
        assert all(row.paid < by_way[theirs][arch].paid for arch, row in by_way[ours].items())
    assert geometric_mean(over_blocks(found).values()) <= OF_BLOCKS_MEAN


def test_on_cuda():
    """Peaks are what was asked for, to a page of a small tensor: 184 bytes are two scalars and 44 of bookkeeping."""
    page = " ".join(CUDA.split())
    for row in ON_CUDA:
        assert row.predicted_bytes == pytest.approx(row.peak_bytes, abs=256)
        assert row.predicted_plain_bytes == pytest.approx(row.plain_bytes, rel=5e-5)
        assert not row.unrepeatable
    bound_by_host = re.findall(r"`(\w+)`", re.search(r"the host bounds the step: ([^.]*)\.", page)[1])
    assert {row.arch for row in ON_CUDA if abs(row.off) > 0.05} == set(bound_by_host)
    assert set(re.findall(r"`(\w+)`", page.split("five points off for plans of")[1].split(".")[0])) == MISSED["cuda"]
    said = "`python benchmark.py --suite cuda --only published`; "
    assert said in on_gpus()[0] and "NVIDIA H200, 16 cores" in on_gpus()[0]
    off = [abs(error) for row in BY_FILE["hollow.json"]["rows"] for error in errors(row)]
    assert len(off) == 60 and max(off) < 0.006 and sum(error > 0.001 for error in off) <= 1


def planned_without_it(name):
    """The plain peak of a row, planned for an H200 that is not there."""
    with torch.device("meta"):
        model = CASES[name].build().train()
    sample = CASES[name].input.sample(CASES[name].batch_size)
    return plain_peak(ogc.parse(model, sample, device="cuda", profile="estimate", gpu="H200"))


@pytest.mark.full
@pytest.mark.parametrize("name", ["vgg11", "gpt2_small"])
def test_an_h200_allocates_what_is_planned_without_it(name):
    (row,) = (row for row in ON_CUDA if row.arch == name)
    assert planned_without_it(name) == pytest.approx(row.plain_bytes, abs=256)


@pytest.mark.slow
def test_all_that_is_said_of_plans_without_a_gpu():
    off = [planned_without_it(row.arch) / row.plain_bytes - 1 for row in ON_CUDA]
    assert sum(abs(share) < 1e-6 for share in off) == 13 and min(off) > -0.042 and max(off) < 1e-6
    assert "13 of the 20 plain peaks" in CUDA and "up to 4.2 % below" in CUDA


# -- the document of other results --------------------------------------------------------------------------------


def section(folder, title):
    return document(folder).split(f"## {title}")[1].split("\n## ")[0]


def test_what_is_said_of_other_results(tmp_path):
    chunked = BY_FILE["cpu_chunked.json"]
    solvers = {**chunked, "failed": [{"name": "vgg19, optimal", "reason": "out of memory", "status": 3}]}
    solvers["rows"] = [chunked["rows"][0] | {"unrepeatable": ["output 0", "gradient of x"]}]
    write_json(tmp_path / "cpu_solvers.json", solvers)
    assert "Measured on CPUs; [on a GPU](cuda.md)." in document(tmp_path)
    assert section(tmp_path, "Other tools side by side").rstrip().endswith("Not measured yet.")
    found = section(tmp_path, "Solvers side by side")
    assert "* vgg19, optimal failed: out of memory" in found
    assert "* vgg11: 2 tensors differ between two plain steps and were not compared" in found
    solvers["rows"][0]["device"] = "NVIDIA H200"
    write_json(tmp_path / "cpu_solvers.json", solvers)
    assert "Measured on CPU, NVIDIA H200." in document(tmp_path) and "[on a GPU]" not in document(tmp_path)


def test_other_tools_have_their_place(tmp_path):
    plain = Row("tiny", "plain", "cpu", (2, 3), 8 * MIB, 8 * MIB, 100, 100, 1.0, 1.0, 0.0)
    ours = replace(plain, way="ogc", peak_bytes=4 * MIB, flops=150, promised=0.5, paid=0.2)
    blocks = replace(plain, way="blocks", peak_bytes=6 * MIB, flops=130, paid=0.5)
    failed = replace(plain, way="compile", reason="no compiler | here", peak_bytes=0, paid=None)

    def said(*found):
        data = {**BY_FILE["cpu_chunked.json"], "rows": [row.written() for row in found]}
        write_json(tmp_path / "compare" / "cpu_tiny.json", data)
        return section(tmp_path, "Other tools side by side")

    found = said(plain, ours, blocks, failed)
    assert "| tiny | 2×3 | 8 | blocks | 6 at 1.50× | – | 4 at 1.20× |" in found
    assert "No peer beats a plan of ours in bytes and FLOPs." in found and "as little time: none is." in found
    fewer = replace(ours, way="ogc: FLOPs of blocks", peak_bytes=5 * MIB, flops=120)
    found = said(plain, replace(ours, dominated_by="blocks"), blocks, failed, fewer)
    assert "| tiny | 2×3 | 8 | blocks | 6 at 1.50× | 5 at 1.20× | 4 at 1.20× |" in found
    assert "**Plans of ours are beaten by a peer**: blocks of tiny" in found
    for paid, size, ahead in ((0.17, 6, ["blocks"]), (0.18, 6, []), (0.18, 3, ["blocks"])):  # 0.18: within the noise
        assert quicker_within([ours, replace(blocks, paid=paid, peak_bytes=size * MIB)]) == ahead


def test_families_are_compared_by_their_ways():
    ways = {"plain": (8, 0.0), "ogc, +10%": (4, 0.1), "ogc, +20%": (2, 0.2)}
    found = [
        Row(arch, way, plain_bytes=8 * factor * MIB, peak_bytes=size * factor * MIB, paid=paid)
        for arch, factor in (("a", 1), ("b", 3))
        for way, (size, paid) in ways.items()
    ]
    table = families([{"rows": found}])
    assert "| b | 24 | 12 (-50%), +10% | 6 (-75%), +20% |" in table
    assert "| geometric mean |  | **-50%**, +10.0% | **-75%**, +20.0% |" in table
    assert families([]) == ""


def test_a_model_that_is_not_equal_is_not_passed_over():
    run = BY_FILE["zoo/timm.json"]
    different = {"name": "x", "verdict": "different", "detail": "output 0 of step 0"}
    found = zoo([run | {"rows": [*run["rows"], different]}])
    assert "| timm | 107 | 106 | 0 | 1 | " in found and "* timm, x: different: output 0 of step 0" in found
    with pytest.raises(AssertionError, match="say so in docs/results"):
        zoo([run | {"rows": [*run["rows"], different | {"verdict": "almost"}]}])
    error = "ParseError: numbers: bool() of a tensor at /a/b/site-packages/x.py:1; item() of a tensor at y.py:2. Do so."
    assert reason(error) == "ParseError: numbers: bool() of a tensor at x.py:1 and 1 more place"


def test_json_is_whole_or_not_at_all(tmp_path):
    with pytest.raises(TypeError):
        write_json(tmp_path / "x.json", {"a": object()})
    assert not (tmp_path / "x.json").exists()
    assert all(json.loads((RESULTS / name).read_text()) for name in BY_FILE)
