"""What a step needs on a device, line by line, before it is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from ..errors import InputError, SolveError
from ..graph import table
from ..parser import Loss, parse
from ..parser.arguments import call_arguments, check_model, device_of
from ..plan import Plan
from ..program.program import device_of_model, storage_bytes
from ..program.structures import InputSpec
from ..solver import Budget, solve
from ..solver.wish import bytes_of
from .optimizer import Optimizer, optimizer_bytes

CONTEXT_BYTES = {"cuda": 600 * 2**20}
"""Allowance for what a process takes of a device beside tensors: on CUDA the driver's context and loaded kernels. A
round figure above what is commonly seen (300 to 500 MiB); it depends on card and driver, and was not measured."""

WORKSPACE_BYTES = {"cuda": 64 * 2**20}
"""Allowance for what libraries keep: cuBLAS 32 MiB per handle on Hopper, 8 MiB elsewhere (PyTorch's notes on CUDA
semantics), of which the forward and the backward have one each."""

T = TypeVar("T")

KINDS = ("parameters", "buffers", "gradients", "optimizer", "optimizer_step", "inputs", "context", "workspaces")


@dataclass(frozen=True)
class Estimate:
    """Bytes that a training step needs on a device.

    Gradients are counted as if they were there throughout, as they are from the second step on unless they are set to
    None. The optimizer's step comes after the backward, when activations are gone.

    Attributes:
        parameters, buffers: of the model, each storage once.
        gradients: of the parameters that are trained.
        optimizer: what it holds from step to step.
        optimizer_step: the most that its step takes beside that.
        inputs: the tensors of the sample input.
        context, workspaces: allowances for what CUDA and its libraries take.
        plain: the peak of activations and gradients of these in the plain model; None where it was not asked for.
        least: the plan with the least peak; None likewise.
        device: the type of the device.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    optimizer_step: int
    inputs: int
    context: int
    workspaces: int
    device: str
    plain: int | None = None
    least: Plan | None = None

    @property
    def fixed(self) -> int:
        """Bytes that no plan changes, and that are there while activations are."""
        held = self.parameters + self.buffers + self.gradients + self.optimizer + self.inputs
        return held + self.context + self.workspaces

    def with_activations(self, peak_bytes: int) -> int:
        """Bytes of the whole step where activations peak at ``peak_bytes``."""
        return self.fixed + max(peak_bytes, self.optimizer_step)

    @property
    def plain_bytes(self) -> int:
        """Bytes of the plain model's step."""
        return self.with_activations(self.plain or 0)

    @property
    def least_bytes(self) -> int:
        """Bytes of the step by the plan with the least peak."""
        return self.with_activations(self.least.peak_bytes if self.least else 0)

    def __str__(self) -> str:
        rows = [[name.replace("_", " "), f"{getattr(self, name) / 2**20:.1f}"] for name in KINDS if getattr(self, name)]
        if self.least is not None:
            rows += [
                ["activations, plain", f"{(self.plain or 0) / 2**20:.1f}"],
                ["activations, least", f"{self.least.peak_bytes / 2**20:.1f}"],
            ]
        lines = [table([f"on {self.device}", "MiB"], rows)]
        if self.least is not None:
            plain, least = self.plain_bytes / 2**20, self.least_bytes / 2**20
            lines.append(
                f"a plain step needs {plain:.1f} MiB, at least {least:.1f} MiB at +{self.least.overhead:.0%} time"
            )
        return "\n".join(lines)


def estimate(
    model: torch.nn.Module,
    sample_input: Any,
    *,
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    device: torch.device | str | None = None,
    **parsing: Any,
) -> Estimate:
    """What a training step needs: nothing is trained, and the forward runs with the memory of inference.

    Args:
        model, sample_input, loss: as for :func:`ogc.optimize`.
        optimizer: one of the model's parameters, or a class or function that makes one, such as
            ``torch.optim.AdamW``. Two steps of it are run on tensors without content.
        device: for this device instead of the model's own; it need not exist here.
        parsing: further arguments of :func:`ogc.parse`.

    Returns:
        The bytes of each part; printed, a table.

    Raises:
        InputError, ParseError: as :func:`ogc.parse` does, and where the optimizer is none.
    """
    least = solve(parse(model, sample_input, loss=loss, device=device, **parsing))
    needs = fixed_needs(model, sample_input, optimizer, device)
    return replace(needs, plain=least.plain_peak_bytes, least=least)


def fixed_needs(
    model: torch.nn.Module, sample_input: Any, optimizer: Optimizer | None, device: torch.device | str | None = None
) -> Estimate:
    """What a step needs beside activations."""
    check_model(model)
    tensors = InputSpec.of(*call_arguments(sample_input))[1]
    target = device_of_model(model, tensors) if device is None else device_of(device)
    found = optimizer_bytes(model, optimizer, target)
    return Estimate(
        parameters=storage_bytes(model.parameters()),
        buffers=storage_bytes(model.buffers()),
        gradients=sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad),
        optimizer=found.state,
        optimizer_step=found.working,
        inputs=input_bytes(sample_input),
        context=CONTEXT_BYTES.get(target.type, 0),
        workspaces=WORKSPACE_BYTES.get(target.type, 0),
        device=target.type,
    )


def input_bytes(sample_input: Any) -> int:
    """Bytes of the tensors of a sample input."""
    return storage_bytes(InputSpec.of(*call_arguments(sample_input))[1])


def device_bytes(device_memory: Budget) -> int:
    """Bytes that ``device_memory`` stands for: a number or a text such as ``"24GB"``."""
    if isinstance(device_memory, (int, str)) and not isinstance(device_memory, bool):
        try:
            return bytes_of(device_memory, 0)
        except InputError:
            pass
    raise InputError(f"device_memory must be bytes or a text like '24GB' or '8GiB', not {device_memory!r}")


def activation_budget(needs: Estimate, device_memory: Budget) -> int:
    """Bytes that a device of this size leaves for activations; 0 where it is too small for the rest."""
    room = device_bytes(device_memory)
    return room - needs.fixed if room > needs.with_activations(0) else 0


def within_device(needs: Estimate, device_memory: Budget, plan: Callable[[int], T]) -> T:
    """What ``plan`` returns for the budget that a device of this size leaves for activations.

    Raises:
        SolveError: nothing fits; the message says which device would do, where that is known.
    """
    try:
        return plan(activation_budget(needs, device_memory) or 1)
    except SolveError as error:
        if error.least_peak_bytes is None:
            raise
        least = needs.with_activations(error.least_peak_bytes)
        raise SolveError(
            f"no plan fits on a device of {device_bytes(device_memory) / 1e6:.1f} MB; the smallest that would do has "
            f"{least / 1e6:.1f} MB, of which activations take {error.least_peak_bytes / 1e6:.1f} MB:\n{needs}"
        ) from error
