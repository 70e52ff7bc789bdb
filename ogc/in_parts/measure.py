"""One step of the model in parts, with what is allocated around each part read off the allocator.

What is held outside of a part while it runs, forward and backward, is seen, not deduced: operators of the model's
own forward, modules that stay plain, gradients that wait for them. The step runs with plans of which everything is
known that the parts take; what is there beyond that is outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch.autograd.graph import Node

from ..parser.arguments import call_arguments, copies
from ..parser.weigh.call import leaf_nodes
from ..program.program import device_of_model, tensor_leaves
from ..program.structures import Given, InputSpec, OutputSpec, TensorSpec
from ..torch_state.allocator import Mark, marked_bytes
from ..torch_state.no_trace import cut_history, untouched
from ..torch_state.private import current_backward, keeps_graph
from ..torch_state.ranks import alone, own_parameters
from .joined import BACK, CALL, REGION, REGION_BACK, Choice, Event, Joined
from .module import Parts, PlannedPart


@dataclass(frozen=True)
class Outside:
    """What runs outside of the parts takes in one step.

    Attributes:
        events: of the step, with the bytes outside of parts.
        saved_bytes: what it holds from the forward to the backward.
        time_share: the time of its forward over that of all parts'.
    """

    events: tuple[Event, ...]
    saved_bytes: int
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

    def call(self, member: PlannedPart, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number, self.calls = self.calls, self.calls + 1
        spec, tensors = InputSpec.of(args, kwargs)
        marked = spec.rebuild([self._marked(tensor, f"done {number}") for tensor in tensors])
        given = Given(*marked)
        self.mark(f"enter {number}")
        result = member.call(*marked)
        self.mark(f"leave {number}")
        outputs, tensors = OutputSpec.of(result, given)
        result = outputs.deliver(tensors, args, kwargs)
        made = [tensor for tensor in tensor_leaves(result) if tensor.requires_grad and tensor.grad_fn is not None]
        for tensor in made:
            self._mark_backward(tensor, f"back {number}")
        if not any(tensor.requires_grad for tensor in tensor_leaves(marked)):
            for node in _nodes_of_parameters(made, member.module):
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


def outside_of_step(marks: Sequence[Mark], step: Joined, choice: Choice) -> Outside | None:
    """What is outside of the parts, by the marks of a step with parts by ``choice``; None if its calls were others."""
    entered = [mark.label for mark in marks if mark.label.startswith("enter ")]
    if entered != [f"enter {n}" for n in range(len(step.calls))]:
        return None
    stages = _stages(marks)
    sizes = step.sizes(choice, [stage.event for stage in stages])
    events = tuple(
        replace(stage.event, outside=max(stage.start - begin, stage.most - most))
        for stage, (begin, most) in zip(stages, sizes, strict=True)
    )
    turn = next(n for n, event in enumerate(events) if event.key[0] == REGION_BACK)
    seconds = [0.0, 0.0]  # of the forward outside of parts, and of the parts'
    for before, mark in pairwise(marks):
        if mark.label.startswith(("enter", "leave", "turn")):
            seconds[mark.label.startswith("leave")] += mark.seconds - before.seconds
    return Outside(events, max(0, stages[turn].start - sizes[turn][0]), seconds[0] / (seconds[1] or 1.0))


@dataclass
class _Stage:
    """What happens between some marks: the bytes when it begins, and the most during it."""

    event: Event
    start: int
    most: int = 0


def _stages(marks: Sequence[Mark]) -> list[_Stage]:
    """The stages of a step that its marks bound."""
    stages: list[_Stage] = []
    last_of = {mark.label: number for number, mark in enumerate(marks)}
    region, region_key, back = 0, REGION, None  # a call in its backward, if there is one
    for number, (before, mark) in enumerate(pairwise(marks), 1):
        kind, *named = mark.label.split()
        call, backward, keeps_graph = map(int, [*named, *["0"] * 3][:3])
        event = back or Event((CALL, call) if kind == "leave" else (region_key, region))
        if not stages or stages[-1].event != event:
            stages.append(_Stage(event, before.bytes))
        stages[-1].most = max(stages[-1].most, mark.peak_bytes)
        if kind == "back":
            back = Event((BACK, call), ends=region_key == REGION_BACK or not keeps_graph, backward=backward)
        elif kind != "done":
            back, region = None, call + 1 if kind == "leave" else region
        elif back is not None and back.key == (BACK, call) and last_of[mark.label] == number:
            back = None
        if kind == "turn":
            region_key = REGION_BACK
        elif kind == "done" and region_key == REGION_BACK:
            region = call
    last = {stage.event.key: stage for stage in stages}
    for stage in stages:
        stage.event = replace(stage.event, ends=stage.event.ends and stage is last[stage.event.key])
    return stages
