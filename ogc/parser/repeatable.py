"""Whether a leaf that the user calls repeatable can be called again for its backward, as far as that can be seen."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch

from ..errors import ReplayError
from ..graph import SMALL_INTERNALS
from ..program.leaf import Leaf
from ..program.program import device_of_model, storage_of, tensor_leaves
from ..program.wrapped import contents
from ..torch_state.allocator import allocated_bytes, can_measure
from ..torch_state.attributes import attributes_of, changes
from ..torch_state.compare import same_bits
from ..torch_state.no_trace import generators_of, untouched
from ..torch_state.private import id_of_storage
from ..torch_state.random_state import cuda_devices, python_random_state, random_states, set_random_states
from .forward.flat import saved_until_done
from .leaves import hooked_modules
from .traced import OpaqueError
from .weigh.call import held_aside
from .weigh.record import Record

FEW = 1024
"""Bytes that do not count: autograd holds numbers that were multiplied by, and tells nobody."""


def refuse_chance(model: torch.nn.Module, node: torch.fx.Node, args: Any) -> None:
    """Raise OpaqueError if what a leaf returns is not alike in every step, as it has to be, but left to chance.

    It is called from several random states; the model is afterwards as before.
    """
    assert isinstance(node.target, Leaf)
    module, given, _ = args
    for seed in range(CHANCES):
        with untouched(model):
            torch.manual_seed(seed)
            try:
                _call(node.target, module, given)
            except ReplayError:
                why = "returns something else by chance"
                raise OpaqueError(f"the leaf module {node.target.module} {why}", {node.target.module: why}) from None


CHANCES = 16
"""Random states that a leaf which decides by random numbers is tried from."""


def why_not_repeatable(model: torch.nn.Module, record: Record, args: Any) -> str | None:
    """The reason, in words, why a leaf must not be called again; None if none was seen.

    It is called twice from the same random state; the model is afterwards as before.
    """
    leaf, (module, given, _) = record.node.target, args
    assert isinstance(leaf, Leaf)
    if leaf.talks:
        return "runs collectives, which other ranks join once"
    if leaf.takes_no_hooks:
        return "differentiates by torch.func, and keeps what it saves for that"
    if module is not None and hooked_modules(dict(module.named_modules())):
        return "has hooks, which would be called again"
    if record.in_place:
        return "writes a buffer, or what it is given"
    if any(leaf.returned.views[number] is not None for number in leaf.new):
        return "returns a view of what it is given"
    with untouched(model):
        return _difference(leaf, module, given, device_of_model(model, given))


def _difference(
    leaf: Leaf, module: torch.nn.Module | None, given: list[torch.Tensor], home: torch.device
) -> str | None:
    devices = cuda_devices()
    states, python_state = random_states(devices), python_random_state()
    own = [] if module is None else [(generator, generator.get_state()) for generator in generators_of([module])]
    before = {} if module is None else attributes_of(module)
    first = _call(leaf, module, given)
    after = {} if module is None else attributes_of(module)
    for _, changed in changes(before, after, ()):
        return f"changes its attribute {changed}"
    if python_random_state() != python_state:
        return "draws random numbers of Python or numpy"
    if not all(torch.equal(generator.get_state(), state) for generator, state in own):
        return "draws from a torch.Generator of its own"
    if any(tensor.is_nested for tensor in chain(*first)):
        return "saves nested tensors in one piece (layout=torch.strided), which cannot be told apart"
    set_random_states(states, devices)
    again = _call(leaf, module, given)
    if not all(len(a) == len(b) and all(map(same_bits, a, b)) for a, b in zip(first, again, strict=True)):
        return "computes something else when it is called again"
    del again
    if can_measure(home):
        results: list[torch.Tensor] = []
        _, held = allocated_bytes(lambda: results.extend(_call(leaf, module, given)[1]), home)
        others = held - _bytes(results)
        if others > FEW and others * SMALL_INTERNALS > _bytes([*first[0], *first[1]]):
            return f"keeps {others / 1e6:.3g} MB for its backward that autograd does not know of"
    if aside := held_aside(leaf, module, given):
        return f"keeps {_bytes([given[n] for n in aside]) / 1e6:.3g} MB that it is given past autograd"
    return None


def _call(leaf: Leaf, module: torch.nn.Module | None, given: list[torch.Tensor]) -> tuple[list[torch.Tensor], ...]:
    """The tensors that a call of a leaf saves, detached, and those that it returns."""
    with saved_until_done() as packed:
        results = tensor_leaves(leaf(module, given))
        saved = [inner.detach() for tensor in packed for inner in contents(tensor)]
    return saved, results


def _bytes(tensors: list[torch.Tensor]) -> int:
    storages = {id_of_storage(s): s.nbytes() for s in map(storage_of, tensors) if s is not None}
    return sum(storages.values())
