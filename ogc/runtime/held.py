"""What is held for the backward: by autograd in the place of saved tensors, by opaque modules, and for recomputation.

A pair stands for a saved tensor: (the tensor, its version), or (who has it, its slot there).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any, Protocol

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks

from ..errors import ReplayError
from ..program.opaque import OpaqueCall
from ..program.program import storage_of
from ..program.tensors import Start, anchor, is_content, parts_of
from ..torch_state.compare import fingerprint, same_bits
from ..torch_state.private import id_of_storage, is_view, keeps_graph, maker_of, untraced, version_of

SMALL = 1 << 14
"""Bytes up to which a vector on the CPU, such as a bias, is copied: it may be written past version counters."""

SAMPLED = 32
"""Entries of anything else that are compared, to see that it was written so."""

ALIGNED = 64
"""Bytes to which tensors on the CPU are aligned."""


class Places:
    """How tensors at some places, parameters, buffers and constants, are noted; for all forwards until they change."""

    def __init__(self, tensors: Mapping[int, torch.Tensor]) -> None:
        self.kinds = {place: (type(tensor), tensor.requires_grad) for place, tensor in tensors.items()}
        self.parts: dict[torch.dtype, list[int | torch.Tensor]] = {}  # places of vectors, and what aligns the next one
        self.copied: dict[int, tuple[torch.dtype, int]] = {}  # where the copies of these are
        self.sampled: dict[torch.dtype, list[tuple[int, int, int]]] = {}  # places, how many entries, how far apart
        ends: dict[torch.dtype, int] = {}
        for place, tensor in tensors.items():
            is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_cpu and tensor.is_contiguous()
            dtype, length = tensor.dtype, tensor.numel()
            if is_plain and length and tensor.dim() <= 1 and tensor.nbytes <= SMALL:
                pad = -length % (ALIGNED // tensor.element_size())
                self.copied[place] = dtype, ends.get(dtype, 0)
                self.parts.setdefault(dtype, []).extend([place, torch.zeros(pad, dtype=dtype)] if pad else [place])
                ends[dtype] = ends.get(dtype, 0) + length + pad
            elif is_plain and length:
                count = min(SAMPLED, length)
                self.sampled.setdefault(dtype, []).append((place, count, length // count))
        self.held = [place for place in tensors if place not in self.copied]


class Seen:
    """Parameters, buffers and constants as a forward has seen them, for recomputation.

    They stay whatever is done to these until then: another ``data``, another type, ``requires_grad``. All of one type
    are copied at once: in a network of small operations one by one took half a step.
    """

    def __init__(self, places: Places, tensors: Mapping[int, torch.Tensor]) -> None:
        self.places, self.shapes = places, {place: tensors[place].shape for place in places.copied}
        self.tensors = {place: tensors[place].detach() for place in places.held}
        self.copies = {
            dtype: _joined([_vector(tensors[part]) if isinstance(part, int) else part for part in parts])
            for dtype, parts in places.parts.items()
        }
        self.samples = {dtype: self._sampled(dtype) for dtype in places.sampled}
        self.made: dict[int, torch.Tensor] = {}

    def tensor(self, place: int) -> torch.Tensor:
        """What was seen, a parameter if it was one: compiled code makes a difference."""
        if place not in self.made:
            kind, requires_grad = self.places.kinds[place]
            if place in self.places.copied:
                (dtype, start), shape = self.places.copied[place], self.shapes[place]
                seen = self.copies[dtype].as_strided(shape, (1,) * len(shape), start)
            else:
                seen = self.tensors[place]
            is_parameter = kind is torch.nn.Parameter
            seen = torch.nn.Parameter(seen, requires_grad) if is_parameter else seen.requires_grad_(requires_grad)
            self.made[place] = seen
        return self.made[place]

    def written(self) -> list[int]:
        """The places of those that were seen to be written past autograd."""
        changed = []
        for dtype, then in self.samples.items():
            now, places = self._sampled(dtype), self.places.sampled[dtype]
            if not same_bits(now, then):
                each = zip(
                    places, *(all_.split([count for _, count, _ in places]) for all_ in (now, then)), strict=True
                )
                changed += [place for (place, _, _), one, other in each if not same_bits(one, other)]
        return changed

    def _sampled(self, dtype: torch.dtype) -> torch.Tensor:
        """Some entries of each."""
        places = self.places.sampled[dtype]
        return _joined([self.tensors[place].as_strided((count,), (step,)) for place, count, step in places])


def _vector(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() else tensor.view(1)


@torch.no_grad()
def _joined(vectors: list[torch.Tensor]) -> torch.Tensor:
    """Vectors of one type one behind the other, outside of the allocator of the step's tensors, aligned as they are."""
    dtype, size = vectors[0].dtype, sum([vector.nbytes for vector in vectors])
    memory = np.empty(size + ALIGNED, np.uint8)
    start = -memory.ctypes.data % ALIGNED
    return torch.cat(vectors, out=torch.from_numpy(memory[start : start + size]).view(dtype))


@dataclass(frozen=True, slots=True)
class _Held:
    """A leaf of autograd or a tensor without history, and whether it required grad, which may have been set since."""

    tensor: torch.Tensor
    requires_grad: bool

    @property
    def is_to_start(self) -> bool:
        """Whether it is to be made differentiable."""
        return self.requires_grad and not self.tensor.requires_grad


class Elsewhere(Protocol):
    """A tensor's bytes, wherever they are."""

    def fetch(self, layout: Any) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class StandIn:
    """What is held in the place of a tensor whose bytes are elsewhere, and whether it required grad."""

    bytes: Elsewhere
    layout: Any
    requires_grad: bool


def fetched(held: Any) -> Any:
    """What was held, with what was elsewhere."""
    if isinstance(held, StandIn):
        return _Held(held.bytes.fetch(held.layout), held.requires_grad)
    return type(held)([*map(fetched, held)]) if isinstance(held, (list, tuple)) else held


def detached(value: Any, tensors: list[tuple[torch.Tensor, int]]) -> Any:
    """What to hold of a value: autograd's leaves as they are, other tensors without history; notes their versions."""
    if isinstance(value, torch.Tensor):
        is_own = value.is_leaf and not is_view(value)  # a view holds on to what it is a view of
        tensor = value if is_own else value.detach()
        tensors.append((tensor, version_of(tensor)))
        return _Held(tensor, value.requires_grad)
    if isinstance(value, (list, tuple)):
        return type(value)([detached(item, tensors) for item in value])
    return value


def differentiable(held: list[Any]) -> Any:
    """The values that were held, differentiable as before."""
    starts = list(_starts(held))
    return _with(held, iter(Start.apply(anchor, *starts) if starts else ()))


def _starts(held: Any) -> Iterator[torch.Tensor]:
    """The tensors that are to be made differentiable."""
    if isinstance(held, _Held):
        if held.is_to_start:
            yield held.tensor
    elif isinstance(held, (list, tuple)):
        for item in held:
            yield from _starts(item)


def _with(held: Any, made: Iterator[torch.Tensor]) -> Any:
    """What was held, with what was made of these."""
    if isinstance(held, _Held):
        if held.is_to_start:
            return next(made)
        return held.tensor if held.requires_grad == held.tensor.requires_grad else held.tensor.detach()
    if isinstance(held, (list, tuple)):
        return type(held)([_with(item, made) for item in held])
    return held


Pack = Callable[[torch.Tensor], Any]
"""What to hold for a tensor that autograd saves."""


class Slots(Protocol):
    """Hands out saved tensors by slot, each once for one backward: the frame of a run."""

    lock: RLock

    def fetch(self, slot: Any) -> torch.Tensor: ...


def kept(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What to hold for a tensor that stays in memory."""
    # A tensor with a grad_fn would make a cycle: graph -> saved tensor -> graph.
    held = tensor if tensor.is_leaf and not is_view(tensor) else tensor.detach()
    return held, version_of(held)


class _Nobody:
    """Has none of the tensors that no backward asks for."""

    def fetch(self, slot: object) -> torch.Tensor:
        raise ReplayError(
            "the backward comes to a part of the graph that no output depended on when the model was optimized; call "
            "ogc.optimize again on this model"
        )


_nobody = _Nobody()


@untraced
def dropped(tensor: torch.Tensor) -> tuple[_Nobody, None]:
    """What to hold for a tensor that no backward asks for."""
    return _nobody, None


@untraced
def unpack(packed: Any) -> torch.Tensor:
    """The tensor that a pair stands for; the backward of a custom function may ask for it more than once.

    So there it stays until autograd releases it.
    """
    is_leafs = type(packed) is Packed
    owner, key = packed.pair if is_leafs else packed
    if not isinstance(owner, torch.Tensor):
        found: torch.Tensor = owner.fetch(key)
        if is_leafs and not keeps_graph():
            packed.pair = kept(found)
        return found
    if version_of(owner) != key:
        raise ReplayError(
            "one of the variables needed for gradient computation has been modified by an in-place operation: "
            f"a tensor of shape {tuple(owner.shape)} is at version {version_of(owner)}, expected {key}"
        )
    return owner


@dataclass(eq=False)
class Packed:
    """A pair that may be replaced by another one: what opaque modules save."""

    pair: Any


class Wrapped:
    """A saved tensor of a class of its own, in parts: each tensor that it holds is packed by itself."""

    def __init__(self, tensor: torch.Tensor, parts: Mapping[str, torch.Tensor], pack: Pack) -> None:
        self.make = maker_of(tensor)
        # A nested tensor knows its lengths by the very tensor that they are in.
        self.parts = {
            name: pack(part) if is_content(part) else (part, version_of(part)) for name, part in parts.items()
        }

    def fetch(self, slot: object) -> torch.Tensor:
        return self.make({name: unpack(part) for name, part in self.parts.items()}).detach()


def in_parts(pack: Pack) -> Pack:
    """A function that packs a tensor of a class of its own in parts, and any other by ``pack``."""

    @untraced
    def packed(tensor: torch.Tensor) -> Any:
        parts = parts_of(tensor)
        return (Wrapped(tensor, parts, packed), None) if parts else pack(tensor)

    return packed


class Argument:
    """The slot of a tensor that an opaque module was given or returned and saved, any number of times."""

    def __init__(self, frame: Slots, slot: int, tensor: torch.Tensor) -> None:
        self.frame = frame
        self.slot = slot
        self.tensor: torch.Tensor | None = tensor  # while the module runs, and between unpackings of what it saved
        self.kind = tensor.dtype, tensor.is_conj(), tensor.is_neg()
        self.saved = self.left = 0

    def is_like(self, tensor: torch.Tensor) -> bool:
        return (tensor.dtype, tensor.is_conj(), tensor.is_neg()) == self.kind

    def save(self, tensor: torch.Tensor) -> Packed:
        self.saved += 1
        return Packed((self, (tensor.shape, tensor.stride(), tensor.storage_offset())))

    def fetch(self, layout: Any) -> torch.Tensor:
        with self.frame.lock:
            if self.tensor is None:
                self.tensor, self.left = self.frame.fetch(self.slot), self.saved
            found = self.tensor.as_strided(*layout)
            self.left -= 1
            if self.left == 0:
                self.tensor = None
            return found


class RepeatedCall:
    """One call of an opaque module that is called twice, and what it saved, in order.

    All of that is held until it has returned, as it may run a backward inside.
    """

    def __init__(self, operation: int, opaque: OpaqueCall) -> None:
        self.operation = operation
        self.opaque = opaque
        self.packed: list[Packed] = []
        self.count = 0
        self.dropped: list[tuple[int, weakref.ref[Packed]]] = []  # its number, and what autograd holds for it
        self.marks = Marks((), ())  # of what was dropped, and of the results

    def run(self, module: torch.nn.Module | None, given: list[torch.Tensor]) -> Any:
        """The results of the call."""

        @in_parts
        def pack(tensor: torch.Tensor) -> Packed:
            self.packed.append(Packed(kept(tensor)))
            return self.packed[-1]

        with saved_tensors_hooks(pack, unpack):
            return self.opaque(module, given)

    def drop(self, slots: Slots, stays: Iterable[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """Release what it saved, but for what stays in memory anyway; ``slots`` will have it again."""
        in_memory = {id_of_storage(storage) for storage in map(storage_of, stays) if storage is not None}
        self.count = len(self.packed)
        for number, packed in enumerate(self.packed):
            storage = storage_of(packed.pair[0])
            if storage is not None and id_of_storage(storage) not in in_memory:
                self.dropped.append((number, weakref.ref(packed)))
        self.marks = self._marks(self, results)
        for number, _ in self.dropped:
            self.packed[number].pair = slots, (self.operation, number)
        self.packed = []

    def awaited(self, again: RepeatedCall, results: Sequence[torch.Tensor]) -> dict[Any, torch.Tensor]:
        """By slot, the tensors that autograd still waits for, as the second call, ``again``, saved them.

        Raises:
            ReplayError: that did not save and return the same.
        """
        if len(again.packed) != self.count:
            raise self.changed()
        self.marks.expect(self._marks(again, results), self.changed)
        waiting = [number for number, reference in self.dropped if reference() is not None]
        return {(self.operation, number): again.packed[number].pair[0].detach() for number in waiting}

    def changed(self) -> ReplayError:
        return ReplayError(
            f"the opaque module {self.opaque.module} saved or returned something else when it was recomputed for its "
            "backward: it depends on more than its arguments, its parameters and torch's random state, or not all "
            "of its kernels are deterministic. Take it out of recompute_opaque, or set these to False"
        )

    def let_go(self) -> None:
        """Release all that it saved: nothing runs backward through it."""
        for packed in self.packed:
            packed.pair = None
        self.packed = []

    def _marks(self, call: RepeatedCall, results: Sequence[torch.Tensor]) -> Marks:
        return Marks.of([*(call.packed[number].pair[0] for number, _ in self.dropped), *results])


@dataclass(frozen=True)
class Marks:
    """What stands for tensors in comparisons.

    Attributes:
        layouts: shape, strides and type of each.
        prints: of each, its fingerprint, where the tensor is.
    """

    layouts: tuple[Any, ...]
    prints: tuple[torch.Tensor, ...]

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> Marks:
        return Marks(tuple((t.shape, t.stride(), t.dtype) for t in tensors), tuple(map(fingerprint, tensors)))

    def expect(self, again: Marks, error: Callable[[], ReplayError]) -> None:
        """Raise the error unless the tensors are the same, now or, on a device that is not waited for, in a later call.

        Raises:
            ReplayError: the tensors are others.
        """
        if self.layouts != again.layouts:
            raise error()
        pairs = list(zip(self.prints, again.prints, strict=True))
        if any(not bool(a == b) for a, b in pairs if is_read_at_once(a)):
            raise error()
        _pending.extend((_read_later(a != b), error()) for a, b in pairs if not is_read_at_once(a))


def raise_what_is_known() -> None:
    """Raise the error of a comparison that a device has come to since, if the tensors were others.

    Raises:
        ReplayError: they were; what has been computed since the call that it names is wrong.
    """
    while _pending and (differs := _pending[0][0]()) is not None:
        error = _pending.pop(0)[1]
        if differs:
            _pending.clear()
            raise ReplayError(f"in an earlier step, whose gradients are wrong: {error}")


_pending: list[tuple[Callable[[], bool | None], ReplayError]] = []
"""In order, what is not known yet: each is asked for what it is, None as long as nobody knows."""


def is_read_at_once(tensor: torch.Tensor) -> bool:
    """Whether reading a tensor waits for nothing."""
    return tensor.device.type == "cpu"


def _read_later(flag: torch.Tensor) -> Callable[[], bool | None]:
    held = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(flag, non_blocking=True)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(flag.device))
    return lambda: bool(held) if done.query() else None
