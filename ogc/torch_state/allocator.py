"""Peak memory as the allocator saw it, which the simulator is held against."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.autograd.profiler import profile, record_function

from .private import Allocation, is_profiled, traverse_dfs

_MARK = "ogc: "

Step = Callable[[Callable[[str], None]], object]


def can_measure(device: torch.device) -> bool:
    """Whether bytes can be read off the allocator now: on a CPU, not while another profiler runs."""
    return device.type == "cuda" or not is_profiled()


def peak_bytes(step: Callable[[], object], device: torch.device | str) -> int:
    """Most bytes allocated at once while ``step()`` runs, above what was allocated before it.

    On CUDA from the allocator's statistics: bytes that were requested, as blocks are larger by up to a mebibyte each.
    On CPU from its events, which the profiler records; memory that libraries take past torch's allocator is not seen.
    """
    return allocated_bytes(step, device)[0]


def allocated_bytes(
    step: Callable[[], object], device: torch.device | str, prepare: Callable[[], object] = lambda: None
) -> tuple[int, int]:
    """The peak as of :func:`peak_bytes`, and by how many bytes more are allocated after the step than before.

    On a CPU the size of what ``prepare()``, run before it, allocates is known when it is freed; that of older memory is
    not.
    """
    _, end = marked_bytes(lambda mark: step(), device, prepare)
    return end.peak_bytes, end.bytes


@dataclass(frozen=True)
class Mark:
    """A moment of a step."""

    label: str  # given by the step; "begin" and "end" for its first and last moment
    bytes: int  # allocated then
    peak_bytes: int  # most bytes allocated at once since the mark before
    seconds: float


def marked_bytes(step: Step, device: torch.device | str, prepare: Callable[[], object] = lambda: None) -> list[Mark]:
    """Bytes allocated at the moments that ``step(mark)`` marks with labels, and peaks between them.

    They count from the start of the step, which is the first mark; ``prepare()`` runs before it.
    """
    device = torch.device(device)
    marks = _marked_on_cuda(step, device, prepare) if device.type == "cuda" else _marked_on_cpu(step, prepare)
    return [replace(m, bytes=m.bytes - marks[0].bytes, peak_bytes=m.peak_bytes - marks[0].bytes) for m in marks]


def _marked_on_cuda(step: Step, device: torch.device, prepare: Callable[[], object]) -> list[Mark]:
    marks: list[Mark] = []
    # That of cudaMallocAsync does not count what was asked for.
    kind = "requested_bytes" if torch.cuda.get_allocator_backend() == "native" else "allocated_bytes"

    def mark(label: str) -> None:
        torch.cuda.synchronize(device)
        found = torch.cuda.memory_stats_as_nested_dict(device)[kind]["all"]
        marks.append(Mark(label, found["current"], found["peak"], time.perf_counter()))
        torch.cuda.reset_peak_memory_stats(device)

    prepare()
    _finish_backwards(device)
    mark("begin")
    step(mark)
    mark("end")
    return marks


def _finish_backwards(device: torch.device) -> None:
    """Wait until the device's thread for backwards holds nothing of those before: it may let go later than they end."""
    with torch.enable_grad():
        start = torch.zeros(1, device=device, requires_grad=True)
        torch.autograd.grad(start.neg(), start)


def _marked_on_cpu(step: Step, prepare: Callable[[], object]) -> list[Mark]:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or each session announces itself on stderr

    def mark(label: str) -> None:
        with record_function(_MARK + label):
            pass

    # torch.profiler.profile makes Python objects of all events at once, which takes longer than most steps.
    with profile(use_kineto=True, profile_memory=True) as profiler:
        prepare()
        mark("begin")
        step(mark)
        mark("end")
    tree = profiler.kineto_results.experimental_event_tree()  # with the addresses, which its public face leaves out
    held: dict[int, int] = {}  # bytes by address: what was there before the profiler has no size, or a stale one
    marks: list[Mark] = []
    live = peak = 0
    for event in sorted(traverse_dfs(tree), key=lambda event: event.start_time_ns):
        block = event.extra_fields
        if event.name.startswith(_MARK):
            marks.append(Mark(event.name.removeprefix(_MARK), live, peak, event.start_time_ns / 1e9))
            peak = live
        elif isinstance(block, Allocation) and block.device.type == "cpu":
            if block.alloc_size > 0:
                held[block.ptr] = block.alloc_size
            live += block.alloc_size if block.alloc_size > 0 else -held.pop(block.ptr, 0)
            peak = max(peak, live)
    return marks
