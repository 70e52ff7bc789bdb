"""The networks whose time is measured, each at a size at which a plain step takes 0.05 to 1 CPU second or so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.networks import ARCHITECTURES, Architecture, Images, Tokens
from benchmarks.networks.architectures import torchvision_model
from benchmarks.networks.recurrent import LstmStack
from benchmarks.networks.stacks import small_blocks


@dataclass(frozen=True)
class Subject:
    """A network and its batch.

    Attributes:
        architecture: what it is, and what its blocks are.
        batch_size: samples in a batch.
        size: height and width of images, or tokens in a sequence; None for the usual.
        package: what has to be installed for it.
    """

    architecture: Architecture
    batch_size: int
    size: int | None = None
    package: str = "torchvision"


class Logits(nn.Module):
    """A causal language model of transformers, called with token numbers alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.model(input_ids=tokens, use_cache=False).logits


def llama() -> nn.Module:
    """A small one: eight layers, 384 wide, three query heads to each key head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=LLAMA_WORDS, hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    return Logits(LlamaForCausalLM(config))


LLAMA_WORDS = 8192
"""A quarter of the vocabulary, or the last product would be all of the step."""


def timm_model(name: str) -> nn.Module:
    import timm

    return timm.create_model(name, pretrained=False)


def _known(name: str, batch_size: int, size: int | None = None, **changes: Any) -> Subject:
    return Subject(replace(ARCHITECTURES[name], **changes), batch_size, size)


def _other(
    description: str, build: Callable[[], nn.Module], block: str, batch_size: int, size: int, **fields: Any
) -> Subject:
    """One that ``benchmark.py --arch`` does not have."""
    inputs = fields.pop("input", Images(size))
    return Subject(
        Architecture(description, build, inputs, batch_size, block, "not asked for here"), batch_size, **fields
    )


def _torchvision(name: str, description: str, block: str, batch_size: int, size: int) -> Subject:
    return _other(description, partial(torchvision_model, name), block, batch_size, size)


TINY = "small_blocks"
"""The one where the host is the limit; what single items cost is measured with it."""

SUBJECTS: dict[str, Subject] = {
    TINY: _other("residual blocks of next to no work", small_blocks, r"\d+", 2, 4, input=Images(4, channels=4)),
    "squeezenet1_1": _torchvision(
        "squeezenet1_1", "1×1 and 3×3 convolutions side by side", r"features\.([34679]|1[0-2])", 4, 160
    ),
    "alexnet": _known("alexnet", 8),
    "shufflenet_v2_x1_0": _torchvision(
        "shufflenet_v2_x1_0", "depthwise convolutions, channels shuffled", r"stage[234]\.\d+", 8, 112
    ),
    "mobilenet_v3_small": _torchvision(
        "mobilenet_v3_small", "inverted residual blocks", r"features\.([1-9]|1[01])", 8, 112
    ),
    "mobilenet_v3_large": _known("mobilenet_v3_large", 4, 112),
    "mobilenet_v2": _torchvision("mobilenet_v2", "inverted residual blocks", r"features\.([1-9]|1[0-7])", 4, 112),
    "mnasnet1_0": _torchvision(
        "mnasnet1_0", "inverted residual blocks found by search", r"layers\.([89]|1[0-3])\.\d+", 4, 112
    ),
    "regnet_y_400mf": _torchvision(
        "regnet_y_400mf", "grouped convolutions, squeeze and excitation", r"trunk_output\.block\d\.block\d-\d+", 4, 112
    ),
    "efficientnet_b0": _torchvision(
        "efficientnet_b0", "inverted residual blocks, squeeze and excitation", r"features\.[1-7]\.\d+", 4, 224
    ),
    "ghostnet_100": _other(
        "cheap convolutions beside ordinary ones", partial(timm_model, "ghostnet_100"), r"blocks\.\d+\.\d+", 4, 112,
        package="timm",
    ),
    "resnet18": _known("resnet18", 4, 112),
    "resnet50": _known("resnet50", 2, 112),
    "resnext50_32x4d": _torchvision("resnext50_32x4d", "residual blocks, grouped", r"layer\d\.\d+", 2, 112),
    "wide_resnet50_2": _torchvision("wide_resnet50_2", "wide residual blocks", r"layer\d\.\d+", 2, 112),
    "resnet101": _known("resnet101", 1, 160),
    "densenet121": _known("densenet121", 2, 112),
    "googlenet": _known("googlenet", 2),
    "inception_v3": _known("inception_v3", 2),
    "vgg11": _known("vgg11", 1),
    "unet": _known("unet", 1, 96),
    "convnext_tiny": _known("convnext_tiny", 1),
    "vit_b_16": _known("vit_b_16", 2),
    "swin_t": _known("swin_t", 1),
    "maxvit_t": _torchvision("maxvit_t", "convolutions, attention in grids", r"blocks\.\d\.layers\.\d", 1, 224),
    "mixer_s16_224": _other(
        "linear layers across patches, across channels", partial(timm_model, "mixer_s16_224"), r"blocks\.\d+", 2, 224,
        package="timm",
    ),
    "bert_base": _known("bert_base", 4, 128),
    "gpt2_small": _known("gpt2_small", 1, 128),
    "llama": _other(
        "transformer decoder: rotary positions, gated feed-forward", llama, r"model\.model\.layers\.\d+", 2, 128,
        input=Tokens(128, LLAMA_WORDS), package="transformers",
    ),
    "lstm": _other("four LSTM layers", LstmStack, r"layers\.\d+", 8, 48, input=Tokens(48, 2000)),
}  # fmt: skip
"""From the smallest to the largest of each kind: convolutions, then transformers, then a recurrent one."""
