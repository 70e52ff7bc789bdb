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
from benchmarks import bench, losses, measuring, running
from benchmarks.largest import Largest, Measured, Ours, _largest_measured, summary
from benchmarks.networks import ARCHITECTURES
from benchmarks.suites import ROOT

SMALL = ["--arch", "resnet18", "--device", "cpu", "--batch-size", "2", "--image-size", "64", "--iterations", "1"]


def test_it_prints_a_table_and_writes_the_same_as_json(capsys, tmp_path):
    path = tmp_path / "out.json"
    assert benchmark.main([*SMALL, "--json", str(path)]) == 0
    table = capsys.readouterr().out
    assert "plain MiB" in table and "5635 (batch 256)" in table
    data = json.loads(path.read_text())
    assert data["command"].startswith("python benchmark.py --arch resnet18")
    (row,) = data["rows"]
    assert row["ogc_bytes"] < row["plain_bytes"]
    assert row["ogc_flops"] >= row["plain_flops"] > 0
    assert row["predicted_bytes"] == pytest.approx(row["ogc_bytes"], rel=0.03)
    assert row["predicted_plain_bytes"] == pytest.approx(row["plain_bytes"], rel=0.03)


def test_without_iterations_no_step_is_timed(capsys, tmp_path):
    path = tmp_path / "out.json"
    assert benchmark.main([*SMALL[:-1], "0", "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["plain_seconds"] is row["ogc_seconds"] is None and row["ogc_bytes"] < row["plain_bytes"]
    assert capsys.readouterr().out.splitlines()[-1].split()[6:9] == ["-", "-", "-"]
    with pytest.raises(SystemExit, match="2"):
        benchmark.main([*SMALL[:-1], "0", "--compare"])
    assert "let --iterations be at least 1" in capsys.readouterr().err


def test_solvers_side_by_side(capsys, tmp_path):
    path = tmp_path / "out.json"
    names = ["optimal", "none", "chen", "feng-huang"]
    assert benchmark.main([*SMALL, "--solver", *names, "--max-overhead", "0.3", "--json", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[-4:]] == [["resnet18", name] for name in names]
    rows = {row["solver"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows["optimal"]["ogc_bytes"] < rows["feng-huang"]["ogc_bytes"] < rows["none"]["ogc_bytes"]
    for row in rows.values():
        assert row["predicted_bytes"] == pytest.approx(row["ogc_bytes"], rel=0.03)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--solver", "best"], "invalid choice: 'best'"),
        (["--solver", "chen", "--memory-budget", "0.5"], "need 'optimal' among the solvers"),
    ],
)
def test_wrong_solvers_are_refused(options, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        benchmark.main([*SMALL, *options])
    assert message in capsys.readouterr().err


def test_the_default_batch_on_cpu_is_small_and_the_output_says_so(capsys):
    assert benchmark.main(["--arch", "alexnet", "--device", "cpu", "--image-size", "64", "--iterations", "1"]) == 0
    assert "batch size 4 instead of the published ones" in capsys.readouterr().out


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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep freed memory")
def test_freed_memory_can_be_kept():
    """In most processes: where the system happens to have put something behind the heap, it cannot grow."""
    script = [sys.executable, "-c", FRESH_PAGES]
    found = []
    for _ in range(4):
        done = subprocess.run(script, capture_output=True, text=True, check=True, cwd=ROOT)
        given_back, kept, given_back_later = map(int, done.stdout.split())
        found.append((min(given_back, given_back_later), kept))
        if found[-1][0] > 10 * kept:
            return
    raise AssertionError(found)


@pytest.mark.parametrize("options", [[], ["--suite", "quick", "--arch", "resnet18"]])
def test_either_architectures_or_a_suite(options, capsys):
    with pytest.raises(SystemExit, match="2"):
        benchmark.main(options)
    assert "say one of --arch, --suite or --only, and --probe" in capsys.readouterr().err


def test_all_are_the_eighteen_published():
    assert len(benchmark.options_of(["--arch", "all"]).arch) == 18


def test_the_list_has_every_architecture_with_its_input(capsys):
    assert benchmark.main(["--arch", "list"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["name", "published", "input"]
    assert [line.split()[:2] for line in lines] == [
        [name, "yes" if known.published else "no"] for name, known in ARCHITECTURES.items()
    ]
    assert any("512 tokens of 30522" in line for line in lines)


def test_an_architecture_that_is_not_published(capsys, tmp_path):
    path = tmp_path / "out.json"
    options = ["--device", "cpu", "--batch-size", "2", "--size", "32", "--iterations", "1", "--json", str(path)]
    assert benchmark.main(["--arch", "unet", *options]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["published"] is None and row["input_shape"] == [2, 3, 32, 32]
    assert row["predicted_bytes"] == pytest.approx(row["ogc_bytes"], rel=0.03)
    assert "2×3×32×32" in capsys.readouterr().out


def test_a_size_that_the_model_does_not_take(capsys):
    assert benchmark.main(["--arch", "linear_relu_100", "--device", "cpu", "--size", "7"]) == 2
    assert "linear_relu_100: the model reads vectors of 1024 numbers, not of 7" in capsys.readouterr().err


def test_an_unknown_architecture_lists_the_nearest(capsys):
    assert benchmark.main(["--arch", "resnet1001", "--device", "cpu"]) == 2
    assert "unknown architecture 'resnet1001'; the nearest are resnet101" in capsys.readouterr().err
    assert benchmark.main(["--arch", "darts_cifar", "--device", "cpu"]) == 2
    assert "unknown architecture 'darts_cifar'; the nearest are darts_cifar10" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_cuda(capsys):
    assert benchmark.main(["--arch", "resnet18", "--device", "cuda:0"]) == 2
    assert "finds no CUDA device; use --device cpu" in capsys.readouterr().err


def test_a_failed_check_names_the_tensor_and_the_difference(capsys, monkeypatch):
    apply = ogc.apply

    def wrong(model, graph, plan):
        optimised = apply(model, graph, plan)
        optimised.register_forward_hook(lambda module, given, result: result * 1.5 if plan is not None else None)
        return optimised

    monkeypatch.setattr(ogc, "apply", wrong)
    step = measuring.step
    monkeypatch.setattr(measuring, "step", lambda model, x, loss: step(model, x + hasattr(model, "plan"), loss))
    assert benchmark.main(SMALL) == 1
    error = capsys.readouterr().err
    assert "CHECK FAILED: output 0 differs by at most" in error


def test_out_of_memory_says_what_would_fit(capsys, monkeypatch):
    def full(*arguments, **keywords):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(bench, "check", full)
    assert benchmark.main(SMALL) == 3
    error = capsys.readouterr().err
    assert "out of memory at batch size 2 on cpu" in error
    assert "samples would fit the plain model" in error


class Broken(torch.nn.Linear):
    def forward(self, x):
        raise RuntimeError("the plain model is broken")


def test_a_row_that_fails_loses_no_other(capsys, monkeypatch, tmp_path):
    broken = replace(ARCHITECTURES["resnet34"], build=lambda: Broken(2, 2))
    monkeypatch.setitem(ARCHITECTURES, "resnet34", broken)
    check, calls = bench.check, []

    def fails_first(*arguments):
        calls.append(1)
        if len(calls) == 1:
            raise measuring.CheckFailed("output 0 differs")
        return check(*arguments)

    monkeypatch.setattr(bench, "check", fails_first)
    path = tmp_path / "new" / "out.json"
    options = ["--arch", "resnet34", "resnet18", "--solver", "chen", "none", "--json", str(path)]
    assert benchmark.main([*SMALL, *options]) == 4
    printed = capsys.readouterr()
    reasons = ["resnet34: RuntimeError: the plain model is broken", "resnet18, chen: CHECK FAILED: output 0 differs"]
    for text in (printed.out, printed.err):
        assert all(reason in text for reason in reasons)
    data = json.loads(path.read_text())
    assert [(row["arch"], row["solver"]) for row in data["rows"]] == [("resnet18", "none")]
    assert [(failed["name"], failed["status"]) for failed in data["failed"]] == [("resnet34", 4), ("resnet18, chen", 1)]


def test_results_are_written_after_each_row(monkeypatch, tmp_path):
    path, check, seen = tmp_path / "out.json", bench.check, []

    def reads(*arguments):
        seen.append(len(json.loads(path.read_text())["rows"]) if path.exists() else 0)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return check(*arguments)

    monkeypatch.setattr(bench, "check", reads)
    with pytest.raises(KeyboardInterrupt):
        benchmark.main([*SMALL, "--solver", "none", "chen", "uniform", "--json", str(path)])
    assert seen == [0, 1, 2]
    assert len(json.loads(path.read_text())["rows"]) == 2


def test_without_a_terminal_there_is_a_line_for_each_row_and_no_bar():
    script = [sys.executable, "-W", "ignore", "benchmark.py", *SMALL, "--solver", "optimal", "none"]
    done = subprocess.run(script, capture_output=True, check=True, cwd=ROOT)
    assert b"\r" not in done.stdout + done.stderr
    lines = [line for line in done.stderr.decode().splitlines() if not line.startswith("[W")]  # PyTorch's own
    assert [line.split(":")[0] for line in lines] == ["resnet18, optimal", "resnet18, none"]


def test_bars_of_ogc_are_for_terminals_alone(capsys):
    with running.plain_progress():
        assert list(tqdm([1, 2], "weigh operations", delay=0, mininterval=0)) == [1, 2]
    assert capsys.readouterr().err == ""
    list(tqdm([1, 2], "weigh operations", delay=0, mininterval=0))
    assert "weigh operations" in capsys.readouterr().err


# -- kernels that are not deterministic ---------------------------------------------------------------------------

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
    model, x = Moody(), torch.randn(3, 4)
    measuring.allocate_gradients(model)
    with measuring.deterministic(torch.device("cuda")):
        plain = measuring.measure(model, model, x, 0)
        left_out = measuring.unrepeatable(model, x, 0, plain)
        assert left_out == ("output 1", "gradient of moody.weight")
        assert bench.check(plain, measuring.measure(model, model, x, 0), left_out) == 0.0

        def wrong(inputs):
            first, second = model(inputs)
            return first + 1, second

        with pytest.raises(measuring.CheckFailed, match="output 0 differs"):
            bench.check(plain, measuring.measure(model, wrong, x, 0), left_out)
    with measuring.deterministic(torch.device("cpu")):
        assert measuring.unrepeatable(model, x, 0, plain) == ()
    with pytest.raises(measuring.CheckFailed, match="output 1 differs"):
        bench.check(plain, measuring.measure(model, model, x, 0))


def test_a_row_says_what_was_not_compared(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "unrepeatable", lambda *_: ("output 0", *(f"gradient of {n}" for n in "abc")))
    path = tmp_path / "out.json"
    assert benchmark.main([*SMALL, "--json", str(path)]) == 0
    said = "resnet18, optimal: not compared, as two plain steps differ there: output 0, gradient of a, gradient of b"
    assert f"{said} and 1 more" in capsys.readouterr().out
    assert len(json.loads(path.read_text())["rows"][0]["unrepeatable"]) == 4


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_run(capsys):
    arguments = ["--arch", "resnet18", "--device", "cuda:0", "--batch-size", "16", "--image-size", "64"]
    assert benchmark.main(arguments) == 0
    assert "resnet18" in capsys.readouterr().out


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        blocks = (torch.nn.Sequential(torch.nn.Conv2d(16, 16, 3, padding=1), torch.nn.GELU()) for _ in range(6))
        self.first, self.last = torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.Linear(16, 10)
        self.blocks = torch.nn.Sequential(*blocks)

    def forward(self, x):
        return self.last(self.blocks(self.first(x)).mean((2, 3)))


@pytest.fixture
def small(monkeypatch):
    architecture = replace(ARCHITECTURES["resnet18"], build=Small, block=r"blocks\.\d+", published=None)
    monkeypatch.setitem(ARCHITECTURES, "resnet18", architecture)
    return ["--arch", "resnet18", "--device", "cpu", "--size", "32", "--optimizer", "AdamW", "--loss", "cross-entropy"]


def test_the_largest_batch_of_each_way_of_training(small, capsys, tmp_path):
    path = tmp_path / "out.json"
    options = ["--device-memory", "8MB", "--largest-batch", "--profile", "estimate", "--json", str(path)]
    assert benchmark.main([*small, *options]) == 0
    assert "with checkpointed blocks, ours" in capsys.readouterr().out
    (row,) = json.loads(path.read_text())["rows"]
    assert 0 < row["plain"] < row["ours"]["20%"]["size"] <= row["ours"]["50%"]["size"]
    assert row["blocks"] > 0
    assert all(found["measured_bytes"] <= 1.01 * 8_000_000 for found in row["ours"].values())
    assert all(row[f"{way}_step"]["bytes"] <= 1.01 * 8_000_000 for way in ("plain", "blocks"))
    assert row["ours"]["50%"]["factor"] == row["ours"]["50%"]["size"] / row["plain"]
    assert row["ours"]["50%"]["next_does_not_fit"] == row["ours"]["50%"]["size"] + 1
    assert row["input_shape"] == [4, 3, 32, 32] and row["search_seconds"] > 0


def what_fits(plain, size, blocks):
    step = Measured(1 << 20, 0.1)
    ours = {"50%": Ours(size, size / plain if plain else None, 0.4, 1 << 20, 0.1, size + 1)}
    return Largest("tiny", (4, 3, 8), 2 << 20, 1.0, plain, step if plain else None, blocks, None, ours)


def test_what_fits_is_summed_up_where_the_plain_model_fits():
    rows = [what_fits(2, 8, 4), what_fits(4, 4, None), what_fits(0, 3, 1)]
    assert summary(rows).endswith("2 of 3 networks: ours 2.0 x at up to 50%; 2.0 x with checkpointed blocks, of 1")
    assert summary(rows[2:]) == ""
    assert "0 plain, 1 with checkpointed blocks, ours 3 at up to 50% more time (of none, promised 40%" in str(rows[2])


@pytest.mark.parametrize(("each", "fixed", "size"), [(10, 5, 9), (60, 5, 1), (100, 5, 0), (47, 0, 2)])
def test_a_largest_batch_is_found_by_measuring(each, fixed, size):
    measured = []

    def measure(batch):
        measured.append(batch)
        return Measured(fixed + each * batch, 0.1)

    found, step = _largest_measured(measure, 100)
    assert found == size and (step is None if size == 0 else step.bytes == fixed + each * size)
    assert 0 not in measured and len(measured) == len(set(measured))


def test_a_device_is_planned_for_with_loss_and_optimizer(small, capsys, tmp_path):
    path = tmp_path / "out.json"
    options = ["--device-memory", "6MB", "--batch-size", "8", "--iterations", "1", "--json", str(path)]
    assert benchmark.main([*small, *options]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["ogc_bytes"] < row["plain_bytes"]
    assert row["predicted_bytes"] == pytest.approx(row["ogc_bytes"], rel=0.01)
    assert benchmark.main([*small, "--device-memory", "100kB", "--batch-size", "8"]) == 2
    assert "the smallest that would do has" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--largest-batch"], "--largest-batch needs --device-memory"),
        (["--optimizer", "Adams", "--device-memory", "1GB"], "must be a class of torch.optim"),
        (["--device-memory", "1GB", "--memory-budget", "0.5"], "not allowed with argument"),
        (["--loss", "hinge"], "invalid choice: 'hinge'"),
    ],
)
def test_wrong_questions_about_devices_are_refused(options, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        benchmark.main([*SMALL, *options])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("shape", [(4, 10), (2, 6, 10), (2, 5, 8, 8)])
def test_a_cross_entropy_for_logits_of_any_kind(shape):
    logits = torch.randn(shape, requires_grad=True)
    for output in (logits, (logits, torch.zeros(1))):
        loss = losses.cross_entropy(output)
        assert loss.dim() == 0 and loss.requires_grad
