"""PyTorch's settings at the forward hold for what runs again; other settings are another kind of call."""

import contextlib
import copy

import pytest
import torch
from helpers import measured_peak
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import ogc
from ogc.torch_state.settings import changed_flags, flags, flags_held, set_flags


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 96) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            q, k, v = layer(x).view(4, 64, 3, 2, 16).permute(2, 0, 3, 1, 4)
            x = x + scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(4, 64, 32)
        return x


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [[nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Tanh(), nn.Softplus()] for _ in range(4)]
        self.layers = nn.Sequential(*(layer for block in layers for layer in block))

    def forward(self, x):
        return self.layers(x) + torch.ones(16)  # of the default type


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def other_default_type():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


SETTINGS = {
    "math attention": (Attention, (4, 64, 32), lambda: sdpa_kernel(SDPBackend.MATH)),
    "flash attention": (Attention, (4, 64, 32), lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)),
    "an order of attention kernels": (
        Attention,
        (4, 64, 32),
        lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True),
    ),
    "no oneDNN": (Convolutions, (4, 8, 16, 16), lambda: torch.backends.mkldnn.flags(enabled=False, allow_tf32=None)),
    "deterministic": (Convolutions, (4, 8, 16, 16), deterministic),
    "another default type": (Convolutions, (4, 8, 16, 16), other_default_type),
    "more threads": (Convolutions, (4, 8, 16, 16), two_threads),
}


def step(run, model, x, setting):
    """Outputs and gradients where the setting holds for the forward alone."""
    before = copy.deepcopy(model.state_dict())
    model.zero_grad()
    with setting():
        output = run(x)
    output.square().mean().backward()
    found = [output.detach(), *(p.grad.clone() for p in model.parameters())]
    model.load_state_dict(before)
    return found


@pytest.mark.full
@pytest.mark.parametrize("name", SETTINGS)
def test_what_runs_again_has_the_settings_of_the_forward(name):
    kind, shape, setting = SETTINGS[name]
    model, x, before = kind(), torch.randn(shape), flags()
    optimised = ogc.optimize(model, x, memory_budget="least")
    for _ in range(2):
        for ours, plain in zip(step(optimised, model, x, setting), step(model, model, x, setting), strict=True):
            assert ours.dtype == plain.dtype and torch.equal(ours, plain)
    assert flags() == before
    assert optimised.report().planned == 2
    assert step(optimised, model, x, contextlib.nullcontext)[0].dtype == torch.float32


def test_a_kernel_is_chosen_by_the_settings_that_the_forward_had():
    """Without that, other tensors would be saved: the math kernel's parts in the place of flash attention's."""
    model, x = Attention(), torch.randn(4, 64, 32)
    optimised = ogc.optimize(model, x, memory_budget="least")
    assert measured_peak(optimised, (x,)) < 0.7 * measured_peak(model, (x,))

    def math(x):
        with sdpa_kernel(SDPBackend.MATH):
            return optimised(x)

    math.parameters = model.parameters
    with sdpa_kernel(SDPBackend.MATH):
        plain = measured_peak(model, (x,))
    assert measured_peak(math, (x,)) < 0.7 * plain


TF32 = {
    "by kind of kernel": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "for products": lambda: torch.set_float32_matmul_precision("high"),
    "cuDNN": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "flash off": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "reductions": lambda: setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    "half reductions": lambda: setattr(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
    "only warn": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
}


@pytest.mark.parametrize("name", TF32)
def test_settings_are_held_and_put_back(name):
    before = flags()
    try:
        TF32[name]()
        changed = flags()
        assert changed != before and changed_flags(before, changed)
        with flags_held(before):
            assert flags() == before
        assert flags() == changed
    finally:
        set_flags(before)
    assert flags() == before
    torch.get_float32_matmul_precision()  # which raises where settings contradict each other
