"""Low-memory variants on CUDA: in parts as there, with the bits of the whole, and taken where they lower the peak."""

import pytest
import torch
import torchvision
from torch import nn

import ogc
from ogc.operators import convolution_parts as convolution
from ogc.operators import normalization, pooling
from ogc.operators.gpus import gpu_named
from ogc.operators.registry import of
from ogc.sizing.cuda.kernels import as_on_cuda
from ogc.sizing.hollow import hollow_run

aten = torch.ops.aten
GPU = "RTX 2080 Ti"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(normalization, "CHUNK_BYTES", 64)
    monkeypatch.setattr(pooling, "CHUNK_BYTES", 64)
    monkeypatch.setattr(convolution, "PART_BYTES", 64)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # or a step differs from the one before it
    normalization._is_bitwise_on_cuda.cache_clear()


def step(operator, tensors, *settings):
    leaves = [t.clone().requires_grad_() for t in tensors]
    result = operator(leaves[0] * 1, *leaves[1:], *settings)
    result.square().sum().backward()
    return [result.detach(), *(leaf.grad for leaf in leaves)]


def assert_same_bits(target, tensors, *settings):
    plain = step(target, tensors, *settings)
    with as_on_cuda(gpu_named(GPU)):  # as to the parts
        ours = step(of(target).low_memory, tensors, *settings)
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(plain, ours, strict=True))


@pytest.mark.parametrize("channels", [1, 3, 16, 40])
def test_batch_norm(device, channels):
    tensors = [torch.randn(shape, device=device) for shape in ((6, channels, 9, 7), channels, channels)]
    assert_same_bits(aten.batch_norm.default, tensors, None, None, True, 0.1, 1e-5, True)


@pytest.mark.parametrize("samples", [1, 5, 16, 40])
def test_max_pool2d(device, samples):
    x = torch.randn(samples, 3, 11, 9, device=device).round()  # ties
    assert_same_bits(aten.max_pool2d.default, [x], [3, 3], [2, 2], [1, 1])


CONVOLUTIONS = {
    "3x3": ((12, 12, 3, 3), ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)),
    "dilated": ((12, 12, 3, 3), ([1, 1], [2, 2], [2, 2], False, [0, 0], 1)),
    "in groups": ((12, 4, 3, 3), ([1, 1], [1, 1], [1, 1], False, [0, 0], 3)),
    "of another shape": ((12, 12, 3, 3), ([2, 2], [1, 1], [1, 1], False, [0, 0], 1)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("samples", [1, 5, 40])
def test_convolution(device, samples, name):
    shape, settings = CONVOLUTIONS[name]
    tensors = [torch.randn(one, device=device) for one in ((samples, 12, 48, 48), shape, (12,))]
    assert_same_bits(aten.convolution.default, tensors, *settings)


def convolution_kind(biased=True):
    """Of a call that is tried on a CPU, as if that were CUDA."""
    shape, settings = CONVOLUTIONS["3x3"]
    images, kernel = torch.empty(32, 12, 16, 16), torch.empty(shape)
    return convolution._Kind(
        device=torch.device("cpu"),
        is_for_cuda=True,
        shapes=(tuple(images.shape), tuple(kernel.shape)),
        strides=(images.stride(), kernel.stride()),
        dtypes=(torch.float32, torch.float32),
        biased=biased,
        settings=tuple(tuple(s) if isinstance(s, list) else s for s in settings),
        threads=1,
        backend=(),
    )


@pytest.mark.parametrize("biased", [True, False])
def test_a_kind_of_convolution_is_tried_whole_and_in_parts(biased, monkeypatch):
    kind = convolution_kind(biased)
    convolution._parts.cache_clear()
    assert len(convolution._parts(kind, 64)) == convolution.CUDA_PARTS
    of_images = convolution.gradient_of_images
    for wrong in (lambda *args, **how: of_images(*args, **how) * (1 + 1e-6), no_room):
        monkeypatch.setattr(convolution, "gradient_of_images", wrong)
        convolution._parts.cache_clear()
        assert convolution._parts(kind, 64) == (slice(0, 32),)
    convolution._parts.cache_clear()


def test_there_are_no_more_parts_than_a_few():
    images = torch.empty(200, 40, 9, 9)
    kernel, settings = torch.empty(40, 40, 3, 3), CONVOLUTIONS["3x3"][1]
    with as_on_cuda(gpu_named(GPU)):
        assert normalization.channels_at_once(images) == 3
        assert len(convolution.parts_of(images, kernel, None, *settings)) == 15
        assert len(convolution.parts_of(images, kernel, None, [2, 2], *settings[1:])) == 1
    assert normalization.channels_at_once(images) == 1
    assert [pooling.images_at_once((200, 40, 81), on_cuda) for on_cuda in (True, False)] == [13, 1]
    assert pooling.images_at_once((0, 40, 81), True) == 1


def kind(weights=torch.float32):
    """Of a call that is tried on a CPU, as if that were CUDA."""
    dtypes = torch.float32, weights, weights
    return normalization._Kind(torch.device("cpu"), torch.Size((6, 20, 9, 7)), dtypes, 1e-5, (True, False))


@pytest.mark.parametrize("weights", [torch.float32, None])
def test_a_kind_of_batch_norm_is_tried_whole_and_in_parts(weights):
    assert normalization._is_bitwise_on_cuda(kind(weights))


def other_bits(*args):
    found = GRADIENTS(*args)
    return (found[0] * (1 + 1e-6 * args[3].shape[1]), *found[1:])


def no_room(*args, **how):
    raise torch.cuda.OutOfMemoryError("for the test")


def with_reserve(*args):
    raise NotImplementedError("for the test")


GRADIENTS = normalization._gradients


@pytest.mark.parametrize("kernels", [other_bits, no_room, with_reserve])
def test_other_bits_in_parts_or_no_room_for_a_trial_leave_it_as_it_is(kernels, monkeypatch):
    monkeypatch.setattr(normalization, "_gradients", kernels)
    assert not normalization._is_bitwise_on_cuda(kind())


def test_a_reserve_of_cudnns_is_no_form(monkeypatch):
    def cudnn(*args):
        return [*torch.ops.aten.native_batch_norm.default(*args), torch.zeros(4, dtype=torch.uint8)]

    monkeypatch.setattr(normalization, "_is_cudnns", lambda *args: True)
    monkeypatch.setattr(normalization.aten.cudnn_batch_norm, "default", cudnn)
    assert not normalization._is_bitwise_on_cuda(kind())


WIDE = {
    "batch_norm": lambda: torchvision.models.resnet18(),
    "max_pool2d": lambda: nn.Sequential(
        nn.Conv2d(3, 64, 5, stride=2), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Conv2d(64, 64, 3, stride=4), nn.Flatten(1)
    ),
    "convolution": lambda: torchvision.models.vgg13().features[:5],
}


@pytest.mark.full
@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("goal", [{"memory_budget": "least"}, {"max_overhead": 0.5}])
def test_where_one_operation_bounds_the_peak_it_runs_in_its_form(name, goal):
    with torch.device("meta"):
        model = WIDE[name]()
    graph = ogc.parse(model, torch.empty(64, 3, 128, 128, device="meta"), device="cuda", profile="estimate", gpu=GPU)
    plan = ogc.solve(graph, **goal)
    assert f"aten.{name}.default" in {graph.operations[t].target for t in plan.low_memory}
    assert plan.peak_bytes < max(graph.with_variants(()).operation_bounds)
    assert hollow_run(model, graph, plan, gpu=GPU).peak_bytes == pytest.approx(plan.peak_bytes, rel=0.005)
