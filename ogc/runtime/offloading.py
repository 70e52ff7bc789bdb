"""Where values of a graph may be offloaded to, and how quickly: measured here, or by the link of a device elsewhere."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import InputError
from ..given import is_number, memory_bytes
from ..graph import Graph, Host
from .copies import offloadable_values
from .host import bandwidths

LINKS = {"PCIe 3": 15.75e9, "PCIe 4": 31.5e9, "PCIe 5": 63e9, "NVLink-C2C": 450e9}
"""Bytes per second, each way: PCI-SIG's base specifications 3.0, 4.0 and 5.0, 16 lanes; NVIDIA's GH200 data sheet."""

Bandwidth = float | str | tuple[float, float]
"""Bytes per second of copies each way, the name of a link, or bytes per second out and back."""

OF_LINK = 0.8
"""Share of that which large copies of pinned memory reach; what is left is protocol."""


@dataclass(frozen=True)
class Offloading:
    """Where values may be offloaded to: a folder, or with "" pinned memory; bytes per second out and back, if known;
    most bytes that may be there of one forward; how many processes share the bandwidth."""

    folder: str
    bandwidth: tuple[float, float] | None = None
    memory: int | None = None
    ranks: int = 1

    @classmethod
    def of(cls, offload: Any, bandwidth: Any, memory: Any, ranks: Any) -> Offloading | None:
        """What the arguments of :func:`ogc.optimize` mean.

        Raises:
            InputError: one of them is of the wrong kind, or there is no such folder.
        """
        if offload is False or offload is None:
            if not (bandwidth is None and memory is None and ranks == 1):
                raise InputError(
                    "bandwidth=, host_memory= and ranks_per_host= are those of offload=, which is not given"
                )
            return None
        if offload is not True and not (isinstance(offload, (str, os.PathLike)) and os.path.isdir(offload)):
            raise InputError(f"offload must be True or the path of a folder that is there, not {offload!r}")
        if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
            raise InputError(f"ranks_per_host must be a number of processes, 1 or more, not {ranks!r}")
        most = None if memory is None else memory_bytes(memory, "host_memory")
        folder = "" if offload is True else os.path.abspath(offload)
        return cls(folder, None if bandwidth is None else _pair(bandwidth), most, ranks)

    def on(self, graph: Graph) -> Graph:
        """The graph, whose plans may offload.

        Raises:
            InputError: the device takes no folder, or its bandwidth is not known.
        """
        device, folder = torch.device(graph.device), self.folder
        if device.type == "cuda" and folder:
            raise InputError("on CUDA values are offloaded to pinned memory: give offload=True, not a folder")
        if device.type != "cuda":
            folder = folder or tempfile.gettempdir()
        is_here = device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available())
        if self.bandwidth is None and not is_here:
            raise InputError(
                f"the bandwidth to {device.type} cannot be measured here; give bandwidth= in bytes per second, or a "
                f"link: {', '.join(LINKS)}"
            )
        out, back, each = (*self.bandwidth, 0.0) if self.bandwidth else bandwidths(device, folder)
        shared = out / self.ranks, back / self.ranks
        return replace(graph, host=Host(*shared, offloadable_values(graph), folder, each, self.memory))


def _pair(bandwidth: Any) -> tuple[float, float]:
    """Bytes per second, out and back."""
    if isinstance(bandwidth, str) and bandwidth in LINKS:
        bandwidth = OF_LINK * LINKS[bandwidth]
    pair = bandwidth if isinstance(bandwidth, tuple) else (bandwidth, bandwidth)
    if not (len(pair) == 2 and all(is_number(one) and one > 0 for one in pair)):
        raise InputError(
            f"bandwidth must be bytes per second, more than 0, a pair of such numbers, or one of "
            f"{', '.join(map(repr, LINKS))}, not {bandwidth!r}"
        )
    return pair
