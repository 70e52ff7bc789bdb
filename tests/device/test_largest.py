"""The largest batch that fits: proved by the simulator at its end, and by the allocator."""

from dataclasses import replace

import pytest
import torch
from helpers import chain
from test_needs import Network
from torch import nn
from torch.nn import functional as F

import ogc
from ogc.device.largest import foretold
from ogc.device.needs import fixed_needs
from ogc.errors import InputError, SolveError
from ogc.plan.simulate import plain_peak
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
    return fixed_needs(model, inputs, optimizer).fixed + peak_bytes(step, "cpu")


@pytest.mark.parametrize("max_overhead", [None, 0.2])
def test_the_largest_batch_fits_and_the_next_does_not(max_overhead):
    model, room = Network(), 12 * 2**20
    sgd = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.01), "make_loss": loss_for}
    found = ogc.largest_batch(model, images, device_memory=room, max_overhead=max_overhead, **sgd)
    assert 1 < found.plain < found.size == found.too_large - 1
    assert max_overhead is None or found.plan.overhead <= max_overhead
    optimised = ogc.apply(model, found.graph, found.plan)
    assert used_by_a_step(model, optimised, found.size) <= 1.01 * room
    assert used_by_a_step(model, model, found.plain) <= 1.01 * room
    assert used_by_a_step(model, model, found.plain + 1) > 0.99 * room
    needs = fixed_needs(model, images(found.too_large), None)
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


def test_the_longest_sequence_is_found():
    model, room = Attention(), 4 * 2**20
    found = ogc.largest_batch(model, lambda length: torch.randn(1, length, 16), device_memory=room, step=8)
    assert found.size % 8 == found.plain % 8 == 0 < found.plain < found.size
    peak = plain_peak(ogc.parse(model, torch.randn(1, found.plain, 16)))
    assert fixed_needs(model, torch.randn(1, found.plain, 16), None).fixed + peak <= room


def test_graphs_are_foretold_as_they_are():
    model = Attention()
    graphs = {size: ogc.parse(model, torch.randn(1, size, 16), profile="estimate") for size in (8, 16, 24, 80)}
    like = foretold([graphs[size] for size in (8, 16, 24)], (8, 16, 24), 80)
    assert [v.bytes for v in like.values] == [v.bytes for v in graphs[80].values]
    assert [op.backward_bytes for op in like.operations] == [op.backward_bytes for op in graphs[80].operations]
    assert plain_peak(like) == plain_peak(graphs[80])


def test_other_programs_are_not_foretold():
    graph = chain([1, 2, 3])
    other = replace(graph, operations=(replace(graph.operations[0], target="another"), *graph.operations[1:]))
    with pytest.raises(InputError, match="another program for size 1 than for 3"):
        foretold([graph, graph, other], (1, 2, 3), 9)


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
