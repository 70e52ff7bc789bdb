"""What a training step needs of a device beside activations, and with them.

What CUDA and its libraries take beside the tensors of a step is listed by name; none of it was measured here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch

from ..errors import InputError, SolveError
from ..given import memory_bytes
from ..graph import MIB, Graph, table
from ..parser import Loss, parse
from ..parser.arguments import call_arguments, check_model, device_of
from ..parser.opaque import NamesAndTypes
from ..plan import Plan
from ..plan.plan import plain_plan
from ..program.program import (
    SHARED,
    Gradients,
    Optimizer,
    TensorRef,
    device_of_model,
    each_storage_bytes,
    storage_bytes,
)
from ..program.structures import InputSpec
from ..solver import Budget, solve
from ..solver.goal import LEAST
from ..torch_state.ranks import own_part
from .allocator import AllocatorSettings, DeviceFullError
from .optimizers import alone_bytes, optimizer_bytes
from .requests import MemoryPeaks, Move, WholeStep, memory_peaks, plain_moves, requests
from .sharded import sharded

CACHING = {"cuda"}
"""Types of devices whose memory PyTorch's caching allocator hands out."""

ROOMY = "on a device with more room than the step needs, and beside the context"

KINDS = (
    *("parameters", "buffers", "gradients", "optimizer", "optimizer_step", "inputs", "gathered"),
    *("context", "cublas", "cudnn", "ddp_buckets"),
)


CONTEXT_BYTES = {"cuda": 600 * MIB}
"""What a process takes past the allocator: the driver's context and loaded kernels. A round figure above what is
commonly seen (300 to 500 MiB); it depends on card and driver."""

CUBLAS_BYTES, CUBLAS_LARGE_BYTES = 8320 * 1024, 32 * MIB
"""cuBLAS' workspace for each handle and stream: ``:4096:2:16:8``, in KiB, but 32 MiB from Hopper on. Source:
``parseChosenWorkspaceSize`` in aten/src/ATen/cuda/CublasHandlePool.cpp."""

CUBLAS_HANDLES = 2
"""Handles belong to threads (``getCurrentCUDABlasHandle`` in the same file): one of the forward's and one of the
backward's. cuBLASLt takes the same workspaces."""

CUDNN_BYTES = 64 * MIB
"""The workspace of a convolution or recurrent layer, a round figure: cuDNN has no documented limit. Where that does not
fit, PyTorch tries the next algorithm (``run_single_conv`` in aten/src/ATen/native/cudnn/Conv_v8.cpp).
"""

FIRST_BUCKET_BYTES, BUCKET_BYTES = MIB, 25 * MIB
"""DDP closes a bucket once it has so many bytes. Source: ``_DEFAULT_FIRST_BUCKET_BYTES`` of torch.distributed and
``bucket_cap_mb`` of DistributedDataParallel; ``compute_bucket_assignment_by_size`` in reducer.cpp."""

TRIES = 8
"""Smaller budgets that are tried where what is reserved does not fit, before the least peak."""

SHARE = 0.92
"""Of a plan's peak, the next budget."""

T = TypeVar("T")

USES_CUDNN = (
    *(torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d),
    *(torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d),
    *(torch.nn.RNN, torch.nn.LSTM, torch.nn.GRU),
)


@dataclass(frozen=True)
class Estimate:
    """Bytes that a training step needs on a device.

    The optimizer's step comes after the backward, when activations are gone but for outputs that the caller holds.

    Attributes:
        parameters, buffers: of the model, each storage once.
        gradients: of the parameters that are trained, once all are there.
        optimizer: what it holds from step to step.
        optimizer_step: the most that its step takes beside that, once the backward is over.
        first_step: the most that its first step takes, which makes what it holds.
        when: where gradients are, as :func:`ogc.parse` takes it: if ``"kept"``, throughout.
        inputs: the tensors of the sample input.
        context, cublas, cudnn: allowances for what CUDA and its libraries take.
        ddp_buckets: what DistributedDataParallel gathers gradients in.
        autocast: weights that autocast keeps in other types; they are among the activations.
        gathered: parameters and gradients of a unit, and of what is around all, that a sharded model gathers.
        tensors: bytes of each tensor that is there before a step, in the order in which they come to be, but inputs.
        plain: the peak of activations and their gradients in the plain model, with parameters' gradients that are not
            there throughout; None where it was not asked for.
        least: the plan with the least peak; None likewise.
        device: the type of the device.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    optimizer_step: int
    inputs: int
    context: int
    cublas: int
    cudnn: int
    device: str
    ddp_buckets: int = 0
    autocast: int = 0
    gathered: int = 0
    first_step: int = 0
    when: Gradients = "kept"
    tensors: tuple[int, ...] = field(default=(), repr=False)
    plain: int | None = None
    least: Plan | None = None

    @property
    def workspaces(self) -> int:
        """What libraries keep."""
        return self.cublas + self.cudnn

    @property
    def fixed(self) -> int:
        """Bytes that no plan changes, and that are there while activations are."""
        held = self.parameters + self.buffers + self.optimizer + self.inputs + self.ddp_buckets + self.gathered
        return held + self.context + self.workspaces + (self.gradients if self.when == "kept" else 0)

    def with_activations(self, peak_bytes: int, left_bytes: int | None = None, is_first: bool | None = None) -> int:
        """Bytes of the whole step where activations, and gradients that are not kept, peak at ``peak_bytes``.

        Args:
            peak_bytes: of forward and backward.
            left_bytes: of what these leave to the optimizer's step; without it gradients that are not kept.
            is_first: whether it is the first step; without it what all steps need.
        """
        left = (self.gradients if self.when == "none" else 0) if left_bytes is None else left_bytes
        first = self.fixed - self.optimizer + max(peak_bytes, left + self.first_step)
        later = self.fixed + max(peak_bytes, left + self.optimizer_step)
        first = first if isinstance(self.when, str) else later  # where the state is made within the backward
        return max(first, later) if is_first is None else (first if is_first else later)

    def bytes_of(self, plan: Plan, is_first: bool | None = None) -> int:
        """The same of a step by a plan; one of a model in parts knows no gradients of parameters, so all count."""
        graph = getattr(plan, "graph", None)
        if graph is None:
            made = 0 if isinstance(self.when, str) else self.optimizer_step
            made += self.gradients if self.when == "none" else 0
            return self.with_activations(plan.peak_bytes + made, is_first=is_first)
        outputs = sum(value.bytes for value in graph.values if value.is_output)
        return self.with_activations(plan.peak_bytes, graph.left_bytes + outputs, is_first)

    def step(self, moves: tuple[Move, ...]) -> WholeStep:
        """The whole step as CUDA's allocator sees it: what is there throughout comes first."""
        return WholeStep(moves, (*self.tensors, self.inputs), self.optimizer_step)

    def memory(self, settings: AllocatorSettings | None = None) -> MemoryPeaks | None:
        """What CUDA's allocator would give for whole steps, without the context; None where no plan was asked for.

        ``settings`` are the allocator's; without them those of this process.
        """
        if self.least is None or self.least.graph is None:
            return None
        settings = settings or AllocatorSettings.of_environment()
        return memory_peaks(self.least.graph, self.least.decisions, settings, self.step)

    @cached_property
    def plain_bytes(self) -> int:
        """Bytes of the plain model's step; on CUDA of the smallest device on which its allocator has room for it."""
        graph = None if self.least is None else self.least.graph
        return self.with_activations(self.plain or 0) if graph is None else needed_bytes(self, plain_plan(graph))

    @cached_property
    def least_bytes(self) -> int:
        """The same of the step by the plan with the least peak."""
        return self.with_activations(0) if self.least is None else needed_bytes(self, self.least)

    def __str__(self) -> str:
        names = {name: name.replace("_", " ") for name in KINDS if getattr(self, name)}
        if self.gradients:
            names["gradients"] += " (kept)" if self.when == "kept" else " (none before the backward)"
        rows = [[text, f"{getattr(self, name) / MIB:.1f}"] for name, text in names.items()]
        if self.least is not None:
            counted = "activations and gradients" if self.when == "none" else "activations"
            rows += [
                [f"{counted}, plain", f"{(self.plain or 0) / MIB:.1f}"],
                [f"{counted}, least", f"{self.least.peak_bytes / MIB:.1f}"],
            ]
        graph = None if self.least is None else self.least.graph
        if self.autocast:
            rows.append(["of these autocast's weights", f"{self.autocast / MIB:.1f}"])
        lines = [table([f"on {self.device}", "MiB"], rows)]
        if self.least is not None:
            plain, least = self.plain_bytes / 2**20, self.least_bytes / 2**20
            others = f"at least {least:.1f} MiB at +{self.least.overhead:.0%} time" if least < plain else "no plan less"
            lines.append(f"a plain step needs {plain:.1f} MiB, {others}")
            if self.optimizer and graph is not None:
                first = self.bytes_of(plain_plan(graph), is_first=True) / 2**20
                lines.append(f"the first one, before which the optimizer holds nothing, needs {first:.1f} MiB")
            if self.device in CACHING and (memory := self.memory()) is not None:
                lines.append(f"{memory}, {ROOMY}")
        return "\n".join(lines)


def estimate(
    model: torch.nn.Module,
    sample_input: Any,
    *,
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    device: torch.device | str | None = None,
    ddp: bool | str = False,
    gradients: str = "none",
    shards: int = 1,
    units: NamesAndTypes = (),
    **parsing: Any,
) -> Estimate:
    """What a training step needs: nothing is trained, and the forward runs with the memory of inference.

    Args:
        model, sample_input, loss: as for :func:`ogc.optimize`.
        optimizer: one of the model's parameters, or a class or function that makes one, such as
            ``torch.optim.AdamW``. Two steps of it are run on meta tensors.
        device: for this device instead of the model's own; it need not exist here.
        ddp: whether the model is trained in DistributedDataParallel; ``"views"`` with ``gradient_as_bucket_view=True``.
        gradients: ``"none"`` if they are set to None before each forward, as ``optimizer.zero_grad()`` does: the
            backward makes them one by one. ``"kept"`` if they are there in the forward too, with
            ``zero_grad(set_to_none=False)`` or where steps accumulate them. ``"freed"`` if the backward steps the
            optimizer, for each parameter by a hook that then sets its gradient to None.
        shards: over so many ranks ``fully_shard`` is to spread the model, none of which has to be here. Parameters,
            gradients and the optimizer's state are then one rank's part, all the time, and what is gathered counts.
        units: names and types of the submodules that it is applied to, beside the model itself.
        parsing: further arguments of :func:`ogc.parse`.

    Returns:
        The bytes of each part; printed, a table.

    Raises:
        InputError, ParseError: as :func:`ogc.parse` does, and where the optimizer is none.
    """
    needs = fixed_needs(model, sample_input, optimizer, device, ddp, gradients, shards, units)
    graph = parse(model, sample_input, loss=loss, device=device, gradients=needs.when, **parsing)
    least = solve(graph, memory_budget=LEAST)
    autocast = autocast_bytes(least.graph) if least.graph is not None else 0
    return replace(needs, plain=least.plain_peak_bytes, least=least, autocast=autocast)


def fixed_needs(
    model: torch.nn.Module,
    sample_input: Any,
    optimizer: Optimizer | None,
    device: torch.device | str | None = None,
    ddp: bool | str = False,
    gradients: str = "none",
    shards: int = 1,
    units: NamesAndTypes = (),
) -> Estimate:
    """What a step needs beside activations; raises InputError where an argument is of the wrong kind."""
    if gradients not in ("none", "kept", "freed"):
        raise InputError(f'gradients must be "none", "kept" or "freed", not {gradients!r}')
    if ddp not in (False, True, "views"):
        raise InputError(f'ddp must be True, False or "views", for gradient_as_bucket_view=True, not {ddp!r}')
    check_model(model, may_lack_content=device is not None)  # what parses it says for which devices
    tensors = InputSpec.of(*call_arguments(sample_input))[1]
    target, gathered = device_of_model(model, tensors) if device is None else device_of(device), 0
    if shards != 1 or units:
        one = sharded(model, shards, units, optimizer, gradients)
        model, gathered, gradients = one.model, one.gathered, "kept"
    found, trained = optimizer_bytes(model, optimizer, target), [p for p in model.parameters() if p.requires_grad]
    sizes, buckets = [own_part(p).nbytes for p in trained], bucket_bytes(trained) if ddp else ()
    if ddp == "views":
        gradients = "kept"  # buckets are there throughout, and gradients are parts of them
    when: Gradients = "none" if gradients == "none" else "kept"
    working = found.working
    if gradients == "freed":
        when = alone_bytes(model, optimizer, target)
        working = max(when.values(), default=0)
    libraries, cudnn = cublas_bytes(target), cudnn_bytes(model, target)
    held = each_storage_bytes(map(own_part, model.parameters())), each_storage_bytes(model.buffers())
    apart = sizes if when == "kept" and ddp != "views" else ()  # else they are parts of buckets
    return Estimate(
        parameters=sum(held[0]),
        buffers=sum(held[1]),
        gradients=sum(sizes) if gradients != "freed" else 0,
        optimizer=found.state,
        optimizer_step=working,
        first_step=found.first,
        when=when,
        inputs=input_bytes(sample_input),
        context=CONTEXT_BYTES.get(target.type, 0),
        cublas=sum(libraries),
        cudnn=cudnn,
        ddp_buckets=0 if ddp == "views" else sum(buckets),
        gathered=gathered,
        device=target.type,
        tensors=(*held[0], *held[1], *libraries, cudnn, *apart, *buckets, *found.tensors, *[gathered] * (gathered > 0)),
    )


def input_bytes(sample_input: Any) -> int:
    """Bytes of the tensors of a sample input."""
    return storage_bytes(InputSpec.of(*call_arguments(sample_input))[1])


def activation_budget(needs: Estimate, device_memory: Budget) -> int:
    """Bytes that a device of this size leaves for activations; 0 where it is too small for the rest."""
    room = memory_bytes(device_memory, "device_memory")
    return room - needs.fixed if room > needs.with_activations(0) else 0


def cublas_bytes(device: torch.device) -> tuple[int, ...]:
    """cuBLAS' workspaces: those of the card where it is there, else the larger ones."""
    if device.type != "cuda":
        return ()
    is_large = not torch.cuda.is_available() or torch.cuda.get_device_capability(device)[0] >= 9
    return (CUBLAS_LARGE_BYTES if is_large else CUBLAS_BYTES,) * CUBLAS_HANDLES


def cudnn_bytes(model: torch.nn.Module, device: torch.device) -> int:
    """cuDNN's workspace, where a module of the model calls it."""
    return CUDNN_BYTES * (device.type == "cuda" and any(isinstance(one, USES_CUDNN) for one in model.modules()))


def bucket_bytes(parameters: Iterable[torch.nn.Parameter]) -> tuple[int, ...]:
    """DDP's buckets, each one tensor: gradients in the order in which they come, by type."""
    return tuple(_buckets([p for p in parameters if p.requires_grad]))


def _buckets(parameters: list[torch.nn.Parameter]) -> Iterator[int]:
    filled: dict[torch.dtype, int] = {}
    closed: set[torch.dtype] = set()
    for parameter in reversed(parameters):
        kind = parameter.dtype
        filled[kind] = filled.get(kind, 0) + own_part(parameter).nbytes
        if filled[kind] >= (BUCKET_BYTES if kind in closed else FIRST_BUCKET_BYTES):
            closed.add(kind)
            yield filled.pop(kind)
    yield from filled.values()


def autocast_bytes(graph: Graph) -> int:
    """Weights in the types that autocast casts them to, which it keeps until the forward is done."""
    if graph.program is None:
        return 0
    casts = (node for node in graph.program.graph.nodes if node.meta.get(SHARED))
    return sum(graph.values[v].bytes for v in {graph.program.storages[TensorRef(node.name, 0)] for node in casts})


def moves_of(plan: Plan) -> tuple[Move, ...] | None:
    """What a plan's step asks the allocator for; None where that is not known: in parts, or plain beside chunks."""
    graph = getattr(plan, "graph", None)  # that of a model in parts has none
    if graph is None:
        return None
    return plain_moves(graph) if plan.is_plain else requests(graph, plan.decisions).moves


def used_bytes(needs: Estimate, plan: Plan, room: int | None = None) -> int:
    """The most bytes of a device that whole steps take; ``room`` is what it has, None for no limit.

    Raises:
        DeviceFullError: CUDA's allocator finds no room, though it gives back what it can.
    """
    if needs.device not in CACHING or (moves := moves_of(plan)) is None:
        return needs.bytes_of(plan)
    left = None if room is None else max(0, room - needs.context)
    return needs.context + needs.step(moves).peaks(AllocatorSettings.of_environment(), left).reserved


def needed_bytes(needs: Estimate, plan: Plan) -> int:
    """Bytes of the smallest device on which whole steps run, on CUDA to 1 %."""
    if needs.device not in CACHING or (moves := moves_of(plan)) is None:
        return needs.bytes_of(plan)
    return needs.context + needs.step(moves).needed_bytes(AllocatorSettings.of_environment())


def fits(needs: Estimate, plan: Plan, room: int) -> bool:
    """Whether whole steps fit on a device of ``room`` bytes."""
    try:
        return used_bytes(needs, plan, room) <= room
    except DeviceFullError:
        return False


def within_device(needs: Estimate, device_memory: Budget, plan: Callable[[int], T], plan_of: Callable[[T], Plan]) -> T:
    """What ``plan`` returns for the budget that a device of this size leaves for activations.

    On CUDA smaller budgets are tried until what the allocator reserves fits too. ``plan_of`` gives the plan of what
    ``plan`` returned.

    Raises:
        SolveError: nothing fits; the message says which device would do, where that is known.
    """
    room = memory_bytes(device_memory, "device_memory")
    budget = activation_budget(needs, device_memory) or 1
    try:
        return made_within(needs, room, budget, plan, plan_of)
    except SolveError as error:
        if error.least_peak_bytes is None:
            raise
        least = needed_bytes(needs, plan_of(plan(error.least_peak_bytes)))
        which = "one that would do has" if needs.device in CACHING else "the smallest that would do has"
        raise SolveError(
            f"no plan fits on a device of {room / MIB:.1f} MiB; {which} "
            f"{least / MIB:.1f} MiB, of which activations take {error.least_peak_bytes / MIB:.1f} MiB:\n{needs}"
        ) from error


def made_within(needs: Estimate, room: int, budget: int, plan: Callable[[int], T], plan_of: Callable[[T], Plan]) -> T:
    """What ``plan`` returns for a budget; on CUDA for the first of falling ones, down to the least peak, that fits.

    Raises:
        SolveError: nothing fits.
    """
    found = plan(budget)
    if needs.device not in CACHING:
        if (beyond := needs.bytes_of(plan_of(found)) - room) > 0:  # such as gradients, of which parts know nothing
            found = plan(max(1, plan_of(found).peak_bytes - beyond))
        if not fits(needs, plan_of(found), room):
            raise SolveError(f"no plan fits on a device of {room / MIB:.1f} MiB, where the optimizer's step does not")
        return found
    for number in range(TRIES + 1):
        if fits(needs, plan_of(found), room):
            return found
        budget = max(1, int(SHARE * min(budget, plan_of(found).peak_bytes))) if number < TRIES else 1
        try:
            found = plan(budget)
        except SolveError as error:
            least = error.least_peak_bytes
            if least is None:
                raise
            found = plan(least)
            if fits(needs, plan_of(found), room):
                return found
            raise
    raise SolveError(f"no plan fits on a device of {room / MIB:.1f} MiB, by what CUDA's allocator reserves")
