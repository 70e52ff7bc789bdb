"""Networks of diffusers made small: U-Nets, autoencoders, transformers, what controls them. It needs diffusers.

Inputs are shapes of floating tensors, or functions that make others.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.zoo.models import Build, Subject, seeded
from benchmarks.zoo.models.diffusers.coders import CODERS
from benchmarks.zoo.models.diffusers.transformers import TRANSFORMERS

_MODELS = {**CODERS, **TRANSFORMERS}


def models() -> dict[str, Build]:
    return {name: partial(_build, name) for name in _MODELS}


def _build(name: str) -> Subject:
    import diffusers

    arguments, inputs = _MODELS[name]

    def batch(step: int) -> dict[str, Any]:
        generator = seeded(step)
        return {
            key: torch.randn(made, generator=generator) if isinstance(made, tuple) else made(generator)
            for key, made in inputs.items()
        }

    return Subject(getattr(diffusers, name)(**arguments), batch)
