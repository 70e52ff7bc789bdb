"""What a rank holds of a model that ``fully_shard`` is to spread over several, none of which has to be here."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import InputError
from ..parser.opaque import NamesAndTypes, modules_named
from ..program.program import Optimizer, storage_bytes
from ..torch_state.ranks import bytes_of_sharding


@dataclass(frozen=True)
class Sharded:
    """A model as one rank has it.

    Attributes:
        model: with this rank's part of each parameter, without content.
        gathered: the most bytes of parameters and gradients that are gathered at once.
    """

    model: torch.nn.Module
    gathered: int


def sharded(
    model: torch.nn.Module, shards: int, units: NamesAndTypes, optimizer: Optimizer | None, gradients: str
) -> Sharded:
    """A model that is to be spread over so many ranks, by units and what is around them.

    Raises:
        InputError: the number is none, a unit is none of the model's, or the optimizer has whole parameters.
    """
    if isinstance(shards, bool) or not isinstance(shards, int) or shards < 1:
        raise InputError(f"shards must be a number of ranks, 1 or more, not {shards!r}")
    if isinstance(optimizer, torch.optim.Optimizer):
        raise InputError("with shards= give the optimizer as a class or function, which makes one of a rank's parts")
    if gradients == "freed":
        raise InputError('with shards= gradients are reduced unit by unit: give gradients="none" or "kept"')
    modules = dict(model.named_modules())
    found = [modules[name] for name in modules_named(modules, units, "units")]
    memo: dict[int, Any] = {id(p): _part(p, shards) for p in model.parameters()}
    of_units = [list(unit.parameters()) for unit in found]
    inside = {id(p) for parameters in of_units for p in parameters}
    around = storage_bytes(p for p in model.parameters() if id(p) not in inside)
    unit = max(map(storage_bytes, of_units), default=0)
    return Sharded(copy.deepcopy(model, memo), max(bytes_of_sharding(unit, unit, around, around)))


def _part(parameter: torch.nn.Parameter, shards: int) -> torch.nn.Parameter:
    """The first rank's, which is as large as any: rows are divided evenly, but for the last ones."""
    shape = (-(-parameter.shape[0] // shards), *parameter.shape[1:]) if parameter.dim() else (1,)
    return torch.nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta"), parameter.requires_grad)
