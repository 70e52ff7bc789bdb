"""Graphs that shapes tell are those that parsing gives, number by number, and no forward runs for them."""

import mmap
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

import ogc
from ogc.errors import ParseError
from ogc.operators import convolution_parts as parts
from ogc.sizing.shapes import Fakes, OtherSizes, extrapolated_program, same_program, stand_ins, to_be_run

SIZES = (2, 3, 4)


def images(number):
    return torch.randn(number, 3, 32, 32)


class Strided(nn.Module):
    """Convolutions without a rule, buffers that are written, in-place operators: N, 3, 32, 32 to N, 10."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
            nn.Conv2d(32, 32, 3, padding=1, groups=32),
            nn.GELU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.GroupNorm(4, 64),
            nn.Dropout(0.1),
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        x = self.layers(x)
        x = x + x.mean((2, 3), keepdim=True)
        return self.head(x.mean((2, 3)))


class Windows(nn.Module):
    """A mask that is made anew and written piece by piece, in windows: N, 3, 32, 32 to N, 10, as in Swin."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Conv2d(3, 32, 4, 4), nn.Linear(32, 10)
        self.keys, self.values = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        x = self.embed(x).permute(0, 2, 3, 1)
        windows = x.unflatten(1, (2, 4)).unflatten(3, (2, 4)).transpose(2, 3).reshape(4 * len(x), 16, 32)
        marks = x.new_zeros((8, 8))
        for number, part in enumerate((slice(0, -4), slice(-4, None))):
            marks[part] = number
        marks = marks.unflatten(0, (2, 4)).unflatten(2, (2, 4)).transpose(1, 2).reshape(4, 16)
        mask = (marks[:, None] - marks[:, :, None]).masked_fill(marks[:, None] > 0, -100.0)
        scores = windows @ self.keys(windows).mT + mask.repeat(len(x), 1, 1)
        return self.head((scores.softmax(-1) @ self.values(windows)).unflatten(0, (len(x), 4)).mean((1, 2)))


class Attention(nn.Module):
    """Causal attention with dropout, a table of positions and a tied head: N, L tokens to N, L, 50."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.dropout = dropout
        self.tokens, self.positions = nn.Embedding(50, 32), nn.Embedding(128, 32)
        self.parts, self.norm = nn.Linear(32, 96), nn.LayerNorm(32)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for _ in range(2):
            q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.parts(self.norm(x)).chunk(3, -1))
            attended = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
            x = x + self.scale * attended.transpose(1, 2).flatten(2)
        return F.linear(x, self.tokens.weight)


class Unused(nn.Module):
    """Computes what nothing uses, the widest it has: N, 3, 32, 32 to N, 10."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 10)

    def forward(self, x):
        x = self.first(x)
        unused = x.repeat(1, 16, 1, 1).exp().sin() * 2
        places = torch.arange(x.numel()).expand(4, -1).contiguous()
        places.view(4, len(x), -1).flip(1)
        x = self.last(x.mean((2, 3)))
        del unused
        return x.tanh()


def labels_for(number):
    """A loss with its targets bound in, of classes or of tokens."""
    labels = torch.arange(number) % 10

    def loss(output):
        return F.cross_entropy(output if output.dim() == 2 else output.mean(1), labels)

    return loss


def tokens(number):
    return torch.randint(50, (number, 24))


def small_swin():
    return torchvision.models.SwinTransformer([4, 4], 24, [2, 2], [2, 4], [4, 4], num_classes=10)


NETWORKS = {
    "convolutions": (Strided, images),
    "windows": (Windows, images),
    "attention with dropout": (Attention, tokens),
    "attention": (lambda: Attention(0.0), tokens),
    "resnet18": (lambda: torchvision.models.resnet18(num_classes=10), lambda n: torch.randn(n, 3, 64, 64)),
    "swin": (small_swin, images),
    "unused": (Unused, images),
    "sequence": (Attention, lambda number: torch.randint(50, (2, 8 * number))),
}


def numbers_of(graph):
    return [asdict(op) for op in graph.operations], graph.values, graph.outside, len(graph.regions)


def looked_at(make, sample, make_loss, sizes=SIZES, **parsing):
    """A model, what tells of other sizes, and the programs of some."""
    torch.manual_seed(0)
    model = make()
    parsing = {"profile": "estimate", **parsing}
    shapes = OtherSizes(model, ogc.parse(model, sample(sizes[0]), loss=make_loss(sizes[0]), **parsing))
    return model, shapes, [shapes.recorded(sample(size), make_loss(size)) for size in sizes]


@pytest.mark.full
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 13])
@pytest.mark.parametrize("name", NETWORKS)
def test_shapes_tell_what_parsing_sees(name, size):
    make, sample = NETWORKS[name]
    make_loss = (lambda number: None) if name == "sequence" else labels_for
    model, shapes, known = looked_at(make, sample, make_loss)
    program = extrapolated_program(known, SIZES, size)
    graph, trials = shapes.weighed(sample(size), program)
    assert trials.succeed()
    parsed = ogc.parse(model, sample(size), loss=make_loss(size), profile="estimate")
    assert numbers_of(graph) == numbers_of(parsed)
    recorded = shapes.recorded(sample(size), make_loss(size))
    assert same_program(program, recorded)
    ready = to_be_run(graph, recorded, make_loss(size))
    plan = ogc.solve(ready, memory_budget="least")
    assert (plan.peak_bytes, plan.plain_peak_bytes) == (
        ogc.solve(parsed, memory_budget="least").peak_bytes,
        ogc.solve(parsed, memory_budget="least").plain_peak_bytes,
    )
    ogc.check(model, ogc.apply(model, ready, plan), sample(size)).raise_if_different()


@pytest.mark.full
def test_shapes_tell_of_a_device_that_is_not_there():
    model, shapes, known = looked_at(Attention, tokens, labels_for, device="cuda")
    graph, _ = shapes.weighed(tokens(13), extrapolated_program(known, SIZES, 13))
    parsed = ogc.parse(model, tokens(13), loss=labels_for(13), device="cuda")
    assert graph.device == parsed.device == "cuda"
    assert numbers_of(graph) == numbers_of(parsed)


@pytest.mark.full
@pytest.mark.parametrize("profile", ["time", "measure"])
def test_times_are_measured_where_they_were(profile):
    model, shapes, known = looked_at(Strided, images, labels_for, profile=profile)
    program = extrapolated_program(known, SIZES, 8)
    timed, estimated = (shapes.weighed(images(8), program, is_timed=flag).graph for flag in (True, False))
    parsed = ogc.parse(model, images(8), loss=labels_for(8), profile=profile)
    assert [v.bytes for v in timed.values] == [v.bytes for v in parsed.values]
    assert [op.backward_bytes for op in timed.operations] == [op.backward_bytes for op in parsed.operations]
    assert [op.internal_bytes for op in estimated.operations] == [op.internal_bytes for op in parsed.operations]
    assert timed.runtime == parsed.runtime
    if profile == "time":  # which a process remembers
        assert [op.forward_seconds for op in timed.operations] == [op.forward_seconds for op in parsed.operations]
    assert timed.step_seconds != estimated.step_seconds


@pytest.mark.full
def test_no_forward_runs_and_the_model_stays_as_it_is():
    model, shapes, known = looked_at(Strided, images, labels_for)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    calls = []
    for module in model.modules():
        module.register_forward_pre_hook(lambda *args: calls.append(1))
    sample, state = images(50), torch.get_rng_state()
    shapes.weighed(sample, extrapolated_program(known, SIZES, 50))
    assert not calls
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.full
def test_a_recording_runs_one_forward():
    model, shapes, _ = looked_at(Strided, images, labels_for)
    calls, forward = SimpleQueue(), model.head.forward
    model.head.forward = lambda x: calls.put(1) or forward(x)
    shapes.recorded(images(5), labels_for(5))
    assert calls.qsize() == 1


class Branching(nn.Module):
    """Does more for batches of over five: N, 8 to N, 8."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x).relu() if len(x) > 5 else self.layer(x)


def vectors(number):
    return torch.randn(number, 8)


def test_another_program_is_told_from_the_same():
    _, shapes, known = looked_at(Branching, vectors, lambda number: None)
    assert same_program(extrapolated_program(known, SIZES, 5), shapes.recorded(vectors(5), None))
    assert not same_program(extrapolated_program(known, SIZES, 6), shapes.recorded(vectors(6), None))
    assert not same_program(extrapolated_program(known, SIZES, 4), shapes.recorded(vectors(5), None))
    with pytest.raises(ParseError, match="another program"):
        extrapolated_program([*known, shapes.recorded(vectors(6), None)], (2, 3, 4, 6), 8)


class Halves(nn.Module):
    """Sees the first half of a sequence: N, L, 8 to N, L // 2, 8."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x)[:, : x.shape[1] // 2]


def test_numbers_on_no_curve_foretell_no_others():
    sizes = (2, 4, 6)
    _, _, known = looked_at(Halves, lambda length: torch.randn(2, length, 8), lambda number: None, sizes)
    assert len(extrapolated_program(known, sizes, 8).graph.nodes) == len(known[0].graph.nodes)
    with pytest.raises(ParseError, match="predicts no others"):
        extrapolated_program(known, sizes, 5)


class Counting(nn.Module):
    """Reads a number out of a tensor, which makes it an opaque module: N, 8 to N, 8."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return x * float(self.layer(x).sum() > 0)


def test_what_shapes_do_not_tell_is_refused():
    model = nn.Sequential(nn.Linear(8, 8), Counting(), nn.Linear(8, 8))
    with pytest.raises(ParseError, match="opaque modules are not called without content"):
        OtherSizes(model, ogc.parse(model, vectors(4), profile="estimate"))
    graph = ogc.parse(model[0], vectors(4), parse_graph=lambda model, x: torch.fx.symbolic_trace(model))
    with pytest.raises(ParseError, match="made by hand"):
        OtherSizes(model[0], graph)


@pytest.mark.full
def test_trials_are_put_off_and_count_where_they_fail(monkeypatch, request):
    monkeypatch.setattr(parts, "PART_BYTES", 1 << 16)
    tried, results = [], [True]
    monkeypatch.setattr(parts, "_give_the_same_bits", lambda kind, _: tried.append(kind) or results[0])
    parts._parts.cache_clear()
    request.addfinalizer(parts._parts.cache_clear)
    model, shapes, known = looked_at(Strided, images, labels_for)
    tried.clear()
    program = extrapolated_program(known, SIZES, 40)
    graph, trials = shapes.weighed(images(40), program)
    assert not tried
    results[0] = False
    assert not trials.succeed()
    assert len(tried) == 1
    parsed = ogc.parse(model, images(40), loss=labels_for(40), profile="estimate")
    assert numbers_of(shapes.weighed(images(40), program, puts_off=False).graph) == numbers_of(parsed)
    variants = [(a.low_memory, b.low_memory) for a, b in zip(graph.operations, parsed.operations, strict=True)]
    for field in ("scratch_bytes", "backward_bytes", "late_bytes"):
        assert all(getattr(ours, field) <= getattr(theirs, field) for ours, theirs in variants if ours)
    assert any(ours.scratch_bytes < theirs.scratch_bytes for ours, theirs in variants if ours)


def test_a_stand_in_is_laid_out_as_what_it_stands_for():
    fakes = Fakes()
    fake = fakes.of(torch.randn(4, 6, requires_grad=True))
    assert fakes.of(fakes.held[next(iter(fakes.held))][0]) is fake
    view, whole = fake.detach()[1:, ::2], fakes.of(torch.ones(3, dtype=torch.long))
    (ours, [same], index) = stand_ins((view, [view], whole), has_numbers=True)
    assert ours is same and type(ours) is torch.Tensor and ours.stride() == (6, 2) and ours.storage_offset() == 6
    assert ours.device.type == "cpu" and 0 < ours.abs().max() <= 1
    assert index.tolist() == [0, 0, 0]
    assert stand_ins(fake, has_numbers=False).requires_grad


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell what is resident")
def test_stand_ins_take_no_memory_where_algorithms_are_deterministic():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        fakes = Fakes()
        with fakes.mode:
            fake = torch.empty(1 << 29)
        start = resident()
        made = stand_ins(fake, has_numbers=False)
        assert made.nbytes == 1 << 31 and resident() - start < 1 << 28
    finally:
        torch.use_deterministic_algorithms(before)
