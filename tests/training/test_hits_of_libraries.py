"""Detectors and segmenters of torchvision and transformers, with their own losses, as in ``test_hits.py``."""

import pytest
import torch
from test_hits import train_beside_plain
from torchvision.models import detection

import ogc

pytestmark = pytest.mark.full

OTHERS = [(3, 0), (1, 1), (0, 2), (7, 3)]


def planned(model, given):
    torch.manual_seed(0)
    optimised = train_beside_plain(model().train(), given, OTHERS)
    assert isinstance(optimised.plan, ogc.PartsPlan) or not optimised.plan.is_plain


# -- torchvision -------------------------------------------------------------------------------------------

OURS = {"weights": None, "weights_backbone": None, "num_classes": 3}
SMALL = {**OURS, "min_size": 64, "max_size": 96}
TORCHVISION = {
    **{
        name: lambda name=name: getattr(detection, name)(**SMALL)
        for name in (
            "fasterrcnn_resnet50_fpn", "fasterrcnn_resnet50_fpn_v2", "fasterrcnn_mobilenet_v3_large_fpn",
            "fasterrcnn_mobilenet_v3_large_320_fpn", "fcos_resnet50_fpn", "retinanet_resnet50_fpn",
            "retinanet_resnet50_fpn_v2", "maskrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn_v2",
        )
    },
    "keypointrcnn_resnet50_fpn": lambda: detection.keypointrcnn_resnet50_fpn(**SMALL | {"num_classes": 2}),
    "ssd300_vgg16": lambda: detection.ssd300_vgg16(**OURS),
    "ssdlite320_mobilenet_v3_large": lambda: detection.ssdlite320_mobilenet_v3_large(**OURS),
}  # fmt: skip


def found(hits, seed):
    """Two images, and what is seen on each."""
    g = torch.Generator().manual_seed(seed)
    images, targets = [torch.rand(3, 64, 64, generator=g) for _ in range(2)], []
    for _ in images:
        corners, sizes = (torch.rand(hits, 2, generator=g) * 30 for _ in range(2))
        points = corners[:, None] + (sizes[:, None] + 5) * torch.rand(hits, 17, 2, generator=g)
        targets.append(
            {
                "boxes": torch.cat([corners, corners + sizes + 5], 1),
                "labels": torch.ones(hits, dtype=torch.long),
                "masks": torch.randint(0, 2, (hits, 64, 64), generator=g, dtype=torch.uint8),
                "keypoints": torch.cat([points, torch.ones(hits, 17, 1)], 2),
            }
        )
    return images, targets


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torchvision's own
@pytest.mark.parametrize("name", TORCHVISION)
def test_detectors_of_torchvision(name):
    planned(TORCHVISION[name], found)


# -- transformers ------------------------------------------------------------------------------------------


def boxes(hits, seed):
    g = torch.Generator().manual_seed(seed)
    labels = []
    for _ in range(2):
        centers, sizes = (torch.rand(hits, 2, generator=g) for _ in range(2))
        known = {"boxes": torch.cat([centers / 2 + 0.25, sizes * 0.3 + 0.1], 1)}
        labels.append({**known, "class_labels": torch.randint(0, 3, (hits,), generator=g)})
    return {"pixel_values": torch.randn(2, 3, 64, 64, generator=g), "labels": labels}


def masks(hits, seed):
    known = boxes(hits, seed)
    shapes = [(torch.arange(64 * 64) % (n + 2) == 0).view(1, 64, 64).expand(hits, -1, -1).float() for n in range(2)]
    return {
        "pixel_values": known["pixel_values"],
        "mask_labels": shapes,
        "class_labels": [one["class_labels"] for one in known["labels"]],
    }


def boxes_and_masks(hits, seed):
    known = boxes(hits, seed)
    for one, shapes in zip(known["labels"], masks(hits, seed)["mask_labels"], strict=True):
        one["masks"] = shapes
    return known


def pixels(hits, seed):
    """Images of which few pixels have a label."""
    labels = torch.full((2, 64 * 64), 255)
    labels[:, : 9 * hits] = torch.randint(0, 3, (2, 9 * hits), generator=torch.Generator().manual_seed(seed))
    return {"pixel_values": boxes(1, seed)["pixel_values"], "labels": labels.view(2, 64, 64)}


def tokens(hits, seed):
    g = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(0, 50, (2, 24), generator=g), torch.full((2, 24), -100)
    labels[:, :hits] = torch.randint(0, 3, (2, hits), generator=g)
    return {"input_ids": ids, "labels": labels}


def detr(t, kind, features=("stage4",), **options):
    backbone = t.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[1] * 4, layer_type="basic", out_features=list(features)
    )
    own = {"use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False, "backbone_config": backbone}
    config = getattr(t, f"{kind.partition('For')[0]}Config")(**own, **DECODER, num_labels=3, **options)
    return getattr(t, kind)(config)


DECODER = {
    "d_model": 32, "num_queries": 8, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 8,
    "decoder_attention_heads": 8, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
}  # fmt: skip
VIT = {
    "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 16, "image_size": 64,
    "patch_size": 16, "num_labels": 3,
}  # fmt: skip
STAGES = [f"stage{n}" for n in (1, 2, 3, 4)]


def swin(t):
    return t.SwinConfig(
        embed_dim=8, depths=[1] * 4, num_heads=[1, 1, 2, 2], window_size=2, image_size=64, out_features=STAGES
    )


def maskformer(t):
    decoder = t.DetrConfig(**DECODER)
    own = {"backbone_config": swin(t), "decoder_config": decoder, "fpn_feature_size": 32, "mask_feature_size": 32}
    return t.MaskFormerForInstanceSegmentation(t.MaskFormerConfig(**own, num_labels=3))


def mask2former(t):
    sizes = dict.fromkeys(("feature_size", "mask_feature_size", "hidden_dim", "encoder_feedforward_dim"), 32)
    layers = {"dim_feedforward": 16, "encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2}
    config = t.Mask2FormerConfig(
        backbone_config=swin(t), **sizes, **layers, num_queries=8, train_num_points=32, num_labels=3
    )
    return t.Mask2FormerForUniversalSegmentation(config)


def rt_detr(t):
    backbone = t.RTDetrResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1] * 4, layer_type="basic", out_features=STAGES[1:]
    )
    config = t.RTDetrConfig(
        backbone_config=backbone, encoder_hidden_dim=16, encoder_in_channels=[8, 16, 16], encoder_layers=1,
        encoder_ffn_dim=16, encoder_attention_heads=2, d_model=16, num_queries=8, decoder_in_channels=[16] * 3,
        decoder_ffn_dim=16, decoder_n_points=2, decoder_layers=2, decoder_attention_heads=2, num_denoising=4,
        num_labels=3,
    )  # fmt: skip
    return t.RTDetrForObjectDetection(config)


def segformer(t):
    sizes = {"hidden_sizes": [8, 8, 16, 16], "depths": [1] * 4, "num_attention_heads": [1, 1, 2, 2]}
    return t.SegformerForSemanticSegmentation(t.SegformerConfig(**sizes, decoder_hidden_size=16, num_labels=3))


def dpt(t):
    sizes = {"neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 16, "backbone_out_indices": [0, 1, 2, 3]}
    return t.DPTForSemanticSegmentation(t.DPTConfig(**VIT, **sizes))


def experts(t):
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    return t.MixtralForCausalLM(t.MixtralConfig(**sizes, **heads, output_router_logits=True, use_cache=False))


def token_classes(t):
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 3, "intermediate_size": 16}
    return t.BertForTokenClassification(t.BertConfig(**sizes, num_attention_heads=2, num_labels=3))


TRANSFORMERS = {
    "DETR": (lambda t: detr(t, "DetrForObjectDetection"), boxes),
    "DETR with masks": (lambda t: detr(t, "DetrForSegmentation", STAGES), boxes_and_masks),
    "conditional DETR": (lambda t: detr(t, "ConditionalDetrForObjectDetection"), boxes),
    "deformable DETR": (
        lambda t: detr(t, "DeformableDetrForObjectDetection", STAGES[1:], num_feature_levels=3),
        boxes,
    ),
    "table transformer": (lambda t: detr(t, "TableTransformerForObjectDetection"), boxes),
    "RT-DETR": (rt_detr, boxes),
    "YOLOS": (
        lambda t: t.YolosForObjectDetection(t.YolosConfig(**VIT | {"image_size": [64, 64]}, num_detection_tokens=8)),
        boxes,
    ),
    "MaskFormer": (maskformer, masks),
    "Mask2Former": (mask2former, masks),
    "SegFormer": (segformer, pixels),
    "BEiT": (lambda t: t.BeitForSemanticSegmentation(t.BeitConfig(**VIT, out_indices=[1, 2, 3, 4])), pixels),
    "DPT": (dpt, pixels),
    "experts": (experts, tokens),
    "classes of tokens": (token_classes, tokens),
}
LONG = {"RT-DETR", "Mask2Former", "MaskFormer", "conditional DETR", "DETR with masks", "table transformer"}


@pytest.mark.integrations
@pytest.mark.filterwarnings("ignore")  # the library's own
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LONG)) for n in TRANSFORMERS])
def test_networks_of_transformers(name):
    transformers = pytest.importorskip("transformers", reason="the networks' home")
    transformers.logging.set_verbosity_error()
    make, given = TRANSFORMERS[name]
    planned(lambda: make(transformers), given)
