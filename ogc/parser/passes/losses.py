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

from ...operators.registry import Summed, is_elementwise, of
from ...operators.slices import SlicedLoss
from ...program.program import SHAPE, call_beside
from ...torch_state.private import OpOverload, schema_of

Node = torch.fx.Node

aten = torch.ops.aten

_SAME = {aten.alias.default, aten.contiguous.default}
"""They change no entry, and none of the shape."""

_REGROUP = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.squeeze.dim,
    aten.unsqueeze.default,
}
"""They keep the order of entries."""

_CASTS = {aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten._to_copy.default}


@dataclass(frozen=True)
class LossHead:
    """A loss and what goes before it.

    Attributes:
        loss: its call.
        summed: how it is made of a sum.
        chain: from the product to before the loss, in order; the first one takes ``rows``, or the result of
            ``product``.
        product: the linear layer, if the chain begins there.
        rows: what goes in.
    """

    loss: Node
    summed: Summed
    chain: tuple[Node, ...]
    product: Node | None
    rows: Node

    @property
    def first(self) -> Node:
        """The first of its calls."""
        return (self.product and [self.product] or [*self.chain, self.loss])[0]

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All its calls, in order."""
        return (*([self.product] if self.product else []), *self.chain, self.loss)


def loss_head(loss: Node) -> LossHead | None:
    """The stretch that ends with a call, if that is a loss over rows."""
    if not isinstance(loss.target, OpOverload) or loss.kwargs or not _has_shapes(loss):
        return None
    if (summed := of(loss.target).summed(loss.args)) is None:
        return None
    scores = summed.args[0]
    current, user, chain = scores, loss, []
    if len(_shape(scores)) > 2:  # classes come second, rows after them
        if not _puts_last_second(scores) or list(scores.users) != [loss]:
            return None
        chain, current, user = [scores], scores.args[0], scores
    elif len(_shape(scores)) < 2:
        return None
    if _shape(summed.targets) == _shape(scores) != _shape(current):
        return None  # probabilities, laid out in another way than rows
    while list(current.users) == [user] and (given := _given_by_row(current)) is not None:
        chain.insert(0, current)
        current, user = given, current
    product = current if _factors(current) is not None and list(current.users) == [user] else None
    rows = current if product is None else _factors(product)[0]  # type: ignore[index]
    return LossHead(loss, summed, tuple(chain), product, rows)


def _has_shapes(node: Node) -> bool:
    return all(SHAPE in one.meta for one in (node, *node.all_input_nodes))


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta.get(SHAPE, ())) if isinstance(node, Node) else ()


def _puts_last_second(node: Node) -> bool:
    """Whether a call only moves the last dimension to the second place."""
    if node.target not in (aten.transpose.int, aten.permute.default, aten.movedim.int):
        return False
    last = len(_shape(node)) - 1
    numbered = torch.empty([*range(last + 1)], device="meta")
    return tuple(node.target(numbered, *node.args[1:]).shape) == (0, last, *range(1, last))  # type: ignore[operator]


def _given_by_row(node: Node) -> Node | None:
    """What a call takes, if it works on each row of that by itself; None if it does not, or is no call."""
    if not isinstance(node.target, OpOverload) or schema_of(node.target).is_mutable or not _has_shapes(node):
        return None
    given = [one for one in node.all_input_nodes if _shape(one)]
    if len(given) != 1 or _shape(given[0])[-1:] != _shape(node)[-1:]:
        return None
    (before,) = given
    if is_elementwise(node.target) and _shape(before) == _shape(node):
        return before
    if node.args[0] is not before or node.all_input_nodes != [before]:
        return None
    is_by_row = node.target in _SAME | _CASTS or _moves_rows(node) or _is_over_last(node)
    return before if is_by_row or (node.target in _REGROUP and prod(_shape(before)) == prod(_shape(node))) else None


def _moves_rows(node: Node) -> bool:
    """Whether a call takes some of the rows, or puts them in another order."""
    last = len(_shape(node.args[0])) - 1
    places = {aten.slice.Tensor: 1, aten.select.int: 1, aten.narrow.default: 1, aten.transpose.int: 2}
    if node.target not in places:
        return False
    dims = (*node.args, *((0,) if len(node.args) < 2 else ()))[1 : 1 + places[node.target]]
    return all(dim % (last + 1) != last for dim in dims)  # type: ignore[operator]


def _is_over_last(node: Node) -> bool:
    return node.target is aten.log_softmax.int and node.args[1] in (-1, len(_shape(node)) - 1)


def _factors(node: Node) -> tuple[Node, Any, Any, bool] | None:
    """Rows, weight, bias of a linear layer, and whether the weight has a column for each class; None if it is none."""
    if not isinstance(node.target, OpOverload) or node.kwargs or not _has_shapes(node):
        return None
    if node.target is aten.linear.default:
        rows, weight, bias = (*node.args, None)[:3]
        found = rows, weight, bias, False
    elif node.target in (aten.matmul.default, aten.mm.default):
        found = *node.args, None, True  # type: ignore[assignment]
    elif node.target is aten.addmm.default and len(node.args) == 3:
        found = node.args[1], node.args[2], node.args[0], True
    else:
        return None
    is_layer = len(_shape(found[0])) >= 2 and len(_shape(found[1])) == 2 and len(_shape(found[2])) < 2
    return found if is_layer else None  # type: ignore[return-value]


def put_in_slices(head: LossHead, slices: int) -> None:
    """Replace the calls of a stretch by one."""
    loss, summed = head.loss, head.summed
    rows, weight, bias, by_columns = _factors(head.product) if head.product else (head.rows, None, None, False)
    with loss.graph.inserting_before(loss):
        for node in head.chain:
            if _is_over_rows(node):
                rows = _of_rows(node, rows)
        width = _shape(rows)[-1]
        flat = rows if len(_shape(rows)) == 2 else call_beside(loss, aten.reshape.default, rows, [-1, width])
        targets = summed.targets
        if len(_shape(targets)) != 1 and _shape(targets) != _shape(summed.args[0]):
            targets = call_beside(loss, aten.reshape.default, targets, [-1])
        body, others = _body(head)
        stretch = SlicedLoss(f"sliced_{head.first.name}", body, 2, slices, by_columns, summed.ignored, summed.is_mean)
        new = call_beside(loss, stretch, flat, targets, weight, bias, summed.classes, *others)
    modules = [str(node.meta.get("module", "")) for node in (head.first, loss)]
    new.meta.update(module=modules[0] if modules[0] == modules[1] else " to ".join(modules), operator="sliced loss")
    new.meta[SHAPE] = ()
    loss.replace_all_uses_with(new)
    for node in reversed(head.nodes):
        loss.graph.erase_node(node)


def _is_over_rows(node: Node) -> bool:
    """Whether a call of the chain moves rows, and leaves each as it is."""
    return _moves_rows(node) or node.target in _REGROUP


def _of_rows(node: Node, rows: Node) -> Node:
    """What the call does to the rows of the scores, done to those that go into the layer."""
    lead = list(_shape(node)[:-1])
    if _puts_last_second(node):
        return rows  # and back, where rows are counted
    if node.target in _REGROUP:
        new = call_beside(node, aten.reshape.default, rows, [*lead, _shape(rows)[-1]])
    else:
        new = call_beside(node, node.target, rows, *node.args[1:], **node.kwargs)
    new.meta[SHAPE] = (*lead, _shape(rows)[-1])
    return new


def _body(head: LossHead) -> tuple[torch.fx.Graph, list[Node]]:
    """From scores, targets and weights of classes to the sum of the losses, and what else that takes."""
    body = torch.fx.Graph()
    scores, targets, classes = (body.placeholder(name) for name in ("scores", "targets", "classes"))
    outside = [one for node in head.chain for one in node.all_input_nodes if not _shape(one)]
    others = {one: body.placeholder(f"other_{n}") for n, one in enumerate(dict.fromkeys(outside))}
    copies: dict[Node, Any] = {head.product or head.rows: scores, head.summed.targets: targets, **others}
    if isinstance(head.summed.classes, Node):
        copies[head.summed.classes] = classes
    for node in head.chain:
        (before,) = (one for one in node.all_input_nodes if _shape(one))
        if _is_over_rows(node) or _puts_last_second(node) or node.target in _SAME:
            copies[node] = copies[before]
            continue
        copies[node] = body.node_copy(node, copies.__getitem__)
        if _is_over_last(node):
            copies[node].update_arg(1, -1)
    args = map_arg(head.summed.args, copies.__getitem__)
    body.output(body.call_function(head.loss.target, args))
    return body, list(others)
