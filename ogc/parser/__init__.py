"""From a module and a sample input to a weighted graph over an executable program."""

from .parse import parse

__all__ = ["parse"]
