"""A step on a device of so many bytes: what it needs, the budget that is left for activations, the batch that fits."""

from .largest import LargestBatch, largest_batch, largest_batches
from .needs import Estimate, activation_budget, estimate

__all__ = ["Estimate", "LargestBatch", "activation_budget", "estimate", "largest_batch", "largest_batches"]
