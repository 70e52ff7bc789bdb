"""Where in the model an operator comes from: module, file and line; where in the trace a tensor is."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import dropwhile
from typing import Any

import torch

_OWN_CODE = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_NOT_USER_CODE = (os.path.dirname(torch.__file__) + os.sep, _OWN_CODE)
_PLACE = re.compile(r"^\s*(\S.*?)\((\d+)\): ", re.MULTILINE)  # in the tracer's call stacks


def scope_name() -> str:
    """The name of the module that is being called."""
    return str(torch._C._get_tracing_state().current_scope()) if torch.jit.is_tracing() else ""


def value_of(tensor: torch.Tensor) -> Any:
    """The value of the jit graph that a tensor is traced as."""
    return torch._C._get_value_trace(tensor)  # type: ignore[attr-defined]


@contextmanager
def untraced() -> Iterator[Any]:
    """Nothing that is run inside is traced; what it is not part of is the graph given."""
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        yield state.graph() if state else None
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]


def inputs_of(node: Any) -> list[Any]:
    """The values that a jit node takes; ``node.inputs()`` takes seven times as long."""
    return [node.inputsAt(index) for index in range(node.inputsSize())]


def outputs_of(node: Any) -> list[Any]:
    """The values that a jit node gives."""
    return [node.outputsAt(index) for index in range(node.outputsSize())]


def user_line() -> str:
    """File and line of the model's code that is running."""
    for frame in reversed(traceback.extract_stack()[:-2]):
        if not frame.filename.startswith(_NOT_USER_CODE):
            return f"{frame.filename}:{frame.lineno}"
    return "unknown place"


def origin(node: Any) -> dict[str, str]:
    """Module path and source line of a jit node."""
    return {"module": node.scopeName().rsplit("/", 1)[-1], "source": _user_place(node.sourceRange())}


@lru_cache(maxsize=1024)  # layers of a kind share their call stacks
def _user_place(stack: str) -> str:
    """File and line of the model's code in one of the tracer's call stacks."""
    places = _PLACE.findall(stack)  # innermost first: watch, model, tracer, whoever called that
    called = dropwhile(lambda place: not place[0].startswith(_OWN_CODE), reversed(places))
    inside = [*dropwhile(lambda place: place[0].startswith(_OWN_CODE), called)][::-1]
    foreign = [place for place in inside if not place[0].startswith(_OWN_CODE)]
    user = [place for place in foreign if not place[0].startswith(_NOT_USER_CODE)] or foreign
    return f"{os.path.basename(user[0][0])}:{user[0][1]}" if user else ""
