"""Runs a plan: generated code, frames that recompute, and the module around them."""

from .module import optimized_module

__all__ = ["optimized_module"]
