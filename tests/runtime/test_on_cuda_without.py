"""What would be wrong on CUDA, by what can be replaced of it on a machine that has none."""

import contextlib

import pytest
import torch
from torch import nn

import ogc
from ogc.errors import InputError, ReplayError
from ogc.parser.arguments import _check_one_device
from ogc.parser.weigh import measure
from ogc.parser.weigh.call import most_bytes
from ogc.parser.weigh.measure import Measurer, seconds_of, typical
from ogc.program import autocast
from ogc.runtime import frame, held
from ogc.runtime.held import Marks, raise_what_is_known
from ogc.torch_state.private import TorchDispatchMode


class Reading(TorchDispatchMode):
    """Notes what waits for a device: numbers that are read out of tensors."""

    only_looks = True

    def __init__(self):
        super().__init__()
        self.read = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.read.append(function)
        return function(*args, **(kwargs or {}))


class Gate(nn.Module):
    """An opaque module: its forward depends on what it computes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.shift = 0.0

    def forward(self, x):
        x = torch.tanh(self.layer(x)) + self.shift
        return x.sin() if Gate.positive(x) else x

    @staticmethod
    def positive(x):
        return len(str(x.shape)) > 0 and bool(torch.ones(()))  # read on the host


@pytest.fixture
def gated():
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (Gate(), nn.Tanh(), nn.Softplus())]
    return nn.Sequential(*layers), torch.randn(64, 32)


@pytest.fixture
def on_a_device(monkeypatch):
    """Marks are read as on a device that nobody waits for; what it has come to is said by the list."""
    known = []
    monkeypatch.setattr(held, "is_read_at_once", lambda tensor: False)
    monkeypatch.setattr(held, "_read_later", lambda flag: lambda: bool(flag) if known else None)
    yield known
    held._pending.clear()


def test_what_is_called_again_is_compared_without_waiting(gated, on_a_device, monkeypatch):
    model, x = gated
    optimised = ogc.optimize(model, x, opaque_modules=[Gate], recompute_opaque=[Gate], memory_budget="least")
    assert any(segment.parts for segment in optimised.plan.segments)
    monkeypatch.setattr(Gate, "positive", staticmethod(lambda x: True))
    with Reading() as mode:
        optimised(x).sum().backward()
    assert not mode.read
    assert held._pending
    on_a_device.append(True)
    optimised(x)
    assert not held._pending


def test_a_difference_is_an_error_once_it_is_known(on_a_device):
    one, other = torch.ones(3), torch.full((3,), 2.0)
    error = ReplayError("it is not the same")
    Marks.of([one]).expect(Marks.of([one]), lambda: error)
    Marks.of([one]).expect(Marks.of([other]), lambda: error)
    raise_what_is_known()  # nothing is known yet
    on_a_device.append(True)
    with pytest.raises(ReplayError, match="earlier step, whose gradients are wrong: it is not the same"):
        raise_what_is_known()
    raise_what_is_known()


def test_another_layout_is_known_at_once(on_a_device):
    with pytest.raises(ReplayError, match="again"):
        Marks.of([torch.ones(3)]).expect(Marks.of([torch.ones(4)]), lambda: ReplayError("again"))


def test_a_plain_step_reads_nothing():
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout())))
    x = torch.randn(64, 32)
    optimised = ogc.optimize(model, x, memory_budget="least")
    assert not optimised.plan.is_plain
    with Reading() as mode:
        optimised(x).sum().backward()
    assert not mode.read


def test_cudnn_benchmark_is_off_in_what_is_planned(monkeypatch, caplog):
    seen = []
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6))), torch.randn(64, 16)
    optimised = ogc.optimize(model, x, memory_budget="least")
    monkeypatch.setattr("ogc.runtime.runner.CHOOSES_ALGORITHMS", ("cpu",))
    own = autocast.flags_held
    monkeypatch.setattr(autocast, "flags_held", lambda flags: seen.append(flags) or own(flags))
    torch.backends.cudnn.benchmark = True
    try:
        for _ in range(2):
            optimised(x).sum().backward()
    finally:
        torch.backends.cudnn.benchmark = False
    assert seen and len(set(map(str, seen))) == 1
    assert caplog.text.count("what is planned runs without it") == 1
    assert ogc.torch_state.settings.flags() in seen  # with benchmark off, and else as they are


def test_a_cuda_graph_takes_no_recomputed_random_numbers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    step = frame.Step(nn.Linear(1, 1), {}, [], (torch.device("cuda"),), ())
    with pytest.raises(ReplayError, match="a CUDA graph cannot"):
        step.remember_random(0)


def test_a_model_on_two_devices_is_refused():
    with pytest.raises(InputError, match=r"weight is on cpu, other parameters on cuda:1: .* one device each"):
        _check_one_device(nn.Linear(4, 4), torch.device("cuda:1"))
    _check_one_device(nn.BatchNorm1d(4).to("cpu"), torch.device("cpu"))


class Device:
    """A stand-in for torch.cuda: work takes the host and the device what it says of each, one behind the other."""

    def __init__(self, monkeypatch):
        self.host = self.now = 0.0
        self.is_idle = True
        for name in ("synchronize", "current_stream", "Event"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
        monkeypatch.setattr(measure, "sleep_on_cuda", lambda cycles: self.work(cycles / 2e9))

    def synchronize(self, device=None):
        self.host = self.now = max(self.host, self.now)
        self.is_idle = True

    def current_stream(self, device=None):
        return self

    def Event(self, enable_timing=False):
        device = self

        class Event:
            def record(self, stream):
                self.at = max(device.host, device.now)

            def elapsed_time(self, other):
                assert device.is_idle, "read before the device was waited for"
                return 1e3 * (other.at - self.at)

        return Event()

    def work(self, seconds, host=0.0):
        self.host += host
        self.now = max(self.host, self.now) + seconds
        self.is_idle = False


def test_seconds_on_cuda_are_the_devices(monkeypatch):
    device = Device(monkeypatch)
    assert seconds_of(lambda: device.work(0.25), torch.device("cuda")) == 0.25


def test_pauses_of_the_host_between_kernels_do_not_count(monkeypatch):
    device = Device(monkeypatch)

    def run():
        for _ in range(4):
            device.work(5e-6, host=1e-4)

    assert seconds_of(run, torch.device("cuda")) == pytest.approx(2e-5)


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_one_slow_run_does_not_count(slow, monkeypatch):
    """The first loads kernels and makes workspaces; any other may meet a busy machine."""
    device, times = Device(monkeypatch), [0.002] * 10
    times[slow] = 0.6
    left = iter(times)
    assert typical(lambda: device.work(next(left)), torch.device("cuda")) == pytest.approx(0.002)


def test_bytes_that_are_not_measured_are_estimated_by_the_rules_of_cuda():
    cuda = torch.device("cuda")
    assert Measurer(cuda, measures_bytes=False).estimator.by_rules is not None
    assert Measurer(cuda).estimator.by_rules is None


def test_the_most_bytes_of_all_runs_but_the_first_count_on_cuda():
    """A run may begin while gradients of the one before it are still alive, and then seems to take less."""
    bytes_of_runs = iter([11, 5, 9, 9])
    assert most_bytes(lambda: (next(bytes_of_runs), 0), torch.device("cuda")) == (9, 0)
