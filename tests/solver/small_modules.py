"""Small modules whose graphs have up to 30 operations, so that their exact optima are known."""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F


class Applied(nn.Module):
    """A function of the modules that it is made of and of a tensor."""

    def __init__(self, function, **modules):
        super().__init__()
        self.function, self.parts = function, nn.ModuleDict(modules)

    def forward(self, x):
        return self.function(self.parts, x)


def conv(inner, outer, size=3, **more):
    return nn.Conv2d(inner, outer, size, padding=size // 2, **more)


def normed(inner, outer, size=3, **more):
    return nn.Sequential(conv(inner, outer, size, bias=False, **more), nn.BatchNorm2d(outer), nn.ReLU())


def multilayer():
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(64, 4)), torch.randn(256, 64)


def hourglass():
    widths = (256, 128, 64, 16, 64, 128, 256)
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers), torch.randn(128, 256)


def convolutions():
    return nn.Sequential(normed(3, 16), normed(16, 16), nn.MaxPool2d(2), normed(16, 32), normed(32, 32)), image()


def image(channels=3, size=16, batch=8):
    return torch.randn(batch, channels, size, size)


def basic_block():
    def forward(m, x):
        for n in "ab":
            y = m[f"{n}2"](F.relu(m[f"{n}1"](x)))
            x = F.relu(x + y)
        return x

    names = ("a1", "a2", "b1", "b2")
    first = nn.Sequential(conv(8, 8), nn.BatchNorm2d(8))
    return nn.Sequential(
        conv(3, 8), Applied(forward, **{n: nn.Sequential(conv(8, 8), nn.BatchNorm2d(8)) for n in names}), first
    ), image()


def residual():
    def forward(m, x):
        for n in range(3):
            x = F.relu(x + m[f"second{n}"](F.relu(m[f"first{n}"](x))))
        return x

    layers = {f"{which}{n}": conv(8, 8) for n in range(3) for which in ("first", "second")}
    return nn.Sequential(conv(3, 8), Applied(forward, **layers)), image()


def bottleneck():
    def forward(m, x):
        y = F.relu(m["n1"](m["c1"](x)))
        y = F.relu(m["n2"](m["c2"](y)))
        return F.relu(m["n3"](m["c3"](y)) + x)

    parts = {"c1": conv(32, 8, 1), "c2": conv(8, 8), "c3": conv(8, 32, 1)}
    norms = {"n1": nn.BatchNorm2d(8), "n2": nn.BatchNorm2d(8), "n3": nn.BatchNorm2d(32)}
    block = Applied(forward, **parts, **norms)
    return nn.Sequential(conv(3, 32), block), image()


def inverted_residual():
    def forward(m, x):
        return x + m["down"](F.hardswish(m["deep"](F.hardswish(m["up"](x)))))

    def block():
        return Applied(forward, up=conv(8, 32, 1), deep=conv(32, 32, groups=32), down=conv(32, 8, 1))

    return nn.Sequential(conv(3, 8), block(), block(), block()), image()


def inception():
    def forward(m, x):
        return torch.cat([m["one"](x), m["two"](m["one_two"](x)), m["three"](x), F.avg_pool2d(x, 3, 1, 1)], 1)

    parts = {"one": normed(16, 8, 1), "one_two": normed(16, 8, 1), "two": normed(8, 8), "three": normed(16, 8, 5)}
    return nn.Sequential(normed(3, 16), Applied(forward, **parts), nn.Conv2d(40, 8, 1)), image()


def dense_block():
    def forward(m, x):
        for n in range(4):
            x = torch.cat([x, m[f"c{n}"](F.relu(m[f"n{n}"](x)))], 1)
        return x

    parts = {f"c{n}": conv(8 + 8 * n, 8) for n in range(4)}
    norms = {f"n{n}": nn.BatchNorm2d(8 + 8 * n) for n in range(4)}
    return nn.Sequential(conv(3, 8), Applied(forward, **parts, **norms)), image()


def squeeze_excite():
    def forward(m, x):
        y = F.silu(m["c1"](x))
        s = m["up"](F.silu(m["down"](y.mean((2, 3), keepdim=True))))
        return x + m["c2"](y * torch.sigmoid(s))

    def block():
        return Applied(forward, c1=conv(8, 24), down=conv(24, 4, 1), up=conv(4, 24, 1), c2=conv(24, 8))

    return nn.Sequential(conv(3, 8), block(), block()), image()


def u_net():
    def forward(m, x):
        a = F.relu(m["d1"](x))
        b = F.relu(m["d2"](F.max_pool2d(a, 2)))
        c = F.relu(m["mid"](F.max_pool2d(b, 2)))
        b = F.relu(m["u2"](torch.cat([b, F.interpolate(c, scale_factor=2)], 1)))
        return m["out"](F.relu(m["u1"](torch.cat([a, F.interpolate(b, scale_factor=2)], 1))))

    parts = {"d1": conv(3, 8), "d2": conv(8, 16), "mid": conv(16, 32), "u2": conv(48, 16), "u1": conv(24, 8)}
    return Applied(forward, **parts, out=conv(8, 2, 1)), image()


def attention():
    def forward(m, x):
        q, k, v = (m[n](m["norm"](x)) for n in "qkv")
        weights = torch.softmax(q @ k.transpose(1, 2) / 8, -1)
        return x + m["out"](weights @ v)

    linear = {n: nn.Linear(64, 64) for n in ("q", "k", "v", "out")}
    return Applied(forward, norm=nn.LayerNorm(64), **linear), torch.randn(4, 48, 64)


def encoder_layer():
    def forward(m, x):
        y = m["norm1"](x)
        y = F.scaled_dot_product_attention(m["q"](y), m["k"](y), m["v"](y))
        x = x + m["out"](y)
        return x + m["down"](F.gelu(m["up"](m["norm2"](x))))

    linear = {n: nn.Linear(32, 32) for n in ("q", "k", "v", "out")}
    norms = {"norm1": nn.LayerNorm(32), "norm2": nn.LayerNorm(32)}
    return Applied(forward, **linear, **norms, up=nn.Linear(32, 128), down=nn.Linear(128, 32)), torch.randn(4, 32, 32)


def gated():
    def forward(m, x):
        for n in range(2):
            y = m[f"norm{n}"](x)
            x = x + m[f"down{n}"](F.silu(m[f"gate{n}"](y)) * m[f"up{n}"](y))
        return x

    parts = {f"{which}{n}": nn.Linear(32, 96) for n in range(2) for which in ("gate", "up")}
    downs = {f"down{n}": nn.Linear(96, 32) for n in range(2)}
    return Applied(forward, **parts, **downs, norm0=nn.RMSNorm(32), norm1=nn.RMSNorm(32)), torch.randn(256, 32)


def mixer():
    def forward(m, x):
        y = m["norm1"](x).transpose(1, 2)
        x = x + m["t2"](F.gelu(m["t1"](y))).transpose(1, 2)
        return x + m["c2"](F.gelu(m["c1"](m["norm2"](x))))

    tokens = {"t1": nn.Linear(16, 64), "t2": nn.Linear(64, 16)}
    channels = {"c1": nn.Linear(32, 128), "c2": nn.Linear(128, 32)}
    norms = {"norm1": nn.LayerNorm(32), "norm2": nn.LayerNorm(32)}
    return Applied(forward, **tokens, **channels, **norms), torch.randn(16, 16, 32)


def recurrent():
    def forward(m, x):
        h = x[:, 0]
        for t in range(1, 5):
            h = torch.tanh(m["inside"](x[:, t]) + m["state"](h))
        return m["out"](h)

    return Applied(forward, inside=nn.Linear(64, 64), state=nn.Linear(64, 64), out=nn.Linear(64, 8)), torch.randn(
        128, 5, 64
    )


def highway():
    def forward(m, x):
        for n in range(2):
            gate = torch.sigmoid(m[f"gate{n}"](x))
            x = gate * torch.relu(m[f"own{n}"](x)) + (1 - gate) * x
        return x

    return Applied(forward, **{f"{k}{n}": nn.Linear(48, 48) for n in range(2) for k in ("gate", "own")}), torch.randn(
        200, 48
    )


def two_heads():
    def forward(m, x):
        x = F.gelu(m["two"](F.gelu(m["one"](x))))
        return m["left2"](F.gelu(m["left1"](x))), m["right2"](torch.tanh(m["right1"](x)))

    widths = {"one": (32, 96), "two": (96, 96), "left1": (96, 64), "left2": (64, 8), "right1": (96, 128)}
    return Applied(forward, **{n: nn.Linear(*w) for n, w in widths.items()}, right2=nn.Linear(128, 4)), torch.randn(
        200, 32
    )


def depthwise():
    def forward(m, x):
        for n in range(2):
            y = m[f"deep{n}"](x).permute(0, 2, 3, 1)
            y = m[f"down{n}"](F.gelu(m[f"up{n}"](m[f"norm{n}"](y))))
            x = x + y.permute(0, 3, 1, 2)
        return x

    deep = {f"deep{n}": conv(8, 8, 7, groups=8) for n in range(2)}
    linear = {f"up{n}": nn.Linear(8, 32) for n in range(2)} | {f"down{n}": nn.Linear(32, 8) for n in range(2)}
    return nn.Sequential(
        conv(3, 8), Applied(forward, **deep, **linear, norm0=nn.LayerNorm(8), norm1=nn.LayerNorm(8))
    ), image()


MODULES = {
    make.__name__: make
    for make in (
        multilayer, hourglass, convolutions, basic_block, residual, bottleneck, inverted_residual, inception,
        dense_block, squeeze_excite, u_net, attention, encoder_layer, gated, mixer, recurrent, highway, two_heads,
        depthwise,
    )
}  # fmt: skip
