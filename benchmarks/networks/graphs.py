"""Networks on graphs, whose batches have another number of nodes and edges each."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn

FEATURES, CLASSES = 16, 4


class MessageLayer(nn.Module):
    """Each node adds up messages of its neighbours, made from both ends of an edge."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width))
        self.update, self.norm = nn.Linear(2 * width, width), nn.LayerNorm(width)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        messages = self.message(torch.cat([nodes[source], nodes[target]], -1))
        added = torch.zeros_like(nodes).index_add_(0, target, messages)
        return nodes + self.norm(torch.relu(self.update(torch.cat([nodes, added], -1))))


class AttentionLayer(nn.Module):
    """Neighbours weighed by a softmax over the edges of each node."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.value, self.score = nn.Linear(width, width), nn.Linear(2 * width, 1)
        self.norm = nn.LayerNorm(width)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        values = self.value(nodes)
        scores = nn.functional.leaky_relu(self.score(torch.cat([values[source], values[target]], -1)), 0.2).exp()
        total = scores.new_zeros(len(nodes), 1).index_add_(0, target, scores)
        weighed = values[source] * (scores / total[target])
        return nodes + torch.relu(self.norm(torch.zeros_like(values).index_add_(0, target, weighed)))


class GraphNetwork(nn.Module):
    """Classes of nodes: (nodes, FEATURES) and (2, edges) to (nodes, CLASSES)."""

    def __init__(self, layer: type[nn.Module], width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(FEATURES, width), nn.Linear(width, CLASSES)
        self.layers = nn.ModuleList(layer(width) for _ in range(depth))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        nodes = self.first(nodes)
        for layer in self.layers:
            nodes = layer(nodes, edges)
        return self.head(nodes)  # type: ignore[no-any-return]


def random_graph(draw: random.Random) -> tuple[Tensor, Tensor]:
    """Nodes and edges of a batch, of a size of its own."""
    nodes = draw.randint(500, 1500)
    return torch.randn(nodes, FEATURES), torch.randint(nodes, (2, draw.randint(4 * nodes, 8 * nodes)))
