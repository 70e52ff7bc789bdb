"""The further tasks of each type of transformers, beside the first one."""

from __future__ import annotations

from functools import partial

from benchmarks.zoo.models import Build
from benchmarks.zoo.models.heads import classes_by_task
from benchmarks.zoo.models.transformers_family import build


def models() -> dict[str, Build]:
    found: dict[str, Build] = {}
    for kind, classes in sorted(classes_by_task().items()):
        for task, name in list(classes.items())[1:]:
            found[f"{kind}, {task.replace('_', ' ')}"] = partial(build, kind, name, task)
    return found
