"""Models of other people with small inputs, built from their configurations: nothing is downloaded.

A family is a table from a name to a function that builds a :class:`Subject`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

FAMILIES = ("torchvision", "timm", "transformers", "transformers_heads", "diffusers", "peft", "others")


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
    found: dict[str, Build] = importlib.import_module(f"benchmarks.zoo.models.{name}_family").models()
    return found


def seeded(step: int) -> torch.Generator:
    """Where the data of a step come from."""
    return torch.Generator().manual_seed(1000 + step)
