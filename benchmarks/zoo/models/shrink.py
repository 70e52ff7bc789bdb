"""Configurations of transformers made small: few layers, narrow, a small vocabulary, groups of keys kept.

The names that configurations give to their sizes are few; what they do not cover is said by type.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

WIDTH, LAYERS, HEADS, INNER, VOCABULARY = 64, 2, 4, 128, 100
FIRST_SPECIAL = VOCABULARY - 1
"""Token ids outside of the small vocabulary become this one, and those below it."""

_SIZES: tuple[tuple[str, int], ...] = (
    (r"(?:\w+_)?vocab_size(?:_\w+)?", VOCABULARY),
    (r"(?:\w+_)?hidden_size|d_model|n_embd|(?:\w+_)?embed_dim|dim|(?:\w+_)?embedding_size|hidden_dim|d_embed", WIDTH),
    (r"(?:\w+_)?projection_dim|(?:\w+_)?hidden_dim|(?:\w+_)?embedding_dim|classifier_proj_size", WIDTH),
    (r"num_key_value_heads|\w+_num_key_value_heads|\w+_key_value_heads|num_kv_heads|n_head_kv|kv_n_heads", HEADS),
    (r"(?:\w+_)?(?:num_)?attention_heads|n_heads?|(?:\w+_)?num_heads", HEADS),
    (r"(?:\w+_)?num_(?:hidden_)?layers|n_layers?|(?:en|de)coder_layers|(?:\w+_)?depth|num_blocks", LAYERS),
    (r"(?:\w+_)?intermediate_size(?:_\w+)?|(?:\w+_)?ffn_dim|n_inner|d_ff|d_inner|ffn_hidden_size", INNER),
    (r"(?:\w+_)?feed_?forward_(?:dim|size)|dim_feedforward|mlp_dim|ffn_size|encoder_mlp_dim", INNER),
    (r"(?:\w+_)?head_dim|d_kv|attention_head_size|qk_\w+_head_dim|v_head_dim|d_head", WIDTH // HEADS),
    (r"(?:\w+_)?lora_rank|lora_\w*rank\w*", 8),
    (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts", 4),
    (r"num_experts_per_tok|moe_topk|moe_k|num_selected_experts|top_k_experts", 2),
    (r"n_group|topk_group|num_expert_groups?", 1),
    (r"(?:\w+_)?sliding_window|attention_window_size|local_attention", 16),
    (r"image_size|img_size|input_size", 32),
    (r"(?:\w+_)?patch_size", 8),
    (r"num_queries|num_query_tokens|n_queries", 8),
    (r"num_mel_bins|num_mel_channels", 16),
    (r"rotary_dim", 8),
)
_AT_MOST: dict[str, int] = {
    "max_position_embeddings": 512,
    "n_positions": 512,
    "max_source_positions": 64,
    "mamba_d_state": 8,
    "state_size": 8,
}
_LISTS: dict[str, list[int]] = {
    "depths": [1] * 8,
    "hidden_sizes": [16, 32, 64, 64, 64, 64, 64, 64],
    "embed_dims": [16, 32, 64, 64, 64, 64, 64],
    "num_heads": [1, 2, 4, 4, 4, 4, 4],
    "num_attention_heads": [1, 2, 4, 4, 4, 4, 4],
    "conv_dim": [32] * 8,
}

_RESNET: dict[str, Any] = {
    "use_timm_backbone": False,
    "backbone": None,
    "backbone_kwargs": None,
    "num_queries": 8,
}
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
# fmt: off
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
    "reformer": {"is_decoder": True, "axial_pos_shape": [6, 8], "axial_pos_embds_dim": [32, 32],
     "attn_layers": ["local", "lsh"], "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8},
    "swin": _WINDOWS,
    "swinv2": _WINDOWS,
    "time_series_transformer": _AHEAD,
    "zamba2": {"layer_types": ["linear_attention", "hybrid"]},
}
# fmt: on
"""What the general shrinking does not know, by type."""


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


def tiny(config_class: type, changes: dict[str, Any] | None = None, ids: dict[int, int] | None = None) -> Any:
    """A small configuration of the class. ``changes`` say more; a dictionary in it is about a nested one."""
    return _tiny(config_class(), dict(changes or {}), {} if ids is None else ids)


def _tiny(default: Any, changes: dict[str, Any], ids: dict[int, int]) -> Any:
    settings: dict[str, Any] = {}
    for name, value in sorted(vars(default).items()):
        if name.startswith("_"):
            continue
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            nested = changes.pop(name, {})
            settings[name] = _tiny(value, dict(nested), ids) if isinstance(nested, dict) else nested
        elif (small := _small(name, value, ids)) is not value:
            settings[name] = small
    settings |= _grouped(default, settings)
    settings |= _kinds_of_layers(default, settings)
    settings |= _stages(default)
    if getattr(default, "is_encoder_decoder", False) and getattr(default, "decoder_start_token_id", None) is None:
        settings["decoder_start_token_id"] = 0
    settings |= _rotations(default, settings)
    settings |= changes
    kind = type(default)
    known = {n: v for n, v in settings.items() if v is not ... and not _is_fixed(kind, n)}
    return kind(**known)


def _is_fixed(kind: type, name: str) -> bool:
    """Whether the class works the setting out by itself."""
    found = getattr(kind, name, None)
    return isinstance(found, property) and found.fset is None


def _small(name: str, value: Any, ids: dict[int, int]) -> Any:
    """The value that stands for a setting's, or that itself."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        if name.endswith(("token_id", "token_index", "_id", "_token", "token_idx")):
            return _within(value, ids)
        if name in _AT_MOST:
            return min(value, _AT_MOST[name]) if value > _AT_MOST[name] else value
        for pattern, size in _SIZES:
            if re.fullmatch(pattern, name):
                return size if value > size else value
        return value
    if isinstance(value, (list, tuple)) and value and all(type(item) is int for item in value):
        if name.endswith("token_id"):
            return _within(value[0], ids)
        if name in _LISTS and len(value) <= len(_LISTS[name]):
            return type(value)(_LISTS[name][: len(value)])
        if name == "image_size":
            return type(value)(32 for _ in value)
    return value


def _within(token: int, ids: dict[int, int]) -> int:
    """A token id inside of the vocabulary, the same for the same one, below those given before."""
    if token < VOCABULARY // 2:
        return token
    return ids.setdefault(token, FIRST_SPECIAL - len(ids))


def _grouped(default: Any, settings: dict[str, Any]) -> dict[str, int]:
    """Half of the heads for keys and values, or one where there is one: published models mostly have fewer."""
    found: dict[str, int] = {}
    if hasattr(default, "kv_lora_rank"):  # keys and values of all heads are made of the same few numbers
        return found
    for name in ("num_key_value_heads", "num_kv_heads"):
        groups = getattr(default, name, None)
        if isinstance(groups, int) and isinstance(heads := settings.get("num_attention_heads"), int):
            found[name] = 1 if groups == 1 else heads // 2
    return found


def _stages(default: Any) -> dict[str, Any]:
    """Of several stages: the width of the first, if the later ones are told by it, and which are given on."""
    if isinstance(getattr(default, "depths", None), (list, tuple)) and isinstance(
        getattr(default, "embed_dim", 0), int
    ):
        width = {"embed_dim": 16, "hidden_size": ...} if hasattr(default, "embed_dim") else {}
        given = {"out_indices": list(default.out_indices)} if getattr(default, "_out_indices", None) else {}
        return {**width, **given}
    return {}


def _rotations(default: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Sections of rotary embeddings (of time, height and width) that fit into the small heads."""
    rope = getattr(default, "rope_parameters", None)
    if not isinstance(rope, dict) or not isinstance(rope.get("mrope_section"), (list, tuple)):
        return {}
    share = rope.get("partial_rotary_factor", getattr(default, "partial_rotary_factor", None)) or 1.0
    half = int(settings.get("head_dim", WIDTH // HEADS) * share) // 2
    part = half * 3 // 8 or 1
    return {"rope_parameters": {**rope, "mrope_section": [half - 2 * part, part, part]}}


def _kinds_of_layers(default: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """One layer of each kind that there is, and two at least."""
    found: dict[str, Any] = {}
    layers = settings.get("num_hidden_layers", getattr(default, "num_hidden_layers", None))
    kinds = getattr(default, "layer_types", None)
    is_told = "layer_types" in {field.name for field in dataclasses.fields(default)}
    if is_told and isinstance(kinds, (list, tuple)) and kinds and isinstance(layers, int):
        different = list(dict.fromkeys(kinds))
        found["num_hidden_layers"] = max(layers, len(different))
        found["layer_types"] = (different * layers)[: found["num_hidden_layers"]]
    return found
