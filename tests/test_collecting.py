"""Planning leaves the garbage collector as it was."""

import gc
import weakref
from functools import partial

import pytest
import torch
from helpers import chain

import ogc
from ogc.errors import InputError, SolveError
from ogc.process import collecting_new_only

GRAPH = chain([8, 3, 2, 4])


def refused(ask, error):
    with pytest.raises(error):
        ask()


@pytest.mark.full
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize(
    "ask",
    [
        partial(ogc.solve, GRAPH),
        partial(ogc.frontier, GRAPH),
        partial(ogc.parse, torch.nn.Linear(2, 2), torch.ones(1, 2)),
        partial(refused, partial(ogc.solve, GRAPH, memory_budget=1), SolveError),
        partial(refused, partial(ogc.parse, torch.nn.Linear(2, 2), "no tensor"), InputError),
    ],
)
def test_the_garbage_collector_is_left_as_it_was(ask, is_frozen):
    if is_frozen:
        gc.freeze()
    before = gc.get_freeze_count()
    try:
        ask()
        assert (gc.get_freeze_count() > 0) == is_frozen == (before > 0)
        assert gc.isenabled()
    finally:
        gc.unfreeze()


def test_what_is_made_meanwhile_is_collected_and_what_was_there_is_not_gone_through():
    class Cycle:
        def __init__(self):
            self.itself = self

    old = Cycle()
    with collecting_new_only():
        new = Cycle()
        seen = {id(found) for found in gc.get_objects()}
        assert id(new) in seen
        assert id(old) not in seen
        gone = weakref.ref(new)
        del new
        assert gc.collect() > 0
        assert gone() is None
    assert any(found is old for found in gc.get_objects())
