"""Fixtures that several files share, and how many processes tests run in. Kernels are those of the default mode."""

import os
from pathlib import Path

import pytest
import torch

from ogc.parser import arguments
from ogc.parser.weigh import host
from ogc.runtime import frame
from ogc.solver.solve import EFFORTS

DEFAULT = "not slow and not full"
"""The tests that run where nothing else is asked for, by their marks."""


def pytest_xdist_auto_num_workers(config):
    """No workers for named files, as these take seconds to start, nor for slow tests, which measure seconds."""
    chosen = config.option.markexpr
    if are_files_named(config) or ("slow" in chosen and "not slow" not in chosen):
        return 0
    return None  # xdist then takes one for each core


def are_files_named(config):
    """Whether certain files are to be run, not all of a folder."""
    return all(Path(config.invocation_params.dir, arg.partition("::")[0]).is_file() for arg in config.args)


def pytest_configure(config):
    """Of files that are named, all runs but what is slow.

    Workers and what they start have one thread each; where a test asks for more, these do not wait by spinning. A
    thread that spins takes the core from the tests beside it, whose threads then spin all the longer.
    """
    if config.option.markexpr == DEFAULT and are_files_named(config):
        config.option.markexpr = "not slow"
    if config.getoption("numprocesses"):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


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


FEW_MOVES = 300
"""A plan is as right after few moves of the local search; it is a little worse, in half of the time that tests take."""


AS_USERS_GET_THEM = ("plan", "solver", "compiling", "test_agreement.py", "test_allocator.py", "test_random_modules.py")
"""Folders and files whose tests search with all moves, as do slow ones and those that ask for ``all_moves``."""


@pytest.fixture(autouse=True)
def few_moves(request, monkeypatch):
    """The search is short, but for tests of plans as users get them: of how good they are, and of what they promise."""
    place = request.path.relative_to(Path(__file__).parent).parts[0]
    is_slow = request.node.get_closest_marker("slow") is not None
    if not (place in AS_USERS_GET_THEM or is_slow or "all_moves" in request.fixturenames):
        monkeypatch.setitem(EFFORTS, 1, FEW_MOVES)


@pytest.fixture
def all_moves():
    """Plans as users get them."""


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


@pytest.fixture(scope="module")
def ranks():
    """Two processes that talk to one another."""
    from ranks import Ranks

    found = Ranks()
    yield found
    found.stop()
