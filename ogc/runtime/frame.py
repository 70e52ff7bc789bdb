"""Runs parts of a program so that their backward finds what they saved, without keeping it.

While saved segments of a recomputed one run forward, ``saved_tensors_hooks`` see every tensor that autograd
saves. What stays in memory anyway is held as it is; anything else gets a slot number. The first slot asked for
in the backward starts the recomputation that fills them all; each is handed over once. A run may also make
values for runs inside it, which follow later. The autograd graph is that of the forward: there is no second
backward call, and DDP, hooks, ``torch.autograd.grad`` and double backward work as ever.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from threading import RLock
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..errors import ReplayError
from ..program.autocast import cast, run_saving
from ..program.opaque import OpaqueCall
from ..program.program import attribute, storage_of, tensor_leaves
from ..torch_state.compare import digest
from ..torch_state.private import id_of_storage, keeps_graph, storage_id, untraced, version_of
from ..torch_state.settings import Flags, State, digest_of_states, random_states, set_random_states
from .copies import Copies
from .held import (
    Argument,
    Marks,
    Packed,
    Places,
    RepeatedCall,
    Seen,
    detached,
    differentiable,
    dropped,
    fetched,
    in_parts,
    kept,
    unpack,
)
from .host import Home

KEEP = -1
"""Marks a saved tensor that stays in memory through the backward; KEEP - 1 - t, one that recomputing t uses."""

AWAY = -(2**40)
"""AWAY - v marks a saved tensor in the storage of value v, which is offloaded."""

DROP = -(2**62)
"""Marks a saved tensor that no backward asks for: nothing is held."""


@dataclass(frozen=True)
class RunCode:
    """What is known of a run before any step.

    Attributes:
        number: of the run in the schedule.
        slots: for each tensor that autograd saves in the forward of its saved segments, its slot or a mark; see KEEP.
        targets: for each tensor that autograd saves in the program, the slot it fills or KEEP (drop it).
        program: carries out the run: ``program(bound, frame)``.
        externals: places in ``Step.bound`` of what the program reads that no operation makes.
        of_opaque: the names in the model of those that opaque modules find for themselves.
    """

    number: int
    slots: tuple[int, ...]
    targets: tuple[int, ...]
    program: Callable[[Sequence[Any], Frame], None]
    externals: tuple[int, ...]
    of_opaque: dict[int, str]


class Step:
    """One forward call and what its frames share: the model, what it gives, the random states of its operations."""

    def __init__(
        self,
        model: torch.nn.Module,
        codes: dict[int, RunCode],
        bound: Sequence[Any],
        devices: tuple[torch.device, ...],
        flags: Flags,
        home: Home | None = None,
        places: dict[tuple[int, ...], Places] | None = None,
    ) -> None:
        self.model = model
        self.codes = codes
        self.bound = bound  # parameters, buffers, constants, and the modules of opaque modules
        self.places = {} if places is None else places  # how these are noted, by where they are
        self.devices = devices  # CUDA devices that the program draws random numbers on
        self.flags = flags  # in the forward
        self.random_states: dict[int, tuple[State, ...]] = {}  # that operations start from
        self.drawn: dict[int, int] = {}  # and what tells their results apart
        self.notes: dict[int, list[weakref.ref[torch.Tensor]]] = {}  # of what autograd keeps, by operation
        self.returned: dict[int, Marks] = {}  # of what opaque modules returned, by operation
        self.seen: dict[int, Seen] = {}  # what recomputation reads of these, by place, as it was in the forward
        self.lock = RLock()
        self.copies = None if home is None else Copies(home, self.lock)
        self.cast = cast

    def note(self, places: Sequence[int]) -> None:
        """Note what is bound at these places."""
        new = tuple(place for place in places if place not in self.seen)
        if not new:
            return
        tensors = {place: self.bound[place] for place in new}
        if new not in self.places:
            self.places[new] = Places(tensors)
        self.seen.update(dict.fromkeys(new, Seen(self.places[new], tensors)))

    def as_seen(self, places: Sequence[int]) -> list[Any]:
        """What is bound; at these places, as it was in the forward."""
        bound = list(self.bound)
        for place in places:
            bound[place] = self.seen[place].tensor(place)
        return bound

    def open(self, number: int, parent: Frame | None = None) -> Frame:
        """The frame of a run of this step; ``parent`` is that of the run around it."""
        return Frame(self.codes[number], self, parent)

    def mark_returned(self, operation: int, result: Any) -> None:
        """Note what an opaque module returned that is recomputed."""
        self.returned[operation] = Marks.of(tensor_leaves(result))

    def remember_random(self, operation: int) -> None:
        """Note the random state that an operation starts from.

        Raises:
            ReplayError: a CUDA graph is captured, in which no state of a generator can be read or set.
        """
        if self.devices and torch.cuda.is_current_stream_capturing():
            raise ReplayError(
                "the plan runs random operations again, which a CUDA graph cannot; make the plan for a model without "
                "them (dropout of 0), or capture the plain model"
            )
        self.random_states[operation] = random_states(self.devices)

    def remember_drawn(self, operation: int, result: Any) -> None:
        """Note what an operation that draws random numbers gave, where another thread may draw before it does.

        PyTorch has one generator for all threads, and no lock that covers both reading its state and the operation.
        """
        if threading.active_count() > 1:
            self.drawn[operation] = self._drawn(result)

    def check_drawn(self, operation: int, result: Any) -> None:
        """Raise ReplayError if an operation that ran again drew other numbers than in the forward."""
        if operation in self.drawn and self._drawn(result) != self.drawn[operation]:
            raise ReplayError(
                "another thread drew random numbers of torch's while an operation of the model drew some, and what is "
                "recomputed is not what was computed; give what draws there a torch.Generator of its own, or let the "
                "threads take turns"
            )

    def _drawn(self, result: Any) -> int:
        """A number that tells results of one operation apart: by their bytes, on CUDA by the state of the generator."""
        return digest_of_states(random_states(self.devices)[1:]) if self.devices else digest(tensor_leaves(result))


class Frame:
    """One run in one step: the values that it starts from and, during the backward, its slots."""

    def __init__(self, code: RunCode, step: Step, parent: Frame | None) -> None:
        self.code = code
        self.step = step
        self.lock = step.lock
        self.parent = parent
        self.inner: dict[int, weakref.ref[Frame]] = {}
        while parent is not None:
            parent.inner[code.number] = weakref.ref(self)
            parent = parent.parent
        self.held: dict[str, Any] = {}
        self.versions: dict[str, list[tuple[torch.Tensor, int]]] = {}  # of the tensors in these
        self.givers: dict[str, Frame] = {}  # of those that runs around this one have made
        self.awaited: list[Frame] = []  # the runs that have to make them again
        self.versions_of_bound: list[int] = []
        self.slots: dict[Any, torch.Tensor] = {}
        self.calls: dict[int, RepeatedCall] = {}  # of opaque modules that are recomputed, by operation
        self.expected = iter(code.slots)  # of the tensors that autograd will save
        self.is_done = False

    def close(self, **values: Any) -> None:
        """End of the frame's part of the forward: hold the values that the program starts from."""
        if next(self.expected, None) is not None:
            raise self._changed("fewer tensors")
        self.hold(values)
        self.versions_of_bound = self._versions_of_bound()
        self.step.note(self.code.externals)

    def hold(self, values: dict[str, Any]) -> None:
        """Hold values by name until the run is carried out."""
        for name, value in values.items():
            tensors: list[tuple[torch.Tensor, int]] = []
            self.held[name] = detached(value, tensors)
            self.versions[name] = tensors

    def give(self, number: int, **values: Any) -> None:
        """Hand values that the program made to a run inside this one, if anybody still waits for them."""
        inner = self.inner[number]()
        if inner is None or (inner.is_done and self not in inner.awaited):
            return
        inner.hold(values)
        inner.givers.update(dict.fromkeys(values, self))
        inner.awaited = [frame for frame in inner.awaited if frame is not self]

    @contextmanager
    def random(self, operation: int) -> Iterator[None]:
        """Run an operation from the random state it had in the forward; the present state is put back."""
        now = random_states(self.step.devices)
        set_random_states(self.step.random_states[operation], self.step.devices)
        try:
            yield
        finally:
            set_random_states(now, self.step.devices)

    def notes(self, operation: int) -> list[torch.Tensor]:
        """What an operation noted in the forward, as long as its backward has not released it."""
        noted = self.step.notes.get(operation, [])
        found = [tensor for note in noted if (tensor := note()) is not None]
        return found if len(found) == len(noted) else []

    def take(self, *names: str) -> list[Any]:
        """The values that the program starts from, which are released.

        Where the graph is kept for another backward, those from the forward stay: the others can be made again.
        """
        values = differentiable([fetched(self.held[name]) for name in names])
        keeps = keeps_graph()
        for name in list(self.givers if keeps else self.held):
            del self.held[name], self.versions[name]
        self.awaited = list(dict.fromkeys(self.givers.values())) if keeps else []
        self.givers = {}
        return values

    def fill(self, slot: int, tensor: torch.Tensor, layout: Any = None) -> None:
        """Give a slot its tensor, seen through ``layout`` = (size, stride, offset) if that differs."""
        tensor = tensor.detach()
        self.slots[slot] = tensor if layout is None else tensor.as_strided(*layout)

    def fetch(self, slot: Any) -> torch.Tensor:
        """The tensor of a slot, for one backward; another one makes it again."""
        tensor = self.slots.pop(slot, None)
        if tensor is None:
            with self.lock:
                if slot not in self.slots:
                    self._run()
                tensor = self.slots.pop(slot)
        return tensor

    def _run(self) -> None:
        if self.parent is not None and not self.parent.is_done:
            self.parent._run()
        while self.awaited:
            self.awaited[0]._run()
        self._check_versions()
        expected, slots = iter(self.code.targets), self.slots

        def capture(tensor: torch.Tensor) -> None:
            slot = next(expected, None)
            if slot is None:
                raise self._changed("more tensors when it ran again")
            if slot != KEEP:
                slots[slot] = tensor.detach()

        bound = self.step.as_seen(self.code.externals)
        run_saving(partial(self.code.program, bound, self), self.step.flags, capture, unpack)
        if next(expected, None) is not None:
            raise self._changed("fewer tensors when it ran again")
        self.is_done = True

    def _versions_of_bound(self) -> list[int]:
        return list(map(version_of, map(self.step.bound.__getitem__, self.code.externals)))

    def _check_versions(self) -> None:
        bound, code, model = self.step.bound, self.code, self.step.model
        held = chain.from_iterable(self.versions.values())
        changed = any(version_of(tensor) != version for tensor, version in held)
        now = self._versions_of_bound()
        replaced = [name for place, name in code.of_opaque.items() if attribute(model, name) is not bound[place]]
        places = zip(code.externals, now, self.versions_of_bound, strict=True)
        written = [place for place, here, then in places if here != then]
        if not written:
            seen = dict.fromkeys(self.step.seen[place] for place in code.externals)
            written = [place for one in seen for place in one.written()]
        if not (changed or replaced or written):
            return
        known = {id(tensor): name for name, tensor in chain(model.named_parameters(), model.named_buffers())}
        names = [*replaced, *(known.get(id(bound[place]), "") for place in written)]
        raise ReplayError(
            f"{next(filter(None, names), 'an input of the model')} was modified in place or replaced "
            f"between the forward and the backward, so part {code.number} of the plan cannot be recomputed; run the "
            "backward before the change (for example before optimizer.step())"
        )

    @contextmanager
    def opaque(self, *arguments: torch.Tensor) -> Iterator[Callable[..., None]]:
        """Call an opaque module, which keeps all that it saves but for arguments and results that have a slot.

        What it gives is to be told the results that may have one.
        """
        given = self._with_slots(arguments)
        kept_whole: list[Packed] = []

        @in_parts
        def pack(tensor: torch.Tensor) -> Any:
            argument = _of_storage(given, tensor)
            if argument is not None and argument.is_like(tensor):
                return argument.save(tensor)
            kept_whole.append(Packed(kept(tensor)))
            return kept_whole[-1]

        def made(*results: torch.Tensor) -> None:
            own = self._with_slots(results)
            for packed in kept_whole:
                tensor = packed.pair[0]
                argument = _of_storage(own, tensor)
                if argument is not None and argument.is_like(tensor):
                    packed.pair = argument.save(tensor).pair
            for argument in own.values():
                argument.tensor = None

        try:
            with saved_tensors_hooks(pack, unpack):
                yield made
        finally:
            kept_whole.clear()
            for argument in given.values():
                argument.tensor = None

    def _with_slots(self, tensors: Sequence[torch.Tensor]) -> dict[int, Argument]:
        """By storage, those of the tensors, which have the next slots, that do not stay in memory."""
        slots = ((tensor, self._next_slot()) for tensor in tensors)
        return {storage_id(t): Argument(self, slot, t.detach()) for t, slot in slots if slot != KEEP}

    def call(
        self,
        operation: int,
        opaque: OpaqueCall,
        module: torch.nn.Module | None,
        given: list[torch.Tensor],
        *,
        stays: list[torch.Tensor],
        results: Sequence[int],
    ) -> Any:
        """Call an opaque module that is recomputed for its backward, and release what it saves.

        Its arguments in ``stays`` and its results with the numbers ``results`` stay in memory anyway.
        """
        call = self.calls[operation] = RepeatedCall(operation, opaque)
        result = call.run(module, given)
        made = tensor_leaves(result)
        own = [] if module is None else [*module.parameters(), *module.buffers()]
        self.step.returned[operation] = Marks.of(made)
        call.drop(self, [*stays, *own, *(made[n] for n in results)], made)
        return result

    def recompute(
        self, operation: int, opaque: OpaqueCall, module: torch.nn.Module | None, given: list[torch.Tensor]
    ) -> Any:
        """Recompute an opaque module, for the slots of what it saved if its backward waits for this run."""
        again = RepeatedCall(operation, opaque)
        result = again.run(module, given)
        made = tensor_leaves(result)
        if operation in self.calls:
            self.slots.update(self.calls[operation].awaited(again, made))
        else:
            self.step.returned[operation].expect(Marks.of(made), again.changed)
        again.let_go()
        return result

    @untraced
    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd holds in the place of a tensor that it saves."""
        slot = self._next_slot()
        if slot >= 0:
            return self, slot
        if slot == DROP:
            return dropped(tensor)
        if slot <= AWAY:
            assert self.step.copies is not None
            return self.step.copies.pack(AWAY - slot, tensor)
        return kept(tensor) if slot == KEEP else self._note(slot, tensor)

    def _note(self, slot: int, tensor: torch.Tensor) -> Any:
        held = kept(tensor)
        self.step.notes.setdefault(KEEP - 1 - slot, []).append(weakref.ref(held[0]))
        return held

    def _next_slot(self) -> int:
        slot = next(self.expected, None)
        if slot is None:
            raise self._changed("more tensors")
        return slot

    def _changed(self, what: str) -> ReplayError:
        return ReplayError(
            f"part {self.code.number} of the plan saved {what} for its backward than when the model was optimized: its "
            "kernels differ from those seen then; call ogc.optimize again under the present settings"
        )


def _of_storage(known: Mapping[int, Argument], tensor: torch.Tensor) -> Argument | None:
    """The argument in whose storage a tensor lies."""
    storage = storage_of(tensor)
    return None if storage is None else known.get(id_of_storage(storage))
