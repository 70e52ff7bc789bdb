"""Ways to train one model, side by side: peaks by the allocator, times in turn with the plain model's.

A way is a function without arguments that returns a forward, and the plan behind it where there is one. A forward takes
no arguments either and returns something that has a ``loss``; what else that holds is held until the step has ended.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import ogc
from ogc.torch_state.allocator import peak_bytes

from .measuring import allocate_gradients, environment, write_json
from .timing.rounds import in_turn, one_thread

Inputs = tuple[torch.Tensor, ...]
Forward = Callable[[], Any]
Way = Callable[[], tuple[Forward, "ogc.Plan | None"]]


@dataclass(frozen=True)
class Row:
    """One way to train a subject.

    Attributes:
        subject: the model and its input.
        way: what saves memory.
        peak_bytes: of the allocator, over one step whose output is held.
        promised_bytes, promised: what a plan of ogc's says of peak and overhead.
        recomputed: the share of the plain step that it runs again.
        paid: what the median step takes more than the plain one, as a share.
        distance: the most by which a gradient is off, as a share of its largest entry.
        reason: why there are no figures.
    """

    subject: str
    way: str
    peak_bytes: int = 0
    promised_bytes: int | None = None
    promised: float | None = None
    recomputed: float | None = None
    paid: float = 0.0
    distance: float = 0.0
    reason: str = ""


def rows(subject: str, model: nn.Module, ways: Mapping[str, Way], rounds: int) -> list[Row]:
    """A row for each way, the first of which is the plain model: first the peaks, then the time of all in turn."""
    found: dict[str, Row] = {}
    forwards: dict[str, Forward] = {}
    plain: dict[str, torch.Tensor] = {}
    allocate_gradients(model)
    for way, make in ways.items():
        print(f"{subject}: {way}", file=sys.stderr)
        found[way] = Row(subject, way)
        try:
            forward, plan = make()
            gradients = _gradients(model, forward)
        except Exception as error:  # of a peer's, such as no compiler: the others are all the same
            found[way] = replace(found[way], reason=f"{type(error).__name__}: {error}".splitlines()[0])
            continue
        plain = plain or gradients
        forwards[way] = forward
        found[way] = replace(
            found[way] if plan is None else _promised(found[way], plan),
            peak_bytes=int(peak_bytes(partial(_step, forward), torch.device("cpu"))),
            distance=max(float((gradients[n] - g).abs().max() / g.abs().max()) for n, g in plain.items()),
        )
    seconds = in_turn({way: partial(_timed, forward) for way, forward in forwards.items()}, rounds, 0.0)
    base = seconds[next(iter(ways))]
    paid = {way: median(own / p for own, p in zip(s, base, strict=True)) - 1 for way, s in seconds.items()}
    return [replace(row, paid=paid.get(way, 0.0)) for way, row in found.items()]


def _promised(row: Row, plan: ogc.Plan) -> Row:
    recomputed = plan.recomputed_seconds / plan.step_seconds
    return replace(row, promised_bytes=plan.peak_bytes, promised=plan.overhead, recomputed=recomputed)


def _gradients(model: nn.Module, forward: Forward) -> dict[str, torch.Tensor]:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    torch.manual_seed(0)  # for dropout
    _step(forward)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _step(forward: Forward) -> Any:
    output = forward()
    output.loss.backward()
    return output


def _timed(forward: Forward) -> float:
    start = time.process_time()
    _step(forward)
    return time.process_time() - start


def with_loss(run: Callable[..., Any], inputs: Inputs, loss: Callable[[Any], torch.Tensor]) -> argparse.Namespace:
    """What a forward returns: the output of ``run``, and its loss."""
    output = run(*inputs)
    return argparse.Namespace(loss=loss(output), output=output)


def measured(
    subjects: Mapping[str, Callable[[], tuple[nn.Module, Inputs]]],
    ways_of: Callable[[nn.Module, Inputs], Mapping[str, Way]],
) -> Callable[[str, int], list[Row]]:
    """For :func:`main`: the rows of a subject, which is a model and its inputs, by all its ways."""

    def measure(subject: str, rounds: int) -> list[Row]:
        torch.manual_seed(0)
        model, inputs = subjects[subject]()
        return rows(subject, model.train(), ways_of(model, inputs), rounds)

    return measure


def compiled(model: nn.Module, budget: float = 1.0) -> Callable[..., Any]:
    """The model in torch.compile, with a budget for what its activations take.

    Each has a backend of its own: compiled code is found again by its function and its backend, so that two budgets
    of one model would otherwise share the code of the one that was called first.
    """
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    torch._dynamo.config.recompile_limit = 64  # of one function, all its backends together

    def backend(graph: Any, inputs: Any) -> Any:
        with config.patch(activation_memory_budget=budget):
            return compile_fx(graph, inputs)

    return torch.compile(model, backend=backend)


def main(module: str, about: str | None, default: Sequence[str], measure: Callable[[str, int], Iterable[Row]]) -> int:
    """Measure, print, and write what was found.

    Args:
        module: its name, for the command.
        about: its docstring.
        default: the subjects.
        measure: the rows of a subject, with so many rounds.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subjects", nargs="*", default=default, help=f"of {', '.join(default)}; all if none is named")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--rounds", type=int, default=7, help="how often each way is timed")
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peers' own
        for subject in options.subjects:
            for row in measure(subject, options.rounds):
                found.append(asdict(row))
                figures = f"{row.peak_bytes / 2**20:8.1f} MiB {row.paid:+7.1%}"
                print(f"{row.subject:>22} {row.way:<28} {row.reason or figures}")
        command = shlex.join(["python", "-m", module, *sys.argv[1:]])
        around = environment(command, torch.device("cpu"), 0, False)
    if options.json:
        write_json(options.json, {**around, "rows": found})
    return 0
