"""How the benchmark measures a training step: peak, FLOPs, time, and every tensor that comes out of it.

One step is a forward, ``sum().backward()``, with the parameters' gradients already allocated. ``Run`` is the plain
model or anything called like it that trains the same parameters.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import ogc
from ogc.torch_state.allocator import peak_bytes
from ogc.torch_state.compare import same_bits

from .losses import Loss, summed

MIB = 2**20

Run = Callable[[torch.Tensor], Any]

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


class CheckFailed(Exception):
    """A model of ours computed something else than the plain one."""


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


def deterministic_if_possible(model: torch.nn.Module, inputs: torch.Tensor, loss: Loss | None = None) -> None:
    """On CUDA, insist on deterministic kernels if the model's step runs with them, else prefer them; for what follows.

    Where they are preferred alone, attention takes a kernel that adds up in any order. The model's parameters have
    gradients afterwards, which are zero.
    """
    if not inputs.is_cuda:
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


def step(run: Run, inputs: torch.Tensor, loss: Loss | None = None) -> list[torch.Tensor]:
    """One forward and backward; the outputs, detached."""
    result = run(inputs)
    (loss or summed)(result).backward()
    return [output.detach() for output in ([result] if isinstance(result, torch.Tensor) else list(result))]


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


def measure(model: torch.nn.Module, run: Run, inputs: torch.Tensor, seed: int, loss: Loss | None = None) -> Measured:
    """Two steps of ``run`` from the same state, for FLOPs and for memory; the model stays as it was."""
    counter = FlopCounter()
    with as_before(model), counter:
        step(run, inputs, loss)
    outputs: list[torch.Tensor] = []
    with as_before(model):
        torch.manual_seed(seed)
        peak = peak_bytes(lambda: outputs.extend(step(run, inputs, loss)), inputs.device)
        tensors = dict(_everything(model, outputs))
    return Measured(peak, counter.total, tensors)


def unrepeatable(
    model: torch.nn.Module, inputs: torch.Tensor, seed: int, plain: Measured, loss: Loss | None = None
) -> tuple[str, ...]:
    """Names of the tensors of which a second plain step gives other bits: they say nothing of another model.

    None where every kernel is deterministic.
    """
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        return ()
    again = measure(model, model, inputs, seed, loss)
    return tuple(name for name, value in plain.tensors.items() if not same_bits(value, again.tensors[name]))


def timed(
    run: Run, inputs: torch.Tensor, clock: Callable[[], float] = time.perf_counter, loss: Loss | None = None
) -> float:
    """Seconds of a step, by this clock."""
    return timed_call(lambda: step(run, inputs, loss), inputs, clock)


def timed_call(call: Callable[[], object], inputs: torch.Tensor, clock: Callable[[], float]) -> float:
    """Seconds of anything that runs on the inputs' device."""
    synchronize: Callable[[], None] = torch.cuda.synchronize if inputs.is_cuda else lambda: None
    with without_fills():
        synchronize()
        start = clock()
        call()
        synchronize()
        return clock() - start


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


def environment(command: str, device: torch.device, seed: int, keeps_freed_memory: bool) -> dict[str, Any]:
    """What results are written with."""
    return {
        "command": command,
        "versions": {"ogc": ogc.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": {
            "device": device_name(device),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),  # decides which kernels run there
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "system": platform.system(),
            "keeps_freed_memory": keeps_freed_memory,
        },
        "seed": seed,
    }


def code_digest() -> str:
    """What the library's files say, and which torch runs them, in short."""
    content = hashlib.sha256(torch.__version__.encode())
    for path in sorted(Path(ogc.__file__).parent.rglob("*.py")):
        content.update(path.read_bytes())
    return content.hexdigest()[:10]


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Whole or not at all; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _everything(model: torch.nn.Module, outputs: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((f"output {number}", output) for number, output in enumerate(outputs))
    yield from ((f"gradient of {name}", p.grad.clone()) for name, p in model.named_parameters() if p.grad is not None)
    yield from ((f"buffer {name}", buffer.clone()) for name, buffer in model.named_buffers())
    yield "random state", torch.get_rng_state()
    yield from ((f"random state of cuda:{n}", state) for n, state in enumerate(torch.cuda.get_rng_state_all()))
