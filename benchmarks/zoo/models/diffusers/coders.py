"""U-Nets and autoencoders of diffusers made small: the class, its arguments, and the inputs of a step."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.zoo.models.diffusers.inputs import (
    BATCH,
    CODER,
    CONDITIONED,
    CROSS,
    FRAMES,
    LATENT,
    PICTURE,
    SIZE,
    UP_AND_DOWN,
    VIDEO,
    WIDTHS,
    WORDS,
    always,
    padded,
    times,
    tokens,
)

CODERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "UNet2DModel": (
        {
            **WIDTHS,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        {"sample": PICTURE, "timestep": times},
    ),
    "UNet2DConditionModel": ({**CROSS, **UP_AND_DOWN}, {"sample": LATENT, **CONDITIONED}),
    "UNet1DModel": (
        {
            "block_out_channels": (16, 16, 32),
            "in_channels": 2,
            "extra_in_channels": 32,
            "sample_size": 64,
        },
        {"sample": (BATCH, 2, 64), "timestep": times},
    ),
    "UNet3DConditionModel": (
        {
            **CROSS,
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        },
        {"sample": VIDEO, **CONDITIONED},
    ),
    "UNetSpatioTemporalConditionModel": (
        {
            "block_out_channels": (32, 64),
            "layers_per_block": 1,
            "num_attention_heads": (2, 2),
            "cross_attention_dim": 32,
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 24,
            "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        },
        {
            "sample": (BATCH, 3, 8, SIZE, SIZE),
            "timestep": times,
            "encoder_hidden_states": (BATCH, 1, 32),
            "added_time_ids": (BATCH, 3),
        },
    ),
    "Kandinsky3UNet": (
        {
            "time_embedding_dim": 32,
            "groups": 4,
            "attention_head_dim": 8,
            "layers_per_block": 1,
            "block_out_channels": (16, 32),
            "cross_attention_dim": 32,
            "encoder_hid_dim": 32,
        },
        {"sample": LATENT, **CONDITIONED, "encoder_attention_mask": padded},
    ),
    "StableCascadeUNet": (
        {
            "in_channels": 4,
            "out_channels": 4,
            "conditioning_dim": 32,
            "block_out_channels": (32, 32),
            "num_attention_heads": (2, 2),
            "down_num_layers_per_block": (1, 1),
            "up_num_layers_per_block": (1, 1),
            "clip_text_pooled_in_channels": 24,
            "timestep_ratio_embedding_dim": 16,
        },
        {
            "sample": LATENT,
            "timestep_ratio": lambda generator: torch.rand(BATCH, generator=generator),
            "clip_text_pooled": (BATCH, 1, 24),
        },
    ),
    "UVit2DModel": (
        {
            "hidden_size": 32,
            "cond_embed_dim": 32,
            "micro_cond_encode_dim": 8,
            "micro_cond_embed_dim": 40,
            "encoder_hidden_size": 32,
            "vocab_size": 40,
            "codebook_size": 32,
            "in_channels": 32,
            "block_out_channels": 32,
            "num_res_blocks": 1,
            "block_num_heads": 2,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "sample_size": 8,
        },
        {
            "input_ids": tokens(BATCH, 8, 8),
            "encoder_hidden_states": WORDS,
            "pooled_text_emb": (BATCH, 32),
            "micro_conds": (BATCH, 5),
        },
    ),
    "AutoencoderKL": (CODER, {"sample": PICTURE, "sample_posterior": always(True)}),
    "VQModel": ({**CODER, "num_vq_embeddings": 32}, {"sample": PICTURE}),
    "AsymmetricAutoencoderKL": (
        {
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "down_block_out_channels": (16, 32),
            "up_block_out_channels": (16, 32),
            "norm_num_groups": 8,
        },
        {"sample": PICTURE},
    ),
    "AutoencoderTiny": (
        {
            "encoder_block_out_channels": (16, 16),
            "decoder_block_out_channels": (16, 16),
            "num_encoder_blocks": (1, 2),
            "num_decoder_blocks": (2, 1),
        },
        {"sample": PICTURE},
    ),
    "AutoencoderDC": (
        {
            "latent_channels": 4,
            "attention_head_dim": 8,
            "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "encoder_block_out_channels": (16, 16),
            "decoder_block_out_channels": (16, 16),
            "encoder_layers_per_block": (1, 1),
            "decoder_layers_per_block": (1, 1),
            "encoder_qkv_multiscales": ((), (5,)),
            "decoder_qkv_multiscales": ((), (5,)),
        },
        {"sample": PICTURE},
    ),
    "AutoencoderOobleck": (
        {
            "encoder_hidden_size": 12,
            "decoder_channels": 12,
            "decoder_input_channels": 6,
            "downsampling_ratios": [2, 4],
            "channel_multiples": [1, 2],
        },
        {"sample": (BATCH, 2, 64)},
    ),
    "AutoencoderKLTemporalDecoder": (
        {"block_out_channels": (32, 64), "down_block_types": ("DownEncoderBlock2D",) * 2, "latent_channels": 4},
        {"sample": (4, 3, 32, 32), "num_frames": always(2)},
    ),
    "AutoencoderKLCogVideoX": (
        {"block_out_channels": (8, 8, 8, 8), "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2},
        {"sample": FRAMES},
    ),
    "AutoencoderKLMochi": (
        {
            "encoder_block_out_channels": (32, 32, 32, 32),
            "decoder_block_out_channels": (32, 32, 32, 32),
            "latent_channels": 4,
            "layers_per_block": (1, 1, 1, 1, 1),
        },
        {"sample": (1, 3, 7, 16, 16)},
    ),
    "AutoencoderKLLTXVideo": (
        {
            "latent_channels": 8,
            "block_out_channels": (8, 8, 8, 8),
            "decoder_block_out_channels": (8, 8, 8, 8),
            "layers_per_block": (1, 1, 1, 1, 1),
            "decoder_layers_per_block": (1, 1, 1, 1, 1),
        },
        {"sample": (BATCH, 3, 9, 32, 32)},
    ),
    "AutoencoderKLWan": (
        {"base_dim": 8, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1},
        {"sample": FRAMES},
    ),
}
