"""The published algorithm against its definitions, spelt out without regard to time."""

import random
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise

import networkx as nx
import pytest
import torch
from helpers import chain, random_graph

import ogc
from ogc.graph import Graph, Operation, Value
from ogc.solver import LEAST_PEAK, feng_huang
from ogc.solver.feng_huang import SOURCE, TensorGraph


def small_graph(seed, most=9):
    """A random graph whose values are small, with a few concatenations."""
    graph = random_graph(seed, most)
    rng = random.Random(seed)
    operations = tuple(replace(op, target="aten.cat.default" if rng.random() < 0.3 else "") for op in graph.operations)
    return replace(graph, operations=operations, values=tuple(replace(v, bytes=v.bytes % 7) for v in graph.values))


def kept_bytes(tensors, limit, start, stop, inside):
    """Fewest bytes of checkpoints in a closed set such that what is left whole has at most ``limit`` bytes."""

    def size(vertices):
        return sum(tensors.bytes[v] for v in vertices)

    if size(inside) <= limit:
        return 0
    dag = nx.DiGraph(tensors.dag.subgraph(inside | {start, stop}))
    dag.remove_edges_from([(start, stop)])
    between = {(a, b): nx.descendants(dag, a) & nx.ancestors(dag, b) for a in dag for b in dag if a != b}
    splits = [v for v in inside if not nx.has_path(nx.restricted_view(dag, [v], []), start, stop)]
    if splits:
        splits.sort(key=tensors.rank.__getitem__)
        return min(
            sum(tensors.bytes[v] for v in chosen)
            + sum(run_bytes(tensors, limit, a, b, between[a, b], splits) for a, b in pairwise((start, *chosen, stop)))
            for count in range(len(splits) + 1)
            for chosen in combinations(splits, count)
        )
    branches = list(nx.weakly_connected_components(dag.subgraph(inside)))
    if len(branches) > 1:
        return sum(kept_bytes(tensors, limit, start, stop, branch) for branch in branches)
    closed = [
        (a, b)
        for (a, b), within in between.items()
        if within
        and (a, b) != (start, stop)
        and all({*dag.successors(v)} <= within | {b} and {*dag.predecessors(v)} <= within | {a} for v in within)
    ]
    closed.sort(key=lambda ends: (-len(between[ends]), tensors.rank[ends[0]], tensors.rank[ends[1]]))
    disjoint = []
    for a, b in closed:
        if all(between[a, b].isdisjoint({c, d} | between[c, d]) and not {a, b} & between[c, d] for c, d in disjoint):
            disjoint.append((a, b))
    rest = inside.difference(*(between[ends] for ends in disjoint))
    return size(rest) + sum(kept_bytes(tensors, limit, *ends, between[ends]) for ends in disjoint)


def run_bytes(tensors, limit, a, b, inside, splits):
    """Bytes kept inside a run of a linear set: it is left whole, or no more than one part and divided."""
    if sum(tensors.bytes[v] for v in inside) <= limit:
        return 0
    return float("inf") if inside & set(splits) else kept_bytes(tensors, limit, a, b, inside)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(60))
def test_the_objective_is_the_least_over_all_limits(seed):
    tensors = TensorGraph(small_graph(seed))
    total = tensors.tree.bytes
    everything = set(tensors.vertices)
    by_limit = [kept_bytes(tensors, limit, SOURCE, tensors.sink, everything) for limit in range(total + 1)]
    assert [tensors.choose(tensors.tree, limit).kept for limit in range(total + 1)] == by_limit
    assert tensors.best_choice().objective == min(limit + kept for limit, kept in enumerate(by_limit))


@pytest.mark.parametrize("seed", range(60, 120))
def test_no_piece_between_checkpoints_is_larger_than_the_objective_says(seed):
    tensors = TensorGraph(small_graph(seed, most=40))
    choice = tensors.best_choice()
    assert len(set(choice.checkpoints)) == len(choice.checkpoints)
    assert choice.kept == sum(tensors.bytes[v] for v in choice.checkpoints)
    pieces = nx.weakly_connected_components(tensors.dag.subgraph(tensors.vertices - set(choice.checkpoints)))
    assert all(sum(tensors.bytes[v] for v in piece) <= choice.largest for piece in pieces)


@pytest.mark.parametrize("seed", range(30))
def test_on_a_chain_any_set_of_checkpoints_was_considered(seed):
    rng = random.Random(seed)
    sizes = [rng.randrange(1, 20) for _ in range(9)]
    best = min(
        sum(sizes[v] for v in chosen) + max(sum(sizes[a + 1 : b]) for a, b in pairwise((-1, *chosen, len(sizes))))
        for count in range(len(sizes) + 1)
        for chosen in combinations(range(len(sizes)), count)
    )
    assert TensorGraph(chain(sizes)).best_choice().objective == best


def test_a_uniform_chain_is_divided_evenly():
    # 99 values: 9 checkpoints of 1 byte leave 10 runs of 9 values.
    choice = TensorGraph(chain([1] * 99)).best_choice()
    assert choice.objective == 18
    assert [segment.stop for segment in feng_huang(chain([1] * 99), LEAST_PEAK).segments] == [*range(10, 91, 10), 99]


def test_branches_stay_whole_one_by_one():
    # A fork into two chains of three values: the two ends are all it takes to run them apart.
    graph = Graph(
        (
            Operation("fork", writes=(0,)),
            *(Operation(f"op{n}", reads=((n - 1) if n not in (1, 4) else 0,), writes=(n,)) for n in range(1, 7)),
            Operation("join", reads=(3, 6), writes=(7,)),
        ),
        tuple(Value(f"v{n}", 1 if n in (0, 7) else 10) for n in range(8)),
    )
    tensors = TensorGraph(graph)
    choice = tensors.choose(tensors.tree, 30)
    assert (choice.kept, choice.largest) == (2, 30)
    assert {tensors.positions[v] for v in choice.checkpoints} == {1, 8}


def test_what_is_changed_in_place_is_one_vertex():
    graph = Graph(
        (
            Operation("conv", writes=(0,)),
            Operation("relu_", reads=(0,), writes=(0,)),
            Operation("norm", reads=(0,), writes=(1,)),
            Operation("relu_ of its own", reads=(1,), writes=(2,), takes_over=1),
        ),
        (Value("a", 5), Value("b", 7), Value("c", 7)),
    )
    tensors = TensorGraph(graph)
    assert sorted((tensors.bytes[v], tensors.positions[v]) for v in tensors.vertices) == [(5, 2), (7, 4)]


def test_a_concatenation_may_be_made_again():
    """Operands that others read too, as in a dense block, are kept for them; the list of them is free."""
    size, operations = [10], [Operation("x", writes=(0,))]
    for n in range(1, 10, 2):
        reads = (0, *range(2, n, 2))
        operations += [
            Operation(f"cat{n}", "aten.cat.default", reads=reads, writes=(n,)),
            Operation(f"conv{n}", reads=(n,), writes=(n + 1,)),
        ]
        size += [10 * len(reads), 10]
    operations.append(Operation("last", "aten.cat.default", reads=tuple(range(0, 11, 2)), writes=(11,)))
    graph = Graph(tuple(operations), tuple(Value(f"v{n}", b) for n, b in enumerate([*size, 60])))
    tensors = TensorGraph(graph)
    assert tensors.tree.bytes == sum(size) + 60 + 10, "the last list weighs what it alone reads"
    choice = tensors.choose(tensors.tree, 60)
    assert (choice.kept, choice.largest) == (60, 60), "the first five features, and in the last list the sixth"


def published(arch):
    """The network as in the published code, where a dense layer concatenates its own input and output.

    torchvision's dense layers concatenate all features of the block before them: another graph, on which the
    algorithm finds smaller plans.
    """
    import torchvision

    model = torchvision.models.get_model(arch)
    for block in model.modules():
        if isinstance(block, torchvision.models.densenet._DenseBlock):
            block.forward = partial(_with_the_input, list(block.values()))
    return model


def _with_the_input(layers, x):
    for layer in layers:
        x = torch.cat([x, layer(x)], 1)
    return x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "mebibytes"), [("resnet18", 57), ("resnet50", 123), ("resnet101", 140), ("densenet121", 113)]
)
def test_it_comes_near_what_the_published_solver_needs(arch, mebibytes):
    """Their runtime lets go of less at once, and weighs some operations otherwise."""
    graph = ogc.parse(published(arch), torch.randn(4, 3, 224, 224), profile="estimate")
    assert 0.7 * mebibytes < ogc.solve(graph, solver="feng-huang").peak_bytes / 2**20 < 0.97 * mebibytes
