"""Convolutions a few images at a time: PyTorch's bits, smaller temporaries, and the whole batch where in doubt."""

import pytest
import torch
from helpers import assert_same_training, measured_peak
from test_allocator import Wide, random_plan, wide_images
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ogc
from ogc.operators import convolution_parts as convolution
from ogc.operators.convolution_parts import parts_of
from ogc.operators.registry import of
from ogc.torch_state.allocator import peak_bytes

aten = torch.ops.aten
SETTINGS = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
LAYERS = {
    "3x3": lambda: nn.Conv2d(16, 32, 3, padding=1),
    "strided": lambda: nn.Conv2d(16, 32, 3, stride=2, bias=False),
    "pointwise": lambda: nn.Conv2d(16, 32, 1),
    "dilated": lambda: nn.Conv2d(16, 16, 3, dilation=2),
    "in groups": lambda: nn.Conv2d(16, 16, 3, groups=4),
    "depthwise": lambda: nn.Conv2d(16, 16, 5, padding=2, groups=16),
    "transposed": lambda: nn.ConvTranspose2d(16, 8, 2, stride=2, bias=False),
    "few channels": lambda: nn.Conv2d(16, 3, (1, 7), padding=(0, 3)),
}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Still large enough for oneDNN, which gets no convolution of fewer than 20480 numbers."""
    monkeypatch.setattr(convolution, "PART_BYTES", (1 << 19) // torch.get_num_threads())


@pytest.mark.parametrize("size", [3, 4, 6, 7, 9])
def test_one_small_image_takes_what_is_estimated(size):
    """Whether the weights of many channels are copied depends on how many pixels there are."""
    model, x = nn.Conv2d(512, 512, 3, padding=1, bias=False), torch.randn(1, 512, size, size, requires_grad=True)
    model.weight.grad, x.grad = torch.zeros_like(model.weight), torch.zeros_like(x)
    plan = ogc.solve(ogc.parse(model, x, loss=torch.sum), solver="none")
    assert peak_bytes(lambda: model(x).sum().backward(), "cpu") == pytest.approx(plan.peak_bytes, rel=0.01)


@pytest.mark.full
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("frozen", ["nothing", "kernel", "images"])
def test_all_kinds_give_the_same_bits(name, dtype, frozen):
    layer, x = LAYERS[name]().to(dtype), torch.randn(19, 16, 20, 20, dtype=dtype)
    kernel = layer.weight.detach().requires_grad_(frozen != "kernel")
    bias = None if layer.bias is None else layer.bias.detach().requires_grad_(frozen != "kernel")
    settings = (
        *map(list, (layer.stride, layer.padding, layer.dilation)),
        layer.transposed,
        list(layer.output_padding),
        layer.groups,
    )

    def found(operator, loss):
        images = x.clone().requires_grad_(frozen != "images")
        result = operator(images, kernel, bias, *settings)
        wanted = [t for t in (images, kernel, bias) if t is not None and t.requires_grad]
        return [result.detach(), *torch.autograd.grad(loss(result), wanted)]

    # Of a square; of a mean, expanded; of a part of something larger.
    for loss in (lambda y: (y * y).sum(), lambda y: y.mean((2, 3)).sum(), lambda y: torch.cat([y, y], 1).exp().sum()):
        plain, ours = (found(run, loss) for run in (aten.convolution.default, of(aten.convolution.default).low_memory))
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(plain, ours, strict=True))


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize("samples", [1, 7, 19, 50])
def test_parts_are_even_and_cover_the_batch(samples, threads, monkeypatch):
    monkeypatch.setattr(convolution, "PART_BYTES", 1 << 18)  # an image and its result
    images, kernel = torch.randn(samples, 32, 32, 32), torch.randn(32, 32, 3, 3)
    parts = parts_of(images, kernel, None, *SETTINGS)
    sizes = [part.stop - part.start for part in parts]
    assert [part.start for part in parts] == [sum(sizes[:n]) for n in range(len(parts))]
    assert sum(sizes) == samples
    assert max(sizes) - min(sizes) <= 1
    assert len(parts) == max(1, samples // threads)


@pytest.mark.parametrize("threads", [1], indirect=True)
def test_one_thread_leaves_no_fewer_images_to_another_kernel_than_it_does_of_the_whole(threads):
    images, kernel = torch.randn(40, 16, 32, 32), torch.randn(16, 16, 1, 1)
    settings = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    assert [p.stop - p.start for p in parts_of(images, kernel, None, *settings)] == [20, 20]
    assert len(parts_of(images[:15], kernel, None, *settings)) == 1


@pytest.mark.parametrize("wrong", ["convolved", "gradient_of_images"])
def test_a_kind_that_gives_other_bits_in_parts_is_left_whole(wrong, monkeypatch):
    function = getattr(convolution, wrong)
    images, kernel = torch.randn(9, 32, 32, 32), torch.randn(32, 32, 3, 3)
    with monkeypatch.context() as patch:
        patch.setattr(convolution, wrong, lambda parts, *rest: function(parts, *rest) + 1e-3 * (len(parts) > 1))
        convolution._parts.cache_clear()
        assert parts_of(images, kernel, None, *SETTINGS) == (slice(0, 9),)
    convolution._parts.cache_clear()
    assert len(parts_of(images, kernel, None, *SETTINGS)) > 1


def test_a_kind_is_tried_once_and_leaves_the_random_stream_alone(monkeypatch):
    images, kernel = torch.randn(9, 32, 33, 32), torch.randn(32, 32, 3, 3)
    state = torch.get_rng_state()
    parts_of(images, kernel, None, *SETTINGS)
    misses = convolution._parts.cache_info().misses
    parts_of(images + 1, nn.Parameter(kernel), None, *SETTINGS)
    assert convolution._parts.cache_info().misses == misses
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    parts_of(images, kernel, None, *SETTINGS)
    assert convolution._parts.cache_info().misses == misses + 1


def test_autocast_does_not_change_what_is_tried(monkeypatch):
    convolved, seen = convolution.convolved, []
    monkeypatch.setattr(convolution, "convolved", lambda *given: seen.append(convolved(*given)) or seen[-1])
    images, kernel = torch.randn(9, 32, 32, 31), torch.randn(32, 32, 3, 3)
    with torch.autocast("cpu"):
        assert len(parts_of(images, kernel, None, *SETTINGS)) > 1
    assert {result.dtype for result in seen} == {torch.float32}


def test_what_is_not_an_ordinary_tensor_on_a_cpu_is_left_whole():
    with FakeTensorMode():
        images, kernel = torch.randn(9, 32, 32, 32), torch.randn(32, 32, 3, 3)
        assert len(parts_of(images, kernel, None, *SETTINGS)) == 1


def test_forward_and_gradient_of_the_images_take_less():
    layer, x = nn.Conv2d(32, 32, 3, padding=1).requires_grad_(False), torch.randn(32, 32, 32, 32)

    assert len(parts_of(x, layer.weight, None, *SETTINGS)) >= 8

    def peaks(operator):
        images = x.clone().requires_grad_()
        results = []
        forward = peak_bytes(lambda: results.append(operator(images, layer.weight, None, *SETTINGS)), "cpu")
        gradient = torch.ones_like(results[0])
        return forward, peak_bytes(lambda: torch.autograd.grad(results.pop(), images, gradient), "cpu")

    for ours, plain in zip(
        peaks(of(aten.convolution.default).low_memory), peaks(aten.convolution.default), strict=True
    ):
        assert x.nbytes < ours < 1.4 * x.nbytes < plain


@pytest.mark.full
@pytest.mark.parametrize("profile", ["estimate", "measure"])
@pytest.mark.parametrize("seed", range(4))
def test_any_plan_peaks_as_simulated_and_trains_as_the_plain_model(profile, seed):
    model, x = Wide(), wide_images()
    graph = ogc.parse(model, x, profile=profile)
    plan = random_plan(graph, seed)
    assert measured_peak(model, (x,)) == pytest.approx(plan.plain_peak_bytes, rel=0.005)
    assert measured_peak(ogc.apply(model, graph, plan), (x,)) == pytest.approx(plan.peak_bytes, rel=0.03)
    assert_same_training(model, ogc.apply(model, graph, plan), (x,))


@pytest.mark.full
@pytest.mark.parametrize("threads", [2], indirect=True)
def test_another_number_of_threads_gives_what_it_gives_the_plain_model(threads):
    model, x = Wide(), wide_images()
    optimised = ogc.optimize(model, x, memory_budget="least")
    for other in (1, threads, 3):
        torch.set_num_threads(other)
        assert_same_training(model, optimised, (x,))


class Between(nn.Module):
    """A frozen convolution, the gradient of whose result nobody else has, or somebody does."""

    def __init__(self, is_shared):
        super().__init__()
        self.first = nn.Conv2d(32, 32, 3, padding=1, bias=False)
        self.frozen = nn.Conv2d(32, 32, 3, padding=1, bias=False).requires_grad_(False)
        self.is_shared = is_shared

    def forward(self, x):
        x = self.first(x)
        y = self.frozen(x)
        return ((x + y if self.is_shared else y) * 2).sin().mean((2, 3))


@pytest.mark.parametrize("is_shared", [False, True])
def test_the_gradient_of_the_images_takes_the_place_of_one_that_nobody_else_has(is_shared):
    model, x = Between(is_shared), torch.randn(40, 32, 32, 32)
    graph = ogc.parse(model, x, profile="estimate")
    plan = ogc.make_plan(graph, [ogc.saved(0, len(graph))], low_memory=graph.low_memory)
    assert_same_training(model, ogc.apply(model, graph, plan), (x,))
    images = x.clone().requires_grad_()
    result = of(aten.convolution.default).low_memory(images, model.frozen.weight, None, *SETTINGS)
    last = (result + images if is_shared else result) * 2
    peak = peak_bytes(lambda: torch.autograd.grad(last, images, x), "cpu")
    assert peak == pytest.approx(form_of(graph, "convolution_default_1").backward_bytes, rel=0.01)
    assert peak < (2.3 if is_shared else 1.3) * x.nbytes


def form_of(graph, name):
    return next(op.low_memory for op in graph.operations if op.name == name)


def test_a_plan_is_carried_over_to_no_images():
    """As a detector has them that finds nothing."""
    layers = (
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Upsample(16)) for _ in range(3)
    )
    model = nn.Sequential(*layers)
    optimised = ogc.optimize(model, torch.randn(4, 8, 16, 16), memory_budget="least")
    for images in (4, 0, 1):
        assert_same_training(model, optimised, (torch.randn(images, 8, 16, 16),), steps=1)
    assert optimised.report().plain == 0
