"""Graphs of a model for calls of other sizes, on tensors that have shapes and no content."""

from ...operators.convolution.parts import Trials
from ..traced import Traced
from .foretell import foretold_program, same_program, shares
from .parse import OtherSizes, to_be_run

__all__ = ["OtherSizes", "Traced", "Trials", "foretold_program", "same_program", "shares", "to_be_run"]
