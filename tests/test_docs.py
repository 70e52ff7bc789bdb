"""Pages that name tests name tests that there are; that of public names has them all, as they are."""

import re
import runpy
from pathlib import Path

import pytest

import ogc

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("page, least", [("contract", 50), ("devices", 10)])
def test_a_page_names_tests_that_there_are(page, least):
    defined = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        defined.update(re.findall(r"def (test_\w+)\(", path.read_text("utf-8")))
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / f"{page}.md").read_text("utf-8")))
    assert len(named) >= least
    assert not named - defined


def test_every_public_name_is_on_its_page_as_it_is():
    made = runpy.run_path(str(ROOT / "docs" / "make_api.py"))
    assert sorted(name for names in made["PARTS"].values() for name in names) == ogc.__all__
    assert made["PAGE"].read_text("utf-8") == made["page"](), "run python docs/make_api.py"


def test_every_public_function_says_what_it_takes_and_raises():
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    for section in re.split(r"\n### ", page)[1:]:
        name = section.split("`")[1]
        if name[0].islower() and name not in ("saved", "recomputed"):
            assert "Args:" in section, name
            assert "Raises:" in section or name in ("frontier",), name


REPLACED = {
    "wish": "goal", "fate": "policy", "stretch": "region", "slices": "chunks", "twin": "copy", "foretell": "predict",
    "carried over": "reused", "carry over": "reuse", "storey": "layer", "at hand": "available", "judge": "verifier",
    "batch_slices": "chunks", "leaf_modules": "opaque_modules", "repeatable_leaves": "recompute_opaque",
    "leaf": "opaque module", "run again": "recomputed", "remade": "recomputed_values", "remaking": "recomputing",
    "PlainRest": "PlainModule", "rest_bytes": "outside_bytes", "rest_seconds": "outside_seconds",
}  # fmt: skip
"""Words of earlier releases that the field has others for."""


def test_pages_use_the_fields_words():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = [
        f"{path.name}:{number}: {word}, say {REPLACED[word]}"
        for path in pages
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        for word in REPLACED
        if re.search(rf"\b{word}(s|es|ed)?\b", line)
    ]
    assert not found, "\n".join(found)
