"""The module that users get: the original's parameters and submodules, a planned forward."""

from __future__ import annotations

import copy
import logging
import weakref
from operator import is_not
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import InputError
from ..graph import Graph
from ..plan import Plan
from ..program import Program, TensorSpec, autocast_kinds, tensor_leaves, without_autocast
from .frame import Step
from .generate import Generated, generate

log = logging.getLogger(__name__)


def optimized_module(model: torch.nn.Module, graph: Graph, plan: Plan) -> torch.nn.Module:
    """A module that shares everything with ``model`` and runs ``plan`` in training.

    It is an instance of a subclass of the model's own class and shares its attributes, so that parameters,
    buffers, flags and methods are one and the same for both. The forward of the original is untouched.
    """
    if "forward" in vars(model):
        raise InputError(
            "the model's forward was replaced on the instance, so a planned one could not take its place; "
            "put the replacement into a subclass"
        )
    runner = Runner(graph, plan)
    original = type(model)

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if runner.applies(self, args, kwargs):
            return runner.run(self, args, kwargs)
        return original.forward(self, *args, **kwargs)

    def refuse_pickling(self: torch.nn.Module) -> Any:
        raise InputError(
            "an optimized module cannot be pickled, its code is generated; save state_dict() (the keys are the "
            "original model's) or the original model"
        )

    def deep_copy(self: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    members: dict[str, Any] = {
        "forward": forward,
        "__reduce_ex__": lambda self, protocol: refuse_pickling(self),
        "__deepcopy__": deep_copy,
        "__module__": original.__module__,
        "__doc__": original.__doc__,
    }
    for name, value in (("plan", plan), ("graph", graph), ("code", runner.generated.source)):
        if hasattr(model, name):
            log.warning("the model has an attribute %r of its own; the optimized module's %r is not set", name, name)
        else:
            members[name] = value
    result: torch.nn.Module = object.__new__(type(f"Optimized{original.__name__}", (original,), members))
    object.__setattr__(result, "__dict__", vars(model))
    runner.watch(result)
    return result


class Runner:
    """Runs a plan for the signature that it was made for."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.program: Program = graph.program
        self.plan = plan
        self.generated: Generated = generate(graph, plan)
        device = torch.device(graph.device)
        self.devices = (device,) if device.type == "cuda" and self.program.random else ()
        self.expected: list[Any] | None = None
        self.training = True
        self.watched: weakref.WeakKeyDictionary[torch.nn.Module, _Watched] = weakref.WeakKeyDictionary()
        self.told: set[str] = set()

    def watch(self, model: torch.nn.Module) -> _Watched:
        """Start comparing the model's flags with those of now (the first model sets what is expected)."""
        watched = _Watched(model)
        self.watched[model] = watched
        if self.expected is None:
            self.expected, self.training = watched.state(), model.training
        return watched

    def applies(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this call is one that the plan was made for; if not, the original forward runs."""
        if self.plan.is_plain or not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return False
        if torch.jit.is_tracing() or torch.compiler.is_compiling() or (self.training and not model.training):
            return False
        watched = self.watched.get(model) or self.watch(model)
        if watched.state() != self.expected:
            return self._run_plain("training flags, parameters, hooks or autocast differ from when it was optimized")
        leaves, tree = pytree.tree_flatten((args, kwargs))
        spec = self.program.inputs
        if tree != spec.tree or not all(map(_fits, leaves, spec.leaves)):
            return self._run_plain("the inputs differ in shape, type, device or structure from the sample input")
        return True

    def run(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One planned forward."""
        tensors = tensor_leaves(args, kwargs)
        with without_autocast():
            outputs = self.generated.forward(model, Step(model, self.generated.runs, self.devices), *tensors)
        return self.program.outputs.rebuild(outputs)

    def _run_plain(self, why: str) -> bool:
        if why not in self.told:
            self.told.add(why)
            log.warning("ogc runs the plain model for this call: %s", why)
        return False


class _Watched:
    """The modules and parameters whose flags decide whether a traced program still holds."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.root = model
        self.modules = [(module, list(module._modules.values())) for module in model.modules()]

    def state(self) -> list[Any]:
        """Flags of all modules and parameters, comparable between calls and between copies of the model."""
        found: list[Any] = [torch.get_autocast_dtype(kind) for kind in autocast_kinds()]
        for module, children in self.modules:
            found.append(module.training)
            if len(children) != len(module._modules) or any(map(is_not, children, module._modules.values())):
                found.append("other submodules")
            if module is not self.root and (
                module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
            ):
                found.append("hooked")
            for parameter in module._parameters.values():
                if parameter is not None:
                    found.append((parameter.requires_grad, parameter.dtype, parameter.device, parameter.shape))
        return found


def _fits(leaf: Any, spec: Any) -> bool:
    if isinstance(leaf, torch.Tensor) or isinstance(spec, TensorSpec):
        return isinstance(leaf, torch.Tensor) and TensorSpec.of(leaf) == spec
    return bool(leaf == spec)
