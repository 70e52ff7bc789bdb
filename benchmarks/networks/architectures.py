"""The architectures that the benchmark knows: how to build each, what it reads, and what its blocks are."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ogc.graph import table

from .densenet_cifar import densenet_cifar
from .inputs import Images, Tokens, Vectors
from .search_space import NETWORKS
from .stacks import Additions, linear_relu
from .transformers import Bert, Gpt2
from .unet import UNet

Layer = Callable[[Any], Any]


@dataclass(frozen=True)
class Published:
    """A row of the paper's table: sizes in MiB, overhead as a share of the plain step."""

    batch_size: int
    image_size: int
    plain: int
    theirs: int
    overhead: float


@dataclass(frozen=True)
class Architecture:
    """A network by its name.

    Attributes:
        description: one line.
        build: makes it, in training mode, with random weights.
        input: what it reads.
        batch_size: published, or else usual.
        block: a regular expression for the names of the submodules that people checkpoint by hand.
        stages: where those are no submodules: the Sequential whose children, up to each max pool, make a block.
        sequence: the model as a list of functions of each other's results, or why there is none.
        published: its row of the published table, if it has one.
    """

    description: str
    build: Callable[[], nn.Module]
    input: Images | Tokens | Vectors
    batch_size: int
    block: str
    sequence: Callable[[Any], Sequence[Layer]] | str
    stages: str = ""
    published: Published | None = None

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The submodules that are checkpointed where every block is; empty for ``stages``."""
        return [module for name, module in model.named_modules() if self.block and re.fullmatch(self.block, name)]

    def is_published(self, batch_size: int, size: int) -> bool:
        """Whether the published row was measured with batches like this."""
        row = self.published
        return row is not None and (batch_size, size) == (row.batch_size, row.image_size)


def torchvision_model(name: str) -> nn.Module:
    import torchvision

    keywords = {"init_weights": True} if name in ("inception_v3", "googlenet") else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torchvision.models.get_model(name, weights=None, **keywords)


def _search_space(name: str) -> nn.Module:
    return NETWORKS[name]()


# -- the models as sequences ----------------------------------------------------------------------------


def _flat_features(model: Any) -> list[Layer]:
    return [*model.features, model.avgpool, nn.Flatten(), *model.classifier]


def _resnet(model: Any) -> list[Layer]:
    stem = [model.conv1, model.bn1, model.relu, model.maxpool]
    blocks = [block for layer in (model.layer1, model.layer2, model.layer3, model.layer4) for block in layer]
    return [*stem, *blocks, model.avgpool, nn.Flatten(), model.fc]


def _densenet(model: Any) -> list[Layer]:
    return [*model.features, nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), model.classifier]


def _cells(model: Any) -> list[Layer]:
    """Each function hands on the outputs of the last two cells."""

    def first(images: Any) -> Any:
        return (model.stem(images),) * 2

    def step(cell: Callable[..., Any], pair: Any) -> Any:
        return pair[1], cell(*pair)

    def last(pair: Any) -> Any:
        return model.classifier(model.pool(pair[1]).flatten(1))

    return [first, *(partial(step, cell) for cell in model.cells), last]


def _convnext(model: Any) -> list[Layer]:
    return [*_unfolded(model.features), model.avgpool, model.classifier]


def _swin(model: Any) -> list[Layer]:
    return [*_unfolded(model.features), model.norm, model.permute, model.avgpool, model.flatten, model.head]


def _unfolded(features: nn.Sequential) -> list[Layer]:
    """Stages taken apart into their blocks."""
    return [layer for stage in features for layer in (stage if isinstance(stage, nn.Sequential) else [stage])]


def _vit(model: Any) -> list[Layer]:
    def embed(images: torch.Tensor) -> torch.Tensor:
        patches = model._process_input(images)
        tokens = torch.cat([model.class_token.expand(len(images), -1, -1), patches], dim=1)
        return model.encoder.dropout(tokens + model.encoder.pos_embedding)

    return [embed, *model.encoder.layers, model.encoder.ln, lambda x: x[:, 0], model.heads]


def _bert(model: Bert) -> list[Layer]:
    return [model.embed, *model.layers, model.pool]


def _gpt2(model: Gpt2) -> list[Layer]:
    return [model.embed, *model.layers, model.predict]


def _additions(model: Additions) -> list[Layer]:
    return [model.hundred] * model.calls


# -- the table ------------------------------------------------------------------------------------------


def _of_table(name: str, description: str, published: Published, **fields: Any) -> Architecture:
    build = partial(_search_space if name in NETWORKS else torchvision_model, name)
    return Architecture(
        description, build, Images(published.image_size), published.batch_size, published=published, **fields
    )


def _rows(description: str, rows: dict[str, Published], **fields: Any) -> dict[str, Architecture]:
    return {name: _of_table(name, description, published, **fields) for name, published in rows.items()}


PUBLISHED: dict[str, Architecture] = {
    **_rows(
        "convolutions, pooling and three linear layers (Krizhevsky et al., 2012)",
        {"alexnet": Published(1024, 224, 4955, 3287, 0.34)},
        block="", stages="features", sequence=_flat_features,
    ),
    **_rows(
        "3×3 convolutions and pooling in a row (Simonyan & Zisserman, 2015)",
        {
            "vgg11": Published(64, 224, 3577, 2781, 0.34),
            "vgg13": Published(64, 224, 5136, 3565, 0.33),
            "vgg16": Published(64, 224, 5136, 3565, 0.32),
            "vgg19": Published(64, 224, 5189, 3565, 0.33),
        },
        block="", stages="features", sequence=_flat_features,
    ),
    **_rows(
        "residual blocks (He et al., 2016)",
        {
            "resnet18": Published(256, 224, 5635, 3677, 0.30),
            "resnet34": Published(128, 224, 4079, 1838, 0.35),
            "resnet50": Published(64, 224, 5323, 1973, 0.31),
            "resnet101": Published(32, 224, 3934, 1024, 0.35),
            "resnet152": Published(16, 224, 2767, 526, 0.37),
        },
        block=r"layer\d\.\d+", sequence=_resnet,
    ),
    **_rows(
        "every layer of a block reads all before it (Huang et al., 2017)",
        {
            "densenet121": Published(32, 224, 4027, 898, 0.34),
            "densenet161": Published(16, 224, 3751, 666, 0.36),
            "densenet169": Published(32, 224, 4862, 897, 0.32),
            "densenet201": Published(16, 224, 3146, 474, 0.53),
        },
        block=r"features\.denseblock\d+", sequence=_densenet,
    ),
    **_rows(
        "blocks of parallel branches (Szegedy et al., 2016)",
        {"inception_v3": Published(32, 300, 3074, 881, 0.29)},
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

ARCHITECTURES: dict[str, Architecture] = {
    **PUBLISHED,
    "unet": Architecture(
        "down and up again with features read across, for segmentation (Ronneberger et al., 2015)",
        UNet, Images(224), 16, r"(down|up)\.\d+", "features are read across from the way down to the way up",
    ),
    "googlenet": Architecture(
        "blocks of parallel branches, two auxiliary classifiers (Szegedy et al., 2015)",
        partial(torchvision_model, "googlenet"), Images(224), 64, r"inception\d\w",
        "the auxiliary classifiers read from the middle",
    ),
    "mobilenet_v3_large": Architecture(
        "inverted residual blocks, depthwise convolutions (Howard et al., 2019)",
        partial(torchvision_model, "mobilenet_v3_large"), Images(224), 64, r"features\.([1-9]|1[0-5])", _flat_features,
    ),
    "convnext_tiny": Architecture(
        "convolutions arranged as in a transformer (Liu et al., 2022)",
        partial(torchvision_model, "convnext_tiny"), Images(224), 32, r"features\.[1357]\.\d+", _convnext,
    ),
    "swin_t": Architecture(
        "attention within shifted windows (Liu et al., 2021)",
        partial(torchvision_model, "swin_t"), Images(224), 32, r"features\.[1357]\.\d+", _swin,
    ),
    "vit_b_16": Architecture(
        "a transformer on patches of 16×16 pixels (Dosovitskiy et al., 2021)",
        partial(torchvision_model, "vit_b_16"), Images(224), 32, r"encoder\.layers\.encoder_layer_\d+", _vit,
    ),
    "bert_base": Architecture(
        "transformer encoder: 12 layers, 768 wide, 12 heads (Devlin et al., 2019)",
        Bert, Tokens(512, 30522), 16, r"layers\.\d+", _bert,
    ),
    "gpt2_small": Architecture(
        "transformer decoder: 12 layers, 768 wide, 12 heads (Radford et al., 2019)",
        Gpt2, Tokens(1024, 50257), 8, r"layers\.\d+", _gpt2,
    ),
    "linear_relu_100": Architecture(
        "a hundred linear layers with ReLU in a row",
        linear_relu, Vectors(1024), 4096, r"\d+", list,
    ),
    "densenet_cifar": Architecture(
        "DenseNet-BC of 100 layers, 12 channels each (Huang et al., 2017)",
        densenet_cifar, Images(32), 256, r"features\.denseblock\d+", _densenet,
    ),
    "additions_100000": Architecture(
        "a hundred thousand additions of a number: what very many operations cost",
        Additions, Vectors(1), 64, "", _additions,
    ),
}  # fmt: skip


def listed() -> str:
    """All of them, as a table."""
    header = ["name", "published", "input", "batch size", "description"]
    rows = [
        [name, "yes" if known.published else "no", str(known.input), str(known.batch_size), known.description]
        for name, known in ARCHITECTURES.items()
    ]
    return table(header, rows)
