"""One step of a probe: ``python -m benchmarks.probe QUESTION --device cuda:0 --json FILE``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from ..measuring import write_json
from .questions import QUESTIONS


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", choices=["tests", *QUESTIONS])
    parser.add_argument("--device", type=torch.device, required=True)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args(arguments)
    if given.question == "tests":
        from .tests import tests

        return tests(given.device, given.json)
    found, is_right = QUESTIONS[given.question](given.device)
    write_json(given.json, {"rows": found})
    for row in found:
        print(row)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
