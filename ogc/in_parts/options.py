"""What was asked for, as it holds for one part of a model."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import PlanError
from ..graph import Graph
from ..parser import OpaqueModules, parse
from ..plan import Decisions, Plan, Segment, make_plan, plain_plan, recomputed
from ..planning.stored import NOWHERE, Store
from ..program.structures import Call
from ..solver import LEAST_PEAK, Goal, solve
from .joined import PartCost


@dataclass(frozen=True)
class Options:
    """The arguments of :func:`ogc.optimize` that parts are planned by.

    ``follows_own_graphs`` says whether submodules may say themselves what they compute, by ``parse_graph``.
    """

    goal: Goal = LEAST_PEAK
    solver: str = "optimal"
    profile: str = "auto"
    opaque_modules: OpaqueModules = ()
    recompute_opaque: OpaqueModules | bool | None = None
    follows_own_graphs: bool = True
    store: Store = NOWHERE

    def frugal(self, graph: Graph) -> Plan:
        """A plan of a part that keeps little until its backward; the plain one if none keeps less or peaks lower."""
        least, plain = solve(graph, solver=self.solver), plain_plan(graph)
        if self.solver != "optimal":
            return least
        plans = [least]
        for decisions in (_inside_a_recomputation(graph, least.decisions), (recomputed(0, len(graph)),)):
            with suppress(PlanError):  # an operation would run twice that must not
                plans.append(make_plan(graph, decisions, "optimal"))
        costs = [PartCost.of(graph, plan) for plan in (*plans, plain)]
        cost, found = min(zip(costs, plans, strict=False), key=lambda pair: (pair[0].kept_bytes, pair[0].most))
        is_better = cost.kept_bytes < costs[-1].kept_bytes or cost.most < costs[-1].most
        return found if is_better else plain

    def parse(self, module: torch.nn.Module, name: str, call: Call) -> Graph:
        """The graph of a call of a submodule, as :func:`ogc.parse` makes it; the errors are the same, too."""
        opaque_modules, parsing = self.of_submodule(name, module)
        with self.store.times():
            return parse(module, call, profile=self.profile, opaque_modules=opaque_modules, **parsing)

    def of_submodule(self, name: str, module: torch.nn.Module) -> tuple[OpaqueModules, dict[str, Any]]:
        """The opaque modules in a submodule, and what else it is parsed with."""
        return _inside(self.opaque_modules, name, module), {
            "loss": "outputs",  # of a part, not of the model
            "holds_outputs": True,
            "outputs": "all",
            "parse_graph": None if self.follows_own_graphs else False,
            "recompute_opaque": self._repeatable(name, module),
        }

    def asked_for(self, model: torch.nn.Module) -> list[str]:
        """The names of the submodules that are to be called as they are."""
        names, types = _names_and_types(self.opaque_modules)
        return [n for n, m in model.named_modules(remove_duplicate=False) if n and (n in names or isinstance(m, types))]

    def _repeatable(self, name: str, module: torch.nn.Module) -> OpaqueModules | bool | None:
        wanted = self.recompute_opaque
        if wanted is None or isinstance(wanted, bool):
            return wanted
        names, types = _names_and_types(wanted)
        is_around = any(f"{name}.".startswith(f"{around}.") for around in names)
        return True if is_around or isinstance(module, types) else _inside(wanted, name, module)


def _names_and_types(wanted: OpaqueModules) -> tuple[list[str], tuple[type[torch.nn.Module], ...]]:
    return [w for w in wanted if isinstance(w, str)], tuple(w for w in wanted if isinstance(w, type))


def _inside(wanted: OpaqueModules, name: str, module: torch.nn.Module) -> list[str | type[torch.nn.Module]]:
    """Of these names and types, those that mean something within a submodule, with names as seen from there."""
    names, types = _names_and_types(wanted)
    children = [child for child in module.modules() if child is not module]
    inner = [entry.removeprefix(f"{name}.") for entry in names if entry.startswith(f"{name}.")]
    return [*inner, *(kind for kind in types if any(isinstance(child, kind) for child in children))]


def _inside_a_recomputation(graph: Graph, decisions: Decisions) -> Decisions:
    """The segments as parts of one that is recomputed, as far as nothing in it must run once."""
    groups: list[list[Segment]] = [[]]
    for segment in decisions.segments:
        if all(op.replayable for op in graph.operations[segment.start : segment.stop]):
            groups[-1].append(segment)
        else:
            groups += [[segment], []]
    segments = tuple(_joined(group) for group in groups if group)
    return replace(decisions, segments=segments, is_plain=False)


def _joined(group: list[Segment]) -> Segment:
    first, last = group[0], group[-1]
    if len(group) == 1 and ((first.parts and not first.kept) or first.start + 1 == first.stop):
        return first
    return recomputed(first.start, last.stop, *group)
