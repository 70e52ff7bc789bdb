"""Which classes of transformers are tried, and by which task: what its auto mappings name.

A type is tried with the first task that it has; its other tasks are the family ``transformers_heads``.
"""

from __future__ import annotations

TASKS = (
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "IMAGE_TEXT_TO_TEXT",
    "SPEECH_SEQ_2_SEQ",
    "CTC",
    "IMAGE_CLASSIFICATION",
    "OBJECT_DETECTION",
    "SEMANTIC_SEGMENTATION",
    "UNIVERSAL_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "VIDEO_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "TIME_SERIES_PREDICTION",
    "SEQUENCE_CLASSIFICATION",
    "TOKEN_CLASSIFICATION",
    "QUESTION_ANSWERING",
    "MULTIPLE_CHOICE",
    "VISUAL_QUESTION_ANSWERING",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "ZERO_SHOT_OBJECT_DETECTION",
    "MASKED_IMAGE_MODELING",
    "IMAGE_TO_IMAGE",
    "KEYPOINT_DETECTION",
    "KEYPOINT_MATCHING",
    "TEXT_TO_SPECTROGRAM",
    "TEXT_TO_WAVEFORM",
    "MASK_GENERATION",
    "RNNT",
    "MULTIMODAL_LM",
    "PRETRAINING",
    "",
)
"""In the order of preference; the last is the mapping of base models."""


def classes_by_task() -> dict[str, dict[str, str]]:
    """For each type, the class of each of its tasks, the preferred one first."""
    from transformers.models.auto import modeling_auto

    found: dict[str, dict[str, str]] = {}
    for task in TASKS:
        name = f"MODEL_FOR_{task}_MAPPING_NAMES" if task else "MODEL_MAPPING_NAMES"
        for kind, classes in getattr(modeling_auto, name, {}).items():
            of_kind = found.setdefault(kind, {})
            chosen = classes if isinstance(classes, str) else classes[0]
            if chosen not in of_kind.values():
                of_kind[task.lower() or "base"] = chosen
    return found


def has_text(task: str) -> bool:
    """Whether a model of the task is given texts, with masks."""
    return task in _TEXTS


_TEXTS = {
    "causal_lm",
    "seq_to_seq_causal_lm",
    "masked_lm",
    "image_text_to_text",
    "sequence_classification",
    "token_classification",
    "question_answering",
    "multimodal_lm",
}
