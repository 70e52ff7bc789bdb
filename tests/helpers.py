"""What several tests share: random graphs, the brute-force solver, and the plain-model oracle."""

from __future__ import annotations

import copy
import inspect
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import ogc
from ogc.graph import Graph, Operation, Value
from ogc.plan.decisions import Decisions, Policy, Segment, cut_into_segments
from ogc.program.structures import OutputSpec
from ogc.runtime.runner import Runner
from ogc.torch_state.allocator import peak_bytes


def seeds(few: int, many: int) -> list[Any]:
    """So many in the default tier, and all in the full one."""
    return [*range(few), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(few, many))]


def random_graph(seed: int, most: int = 8) -> Graph:
    """A seeded DAG with shared values, in-place groups, outputs, internals, values saved by several."""
    rng = random.Random(seed)
    values: list[Value] = []
    operations: list[Operation] = []
    saved: set[int] = set()
    gone: set[int] = set()  # taken over by another value
    least_gradients, range_of_gradients = rng.randrange(20), rng.choice([1, 1, 30])
    for t in range(rng.randrange(2, most + 1)):
        reads: list[int] = []
        if values:
            near = max(0, len(values) - 4)
            reads = sorted(
                {rng.randrange(near if rng.random() < 0.8 else 0, len(values)) for _ in range(rng.choice([1, 1, 2, 3]))}
                - gone
            )
        changeable = [v for v in reads if v not in saved]
        taken = None
        if changeable and rng.random() < 0.25:
            writes = [rng.choice(changeable)]
        elif changeable and rng.random() < 0.2 and not values[changeable[-1]].is_output:
            taken = changeable[-1]
            values.append(Value(f"v{len(values)}", values[taken].bytes))
            writes = [len(values) - 1]
            gone.add(taken)
        else:
            writes = []
            for _ in range(rng.choice([1, 1, 1, 2])):
                size = rng.choice([0, 1, 2, 3, 5, 8, 13, 100])
                values.append(Value(f"v{len(values)}", size, is_output=rng.random() < 0.08))
                writes.append(len(values) - 1)
        saves = [v for v in sorted({*reads, *writes} - {taken}) if rng.random() < 0.45]
        saved.update(saves)
        operations.append(
            Operation(
                f"op{t}",
                reads=tuple(reads),
                writes=tuple(writes),
                saves=tuple(saves),
                internal_bytes=rng.choice([0, 0, 0, 0, 1, 4]),
                scratch_bytes=rng.choice([0, 0, 3]),
                gradient_bytes=least_gradients + rng.randrange(range_of_gradients),
                backward_bytes=rng.randrange(60),
                late_bytes=rng.choice([0, 0, 0, rng.randrange(60)]),
                forward_seconds=rng.choice([1, 2, 5, 0.5]),
                backward_seconds=1,
                repeat_seconds=0.25 if t % 3 == 0 else None,
                replayable=rng.random() > 0.06,
                takes_over=taken,
            )
        )
    return Graph(tuple(operations), tuple(values))


def chain(sizes: list[int], **weights: int) -> Graph:
    """Operations in a row, each saving what it reads, as convolutions do."""
    operations = tuple(
        Operation(
            f"op{t}",
            reads=(t - 1,) if t else (),
            writes=(t,),
            saves=(t - 1,) if t else (),
            forward_seconds=1.0,
            backward_seconds=2.0,
            **weights,
        )
        for t in range(len(sizes))
    )
    values = tuple(Value(f"v{t}", size, is_output=t == len(sizes) - 1) for t, size in enumerate(sizes))
    return Graph(operations, values)


class Function(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: object) -> object:
        return self.function(*args)


def forced(model: torch.nn.Module, sample: object, pieces: int = 3, **options: str) -> torch.nn.Module:
    """The model cut into about equal pieces, all recomputed, in low-memory variants, whether that pays or not."""
    graph = ogc.parse(model, sample, **options)  # type: ignore[arg-type]
    inner = list(graph.cuts[1:-1])
    step = max(1, len(inner) // pieces)
    cuts = [0, *inner[step - 1 :: step], len(graph)]
    plan = ogc.make_plan(graph, cut_into_segments(cuts, [True] * (len(cuts) - 1)), low_memory=graph.low_memory)
    return ogc.apply(model, graph, plan)


def runner_of(optimised: Any) -> Runner:
    """What chooses the plans of an optimized module."""
    functions, found = [type(optimised).forward], None
    while found is None:  # torch.compile is kept out of the one that has it
        cells = [cell.cell_contents for cell in functions.pop().__closure__ or ()]
        found = next((cell for cell in cells if isinstance(cell, Runner)), None)
        functions += filter(inspect.isfunction, cells)
    return found


def random_tree(
    graph: ogc.Graph, rng: random.Random, cuts: tuple[int, ...] | None = None, depth: int = 0
) -> tuple[Segment, ...]:
    """Segments over ``cuts``, saved, recomputed or nested at random, with values kept in some."""
    cuts = graph.cuts if cuts is None else cuts
    inner = sorted(rng.sample(cuts[1:-1], rng.randint(0, min(3, len(cuts) - 2))))
    edges = [cuts[0], *inner, cuts[-1]]
    segments = []
    for start, stop in pairwise(edges):
        within = tuple(c for c in cuts if start <= c <= stop)
        chance = rng.random()
        kept = [v for v in random_values(graph, rng) if start <= graph.producers[v] < stop]
        if chance < 0.5 and depth < 3 and len(within) > 2:
            segments.append(ogc.recomputed(start, stop, *random_tree(graph, rng, within, depth + 1), saved_values=kept))
        else:
            segments.append(ogc.recomputed(start, stop, saved_values=kept) if chance < 0.8 else ogc.saved(start, stop))
    return tuple(segments)


def random_decisions(graph: ogc.Graph, rng: random.Random) -> Decisions:
    """A random tree with any policy for some values, in the program and within segments."""

    def some(start: int, stop: int) -> tuple[tuple[int, Policy], ...]:
        inside = (v for v, t in enumerate(graph.producers) if start <= t < stop)
        return tuple((v, rng.choice((Policy.SAVED, Policy.RECOMPUTED))) for v in inside if rng.random() < 0.3)

    def decided(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
        return tuple(
            replace(s, parts=decided(s.parts), policies=some(s.start, s.stop)) if s.parts else s for s in segments
        )

    return Decisions(decided(random_tree(graph, rng)), some(0, len(graph)))


def tree_and_values(graph: ogc.Graph, rng: random.Random) -> Decisions:
    """A random tree, and random values that are recomputed."""
    return Decisions.of(random_tree(graph, rng)).recomputing(random_values(graph, rng))


def random_plans(
    graph: ogc.Graph, rng: random.Random, count: int, decide: Callable[..., Any] = tree_and_values
) -> list[ogc.Plan]:
    """So many plans without any sense, which no solver would try; those that may not be run are thrown away.

    Raises:
        AssertionError: so many are not found, and what was to be verified by them would not be.
    """
    found: list[ogc.Plan] = []
    for _ in range(40 * count):
        if len(found) < count:
            with suppress(ogc.PlanError):
                variants = [t for t in graph.low_memory if rng.random() < 0.5]
                found.append(ogc.make_plan(graph, decide(graph, rng), low_memory=variants))
    assert len(found) == count, f"{len(found)} of {count} random plans may be run"
    return found


def random_values(graph: ogc.Graph, rng: random.Random) -> list[int]:
    """About a third of the values, to be recomputed or saved, or none."""
    return [v for v in range(len(graph.values)) if rng.random() < 0.3] if rng.random() < 0.8 else []


def tensors_of(result: object) -> list[torch.Tensor]:
    return OutputSpec.of(result)[1]


def measured_peak(model, inputs, loss=None, holds_outputs=False, named=None):
    """Peak bytes of a training step by the allocator, gradients of parameters not counted."""
    loss = loss or loss_of
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None

    def step():
        if not holds_outputs:
            return loss(model(*inputs, **(named or {}))).backward()
        output = model(*inputs, **(named or {}))
        loss(output).backward()
        return output

    step()
    return peak_bytes(step, next(model.parameters()).device)


def loss_of(result: object) -> torch.Tensor:
    parts = [t for t in tensors_of(result) if t.requires_grad]
    return sum((t.square().sum() if t.is_floating_point() else t.abs().sum() for t in parts), torch.zeros(()))


def trace_of_training(
    model: torch.nn.Module, run: torch.nn.Module, inputs: tuple, steps: int = 3
) -> list[torch.Tensor]:
    """Outputs, gradients, buffers, parameters and random state over a few SGD steps of ``run``.

    ``model`` owns the parameters; it is put back to where it was.
    """
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen: list[torch.Tensor] = []
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        result = run(*inputs)
        loss_of(result).backward()
        seen += [t.detach().clone() for t in tensors_of(result)]
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        seen += [t.grad.clone() for t in tensors_of(inputs) if t.grad is not None]
        optimizer.step()
        seen += [t.clone() for t in model.state_dict().values()]
        seen.append(torch.get_rng_state())
    model.load_state_dict(start)
    model.zero_grad()
    for tensor in tensors_of(inputs):
        tensor.grad = None
    return seen


def assert_same_training(model: torch.nn.Module, optimised: torch.nn.Module, inputs: tuple, steps: int = 3) -> None:
    """Bitwise the same outputs, gradients, buffers, parameters and random stream as the plain model."""
    plain = trace_of_training(model, model, inputs, steps)
    ours = trace_of_training(model, optimised, inputs, steps)
    assert len(plain) == len(ours)
    for number, (a, b) in enumerate(zip(plain, ours, strict=True)):
        assert torch.equal(a, b), f"tensor {number} of {len(plain)} differs by {(a.double() - b.double()).abs().max()}"


def assert_same_step(
    optimised: torch.nn.Module, model: torch.nn.Module, *inputs: object, loss: Callable[..., torch.Tensor] = loss_of
) -> None:
    """Bitwise the same outputs, gradients, buffers and random numbers of a step as the plain model, layout included.

    The gradients and buffers of the step stay.
    """
    before = [buffer.clone() for buffer in model.buffers()]
    plain, ours = (_step_from(before, run, model, copy.deepcopy(inputs), loss) for run in (model, optimised))
    shapes = [list(tensor.shape) for tensor in tensors_of(inputs)]
    assert len(plain) == len(ours) and all(map(torch.equal, ours, plain)), shapes
    assert [t.stride() for t in ours] == [t.stride() for t in plain], shapes


def _step_from(
    before: list, run: torch.nn.Module, model: torch.nn.Module, inputs: tuple, loss: Callable[..., torch.Tensor]
) -> list[torch.Tensor]:
    model.zero_grad()
    for buffer, value in zip(model.buffers(), before, strict=True):
        buffer.data.copy_(value)
    torch.manual_seed(2)
    result = run(*inputs)
    loss(result).backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [*tensors_of(result), *gradients, *(buffer.clone() for buffer in model.buffers()), torch.rand(2)]


def run_apart(function: Callable[[], object]) -> None:
    """Run a function of a test file in a process of its own, as after an error inside torch.compile PyTorch's own frame
    evaluation stays on, for which Python holds arguments longer: what other tests measure would be more.
    """
    file = Path(inspect.getfile(function))
    paths = [str(file.parent), str(Path(__file__).parent), str(Path(__file__).parents[1])]
    code = f"import sys; sys.path[:0] = {paths!r}; import {file.stem}; {file.stem}.{function.__name__}()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not done.returncode, done.stderr
