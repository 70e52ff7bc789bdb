"""From a module and a sample input to a weighted graph over an executable program."""

from .again import carry_over
from .custom import ParseGraph
from .parse import parse

__all__ = ["ParseGraph", "carry_over", "parse"]
