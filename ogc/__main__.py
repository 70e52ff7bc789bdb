"""``python -m ogc``: what a model needs, the plan for it and the curve of its plans, also for a GPU that is not there.

Everything that goes wrong is one line on the standard error, and exit status 2.
"""

from __future__ import annotations

import sys
import traceback
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module, util
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch

from .errors import InputError, OgcError, SolveError, optional
from .given import memory_bytes
from .graph import MIB, Graph
from .parser import parse
from .parser.arguments import device_of
from .plan import Frontier, Plan, plain_plan
from .program.program import Gradients, Loss
from .solver import frontier, solve

EPILOG = """\
FACTORY is a function without arguments that returns (model, sample_input) or (model, sample_input, loss), as
ogc.optimize takes them. Where the device is CUDA and not there, or --gpu names one, it is called on the meta device:
nothing is allocated."""


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _size(text: str) -> int:
    try:
        return memory_bytes(text, "it")
    except InputError:
        raise ArgumentTypeError(f"{text!r} is no size: give bytes, or a text like '24GB' or '8GiB'") from None


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < float("inf"):
        raise ArgumentTypeError(f"{text!r} is no share of a step's time, such as 0.2")
    return share


def _arguments() -> ArgumentParser:
    parser = _Parser("python -m ogc", description=__doc__.partition("\n")[0], epilog=EPILOG)
    commands = parser.add_subparsers(dest="command", required=True, metavar="estimate|plan|frontier")
    for name, told in (
        ("estimate", "what a training step needs, part by part, and whether it fits"),
        ("plan", "the plan for a budget, or within an overhead"),
        ("frontier", "the curve of memory against overhead"),
    ):
        command = commands.add_parser(name, help=told, description=told, epilog=EPILOG)
        command.add_argument("factory", metavar="MODULE:FACTORY", help="a module or a .py file, and a function in it")
        command.add_argument("--device", help="such as cuda; without it the model's own, or cuda with --gpu")
        command.add_argument("--gpu", help="the GPU that cuda means, such as H100")
        command.add_argument(
            "--budget", "--device-memory", type=_size, metavar="SIZE", help="what the device has for the whole step"
        )
        command.add_argument("--optimizer", help="whose state counts: of torch.optim, such as AdamW, or MODULE:NAME")
        if name != "estimate":
            command.add_argument(
                "--max-overhead", type=_share, metavar="SHARE", help="of a plain step's time that a plan may add"
            )
        if name == "plan":
            command.add_argument("--html", metavar="FILE", help="write a page that shows the plan")
            command.add_argument(
                "--snapshot", metavar="FILE", help="write a memory snapshot for pytorch.org/memory_viz"
            )
            command.add_argument("--save", metavar="FILE", help="write the plan, for ogc.optimize(plan=)")
    return parser


@dataclass(frozen=True)
class _Asked:
    """What a factory returned, and for what it is to be looked at."""

    model: torch.nn.Module
    sample_input: Any
    loss: Loss | None
    optimizer: Any
    device: str | None
    gpu: str | None
    budget: int | None
    max_overhead: float | None

    @classmethod
    def of(cls, given: Namespace) -> _Asked:
        """Raises InputError where something is not there, or the factory returns something else."""
        device = given.device or ("cuda" if given.gpu else None)
        factory = _found(given.factory)
        with nullcontext() if device is None else _home(device_of(device), given.gpu):
            made = factory()
        if not (isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], torch.nn.Module)):
            raise InputError(
                f"{given.factory} must return (model, sample_input) or (model, sample_input, loss), not {_kind(made)}"
            )
        model, sample_input, *loss = made
        chosen = given.optimizer and (getattr(torch.optim, given.optimizer, None) or _found(given.optimizer))
        return cls(
            model, sample_input, loss[0] if loss else None, chosen, device, given.gpu, given.budget,
            getattr(given, "max_overhead", None),
        )  # fmt: skip

    @property
    def parsing(self) -> dict[str, Any]:
        """Arguments of :func:`ogc.parse`."""
        return {"loss": self.loss, "device": self.device, "gpu": self.gpu}

    def estimate(self) -> Any:
        """What :func:`ogc.estimate` returns."""
        return optional("sizing.needs").estimate(
            self.model, self.sample_input, optimizer=self.optimizer, **self.parsing
        )

    @cached_property
    def needs(self) -> Any:
        """What a step needs beside activations."""
        return optional("sizing.needs").fixed_needs(self.model, self.sample_input, self.optimizer, self.device)

    def graph(self) -> Graph:
        """Where whole steps are to fit, parameters' gradients count as they come."""
        gradients: Gradients = "kept" if self.budget is None else self.needs.when
        return parse(self.model, self.sample_input, gradients=gradients, **self.parsing)

    def plan(self, graph: Graph) -> Plan:
        """Raises SolveError where nothing fits."""
        if self.budget is None:
            return solve(graph, max_overhead=self.max_overhead)
        found: Plan = optional("sizing.needs").within_device(
            self.needs, self.budget, lambda budget: solve(graph, memory_budget=budget), lambda plan: plan
        )
        if self.max_overhead is not None and found.overhead > self.max_overhead:
            raise SolveError(
                f"no plan fits on a device of {self.budget / MIB:.1f} MiB within {self.max_overhead:.0%} more time; "
                f"one that fits takes {found.overhead:.0%}"
            )
        return found

    def fits(self, plan: Plan) -> bool:
        """Whether a step by the plan fits the device, if that is limited, and keeps to the overhead."""
        is_quick = self.max_overhead is None or plan.overhead <= self.max_overhead
        return is_quick and (self.budget is None or optional("sizing.needs").fits(self.needs, plan, self.budget))


def _home(device: torch.device, gpu: str | None) -> torch.device:
    """Where a factory is called: on the meta device for a GPU that is not there, or that is another one."""
    is_there = torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
    return torch.device("meta") if device.type == "cuda" and (gpu is not None or not is_there) else device


def _kind(made: Any) -> str:
    if not isinstance(made, tuple):
        return type(made).__name__
    return f"({', '.join(type(one).__name__ for one in made)})"


def _found(name: str) -> Any:
    """What ``MODULE:NAME`` names; raises InputError where it is not there."""
    module, _, attribute = name.rpartition(":")
    if not module or not attribute:
        raise InputError(f"{name!r} must be MODULE:NAME, such as train.py:make or package.module:make")
    try:
        found = attrgetter(attribute)(_module(module))
    except AttributeError:
        raise InputError(f"{module} has no {attribute}") from None
    if not callable(found):
        raise InputError(f"{name} must be a function, not {_kind(found)}")
    return found


def _module(name: str) -> ModuleType:
    path = Path(name)
    if path.suffix != ".py":
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise InputError(
                f"there is no module {name!r} here; give its dotted name, or the path of a .py file"
            ) from None
    if not path.is_file():
        raise InputError(f"there is no file {name!r}")
    path = path.resolve()
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    sys.path.insert(0, str(path.parent))  # as python does with a script
    spec = util.spec_from_file_location(path.stem if known is None else f"{path.stem} by path", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _estimate(asked: _Asked, given: Namespace) -> str:
    needs = asked.estimate()
    if asked.budget is None:
        return str(needs)
    device, graph = f"a device of {asked.budget / MIB:.1f} MiB", needs.least.graph
    if asked.fits(plain_plan(graph)):
        return f"{needs}\nfits: a plain step does on {device}"
    try:
        return f"{needs}\nfits: a step by a plan does on {device}, {asked.plan(graph).summary}"
    except SolveError:
        return f"{needs}\ndoes not fit: no step does on {device}"


def _plan(asked: _Asked, given: Namespace) -> str:
    plan = asked.plan(asked.graph())
    for path, write in ((given.html, plan.html), (given.snapshot, plan.snapshot), (given.save, plan.save)):
        if path is not None:
            write(path)
    if asked.budget is None:
        return str(plan)
    used = optional("sizing.needs").used_bytes(asked.needs, plan, asked.budget)
    return f"{plan}\nfits: a step takes {used / MIB:.1f} MiB of a device of {asked.budget / MIB:.1f} MiB"


def _frontier(asked: _Asked, given: Namespace) -> str:
    found = frontier(asked.graph())
    if fitting := tuple(filter(asked.fits, found.plans)):
        return str(Frontier(fitting))
    least, most = found.plans[0], found.plans[-1]
    raise SolveError(
        f"none of {len(found.plans)} plans fits, from {least.peak_bytes / MIB:.1f} MiB of activations at "
        f"{least.overhead:+.0%} time to {most.peak_bytes / MIB:.1f} MiB at {most.overhead:+.0%}"
    )


COMMANDS = {"estimate": _estimate, "plan": _plan, "frontier": _frontier}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; ``arguments`` are those of the process without its name.

    Returns:
        The exit status: 0, or 2 after an error.
    """
    given = _arguments().parse_args(arguments)
    try:
        text = COMMANDS[given.command](_Asked.of(given), given)
    except Exception as error:
        sys.stderr.write(f"python -m ogc: error: {_line(error)}\n")
        return 2
    sys.stdout.write(f"{text}\n")
    return 0


def _line(error: Exception) -> str:
    """What went wrong, and where, unless ogc says it itself."""
    text = (str(error).strip().splitlines() or [""])[0].rstrip(":")
    if isinstance(error, OgcError):
        return text
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text} ({Path(place.filename).name}:{place.lineno})"


if __name__ == "__main__":
    sys.exit(main())
