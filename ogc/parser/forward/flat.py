"""A model's forward as a function of a flat list of tensors, run with the memory of inference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ...errors import OgcError, ParseError, add_note
from ...program.structures import Given, InputSpec, OutputSpec
from ..passes.reached import reached
from ..traced import OpaqueError
from .location import entry

Pack = Callable[[torch.Tensor], object]


class FlatForward:
    r"""A forward as a function of a flat list of tensors.

    Attributes:
        output_spec, outputs, requires_grad, grad_targets: of its last call, as in
            :class:`~ogc.parser.traced.Traced`; all but the first once it was :meth:`finish`\ ed.
    """

    def __init__(self, forward: Callable[..., Any], spec: InputSpec) -> None:
        self.forward = forward
        self.spec = spec
        self.output_spec: OutputSpec | None = None
        self.outputs: list[torch.Tensor] = []
        self.requires_grad: list[bool] = []
        self.grad_targets: frozenset[Any] = frozenset()
        self.graph: list[Any] = []  # nodes for a backward, held until the outputs are gone

    @entry
    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        args, kwargs = self.spec.rebuild(list(tensors))
        given = Given(args, kwargs)
        try:
            result = self.forward(*args, **kwargs)
        except OgcError:
            raise
        except Exception as error:
            add_note(error, "ogc: this error was raised by the model's own forward on the sample input.")
            raise
        if given.has_other_items():
            raise OpaqueError("the forward changes lists or dicts that it is given", {"": "changes its arguments"})
        self.output_spec, outputs = OutputSpec.of(result, given)
        if not outputs:
            raise ParseError("the model's forward returns no tensor; there is nothing to train")
        return outputs

    def finish(self, outputs: list[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        """Look at the outputs of a call with these tensors; apart from it, as calls may be watched."""
        self.outputs = [tensor.detach() for tensor in outputs]
        self.requires_grad = [tensor.requires_grad for tensor in outputs]
        self.grad_targets, self.graph = reached(outputs, tensors)

    def run(self, tensors: list[torch.Tensor]) -> None:
        """Call it, with gradients on and nothing saved, and look at the outputs."""
        with nothing_saved():
            self.finish(self(*tensors), tensors)


def forward_alone(model: torch.nn.Module, spec: InputSpec, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that the model's forward returns, detached, with gradients on and nothing saved."""
    flat = FlatForward(model.forward, spec)
    flat.run(tensors)
    return flat.outputs


@contextmanager
def nothing_saved(told: Pack = id, where: Callable[[], str] = str) -> Iterator[None]:
    """Gradients are on, but nothing is kept for a backward: memory is that of inference.

    Args:
        told: called with each tensor that would be saved.
        where: the name of the module that is running.
    """

    def pack(tensor: torch.Tensor) -> None:
        told(tensor)

    def unpack(packed: object) -> torch.Tensor:
        raise OpaqueError(
            "the model runs a backward pass inside its forward, which cannot be recorded; put it into a submodule of "
            "its own",
            {where(): "runs a backward pass"},
        )

    with saved_tensors_hooks(pack, unpack), torch.enable_grad():
        yield


@contextmanager
def saved_until_done(told: Pack = id) -> Iterator[list[torch.Tensor]]:
    """Tensors saved inside are there for a backward that is run inside, and gone afterwards.

    Args:
        told: called with each tensor that is saved.
    """
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        told(tensor)
        saved.append(tensor)
        return len(saved) - 1

    with saved_tensors_hooks(pack, saved.__getitem__):
        yield saved
    saved.clear()
