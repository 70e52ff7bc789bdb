"""Trains a model of the zoo beside its optimised self, and says what became of it.

The verifier reads nothing of the library but its own errors, the plan and the allocator's events.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

import ogc
from benchmarks.zoo.models import Subject
from ogc.program.opaque import OpaqueCall
from ogc.torch_state.allocator import peak_bytes

STEPS = 3
SEED = 3
LARGE = 30_000_000  # parameters, from which on the optimizer keeps no moments


@dataclass
class Training:
    """What a few steps gave, as digests by name, and the peak of one more step."""

    digests: dict[str, str] = field(default_factory=dict)
    finite: bool = True
    peak: int = 0

    def record(self, name: str, value: object) -> None:
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
            self.finite = self.finite and bool(value.detach().isfinite().all())
        self.digests[name] = digest(value)


def digest(value: object) -> str:
    """The same for the same bits, type and shape."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    tensor = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    content = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    content.update(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return content.hexdigest()


def row_of(build: Callable[[], Subject], plain_only: bool = False) -> dict[str, Any]:
    """The row of a model: a verdict, what it is about, and the figures there are."""
    try:
        found, plain = _plainly(build)
    except Exception as error:  # what cannot be trained plainly says nothing of us
        return {"verdict": "plain cannot", "detail": _text(error)}
    if plain_only:
        return {"verdict": "plain", "detail": "" if plain.finite else "not all is finite", **found}
    own = difference(plain, _plainly(build)[1])
    try:
        ours, planned = _ours(build)
    except ogc.OgcError as error:
        return {"verdict": "refused", "detail": _text(error), **found}
    except Exception as error:  # any model may fail in any way: that is what is found out here
        return {"verdict": "error", "detail": _text(error), **found}
    said = difference(plain, ours)
    if said and own:
        return {"verdict": "plain cannot", "detail": f"it differs from itself: {own}", **found, **planned}
    detail = said or ("" if plain.finite else "not all is finite")
    return {"verdict": "different" if said else "equal", "detail": detail, **found, **planned}


def _built(build: Callable[[], Subject]) -> Subject:
    _seed(0)
    subject = build()
    subject.model.train()
    return subject


def _plainly(build: Callable[[], Subject]) -> tuple[dict[str, Any], Training]:
    """What a model is, and its training; nothing of it stays in memory."""
    subject = _built(build)
    training = train(subject, subject.model)
    return {**_description(subject), "plain_bytes": training.peak}, training


def _seed(number: int) -> None:
    torch.manual_seed(number)
    numpy.random.seed(number)
    random.seed(number)


def _text(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:600]}"


def _description(subject: Subject) -> dict[str, Any]:
    shapes = [f"{name} {list(value.shape)}" for name, value in tensors_in(subject.batch(0), "")]
    return {
        **({"part": subject.part} if subject.part else {}),
        **({"note": subject.note} if subject.note else {}),
        "model": type(subject.model).__name__,
        "parameters": sum(p.numel() for p in subject.model.parameters()),
        "inputs": [shape.lstrip(".") for shape in shapes],
    }


def _ours(build: Callable[[], Subject]) -> tuple[Training, dict[str, Any]]:
    """The training of the optimised model, and what was planned."""
    subject = _built(build)
    sample = _sample_of(_built(build)) if subject.part else subject.batch(0)
    original = subject.model.get_submodule(subject.part)
    start = time.perf_counter()
    optimised = ogc.optimize(original, sample, profile="estimate", memory_budget="least")
    seconds = time.perf_counter() - start
    plan: Any = optimised.plan
    graphs: Any = optimised.graph
    graphs = graphs if isinstance(plan, ogc.PartsPlan) else {"": graphs}
    opaque = [one for name, graph in graphs.items() for one in _opaque_of(name, graph)]
    run = optimised if not subject.part else _with(subject.model, subject.part, optimised)
    training = train(subject, run)
    return training, {
        "ogc_bytes": training.peak,
        "predicted_plain_bytes": plan.plain_peak_bytes,
        "predicted_bytes": plan.peak_bytes,
        "overhead": plan.overhead,
        "plan_seconds": seconds,
        "parts": len(plan.parts) if isinstance(plan, ogc.PartsPlan) else 1,
        "operations": sum(map(len, graphs.values())),
        "opaque_modules": len(opaque),
        **_largest(original, opaque),
    }


def _opaque_of(part: str, graph: Any) -> list[str]:
    """The submodules that a part calls as they are, by their names in the model."""
    targets = [node.target for node in graph.program.operations]
    names = [target.submodule for target in targets if isinstance(target, OpaqueCall) and target.submodule is not None]
    return [f"{part}.{name}" if part else name for name in names]


def _largest(model: torch.nn.Module, opaque: list[str]) -> dict[str, Any]:
    """The opaque module with the most parameters, and its share of all of the model's."""

    def count(module: torch.nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    if not opaque:
        return {"largest_opaque": "", "opaque_share": 0.0}
    largest = max(opaque, key=lambda name: count(model.get_submodule(name)))
    return {"largest_opaque": largest, "opaque_share": count(model.get_submodule(largest)) / max(1, count(model))}


def _sample_of(twin: Subject) -> Any:
    """How the model calls its part. Another one is asked, as statistics move in training mode."""
    calls: list[Any] = []

    def note(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert not (args and kwargs), "a part is called with positional or with keyword arguments"
        calls.append(args or kwargs)

    twin.model.get_submodule(twin.part).register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        call(twin.model, twin.batch(0))
    return calls[0]


def _with(model: torch.nn.Module, part: str, replacement: torch.nn.Module) -> torch.nn.Module:
    around, _, name = part.rpartition(".")
    setattr(model.get_submodule(around), name, replacement)
    return model


def call(run: torch.nn.Module, batch: Any) -> Any:
    return run(**batch) if isinstance(batch, dict) else run(*batch)


def train(subject: Subject, run: torch.nn.Module) -> Training:
    """A few optimizer steps of ``run``, whose parameters are those of the subject's model, on changing data."""
    model, training = subject.model, Training()
    parameters = [p for p in model.parameters() if p.requires_grad]
    large = sum(p.numel() for p in parameters) > LARGE
    optimizer = torch.optim.SGD(parameters, lr=1e-2) if large else torch.optim.AdamW(parameters, lr=1e-3)
    for name, tensor in _state(model):
        training.record(f"{name} at the start", tensor)
    for step in range(STEPS):
        batch = subject.batch(step)
        _seed(SEED + step)
        optimizer.zero_grad()
        result = call(run, batch)
        loss = loss_of(result)
        training.record(f"loss of step {step}", loss)
        for name, value in tensors_in(result, ""):
            training.record(f"output {name.lstrip('.')} of step {step}", value)
        del result
        loss.backward()
        for name, parameter in model.named_parameters():
            training.record(f"gradient of {name} in step {step}", parameter.grad)
        optimizer.step()
        for name, tensor in _state(model):
            training.record(f"{name} after step {step}", tensor)
        states = (torch.get_rng_state(), repr(numpy.random.get_state()), hash(random.getstate()))
        for kind, state in zip(("torch", "numpy", "python"), states, strict=True):
            training.record(f"random state of {kind} after step {step}", state)
    training.peak = _peak(subject, run)
    return training


def _peak(subject: Subject, run: torch.nn.Module) -> int:
    """Of one more step, which finds the gradients of parameters allocated and holds on to the outputs."""
    batch = subject.batch(0)

    def step() -> None:
        result = call(run, batch)
        loss_of(result).backward()

    _seed(SEED)
    return peak_bytes(step, "cpu")


def _state(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def loss_of(result: Any) -> torch.Tensor:
    """The result's own loss, or the sum of the means of its floating tensors."""
    loss = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return loss.mean()
    parts = [value for _, value in tensors_in(result, "") if isinstance(value, torch.Tensor) and value.requires_grad]
    if not parts:
        raise ValueError("no output needs a gradient")
    return torch.stack([(p.abs() if p.is_complex() else p).mean().float() for p in parts]).sum()


def tensors_in(value: Any, name: str, around: tuple[int, ...] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in a result by their path, those that objects hold among them."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif id(value) in around or isinstance(value, (torch.nn.Module, type)):
        return
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(item, f"{name}.{key}", (*around, id(value)))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from tensors_in(item, f"{name}.{number}", (*around, id(value)))
    elif hasattr(value, "__dict__") and not callable(value):
        yield from tensors_in(vars(value), name, (*around, id(value)))


def difference(plain: Training, ours: Training) -> str:
    """The first of them in which two trainings differ; empty if none."""
    for name, found in plain.digests.items():
        if name not in ours.digests:
            return f"{name} is missing"
        if ours.digests[name] != found:
            return name
    more = [name for name in ours.digests if name not in plain.digests]
    return f"{more[0]} is there too" if more else ""
