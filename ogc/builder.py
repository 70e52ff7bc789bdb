"""Writes down what a model computes, call by call: a graph by hand for ``parse_graph=``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.node import Node

from .errors import ParseError


class GraphBuilder:
    """The calls of a model's forward, in the order in which they are to run.

    For ``parse_graph=`` of :func:`ogc.optimize` and :func:`ogc.parse`::

        def parse_graph(model, images):
            build = ogc.GraphBuilder(model)
            x = build.input("images")
            y = build.call(model.convolution, x)
            y = build.call(torch.add, y, x, alpha=2)
            return build.output(build.call(model.head, y))

    Nodes stand for values without a shape: arithmetic on them is a ``call`` too (``operator.getitem`` for a part of a
    result). Other arguments, such as the model's parameters and buffers, are passed on as they are.

    Attributes:
        graph: what was written so far, a ``torch.fx.Graph``.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        if not isinstance(model, torch.nn.Module):
            raise ParseError(f"a GraphBuilder is for a torch.nn.Module, not for {type(model).__name__}")
        self.graph = torch.fx.Graph()
        self._paths = {module: path for path, module in model.named_modules() if path}

    def input(self, name: str) -> Node:
        """The next argument of the forward, by position or by this name."""
        self._check_open()
        if any(node.target == name for node in self.graph.find_nodes(op="placeholder")):
            raise ParseError(f"the graph has two inputs named '{name}'")
        node = self.graph.placeholder(name)
        node.meta["label"] = f"input '{name}'"
        return node

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Node:
        """The result of ``function(*args, **kwargs)``.

        Args:
            function: one of the model's submodules, or any function of tensors.
            args: nodes, tensors of the model, constants, and lists, tuples and dicts of them.
            kwargs: like ``args``.

        Raises:
            ParseError: ``function`` cannot be called.
        """
        return self.labelled_call("", function, args, kwargs)

    def labelled_call(
        self, label: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Node:
        """:meth:`call`, with what messages are to call the node."""
        self._check_open()
        if not callable(function):
            raise ParseError(f"{label or 'a node of the graph'} calls {function!r}, which is not callable")
        path = self._paths.get(function) if isinstance(function, torch.nn.Module) else None
        name = str(path or getattr(function, "__name__", type(function).__name__)).replace(".", "_").lower()
        kind = "call_module" if path else "call_function"
        node = self.graph.create_node(kind, path or function, args, kwargs, name=name)
        if label:
            node.meta["label"] = label
        return node

    def output(self, result: Any) -> GraphBuilder:
        """End the graph with what the forward returns: a node, or a list, tuple or dict of nodes.

        Returns:
            The builder itself, for ``parse_graph`` to return.

        Raises:
            ParseError: a node leads nowhere.
        """
        self._check_open()
        self.graph.output(result)
        for node in self.graph.nodes:
            if node.op not in ("placeholder", "output") and not node.users:
                raise ParseError(f"{label_of(node)} does not lead to the output; use its result or leave it out")
        return self

    @property
    def is_complete(self) -> bool:
        """Whether the graph has its output."""
        return bool(self.graph.find_nodes(op="output"))

    def _check_open(self) -> None:
        if self.is_complete:
            raise ParseError("the graph has its output already; nothing can come after it")


def label_of(node: Node) -> str:
    """What messages call a node."""
    return str(node.meta.get("label", f"node '{node.name}'"))
