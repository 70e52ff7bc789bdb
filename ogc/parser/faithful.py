"""Records a model with as many opaque modules as it takes, until the program is the one that eager runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch

from ..errors import InputError, OgcError, ParseError
from ..program.opaque import opaque_in
from ..torch_state.compare import same_bits
from ..torch_state.forwards import plain_forward
from ..torch_state.no_trace import put_back_as_well, untouched
from ..torch_state.reads import Observer, Write
from .arguments import Sample
from .custom import CustomForward
from .doors import dynamo, export, jit
from .doors.door import Door
from .forward.flat import FlatForward, raise_own_error, state_of
from .forward.location import running
from .forward.patches import seen_as_recorded
from .opaque import OpaqueModules
from .recorder import followed, record
from .traced import RECORD, FrontEnd, OpaqueError, RecordAgain, Traced
from .verify import verify

FRONT_ENDS: dict[str, FrontEnd] = {
    RECORD: record,
    "jit": Door("jit", jit, record),
    "export": Door("export", export, record, knows_lines=False),
    "dynamo": Door("dynamo", dynamo, record),
}
"""By name."""


def check_front_end(name: Any, is_by_hand: bool) -> None:
    """Raise InputError unless it is the name of a front end, and the recorder's for a graph made by hand."""
    if not isinstance(name, str) or name not in FRONT_ENDS:
        raise InputError(f"front_end must be one of {', '.join(map(repr, FRONT_ENDS))}, not {name!r}")
    if is_by_hand and name != RECORD:
        raise InputError(
            f"front_end={name!r} and a graph made by hand both say what the program is: give parse_graph=False, or "
            "leave front_end away"
        )


follow = followed
"""Runs a forward along a program that it recorded."""


@contextmanager
def observed(
    sample: Sample, run: Callable[..., Any], opaque: set[str], is_careful: bool = False, front_end: FrontEnd = record
) -> Iterator[tuple[Traced, Observer]]:
    """A recording of ``run``, with what it read and wrote outside of tensors. Inside, all is as it leaves it."""
    observer = Observer(sample.model, running)
    with untouched(sample.model):
        try:
            copied = sample._replace(tensors=sample.copies())
            yield front_end(copied, observer.around(run), opaque, is_careful=is_careful), observer
        finally:
            put_back_as_well(observer.others)
            observer.put_back()


def faithful_program(sample: Sample, forward: CustomForward | None, opaque: OpaqueModules) -> Traced:
    """The model's verified program, every call in it, and the state after it."""
    is_careful = False
    run = plain_forward(sample.model) if forward is None else forward
    while True:
        try:
            return _program(sample, run, forward is not None, opaque, is_careful)
        except RecordAgain as again:
            is_careful = again.is_careful
        except OpaqueError as problem:
            if isinstance(problem.__cause__, Exception):
                raise_own_error(*sample, seen=problem.__cause__)
            opaque.cover(problem)
        except OgcError:
            raise
        except Exception as error:
            raise_own_error(*sample, seen=error)
            what = f"fails while it is watched: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise ParseError(f"the model's forward {what}; by itself it runs") from error


def _program(
    sample: Sample, run: Callable[..., Any], is_custom: bool, opaque: OpaqueModules, is_careful: bool
) -> Traced:
    """The verified program with these opaque modules; RecordAgain or OpaqueError if it is to be recorded otherwise."""
    front_end = FRONT_ENDS[opaque.front_end]
    with observed(sample, run, opaque.names, is_careful, front_end) as (traced, observer):
        traced = replace(traced, state=state_of(sample.model))
        called = opaque_in(traced.graph)
        writes = observer.writes(called)
        opaque.changing = observer.changing()
    if is_custom:
        opaque.check_hooks(called)
    elif not any(traced.requires_grad):
        raise ParseError(
            "no output of the model's forward requires grad, so there is no backward pass to save memory in; "
            "take torch.no_grad() or detach() out of it"
        )
    if observer.mixed:
        reasons = "; ".join(f"{name or 'the model'} {why}" for name, why in observer.mixed.items())
        raise OpaqueError(f"what a module reads is written while the forward runs: {reasons}", observer.mixed)
    if writes and not is_custom:
        return _settled(sample, run, traced, observer, writes, opaque, is_careful)
    return replace(_verified(sample, traced, run), reads=observer.reads())


def _settled(
    sample: Sample,
    run: Callable[..., Any],
    first: Traced,
    observer: Observer,
    writes: list[Write],
    opaque: OpaqueModules,
    is_careful: bool,
) -> Traced:
    """The program of a forward that writes something in its first call, as it is in all calls after that.

    OpaqueError if it writes something in each call, or computes something else in its first one.
    """
    model, cold = sample.model, observer.reads(writes)
    with untouched(model):
        with untouched(model, attributes_stay=True):
            _outputs(sample, first.graph)
        with observer.again():
            with untouched(model):
                copied = sample._replace(tensors=sample.copies())
                traced = FRONT_ENDS[opaque.front_end](copied, observer.around(run), opaque.names, is_careful=is_careful)
                traced = replace(traced, state=state_of(model))
                again = observer.writes(opaque_in(traced.graph))
                observer.put_back()
            if again or not all(map(same_bits, traced.outputs, first.outputs)):
                _refuse_writes(observer, again or writes, "each call" if again else "its first call")
            lasting = [write for write in writes if (write.owner.number, write.key) not in observer.effects]
            reads = observer.reads(lasting)
            return replace(_verified(sample, traced, run), reads=reads, cold=cold if lasting else None)


def _refuse_writes(observer: Observer, writes: list[Write], when: str) -> NoReturn:
    reasons = {write.module: f"changes {observer.name(write)} in {when}" for write in reversed(writes)}
    all_of_them = "; ".join(f"{name or 'the model'} {why}" for name, why in reasons.items())
    raise OpaqueError(
        f"a replayed forward leaves attributes as they are: {all_of_them}. Return what others are to have "
        "instead, hold it in a buffer; if only its first call is another, call the model before it is optimized.",
        reasons,
        are_written=True,
    )


def _verified(sample: Sample, traced: Traced, run: Callable[..., Any]) -> Traced:
    try:
        calls = verify(sample, traced, run)
    except OpaqueError as problem:
        if traced.parting:
            problem.args = (f"{problem}. The graph parts from the forward at {traced.parting}",)
        raise
    return replace(with_expected(sample, traced), python_calls=calls.count)


def _outputs(sample: Sample, graph: torch.fx.Graph) -> list[torch.Tensor]:
    """The tensors that the model's forward, of which that is the program, returns, detached."""
    flat = FlatForward(plain_forward(sample.model), sample.spec)
    with seen_as_recorded(sample.model, graph):
        flat.run(sample.copies())
    return flat.outputs


def with_expected(sample: Sample, traced: Traced) -> Traced:
    """The program with what its guards read for the sample."""
    if traced.guards is None:
        return traced
    with untouched(sample.model):
        expected = traced.guards.read(sample.model, sample.copies())
    return replace(traced, guards=replace(traced.guards, expected=expected))
