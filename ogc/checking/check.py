"""Holds an optimized model against the plain one on the user's own data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from ..errors import CheckError, InputError
from ..graph import Graph
from .step import (
    Arguments,
    Difference,
    NotVaried,
    Results,
    Snapshot,
    another_input,
    differences,
    results_of,
    smaller_batch,
    state,
)


def check(model: torch.nn.Module, optimized: torch.nn.Module, *inputs: Any, **named_inputs: Any) -> CheckReport:
    """Run steps of both models from the same state, under several conditions, and compare everything bit by bit.

    A step is one forward and backward. Those that are compared:

    * ``"seed 1"``, ``"seed 2"``, ``"seed 3"``: on the given input, with random states of that seed;
    * ``"another input"``: other values of the same shapes. Floating tensors get random values of the same mean,
      spread and limits; of ids, labels and masks, whole samples change places within the batch;
    * ``"a smaller batch"``: the first half of all tensors that share their first dimension with the first tensor;
    * ``"after an optimizer step"``: the second step, after the parameters moved by the gradients of a first one.

    What cannot be made of the given input, or raises an error in the plain model, is left out, and the report says why.

    Compared are the outputs, the gradients of all parameters and of inputs that require grad, the buffers, parameters
    and inputs after the step, and the random stream. The backward starts from random gradients of the outputs, or of
    the loss of a module that returns that alone. Parameters, gradients, buffers and the random state are afterwards as
    before, and inputs are copied. Parameters are written to and put back, so a forward from before cannot be followed
    by its backward: check between steps. The parameters' own hooks run, but none that wait for a gradient to be
    accumulated.

    Cost: seven steps of each model, what the optimized one needs to plan for half a batch, and one more of the plain
    model wherever something differs; the memory of a plain step and a few copies of parameters, gradients and buffers.
    :class:`ogc.Checker` has options, as all keyword arguments here are the model's.

    Args:
        model: the plain model.
        optimized: what :func:`ogc.optimize` made of it, or any other module with the same parameters.
        inputs: positional arguments of the forward.
        named_inputs: its keyword arguments.

    Returns:
        The report: ``report.ok``, ``print(report)``, ``report.raise_if_different()``.

    Raises:
        InputError: an argument is no module, or the two have other parameters or buffers.
        Exception: whatever either model raises on the given input. What only the optimized one raises on another
            is a difference.
    """
    return Checker().check(model, optimized, *inputs, **named_inputs)


@dataclass(frozen=True)
class Checker:
    """What :func:`ogc.check` tries: ``Checker(seeds=10).check(model, optimized, images)``.

    Attributes:
        seeds: how many seeds the given input is tried with, 1, 2 and so on; at least one.
        another_input: whether other values of the same shape are tried.
        smaller_batch: whether half of the batch is tried.
        second_step: whether a second step, after one of an optimizer, is tried.

    Raises:
        InputError: ``seeds`` is no number of at least one.
    """

    seeds: int = 3
    another_input: bool = True
    smaller_batch: bool = True
    second_step: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.seeds, bool) or not isinstance(self.seeds, int) or self.seeds < 1:
            raise InputError(f"seeds must be how many to try, at least 1, not {self.seeds!r}")

    def check(
        self, model: torch.nn.Module, optimized: torch.nn.Module, *inputs: Any, **named_inputs: Any
    ) -> CheckReport:
        """As :func:`ogc.check` says, with these options."""
        _check_comparable(model, optimized)
        before = Snapshot((model, optimized))
        return _report({trial.name: _outcome(trial, before, (inputs, named_inputs)) for trial in self._trials()})

    def _trials(self) -> Iterator[_Trial]:
        yield from (_Trial(f"seed {seed}", seed, is_given=True) for seed in range(1, self.seeds + 1))
        if self.another_input:
            yield _Trial("another input", vary=another_input)
        if self.smaller_batch:
            yield _Trial("a smaller batch", vary=smaller_batch)
        if self.second_step:
            yield _Trial("after an optimizer step", after_step=True)


def check_two_steps(model: torch.nn.Module, optimized: torch.nn.Module, call: Arguments) -> CheckReport:
    """What :func:`check` tries, in two steps of each model: the second after the parameters moved by the first one's
    gradients, from another seed, on another input where one can be made and the plain model takes it.
    """
    _check_comparable(model, optimized)
    before = Snapshot((model, optimized))
    trial = _Trial("seed 1", is_given=True)
    first = _outcome(trial, before, call)
    assert isinstance(first, _Outcome)
    found: dict[str, _Outcome | str] = {trial.name: first}
    second = _Trial("another input, after an optimizer step", 2, another_input, after_step=first.plain)
    found[second.name] = _outcome(second, before, call)
    if isinstance(found[second.name], str):
        second = second._replace(name="after an optimizer step", vary=_as_given)
        found[second.name] = _outcome(second, before, call)
    return _report(found)


def _report(found: dict[str, _Outcome | str]) -> CheckReport:
    """What came of trials, by name."""
    tried = {name: outcome for name, outcome in found.items() if isinstance(outcome, _Outcome)}
    return CheckReport(
        compared=sum(len(outcome.plain) for outcome in tried.values()),
        differences=tuple(difference for outcome in tried.values() for difference in outcome.differences),
        is_deterministic=all(outcome.is_deterministic for outcome in tried.values()),
        tried=tuple(tried),
        skipped={name: why for name, why in found.items() if isinstance(why, str)},
    )


def _as_given(call: Arguments) -> Arguments:
    return call


class _Trial(NamedTuple):
    """A comparison to make. An error of a model on the given input is the caller's to see."""

    name: str
    seed: int = 1
    vary: Callable[[Arguments], Arguments] = _as_given
    after_step: bool | Results = False
    is_given: bool = False


class _Outcome(NamedTuple):
    """What a comparison found: what the plain model gave, and in what the optimized one differs."""

    plain: Results
    differences: list[Difference]
    is_deterministic: bool = True


def _outcome(trial: _Trial, before: Snapshot, call: Arguments) -> _Outcome | str:
    """What the comparison found, or why it could not be made."""
    model, optimized = before.models
    try:
        call = trial.vary(call)
    except NotVaried as reason:
        return str(reason)
    except Exception as error:  # of a kind of tensor that cannot be written to or cut
        return f"the input cannot be varied: {_short(error)}"
    graph = getattr(optimized, "graph", None)
    loss_alone = isinstance(graph, Graph) and graph.program.after_forward.outputs == "loss"
    step = partial(
        results_of, before=before, call=call, seed=trial.seed, after_step=trial.after_step, loss_alone=loss_alone
    )
    try:
        plain = step(model)
    except NotVaried as reason:
        return str(reason)
    except Exception as error:
        if trial.is_given:
            raise
        return f"the plain model raises {_short(error)}"
    try:
        found = differences(step(optimized), plain, trial.name)
    except Exception as error:
        if trial.is_given:
            raise
        text = f"raises {_short(error)} where the plain model does not"
        return _Outcome(plain, [Difference("the call", float("inf"), text, trial.name)])
    return _Outcome(plain, found, not found or not differences(step(model), plain, trial.name))


def _short(error: Exception) -> str:
    """The error's kind and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _check_comparable(model: torch.nn.Module, optimized: torch.nn.Module) -> None:
    for module in (model, optimized):
        if not isinstance(module, torch.nn.Module):
            raise InputError(f"check compares two torch.nn.Modules, not {type(module).__name__}")
    strangers = dict(state(model)).keys() ^ dict(state(optimized)).keys()
    if strangers:
        raise InputError(f"only one of the two models has {min(strangers)}; they cannot be compared")


@dataclass(frozen=True)
class CheckReport:
    """What :func:`ogc.check` found; true if nothing differs.

    Attributes:
        compared: how many tensors and other results were compared, over everything that was tried.
        differences: those that differ, in the order of ``tried`` and in each of them in the order outputs,
            gradients, buffers, parameters, inputs, random state.
        is_deterministic: whether the plain model gave the same twice; it runs a second time only after a difference.
        tried: the comparisons that were made, for instance ``("seed 1", "another input")``.
        skipped: why a comparison was not made, by its name.
    """

    compared: int
    differences: tuple[Difference, ...]
    is_deterministic: bool = True
    tried: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether both models did the same."""
        return not self.differences

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        lines = [self._verdict()]
        if self.differences:
            counts = Counter(difference.found_in for difference in self.differences)
            lines.append("found in: " + ", ".join(f"{name} ({count})" for name, count in counts.items()))
        if self.tried:
            lines.append("tried: " + ", ".join(self.tried))
        lines += [f"skipped: {name}, as {why}" for name, why in self.skipped.items()]
        return "\n".join(lines)

    def _verdict(self) -> str:
        if self.ok:
            return f"the same as the plain model: {self.compared} results compared bit by bit"
        text = f"{len(self.differences)} of {self.compared} results differ from the plain model's, first {self.first}"
        if not self.is_deterministic:
            text += (
                "; the plain model differs from itself when it is run again, "
                "so use torch.use_deterministic_algorithms(True) before comparing"
            )
        return text

    @property
    def first(self) -> Difference | None:
        """The first difference, if there is any."""
        return self.differences[0] if self.differences else None

    def raise_if_different(self) -> None:
        """Do nothing if nothing differs; else raise CheckError with the report."""
        if not self.ok:
            raise CheckError(str(self))
