"""Transformers and controlling networks of diffusers made small: the class, its arguments, the inputs of a step."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo.models.diffusers.inputs import (
    BATCH,
    CONDITIONED,
    CROSS,
    FLUX,
    FLUX_INPUTS,
    HEADS,
    LATENT,
    SD3,
    SD3_INPUTS,
    SIZE,
    TEXT,
    UP_AND_DOWN,
    WORDS,
    always,
    classes,
    ones,
    padded,
    times,
)

TRANSFORMERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "DiTTransformer2DModel": (
        {**HEADS, "sample_size": SIZE, "num_embeds_ada_norm": 10},
        {"hidden_states": LATENT, "timestep": classes, "class_labels": classes},
    ),
    "SD3Transformer2DModel": (SD3, SD3_INPUTS),
    "FluxTransformer2DModel": (FLUX, {**FLUX_INPUTS, "pooled_projections": (BATCH, 24)}),
    "PixArtTransformer2DModel": (
        {**HEADS, "cross_attention_dim": 32, "caption_channels": 32, "sample_size": SIZE},
        {
            "hidden_states": LATENT,
            **CONDITIONED,
            "encoder_attention_mask": padded,
            "added_cond_kwargs": always({"resolution": None, "aspect_ratio": None}),
        },
    ),
    "ControlNetModel": (
        {
            **CROSS,
            "down_block_types": UP_AND_DOWN["down_block_types"],
            "conditioning_embedding_out_channels": (8, 16),
        },
        {"sample": LATENT, **CONDITIONED, "controlnet_cond": (BATCH, 3, 2 * SIZE, 2 * SIZE)},
    ),
    "SD3ControlNetModel": (SD3, {**SD3_INPUTS, "controlnet_cond": LATENT}),
    "FluxControlNetModel": (
        FLUX,
        {**FLUX_INPUTS, "pooled_projections": (BATCH, 24), "controlnet_cond": (BATCH, 16, 8)},
    ),
    "T2IAdapter": ({"channels": [16, 32], "num_res_blocks": 1}, {"x": (BATCH, 3, 64, 64)}),
    "PriorTransformer": (
        {**HEADS, "embedding_dim": 32, "num_embeddings": TEXT},
        {
            "hidden_states": (BATCH, 32),
            "timestep": times,
            "proj_embedding": (BATCH, 32),
            "encoder_hidden_states": WORDS,
        },
    ),
    "AuraFlowTransformer2DModel": (
        {
            "sample_size": SIZE,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "caption_projection_dim": 32,
            "pos_embed_max_size": 256,
        },
        {"hidden_states": LATENT, **CONDITIONED},
    ),
    "CogVideoXTransformer3DModel": (
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 8,
            "text_embed_dim": 32,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 9,
            "max_text_seq_length": TEXT,
        },
        {"hidden_states": (BATCH, 3, 4, 8, 8), **CONDITIONED},
    ),
    "LatteTransformer3DModel": (
        {
            **HEADS,
            "in_channels": 4,
            "cross_attention_dim": 32,
            "sample_size": 8,
            "patch_size": 2,
            "caption_channels": 32,
            "num_embeds_ada_norm": 1000,
            "norm_type": "ada_norm_single",
            "norm_elementwise_affine": False,
            "video_length": 3,
        },
        {"hidden_states": (BATCH, 4, 3, 8, 8), **CONDITIONED},
    ),
    "SanaTransformer2DModel": (
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 16,
            "cross_attention_dim": 32,
            "caption_channels": 32,
            "sample_size": SIZE,
        },
        {"hidden_states": LATENT, **CONDITIONED, "encoder_attention_mask": padded},
    ),
    "Transformer2DModel": (
        {**HEADS, "in_channels": 32, "norm_num_groups": 8, "cross_attention_dim": 32},
        {"hidden_states": (BATCH, 32, SIZE, SIZE), "encoder_hidden_states": WORDS},
    ),
    "MochiTransformer3DModel": (
        {
            **HEADS,
            "pooled_projection_dim": 16,
            "in_channels": 4,
            "text_embed_dim": 32,
            "time_embed_dim": 8,
            "max_sequence_length": TEXT,
        },
        {"hidden_states": (BATCH, 4, 2, 8, 8), **CONDITIONED, "encoder_attention_mask": padded},
    ),
    "CogView3PlusTransformer2DModel": (
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "text_embed_dim": 32,
            "time_embed_dim": 8,
            "condition_dim": 8,
            "pos_embed_max_size": 16,
            "sample_size": SIZE,
        },
        {
            "hidden_states": LATENT,
            **CONDITIONED,
            "original_size": (BATCH, 2),
            "target_size": (BATCH, 2),
            "crop_coords": (BATCH, 2),
        },
    ),
    "LTXVideoTransformer3DModel": (
        {**HEADS, "in_channels": 8, "out_channels": 8, "cross_attention_dim": 32, "caption_channels": 32},
        {
            "hidden_states": (BATCH, 2 * 4 * 4, 8),
            **CONDITIONED,
            "encoder_attention_mask": padded,
            "num_frames": always(2),
            "height": always(4),
            "width": always(4),
        },
    ),
    "WanTransformer3DModel": (
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 32,
            "freq_dim": 16,
            "ffn_dim": 64,
            "rope_max_seq_len": 32,
        },
        {"hidden_states": (BATCH, 4, 2, 8, 8), **CONDITIONED},
    ),
    "HunyuanVideoTransformer3DModel": (
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "text_embed_dim": 32,
            "pooled_projection_dim": 24,
            "rope_axes_dim": (4, 4, 8),
        },
        {
            "hidden_states": (BATCH, 4, 2, 8, 8),
            **CONDITIONED,
            "encoder_attention_mask": padded,
            "pooled_projections": (BATCH, 24),
            "guidance": (BATCH,),
        },
    ),
    "Lumina2Transformer2DModel": (
        {
            "sample_size": SIZE,
            "in_channels": 4,
            "hidden_size": 32,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "multiple_of": 8,
            "axes_dim_rope": (4, 2, 2),
            "axes_lens": (64, 32, 32),
            "cap_feat_dim": 32,
        },
        {"hidden_states": LATENT, **CONDITIONED, "encoder_attention_mask": padded},
    ),
    "QwenImageTransformer2DModel": (
        {**HEADS, "in_channels": 16, "out_channels": 4, "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8)},
        {
            "hidden_states": (BATCH, 16, 16),
            **CONDITIONED,
            "encoder_hidden_states_mask": ones(BATCH, TEXT),
            "img_shapes": always([[(1, 4, 4)]] * BATCH),
        },
    ),
}
