"""How the benchmark measures a training step: peak, FLOPs, time, and every tensor that comes out of it.

One step is a forward and the backward of a loss, with the parameters' gradients already allocated. ``Run`` is the plain
model or anything called like it that trains the same parameters. Inputs are a tensor, a tuple of positional arguments,
or a dictionary of keyword arguments.
"""

from __future__ import annotations

import ctypes
import gc
import math
import random
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ogc.torch_state.allocator import peak_bytes
from ogc.torch_state.compare import same_bits

from .losses import Loss, summed

MIB = 2**20

Run = Callable[..., Any]
Inputs = Any
Clock = Callable[[], float]

FORMULAS = {
    **flop_registry,
    # What attention without dropout runs as on a CPU; torch has the formulas under CUDA's names.
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        torch.ops.aten._scaled_dot_product_flash_attention
    ],
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ],
}


class FlopCounter(TorchDispatchMode):
    """Adds up the FLOPs of matrix products, convolutions and attention, by torch's own formulas.

    Unlike ``FlopCounterMode`` it lets compiled code run as compiled: that one makes ``torch.compile`` step aside.
    """

    only_looks = True  # so that plans run under it

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = FORMULAS.get(func._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=result)
        return result


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Deterministic kernels where there are any, as before afterwards.

    On CUDA the backward of adaptive average pooling has none: there PyTorch warns where it would raise, and that one
    warning is left out. What differs from step to step then, :func:`unrepeatable` finds out. See
    :func:`deterministic_if_possible` for networks without one.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=device.type == "cuda")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "adaptive_avg_pool2d_backward_cuda does not have a deterministic")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def deterministic_if_possible(model: torch.nn.Module, inputs: Inputs, loss: Loss | None = None) -> None:
    """On CUDA, insist on deterministic kernels if the model's step runs with them, else prefer them; for what follows.

    Where they are preferred alone, attention takes a kernel that adds up in any order. The model's parameters have
    gradients afterwards, which are zero.
    """
    if not first_of(inputs).is_cuda:
        return
    allocate_gradients(model)
    torch.use_deterministic_algorithms(True)
    try:
        with as_before(model):
            step(model, inputs, loss)
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        torch.use_deterministic_algorithms(True, warn_only=True)


@contextmanager
def without_fills() -> Iterator[None]:
    """Deterministic algorithms do not fill new memory, which the step of a user does not either."""
    settings: Any = torch.utils.deterministic
    before = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = before


@dataclass(frozen=True)
class Measured:
    """One step: peak bytes, FLOPs, and all outputs, gradients, buffers and the random state after it, by name."""

    peak: int
    flops: int
    tensors: dict[str, torch.Tensor]


def step(run: Run, inputs: Inputs, loss: Loss | None = None) -> list[torch.Tensor]:
    """One forward and backward; the outputs, detached."""
    result = called(run, inputs)
    (loss or summed)(result).backward()
    return [output.detach() for output in tree_leaves(result) if isinstance(output, torch.Tensor)]


def called(run: Run, inputs: Inputs) -> Any:
    if isinstance(inputs, dict):
        return run(**inputs)
    return run(*inputs) if isinstance(inputs, tuple) else run(inputs)


def first_of(inputs: Inputs) -> torch.Tensor:
    """The first tensor, which tells the device and the number of samples."""
    return next(value for value in tree_leaves(inputs) if isinstance(value, torch.Tensor))


def allocate_gradients(model: torch.nn.Module) -> None:
    """As after the first step of a training that zeroes gradients in place."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


@contextmanager
def as_before(model: torch.nn.Module) -> Iterator[None]:
    """Buffers are put back afterwards, and gradients are zero again."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    try:
        yield
    finally:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()
        with torch.no_grad():
            for buffer, copy in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(copy)


def measure(model: torch.nn.Module, run: Run, inputs: Inputs, seed: int, loss: Loss | None = None) -> Measured:
    """Two steps of ``run`` from the same state, for FLOPs and for memory; the model stays as it was."""
    counter = FlopCounter()
    with as_before(model), counter:
        step(run, inputs, loss)
    outputs: list[torch.Tensor] = []
    with as_before(model):
        torch.manual_seed(seed)
        peak = peak_bytes(lambda: outputs.extend(step(run, inputs, loss)), first_of(inputs).device)
        tensors = dict(everything(model, outputs))
    return Measured(peak, counter.total, tensors)


def unrepeatable(
    model: torch.nn.Module, inputs: Inputs, seed: int, plain: Measured, loss: Loss | None = None
) -> tuple[str, ...]:
    """Names of the tensors of which a second plain step gives other bits: they say nothing of another model.

    None where every kernel is deterministic.
    """
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        return ()
    again = measure(model, model, inputs, seed, loss)
    return tuple(name for name, value in plain.tensors.items() if not same_bits(value, again.tensors[name]))


# -- bits ---------------------------------------------------------------------------------------------------------


def distances(plain: Measured, other: Measured, left_out: Collection[str] = ()) -> dict[str, float]:
    """By name, the tensors that are not bitwise the plain step's, and the most by which an entry differs."""
    found = {}
    for name, value in plain.tensors.items():
        there = other.tensors.get(name)
        if name in left_out or (there is not None and same_bits(value, there)):
            continue
        is_alike = there is not None and there.shape == value.shape
        apart = (value.double() - there.double()).abs().max().item() if is_alike else math.inf  # type: ignore[union-attr]
        found[name] = math.inf if math.isnan(apart) else apart
    return found


def differing(distances: Mapping[str, float]) -> tuple[str, ...]:
    """Which kinds of tensors are among these."""
    named = {"output": "outputs", "gradient": "gradients", "buffer": "buffers", "random": "random state"}
    return tuple(dict.fromkeys(named[name.split(" ")[0]] for name in distances))


def largest_entry(plain: Measured, names: Collection[str]) -> float:
    """Of these tensors of the plain step; never 0."""
    return max([1e-300, *(plain.tensors[name].double().abs().max().item() for name in names)])


# -- time ---------------------------------------------------------------------------------------------------------


def timed(run: Run, inputs: Inputs, clock: Clock = time.perf_counter, loss: Loss | None = None) -> float:
    """Seconds of a step, by this clock."""
    return timed_call(lambda: step(run, inputs, loss), inputs, clock)


def timed_call(call: Callable[[], object], inputs: Inputs, clock: Clock) -> float:
    """Seconds of anything that runs on the inputs' device."""
    synchronize: Callable[[], None] = torch.cuda.synchronize if first_of(inputs).is_cuda else lambda: None
    with without_fills():
        synchronize()
        start = clock()
        call()
        synchronize()
        return clock() - start


MOST_ROUNDS = 201
"""A quantile of two hundred is as good as it gets."""

STEADY, MOST_TRIES = 0.05, 3
"""A round counts where the machine was steady, which is seen by two plain steps: they are not further apart than this,
or, after so many times the rounds, it is one of those where they are closest. While another guest of the machine was
busy, a plan of MobileNetV3 that promised 20 % paid 8 in the median; in half of the rounds the plain steps were 11
points apart or more."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Kernels run on one thread, so that their time is CPU time; as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def clock_of(device: torch.device) -> Clock:
    """CPU seconds of this process, which others on the machine do not add to; on CUDA those of the wall."""
    return time.perf_counter if device.type == "cuda" else time.process_time


@dataclass(frozen=True)
class Seconds:
    """Of one run, a number for each round: ``own`` of its steps, ``plain`` of the plain model's in the same rounds."""

    own: Sequence[float]
    plain: Sequence[float]

    @property
    def paid(self) -> float:
        """The overhead, as a share of the plain step."""
        return median(self._ratios) - 1

    @property
    def quartiles(self) -> tuple[float, float]:
        """Between which the overheads of the middle half of the rounds are."""
        if len(self.own) < 2:
            return self.paid, self.paid
        low, _, high = quantiles(self._ratios, n=4, method="inclusive")
        return low - 1, high - 1

    @property
    def _ratios(self) -> list[float]:
        return [own / plain for own, plain in zip(self.own, self.plain, strict=True)]


def in_turn(
    steps: Mapping[str, Callable[[], float]], rounds: int, seconds: float, twins: tuple[str, str] | None = None
) -> dict[str, list[float]]:
    """Seconds of every step in every round, after one that does not count.

    There are at least ``rounds`` of them, and more until ``seconds`` are spent. Each has an order of its own: a step
    works in the memory that the one before it left, and where the order went round, two plain steps of ResNet-101 were
    3 points apart. Where two of the steps are ``twins``, rounds in which these are apart are replaced by others.
    """
    gc.collect()
    start = time.perf_counter()
    for step in steps.values():
        step()
    each = time.perf_counter() - start
    number = max(rounds, min(MOST_ROUNDS, math.floor(seconds / max(each, 1e-9))))
    found: list[dict[str, float]] = []
    orders = random.Random(0)
    while len(found) < number or (
        twins and len(found) < MOST_TRIES * number and _apart(found[number - 1], twins) > STEADY
    ):
        found.append({name: steps[name]() for name in orders.sample(list(steps), len(steps))})
        if twins:
            found.sort(key=lambda round_: _apart(round_, twins))
    return {name: [round_[name] for round_ in found[:number]] for name in steps}


def _apart(round_: Mapping[str, float], twins: tuple[str, str]) -> float:
    one, other = (round_[name] for name in twins)
    return abs(math.log(one / other))


# -- memory of the process ----------------------------------------------------------------------------------------


def keep_freed_memory() -> bool:
    """Have the process hand out freed memory again, as PyTorch's allocator on CUDA does; True where that works.

    By default glibc gives every block of 32 MiB and more back to the system. The next tensor then lies on fresh pages,
    and touching them first takes longer than an elementwise operation: times would be the system's, not the kernels'.
    """
    set_option = _glibc("mallopt")
    trim_threshold, mmap_max = -1, -4  # of <malloc.h>
    return bool(set_option and set_option(trim_threshold, -1) and set_option(mmap_max, 0))


def give_back_freed_memory() -> None:
    """Return what is free to the system, or the gaps that one network's tensors leave would add to the next one's."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if trim := _glibc("malloc_trim"):
        trim(0)


def _glibc(name: str) -> Callable[..., int] | None:
    """A function of the C library, or None where that is another one."""
    try:
        function: Callable[..., int] = getattr(ctypes.CDLL("libc.so.6"), name)
    except (OSError, AttributeError):
        return None
    return function


def everything(model: torch.nn.Module, outputs: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """What a step leaves, by name: its outputs, gradients, buffers and the random state."""
    yield from ((f"output {number}", output) for number, output in enumerate(outputs))
    yield from ((f"gradient of {name}", p.grad.clone()) for name, p in model.named_parameters() if p.grad is not None)
    yield from ((f"buffer {name}", buffer.clone()) for name, buffer in model.named_buffers())
    yield "random state", torch.get_rng_state()
    yield from ((f"random state of cuda:{n}", state) for n, state in enumerate(torch.cuda.get_rng_state_all()))
