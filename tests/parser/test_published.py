"""What published architectures do that small models of these tests do not: found by ``benchmarks/zoo``."""

import numpy
import pytest
import torch
from helpers import Function, assert_same_training, measured_peak
from torch import nn

import ogc
from ogc.errors import ParseError

CONVOLUTIONS = {
    "patches": (lambda: nn.Conv2d(3, 64, 16, stride=16), (4, 3, 64, 64)),
    "dilated": (lambda: nn.Conv2d(128, 128, 3, padding=2, dilation=2), (4, 128, 7, 7)),
    "depthwise": (lambda: nn.Conv2d(96, 96, 7, padding=3, groups=96), (4, 96, 28, 28)),
    "strided": (lambda: nn.Conv2d(64, 256, 3, stride=2), (2, 64, 14, 14)),
    "odd channels": (lambda: nn.Conv2d(17, 33, 3, padding=1), (4, 17, 28, 28)),
    "in three dimensions": (lambda: nn.Conv3d(16, 32, 3, padding=1), (2, 16, 4, 14, 14)),
    "transposed": (lambda: nn.ConvTranspose2d(32, 16, 2, stride=2), (4, 32, 14, 14)),
}


class Around(nn.Module):
    """An operation between others that take less memory."""

    def __init__(self, inner, scale):
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.full((), scale))

    def forward(self, x):
        return self.inner(x * self.scale).mean()


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_what_any_convolution_takes_on_a_cpu_is_known(name):
    make, shape = CONVOLUTIONS[name]
    model, x = Around(make(), 0.5), torch.randn(shape)
    plan = ogc.solve(ogc.parse(model, x), solver="none")
    assert measured_peak(model, (x,)) == pytest.approx(plan.peak_bytes, rel=0.03)


def test_instance_norm_is_weighed_as_batch_norm_is():
    model, x = Around(nn.InstanceNorm2d(16), 0.5), torch.randn(4, 16, 32, 32)
    plan = ogc.solve(ogc.parse(model, x), solver="none")
    assert measured_peak(model, (x,)) == pytest.approx(plan.peak_bytes, rel=0.03)


CONVERSIONS = {
    "a mask": lambda x: x * (x > 0),
    "halves": lambda x: x + x.bfloat16(),
    "integers": lambda x: x / torch.ones_like(x, dtype=torch.int64),
    "the largest of some": lambda x: x.unflatten(1, (4, -1)).amax(1),
    "none for a mask": lambda x: x.masked_fill(x > 0, 0.5),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_operands_are_converted_where_an_operator_mixes_types(name):
    model, x = nn.Sequential(Around(Function(CONVERSIONS[name]), 0.5)), torch.randn(4, 16, 64, 64)
    optimised = ogc.optimize(model, x, profile="estimate", memory_budget="least")
    assert measured_peak(model, (x,)) == pytest.approx(optimised.plan.plain_peak_bytes, rel=0.01)
    assert measured_peak(optimised, (x,)) == pytest.approx(optimised.plan.peak_bytes, rel=0.01)


def test_attention_is_weighed_for_the_kernel_of_the_device():
    attention = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
    x = torch.randn(2, 256, 32)
    plan = ogc.optimize(attention, x, memory_budget="least").plan
    assert measured_peak(attention, (x,)) == pytest.approx(plan.plain_peak_bytes, rel=0.1)  # not four times as much


class Tied(nn.Module):
    """The head's large gradient waits until the embedding's is there too."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(3000, 32)
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)))

    def forward(self, tokens):
        return nn.functional.linear(self.body(self.embedding(tokens)), self.embedding.weight).relu().mean((0, 1))


def test_the_gradient_of_a_shared_parameter_waits_for_all_its_uses():
    model, tokens = Tied(), torch.randint(3000, (2, 8))
    graph = ogc.parse(model, tokens)
    assert graph.operations[1].gradient_bytes > model.embedding.weight.nbytes
    plan = ogc.solve(graph, solver="none")
    assert measured_peak(model, (tokens,)) == pytest.approx(plan.peak_bytes, rel=0.03)


class Unused(nn.Module):
    """Drops out what nothing reads, as DeBERTa does with positions of no kind."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.positions = nn.Parameter(torch.randn(16))

    def forward(self, x):
        for layer in self.layers:
            nn.functional.dropout(self.positions, 0.5, self.training)
            x = nn.functional.dropout(layer(x).relu(), 0.2, self.training)
        return x


def test_random_numbers_that_nothing_uses_are_drawn():
    model, x = Unused(), torch.randn(8, 16)
    assert_same_training(model, ogc.optimize(model, x, memory_budget="least"), (x,))


class Repeats(nn.Module):
    """Repeats rows by a size, as MViT's positions are: a number for the plain model, a tensor in the trace."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(4, 16))
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))

    def forward(self, x):
        rows = self.rows.repeat_interleave(x.size(1) // 4, 0) ** x.size(0)
        return self.layers(x + rows)


def test_a_size_as_an_argument_takes_the_overload_for_numbers():
    model, x = Repeats(), torch.randn(3, 256, 16)
    assert_same_training(model, ogc.optimize(model, x, memory_budget="least"), (x,))


class Masked(nn.Module):
    """Puts a learnt vector where a mask says so, as masked speech models do."""

    def __init__(self):
        super().__init__()
        self.vector = nn.Parameter(torch.randn(16))
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 16))

    def forward(self, x, mask):
        x = x * 1.0
        x[mask] = self.vector
        return self.layers(x)


def test_writing_where_a_mask_says_so():
    model, x, mask = Masked(), torch.randn(4, 32, 16), torch.rand(4, 32) < 0.3
    assert_same_training(model, ogc.optimize(model, (x, mask), memory_budget="least"), (x, mask))


class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x) * torch.from_numpy(numpy.random.rand(8).astype("float32"))


def test_numbers_drawn_with_numpy_are_drawn_again_in_every_step():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Noise(), nn.Linear(8, 8)), torch.randn(4, 8)
    before = numpy.random.get_state()[1].copy()
    optimised = ogc.optimize(model, x, memory_budget="least")
    assert (numpy.random.get_state()[1] == before).all()
    for seed in (1, 2):
        numpy.random.seed(seed)
        plain = model(x)
        numpy.random.seed(seed)
        assert torch.equal(optimised(x), plain)


def test_numbers_drawn_with_numpy_in_the_models_own_forward_are_refused():
    with pytest.raises(ParseError, match=r"random numbers of Python or numpy before .*test_published\.py"):
        ogc.optimize(Noise(), torch.randn(4, 8), memory_budget="least")


class Detector(nn.Module):
    """Looks at its targets before it does anything, as torchvision's detectors do."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
        )
        self.head = nn.Linear(8, 4)

    def forward(self, images, boxes):
        if (boxes[:, 2:] <= boxes[:, :2]).any():
            raise ValueError("boxes must have a height and a width")
        return (self.head(self.backbone(images).mean((2, 3))) - boxes).abs().mean()


def test_a_model_that_looks_at_its_inputs_is_planned():
    model = Detector()
    images, boxes = torch.randn(2, 3, 16, 16), torch.tensor([[0.0, 0.0, 4.0, 4.0], [1.0, 1.0, 2.0, 3.0]])
    optimised = ogc.optimize(model, (images, boxes), memory_budget="least")
    assert_same_training(model, optimised, (images, boxes), steps=2)
    assert_same_training(model, optimised, (images, boxes.flip(0)[:1]), steps=1)


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)))
        self.layers[1].register_forward_hook(lambda module, args, result: None)

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize("profile", ["estimate", "measure"])
@pytest.mark.full
def test_planning_while_a_profiler_runs(profile):
    """Two profilers cannot run at once: the one that was there first goes on, and weights are estimated."""
    model, x = Hooked(), torch.randn(8, 16)
    with torch.profiler.profile(acc_events=True) as profiler:
        optimised = ogc.optimize(
            nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), model), x, profile=profile, memory_budget="least"
        )
        optimised(x).sum().backward()
    assert any(event.key == "aten::linear" for event in profiler.key_averages())
