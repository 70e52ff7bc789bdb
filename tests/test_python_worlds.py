"""Whatever a forward reads and writes outside of tensors, training is the plain model's: random programs."""

import random

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from python_worlds import CHANGES, World, program

import ogc
from ogc.errors import OgcError

STEPS = 5


def step(world, run, images, between):
    """All that a training step gives: its outputs, gradients, buffers and what it wrote; or how it fails."""
    world.model.zero_grad()
    torch.manual_seed(0)
    try:
        output = run(images)
        for change in between:
            world.change(*change)
        output.square().mean().backward()
    except (KeyError, TypeError, IndexError, AttributeError, StopIteration) as error:  # the program's own
        return [torch.zeros(0)], f"{type(error).__name__}: {error}"
    found = [output.detach(), *(p.grad for p in world.model.parameters() if p.grad is not None)]
    return [*found, torch.get_rng_state()], world.state()


def evaluate(world, run, images):
    """What an evaluation gives, or how it fails."""
    try:
        with torch.no_grad():
            return run(images).tolist(), world.state()
    except (KeyError, TypeError, IndexError, AttributeError, StopIteration) as error:
        return f"{type(error).__name__}: {error}"


def changes(rng, most):
    count = rng.randint(0, most)
    return [(rng.choice(CHANGES), rng.randrange(3), round(rng.uniform(0.5, 2.0), 3)) for _ in range(count)]


def assert_same_steps(number):
    """Train the plain and the optimized model of a random program side by side; whether it is planned."""
    rng = random.Random(number)
    source = program(rng)
    torch.manual_seed(number)
    plain = World(source)
    torch.manual_seed(number)
    other = World(source)
    before = other.state()
    sample = torch.randn(16, 8)
    try:
        optimised = ogc.optimize(other.model, sample, profile="estimate", memory_budget="least")
    except OgcError:
        assert other.state() == before
        return None
    assert other.state() == before
    for _ in range(STEPS):
        for change in changes(rng, 2):
            plain.change(*change)
            other.change(*change)
        images = torch.randn(rng.choice((16, 16, 12)), 8)
        if rng.random() < 0.2:
            evaluated = [evaluate(plain, plain.model, images), evaluate(other, optimised, images)]
            assert evaluated[0] == evaluated[1], (number, source)
        between = changes(rng, 1) if rng.random() < 0.3 else []
        theirs, ours = step(plain, plain.model, images, between), step(other, optimised, images, between)
        assert ours[1] == theirs[1], (number, source)
        assert len(ours[0]) == len(theirs[0]), (number, source)
        assert all(map(torch.equal, ours[0], theirs[0])), (number, source)
    return optimised.report().planned


@pytest.mark.full
@seed(0)
@settings(max_examples=12, deadline=None, database=None)
@given(st.integers(0, 2**32))
def test_what_python_reads_and_writes_is_the_plain_models(number):
    assert_same_steps(number)


@pytest.mark.parametrize("number", [30897, 30991])  # a write in the first call alone; a function with another's code
def test_programs_that_once_differed_do_not(number):
    assert assert_same_steps(number)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(50))
def test_of_five_thousand_programs_none_differs(part):
    planned = [assert_same_steps(100 * part + number) for number in range(100)]
    assert sum(count is not None and count > 0 for count in planned) > 50
