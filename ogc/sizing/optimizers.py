"""What an optimizer takes, found by two of its steps on meta tensors."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import torch

from ..errors import InputError
from ..parser.weigh.meter import Meter
from ..program.program import Optimizer, each_storage_bytes, tensor_leaves
from ..torch_state.no_trace import untouched
from ..torch_state.private import TorchDispatchMode
from ..torch_state.ranks import own_part

FOREACH = {"cuda"}
"""Types of devices on which PyTorch's optimizers take all parameters at once unless they are told otherwise."""

aten = torch.ops.aten


class OptimizerBytes(NamedTuple):
    """Bytes of an optimizer.

    Attributes:
        state: that it holds from step to step.
        working: the most that a step takes beside that.
        tensors: of each tensor of the state.
        first: the most that the first step takes, which makes the state.
    """

    state: int = 0
    working: int = 0
    tensors: tuple[int, ...] = ()
    first: int = 0


def optimizer_bytes(model: torch.nn.Module, optimizer: Optimizer | None, device: torch.device) -> OptimizerBytes:
    """What an optimizer takes for the parameters of ``model`` on ``device``.

    Raises:
        InputError: it is none, or its step cannot be run without numbers.
    """
    if optimizer is None:
        return OptimizerBytes()
    optimizer = _instance(model, optimizer)
    groups = optimizer.param_groups
    if not any(group["params"] for group in groups):
        return OptimizerBytes()
    state, first, working = _two_steps(_on_meta(optimizer, groups, device))
    if all(group.get("fused") for group in groups):  # writes over what it holds
        working = _fused_bytes(groups, device)
        first = sum(state) + working
    if optimizer.state:  # the first step is over
        first = sum(state) + working
    return OptimizerBytes(sum(state), working, state, first)


def alone_bytes(
    model: torch.nn.Module, optimizer: Optimizer | None, device: torch.device
) -> dict[tuple[int, ...], int]:
    """By shape, the most that a step for one parameter alone takes beside the state.

    Raises:
        InputError: as above.
    """
    found: dict[tuple[int, ...], int] = {}
    if optimizer is None:
        return found
    optimizer = _instance(model, optimizer)
    for group in optimizer.param_groups:
        for shape, parameter in {tuple(p.shape): p for p in group["params"]}.items():
            one = {**group, "params": [parameter]}
            if group.get("fused"):
                working = _fused_bytes([one], device)
            else:
                working = _two_steps(_on_meta(optimizer, [one], device))[2]
            found[shape] = max(working, found.get(shape, 0))
    return found


def _fused_bytes(groups: list[dict[str, Any]], device: torch.device) -> int:
    """What fused steps take: none, but on a CPU a copy of one gradient of another layout, such as channels last."""
    laid_out = (p for group in groups for p in group["params"] if not p.is_contiguous() and device.type == "cpu")
    return max((p.nbytes for p in laid_out), default=0)


def _two_steps(optimizer: torch.optim.Optimizer) -> tuple[tuple[int, ...], int, int]:
    """Bytes of each tensor of the state, and the most that the first step and the second take."""
    meter = Meter(lambda *cost: 0.0)
    try:
        with untouched(), _WithoutNumbers(), meter:
            optimizer.step()  # makes what is held
            first = meter.take()
            optimizer.step()
    except Exception as error:
        raise InputError(
            f"what {type(optimizer).__name__} takes cannot be told, as its step needs numbers: {error!r}; leave "
            "optimizer out, and take what it takes off the memory yourself"
        ) from error
    held = tuple(each_storage_bytes(tensor_leaves(*optimizer.state.values())))
    return held, first.peak_bytes, meter.take().peak_bytes


def _instance(model: torch.nn.Module, optimizer: Any) -> torch.optim.Optimizer:
    if not isinstance(optimizer, torch.optim.Optimizer) and callable(optimizer):
        optimizer = optimizer([p for p in model.parameters() if p.requires_grad])
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            "optimizer must be a torch.optim.Optimizer, or a class or function that makes one of parameters, not "
            f"{type(optimizer).__name__}"
        )
    return optimizer


def _on_meta(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], device: torch.device
) -> torch.optim.Optimizer:
    """The same optimizer for parameters without content, with gradients and its state, and without hooks."""
    copied = copy.copy(optimizer)
    copied.param_groups = [_group(group, device) for group in groups]
    copied.state = defaultdict(dict)
    for group, of_twin in zip(groups, copied.param_groups, strict=True):
        for parameter, meta in zip(group["params"], of_twin["params"], strict=True):
            if parameter in optimizer.state:
                copied.state[meta] = {key: _without_content(one) for key, one in optimizer.state[parameter].items()}
    for name in [name for name in vars(copied) if name.startswith("_optimizer_step_")]:
        setattr(copied, name, OrderedDict())
    return copied


def _without_content(held: Any) -> Any:
    """A tensor of a state without its content; what counts steps keeps it."""
    held = own_part(held)
    is_large = isinstance(held, torch.Tensor) and held.dim() > 0
    return torch.empty_like(held, device="meta") if is_large else copy.deepcopy(held)


def _group(group: dict[str, Any], device: torch.device) -> dict[str, Any]:
    parameters = []
    for parameter in group["params"]:
        meta = torch.nn.Parameter(torch.empty_like(own_part(parameter), device="meta"), parameter.requires_grad)
        meta.grad = torch.empty_like(meta) if parameter.requires_grad else None
        parameters.append(meta)
    chosen: dict[str, Any] = {"params": parameters}
    if group.get("fused"):  # meta tensors have no such kernel
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
