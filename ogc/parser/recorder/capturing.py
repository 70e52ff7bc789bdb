"""Hooks that do nothing but hand what a module returns to the forward around it.

``transformers`` collects hidden states and attentions with such hooks, which it registers for good: a forward that was
asked for them makes a collector, the hooks add to it while it runs, and it returns what was collected. Without a
collector they do nothing. Where the collector comes and goes within the recorded forward, all that they do is in the
program. Other hooks may do anything, so these are told by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

Told = Callable[[str, str], object]

_MODULE = "transformers.utils.output_capturing"
_NAMES = {f"install_output_{verb}_hook.<locals>.output_capturing_hook" for verb in ("capuring", "capturing")}
_OTHER_KINDS = ("_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_always_called")


def only_records(module: torch.nn.Module) -> bool:
    """Whether all hooks that the module has, if any, are such, and no forward that runs now has a collector."""
    hooks = list(module._forward_hooks.values())
    has_others = any(getattr(module, kind) for kind in _OTHER_KINDS)
    return not has_others and all(_is_recorder(hook) and _collector(hook) is None for hook in hooks)


@contextmanager
def recorders_watched(model: torch.nn.Module, told: Told) -> Iterator[None]:
    """``told(module, why)`` is called where hooks run for whom the forward that is recorded made no collector."""
    with ExitStack() as stack:
        for name, module in model.named_modules():
            for key, hook in module._forward_hooks.items():
                if name and _is_recorder(hook):
                    stack.callback(module._forward_hooks.__setitem__, key, hook)
                    module._forward_hooks[key] = _watched(hook, name, told)
        yield


def _watched(hook: Callable[..., Any], name: str, told: Told) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        if _collector(hook) is None:
            told(name, "has hooks for a forward around it")
        return hook(*args)

    return call


def _is_recorder(hook: Any) -> bool:
    named = getattr(hook, "__module__", "") == _MODULE and getattr(hook, "__qualname__", "") in _NAMES
    return named and hasattr(hook.__globals__.get("_active_collector"), "get")


def _collector(hook: Any) -> Any:
    return hook.__globals__["_active_collector"].get()
