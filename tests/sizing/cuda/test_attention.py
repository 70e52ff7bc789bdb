"""Attention for CUDA without a GPU: the kernel by PyTorch's rules, and the bytes that it takes."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

import ogc
from ogc.operators.gpus import gpu_named
from ogc.sizing.cuda import attention
from ogc.sizing.cuda.attention import _SHARES_HEADS, CUDNN, EFFICIENT, FLASH, MATH, Attention, chosen

aten = torch.ops.aten
HALF, FLOAT = torch.bfloat16, torch.float32


def call(dtype=HALF, width=64, heads=4, shared=None, length=32, keys=None, requires_grad=True, **more):
    def made(heads, length):
        return torch.empty(2, heads, length, width, dtype=dtype, device="meta", requires_grad=requires_grad)

    shared, keys = shared or heads, keys or length
    return Attention(made(heads, length), made(shared, keys), made(shared, keys), **more)


def mask(*shape, dtype=torch.bool, **more):
    return torch.empty(shape, dtype=dtype, device="meta", **more)


CHOICES = {
    "half": (call(), "A100", FLASH),
    "float16": (call(torch.float16), "A100", FLASH),
    "float32": (call(FLOAT), "A100", EFFICIENT),
    "float64": (call(torch.float64), "A100", MATH),
    "a mask": (call(mask=mask(32, 32)), "A100", EFFICIENT),
    "a width that is padded": (call(width=60), "A100", FLASH),
    "a width that no tile has": (call(FLOAT, width=63), "A100", MATH),
    "the widest": (call(width=256), "A100", FLASH),
    "wider": (call(width=264), "A100", EFFICIENT),
    "causal, not square": (call(keys=48, is_causal=True), "A100", EFFICIENT),
    "three dimensions": (Attention(*(torch.empty(4, 8, 16, dtype=HALF, device="meta"),) * 3), "A100", MATH),
    "a width with strides": (
        Attention(*(torch.empty(2, 4, 16, 8, dtype=HALF, device="meta").transpose(2, 3),) * 3), "A100", MATH
    ),
    "shared heads": (call(shared=2, enable_gqa=True), "A100", FLASH),
    "shared heads that are not said to be": (call(shared=2), "A100", MATH),
    "shared heads, float32": (
        call(FLOAT, shared=2, enable_gqa=True), "A100", EFFICIENT if _SHARES_HEADS else MATH
    ),
    "few registers": (call(width=200), "RTX 4090", EFFICIENT),
    "few registers, nothing trained": (call(width=200, requires_grad=False), "RTX 4090", FLASH),
    "few registers, the widest": (call(width=256), "RTX 5090", FLASH),
    "few registers, the widest, with dropout": (call(width=256, dropout_p=0.1), "RTX 3090", EFFICIENT),
    "Turing": (call(torch.float16), "T4", EFFICIENT),
    "Turing, bfloat16": (call(), "T4", MATH),
    "Hopper": (call(), "H100", CUDNN),
    "Hopper, wide": (call(width=256), "H100", FLASH),
    "Hopper, float32": (call(FLOAT), "H100", EFFICIENT),
    "Hopper, odd dropout": (call(dropout_p=0.1), "H100", FLASH),
    "Hopper, a mask": (call(mask=mask(2, 1, 32, 32)), "H100", CUDNN),
    "Hopper, a mask with a gradient": (
        call(mask=mask(2, 1, 32, 32, dtype=HALF, requires_grad=True)), "H200", EFFICIENT
    ),
}  # fmt: skip


@pytest.mark.parametrize(("attention", "gpu", "kernel"), CHOICES.values(), ids=CHOICES)
def test_the_kernel_is_what_cuda_would_choose(attention, gpu, kernel):
    assert chosen(attention, gpu_named(gpu)) == kernel


def test_settings_choose():
    gpu = gpu_named("A100")
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert chosen(call(), gpu) == EFFICIENT
    with sdpa_kernel(SDPBackend.MATH):
        assert chosen(call(), gpu) == MATH
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert chosen(call(), gpu) == EFFICIENT


@pytest.mark.parametrize(("is_at_hand", "kernel"), [(True, FLASH), (False, CUDNN)])
def test_the_order_of_a_gpu_at_hand_is_not_that_of_another(monkeypatch, is_at_hand, kernel):
    monkeypatch.setattr(attention, "sdp_order", lambda: [3, 1, 2, 0, 4])  # as PyTorch sets it on a Hopper
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_at_hand)
    assert chosen(call(), gpu_named("A100")) == kernel
    assert chosen(call(), gpu_named("H100")) == CUDNN


class SelfAttention(nn.Module):
    """Attention alone, of the heads that it is given; all is laid out as projections leave it."""

    def __init__(self, width, dropout_p=0.0):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.dropout_p = dropout_p

    def forward(self, x, mask=None):
        each = [part(x).transpose(1, 2) for part in (self.query, self.key, self.value)]
        return nn.functional.scaled_dot_product_attention(*each, mask, self.dropout_p)


def attention_of(graph):
    (found,) = (op for op in graph.operations if "scaled_dot_product" in op.target)
    return found


B, S, H, D = 2, 100, 4, 64
RESULT = B * S * H * D


def parsed(dtype, gpu, *more, device="meta", dropout_p=0.0):
    model = SelfAttention(D, dropout_p).to(device, dtype)
    x = torch.zeros(B, S, H, D, dtype=dtype)
    return attention_of(ogc.parse(model, (x, *more), device="cuda", profile="estimate", gpu=gpu))


def kernel_of(dtype, gpu):
    with FakeTensorMode():
        each = [torch.empty(B, H, S, D, dtype=dtype, device="cuda", requires_grad=True) for _ in range(3)]
        internal = []

        def pack(tensor):
            internal.append(tensor)
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            if dtype == FLOAT:
                result = aten._scaled_dot_product_efficient_attention(*each, None, True)
            elif gpu == "H100":
                result = aten._scaled_dot_product_cudnn_attention(*each, None, True)
            else:
                result = aten._scaled_dot_product_flash_attention(*each)
        known = {tensor.untyped_storage()._cdata for tensor in (*each, result[0])}
        return sum(t.untyped_storage().nbytes() for t in internal if t.untyped_storage()._cdata not in known)


@pytest.mark.full
@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize(("dtype", "gpu"), [(HALF, "A100"), (FLOAT, "A100"), (HALF, "H100")])
def test_what_is_saved_is_the_kernels(dtype, gpu, device):
    """Held against PyTorch's own kernel on fake CUDA tensors, and by hand: sums of the softmax, and a seed."""
    attention = parsed(dtype, gpu, device=device)
    rows = 128 if dtype == FLOAT else S
    seeds = {FLOAT: 16, HALF: 16 if gpu == "H100" else 24}[dtype]
    assert attention.internal_bytes == 4 * B * H * rows + seeds == kernel_of(dtype, gpu)
    assert len(attention.saves) == 4  # query, key, value and result


def test_backward_of_flash():
    """Three gradients, the query's once more in float32 for 128 rows at a time, and sums of the softmax."""
    attention = parsed(HALF, "A100")
    assert attention.backward_bytes - attention.gradient_bytes == 3 * 2 * RESULT + 4 * B * 128 * H * (D + 1)


def test_backward_of_the_efficient_kernel():
    attention = parsed(FLOAT, "A100")
    tiles = 2 * 1 * (64 * 64 + 4)  # of the query's gradient, with a lock each
    assert attention.backward_bytes - attention.gradient_bytes == 3 * 4 * RESULT + 4 * B * H * (S + tiles)


def test_a_mask_that_is_not_aligned_is_padded_for_each_head():
    rows = 4 * B * H * S
    whole = parsed(FLOAT, "A100", torch.ones(S, S, dtype=torch.bool)).internal_bytes
    assert whole == 4 * B * H * 128 + 16 + rows * 112  # 100 columns are made 112


def test_scores_are_not_held():
    """Plain operators save the shares of all pairs of words; the kernel saves four of its tensors and their sums."""
    model = SelfAttention(64).to("meta", HALF)
    x = torch.zeros(1, 1024, 12, 64, dtype=HALF)
    held = []
    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(kernel):
            graph = ogc.parse(model, x, device="cuda", profile="estimate")
        attention = attention_of(graph)
        held.append(attention.internal_bytes + sum(graph.values[v].bytes for v in attention.saves))
    assert held[0] == 4 * 2 * 1024 * 12 * 64 + 4 * 12 * 1024 + 24
    assert held[1] > 50 * 2**20


def test_attention_on_meta_is_pytorchs_own_outside_of_parsing():
    each = [torch.empty(B, S, H, D, device="meta").transpose(1, 2).requires_grad_() for _ in range(3)]
    parsed(FLOAT, "A100")
    result = nn.functional.scaled_dot_product_attention(*each)
    assert type(result.grad_fn).__name__ == "UnsafeViewBackward0" and result.is_contiguous()
    assert [t.shape for t in torch.autograd.grad(result.sum(), each)] == [t.shape for t in each]


@pytest.mark.skipif(not _SHARES_HEADS, reason="this release has plain operators there")
def test_shared_heads_are_repeated_for_the_efficient_kernel():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(D, D, bias=False) for _ in range(3))

        def forward(self, x):
            query, key, value = (part(x).transpose(1, 2) for part in (self.query, self.key, self.value))
            shared = key[:, :2], value[:, :2]
            return nn.functional.scaled_dot_product_attention(query, *shared, enable_gqa=True)

    attention = attention_of(ogc.parse(Shared().to("meta"), torch.zeros(B, S, H, D), device="cuda"))
    assert attention.internal_bytes == 4 * B * H * 128 + 16 + 2 * 4 * RESULT
