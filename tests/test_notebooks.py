"""Each notebook opens with the question that it answers; its code cells run, in order, and the last one draws."""

import ast
import json
from pathlib import Path

import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure

pytestmark = pytest.mark.full

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
NEEDS = {"fine_tune_a_transformer": ("transformers", "peft", "accelerate")}
"""Libraries of the extra ``integrations``, by the notebook that is about them."""

MARKS = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore"),  # the libraries' own, about one another
]


def cells_of(path: Path, kind: str) -> list[str]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


@pytest.fixture
def no_figures():
    yield
    pyplot.close("all")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_opens_with_its_question(path):
    first = json.loads(path.read_text(encoding="utf-8"))["cells"][0]
    assert first["cell_type"] == "markdown"
    title, question = "".join(first["source"]).split("\n\n")[:2]
    assert title.startswith("# ")
    assert "?" in title + question


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_is_kept_without_outputs(path):
    code = [c for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
    assert not [cell for cell in code if cell["outputs"] or cell["execution_count"] is not None]


@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=MARKS if p.stem in NEEDS else (), id=p.stem) for p in NOTEBOOKS]
)
def test_the_notebook_runs_and_ends_with_a_picture(path, no_figures):
    for library in NEEDS.get(path.stem, ()):
        pytest.importorskip(library, reason="the notebook is about it")
    names: dict = {}
    *cells, last = cells_of(path, "code")
    for number, cell in enumerate(cells):
        exec(compile(cell, f"{path.name} cell {number}", "exec"), names)
    pyplot.close("all")
    figures = shown(last, f"{path.name}, its last cell", names)
    assert figures and all(any(ax.has_data() for ax in figure.axes) for figure in figures)


def shown(cell: str, name: str, names: dict) -> list[Figure]:
    """The figures that Jupyter shows below a cell: what it ends with, and those that pyplot has made in it."""
    *before, end = ast.parse(cell, name).body
    if not isinstance(end, ast.Expr):
        exec(compile(cell, name, "exec"), names)
        value = None
    else:
        exec(compile(ast.Module(before, []), name, "exec"), names)
        value = eval(compile(ast.Expression(end.value), name, "eval"), names)
    made = [pyplot.figure(number) for number in pyplot.get_fignums()]
    return made + ([value] if isinstance(value, Figure) else [])


def test_a_cell_that_shows_nothing_is_told_from_one_that_does(no_figures):
    names: dict = {}
    assert shown("import matplotlib.pyplot as plt\nfrom matplotlib.figure import Figure\n1 + 1", "cell", names) == []
    assert shown("figure = Figure()\nfigure", "cell", names) == [names["figure"]]
    assert shown("figure = Figure()", "cell", names) == []  # which pyplot does not know
    assert shown("figure, ax = plt.subplots()\n_ = ax.legend", "cell", names) == [names["figure"]]
