"""Reads a model's forward: it runs once as ever, and each operator that it calls is written down.

A front end: whatever returns a :class:`~ogc.parser.traced.Traced` can take its place. The model cannot tell that it is
recorded, and runs as in training. What goes past PyTorch's dispatcher is seen here too: calls of submodules and custom
``autograd.Function``\\ s, numbers that Python reads out of tensors, hooks, writes past autograd. What no program can
hold is refused, unless it happens inside a *leaf*: a submodule whose call is one node.
"""

from .capturing import only_records
from .forward import FlatForward, forward_alone, nothing_saved, saved_until_done
from .leaf_calls import READS
from .places import scope
from .python import is_compiled, python_random_state, seen_as_recorded
from .record import RecordAgain, record

__all__ = [
    "READS",
    "FlatForward",
    "RecordAgain",
    "forward_alone",
    "is_compiled",
    "nothing_saved",
    "only_records",
    "python_random_state",
    "record",
    "saved_until_done",
    "scope",
    "seen_as_recorded",
]
