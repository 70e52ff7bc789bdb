"""Chooses what runs each call of an optimised module: a plan that was made for calls like it, or the plain model."""

from __future__ import annotations

import logging
import time
import weakref
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Protocol

import torch

from ..errors import OgcError
from ..graph import Graph
from ..plan.plan import Plan
from ..program.leaf import Leaf, called_leaves
from ..program.program import Program, attribute, get_attribute, without_autocast
from ..program.structures import Call, InputSpec, input_tensors
from ..torch_state.attributes import WatchedAttributes
from ..torch_state.module_state import State, WatchedModule
from ..torch_state.no_trace import is_plain
from ..torch_state.private import has_global_hooks, is_fx_tracing, parametrizations_are_cached
from .frame import Step
from .generate import Generated, generate

log = logging.getLogger(__name__)

PLANS = 8
"""How many kinds of calls are planned for beside the sample's; the least recently used makes room."""
SHAPES = 64
"""Over how many other shapes of the inputs plans are carried; the least recently used makes room."""
EVICTIONS = 3
"""How many plans may make room for others before no more are made."""


class Planner(Protocol):
    """Makes plans for calls that differ from the sample input. Whatever it raises, the plain model runs."""

    def carry_over(self, model: torch.nn.Module, call: Call, graph: Graph, plan: Plan) -> Graph | None:
        """``graph`` for inputs of other sizes, if the plan still holds; None if that is not sure."""

    def plan(self, model: torch.nn.Module, call: Call) -> tuple[Graph, Plan] | None:
        """A plan of its own, if this planner makes any."""

    def apart(self, model: torch.nn.Module) -> torch.nn.Module | None:
        """What runs the model from now on if it can no longer be planned as a whole."""


@dataclass(frozen=True)
class Variant:
    """A kind of calls and what runs them: generated code, or without it the original forward."""

    state: State  # of the module
    inputs: InputSpec
    graph: Graph | None = None
    plan: Plan | None = None
    code: Generated | None = None
    is_carried: bool = False  # the plan was made for other sizes
    attributes: WatchedAttributes | None = None  # that its program depends on

    def fits(self, state: State, inputs: InputSpec, size: bool = True) -> bool:
        """Whether a call is of this kind; without ``size``, up to shapes and strides."""
        return (self.state is state or self.state == state) and self.inputs.fits(inputs, size)

    def difference(self, model: torch.nn.Module, tensors: list[torch.Tensor]) -> str:
        """What Python would read otherwise out of attributes and these inputs, in words; "" if nothing."""
        changed = None if self.attributes is None else self.attributes.first_changed(model)
        if changed is not None:
            return f"the attribute {changed} is another than when it was optimized"
        guards = None if self.graph is None else self.graph.program.guards
        return "" if guards is None else guards.difference(guards.read(model, tensors))


class Runner:
    """The plans of one optimised module and its deep copies."""

    def __init__(self, model: torch.nn.Module, graph: Graph, plan: Plan, planner: Planner | None = None) -> None:
        self.planner = planner
        self.training = model.training
        self.structures = count(1)
        self.watched: weakref.WeakKeyDictionary[torch.nn.Module, WatchedModule] = weakref.WeakKeyDictionary()
        self.generated = generate(graph, plan)
        self.is_idle = plan.is_plain and planner is None
        state = self.watch(model).state(model)
        self.sample = _variant(model, state, graph.program.inputs, graph, plan, self.generated)
        self.variants = [self.sample]  # most recently used first
        self.evictions = 0
        self.is_planning = False
        self.told: set[str] = set()
        self.apart: weakref.WeakKeyDictionary[torch.nn.Module, torch.nn.Module] = weakref.WeakKeyDictionary()

    @property
    def is_plain(self) -> bool:
        """Whether all that was planned for runs as it is."""
        return all(variant.code is None for variant in self.variants)

    def add(self, model: torch.nn.Module, graph: Graph, plan: Plan) -> None:
        """Take in a plan for another kind of calls."""
        self.is_idle = self.is_idle and plan.is_plain
        watched = self.watched.get(model) or self.watch(model)
        self.variants.append(_variant(model, watched.state(model), graph.program.inputs, graph, plan))

    def watch(self, model: torch.nn.Module, like: torch.nn.Module | None = None) -> WatchedModule:
        """Start to compare ``model`` with what it is now: as the sample was planned for, or the same as ``like``."""
        structure = self.watched[like].state(like)[0] if like is not None and like in self.watched else 0
        watched = self.watched[model] = WatchedModule(model, self.structures, structure)
        return watched

    def select(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant | None:
        """What runs this call, or None for the original forward."""
        if self.is_idle or self.is_planning or not is_planned_call(model, self.training) or model in self.apart:
            return None
        state = (self.watched.get(model) or self.watch(model)).state(model)
        inputs, tensors = InputSpec.of(args, kwargs)
        alike = [variant for variant in self.variants if variant.fits(state, inputs)]
        alike.sort(key=lambda variant: variant.graph is None)  # of those without one nothing is known
        known = next((variant for variant in alike if not variant.difference(model, tensors)), None)
        if known is None and self.evictions > EVICTIONS:
            return None
        if known is None and self.planner is not None and (apart := self.planner.apart(model)) is not None:
            self.apart[model] = apart
            return None
        variant = known or self._make(model, Call(args, kwargs), state, inputs)
        if variant is not self.variants[0]:
            self._put_first(variant)
        return variant if variant.code is not None else None

    def run(self, variant: Variant, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One planned forward."""
        assert variant.graph is not None and variant.code is not None
        program, device = variant.graph.program, torch.device(variant.graph.device)
        devices = (device,) if device.type == "cuda" and program.random else ()
        code = variant.code
        bound = self.watched[model].bound(code, partial(_bound, model, program, code))
        with without_autocast():
            step = Step(model, code.runs, bound, devices)
            outputs = code.forward(step, *input_tensors(args, kwargs), *bound)
        return program.outputs.deliver(outputs, args, kwargs)

    def _make(self, model: torch.nn.Module, call: Call, state: State, inputs: InputSpec) -> Variant:
        """What runs a kind of calls that was not seen before."""
        why, start = self._difference(model, call, state, inputs), time.perf_counter()
        self.is_planning = True  # calls of the model from here on are the planner's
        try:
            variant = None if self.planner is None else self._planned(self.planner, model, call, state, inputs)
        except Exception as error:  # a broken call raises the same from the plain model
            self._tell(f"ogc runs the plain model for calls where {why}: {_first_line(error)}")
            return Variant(state, inputs)
        finally:
            self.is_planning = False
        seconds = time.perf_counter() - start
        if variant is None:
            self._tell(f"ogc runs the plain model for calls where {why}")
            return Variant(state, inputs)
        if variant.is_carried:
            log.info("the plan is carried over to inputs %s, in %.2f s", _shapes(inputs), seconds)
        else:
            what = "needs no less memory than the plain model" if variant.code is None else "is ready"
            log.warning("a plan for calls where %s %s, after %.2f s", why, what, seconds)
        return variant

    def _planned(
        self, planner: Planner, model: torch.nn.Module, call: Call, state: State, inputs: InputSpec
    ) -> Variant | None:
        """A plan that is carried over from other sizes, or else one of its own."""
        for origin in self.variants:
            if origin.graph is None or origin.plan is None or origin.is_carried:
                continue
            if origin.fits(state, inputs, size=False):
                graph = planner.carry_over(model, call, origin.graph, origin.plan)
                if graph is not None:
                    code = origin.code if _runs_the_same(graph, origin.graph) else None
                    return _variant(model, state, inputs, graph, origin.plan, code, is_carried=True)
        planned = planner.plan(model, call)
        return None if planned is None else _variant(model, state, inputs, *planned)

    def _put_first(self, variant: Variant) -> None:
        """Note that a variant is used; if it is new, one of its kind may have to make room."""
        variants = [variant, *(v for v in self.variants if v is not variant)]
        alike = [v for v in variants if v.is_carried == variant.is_carried and v is not self.sample]
        if len(alike) > (SHAPES if variant.is_carried else PLANS):
            variants.remove(alike[-1])
            self._forget(alike[-1])
        self.variants = variants

    def _forget(self, variant: Variant) -> None:
        if variant.is_carried:
            self._tell(
                f"ogc meets more than {SHAPES} shapes of inputs and checks those that it forgot anew; "
                "pad them to a few sizes"
            )
            return
        self.evictions += 1
        if self.evictions > EVICTIONS:
            self._tell(
                f"ogc met more than {PLANS + EVICTIONS} kinds of calls that need a plan each and makes no more: "
                "calls unlike those of the last plans run the plain model"
            )

    def _difference(self, model: torch.nn.Module, call: Call, state: State, inputs: InputSpec) -> str:
        """In what a call differs from the sample, in words."""
        known = next((variant for variant in self.variants if variant.fits(state, inputs)), None)
        if known is not None:
            return known.difference(model, input_tensors(call.args, call.kwargs))
        found = []
        if state != self.sample.state:
            found.append("training flags, parameters, hooks or submodules differ from when it was optimized")
        if inputs.casts != self.sample.inputs.casts:
            found.append("autocast is another")
        if not inputs.fits(self.sample.inputs):
            found.append(f"the inputs differ in shape, type, device or structure from the sample: {_shapes(inputs)}")
        return " and ".join(found) or "something differs"

    def _tell(self, what: str) -> None:
        if what not in self.told:
            self.told.add(what)
            log.warning(what)


def is_planned_call(model: torch.nn.Module, training: bool) -> bool:
    """Whether plans are for such calls, if ``model`` was in training when they were made: a backward may follow."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled() or (training and not model.training):
        return False
    if is_plain() or torch.jit.is_tracing() or torch.compiler.is_compiling() or is_fx_tracing():
        return False
    return not (has_global_hooks() or parametrizations_are_cached())


def _bound(model: torch.nn.Module, program: Program, code: Generated) -> tuple[Any, ...]:
    """What the code is given of the model and of the program's constants."""
    found = [get_attribute(model, program.constants, name) for name in code.bound]
    return (*found, *(torch.zeros_like(attribute(model, name)) for name in code.copied))


def _variant(
    model: torch.nn.Module,
    state: State,
    inputs: InputSpec,
    graph: Graph,
    plan: Plan,
    code: Generated | None = None,
    is_carried: bool = False,
) -> Variant:
    if plan.is_plain:
        return Variant(state, inputs, graph, plan, None, is_carried)
    attributes = WatchedAttributes(model, called_leaves(graph.program.graph), graph.program.names_read)
    return Variant(state, inputs, graph, plan, code or generate(graph, plan), is_carried, attributes)


def _runs_the_same(a: Graph, b: Graph) -> bool:
    """Whether the code that runs one program runs the other."""
    same = ("saves", "forms", "bindings")
    alike = not a.program.constants and not b.program.constants
    alike = alike and all(getattr(a.program, name) == getattr(b.program, name) for name in same)
    has_leaves = any(isinstance(node.target, Leaf) for node in a.program.operations)
    return alike and not has_leaves and str(a.program.graph) == str(b.program.graph)


def _shapes(inputs: InputSpec) -> str:
    return ", ".join(f"{spec.shape} {str(spec.dtype).removeprefix('torch.')}" for spec in inputs.tensors[:4])


def _first_line(error: Exception) -> str:
    text = str(error) if isinstance(error, OgcError) else repr(error)
    return text.splitlines()[0] if text else ""
