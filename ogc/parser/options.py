"""How a model is parsed, whatever its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..graph import Graph
from ..program.program import AfterForward, Gradients, Loss, device_of_model
from .arguments import profile_kind
from .custom import ParseGraph, parse_graph_of
from .loss import check_after_forward
from .opaque import NamesAndTypes, names_in

Rewrite = Callable[[torch.fx.Graph, torch.device], object]
"""Changes a program, in place, before it is planned for a device."""


@dataclass(frozen=True)
class ParseOptions:
    """The arguments of :func:`ogc.parse` beside the model and its sample input, by the same names."""

    loss: Loss | None = None
    holds_outputs: bool = True
    outputs: str = "all"
    gradients: Gradients = "kept"
    parse_graph: ParseGraph | bool | None = None
    profile: str = "auto"
    device: torch.device | str | None = None
    rewrite: Rewrite | None = None
    plain_peak_bytes: int | None = None
    gpu: str | None = None
    opaque_modules: NamesAndTypes = ()
    recompute_opaque: NamesAndTypes | bool | None = None

    @property
    def after_forward(self) -> AfterForward:
        """How the caller goes on."""
        return AfterForward(self.loss, self.holds_outputs, self.outputs, self.gradients)

    def check(self, model: torch.nn.Module) -> None:
        """Raise InputError if one of them is of the wrong kind, as far as that is known without a call."""
        home = device_of_model(model)
        profile_kind(self.profile, home, home)
        check_after_forward(self.after_forward)
        parse_graph_of(model, self.parse_graph)
        modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
        names_in(modules, self.opaque_modules, self.recompute_opaque)

    def of_submodule(self, name: str, module: torch.nn.Module) -> ParseOptions:
        """Those of a submodule's calls, which are not where the model's step ends, nor told by its ``parse_graph``."""
        return replace(
            self,
            loss="outputs",
            holds_outputs=True,
            outputs="all",
            gradients="kept",
            parse_graph=None if self.parse_graph is None else False,
            opaque_modules=_inside(self.opaque_modules, name, module),
            recompute_opaque=self._repeatable(name, module),
        )

    def as_for(self, graph: Graph) -> ParseOptions:
        """Those that parse the model of a graph again as it was then: what was opaque is, and weights are of a kind."""
        opaque = {op.module for op in graph.operations[: graph.end] if op.target.startswith("opaque ")}
        return replace(self, profile=graph.profile, opaque_modules=opaque)

    def asked_for(self, model: torch.nn.Module) -> list[str]:
        """The names of the submodules that are to be called as they are."""
        names, types = _names_and_types(self.opaque_modules)
        return [n for n, m in model.named_modules(remove_duplicate=False) if n and (n in names or isinstance(m, types))]

    def _repeatable(self, name: str, module: torch.nn.Module) -> NamesAndTypes | bool | None:
        wanted = self.recompute_opaque
        if wanted is None or isinstance(wanted, bool):
            return wanted
        names, types = _names_and_types(wanted)
        is_around = any(f"{name}.".startswith(f"{around}.") for around in names)
        return True if is_around or isinstance(module, types) else _inside(wanted, name, module)


def _names_and_types(wanted: NamesAndTypes) -> tuple[list[str], tuple[type[torch.nn.Module], ...]]:
    return [w for w in wanted if isinstance(w, str)], tuple(w for w in wanted if isinstance(w, type))


def _inside(wanted: NamesAndTypes, name: str, module: torch.nn.Module) -> list[str | type[torch.nn.Module]]:
    """Of these names and types, those that mean something within a submodule, with names as seen from there."""
    names, types = _names_and_types(wanted)
    children = [child for child in module.modules() if child is not module]
    inner = [entry.removeprefix(f"{name}.") for entry in names if entry.startswith(f"{name}.")]
    return [*inner, *(kind for kind in types if any(isinstance(child, kind) for child in children))]
