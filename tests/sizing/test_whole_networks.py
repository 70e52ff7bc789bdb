"""Whole steps of ten networks by the allocator, with six optimizers, plain and planned, wherever gradients are."""

from functools import partial

import pytest
import torch
import torchvision
from test_whole_steps import assert_as_allocated
from torch.nn import functional as F

timm = pytest.importorskip("timm", reason="some of the networks' home")
transformers = pytest.importorskip("transformers", reason="some of the networks' home")


def vision(make, number=4, size=64):
    def case():
        return make(num_classes=10), torch.randn(number, 3, size, size), lambda y: F.cross_entropy(y, labels)

    labels = torch.arange(number) % 10
    return case


def language(make, config, **options):
    def case():
        ids = torch.randint(0, 100, (2, 32))
        return make(config(**options)), {"input_ids": ids, "labels": ids}, lambda output: output.loss

    return case


SMALL = {"vocab_size": 1000, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
LLAMA = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}
NETWORKS = {
    "ResNet-18": vision(torchvision.models.resnet18),
    "MobileNet-V3": vision(torchvision.models.mobilenet_v3_small, 8),
    "SqueezeNet": vision(torchvision.models.squeezenet1_1, 8),
    "ShuffleNet": vision(torchvision.models.shufflenet_v2_x0_5, 8),
    "ConvNeXt": vision(partial(timm.create_model, "convnext_atto")),
    "ViT": vision(partial(timm.create_model, "vit_tiny_patch16_224", img_size=64)),
    "RegNet": vision(partial(timm.create_model, "regnety_002"), 8),
    "GPT-2": language(
        transformers.GPT2LMHeadModel, transformers.GPT2Config, n_positions=64, n_embd=64, n_layer=3, n_head=4, **SMALL
    ),
    "Llama": language(transformers.LlamaForCausalLM, transformers.LlamaConfig, num_key_value_heads=2, **LLAMA, **SMALL),
    "T5": language(
        transformers.T5ForConditionalGeneration,
        transformers.T5Config,
        **{"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
        **SMALL,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("gradients", ["none", "kept", "freed"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_of_a_network_takes_what_the_allocator_says(name, gradients):
    assert_as_allocated(NETWORKS[name], gradients)
