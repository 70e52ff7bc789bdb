"""The same training by a plain model and by an optimized one: what tests of trainers share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ogc
from ogc.runtime import frame
from ogc.torch_state.allocator import peak_bytes

WORDS = 60


class Training:
    """What a training is written with, such that nothing but ``optimize`` differs: it does nothing for the plain one.

    What is to be the same afterwards is told by ``optimize``, whose model's state counts, and ``same``.
    """

    def __init__(self, is_plain: bool) -> None:
        self.is_plain = is_plain
        self.models: list[nn.Module] = []
        self.optimised: list[nn.Module] = []
        self.found: list[torch.Tensor] = []
        self.peak = 0

    def optimize(self, model: nn.Module, sample: Any = None, **goal: Any) -> nn.Module:
        """Without a sample at its first call."""
        self.models.append(model)
        if self.is_plain:
            return model
        optimised = ogc.optimize(model, sample, **(goal or {"memory_budget": "least"}))
        assert sample is None or not optimised.plan.is_plain
        self.optimised.append(optimised)
        return optimised

    def same(self, *tensors: torch.Tensor) -> None:
        """Tensors that must be the plain training's."""
        self.found += [tensor.detach().clone() for tensor in tensors]

    def measured(self, step: Callable[[], Any]) -> Any:
        """What a step, or a whole training, returns; its peak is noted."""
        returned: list[Any] = []
        self.peak = max(self.peak, peak_bytes(lambda: returned.append(step()), "cpu"))
        return returned[0]

    def end(self) -> dict[str, torch.Tensor]:
        """All that must be the same, by name."""
        states = {f"{n} {key}": t for n, model in enumerate(self.models) for key, t in _tensors(model).items()}
        noted = {f"noted {n}": tensor for n, tensor in enumerate(self.found)}
        return {**states, **noted, "random state": torch.get_rng_state()}


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    named = [*model.named_parameters(), *model.named_buffers()]  # buffers that are not saved, too
    gradients = {f"gradient of {key}": p.grad for key, p in model.named_parameters() if p.grad is not None}
    return {**{key: tensor.detach() for key, tensor in named}, **gradients}


def assert_trained_alike(
    train: Callable[[Training], object],
    monkeypatch: pytest.MonkeyPatch,
    share: float | None = None,
    runs_plan: bool | None = True,
) -> Training:
    """``train`` ends with the same weights, gradients, buffers and random state, bit by bit, and runs a plan.

    With ``runs_plan`` False it runs the plain model, for a reason that is logged.
    The peak that it measured is at most this share of the plain one. Returned is that of the optimized model.
    """
    plain, ours = Training(True), Training(False)
    opened: list[int] = []
    original = frame.Step.open
    monkeypatch.setattr(frame.Step, "open", lambda *args: (opened.append(1), original(*args))[1])
    ends = []
    for training in (plain, ours):
        torch.manual_seed(0)
        train(training)
        ends.append({key: copy.deepcopy(tensor) for key, tensor in training.end().items()})
        assert not torch.is_autocast_enabled("cpu")
        if runs_plan is not None or training.is_plain:
            assert bool(opened) is (bool(runs_plan) and not training.is_plain), "the plain model ran"
    expected, found = ends
    assert expected.keys() == found.keys()
    different = [key for key in expected if not torch.equal(expected[key], found[key])]
    assert not different, different
    if share is not None:
        assert 0 < ours.peak <= share * plain.peak, f"{ours.peak} bytes, {plain.peak} of the plain model"
    return ours


def sentences(count: int = 14, length: int = 32, shortest: int | None = None) -> list[dict[str, torch.Tensor]]:
    """Samples of a language model, of one length or of many."""
    seeded = torch.Generator().manual_seed(0)
    lengths = torch.randint(shortest or length, length + 1, (count,), generator=seeded).tolist()
    rows = [torch.randint(1, WORDS, (n,), generator=seeded) for n in lengths]
    return [{"input_ids": row, "labels": row} for row in rows]


def batch(data: list[dict[str, torch.Tensor]], size: int = 6) -> dict[str, torch.Tensor]:
    return {key: torch.stack([one[key] for one in data[:size]]) for key in data[0]}


def gpt(transformers: Any, dropout: float = 0.1) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=32, n_embd=16, n_layer=2, n_head=2,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


class Own(nn.Module):
    """A model that is no one's: it returns its loss first."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(4))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        x = self.words(input_ids)
        for layer in self.layers:
            if self.is_there():
                x = x + layer(x)
        scores = self.head(x)
        found = {"logits": scores}
        if labels is not None:
            found = {"loss": nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()), **found}
        return found

    def is_there(self) -> bool:
        """Whether the next layer runs."""
        return True


class Dropped(Own):
    """Leaves layers out at random, so that it is planned in parts."""

    def is_there(self) -> bool:
        return not self.training or torch.rand(()).item() > 0.2


def layers(depth: int = 8, width: int = 32, out: int = 5, drop: float = 0.1) -> nn.Sequential:
    """A chain of layers, whose activations are most of its memory at a batch of some hundreds."""
    blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(drop), nn.Softplus()) for _ in range(depth)]
    return nn.Sequential(*blocks, nn.Linear(width, out))


class Images(nn.Module):
    """Convolutions with batch norm and a head, for images of any size."""

    def __init__(self, classes: int = 5, width: int = 8) -> None:
        super().__init__()
        widths = [3, width, width, 2 * width, 2 * width]
        self.body = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True))
                for a, b in pairwise(widths)
            )
        )
        self.pool, self.drop, self.head = nn.AdaptiveAvgPool2d(1), nn.Dropout(0.1), nn.Linear(2 * width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.pool(self.body(images)).flatten(1)))


BATCH = 192
"""Of :func:`data`: so many that activations are most of the memory of a small chain of layers."""


@dataclass(frozen=True)
class Way:
    """A way of training, and what share of the plain model's peak it may take at most; None where none is measured."""

    train: Callable[[Training], None]
    share: float | None
    runs_plan: bool


def registering(ways: dict[str, Way]) -> Callable[..., Any]:
    """A decorator that notes ways of training under their names."""

    def way(share: float | None = None, runs_plan: bool | None = True) -> Callable[..., Any]:
        def register(train: Callable[[Training], None]) -> Callable[[Training], None]:
            ways[train.__name__] = Way(train, share, runs_plan)
            return train

        return register

    return way


def unnamed(ways: dict[str, Way]) -> list[str]:
    """The ways that docs/training.md does not name; in bold, those whose memory is measured."""
    page = " ".join((Path(__file__).parent.parent / "docs" / "training.md").read_text("utf-8").split())
    words = {name: name.replace("_", " ") for name in ways}
    return [n for n, text in words.items() if (f"**{text}**" if ways[n].share else f" {text},") not in page]


def data(count: int = 3, size: int = BATCH, width: int = 32, classes: int = 5) -> list[tuple[Any, Any]]:
    return [(torch.randn(size, width), torch.randint(classes, (size,))) for _ in range(count)]


def pictures(count: int = 3, size: int = 8, side: int = 16, classes: int = 5) -> list[tuple[Any, Any]]:
    return [(torch.randn(size, 3, side, side), torch.randint(classes, (size,))) for _ in range(count)]


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9)


def steps(
    training: Training,
    run: Callable[..., Any],
    batches: Any,
    optimizer: torch.optim.Optimizer,
    loss: Callable[..., torch.Tensor] = nn.functional.cross_entropy,
) -> None:
    """The plain loop, each step measured."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        found = loss(run(x), y)
        found.backward()
        optimizer.step()
        return found

    for x, y in batches:
        training.same(training.measured(lambda x=x, y=y: step(x, y)))
