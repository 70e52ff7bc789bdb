"""A simulated step as a memory snapshot of CUDA: the file that ``torch.cuda.memory._dump_snapshot`` writes.

The viewers of such files, pytorch.org/memory_viz and ``torch/cuda/_memory_viz.py``, show what is alive at each moment.
Blocks are those of :mod:`ogc.sizing.requests`; a model of the caching allocator gives them addresses in segments.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from typing import Any

from ..graph import Graph
from ..plan.decisions import Decisions, saved
from ..plan.queues import Queues, seconds_of
from ..plan.schedule import Schedule
from .allocator import Block, CachingAllocator, State
from .requests import Requests, requests

PROTOCOL = 4
"""The newest pickles that the viewer reads."""

DEVICE_ADDRESSES = 2**46
"""Addresses that the devices lie apart: the viewer knows blocks by their addresses alone."""

NO_CATEGORY = "unknown"
"""What the viewer expects among the categories, where there are any."""

Snapshot = dict[str, Any]
"""``segments`` and ``device_traces``, as ``torch.cuda.memory._snapshot`` documents them."""


def write_snapshot(graph: Graph, decisions: Decisions, path: str | os.PathLike[str]) -> None:
    """Write what :meth:`ogc.Plan.snapshot` promises."""
    text = pickle.dumps(snapshot(graph, decisions), PROTOCOL)
    with open(path, "wb") as file:
        file.write(text)


def snapshot(graph: Graph, decisions: Decisions) -> Snapshot:
    """A step by the plan as device 0, and the plain model's, where that is known and another one, as device 1.

    Raises:
        PlanError: the plan is plain, and the graph's operations are not the plain model's.
    """
    steps = [requests(graph, decisions)]
    if len(graph) and not decisions.is_plain and graph.plain_peak_bytes is None:
        steps.append(requests(graph, Decisions((saved(0, len(graph)),), is_plain=True)))
    traces = [_Trace(device, step) for device, step in enumerate(steps)]
    return {
        "segments": [segment for trace in traces for segment in trace.segments()],
        "device_traces": [trace.events for trace in traces],
    }


class _Trace:
    """What the allocator of one device records of one step."""

    def __init__(self, device: int, found: Requests) -> None:
        self.device, self.found = device, found
        self.allocator = CachingAllocator()
        self.events: list[dict[str, Any]] = []
        self.made: dict[int, tuple[int, list[dict[str, Any]]]] = {}  # by block, its address and its frames
        starts = _starts(found.schedule)
        handles: dict[int, int] = {}
        for (block, size), step in zip(found.moves, found.steps, strict=True):
            time = round(1e6 * starts[step])
            if size > 0:
                handles[block] = self._allocate(block, size, step, time)
            else:
                self._free(block, -size, handles.pop(block), time)
        self.alive = {self._address(self.allocator.block(handle)): block for block, handle in handles.items()}

    def _allocate(self, block: int, size: int, step: int, time: int) -> int:
        segments = len(self.allocator.segments)
        handle = self.allocator.allocate(size)
        frames, kind = _frames(self.found.schedule, step, *self.found.contents[block])
        if len(self.allocator.segments) > segments:
            first = list(self.allocator.segments.values())[-1]
            whole = sum(part.size for part in first.region())
            self._record("segment_alloc", self._address(first), whole, frames, NO_CATEGORY, time)
        self.made[block] = address, _ = self._address(self.allocator.block(handle)), frames
        self._record("alloc", address, size, frames, kind, time)
        return handle

    def _free(self, block: int, size: int, handle: int, time: int) -> None:
        self.allocator.free(handle)
        address, frames = self.made[block]
        for action in ("free_requested", "free_completed"):
            self._record(action, address, size, frames, NO_CATEGORY, time)

    def _record(self, action: str, address: int, size: int, frames: list[Any], category: str, time: int) -> None:
        self.events.append(
            {
                "action": action,
                "addr": address,
                "size": size,
                "stream": 0,
                "time_us": time,
                "frames": frames,
                "category": category,
            }
        )

    def _address(self, block: Block) -> int:
        return (self.device + 1) * DEVICE_ADDRESSES + block.address

    def segments(self) -> Iterator[dict[str, Any]]:
        """The segments after the step, with the blocks that outlive it."""
        for first in self.allocator.segments.values():
            blocks = [self._block(block) for block in first.region()]
            allocated = sum(block["size"] for block in blocks if block["state"] != "inactive")
            yield {
                "device": self.device,
                "address": self._address(first),
                "total_size": sum(block["size"] for block in blocks),
                "allocated_size": allocated,
                "active_size": allocated,
                "requested_size": sum(block["requested_size"] for block in blocks),
                "stream": 0,
                "segment_type": "small" if first.pool.is_small else "large",
                "segment_pool_id": (0, 0),
                "is_expandable": False,
                "frames": [],
                "blocks": blocks,
            }

    def _block(self, block: Block) -> dict[str, Any]:
        address = self._address(block)
        is_allocated = block.state is State.ALLOCATED
        return {
            "address": address,
            "size": block.size,
            "requested_size": block.requested,
            "state": "active_allocated" if is_allocated else "inactive",
            "frames": self.made[self.alive[address]][1] if is_allocated else [],
        }


def _starts(schedule: Schedule) -> list[float]:
    """Seconds after which each step begins, once it need not wait."""
    seconds = seconds_of(schedule)
    for step, late in Queues.of(schedule).waits:
        seconds[step - 1] += late
    return [0.0, *accumulate(seconds)]


def _frames(schedule: Schedule, number: int, operation: int, kind: str) -> tuple[list[dict[str, Any]], str]:
    """The stack of what a step allocates, innermost first, and its kind: its line, the modules around, the phase."""
    op, step = schedule.graph.operations[operation], schedule.steps[number]
    phase = "backward" if step.is_backward else "recomputation" if step.run else "forward"
    kind = "recomputed value" if kind == "value" and step.run else kind
    file, _, line = op.source.rpartition(":")
    place = (file, int(line)) if line.isdecimal() else (op.source, 0)
    around = list(accumulate(op.module.split("."), "{}.{}".format)) if op.module else []
    innermost = _frame(*place, f"{op.module or 'the model'}: {op.target or op.name}, {kind}")
    return [innermost, *(_frame("module", 0, name) for name in reversed(around)), _frame("step", 0, phase)], kind


@lru_cache(2**16)
def _frame(filename: str, line: int, name: str) -> dict[str, Any]:
    """One object for equal frames, which a pickle writes once."""
    return {"filename": filename, "line": line, "name": name}
