"""In-place operators on views, whose backward copies: run out of place where nobody sees the difference.

Instance norm returns a view of what batch norm made. Where such a view is written in place, autograd differentiates
the write as one to the whole storage, which takes three more copies of it (``CopySlices`` in
torch/csrc/autograd/functions/tensor.cpp), and a low-memory backward cannot take its place.
"""

from __future__ import annotations

import torch

from ...operators.registry import is_elementwise, of, out_of_place
from .versions import saves_result

REBASED = "rebased"
"""In a node's ``meta``: the plain model runs it in place, on a view."""

COPIES = 3
"""Most copies of what was written that are made in the backward, beside the gradient that it is given."""


def run_out_of_place(graph: torch.fx.Graph) -> None:
    """Mark operators that write such a view; put those without underscore in their places, if nothing else uses it.

    Not if they save what they are given, which would have to be kept beside their result.
    """
    for node in graph.nodes:
        given = node.args[0] if node.op == "call_function" and node.args else None
        if not isinstance(given, torch.fx.Node) or not of(given.target).returns_view:
            continue
        twin = out_of_place(node.target)
        is_random = torch.Tag.nondeterministic_seeded in getattr(twin, "tags", ())
        if node.all_input_nodes != [given] or not is_elementwise(twin) or is_random:
            continue
        node.meta[REBASED] = True
        if len(given.users) == 1 and saves_result(node, twin) == saves_result(node, node.target):
            node.target = twin
