"""Stretches of operators that work sample by sample, run forward and backward a part of the batch at a time.

Of all that such a stretch makes and saves in between, only one slice's share is alive at once, in the forward
and in the backward; in between it holds its inputs. Gradients of parameters are sums over the samples: added
up slice by slice they differ from PyTorch's in the last bits, and a kernel chosen for a smaller batch may
round otherwise too. So nothing is sliced unless the user asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...program.program import call_node, run_nodes, without_autocast
from ..low_memory import LowMemory
from ..parts import even_parts, part_by_part


@dataclass(frozen=True, eq=False)
class Sliced:
    """A stretch as one operator: called with tensors to slice along their first axis, then with whole ones.

    Attributes:
        name: identifies it in generated code.
        graph: the stretch; a placeholder for each argument, one tensor as output.
        cut: how many of the arguments are sliced.
        slices: into how many slices, if the batch has as many samples.
    """

    name: str
    graph: torch.fx.Graph
    cut: int
    slices: int

    @property
    def __name__(self) -> str:
        return "sliced"

    def __call__(self, *tensors: torch.Tensor | None) -> torch.Tensor:
        result: torch.Tensor = _Slices.apply(self, *tensors)
        return result

    def run(self, tensors: list[torch.Tensor | None]) -> torch.Tensor:
        """The stretch, as it stands, on the arguments or on a slice of them.

        They are taken out of the list, so that each is gone after its last use.
        """
        inputs = (tensors.pop(0) for _ in range(len(tensors)))
        result: torch.Tensor = run_nodes(self.graph.nodes, inputs, _no_attribute, call_node)
        return result

    def parts(self, samples: int) -> tuple[slice, ...]:
        """The slices of a batch."""
        return even_parts(samples, min(self.slices, samples))

    def with_plain_operators(self) -> Sliced:
        """The same stretch of PyTorch's own operators, but for those that save less."""
        graph = torch.fx.Graph()
        output = graph.graph_copy(self.graph, {})
        graph.output(output)
        for node in graph.nodes:
            if isinstance(node.target, LowMemory) and not node.target.saves_less:
                node.target = node.target.operator
        return replace(self, graph=graph)


def _no_attribute(name: str) -> None:
    raise AssertionError(f"a stretch is given {name} as an argument")


class _Slices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stretch: Sliced, *tensors: torch.Tensor | None) -> torch.Tensor:
        ctx.stretch = stretch
        ctx.save_for_backward(*tensors)
        parts = stretch.parts(tensors[0].shape[0])  # type: ignore[union-attr]
        return part_by_part(parts, lambda part: stretch.run(_cut(tensors, part, stretch.cut)))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        stretch, tensors, needs = ctx.stretch, ctx.saved_tensors, ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():
            return None, *_differentiable(stretch, tensors, needs, gradient)
        whole = [t.detach().requires_grad_() if need else t for t, need in zip(tensors, needs, strict=True)]
        wanted = [k for k, need in enumerate(needs) if need]
        totals = [torch.empty_like(t) if k < stretch.cut and k in wanted else None for k, t in enumerate(tensors)]
        for part in stretch.parts(gradient.shape[0]):
            sliced = zip(tensors[: stretch.cut], needs, strict=False)
            given = [*(t[part].detach().requires_grad_(need) for t, need in sliced), *whole[stretch.cut :]]
            with torch.enable_grad(), without_autocast():
                result = stretch.run([*given])
            found = torch.autograd.grad(result, [given[k] for k in wanted], gradient[part])
            del result, given
            for k, of_argument in zip(wanted, found, strict=True):
                total = totals[k]
                if k < stretch.cut:
                    total[part] = of_argument  # type: ignore[index]
                else:
                    totals[k] = of_argument if total is None else total.add_(of_argument)
            del found, of_argument
        return None, *totals


def _cut(tensors: Sequence[torch.Tensor | None], part: slice, cut: int) -> list[torch.Tensor | None]:
    return [t[part] if t is not None and k < cut else t for k, t in enumerate(tensors)]


def _differentiable(
    stretch: Sliced, tensors: Sequence[Any], needs: Sequence[bool], gradient: torch.Tensor
) -> list[torch.Tensor | None]:
    """The gradients as functions of the arguments, of the whole batch at once."""
    wanted = [t for t, need in zip(tensors, needs, strict=True) if need]
    found = iter(torch.autograd.grad(stretch.run([*tensors]), wanted, gradient, create_graph=True))
    return [next(found) if need else None for need in needs]
