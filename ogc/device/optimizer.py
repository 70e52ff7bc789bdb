"""What an optimizer holds and takes, found by running two of its steps on meta tensors: shapes alone, no memory."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from ..errors import InputError
from ..parser.weigh.meter import Meter
from ..program.program import each_storage_bytes, tensor_leaves
from ..torch_state.no_trace import untouched
from ..torch_state.private import TorchDispatchMode

aten = torch.ops.aten

Optimizer = torch.optim.Optimizer | Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
"""An optimizer of a model, or a class or function that makes one of parameters."""

FOREACH = {"cuda"}
"""Types of devices on which PyTorch's optimizers take all parameters at once unless they are told otherwise."""


class OptimizerBytes(NamedTuple):
    """Bytes of an optimizer: what it holds from step to step, and the most that a step takes beside that.

    ``tensors`` are those of each storage that it holds.
    """

    state: int
    working: int
    tensors: tuple[int, ...] = ()


def optimizer_bytes(model: torch.nn.Module, optimizer: Optimizer | None, device: torch.device) -> OptimizerBytes:
    """What ``optimizer`` takes for the parameters of ``model`` on ``device``.

    Args:
        model: the module that is trained.
        optimizer: one of its parameters, or what makes one, such as ``torch.optim.AdamW``; None for none.
        device: where the parameters are to be.

    Raises:
        InputError: it is none, or its step cannot be run without numbers.
    """
    if optimizer is None:
        return OptimizerBytes(0, 0)
    twin = _twin(_instance(model, optimizer), device)
    meter = Meter(lambda *cost: 0.0)
    try:
        with untouched(), _WithoutNumbers(), meter:
            twin.step()  # makes what is held
            meter.take()
            twin.step()
    except Exception as error:
        raise InputError(
            f"what {type(twin).__name__} takes cannot be told, as its step needs numbers: {error!r}; leave optimizer "
            "out, and take what it takes off the memory yourself"
        ) from error
    held = tuple(each_storage_bytes(tensor_leaves(*twin.state.values())))
    return OptimizerBytes(sum(held), meter.take().peak_bytes, held)


def _instance(model: torch.nn.Module, optimizer: Any) -> torch.optim.Optimizer:
    if not isinstance(optimizer, torch.optim.Optimizer) and callable(optimizer):
        optimizer = optimizer([p for p in model.parameters() if p.requires_grad])
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            "optimizer must be a torch.optim.Optimizer, or a class or function that makes one of parameters, not "
            f"{type(optimizer).__name__}"
        )
    return optimizer


def _twin(optimizer: torch.optim.Optimizer, device: torch.device) -> torch.optim.Optimizer:
    """The same optimizer for parameters without content, with gradients and its state, and without hooks."""
    twin = copy.copy(optimizer)
    twin.param_groups = [_group(group, device) for group in optimizer.param_groups]
    twin.state = defaultdict(dict)
    for group, of_twin in zip(optimizer.param_groups, twin.param_groups, strict=True):
        for parameter, meta in zip(group["params"], of_twin["params"], strict=True):
            if parameter in optimizer.state:
                twin.state[meta] = {key: _without_content(one) for key, one in optimizer.state[parameter].items()}
    for name in [name for name in vars(twin) if name.startswith("_optimizer_step_")]:
        setattr(twin, name, OrderedDict())
    return twin


def _without_content(held: Any) -> Any:
    """A tensor of a state without its content; what counts steps keeps it."""
    is_large = isinstance(held, torch.Tensor) and held.dim() > 0
    return torch.empty_like(held, device="meta") if is_large else copy.deepcopy(held)


def _group(group: dict[str, Any], device: torch.device) -> dict[str, Any]:
    parameters = []
    for parameter in group["params"]:
        meta = torch.nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        meta.grad = torch.empty_like(meta) if parameter.requires_grad else None
        parameters.append(meta)
    chosen: dict[str, Any] = {"params": parameters}
    if group.get("fused"):  # writes over what it holds, and takes nothing beside it
        chosen |= {"fused": False, "foreach": False}
    elif "foreach" in group and group["foreach"] is None:
        chosen["foreach"] = device.type in FOREACH
    return {**group, **chosen}


class _WithoutNumbers(TorchDispatchMode):
    """A number that is read out of a tensor without content is one."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is aten._local_scalar_dense.default and args[0].is_meta:
            return args[0].new_ones((), device="cpu").item()
        return function(*args, **(kwargs or {}))
