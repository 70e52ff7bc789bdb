"""``python -m ogc``: what it prints is what the functions return, and each error is one line and status 2."""

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ogc
from ogc.__main__ import main

FACTORIES = """
import torch, helper_of_net
from torch import nn

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(3)))

    def forward(self, ids):
        return self.head(self.blocks(self.words(ids)))

class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, x):
        return self.body(x) if x.sum() > 0 else -self.body(x)

def network():
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(6)))

def make():
    return network(), torch.randn(512, 256)

def words():
    ids = torch.randint(50, (4, 16))
    return Words(), ids, lambda scores: nn.functional.cross_entropy(scores.flatten(0, 1), ids.flatten())

def where():
    raise RuntimeError(f"on {torch.empty(0).device}")

def fails():
    return network(), torch.randn(512, 255)

def alone():
    return network()

def of_texts():
    return "model", "sample"

def branches():
    return Branching(), torch.randn(4, 8)

def descends(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

number = 3
"""


@pytest.fixture
def net(tmp_path, monkeypatch):
    """A file beside one that it imports, which is not in the working directory."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "net.py").write_text(FACTORIES)
    (folder / "helper_of_net.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield str(folder / "net.py")
    for name in ("net", "helper_of_net"):
        sys.modules.pop(name, None)


def run(capsys, *arguments):
    status = main(arguments)
    printed = capsys.readouterr()
    assert status == 0, printed.err
    return printed.out


def said(capsys, *arguments):
    """The one line of an error."""
    try:
        status = main(arguments)
    except SystemExit as exit:
        status = exit.code
    printed = capsys.readouterr()
    assert status == 2 and not printed.out
    assert printed.err.count("\n") == 1 and printed.err.startswith("python -m ogc")
    return printed.err


def test_what_a_step_needs_and_whether_it_fits(net, capsys):
    options = ("estimate", f"{net}:make", "--gpu", "H100", "--optimizer", "AdamW")
    with torch.device("meta"):
        model, sample = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6))), torch.randn(512, 256)
    needs = ogc.estimate(model, sample, device="cuda", gpu="H100", optimizer=torch.optim.AdamW)
    text = run(capsys, *options)
    assert "fits" not in text
    for part in ("parameters", "optimizer", "context", "inputs"):
        assert f"{getattr(needs, part) / 2**20:.1f}" in next(
            line for line in text.splitlines() if line.startswith(part)
        )
    assert run(capsys, *options, "--budget", "24GB").endswith("fits: a plain step does on a device of 22888.2 MiB\n")
    assert run(capsys, *options, "--budget", "600MB").endswith("does not fit: no step does on a device of 572.2 MiB\n")


def bounds(text):
    """MiB of a plain step and of the least."""
    return [float(number) for number in re.search(r"step needs ([\d.]+) MiB, at least ([\d.]+) MiB", text).groups()]


@pytest.mark.full
def test_a_step_that_fits_by_a_plan_alone(net, capsys):
    options = [f"{net}:make", "--optimizer", f"{net}:descends"]
    plain, least = bounds(run(capsys, "estimate", *options))
    assert plain > bounds(run(capsys, "estimate", f"{net}:make"))[0]  # its momentum counts
    options += ["--budget", f"{(plain + least) / 2:.3f}MiB"]
    told = run(capsys, "estimate", *options).splitlines()[-1]
    assert told.startswith("fits: a step by a plan does on a device") and "time" in told
    planned = run(capsys, "plan", *options).splitlines()[-1]
    used, room = (float(number) for number in re.findall(r"([\d.]+) MiB", planned))
    assert planned.startswith("fits: a step takes") and used <= room < plain


def test_a_plan_with_all_its_files(net, capsys, tmp_path):
    files = {kind: tmp_path / f"plan.{kind}" for kind in ("html", "pickle", "json")}
    text = run(
        capsys, "plan", f"{net}:words", "--device", "cuda", "--max-overhead", "0.2",
        "--html", str(files["html"]), "--snapshot", str(files["pickle"]), "--save", str(files["json"]),
    )  # fmt: skip
    peak = json.loads(files["json"].read_text())["about"]["peak_bytes"]
    assert text.startswith(f"peak {peak / 2**20:.1f} of ")
    assert len(pickle.loads(files["pickle"].read_bytes())["device_traces"]) == 2
    assert text.partition("\n")[0].partition(";")[0] in files["html"].read_text("utf-8")


def test_a_curve_within_a_budget_and_an_overhead(net, capsys):
    whole = run(capsys, "frontier", f"{net}:make", "--gpu", "H100").splitlines()
    quick = run(capsys, "frontier", f"{net}:make", "--gpu", "H100", "--max-overhead", "0.1").splitlines()
    assert whole[0] == quick[0] and 1 < len(quick) < len(whole) and whole[-1].split()[2] == "0.0%"
    assert all(float(line.split()[2].strip("%")) <= 10 for line in quick[1:])
    assert len(run(capsys, "frontier", f"{net}:make", "--gpu", "H100", "--budget", "40GB").splitlines()) > 1
    assert "none of" in said(capsys, "frontier", f"{net}:make", "--gpu", "H100", "--budget", "1MB")


def test_a_factory_is_called_where_the_model_is_to_be(net, capsys):
    assert "on cpu" in said(capsys, "plan", f"{net}:where")
    assert "on cpu" in said(capsys, "plan", f"{net}:where", "--device", "cpu")
    assert "on meta" in said(capsys, "plan", f"{net}:where", "--gpu", "H100")
    if not torch.cuda.is_available():
        assert "on meta" in said(capsys, "plan", f"{net}:where", "--device", "cuda")
    assert "RuntimeError: on meta (net.py:" in said(capsys, "plan", f"{net}:where", "--gpu", "H100")


def test_a_file_takes_no_modules_place(net, capsys, tmp_path):
    (tmp_path / "json.py").write_text(Path(net).read_text().replace(", helper_of_net", ""))
    assert run(capsys, "frontier", f"{tmp_path / 'json.py'}:make", "--gpu", "H100").startswith("peak MiB")
    assert sys.modules["json"] is json
    del sys.modules["json by path"]


ERRORS = {
    "no function": (["plan", "{net}"], "must be MODULE:NAME, such as train.py:make"),
    "no such function": (["plan", "{net}:nope"], "net.py has no nope"),
    "a number": (["plan", "{net}:number"], "number must be a function, not int"),
    "no such file": (["plan", "absent.py:make"], "there is no file 'absent.py'"),
    "no such module": (["plan", "absent.module:make"], "there is no module 'absent.module' here"),
    "a model alone": (["plan", "{net}:alone"], r"must return \(model, sample_input\) or .* not Sequential"),
    "texts": (["plan", "{net}:of_texts"], r"not \(str, str\)"),
    "a sample that does not go": (["plan", "{net}:fails"], "RuntimeError: .*512x255"),
    "Python that asks for numbers": (["plan", "{net}:branches", "--gpu", "H100"], "content|cannot|depends|read"),
    "no size": (["plan", "{net}:make", "--budget", "24XB"], "'24XB' is no size: give bytes, or a text like '24GB'"),
    "no share": (["plan", "{net}:make", "--max-overhead", "-1"], "is no share of a step's time"),
    "too small": (["plan", "{net}:make", "--budget", "1MB"], "no plan fits on a device of 1.0 MiB; .* would do has"),
    "no device": (["plan", "{net}:make", "--device", "gpu"], "device must be a torch.device or its name"),
    "a GPU on a CPU": (["plan", "{net}:make", "--device", "cpu", "--gpu", "H100"], "add device='cuda'"),
    "no optimizer": (["estimate", "{net}:make", "--optimizer", "Adamw"], "must be MODULE:NAME"),
    "no option": (["plan", "{net}:make", "--frob"], "unrecognized arguments: --frob"),
    "no command": ([], "required"),
    "no folder": (["plan", "{net}:make", "--html", "absent/plan.html"], "FileNotFoundError: .*absent/plan.html"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_every_error_is_one_line(net, capsys, case):
    arguments, words = ERRORS[case]
    line = said(capsys, *(one.format(net=net) for one in arguments))
    assert re.search(words, line), line


@pytest.mark.full
def test_slow_is_refused(net, capsys):
    _, least = bounds(run(capsys, "estimate", f"{net}:make"))
    line = said(capsys, "plan", f"{net}:make", "--budget", f"{least * 1.02:.2f}MiB", "--max-overhead", "0.0001")
    assert "within 0% more time; one that fits takes" in line


@pytest.mark.full
def test_the_program_runs_by_its_name(net):
    """In seven seconds, most of which are imports."""
    command = [sys.executable, "-m", "ogc", "plan", "net:make", "--device", "cuda", "--gpu", "H100"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(net).parent)
    assert not done.returncode and done.stdout.startswith("peak "), done.stderr
    done = subprocess.run([*command[:3], "plan", "net:nope"], capture_output=True, text=True, cwd=Path(net).parent)
    assert done.returncode == 2 and done.stderr == "python -m ogc: error: net has no nope\n"
    done = subprocess.run([*command[:3], "--help"], capture_output=True, text=True)
    assert not done.returncode and "estimate|plan|frontier" in done.stdout


PAGE = (Path(__file__).parents[1] / "docs" / "look.md").read_text("utf-8")


@pytest.mark.full
@pytest.mark.parametrize("line", re.findall(r"^python -m ogc (.*)$", PAGE, re.MULTILINE))
def test_commands_of_the_page_run(net, capsys, line):
    (code,) = re.findall(r"```python\n# net.py\n(.*?)```", PAGE, re.DOTALL)
    Path("net.py").write_text(code)
    text = run(capsys, *line.split())
    if "--budget" in line:
        assert text.splitlines()[-1].startswith("fits: ")
    assert all(Path(name).stat().st_size for name in re.findall(r"plan\.\w+", line))
