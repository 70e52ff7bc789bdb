"""The nodes of a recorded program's tensors, and the storages that these tensors are in."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils.weak import WeakTensorKeyDictionary

from ...process import tell_stage
from ...program.program import CONSTANT, OWN, SHAPE, storage_of
from ...program.structures import TensorSpec
from ...program.tensors import ByStorage
from ...torch_state.private import storage_id
from ..forward.location import user_line
from ..traced import ALIVE, BYTES, CALL, History, Seen
from ..weigh.record import alike, layout_of

Layout = tuple[tuple[int, ...], tuple[int, ...], int]


@dataclass
class Storage:
    """A storage; ``layout`` (shape, strides, offset in entries) is that of its first tensor, which is ``node``."""

    number: int
    opaque: str | None  # the opaque module that made it, if one did
    is_state: bool = False  # whether it is that of a parameter or buffer
    node: torch.fx.Node | None = None
    layout: Layout | None = None
    dtype: torch.dtype | None = None
    since: int = 0  # calls until that one
    is_written: bool = False
    is_aliased: bool = False  # seen past autograd, as by .data


class Tensors:
    """The nodes that stand for the tensors of a forward; ``refuse`` is told what no program can hold, in words.

    ``graph`` gets one for each parameter, buffer and constant that is used, where it first is.
    """

    def __init__(
        self, graph: torch.fx.Graph, model: torch.nn.Module, inputs: list[torch.Tensor], refuse: Callable[..., None]
    ) -> None:
        self.graph = graph
        self.refuse = refuse
        self.constants: dict[str, torch.Tensor] = {}  # no attributes of the model, by the name of their node
        self.fresh: set[torch.fx.Node] = set()  # constants that the forward makes anew each time of what Python holds
        self.rewritten: set[torch.fx.Node] = set()  # those of them that are written later
        self.requires_grad: dict[torch.fx.Node, bool] = {}
        self.state = dict(chain(model.named_parameters(), model.named_buffers()))
        self._names = {id(tensor): name for name, tensor in self.state.items()}  # all are held by the model
        self._nodes = WeakTensorKeyDictionary()
        self._storages: ByStorage[Storage] = ByStorage()
        self._alive: dict[int, tuple[Storage, weakref.ref[torch.UntypedStorage]]] = {}  # by number, if not external
        self._calls = 0
        self._count = 0
        self.external_numbers: frozenset[int] = frozenset()
        for number, tensor in enumerate(inputs):
            self.bind(tensor, graph.placeholder(f"input_{number}"))
        for tensor in self.state.values():
            if (storage := self.storage(tensor)) is not None:
                storage.is_state = True
        self.external_numbers = frozenset(range(self._count))  # of the storages of inputs, parameters and buffers
        self._alive.clear()

    def bind(self, tensor: torch.Tensor, node: torch.fx.Node) -> None:
        """From here on ``node`` stands for ``tensor``."""
        self._nodes[tensor] = node
        node.meta.setdefault(SHAPE, tuple(tensor.shape))
        self.requires_grad[node] = tensor.requires_grad
        storage = self.storage(tensor)
        if storage is not None and storage.node is None:
            storage.node, storage.layout, storage.dtype = node, layout_of(tensor), tensor.dtype
            raw = tensor.untyped_storage()
            node.meta[BYTES] = raw.nbytes()
            if storage.number not in self.external_numbers:
                storage.since = self._calls
                self._alive[storage.number] = storage, weakref.ref(raw, partial(self._note_end, storage.number))

    def note_call(self, node: torch.fx.Node) -> None:
        """Number a call."""
        self._calls += 1
        tell_stage(f"record operation {self._calls}")
        node.meta[CALL] = self._calls

    def note_ends(self) -> None:
        """Note that what the forward holds still is there at its last call."""
        for number in list(self._alive):
            self._note_end(number)

    def _note_end(self, number: int, _: object = None) -> None:
        """Note the last call during which the forward held a storage."""
        storage, _reference = self._alive.pop(number, (None, None))
        if storage is not None and storage.node is not None and self._calls > storage.since:
            storage.node.meta[ALIVE] = self._calls

    def history(self, results: list[torch.Tensor], saved: list[torch.Tensor]) -> History:
        """That of a call with these results, which saves these tensors."""
        raws = dict.fromkeys(raw for raw in map(storage_of, saved) if raw is not None)
        entries = [(raw, self._storages.get(raw)) for raw in raws]
        own = [storage for storage in map(self.storage, results) if storage is not None]
        return History(
            results=tuple(storage.node.name for storage in own if storage.node is not None),
            saved=tuple(entry.node.name for _, entry in entries if entry is not None and entry.node is not None),
            bytes=sum(raw.nbytes() for raw, entry in entries if entry is None),
        )

    def node(self, tensor: torch.Tensor) -> torch.fx.Node:
        """The node of ``tensor``, made now if it has none."""
        node: torch.fx.Node | None = self._nodes.get(tensor)
        if node is None:
            node = self._new_node(tensor)
            self.bind(tensor, node)
        elif self.requires_grad[node] != tensor.requires_grad:
            storage = self.storage(tensor)
            if isinstance(tensor.grad_fn, BackwardCFunction):  # called by a name that it got before
                self.refuse(
                    f"calls a custom torch.autograd.Function past its class, {tensor.grad_fn.name()}, seen at "
                    f"{user_line()}",
                    node.meta.get("module"),  # where its result was made, not where that was used
                )
            elif storage is None or not storage.is_written:  # else a write has made it so
                self.refuse(f"changes what requires grad past autograd, seen at {user_line()}")
            self.requires_grad[node] = tensor.requires_grad
        return node

    def known(self, tensor: torch.Tensor) -> torch.fx.Node | None:
        node: torch.fx.Node | None = self._nodes.get(tensor)
        return node

    def storage(self, tensor: torch.Tensor, opaque: str | None = None) -> Storage | None:
        """The entry of the tensor's storage, None if it has no storage; a new entry says that ``opaque`` made it."""
        raw = storage_of(tensor)
        if raw is None:
            return None
        known = self._storages.get(raw)
        if known is None:
            known = self._storages[raw] = Storage(self._count, opaque)
            self._count += 1
        return known

    def is_new(self, tensor: torch.Tensor) -> bool:
        """Whether nothing is known of the tensor's storage."""
        raw = storage_of(tensor)
        return raw is None or raw not in self._storages

    def write(self, tensor: torch.Tensor) -> None:
        storage = self.storage(tensor)
        if storage is None:
            return
        if storage.is_aliased:
            self.refuse(f"writes a tensor past autograd (.data) at {user_line()}")
        storage.is_written = True
        if storage.node in self.fresh:
            self.rewritten.add(storage.node)

    def get_attr(self, target: str, tensor: torch.Tensor | None = None) -> torch.fx.Node:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fx warns that its graph has no owning module
            node = self.graph.get_attr(target)
        if tensor is not None:
            self.requires_grad[node] = tensor.requires_grad
        return node

    def constant(self, tensor: torch.Tensor, is_fresh: bool = False) -> torch.fx.Node:
        """A node for a tensor that is no attribute of the model; ``is_fresh`` if each forward makes its own."""
        name = f"{CONSTANT}{len(self.constants)}"
        self.constants[name] = tensor.clone() if is_fresh else tensor
        node = self.get_attr(name, tensor)
        self.bind(tensor, node)
        if is_fresh:
            self.fresh.add(node)
        return node

    def _new_node(self, tensor: torch.Tensor) -> torch.fx.Node:
        """A node for a tensor that no operator made."""
        name = self._names.get(id(tensor))
        if name is not None:
            return self.get_attr(name, tensor)
        storage = None if self.is_new(tensor) else self.storage(tensor)
        if storage is not None and (storage.node is not None or tensor.grad_fn is None):
            base = self._base(tensor, storage)
            if base is not None:
                return base
        if storage_of(tensor) is None:
            self.refuse(f"uses a tensor without memory of its own at {user_line()}")
        if tensor.grad_fn is not None:
            self.refuse(f"uses a tensor whose history begins outside of the forward, at {user_line()}")
        return self.constant(tensor)

    def _base(self, tensor: torch.Tensor, storage: Storage) -> torch.fx.Node | None:
        """A node for what shares the memory of a known tensor, but not its history, as ``.data`` does."""
        of_state = (self.node(held) for held in self.state.values() if self.storage(held) is storage)
        node = storage.node or next(of_state, None)
        if node is None:
            return None
        if tensor.requires_grad or tensor.dtype != storage.dtype:
            self.refuse(f"sees a tensor past autograd at {user_line()}")
        storage.is_aliased = True
        result = self.graph.call_function(torch.ops.aten.detach.default, (node,))
        result.meta[OWN] = True
        if storage.layout != layout_of(tensor):
            result = self.graph.call_function(torch.ops.aten.as_strided.default, (result, *layout_of(tensor)))
        return result


def seen_of(given: list[torch.Tensor], results: list[torch.Tensor], saved: list[torch.Tensor]) -> Seen | None:
    """What is seen of a call; None where a tensor has no memory of its own."""
    try:
        return Seen(tuple([TensorSpec.of(t) for t in given]), *memory_seen_of(given, results, saved))
    except (NotImplementedError, RuntimeError):
        return None


def memory_seen_of(
    given: list[torch.Tensor], results: list[torch.Tensor], saved: list[torch.Tensor]
) -> tuple[tuple[int | None, ...], tuple[tuple[tuple[bool, int], Layout | None] | None, ...]]:
    """What a call shares and saves, as in :class:`Seen`; an error where a tensor has no memory of its own."""
    storages, own = list(map(storage_id, given)), list(map(storage_id, results))
    views = tuple([storages.index(one) if one in storages else None for one in own])
    if not saved:
        return views, ()
    known = [*((t, (True, n)) for n, t in enumerate(results)), *((t, (False, n)) for n, t in enumerate(given))]
    own += storages
    if len(own) > len(set(own)):
        return views, tuple([alike(t, known) for t in saved])
    places = dict(zip(own, known, strict=True))  # each memory is that of one tensor
    return views, tuple([alike(t, [places[one]] if (one := storage_id(t)) in places else []) for t in saved])
