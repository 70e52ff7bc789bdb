"""Graphs made by hand (``parse_graph=``), in whatever form: a :class:`CustomForward` runs them.

It takes the place of the model's forward before the front end: its operators are recorded and weighed like any model's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.fx.node import Node

from ..errors import InputError, OgcError, ParseError, add_note
from ..program.program import args_of, attribute, run_nodes
from ..torch_state.private import pytree
from .forward.location import scope


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


def place_of(node: Node) -> tuple[str, str]:
    """What messages call the place of a node: its module, or else its label, and its line if that is known."""
    return node.meta.get("module", label_of(node).replace("/", "_")), node.meta.get("source", "")


ParseGraph = Callable[..., Any]

VARIANTS = (
    "a torch.fx.Graph or GraphModule, a torch.export.ExportedProgram, an ogc.GraphBuilder, or "
    "(networkx.MultiDiGraph, source, target)"
)


class CustomForward:
    """A graph made by hand, called like the model's forward. ParseError if it is none, or uses others' parameters.

    Args:
        graph: the program, each node in front of those that use it.
        root: where the targets of its nodes are found, the model or a GraphModule around parts of it.
        signature: how arguments become its inputs; by default each placeholder is one.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        graph: torch.fx.Graph,
        root: torch.nn.Module | None = None,
        signature: inspect.Signature | None = None,
    ) -> None:
        self.graph = graph
        self.root = model if root is None else root
        self.inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.signature = signature or _signature(self.inputs)
        self._check_order()
        self._check_targets(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph, node by node, while it is being recorded; ParseError names a node that cannot be run."""
        return run_nodes(self.graph.nodes, self._bind(args, kwargs), self._held, self._run)

    def output_label(self, number: int) -> str:
        """The label, for messages, of the node that gives output tensor ``number``."""
        (output,) = self.graph.find_nodes(op="output")
        nodes = [node for node in pytree.tree_leaves(output.args[0]) if isinstance(node, Node)]
        return label_of(nodes[number] if number < len(nodes) else output)

    def _held(self, name: str) -> Any:
        """What a node stands for; of the body of a call, which is a graph again, what runs it."""
        held = attribute(self.root, name)
        if not isinstance(held, torch.fx.GraphModule):
            return held
        return lambda *inputs: run_nodes(held.graph.nodes, inputs, partial(attribute, held), self._run)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ParseError(f"the graph takes {self.signature}, the sample input does not fit: {error}") from None
        bound.apply_defaults()
        given = self.graph.process_inputs(*bound.arguments.values())
        if len(given) != len(self.inputs):
            raise ParseError(f"the graph takes {len(self.inputs)} inputs, the sample input gives {len(given)}")
        return list(given)

    def _run(self, node: Node, values: dict[Node, Any]) -> Any:
        args, kwargs = args_of(node, values)
        try:
            with scope(*place_of(node)):
                if node.op == "call_module":
                    return attribute(self.root, str(node.target))(*args, **kwargs)
                if node.op == "call_method":
                    return getattr(args[0], str(node.target))(*args[1:], **kwargs)
                return node.target(*args, **kwargs)  # type: ignore[operator]
        except OgcError:
            raise
        except Exception as error:
            text = str(error).partition("\n")[0]
            raise ParseError(f"{label_of(node)} of the graph raises {type(error).__name__}: {text}") from error

    def _check_order(self) -> None:
        seen: set[Node] = set()
        from_inputs: set[Node] = set(self.inputs)
        for node in self.graph.nodes:
            for used in node.all_input_nodes:
                if used.graph is not self.graph:
                    raise ParseError(f"{label_of(node)} uses {label_of(used)}, which belongs to another graph")
                if used not in seen:
                    raise ParseError(
                        f"{label_of(node)} uses {label_of(used)} before it is computed: the graph has a cycle or is "
                        "out of order"
                    )
            seen.add(node)
            if not from_inputs.isdisjoint(node.all_input_nodes):
                from_inputs.add(node)
        outputs = self.graph.find_nodes(op="output")
        if not outputs:
            raise ParseError("the graph has no output node; end it with one")
        if outputs[0] not in from_inputs:
            raise ParseError("the output of the graph does not depend on its inputs")

    def _check_targets(self, model: torch.nn.Module) -> None:
        own = {id(tensor) for tensor in chain(model.parameters(), model.buffers())}
        for node in self.graph.nodes:
            used: list[Any] = [node.target, *pytree.tree_leaves((node.args, node.kwargs))]
            if node.op in ("get_attr", "call_module"):
                try:
                    used.append(attribute(self.root, str(node.target)))
                except AttributeError as error:
                    raise ParseError(f"{label_of(node)} stands for '{node.target}': {error}") from None
            for thing in used:
                foreign = _foreign(thing, own)
                if foreign:
                    raise ParseError(
                        f"{label_of(node)} uses {foreign}, which is not the model's; the optimized model trains and "
                        "saves its own parameters and buffers only, so make it part of the model"
                    )


def parse_graph_of(model: torch.nn.Module, parse_graph: ParseGraph | bool | None) -> ParseGraph | None:
    """``parse_graph``, else the model's own method of that name, if any; InputError if it is no function."""
    if parse_graph is None or parse_graph is True:
        own = getattr(type(model), "parse_graph", None)
        if not callable(own) and parse_graph:
            raise InputError(f"parse_graph=True, but {type(model).__name__} has no method parse_graph")
        parse_graph = own if callable(own) else None
    if parse_graph is None or parse_graph is False:
        return None
    if not callable(parse_graph):
        raise InputError(f"parse_graph must be a function of the model and its inputs, not {parse_graph!r}")
    return parse_graph


def custom_forward(
    model: torch.nn.Module, parse_graph: ParseGraph, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> CustomForward:
    """The forward of the graph that ``parse_graph`` makes of the model.

    InputError if that is no graph, ParseError if it is not one of this model; errors of its own get a note that says
    so.
    """
    try:
        made = parse_graph(model, *args, **kwargs)
    except Exception as error:
        add_note(error, "ogc: this error was raised by parse_graph on the sample input.")
        raise
    return _forward_of(model, made, args, kwargs)


def _forward_of(model: torch.nn.Module, made: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CustomForward:
    if isinstance(made, torch.export.ExportedProgram):
        made = made.module(check_guards=False)
    if isinstance(made, torch.fx.GraphModule):
        return CustomForward(model, made.graph, made, inspect.signature(made.forward))
    if isinstance(made, torch.fx.Graph):
        return CustomForward(model, made)
    if isinstance(made, tuple) and len(made) == 3 and _is_networkx(made[0]):
        made = _from_networkx(model, *made, args, kwargs)
    if isinstance(made, GraphBuilder):
        if not made.is_complete:
            raise ParseError("the GraphBuilder that parse_graph returned has no output; end it with .output(...)")
        return CustomForward(model, made.graph)
    described = f"({', '.join(type(x).__name__ for x in made)})" if isinstance(made, tuple) else type(made).__name__
    raise InputError(f"parse_graph must return {VARIANTS}; it returned {described}")


def _signature(inputs: list[Node]) -> inspect.Signature:
    """The arguments that placeholders stand for; their own arguments are default values."""
    kinds = {0: inspect.Parameter.POSITIONAL_OR_KEYWORD, 1: inspect.Parameter.VAR_POSITIONAL}
    parameters = []
    for node in inputs:
        stars = len(str(node.target)) - len(str(node.target).lstrip("*"))
        default = node.args[0] if node.args else inspect.Parameter.empty
        kind = kinds.get(stars, inspect.Parameter.VAR_KEYWORD)
        parameters.append(inspect.Parameter(str(node.target).lstrip("*"), kind, default=default))
    return inspect.Signature(parameters)


def _foreign(thing: Any, own: set[int]) -> str:
    """A parameter or buffer in use that is not among the model's, in words; else nothing."""
    if isinstance(thing, torch.nn.Module):
        for name, tensor in chain(thing.named_parameters(), thing.named_buffers()):
            if id(tensor) not in own:
                return f"'{name}' of a {type(thing).__name__}"
    elif isinstance(thing, torch.Tensor) and thing.requires_grad and id(thing) not in own:
        return f"a tensor of shape {tuple(thing.shape)} that requires grad"
    return ""


def _is_networkx(dag: Any) -> bool:
    import networkx as nx

    return isinstance(dag, nx.DiGraph)


def _from_networkx(
    model: torch.nn.Module, dag: Any, source: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> GraphBuilder:
    """The published form (Feng & Huang, 2021): vertices are values, an edge applies its ``module`` to its tail.

    A vertex with a ``transition`` is that function of its edges' results, in ``transition_input_order``, a list of
    (tail, key) or of tails; without it their sum, in the order in which the edges were added. Costs are not read.
    """
    if len(args) + len(kwargs) != 1:
        raise ParseError(
            f"a graph with one source takes one input, the sample input has {len(args) + len(kwargs)}; use "
            "ogc.GraphBuilder for several"
        )
    import networkx as nx

    dag = nx.MultiDiGraph(dag)
    _check_dag(dag, source, target)
    build = GraphBuilder(model)
    values = {source: build.input(next(iter(kwargs), "input"))}
    position = {vertex: number for number, vertex in enumerate(dag)}
    for vertex in nx.lexicographical_topological_sort(dag, position.__getitem__):
        if vertex != source:
            values[vertex] = _vertex(build, dag, vertex, values)
    return build.output(values[target])


def _check_dag(dag: Any, source: Any, target: Any) -> None:
    import networkx as nx

    for role, vertex in (("source", source), ("target", target)):
        if vertex not in dag:
            raise ParseError(f"the {role} {vertex!r} is not a node of the graph")
    if source == target:
        raise ParseError(f"source and target are the same node {source!r}")
    if not nx.is_directed_acyclic_graph(dag):
        around = [edge[0] for edge in nx.find_cycle(dag)]
        raise ParseError(f"the graph has a cycle: {' -> '.join(map(repr, [*around, around[0]]))}")
    from_source, to_target = nx.descendants(dag, source) | {source}, nx.ancestors(dag, target) | {target}
    for vertex in dag:
        if vertex not in from_source:
            raise ParseError(f"node {vertex!r} cannot be reached from the source {source!r}")
        if vertex not in to_target:
            raise ParseError(f"node {vertex!r} does not lead to the target {target!r}")


def _vertex(build: GraphBuilder, dag: Any, vertex: Any, values: dict[Any, Node]) -> Node:
    results = {}
    for tail, _, key, data in dag.in_edges(vertex, keys=True, data=True):
        edge = f"edge {tail!r} -> {vertex!r}" + (f" ({key!r})" if key else "")
        if data.get("module") is None:
            raise ParseError(f"{edge} has no module; give it torch.nn.Identity() if it only carries its value on")
        results[tail, key] = build.labelled_call(edge, data["module"], (values[tail],), {})
    node = dag.nodes[vertex]
    ordered = _ordered(vertex, results, node.get("transition_input_order"))
    if node.get("transition") is not None:
        return build.labelled_call(f"node {vertex!r}", node["transition"], (ordered,), {})
    total = ordered[0]
    for more in ordered[1:]:
        total = build.labelled_call(f"node {vertex!r}", torch.add, (total, more), {})
    return total


def _ordered(vertex: Any, results: dict[tuple[Any, Any], Node], order: list[Any] | None) -> list[Node]:
    if order is None:
        return list(results.values())
    tails = {tail: (tail, key) for tail, key in results}
    edges = [one if isinstance(one, tuple) and one in results else tails.get(one) for one in order]
    if None in edges:
        unknown = order[edges.index(None)]
        raise ParseError(
            f"node {vertex!r}: transition_input_order names {unknown!r}, but the edges into it come from "
            f"{', '.join(map(repr, results))} (tail, key)"
        )
    for edge in results:
        if edge not in edges:
            raise ParseError(f"node {vertex!r}: transition_input_order leaves out the edge from {edge!r} (tail, key)")
    return [results[edge] for edge in edges if edge is not None]
