"""How the result of a call flattens into tensors, and how it is put together again, with what the call has changed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import InputError
from ..torch_state.private import pytree
from .structures import Given, HolderSpec, flat_leaves, hold, is_container, is_holder, items_of

TENSOR = object()
"""Stands for a tensor among the leaves of a result."""


@dataclass(frozen=True)
class OutputSpec:
    """How a result is rebuilt.

    Attributes:
        tree: its structure; where objects that were given are changed, that of a pair: the result, and what they hold.
        leaves: TENSOR for each tensor, a HolderSpec for each object that is taken apart, else an object, list or dict
            that was given, or the leaf itself.
        changed: the numbers of the given objects that are changed.
    """

    tree: pytree.TreeSpec
    leaves: tuple[Any, ...]
    changed: tuple[int, ...] = ()

    @staticmethod
    def of(result: Any, given: Given | None = None) -> tuple[OutputSpec, list[torch.Tensor]]:
        """The specification of a result and its tensors, in order; those that objects hold are among them."""
        holders = [] if given is None else given.holders
        changed = () if given is None else given.changed_holders()
        known = {
            id(holder): _GivenObject(number)
            for number, holder in enumerate(holders)
            if changed or not is_container(holder)
        }
        if not changed:
            return _output_of(result, known)
        spec, tensors = _output_of((result, [_Content(holders[number]) for number in changed]), known)
        return OutputSpec(spec.tree, spec.leaves, changed), tensors

    @property
    def constants(self) -> list[Any]:
        """What is no tensor, in order."""
        return [leaf for leaf in flat_leaves(self.leaves) if leaf is not TENSOR and not isinstance(leaf, _GivenObject)]

    def only(self, number: int) -> OutputSpec:
        """The structure with one of its tensors, and None in the place of the others and of objects that hold them.

        Raises:
            InputError: the call changes objects that it is given.
        """
        if self.changed:
            raise InputError("the forward stores tensors in objects that it is given, so they are wanted; let it not")
        count = itertools.count()
        return replace(self, leaves=tuple(_only(leaf, number, count) for leaf in self.leaves))

    def deliver(self, tensors: Iterable[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call with these arguments; objects among them are changed as by the call."""
        has_objects = self.changed or any(isinstance(leaf, (HolderSpec, _GivenObject)) for leaf in self.leaves)
        holders = Given(args, kwargs).holders if has_objects else []
        result = self._rebuild(iter(tensors), holders)
        if not self.changed:
            return result
        result, contents = result
        for number, content in zip(self.changed, contents, strict=True):
            hold(holders[number], content.items)
        return result

    def _rebuild(self, source: Iterator[torch.Tensor], holders: list[Any]) -> Any:
        def leaf_of(described: Any) -> Any:
            if described is TENSOR:
                return next(source)
            if isinstance(described, _GivenObject):
                return holders[described.number]
            if isinstance(described, HolderSpec):
                return described.instance(described.content._rebuild(source, holders))
            return described

        return pytree.tree_unflatten([leaf_of(leaf) for leaf in self.leaves], self.tree)


def _only(leaf: Any, number: int, count: Iterator[int]) -> Any:
    """One leaf of a structure, of whose tensors in order one is wanted."""
    if leaf is TENSOR:
        return TENSOR if next(count) == number else None
    if not isinstance(leaf, HolderSpec):
        return leaf
    content = replace(leaf.content, leaves=tuple(_only(one, number, count) for one in leaf.content.leaves))
    return HolderSpec(leaf.kind, content) if TENSOR in flat_leaves(content.leaves) else None


class _Content:
    """What a given object, list or dict holds after a call."""

    def __init__(self, holder: Any) -> None:
        self.items = items_of(holder)


@dataclass(frozen=True)
class _GivenObject:
    """An object that was given."""

    number: int


def _output_of(
    result: Any, known: dict[int, _GivenObject], around: tuple[Any, ...] = ()
) -> tuple[OutputSpec, list[torch.Tensor]]:
    """The specification and the tensors; ``around`` are the objects that hold the result."""
    leaves, tree = pytree.tree_flatten(result, is_leaf=lambda thing: id(thing) in known)
    opened = [_open(leaf, known, around) for leaf in leaves]
    return OutputSpec(tree, tuple(leaf for leaf, _ in opened)), [tensor for _, inside in opened for tensor in inside]


def _open(leaf: Any, known: dict[int, _GivenObject], around: tuple[Any, ...]) -> tuple[Any, list[torch.Tensor]]:
    if id(leaf) in known:
        return known[id(leaf)], []
    if isinstance(leaf, torch.Tensor):
        return TENSOR, [leaf]
    is_closed = isinstance(leaf, (type, torch.nn.Module)) or callable(leaf) or not hasattr(leaf, "__dict__")
    if is_closed or any(leaf is one for one in around):
        return leaf, []
    is_own = any(isinstance(one, _Content) for one in (leaf, *around))  # else objects without tensors stay themselves
    spec, tensors = _output_of(vars(leaf), known, (*around, leaf))
    if tensors or isinstance(leaf, _Content) or (is_own and is_holder(leaf)):
        return HolderSpec(type(leaf), spec), tensors
    return leaf, []
