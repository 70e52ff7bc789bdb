"""Inputs and sizes that the small networks of diffusers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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
