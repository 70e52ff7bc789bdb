"""The weighted graph: validation, cuts, boundaries, export."""

from dataclasses import replace

import pytest
from helpers import chain

from ogc.errors import ParseError
from ogc.graph import Graph, Operation, Value


def test_boundary_is_what_is_made_before_and_used_after():
    graph = Graph(
        (
            Operation("a", writes=(0,)),
            Operation("b", reads=(0,), writes=(1,)),
            Operation("c", reads=(1,), writes=(2,)),
            Operation("d", reads=(0, 2), writes=(3,)),
        ),
        (Value("a", 1), Value("b", 2), Value("c", 3), Value("d", 4, is_output=True)),
    )
    assert [graph.boundary(c) for c in range(5)] == [(), (0,), (0, 1), (0, 2), (3,)]


def test_no_cut_between_a_value_and_its_in_place_write():
    graph = Graph(
        (
            Operation("conv", writes=(0,)),
            Operation("norm", reads=(0,), writes=(1,), saves=(0,)),
            Operation("relu_", reads=(1,), writes=(1,), saves=(1,)),
            Operation("conv2", reads=(1,), writes=(2,), saves=(1,)),
        ),
        (Value("x", 1), Value("y", 1), Value("z", 1)),
    )
    assert graph.cuts == (0, 1, 3, 4)


def test_no_cut_while_a_value_read_before_its_last_write_lives():
    graph = Graph(
        (
            Operation("make", writes=(0,)),
            Operation("read", reads=(0,), writes=(1,)),
            Operation("change_", reads=(0,), writes=(0,)),
            Operation("other", reads=(1,), writes=(2,)),
            Operation("use", reads=(0, 2), writes=(3,)),
            Operation("end", reads=(3,), writes=(4,)),
        ),
        tuple(Value(f"v{n}", 1) for n in range(5)),
    )
    assert graph.cuts == (0, 5, 6)


@pytest.mark.parametrize(
    ("changes", "cuts"),
    [
        ({}, (0, 1, 2, 3, 4, 5, 6, 7)),
        ({"saves": (0,)}, (0, 1, 6, 7)),  # what is saved is needed when it runs again
        ({"internal_bytes": 4}, (0, 1, 6, 7)),  # so is what it reads, for its own sake
    ],
)
def test_cuts_between_writes_of_pieces_that_nobody_needs_before_the_last(changes, cuts):
    graph = Graph(
        (
            Operation("first", writes=(1,)),
            Operation("empty", writes=(0,)),
            Operation("view", reads=(0,)),
            replace(Operation("write", reads=(0, 1), writes=(0,)), **changes),
            Operation("second", reads=(1,), writes=(2,), saves=(1,)),
            Operation("write again", reads=(0, 2), writes=(0,)),
            Operation("use", reads=(0,), writes=(3,), saves=(0,)),
        ),
        tuple(Value(f"v{n}", 4) for n in range(4)),
    )
    assert graph.cuts == cuts


def test_operations_that_touch_no_value_add_no_cut():
    graph = Graph(
        (Operation("a", writes=(0,)), Operation("count"), Operation("b", reads=(0,), writes=(1,))),
        (Value("a", 1), Value("b", 1)),
    )
    assert graph.cuts == (0, 1, 3)


def test_a_mere_view_is_no_use_of_what_it_sees():
    graph = Graph(
        (
            Operation("a", writes=(0,)),
            Operation("view", reads=(0,)),
            Operation("b", reads=(0,), writes=(1,)),
            Operation("c", reads=(0, 1), writes=(2,), saves=(0,)),
        ),
        (Value("a", 1), Value("b", 1), Value("c", 1, is_output=True)),
    )
    assert graph.first_uses == (2, 3, 4)


@pytest.mark.parametrize(
    ("operations", "values", "message"),
    [
        ([Operation("a", reads=(0,), writes=(1,)), Operation("b", writes=(0,))], 2, "topological order"),
        ([Operation("a", writes=(5,))], 1, "names value 5"),
        ([Operation("a", writes=(0,)), Operation("b", writes=(0,))], 1, "name the value among its reads"),
        ([Operation("a", writes=(0,)), Operation("b", writes=(1,), saves=(0,))], 2, "neither reads nor writes"),
        ([Operation("a", writes=(0,))], 2, "no operation makes value v1"),
    ],
)
def test_inconsistent_graphs_are_refused(operations, values, message):
    with pytest.raises(ParseError, match=message):
        Graph(tuple(operations), tuple(Value(f"v{n}", 1) for n in range(values)))


def test_networkx_export_carries_the_weights():
    dag = chain([4, 2, 1]).to_networkx()
    assert list(dag.nodes) == ["op0", "op1", "op2"]
    assert [(a, b, d["bytes"]) for a, b, d in dag.edges(data=True)] == [("op0", "op1", 4), ("op1", "op2", 2)]
    assert dag.nodes["op1"]["forward_seconds"] == 1.0


def test_a_graph_prints_as_a_table():
    lines = str(chain([4_000_000, 2_000_000])).splitlines()
    assert lines[0].split()[:3] == ["#", "operation", "operator"]
    assert len(lines) == 3
    assert "3.815" in lines[1]
