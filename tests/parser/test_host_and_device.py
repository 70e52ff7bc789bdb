"""What operations add to a step on CUDA, against a host and a device that take turns one by one."""

from dataclasses import astuple, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ogc
from ogc.graph import Operation, RuntimeCosts, Variant
from ogc.parser.weigh.host import OF_BACKWARD, OF_FORWARD, beside_device, longest

COSTS = RuntimeCosts(1.0, 2.0, 3.0, 4.0)
SECONDS = st.integers(0, 50).map(float)


def step(host, device):
    """Seconds until the last operation is done: each starts when it is handed over and the one before it is done."""
    handed = done = 0.0
    for of_host, of_device in zip(host, device, strict=True):
        handed += of_host
        done = max(done, handed) + of_device
    return done


def operations(*seconds):
    """Operations of so many seconds forward and backward on the device, by that of a hooked tensor."""
    return [
        Operation(f"op{n}", backward_bytes=4, forward_seconds=forward, backward_seconds=backward)
        for n, (forward, backward) in enumerate(seconds)
    ]


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=12))
def test_a_step_takes_as_long_as_one_of_a_host_and_a_device(pairs):
    host, device = zip(*pairs, strict=True)
    change, seconds = longest(host, device)
    assert seconds == step(host, device) == sum(host[: change + 1]) + sum(device[change:])


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=8))
def test_operations_add_up_to_the_step(pairs):
    plain = operations(*pairs)
    counted, costs = beside_device(plain, COSTS, 1.0)
    host = [OF_FORWARD] * len(plain) + [OF_BACKWARD] * len(plain)
    device = [op.forward_seconds for op in plain] + [op.backward_seconds for op in reversed(plain)]
    added_up = sum(op.forward_seconds + op.backward_seconds for op in counted)
    assert added_up - costs.overlapped == pytest.approx(step(host, device))
    assert all(ours.forward_seconds >= op.forward_seconds for ours, op in zip(counted, plain, strict=True))


def test_where_the_host_is_slower_an_operation_takes_what_it_takes():
    variant = Variant(forward_seconds=2.0, backward_seconds=200.0, repeat_seconds=1.0)
    trained, other = operations((1.0, 30.0), (1.0, 0.0))
    (a, b), costs = beside_device((replace(trained, low_memory=variant), replace(other, backward_bytes=0)), COSTS, 1.0)
    assert [a.forward_seconds, a.backward_seconds] == [OF_FORWARD, 30.0]
    assert [b.forward_seconds, b.backward_seconds] == [OF_FORWARD, 0.0]
    assert a.low_memory == Variant(forward_seconds=OF_FORWARD, backward_seconds=200.0, repeat_seconds=OF_FORWARD)
    assert astuple(costs)[:-1] == (1.0, 2.0, 3.0, 4.0)


def test_where_the_gpu_is_slower_the_host_has_time_for_the_runtime():
    plain = operations((1e3, 1e3), (1e3, 1e3))
    counted, costs = beside_device(plain, COSTS, 1.0)
    assert list(counted) == plain and costs == RuntimeCosts(overlapped=-OF_FORWARD)  # before the first one starts


def test_behind_what_is_the_hosts_a_backward_is_the_devices():
    plain = operations((1.0, 1.0), (200.0, 400.0), *[(1.0, 1.0)] * 8)
    (first, *others), costs = beside_device(plain, COSTS, 1.0)
    assert first == plain[0]  # its backward waits for that of the large one
    assert [op.forward_seconds for op in others] == [200.0, *[OF_FORWARD] * 8]
    assert [op.backward_seconds for op in others] == [400.0, *[OF_BACKWARD] * 8]
    assert astuple(costs)[:-1] == pytest.approx((0.9, 1.8, 2.7, 3.6))


def test_a_step_is_shorter_by_what_is_overlapped():
    graph = ogc.parse(torch.nn.Linear(2, 2), torch.ones(1, 2))
    shorter = replace(graph, runtime=replace(graph.runtime, overlapped=1e-6))
    assert shorter.step_seconds == pytest.approx(graph.step_seconds - 1e-6)
