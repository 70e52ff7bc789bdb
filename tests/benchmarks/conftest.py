"""Garbage is not collected before each timed step: of a whole test run that takes longer than all of the steps."""

from types import SimpleNamespace

import pytest

from benchmarks import measuring


@pytest.fixture(autouse=True)
def no_collecting(monkeypatch):
    monkeypatch.setattr(measuring, "gc", SimpleNamespace(collect=lambda: 0))
