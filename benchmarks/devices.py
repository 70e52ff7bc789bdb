"""The table of many devices: a network in DistributedDataParallel, plain, with torch's checkpoint, and with ogc.

    torchrun --nproc-per-node 2 benchmark.py --arch densenet_cifar --device cpu

Each rank has a batch of its own. All three train the same network from the same start, step by step in turn, so that
times are of the same moments. Memory is the allocator's peak over one step less what was allocated before it.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ogc
from ogc.torch_state.allocator import peak_bytes

from .cases import CASES
from .measuring import keep_freed_memory
from .results import environment, write_json
from .row import Data
from .running import batch_size_of
from .suites import RESULTS
from .summaries import on_many_devices

STEPS = 5
"""How many losses are compared, at least."""

CPU_BATCH_SIZE = 8
"""Of each rank: small, as both have to fit on one machine."""


def is_one_of_several() -> bool:
    """Whether torchrun has started this process beside others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Measure the first architecture on all ranks; the first of them prints and writes."""
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    keeps = device.type == "cuda" or keep_freed_memory()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        rows = [row for name in options.arch for row in _rows(name, device, options)]
        if dist.get_rank() == 0:
            path = options.json or RESULTS / ("cuda_devices.json" if device.type == "cuda" else "devices.json")
            launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(dist.get_world_size())]
            write_json(path, {**environment([*launch, *command], device, options.seed, keeps), "rows": rows})
            print(f"{on_many_devices([{'rows': rows}])}\nwritten to {path}")
        return 0 if all(row["is_plain"] for row in rows) else 1
    finally:
        dist.destroy_process_group()


def _rows(name: str, device: torch.device, options: argparse.Namespace) -> list[Data]:
    """For each way: bytes and seconds of one step, by rank; whether losses and parameters are plain DDP's."""
    torch.manual_seed(options.seed)
    case = CASES[name]
    model = case.build().to(device).train()
    size = CPU_BATCH_SIZE if device.type == "cpu" and not options.batch_size else batch_size_of(name, device, options)
    torch.manual_seed(options.seed + 1 + dist.get_rank())
    batches = [case.sample(size, options.size, device) for _ in range(STEPS)]
    trainings = {way: _Training(make(model, batches[0])) for way, make in WAYS.items()}
    for number in range(max(STEPS, options.iterations)):
        for training in trainings.values():
            training.step(batches[number % STEPS])
    plain = trainings["plain"]
    return [
        {
            "arch": name,
            "way": way,
            "device": str(device.type),
            "ranks": dist.get_world_size(),
            "batch_size": size,  # of each rank
            "peak_bytes": _of_all(training.peak(batches[0])),
            "seconds": _of_all(median(training.seconds[1:])),
            "losses": training.losses,
            "is_plain": all(_of_all(training.losses == plain.losses and training.is_same(plain))),
        }
        for way, training in trainings.items()
    ]


class _Training:
    """One model in DistributedDataParallel, and what its steps gave."""

    def __init__(self, model: nn.Module) -> None:
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, batch: torch.Tensor) -> None:
        """One step of training."""
        _wait_for_all(batch)
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=False)
        loss = self._backward(batch)
        self.optimizer.step()
        _wait_for_all(batch)
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(loss))

    def peak(self, batch: torch.Tensor) -> int:
        """Bytes of a forward and a backward. What they change is not trained any further."""
        self.optimizer.zero_grad(set_to_none=False)
        return peak_bytes(lambda: self._backward(batch), batch.device)

    def is_same(self, other: _Training) -> bool:
        """Whether both have the same parameters, bit by bit."""
        pairs = zip(self.model.parameters(), other.model.parameters(), strict=True)
        return all(torch.equal(one, two) for one, two in pairs)

    def _backward(self, batch: torch.Tensor) -> torch.Tensor:
        output = self.model(batch)
        target = torch.arange(len(output), device=output.device) % output.shape[-1]
        loss = nn.functional.cross_entropy(output, target)
        loss.backward()
        return loss.detach()


def _wait_for_all(batch: torch.Tensor) -> None:
    if batch.is_cuda:
        torch.cuda.synchronize()
    dist.barrier()


def _checkpointed(model: nn.Module, batch: torch.Tensor) -> nn.Module:
    """With torch's checkpoint on each dense layer, as in 2018, or on each block of another network."""
    twin = copy.deepcopy(model)
    layers = [module for module in twin.modules() if type(module).__name__ == "_DenseLayer"]
    blocks = (block for module in twin.modules() if isinstance(module, nn.Sequential) for block in module)
    for layer in layers or list(blocks):
        layer.forward = partial(_again, layer.forward)  # type: ignore[method-assign]
    return twin


def _again(forward: Callable[..., Any], given: Any) -> Any:
    # A dense block adds to the list that it gives its layers: what runs again must see it as it was.
    return checkpoint(forward, list(given) if isinstance(given, list) else given, use_reentrant=False)


WAYS: dict[str, Callable[[nn.Module, torch.Tensor], nn.Module]] = {
    "plain": lambda model, batch: copy.deepcopy(model),
    "torch's checkpoint on each layer": _checkpointed,
    "ogc": lambda model, batch: ogc.optimize(copy.deepcopy(model), batch, memory_budget="least"),
}


def _of_all(value: Any) -> list[Any]:
    """What each rank has."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
