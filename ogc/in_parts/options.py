"""What was asked for, as it holds for one part of a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..graph import Graph
from ..parser import LeafModules, parse
from ..planning.stored import NOWHERE, Store, key_of
from ..program.structures import Call
from ..solver import LEAST_PEAK, Wish
from .choice.ways import Way, saved_ways, ways_by, ways_of


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
    store: Store = NOWHERE

    def ways(self, graph: Graph) -> tuple[Way, ...]:
        """The ways to run a part: those that were kept, whatever the wish was, or new ones."""
        key = key_of("ways", graph, LEAST_PEAK, self.solver)
        found = self.store.found(key, lambda saved: ways_by(graph, saved))
        if found is None:
            found = ways_of(graph, self.solver)
            self.store.keep(key, lambda: saved_ways(found, self.solver))
        return found

    def parse(self, module: torch.nn.Module, name: str, call: Call) -> Graph:
        """The graph of a call of a submodule, as :func:`ogc.parse` makes it; the errors are the same, too."""
        with self.store.times():
            return parse(
                module,
                call,
                loss="outputs",  # of a part, not of the model
                parse_graph=None if self.follows_own_graphs else False,
                profile=self.profile,
                leaf_modules=_inside(self.leaf_modules, name, module),
                repeatable_leaves=self._repeatable(name, module),
            )

    def asked_for(self, model: torch.nn.Module) -> list[str]:
        """The names of the submodules that are to be called as they are."""
        names, types = _names_and_types(self.leaf_modules)
        return [n for n, m in model.named_modules(remove_duplicate=False) if n and (n in names or isinstance(m, types))]

    def _repeatable(self, name: str, module: torch.nn.Module) -> LeafModules | bool | None:
        wanted = self.repeatable_leaves
        if wanted is None or isinstance(wanted, bool):
            return wanted
        names, types = _names_and_types(wanted)
        is_around = any(f"{name}.".startswith(f"{around}.") for around in names)
        return True if is_around or isinstance(module, types) else _inside(wanted, name, module)


def _names_and_types(wanted: LeafModules) -> tuple[list[str], tuple[type[torch.nn.Module], ...]]:
    return [w for w in wanted if isinstance(w, str)], tuple(w for w in wanted if isinstance(w, type))


def _inside(wanted: LeafModules, name: str, module: torch.nn.Module) -> list[str | type[torch.nn.Module]]:
    """Of these names and types, those that mean something within a submodule, with names as seen from there."""
    names, types = _names_and_types(wanted)
    children = [child for child in module.modules() if child is not module]
    inner = [entry.removeprefix(f"{name}.") for entry in names if entry.startswith(f"{name}.")]
    return [*inner, *(kind for kind in types if any(isinstance(child, kind) for child in children))]
