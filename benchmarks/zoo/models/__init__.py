"""Models of other people with small inputs, built from their configurations: nothing is downloaded.

A family is a table from a name to a function that builds a :class:`Subject`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

FAMILIES = {
    "torchvision": "torchvision", "timm": "timm", "transformers": "transformers", "transformers_heads": "transformers",
    "diffusers": "diffusers", "peft": "transformers", "others": "others",
}  # fmt: skip
"""And the file that has each."""


@dataclass(frozen=True)
class Subject:
    """A model and what it is trained on.

    Attributes:
        model: with random weights.
        batch: the arguments of a step, by its number: a dictionary of keyword or a tuple of positional ones.
        part: the submodule to optimise where the model's own forward depends on its data; "" for the whole.
        note: what the row says of the inputs.
    """

    model: torch.nn.Module
    batch: Callable[[int], Any]
    part: str = ""
    note: str = ""


Build = Callable[[], Subject]


def family(name: str) -> dict[str, Build]:
    """The models of a family, in the order to try them."""
    module = importlib.import_module(f"benchmarks.zoo.models.{FAMILIES[name]}_family")
    found: dict[str, Build] = getattr(module, name if name != FAMILIES[name] else "models")()
    return found


def seeded(step: int) -> torch.Generator:
    """Where the data of a step come from."""
    return torch.Generator().manual_seed(1000 + step)


def drawn(inputs: Any, step: int) -> Any:
    """The arguments of a step. Each is the shape of a floating tensor, or a function that a generator is given to."""
    generator = seeded(step)

    def one(made: Any) -> Any:
        return torch.randn(made, generator=generator) if isinstance(made, tuple) else made(generator)

    return {key: one(made) for key, made in inputs.items()} if isinstance(inputs, dict) else tuple(map(one, inputs))
