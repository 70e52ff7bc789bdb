"""Schedules of ``torch.distributed.pipelining``: how many micro-batches a stage has in flight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..errors import InputError

BEGINS, ENDS = {"F"}, {"B", "W"}
"""Actions after which a micro-batch is in flight and no longer is: with a backward in two parts, after the second."""


def in_flight(schedule: Any, stage_index: int) -> int:
    """How many forwards of a stage run before the backward of the first: the most, for ``ogc.optimize(in_flight=)``.

    Args:
        schedule: of ``torch.distributed.pipelining``, such as a ``Schedule1F1B``; it need not have run.
        stage_index: of the stage, in the whole pipeline.

    Raises:
        InputError: the schedule does not tell the order of its actions, or has no such stage.
    """
    order = getattr(schedule, "pipeline_order", None)
    if not order:
        raise InputError(f"schedule must be one of torch.distributed.pipelining with an order of actions: {schedule!r}")
    now = most = 0
    for actions in order.values():
        for kind in _kinds(actions, stage_index):
            now += (kind in BEGINS) - (kind in ENDS)
            most = max(most, now)
    if not most:
        raise InputError(f"the schedule has no stage {stage_index!r}")
    return most


def _kinds(actions: Any, stage_index: int) -> Iterator[str]:
    """What happens to a stage, in order."""
    for action in actions:
        if action is None:
            continue
        if getattr(action, "sub_actions", None):
            yield from _kinds(action.sub_actions, stage_index)
        elif action.stage_index == stage_index:
            yield str(action.computation_type.value)
