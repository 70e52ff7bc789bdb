"""Tells, at each call of a part, whether its plain attributes are still those that it was planned with.

The model's own forward may set them, differently in each step; a program has what they were made into. Part by part
they are found out once and compared by identity, and only where that differs by what they hold.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from ..torch_state.no_trace import attributes_of
from ..torch_state.private import CALL

UNWATCHED = ("training", "forward", CALL)
"""Flags that plans are chosen by anyway, and what stands in the place of calls."""


class Attributes:
    """The plain attributes of a module and of its submodules, but for those inside leaves.

    Args:
        module: the module.
        leaves: names of submodules that are called as they are, and may change what they like.
    """

    def __init__(self, module: torch.nn.Module, leaves: Collection[str] = ()) -> None:
        covered = tuple(f"{leaf}." for leaf in leaves)
        self.module = module
        self.names = [name for name, _ in module.named_modules() if not f"{name}.".startswith(covered)]
        self.attributes = [vars(child) for name, child in module.named_modules() if name in set(self.names)]
        self.held = self._contents()
        self.values = self._values()

    def first_changed(self) -> str | None:
        """The name of an attribute that is not what it was."""
        now = self._values()
        if len(now) == len(self.values) and all(map(lambda a, b: a is b, now, self.values)):
            return None
        held = self._contents()
        for name in self.names:
            for key in {**self.held.get(name, {}), **held.get(name, {})}:
                if self.held.get(name, {}).get(key) != held.get(name, {}).get(key):
                    return f"{name}.{key}" if name else key
        self.values = now
        return None

    def _values(self) -> list[Any]:
        return [value for found in self.attributes for value in found.values()]

    def _contents(self) -> dict[str, dict[str, Any]]:
        return without_unwatched(attributes_of(self.module))


def without_unwatched(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The attributes by module, without those that do not count."""
    return {name: {key: value for key, value in held.items() if key not in UNWATCHED} for name, held in found.items()}
