"""One step of a probe: ``python -m benchmarks.probe QUESTION --device cuda:0 --json FILE``."""

from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from ..results import write_json
from ..suites import ROOT
from .questions import QUESTIONS


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", choices=["tests", *QUESTIONS])
    parser.add_argument("--device", type=torch.device, required=True)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args(arguments)
    if given.question == "tests":
        return tests(given.device, given.json)
    found, is_right = QUESTIONS[given.question](given.device)
    write_json(given.json, {"rows": found})
    for row in found:
        print(row)
    return 0 if is_right else 1


def tests(device: torch.device, path: Path) -> int:
    """Run those that have a device to choose, on it, and write which did not pass; the exit status is pytest's."""
    import pytest

    with TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        status = pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", "--junitxml", str(report),
                              "-k", f"[{device.type}", str(ROOT / "tests")])  # fmt: skip
        cases = list(ElementTree.parse(report).iter("testcase"))
    wrong = [case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    write_json(path, {"passed": len(cases) - len(wrong) - skipped, "skipped": skipped, "failed": wrong})
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
