"""Processes that talk over gloo, for tests of many devices. One that does not answer in time is a failure."""

from __future__ import annotations

import logging
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch

RANKS, SECONDS = 2, 60


class Ranks:
    """Processes that stay from test to test; a test that fails in one, or hangs, ends them all."""

    def __init__(self, count: int = RANKS, seconds: float = SECONDS) -> None:
        self.count, self.seconds = count, seconds
        self.processes: list[Any] = []
        self.pipes: list[Any] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``function(rank, *args)`` returns on each rank, all at once.

        Raises:
            AssertionError: it raised on a rank, which the message shows, or took too long.
        """
        if not self.processes:
            self._start()
        for pipe in self.pipes:
            pipe.send((function, args))
        answers, end = [], time.monotonic() + self.seconds
        for rank, pipe in enumerate(self.pipes):
            try:
                has_answered = pipe.poll(max(0.0, end - time.monotonic()))
                answers.append(pipe.recv() if has_answered else (False, f"rank {rank} hangs"))
            except EOFError:
                answers.append((False, f"rank {rank} died"))
            if not answers[-1][0]:
                end = min(end, time.monotonic() + 5)  # the others may wait for this one
        if failures := [answer for is_done, answer in answers if not is_done]:
            self.stop()
            raise AssertionError("\n".join(failures))
        return [answer for _, answer in answers]

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        folder = tempfile.mkdtemp()
        for rank in range(self.count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.count, os.path.join(folder, "meeting"), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def stop(self) -> None:
        """End the processes, also such as hang."""
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.pipes = [], []


def _serve(rank: int, count: int, meeting: str, pipe: Any) -> None:
    from ogc.parser import arguments

    torch.set_num_threads(1)
    arguments.AUTO["cpu"] = "estimate"  # as in all tests, see conftest.py
    warnings.simplefilter("error")
    for what in ("`broadcast_buffers`", ".*torch.distributed", "`torch.distributed"):
        warnings.filterwarnings("ignore", what, FutureWarning)  # of names that another release of torch lacks
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=count)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        torch.manual_seed(0)
        try:
            pipe.send((True, function(rank, *args)))
        except BaseException:
            pipe.send((False, f"rank {rank}: {traceback.format_exc()}"))


class Told(logging.Handler):
    """Collects what ogc logs, in a ``with``."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> Told:
        logging.getLogger("ogc").addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger("ogc").removeHandler(self)
