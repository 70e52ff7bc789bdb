"""The contract of a front end: what it is given, and what it gives, a program or why there is none."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch

from ..errors import ParseError
from ..operators.registry import updates_statistics
from ..program.opaque import OpaqueCall
from ..program.program import AfterForward, Guards
from ..program.structures import OutputSpec, TensorSpec
from ..program.tensors import Layout
from ..torch_state.private import schema_of
from ..torch_state.reads import Reads
from .arguments import Sample

READS = "reads"
"""In the ``meta`` of an opaque module's node: whether Python reads numbers out of tensors in it."""

SIZED = "sized"
"""In a node's ``meta``: whether data decide on the sizes of its results, as far as is known."""

CALL, ALIVE = "call", "alive"
"""In a node's ``meta``, if the front end knows: the number of its call, and that of the last call during which the
forward held the memory that its result was the first to be in."""

BYTES, HISTORY = "bytes", "history"
"""In a node's ``meta``, if the front end knows: the bytes of the memory that its result was the first to be in; and, of
a call that autograd has a node for, its :class:`History`."""

SEEN = "seen"
"""In a node's ``meta``: the :class:`Seen` of its call, None where the front end does not know."""

ON_CONSTANTS = {torch.ops.aten.lift_fresh.default, torch.ops.aten.detach_.default}
"""Calls by PyTorch on a tensor that it makes of Python's data: nothing comes of them, and no program has them."""


RECORD = "record"
"""The name of the front end that is the default."""


class History(NamedTuple):
    """What autograd's node for a call holds, as long as something differentiable comes of its results."""

    results: tuple[str, ...]  # names of the nodes whose results were the first in the memory of its own results
    saved: tuple[str, ...]  # the same of what it saves
    bytes: int  # of what it saves besides


class Seen(NamedTuple):
    """What a call was given, shares and saves."""

    given: tuple[TensorSpec, ...]  # each tensor that it is given, in order
    views: tuple[int | None, ...]  # for each result, the number of a given tensor whose storage it shares
    # for each saved tensor, whether a result it is like and which, or which given tensor, and its layout where that
    # differs; None for an internal one
    saves: tuple[tuple[tuple[bool, int], Any] | None, ...]

    @property
    def kinds(self) -> list[int]:
        """For each given tensor, the first of its kind."""
        return list(map(self.given.index, self.given))

    @property
    def outline(self) -> tuple[Any, ...]:
        """What a call that does the same to memory has, too, whatever the sizes."""
        given = [outline_of(spec.shape, spec.stride) for spec in self.given]
        return given, self.views, [save and (save[0], save[1] is None) for save in self.saves]


@lru_cache(maxsize=10_000)
def outline_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[Any, ...]:
    """Which sizes are zero or one, and whether such a tensor is dense."""
    return *(min(size, 2) for size in shape), Layout(shape, strides).is_dense


class FrontEnd(Protocol):
    """Turns a forward into a program; :mod:`ogc.parser.faithful` names them and has their programs verified."""

    def __call__(self, sample: Sample, forward: Callable[..., Any], opaque: set[str], is_careful: bool) -> Traced:
        """Run ``forward`` once on the arguments of ``sample`` and return what it computed.

        Gradients are on, but nothing is saved for a backward: memory is that of inference.

        Args:
            sample: the model and its arguments; buffers, attributes and random states change as in one forward.
            forward: what is to be recorded, the model's own or one made by hand.
            opaque: names of submodules to call as they are, each call one node, a
                :class:`~ogc.program.opaque.OpaqueCall`.
            is_careful: look closer, at the cost of time; so asked for by :class:`RecordAgain`.

        Raises:
            OpaqueError: the forward does what no program can hold; modules named by it would have to be opaque.
            ParseError: the forward cannot be represented faithfully; the message names file and line.
            RecordAgain: it has turned out how to write it down; to be called again from the state before.
            Exception: whatever the model's own forward raises, with a note saying so.
        """


class Unlike(Exception):
    """A forward does something else than a recorded program; the argument says what."""


@dataclass
class Followed:
    """What a forward along a recorded program took, by the names of the nodes, and what came of it."""

    taken: dict[str, list[Any]] = field(default_factory=dict)  # what each call takes, in order; None for tensors
    changed: list[str] = field(default_factory=list)  # the calls that take other numbers
    seen: dict[str, Seen] = field(default_factory=dict)  # of those calls for which it is wanted
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of each tensor
    outputs: list[torch.Tensor] = field(default_factory=list)
    output_spec: OutputSpec | None = None
    requires_grad: list[bool] = field(default_factory=list)


@dataclass(frozen=True)
class StepEnd:
    """How a step goes on from a forward."""

    starts: tuple[int, ...]  # the numbers of the outputs at which the backward starts
    # what was said of that; a loss gives one output more, the last, and its calls are part of the program
    after_forward: AfterForward = field(default_factory=AfterForward)

    @property
    def has_loss(self) -> bool:
        """Whether the program ends with the loss."""
        return callable(self.after_forward.loss)


@dataclass(frozen=True)
class Traced:
    """A recorded forward: its program, and the outputs and output structure of the recorded call."""

    graph: torch.fx.Graph  # call nodes carry ``meta["module"]`` and ``meta["source"]``
    # tensors that are no attribute of the model, by the name of their ``get_attr`` node
    constants: dict[str, torch.Tensor]
    output_spec: OutputSpec  # the structure of the result
    outputs: list[torch.Tensor]  # its tensors, detached
    requires_grad: list[bool] = field(default_factory=list)  # of each output
    grad_targets: frozenset[Any] = frozenset()  # what a backward gives gradients to; see forward/flat.py
    guards: Guards | None = None  # what Python read out of tensors; the program holds where these are the same
    # the model's after the call, once that was verified; see forward/flat.py
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    python_calls: int = 0  # of functions, Python's and others, by the forward's own code
    reads: Reads = field(default_factory=Reads)  # what Python read outside of tensors
    cold: Reads | None = None  # what it reads in a first call that settles what all others read, if there is one
    end: StepEnd | None = None  # how a step goes on from here, once that is known
    parting: str = ""  # of another tracer's graph: the first call that the forward was not seen to make, in words


class RecordAgain(Exception):
    """It has turned out how the forward is to be recorded; ``is_careful`` if slowly, to see where something happens."""

    def __init__(self, is_careful: bool) -> None:
        super().__init__()
        self.is_careful = is_careful


class OpaqueError(ParseError):
    """The forward does what no program can hold; modules that hide it, by name, and why each would have to."""

    def __init__(self, message: str, modules: dict[str, str], are_written: bool = False) -> None:
        super().__init__(message)
        self.modules = modules
        self.are_written = are_written  # what calls compute, they change for the next ones


def forget_calls(node: torch.fx.Node) -> None:
    """Take out of a node's ``meta`` what it says of other calls, which are none of the forward's."""
    for key in (CALL, ALIVE, BYTES, HISTORY):
        node.meta.pop(key, None)


def has_effects(operator: Any) -> bool:
    """Whether a call does more than it returns: it writes, checks, draws random numbers, or may do anything."""
    schema, tags = schema_of(operator), getattr(operator, "tags", ())
    changes = bool(schema and (schema.is_mutable or not schema.returns)) or isinstance(operator, OpaqueCall)
    return changes or updates_statistics(operator) or torch.Tag.nondeterministic_seeded in tags


def without_unused(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A copy without calls that nothing uses and that have no effect.

    An operator's own results all stay, each by its number: its backward may need those that the forward does not.
    """
    needed = used(graph)
    result = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        if node in needed:
            copies[node] = result.node_copy(node, copies.__getitem__)
    return result


def used(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The nodes of a program that something uses, or that have an effect."""
    needed: set[torch.fx.Node] = set()
    for node in reversed(graph.nodes):
        acts = node.op == "call_function" and has_effects(node.target)
        if acts or node in needed or node.op in ("placeholder", "output"):
            needed.add(node)
            needed.update(node.all_input_nodes)
    needed.update(node for node in graph.nodes if _is_own_result(node) and node.args[0] in needed)
    return needed


def _is_own_result(node: torch.fx.Node) -> bool:
    """Whether a node is one of several tensors that an operator returns, not an entry of a list that it returns."""
    if node.target is not operator.getitem or not isinstance(node.args[0], torch.fx.Node):
        return False
    return len(getattr(schema_of(node.args[0].target), "returns", ())) > 1
