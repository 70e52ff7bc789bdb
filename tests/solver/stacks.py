"""Stacks of equal layers as graphs."""

import random
from dataclasses import replace

from ogc import Graph, Operation, Value


def stack(seed, layers, length=12, almost=0.0):
    """Equal layers of random operations, each with a skip connection, whose times differ by ``almost`` of them."""
    rng = random.Random(seed)
    kinds = [(rng.choice([4, 8, 16, 64]), rng.choice([1.0, 2.0, 8.0]), rng.random() < 0.6) for _ in range(length)]
    back = [rng.choice([1, 1, 1, 2, 3]) for _ in range(length)]
    operations = []
    for t in range(layers * length):
        _, seconds, saves = kinds[t % length]
        reads = {t - 1, t - back[t % length]} if t else set()
        reads |= {t - length} if t % length == length - 1 else set()
        reads = tuple(sorted(v for v in reads if v >= 0))
        seconds *= 1 + almost * rng.random()
        operations.append(
            Operation(
                f"op{t}",
                reads=reads,
                writes=(t,),
                saves=reads if saves else (),
                gradient_bytes=8,
                backward_bytes=24,
                forward_seconds=seconds,
                backward_seconds=2 * seconds,
            )
        )
    values = (Value(f"v{t}", kinds[t % length][0], t == layers * length - 1) for t in range(layers * length))
    return Graph(tuple(operations), tuple(values))


def with_views(graph, seed):
    """The graph with up to two views in front of what reads a value."""
    rng, operations = random.Random(seed), []
    for op in graph.operations:
        for v in op.reads:
            operations += rng.randrange(3) * [Operation("view", reads=(v,), backward_bytes=rng.randrange(60))]
        operations.append(op)
    return replace(graph, operations=tuple(operations))
