"""The weighted graph of a joint graph, that is of the forward and backward of one function, as AOTAutograd traces them.

An operation is a kernel of the forward, with those of the backward that can run once the backward has come to it. A
value is what a kernel leaves in memory. What is computed element by element inside of a kernel is no value: a backward
that reads it computes it from the values around.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cached_property
from itertools import groupby

import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node

from ..graph import Graph, Operation, Value
from ..operators.gpus import gpu_of
from ..parser.weigh.meter import Rates, rates_of
from ..torch_state.compilers import prims
from ..torch_state.private import DIFFERENTIABLE, FUNCTIONAL, OpOverload, schema_of
from .kernels import (
    RANDOM,
    Kernel,
    Kernels,
    base_of,
    elements,
    flops,
    is_fused,
    is_part,
    is_tensor,
    is_view,
    maker_of,
    nbytes,
    packet,
)

DRAWS = frozenset({prims.inductor_seeds})
"""Operators beside those that torch tags as seeded by the random stream that must not run twice."""

DRAW_SECONDS = 1.2e-8
"""What Inductor's code takes on a CPU for one random number: measured on an EPYC with torch 2.14, where the same kernel
without it took 1.6e-10."""

FEW = 2
"""Operations that read a value beside each other, as those of one layer do; what more read is of the whole model."""

COLLECTIVES = frozenset({FUNCTIONAL, DIFFERENTIABLE, "_dtensor"})
"""Where operators live that other ranks take part in."""


class JointGraph:
    """A joint graph, and what is needed to plan it.

    Attributes:
        forward, later: its nodes, without placeholders and the output.
        returned, results: what the forward and the backward return.
        left_bytes: gradients of parameters.

    Args:
        graph: the joint graph.
        forward_outputs: how many of its results are the forward's.
        fuses: whether a compiler fuses operators; else each is a kernel of its own.
        parameters: which inputs stay from step to step.
    """

    def __init__(
        self, graph: FxGraph, forward_outputs: int, fuses: bool = True, parameters: Collection[int] = ()
    ) -> None:
        self.fuses = fuses
        nodes = list(graph.nodes)
        (output,) = (node for node in nodes if node.op == "output")
        results = list(output.args[0])
        self.given = {node for node in nodes if node.op == "placeholder"}
        self.returned = [node for node in results[:forward_outputs] if isinstance(node, Node)]
        self.results = [node for node in results[forward_outputs:] if isinstance(node, Node)]
        left = (results[forward_outputs + n] for n in parameters if forward_outputs + n < len(results))
        self.left_bytes = sum(nbytes(node) for node in left if isinstance(node, Node))
        last = max(n for n, node in enumerate(nodes) if _tag(node) == "is_forward")
        called = [(n, node) for n, node in enumerate(nodes) if node.op in ("call_function", "get_attr")]
        self.forward = [node for n, node in called if n <= last]
        self.later = [node for n, node in called if n > last and not _tag(node).startswith("must_be_in_forward")]
        self._places = {node: n for n, node in enumerate(nodes)}
        self.tangents = {node for node in self.given if node.name.startswith("tangents")}
        self.in_forward = set(self.forward)

    @cached_property
    def kernels(self) -> Kernels:
        """Those of the forward."""
        return Kernels(self.forward, self.fuses)

    @cached_property
    def values(self) -> tuple[Node, ...]:
        """The bases that the forward leaves in memory, by their kernels."""
        found: dict[Node, None] = {}
        returned = {base_of(node) for node in self.returned}
        for node in self.forward:
            if not is_tensor(node) or base_of(node) is not node:
                continue
            kernel = self.kernels.kernel_of(node)
            if kernel is not None and (self._is_kept(node, kernel) or node in returned):
                found[node] = None
        return tuple(sorted(found, key=lambda node: self.number(node)))

    def number(self, base: Node) -> int:
        """The number of the operation that makes a value."""
        kernel = self.kernels.kernel_of(base)
        assert kernel is not None
        return kernel.number

    def _is_kept(self, base: Node, kernel: Kernel) -> bool:
        """Whether a base is in memory: others read it, or it cannot be computed from what they read."""
        if not kernel.is_fused or not is_fused(maker_of(base)):
            return True
        users = (user for user in users_of(base) if user in self.in_forward)
        return any(self.kernels.of.get(user, kernel) is not kernel for user in users)

    @cached_property
    def _numbers(self) -> dict[Node, int]:
        return {node: n for n, node in enumerate(self.values)}

    def sources(self, node: Node) -> frozenset[int]:
        """The values from which a node of the forward is computed element by element; inputs stay, and are none."""
        if node not in self._sources:
            base = base_of(node)
            if base in self._numbers:
                found = frozenset([self._numbers[base]])
            elif base in self.in_forward:
                found = frozenset().union(*map(self.sources, base.all_input_nodes))
            else:
                found = frozenset()
            self._sources[node] = found
        return self._sources[node]

    @cached_property
    def _sources(self) -> dict[Node, frozenset[int]]:
        return {}

    @cached_property
    def turns(self) -> dict[Node, int]:
        """For each node of the backward, the operation whose turn it is when all that it reads is there.

        A node that reads nothing of the forward runs at once. What the gradients of many operations read, such as the
        sines of rotary embeddings, does not say whose turn it is: autograd's number of the node does.
        """
        turns: dict[Node, int] = {}
        end = len(self.kernels.kernels)
        for node in self.later:
            own = self._own_number(node)
            values = self.saved_by(node)
            read = [own if own is not None and v in self._shared else self.number(self.values[v]) for v in values]
            given = [turns[one] for one in node.all_input_nodes if one in turns]
            turns[node] = min([max(read, default=end), *given])
        return {node: max(0, min(turn, end - 1)) for node, turn in turns.items()}

    def _own_number(self, node: Node) -> int | None:
        """The operation whose gradient a node of the backward computes, where autograd says so."""
        return self._numbers_in_autograd.get(node.meta.get("seq_nr"))

    @cached_property
    def _numbers_in_autograd(self) -> dict[int | None, int]:
        """The last operation of each call in the forward, by the number that autograd's node of it has."""
        nodes = (node for kernel in self.kernels.kernels for node in kernel.nodes if "seq_nr" in node.meta)
        return {node.meta["seq_nr"]: self.kernels.of[node].number for node in nodes}

    @cached_property
    def _shared(self) -> set[int]:
        """The values that the gradients of more than ``FEW`` operations read."""
        readers: dict[int, set[int | None]] = {}
        for node in self.later:
            for v in self.saved_by(node):
                readers.setdefault(v, set()).add(self._own_number(node))
        return {v for v, numbers in readers.items() if len(numbers - {None}) > FEW}

    def saved_by(self, node: Node) -> frozenset[int]:
        """The values that a node of the backward reads."""
        read = (one for one in node.all_input_nodes if one in self.in_forward)
        return frozenset().union(*map(self.sources, read))

    @cached_property
    def backward(self) -> Kernels:
        """The kernels of the backward. What reads nothing of the forward may wait for what it is fused with."""
        order = sorted(self.later, key=lambda node: (-self.turns[node], self._places[node]))
        return Kernels(order, self.fuses, self.turns, lambda node: not self.saved_by(node))

    def left_by(self, kernel: Kernel) -> list[Node]:
        """The bases that a kernel of the backward leaves in memory."""
        found, kernels, results = [], self.backward.of, set(map(base_of, self.results))
        for node in kernel.nodes:
            for base in [node] if is_tensor(node) else [user for user in node.users if is_part(user)]:
                if base in results or any(kernels.get(user) is not kernel for user in users_of(base)):
                    found.append(base)
        return found

    def weighted(self, device: torch.device) -> Graph:
        """The graph, with bytes as they are in memory and seconds from a roofline.

        Raises:
            ParseError: it is none that can be planned.
        """
        rates = rates_of(device.type, gpu_of(device, None))
        kernels = self.kernels.kernels
        made: list[list[int]] = [[] for _ in kernels]
        for v, base in enumerate(self.values):
            made[self.number(base)].append(v)
        saved = self._saved()
        gradients = Gradients(self)
        operations = []
        for t, kernel in enumerate(kernels):
            reads = self._reads(kernel)
            seconds, count = self._forward_weight(kernel, [*reads, *made[t]], rates)
            asked, most, later_seconds, later_flops = gradients.weight(t, rates)
            operations.append(
                Operation(
                    name=kernel.nodes[-1].name,
                    target=str(kernel.nodes[-1].target),
                    module=_module_of(kernel.nodes[-1]),
                    reads=tuple(sorted((reads | saved[t]) - set(made[t]))),
                    writes=tuple(made[t]),
                    saves=tuple(sorted(saved[t])),
                    gradient_bytes=asked,
                    backward_bytes=most,
                    forward_seconds=seconds,
                    forward_flops=count,
                    backward_seconds=later_seconds,
                    backward_flops=later_flops,
                    replayable=not any(map(runs_once, kernel.nodes)),
                )
            )
        returned = {self._numbers[base] for node in self.returned if (base := base_of(node)) in self._numbers}
        values = tuple(Value(base.name, nbytes(base), is_output=v in returned) for v, base in enumerate(self.values))
        return Graph(tuple(operations), values, device=str(device), left_bytes=self.left_bytes)

    def _reads(self, kernel: Kernel) -> set[int]:
        own = set(kernel.nodes)
        outside = (one for node in kernel.nodes for one in node.all_input_nodes if one in self.in_forward)
        return {v for one in outside if maker_of(base_of(one)) not in own for v in self.sources(one)}

    def _saved(self) -> list[set[int]]:
        """For each operation, the values that its turn in the backward reads."""
        saved: list[set[int]] = [set() for _ in self.kernels.kernels]
        for node, turn in self.turns.items():
            for v in self.saved_by(node):
                saved[max(turn, self.number(self.values[v]))].add(v)
        return saved

    def _forward_weight(self, kernel: Kernel, touched: Iterable[int], rates: Rates) -> tuple[float, int]:
        moved = sum(nbytes(self.values[v]) for v in touched) + _bytes_given(kernel, self.given)
        count, drawn = flops(kernel.nodes), sum(elements(node) for node in kernel.nodes if packet(node) in RANDOM)
        seconds = rates.seconds(count, moved, _type_of(kernel))
        return seconds + (DRAW_SECONDS * drawn if rates.gpu is None else 0.0), count


class Gradients:
    """What the backward leaves in memory beside the values of the forward, turn by turn."""

    def __init__(self, joint: JointGraph) -> None:
        self.joint = joint
        self.kernels = joint.backward
        self._last = self._last_uses()
        self._made = {kernel: joint.left_by(kernel) for kernel in self.kernels.kernels}
        self._turns = {
            turn: list(kernels) for turn, kernels in groupby(self.kernels.kernels, lambda kernel: kernel.turn)
        }
        self._bytes = self._walk()

    def _last_uses(self) -> dict[Node, int]:
        """For each base of the backward, the number of the last kernel that reads it; beyond all for a result."""
        last: dict[Node, int] = {}
        for kernel in self.kernels.kernels:
            for node in kernel.nodes:
                for base in self.kernels.reads(node):
                    last[base] = kernel.number
        return {**last, **dict.fromkeys(map(base_of, self.joint.results), len(self.kernels.kernels))}

    def _walk(self) -> dict[int, tuple[int, int]]:
        """For each turn, the bytes that are alive when it comes, and the most while it runs."""
        alive = {base: nbytes(base) for base in self.joint.tangents if is_tensor(base)}
        total, found = sum(alive.values()), dict[int, tuple[int, int]]()
        for turn, kernels in self._turns.items():
            asked = most = total
            for kernel in kernels:
                made = {base: nbytes(base) for base in self._made[kernel]}
                ended = [b for n in kernel.nodes for b in self.kernels.reads(n) if self._last.get(b) == kernel.number]
                released = sum(alive.pop(base) for base in dict.fromkeys(ended) if base in alive)
                total += sum(made.values())
                most = max(most, total - (_reused(made.values(), released) if kernel.is_fused else 0))
                total -= released
                alive |= made
                total -= sum(alive.pop(base) for base in made if base not in self._last)
            found[turn] = asked, max(most, total)
        return found

    def weight(self, turn: int, rates: Rates) -> tuple[int, int, float, int]:
        """Bytes when an operation's turn comes, most bytes while it runs, its seconds and FLOPs."""
        kernels = self._turns.get(turn, [])
        seconds, count = 0.0, 0
        for kernel in kernels:
            reads = {base for node in kernel.nodes for base in self.kernels.reads(node) if is_tensor(base)}
            moved = sum(nbytes(base) for base in (*reads, *self._made[kernel]) if is_tensor(base))
            here = flops(kernel.nodes)
            seconds, count = seconds + rates.seconds(here, moved, _type_of(kernel)), count + here
        asked, most = self._bytes.get(turn, self._before(turn))
        return asked, most, seconds, count

    def _before(self, turn: int) -> tuple[int, int]:
        later = [number for number in self._bytes if number > turn]
        return self._bytes[min(later)] if later else (0, 0)


def _reused(made: Iterable[int], released: int) -> int:
    """Bytes of what is released that a fused kernel writes its results into."""
    return min(sum(made), released)


def _tag(node: Node) -> str:
    """Where AOTAutograd says that a node belongs."""
    return str(node.meta.get("partitioner_tag", ""))


def users_of(base: Node) -> list[Node]:
    """The nodes that read a base, through views too."""
    found: dict[Node, None] = {}
    queue = [base]
    while queue:
        for user in queue.pop().users:
            if user.op == "call_function" and (is_view(user.target) or (is_part(user) and base_of(user) is not user)):
                queue.append(user)
            else:
                found[user] = None
    return list(found)


def runs_once(node: Node) -> bool:
    """Whether a node must not run a second time: it draws from the random stream, or has effects."""
    if not isinstance(node.target, OpOverload):
        return True
    if packet(node) in RANDOM:
        return False
    if node.target.namespace in COLLECTIVES:
        return True
    return (is_seeded(node) and not _drops_nothing(node)) or schema_of(node.target).is_mutable


def is_seeded(node: Node) -> bool:
    """Whether torch says that a node draws from the random stream."""
    if not isinstance(node.target, OpOverload):
        return False
    return packet(node) in DRAWS or torch.Tag.nondeterministic_seeded in node.target.tags


def _drops_nothing(node: Node) -> bool:
    """Whether a node is attention without dropout, which draws nothing."""
    names = [argument.name for argument in schema_of(node.target).arguments]
    if "dropout_p" not in names:
        return False
    place = names.index("dropout_p")
    return bool((node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", 0.0)) == 0.0)


def _bytes_given(kernel: Kernel, given: set[Node]) -> int:
    bases = {base_of(one) for node in kernel.nodes for one in node.all_input_nodes}
    return sum(nbytes(base) for base in bases & given if is_tensor(base))


def _type_of(kernel: Kernel) -> torch.dtype:
    value = kernel.nodes[-1].meta.get("val")
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    return first.dtype if isinstance(first, torch.Tensor) else torch.float32


def _module_of(node: Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return next((str(name) for name, _ in reversed(list(stack.values()))), "")
