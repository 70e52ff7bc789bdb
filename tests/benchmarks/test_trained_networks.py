"""The architectures beside the published table: their sizes, what is in them, and that they train bit by bit."""

import pytest
import torch
from helpers import assert_same_training
from torch import nn

import ogc
from benchmarks.networks import ARCHITECTURES, PUBLISHED, Tokens
from benchmarks.networks.densenet_cifar import densenet_cifar
from benchmarks.networks.stacks import Additions, linear_relu
from benchmarks.networks.transformers import Bert, Gpt2
from benchmarks.networks.unet import UNet

# torchvision's own counts (GoogLeNet's without auxiliary classifiers), those of the published BERT-base with pooler,
# GPT-2 small and DenseNet-BC (100, 12), and of U-Net with padding, batch norm, three channels and two classes.
PARAMETERS = {
    "unet": 31_037_698,
    "googlenet": 6_624_904,
    "mobilenet_v3_large": 5_483_032,
    "convnext_tiny": 28_589_128,
    "swin_t": 28_288_354,
    "vit_b_16": 86_567_656,
    "bert_base": 109_482_240,
    "gpt2_small": 124_439_808,
    "linear_relu_100": 100 * (1024 + 1) * 1024,
    "densenet_cifar": 769_162,
    "additions_100000": 1,
}

# In small, or whole where that is quick, with an input that fits.
SMALL = {
    "unet": lambda: (UNet(4), torch.randn(2, 3, 32, 32)),
    "bert": lambda: (Bert(50, 16, 32, 4, depth=3), torch.randint(50, (2, 8))),
    "gpt2": lambda: (Gpt2(50, 16, 32, 4, depth=3), torch.randint(50, (2, 8))),
    "linear_relu": lambda: (linear_relu(10, 16), torch.randn(32, 16)),
    "densenet_cifar": lambda: (densenet_cifar(22), torch.randn(4, 3, 32, 32)),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts(name):
    parameters = ARCHITECTURES[name].build().named_parameters()
    assert sum(p.numel() for key, p in parameters if not key.startswith("aux")) == PARAMETERS[name]


def test_every_architecture_has_a_count_or_is_published():
    assert ARCHITECTURES.keys() == PARAMETERS.keys() | PUBLISHED.keys()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_blocks_and_stages_are_there(name):
    architecture = ARCHITECTURES[name]
    with torch.device("meta"):
        model = architecture.build()
    if architecture.stages:
        assert any(isinstance(child, nn.MaxPool2d) for child in model.get_submodule(architecture.stages))
    elif architecture.block:
        assert len(architecture.blocks(model)) >= 3
    else:
        assert name == "additions_100000"


@pytest.mark.parametrize("name", SMALL)
def test_small_ones_train_bitwise(name):
    model, x = SMALL[name]()
    optimised = ogc.optimize(model, x, profile="estimate")
    assert not optimised.plan.is_plain
    assert_same_training(model, optimised, (x,), steps=2)


def test_additions_keep_nothing():
    model, x = Additions(calls=3), torch.randn(2, 1)
    graph = ogc.parse(model, x)
    assert len(graph) == 300
    assert ogc.solve(graph).is_plain


def test_bert_reads_both_ways_and_gpt_only_back():
    tokens = torch.randint(50, (1, 8))
    other = tokens.clone()
    other[0, -1] = (other[0, -1] + 1) % 50
    for kind, changes in ((Bert, True), (Gpt2, False)):
        model = kind(50, 16, 32, 4, depth=2).eval()
        results = [model(t) for t in (tokens, other)]
        first = [(r[0] if isinstance(r, tuple) else r)[0, 0] for r in results]
        assert torch.equal(*first) is not changes


def test_densenet_cifar_keeps_the_size_up_to_its_first_transition():
    model = densenet_cifar(22)
    x = torch.randn(1, 3, 32, 32)
    assert model.features.denseblock1(model.features.conv0(x)).shape == (1, 24 + 3 * 12, 32, 32)
    assert model(x).shape == (1, 10)


def test_a_sequence_gives_what_the_model_gives():
    for name, (model, x) in {
        "bert_base": SMALL["bert"](),
        "gpt2_small": SMALL["gpt2"](),
        "densenet_cifar": SMALL["densenet_cifar"](),
        "linear_relu_100": SMALL["linear_relu"](),
        "additions_100000": (Additions(calls=2), torch.randn(2, 1)),
    }.items():
        _assert_sequence(name, model.eval(), x)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, known in ARCHITECTURES.items() if not isinstance(known.sequence, str)])
def test_whole_sequences_give_what_the_models_give(name):
    architecture = ARCHITECTURES[name]
    size = 32 if isinstance(architecture.input, Tokens) else None
    _assert_sequence(name, architecture.build().eval(), architecture.input.sample(2, size))


@torch.no_grad()
def _assert_sequence(name, model, x):
    value = x
    for layer in ARCHITECTURES[name].sequence(model):
        value = layer(value)
    found, expected = (r if isinstance(r, tuple) else (r,) for r in (value, model(x)))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PARAMETERS if name != "additions_100000"])
def test_whole_ones_train_bitwise(name):
    architecture = ARCHITECTURES[name]
    size = 256 if isinstance(architecture.input, Tokens) else None  # of fewer, the embedding's gradient is the peak
    if name in ("unet", "googlenet", "mobilenet_v3_large", "convnext_tiny", "swin_t"):
        size = 64
    model, x = architecture.build(), architecture.input.sample(2, size)
    optimised = ogc.optimize(model, x, profile="estimate")
    assert not optimised.plan.is_plain
    assert_same_training(model, optimised, (x,), steps=2)
