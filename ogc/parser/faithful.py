"""Records a model with as many leaves as it takes, until the program is the one that eager runs."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..errors import ParseError
from ..program.structures import InputSpec
from ..torch_state.compare import same_bits
from ..torch_state.no_trace import attributes_of, changes, untouched
from .arguments import copies
from .custom import CustomForward
from .forward.flat import forward_alone
from .judge import judge
from .leaves import Leaves
from .recorder import record
from .traced import FrontEnd, OpaqueError, RecordAgain, Traced, called_leaves
from .weigh.observe import state_of

front_end: FrontEnd = record
"""The one in use."""


def faithful_program(
    model: torch.nn.Module,
    spec: InputSpec,
    tensors: list[torch.Tensor],
    forward: CustomForward | None,
    leaves: Leaves,
) -> tuple[Traced, list[torch.Tensor]]:
    """The model's program, every call in it, with as many leaves as it takes; the model's state afterwards.

    It has been held against a forward that nobody records; see :mod:`ogc.parser.judge`.
    """
    is_careful = False
    while True:
        try:
            with untouched(model):
                before = attributes_of(model)
                traced = front_end(model, spec, copies(tensors), forward, leaves.names, is_careful=is_careful)
                after = state_of(model)
                called = called_leaves(traced.graph)
                changed = dict(changes(before, after_attributes := attributes_of(model), called))
                leaves.changing = dict(changes(before, after_attributes, ()))
            if forward is not None:
                leaves.check_hooks(called)
            elif not any(traced.requires_grad):
                raise ParseError(
                    "no output of the model's forward requires grad, so there is no backward pass to save memory in; "
                    "take torch.no_grad() or detach() out of it"
                )
            elif changed:
                _refuse_dependence(model, spec, tensors, traced, changed, leaves.names)
            judge(model, spec, tensors, traced, forward)
            return _with_expected(model, tensors, traced), after
        except RecordAgain as again:
            is_careful = again.is_careful
        except OpaqueError as problem:
            if isinstance(problem.__cause__, Exception) and not _runs(model, spec, tensors):
                raise problem.__cause__ from None
            leaves.cover(problem)


def _runs(model: torch.nn.Module, spec: InputSpec, tensors: list[torch.Tensor]) -> bool:
    try:
        with untouched(model):
            forward_alone(model, spec, copies(tensors))
    except Exception:  # the model's own, as it was in the recording
        return False
    return True


def _with_expected(model: torch.nn.Module, tensors: list[torch.Tensor], traced: Traced) -> Traced:
    """The program with what its guards read for the sample."""
    if traced.guards is None:
        return traced
    with untouched(model):
        expected = traced.guards.read(model, copies(tensors))
    return replace(traced, guards=replace(traced.guards, expected=expected))


def _refuse_dependence(
    model: torch.nn.Module,
    spec: InputSpec,
    tensors: list[torch.Tensor],
    traced: Traced,
    changed: dict[str, str],
    leaves: set[str],
) -> None:
    """Raise OpaqueError unless the attributes that a first call changed stay as they are then, and make no difference.

    Args:
        changed: an attribute that did change for each module.
        leaves: they may change with each call; one of which only methods are called as long as it makes no difference.

    Raises:
        OpaqueError: it names the modules whose attributes count, collect or tell the first call from others.
    """
    with untouched(model):
        with untouched(model, attributes_stay=True):
            forward_alone(model, spec, copies(tensors))
        before = attributes_of(model)
        outputs = forward_alone(model, spec, copies(tensors))
        again = dict(changes(before, attributes_of(model), leaves))
    when = "each call" if again else "its first call"
    if again or not all(map(same_bits, outputs, traced.outputs)):
        reasons = {name: f"changes its attribute {key} in {when}" for name, key in (again or changed).items()}
        all_of_them = "; ".join(f"{name or 'the model'} {why}" for name, why in reasons.items())
        raise OpaqueError(
            f"a replayed forward leaves attributes as they are: {all_of_them}. Return what others are to have "
            "instead, hold it in a buffer; if only its first call is another, call the model before it is optimized.",
            reasons,
        )
