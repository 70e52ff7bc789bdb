"""A loss over many classes, with the linear layer before it, run forward and backward together some rows at a time.

The widest tensor of a language model is its logits: a row for each token, a column for each word. A loss is a sum over
rows, so of each slice of rows the logits, the loss and the gradients are made at once: logits never exist whole, and
nothing runs twice. The gradients of rows and weight are kept until the backward, which multiplies them by the gradient
of the loss. Sums over rows are added up chunk by chunk: results differ from PyTorch's in the last bits. In float16
small gradients would be lost before a scaled loss could help: there the chunks are made once more in the backward.

What lies between the layer and the loss works row by row. Views that only move rows are made of the rows that go into
the layer instead; the rest, such as a cast to float32, goes with the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.fx.node import map_arg

from ..operators.low_memory import is_pytorchs
from ..operators.registry import of
from ..program.program import SHAPE, call_beside, without_autocast
from ..torch_state.private import OpOverload, schema_of, untraced
from .blocks import copied_into, has_shapes, in_parts, may_be_in_parts, place_of, shape_of
from .chunked import Chunked, Tensors, differentiable, that_need
from .rules import Summed, rule_of

ROWS, TARGETS, WEIGHT, BIAS, CLASSES = range(5)
"""The arguments: rows and targets, which are chunked; weight and bias of the linear layer, if there is one; weights of
classes; then what else the rest of the region takes."""


@dataclass(frozen=True, eq=False)
class ChunkedLoss(Chunked):
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

    runs_once = True  # the gradients that a call has made are its own

    def is_run_for_bytes(self, flops: int) -> bool:
        return False

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
        return self.run_all([self.logits(rows, weight, bias), targets, *others])

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
                loss = self.run_all(given)
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
    def forward(ctx: Any, region: ChunkedLoss, *tensors: torch.Tensor | None) -> torch.Tensor:
        ctx.region, ctx.gradients = region, None
        ctx.save_for_backward(*tensors)
        needs = ctx.needs_input_grad[1:]
        if not any(needs) or torch.float16 in {t.dtype for t in tensors if t is not None}:
            return region.loss(tensors)
        loss, ctx.gradients = region.with_gradients(tensors, needs)
        return loss

    @staticmethod
    @untraced
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        region, tensors, needs = ctx.region, ctx.saved_tensors, ctx.needs_input_grad[1:]
        if is_pytorchs(gradient):
            return None, *differentiable(region, tensors, needs, gradient)
        found, ctx.gradients = ctx.gradients, None  # a second backward makes them anew
        if found is None:
            _, found = region.with_gradients(tensors, needs, gradient)
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


Node = torch.fx.Node


@dataclass(frozen=True)
class LossHead:
    """A loss and what goes before it.

    Attributes:
        loss: its call.
        summed: how it is made of a sum.
        chain: from the product to before the loss; the first one takes ``rows``, or the result of ``product``.
        product: the linear layer, if the chain begins there.
        rows: what goes in.
    """

    loss: Node
    summed: Summed
    chain: tuple[Node, ...]
    product: Node | None
    rows: Node

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All its calls, in order."""
        return (*([self.product] if self.product else []), *self.chain, self.loss)


def loss_head(loss: Node) -> LossHead | None:
    """The region that ends with a call, if that is a loss over rows."""
    if not isinstance(loss.target, OpOverload) or loss.kwargs or not has_shapes(loss):
        return None
    if (summed := rule_of(loss.target).summed(loss.args)) is None:
        return None
    scores = summed.args[0]
    current, user, chain = scores, loss, []
    if len(shape_of(scores)) > 2:  # classes come second, rows after them
        if not _puts_last_second(scores) or list(scores.users) != [loss]:
            return None
        chain, current, user = [scores], scores.args[0], scores
    elif len(shape_of(scores)) < 2:
        return None
    if shape_of(summed.targets) == shape_of(scores) != shape_of(current):
        return None  # probabilities, laid out in another way than rows
    while list(current.users) == [user] and (given := _given_by_row(current)) is not None:
        chain.insert(0, current)
        current, user = given, current
    product = current if _factors(current) is not None and list(current.users) == [user] else None
    rows = current if product is None else _factors(product)[0]  # type: ignore[index]
    return LossHead(loss, summed, tuple(chain), product, rows)


def _puts_last_second(node: Node) -> bool:
    """Whether a call only moves the last dimension to the second place."""
    if node.op != "call_function" or not of(node.target).moves:
        return False
    last = len(shape_of(node)) - 1
    numbered = torch.empty([*range(last + 1)], device="meta")
    found = node.target(numbered, *node.args[1:]) if rule_of(node.target).sizes is None else None  # type: ignore[operator]
    return found is not None and tuple(found.shape) == (0, last, *range(1, last))


def _given_by_row(node: Node) -> Node | None:
    """What a call takes, if it works on each row of that by itself; None if it does not, or is no call."""
    given = [one for one in node.all_input_nodes if shape_of(one)]
    if not may_be_in_parts(node) or schema_of(node.target).is_mutable or len(given) != 1:
        return None
    (before,) = given
    is_alike = shape_of(before) == shape_of(node)
    return (
        before
        if moves_rows(node) or (is_alike and all(_is_along(node, n) for n in range(len(shape_of(node)) - 1)))
        else None
    )


def moves_rows(node: Node) -> bool:
    """Whether a call moves rows, and leaves each as it is."""
    return of(node.target).moves and _is_along(node, len(shape_of(node.args[0])) - 1)


def _is_along(node: Node, axis: int) -> bool:
    """Whether a call treats what lies along an axis of the one tensor that it takes one by one."""
    found = in_parts(node, {one: axis for one in node.all_input_nodes if shape_of(one)})
    last = len(shape_of(node)) - 1
    return found is not None and found.result == (last if of(node.target).moves else axis)


def _factors(node: Node | None) -> tuple[Node, Any, Any, bool] | None:
    """Rows, weight, bias of a linear layer, and whether the weight has a column for each class; None if it is none."""
    if node is None or not may_be_in_parts(node) or (found := rule_of(node.target).layer(node.args)) is None:
        return None
    rows, weight, bias, _ = found
    return found if len(shape_of(rows)) >= 2 and len(shape_of(weight)) == 2 and len(shape_of(bias)) < 2 else None


def put_in_chunks(head: LossHead, chunks: int, device: torch.device) -> None:
    """Replace the calls of a region by one."""
    loss, summed = head.loss, head.summed
    rows, weight, bias, by_columns = _factors(head.product) or (head.rows, None, None, False)
    with loss.graph.inserting_before(loss):
        for node in head.chain:
            if moves_rows(node):
                rows = _of_rows(node, rows)
        if len(shape_of(rows)) != 2:
            rows = _reshaped(loss, rows, (prod(shape_of(rows)[:-1]), shape_of(rows)[-1]))
        targets = summed.targets
        if len(shape_of(targets)) != 1 and shape_of(targets) != shape_of(summed.args[0]):
            targets = _reshaped(loss, targets, (prod(shape_of(targets)),))
        body, others = _body(head, device)
        axes = (0, 0, *[None] * (3 + len(others)))
        name = f"sliced_{head.nodes[0].name}"
        region = ChunkedLoss(name, body, axes, chunks, 0, by_columns, summed.ignored, summed.is_mean)
        new = call_beside(loss, region, rows, targets, weight, bias, summed.classes, *others)
    new.meta.update(module=place_of(head.nodes), operator="chunked loss")
    loss.replace_all_uses_with(new)
    for node in reversed(head.nodes):
        loss.graph.erase_node(node)


def _of_rows(node: Node, rows: Node) -> Node:
    """What a call does to the rows of the scores, done to those that go into the layer."""
    shape = (*shape_of(node)[:-1], shape_of(rows)[-1])
    if rule_of(node.target).sizes is not None:  # a view of the scores need not be one of the rows
        return _reshaped(node, rows, shape)
    new = call_beside(node, node.target, rows, *node.args[1:], **node.kwargs)
    new.meta[SHAPE] = shape
    return new


def _reshaped(beside: Node, tensor: Node, shape: tuple[int, ...]) -> Node:
    new = call_beside(beside, torch.ops.aten.reshape.default, tensor, list(shape))
    new.meta[SHAPE] = shape
    return new


def _body(head: LossHead, device: torch.device) -> tuple[torch.fx.Graph, list[Node]]:
    """From scores, targets and weights of classes to the sum of the losses, and what else that takes."""
    body = torch.fx.Graph()
    scores, targets, classes = (body.placeholder(name) for name in ("scores", "targets", "classes"))
    outside = [one for node in head.chain for one in node.all_input_nodes if not shape_of(one)]
    others = {one: body.placeholder(f"other_{n}") for n, one in enumerate(dict.fromkeys(outside))}
    copies: dict[Node, Any] = {head.product or head.rows: scores, head.summed.targets: targets, **others}
    if isinstance(head.summed.classes, Node):
        copies[head.summed.classes] = classes
    for node in head.chain:
        (before,) = (one for one in node.all_input_nodes if shape_of(one))
        if moves_rows(node) or _puts_last_second(node):
            copies[node] = copies[before]
        else:
            copies[node] = copied_into(body, node, copies, 0, device)
            if (dims := rule_of(node.target).dims) is not None:  # there are no more than two of them here
                copies[node].update_arg(dims, -1)
    body.output(body.call_function(head.loss.target, map_arg(head.summed.args, copies.__getitem__)))  # type: ignore[arg-type]
    return body, list(others)
