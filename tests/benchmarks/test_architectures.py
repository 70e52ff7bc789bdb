"""The published architectures. Small ones always; all of them, and their figures, with ``-m slow``."""

import random
import time
from dataclasses import replace
from functools import cache
from statistics import geometric_mean

import pytest
import torch
from helpers import assert_same_training, loss_of, trace_of_training
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.flop_counter import FlopCounterMode

import ogc
from benchmarks.measuring import step
from benchmarks.networks import NETWORKS, PUBLISHED
from benchmarks.tables import files, rows
from ogc.solver import local_search
from ogc.torch_state.allocator import peak_bytes

MIB = 2**20

# Allocator peak of the published solver and runtime on a CPU, torch 2.15, batch 4, in MiB.
REFERENCE_AT_BATCH_4 = {
    "alexnet": 151, "vgg11": 468, "vgg13": 413, "vgg16": 439, "vgg19": 508, "resnet18": 57, "resnet34": 57,
    "resnet50": 123, "resnet101": 140, "resnet152": 140, "densenet121": 113, "densenet161": 168,
    "densenet169": 113, "densenet201": 129, "inception_v3": 110, "nasnet_cifar10": 69, "amoebanet_cifar10": 64,
    "darts_cifar10": 71,
}  # fmt: skip


def images(name, batch_size, image_size=None):
    return torch.randn(batch_size, 3, *[image_size or PUBLISHED[name].input.size] * 2)


@pytest.mark.parametrize("name", ["resnet18", "densenet121"])
def test_small_images_train_bitwise(name):
    model, x = PUBLISHED[name].build(), images(name, 2, 64)
    optimised = ogc.optimize(model, x)
    assert not optimised.plan.is_plain
    assert_same_training(model, optimised, (x,), steps=2)


@cache
def resnet18_graph(threads):
    """The same for all tests with as many threads: none changes it, and it takes longer to parse than to plan."""
    assert torch.get_num_threads() == threads
    return ogc.parse(PUBLISHED["resnet18"].build(), images("resnet18", 8), profile="estimate")


@pytest.mark.parametrize("wish", [{}, {"max_overhead": 0.3}])
@pytest.mark.parametrize("threads", [1, 2], indirect=True)
def test_the_least_peak_is_reached_in_as_little_time_as_within_a_budget(wish, threads):
    graph = resnet18_graph(threads)
    plan = ogc.solve(graph, **wish)
    within = ogc.solve(graph, memory_budget=plan.peak_bytes)
    assert within.peak_bytes == plan.peak_bytes
    assert plan.added_seconds <= within.added_seconds


@pytest.mark.parametrize("threads", [1], indirect=True)
def test_what_is_better_lost_goes_whatever_the_times(monkeypatch, threads):
    graph, noise = resnet18_graph(threads), random.Random(0)
    peaks = []
    for _ in range(6):
        slower = [replace(op, forward_seconds=op.forward_seconds * noise.uniform(0.8, 1.2)) for op in graph.operations]
        peaks.append(ogc.solve(replace(graph, operations=tuple(slower))).peak_bytes)
    assert max(peaks) <= 1.01 * min(peaks)
    monkeypatch.setattr(local_search, "DROP_SIMULATIONS", 0)
    assert max(peaks) <= 0.93 * ogc.solve(graph).peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_three_sgd_steps_are_bitwise_the_plain_models(name):
    model, x = PUBLISHED[name].build(), images(name, 2)
    assert_same_training(model, ogc.optimize(model, x), (x,), steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_planning_is_quick(name):
    model, x = PUBLISHED[name].build(), images(name, 4)

    def forward():
        start = time.perf_counter()
        with torch.no_grad():
            model(x)
        return time.perf_counter() - start

    forward()
    forward_seconds = min(forward(), forward())
    start = time.perf_counter()
    graph = ogc.parse(model, x, profile="estimate")
    parse_seconds = time.perf_counter() - start
    start = time.perf_counter()
    ogc.solve(graph)
    solve_seconds = time.perf_counter() - start
    print(f"{name}: forward {forward_seconds:.2f} s, parse {parse_seconds:.2f} s, solve {solve_seconds:.2f} s")
    assert solve_seconds <= 1
    assert parse_seconds <= 2 * forward_seconds + 3


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_frontier_is_quick(name):
    graph = ogc.parse(PUBLISHED[name].build(), images(name, 4), profile="estimate")
    start = time.perf_counter()
    plans = ogc.frontier(graph).plans
    seconds = time.perf_counter() - start
    print(f"{name}: {len(plans)} points of the frontier in {seconds:.2f} s")
    assert seconds <= 10


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_batch_4_is_below_the_reference_and_as_simulated(name):
    model, x = PUBLISHED[name].build(), images(name, 4)
    optimised = ogc.optimize(model, x, profile="measure")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    peaks = [peak_bytes(lambda: step(run, x), "cpu") for run in (model, optimised)]  # noqa: B023
    print(f"{name}: plain {peaks[0] / MIB:.1f} MiB, ogc {peaks[1] / MIB:.1f} MiB")
    assert peaks[1] / MIB < REFERENCE_AT_BATCH_4[name]
    assert optimised.plan.plain_peak_bytes == pytest.approx(peaks[0], rel=0.03)
    assert optimised.plan.peak_bytes == pytest.approx(peaks[1], rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "is_nested"),
    [
        *((name, True) for name in ("resnet50", "densenet121", "inception_v3", "amoebanet_cifar10", "darts_cifar10")),
        ("vgg16", False),  # of so few operations that segments through parts are no faster
    ],
)
def test_points_of_the_frontier_hold_when_measured(name, is_nested):
    model, x = PUBLISHED[name].build(), images(name, 4)
    graph = ogc.parse(model, x, profile="measure")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    plans = [plan for plan in ogc.frontier(graph).plans if not plan.is_plain]
    assert len(plans) >= 10
    assert not is_nested or any(part.depth > 1 for plan in plans for part in plan.segments)
    errors = []
    for plan in plans:
        optimised = ogc.apply(model, graph, plan)
        errors.append(plan.peak_bytes / peak_bytes(lambda: step(optimised, x), "cpu") - 1)  # noqa: B023
    print(f"{name}: {len(plans)} points, error {min(errors):+.2%} to {max(errors):+.2%}")
    assert max(map(abs, errors)) <= 0.03


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["arch"])
def test_committed_results_are_consistent(row):
    """Prediction within 3 % of the allocator, overhead by profile and by FLOPs within the published one."""
    assert row["predicted_bytes"] == pytest.approx(row["ogc_bytes"], rel=0.03)
    assert row["predicted_plain_bytes"] == pytest.approx(row["plain_bytes"], rel=0.03)
    assert row["ogc_flops"] / row["plain_flops"] - 1 <= row["published"]["overhead"]
    assert row["predicted_overhead"] <= row["published"]["overhead"]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["arch"])
def test_committed_peaks_are_below_the_published(row):
    assert row["ogc_bytes"] / MIB < row["published"]["theirs"]


def test_committed_peaks_are_three_fifths_of_the_published_and_half_of_it_in_slices():
    whole = {row["arch"]: row for row in rows()}
    sliced = {row["arch"]: row for file in files("cpu_sliced*.json") for row in file["rows"]}
    for found, most, without_cells in ((whole, 0.55, 0.60), (whole | sliced, 0.48, 0.50)):
        ratios = {name: row["ogc_bytes"] / MIB / row["published"]["theirs"] for name, row in found.items()}
        assert geometric_mean(ratios.values()) <= most
        assert geometric_mean(ratio for name, ratio in ratios.items() if name not in NETWORKS) <= without_cells


@pytest.mark.parametrize(("kind", "most"), [("overhead", 0.19), ("flops", 0.08)])
def test_committed_overheads_at_the_published_memory_are_a_fifth_of_the_published_and_less_by_flops(kind, most):
    """Simulated time and FLOPs. What is run again there has few FLOPs.

    DenseNet-121 runs all norms, ReLUs and concatenations again: 2 % of the FLOPs, and 15 % of the time. It was promised
    16 % and paid 15 %.
    """
    ratios = [max(0.01, row[f"{kind}_at_theirs"]) / row["published"]["overhead"] for row in rows()]
    assert max(ratios) <= 0.60
    assert geometric_mean(ratios) <= most


def peak_and_flops(step):
    step()
    counter = FlopCounterMode(display=False)
    with counter:
        step()
    return peak_bytes(step, "cpu"), counter.get_total_flops()


def checkpointed_blocks(model, name):
    """torch.utils.checkpoint around every residual or dense block."""
    if name == "resnet50":
        blocks = [block for layer in (model.layer1, model.layer2, model.layer3, model.layer4) for block in layer]
    else:
        blocks = [module for key, module in model.features.named_children() if key.startswith("denseblock")]
    for block in blocks:
        plain = block.forward
        block.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=False)
    return blocks


def as_sequence(model, name):
    if name == "resnet50":
        # One layer: checkpoint_sequential cannot cut before an in-place operation.
        layers = [torch.nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool)]
        layers += [block for layer in (model.layer1, model.layer2, model.layer3, model.layer4) for block in layer]
        return [*layers, model.avgpool, torch.nn.Flatten(), model.fc]
    tail = [torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), model.classifier]
    children = list(model.features.children())
    return [torch.nn.Sequential(*children[:4]), *children[4:], *tail]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet50", "densenet121"])
def test_less_memory_and_no_more_flops_than_hand_placed_checkpoints(name):
    model, x = PUBLISHED[name].build(), images(name, 8)
    graph = ogc.parse(model, x, profile="measure")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    layers = as_sequence(model, name)
    found = {"plain": peak_and_flops(lambda: loss_of(model(x)).backward())}
    for segments in range(2, 9):
        run = lambda: loss_of(checkpoint_sequential(layers, segments, x, use_reentrant=False)).backward()  # noqa: B023, E731
        found[f"sequential {segments}"] = peak_and_flops(run)
    blocks = checkpointed_blocks(model, name)
    found["blocks"] = peak_and_flops(lambda: loss_of(model(x)).backward())
    for block in blocks:
        del block.forward
    for what, (peak, flops) in found.items():
        print(f"{name} {what}: {peak / MIB:.1f} MiB, FLOPs {flops / found['plain'][1] - 1:+.1%}")
    best = min(figures for what, figures in found.items() if what != "plain")
    optimised = ogc.apply(model, graph, ogc.solve(graph, memory_budget=int(0.99 * best[0])))
    ours = peak_and_flops(lambda: loss_of(optimised(x)).backward())
    print(f"{name} ogc: {ours[0] / MIB:.1f} MiB, FLOPs {ours[1] / found['plain'][1] - 1:+.1%}")
    assert ours[0] < best[0]
    assert ours[1] <= best[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_resnet_on_cuda_trains_bitwise(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    model = PUBLISHED["resnet18"].build().cuda()
    x = images("resnet18", 8, 64).cuda()
    optimised = ogc.optimize(model, x)
    assert optimised.graph.profile == "measure"
    plain = trace_of_training(model, model, (x,))
    ours = trace_of_training(model, optimised, (x,))
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
