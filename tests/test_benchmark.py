"""The command line: its table, its file, its checks and its exit codes."""

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import benchmark
import ogc
from benchmarks import measuring
from benchmarks.networks import ARCHITECTURES

ROOT = Path(measuring.__file__).parents[1]
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
    script = [sys.executable, "-c", FRESH_PAGES]
    done = subprocess.run(script, capture_output=True, text=True, check=True, cwd=ROOT)
    given_back, kept, given_back_later = map(int, done.stdout.split())
    assert min(given_back, given_back_later) > 10 * kept


def test_all_are_the_eighteen_published():
    assert len(benchmark._options(["--arch", "all"]).arch) == 18


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
    monkeypatch.setattr(measuring, "step", lambda model, x: step(model, x + ("Optimized" in type(model).__name__)))
    assert benchmark.main(SMALL) == 1
    error = capsys.readouterr().err
    assert "CHECK FAILED: output 0 differs by at most" in error


def test_out_of_memory_says_what_would_fit(capsys, monkeypatch):
    def full(*arguments, **keywords):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(benchmark, "_check", full)
    assert benchmark.main(SMALL) == 3
    error = capsys.readouterr().err
    assert "out of memory at batch size 2 on cpu" in error
    assert "samples would fit the plain model" in error


def test_an_error_that_is_not_about_memory_comes_through(monkeypatch):
    def broken(*arguments, **keywords):
        raise RuntimeError("something else")

    monkeypatch.setattr(benchmark, "_check", broken)
    with pytest.raises(RuntimeError, match="something else"):
        benchmark.main(SMALL)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_run(capsys):
    arguments = ["--arch", "resnet18", "--device", "cuda:0", "--batch-size", "16", "--image-size", "64"]
    assert benchmark.main(arguments) == 0
    assert "resnet18" in capsys.readouterr().out
