"""Finds a linear layer into many classes and the loss behind it, and puts one operator in the place of both.

What lies between works row by row: views that only move rows, such as shifted or flattened ones, are made of the rows
that go into the layer instead, and the rest, such as a cast to float32, goes with the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.fx.node import map_arg

from ...operators.registry import Summed, of
from ...operators.slices import SlicedLoss
from ...program.program import SHAPE, call_beside
from ...torch_state.private import OpOverload, schema_of
from .blocks import copied_into, has_shapes, in_parts, may_be_in_parts, place_of, shape_of

Node = torch.fx.Node


@dataclass(frozen=True)
class LossHead:
    """A loss and what goes before it."""

    loss: Node  # its call
    summed: Summed  # how it is made of a sum
    # from the product to before the loss, in order; the first takes ``rows``, or the result of ``product``
    chain: tuple[Node, ...]
    product: Node | None  # the linear layer, if the chain begins there
    rows: Node  # what goes in

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (*([self.product] if self.product else []), *self.chain, self.loss)


def loss_head(loss: Node) -> LossHead | None:
    """The stretch that ends with a call, if that is a loss over rows."""
    if not isinstance(loss.target, OpOverload) or loss.kwargs or not has_shapes(loss):
        return None
    if (summed := of(loss.target).summed(loss.args)) is None:
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
    found = node.target(numbered, *node.args[1:]) if of(node.target).sizes is None else None  # type: ignore[operator]
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
    if node is None or not may_be_in_parts(node) or (found := of(node.target).layer(node.args)) is None:
        return None
    rows, weight, bias, _ = found
    return found if len(shape_of(rows)) >= 2 and len(shape_of(weight)) == 2 and len(shape_of(bias)) < 2 else None


def put_in_slices(head: LossHead, slices: int, device: torch.device) -> None:
    """Replace the calls of a stretch by one."""
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
        stretch = SlicedLoss(name, body, axes, slices, 0, by_columns, summed.ignored, summed.is_mean)
        new = call_beside(loss, stretch, rows, targets, weight, bias, summed.classes, *others)
    new.meta.update(module=place_of(head.nodes), operator="sliced loss")
    loss.replace_all_uses_with(new)
    for node in reversed(head.nodes):
        loss.graph.erase_node(node)


def _of_rows(node: Node, rows: Node) -> Node:
    """What a call does to the rows of the scores, done to those that go into the layer."""
    shape = (*shape_of(node)[:-1], shape_of(rows)[-1])
    if of(node.target).sizes is not None:  # a view of the scores need not be one of the rows
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
            if (dims := of(node.target).dims) is not None:  # there are no more than two of them here
                copies[node].update_arg(dims, -1)
    body.output(body.call_function(head.loss.target, map_arg(head.summed.args, copies.__getitem__)))  # type: ignore[arg-type]
    return body, list(others)
