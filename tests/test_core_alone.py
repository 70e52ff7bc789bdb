"""The core without its optional packages: it plans and trains as ever, and says what is missing."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ogc

PACKAGE = Path(ogc.__file__).parent

TRAINING = """
import pathlib, sys, torch

sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in repr(one).lower()]  # which finds the deleted ones
import ogc

def steps(model, run):
    torch.manual_seed(1)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = run(torch.randn(8, 3, 16, 16)).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found, [tensor.clone() for tensor in model.state_dict().values()]

def made():
    torch.manual_seed(0)
    blocks = [[torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU()] for _ in range(4)]
    layers = [torch.nn.Conv2d(3, 8, 3), *sum(blocks, []), torch.nn.Dropout(0.1), torch.nn.Flatten()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(8 * 14 * 14, 4))

plain, model = made(), made()
optimized = ogc.optimize(model, torch.randn(8, 3, 16, 16))
assert not optimized.plan.is_plain and optimized.plan.peak_bytes < optimized.plan.plain_peak_bytes
(losses, state), (our_losses, our_state) = steps(plain, plain), steps(model, optimized)
assert losses == our_losses and all(torch.equal(a, b) for a, b in zip(state, our_state, strict=True))
said = []
for ask in (
    lambda: ogc.estimate(model, torch.randn(8, 3, 16, 16)),
    lambda: ogc.optimize(model, torch.randn(8, 3, 16, 16), device_memory="1GB"),
    lambda: ogc.parse(model, torch.randn(8, 3, 16, 16), device="cuda"),
    optimized.plan.memory,
    lambda: optimized.plan.snapshot("plan.pickle"),
    lambda: optimized.plan.html("plan.html"),
):
    try:
        ask()
    except ogc.DependencyError as error:
        said.append(str(error))
assert all("needs ogc.sizing" in text for text in said[:5]) and "needs ogc.looking" in said[5], said
print(pathlib.Path(ogc.__file__).parent)
"""


@pytest.mark.full
def test_models_train_where_the_optional_packages_are_deleted(tmp_path):
    shutil.copytree(
        PACKAGE,
        tmp_path / "ogc",
        ignore=shutil.ignore_patterns("__pycache__", "compiling", "looking", "sizing", "rewrites"),
    )
    done = subprocess.run([sys.executable, "-c", TRAINING], capture_output=True, text=True, cwd=tmp_path)
    assert not done.returncode, done.stderr
    assert done.stdout.strip() == str(tmp_path / "ogc")
