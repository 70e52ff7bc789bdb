"""Trainings in which each batch has another size: every step has the plain model's bits, and runs by a plan."""

import importlib
import random

import pytest
import torch
from helpers import assert_same_step, tensors_of
from torch import nn
from torch.nn import functional as F

import ogc

pytestmark = pytest.mark.full

reuse = importlib.import_module("ogc.parser.reuse")


def train(model, batches):
    """The report of an optimized model, each step of which was held against the plain one's."""
    made = ogc.optimize(model)
    for inputs in batches:
        assert_same_step(made, model, *inputs, loss=lambda found: sum(tensors_of(found)))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 1e-3 * parameter.grad
    return made.report()


@pytest.fixture
def looks(monkeypatch):
    """How many sizes were recorded anew."""
    seen = []
    record = reuse.record_program
    monkeypatch.setattr(reuse, "record_program", lambda *args: seen.append(args) or record(*args))
    return seen


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        h, mask = self.norm(x), torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        x = x + self.mix(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.feed(x)


class Words(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.words, self.places = nn.Embedding(50, width), nn.Embedding(64, width)
        self.blocks, self.head = nn.Sequential(Block(width), Block(width), Block(width)), nn.Linear(width, 50)

    def forward(self, words):
        x = self.blocks(self.words(words) + self.places(torch.arange(words.shape[1])))
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def test_forty_lengths(looks):
    torch.manual_seed(0)
    lengths = random.Random(0).sample(range(12, 60), 40)
    report = train(Words(), ((torch.randint(50, (4, length)),) for length in lengths))
    assert (report.planned, report.plain, len(looks)) == (40, 0, 0)


class Layer(nn.Module):
    """Messages along edges, gathered and added up."""

    def __init__(self, width):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width))
        self.update, self.norm = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU()), nn.LayerNorm(width)

    def forward(self, x, edges):
        source, target = edges
        messages = self.message(torch.cat([x[source], x[target]], -1))
        return x + self.norm(self.update(torch.cat([x, torch.zeros_like(x).index_add_(0, target, messages)], -1)))


class Gathering(nn.Module):
    """Several graphs in a batch, whose number is read out of it, as ``torch_geometric`` does."""

    def __init__(self, width=16):
        super().__init__()
        self.first, self.head = nn.Linear(8, width), nn.Linear(width, 3)
        self.layers = nn.ModuleList(Layer(width) for _ in range(3))

    def forward(self, x, edges, graph, target):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, edges)
        total = x.new_zeros(int(graph.max()) + 1, x.shape[1])
        return F.cross_entropy(self.head(total.scatter_add(0, graph[:, None].expand_as(x), x)), target)


class Multiplying(nn.Module):
    """Features of neighbours by a product with the adjacency matrix."""

    def __init__(self, width=64):
        super().__init__()
        self.first, self.head = nn.Linear(8, width), nn.Linear(width, 3)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x, edges, graph, target):
        adjacent = x.new_zeros(len(x), len(x)).index_put((edges[0], edges[1]), x.new_ones(()))
        scale = adjacent.sum(1).clamp(min=1).rsqrt()
        x = self.first(x)
        for layer in self.layers:
            x = F.gelu(layer((scale[:, None] * adjacent * scale) @ x))
        return F.cross_entropy(self.head(x), target[graph])


def graphs(draw, count=4):
    """Nodes, edges, the graph of each node, and the classes of the graphs; all of other sizes in each batch."""
    sizes = [draw.randint(10, 40) for _ in range(count)]
    edges = [
        torch.randint(size, (2, draw.randint(2 * size, 4 * size))) + sum(sizes[:n]) for n, size in enumerate(sizes)
    ]
    graph = torch.repeat_interleave(torch.arange(count), torch.tensor(sizes))
    return torch.randn(len(graph), 8), torch.cat(edges, 1), graph, torch.randint(3, (count,))


@pytest.mark.parametrize("kind", [Gathering, Multiplying])
def test_graphs_with_another_number_of_nodes_and_edges_in_each_batch(kind, looks):
    torch.manual_seed(0)
    draw = random.Random(1)
    report = train(kind(), (graphs(draw) for _ in range(20)))
    assert (report.planned, report.plain, len(looks)) == (20, 0, 0)


def test_another_number_of_graphs_is_a_condition():
    torch.manual_seed(0)
    draw = random.Random(2)
    report = train(Gathering(), (graphs(draw, count) for count in (4, 4, 3, 5, 4, 3)))
    assert report.planned + report.plain == 6


def picture(height, width, draw):
    boxes = [[x, y, x + draw.randint(8, 30), y + draw.randint(8, 30)] for x, y in ((3, 5), (20, 12), (33, 30))]
    chosen = torch.tensor(draw.sample(boxes, draw.randint(1, 3)), dtype=torch.float32)
    return torch.rand(3, height, width), {"boxes": chosen, "labels": torch.randint(1, 4, (len(chosen),))}


def test_twelve_sizes_of_images():
    """A detector keeps its loss, whose sizes data decide, to Python; what is below runs by plans."""
    detection = pytest.importorskip("torchvision.models.detection")
    backbone_of = detection.backbone_utils.mobilenet_backbone
    torch.manual_seed(0)
    backbone = backbone_of(backbone_name="mobilenet_v3_small", weights=None, fpn=True, trainable_layers=6)
    anchors = detection.anchor_utils.AnchorGenerator(((16, 32),) * 3, ((0.5, 1.0),) * 3)
    sizes = {"min_size": 64, "max_size": 256}
    model = detection.RetinaNet(backbone, num_classes=4, anchor_generator=anchors, **sizes)
    shapes = [(64, 64 + 32 * n) for n in range(7)] + [(64 + 32 * n, 64) for n in range(1, 6)]
    draw = random.Random(0)
    draw.shuffle(shapes)
    pictures = ([picture(*shape, draw) for _ in range(2)] for shape in shapes)
    report = train(model, (tuple(map(list, zip(*batch, strict=True))) for batch in pictures))
    assert report.planned >= 12 and report.plain == 0
