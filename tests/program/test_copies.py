"""Copies of what is given lie as it does, and share memory where it does."""

import pytest
import torch

from ogc.program.tensors import copies, made_copies

WIDE = torch.arange(48.0).view(6, 8)
COLUMNS = WIDE[:, 2:5]
PAIR = torch.ones(3, dtype=torch.cfloat) * 1j
GIVEN = {
    "dense": [WIDE],
    "transposed": [WIDE.T],
    "a part": [COLUMNS],
    "expanded": [WIDE[:1].expand(6, 8)],
    "a whole and its part": [WIDE, COLUMNS],
    "parts that overlap": [WIDE[:4], WIDE[2:], torch.zeros(3)],
    "the same memory twice": [WIDE, WIDE.view(48)],
    "complex and conjugate": [PAIR, PAIR.conj(), PAIR.conj()[::2]],
    "nothing": [torch.zeros(0, 3), torch.tensor(1)],
    "sparse": [torch.eye(3).to_sparse()],
}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_they_are_laid_out_as_what_is_given_and_elsewhere(given):
    for copied in (copies(given), made_copies(given)):
        for copy, tensor in zip(copied, given, strict=True):
            assert copy.layout == tensor.layout and copy.dtype == tensor.dtype and copy.shape == tensor.shape
            assert torch.equal(copy.to_dense(), tensor.to_dense())
            if tensor.layout is torch.strided:
                assert copy.stride() == tensor.stride()
                assert not tensor.numel() or copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def test_what_is_written_into_one_is_seen_in_those_that_share_its_memory():
    whole, part, other = copies([WIDE, COLUMNS, WIDE.clone()])
    whole.zero_()
    assert not part.any() and part._version == whole._version > other._version
    assert COLUMNS.any() and other.any()


def test_parts_far_apart_are_copied_without_what_lies_between():
    far = torch.zeros(1000, 8)
    first, last = copies([far[:2], far[998:]])
    assert first.untyped_storage().nbytes() == last.untyped_storage().nbytes() == 64


def test_gradients_are_wanted_for_the_same_ones():
    given = [WIDE.clone().requires_grad_(), torch.ones(2), torch.ones(2, dtype=torch.int64)]
    for is_leaf, copied in ((True, copies(given)), (False, made_copies(given))):
        assert [t.requires_grad for t in copied] == [True, False, False]
        assert copied[0].is_leaf == is_leaf
