"""What a public report of checkpointing becomes here: a case of its own, and what must come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from helpers import tensors_of
from trained import Training

Case = Callable[[Training], None]


@dataclass(frozen=True)
class Report:
    """A report, named ``owner/repository#number``, and a training that has its structure.

    ``share`` is the most of the plain peak that the training may take, None where memory is not the point.
    With ``says``, a plan runs no call, and these are words of what :meth:`report` gives as the reason.
    With ``refused``, an :class:`ogc.OgcError` of these words is raised.
    """

    source: str
    train: Case
    share: float | None = None
    says: str | None = None
    refused: str | None = None

    @property
    def outcome(self) -> str:
        """As the page has it."""
        if self.refused:
            return f"refused: “{self.refused}”"
        if self.says:
            return f"plain: “{self.says}”"
        return f"works, at most {self.share:.0%} of the peak" if self.share else "works"


def registering(reports: dict[str, Report]) -> Callable[..., Any]:
    """A decorator that notes cases under the reports that they stand for."""

    def report(source: str, share: float | None = None, **ends: str) -> Callable[[Case], Case]:
        def register(train: Case) -> Case:
            assert source not in reports, source
            reports[source] = Report(source, train, share, **ends)
            return train

        return register

    return report


def mean_square(result: Any) -> torch.Tensor:
    """Of all that needs gradients, so small that a few steps of any network stay finite."""
    return sum((t.abs().square().mean() for t in tensors_of(result) if t.requires_grad), torch.zeros(()))


def learn(
    training: Training,
    run: torch.nn.Module,
    inputs: tuple[Any, ...] | Callable[[], tuple[Any, ...]],
    loss: Callable[[Any], torch.Tensor] = mean_square,
    count: int = 3,
    **named: Any,
) -> None:
    """A few steps of SGD on the same inputs, or on those that a function makes; outputs and their kind are compared."""
    optimizer = torch.optim.SGD([p for p in run.parameters() if p.requires_grad], 0.01, momentum=0.9)

    def step() -> Any:
        optimizer.zero_grad()
        result = run(*(inputs() if callable(inputs) else inputs), **named)
        loss(result).backward()
        return result

    for _ in range(count):
        result = training.measured(step)
        found = tensors_of(result)
        assert all(t.isfinite().all() for t in found)
        training.same(*found, torch.tensor([t.requires_grad for t in found]))
        optimizer.step()
