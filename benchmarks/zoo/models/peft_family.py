"""Models of transformers with LoRA adapters, the rest of them frozen. It needs transformers and peft."""

from __future__ import annotations

from functools import partial

from benchmarks.zoo.models import Build, Subject
from benchmarks.zoo.models.heads import classes_by_task
from benchmarks.zoo.models.transformers_family import build

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


def models() -> dict[str, Build]:
    return {name: partial(_build, name) for name in _TARGETS}


def _build(name: str) -> Subject:
    import peft

    kind, _, padded = name.partition(", ")
    task, class_name = next(iter(classes_by_task()[kind].items()))
    subject = build(kind, class_name, task, bool(padded))
    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=_TARGETS[name])
    return Subject(peft.get_peft_model(subject.model, config), subject.batch, note="LoRA")  # type: ignore[arg-type]
