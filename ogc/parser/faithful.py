"""Records a model with as many leaves as it takes, until the program is the one that eager runs."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..errors import OgcError, ParseError
from ..program.leaf import called_leaves
from ..torch_state.attributes import attributes_of, changes
from ..torch_state.compare import same_bits
from ..torch_state.forwards import plain_forward
from ..torch_state.no_trace import untouched
from .arguments import Sample
from .custom import CustomForward
from .forward.flat import FlatForward, raise_own_error, state_of
from .forward.patches import seen_as_recorded
from .judge import judge
from .leaves import Leaves
from .recorder import record
from .traced import FrontEnd, OpaqueError, RecordAgain, Traced

front_end: FrontEnd = record
"""The one in use."""


def faithful_program(sample: Sample, forward: CustomForward | None, leaves: Leaves) -> Traced:
    """The model's program, every call in it, with as many leaves as it takes; with the model's state after it.

    It has been held against a forward that nobody records; see :mod:`ogc.parser.judge`.
    """
    model, is_careful = sample.model, False
    run = plain_forward(model) if forward is None else forward
    while True:
        try:
            with untouched(model):
                before = attributes_of(model)
                traced = front_end(sample._replace(tensors=sample.copies()), run, leaves.names, is_careful=is_careful)
                state, after = state_of(model), attributes_of(model)
            called = called_leaves(traced.graph)
            changed = dict(changes(before, after, called))
            leaves.changing = dict(changes(before, after, ()))
            if forward is not None:
                leaves.check_hooks(called)
            elif not any(traced.requires_grad):
                raise ParseError(
                    "no output of the model's forward requires grad, so there is no backward pass to save memory in; "
                    "take torch.no_grad() or detach() out of it"
                )
            elif changed:
                _refuse_dependence(sample, traced, changed, leaves.names)
            calls = judge(sample, traced, run)
            names = calls.names_read()
            return replace(with_expected(sample, traced), state=state, python_calls=calls.count, names_read=names)
        except RecordAgain as again:
            is_careful = again.is_careful
        except OpaqueError as problem:
            if isinstance(problem.__cause__, Exception):
                raise_own_error(*sample)
            leaves.cover(problem)
        except OgcError:
            raise
        except Exception as error:
            raise_own_error(*sample)
            what = f"fails while it is watched: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise ParseError(f"the model's forward {what}; by itself it runs") from error


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


def _refuse_dependence(sample: Sample, traced: Traced, changed: dict[str, str], leaves: set[str]) -> None:
    """Raise OpaqueError unless the attributes that a first call changed stay as they are then, and make no difference.

    Args:
        changed: an attribute that did change for each module.
        leaves: they may change with each call; one of which only methods are called as long as it makes no difference.

    Raises:
        OpaqueError: it names the modules whose attributes count, collect or tell the first call from others.
    """
    model = sample.model
    with untouched(model):
        with untouched(model, attributes_stay=True):
            _outputs(sample, traced.graph)
        before = attributes_of(model)
        outputs = _outputs(sample, traced.graph)
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
