"""What kind a call is: all that a plan depends on, and in words how two kinds differ."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ...program.structures import EACH_BY_ITSELF, HolderSpec, InputSpec, Same, TensorSpec, same_leaf
from ...torch_state.module_state import State, changed_state
from ...torch_state.private import pytree
from ...torch_state.settings import Flags, changed_flags

MOST = 3
"""How many differences are told."""


class Kind(NamedTuple):
    """The module, the arguments and PyTorch's settings at a call. Equal where the same plan holds."""

    state: State
    inputs: InputSpec
    flags: Flags

    def fits(self, other: Kind, size: bool = True) -> bool:
        """Whether calls are of one kind; without ``size``, up to shapes, strides and numbers."""
        same_state = self.state is other.state or self.state == other.state
        return same_state and self.flags == other.flags and self.inputs.fits(other.inputs, size)

    def differences(self, model: torch.nn.Module, other: Kind) -> str:
        """In what this kind differs from another, in words."""
        found = [*changed_state(model, other.state, self.state), *_autocast(self.inputs.casts, other.inputs.casts)]
        found += [*changed_flags(other.flags, self.flags), *_inputs(model, self.inputs, other.inputs)]
        rest = f" and {len(found) - MOST} more" if len(found) > MOST else ""
        return (", ".join(found[:MOST]) + rest) or "the arguments are nested otherwise"


def _autocast(now: tuple[Any, ...], then: tuple[Any, ...]) -> Iterator[str]:
    if now == then:
        return
    casts = [f"casts to {one[1]} on {one[0]}" for one in now if one is not EACH_BY_ITSELF]
    cache = ", without its cache" if EACH_BY_ITSELF in now else ""
    yield f"autocast {' and '.join(casts) or 'is off'}{cache}"


def _inputs(model: torch.nn.Module, given: InputSpec, sample: InputSpec) -> Iterator[str]:
    here, there = (_by_name(model, spec) for spec in (given, sample))
    for name, leaf in here.items():
        if name not in there:
            yield f"{name} is {_text(leaf)}, which the sample has not"
        elif not same_leaf(leaf, there[name]):
            now, then = _text(leaf), _text(there[name])
            yield f"{name} is {now}, not {then}" if now != then else f"{name} has other strides or contents"
    yield from (f"{name} is not there" for name in there if name not in here)


def _by_name(model: torch.nn.Module, spec: InputSpec) -> dict[str, Any]:
    """The leaves of a call's arguments, by the names of the forward's parameters."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    args, kwargs = spec.tree.children()
    places = [positional[n] if n < len(positional) else f"argument {n}" for n in range(args.num_children)]
    names = [name for place, tree in zip(places, args.children(), strict=True) for name in _names(place, tree)]
    names += [name for key, tree in zip(kwargs.context, kwargs.children(), strict=True) for name in _names(key, tree)]
    return dict(zip(names, spec.leaves, strict=True))


def _names(name: str, tree: pytree.TreeSpec) -> Iterator[str]:
    """A name for each leaf of an argument."""
    if tree.is_leaf():
        yield name
        return
    keys = tree.context if tree.type is dict else range(tree.num_children)
    for key, child in zip(keys, tree.children(), strict=True):
        yield from _names(f"{name}[{key!r}]", child)


def _text(leaf: Any) -> str:
    if isinstance(leaf, TensorSpec):
        grad = " that requires grad" if leaf.requires_grad else ""
        return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)} on {leaf.device}{grad}"
    if isinstance(leaf, Same):
        return "an object that is given before"
    if isinstance(leaf, HolderSpec):
        return "given more than once" if leaf.kind is None else f"another {leaf.kind.__name__}"
    return repr(leaf)[:40]
