"""A model's forward as a function of a flat list of tensors, run with the memory of inference."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import chain
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ...errors import ParseError, add_note
from ...program.program import storage_of
from ...program.structures import Given, InputSpec, OutputSpec
from ...program.tensors import copies, input_started
from ...torch_state.compare import difference, same_bits
from ...torch_state.dispatch import made_as_they_are
from ...torch_state.forwards import plain_forward
from ...torch_state.no_trace import plainly, untouched
from ...torch_state.private import id_of_storage, storage_id, untraced
from ...torch_state.ranks import alone
from ..traced import OpaqueError
from .location import entry

Pack = Callable[[torch.Tensor], object]


class FlatForward:
    """A forward as a function of a flat list of tensors.

    What came of its last call is named as in :class:`~ogc.parser.traced.Traced`, and there after ``finish()``.
    """

    def __init__(self, forward: Callable[..., Any], spec: InputSpec) -> None:
        self.forward = forward
        self.spec = spec
        self.output_spec: OutputSpec | None = None
        self.outputs: list[torch.Tensor] = []
        self.requires_grad: list[bool] = []
        self.grad_targets: frozenset[Any] = frozenset()
        self.graph: list[Any] = []  # nodes for a backward, held until the outputs are gone

    @entry
    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        args, kwargs = self.spec.rebuild(list(tensors))
        given = Given(args, kwargs)
        with made_as_they_are():
            result = self.forward(*args, **kwargs)
        if given.has_other_items():
            raise OpaqueError(
                "the forward changes what it is given, which is no list, dict or object of plain attributes",
                {"": "changes its arguments"},
            )
        self.output_spec, outputs = OutputSpec.of(result, given)
        if not outputs:
            raise ParseError("the model's forward returns no tensor; there is nothing to train")
        return outputs

    def finish(self, outputs: list[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        """Look at the outputs of a call with these tensors; apart from it, as calls may be watched."""
        self.outputs = [tensor.detach() for tensor in outputs]
        self.requires_grad = [tensor.requires_grad for tensor in outputs]
        self.grad_targets, self.graph = gradient_targets(outputs, tensors)

    def run(self, tensors: list[torch.Tensor]) -> None:
        """Call it, with gradients on and nothing saved, and look at the outputs."""
        with nothing_saved():
            self.finish(self(*tensors), tensors)


def raise_own_error(
    model: torch.nn.Module, spec: InputSpec, tensors: Sequence[torch.Tensor], seen: Exception | None = None
) -> None:
    """If the model's own forward raises when nobody looks, raise that, with a note that says so; else do nothing.

    What it raised where it was ``seen`` is raised in its place: it may have run as for another device. It runs with the
    memory of inference; where that fails, with that of a plain step.
    """

    def run(as_in_training: Callable[[], AbstractContextManager[None]]) -> None:
        args, kwargs = spec.rebuild(copies(tensors))
        with untouched(model, given=spec.constants), plainly(), alone(), as_in_training():
            plain_forward(model)(*args, **kwargs)

    try:
        run(nothing_saved)
    except Exception:
        try:
            run(torch.enable_grad)
        except Exception as error:
            own = seen or error
            add_note(own, "ogc: this error was raised by the model's own forward on the sample input.")
            raise own from None


def gradient_targets(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> tuple[frozenset[Any], list[Any]]:
    """The tensors that the backward of ``outputs`` ends at: an input is its number, anything else itself.

    Returns: The tensors, and the nodes on the way, to be held until the outputs are gone: nodes that Python has looked
    at are freed recursively by PyTorch 2.15, which takes more stack for a long program than there is. A list lets go of
    its last item first, and each node comes after those that it holds.
    """
    numbers = {id(tensor): number for number, tensor in enumerate(inputs)}
    found: set[Any] = {numbers.get(id(t), t) for t in outputs if t.requires_grad and t.grad_fn is None}
    starts: list[Any] = [t.grad_fn for t in outputs if t.grad_fn is not None]
    holders = dict.fromkeys(starts, 0)
    pending = list(holders)
    while pending:
        for following in _following(pending.pop()):
            if following not in holders:
                holders[following] = 0
                pending.append(following)
            holders[following] += 1
    nodes: list[Any] = []
    pending = [node for node, count in holders.items() if count == 0]
    while pending:
        nodes.append(node := pending.pop())
        if (number := input_started(node)) is not None:
            found.add(number)
        elif hasattr(node, "variable"):
            found.add(numbers.get(id(node.variable), node.variable))
        for following in _following(node):
            holders[following] -= 1
            if holders[following] == 0:
                pending.append(following)
    return frozenset(found), nodes[::-1]


def edges(node: Any) -> list[tuple[Any, int]]:
    """The nodes that a node hands gradients to, and the places there, as far as they are the forward's."""
    return [] if input_started(node) is not None else node.next_functions


def _following(node: Any) -> list[Any]:
    return [following for following, _ in edges(node) if following is not None]


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a forward may change, by what messages call it: copies of the buffers, and the random state."""
    return {f"buffer {name}": b.clone() for name, b in model.named_buffers()} | {"random state": torch.get_rng_state()}


def other_state(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], same: Callable[..., bool] = same_bits
) -> tuple[str, str] | None:
    """The first entry of a model's state that is not the same after another run, and how it differs, in words."""
    for name in ours | theirs:
        if name not in ours or name not in theirs:
            return f"another {name}", "only one of both has it"
        if not same(ours[name], theirs[name]):
            return f"another {name}", difference(ours[name], theirs[name])
    return None


@contextmanager
def nothing_saved(told: Pack = id, where: Callable[[], str] = str) -> Iterator[None]:
    """Gradients are on, but nothing is kept for a backward: memory is that of inference.

    ``told`` is called with each tensor that would be saved; ``where`` gives the name of the module that is running.
    Autograd's graph holds ``unpack``, out of sight of the garbage collector. What ``where`` holds may hold that graph,
    so it is let go of in the end.
    """
    asked = [where]

    @untraced
    def pack(tensor: torch.Tensor) -> None:
        told(tensor)

    def unpack(packed: object) -> torch.Tensor:
        raise OpaqueError(
            "the model runs a backward pass inside its forward, which cannot be recorded; put it into a submodule of "
            "its own",
            {"".join(name() for name in asked): "runs a backward pass"},
        )

    try:
        with saved_tensors_hooks(pack, unpack), torch.enable_grad():
            yield
    finally:
        asked.clear()


@contextmanager
def saved_until_done(told: Pack = id) -> Iterator[list[torch.Tensor]]:
    """Tensors saved inside are there for a backward that is run inside, and gone afterwards; ``told`` hears of each."""
    saved: list[torch.Tensor] = []
    try:
        with saving(saved, told):
            yield saved
    finally:
        saved.clear()


def saving(saved: list[torch.Tensor], told: Pack = id, asked: Callable[[], object] = int) -> saved_tensors_hooks:
    """Hooks that list what autograd saves, and tell of it; and of each time that a backward has ``asked`` for it."""

    @untraced
    def pack(tensor: torch.Tensor) -> int:
        told(tensor)
        saved.append(tensor)
        return len(saved) - 1

    def unpack(number: int) -> torch.Tensor:
        asked()
        return saved[number]

    return saved_tensors_hooks(pack, unpack)


def saved_bytes(model: torch.nn.Module, spec: InputSpec, tensors: Sequence[torch.Tensor]) -> int:
    """What autograd saves in a forward beside parameters and buffers: a step takes at least that.

    It is what is saved before it, where the forward runs a backward of its own.
    """
    lasting = set(map(storage_id, chain(model.parameters(), model.buffers())))
    seen: dict[int, weakref.ref[torch.Tensor]] = {}
    total = 0

    def told(tensor: torch.Tensor) -> None:
        nonlocal total
        storage = storage_of(tensor)
        if storage is None or (key := id_of_storage(storage)) in lasting:
            return
        if key not in seen or seen[key]() is None:  # else another memory has the number of one that is gone
            total += storage.nbytes()
        seen[key] = weakref.ref(tensor)

    args, kwargs = spec.rebuild(copies(tensors))
    with untouched(model, given=spec.constants), plainly(), alone(), suppress(OpaqueError), nothing_saved(told):
        plain_forward(model)(*args, **kwargs)
    return total
