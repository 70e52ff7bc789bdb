"""The tests that have a device to choose, on that device."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from ..measuring import write_json
from ..suites import ROOT


def tests(device: torch.device, path: Path) -> int:
    """Run them and write how many passed, and which did not; the exit status is pytest's."""
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        status = pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", "--junitxml", str(report),
                              "-k", f"[{device.type}", str(ROOT / "tests")])  # fmt: skip
        cases = list(ElementTree.parse(report).iter("testcase"))
    wrong = [case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    write_json(path, {"passed": len(cases) - len(wrong) - skipped, "skipped": skipped, "failed": wrong})
    return int(status)
