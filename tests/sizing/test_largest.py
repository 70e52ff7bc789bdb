"""The largest batch that fits: proved by the simulator at its end, and by the allocator."""

from dataclasses import replace
from functools import partial
from queue import SimpleQueue

import pytest
import torch
from helpers import assert_same_step, chain
from test_needs import Network
from torch import nn
from torch.nn import functional as F

import ogc
from ogc.errors import InputError, SolveError
from ogc.operators import convolution_parts as parts
from ogc.plan.simulate import plain_peak
from ogc.sizing import graphs
from ogc.sizing.graphs import paced
from ogc.sizing.largest import _Search
from ogc.sizing.needs import fixed_needs
from ogc.torch_state.allocator import peak_bytes


def images(number):
    return torch.randn(number, 3, 32, 32)


def loss_for(number):
    labels = torch.arange(number) % 10
    return lambda output: F.cross_entropy(output, labels)


def used_by_a_step(model, run, number):
    """Bytes of everything at the peak of a step with SGD."""
    optimizer, inputs, loss = torch.optim.SGD(model.parameters(), lr=0.01), images(number), loss_for(number)

    def step():
        optimizer.zero_grad(set_to_none=False)
        loss(run(inputs)).backward()
        optimizer.step()

    step()
    return fixed_needs(model, inputs, optimizer, gradients="kept").fixed + peak_bytes(step, "cpu")


@pytest.mark.full
def test_a_host_carries_a_larger_batch_in_as_much_time(tmp_path):
    """Its step runs, with the plain model's bits, within what the device has."""
    model, room = Network(), 12 * 2**20
    given = {"make_loss": loss_for, "gradients": "kept", "device_memory": room, "max_overhead": 0.1}
    alone = ogc.largest_batch(model, images, profile="estimate", **given)
    found = ogc.largest_batch(model, images, profile="estimate", offload=tmp_path, bandwidth=2e10, **given)
    assert found.size > 1.1 * alone.size and found.plan.offloaded and found.plan.overhead <= 0.1
    optimised, inputs = ogc.apply(model, found.graph, found.plan), images(found.size)
    assert_same_step(optimised, model, inputs, loss=loss_for(found.size))
    assert used_by_a_step(model, optimised, found.size) <= 1.01 * room


@pytest.mark.full
@pytest.mark.parametrize("max_overhead", [None, 0.2])
def test_the_largest_batch_fits_and_the_next_does_not(max_overhead):
    model, room = Network(), 12 * 2**20
    sgd = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.01), "make_loss": loss_for}
    sgd["gradients"] = "kept"
    found = ogc.largest_batch(model, images, device_memory=room, max_overhead=max_overhead, **sgd)
    assert 1 < found.plain < found.size == found.too_large - 1
    assert max_overhead is None or found.plan.overhead <= max_overhead
    optimised = ogc.apply(model, found.graph, found.plan)
    assert used_by_a_step(model, optimised, found.size) <= 1.01 * room
    assert used_by_a_step(model, model, found.plain) <= 1.01 * room
    assert used_by_a_step(model, model, found.plain + 1) > 0.99 * room
    needs = fixed_needs(model, images(found.too_large), None, gradients="kept")
    graph = ogc.parse(model, images(found.too_large), loss=loss_for(found.too_large))
    try:
        next_plan = ogc.solve(graph, memory_budget=room - needs.fixed)
    except SolveError:
        next_plan = None
    assert next_plan is None or (max_overhead is not None and next_plan.overhead > max_overhead)
    assert f"{found.size} fit" in str(found)


class Attention(nn.Module):
    """Attention written out, whose scores grow with the square of the length: N, L, 16 to N, L, 16."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.out = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        for _ in range(3):
            scores = self.query(x) @ self.key(x).transpose(1, 2)
            x = x + self.out(scores.softmax(-1) @ x)
        return x


@pytest.mark.full
def test_the_longest_sequence_is_found():
    model, room = Attention(), 4 * 2**20
    kept = {"gradients": "kept"}
    found = ogc.largest_batch(model, lambda length: torch.randn(1, length, 16), device_memory=room, step=8, **kept)
    assert found.size % 8 == found.plain % 8 == 0 < found.plain < found.size
    peak = plain_peak(ogc.parse(model, torch.randn(1, found.plain, 16)))
    assert fixed_needs(model, torch.randn(1, found.plain, 16), None, **kept).fixed + peak <= room


def counted(model, room, **options):
    """What fits, and the sizes of the forwards that ran for that."""
    seen, forward = SimpleQueue(), model.stem.forward  # no list, as what a forward writes to one is its result, too
    model.stem.forward = lambda x: seen.put(len(x)) or forward(x)
    found = ogc.largest_batches(model, images, device_memory=room, make_loss=loss_for, **options)
    return found, [seen.get() for _ in range(seen.qsize())]


@pytest.mark.full
def test_a_large_size_runs_its_forward_once():
    found, sizes = counted(Network(width=16), 12 * 2**20, max_overheads=[0.1, None], profile="estimate")
    answers = [found[0].plain, *(one.size for one in found)]
    assert sorted(size for size in sizes if size > 4) == sorted(answers)
    assert len(set(answers)) == 3


@pytest.mark.parametrize(("answer", "guess"), [(96, 104), (96, 60), (1, 9), (0, 5), (7, 7), (40, 41)])
def test_the_search_gallops_from_what_is_known(monkeypatch, answer, guess):
    search = _Search(None, None, 0, 1)
    tried = []
    monkeypatch.setattr(search, "_predicted", lambda peak_of, low, high: min(max(guess, low), high - 1))
    assert search._largest(None, lambda size: tried.append(size) or size <= answer) == answer
    assert answer == 0 or {answer, answer + 1} <= set(tried)
    assert len(tried) == len(set(tried)) <= 14


@pytest.mark.slow
def test_several_overheads_are_answered_as_each_alone():
    model, room = Network(width=16), 8 * 2**20
    options = {"device_memory": room, "make_loss": loss_for, "profile": "estimate"}
    found = ogc.largest_batches(model, images, max_overheads=(0.05, None), **options)
    alone = [ogc.largest_batch(model, images, max_overhead=share, **options) for share in (0.05, None)]
    assert [(one.plain, one.size) for one in found] == [(one.plain, one.size) for one in alone]
    assert found[0].size < found[1].size
    assert found[0].plan.overhead <= 0.05


@pytest.mark.full
def test_the_graph_that_is_found_is_the_parsed_one():
    model = Network(width=16)
    found = ogc.largest_batch(model, images, device_memory=8 * 2**20, make_loss=loss_for)
    given = {"loss": loss_for(found.size), "gradients": "none", "profile": "estimate"}
    parsed = ogc.parse(model, images(found.size), **given)
    assert parsed.left_bytes == found.graph.left_bytes == found.needs.gradients
    assert found.graph.operations == parsed.operations and found.graph.values == parsed.values
    assert found.plan.graph is found.graph
    check = ogc.check(model, ogc.apply(model, found.graph, found.plan), images(found.size))
    check.raise_if_different()


class Branching(Network):
    """Takes more memory for batches of over ten: images N, 3, 32, 32 to N, 10."""

    def forward(self, x):
        found = self.stem(x)
        if len(x) > 10:
            found = found * found.sigmoid() + found.tanh() * found.exp()
        return self.head(self.blocks(found).mean((2, 3)))


@pytest.mark.full
def test_a_program_that_depends_on_the_size_is_not_taken_for_another():
    model, least = Branching(width=16), partial(ogc.solve, memory_budget="least")
    for room, is_above in ((8 * 2**20, True), (2 * 2**20, False)):
        found = ogc.largest_batch(model, images, device_memory=room, gradients="kept")
        assert 0 < found.plain < found.size and (found.size > 10) == is_above
        for size, fits in ((found.size, True), (found.too_large, False)):
            beside = fixed_needs(model, images(size), None, gradients="kept").fixed
            assert (beside + least(ogc.parse(model, images(size), profile="estimate")).peak_bytes <= room) == fits


class Recurrent(nn.Module):
    """An LSTM, whose kernels shapes do not tell: N, 9, 16 to N, 10."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 32, num_layers=2, batch_first=True), nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


@pytest.mark.full
def test_what_shapes_do_not_tell_is_parsed(caplog):
    caplog.set_level("INFO")
    model, room = Recurrent(), 400_000
    found = ogc.largest_batch(model, lambda number: torch.randn(number, 9, 16), device_memory=room, gradients="kept")
    assert "each size is parsed" in caplog.text
    for size, fits in ((found.plain, True), (found.plain + 1, False)):
        inputs = torch.randn(size, 9, 16)
        beside = fixed_needs(model, inputs, None, gradients="kept").fixed
        assert (beside + plain_peak(ogc.parse(model, inputs)) <= room) == fits


@pytest.mark.full
def test_a_failed_trial_is_not_passed_over(monkeypatch, request):
    parts._parts.cache_clear()
    request.addfinalizer(parts._parts.cache_clear)
    monkeypatch.setattr(parts, "PART_BYTES", 1 << 16)
    monkeypatch.setattr(parts, "_give_the_same_bits", lambda kind, _: False)
    model, room = Network(width=16), 8 * 2**20
    found = ogc.largest_batch(model, images, device_memory=room, gradients="kept")
    for size in (found.size, found.too_large):
        graph = ogc.parse(model, images(size), profile="estimate")
        budget = room - fixed_needs(model, images(size), None, gradients="kept").fixed
        if size == found.size:
            assert found.graph.operations == graph.operations
            assert ogc.solve(graph, memory_budget=budget).peak_bytes <= budget
        else:
            with pytest.raises(SolveError):
                ogc.solve(graph, memory_budget=budget)


@pytest.mark.full
def test_long_steps_are_not_timed_but_scaled(monkeypatch):
    model, room = Network(width=16), 8 * 2**20
    options = {"device_memory": room, "max_overhead": 0.3, "make_loss": loss_for, "gradients": "kept"}
    monkeypatch.setattr(graphs, "TIMED_SECONDS", 0.0)
    found = ogc.largest_batch(model, images, **options)
    parsed = ogc.parse(model, images(found.size), loss=loss_for(found.size), profile="time")
    assert [op.backward_bytes for op in found.graph.operations] == [op.backward_bytes for op in parsed.operations]
    assert found.graph.step_seconds != parsed.step_seconds
    assert found.graph.step_seconds > 0 and found.plan.overhead <= 0.3


def test_times_are_scaled_by_the_pace_of_each_operation():
    graph = chain([1, 2, 3])
    op = graph.operations[0]
    now, then, guess = (
        replace(graph, operations=(replace(op, forward_seconds=seconds), *graph.operations[1:]))
        for seconds in (6.0, 5.0, 2.0)
    )
    assert paced(now, then, guess).operations[0].forward_seconds == 15.0
    assert paced(now, then, guess).operations[0].backward_bytes == op.backward_bytes


@pytest.mark.full
def test_a_device_on_which_nothing_fits_is_told_what_would_do():
    with pytest.raises(SolveError, match="the smallest that would do has"):
        ogc.largest_batch(Network(), images, device_memory="100kB")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": 0}, "step must be"),
        ({"device_memory": 0.5}, "device_memory must be bytes"),
        ({"max_overhead": -1}, "max_overhead must be"),
        ({"loss": torch.sum, "make_loss": loss_for}, "loss or make_loss, not both"),
    ],
)
def test_wrong_questions_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        ogc.largest_batch(Network(), images, **{"device_memory": "1GB", **options})


@pytest.mark.parametrize("overheads", [(), 0.5, "0.5", [-1.0], [0.2, "much"]])
def test_overheads_are_a_list(overheads):
    with pytest.raises(InputError, match="max_overhead"):
        ogc.largest_batches(Network(), images, device_memory="1GB", max_overheads=overheads)
