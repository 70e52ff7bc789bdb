"""Tensors told apart by a few of their entries."""

import torch

from ogc.torch_state.allocator import peak_bytes
from ogc.torch_state.compare import digest


def test_a_digest_takes_no_copy_of_what_lies_otherwise_in_memory():
    turned = torch.rand(512, 512).t()
    assert peak_bytes(lambda: digest([turned]), "cpu") < turned.nbytes // 8


def test_digests_tell_what_was_drawn():
    one, other = torch.rand(64, 32).t(), torch.rand(64, 32).t()
    assert digest([one]) == digest([one.clone()]) != digest([other])
