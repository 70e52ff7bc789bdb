"""How a model is parsed, whatever its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from ..graph import Graph
from ..plan.told import NO_INSTRUCTIONS, Instructions
from ..program.program import AfterForward, Gradients, Loss, device_of_model
from .arguments import profile_kind
from .custom import ParseGraph, parse_graph_of
from .faithful import check_front_end
from .loss import check_after_forward
from .opaque import NamesAndTypes, names_in
from .traced import RECORD

Rewrite = Callable[[torch.fx.Graph, torch.device], object]
"""Changes a program, in place, before it is planned for a device."""


@dataclass(frozen=True)
class ParseOptions:
    """The arguments of :func:`ogc.parse` beside the model and its sample input, and what plans are told."""

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
    front_end: str = RECORD
    told: Instructions = NO_INSTRUCTIONS  # by names of modules, for plans

    @property
    def after_forward(self) -> AfterForward:
        """How the caller goes on."""
        return AfterForward(self.loss, self.holds_outputs, self.outputs, self.gradients)

    def check(self, model: torch.nn.Module) -> None:
        """Raise InputError if one of them is of the wrong kind, as far as that is known without a call."""
        home = device_of_model(model)
        profile_kind(self.profile, home, home)
        check_after_forward(self.after_forward)
        check_front_end(self.front_end, parse_graph_of(model, self.parse_graph) is not None)
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
            told=self.told.within(name),
        )

    def as_for(self, graph: Graph) -> ParseOptions:
        """Those that parse the model of a graph again as it was then: what was opaque is, and weights are of a kind."""
        opaque = {op.module for op in graph.operations[: graph.end] if op.target.startswith("opaque ")}
        return replace(self, profile=graph.profile, opaque_modules=opaque)

    def asked_for(self, model: torch.nn.Module) -> list[str]:
        """The names of the submodules that are to be called as they are."""
        modules = model.named_modules(remove_duplicate=False)
        return [name for name, module in modules if name and any(_is(one, name, module) for one in self.opaque_modules)]

    def _repeatable(self, name: str, module: torch.nn.Module) -> NamesAndTypes | bool | None:
        wanted = self.recompute_opaque
        if wanted is None or isinstance(wanted, bool):
            return wanted
        around = list(accumulate(name.split("."), "{}.{}".format))
        is_named = any(_is(one, outer, module) for one in wanted for outer in around)
        return is_named or _inside(wanted, name, module)


def _is(wanted: str | type[torch.nn.Module], name: str, module: torch.nn.Module) -> bool:
    return wanted == name if isinstance(wanted, str) else isinstance(module, wanted)


def _inside(wanted: NamesAndTypes, name: str, module: torch.nn.Module) -> list[str | type[torch.nn.Module]]:
    """Of these names and types, those that mean something within a submodule, with names as seen from there."""
    children = [child for child in module.modules() if child is not module]
    inner = [one.removeprefix(f"{name}.") for one in wanted if isinstance(one, str) and one.startswith(f"{name}.")]
    types = [one for one in wanted if isinstance(one, type) and any(isinstance(child, one) for child in children)]
    return [*inner, *types]
