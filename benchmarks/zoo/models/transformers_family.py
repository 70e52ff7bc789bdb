"""Models of transformers: each type of its auto mappings, with the first of its tasks. It needs transformers.

``NAME`` begins with a mask of ones and has padding in the second step, ``NAME, padded`` begins with padding.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.zoo.models import Build, Subject
from benchmarks.zoo.models.calls import Maker, ways
from benchmarks.zoo.models.heads import classes_by_task, has_text
from benchmarks.zoo.models.settings import own_ways, settings_of
from benchmarks.zoo.models.shrink import tiny


def models() -> dict[str, Build]:
    found: dict[str, Build] = {}
    padded: dict[str, Build] = {}
    for kind, classes in sorted(classes_by_task().items()):
        task, name = next(iter(classes.items()))
        found[kind] = partial(build, kind, name, task)
        if has_text(task):
            padded[f"{kind}, padded"] = partial(build, kind, name, task, padded=True)
    return found | padded


def build(kind: str, name: str, task: str, padded: bool = False) -> Subject:
    """A model of the type, and the first way to call it that it takes."""
    model = _model(kind, name)
    maker = Maker(model, task, padded)
    errors: list[str] = []
    for note, batch in [*own_ways(maker, kind), *ways(maker)]:
        try:
            _try(model, batch(0))
        except Exception as error:  # the next way may do
            errors.append(f"{note or 'the usual way'}: {type(error).__name__}: {error}"[:200])
            continue
        torch.manual_seed(0)
        fresh = _model(kind, name)
        maker.model = fresh
        return Subject(fresh, batch, note=note)
    if not errors:
        raise NotImplementedError(f"no way to call {type(model).__name__}{sorted(maker.names)}")
    raise ValueError("; ".join(dict.fromkeys(errors)))


def _model(kind: str, name: str) -> torch.nn.Module:
    import transformers

    config = tiny(transformers.CONFIG_MAPPING[kind], settings_of(kind))
    model: Any = getattr(transformers, name)
    if model.config_class and not isinstance(config, model.config_class):
        config = next((part for part in vars(config).values() if isinstance(part, model.config_class)), config)
    if name.endswith("SequenceClassification") and config.get_text_config().pad_token_id is None:
        config.get_text_config().pad_token_id = 0
    found: torch.nn.Module = model(config)
    return found.train()


def _try(model: torch.nn.Module, batch: dict[str, Any]) -> None:
    from benchmarks.zoo.training import loss_of

    loss_of(model(**batch)).backward()
