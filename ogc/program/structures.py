"""How arguments and results of a call flatten into tensors, and how they are put together again.

Lists, tuples, dicts and whatever is registered as a pytree are taken apart; so are objects that hold nothing but
tensors, constants and such objects (caches, dataclasses). A call may change these: what they hold then is part of its
result. An object that is given twice is one object when it is put together again.
"""

from __future__ import annotations

import copy
import enum
import itertools
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch

from ..errors import InputError
from ..torch_state.no_trace import shares_casts
from ..torch_state.private import pytree
from ..torch_state.reads.objects import same_objects

CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, type, enum.Enum, slice, type(Ellipsis),
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
"""What holds no tensor, and is the same whenever it is equal."""

NOT_DENSE = (-1,)
"""In the place of strides, where there are none: no dense tensor has these."""

_NO_CONTAINERS = (torch.Tensor, *CONSTANTS)
_DEEPEST = 4  # of objects within objects


class TensorSpec(NamedTuple):
    """Shape, strides, type and place of an input tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSpec:
        stride = tensor.stride() if tensor.layout is torch.strided else NOT_DENSE
        return TensorSpec(tuple(tensor.shape), stride, tensor.dtype, tensor.device, tensor.requires_grad)


@dataclass(frozen=True)
class Same:
    """An argument that is given once more: its number among the objects that are taken apart, tensors included."""

    number: int


@dataclass(frozen=True)
class Call:
    """The arguments of a call, as a sample input."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class InputSpec:
    """How the arguments of a call flatten, and everything about them that a program depends on."""

    tree: pytree.TreeSpec  # the structure of the arguments
    leaves: tuple[Any, ...]  # TensorSpec or HolderSpec, Same where either is given once more, else the value itself
    casts: tuple[Any, ...]  # what autocast does, by device type

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[InputSpec, list[torch.Tensor]]:
        """The specification of a call and its tensors, in order, each once."""
        casts = _casts()
        if _are_tensors(args, kwargs):
            return InputSpec(_tree_of_tensors(len(args)), tuple(map(TensorSpec.of, args)), casts), list(args)
        taken = first = _TakenApart()
        spec = taken.spec((args, kwargs), casts)
        if first.twice:
            taken = _TakenApart(first.twice)
            spec = taken.spec((args, kwargs), casts)
        return spec, taken.tensors

    @property
    def tensors(self) -> list[TensorSpec]:
        return [leaf for leaf in flat_leaves(self.leaves) if isinstance(leaf, TensorSpec)]

    @property
    def constants(self) -> list[Any]:
        """What is no tensor, in order."""
        return [leaf for leaf in flat_leaves(self.leaves) if not isinstance(leaf, (TensorSpec, Same))]

    def fits(self, other: InputSpec, size: bool = True) -> bool:
        """Whether calls of the two are alike; without ``size``, up to shapes, strides and numbers."""
        return (
            (self.tree is other.tree or self.tree == other.tree)
            and self.casts == other.casts
            and all(same_leaf(a, b, size) for a, b in zip(self.leaves, other.leaves, strict=True))
        )

    def rebuild(self, tensors: list[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call, with the given tensors in the places of its own, and objects of their own."""
        args, kwargs = self._rebuild(iter(tensors), [])
        return args, kwargs

    def _rebuild(self, source: Iterator[torch.Tensor], made: list[Any]) -> Any:
        """``made`` are the objects until then; more are added."""

        def leaf_of(described: Any) -> Any:
            if isinstance(described, TensorSpec):
                made.append(next(source))
                return made[-1]
            if isinstance(described, HolderSpec):
                number = len(made)
                made.append(None)  # until it is there
                made[number] = described.instance(described.content._rebuild(source, made)[0])
                return made[number]
            return made[described.number] if isinstance(described, Same) else described

        return pytree.tree_unflatten([leaf_of(leaf) for leaf in self.leaves], self.tree)


def _are_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call has nothing but tensors, each once."""
    is_flat = not kwargs and all(isinstance(arg, torch.Tensor) for arg in args)
    return is_flat and (len(args) == 1 or len(set(map(id, args))) == len(args))


class _TakenApart:
    """Arguments of one call, as they are taken apart; ``twice`` are the ids of containers that are given again."""

    def __init__(self, twice: Collection[int] = ()) -> None:
        self.twice = set(twice)
        self.seen: dict[int, Any] = {}  # containers, held so that their ids stay theirs
        self.numbers: dict[int, int] = {}  # of tensors and of objects that are taken apart, by their ids
        self.tensors: list[torch.Tensor] = []
        self.opened: Any = None
        self.held: list[Any] = []

    def spec(self, given: Any, casts: tuple[Any, ...] = ()) -> InputSpec:
        own = weakref.proxy(self)  # as pytree's function is in a cycle, with what it is given to call
        leaves, tree = pytree.tree_flatten(given, is_leaf=lambda thing: own._is_leaf(thing))
        return InputSpec(tree, tuple(map(self._described, leaves)), casts)

    def _is_leaf(self, thing: Any) -> bool:
        if isinstance(thing, _NO_CONTAINERS) or thing is self.opened:
            return False
        if id(thing) in self.twice:
            return True
        is_tuple = isinstance(thing, tuple)
        if id(thing) in self.seen and (not is_tuple or any(map(torch.is_tensor, pytree.tree_leaves(thing)))):
            self.twice.add(id(thing))
        if is_tuple or type(thing) in pytree.SUPPORTED_NODES:
            self.seen[id(thing)] = thing
        return False

    def _described(self, leaf: Any) -> Any:
        is_tensor, is_container = isinstance(leaf, torch.Tensor), id(leaf) in self.twice
        if not (is_tensor or is_container or is_holder(leaf)):
            return leaf
        if id(leaf) in self.numbers:
            return Same(self.numbers[id(leaf)])
        self.numbers[id(leaf)] = len(self.numbers)
        self.held.append(leaf)
        if is_tensor:
            self.tensors.append(leaf)
            return TensorSpec.of(leaf)
        self.opened = leaf
        kind, content = (None, leaf) if is_container else (type(leaf), vars(leaf))
        return HolderSpec(kind, self.spec((content,)))


def input_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments of a call, in order, each once."""
    return list(args) if _are_tensors(args, kwargs) else InputSpec.of(args, kwargs)[1]


@dataclass(frozen=True)
class HolderSpec:
    """An object that is taken apart: its class, and the InputSpec or OutputSpec of its attributes.

    A container that is given more than once has no class here: it is its content.
    """

    kind: type | None
    content: Any

    def instance(self, attributes: Any) -> Any:
        """A new object of the class, made without calling it."""
        if self.kind is None:
            return attributes
        result: Any = object.__new__(self.kind)
        vars(result).update(attributes)
        return result


def flat_leaves(leaves: Iterable[Any]) -> Iterator[Any]:
    """Those of arguments or of a result, and of the objects among them in their places."""
    for leaf in leaves:
        yield from flat_leaves(leaf.content.leaves) if isinstance(leaf, HolderSpec) else (leaf,)


def is_holder(thing: Any, depth: int = 0) -> bool:
    """Whether it is an object that is taken apart: it holds tensors, constants, and objects that do, alone."""
    if isinstance(thing, (*CONSTANTS, torch.Tensor, torch.nn.Module)) or callable(thing):
        return False
    if not hasattr(thing, "__dict__") or type(thing).__new__ is not object.__new__ or depth == _DEEPEST:
        return False
    leaves = pytree.tree_leaves(vars(thing))
    return all(isinstance(x, (*CONSTANTS, torch.Tensor)) or is_holder(x, depth + 1) for x in leaves)


class Given:
    """The arguments of one call, to see afterwards what the call has changed in them."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, nodes = _opened([*args, *kwargs.values()])
        found = [leaf for leaf in leaves if is_holder(leaf)] + [node for node in nodes if is_container(node)]
        self.holders = list({id(holder): holder for holder in found}.values())
        self.before = list(map(_content, self.holders))
        self.others = [node for node in nodes if not is_container(node)]
        self.others_before = list(map(self._flat, self.others))

    def changed_holders(self) -> tuple[int, ...]:
        """The numbers of the objects, lists and dicts that hold something else than before."""
        pairs = zip(map(_content, self.holders), self.before, strict=True)
        alike = (now.fits(then) and same_objects(tensors, before) for (now, tensors), (then, before) in pairs)
        return tuple(number for number, same in enumerate(alike) if not same)

    def has_other_items(self) -> bool:
        """Whether something else among the arguments that is taken apart holds something else than before."""
        pairs = zip(map(self._flat, self.others), self.others_before, strict=True)
        return not all(now == then and same_objects(leaves, before) for (leaves, now), (before, then) in pairs)

    def _flat(self, node: Any) -> tuple[list[Any], pytree.TreeSpec]:
        known = set(map(id, self.holders))
        return pytree.tree_flatten(node, is_leaf=lambda thing: id(thing) in known)


def is_container(thing: Any) -> bool:
    """Whether it is a list or a dict that is taken apart."""
    return type(thing) in (list, dict, OrderedDict, defaultdict)


def _opened(arguments: list[Any]) -> tuple[list[Any], list[Any]]:
    """The leaves of arguments, and what is taken apart there and can be changed, from the outside in."""
    nodes: list[Any] = []

    def note(thing: Any) -> bool:
        if type(thing) in pytree.SUPPORTED_NODES and not isinstance(thing, tuple) and thing is not arguments:
            nodes.append(thing)
        return False

    return pytree.tree_leaves(arguments, is_leaf=note), nodes


def items_of(holder: Any) -> Any:
    """What an object, list or dict holds, in a list or dict of its own."""
    return copy.copy(holder if is_container(holder) else vars(holder))


def hold(holder: Any, items: Any) -> None:
    """Let an object, list or dict hold these items."""
    held = holder if is_container(holder) else vars(holder)
    if isinstance(held, list):
        held[:] = items
    else:
        held.clear()
        held.update(items)


def _content(holder: Any) -> tuple[InputSpec, list[torch.Tensor]]:
    return InputSpec.of((items_of(holder),), {})


@cache
def _tree_of_tensors(count: int) -> pytree.TreeSpec:
    """How a call with so many tensors and nothing else flattens."""
    return pytree.tree_structure(((0,) * count, {}))


def same_leaf(a: Any, b: Any, size: bool = True) -> bool:
    """Whether two leaves of arguments are alike; without ``size``, up to shapes, strides and numbers."""
    if isinstance(a, TensorSpec) and isinstance(b, TensorSpec):
        return a == b if size else len(a.shape) == len(b.shape) and a[2:] == b[2:]
    if isinstance(a, HolderSpec) and isinstance(b, HolderSpec):
        return a.kind is b.kind and a.content.fits(b.content, size)
    if a is b or type(a) is not type(b):
        return a is b
    if not size and type(a) in (int, float):
        return True
    try:
        return bool(a == b)
    except (TypeError, ValueError, RuntimeError):  # an array has no one truth
        return False


EACH_BY_ITSELF = "each by itself"
"""What autocast does to a parameter where its casts are not shared."""


def autocast_state() -> tuple[tuple[str, torch.dtype], ...]:
    """Device types for which autocast is on, and what it casts to."""
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in autocast_kinds())


def _casts() -> tuple[Any, ...]:
    """What autocast does to a call, and whether it shares its casts."""
    casts = autocast_state()
    shares = not casts or shares_casts.value or torch.is_autocast_cache_enabled()
    return casts if shares else (*casts, EACH_BY_ITSELF)


def autocast_kinds() -> list[str]:
    """Device types for which autocast is on."""
    return [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]


TENSOR = object()
"""Stands for a tensor among the leaves of a result."""


@dataclass(frozen=True)
class OutputSpec:
    """How a result is rebuilt."""

    tree: pytree.TreeSpec  # its structure; with changed objects, that of a pair: the result, and what they hold
    leaves: tuple[Any, ...]  # TENSOR, a HolderSpec, an object that was given, or the leaf itself
    changed: tuple[int, ...] = ()  # the numbers of the given objects that are changed

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
        """The structure with one of its tensors, None for the others; InputError if the call changes its arguments."""
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
