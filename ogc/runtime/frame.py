"""Runs one segment so that its backward finds what it saved, without keeping it.

While a recomputed segment runs forward, ``saved_tensors_hooks`` see every tensor that autograd saves. What
stays in memory anyway is kept as it is; for anything else a slot number is handed out. The first slot
asked for in the backward runs the segment's program again, which fills them all; each is handed over once.
The autograd graph is that of the first run, so there is no second backward call and everything built on
autograd (DDP, hooks, ``torch.autograd.grad``, double backward) works as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..errors import ReplayError
from ..program import attribute, tensor_leaves, without_autocast

KEEP = -1
"""Marks a saved tensor that stays in memory through the backward."""


@dataclass(frozen=True)
class SegmentCode:
    """What the runtime knows of a recomputed segment before any step.

    Attributes:
        number: of the segment in the plan.
        slots: for each tensor that autograd saves in the forward, its slot or KEEP.
        targets: for each tensor that autograd saves in the program, the slot it fills or KEEP (drop it).
        program: runs the segment's program again: ``program(model, frame)``.
        externals: names of the parameters and buffers that the program reads.
    """

    number: int
    slots: tuple[int, ...]
    targets: tuple[int, ...]
    program: Callable[[torch.nn.Module, Frame], None]
    externals: tuple[str, ...]
    devices: tuple[torch.device, ...]  # CUDA devices that the segment draws random numbers on


class Frame:
    """One run of one segment: its checkpoints, random states and, during the backward, its slots."""

    def __init__(self, code: SegmentCode, model: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        self.code = code
        self.model = model
        self.held: list[Any] = [_detached(value) for value in inputs]
        self.versions = [(tensor, tensor._version) for tensor in tensor_leaves(self.held)]
        self.random_states: list[tuple[torch.Tensor, ...]] = []
        self.slots: dict[int, torch.Tensor] = {}
        self.saved = 0
        self.lock = RLock()
        self.hooks = ExitStack()

    def __enter__(self) -> Frame:
        self.hooks.enter_context(saved_tensors_hooks(self._pack, _unpack))
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.hooks.close()  # and lets go of them: they hold this frame
        if kind is None:
            if self.saved != len(self.code.slots):
                raise self._changed("saved", self.saved, len(self.code.slots))
            externals = [attribute(self.model, name) for name in self.code.externals]
            self.versions += [(tensor, tensor._version) for tensor in externals]

    def retain(self, *values: Any) -> None:
        """Hold values that the segment made and that stay in memory anyway."""
        for value in values:
            self.held.append(_detached(value))

    def remember_random(self) -> None:
        """Note the random state that the next operation starts from."""
        self.random_states.append(_random_state(self.code.devices))

    @contextmanager
    def random(self, draw: int) -> Iterator[None]:
        """Run one operation from the random state it had in the forward, and put the state of now back."""
        now = _random_state(self.code.devices)
        _set_random_state(self.random_states[draw], self.code.devices)
        try:
            yield
        finally:
            _set_random_state(now, self.code.devices)

    def take(self) -> list[Any]:
        """The program's inputs; the frame lets go of them unless the graph is kept for another backward."""
        held = list(self.held)
        if not _keeps_graph():
            self.held.clear()
            self.versions.clear()
        return held

    def fill(self, slot: int, tensor: torch.Tensor, layout: Any = None) -> None:
        """Give a slot its tensor, seen through ``layout`` = (size, stride, offset) if that differs."""
        tensor = tensor.detach()
        self.slots[slot] = tensor if layout is None else tensor.as_strided(*layout)

    def fetch(self, slot: int) -> torch.Tensor:
        """The tensor of a slot, for one backward."""
        with self.lock:
            if slot not in self.slots:
                self._recompute()
            return self.slots[slot] if _keeps_graph() else self.slots.pop(slot)

    def _recompute(self) -> None:
        self._check_versions()
        filled = 0

        def capture(tensor: torch.Tensor) -> None:
            nonlocal filled
            if filled < len(self.code.targets) and self.code.targets[filled] != KEEP:
                self.slots[self.code.targets[filled]] = tensor.detach()
            filled += 1

        # Gradients are on, as in the forward: kernels may depend on it, and operations save the same.
        with torch.enable_grad(), without_autocast(), saved_tensors_hooks(capture, _unpack):
            self.code.program(self.model, self)
        if filled != len(self.code.targets):
            raise self._changed("saved again", filled, len(self.code.targets))

    def _check_versions(self) -> None:
        current = {name: attribute(self.model, name) for name in self.code.externals}
        replaced = [name for name, tensor in current.items() if all(tensor is not t for t, _ in self.versions)]
        changed = [tensor for tensor, version in self.versions if tensor._version != version]
        if not replaced and not changed:
            return
        names = replaced or [name for name, tensor in current.items() if any(tensor is t for t in changed)]
        raise ReplayError(
            f"{names[0] if names else 'an input of the model'} was modified in place or replaced between the "
            f"forward and the backward, so segment {self.code.number} cannot be recomputed; run the backward "
            "before the change (for example before optimizer.step())"
        )

    def _pack(self, tensor: torch.Tensor) -> Any:
        index = self.saved
        self.saved = index + 1
        if index >= len(self.code.slots):
            raise self._changed("saved", self.saved, len(self.code.slots))
        slot = self.code.slots[index]
        if slot == KEEP:
            # A tensor with a grad_fn would make a cycle: graph -> saved tensor -> graph.
            kept = tensor if tensor.is_leaf else tensor.detach()
            return kept, kept._version
        return self, slot

    def _changed(self, what: str, now: int, then: int) -> ReplayError:
        return ReplayError(
            f"segment {self.code.number} {what} {now} tensors for its backward instead of {then}: its kernels "
            "differ from those seen when the model was optimized; call ogc.optimize again under the present settings"
        )


def _unpack(packed: Any) -> torch.Tensor:
    owner, key = packed
    if isinstance(owner, Frame):
        return owner.fetch(key)
    if owner._version != key:
        raise ReplayError(
            "one of the variables needed for gradient computation has been modified by an in-place operation: "
            f"a tensor of shape {tuple(owner.shape)} is at version {owner._version}, expected {key}"
        )
    return owner


def _keeps_graph() -> bool:
    outside = torch._C._current_graph_task_id() == -1
    return outside or torch._C._autograd._get_current_graph_task_keep_graph()


def _detached(value: Any) -> Any:
    """The value without its history, differentiable as before; a leaf as it is."""
    if isinstance(value, torch.Tensor):
        return value if value.is_leaf else value.detach().requires_grad_(value.requires_grad)
    if isinstance(value, (list, tuple)):
        return type(value)(_detached(item) for item in value)
    return value


def _random_state(devices: tuple[torch.device, ...]) -> tuple[torch.Tensor, ...]:
    return (torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices))


def _set_random_state(states: tuple[torch.Tensor, ...], devices: tuple[torch.device, ...]) -> None:
    torch.set_rng_state(states[0])
    for device, state in zip(devices, states[1:], strict=True):
        torch.cuda.set_rng_state(state, device)
