"""One step of the model in parts, with what is allocated around each part read off the allocator.

What the rest of the model holds while a part runs, forward and backward, is seen, not deduced: operators of the model's
own forward, modules that stay plain, gradients that wait for them. The step runs with plans of which everything is
known that the parts take; what is there beyond that is the rest's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch.autograd.graph import Node

from ..parser.arguments import call_arguments, copies
from ..parser.weigh.leaf import leaf_nodes
from ..plan import PartCost
from ..program.program import device_of_model, tensor_leaves
from ..program.structures import Given, InputSpec, OutputSpec, TensorSpec
from ..torch_state.allocator import Mark, marked_bytes
from ..torch_state.no_trace import cut_history, untouched
from ..torch_state.private import current_backward, keeps_graph
from ..torch_state.ranks import alone, own_parameters
from .choice.combine import Stop
from .module import Parts, Twin


@dataclass(frozen=True)
class Rest:
    """What the rest of the model takes in one step.

    Attributes:
        before: most bytes before the first call of a part, forward or backward.
        stops: the calls, with what the rest takes while and after each.
        kept_bytes: what the rest holds from the forward to the backward.
        time_share: the time of the rest's forward over that of all parts'.
    """

    before: int
    stops: tuple[Stop, ...]
    kept_bytes: int
    time_share: float


def measure(model: torch.nn.Module, optimized: torch.nn.Module, parts: Parts, sample_input: Any) -> list[Mark]:
    """The marks of one step of ``optimized``: where each call begins and ends, forward and backward.

    Gradients of parameters go no further than to where they would be added up. The model is afterwards as before.

    Args:
        model, optimized: the plain model, and the one in parts.
        parts: those of ``optimized``.
        sample_input: as for :func:`ogc.optimize`.
    """
    spec, tensors = InputSpec.of(*call_arguments(sample_input))
    given = copies(tensors)

    def step(mark: Callable[[str], None]) -> None:
        parts.run_part = _Marking(mark).call
        args, kwargs = spec.rebuild(given)
        with torch.enable_grad():
            ends = [t for t in tensor_leaves(optimized.forward(*args, **kwargs)) if t.requires_grad]
        mark("turn")
        if ends:
            root = _Seeds.apply(*ends)
            stops = [node.register_prehook(lambda gradients: (None,)) for node in leaf_nodes(root)]
            try:
                root.backward()
            finally:
                for handle in stops:
                    handle.remove()

    try:
        with untouched(model, given=spec.constants), alone():
            cut_history(list(model.modules()))
            own_parameters(model)  # the hooks of the others must not be called for nothing
            return marked_bytes(step, device_of_model(model))
    finally:
        parts.run_part = None


@dataclass
class _Marking:
    """Marks where calls of parts begin and end."""

    mark: Callable[[str], None]
    calls: int = 0

    def call(self, twin: Twin, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number, self.calls = self.calls, self.calls + 1
        spec, tensors = InputSpec.of(args, kwargs)
        marked = spec.rebuild([self._marked(tensor, f"done {number}") for tensor in tensors])
        given = Given(*marked)
        self.mark(f"enter {number}")
        result = twin.call(*marked)
        self.mark(f"leave {number}")
        outputs, tensors = OutputSpec.of(result, given)
        result = outputs.deliver(tensors, args, kwargs)
        made = [tensor for tensor in tensor_leaves(result) if tensor.requires_grad and tensor.grad_fn is not None]
        for tensor in made:
            self._mark_backward(tensor, f"back {number}")
        if not any(tensor.requires_grad for tensor in tensor_leaves(marked)):
            for node in _nodes_of_parameters(made, twin.module):
                self._mark_backward(node, f"done {number}")
        return result

    def _marked(self, tensor: torch.Tensor, label: str) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        seen = tensor.view_as(tensor)
        self._mark_backward(seen, label)
        return seen

    def _mark_backward(self, of: torch.Tensor | Node, label: str) -> None:
        """Mark when the gradient of a tensor is there, or a node is done, with the number of the backward, and whether
        another one may come."""
        of.register_hook(lambda *_: self.mark(f"{label} {current_backward()} {int(keeps_graph())}"))


def _nodes_of_parameters(results: Sequence[torch.Tensor], module: torch.nn.Module) -> list[Node]:
    """The nodes of the graph behind results from which gradients of a module's parameters come."""
    ends = {parameter.grad_fn for parameter in module.parameters()}  # they may be computed, as in functional_call
    found, seen, waiting = [], set(ends), [result.grad_fn for result in results]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        following = [after for after, _ in node.next_functions if after is not None]
        if any(after in ends or not after.next_functions for after in following):
            found.append(node)
        waiting += following
    return found


class _Seeds(torch.autograd.Function):
    """Makes the gradients of all outputs when the backward starts."""

    @staticmethod
    def forward(ctx: Any, *ends: torch.Tensor) -> torch.Tensor:
        ctx.like = list(map(TensorSpec.of, ends))
        return torch.zeros((), device=ends[0].device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.ones(like.shape, dtype=like.dtype, device=like.device) for like in ctx.like)


def rest_of_step(
    marks: Sequence[Mark], stops: Sequence[Stop], costs: Sequence[PartCost], kept: Sequence[int]
) -> Rest | None:
    """What the rest takes, by the marks of a step; None if its calls were others.

    Args:
        marks: of :func:`measure`.
        stops: for each call, what is known of it.
        costs: for each call, what the part takes by the plan that it ran by.
        kept: for each call, the bytes that stay of it.
    """
    entered = [mark.label for mark in marks if mark.label.startswith("enter ")]
    return _Reading(stops, costs, kept).read(marks) if len(entered) == len(stops) else None


class _Reading:
    """Adds up, mark by mark, what is there beyond what parts keep."""

    def __init__(self, stops: Sequence[Stop], costs: Sequence[PartCost], kept: Sequence[int]) -> None:
        self.stops = stops
        self.costs = costs
        self.kept = kept
        self.before = [0] * len(stops)  # what is kept of others when a call begins
        self.forward = [0] * len(stops)
        self.backward: list[int | None] = [None] * len(stops)
        self.rest = [0] * (len(stops) + 1)  # by the number of calls
        self.ended: list[list[int]] = [[] for _ in stops]
        self.inside: list[dict[int, int]] = [{} for _ in stops]
        self.backwards: list[set[str]] = [set() for _ in stops]
        self.open: set[int] = set()  # calls of which something is kept
        self.ending: set[int] = set()  # those whose graph is gone when the forward goes on
        self.calls = 0  # that there were, or are not done with their backward
        self.turn: int | None = None
        self.running: tuple[int, int] | None = None  # a call in its backward, and the bytes when that began
        self.seconds = [0.0, 0.0]  # of the rest's forward, and of the parts'

    def read(self, marks: Sequence[Mark]) -> Rest:
        ends = {mark.label: number for number, mark in enumerate(marks)}  # the last of each label
        for number, (last, mark) in enumerate(pairwise(marks), 1):
            self._between(last, mark, is_last=ends[mark.label] == number)
        stops = tuple(
            replace(
                stop,
                forward=self.forward[n],
                backward=self.forward[n] if (back := self.backward[n]) is None else back,
                after=self.rest[n + 1],
                backwards=max(1, len(self.backwards[n])),
                inside=tuple(self.inside[n].items()),
                ended=tuple(self.ended[n]),
            )
            for n, stop in enumerate(self.stops)
        )
        return Rest(self.rest[0], stops, self.turn or 0, self.seconds[0] / (self.seconds[1] or 1.0))

    def _between(self, last: Mark, mark: Mark, is_last: bool) -> None:
        kind, number, *backward = *mark.label.split(), *["0"] * (" " not in mark.label)
        call = int(number)
        if self.running is not None:
            self._backward_of_part(mark, *self.running)
        elif kind == "leave":
            self._forward_of_part(last, mark, call)
        else:
            self._rest(mark)
        if backward:
            self._go_back(mark, kind, call, backward, is_last)
        else:
            self._go_on(last, mark, kind, call)

    def _go_on(self, last: Mark, mark: Mark, kind: str, call: int) -> None:
        """The forward goes on; a backward inside of it, if there was one, is over."""
        self.running = None
        for number in sorted(self.ending & self.open):
            self.ended[self.calls - 1].append(number)
            self.open.remove(number)
        self.seconds[kind == "leave"] += mark.seconds - last.seconds
        if kind == "enter":
            self.before[call] = self._held
        elif kind == "leave":
            self.open.add(call)
            self.calls = call + 1
        elif kind == "turn":
            self.turn = max(0, mark.bytes - self._held)

    def _go_back(self, mark: Mark, kind: str, call: int, backward: list[str], is_last: bool) -> None:
        """The backward with this number comes to a call, or is done with it."""
        number, keeps_graph = backward
        if kind == "back":
            self.backwards[call].add(number)
            if self.running is None or self.running[0] != call:
                self.running = (call, mark.bytes)
        elif is_last and self.running is not None and self.running[0] == call:
            self.running = None
        if self.turn is not None:
            self.open = {n for n in self.open if n < call or (n == call and kind == "back")}
            self.calls = 1 + max(self.open, default=-1)
        elif keeps_graph == "0":
            self.ending.add(call)

    @property
    def _held(self) -> int:
        return sum(self.kept[call] for call in self.open)

    def _forward_of_part(self, last: Mark, mark: Mark, call: int) -> None:
        most = max(last.bytes, mark.peak_bytes - self.costs[call].forward_bytes)
        self.forward[call] = most - self.before[call]

    def _backward_of_part(self, mark: Mark, call: int, start: int) -> None:
        cost = self.costs[call]
        kept = self._held - self.kept[call] if self.turn is None else self.before[call]
        held = start - kept - self.kept[call] - cost.gradient_bytes
        rest = max(held, mark.peak_bytes - kept - cost.backward_bytes)
        if self.turn is None:
            inside = self.inside[self.calls - 1]
            inside[call] = max(inside.get(call, rest), rest)
        else:
            known = self.backward[call]
            self.backward[call] = rest if known is None else max(known, rest)

    def _rest(self, mark: Mark) -> None:
        self.rest[self.calls] = max(self.rest[self.calls], mark.peak_bytes - self._held)
