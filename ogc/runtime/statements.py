"""The text of single statements of a planned forward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..operators.low_memory import LowMemory
from ..operators.registry import live_arguments
from ..program.leaf import Leaf, Opaque
from ..program.program import WithoutGrad
from ..torch_state.private import OpOverload


def live_nodes(node: torch.fx.Node) -> list[Any]:
    """Those of its arguments that the operator updates and its own result does not depend on."""
    return [live for live in live_arguments(node.target, node.args) if isinstance(live, torch.fx.Node)]


def view_of(node: torch.fx.Node) -> str | None:
    """The statement that makes what a leaf returned, a view of an argument, anew."""
    if not isinstance(node.target, Leaf) or (view := node.target.view) is None:
        return None
    number, (size, stride), offset = view
    given = node.args[1]
    assert isinstance(given, list)
    source = argument(given[number])
    return f"{node.name} = {source}.as_strided({size!r}, {stride!r}, {source}.storage_offset() + {offset})"


def takes_notes(target: Any) -> bool:
    """Whether an operator, run again, makes use of the internal tensors that it saved."""
    return isinstance(target, LowMemory) and target.takes_notes


def copy_of(node: torch.fx.Node) -> str:
    """The name of a copy of a buffer, which runs again write in its place."""
    return f"copy_of_{node.name}"


def call_of(node: torch.fx.Node) -> str:
    """The arguments of a call of a leaf: itself, its module, the tensors that it is given."""
    assert isinstance(node.target, Leaf)
    return f"{node.target.name}, {argument(node.args[0])}, {argument(node.args[1])}"


def statement(node: torch.fx.Node, target: Any, binding: str | None = None, again: int | None = None) -> str:
    """The statement that runs an operation.

    Args:
        node: the operation.
        target: what runs.
        binding: what PyTorch calls the operator by, where that is quicker than ``torch.ops``.
        again: the number of the operation where it has run before.
    """
    if isinstance(target, WithoutGrad):
        return f"with torch.no_grad(): {statement(node, target.operator, binding, again)}"
    live = live_nodes(node) if again is not None else []
    given = node.args[: target.given] if isinstance(target, Opaque) else node.args
    arguments = [_unchanged(a) if any(a is one for one in live) else argument(a) for a in given]
    if again is not None and takes_notes(target):
        arguments.append(f"*frame.notes({again})")
    arguments += [f"{key}={argument(value)}" for key, value in node.kwargs.items()]
    if isinstance(target, LowMemory):
        function = f"low_memory.{target.__name__}"
    elif isinstance(target, Opaque):
        function = target.name
    elif isinstance(target, OpOverload):
        function = binding or f"torch.ops.{target}"
    else:
        function = f"operator.{target.__name__}"
    return f"{node.name} = {function}({', '.join(arguments)})"


def _unchanged(given: Any) -> str:
    """What is written in the place of an argument that must stay as it is."""
    return copy_of(given) if given.op == "get_attr" else f"{given.name}.clone()"


def argument(value: Any) -> str:
    """The text of an argument, nodes by their names."""
    if isinstance(value, torch.fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(argument(item) for item in value)}]"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    return repr(value)


def let_go(nodes: Iterable[torch.fx.Node]) -> str:
    """What to put behind a statement, so that these names hold nothing after it."""
    names = list(dict.fromkeys(node.name for node in nodes))
    return f"; {' = '.join(names)} = None" if names else ""
