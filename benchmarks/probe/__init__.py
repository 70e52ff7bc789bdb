"""All that is to be known of a device, by one command: ``python benchmark.py --probe --device cuda:0 --json FILE``."""

from .making import probe

__all__ = ["probe"]
