"""Values of one forward that are offloaded until its backward: what stands in their places, and when they are copied.

A saved tensor, and a value that a recomputation starts from, hold an :class:`Away` in the place of the tensor. It is
let go of where the tensor would be, and the memory with it.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass
from threading import RLock
from typing import Any

import torch

from ..errors import ReplayError
from ..graph import Graph
from ..program.opaque import Opaque
from ..program.program import Program, storage_of, tensor_leaves
from ..torch_state.private import id_of_storage, keeps_graph, untraced, version_of
from .held import StandIn, kept
from .host import Fetched, Home, Sent

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor in the bytes of a storage."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        """That of a tensor."""
        return Layout(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def view(self, data: torch.Tensor) -> torch.Tensor:
        """The tensor in these bytes."""
        found = torch.empty(0, dtype=self.dtype, device=data.device)
        return found.set_(data.untyped_storage(), self.offset, self.size, self.stride)  # type: ignore[call-overload,no-any-return]


class Away:
    """One value of one forward: here, on its way, or away."""

    def __init__(self, tensor: torch.Tensor, lock: RLock) -> None:
        self.lock = lock
        storage = tensor.untyped_storage()
        self.storage = id_of_storage(storage)  # as long as it is here
        self.tensor: torch.Tensor | None = tensor.detach()
        self.version = version_of(self.tensor)
        self.data: torch.Tensor | None = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)  # type: ignore[call-overload]
        self.sent: Sent | None = None
        self.fetched: Fetched | None = None

    def leave(self) -> None:
        """Wait for the copy out, and let go of the bytes.

        Raises:
            OSError: the copy failed, and the bytes stay.
        """
        if self.sent is None or self.tensor is None:
            return
        sent, self.sent = self.sent, None
        sent.wait()
        if version_of(self.tensor) == self.version:  # else what asks for it is told
            self.sent, self.tensor, self.data, self.storage = sent, None, None, -1

    def start(self) -> None:
        """Start the copy back, unless it is here or under way."""
        with self.lock:
            if self.data is None and self.fetched is None:
                assert self.sent is not None
                self.fetched = self.sent.back()

    def fetch(self, layout: Layout) -> torch.Tensor:
        """The tensor of this layout; one that another backward may ask for is not held, but fetched again then."""
        with self.lock:
            if self.data is None:
                self.start()
                assert self.fetched is not None
                self.fetched.wait()
                self.data, self.fetched = self.fetched.data, None
            found = layout.view(self.data)
            if self.tensor is None:
                self.data = None if keeps_graph() else self.data
            elif version_of(self.tensor) != self.version:
                raise ReplayError(
                    "one of the variables needed for gradient computation has been modified by an in-place operation: "
                    f"a tensor of shape {layout.size} is at version {version_of(self.tensor)}, expected {self.version}"
                )
            return found


class Copies:
    """All offloaded values of one forward, by their numbers."""

    def __init__(self, home: Home, lock: RLock) -> None:
        self.home = home
        self.lock = lock
        self.here: dict[int, Away] = {}  # until they leave
        self.gone: dict[int, weakref.ref[Away]] = {}

    def pack(self, value: int, tensor: torch.Tensor) -> Any:
        """What autograd holds in the place of a tensor in the value's storage."""
        away = self._of(value, tensor)
        return kept(tensor) if away is None else (away, Layout.of(tensor))

    @untraced
    def out(self, value: int, result: Any, number: int) -> None:
        """Start the copy of a value that an operation has written for the last time, in one of its results."""
        away = self._of(value, tensor_leaves(result)[number])
        if away is None or away.data is None:
            return
        assert away.tensor is not None
        away.version = version_of(away.tensor)
        try:
            away.sent = self.home.out(away.data)
        except OSError as error:
            self._tell(error)

    @untraced
    def leave(self, *values: int) -> None:
        """Let go of values, whose copies have ended then."""
        for value in values:
            if (away := self.here.pop(value, None)) is not None:
                self.gone[value] = weakref.ref(away)
                try:
                    away.leave()
                except OSError as error:
                    self._tell(error)

    @untraced
    def stand_in(self, value: int, held: Any) -> Any:
        """What a recomputation holds in the place of what has tensors in the value's storage."""
        if isinstance(held, (list, tuple)):
            return type(held)([self.stand_in(value, item) for item in held])
        if not isinstance(held, torch.Tensor) or (away := self._of(value, held)) is None:
            return held
        return StandIn(away, Layout.of(held), held.requires_grad)

    @untraced
    def before_backward(self, result: Any, *values: int) -> None:
        """Fetch values, in this order, before the backward of what made these results."""
        for tensor in tensor_leaves(result):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(_Fetching(self.gone, values))
                return

    def _of(self, value: int, tensor: torch.Tensor) -> Away | None:
        """The value, of whose storage this is a tensor; None where that is another one, or another kind of tensor."""
        storage = storage_of(tensor)
        is_usual = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not (tensor.is_conj() or tensor.is_neg())
        if storage is None or not is_usual or tensor.layout is not torch.strided or tensor.is_quantized:
            return None
        known = self.here.get(value)
        if known is None and value not in self.gone:
            known = self.here[value] = Away(tensor, self.lock)
        return known if known is not None and known.storage == id_of_storage(storage) else None

    def _tell(self, error: OSError) -> None:
        what = f"ogc keeps values in memory that it was to offload: {error.strerror or error}"
        if what not in self.home.told:
            self.home.told.add(what)
            log.warning(what)


@dataclass(frozen=True)
class _Fetching:
    """A hook that fetches what is away."""

    gone: dict[int, weakref.ref[Away]]
    values: tuple[int, ...]

    def __call__(self, gradients: Any) -> None:
        for value in self.values:
            reference = self.gone.get(value)
            if reference is not None and (away := reference()) is not None:
                away.start()


def offloadable_values(graph: Graph) -> frozenset[int]:
    """The values that the runtime can offload: each is the only one that its nodes return, and those can be told.

    What an opaque module reads, or keeps of its results, it may hold.
    """
    program: Program = graph.program
    nodes: dict[str, set[int]] = {}
    for ref, value in program.storages.items():
        nodes.setdefault(ref.node, set()).add(value)
    shared = {value for values in nodes.values() if len(values) > 1 for value in values}
    for t, (node, op) in enumerate(zip(program.operations, graph.operations, strict=False)):
        if isinstance(node.target, Opaque):
            shared.update((*op.reads, *op.writes, *op.saves))
        shared.update(v for v in op.writes if graph.last_writes[v] == t and v not in nodes.get(node.name, ()))
    return frozenset(v for v, value in enumerate(graph.values) if value.bytes and v not in shared)
