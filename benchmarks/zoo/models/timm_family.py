"""One model of each module of timm, the smallest or one made smaller, with images as small as it takes.

It needs timm.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.zoo.models import Build, Subject, seeded

BATCH = 4
SIZE = 96
_FIXED = (224, 240)
"""Image sizes that are the models' own: they take no argument for it."""

_MODELS: dict[str, dict[str, Any]] = {
    "beit_base_patch16_224": {"img_size": 112},
    "cait_xxs24_224": {"img_size": 112},
    "coat_tiny": {"img_size": 224},
    "coatnet_0_rw_224": {"img_size": 224},
    "convit_tiny": {"img_size": 112},
    "convmixer_768_32": {},
    "convnext_atto": {},
    "cpubone_nano": {},
    "crossvit_tiny_240": {"img_size": 240},
    "csatv2": {"size": 128},
    "cspnext_tiny": {},
    "cspresnet50": {},
    "davit_tiny": {},
    "deepseek_vit_412m": {"img_size": 84, "embed_dim": 64, "depth": 3, "num_heads": 2},
    "deit3_small_patch16_224": {"img_size": 112},
    "deit_tiny_patch16_224": {"img_size": 112},
    "densenet121": {},
    "dla34": {},
    "dm_nfnet_f0": {},
    "dpn68": {},
    "edgenext_xx_small": {},
    "efficientformer_l1": {"img_size": 224},
    "efficientformerv2_s0": {"img_size": 224},
    "efficientnet_b0": {},
    "efficientvim_m1": {"size": 128},
    "efficientvit_b0": {},
    "efficientvit_m0": {"img_size": 224},
    "eva02_tiny_patch14_224": {"img_size": 112},
    "fasternet_t0": {},
    "fastvit_t8": {},
    "focalnet_tiny_srf": {},
    "gcvit_xxtiny": {"img_size": 224},
    "gemma4_vit_167m": {
        "img_size": 96,
        "embed_dim": 64,
        "depth": 3,
        "num_heads": 2,
        "head_dim": 32,
        "intermediate_size": 128,
        "position_embedding_size": 64,
    },
    "ghostnet_100": {},
    "gmlp_ti16_224": {"img_size": 112},
    "halonet_h1": {"size": 256},
    "hardcorenas_a": {},
    "hgnetv2_b0": {},
    "hiera_tiny_224": {"img_size": 224},
    "hrnet_w18_small": {},
    "iformer_t": {},
    "inception_next_tiny": {},
    "inception_resnet_v2": {"size": 128},
    "inception_v3": {"size": 128},
    "inception_v4": {},
    "nest_tiny_jx": {"img_size": 224},
    "lambda_resnet26t": {"img_size": 128},
    "lcnetv2_small": {},
    "legacy_seresnet18": {},
    "legacy_xception": {},
    "levit_128s": {"img_size": 224},
    "lowformer_b0": {"size": 128},
    "mambaout_femto": {},
    "maxvit_rmlp_pico_rw_256": {"img_size": 128},
    "mixer_s32_224": {"img_size": 224},
    "mobilenetv3_small_100": {},
    "mobilenetv4_conv_small": {},
    "mobilenetv5_base": {"size": 64},
    "mobilevit_xxs": {},
    "mvitv2_tiny": {"img_size": 224},
    "naflexvit_base_patch16_gap": {"embed_dim": 96, "depth": 4, "num_heads": 3},
    "nasnetalarge": {"num_features": 1344, "stem_size": 32},
    "nextvit_small": {},
    "nf_resnet50": {},
    "pit_ti_224": {"img_size": 224},
    "pnasnet5large": {},
    "poolformer_s12": {},
    "pvt_v2_b0": {},
    "qwen3_vit_88m": {"img_size": 96, "embed_dim": 64, "depth": 3, "num_heads": 2},
    "rdnet_tiny": {},
    "regnety_002": {},
    "repghostnet_050": {},
    "repvgg_a0": {},
    "repvit_m1": {},
    "res2net50_26w_4s": {},
    "resnest14d": {},
    "resnetv2_50": {},
    "rexnet_100": {},
    "sam2_hiera_tiny": {"img_size": 224},
    "samvit_base_patch16_224": {
        "img_size": 112,
        "embed_dim": 96,
        "depth": 4,
        "num_heads": 3,
        "global_attn_indexes": (1, 3),
    },
    "selecsls42": {},
    "sequencer2d_s": {"img_size": 112},
    "shvit_s1": {},
    "skresnet18": {},
    "starnet_s050": {},
    "swiftformer_xs": {"img_size": 224},
    "swin_tiny_patch4_window7_224": {"img_size": 224},
    "swinv2_cr_tiny_224": {"img_size": 224},
    "swinv2_tiny_window8_256": {"img_size": 128},
    "test_nfnet": {},
    "test_resnet": {},
    "test_vit_relpos": {"img_size": 96},
    "tf_mixnet_s": {},
    "tiny_vit_5m_224": {"img_size": 224},
    "tnt_s_patch16_224": {"img_size": 224},
    "tresnet_m": {},
    "twins_svt_small": {"img_size": 224},
    "vgg11": {"mlp_ratio": 0.1},
    "visformer_tiny": {"img_size": 224},
    "vit_tiny_patch16_224": {"img_size": 112},
    "vit_tiny_r_s16_p8_224": {"img_size": 224},
    "vitamin_small_224": {"img_size": 224},
    "volo_d1_224": {"img_size": 224},
    "vovnet39a": {},
    "xception41": {},
    "xcit_nano_12_p16_224": {"img_size": 112},
}
"""Arguments of each model; ``size`` is that of the images alone, ``img_size`` is told to the model too."""


def models() -> dict[str, Build]:
    return {name: partial(_model, name, dict(keywords)) for name, keywords in _MODELS.items()}


def modules_without_a_model() -> list[str]:
    """timm's modules of which none is here."""
    import timm

    return [name for name in timm.list_modules() if not set(timm.list_models(module=name)) & _MODELS.keys()]


def _model(name: str, keywords: dict[str, Any]) -> Subject:
    import timm

    keywords = dict(keywords)  # a model is built several times
    size = keywords.pop("size", keywords.get("img_size", SIZE))
    if keywords.get("img_size") in _FIXED:
        del keywords["img_size"]
    model = timm.create_model(name, pretrained=False, drop_rate=0.1, **keywords)
    return Subject(model, lambda step: (torch.randn(BATCH, 3, size, size, generator=seeded(step)),))
