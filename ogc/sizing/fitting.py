"""Whether a step fits on a device. On CUDA that is decided by what the caching allocator reserves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..errors import SolveError
from ..plan import Plan
from ..solver import Budget
from . import requests
from .allocator import AllocatorSettings, DeviceFullError
from .needs import CACHING, Estimate, activation_budget, device_bytes
from .requests import Move

TRIES = 8
"""Smaller budgets that are tried where what is reserved does not fit, before the least peak."""

SHARE = 0.92
"""Of a plan's peak, the next budget."""

T = TypeVar("T")


def moves_of(plan: Plan) -> tuple[Move, ...] | None:
    """What a plan's step asks the allocator for; None where that is not known: in parts, or plain beside slices."""
    graph = getattr(plan, "graph", None)  # that of a model in parts has none
    return None if graph is None else requests.moves_of(graph, plan.decisions)


def used_bytes(needs: Estimate, plan: Plan, room: int | None = None) -> int:
    """The most bytes of a device that whole steps take.

    Args:
        needs: of a step, beside activations.
        plan: for the activations.
        room: bytes of the device; None for no limit.

    Raises:
        DeviceFullError: CUDA's allocator finds no room, though it gives back what it can.
    """
    moves = moves_of(plan) if needs.device in CACHING else None
    if moves is None:
        return needs.with_activations(plan.peak_bytes)
    left = None if room is None else max(0, room - needs.context)
    return needs.context + needs.step(moves).peaks(AllocatorSettings.of_environment(), left).reserved


def needed_bytes(needs: Estimate, plan: Plan) -> int:
    """Bytes of the smallest device on which whole steps run, on CUDA to 1 %."""
    moves = moves_of(plan) if needs.device in CACHING else None
    if moves is None:
        return needs.with_activations(plan.peak_bytes)
    return needs.context + needs.step(moves).needed_bytes(AllocatorSettings.of_environment())


def fits(needs: Estimate, plan: Plan, room: int) -> bool:
    """Whether whole steps fit on a device of ``room`` bytes."""
    try:
        return used_bytes(needs, plan, room) <= room
    except DeviceFullError:
        return False


def within_device(needs: Estimate, device_memory: Budget, plan: Callable[[int], T], plan_of: Callable[[T], Plan]) -> T:
    """What ``plan`` returns for the budget that a device of this size leaves for activations.

    On CUDA smaller budgets are tried until what the allocator reserves fits too.

    Args:
        needs: of a step, beside activations.
        device_memory: of the device.
        plan: makes something for a budget.
        plan_of: the plan of what that makes.

    Raises:
        SolveError: nothing fits; the message says which device would do, where that is known.
    """
    room = device_bytes(device_memory)
    budget = activation_budget(needs, device_memory) or 1
    try:
        return made_within(needs, room, budget, plan, plan_of)
    except SolveError as error:
        if error.least_peak_bytes is None:
            raise
        least, which = needs.with_activations(error.least_peak_bytes), "the smallest that would do has"
        if needs.device in CACHING:
            least, which = needed_bytes(needs, plan_of(plan(error.least_peak_bytes))), "one that would do has"
        raise SolveError(
            f"no plan fits on a device of {room / 1e6:.1f} MB; {which} "
            f"{least / 1e6:.1f} MB, of which activations take {error.least_peak_bytes / 1e6:.1f} MB:\n{needs}"
        ) from error


def made_within(needs: Estimate, room: int, budget: int, plan: Callable[[int], T], plan_of: Callable[[T], Plan]) -> T:
    """What ``plan`` returns for a budget; on CUDA for the first of falling ones for which what is reserved fits.

    The last of these is the least peak.

    Raises:
        SolveError: nothing fits.
    """
    found = plan(budget)
    if needs.device not in CACHING:
        return found
    for number in range(TRIES + 1):
        if fits(needs, plan_of(found), room):
            return found
        budget = max(1, int(SHARE * min(budget, plan_of(found).peak_bytes))) if number < TRIES else 1
        try:
            found = plan(budget)
        except SolveError as error:
            least = error.least_peak_bytes
            if least is None:
                raise
            found = plan(least)
            if fits(needs, plan_of(found), room):
                return found
            raise
    raise SolveError(f"no plan fits on a device of {room / 1e6:.1f} MB, by what CUDA's allocator reserves")
