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

# fmt: off
_GROUPS: tuple[tuple[dict[str, Any], str], ...] = (
    ({}, """
        convmixer_768_32 convnext_atto cpubone_nano cspnext_tiny cspresnet50 davit_tiny densenet121 dla34
        dm_nfnet_f0 dpn68 edgenext_xx_small efficientnet_b0 efficientvit_b0 fasternet_t0 fastvit_t8
        focalnet_tiny_srf ghostnet_100 hardcorenas_a hgnetv2_b0 hrnet_w18_small iformer_t inception_next_tiny
        inception_v4 lcnetv2_small legacy_seresnet18 legacy_xception mambaout_femto mobilenetv3_small_100
        mobilenetv4_conv_small mobilevit_xxs nextvit_small nf_resnet50 pnasnet5large poolformer_s12 pvt_v2_b0
        rdnet_tiny regnety_002 repghostnet_050 repvgg_a0 repvit_m1 res2net50_26w_4s resnest14d resnetv2_50
        rexnet_100 selecsls42 shvit_s1 skresnet18 starnet_s050 test_nfnet test_resnet tf_mixnet_s tresnet_m
        vovnet39a xception41
    """),
    ({"img_size": 96}, "test_vit_relpos"),
    ({"img_size": 112}, """
        beit_base_patch16_224 cait_xxs24_224 convit_tiny deit3_small_patch16_224 deit_tiny_patch16_224
        eva02_tiny_patch14_224 gmlp_ti16_224 sequencer2d_s vit_tiny_patch16_224 xcit_nano_12_p16_224
    """),
    ({"img_size": 128}, "lambda_resnet26t maxvit_rmlp_pico_rw_256 swinv2_tiny_window8_256"),
    ({"img_size": 224}, """
        coat_tiny coatnet_0_rw_224 efficientformer_l1 efficientformerv2_s0 efficientvit_m0 gcvit_xxtiny
        hiera_tiny_224 nest_tiny_jx levit_128s mixer_s32_224 mvitv2_tiny pit_ti_224 sam2_hiera_tiny
        swiftformer_xs swin_tiny_patch4_window7_224 swinv2_cr_tiny_224 tiny_vit_5m_224 tnt_s_patch16_224
        twins_svt_small visformer_tiny vit_tiny_r_s16_p8_224 vitamin_small_224 volo_d1_224
    """),
    ({"img_size": 240}, "crossvit_tiny_240"),
    ({"size": 64}, "mobilenetv5_base"),
    ({"size": 128}, "csatv2 efficientvim_m1 inception_resnet_v2 inception_v3 lowformer_b0"),
    ({"size": 256}, "halonet_h1"),
)
_OTHERS: dict[str, dict[str, Any]] = {
    "deepseek_vit_412m": {"img_size": 84, "embed_dim": 64, "depth": 3, "num_heads": 2},
    "gemma4_vit_167m": {"img_size": 96, "embed_dim": 64, "depth": 3, "num_heads": 2, "head_dim": 32,
     "intermediate_size": 128, "position_embedding_size": 64},
    "naflexvit_base_patch16_gap": {"embed_dim": 96, "depth": 4, "num_heads": 3},
    "nasnetalarge": {"num_features": 1344, "stem_size": 32},
    "qwen3_vit_88m": {"img_size": 96, "embed_dim": 64, "depth": 3, "num_heads": 2},
    "samvit_base_patch16_224": {"img_size": 112, "embed_dim": 96, "depth": 4, "num_heads": 3,
     "global_attn_indexes": (1, 3)},
    "vgg11": {"mlp_ratio": 0.1},
}
# fmt: on
"""Arguments, and models that take these; ``size`` is that of the images, ``img_size`` is told to the model too."""

_MODELS = dict(sorted({**{name: given for given, names in _GROUPS for name in names.split()}, **_OTHERS}.items()))


def models() -> dict[str, Build]:
    return {name: partial(_model, name, dict(keywords)) for name, keywords in _MODELS.items()}


def _model(name: str, keywords: dict[str, Any]) -> Subject:
    import timm

    keywords = dict(keywords)  # a model is built several times
    size = keywords.pop("size", keywords.get("img_size", SIZE))
    if keywords.get("img_size") in _FIXED:
        del keywords["img_size"]
    model = timm.create_model(name, pretrained=False, drop_rate=0.1, **keywords)
    return Subject(model, lambda step: (torch.randn(BATCH, 3, size, size, generator=seeded(step)),))
