"""What was asked for, as it holds for one part of a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..graph import Graph
from ..parser import LeafModules, parse
from ..program.structures import Call
from ..solver import LEAST_PEAK, Wish


@dataclass(frozen=True)
class Options:
    """The arguments of :func:`ogc.optimize` that parts are planned by.

    ``follows_own_graphs`` says whether submodules may say themselves what they compute, by ``parse_graph``.
    """

    wish: Wish = LEAST_PEAK
    solver: str = "optimal"
    profile: str = "auto"
    leaf_modules: LeafModules = ()
    repeatable_leaves: LeafModules | bool | None = None
    follows_own_graphs: bool = True

    def parse(self, module: torch.nn.Module, name: str, call: Call) -> Graph:
        """The graph of a call of a submodule, as :func:`ogc.parse` makes it; the errors are the same, too."""
        return parse(
            module,
            call,
            parse_graph=None if self.follows_own_graphs else False,
            profile=self.profile,
            leaf_modules=_inside(self.leaf_modules, name, module),
            repeatable_leaves=self._repeatable(name, module),
        )

    def asked_for(self, model: torch.nn.Module) -> list[str]:
        """The names of the submodules that are to be called as they are."""
        names = {entry for entry in self.leaf_modules if isinstance(entry, str)}
        kinds = tuple(entry for entry in self.leaf_modules if isinstance(entry, type))
        return [n for n, m in model.named_modules(remove_duplicate=False) if n and (n in names or isinstance(m, kinds))]

    def _repeatable(self, name: str, module: torch.nn.Module) -> LeafModules | bool | None:
        wanted = self.repeatable_leaves
        if wanted is None or isinstance(wanted, bool):
            return wanted
        kinds = tuple(entry for entry in wanted if isinstance(entry, type))
        around = any(isinstance(entry, str) and f"{name}.".startswith(f"{entry}.") for entry in wanted)
        return True if around or isinstance(module, kinds) else _inside(wanted, name, module)


def _inside(wanted: LeafModules, name: str, module: torch.nn.Module) -> list[str | type[torch.nn.Module]]:
    """Of these names and types, those that mean something within a submodule, with names as seen from there."""
    found: list[str | type[torch.nn.Module]] = []
    for entry in wanted:
        if isinstance(entry, type):
            if any(isinstance(child, entry) for child in module.modules() if child is not module):
                found.append(entry)
        elif entry.startswith(f"{name}."):
            found.append(entry.removeprefix(f"{name}."))
    return found
