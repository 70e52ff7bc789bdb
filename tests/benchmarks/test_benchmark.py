"""The command line: its table, its file, its checks and its exit codes."""

import json
import platform
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from tqdm import tqdm

import benchmark
import ogc
from benchmarks import losses, measuring, results, trial
from benchmarks.cases import CASES, PUBLISHED
from benchmarks.largest import largest_measured
from benchmarks.suites import ROOT
from benchmarks.summaries import largest


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        blocks = (torch.nn.Sequential(torch.nn.Conv2d(16, 16, 3, padding=1), torch.nn.GELU()) for _ in range(6))
        self.first, self.last = torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.Linear(16, 10)
        self.blocks = torch.nn.Sequential(*blocks)

    def forward(self, x):
        return self.last(self.blocks(self.first(x)).mean((2, 3)))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A small network in the place of two."""
    for name in ("resnet18", "unet"):
        monkeypatch.setitem(CASES, name, replace(CASES[name], build=Small, block=r"blocks\.\d+"))


@pytest.fixture
def run(tmp_path):
    """The exit status, and what was written."""
    path = tmp_path / "new" / "out.json"

    def run(*options, arch=("resnet18",)):
        small = ["--device", "cpu", "--batch-size", "2", "--size", "32", "--iterations", "1", "--json", str(path)]
        status = benchmark.main(["--arch", *arch, *small, *options])
        return status, json.loads(path.read_text()) if path.exists() else {}

    return run


def test_it_prints_a_table_and_writes_the_same_as_json(run, capsys):
    names = ["optimal", "none", "chen", "feng-huang"]
    status, data = run("--solver", *names, "--max-overhead", "0.5")
    assert status == 0 and data["command"].startswith("python benchmark.py --arch resnet18")
    head, *lines = (line.split() for line in capsys.readouterr().out.splitlines())
    assert "published: plain" in " ".join(head) and all("(batch 256)" in " ".join(line) for line in lines)
    assert [(line[0], line[2]) for line in lines] == [("resnet18", name) for name in names]
    rows = {row["way"]: row for row in data["rows"]}
    assert rows["optimal"]["peak_bytes"] <= rows["feng-huang"]["peak_bytes"] < rows["none"]["peak_bytes"]
    for row in rows.values():
        assert row["flops"] >= row["plain_flops"] > 0 and row["rounds"] == 1
        assert row["predicted_bytes"] == pytest.approx(row["peak_bytes"], rel=0.03)
        assert row["predicted_plain_bytes"] == pytest.approx(row["plain_bytes"], rel=0.03)


def test_without_iterations_no_step_is_timed(run, capsys):
    status, data = run("--iterations", "0", arch=("unet",))
    (row,) = data["rows"]
    assert status == 0 and "paid" not in row and "published" not in row and row["input_shape"] == [2, 3, 32, 32]
    assert "2×3×32×32" in capsys.readouterr().out


@pytest.mark.full
def test_the_default_batch_on_cpu_is_small_and_the_output_says_so(capsys):
    assert benchmark.main(["--arch", "unet", "--device", "cpu", "--size", "16", "--iterations", "0"]) == 0
    out = capsys.readouterr().out
    assert "batch size 4 instead of the published ones" in out and "4×3×16×16" in out


@pytest.mark.full
def test_the_command_of_the_readme():
    """In a process of its own: without a terminal there is a line for each row, and no bar."""
    options = ["--arch", "resnet18", "--device", "cpu", "--batch-size", "2", "--size", "32", "--iterations", "1"]
    script = [sys.executable, "-W", "ignore", "benchmark.py", *options, "--profile", "estimate"]
    done = subprocess.run(script, capture_output=True, check=True, cwd=ROOT)
    assert b"\r" not in done.stdout + done.stderr
    lines = [line for line in done.stderr.decode().splitlines() if not line.startswith("[W")]  # PyTorch's own
    assert [line.split(":")[0] for line in lines] == ["resnet18, optimal"]


def test_bars_of_ogc_are_for_terminals_alone(capsys):
    with results.plain_progress():
        assert list(tqdm([1, 2], "weigh operations", delay=0, mininterval=0)) == [1, 2]
    assert capsys.readouterr().err == ""
    list(tqdm([1, 2], "weigh operations", delay=0, mininterval=0))
    assert "weigh operations" in capsys.readouterr().err


def test_the_list_has_every_network_with_its_input(capsys):
    assert benchmark.main(["--arch", "list"]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    named = [[name, "yes" if known.published else "no"] for name, known in CASES.items()]
    assert [line.split()[:2] for line in lines] == named
    assert any("512 tokens of 30522" in line for line in lines)
    assert benchmark.options_of(["--arch", "all"]).arch == list(PUBLISHED) and len(PUBLISHED) == 18


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "say one of --arch, --suite or --only, and --probe"),
        (["--suite", "quick", "--arch", "unet"], "say one of --arch, --suite or --only, and --probe"),
        (["--probe"], "needs --json"),
        (["--probe", "--arch", "unet", "--json", "x"], "say one of --arch"),
        (["--arch", "unet", "--solver", "best"], "invalid choice: 'best'"),
        (["--arch", "unet", "--solver", "chen", "--memory-budget", "0.5"], "need 'optimal' among the solvers"),
        (["--arch", "unet", "--compare", "--iterations", "0"], "let --iterations be at least 1"),
        (["--arch", "unet", "--compare", "--solver", "chen"], "--compare runs every solver by itself"),
        (["--arch", "unet", "--compare", "--chunks", "2"], "--compare runs every solver by itself"),
        (["--arch", "unet", "--compare", "--memory-budget", "0.5"], "leave out the goal"),
        (["--arch", "unet", "--compare", "--compile-budgets", "1.5"], "must be between 0 and 1, not 1.5"),
        (["--arch", "unet", "--largest-batch"], "--largest-batch needs --device-memory"),
        (["--arch", "unet", "--optimizer", "Adams", "--device-memory", "1GB"], "must be a class of torch.optim"),
        (["--arch", "unet", "--device-memory", "1GB", "--memory-budget", "0.5"], "not allowed with argument"),
        (["--arch", "unet", "--loss", "hinge"], "invalid choice: 'hinge'"),
    ],
)
def test_options_that_do_not_go_together(options, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        benchmark.main(options)
    assert message in capsys.readouterr().err


def test_what_cannot_be_run_is_refused(capsys):
    assert benchmark.main(["--arch", "resnet1001", "--device", "cpu"]) == 2
    assert "unknown network 'resnet1001'; the nearest are resnet101" in capsys.readouterr().err
    assert benchmark.main(["--arch", "linear_relu_100", "--device", "cpu", "--size", "7"]) == 2
    assert "linear_relu_100: the model reads numbers of shape 1024, not of 7" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert benchmark.main(["--arch", "resnet18", "--device", "cuda:0"]) == 2
        assert "finds no CUDA device; use --device cpu" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("where", ["unrepeatable", "distances"], ids=["the plain step", "a planned step"])
def test_out_of_memory_says_what_would_fit(where, run, capsys, monkeypatch):
    def full(*arguments, **keywords):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(trial, where, full)
    assert run()[0] == 3
    error = capsys.readouterr().err
    assert "out of memory at batch size 2 on cpu" in error and "samples would fit the plain model" in error


class Broken(torch.nn.Linear):
    def forward(self, x):
        raise RuntimeError("the plain model is broken")


def test_a_row_that_fails_loses_no_other(run, capsys, monkeypatch):
    monkeypatch.setitem(CASES, "resnet34", replace(CASES["resnet34"], build=lambda: Broken(2, 2)))
    apply, plans = ogc.apply, []

    def wrong_first(model, graph, plan):
        plans.append(plan)
        right = apply(model, graph, plan)
        return right if len(plans) > 1 else lambda x: 1.5 * right(x)

    monkeypatch.setattr(ogc, "apply", wrong_first)
    status, data = run("--solver", "chen", "none", arch=("resnet34", "resnet18"))
    assert status == 4
    printed = capsys.readouterr()
    for text in (printed.out, printed.err):
        assert "resnet34: RuntimeError: the plain model is broken" in text
        assert "resnet18, chen: CHECK FAILED: output 0 differs by at most" in text
    assert [(row["way"], row.get("failed", False)) for row in data["rows"]] == [("chen", True), ("none", False)]
    assert [(failed["name"], failed["status"]) for failed in data["failed"]] == [("resnet34", 4), ("resnet18, chen", 1)]


def test_results_are_written_after_each_row(run, monkeypatch, tmp_path):
    path, measured, seen = tmp_path / "new" / "out.json", trial.Trial.measured, []

    def reads(*arguments, **keywords):
        seen.append(len(json.loads(path.read_text())["rows"]) if path.exists() else 0)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return measured(*arguments, **keywords)

    monkeypatch.setattr(trial.Trial, "measured", reads)
    with pytest.raises(KeyboardInterrupt):
        run("--solver", "none", "chen", "uniform")
    assert seen == [0, 1, 2] and len(json.loads(path.read_text())["rows"]) == 2


# -- the machine --------------------------------------------------------------------------------------------------

FRESH_PAGES = """
import resource, torch
from benchmarks.measuring import give_back_freed_memory, keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

given_back = min(faults() for _ in range(5))
assert keep_freed_memory()
print(given_back, min(faults() for _ in range(5)))
give_back_freed_memory()
print(faults())
"""


@pytest.mark.full
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep freed memory")
def test_freed_memory_can_be_kept():
    """In most processes: where the system happens to have put something behind the heap, it cannot grow."""
    found = []
    for _ in range(4):
        script = [sys.executable, "-c", FRESH_PAGES]
        done = subprocess.run(script, capture_output=True, text=True, check=True, cwd=ROOT)
        given_back, kept, given_back_later = map(int, done.stdout.split())
        found.append((min(given_back, given_back_later), kept))
        if found[-1][0] > 10 * kept:
            return
    raise AssertionError(found)


POOLING = (
    "adaptive_avg_pool2d_backward_cuda does not have a deterministic implementation, but you set "
    "'torch.use_deterministic_algorithms(True, warn_only=True)'."
)


def test_on_cuda_one_kernel_may_differ_and_only_its_warning_is_left_out():
    before = torch.is_deterministic_algorithms_warn_only_enabled()
    with measuring.deterministic(torch.device("cuda")):
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        warnings.warn(POOLING, UserWarning, stacklevel=1)
        with pytest.warns(UserWarning, match="adaptive_max"):
            warnings.warn(POOLING.replace("adaptive_avg", "adaptive_max"), UserWarning, stacklevel=1)
    assert torch.is_deterministic_algorithms_warn_only_enabled() == before
    with measuring.deterministic(torch.device("cpu")):
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    with pytest.raises(UserWarning):
        warnings.warn(POOLING, UserWarning, stacklevel=1)


class Moody(torch.nn.Module):
    """Its second branch gives other numbers each time, as a kernel that adds atomically does."""

    def __init__(self):
        super().__init__()
        self.steady, self.moody = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.steps = 0

    def forward(self, x):
        self.steps += 1
        return self.steady(x), self.moody(x * self.steps)


def test_what_two_plain_steps_differ_in_is_named_and_not_compared():
    case = replace(CASES["linear_relu_100"], build=Moody, input=replace(CASES["linear_relu_100"].input, shape=(4,)))
    with measuring.deterministic(torch.device("cuda")):
        tried = trial.Trial("net", case, torch.device("cpu"), results.Results(None, {}), batch_size=3)
        found = tried.measured("again", lambda: tried.model)
        assert found.unrepeatable == ("output 1", "gradient of moody.weight") and found.differs == ()
        wrong = tried.measured("wrong", lambda: lambda x: (tried.model(x)[0] + 1, tried.model(x)[1]))
        assert wrong.differs == ("outputs",)
    tried.results.add(found)
    said = "net: not compared, as two plain steps differ there: output 1, gradient of moody.weight"
    assert said in str(tried.results)
    with measuring.deterministic(torch.device("cpu")):
        assert trial.Trial("net", case, torch.device("cpu"), tried.results, batch_size=3).plain[1] == ()


def test_memory_is_not_filled_while_a_step_is_timed(monkeypatch):
    settings, seen = torch.utils.deterministic, []
    assert settings.fill_uninitialized_memory
    monkeypatch.setattr(measuring, "step", lambda *_: seen.append(settings.fill_uninitialized_memory))
    measuring.timed(torch.nn.Identity(), torch.ones(1))
    assert seen == [False] and settings.fill_uninitialized_memory
    monkeypatch.setattr(measuring, "step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        measuring.timed(torch.nn.Identity(), torch.ones(1))
    assert settings.fill_uninitialized_memory


# -- devices ------------------------------------------------------------------------------------------------------

DEVICE = ["--optimizer", "AdamW", "--loss", "cross-entropy", "--profile", "estimate"]


@pytest.mark.full
def test_the_largest_batch_of_each_way_of_training(run, capsys):
    status, data = run("--device-memory", "4MB", "--largest-batch", *DEVICE)
    assert status == 0 and "Geometric mean over the plain batch, of 1 rows" in capsys.readouterr().out
    (row,) = data["rows"]
    assert 0 < row["plain"] < row["ours"]["20%"]["size"] <= row["ours"]["50%"]["size"] and row["blocks"] > 0
    assert all(found["measured_bytes"] <= 1.01 * 4_000_000 for found in row["ours"].values())
    assert all(row[f"{way}_step"]["bytes"] <= 1.01 * 4_000_000 for way in ("plain", "blocks"))
    assert row["ours"]["50%"]["factor"] == row["ours"]["50%"]["size"] / row["plain"]
    assert row["ours"]["50%"]["next_does_not_fit"] == row["ours"]["50%"]["size"] + 1
    unknown = row | {"plain": 0, "plain_step": None, "blocks": None, "blocks_step": None}
    found = largest([{"rows": [unknown, row]}])
    assert " | 0 | – | " in found and "of 1 rows where that is not 0" in found


@pytest.mark.parametrize(("each", "fixed", "size"), [(10, 5, 9), (60, 5, 1), (100, 5, 0), (47, 0, 2)])
def test_a_largest_batch_is_found_by_measuring(each, fixed, size):
    measured = []

    def measure(batch):
        measured.append(batch)
        return {"bytes": fixed + each * batch}

    found, step = largest_measured(measure, 100)
    assert found == size and (step is None if size == 0 else step["bytes"] == fixed + each * size)
    assert 0 not in measured and len(measured) == len(set(measured))


@pytest.mark.full
def test_a_device_is_planned_for_with_loss_and_optimizer(run, capsys):
    status, data = run("--device-memory", "3MB", "--batch-size", "4", *DEVICE)
    (row,) = data["rows"]
    assert status == 0 and row["peak_bytes"] < row["plain_bytes"]
    assert row["predicted_bytes"] == pytest.approx(row["peak_bytes"], rel=0.01)
    assert run("--device-memory", "100kB", *DEVICE)[0] == 2
    assert "the smallest that would do has" in capsys.readouterr().err


@pytest.mark.parametrize("shape", [(4, 10), (2, 6, 10), (2, 5, 8, 8)])
def test_a_cross_entropy_for_logits_of_any_kind(shape):
    logits = torch.randn(shape, requires_grad=True)
    for output in (logits, (logits, torch.zeros(1))):
        loss = losses.cross_entropy(output)
        assert loss.dim() == 0 and loss.requires_grad
