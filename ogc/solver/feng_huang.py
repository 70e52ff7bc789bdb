"""The published algorithm: checkpoints of a tensor graph by its division tree.

Source: Feng & Huang, "Optimal Gradient Checkpoint Search for Arbitrary Computation Graphs", CVPR 2021.
Vertices are tensors, weighed by their bytes. A *closed set* holds the vertices between two vertices that
are reached, and reach, only through those two. Objective: checkpoints R with the least

    bytes of R + most bytes in any one closed set that is left whole between them.

Class of solutions: a closed set of at most C bytes is left whole; of a larger one the vertices that split it
become checkpoints and the parts are looked at in turn, but the splitting vertices of a linear set are chosen by
a shortest path over runs of at most C bytes. Gradients, saved tensors, temporaries and outputs do not count.
For V vertices and E edges the tree takes O(V (V + E)), a choice for one C O(V log V).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import networkx as nx

from ..graph import Graph

SOURCE = -1
"""Stands before every vertex that is made from no other."""

CONCATENATIONS = ("aten.cat.", "aten.stack.")
"""Operators whose operands are a list."""


@dataclass(frozen=True)
class ClosedSet:
    """A node of the division tree.

    Attributes:
        bytes: of the vertices inside, its two ends left out.
        splits: vertices that become checkpoints where it is divided, in topological order.
        parts: the closed sets that are left then; in a linear set one before, between and after the splits.
        is_linear: whether every path passes all the splits, so that some of them may be passed over.
    """

    bytes: int
    splits: tuple[int, ...] = ()
    parts: tuple[ClosedSet, ...] = ()
    is_linear: bool = False


@dataclass(frozen=True)
class Choice:
    """Checkpoints, their bytes, and the most bytes in a closed set left whole."""

    checkpoints: tuple[int, ...]
    kept: int
    largest: int

    @property
    def objective(self) -> int:
        """The objective of the published algorithm, in bytes."""
        return self.kept + self.largest


class TensorGraph:
    """The vertices and edges of a graph of operations, as the published algorithm sees it.

    A vertex is what one operation makes, with every in-place change to it. The operands of a concatenation
    are a vertex too, as in a traced program, which puts them in a list first; it weighs those of them that
    nothing else reads. So a concatenation may be recomputed, which matters on dense blocks.

    Attributes:
        dag: the vertices between ``SOURCE`` and ``sink``.
        bytes: of each vertex.
        positions: for each vertex, the position in the program from which it is there, unchanged.
        rank: of each vertex in the topological order.
    """

    def __init__(self, graph: Graph) -> None:
        flow = nx.DiGraph()
        flow.add_nodes_from(range(len(graph.values)))
        size = [value.bytes for value in graph.values]
        place = [last + 1 for last in graph.last_writes]
        readers = Counter(v for op in graph.operations for v in set(op.reads))
        for t, op in enumerate(graph.operations):
            operands = op.reads
            if op.target.startswith(CONCATENATIONS):
                operands = (len(size),)
                size.append(sum(size[v] for v in set(op.reads) if readers[v] == 1))
                place.append(t)
                flow.add_edges_from((v, *operands) for v in op.reads)
            flow.add_edges_from((v, w) for v in operands for w in op.writes)
            together = op.writes[:1] if op.takes_over is None else (op.takes_over,)
            flow.add_edges_from(edge for v in together for w in op.writes for edge in ((v, w), (w, v)))
            if op.takes_over is not None:
                size[op.takes_over] = 0
        self.dag = nx.condensation(flow)
        members = dict(self.dag.nodes(data="members"))
        self.vertices = frozenset(members)
        self.bytes = {vertex: sum(size[m] for m in found) for vertex, found in members.items()}
        self.positions = {vertex: max(place[m] for m in found) for vertex, found in members.items()}
        self.sink = len(members)
        self.dag.add_edges_from([(SOURCE, v) for v in members if not self.dag.in_degree(v)])
        self.dag.add_edges_from([(v, self.sink) for v in members if not self.dag.out_degree(v)])
        self.rank = {vertex: rank for rank, vertex in enumerate(nx.topological_sort(self.dag))}

    @cached_property
    def tree(self) -> ClosedSet:
        """The division tree: closed sets within closed sets, down to empty ones."""
        return self._divide(SOURCE, self.sink, self.vertices)

    def _divide(self, start: int, stop: int, inside: frozenset[int]) -> ClosedSet:
        size = sum(self.bytes[v] for v in inside)
        if not inside:
            return ClosedSet(size)
        order = sorted(inside, key=self.rank.__getitem__)
        splits = self._splitting(start, inside, order)
        if splits:
            return ClosedSet(size, splits, tuple(self._linear_parts(start, stop, order, splits)), is_linear=True)
        branches = sorted(map(sorted, nx.weakly_connected_components(self.dag.subgraph(inside))))
        if len(branches) > 1:
            return ClosedSet(size, parts=tuple(self._divide(start, stop, frozenset(b)) for b in branches))
        within = self._largest_closed(start, stop, inside)
        covered = frozenset().union(*(part for _, _, part in within))
        parts = tuple(self._divide(a, b, part) for a, b, part in within)
        return ClosedSet(size, tuple(v for v in order if v not in covered), parts)

    def _splitting(self, start: int, inside: frozenset[int], order: list[int]) -> tuple[int, ...]:
        """Vertices that every path passes: no edge leads from before them to behind them."""
        rank = self.rank
        furthest = max(rank[v] for v in self.dag.successors(start) if v in inside)
        found = []
        for v in order:
            if furthest == rank[v]:
                found.append(v)
            furthest = max(furthest, *(rank[w] for w in self.dag.successors(v)))
        return tuple(found)

    def _linear_parts(self, start: int, stop: int, order: list[int], splits: tuple[int, ...]) -> Iterator[ClosedSet]:
        ranks = [self.rank[v] for v in order]
        first = 0
        for a, b in zip((start, *splits), (*splits, stop), strict=True):
            place = bisect_left(ranks, self.rank[b])
            yield self._divide(a, b, frozenset(order[first:place]))
            first = place + 1

    def _largest_closed(self, start: int, stop: int, inside: frozenset[int]) -> list[tuple[int, int, frozenset[int]]]:
        """Disjoint closed sets (start, stop, inside) within one that neither splits nor branches, the largest first.

        A set's start dominates the first vertex inside, and all paths from there pass the set's stop.
        """
        within = self.dag.subgraph(inside | {start, stop})
        before = nx.immediate_dominators(within, start)
        behind = nx.immediate_dominators(within.reverse(copy=False), stop)
        below = {a: nx.descendants(within, a) for a in {before[v] for v in inside}}
        above = {b: nx.ancestors(within, b) for b in {behind[v] for v in inside}}
        found: dict[tuple[int, int], frozenset[int]] = {}
        for v in inside:
            a, b = before[v], behind[v]
            while (a, b) not in found and (a, b) != (start, stop):
                found[a, b] = self._if_closed(a, b, frozenset(below[a] & above[b]))
                if b == stop:
                    break
                b = behind[b]
        largest = sorted(found.items(), key=lambda item: (-len(item[1]), self.rank[item[0][0]], self.rank[item[0][1]]))
        chosen: list[tuple[int, int, frozenset[int]]] = []
        for (a, b), part in largest:
            if part and all(part.isdisjoint(p | {c, d}) and p.isdisjoint({a, b}) for c, d, p in chosen):
                chosen.append((a, b, part))
        return chosen

    def _if_closed(self, a: int, b: int, between: frozenset[int]) -> frozenset[int]:
        """The vertices between a and b if nothing else touches them, otherwise none."""
        after, ahead = between | {b}, between | {a}
        closed = all(
            after.issuperset(self.dag.successors(v)) and ahead.issuperset(self.dag.predecessors(v)) for v in between
        )
        return between if closed else frozenset()

    def choose(self, closed: ClosedSet, limit: int) -> Choice:
        """The checkpoints with the fewest bytes such that no set left whole has more than ``limit`` bytes."""
        if closed.bytes <= limit:
            return Choice((), 0, closed.bytes)
        if closed.is_linear:
            return self._shortest_path(closed, limit)
        return self._together(closed.splits, [self.choose(part, limit) for part in closed.parts], 0)

    def _shortest_path(self, closed: ClosedSet, limit: int) -> Choice:
        """Splitting vertices of a linear set by a shortest path over its runs. O(n log n) for n of them."""
        weights = [0, *(self.bytes[v] for v in closed.splits), 0]
        ends = [0]  # bytes before each splitting vertex
        for part, weight in zip(closed.parts, weights, strict=False):
            ends.append(ends[-1] + weight + part.bytes)
        best, parents = [0], [0]
        reachable = [(0, 0)]  # bytes of the path, its end; a heap
        first = 0  # where the longest run that may end at k starts
        for k in range(1, len(weights)):
            while first < k - 1 and ends[k] - ends[first] - weights[first] > limit:
                first += 1
            while reachable[0][1] < first:
                heapq.heappop(reachable)
            best.append(reachable[0][0] + weights[k])
            parents.append(reachable[0][1])
            heapq.heappush(reachable, (best[k], k))
        path = [len(weights) - 1]
        while path[-1]:
            path.append(parents[path[-1]])
        path.reverse()
        largest, divided = 0, []
        for j, k in pairwise(path):
            run = ends[k] - ends[j] - weights[j]
            if run <= limit:
                largest = max(largest, run)
            else:
                divided.append(self.choose(closed.parts[j], limit))
        return self._together(tuple(closed.splits[k - 1] for k in path[1:-1]), divided, largest)

    def _together(self, splits: tuple[int, ...], parts: list[Choice], largest: int) -> Choice:
        return Choice(
            splits + tuple(v for part in parts for v in part.checkpoints),
            sum(self.bytes[v] for v in splits) + sum(part.kept for part in parts),
            max([largest, *(part.largest for part in parts)]),
        )

    def best_choice(self) -> Choice:
        """The checkpoints with the least objective over all limits.

        A larger limit never takes more checkpoint bytes: no limit between two does better than the bytes kept at the
        larger and a set just above the smaller, so most need not be tried.
        """
        best = whole = self.choose(self.tree, self.tree.bytes)
        pending = [(0, self.choose(self.tree, 0), whole)]
        while pending:
            limit, low, high = pending.pop()
            best = min(best, low, key=lambda choice: choice.objective)
            if low.kept > high.kept and limit + 1 < min(high.largest, best.objective - high.kept):
                middle = (limit + high.largest) // 2
                found = self.choose(self.tree, middle)
                pending += [(middle, found, high), (limit, low, found)]
        return best


def checkpoint_positions(graph: Graph) -> list[int]:
    """Positions in the program from which the checkpoints of the published algorithm are there."""
    tensors = TensorGraph(graph)
    return sorted({tensors.positions[v] for v in tensors.best_choice().checkpoints})
