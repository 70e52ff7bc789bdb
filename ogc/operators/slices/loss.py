"""A loss over many classes, with the linear layer before it, run forward and backward together some rows at a time.

The widest tensor of a language model is its logits: a row for each token, a column for each word. A loss is a sum over
rows, and the backward starts from it: of each slice of rows the logits, the loss and the gradients are made at once, so
that logits never exist whole and nothing runs twice. Until the backward the gradients of the rows and of the weight are
kept in place of them; there they are multiplied by the gradient of the loss. Sums over rows are added up slice by
slice: results differ from PyTorch's in the last bits. A linear layer in float16 would lose small gradients before a
scaled loss could help: there the slices are made once more in the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from ...program.program import without_autocast
from ...torch_state.private import untraced
from ..low_memory import is_pytorchs
from .stretch import Sliced, Tensors, differentiable, that_need

ROWS, TARGETS, WEIGHT, BIAS, CLASSES = range(5)
"""The arguments: rows and targets, which are sliced; weight and bias of the linear layer, if there is one; weights of
classes; then what else the rest of the stretch takes."""


@dataclass(frozen=True, eq=False)
class SlicedLoss(Sliced):
    """A linear layer, elementwise operators and a cross-entropy as one operator; see above for its arguments.

    Attributes:
        graph: from logits, targets, weights of classes and others to the sum of the losses.
        by_columns: the weight has a column for each class, as a matrix to multiply with, not a row.
        ignored: targets of this class do not count.
        is_mean: the result is the mean loss, not the sum.
    """

    by_columns: bool = False
    ignored: int = -100
    is_mean: bool = True

    def __call__(self, *tensors: torch.Tensor | None) -> torch.Tensor:
        result: torch.Tensor = _Loss.apply(self, *tensors)
        return result

    @property
    def runs_once(self) -> bool:
        """The gradients that a call has made are its own."""
        return True

    def logits(self, rows: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        """The linear layer, if there is one."""
        if weight is None:
            return rows
        return torch.nn.functional.linear(rows, weight.t() if self.by_columns else weight, bias)

    def scale(self, tensors: Tensors) -> torch.Tensor | None:
        """What the sum is multiplied by."""
        rows, targets, classes = tensors[ROWS], tensors[TARGETS], tensors[CLASSES]
        assert rows is not None and targets is not None
        if not self.is_mean:
            return None
        if targets.is_floating_point():  # probabilities of classes
            return rows.new_full((), 1 / len(rows), dtype=_exact(rows.dtype))
        counted = targets != self.ignored
        weights = counted if classes is None else classes.take(targets.where(counted, 0)) * counted
        return weights.sum(dtype=_exact(rows.dtype)).reciprocal()

    def loss(self, tensors: Tensors) -> torch.Tensor:
        """The loss alone."""
        total, entries = _Sum(), self.entries(tensors)
        for part in self.parts(entries):
            total.add(self.summed(self.cut(tensors, part, entries)))
        return total.times(self.scale(tensors))

    def summed(self, tensors: Tensors) -> torch.Tensor:
        """The sum of the losses of some rows."""
        rows, targets, weight, bias, *others = tensors
        assert rows is not None
        return self.run([self.logits(rows, weight, bias), targets, *others])

    def whole(self, tensors: Tensors) -> torch.Tensor:
        loss, scale = self.summed(tensors), self.scale(tensors)
        return loss if scale is None else loss * scale

    def with_gradients(
        self, tensors: Tensors, needs: Sequence[bool], start: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """The loss, and the gradients of the arguments that need them; ``start`` is that of the loss, or else 1."""
        rows, targets, weight, bias = tensors[:CLASSES]
        assert rows is not None and targets is not None
        scale, total = self.scale(tensors), _Sum()
        of_loss = _product(start, scale)
        wanted = [k for k in range(CLASSES, len(tensors)) if needs[k]]
        found: list[torch.Tensor | None] = [None] * len(tensors)
        found[ROWS] = torch.empty_like(rows) if needs[ROWS] else None
        for part in self.parts(len(rows)):
            with torch.enable_grad(), without_autocast(), _nobody_looks():
                logits = self.logits(rows[part].detach().requires_grad_(), *_detached((weight, bias)))
                others = _detached(tensors[CLASSES:], needs[CLASSES:])
                starts: list[Any] = [get_gradient_edge(logits), *that_need(others, needs[CLASSES:])]
                given = [logits, targets[part], *others]
                del logits
                loss = self.run(given)
            total.add(loss.detach())
            of_logits, *rest = torch.autograd.grad(loss, starts, None if of_loss is None else of_loss.to(loss.dtype))
            del loss  # and with it what was saved for the backward that is done
            self._of_the_layer(found, needs, rows[part], part, weight, of_logits)
            for k, gradient in zip(wanted, rest, strict=True):
                found[k] = gradient if found[k] is None else found[k].add_(gradient)  # type: ignore[union-attr]
            del of_logits, rest
        return total.times(scale), found

    def _of_the_layer(
        self,
        found: list[torch.Tensor | None],
        needs: Sequence[bool],
        rows: torch.Tensor,
        part: slice,
        weight: torch.Tensor | None,
        gradient: torch.Tensor,
    ) -> None:
        """Add what the gradient of some rows of the logits gives for rows, weight and bias."""
        if (of_rows := found[ROWS]) is not None:
            if weight is not None:
                of_rows[part] = gradient @ (weight.t() if self.by_columns else weight)
            else:
                of_rows[part] = gradient
        if needs[WEIGHT]:
            left, right = (rows, gradient) if self.by_columns else (gradient, rows)
            before = found[WEIGHT]
            # Not addmm_, whose FLOPs PyTorch's counter does not know.
            found[WEIGHT] = left.t() @ right if before is None else torch.addmm(before, left.t(), right, out=before)
        if needs[BIAS]:
            of_bias, before = gradient.sum(0), found[BIAS]
            found[BIAS] = of_bias if before is None else before.add_(of_bias)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stretch: SlicedLoss, *tensors: torch.Tensor | None) -> torch.Tensor:
        ctx.stretch, ctx.gradients = stretch, None
        ctx.save_for_backward(*tensors)
        needs = ctx.needs_input_grad[1:]
        if not any(needs) or torch.float16 in {t.dtype for t in tensors if t is not None}:
            return stretch.loss(tensors)
        loss, ctx.gradients = stretch.with_gradients(tensors, needs)
        return loss

    @staticmethod
    @untraced
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        stretch, tensors, needs = ctx.stretch, ctx.saved_tensors, ctx.needs_input_grad[1:]
        if is_pytorchs(gradient):
            return None, *differentiable(stretch, tensors, needs, gradient)
        found, ctx.gradients = ctx.gradients, None  # a second backward makes them anew
        if found is None:
            _, found = stretch.with_gradients(tensors, needs, gradient)
        else:
            for one in found:
                if one is not None:
                    one.mul_(gradient)
        return None, *found


class _Sum:
    """Losses added up in float32 or better."""

    def __init__(self) -> None:
        self.total: torch.Tensor | None = None
        self.dtype = torch.float32

    def add(self, loss: torch.Tensor) -> None:
        self.dtype = loss.dtype
        if self.total is None:
            self.total = loss.to(_exact(loss.dtype), copy=True)
        else:
            self.total += loss

    def times(self, scale: torch.Tensor | None) -> torch.Tensor:
        assert self.total is not None
        return (self.total if scale is None else self.total * scale).to(self.dtype)


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _nobody_looks() -> saved_tensors_hooks:
    """What is saved inside is none of the caller's: its backward is done before the forward is."""
    return saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor)


def _product(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    return other if one is None else one if other is None else one * other


def _detached(tensors: Tensors, needs: Sequence[bool] | None = None) -> list[torch.Tensor | None]:
    wanted = [False] * len(tensors) if needs is None else needs
    return [t if t is None else t.detach().requires_grad_(need) for t, need in zip(tensors, wanted, strict=True)]
