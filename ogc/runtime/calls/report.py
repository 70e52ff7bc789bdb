"""What ran the calls of an optimized module."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...graph import table


@dataclass(frozen=True)
class Calls:
    """Calls of one kind.

    Attributes:
        kind: how they differ from the sample; "" where they run the plain model whatever their kind.
        runs: the plan that ran them, or ``"plain: "`` and why.
        count: how many there were.
        module: the planned part, where the model is planned in parts.
    """

    kind: str
    runs: str
    count: int
    module: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether the plain model ran them."""
        return self.runs.startswith("plain")


@dataclass(frozen=True)
class Report:
    """The calls of an optimized module and of its copies until now, by kind and by what ran them."""

    calls: tuple[Calls, ...]

    @property
    def planned(self) -> int:
        """How many calls ran by a plan."""
        return sum(calls.count for calls in self.calls if not calls.is_plain)

    @property
    def plain(self) -> int:
        """How many calls ran the plain model."""
        return sum(calls.count for calls in self.calls if calls.is_plain)

    def of(self, module: str) -> Report:
        """The same, said to be of a part with that name."""
        return Report(tuple(replace(calls, module=module) for calls in self.calls))

    def __str__(self) -> str:
        rows = [(*([c.module] if self._has_parts else []), str(c.count), c.kind, c.runs) for c in self.calls]
        header = (*(["part"] if self._has_parts else []), "calls", "where", "ran")
        return f"{table(header, rows)}\n{self.planned} calls by a plan, {self.plain} plain"

    @property
    def _has_parts(self) -> bool:
        return any(calls.module for calls in self.calls)
