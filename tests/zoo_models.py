"""Published architectures with small inputs, built from their configurations: nothing is downloaded.

A family is a table from a name to a function that returns the model and the keyword or positional arguments
of a training call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

Build = Callable[[], tuple[torch.nn.Module, Any]]

BATCH = 4
SIZE = 96


def family(name: str) -> dict[str, Build]:
    """The architectures of ``torchvision``, ``timm`` or ``transformers``, in the order to try them."""
    return {"torchvision": _torchvision, "timm": _timm, "transformers": _transformers}[name]()


def part_of(name: str) -> str:
    """The submodule to optimise of a model whose own forward depends on its data; "" for the whole model."""
    return str(_of_prefix(_PARTS, name, ""))


_DETECTORS = ("fasterrcnn", "fcos", "keypointrcnn", "maskrcnn", "retinanet", "ssd")
_PARTS = {
    **dict.fromkeys(_DETECTORS, "backbone"),
    "deberta_v2": "deberta",
    "wav2vec2": "wav2vec2",
    "wav2vec2, layerdrop": "wav2vec2.feature_extractor",
}


# -- torchvision ----------------------------------------------------------------------------------------

_IMAGE_ARGUMENTS: dict[str, dict[str, Any]] = {
    **{f"vit_{size}_16": {"image_size": SIZE} for size in "bl"},
    "vit_h": {"image_size": 98},
}
_IMAGES = {  # number and size, where it takes more for activations to outweigh the gradient of the largest weight
    "alexnet": (256, 224),
    "inception": (BATCH, 299),
    "quantized_inception": (BATCH, 299),
    "maxvit": (BATCH, 224),
    "regnet_y_128gf": (BATCH, 128),
    "vgg": (8, 224),
    "vgg11": (12, 224),
    "vgg13": (10, 224),
    "vit_b_32": (BATCH, 224),
    "vit_h": (BATCH, 98),
    "vit_l_32": (BATCH, 224),
}
_VIDEO_SHAPES = {"s3d": (2, 3, 16, 224, 224), "mvit": (1, 3, 16, 224, 224)}
_DETECTION_BATCH = 2
_DETECTION_ARGUMENTS: dict[str, dict[str, int]] = {"": {"min_size": 320, "max_size": 400}, "ssd": {}}


def _torchvision() -> dict[str, Build]:
    from torchvision import models

    def of(module: Any) -> list[str]:
        return models.list_models(module)

    found: dict[str, Build] = {}
    found |= {name: partial(_classifier, name) for name in of(models)}
    found |= {name: partial(_classifier, name) for name in of(models.quantization)}  # to be quantized, not yet so
    found |= {name: partial(_segmentation, name) for name in of(models.segmentation)}
    found |= {name: partial(_video, name) for name in of(models.video)}
    found |= {name: partial(_flow, name) for name in of(models.optical_flow)}
    found |= {name: partial(_detection, name) for name in of(models.detection)}
    return found


def _of_prefix(table: dict[str, Any], name: str, default: Any) -> Any:
    fitting = [prefix for prefix in table if name.startswith(prefix)]
    return table[max(fitting, key=len)] if fitting else default


def _torchvision_model(name: str, **keywords: Any) -> torch.nn.Module:
    from torchvision import models

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # slow initialisation of inception_v3
        return models.get_model(name, weights=None, **keywords)


def _classifier(name: str) -> tuple[torch.nn.Module, Any]:
    batch, size = _of_prefix(_IMAGES, name, (BATCH, SIZE))
    return _torchvision_model(name, **_of_prefix(_IMAGE_ARGUMENTS, name, {})), (torch.randn(batch, 3, size, size),)


def _segmentation(name: str) -> tuple[torch.nn.Module, Any]:
    model = _torchvision_model(name, weights_backbone=None, aux_loss=True if "lraspp" not in name else None)
    return model, (torch.randn(BATCH, 3, SIZE, SIZE),)


def _video(name: str) -> tuple[torch.nn.Module, Any]:
    return _torchvision_model(name), (torch.randn(_of_prefix(_VIDEO_SHAPES, name, (2, 3, 8, 64, 64))),)


def _flow(name: str) -> tuple[torch.nn.Module, Any]:
    images = torch.randn(2, 1, 3, 128, 128)
    return _torchvision_model(name), {"image1": images[0], "image2": images[1], "num_flow_updates": 4}


def _detection(name: str) -> tuple[torch.nn.Module, Any]:
    model = _torchvision_model(name, weights_backbone=None, **_of_prefix(_DETECTION_ARGUMENTS, name, {}))
    images = [torch.rand(3, SIZE, SIZE) for _ in range(_DETECTION_BATCH)]
    targets = [
        {
            "boxes": torch.tensor([[10.0, 12.0, 80.0, 90.0], [30.0, 20.0, 70.0, 60.0]]),
            "labels": torch.tensor([1, 1]),
            "masks": torch.ones(2, SIZE, SIZE, dtype=torch.uint8),
            "keypoints": torch.full((2, 17, 3), 40.0),
        }
        for _ in images
    ]
    return model, (images, targets)


# -- timm -----------------------------------------------------------------------------------------------

_TIMM: dict[str, dict[str, Any]] = {
    "beit_base_patch16_224": {"img_size": 112},
    "cait_xxs24_224": {"img_size": 112},
    "coatnet_0_rw_224": {"img_size": 224},
    "convmixer_768_32": {},
    "convnext_atto": {},
    "crossvit_tiny_240": {"img_size": 240},
    "cspresnet50": {},
    "davit_tiny": {},
    "deit3_small_patch16_224": {"img_size": 112},
    "dla34": {},
    "dm_nfnet_f0": {},
    "dpn68": {},
    "edgenext_xx_small": {},
    "efficientformer_l1": {"img_size": 224},
    "efficientnet_b0": {},
    "efficientvit_b0": {},
    "eva02_tiny_patch14_224": {"img_size": 112},
    "fastvit_t8": {},
    "focalnet_tiny_srf": {},
    "gcvit_xxtiny": {"img_size": 224},
    "ghostnet_100": {},
    "hardcorenas_a": {},
    "hiera_tiny_224": {"img_size": 224},
    "hrnet_w18_small": {},
    "inception_next_tiny": {},
    "inception_v4": {},
    "lambda_resnet26t": {"img_size": 128},
    "levit_128s": {"img_size": 224},
    "mambaout_femto": {},
    "maxvit_rmlp_pico_rw_256": {"img_size": 128},
    "mixer_s32_224": {"img_size": 224},
    "mobilenetv3_small_100": {},
    "mobilenetv4_conv_small": {},
    "mobilevit_xxs": {},
    "nf_resnet50": {},
    "pit_ti_224": {"img_size": 224},
    "poolformer_s12": {},
    "pvt_v2_b0": {},
    "regnety_002": {},
    "repvgg_a0": {},
    "res2net50_26w_4s": {},
    "resnest14d": {},
    "resnetv2_50": {},
    "rexnet_100": {},
    "sequencer2d_s": {"img_size": 112},
    "skresnet18": {},
    "swinv2_cr_tiny_224": {"img_size": 224},
    "swin_tiny_patch4_window7_224": {"img_size": 224},
    "tf_mixnet_s": {},
    "tiny_vit_5m_224": {"img_size": 224},
    "tnt_s_patch16_224": {"img_size": 224},
    "twins_svt_small": {"img_size": 224},
    "vit_tiny_patch16_224": {"img_size": 112},
    "volo_d1_224": {"img_size": 224},
    "vovnet39a": {},
    "xception41": {},
    "xcit_nano_12_p16_224": {"img_size": 112},
}


def _timm() -> dict[str, Build]:
    return {name: partial(_timm_model, name, keywords) for name, keywords in _TIMM.items()}


def _timm_model(name: str, keywords: dict[str, Any]) -> tuple[torch.nn.Module, Any]:
    import timm

    model = timm.create_model(name, pretrained=False, drop_rate=0.1, **_accepted(name, keywords))
    size = keywords.get("img_size", SIZE)
    return model, (torch.randn(BATCH, 3, size, size),)


def _accepted(name: str, keywords: dict[str, Any]) -> dict[str, Any]:
    """Without the image size where it is the model's own."""
    return {} if keywords.get("img_size") in (224, 240) else keywords


# -- transformers ---------------------------------------------------------------------------------------

_LENGTH = 64
_VOCABULARY = 199
_SHORT = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": _VOCABULARY}
_TEXT = {**_SHORT, "intermediate_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GROUPED = {**_TEXT, "num_key_value_heads": 2}
_VISION = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
_DECODER = {"vocab_size": _VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "d_model": 64}
_PAIR = {
    **_DECODER,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "decoder_start_token_id": 1,
}


def _tokens(length: int = _LENGTH) -> torch.Tensor:
    return torch.randint(3, _VOCABULARY, (BATCH, length))


def _masked_tokens() -> dict[str, torch.Tensor]:
    """Token ids and a mask whose last row is padded."""
    mask = torch.ones(BATCH, _LENGTH, dtype=torch.long)
    mask[-1, _LENGTH // 2 :] = 0
    return {"input_ids": _tokens(), "attention_mask": mask}


def _language(**more: Any) -> dict[str, Any]:
    return {**_masked_tokens(), "labels": _tokens(), **more}


def _pair(**more: Any) -> dict[str, Any]:
    return {**_masked_tokens(), "labels": _tokens(_LENGTH // 2), **more}


def _classes(**more: Any) -> dict[str, Any]:
    return {**_masked_tokens(), "labels": torch.arange(BATCH) % 2, **more}


def _pixels(size: int = 64, **more: Any) -> dict[str, Any]:
    return {"pixel_values": torch.randn(BATCH, 3, size, size), **more}


def _image_classes(size: int = 64) -> dict[str, Any]:
    return _pixels(size, labels=torch.arange(BATCH) % 2)


def _sound(**more: Any) -> dict[str, Any]:
    return {"input_values": torch.randn(BATCH, 4000), "labels": torch.randint(1, 30, (BATCH, 4)), **more}


_SPEECH = {
    **_VISION,
    "vocab_size": 32,
    "conv_dim": (32, 32, 32),
    "conv_stride": (5, 4, 2),
    "conv_kernel": (10, 4, 2),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
_CLIP = {
    "text_config": {**_TEXT, "max_position_embeddings": _LENGTH},
    "vision_config": {**_VISION, "image_size": 64, "patch_size": 16},
    "projection_dim": 32,
}
_STAGES = {"depths": [2, 2, 2, 2], "num_labels": 2}

_TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "albert": ("Albert", "ForMaskedLM", {**_TEXT, "embedding_size": 32}, _language),
    "bart": ("Bart", "ForConditionalGeneration", {**_PAIR}, partial(_pair, use_cache=False)),
    "bart, cache": ("Bart", "ForConditionalGeneration", {**_PAIR}, partial(_pair, use_cache=True)),
    "beit": ("Beit", "ForImageClassification", {**_VISION, "image_size": 224}, partial(_image_classes, 224)),
    "bert": ("Bert", "ForMaskedLM", _TEXT, _language),
    "bert, eager attention": ("Bert", "ForMaskedLM", {**_TEXT, "attn_implementation": "eager"}, _language),
    "bert, hidden states": ("Bert", "ForMaskedLM", _TEXT, partial(_language, output_hidden_states=True)),
    "bloom": ("Bloom", "ForCausalLM", {**_TEXT, "n_layer": 4, "n_head": 4}, partial(_language, use_cache=False)),
    "clip": ("CLIP", "Model", _CLIP, lambda: {**_masked_tokens(), **_pixels(), "return_loss": True}),
    "convnext": ("ConvNext", "ForImageClassification", {"hidden_sizes": [16, 32, 64, 96], **_STAGES}, _image_classes),
    "deberta_v2": ("DebertaV2", "ForSequenceClassification", {**_TEXT, "relative_attention": True}, _classes),
    "distilbert": (
        "DistilBert",
        "ForSequenceClassification",
        {"vocab_size": _VOCABULARY, "dim": 64, "n_layers": 4, "n_heads": 4, "hidden_dim": 128, "pad_token_id": 0},
        _classes,
    ),
    "electra": ("Electra", "ForMaskedLM", {**_TEXT, "embedding_size": 32}, _language),
    "falcon": ("Falcon", "ForCausalLM", _TEXT, partial(_language, use_cache=False)),
    "fnet": ("FNet", "ForMaskedLM", _TEXT, lambda: {"input_ids": _tokens(), "labels": _tokens()}),
    "funnel": (
        "Funnel",
        "ForMaskedLM",
        {"vocab_size": _VOCABULARY, "block_sizes": [2, 2], "d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 128},
        _language,
    ),
    "gemma2": ("Gemma2", "ForCausalLM", {**_GROUPED, "head_dim": 16}, partial(_language, use_cache=False)),
    "gpt2": (
        "GPT2",
        "LMHeadModel",
        {"vocab_size": _VOCABULARY, "n_embd": 64, "n_layer": 4, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
        partial(_language, use_cache=False),
    ),
    "gpt2, cache": (
        "GPT2",
        "LMHeadModel",
        {"vocab_size": _VOCABULARY, "n_embd": 64, "n_layer": 4, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
        partial(_language, use_cache=True),
    ),
    "gpt_neox": ("GPTNeoX", "ForCausalLM", _TEXT, partial(_language, use_cache=False)),
    "llama": ("Llama", "ForCausalLM", _GROUPED, partial(_language, use_cache=False)),
    "llama, cache": ("Llama", "ForCausalLM", _GROUPED, partial(_language, use_cache=True)),
    "llama, eager attention": (
        "Llama",
        "ForCausalLM",
        {**_GROUPED, "attn_implementation": "eager"},
        partial(_language, use_cache=False),
    ),
    "llama, tuple": ("Llama", "ForCausalLM", _GROUPED, partial(_language, use_cache=False, return_dict=False)),
    "longformer": ("Longformer", "ForMaskedLM", {**_TEXT, "attention_window": 16}, _language),
    "mamba": ("Mamba", "ForCausalLM", {**_SHORT, "state_size": 8, "pad_token_id": 0}, partial(_language)),
    "mistral": ("Mistral", "ForCausalLM", {**_GROUPED, "sliding_window": 16}, partial(_language, use_cache=False)),
    "mixtral": (
        "Mixtral",
        "ForCausalLM",
        {**_GROUPED, "num_local_experts": 4},
        partial(_language, use_cache=False),
    ),
    "mobilebert": (
        "MobileBert",
        "ForMaskedLM",
        {**_TEXT, "embedding_size": 32, "intra_bottleneck_size": 64, "true_hidden_size": 64},
        _language,
    ),
    "mpnet": ("MPNet", "ForMaskedLM", _TEXT, _language),
    "opt": (
        "OPT",
        "ForCausalLM",
        {**_TEXT, "ffn_dim": 128, "word_embed_proj_dim": 64},
        partial(_language, use_cache=False),
    ),
    "phi": ("Phi", "ForCausalLM", _TEXT, partial(_language, use_cache=False)),
    "qwen2": ("Qwen2", "ForCausalLM", _GROUPED, partial(_language, use_cache=False)),
    "resnet": (
        "ResNet",
        "ForImageClassification",
        {"embedding_size": 16, "hidden_sizes": [32, 64, 96, 128], **_STAGES},
        _image_classes,
    ),
    "roberta": ("Roberta", "ForSequenceClassification", _TEXT, _classes),
    "segformer": (
        "Segformer",
        "ForSemanticSegmentation",
        {"hidden_sizes": [16, 32, 48, 64], "num_labels": 5, "decoder_hidden_size": 32},
        lambda: _pixels(labels=torch.randint(0, 5, (BATCH, 64, 64))),
    ),
    "swin": (
        "Swin",
        "ForImageClassification",
        {"image_size": 64, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
        _image_classes,
    ),
    "t5": (
        "T5",
        "ForConditionalGeneration",
        {
            **_DECODER,
            "d_kv": 16,
            "d_ff": 128,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        partial(_pair, use_cache=False),
    ),
    "vit": ("ViT", "ForImageClassification", {**_VISION, "image_size": 224}, partial(_image_classes, 224)),
    "wav2vec2": ("Wav2Vec2", "ForCTC", {**_SPEECH, "mask_time_prob": 0.0, "layerdrop": 0.0}, _sound),
    "wav2vec2, layerdrop and masks": ("Wav2Vec2", "ForCTC", _SPEECH, _sound),
    "whisper": (
        "Whisper",
        "ForConditionalGeneration",
        {**_PAIR, "num_mel_bins": 16, "max_source_positions": 64, "max_target_positions": 64},
        lambda: {"input_features": torch.randn(BATCH, 16, 128), "labels": _tokens(16), "use_cache": False},
    ),
    "xlnet": (
        "XLNet",
        "LMHeadModel",
        {"vocab_size": _VOCABULARY, "d_model": 64, "n_layer": 4, "n_head": 4, "d_inner": 128},
        partial(_language, use_mems=False),
    ),
}


def _transformers() -> dict[str, Build]:
    return {name: partial(_transformer, *entry) for name, entry in _TRANSFORMERS.items()}


def _transformer(
    prefix: str, suffix: str, settings: dict[str, Any], call: Callable[[], dict[str, Any]]
) -> tuple[torch.nn.Module, Any]:
    import transformers

    settings = dict(settings)
    attention = settings.pop("attn_implementation", None)
    config = getattr(transformers, f"{prefix}Config")(**settings)
    model_class = getattr(transformers, prefix + suffix)
    model = model_class._from_config(config, **({"attn_implementation": attention} if attention else {}))
    return model, call()
