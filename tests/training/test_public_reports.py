"""Public reports of problems with checkpointing, each as a small training that must end as the plain one does.

docs/reports.md lists them with what went wrong there and what comes of it here.
"""

import random
import re
from pathlib import Path

import pytest
import reported_calls
import reported_libraries
import reported_memory
import reported_numbers
import reported_state
from trained import Training, assert_trained_alike

import ogc

pytestmark = pytest.mark.full

OF_LIBRARIES = reported_libraries.REPORTS
REPORTS = {
    **reported_numbers.REPORTS, **reported_state.REPORTS, **reported_calls.REPORTS, **reported_memory.REPORTS,
    **OF_LIBRARIES,
}  # fmt: skip
PAGE = Path(__file__).parents[2] / "docs" / "reports.md"
ROW = re.compile(r"^\| \[(\S+)\]\((\S+)\) \| (.+) \| (.+) \|$")
LIBRARY = (pytest.mark.integrations, pytest.mark.filterwarnings("ignore"))  # the libraries' own, about one another


@pytest.mark.parametrize(
    "source", [pytest.param(name, marks=LIBRARY if name in OF_LIBRARIES else ()) for name in REPORTS]
)
def test_a_report(source, monkeypatch):
    report = REPORTS[source]
    random.seed(0)
    if report.refused:
        with pytest.raises(ogc.OgcError, match=re.escape(report.refused)):
            report.train(Training(False))
        return
    ours = assert_trained_alike(report.train, monkeypatch, report.share, runs_plan=not report.says)
    assert not report.says or report.says in " ".join(str(ours.optimised[-1].report()).split())


def test_the_page_has_each_report_and_what_comes_of_it():
    rows = [found.groups() for line in PAGE.read_text("utf-8").splitlines() if (found := ROW.match(line))]
    assert {source: outcome for source, _, _, outcome in rows} == {name: r.outcome for name, r in REPORTS.items()}
    assert len(rows) == len(REPORTS) >= 30
    for source, link, *_ in rows:
        repository, number = source.split("#")
        assert link in (f"https://github.com/{repository}/{kind}/{number}" for kind in ("issues", "pull"))
