"""What a check found: the differences, where they were found, and what was tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import CheckError


@dataclass(frozen=True)
class Difference:
    """One thing in which the optimized model differs from the plain one.

    Attributes:
        name: what it is, for instance ``"gradient of conv.weight"``.
        distance: the largest distance between two entries; infinite where shapes or kinds differ.
        text: the difference in words.
        found_in: the comparison that it was found in, for instance ``"seed 2"`` or ``"a smaller batch"``.
    """

    name: str
    distance: float
    text: str
    found_in: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.text}" + (f" ({self.found_in})" if self.found_in else "")


@dataclass(frozen=True)
class CheckReport:
    """What :func:`ogc.check` found; true if nothing differs.

    Attributes:
        compared: how many tensors and other results were compared, over everything that was tried.
        differences: those that differ, in the order of ``tried`` and in each of them in the order outputs,
            gradients, buffers, parameters, inputs, random state.
        is_deterministic: whether the plain model gave the same twice; it is run again only after a difference.
        tried: the comparisons that were made, for instance ``("seed 1", "another input")``.
        skipped: why a comparison was not made, by its name.
    """

    compared: int
    differences: tuple[Difference, ...]
    is_deterministic: bool = True
    tried: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether both models did the same."""
        return not self.differences

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        lines = [self._verdict()]
        if self.differences:
            counts = Counter(difference.found_in for difference in self.differences)
            lines.append("found in: " + ", ".join(f"{name} ({count})" for name, count in counts.items()))
        if self.tried:
            lines.append("tried: " + ", ".join(self.tried))
        lines += [f"skipped: {name}, as {why}" for name, why in self.skipped.items()]
        return "\n".join(lines)

    def _verdict(self) -> str:
        if self.ok:
            return f"the same as the plain model: {self.compared} results compared bit by bit"
        text = f"{len(self.differences)} of {self.compared} results differ from the plain model's, first {self.first}"
        if not self.is_deterministic:
            text += (
                "; the plain model differs from itself when it is run again, "
                "so use torch.use_deterministic_algorithms(True) before comparing"
            )
        return text

    @property
    def first(self) -> Difference | None:
        """The first difference, if there is any."""
        return self.differences[0] if self.differences else None

    def raise_if_different(self) -> None:
        """Do nothing if nothing differs; else raise CheckError with the report."""
        if not self.ok:
            raise CheckError(str(self))
