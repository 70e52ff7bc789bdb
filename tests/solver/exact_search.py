"""A second exact oracle, for tiny graphs: it checks the constraint program and shares nothing with it.

A state is how many steps of the forward and backward are done and what is held; dropping anything and running any
operation lead to other states. The least time is a shortest path, the least peak a bottleneck one (Dijkstra, "A note
on two problems in connexion with graphs", 1959, with max in place of +). Operations run again in any order, any number
of times. Exponential in what can be held.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ogc.graph import Graph


class Held(NamedTuple):
    """A value as operation ``write`` left it; the operation's internal tensors where ``value`` is -1."""

    value: int
    write: int


State = tuple[int, frozenset[Held]]  # steps done, what is held


def searched_peak(graph: Graph, in_forward: bool = True) -> int:
    """The least peak in bytes; without ``in_forward``, of schedules that recompute for the backward alone."""
    found = _searched(graph, in_forward, lambda peak, size, _: max(peak, size))
    assert found is not None
    return int(found)


def searched_seconds(graph: Graph, budget: int, in_forward: bool = True) -> float | None:
    """The least time that is recomputed within a budget in bytes; None where nothing fits."""
    return _searched(graph, in_forward, lambda time, size, more: None if size > budget else time + more)


Price = Callable[[float, int, float], float | None]
"""Of a way so far, by the price before, and the bytes and recomputed seconds of one more step; None: not allowed."""


def _searched(graph: Graph, in_forward: bool, price: Price) -> float | None:
    waiting: list[tuple[float, int, State]] = [(0, 0, (0, frozenset()))]
    seen: set[State] = set()
    pushed = 0
    while waiting:
        so_far, _, state = heapq.heappop(waiting)
        if state[0] == 2 * len(graph):
            return so_far
        if state in seen:
            continue
        seen.add(state)
        for size, seconds, following in _moves(graph, state, in_forward):
            if following not in seen and (found := price(so_far, size, seconds)) is not None:
                pushed += 1
                heapq.heappush(waiting, (found, pushed, following))
    return None


def _moves(graph: Graph, state: State, in_forward: bool) -> Iterator[tuple[int, float, State]]:
    """The states that one step leads to, the bytes alive meanwhile, and the seconds recomputed."""
    done, held = state
    for item in held - _staying(graph, done):
        yield 0, 0, (done, held - {item})
    if done < len(graph):
        again, gradients = done if in_forward else 0, 0
        yield from ((size, 0, after) for size, after in _run(graph, done, held, 0, done + 1))
    else:
        t = 2 * len(graph) - 1 - done
        again, gradients = t + 1, graph.operations[t].gradient_bytes
        yield from ((size, 0, after) for size, after in _backward(graph, t, held, done + 1))
    for t in range(again):
        if graph.operations[t].replayable:
            yield from ((s, graph.repeat_seconds[t], after) for s, after in _run(graph, t, held, gradients, done))


def _run(graph: Graph, t: int, held: frozenset[Held], gradients: int, done: int) -> Iterator[tuple[int, State]]:
    op = graph.operations[t]
    old = {v: _content(graph, v, t) for v in op.reads}
    if not held.issuperset(old.values()):
        return
    changed = {old[v] for v in op.writes if v in old}
    made = {Held(v, t) for v in op.writes} | ({Held(-1, t)} if op.internal_bytes else set())
    fresh = {Held(v, t) for v in op.writes if v not in old} | {Held(-1, t)}
    size = _size(graph, held) + _size(graph, fresh) + op.scratch_bytes + gradients
    after = (held - changed) | made
    yield size, (done, after)
    if op.takes_over is not None:
        yield size - graph.values[op.takes_over].bytes, (done, after - {old[op.takes_over]})


def _backward(graph: Graph, t: int, held: frozenset[Held], done: int) -> Iterator[tuple[int, State]]:
    """What was saved may be let go of within the step, before late bytes are alive."""
    op = graph.operations[t]
    internal = {Held(-1, t)} if op.internal_bytes else set()
    saved = {_content(graph, v, t + 1) for v in op.saves}
    if not held.issuperset(saved | internal):
        return
    early = _size(graph, held) + op.backward_bytes
    droppable = sorted(saved - _outputs(graph)) if op.late_bytes else []
    for pattern in range(2 ** len(droppable)):
        after = held - {item for place, item in enumerate(droppable) if pattern >> place & 1}
        late = _size(graph, after) + op.late_bytes if op.late_bytes else 0
        yield max(early, late), (done, after - internal)


def _staying(graph: Graph, done: int) -> set[Held]:
    """What stays whatever the schedule: outputs, internal tensors that every plan keeps, what the caller still has."""
    kept = {Held(-1, t) for t, always in enumerate(graph.keeps_internals) if always}
    returned = {Held(v, graph.last_writes[v]) for v in graph.returned} if done < len(graph) else set()
    return _outputs(graph) | kept | returned


def _outputs(graph: Graph) -> set[Held]:
    return {Held(v, graph.last_writes[v]) for v, value in enumerate(graph.values) if value.is_output}


def _content(graph: Graph, v: int, t: int) -> Held:
    """Value ``v`` as it is before operation ``t``."""
    return Held(v, max(w for w in range(t) if v in graph.operations[w].writes))


def _size(graph: Graph, held: set[Held] | frozenset[Held]) -> int:
    operations, values = graph.operations, graph.values
    return sum(operations[i.write].internal_bytes if i.value < 0 else values[i.value].bytes for i in held)
