"""What the general shrinking of configurations does not know, by type of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.zoo.models import seeded
from benchmarks.zoo.models.calls import BATCH, LENGTH, Maker
from benchmarks.zoo.models.shrink import VOCABULARY, tiny

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

    return tiny(
        transformers.ResNetConfig,
        {"embedding_size": 16, "out_indices": [2, 3, 4], "out_features": ["stage2", "stage3", "stage4"]},
    )


_ON_A_RESNET = {"detr", "conditional_detr", "dab-detr", "deformable_detr", "table-transformer"}

_GLM = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
_GLM_HALF = {"rope_parameters": {**_GLM["rope_parameters"], "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}}
_AHEAD = {"prediction_length": 8, "context_length": 24}
_FEW_EXPERTS = {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1}
_WINDOWS = {
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
    "image_size": 64,
    "patch_size": 4,
    "out_indices": [2],
}
_STAGES = {"encoder_in_channels": [32, 64, 64], "decoder_in_channels": [64, 64, 64]}
_SETTINGS: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"max_length": 96},
    "autoformer": _AHEAD,
    "bamba": {"attn_layer_indices": [1]},
    "bit": {"num_groups": 4},
    "blip-2": {"image_token_index": 90},
    "dbrx": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "deepseek_v2": _FEW_EXPERTS,
    "donut-swin": _WINDOWS,
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [16, 32, 64, 64]},
    "dots1": _FEW_EXPERTS,
    "efficientnet": {"hidden_dim": 2560},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 4},
    "gemma3n": {"text_config": {"num_kv_shared_layers": 0}},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "glm46v": {"text_config": _GLM},
    "glm4v": {"text_config": _GLM},
    "glm4v_moe": {"text_config": _GLM_HALF},
    "glm4v_moe_text": _GLM_HALF,
    "glm4v_text": _GLM,
    "glm_image_text": _GLM,
    "glm_ocr": {"text_config": _GLM},
    "glm_ocr_text": _GLM,
    "glmga": {"text_config": _GLM},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "informer": _AHEAD,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "layoutlmv3": {"coordinate_size": 8, "shape_size": 16},
    "hunyuan_vl_text": {"head_dim": 16},
    "lilt": {"hidden_size": 96},
    "mamba2": {"head_dim": 32, "n_groups": 2, "state_size": 8},
    "ministral": {"head_dim": 16},
    "mobilebert": {"intra_bottleneck_size": 64, "true_hidden_size": 64, "embedding_size": 64},
    "moonshine": {"pad_token_id": 0},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "owlv2": {"text_config": {"max_position_embeddings": 64}},
    "owlvit": {"text_config": {"max_position_embeddings": 64}},
    "qwen2_5_vl": {"text_config": _GLM},
    "qwen2_5_vl_text": _GLM,
    "qwen2_vl": {"text_config": _GLM},
    "qwen2_vl_text": _GLM,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "rt_detr": _STAGES,
    "rt_detr_v2": _STAGES,
    "reformer": {
        "is_decoder": True,
        "axial_pos_shape": [6, 8],
        "axial_pos_embds_dim": [32, 32],
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
    },
    "swin": _WINDOWS,
    "swinv2": _WINDOWS,
    "time_series_transformer": _AHEAD,
    "zamba2": {"layer_types": ["linear_attention", "hybrid"]},
}


def own_ways(maker: Maker, kind: str) -> list[tuple[str, Callable[[int], dict[str, Any]]]]:
    """Calls that only this type knows."""
    make = _WAYS.get(kind)
    return [("", lambda step: make(maker, step))] if make else []


def _as_long(maker: Maker, step: int) -> dict[str, Any]:
    """Labels as long as the text."""
    return {**maker.text(step), "labels": maker.tokens(step, LENGTH, 20)}


def _with_boxes(maker: Maker, step: int) -> dict[str, Any]:
    """A place on the page for each word."""
    return {**maker.text(step), "bbox": torch.rand(BATCH, LENGTH, 4, generator=seeded(step))}


_WAYS: dict[str, Callable[[Maker, int], dict[str, Any]]] = {"fsmt": _as_long, "bros": _with_boxes}
