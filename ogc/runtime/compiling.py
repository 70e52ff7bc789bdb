"""What torch.compile finds in the place of an optimized forward: a call that leaves the compiled graph.

A plan would be lost in one: what is traced is the operators alone, without the hooks that save memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ..torch_state.forwards import original_class, plain_forward
from ..torch_state.private import is_exporting
from .calls import note_reached
from .runner import log

ADVICE = (
    "a module that ogc optimized runs by its plan, as it is, and cannot be part of a compiled graph: leave out "
    "fullgraph=True, or compile submodules before ogc.optimize, which calls them as they are"
)


def kept_from_compiling(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same forward, which compiled code calls as it is, with one message.

    What torch.export sees, and torch.compile where no gradients are on, is the plain forward.
    """

    def reached(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        note_reached(self)
        return forward(self, *args, **kwargs)

    as_it_is = torch.compiler.disable(reached, reason=ADVICE)

    def forward_or_plain(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_exporting() or (torch.compiler.is_compiling() and not torch.is_grad_enabled()):
            return plain_forward(self)(*args, **kwargs)
        if torch.compiler.is_compiling():
            _tell(original_class(self).__name__)
        return as_it_is(self, *args, **kwargs)

    # Recompilations are counted, and limited, by code object: each optimized module has its own.
    forward_or_plain.__code__ = forward_or_plain.__code__.replace()
    return forward_or_plain


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _tell(name: str) -> None:
    """Called while something is compiled, not when it runs."""
    _tell_once(name)


@cache
def _tell_once(name: str) -> None:
    log.warning("torch.compile leaves %s as it is, which ogc optimized: it runs by its plan, and is not compiled", name)
