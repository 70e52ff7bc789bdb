"""What the runtime's own work takes of the host, from a small piece of the same work, measured once in a process."""

from __future__ import annotations

from functools import cache
from itertools import count
from statistics import median
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ....graph import RuntimeCosts
from ....program.autocast import run_saving
from ....torch_state.module_state import WatchedModule
from ....torch_state.reads import Reads, WatchedReads
from ....torch_state.settings import flags
from ..measure import own_clock
from ..timing import Caches

LENGTH, REPEATS = 64, 15
"""Operations of the chain, and how often it runs: some 20 ms in all."""

HOOK_SECONDS = 1.7e-6
"""Of a hooked tensor of the chain, on a Xeon with torch 2.14: where nothing is measured."""

OF_TENSOR, OF_RUN = 1.7, 20.0
"""What a saved tensor and a run again take, by the time of a hooked tensor of the chain. In a residual network of 208
tiny operations, cut into 1, 2, 4, 8 and 16 runs, a tensor took 2.9 us on a Xeon where that took 1.7, and 5.5 on an EPYC
where it took 3.3; a run took 28 and 115, between which this is, and takes a seventh less since (72, not 84 there)."""

OF_CALL = 0.33
"""What a function takes that the plain forward calls, and the generated one does not: that network's forward calls 1700
more, and on the EPYC a step in which nothing is recomputed took 1.5 ms less, though choosing its plan took 0.3 ms."""

RETURN_OF_TENSOR = 0.03
"""The part that a saved tensor takes of a run's return from a kernel. On a virtual EPYC that was 0.17 ms. 21 plans of
MobileNetV3, GhostNet and DenseNet-121 promised 4 points less than they paid without returns, and 1 more with 0.05."""

OF_CHOICE = 100.0
"""What stands between a call and its forward, whatever the model, by the same: it took 0.15 to 0.35 ms of that
network's step where nothing was to be done, most of it for what a step has driven out of the caches."""

RETURNS = 45
"""Returns that are measured, a third of a second in all: they vary by half, and their median by a tenth."""

CHOICES = 5
"""Times that the choice of a plan is measured. Most of it is waiting for memory: what a step leaves in the caches."""


def runtime_costs(is_measured: bool, calls_left_out: int, choice: float, kernels_evict: bool = False) -> RuntimeCosts:
    """The costs on this host, ``choice`` among them; estimated, nothing is taken off for what is left out.

    ``kernels_evict`` says that what a step does between the runtime's runs needs the caches for itself: kernels on a
    CPU do where their tensors are large, and on CUDA what hands kernels over does.
    """
    hooked = hook_seconds() if is_measured else HOOK_SECONDS
    left_out = OF_CALL * hooked * max(0, calls_left_out) if is_measured else 0.0
    return_ = _return_seconds() if is_measured and kernels_evict else 0.0
    return RuntimeCosts(OF_RUN * hooked + return_, OF_TENSOR * hooked + RETURN_OF_TENSOR * return_, left_out, choice)


def choice_seconds(model: torch.nn.Module, reads: Reads) -> float:
    """What it takes before a call to see that a module, in all its tables, is what it was.

    Measured once in a process for so many modules and parameters, so that what is planned twice costs the same.
    """
    size = sum(1 for _ in model.modules()), sum(1 for _ in model.parameters())
    if size not in _choices:
        _choices[size] = OF_CHOICE * hook_seconds() + _choice_seconds(model, reads)
    return _choices[size]


_choices: dict[tuple[int, int], float] = {}


def _choice_seconds(model: torch.nn.Module, reads: Reads) -> float:
    module, watched, caches = WatchedModule(model, count(1)), WatchedReads(reads, model), Caches()

    def seconds() -> float:
        caches.evict()
        begin = own_clock()
        module.state(model)
        watched.first_changed(model)
        return own_clock() - begin

    return median(seconds() for _ in range(CHOICES))


@cache
def hook_seconds() -> float:
    """Seconds that a saved tensor takes more where hooks in Python pack and unpack it."""
    differences = []
    with torch.enable_grad():
        for _ in range(REPEATS):
            plain, hooked = _timed(None), _timed(_Hooks())
            differences.append((hooked - plain) / LENGTH)
    return max(0.0, median(differences))


@cache
def _return_seconds() -> float:
    """Seconds that what a run does first takes more after a convolution than after itself."""
    settings, start, caches, differences = flags(), torch.zeros(4), Caches(), list[float]()
    images, weight = torch.zeros(2, 64, 56, 56), torch.zeros(64, 64, 3, 3)

    def seconds() -> float:
        begin = own_clock()
        run_saving(start.detach().requires_grad_().sigmoid, settings, _Hooks().pack, _unpack)
        return own_clock() - begin

    for _ in range(RETURNS):
        caches.evict()
        torch.conv2d(images, weight, padding=1)
        first, second = seconds(), seconds()
        differences.append(first - second)
    return max(0.0, median(differences))


class _Hooks:
    def __init__(self) -> None:
        self.held: dict[int, torch.Tensor] = {}

    def pack(self, tensor: torch.Tensor) -> Any:
        self.held[len(self.held)] = tensor.detach()
        return self, len(self.held) - 1

    def fetch(self, number: int) -> torch.Tensor:
        return self.held[number]


def _unpack(packed: Any) -> torch.Tensor:
    hooks, number = packed
    found: torch.Tensor = hooks.fetch(number)
    return found


def _timed(hooks: _Hooks | None) -> float:
    start = torch.zeros(4, requires_grad=True)
    begin = own_clock()
    if hooks is None:
        end = _chain(start)
    else:
        with saved_tensors_hooks(hooks.pack, _unpack):
            end = _chain(start)
    torch.autograd.grad(end, start)
    return own_clock() - begin


def _chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(LENGTH):
        x = x.sigmoid()
    return x.sum()
