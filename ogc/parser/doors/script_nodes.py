"""What the nodes of a TorchScript graph say of themselves: operator, place, steps of indexing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import takewhile
from typing import Any

import torch

from ...errors import ParseError
from ..forward.location import is_before_us, line_of

_SCHEMA = re.compile(r"(?P<namespace>\w+)::(?P<name>\w+)(\.(?P<overload>\w+))?\(")
_FRAMES = re.compile(r'^(?P<file>.+)\((?P<line>\d+)\): |File "(?P<named>[^"]+)", line (?P<number>\d+)', re.MULTILINE)
_INDEXING = {"aten::slice", "aten::select", "aten::unsqueeze", "aten::index", "aten::index_put_", "aten::copy_"}
_TO_THE_END = 2**63 - 1


def overload_of(node: Any) -> Any:
    """The operator of a node."""
    found = _SCHEMA.match(node.schema())
    if found is None:
        raise ParseError(f'front_end="jit": {node.kind()} at {line_of_node(node)} is no operator')
    packet = getattr(getattr(torch.ops, found["namespace"]), found["name"])
    return getattr(packet, found["overload"] or "default")


def scope_of(node: Any) -> str:
    """The path of the module that a node is in, such as ``model.blocks.0``; "" if it is not known."""
    return str(node.scopeName()).rpartition("/")[2].removeprefix("__module.")


def line_of_node(node: Any) -> str:
    """File and line of the model's code that a node comes from."""
    found = _FRAMES.finditer(node.sourceRange())
    frames = ((one["file"] or one["named"], int(one["line"] or one["number"])) for one in found)
    return line_of(takewhile(is_before_us, frames))


def input_of(node: Any) -> Any:
    """The node that gives a node its first input."""
    return next(node.inputs()).node()


def is_moved(node: Any) -> bool:
    """Whether a node moves a tensor that is made of Python's data, by ``torch.tensor`` or as an index, as traces do."""
    if node.kind() != "aten::to" or input_of(node).kind() != "prim::Constant":
        return False
    users = [use.user for use in node.output().uses()]
    return len(users) == 1 and users[0].kind() in ("aten::detach", "prim::ListConstruct")


def is_left_out_by_eager(node: Any) -> bool:
    """Whether a slice is one of several steps of indexing, and takes all: eager has it in a trace alone."""
    if node.kind() != "aten::slice" or [value.toIValue() for value in node.inputs()][2:] != [0, _TO_THE_END, 1]:
        return False
    return _goes_on(node) or _indexes_with(input_of(node), node)


def leaves_all(node: Any) -> bool:
    """Whether a step of indexing is the last of several of which none does anything: eager makes an alias."""
    if _goes_on(node):
        return False
    while _indexes_with(before := input_of(node), node):
        if not is_left_out_by_eager(before):
            return False
        node = before
    return True


def last_uses(nodes: list[Any], outputs: Iterable[Any]) -> dict[int, list[str]]:
    """For each of these nodes, by its number, the values that no later one uses, in blocks of theirs neither."""
    last: dict[str, int] = {}
    for number, node in enumerate(nodes):
        last.update(dict.fromkeys(_used(node), number))
    found: dict[int, list[str]] = {}
    for name in last.keys() - {value.debugName() for value in outputs}:
        found.setdefault(last[name], []).append(name)
    return found


def _used(node: Any) -> list[str]:
    inner = [name for block in node.blocks() for one in block.nodes() for name in _used(one)]
    returned = [value.debugName() for block in node.blocks() for value in block.outputs()]
    return [*(value.debugName() for value in node.inputs()), *inner, *returned]


def _goes_on(node: Any) -> bool:
    return any(_indexes_with(use.user, node) for use in node.output().uses())


def _indexes_with(one: Any, other: Any) -> bool:
    """Whether both are steps of the same indexing."""
    return one.kind() in _INDEXING and one.sourceRange() == other.sourceRange()
