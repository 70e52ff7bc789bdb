"""The networks that are measured: how to build each, what it reads, and what its blocks are."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ogc import InputError
from ogc.graph import table

from .measuring import Inputs, Run
from .networks import others as own
from .networks.search_space import NETWORKS
from .networks.transformers import Bert, Gpt2


@dataclass(frozen=True)
class Published:
    """A row of the paper's table: sizes in MiB, overhead as a share of the plain step."""

    batch_size: int
    image_size: int
    plain: int
    theirs: int
    overhead: float


# -- what they read -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Images:
    """Square images, RGB by default: N, channels, size, size."""

    size: int
    channels: int = 3

    def sample(self, batch_size: int, size: int | None = None) -> Inputs:
        return torch.randn(batch_size, self.channels, *[size or self.size] * 2)

    def __str__(self) -> str:
        return f"{self.channels}×{self.size}×{self.size} images"


@dataclass(frozen=True)
class Tokens:
    """Token numbers below ``vocabulary``: N, size. With labels, a model of transformers' own arguments."""

    size: int
    vocabulary: int
    has_labels: bool = False

    def sample(self, batch_size: int, size: int | None = None) -> Inputs:
        words = torch.randint(self.vocabulary, (batch_size, size or self.size))
        return {"input_ids": words, "labels": words} if self.has_labels else words

    def __str__(self) -> str:
        return f"{self.size} tokens of {self.vocabulary}"


@dataclass(frozen=True)
class Numbers:
    """Samples of a shape that is the model's own: N, shape; of several arguments alike, T, N, shape."""

    shape: tuple[int, ...]
    arguments: int = 1

    def sample(self, batch_size: int, size: int | None = None) -> Inputs:
        """A batch.

        Raises:
            InputError: another size is asked for than the model's weights have.
        """
        if size not in (None, self.shape[0]):
            raise InputError(f"the model reads {self}, not of {size}")
        if self.arguments == 1:
            return torch.randn(batch_size, *self.shape)
        first, *others = self.shape
        return tuple(torch.rand(first, batch_size, *others) for _ in range(self.arguments))

    def __str__(self) -> str:
        return f"numbers of shape {'×'.join(map(str, self.shape))}"


@dataclass(frozen=True)
class Case:
    """A network.

    Attributes:
        description: one line.
        build: makes it, in training mode, with random weights.
        input: what it reads.
        batch_size: published, or else usual.
        block: a regular expression for the names of the submodules that people checkpoint by hand.
        sequence: the model as a list of functions of each other's results, or why there is none.
        stages: where blocks are no submodules: the Sequential whose children, up to each max pool, make one.
        published: its row of the published table, if it has one.
        package: what has to be installed for it.
    """

    description: str
    build: Callable[[], nn.Module]
    input: Images | Tokens | Numbers
    batch_size: int
    block: str
    sequence: Callable[[Any], Sequence[Run]] | str = "it is not known as a sequence"
    stages: str = ""
    published: Published | None = None
    package: str = "torchvision"

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The submodules that are checkpointed where every block is; empty for ``stages``."""
        return [module for name, module in model.named_modules() if self.block and re.fullmatch(self.block, name)]

    def sample(self, batch_size: int, size: int | None, device: torch.device) -> Inputs:
        """A batch on the device."""
        return torch.utils._pytree.tree_map(lambda tensor: tensor.to(device), self.input.sample(batch_size, size))


# -- the models as sequences --------------------------------------------------------------------------------------


def _flat_features(model: Any) -> list[Run]:
    return [*model.features, model.avgpool, nn.Flatten(), *model.classifier]


def _resnet(model: Any) -> list[Run]:
    stem = [model.conv1, model.bn1, model.relu, model.maxpool]
    blocks = [block for layer in (model.layer1, model.layer2, model.layer3, model.layer4) for block in layer]
    return [*stem, *blocks, model.avgpool, nn.Flatten(), model.fc]


def _densenet(model: Any) -> list[Run]:
    return [*model.features, nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), model.classifier]


def _cells(model: Any) -> list[Run]:
    """Each function hands on the outputs of the last two cells."""

    def step(cell: Callable[..., Any], pair: Any) -> Any:
        return pair[1], cell(*pair)

    def last(pair: Any) -> Any:
        return model.classifier(model.pool(pair[1]).flatten(1))

    return [lambda images: (model.stem(images),) * 2, *(partial(step, cell) for cell in model.cells), last]


def _unfolded(features: nn.Sequential) -> list[Run]:
    """Stages taken apart into their blocks."""
    return [layer for stage in features for layer in (stage if isinstance(stage, nn.Sequential) else [stage])]


def _swin(model: Any) -> list[Run]:
    return [*_unfolded(model.features), model.norm, model.permute, model.avgpool, model.flatten, model.head]


def _vit(model: Any) -> list[Run]:
    def embed(images: torch.Tensor) -> torch.Tensor:
        patches = model._process_input(images)
        tokens = torch.cat([model.class_token.expand(len(images), -1, -1), patches], dim=1)
        return model.encoder.dropout(tokens + model.encoder.pos_embedding)

    return [embed, *model.encoder.layers, model.encoder.ln, lambda x: x[:, 0], model.heads]


# -- builders -----------------------------------------------------------------------------------------------------


def torchvision_model(name: str) -> nn.Module:
    import torchvision

    keywords = {"init_weights": True} if name in ("inception_v3", "googlenet") else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torchvision.models.get_model(name, weights=None, **keywords)


def timm_model(name: str) -> nn.Module:
    import timm

    return timm.create_model(name, pretrained=False)


def llama(
    words: int, width: int, hidden: int, heads: int, groups: int, wraps: bool = True, depth: int = 8
) -> nn.Module:
    """A Llama of transformers, called with token numbers alone, or with its own arguments."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=words, hidden_size=width, intermediate_size=hidden, num_hidden_layers=depth,
        num_attention_heads=heads, num_key_value_heads=groups, max_position_embeddings=512, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    return own.Logits(model) if wraps else model


def with_labels(words: int) -> Case:
    """A Llama of width 256 with its own loss."""
    return Case(
        f"transformer decoder with a vocabulary of {words:,} words and labels",
        partial(llama, words, 256, 1024, 4, 4, wraps=False), Tokens(512, words, True), 2, r"model\.layers\.\d+",
        package="transformers",
    )  # fmt: skip


# -- the table ----------------------------------------------------------------------------------------------------


def _search_space(name: str) -> nn.Module:
    return NETWORKS[name]()


def _rows(description: str, rows: dict[str, Published], **fields: Any) -> dict[str, Case]:
    return {
        name: Case(
            description, partial(_search_space if name in NETWORKS else torchvision_model, name),
            Images(row.image_size), row.batch_size, published=row, **fields,
        )
        for name, row in rows.items()
    }  # fmt: skip


def _torchvision(name: str, description: str, block: str, batch_size: int = 64, **fields: Any) -> dict[str, Case]:
    return {name: Case(description, partial(torchvision_model, name), Images(224), batch_size, block, **fields)}


def _timm(name: str, description: str, block: str) -> dict[str, Case]:
    return {name: Case(description, partial(timm_model, name), Images(224), 64, block, package="timm")}


PUBLISHED: dict[str, Case] = {
    **_rows(
        "convolutions, pooling and three linear layers (Krizhevsky et al., 2012)",
        {"alexnet": Published(1024, 224, 4955, 3287, 0.34)},
        block="", stages="features", sequence=_flat_features,
    ),
    **_rows(
        "3×3 convolutions and pooling in a row (Simonyan & Zisserman, 2015)",
        {
            "vgg11": Published(64, 224, 3577, 2781, 0.34), "vgg13": Published(64, 224, 5136, 3565, 0.33),
            "vgg16": Published(64, 224, 5136, 3565, 0.32), "vgg19": Published(64, 224, 5189, 3565, 0.33),
        },
        block="", stages="features", sequence=_flat_features,
    ),
    **_rows(
        "residual blocks (He et al., 2016)",
        {
            "resnet18": Published(256, 224, 5635, 3677, 0.30), "resnet34": Published(128, 224, 4079, 1838, 0.35),
            "resnet50": Published(64, 224, 5323, 1973, 0.31), "resnet101": Published(32, 224, 3934, 1024, 0.35),
            "resnet152": Published(16, 224, 2767, 526, 0.37),
        },
        block=r"layer\d\.\d+", sequence=_resnet,
    ),
    **_rows(
        "every layer of a block reads all before it (Huang et al., 2017)",
        {
            "densenet121": Published(32, 224, 4027, 898, 0.34), "densenet161": Published(16, 224, 3751, 666, 0.36),
            "densenet169": Published(32, 224, 4862, 897, 0.32), "densenet201": Published(16, 224, 3146, 474, 0.53),
        },
        block=r"features\.denseblock\d+", sequence=_densenet,
    ),
    **_rows(
        "blocks of parallel branches (Szegedy et al., 2016)", {"inception_v3": Published(32, 300, 3074, 881, 0.29)},
        block=r"Mixed_\w+", sequence="the auxiliary classifier reads from the middle",
    ),
    **_rows(
        "twenty cells found by architecture search, for CIFAR-10",
        {
            "nasnet_cifar10": Published(64, 32, 5832, 1129, 0.31),
            "amoebanet_cifar10": Published(64, 32, 4944, 1058, 0.36),
            "darts_cifar10": Published(64, 32, 5627, 1115, 0.55),
        },
        block=r"cells\.\d+", sequence=_cells,
    ),
}  # fmt: skip
"""The eighteen of the published table."""

CASES: dict[str, Case] = {
    **PUBLISHED,
    "unet": Case(
        "down and up again with features read across, for segmentation (Ronneberger et al., 2015)",
        own.UNet, Images(224), 16, r"(down|up)\.\d+", "features are read across from the way down to the way up",
    ),
    **_torchvision(
        "googlenet", "blocks of parallel branches, two auxiliary classifiers (Szegedy et al., 2015)",
        r"inception\d\w", sequence="the auxiliary classifiers read from the middle",
    ),
    **_torchvision(
        "mobilenet_v3_large", "inverted residual blocks, depthwise convolutions (Howard et al., 2019)",
        r"features\.([1-9]|1[0-5])", sequence=_flat_features,
    ),
    **_torchvision(
        "convnext_tiny", "convolutions arranged as in a transformer (Liu et al., 2022)", r"features\.[1357]\.\d+", 32,
        sequence=lambda model: [*_unfolded(model.features), model.avgpool, model.classifier],
    ),
    **_torchvision(
        "swin_t", "attention within shifted windows (Liu et al., 2021)", r"features\.[1357]\.\d+", 32, sequence=_swin,
    ),
    **_torchvision(
        "vit_b_16", "a transformer on patches of 16×16 pixels (Dosovitskiy et al., 2021)",
        r"encoder\.layers\.encoder_layer_\d+", 32, sequence=_vit,
    ),
    "bert_base": Case(
        "transformer encoder: 12 layers, 768 wide, 12 heads (Devlin et al., 2019)",
        Bert, Tokens(512, 30522), 16, r"layers\.\d+", lambda model: [model.embed, *model.layers, model.pool],
    ),
    "gpt2_small": Case(
        "transformer decoder: 12 layers, 768 wide, 12 heads (Radford et al., 2019)",
        Gpt2, Tokens(1024, 50257), 8, r"layers\.\d+", lambda model: [model.embed, *model.layers, model.predict],
    ),
    "linear_relu_100": Case(
        "a hundred linear layers with ReLU in a row", own.linear_relu, Numbers((1024,)), 4096, r"\d+", list,
    ),
    "densenet_cifar": Case(
        "DenseNet-BC of 100 layers, 12 channels each (Huang et al., 2017)",
        own.densenet_cifar, Images(32), 256, r"features\.denseblock\d+", _densenet,
    ),
    "additions_100000": Case(
        "a hundred thousand additions of a number: what very many operations cost",
        own.Additions, Numbers((1,)), 64, "", lambda model: [model.hundred] * model.calls,
    ),
    "small_blocks": Case("residual blocks of next to no work", own.small_blocks, Images(4, 4), 2, r"\d+", list),
    **_torchvision("squeezenet1_1", "1×1 and 3×3 convolutions side by side", r"features\.([34679]|1[0-2])"),
    **_torchvision("shufflenet_v2_x1_0", "depthwise convolutions, channels shuffled", r"stage[234]\.\d+"),
    **_torchvision("mobilenet_v3_small", "inverted residual blocks", r"features\.([1-9]|1[01])"),
    **_torchvision("mobilenet_v2", "inverted residual blocks", r"features\.([1-9]|1[0-7])"),
    **_torchvision("mnasnet1_0", "inverted residual blocks found by search", r"layers\.([89]|1[0-3])\.\d+"),
    **_torchvision(
        "regnet_y_400mf", "grouped convolutions, squeeze and excitation", r"trunk_output\.block\d\.block\d-\d+",
    ),
    **_torchvision("regnet_x_32gf", "wide grouped convolutions", r"trunk_output\.block\d\.block\d-\d+", 32),
    **_torchvision("efficientnet_b0", "inverted residual blocks, squeeze and excitation", r"features\.[1-7]\.\d+"),
    **_timm("ghostnet_100", "cheap convolutions beside ordinary ones", r"blocks\.\d+\.\d+"),
    **_torchvision("resnext50_32x4d", "residual blocks, grouped", r"layer\d\.\d+"),
    **_torchvision("wide_resnet50_2", "wide residual blocks", r"layer\d\.\d+"),
    **_torchvision("maxvit_t", "convolutions, attention in grids", r"blocks\.\d\.layers\.\d", 32),
    **_timm("mixer_s16_224", "linear layers across patches, across channels", r"blocks\.\d+"),
    "llama": Case(
        "transformer decoder: rotary positions, gated feed-forward; a quarter of the vocabulary",
        partial(llama, 8192, 384, 1024, 6, 2), Tokens(128, 8192), 2, r"model\.model\.layers\.\d+",
        package="transformers",
    ),
    "lstm": Case("four LSTM layers", own.LstmStack, Tokens(48, 2000), 8, r"layers\.\d+"),
    "unet_32": Case("U-Net of half the width", partial(own.UNet, 32, classes=1), Images(256), 4, r"(down|up)\.\d+"),
    "mixer": Case(
        "linear layers across patches, across channels (Tolstikhin et al., 2021)",
        partial(own.Mixer, 256, width=512), Images(256), 4, r"layers\.\d+",
    ),
    "transformer": Case(
        "encoder and decoder (Vaswani et al., 2017)", partial(nn.Transformer, 512, 16), Numbers((200, 512), 2), 4,
        r"(en|de)coder\.layers\.\d+",
    ),
    "fno_1d": Case(
        "a neural operator on a line (Li et al., 2021)",
        partial(own.FourierNeuralOperator, 1, 2, width=64, modes=16, hidden=2), Numbers((2, 256)), 256,
        r"spectral\.\d+",
    ),
    "fno_3d": Case(
        "a neural operator in space (Li et al., 2021)",
        partial(own.FourierNeuralOperator, 3, 13, width=32, modes=8, hidden=4), Numbers((13, 32, 32, 20)), 5,
        r"spectral\.\d+",
    ),
    "attention": Case(
        "eight blocks of attention and an MLP",
        lambda: nn.Sequential(*(own.AttentionBlock(128) for _ in range(8))), Numbers((128, 128)), 16, r"\d+", list,
    ),
    "pointwise": Case(
        "ten linear layers with many operations on single elements",
        lambda: nn.Sequential(*(own.Pointwise(128) for _ in range(10))), Numbers((128,)), 4096, r"\d+", list,
    ),
}  # fmt: skip


def listed() -> str:
    """All of them, as a table."""
    rows = [
        [name, "yes" if known.published else "no", str(known.input), str(known.batch_size), known.description]
        for name, known in CASES.items()
    ]
    return table(["name", "published", "input", "batch size", "description"], rows)
