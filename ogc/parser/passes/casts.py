"""Casts of a parameter that autocast shares in the caller's region are one call."""

from __future__ import annotations

from typing import Any

import torch

from ...program.program import SHARED


def share_casts(graph: torch.fx.Graph) -> None:
    """Put the first cast of a parameter in the place of later ones to the same type, which are recorded, too."""
    first: dict[Any, torch.fx.Node] = {}
    for node in [node for node in graph.nodes if node.meta.get(SHARED)]:
        known = first.setdefault(node.args[:2], node)
        if known is not node:
            node.replace_all_uses_with(known)
            graph.erase_node(node)
