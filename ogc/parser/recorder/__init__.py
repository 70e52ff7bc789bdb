"""Reads a model's forward: it runs once as ever, and each operator that it calls is written down.

A :class:`~ogc.parser.traced.FrontEnd`. The model cannot tell that it is recorded, and runs as in training. What
goes past the dispatcher is seen here too: calls of submodules and custom ``autograd.Function``\\ s, hooks, numbers that
Python reads out of tensors, writes past autograd. What no program can hold is refused, unless it happens inside a
*leaf*: a submodule whose call is one node.
"""

from .record import record

__all__ = ["record"]
