"""Which nodes of a graph become one kernel when it is compiled, and which of their results are in memory.

A model of what Inductor does: elementwise operators and reductions over the last dimensions are fused with what makes
their operands; views are none; anything else is a kernel of its own. A result that only its own kernel reads is
never in memory.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import networkx as nx
import torch
from torch.fx import Node

from ..parser.weigh.meter import flops_of
from ..torch_state.compilers import prims
from ..torch_state.private import OpOverload

aten = torch.ops.aten

FUSED = frozenset({
    aten.clone, aten.copy, aten.full, aten.full_like, aten.arange, aten.scalar_tensor, aten.empty, aten.embedding,
    aten.index, aten.gather, aten.constant_pad_nd, aten.where, aten.slice_scatter, aten.select_scatter,
    aten.repeat, aten.flip, aten.cat, aten.zeros_like, aten.ones_like, aten.native_dropout_backward,
    aten.fill, aten._to_copy, aten.unfold, aten.tril, aten.triu, aten.lift_fresh_copy,
    prims.convert_element_type, prims.iota, prims.inductor_random, prims.inductor_lookup_seed, prims.device_put,
})  # fmt: skip
"""Operators that are computed element by element beside those that torch tags as pointwise."""

REDUCTIONS = frozenset({
    aten.sum, aten.mean, aten.amax, aten.amin, aten.prod, aten.any, aten.all, aten.var, aten.var_mean, aten.argmax,
    aten.argmin, aten.max, aten.min, aten.logsumexp, aten.std,
})  # fmt: skip
"""Operators that are computed in a loop over what they reduce."""

VIEWS = frozenset({aten._unsafe_view.default})
"""Operators that are views in compiled code, though their schemas say nothing of it."""

RANDOM = frozenset({prims.inductor_random, prims.inductor_randint})
"""Operators that draw the numbers which a seed stands for: the same each time."""

SEEDED = frozenset({prims.inductor_lookup_seed})
"""Operators that take one seed out of several."""


def is_tensor(node: Node) -> bool:
    """Whether a node's value is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def size(value: Any) -> int:
    """A number of elements or bytes; the one that it has now, where it is symbolic."""
    if isinstance(value, int):
        return value
    hint = value.node.hint
    return 1 if hint is None else int(hint)


def elements(node: Node) -> int:
    return size(node.meta["val"].numel())


def nbytes(node: Node) -> int:
    """Bytes of a node's tensor, once it is in memory."""
    tensor = node.meta["val"]
    return size(tensor.numel()) * tensor.element_size() if tensor.layout is torch.strided else 0


def is_view(target: Any) -> bool:
    """Whether an operator makes nothing."""
    return isinstance(target, OpOverload) and (target.is_view or target in VIEWS)


def packet(node: Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


@cache
def _is_pointwise(target: Any) -> bool:
    return isinstance(target, OpOverload) and (torch.Tag.pointwise in target.tags or target.overloadpacket in FUSED)


def is_fused(node: Node) -> bool:
    """Whether a node is computed element by element."""
    return node.op == "call_function" and _is_pointwise(node.target) and is_tensor(node)


def is_reduction(node: Node) -> bool:
    return node.op == "call_function" and packet(node) in REDUCTIONS


def is_inlined(node: Node) -> bool:
    """Whether a node is computed wherever it is read, out of no tensor or of a seed."""
    return node.op == "call_function" and (packet(node) in SEEDED or (is_fused(node) and not node.all_input_nodes))


def is_free(node: Node) -> bool:
    """Whether a node is part of no kernel."""
    return is_view(node.target) or is_inlined(node)


def is_part(node: Node) -> bool:
    """Whether a node takes one result out of several."""
    return node.target is operator.getitem


def base_of(node: Node) -> Node:
    """The node whose memory a node's value lies in: itself, unless it is a view or a part of several views."""
    while node.op == "call_function":
        whole = node.args[0] if is_part(node) else node
        if not isinstance(whole, Node) or not is_view(whole.target):
            return node
        node = whole.all_input_nodes[0]
    return node


def maker_of(base: Node) -> Node:
    """The node that computes what a base takes out of several results, or itself."""
    return base.all_input_nodes[0] if is_part(base) else base


@dataclass(eq=False)
class Kernel:
    """Nodes that are computed together, in order; nodes that take out their results are not among them.

    Attributes:
        is_fused: whether elementwise nodes and reductions may be added.
        sizes: numbers of elements that its loops run over.
        loop: how many elements its reductions read, if it has any.
        is_ended: whether a reduction ends the loop over all elements, as it is none over the last dimensions.
        turn: when it runs; those with lower ones run later.
    """

    number: int
    nodes: list[Node] = field(default_factory=list)
    is_fused: bool = True
    sizes: set[int] = field(default_factory=set)
    loop: int = 0
    is_ended: bool = False
    turn: int = 0

    def takes(self, other: Kernel) -> bool:
        """Whether a kernel that reads from this one can become part of it.

        Random numbers go with the mask that is made of them alone: that can be kept where drawing takes long.
        """
        if self.draws and not (len(other.nodes) == 1 and _is_mask(other.nodes[0])):
            return False
        if not (self.is_fused and other.is_fused) or self.sizes.isdisjoint(other.sizes):
            return False
        if self.is_ended:
            return self.loop not in other.sizes
        return not (self.loop and other.loop) or self.loop == other.loop

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return any(packet(node) in RANDOM for node in self.nodes)

    def take(self, other: Kernel) -> None:
        """Take in a kernel that this one reads from."""
        self.nodes = other.nodes + self.nodes
        self.sizes |= other.sizes
        self.loop, self.is_ended = self.loop or other.loop, self.is_ended or other.is_ended


def _is_mask(node: Node) -> bool:
    return is_tensor(node) and node.meta["val"].dtype is torch.bool


def _alone(number: int, node: Node) -> Kernel:
    """A kernel of one node."""
    if not is_reduction(node):
        fused = is_fused(node)
        return Kernel(number, [node], fused, {elements(node)} if fused else set())
    given = node.all_input_nodes[0]
    dims = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], (list, tuple, int)) else None
    rank = given.meta["val"].dim()
    dims = sorted(d % max(rank, 1) for d in ([dims] if isinstance(dims, int) else dims or range(rank)))
    value = node.meta["val"]
    made = value if isinstance(value, torch.Tensor) else value[0]
    is_last = list(dims) == list(range(rank - len(dims), rank))
    return Kernel(number, [node], True, {elements(given), size(made.numel())}, elements(given), not is_last)


class Kernels:
    """The kernels of some nodes of a graph, numbered such that each reads from earlier ones alone.

    Args:
        nodes: in an order in which they can run.
        fuses: whether any are; else each is a kernel of its own.
        turns: a number for each node: those with lower ones run later. What is fused has one turn.
        waits: whether a node may run in a later turn than its own.
    """

    def __init__(
        self,
        nodes: Iterable[Node],
        fuses: bool,
        turns: Mapping[Node, int] | None = None,
        waits: Callable[[Node], bool] = lambda node: False,
    ) -> None:
        self._waits = waits
        self.of: dict[Node, Kernel] = {}
        kernels: list[Kernel] = []
        for node in nodes:
            if node.op == "call_function" and not is_free(node) and not is_part(node) and _has_tensor(node):
                self.of[node] = _alone(len(kernels), node) if fuses else Kernel(len(kernels), [node], False)
                self.of[node].turn = turns[node] if turns else 0
                kernels.append(self.of[node])
        self.kernels = self._in_order(self._fused(kernels))

    def kernel_of(self, base: Node) -> Kernel | None:
        """The kernel that computes a base; None for one that is given."""
        return self.of.get(maker_of(base))

    def reads(self, node: Node) -> list[Node]:
        """The bases that a node reads."""
        found: dict[Node, None] = {}
        for given in node.all_input_nodes:
            base = base_of(given)
            found |= dict.fromkeys(self.reads(base)) if is_inlined(base) else {base: None}
        return list(found)

    def _fused(self, kernels: list[Kernel]) -> list[Kernel]:
        """Fuse each kernel with what it reads from, nearest first, as long as no circle comes of it."""
        dag = nx.DiGraph()
        dag.add_nodes_from(kernels)
        for kernel in kernels:
            dag.add_edges_from((maker, kernel) for maker in self._makers(kernel))
        for kernel in kernels:
            for maker in sorted(dag.predecessors(kernel), key=lambda one: -one.number):
                if maker.takes(kernel) and self._meets(dag, maker, kernel) and not _leads_around(dag, maker, kernel):
                    kernel.take(maker)
                    edges = [(one, kernel) for one in dag.predecessors(maker)]
                    edges += [(kernel, one) for one in dag.successors(maker) if one is not kernel]
                    dag.remove_node(maker)
                    dag.add_edges_from(edges)
        self.of = {node: kernel for kernel in dag for node in kernel.nodes}
        return list(nx.lexicographical_topological_sort(dag, key=lambda kernel: (-kernel.turn, kernel.number)))

    def _meets(self, dag: nx.DiGraph, maker: Kernel, kernel: Kernel) -> bool:
        """Whether both run in one turn, or what makes can wait for that of what reads."""
        if maker.turn == kernel.turn:
            return True
        return all(map(self._waits, maker.nodes)) and all(one.turn <= kernel.turn for one in dag.successors(maker))

    def _makers(self, kernel: Kernel) -> Iterator[Kernel]:
        for node in kernel.nodes:
            yield from (maker for base in self.reads(node) if (maker := self.kernel_of(base)) is not None)

    def _in_order(self, kernels: list[Kernel]) -> list[Kernel]:
        for number, kernel in enumerate(kernels):
            kernel.number = number
        return kernels


def _leads_around(dag: nx.DiGraph, maker: Kernel, kernel: Kernel) -> bool:
    """Whether a kernel depends on another one through a third."""
    seen: set[Kernel] = set()
    queue = [one for one in dag.successors(maker) if one is not kernel and one.number < kernel.number]
    while queue:
        for one in dag.successors(queue.pop()):
            if one is kernel:
                return True
            if one.number < kernel.number and one not in seen:
                seen.add(one)
                queue.append(one)
    return False


def _has_tensor(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, (torch.Tensor, tuple, list)) or value is None


def flops(nodes: Sequence[Node]) -> int:
    """Floating-point operations of nodes."""
    total = 0
    for node in nodes:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
        total += size(flops_of(node.target, args, kwargs, node.meta.get("val")))
    return total
