"""The notebooks' code cells run, in order."""

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs(path):
    names: dict = {}
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    for number, cell in enumerate(cell for cell in cells if cell["cell_type"] == "code"):
        exec(compile("".join(cell["source"]), f"{path.name} cell {number}", "exec"), names)
