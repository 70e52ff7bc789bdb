"""Operators whose backward needs less memory: PyTorch's bits, and never a gradient that somebody else holds."""

import itertools
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ogc.operators import low_memory as holders
from ogc.operators import normalization, pooling
from ogc.operators.elementwise import WrittenOver
from ogc.operators.registry import low_memory_variant, registered
from ogc.torch_state.allocator import peak_bytes
from ogc.torch_state.compare import same_bits

aten = torch.ops.aten
CPU = torch.device("cpu")

CONVOLUTIONS = list(itertools.product([1, 3, 5], [1, 2], [0, 2], [1, 4]))
VARIANTS = {operator.target: operator.low_memory for operator in registered() if operator.low_memory is not None}
ELEMENTWISE = [target for target, variant in VARIANTS.items() if isinstance(variant, WrittenOver)]


def gradients(operator, tensors, *settings, after=lambda y: (y * y).sum()):
    """The result, and the gradients of its square's sum, as they reach the tensors through another operation."""
    leaves = [t.clone().requires_grad_() if t is not None else None for t in tensors]
    result = operator(leaves[0] * 1, *leaves[1:], *settings)
    found = torch.autograd.grad(after(result), [leaf for leaf in leaves if leaf is not None])
    return [result.detach(), *found]


def assert_same_bits(operator, tensors, *settings, **options):
    plain = gradients(operator, tensors, *settings, **options)
    ours = gradients(VARIANTS[operator], tensors, *settings, **options)
    assert all(same_bits(a, b) and a.stride() == b.stride() for a, b in zip(plain, ours, strict=True))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(normalization, "CHUNK_BYTES", 2000)
    monkeypatch.setattr(pooling, "CHUNK_BYTES", 2000)


@pytest.mark.parametrize("operator", ELEMENTWISE, ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_elementwise(operator, layout):
    x = torch.randn(4, 3, 6, 5).contiguous(memory_format=layout)
    assert_same_bits(operator, [x])
    assert_same_bits(operator, [x], after=lambda y: y.sum())
    assert_same_bits(operator, [x], after=lambda y: (torch.cat([y, y * 2]) ** 2).sum())


def test_keywords_reach_the_backward():
    x = torch.randn(50, requires_grad=True)
    for function in (aten.gelu.default, VARIANTS[aten.gelu.default]):
        (found,) = torch.autograd.grad((function(x * 1, approximate="tanh") ** 2).sum(), x)
        expected = torch.autograd.grad((torch.nn.functional.gelu(x, approximate="tanh") ** 2).sum(), x)[0]
        assert torch.equal(found, expected)


@pytest.mark.parametrize("shape", [(4, 8, 9, 7), (2, 17, 3, 3), (5, 6, 10), (2, 3, 4, 5, 6), (7, 8, 1, 1), (8, 5)])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm(shape, affine):
    weights = [torch.rand(shape[1]), torch.rand(shape[1])] if affine else [None, None]
    running = [torch.zeros(shape[1]), torch.ones(shape[1])]
    for training in (True, False):
        stats = [[t.clone() for t in running] for _ in range(2)]
        plain = gradients(aten.batch_norm.default, [torch.randn(shape), *weights], *stats[0], training, 0.1, 1e-5, True)
        torch.manual_seed(0)
        x = torch.randn(shape)
        stats = [[t.clone() for t in running] for _ in range(2)]
        plain = gradients(aten.batch_norm.default, [x, *weights], *stats[0], training, 0.1, 1e-5, True)
        ours = gradients(VARIANTS[aten.batch_norm.default], [x, *weights], *stats[1], training, 0.1, 1e-5, True)
        for a, b in zip([*plain, *stats[0]], [*ours, *stats[1]], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 8, 9, 7), (2, 17, 3, 3), (5, 6, 10), (2, 3, 4, 5, 6), (3, 40, 1, 2)])
@pytest.mark.parametrize("affine", [(1, 1), (1, 0), (0, 1), (0, 0)])
def test_batch_norm_again_takes_the_statistics_that_it_is_given(shape, affine, dtype, monkeypatch):
    monkeypatch.setattr(normalization, "CHUNK_BYTES", 1)
    x = (torch.randn(shape, dtype=dtype) * 5 + 3).requires_grad_()
    weights = [torch.randn(shape[1], dtype=dtype) if has else None for has in affine]
    operator, saved = VARIANTS[aten.batch_norm.default], []
    settings = (torch.zeros(shape[1], dtype=dtype), torch.ones(shape[1], dtype=dtype), True, 0.1, 1e-5, True)
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda packed: packed):
        first = operator(x, *weights, *settings)
    statistics = saved[-2:]
    running = settings[0].clone()
    assert torch.equal(operator(x, *weights, *settings, *statistics), first)
    exact = normalization.repeats_exactly(x, *weights)
    assert exact == (dtype is not torch.bfloat16)
    assert torch.equal(settings[0], running) == exact  # which are none of its business the second time


@pytest.mark.parametrize("change", ["layout", "mixed", "strided"])
def test_batch_norm_again_is_computed_anew_where_the_bits_may_differ(change):
    x, weight = torch.randn(4, 8, 9, 7), torch.randn(16)[::2]
    if change == "layout":
        x, weight = x.contiguous(memory_format=torch.channels_last), weight.contiguous()
    if change == "mixed":
        x, weight = x.bfloat16(), weight.contiguous()
    assert not normalization.repeats_exactly(x, weight, None)


@pytest.mark.parametrize(("size", "stride", "padding", "groups"), CONVOLUTIONS)
@pytest.mark.parametrize("biased", [True, False])
def test_convolution(size, stride, padding, groups, biased):
    tensors = [torch.randn(3, 8, 9, 8), torch.randn(12, 8 // groups, size, size), torch.randn(12) if biased else None]
    settings = ([stride, stride], [padding, padding], [1, 1], False, [0, 0], groups)
    assert_same_bits(aten.convolution.default, tensors, *settings)
    assert_same_bits(
        aten.convolution.default, [tensors[0].contiguous(memory_format=torch.channels_last), *tensors[1:]], *settings
    )


def test_images_of_one_position_whose_channels_come_last():
    """They are contiguous, but the gradient's strides are those of the images, by which later kernels are chosen."""
    settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    gradients = []
    for operator in (aten.convolution.default, low_memory_variant(aten.convolution.default, torch.device("cpu"))):
        torch.manual_seed(0)
        x = torch.randn(3, 8).as_strided((3, 8, 1, 1), (8, 1, 8, 8)).requires_grad_()
        assert x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        result = operator(x, torch.randn(8, 8, 3, 3, requires_grad=True), None, *settings)
        gradients.append(torch.autograd.grad(result.sin().sum(), x)[0])
    assert torch.equal(*gradients) and gradients[0].stride() == gradients[1].stride()


@pytest.mark.parametrize("settings", [([2, 2],), ([3, 3], [2, 2], [1, 1]), ([3, 2], [1, 2], [1, 0], [2, 1], True)])
def test_max_pool2d(settings):
    x = torch.randn(3, 4, 11, 9).round()  # ties
    assert_same_bits(aten.max_pool2d.default, [x], *settings)
    assert_same_bits(aten.max_pool2d.default, [x.contiguous(memory_format=torch.channels_last)], *settings)


@pytest.mark.parametrize(
    ("width", "kernel", "dtype"), [(126, 3, torch.uint8), (200, 3, torch.int16), (9000, 5, torch.int32)]
)
def test_max_pool2d_saves_places_in_windows(width, kernel, dtype):
    x = torch.randn(3, 2, kernel + 2, width)
    x[0, 0, 1] = float("nan")
    x[1, 1] = -float("inf")
    settings = [kernel] * 2, [1, 2], [kernel // 2] * 2
    assert_same_bits(aten.max_pool2d.default, [x], *settings)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
        result = VARIANTS[aten.max_pool2d.default](x.requires_grad_(), *settings)
    assert [(t.dtype, t.shape) for t in saved] == [(dtype, result.shape)]


def concatenated(y):
    """A loss whose gradient reaches ``y`` as a part of a larger one."""
    return (torch.cat([y, y * 2], 1) ** 3).sum()


def transposed(y):
    """A loss whose gradient has another order of strides, and no gaps."""
    weights = torch.randn(y.transpose(1, -1).shape, generator=torch.Generator().manual_seed(0))
    return (y.transpose(1, -1) * weights).sum()


@pytest.mark.parametrize("after", [concatenated, transposed, lambda y: y.mean((2, 3)).pow(2).sum()])
@pytest.mark.parametrize("operator", VARIANTS, ids=str)
def test_a_gradient_that_is_not_contiguous(operator, after):
    x, settings, weights = torch.randn(4, 12, 16, 16), (), []
    if operator is aten.batch_norm.default:
        weights, settings = [torch.rand(12), torch.rand(12)], (None, None, True, 0.1, 1e-5, True)
    if operator is aten.convolution.default:
        weights, settings = [torch.randn(6, 12, 3, 3), None], ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    if operator is aten.max_pool2d.default:
        settings = ([3, 3], [2, 2])
    assert_same_bits(operator, [x, *weights], *settings, after=after)


@pytest.mark.parametrize("operator", [aten.relu.default, aten.batch_norm.default], ids=str)
def test_a_gradient_that_somebody_holds_is_left_alone(operator):
    settings = (None, None, None, None, True, 0.1, 1e-5, True) if "norm" in str(operator) else ()
    x = torch.randn(4, 8, 9, 7, requires_grad=True)

    def results(function, watch):
        y = function(x * 1, *settings)
        z = y * 3 if watch != "the caller's" else y
        kept = []
        if watch == "retain_grad":
            y.retain_grad()
        elif watch == "hook":
            y.register_hook(kept.append)
        elif watch == "prehook":
            y.grad_fn.register_prehook(lambda given: kept.append(given[0]))
        gradient = torch.randn(z.shape, generator=torch.Generator().manual_seed(1))
        copy = gradient.clone()
        wanted = [x, y] if watch == "asked for" else [x]
        found = (
            torch.autograd.grad(z, wanted, gradient) if watch != "retain_grad" else (z.backward(gradient), x.grad)[1:]
        )
        assert torch.equal(gradient, copy)
        kept += [y.grad] if watch == "retain_grad" else []
        x.grad = None
        return [*found, *kept]

    for watch in ("nobody", "the caller's", "retain_grad", "hook", "prehook", "asked for"):
        plain, ours = results(operator, watch), results(VARIANTS[operator], watch)
        assert len(plain) == len(ours)
        assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True)), watch


@pytest.mark.parametrize("watch", ["nobody", "the caller's", "retain_grad", "hook", "prehook", "asked for"])
def test_a_gradient_whose_base_somebody_holds_is_left_alone(watch):
    x = torch.randn(4, 8, 6, requires_grad=True)

    def results(function):
        view = function(x * 1).view(32, 6)
        z = view if watch == "the caller's" else view * 3
        kept = []
        if watch == "retain_grad":
            view.retain_grad()
        elif watch == "hook":
            view.register_hook(kept.append)
        elif watch == "prehook":
            view.grad_fn.register_prehook(lambda given: kept.append(given[0]))
        gradient = torch.randn(z.shape, generator=torch.Generator().manual_seed(1))
        copy = gradient.clone()
        found = []
        if watch == "asked for":
            found += torch.autograd.grad(z, [x, view], gradient)
        else:
            x.grad = None
            z.backward(gradient)
            found += [x.grad, *kept, *([view.grad] if watch == "retain_grad" else [])]
        assert torch.equal(gradient, copy)
        return found

    plain, ours = results(aten.relu.default), results(VARIANTS[aten.relu.default])
    assert len(plain) == len(ours)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_the_backward_needs_less_behind_a_view_too():
    """As between the linear layers of a transformer, whose inputs have three dimensions."""
    x, wide, narrow = torch.randn(8, 64, 32), torch.randn(256, 32), torch.randn(32, 256)

    def peak(relu, x):
        start = x.clone().requires_grad_()
        hidden = relu(torch.nn.functional.linear(start, wide))
        loss = torch.nn.functional.linear(hidden, narrow).sum()
        del hidden
        return peak_bytes(lambda: torch.autograd.grad(loss, start), CPU)

    ours, plain = VARIANTS[aten.relu.default], aten.relu.default
    flat = x.flatten(0, 1)
    assert peak(ours, x) == peak(ours, flat) < peak(plain, flat)


@pytest.mark.parametrize("operator", [*ELEMENTWISE, aten.batch_norm.default], ids=str)
def test_double_backward(operator):
    settings = (None, None, None, None, True, 0.1, 1e-5, True) if "norm" in str(operator) else ()

    def second(function):
        x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
        (first,) = torch.autograd.grad((function(x * 1, *settings) ** 3).sum(), x, create_graph=True)
        return torch.autograd.grad((first**2).sum(), x)[0]

    assert torch.equal(second(operator), second(VARIANTS[operator]))


def test_second_gradients_of_convolution_and_pooling():
    def second(convolve, pool):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(2, 3, 8, 8, generator=generator).requires_grad_()
        weight = torch.randn(4, 3, 3, 3, generator=generator).requires_grad_()
        y = pool(convolve(x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1), [2, 2])
        first = torch.autograd.grad((y**3).sum(), [x, weight], create_graph=True)
        return torch.autograd.grad(sum((t**2).sum() for t in first), [x, weight])

    plain = second(aten.convolution.default, aten.max_pool2d.default)
    ours = second(VARIANTS[aten.convolution.default], VARIANTS[aten.max_pool2d.default])
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_the_backward_needs_less():
    x = torch.randn(8, 32, 64, 64)
    weight = torch.randn(32, 32, 3, 3)
    size = x.numel() * x.element_size()

    def peak(convolve, norm, relu):
        start, kernel = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = norm(start * 1, None, None, None, None, True, 0.1, 1e-5, True)
        y = convolve(relu(y), kernel, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        loss = (y * 2).sum()
        del y
        return peak_bytes(lambda: torch.autograd.grad(loss, [start, kernel]), CPU)

    plain = [aten.convolution.default, aten.batch_norm.default, aten.relu.default]
    expected = peak(*plain)
    assert peak(*(VARIANTS[op] for op in plain)) < expected - 0.9 * size


@pytest.mark.parametrize("operator", ELEMENTWISE, ids=str)
def test_autograd_still_adds_to_the_gradient_in_place(operator):
    """A backward that asks who holds its gradient must not itself become a holder."""
    x = torch.randn(4, 5, requires_grad=True)
    start = x * 1.0
    loss = (VARIANTS[operator](start + torch.cos(start)) * 3).sum()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as seen:
        loss.backward()
    names = [event.name for event in seen.events()]
    assert "aten::add_" in names
    assert "aten::add" not in names


@pytest.mark.parametrize("operator", ELEMENTWISE, ids=str)
@pytest.mark.parametrize("shape", [(4, 6, 5, 3), (360,)])
def test_a_gradient_of_another_layout_is_not_written_over(operator, shape):
    """What comes before would get a gradient of other strides than PyTorch gives it, and take another kernel."""
    x = torch.randn(4, 6, 5, 3).to(memory_format=torch.channels_last)

    def found(run):
        strides = []
        start = x.clone().requires_grad_()
        middle = start * 1.0
        middle.register_hook(lambda gradient: strides.append(gradient.stride()))
        result = (run(middle).contiguous().view(shape) * torch.arange(360.0).view(shape)).sum()
        return torch.autograd.grad(result, start)[0], strides

    (plain, plain_strides), (ours, our_strides) = found(operator), found(VARIANTS[operator])
    assert torch.equal(plain, ours)
    assert our_strides == plain_strides


def test_known_statistics_are_tried_on_the_cpu_whatever_the_default_device():
    x, weight = torch.randn(4, 8, 9, 7), torch.randn(8)
    normalization._normalizes_bitwise.cache_clear()
    with torch.device("meta"):
        assert normalization.repeats_exactly(x, weight, None)


class _Keeps(TorchDispatchMode):
    """Holds all that PyTorch computes."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.kept.append(function(*args, **(kwargs or {})))
        return self.kept[-1]


@contextmanager
def tracing():
    """Looks at the variables of whatever is called, as debuggers do, in each new thread too."""

    def trace(frame, event, argument):
        assert isinstance(frame.f_locals, dict)
        return trace

    before = sys.gettrace(), threading.gettrace()
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before[0])
        threading.settrace(before[1])


@contextmanager
def keeping(wrapped):
    """Holds ``wrapped(tensor)`` of every gradient that a backward is counted for, in whatever thread."""
    kept, original = [], holders._holders
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holders, "_holders", lambda gradient: (kept.append(wrapped(gradient)), original(gradient))[1])
        yield


@pytest.mark.parametrize("holder", [_Keeps, tracing, partial(keeping, lambda t: t), partial(keeping, torch.detach)])
def test_who_holds_gradients_when_they_are_first_counted_does_not_make_shared_ones_ours(holder, monkeypatch):
    expected = holders.holders_when_ours()
    monkeypatch.setattr(holders, "_when_ours", {})
    with holder():
        assert holders.holders_when_ours() in (expected, set())
        low_memory_relu = low_memory_variant(aten.relu.default, CPU)
        assert (low_memory_relu is None) == (not holders._when_ours)

    x = torch.randn(4, 8, requires_grad=True)
    for wrapped in (lambda gradient: gradient, torch.detach):
        kept = []
        y = VARIANTS[aten.relu.default](x * 1)
        y.grad_fn.register_prehook(lambda given, kept=kept, wrapped=wrapped: kept.append(wrapped(given[0])))
        torch.autograd.grad((y * 3).sum(), x)
        assert torch.equal(kept[0], torch.full_like(x, 3))
    assert low_memory_variant(aten.relu.default, CPU) is VARIANTS[aten.relu.default]  # counted anew once they are gone
    assert holders.holders_when_ours() == expected


AROUND_A_FAILURE = """
import sys
import torch
from ogc.operators import low_memory
from ogc.operators.registry import registered

relu = next(one.low_memory for one in registered() if one.target is torch.ops.aten.relu.default)


def written_over(count):
    def hook(given):
        kept.extend(count * given)
        places.append(given[0].data_ptr())

    kept, places, x = [], [], torch.randn(4, 8, requires_grad=True) * 1
    y = relu(x)
    y.grad_fn.register_prehook(hook)
    (gradient,) = torch.autograd.grad((y * 3).sum(), x)
    assert all(torch.equal(one, torch.full_like(x, 3)) for one in kept)
    return gradient.data_ptr() in places


def look():
    assert [written_over(count) for count in range(4)] == [True, False, False, False]
    return low_memory.held_by_calls()


def backend(graph, inputs):
    raise ValueError("nothing compiles")


before = look() if sys.argv[1] == "counted before" else low_memory.held_by_calls()
try:
    torch.compile(torch.nn.Linear(8, 8), backend=backend)(torch.randn(4, 8))
except torch._dynamo.exc.BackendCompilerFailed:
    print(before, look())
"""


@pytest.mark.full
@pytest.mark.parametrize("when", ["counted before", "counted behind"])
def test_a_gradient_is_written_over_after_a_compilation_failed(when):
    """From then on torch runs Python so that calls hold more, in the whole process."""
    done = subprocess.run([sys.executable, "-c", AROUND_A_FAILURE, when], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    assert len(done.stdout.split()) == 2
