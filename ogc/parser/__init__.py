"""From a module and a sample input to a weighted graph over an executable program."""

from .custom import ParseGraph
from .parse import parse

__all__ = ["ParseGraph", "parse"]
