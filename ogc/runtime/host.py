"""Where offloaded values go, and the two queues of copies: out of the device's memory and back, first in, first out.

On a CPU values go to a file without a name, which a thread for each queue writes and reads: that lets go of Python, and
kernels run beside it. What fails is an exception there, such as a full disk, where a mapped file would be a signal. On
CUDA values go to pinned memory, by a stream for each queue.
"""

from __future__ import annotations

import _thread
import os
import tempfile
import time
import weakref
from collections.abc import Callable
from functools import cache, partial
from queue import SimpleQueue
from threading import Event
from typing import Any, Protocol

import torch

from ..errors import InputError, ReplayError


class Fetched(Protocol):
    """A copy back: where it goes to, which is its own from the start."""

    data: torch.Tensor

    def wait(self) -> None:
        """Until it has ended. ReplayError: it failed."""


class Sent(Protocol):
    """A copy out, and what there is of the value afterwards; its memory is used again when nobody holds it."""

    def wait(self) -> None:
        """Until it has ended. OSError: it failed."""

    def back(self) -> Fetched:
        """Start the copy back."""


class Home(Protocol):
    """Where values go to; ``told`` has what was logged of it."""

    told: set[str]

    def out(self, data: torch.Tensor) -> Sent:
        """Start the copy of these bytes, which stay until it has ended. OSError: there is no room."""


def home_at(device: torch.device, folder: str) -> Home:
    """That of a device's values: on CUDA pinned memory, else a file in the folder."""
    return Pinned(device) if device.type == "cuda" else Folder(folder)


PIECE, PIECES = 1 << 22, 16
"""Bytes of a copy by which bandwidth is measured, and how many there are: together they are in no cache."""


@cache
def bandwidths(device: torch.device, folder: str) -> tuple[float, float, float]:
    """Bytes per second of copies out and back, measured once, in places that were used before; seconds of a byte's.

    Raises:
        InputError: no file can be made in the folder, or it has no room.
    """
    home = home_at(device, folder)
    pieces = torch.ones(PIECES, PIECE, dtype=torch.uint8, device=device)
    try:
        for _ in range(2):
            start = _now(device)
            sent = [home.out(piece) for piece in pieces]
            for one in sent:
                one.wait()
            left = _now(device)
            for one in sent:
                one.back().wait()
            returned = _now(device)
            for piece in pieces:
                home.out(piece[:1]).back().wait()
            each = (_now(device) - returned) / PIECES
            del sent, one
    except OSError as error:
        raise InputError(f"offload={folder!r}: {error.strerror or error}; give a folder that has room") from error
    return PIECE * PIECES / (left - start), PIECE * PIECES / (returned - left), each


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# -- files -------------------------------------------------------------------------------------------------


class _Job:
    """One copy of a thread's; who waits for it lets go of what it holds, not the thread."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work: Callable[[], None] | None = work
        self.done = Event()
        self.error: Exception | None = None
        self.pid = os.getpid()

    def run(self) -> None:
        assert self.work is not None
        try:
            self.work()
        except Exception as error:
            self.error = error.with_traceback(None)
        self.work = None
        self.done.set()

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job


class _Queue:
    """Copies of one direction, by a thread of their own."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[_Job | None] = SimpleQueue()
        # Not one of threading's: operations that draw random numbers are looked at where there are others of these.
        _thread.start_new_thread(_work, (self.jobs,))
        weakref.finalize(self, self.jobs.put, None)

    def put(self, work: Callable[[], None]) -> _Job:
        job = _Job(work)
        self.jobs.put(job)
        return job


CLASSES = 8
"""Sizes in the file between one power of two and the next: another value's place is used again if it is as large."""


class _File:
    """A file without a name, of the process that made it, and which of its places are free."""

    def __init__(self, folder: str) -> None:
        self.file = file_in(folder)
        weakref.finalize(self, self.file.close)
        self.pid, self.end = os.getpid(), 0
        self.free: dict[int, list[int]] = {}  # of each size, places
        self.out, self.back = _Queue(), _Queue()

    def room(self, size: int) -> int:
        """The place of as many bytes, which :func:`rounded` gave. OSError: there is no room."""
        if free := self.free.setdefault(size, []):
            return free.pop()
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self.file.fileno(), self.end, size)
        self.end += size
        return self.end - size

    def write(self, data: torch.Tensor, place: int) -> None:
        view, number = _bytes_of(data), self.file.fileno()
        done = 0
        while done < len(view):
            done += os.pwrite(number, view[done:], place + done)

    def read(self, data: torch.Tensor, place: int) -> None:
        view, number = _bytes_of(data), self.file.fileno()
        done = 0
        while done < len(view):
            count = os.preadv(number, [view[done:]], place + done)
            if not count:
                raise OSError("the file is shorter than what was written to it")
            done += count


def _bytes_of(data: torch.Tensor) -> memoryview:
    bytes_of: Any = data.numpy()
    return memoryview(bytes_of)


def file_in(folder: str) -> Any:
    """A new file without a name.

    Raises:
        InputError: none can be made there.
    """
    if not hasattr(os, "preadv"):
        raise InputError(
            "offload= writes and reads files at places (os.preadv), which this system cannot; leave it out"
        )
    try:
        return tempfile.TemporaryFile(dir=folder, buffering=0)
    except OSError as error:
        raise InputError(
            f"offload={folder!r}: no file can be made there ({error.strerror}); give the path of a folder "
            "that is there and can be written"
        ) from None


def rounded(size: int) -> int:
    """The size of a place for so many bytes."""
    grain = max(1, (1 << max(0, size - 1).bit_length()) // (2 * CLASSES))
    return -(-size // grain) * grain


class _InFile:
    """A value in a file."""

    def __init__(self, file: _File, data: torch.Tensor) -> None:
        self.file, self.size = file, data.nbytes
        self.place = file.room(rounded(self.size))
        self.job = file.out.put(partial(file.write, data, self.place))

    def wait(self) -> None:
        self.job.wait()

    def back(self) -> Fetched:
        if self.file.pid != os.getpid():
            raise ReplayError(
                "the process was forked between a forward that offloaded values and its backward, and the threads that "
                "copy them stayed behind; run both in one process"
            )
        return _FromFile(self)

    def __del__(self) -> None:
        if hasattr(self, "job"):
            free = partial(self.file.free[rounded(self.size)].append, self.place)
            if self.job.done.is_set():
                free()
            else:  # behind the copy
                self.file.out.put(free)


class _FromFile:
    def __init__(self, source: _InFile) -> None:
        self.source = source  # whose place stays its own until this is read
        self.data = torch.empty(source.size, dtype=torch.uint8)
        self.job = source.file.back.put(partial(self._read, source, self.data))

    @staticmethod
    def _read(source: _InFile, data: torch.Tensor) -> None:
        source.job.wait()
        source.file.read(data, source.place)

    def wait(self) -> None:
        try:
            self.job.wait()
        except OSError as error:
            raise ReplayError(f"an offloaded value could not be read again: {error}") from error


class Folder:
    """A folder's file; another one for each process."""

    def __init__(self, folder: str) -> None:
        self.folder, self.told = folder, set[str]()
        self.files: dict[int, _File] = {}

    def out(self, data: torch.Tensor) -> Sent:
        pid = os.getpid()
        return _InFile(self.files.get(pid) or self.files.setdefault(pid, _File(self.folder)), data)


# -- pinned memory -------------------------------------------------------------------------------------------


class Pinned:
    """Pinned memory that is used again and again: each piece takes long to make, and waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.told = device, set[str]()
        self.streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.free: dict[int, list[tuple[torch.Tensor, Any]]] = {}  # pieces, and when their last copy has ended

    def out(self, data: torch.Tensor) -> Sent:
        if torch.cuda.is_current_stream_capturing():
            raise ReplayError("values cannot be offloaded while a CUDA graph is captured; leave out offload=")
        return _InPinned(self, data)

    def copy(self, number: int, source: torch.Tensor, target: torch.Tensor, after: Any = None) -> Any:
        """Copy on a stream of ours, behind what the current one does until now; the event of its end."""
        stream = self.streams[number]
        stream.wait_stream(torch.cuda.current_stream(self.device))  # asked for outside of the stream's own context
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            ended = torch.cuda.Event()
            ended.record(stream)
        return ended


class _Ended:
    """A copy on another stream: memory of the current one is let go of behind it, whoever lets go."""

    device: torch.device
    ended: Any

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.ended)


class _InPinned(_Ended):
    def __init__(self, home: Pinned, data: torch.Tensor) -> None:
        self.home, self.device, self.data = home, home.device, data
        free = home.free.setdefault(data.nbytes, [])
        piece, last = free.pop() if free else (torch.empty(data.nbytes, dtype=torch.uint8, pin_memory=True), None)
        self.piece, self.ended = piece, home.copy(0, data, piece, last)
        self.last = self.ended

    def wait(self) -> None:
        super().wait()
        self.data = self.piece[:0]

    def back(self) -> Fetched:
        found = _FromPinned(self)
        self.last = found.ended
        return found

    def __del__(self) -> None:
        if hasattr(self, "last"):
            self.wait()
            self.home.free[self.piece.nbytes].append((self.piece, self.last))


class _FromPinned(_Ended):
    def __init__(self, source: _InPinned) -> None:
        self.device = source.device
        self.data = torch.empty(source.piece.nbytes, dtype=torch.uint8, device=self.device)
        self.ended = source.home.copy(1, source.piece, self.data, source.ended)

    def __del__(self) -> None:
        if hasattr(self, "ended"):
            self.wait()
