"""All that is special about single operators, each family in a room of its own, which registers what it holds."""

from . import convolution, elementwise, indexing, losses, normalization, pooling, products

__all__ = ["convolution", "elementwise", "indexing", "losses", "normalization", "pooling", "products"]
