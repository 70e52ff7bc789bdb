"""Operators on meta tensors are those that PyTorch makes of them on CUDA: the same backward, with the same saved."""

import pytest
import torch
from torch.nn import functional as F

from ogc.operators.gpus import gpu_named
from ogc.sizing.cuda.kernels import as_on_cuda
from ogc.torch_state.private import FakeTensorMode

IMAGES, ROWS, VOLUMES = (2, 8, 8, 8), (4, 8), (2, 8, 4, 4, 4)


def normalized(training, **form):
    def run(x, weight, bias, mean, var):
        return F.batch_norm(x.to(**form), mean, var, weight, bias, training)

    return run


STATISTICS = [(8,), (8,), [8], [8]]  # in brackets: without grad
CALLS = {
    "batch_norm": (normalized(True), IMAGES, *STATISTICS),
    "batch_norm of volumes": (normalized(True), VOLUMES, *STATISTICS),
    "batch_norm of rows": (normalized(True), ROWS, *STATISTICS),
    "batch_norm in evaluation": (normalized(False), IMAGES, *STATISTICS),
    "batch_norm of halves": (normalized(True, dtype=torch.float16), IMAGES, *STATISTICS),
    "batch_norm of bfloat16": (normalized(True, dtype=torch.bfloat16), IMAGES, *STATISTICS),
    "batch_norm alone": (lambda x: F.batch_norm(x, None, None, training=True), IMAGES),
    "batch_norm, small eps": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True, eps=1e-6), IMAGES, (8,), (8,)),
    "instance_norm": (F.instance_norm, IMAGES),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), IMAGES, (8,), (8,)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (8,), w, b), ROWS, (8,), (8,)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (8,), w), ROWS, (8,)),
    "rms_norm alone": (lambda x: F.rms_norm(x, (8,)), ROWS),
    "rms_norm in two types": (lambda x, w: F.rms_norm(x.bfloat16(), (8,), w), ROWS, (8,)),
    "rms_norm, channels last": (
        lambda x: F.rms_norm(x.contiguous(memory_format=torch.channels_last), (8,)),
        IMAGES,
    ),
    "dropout": (lambda x: F.dropout(x, 0.1), ROWS),
    "dropout of all": (lambda x: F.dropout(x, 1.0), ROWS),
    "dropout in place": (lambda x: F.dropout(x * 2, 0.1, inplace=True), ROWS),
    "dropout of channels": (lambda x: F.dropout2d(x, 0.1), IMAGES),
    "alpha_dropout": (lambda x: F.alpha_dropout(x, 0.1, True), ROWS),
    "logsigmoid": (F.logsigmoid, ROWS),
    "linear": (F.linear, ROWS, (6, 8), (6,)),
    "linear of sequences": (F.linear, (2, 4, 8), (6, 8), (6,)),
    "linear without bias": (F.linear, (2, 4, 8), (6, 8)),
    "matmul": (torch.matmul, (2, 4, 8), (2, 8, 4)),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->bik", a, b), (2, 4, 8), (2, 8, 4)),
    "conv1d": (F.conv1d, (2, 8, 8), (6, 8, 3)),
    "conv2d": (F.conv2d, IMAGES, (6, 8, 3, 3), (6,)),
    "conv2d by channel": (lambda x, w: F.conv2d(x, w, groups=8), IMAGES, (8, 1, 3, 3)),
    "conv3d": (F.conv3d, VOLUMES, (6, 8, 3, 3, 3), (6,)),
    "conv_transpose2d": (F.conv_transpose2d, IMAGES, (8, 6, 3, 3), (6,)),
    "max_pool1d": (lambda x: F.max_pool1d(x, 2), (2, 4, 8)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), IMAGES),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 2), IMAGES),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), IMAGES),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 2), IMAGES),
    "adaptive_avg_pool2d to one": (lambda x: F.adaptive_avg_pool2d(x, 1), IMAGES),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), IMAGES),
    "grid_sample": (lambda x, g: F.grid_sample(x, g, align_corners=False), IMAGES, (2, 8, 8, 2)),
    "local_response_norm": (lambda x: F.local_response_norm(x, 3), IMAGES),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), IMAGES),
    "unfold": (lambda x: F.unfold(x, 3), IMAGES),
    "embedding": (lambda w: F.embedding(torch.zeros(3, dtype=torch.long, device=w.device), w), (10, 8)),
    "embedding_bag": (lambda w: F.embedding_bag(torch.zeros(2, 3, dtype=torch.long, device=w.device), w), (10, 8)),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long, device=x.device)), ROWS),
    "mse_loss": (F.mse_loss, ROWS, ROWS),
    "binary_cross_entropy_with_logits": (F.binary_cross_entropy_with_logits, ROWS, [4, 8]),
    **{
        name: (getattr(F, name), ROWS)
        for name in ("gelu", "silu", "relu", "hardswish", "mish", "elu", "leaky_relu", "softplus", "glu", "tanh")
    },
    "softmax": (lambda x: F.softmax(x, -1), ROWS),
    "log_softmax": (lambda x: F.log_softmax(x, -1), ROWS),
    "prelu": (F.prelu, ROWS, (8,)),
    "cumsum": (lambda x: x.cumsum(0), ROWS),
    "sort": (lambda x: x.sort(0)[0], ROWS),
    "std": (lambda x: x.std(0), ROWS),
    "cat": (lambda a, b: torch.cat([a, b]), ROWS, ROWS),
}


def saved(function, shapes, device):
    """How many bytes each saved tensor has that is no argument, and of what type, for a call on a device."""
    found = []

    def pack(tensor):
        if tensor.untyped_storage()._cdata not in known:
            found.append((tensor.dtype, tensor.numel()))
        return tensor

    given = [torch.empty(tuple(s), device=device, requires_grad=isinstance(s, tuple)) for s in shapes]
    known = {tensor.untyped_storage()._cdata for tensor in given}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*given)
    return sorted((entry for entry in found if entry[1]), key=str)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("name", CALLS)
def test_what_is_saved_is_what_fake_tensors_on_cuda_save(name):
    function, *shapes = CALLS[name]
    with FakeTensorMode():
        on_cuda = saved(function, shapes, "cuda")
    with as_on_cuda(gpu_named("A100"), is_recorded=False):
        on_meta = saved(function, shapes, "meta")
    assert on_meta == on_cuda


def test_elsewhere_they_are_pytorchs_own():
    x = torch.empty(IMAGES, device="meta", requires_grad=True)
    with as_on_cuda(None):
        assert "Native" in F.batch_norm(x, None, None, training=True).grad_fn.name()
        assert "Mul" in F.dropout(x, 0.1).grad_fn.name()
