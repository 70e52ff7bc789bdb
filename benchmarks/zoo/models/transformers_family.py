"""Models of transformers: each type of its auto mappings, with the first of its tasks. It needs transformers.

``NAME`` begins with a mask of ones and has padding in the second step, ``NAME, padded`` begins with padding. A type's
further tasks are the family ``transformers_heads``. ``peft`` has LoRA adapters, the rest of them frozen; it needs peft.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.zoo.models import Build, Subject
from benchmarks.zoo.models.calls import Maker, own_ways, ways
from benchmarks.zoo.models.shrink import settings_of, tiny

_TASKS = """
    CAUSAL_LM SEQ_TO_SEQ_CAUSAL_LM MASKED_LM IMAGE_TEXT_TO_TEXT SPEECH_SEQ_2_SEQ CTC IMAGE_CLASSIFICATION
    OBJECT_DETECTION SEMANTIC_SEGMENTATION UNIVERSAL_SEGMENTATION DEPTH_ESTIMATION VIDEO_CLASSIFICATION
    AUDIO_CLASSIFICATION TIME_SERIES_PREDICTION SEQUENCE_CLASSIFICATION TOKEN_CLASSIFICATION QUESTION_ANSWERING
    MULTIPLE_CHOICE VISUAL_QUESTION_ANSWERING ZERO_SHOT_IMAGE_CLASSIFICATION ZERO_SHOT_OBJECT_DETECTION
    MASKED_IMAGE_MODELING IMAGE_TO_IMAGE KEYPOINT_DETECTION KEYPOINT_MATCHING TEXT_TO_SPECTROGRAM
    TEXT_TO_WAVEFORM MASK_GENERATION RNNT MULTIMODAL_LM PRETRAINING
"""
"""In the order of preference; the last is the mapping of base models, which has no name."""

_TEXTS = {
    "causal_lm", "seq_to_seq_causal_lm", "masked_lm", "image_text_to_text", "sequence_classification",
    "token_classification", "question_answering", "multimodal_lm",
}  # fmt: skip
"""Tasks whose models are given texts, with masks."""

_TARGETS: dict[str, list[str]] = {
    "llama": ["q_proj", "v_proj"],
    "llama, padded": ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
    "bert": ["query", "value"],
    "t5": ["q", "v"],
    "vit": ["q_proj", "v_proj"],
    "whisper": ["q_proj", "v_proj"],
    "gpt2": ["c_attn"],
    "mistral": ["q_proj", "v_proj"],
}
"""Which linear layers are adapted."""


def _classes_by_task() -> dict[str, dict[str, str]]:
    """For each type, the class of each of its tasks, the preferred one first."""
    from transformers.models.auto import modeling_auto

    found: dict[str, dict[str, str]] = {}
    for task in (*_TASKS.split(), ""):
        name = f"MODEL_FOR_{task}_MAPPING_NAMES" if task else "MODEL_MAPPING_NAMES"
        for kind, classes in getattr(modeling_auto, name, {}).items():
            of_kind = found.setdefault(kind, {})
            chosen = classes if isinstance(classes, str) else classes[0]
            if chosen not in of_kind.values():
                of_kind[task.lower() or "base"] = chosen
    return found


def models() -> dict[str, Build]:
    found: dict[str, Build] = {}
    padded: dict[str, Build] = {}
    for kind, classes in sorted(_classes_by_task().items()):
        task, name = next(iter(classes.items()))
        found[kind] = partial(_build, kind, name, task)
        if task in _TEXTS:
            padded[f"{kind}, padded"] = partial(_build, kind, name, task, padded=True)
    return found | padded


def transformers_heads() -> dict[str, Build]:
    return {
        f"{kind}, {task.replace('_', ' ')}": partial(_build, kind, name, task)
        for kind, classes in sorted(_classes_by_task().items())
        for task, name in list(classes.items())[1:]
    }


def peft() -> dict[str, Build]:
    return {name: partial(_with_adapters, name) for name in _TARGETS}


def _with_adapters(name: str) -> Subject:
    import peft

    kind, _, padded = name.partition(", ")
    task, class_name = next(iter(_classes_by_task()[kind].items()))
    subject = _build(kind, class_name, task, bool(padded))
    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=_TARGETS[name])
    return Subject(peft.get_peft_model(subject.model, config), subject.batch, note="LoRA")  # type: ignore[arg-type]


def _build(kind: str, name: str, task: str, padded: bool = False) -> Subject:
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
