"""What each part of the search gains: the same questions with one part left out, by simulator and allocator.

Each plan is run once, on the CPU, for its peak. Another order of the program is tried by writing the model's
operations down in it, as a module of its own: parsed, planned and run like any other.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import networkx as nx
import torch
from torch import fx, nn

import ogc
from ogc.solver import candidates, search
from ogc.torch_state.allocator import peak_bytes

from .cases import CASES
from .measuring import allocate_gradients, step
from .results import Results

NETWORKS = {
    "resnet18": (4, None), "resnet50": (8, None), "densenet121": (4, None), "inception_v3": (4, None),
    "amoebanet_cifar10": (4, None), "mobilenet_v3_large": (8, None), "unet": (1, None), "vit_b_16": (4, None),
    "gpt2_small": (4, 128),
}  # fmt: skip
"""Batch sizes, and sizes of the input where not the usual."""

GOALS: dict[str, dict[str, Any]] = {
    "least peak": {"memory_budget": "least"},
    "20% more time": {"max_overhead": 0.2},
    "5% more time": {"max_overhead": 0.05},
}

ORDERS = 6
"""Other orders of a program that are tried; the best one counts."""


def without() -> Iterator[tuple[str, AbstractContextManager[Any]]]:
    """Names of the parts and what leaves them out; without any of them, there is no local search either."""
    yield "nothing", nullcontext()
    yield "local search", nullcontext()
    yield "nested plans", patch.object(search.CutSearch, "_table", lambda *_: None)
    yield "saved values", patch.object(search, "worth_keeping", lambda graph: [])
    yield "recomputed values", patch.object(candidates, "DROP_SIMULATIONS", 0)


def add_rows(name: str, results: Results) -> None:
    """The rows of a network, each as soon as it is there."""
    for row in rows_of(name, *NETWORKS[name]):
        results.add(row)


def rows_of(name: str, batch_size: int, size: int | None) -> Iterator[dict[str, Any]]:
    """A row for each goal, each part left out, and the best of some other orders."""
    torch.manual_seed(0)
    model = CASES[name].build().train()
    allocate_gradients(model)
    inputs = CASES[name].input.sample(batch_size, size)
    graph = ogc.parse(model, inputs, profile="estimate")
    plain = peak_bytes(lambda: step(model, inputs), "cpu")
    others = [other for seed in range(ORDERS) if (other := in_another_order(model, graph, seed)) is not None]
    parsed = [(other, ogc.parse(other, inputs, profile="estimate")) for other in others]
    for goal, asked in GOALS.items():
        about = {"arch": name, "input_shape": list(inputs.shape), "goal": goal, "plain_bytes": plain}
        for left_out, context in without():
            with context:
                effort = 1 if left_out == "nothing" else 0
                plan = ogc.solve(replace(graph), effort=effort, **asked)  # of a graph of which nothing is known
            yield {**about, "without": left_out, **_figures(model, graph, plan, inputs)}
        if parsed:
            plans = [(ogc.solve(replace(g), **asked), number) for number, (_, g) in enumerate(parsed)]
            plan, number = min(plans, key=lambda pair: (pair[0].peak_bytes, pair[0].overhead))
            yield {**about, "without": "program order", **_figures(*parsed[number], plan, inputs)}


def _figures(model: nn.Module, graph: ogc.Graph, plan: ogc.Plan, inputs: torch.Tensor) -> dict[str, Any]:
    run = ogc.apply(model, graph, plan)
    step(run, inputs)
    measured = peak_bytes(lambda: step(run, inputs), "cpu")
    return {"predicted_bytes": plan.peak_bytes, "peak_bytes": measured, "overhead": plan.overhead}


def in_another_order(model: nn.Module, graph: ogc.Graph, seed: int) -> nn.Module | None:
    """The model with its operations in another order, branch after branch; None if there is no other.

    What writes a value stays behind all that touched it before, and random draws stay in order.
    """
    program = graph.program
    depends = nx.DiGraph()
    depends.add_nodes_from(range(len(graph)))
    touched: dict[int, list[int]] = {}
    written: dict[int, int] = {}
    drawn: list[int] = []
    for t, op in enumerate(graph.operations):
        taken = () if op.takes_over is None else (op.takes_over,)
        depends.add_edges_from((written[v], t) for v in op.reads)
        for v in (*op.writes, *taken):
            depends.add_edges_from((s, t) for s in touched.get(v, []))
            written[v] = t
        for v in {*op.reads, *op.writes, *taken}:
            touched.setdefault(v, []).append(t)
        if t in program.random:
            depends.add_edges_from((s, t) for s in drawn[-1:])
            drawn.append(t)
    place = {node: t for t, node in enumerate(program.operations)}
    depends.add_edges_from(
        (place[source], t) for node, t in place.items() for source in node.all_input_nodes if source in place
    )
    order = _branch_after_branch(depends, random.Random(seed))
    if order == sorted(order):
        return None
    return _written_down(model, program.graph, [program.operations[t] for t in order])


def _branch_after_branch(depends: nx.DiGraph, rng: random.Random) -> list[int]:
    """A topological order that goes on with what has just become possible, any one of it."""
    waits = dict(depends.in_degree())
    ready = [t for t, count in waits.items() if not count]
    order = []
    while ready:
        order.append(ready.pop())
        freed = []
        for t in depends.successors(order[-1]):
            waits[t] -= 1
            if not waits[t]:
                freed.append(t)
        rng.shuffle(freed)
        ready += freed
    return order


def _written_down(model: nn.Module, graph: fx.Graph, operations: list[fx.Node]) -> nn.Module:
    """A module that runs these nodes in their order."""
    written = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    fixed = [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]
    end = [node for node in graph.nodes if node.op == "output"]
    for node in (*fixed, *operations, *end):
        copies[node] = written.node_copy(node, copies.__getitem__)
    return fx.GraphModule(model, written).train()
