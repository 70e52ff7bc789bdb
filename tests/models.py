"""Small networks, each with something that goes wrong easily."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F


class Residual(nn.Module):
    """Convolutions, batch norm, in-place ReLU and addition, pooling, dropout: a network in small."""

    def __init__(self, inplace: bool = True, dropout: float = 0.3) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=inplace))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)) for _ in range(4)
        )
        self.pool = nn.MaxPool2d(2)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8 * 4 * 4, 5)
        self.label = "kept"

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            y = block(x)
            y += x
            x = F.relu(y, inplace=y.shape[0] > 2)
        x = self.dropout(self.pool(x))
        return self.head(x.flatten(1))

    def greet(self):
        return f"label {self.label}"


class Dense(nn.Module):
    """Every layer reads all earlier ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(3 + 4 * n), nn.ReLU(inplace=True), nn.Conv2d(3 + 4 * n, 4, 3, padding=1))
            for n in range(5)
        )

    def forward(self, x):
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return torch.cat(features, 1).mean((2, 3))


class Attention(nn.Module):
    """Embedding, attention, layer norm, a tied output: no convolution anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(16), "qkv": nn.Linear(16, 48), "out": nn.Linear(16, 16)})
            for _ in range(3)
        )

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            q, k, v = layer["qkv"](layer["norm"](x)).chunk(3, -1)
            attended = F.scaled_dot_product_attention(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), is_causal=True)
            x = x + F.dropout(layer["out"](attended.squeeze(1)), 0.2, self.training)
        return x @ self.embedding.weight.t()


class SelfAttention(nn.Module):
    """One head, written out."""

    def __init__(self):
        super().__init__()
        self.taken, self.given = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        query, key, value = self.taken(x).chunk(3, -1)
        return x + self.given(torch.softmax(query @ key.transpose(1, 2) / 4, -1) @ value)


class Outputs(nn.Module):
    """Several outputs in a dict: an input, an intermediate, integers, one that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x, scale=2.0, *, shift=None):
        hidden = torch.tanh(self.first(x)) * scale
        if shift is not None:
            hidden = hidden + shift
        last = torch.sigmoid(self.second(hidden))
        return {"last": last, "hidden": [hidden, last.argmax(1)], "input": x, "none": None, "plain": last.detach() * 2}


class Shared(nn.Module):
    """One module called several times, with a view, a slice and an in-place write through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        for _ in range(4):
            x = torch.tanh(self.cell(x)) + x
            y = x * 1.5
            y[:, :2] += 1.0
            y.view(-1)[3:5].mul_(0.5)
            x = self.norm(y) + x.roll(1, 1)
        return x


class WithoutGrad(nn.Module):
    """A target branch under no_grad, whose weights must get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Conv2d(3, 4, 3, padding=1)
        self.target = nn.Conv2d(3, 4, 3, padding=1)
        self.last = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        with torch.no_grad():
            goal = self.target(x)
        return torch.relu(self.last(torch.relu(self.online(x)))) * goal


class Frozen(nn.Module):
    """Frozen first layers, batch norm in eval mode, a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.frozen.requires_grad_(False)
        self.frozen.eval()
        self.trained = nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1), nn.InstanceNorm2d(4, track_running_stats=True), nn.SiLU()
        )
        self.register_buffer("calls", torch.zeros(()))
        self.tail = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Hardtanh(), nn.AvgPool2d(2))

    def forward(self, x):
        self.calls.add_(1)
        return self.tail(self.trained(self.frozen(x)) + self.calls)


class ViewsWithoutGrad(nn.Module):
    """Under no_grad nothing gets a gradient: views, which say that they require it, and one of several results."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        with torch.no_grad():
            column, weight = x[:, :1], self.second.weight.t()
            left, right = x.chunk(2, 1)
            ordered = x.sort(-1).values
        return self.second(x) * column + ordered @ weight + torch.cat([right, left], 1)


class Unused(nn.Module):
    """Random draws and statistics whose results nobody needs, but which leave their mark."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 6)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        assert len(self.norm(F.dropout(x, 0.5, self.training))) == len(x)
        torch.rand(3)
        return F.dropout(self.second(x), 0.5, self.training)


class WrittenResult(nn.Module):
    """One of an operator's results is written in place, by an operation with a mask to be made again, and returned."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(6, 6, batch_first=True)

    def forward(self, x):
        x, _ = self.layer(x.unsqueeze(1) * 2)
        return F.dropout(x, 0.3, self.training, inplace=True), torch.sin(x)


class Cumulative(nn.Module):
    """Written in place by an operator that would give a result of another memory format out of place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))

    def forward(self, x):
        x = x.contiguous(memory_format=torch.channels_last)
        for layer in self.layers:
            x = layer(x * 0.5)
            x.cumsum_(-1)
        return torch.sin(x)


class SizesAsTensors(nn.Module):
    """Sizes that meet tensors where no number may stand, and move between devices as tensors do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        scale = torch.sqrt(torch.tensor(x.size(-1), dtype=torch.float32))
        x = self.layer(x).to(device=x.device, dtype=x.dtype) / scale
        place = torch.arange(x.shape[1], device=x.device)
        x = torch.where(place >= x.shape[1] - 2, x, self.layer(x))
        return torch.tanh(x).repeat_interleave(x.shape[0], 0) * torch.tensor(x.shape[0]).to(x.dtype)


@dataclass
class Result:
    """No pytree: an object with attributes, as caches and many libraries' results are."""

    logits: torch.Tensor
    layers: list[torch.Tensor] = field(default_factory=list)
    label: str = ""


class InObjects(nn.Module):
    """Tensors inside objects among the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        inside = Result(x, label="inside")
        for layer in self.layers:
            x = torch.tanh(layer(x))
            inside.layers.append(x)
        return inside, {"outside": x * 2, "inside": inside}


def images(batch: int = 4, size: int = 8) -> torch.Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1))


def rows() -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(2))


CASES = {
    "residual": (Residual, lambda: (images(),)),
    "residual out of place": (lambda: Residual(inplace=False), lambda: (images(),)),
    "dense": (Dense, lambda: (images(),)),
    "attention": (Attention, lambda: (torch.arange(20).reshape(2, 10) % 11,)),
    "outputs": (Outputs, lambda: (rows(),)),
    "shared": (Shared, lambda: (rows(),)),
    "without grad": (WithoutGrad, lambda: (images(),)),
    "views without grad": (ViewsWithoutGrad, lambda: (rows(),)),
    "unused": (Unused, lambda: (rows(),)),
    "written result": (WrittenResult, lambda: (rows(),)),
    "cumulative": (Cumulative, lambda: (images(),)),
    "sizes as tensors": (SizesAsTensors, lambda: (rows(),)),
    "in objects": (InObjects, lambda: (rows(),)),
    "frozen": (Frozen, lambda: (images(),)),
}


class Doubled(torch.autograd.Function):
    """A custom function."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient
