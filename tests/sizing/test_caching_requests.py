"""A step's requests to the allocator: at each event they add up to what the simulator counts, to the byte."""

import random

import pytest
import torch
import torchvision
from helpers import chain, random_decisions, random_graph, random_plans, tree_and_values
from torch import nn
from torch.autograd.profiler import profile

import ogc
from ogc.errors import InputError, PlanError
from ogc.graph import Graph, Operation, Value
from ogc.sizing.allocator import AllocatorSettings, DeviceFullError, Usage
from ogc.sizing.requests import WholeStep, requests
from ogc.torch_state.private import Allocation, traverse_dfs

MIB = 2**20


def sums_of(moves):
    """The bytes alive after each move; every block is allocated once, and freed once with the same size."""
    alive, seen, sums = {}, set(), [0]
    for block, size in moves:
        assert size
        if size > 0:
            assert block not in seen
            seen.add(block)
            alive[block] = size
        else:
            assert alive.pop(block) == -size
        sums.append(sums[-1] + size)
    return sums


def assert_as_simulated(graph, plan):
    found = requests(graph, plan)
    sums = sums_of(found.moves)
    simulated = ogc.simulate(graph.of_the_plain_model if plan.is_plain else graph, plan)
    assert found.timeline == simulated.timeline
    assert [sums[place] for place in found.places] == [event.bytes for event in simulated.timeline]
    assert max(sums) == simulated.peak_bytes == plan.peak_bytes
    assert sums[-1] == graph.left_bytes + sum(value.bytes for value in graph.values if value.is_output)
    return found


@pytest.mark.full
@pytest.mark.parametrize("decide", [tree_and_values, random_decisions], ids=["trees", "policies"])
def test_random_plans_request_what_is_simulated(decide):
    number = 0
    for seed in range(80):
        graph = random_graph(seed, 14)
        try:
            plans = random_plans(graph, random.Random(seed), 6, decide)
        except AssertionError:  # hardly any plan of this graph may be run
            continue
        for plan in (*plans, ogc.solve(graph, solver="none"), ogc.solve(graph, memory_budget="least")):
            assert_as_simulated(graph, plan)
            number += 1
    assert number > 400


NETWORKS = {
    "resnet18": (lambda: torchvision.models.resnet18(num_classes=10), (4, 3, 64, 64)),
    "transformer": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 3),
        (4, 32, 64),
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", NETWORKS)
def test_plans_of_networks_request_what_is_simulated(name, device):
    make, shape = NETWORKS[name]
    graph = ogc.parse(make(), torch.randn(shape), loss=lambda y: y.square().mean(), device=device, profile="estimate")
    for plan in (
        ogc.solve(graph, solver="none"),
        ogc.solve(graph, memory_budget="least"),
        ogc.solve(graph, max_overhead=0.1),
    ):
        found = assert_as_simulated(graph, plan)
        memory = plan.memory()
        assert memory.planned.requested == plan.peak_bytes
        assert memory.plain.requested == plan.plain_peak_bytes
        for settings in ({}, {"expandable_segments": True}, {"max_split_size_mb": 64}):
            peaks = plan.memory(**settings).planned
            assert peaks.requested <= peaks.allocated <= peaks.reserved
        assert WholeStep(found.moves).peaks(AllocatorSettings()) == memory.planned


def test_a_chain_by_hand():
    """Three values of 100, 200 and 300 bytes; each operation saves what it reads; the gradients are as large."""
    sizes = [100, 200, 300]
    operations = [
        Operation(
            f"op{t}",
            reads=(t - 1,) if t else (),
            writes=(t,),
            saves=(t - 1,) if t else (),
            scratch_bytes=7 if t == 1 else 0,
            internal_bytes=9 if t == 1 else 0,
            gradient_bytes=size,
            backward_bytes=size + (sizes[t - 1] if t else 40),
        )
        for t, size in enumerate(sizes)
    ]
    graph = Graph(tuple(operations), tuple(Value(f"v{t}", size) for t, size in enumerate(sizes)))
    found = requests(graph, [ogc.saved(0, 3)])
    forward = [100, 200, 9, 7, -7, 300, -300]  # nothing saves the last value
    last = [300, 200, -200, -300]  # its gradient, that of the second value; the saved value and the first gradient go
    second = [100, -100, -9, -200]
    first = [40, -40, -100]
    assert [size for _, size in found.moves] == [*forward, *last, *second, *first]
    again = requests(graph, [ogc.recomputed(0, 2), ogc.saved(2, 3)])
    assert [size for _, size in again.moves][:6] == [100, 200, 9, 7, -7, -9]  # internal tensors do not stay


def test_a_result_takes_over_the_block_of_what_ends():
    operations = (
        Operation("make", writes=(0,), backward_bytes=1),
        Operation("change", reads=(0,), writes=(1,), takes_over=0, backward_bytes=1),
        Operation("use", reads=(1,), writes=(2,), backward_bytes=1),
    )
    graph = Graph(operations, (Value("a", 64), Value("b", 64), Value("c", 8)))
    moves = requests(graph, [ogc.saved(0, 3)]).moves
    assert [size for _, size in moves][:3] == [64, 8, -64]


@pytest.mark.parametrize(
    ("device", "profile", "target", "blocks"),
    [
        ("cuda", "measure", "aten.convolution.default", [70]),
        ("cuda", "measure", "aten.mul.Tensor", [32, 32, 6]),
        ("cuda", "estimate", "aten.convolution.default", [32, 32, 6]),
        ("cpu", "measure", "aten.convolution.default", [32, 32, 6]),
    ],
)
def test_a_workspace_is_one_block(device, profile, target, blocks):
    """As VGG-16's second convolution takes 1568 MiB at once on an H200, beside operands of 784."""
    operation = Operation("op", target=target, writes=(0,), scratch_bytes=70, backward_bytes=1)
    graph = Graph((operation,), (Value("a", 32),), device=device, profile=profile)
    moves = [size for _, size in requests(graph, [ogc.saved(0, 1)]).moves]
    assert moves[1 : 1 + len(blocks)] == blocks and moves[1 + len(blocks)] == -blocks[0]


def test_values_without_bytes_are_not_requested():
    graph = chain([0, 8, 0])
    assert {abs(size) for _, size in requests(graph, [ogc.saved(0, 3)]).moves} == {8}


def test_later_steps_find_what_earlier_ones_left():
    """What is free after a step, in pieces, may not do for the next one."""
    step = WholeStep(((0, 30 * MIB), (1, 30 * MIB), (0, -30 * MIB), (2, 12 * MIB), (1, -30 * MIB), (2, -12 * MIB)))
    assert step.peaks(steps=1) == (60 * MIB, 60 * MIB, 60 * MIB)
    held = WholeStep(step.moves, held=(5 * MIB,), behind=70 * MIB)
    assert held.peaks(steps=1) == (75 * MIB, 75 * MIB, 150 * MIB)
    assert held.peaks() == held.peaks(steps=2)
    with pytest.raises(DeviceFullError):
        held.peaks(device_bytes=89 * MIB)
    assert held.peaks(device_bytes=90 * MIB).reserved == 90 * MIB


def test_the_smallest_device_is_found():
    step = WholeStep(
        ((0, 30 * MIB), (1, 30 * MIB), (0, -30 * MIB), (2, 12 * MIB), (1, -30 * MIB), (2, -12 * MIB)), behind=70 * MIB
    )
    assert step.peaks().reserved == 130 * MIB
    needed = step.needed_bytes()
    step.peaks(device_bytes=needed)
    with pytest.raises(DeviceFullError):
        step.peaks(device_bytes=int(0.98 * needed))
    assert step.peaks(steps=1).requested <= needed < 130 * MIB
    assert WholeStep(()).needed_bytes() == 0


def test_what_is_there_before_takes_part_in_fragmentation():
    """Parameters hold a part of the 20 MiB segments that activations would take whole."""
    step = WholeStep(((0, 9 * MIB), (1, 9 * MIB), (0, -9 * MIB), (1, -9 * MIB)))
    assert step.peaks().reserved == 20 * MIB
    beside = WholeStep(step.moves, held=(3 * MIB,))
    assert beside.peaks().reserved == 40 * MIB
    assert beside.peaks(AllocatorSettings(expandable_segments=True)).reserved == 40 * MIB


def test_plans_print_what_the_allocator_would_give():
    graph = chain([3 * MIB, 5 * MIB, 7 * MIB, 2 * MIB], gradient_bytes=MIB, backward_bytes=2 * MIB)
    plan = ogc.solve(graph, memory_budget="least")
    text = str(plan.memory())
    assert text.startswith("predicted for CUDA's allocator  requested MiB  allocated MiB  reserved MiB\nplain")
    assert f"{plan.peak_bytes / MIB:.1f}" in text and "segments are of fixed size" in text
    assert "segments are expandable" in str(plan.memory(expandable_segments=True))
    assert isinstance(plan.memory().planned, Usage)


def test_a_plan_without_a_graph_or_with_wrong_settings_is_refused():
    plan = ogc.solve(chain([1, 2, 3]), memory_budget="least")
    with pytest.raises(InputError, match="max_split_size_mb"):
        plan.memory(max_split_size_mb=1)
    bare = ogc.Plan(**{**vars(plan), "graph": None})
    with pytest.raises(PlanError, match="does not know its graph"):
        bare.memory()


def test_the_plain_model_beside_slices_is_not_known():
    graph = ogc.Graph(chain([1, 2, 3]).operations, chain([1, 2, 3]).values, plain_peak_bytes=100)
    plain = ogc.solve(graph, solver="none")
    with pytest.raises(PlanError, match="runs chunk by chunk"):
        plain.memory()
    assert ogc.make_plan(graph, [ogc.recomputed(0, 3)]).memory().plain is None


def recorded(step):
    """All that a step allocates and frees on a CPU, in order, as its allocator tells."""
    with profile(use_kineto=True, profile_memory=True) as profiler:
        step()
    moves, alive = [], {}
    tree = profiler.kineto_results.experimental_event_tree()
    for event in sorted(traverse_dfs(tree), key=lambda event: event.start_time_ns):
        block = event.extra_fields
        if isinstance(block, Allocation) and block.alloc_size > 0:
            alive[block.ptr] = len(moves), block.alloc_size
            moves.append(alive[block.ptr])
        elif isinstance(block, Allocation) and block.ptr in alive:
            number, size = alive.pop(block.ptr)
            moves.append((number, -size))
    return tuple(moves) + tuple((number, -size) for number, size in alive.values())


def encoder():
    layer = nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


RECORDED = {
    "transformer": (encoder, (16, 256, 256)),
    "mobilenet": (lambda: torchvision.models.mobilenet_v3_large(num_classes=10), (16, 3, 112, 112)),
}


@pytest.mark.full
@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "planned"])
@pytest.mark.parametrize("name", RECORDED)
def test_what_real_steps_allocate_is_reserved_for(name, is_plain):
    """The allocator's model gives about the same for the blocks of a real step as for those that are told of it.

    The step runs on a CPU, whose allocator tells each of its blocks. What is reserved may differ by one large segment,
    as whether a request just fits hangs on how temporaries are divided.
    """
    make, shape = RECORDED[name]
    model, inputs = make(), torch.randn(shape)
    graph = ogc.parse(model, inputs, loss=lambda y: y.square().mean())
    plan = ogc.solve(graph, solver="none") if is_plain else ogc.solve(graph, memory_budget="least")
    run = model if is_plain else ogc.apply(model, graph, plan)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step():
        output = run(inputs)
        output.square().mean().backward()

    step()
    moves = recorded(step)
    for settings in (AllocatorSettings(), AllocatorSettings(expandable_segments=True)):
        real, told = (
            WholeStep(moves).peaks(settings),
            plan.memory(expandable_segments=settings.expandable_segments).planned,
        )
        assert told.requested == pytest.approx(real.requested, rel=0.01)
        assert told.allocated == pytest.approx(real.allocated, rel=0.03)
        assert told.reserved == pytest.approx(real.reserved, rel=0.1, abs=20 * MIB)
