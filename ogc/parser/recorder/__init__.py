"""Reads a model's forward: it runs once as ever, and each operator that it calls is written down.

A :class:`~ogc.parser.traced.FrontEnd`. Recording is invisible to the model. What goes past the dispatcher is seen too:
calls of submodules and custom functions, hooks, numbers that Python reads out of tensors, writes past autograd. What no
program can hold is refused, unless an opaque module hides it.
"""

from .follow import followed
from .record import record

__all__ = ["followed", "record"]
