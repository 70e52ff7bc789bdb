"""Examples of README and docs run, README's table is that of the committed results, CI runs its test command."""

import re
import subprocess
import warnings
from pathlib import Path

import pytest

from benchmarks import tables

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LIBRARIES = {"transformers", "accelerate", "lightning", "peft", "diffusers"}
"""What only some examples need, and not everybody has."""


def libraries_of(example: str) -> set[str]:
    imports = " ".join(re.findall(r"^import (.*)$", example, re.MULTILINE))
    return LIBRARIES.intersection(re.findall(r"\w+", imports))


EXAMPLES = [
    pytest.param(example, id=f"{page.name} {number}", marks=[pytest.mark.integrations] * bool(libraries_of(example)))
    for page in PAGES
    for number, example in enumerate(re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL))
]


@pytest.mark.full
@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_run(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some save what they trained
    libraries = libraries_of(example)
    with warnings.catch_warnings():
        if libraries:
            warnings.simplefilter("ignore")  # the libraries' own, about one another
        for library in libraries:
            pytest.importorskip(library, reason=f"the example is about {library}")
        exec(compile(example, "example", "exec"), {"__name__": "example"})


def test_there_are_examples_and_two_commands():
    assert len(EXAMPLES) >= 5
    assert len(re.findall(r"```bash\n", TEXT)) == 2


def test_pages_are_as_short_as_their_readers_time():
    sizes = {page.name: len(page.read_bytes()) for page in PAGES}
    assert sizes.pop("README.md") <= 8 * 1024
    assert sizes.pop("api.md")  # is looked things up in
    assert max(sizes.values()) <= 15 * 1024
    assert len((ROOT / "CHANGELOG.md").read_text("utf-8").splitlines()) <= 40


def test_the_table_is_that_of_the_results():
    assert tables.inserted(TEXT, tables.markdown()) == TEXT, "run python -m benchmarks.tables"


def test_every_file_a_reader_is_sent_to_is_there():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
            assert (page.parent / target).is_file(), f"{page.name}: {target}"


def test_ci_runs_the_test_command():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    finder = next(line for line in script.splitlines() if line.startswith("command="))
    found = subprocess.run(["bash", "-c", f'{finder}; echo "$command"'], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout.strip().endswith("-m pytest -q")
    assert found.stdout.strip() in TEXT
    assert not re.search("ruff|mypy", found.stdout)


def test_lint_has_exact_versions_in_one_place():
    extras = dict(
        re.findall(r"^(\w+) = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert re.fullmatch(r'"ruff==[\d.]+", "mypy==[\d.]+"', extras["lint"])
    assert not [name for name, packages in extras.items() if name != "lint" and re.search("ruff|mypy", packages)]


def test_ci_installs_and_runs_what_the_test_command_leaves_out():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    marks = '-m "(full or integrations) and not slow"'
    for step in ('".[lint]"', "ruff check .", "ruff format --check .", "mypy", '".[integrations]"', marks):
        assert step in script
