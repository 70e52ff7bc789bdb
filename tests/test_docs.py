"""Pages that name tests name tests that there are."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("page, least", [("contract", 50), ("devices", 10)])
def test_a_page_names_tests_that_there_are(page, least):
    defined = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        defined.update(re.findall(r"def (test_\w+)\(", path.read_text("utf-8")))
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / f"{page}.md").read_text("utf-8")))
    assert len(named) >= least
    assert not named - defined
