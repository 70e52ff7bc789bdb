"""Regions that work sample by sample, run forward and backward a part of the batch at a time.

Of what is made and saved inside, only one slice's share is alive at once; between forward and backward the inputs are
held. Gradients of parameters are sums over the samples: added up chunk by chunk they differ from PyTorch's in the last
bits, and a kernel chosen for a smaller batch may round otherwise too. Nothing is chunked unless the user asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..operators.low_memory import LowMemory, even_parts, is_pytorchs
from ..program.opaque import Region
from ..program.program import without_autocast
from ..torch_state.private import untraced
from .rules import rule_of

Tensors = Sequence[torch.Tensor | None]

_SMALL_FLOPS = 1e9
"""Below this, what the kernels inside copy is measured: small chunks are convolved in many ways."""


@dataclass(frozen=True, eq=False)
class Chunked(Region):
    """A region that runs chunk by chunk.

    Attributes:
        graph: a placeholder for each argument, one tensor as output.
        axes: for each argument, the axis along which it is chunked; None where it is whole.
        chunks: into how many chunks, if there are as many entries along the shortest of these axes.
        axis: that of the result along which its chunks lie.
    """

    name: str
    graph: torch.fx.Graph
    axes: tuple[int | None, ...]
    chunks: int
    axis: int = 0

    @property
    def __name__(self) -> str:
        return "chunked"

    def __call__(self, *tensors: torch.Tensor | None) -> torch.Tensor:
        result: torch.Tensor = _Chunks.apply(self, *tensors)
        return result

    live = ()
    recomputes = True

    @property
    def key(self) -> Any:
        """There is a new one each time."""
        return "chunked", str(self.graph), self.axes, self.chunks, self.axis

    def hidden_bytes(self, operator: Any, args: Any, results: list[torch.Tensor]) -> int:
        return rule_of(operator).hidden_bytes(args, results)

    def is_run_for_bytes(self, flops: int) -> bool:
        return flops < _SMALL_FLOPS

    def run_all(self, tensors: list[torch.Tensor | None]) -> torch.Tensor:
        """The region on the arguments, or on a slice of them: each is taken out of the list, and gone once used."""
        result: torch.Tensor = self.run(tensors.pop(0) for _ in range(len(tensors)))
        return result

    def entries(self, tensors: Tensors) -> int:
        """How many there are to slice: along the shortest of the axes; others have as many or so many times more."""
        return min(
            t.shape[axis] for t, axis in zip(tensors, self.axes, strict=True) if t is not None and axis is not None
        )

    def parts(self, entries: int) -> tuple[slice, ...]:
        """The chunks of so many entries."""
        return even_parts(entries, min(self.chunks, entries))

    def cut(self, tensors: Tensors, part: slice, entries: int) -> list[torch.Tensor | None]:
        """A slice of the arguments."""
        pairs = zip(tensors, self.axes, strict=True)
        return [t if t is None or axis is None else chunk_of(t, axis, part, entries) for t, axis in pairs]

    def whole(self, tensors: Tensors) -> torch.Tensor:
        """The result for all of the arguments at once."""
        return self.run_all([*tensors])

    def to_weigh(self) -> Chunked:
        """The same region of PyTorch's own operators, but for those that save less."""
        graph = torch.fx.Graph()
        output = graph.graph_copy(self.graph, {})
        graph.output(output)
        for node in graph.nodes:
            if isinstance(node.target, LowMemory) and not node.target.saves_less:
                node.target = node.target.operator
        return replace(self, graph=graph)


class _Chunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, region: Chunked, *tensors: torch.Tensor | None) -> torch.Tensor:
        ctx.region = region
        ctx.save_for_backward(*tensors)
        entries, result = region.entries(tensors), None
        for part in region.parts(entries):
            found = region.run_all(region.cut(tensors, part, entries))
            if result is None:
                if part.stop == entries:
                    return found
                shape = [*found.shape]
                shape[region.axis] = shape[region.axis] // (part.stop - part.start) * entries
                result = found.new_empty(shape)
            chunk_of(result, region.axis, part, entries).copy_(found)
            del found
        assert result is not None
        return result

    @staticmethod
    @untraced
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        region, tensors, needs = ctx.region, ctx.saved_tensors, ctx.needs_input_grad[1:]
        if is_pytorchs(gradient):
            return None, *differentiable(region, tensors, needs, gradient)
        axes, entries = region.axes, region.entries(tensors)
        whole = [t.detach().requires_grad_() if need else t for t, need in zip(tensors, needs, strict=True)]
        wanted = [k for k, need in enumerate(needs) if need]
        totals = [torch.empty_like(t) if k in wanted and axes[k] is not None else None for k, t in enumerate(tensors)]
        for part in region.parts(entries):
            given = region.cut(whole, part, entries)
            given = [
                t if t is None or axis is None else t.detach().requires_grad_(need)
                for t, axis, need in zip(given, axes, needs, strict=True)
            ]
            with torch.enable_grad(), without_autocast():
                result = region.run_all([*given])
            found = torch.autograd.grad(
                result, [given[k] for k in wanted], chunk_of(gradient, region.axis, part, entries)
            )
            del result, given
            for k, of_argument in zip(wanted, found, strict=True):
                total, axis = totals[k], axes[k]
                if total is None:
                    totals[k] = of_argument
                elif axis is None:
                    total.add_(of_argument)
                else:
                    chunk_of(total, axis, part, entries).copy_(of_argument)
            del found, of_argument
        return None, *totals


def chunk_of(tensor: torch.Tensor, axis: int, part: slice, entries: int) -> torch.Tensor:
    """A part of a tensor that has so many entries along an axis, or so many times more."""
    each = tensor.shape[axis] // entries
    return tensor.narrow(axis, each * part.start, each * (part.stop - part.start))


def that_need(tensors: Tensors, needs: Sequence[bool]) -> list[Any]:
    """The tensors that need a gradient."""
    return [tensor for tensor, need in zip(tensors, needs, strict=True) if need]


def differentiable(
    region: Chunked, tensors: Tensors, needs: Sequence[bool], gradient: torch.Tensor
) -> list[torch.Tensor | None]:
    """The gradients as functions of the arguments, of all of them at once."""
    found = iter(torch.autograd.grad(region.whole(tensors), that_need(tensors, needs), gradient, create_graph=True))
    return [next(found) if need else None for need in needs]
