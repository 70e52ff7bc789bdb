"""Fixtures that several files share. Kernels are those of the default mode, as users have them."""

import pytest
import torch

from ogc.parser import arguments
from ogc.parser.weigh import host
from ogc.runtime import frame


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def deterministic():
    """For kernels that give other bits each time, such as sums into the rows that an index names on many threads."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
    ]
)
def device(request):
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def same_times(request, monkeypatch):
    """Times are estimated, so that plans are the same each time, but for tests of ``measured_times``."""
    if "measured_times" not in request.fixturenames:
        monkeypatch.setitem(arguments.AUTO, "cpu", "estimate")


@pytest.fixture
def free_runtime(monkeypatch):
    """The runtime's own work costs nothing: for tests of recomputation alone, on tensors so small that it is most."""
    monkeypatch.setattr(host, "HOOK_SECONDS", 0.0)


@pytest.fixture
def measured_times():
    """For tests that plan with times as users do."""


@pytest.fixture
def threads(request):
    """As many threads as a test's parameter says, handed in indirectly."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def opened(monkeypatch):
    """The frames that are opened: none where the plain model runs."""
    seen = []
    original = frame.Step.open
    monkeypatch.setattr(frame.Step, "open", lambda *args: (seen.append(1), original(*args))[1])
    return seen
