"""Reads a model's forward with the tracer of ``torch.jit`` and carries it over to a ``torch.fx.Graph``.

The only folder that touches ``torch.jit``: another front end can take its place by returning the same
:class:`Traced`. Tracing records what one call computes. What a trace cannot see is found out here and
refused: numbers read from tensors (control flow that depends on data), shapes that depend on data, custom autograd
functions, scripted code, in-place writes without gradients. Unless it happens inside a *leaf*: a submodule whose
call is one node, with the tracer switched off while it runs.
"""

from .leaf_calls import saved_until_done
from .recorders import only_records
from .trace import FlatForward, forward_alone, nothing_saved, scope, trace
from .traced import Traced, has_decisions, same_number, without_decisions
from .watch import LookAgain, OpaqueError, python_random_state

__all__ = [
    "FlatForward",
    "LookAgain",
    "OpaqueError",
    "Traced",
    "forward_alone",
    "has_decisions",
    "nothing_saved",
    "only_records",
    "python_random_state",
    "same_number",
    "saved_until_done",
    "scope",
    "trace",
    "without_decisions",
]
