"""Networks of diffusers made small: U-Nets, autoencoders, transformers, what controls them. It needs diffusers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.zoo.models import Build, Subject, drawn

BATCH = 2
SIZE = 16
TEXT = 12
Make = Callable[[torch.Generator], Any]


def times(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(1, 900, (BATCH,), generator=generator)


def classes(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 10, (BATCH,), generator=generator)


def tokens(*shape: int) -> Make:
    return lambda generator: torch.randint(0, 30, shape, generator=generator)


def ones(*shape: int) -> Make:
    return lambda _: torch.ones(shape, dtype=torch.long)


def padded(_: torch.Generator) -> torch.Tensor:
    mask = torch.ones(BATCH, TEXT, dtype=torch.long)
    mask[-1, TEXT // 2 :] = 0
    return mask


def always(value: Any) -> Make:
    return lambda _: value


LATENT = (BATCH, 4, SIZE, SIZE)
PICTURE = (BATCH, 3, 32, 32)
WORDS = (BATCH, TEXT, 32)
CONDITIONED: dict[str, Any] = {"timestep": times, "encoder_hidden_states": WORDS}
WIDTHS = {"block_out_channels": (16, 32), "norm_num_groups": 8, "layers_per_block": 1}
CROSS = {**WIDTHS, "cross_attention_dim": 32, "attention_head_dim": 8}
UP_AND_DOWN = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
CODER = {
    **WIDTHS,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}
JOINT = {**HEADS, "joint_attention_dim": 32, "pooled_projection_dim": 24}
FLUX = {**JOINT, "num_single_layers": 2, "in_channels": 8, "axes_dims_rope": (4, 4, 8)}
FLUX_INPUTS: dict[str, Any] = {
    "hidden_states": (BATCH, 16, 8),
    "encoder_hidden_states": WORDS,
    "timestep": lambda generator: torch.rand(BATCH, generator=generator),
    "img_ids": (16, 3),
    "txt_ids": (TEXT, 3),
}
SD3 = {**JOINT, "in_channels": 4, "out_channels": 4, "sample_size": SIZE, "caption_projection_dim": 32}
SD3_INPUTS: dict[str, Any] = {"hidden_states": LATENT, **CONDITIONED, "pooled_projections": (BATCH, 24)}
VIDEO = (BATCH, 4, 3, SIZE, SIZE)
FRAMES = (BATCH, 3, 5, 32, 32)

# fmt: off
_MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "UNet2DModel": ({**WIDTHS, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
     "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}, {"sample": PICTURE, "timestep": times}),
    "UNet2DConditionModel": ({**CROSS, **UP_AND_DOWN}, {"sample": LATENT, **CONDITIONED}),
    "UNet1DModel": ({"block_out_channels": (16, 16, 32), "in_channels": 2, "extra_in_channels": 32, "sample_size": 64},
     {"sample": (BATCH, 2, 64), "timestep": times}),
    "UNet3DConditionModel": ({**CROSS, "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
     "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D")}, {"sample": VIDEO, **CONDITIONED}),
    "UNetSpatioTemporalConditionModel": ({"block_out_channels": (32, 64), "layers_per_block": 1,
     "num_attention_heads": (2, 2), "cross_attention_dim": 32, "addition_time_embed_dim": 8,
     "projection_class_embeddings_input_dim": 24, "down_block_types": ("CrossAttnDownBlockSpatioTemporal",
     "DownBlockSpatioTemporal"), "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal")},
     {"sample": (BATCH, 3, 8, SIZE, SIZE), "timestep": times, "encoder_hidden_states": (BATCH, 1, 32),
     "added_time_ids": (BATCH, 3)}),
    "Kandinsky3UNet": ({"time_embedding_dim": 32, "groups": 4, "attention_head_dim": 8, "layers_per_block": 1,
     "block_out_channels": (16, 32), "cross_attention_dim": 32, "encoder_hid_dim": 32}, {"sample": LATENT,
     **CONDITIONED, "encoder_attention_mask": padded}),
    "StableCascadeUNet": ({"in_channels": 4, "out_channels": 4, "conditioning_dim": 32, "block_out_channels": (32, 32),
     "num_attention_heads": (2, 2), "down_num_layers_per_block": (1, 1), "up_num_layers_per_block": (1, 1),
     "clip_text_pooled_in_channels": 24, "timestep_ratio_embedding_dim": 16}, {"sample": LATENT,
     "timestep_ratio": lambda generator: torch.rand(BATCH, generator=generator), "clip_text_pooled": (BATCH, 1, 24)}),
    "UVit2DModel": ({"hidden_size": 32, "cond_embed_dim": 32, "micro_cond_encode_dim": 8, "micro_cond_embed_dim": 40,
     "encoder_hidden_size": 32, "vocab_size": 40, "codebook_size": 32, "in_channels": 32, "block_out_channels": 32,
     "num_res_blocks": 1, "block_num_heads": 2, "num_hidden_layers": 2, "num_attention_heads": 2,
     "intermediate_size": 64, "sample_size": 8}, {"input_ids": tokens(BATCH, 8, 8), "encoder_hidden_states": WORDS,
     "pooled_text_emb": (BATCH, 32), "micro_conds": (BATCH, 5)}),
    "AutoencoderKL": (CODER, {"sample": PICTURE, "sample_posterior": always(True)}),
    "VQModel": ({**CODER, "num_vq_embeddings": 32}, {"sample": PICTURE}),
    "AsymmetricAutoencoderKL": ({"down_block_types": ("DownEncoderBlock2D",) * 2,
     "up_block_types": ("UpDecoderBlock2D",) * 2, "down_block_out_channels": (16, 32),
     "up_block_out_channels": (16, 32), "norm_num_groups": 8}, {"sample": PICTURE}),
    "AutoencoderTiny": ({"encoder_block_out_channels": (16, 16), "decoder_block_out_channels": (16, 16),
     "num_encoder_blocks": (1, 2), "num_decoder_blocks": (2, 1)}, {"sample": PICTURE}),
    "AutoencoderDC": ({"latent_channels": 4, "attention_head_dim": 8, "encoder_block_types": ("ResBlock",
     "EfficientViTBlock"), "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
     "encoder_block_out_channels": (16, 16), "decoder_block_out_channels": (16, 16), "encoder_layers_per_block": (1, 1),
     "decoder_layers_per_block": (1, 1), "encoder_qkv_multiscales": ((), (5,)), "decoder_qkv_multiscales": ((), (5,))},
     {"sample": PICTURE}),
    "AutoencoderOobleck": ({"encoder_hidden_size": 12, "decoder_channels": 12, "decoder_input_channels": 6,
     "downsampling_ratios": [2, 4], "channel_multiples": [1, 2]}, {"sample": (BATCH, 2, 64)}),
    "AutoencoderKLTemporalDecoder": ({"block_out_channels": (32, 64), "down_block_types": ("DownEncoderBlock2D",) * 2,
     "latent_channels": 4}, {"sample": (4, 3, 32, 32), "num_frames": always(2)}),
    "AutoencoderKLCogVideoX": ({"block_out_channels": (8, 8, 8, 8), "latent_channels": 4, "layers_per_block": 1,
     "norm_num_groups": 2}, {"sample": FRAMES}),
    "AutoencoderKLMochi": ({"encoder_block_out_channels": (32, 32, 32, 32),
     "decoder_block_out_channels": (32, 32, 32, 32), "latent_channels": 4, "layers_per_block": (1, 1, 1, 1, 1)},
     {"sample": (1, 3, 7, 16, 16)}),
    "AutoencoderKLLTXVideo": ({"latent_channels": 8, "block_out_channels": (8, 8, 8, 8),
     "decoder_block_out_channels": (8, 8, 8, 8), "layers_per_block": (1, 1, 1, 1, 1),
     "decoder_layers_per_block": (1, 1, 1, 1, 1)}, {"sample": (BATCH, 3, 9, 32, 32)}),
    "AutoencoderKLWan": ({"base_dim": 8, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1},
     {"sample": FRAMES}),
    "DiTTransformer2DModel": ({**HEADS, "sample_size": SIZE, "num_embeds_ada_norm": 10}, {"hidden_states": LATENT,
     "timestep": classes, "class_labels": classes}),
    "SD3Transformer2DModel": (SD3, SD3_INPUTS),
    "FluxTransformer2DModel": (FLUX, {**FLUX_INPUTS, "pooled_projections": (BATCH, 24)}),
    "PixArtTransformer2DModel": ({**HEADS, "cross_attention_dim": 32, "caption_channels": 32, "sample_size": SIZE},
     {"hidden_states": LATENT, **CONDITIONED, "encoder_attention_mask": padded,
     "added_cond_kwargs": always({"resolution": None, "aspect_ratio": None})}),
    "ControlNetModel": ({**CROSS, "down_block_types": UP_AND_DOWN["down_block_types"],
     "conditioning_embedding_out_channels": (8, 16)}, {"sample": LATENT, **CONDITIONED, "controlnet_cond": (BATCH, 3, 2
     * SIZE, 2 * SIZE)}),
    "SD3ControlNetModel": (SD3, {**SD3_INPUTS, "controlnet_cond": LATENT}),
    "FluxControlNetModel": (FLUX, {**FLUX_INPUTS, "pooled_projections": (BATCH, 24),
     "controlnet_cond": (BATCH, 16, 8)}),
    "T2IAdapter": ({"channels": [16, 32], "num_res_blocks": 1}, {"x": (BATCH, 3, 64, 64)}),
    "PriorTransformer": ({**HEADS, "embedding_dim": 32, "num_embeddings": TEXT}, {"hidden_states": (BATCH, 32),
     "timestep": times, "proj_embedding": (BATCH, 32), "encoder_hidden_states": WORDS}),
    "AuraFlowTransformer2DModel": ({"sample_size": SIZE, "num_mmdit_layers": 1, "num_single_dit_layers": 1,
     "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32, "caption_projection_dim": 32,
     "pos_embed_max_size": 256}, {"hidden_states": LATENT, **CONDITIONED}),
    "CogVideoXTransformer3DModel": ({**HEADS, "in_channels": 4, "out_channels": 4, "time_embed_dim": 8,
     "text_embed_dim": 32, "sample_width": 8, "sample_height": 8, "sample_frames": 9, "max_text_seq_length": TEXT},
     {"hidden_states": (BATCH, 3, 4, 8, 8), **CONDITIONED}),
    "LatteTransformer3DModel": ({**HEADS, "in_channels": 4, "cross_attention_dim": 32, "sample_size": 8,
     "patch_size": 2, "caption_channels": 32, "num_embeds_ada_norm": 1000, "norm_type": "ada_norm_single",
     "norm_elementwise_affine": False, "video_length": 3}, {"hidden_states": (BATCH, 4, 3, 8, 8), **CONDITIONED}),
    "SanaTransformer2DModel": ({**HEADS, "in_channels": 4, "out_channels": 4, "num_cross_attention_heads": 2,
     "cross_attention_head_dim": 16, "cross_attention_dim": 32, "caption_channels": 32, "sample_size": SIZE},
     {"hidden_states": LATENT, **CONDITIONED, "encoder_attention_mask": padded}),
    "Transformer2DModel": ({**HEADS, "in_channels": 32, "norm_num_groups": 8, "cross_attention_dim": 32},
     {"hidden_states": (BATCH, 32, SIZE, SIZE), "encoder_hidden_states": WORDS}),
    "MochiTransformer3DModel": ({**HEADS, "pooled_projection_dim": 16, "in_channels": 4, "text_embed_dim": 32,
     "time_embed_dim": 8, "max_sequence_length": TEXT}, {"hidden_states": (BATCH, 4, 2, 8, 8), **CONDITIONED,
     "encoder_attention_mask": padded}),
    "CogView3PlusTransformer2DModel": ({**HEADS, "in_channels": 4, "out_channels": 4, "text_embed_dim": 32,
     "time_embed_dim": 8, "condition_dim": 8, "pos_embed_max_size": 16, "sample_size": SIZE}, {"hidden_states": LATENT,
     **CONDITIONED, "original_size": (BATCH, 2), "target_size": (BATCH, 2), "crop_coords": (BATCH, 2)}),
    "LTXVideoTransformer3DModel": ({**HEADS, "in_channels": 8, "out_channels": 8, "cross_attention_dim": 32,
     "caption_channels": 32}, {"hidden_states": (BATCH, 2 * 4 * 4, 8), **CONDITIONED, "encoder_attention_mask": padded,
     "num_frames": always(2), "height": always(4), "width": always(4)}),
    "WanTransformer3DModel": ({**HEADS, "in_channels": 4, "out_channels": 4, "text_dim": 32, "freq_dim": 16,
     "ffn_dim": 64, "rope_max_seq_len": 32}, {"hidden_states": (BATCH, 4, 2, 8, 8), **CONDITIONED}),
    "HunyuanVideoTransformer3DModel": ({**HEADS, "in_channels": 4, "out_channels": 4, "num_single_layers": 1,
     "num_refiner_layers": 1, "text_embed_dim": 32, "pooled_projection_dim": 24, "rope_axes_dim": (4, 4, 8)},
     {"hidden_states": (BATCH, 4, 2, 8, 8), **CONDITIONED, "encoder_attention_mask": padded,
     "pooled_projections": (BATCH, 24), "guidance": (BATCH,)}),
    "Lumina2Transformer2DModel": ({"sample_size": SIZE, "in_channels": 4, "hidden_size": 32, "num_layers": 2,
     "num_refiner_layers": 1, "num_attention_heads": 4, "num_kv_heads": 2, "multiple_of": 8, "axes_dim_rope": (4, 2, 2),
     "axes_lens": (64, 32, 32), "cap_feat_dim": 32}, {"hidden_states": LATENT, **CONDITIONED,
     "encoder_attention_mask": padded}),
    "QwenImageTransformer2DModel": ({**HEADS, "in_channels": 16, "out_channels": 4, "joint_attention_dim": 32,
     "axes_dims_rope": (4, 4, 8)}, {"hidden_states": (BATCH, 16, 16), **CONDITIONED,
     "encoder_hidden_states_mask": ones(BATCH, TEXT), "img_shapes": always([[(1, 4, 4)]] * BATCH)}),
}
# fmt: on
"""The arguments of each class, and the inputs of a step."""


def models() -> dict[str, Build]:
    return {name: partial(_build, name) for name in _MODELS}


def _build(name: str) -> Subject:
    import diffusers

    arguments, inputs = _MODELS[name]
    return Subject(getattr(diffusers, name)(**arguments), partial(drawn, inputs))
