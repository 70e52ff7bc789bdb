"""DenseNet-BC for CIFAR: Huang et al., "Densely Connected Convolutional Networks", CVPR 2017 (arXiv 1608.06993).

The network of the first memory-efficient implementations (Pleiss et al., arXiv 1707.06990).
"""

from __future__ import annotations

from torch import nn


def densenet_cifar(depth: int = 100, growth: int = 12, classes: int = 10) -> nn.Module:
    """Three dense blocks of bottleneck layers, half of the channels kept between them: N, 3, 32, 32 to N, classes.

    Args:
        depth: convolutions and the linear layer: two for each dense layer, and four more.
        growth: channels that each layer adds.
        classes: outputs.
    """
    from torchvision.models import DenseNet

    layers = (depth - 4) // 6
    model = DenseNet(growth, (layers,) * 3, num_init_features=2 * growth, num_classes=classes)
    # Images are small: no stride, no pooling before the first block.
    del model.features.norm0, model.features.relu0, model.features.pool0
    model.features.conv0 = nn.Conv2d(3, 2 * growth, 3, padding=1, bias=False)
    return model
