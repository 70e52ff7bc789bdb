"""What a backward reaches is found out without a word about it to the caller, and without taking his stack."""

import threading

import pytest
import torch
from helpers import Function, run_apart

import ogc
from ogc.parser.forward.flat import gradient_targets


def test_inputs_are_numbers_and_parameters_themselves():
    x, w, unused = (torch.ones(3, requires_grad=True) for _ in range(3))
    found, _ = gradient_targets([x * w, torch.ones(3), x], [unused, x])
    assert found == {1, w}


def test_nodes_come_after_those_that_they_hold():
    x = torch.ones(3, requires_grad=True)
    skips = [x]
    for _ in range(20):
        skips.append(skips[-1].sin() + sum(skips[-3:]))
    found, nodes = gradient_targets([skips[-1], skips[-4]], [x])
    place = {node: number for number, node in enumerate(nodes)}
    assert found == {0} and len(place) == len(nodes)
    held = [(place[node], place[next_]) for node in nodes for next_, _ in node.next_functions if next_ is not None]
    assert held and all(holder > inner for holder, inner in held)


@pytest.mark.full
def test_a_long_chain_can_be_let_go_of():
    w = torch.ones(1, requires_grad=True)
    y = w.exp()
    for _ in range(100_000):
        y = y * w
    found, nodes = gradient_targets([y], [w])
    assert found == {0} and len(nodes) == 100_002
    del y  # and the nodes after it


@pytest.mark.full
def test_a_long_program_is_parsed_on_a_small_stack():
    run_apart(parse_on_a_small_stack)


def parse_on_a_small_stack():
    """Nodes that are let go of one within the other take stack each; where there is none left, the process ends."""

    def added(x):
        for _ in range(6000):
            x = x + 1
        return x

    found = []

    def parse():
        found.append(ogc.parse(Function(added), torch.ones((), requires_grad=True), profile="estimate"))

    threading.stack_size(2**19)
    thread = threading.Thread(target=parse)
    thread.start()
    thread.join()
    assert len(found[0]) == 6000
