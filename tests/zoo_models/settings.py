"""What the general shrinking of configurations does not know, by type of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.zoo_models.calls import LENGTH, Maker
from tests.zoo_models.shrink import VOCABULARY, tiny

_RESNET: dict[str, Any] = {
    "use_timm_backbone": False,
    "backbone": None,
    "backbone_kwargs": None,
    "num_queries": 8,
}


def settings_of(kind: str) -> dict[str, Any]:
    """More changes to the configuration of a type."""
    found = dict(_SETTINGS.get(kind, {}))
    if kind in _ON_A_RESNET:
        found |= {**_RESNET, "backbone_config": _resnet()}
    return found


def _resnet() -> Any:
    import transformers

    return tiny(transformers.ResNetConfig, {"embedding_size": 16, "out_features": ["stage2", "stage3", "stage4"]})


_ON_A_RESNET = {"detr", "conditional_detr", "dab-detr", "deformable_detr", "table-transformer"}

_SETTINGS: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"max_length": 96},
    "autoformer": {"prediction_length": 8, "context_length": 24},
    "time_series_transformer": {"prediction_length": 8, "context_length": 24},
    "informer": {"prediction_length": 8, "context_length": 24},
    "bit": {"num_groups": 4},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma3n": {"text_config": {"num_kv_shared_layers": 0}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "efficientnet": {"hidden_dim": 2560},
}


def own_ways(maker: Maker, kind: str) -> list[tuple[str, Callable[[int], dict[str, Any]]]]:
    """Calls that only this type knows."""
    make = _WAYS.get(kind)
    return [("", lambda step: make(maker, step))] if make else []


def _as_long(maker: Maker, step: int) -> dict[str, Any]:
    """Labels as long as the text."""
    return {**maker.text(step), "labels": maker.tokens(step, LENGTH, 20)}


_WAYS: dict[str, Callable[[Maker, int], dict[str, Any]]] = {"fsmt": _as_long}
