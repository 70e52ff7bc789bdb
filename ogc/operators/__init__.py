"""All that is special about single operators: each family in a file of its own, which registers what it holds."""

from . import convolution, elementwise, normalization, pooling, products

__all__ = ["convolution", "elementwise", "normalization", "pooling", "products"]
