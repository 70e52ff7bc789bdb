"""A model that returns its loss, so that the loss is planned and run like the rest of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ..errors import InputError
from ..torch_state.forwards import ORIGINAL, original_class
from .module import instance_around, refuse_replaced_forward

TARGETS = "targets"
"""The name of the argument that a model with a loss takes besides its own."""


def with_loss(model: torch.nn.Module, loss: Callable[..., torch.Tensor], has_targets: bool) -> torch.nn.Module:
    """An instance of a subclass of the model's that shares its attributes and returns ``loss(output, targets)``.

    Without ``has_targets``, ``loss(output)``. Called without targets that it has, it returns what the model returns.

    Raises:
        InputError: the model has an argument ``targets`` of its own, or its forward is not that of its class.
    """
    refuse_replaced_forward(model)
    original = original_class(model)
    signature = inspect.signature(original.forward)
    if TARGETS in signature.parameters:
        raise InputError("the model takes targets of its own; let its forward return the loss, and leave out loss=")

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = [kwargs.pop(TARGETS)] if has_targets and TARGETS in kwargs else []
        output = original.forward(self, *args, **kwargs)
        return loss(output, *given) if given or not has_targets else output

    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    rest = [p for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    named = [inspect.Parameter(TARGETS, inspect.Parameter.KEYWORD_ONLY, default=None)] if has_targets else []
    forward.__signature__ = signature.replace(parameters=[*own, *named, *rest])  # type: ignore[attr-defined]
    result = instance_around(model, original.__name__, {"forward": forward}, {})
    setattr(type(result), ORIGINAL, type(result))
    return result
