"""torchvision's models: images, segmentation, video, flow and detection. It needs torchvision."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.zoo.models import Build, Subject, seeded

BATCH = 4
SIZE = 96

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


def models() -> dict[str, Build]:
    from torchvision import models

    def of(module: Any) -> list[str]:
        return list(models.list_models(module))

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


def _model(name: str, **keywords: Any) -> torch.nn.Module:
    from torchvision import models

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # slow initialisation of inception_v3
        return models.get_model(name, weights=None, **keywords)


def _images(*shape: int) -> Callable[[int], Any]:
    return lambda step: (torch.randn(*shape, generator=seeded(step)),)


def _classifier(name: str) -> Subject:
    number, size = _of_prefix(_IMAGES, name, (BATCH, SIZE))
    return Subject(_model(name, **_of_prefix(_IMAGE_ARGUMENTS, name, {})), _images(number, 3, size, size))


def _segmentation(name: str) -> Subject:
    model = _model(name, weights_backbone=None, aux_loss=True if "lraspp" not in name else None)
    return Subject(model, _images(BATCH, 3, SIZE, SIZE))


def _video(name: str) -> Subject:
    return Subject(_model(name), _images(*_of_prefix(_VIDEO_SHAPES, name, (2, 3, 8, 64, 64))))


def _flow(name: str) -> Subject:
    def batch(step: int) -> dict[str, Any]:
        images = torch.randn(2, 1, 3, 128, 128, generator=seeded(step))
        return {"image1": images[0], "image2": images[1], "num_flow_updates": 4}

    return Subject(_model(name), batch)


def _detection(name: str) -> Subject:
    model = _model(name, weights_backbone=None, **_of_prefix(_DETECTION_ARGUMENTS, name, {}))

    def batch(step: int) -> tuple[Any, ...]:
        images = [torch.rand(3, SIZE, SIZE, generator=seeded(step)) for _ in range(_DETECTION_BATCH)]
        return images, [_target(step) for _ in images]

    return Subject(model, batch, part="backbone")


def _target(step: int) -> dict[str, torch.Tensor]:
    return {
        "boxes": torch.tensor([[10.0 + step, 12.0, 80.0, 90.0], [30.0, 20.0, 70.0, 60.0 + step]]),
        "labels": torch.tensor([1, 1]),
        "masks": torch.ones(2, SIZE, SIZE, dtype=torch.uint8),
        "keypoints": torch.full((2, 17, 3), 40.0),
    }
