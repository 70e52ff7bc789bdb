"""The weights of a backward that is given gradients laid out in another way than is usual.

Many kernels copy such a gradient first; what they return may be laid out in another way, too. Elementwise operators
and views show this on shapes alone. Others are run, where that is possible, on zeros: once with usual gradients, once
with these, and the difference is what there is to add.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.fx.node import map_aggregate

from ....operators.registry import copies_strided_gradients, is_elementwise, of
from ....operators.weights import InputGradient, Weights
from ....program.program import tensor_leaves, without_autocast
from ....program.tensors import Layout
from ....torch_state.private import OpOverload

LONG_FLOPS = 2e9
"""A call with more is not run where its operator is known to copy what is laid out in another way."""

Layouts = Mapping[int, Layout]
"""How gradients are laid out, by the number of the result; other results get none."""


@dataclass(frozen=True)
class Backward:
    """What depends on how gradients are laid out.

    Attributes:
        gradients: of the arguments.
        more: bytes at most allocated beyond what usual gradients take; less than none if it is less.
        working: bytes at most allocated, of PyTorch's operator, if that was measured.
        has_copies: whether the copies that kernels make unseen are in these.
        first: bytes allocated until it asks for what the forward saved.
    """

    gradients: tuple[InputGradient, ...]
    more: int
    working: int | None = None
    has_copies: bool = False
    first: int = 0

    def weights(self, usual: Weights) -> Weights:
        """The weights of the call in this form."""
        found = {gradient.argument: gradient for gradient in self.gradients}
        working = max(0, usual.working_bytes + self.more) if self.working is None else self.working
        late = usual.late_bytes and max(0, usual.late_bytes + self.more)
        gradients = tuple(self._changed(gradient, found) for gradient in usual.gradients)
        return replace(usual, gradients=gradients, working_bytes=working, late_bytes=late)

    def _changed(self, gradient: InputGradient, found: dict[int, InputGradient]) -> InputGradient:
        new = found.get(gradient.argument)
        return gradient if new is None else replace(new, reuses=gradient.reuses)


Run = Callable[[Any, Any, Layouts], Weights]
"""Runs a call on shapes alone, from arguments without memory."""

Measure = Callable[[Any, Any, Layouts, bool, bool], tuple[int, int, Mapping[int, Layout]]]
"""What the backward of a call allocates, run on these arguments: most bytes, those until it asks for what was saved,
and its results' layouts.

The last two say whether it is that of the operator's low-memory form, and whether others hold the gradients, too."""


class Again:
    """Weighs the backward of a call for other gradients than usual ones.

    Args:
        target: the operator.
        args, kwargs: what it is called with; their content is not held.
        run, measure: how; without the latter it is weighed on shapes alone.
    """

    def __init__(self, target: Any, args: Any, kwargs: Any, run: Run, measure: Measure | None) -> None:
        self.target, self.run, self.measure = target, run, measure
        first = next(iter(tensor_leaves(args, kwargs)))
        self.device, self.dtype = first.device, first.dtype
        self.args, self.kwargs = map_aggregate((args, kwargs), self._shadow)
        self.found: dict[Any, Backward | None] = {}

    def __call__(self, layouts: Layouts, usual: Layouts, is_low_memory: bool, are_held: bool) -> Backward | None:
        """The backward, in one form, for gradients laid out so, where others are usual; None if that cannot be told.

        What copies a gradient, and then goes on, may let go of it, unless gradients ``are_held`` by others, too.
        """
        key = frozenset(layouts.items()), is_low_memory, are_held
        if key not in self.found:
            self.found[key] = self._weighed(layouts, usual, is_low_memory, are_held)
        return self.found[key]

    def _weighed(self, layouts: Layouts, ordinary: Layouts, is_low_memory: bool, are_held: bool) -> Backward | None:
        if of(self.target).needs_data(tensor_leaves(self.args, self.kwargs)):
            return None
        with torch.enable_grad(), without_autocast():
            try:
                usual, found = (self.run(self.args, self.kwargs, given) for given in (ordinary, layouts))
            except (NotImplementedError, RuntimeError):  # no kernel for shapes alone
                return None
            more = found.working_bytes - usual.working_bytes
            if self.measure is None or _shows_all(self.target):
                return Backward(found.gradients, more)
            if usual.forward_flops > LONG_FLOPS and copies_strided_gradients(self.target):
                more = sum(prod(layout.shape) * self.dtype.itemsize for layout in layouts.values())
                return Backward(found.gradients, more, has_copies=True)
            given = map_aggregate((self.args, self.kwargs), self._filled)
            try:
                before, _, _ = self.measure(*given, ordinary, is_low_memory, are_held)
                working, first, results = self.measure(*given, layouts, is_low_memory, are_held)
            except RuntimeError:  # it does not take zeros
                return Backward(found.gradients, more)
            gradients = tuple(_laid_out(gradient, results.get(gradient.argument)) for gradient in found.gradients)
            more, measured = working - before, None if is_low_memory else working
            return Backward(gradients, more, measured, has_copies=True, first=first)

    def _shadow(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        shadow = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
        return shadow.requires_grad_(leaf.requires_grad)

    def _filled(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return Layout.of(leaf).zeros(leaf.dtype, self.device).requires_grad_(leaf.requires_grad)


def _laid_out(gradient: InputGradient, layout: Layout | None) -> InputGradient:
    """The gradient as it is laid out where that was seen."""
    if layout is None or not gradient.dense or gradient.is_view:
        return gradient
    return replace(gradient, contiguous=layout.is_contiguous, layout=layout)


def _shows_all(target: Any) -> bool:
    """Whether all that an operator's backward allocates is seen on shapes alone."""
    return is_elementwise(target) or (isinstance(target, OpOverload) and target.is_view)
