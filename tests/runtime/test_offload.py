"""Offloading, run on a CPU: the plain model's bits, the bytes that were promised, and nothing left behind."""

import copy
import errno
import gc
import logging
import os
import pickle
import sys
import time
import weakref

import models
import pytest
import torch
from helpers import assert_same_training, loss_of, measured_peak, run_apart, runner_of, trace_of_training
from torch import nn

import ogc
from ogc.runtime import host
from ogc.runtime.copies import Copies, offloadable_values

pytestmark = pytest.mark.skipif(not hasattr(os, "preadv"), reason="files cannot be read at places here")
FAST = 1e12
"""Bytes per second with which nothing is waited for, so that all that is over the budget is offloaded."""
SCALARS = 600
"""Bytes of losses and the like that may be missing."""


def mlp(depth=4, width=64):
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())), nn.Linear(width, 4))


X = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))


def optimized(model, folder, sample=X, **options):
    run = ogc.optimize(model, sample, memory_budget=0.5, offload=folder, bandwidth=FAST, profile="estimate", **options)
    assert len(run.plan.offloaded) > 2
    return run


def open_files():
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0


def threads():
    return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 0


def threads_that_stay():
    """How many there are when those of earlier tests have ended."""
    gc.collect()
    counts = [-1]
    while len(counts) < 10 or len({*counts[-10:]}) > 1:
        counts.append(threads())
        time.sleep(0.02)
    return counts[-1]


def settle(count):
    """Until no more threads are there than before: those of queues end by themselves."""
    for _ in range(500):
        gc.collect()
        if threads() <= count:
            return
        time.sleep(0.01)
    raise AssertionError(f"{threads()} threads, {count} before")


def test_a_model_trains_as_ever_within_its_budget(tmp_path):
    model = mlp(8)
    plain = measured_peak(copy.deepcopy(model), (X,), loss=loss_of)
    run = optimized(model, tmp_path, loss=loss_of, holds_outputs=False)
    assert abs(measured_peak(run, (X,), loss=loss_of) - run.plan.peak_bytes) <= SCALARS
    assert run.plan.peak_bytes <= 0.5 * plain + SCALARS and not run.plan.recomputed_seconds
    assert_same_training(model, run, (X,))
    assert os.listdir(tmp_path) == []


def gradients(model, output, **options):
    model.zero_grad()
    loss_of(output).backward(**options)
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_a_graph_is_kept_and_run_again(tmp_path):
    model = mlp()
    run = optimized(model, tmp_path)
    expected = gradients(model, model(X))
    output = run(X)
    for retain in (True, True, False):
        assert all(map(torch.equal, gradients(model, output, retain_graph=retain), expected))


def test_a_kept_graph_holds_no_more_than_before(tmp_path):
    model = mlp(8)
    run = optimized(model, tmp_path, loss=loss_of, holds_outputs=False)

    def twice(result):
        loss = loss_of(result)
        loss.backward(retain_graph=True)
        return loss

    assert measured_peak(run, (X,), loss=twice) <= measured_peak(model, (X,), loss=twice) * 0.8


def test_gradients_of_gradients(tmp_path):
    model = mlp()
    run = optimized(model, tmp_path)

    def second(module):
        x = X.clone().requires_grad_()
        (first,) = torch.autograd.grad(loss_of(module(x)), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, *model.parameters()], allow_unused=True)

    for one, other in zip(second(model), second(run), strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def test_forwards_and_evaluation_between(tmp_path):
    model = mlp()
    run, inputs = optimized(model, tmp_path), [X, 2 * X, -X]
    expected = [gradients(model, model(x)) for x in inputs]
    outputs = [run(x) for x in inputs]
    with torch.no_grad():
        assert torch.equal(run(X), outputs[0])
    for n in (1, 0, 2):
        assert all(map(torch.equal, gradients(model, outputs[n]), expected[n]))


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("it fails here")


def test_nothing_is_left_of_a_step_that_dies(tmp_path):
    model = mlp()
    run = optimized(model, tmp_path)
    run(X).sum().backward()
    file = next(iter(run_home(run).files.values()))
    gc.collect()
    places, files, running = sum(map(len, file.free.values())), open_files(), threads()
    for _ in range(3):
        hidden = X.clone().requires_grad_()
        output = run(Fails.apply(hidden))
        with pytest.raises(RuntimeError, match="it fails here"):
            output.sum().backward()
        del output, hidden
    gc.collect()
    run(X)  # a step without a backward
    gc.collect()
    deadline = 500
    while sum(map(len, file.free.values())) != places and deadline:
        time.sleep(0.01)
        deadline -= 1
    assert sum(map(len, file.free.values())) == places
    assert open_files() == files and threads() == running and os.listdir(tmp_path) == []
    assert_same_training(model, run, (X,), 1)


def run_home(run):
    """Where the values of an optimized model go."""
    (home,) = runner_of(run).homes.values()
    return home


@pytest.mark.full
def test_nothing_is_left_of_a_model_that_goes(tmp_path):
    ogc.optimize(mlp(), X, memory_budget=0.5)(X).sum().backward()  # for which torch starts threads
    before, files = threads_that_stay(), open_files()
    run = optimized(mlp(), tmp_path)
    run(X).sum().backward()
    assert threads() == before + 2 or sys.platform != "linux"
    home = weakref.ref(run_home(run))
    del run
    settle(before)
    assert home() is None and open_files() == files and os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["posix_fallocate", "pwrite"])
def test_on_a_full_disk_values_stay_and_the_log_says_so_once(name, tmp_path, monkeypatch, caplog):
    model = mlp()
    run = optimized(model, tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, name, full)
    with caplog.at_level(logging.WARNING):
        assert_same_training(model, run, (X,))
    told = [record.getMessage() for record in caplog.records if "offload" in record.getMessage()]
    assert told == ["ogc keeps values in memory that it was to offload: No space left on device"]


def test_what_cannot_be_read_again_is_an_error(tmp_path, monkeypatch):
    run = optimized(mlp(), tmp_path)
    output = run(X)

    def broken(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(ogc.ReplayError, match=r"an offloaded value could not be read again: .*Input/output error"):
        output.sum().backward()


def in_a_fork():
    model = mlp()
    folder = os.environ["OGC_TEST_FOLDER"]
    run = optimized(model, folder)
    expected = gradients(model, model(X))
    output = run(X)
    if (child := os.fork()) == 0:
        code = 1
        try:
            try:
                gradients(model, output)
            except ogc.ReplayError as error:
                assert "the process was forked between a forward that offloaded values and its backward" in str(error)
                del output
                assert all(map(torch.equal, gradients(model, run(X)), expected))
                code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert all(map(torch.equal, gradients(model, output), expected))
    assert os.listdir(folder) == []


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_has_a_file_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("OGC_TEST_FOLDER", str(tmp_path))
    run_apart(in_a_fork)


def test_what_was_written_in_place_is_an_error_as_ever(tmp_path, monkeypatch):
    """Before it has left, somebody writes to a value that the backward needs."""
    run = optimized(mlp(), tmp_path)

    def leave(self, *values):
        self.here[values[0]].tensor.add_(1)
        return left(self, *values)

    left = Copies.leave
    monkeypatch.setattr(Copies, "leave", leave)
    output = run(X)
    with pytest.raises(ogc.ReplayError, match="modified by an in-place operation: a tensor of shape"):
        output.sum().backward()


def test_a_plan_is_saved_copied_and_pickled(tmp_path):
    model = mlp()
    run = optimized(model, tmp_path)
    run.plan.save(tmp_path / "plan.json")
    again = optimized(mlp(), tmp_path, plan=tmp_path / "plan.json")
    assert again.plan.decisions == run.plan.decisions
    expected = trace_of_training(model, model, (X,), 1)
    for made in (copy.deepcopy(run), pickle.loads(pickle.dumps(again))):
        found = trace_of_training(made, made, (X,), 1)
        assert all(map(torch.equal, found, expected)) and len(found) == len(expected)
        assert made.report().calls[0].runs.startswith("plan")


def test_other_sizes_and_a_model_planned_when_it_is_called(tmp_path):
    model = mlp()
    run = ogc.optimize(model, memory_budget=0.5, offload=tmp_path, bandwidth=FAST, profile="estimate")
    for x in (X, X[:128], torch.cat([X, X])):
        assert_same_training(model, run, (x,), 2)
    calls = [call.runs for call in run.report().calls]
    assert len(calls) == 3 and not any(runs.startswith("plain") for runs in calls)
    assert any(runs.startswith("reused") for runs in calls)


def test_random_numbers_are_drawn_as_ever(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.3))))
    assert_same_training(model, optimized(model, tmp_path), (X,))


def test_shared_storages_and_a_frozen_part(tmp_path):
    torch.manual_seed(0)
    model, x = models.Attention(), torch.randint(11, (8, 64))
    run = ogc.optimize(model, x, memory_budget=0.6, offload=tmp_path, bandwidth=FAST, profile="estimate")
    assert run.plan.offloaded
    assert_same_training(model, run, (x,), 1)


@pytest.mark.parametrize(
    "options, words",
    [
        (
            {"offload": "nowhere/at all"},
            "offload must be True or the path of a folder that is there, not 'nowhere/at all'",
        ),
        ({"offload": 3}, "not 3"),
        ({"bandwidth": 1e9}, "host_memory= and ranks_per_host= are those of offload=, which is not given"),
        ({"host_memory": "1GB"}, "host_memory= and ranks_per_host= are those of offload=, which is not given"),
        ({"ranks_per_host": 8}, "host_memory= and ranks_per_host= are those of offload=, which is not given"),
        ({"offload": True, "ranks_per_host": 0}, "ranks_per_host must be a number of processes, 1 or more, not 0"),
        ({"offload": True, "bandwidth": "PCIe 9"}, "'PCIe 3', 'PCIe 4', 'PCIe 5', 'NVLink-C2C', not 'PCIe 9'"),
        (
            {"offload": True, "host_memory": 0.5},
            "host_memory must be bytes or a text like '24GB' or '8GiB', not 0.5",
        ),
        ({"offload": True, "host_memory": "much"}, "host_memory must be bytes"),
        ({"offload": True, "host_memory": "least"}, "host_memory must be bytes"),
        ({"offload": True, "bandwidth": 0.0}, "bandwidth must be bytes per second, more than 0"),
        ({"offload": True, "bandwidth": (1.0, 2.0, 3.0)}, "a pair of such numbers"),
        ({"offload": True, "chunks": 2}, "offload= does not go with chunks="),
        ({"offload": True, "compile": "eager"}, "offload= does not go with compile="),
        ({"offload": True, "keep": ["0"]}, "offload= does not go with keep=, recompute= and once="),
    ],
)
def test_what_does_not_go_is_an_error_that_says_why(options, words):
    with pytest.raises(ogc.InputError, match=words):
        ogc.optimize(mlp(), X, **{"memory_budget": 0.5, **options})


def test_a_model_in_parts_is_an_error(tmp_path):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, x):
            return self.body(x) if float(x.sum()) > -1e9 and torch.rand(()).item() >= 0 else x

    with pytest.raises(ogc.ParseError, match="offload= needs one plan of the whole model, leave it out: "):
        ogc.optimize(Branches(), X, memory_budget=0.5, offload=tmp_path)


@pytest.mark.parametrize("goal", [{"max_overhead": 0.1}, {"memory_budget": "least"}, {}], ids=str)
def test_a_model_trains_as_ever_by_any_goal(goal, tmp_path):
    model = mlp(8)
    alone = ogc.optimize(mlp(8), X, loss=loss_of, holds_outputs=False, **goal)
    given = {"offload": tmp_path, "bandwidth": FAST, "loss": loss_of, "holds_outputs": False}
    optimised = ogc.optimize(model, X, **given, **goal)
    assert optimised.plan.peak_bytes <= alone.plan.peak_bytes
    if goal != {"memory_budget": "least"}:  # the floor is that of one operation
        assert optimised.plan.offloaded and optimised.plan.peak_bytes < 0.9 * alone.plan.peak_bytes
    assert goal.get("max_overhead", 9) >= optimised.plan.overhead
    assert abs(measured_peak(optimised, (X,), loss=loss_of) - optimised.plan.peak_bytes) <= SCALARS
    assert_same_training(model, optimised, (X,))


def test_ranks_of_a_host_share_its_link():
    with torch.device("meta"):
        model, x = mlp(), torch.empty(256, 64)
    graph = ogc.parse(model, x, device="cuda", gpu="H100")
    alone, shared = ogc.with_host(graph, bandwidth="PCIe 5"), ogc.with_host(graph, bandwidth="PCIe 5", ranks_per_host=8)
    assert alone.host.out == alone.host.back == 0.8 * 63e9 == 8 * shared.host.out
    assert alone.offloadable and alone.host.values == offloadable_values(graph)
    with pytest.raises(ogc.InputError, match="cannot be measured here; give bandwidth= in bytes per second, or a link"):
        ogc.with_host(graph)
    with pytest.raises(ogc.InputError, match=r"must be a Graph that ogc\.parse made"):
        ogc.with_host(model)


def test_bandwidths_are_measured_once_for_a_folder(tmp_path):
    first = host.bandwidths(torch.device("cpu"), str(tmp_path))
    assert min(first[:2]) > 1e6 and 0 < first[2] < 0.1 and host.bandwidths(torch.device("cpu"), str(tmp_path)) is first
    assert os.listdir(tmp_path) == []


def test_places_of_a_file_are_rounded_little():
    for size in (1, 7, 1000, 4097, 10**7 + 1):
        assert size <= host.rounded(size) <= 1.13 * size + 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_cuda_values_go_to_pinned_memory_and_come_back():
    model, x = mlp(8).cuda(), X.cuda()
    run = ogc.optimize(model, x, memory_budget=0.5, offload=True, bandwidth=FAST)
    assert run.plan.offloaded
    assert_same_training(model, run, (x,), 5)
    with pytest.raises(ogc.InputError, match="on CUDA values are offloaded to pinned memory"):
        ogc.optimize(model, x, memory_budget=0.5, offload=".")
