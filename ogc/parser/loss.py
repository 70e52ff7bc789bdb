"""How a step goes on from the outputs of a forward: the caller's loss, put behind the model's program to be weighed.

It is recorded as a function of the outputs. Its calls are the caller's: no plan recomputes them, no generated code runs
them.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch.fx.node import map_arg

from ..errors import InputError
from ..program.program import CONSTANT, OUTSIDE, AfterForward, get_attribute, losses_among, tensor_leaves
from ..program.structures import InputSpec
from ..torch_state.no_trace import untouched
from ..torch_state.settings import cuda_devices
from .arguments import Sample
from .faithful import faithful_program
from .opaque import OpaqueModules
from .traced import Followed, StepEnd, Traced, forget_calls, without_unused


def check_after_forward(after_forward: AfterForward) -> None:
    """Raise InputError if what is said of how a step goes on is of the wrong kind."""
    loss = after_forward.loss
    if after_forward.outputs not in ("all", "loss"):
        raise InputError(f'outputs must be "all" or "loss", not {after_forward.outputs!r}')
    _check_gradients(after_forward.gradients)
    if isinstance(loss, str) and loss != "outputs":
        raise InputError(f'loss must be a function of the model\'s output, or "outputs", not {loss!r}')
    if loss is None or isinstance(loss, str):
        return
    if after_forward.outputs == "loss":
        raise InputError('outputs="loss" needs a model that returns its loss; ogc.optimize makes one with loss=')
    if not callable(loss):
        raise InputError(f"loss must be a function of the model's output, such as a criterion, not {loss!r}")


def with_step_end(
    sample: Sample,
    traced: Traced,
    after_forward: AfterForward,
    record: Callable[[Sample, None, OpaqueModules], Traced] = faithful_program,
) -> Traced:
    """A forward's program with what the step does beyond it, which ``record`` writes down.

    InputError if the loss is no function, fails, or returns something else than one number to differentiate; or if
    nothing but the loss is wanted, and no output is the loss.
    """
    check_after_forward(after_forward)
    loss = after_forward.loss
    if loss is None or isinstance(loss, str):
        found = replace(traced, end=StepEnd(_starts(sample, traced, loss), after_forward))
        return found if after_forward.outputs == "all" else _with_the_loss_alone(found)
    root = torch.nn.Sequential(OrderedDict(loss=_Function(loss)))  # so that it may be an opaque module
    spec, tensors = InputSpec.of((_output(sample, traced),), {})
    numbers = {id(tensor): number for number, tensor in enumerate(traced.outputs)}
    places = [numbers[id(tensor)] for tensor in tensors]
    given = [tensor.detach().requires_grad_(traced.requires_grad[n]) for tensor, n in zip(tensors, places, strict=True)]
    with torch.random.fork_rng(cuda_devices()):
        torch.set_rng_state(traced.state["random state"])
        _check(root, spec, given)
        found = record(Sample(root, spec, given), None, OpaqueModules(root, ()))
    return _joined(traced, found, root, places, StepEnd((len(traced.outputs),), after_forward))


def _check_gradients(given: Any) -> None:
    if not (isinstance(given, Mapping) or (isinstance(given, str) and given in ("kept", "none"))):
        raise InputError(
            f'gradients must be "kept", "none", or by shape the bytes of a step that frees one, not {given!r}'
        )


def _with_the_loss_alone(traced: Traced) -> Traced:
    """A program that returns its loss, and None in the place of all other tensors."""
    assert traced.end is not None
    starts = traced.end.starts
    if len(starts) != 1 or traced.outputs[starts[0]].dim():
        shapes = ", ".join(str(list(traced.outputs[n].shape)) for n in starts) or "none"
        raise InputError(
            'outputs="loss" needs a model that returns one number to differentiate, by the name loss if there are '
            f"several; this one returns tensors to differentiate of shapes {shapes}. Compute the loss in its forward, "
            "or give loss= and targets= too"
        )
    (start,) = starts
    graph = torch.fx.Graph()
    output = graph.graph_copy(traced.graph, {})
    graph.output((output[start],))  # type: ignore[index]
    return replace(
        traced,
        graph=without_unused(graph),
        output_spec=traced.output_spec.only(start),
        outputs=[traced.outputs[start]],
        requires_grad=[True],
        end=replace(traced.end, starts=(0,)),
    )


class _Function(torch.nn.Module):
    """A function, and the modules that it gets hold of, so that these are left as they were."""

    def __init__(self, function: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.others = torch.nn.ModuleList(modules_of(function))

    def forward(self, output: Any) -> Any:
        return self.function(output)


def tensors_of(function: Any) -> list[torch.Tensor]:
    """The tensors that a function gets hold of by itself, other than those of modules."""
    held = [thing for thing in _held_by(function) if thing is not function and not isinstance(thing, torch.nn.Module)]
    return tensor_leaves(held)


def modules_of(function: Any) -> list[torch.nn.Module]:
    """The modules that a function gets hold of: itself, bound, enclosed, as a default or by the name of a global."""
    found: dict[int, torch.nn.Module] = {}
    for thing in _held_by(function):
        for one in thing if isinstance(thing, (list, tuple)) else (thing,):
            if isinstance(one, torch.nn.Module):
                found[id(one)] = one
    return list(found.values())


def _held_by(function: Any) -> Iterator[Any]:
    while isinstance(function, functools.partial):
        yield from (*function.args, *function.keywords.values())
        function = function.func
    yield function
    if inspect.ismethod(function):
        yield function.__self__
        function = function.__func__
    if not inspect.isfunction(function):
        return
    names = inspect.getclosurevars(function)
    yield from (*names.nonlocals.values(), *names.globals.values())
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


def losses_of(sample: Sample, found: Traced | Followed) -> list[int]:
    """The numbers of the outputs of a forward that may be the loss."""
    return losses_among(_output(sample, found), found.outputs, found.requires_grad)


def _output(sample: Sample, found: Traced | Followed) -> Any:
    """What a forward returned, with the tensors that were found."""
    assert found.output_spec is not None
    args, kwargs = sample.spec.rebuild(sample.copies())
    return found.output_spec.deliver(found.outputs, args, kwargs)


def _starts(sample: Sample, traced: Traced, loss: str | None) -> tuple[int, ...]:
    """The outputs at which a backward starts: the one scalar, or all of them."""
    differentiable = [n for n, requires_grad in enumerate(traced.requires_grad) if requires_grad]
    found = losses_of(sample, traced) if loss is None else []
    return tuple(found if len(found) == 1 else differentiable)


def _check(root: torch.nn.Module, spec: InputSpec, tensors: list[torch.Tensor]) -> None:
    args, _ = spec.rebuild(tensors)
    try:
        with untouched(root), torch.enable_grad():
            result = root(*args)
    except Exception as error:
        if "leaf Variable" in str(error):
            raise InputError(
                "loss writes in place to what the model returns; make that operation not in place"
            ) from error
        raise InputError(f"loss failed on what the model returns for the sample input: {error!r}") from error
    if not isinstance(result, torch.Tensor):
        raise InputError(f"loss must return a tensor, not {type(result).__name__}")
    if result.numel() != 1:
        raise InputError(f"loss must return one number to differentiate, not a tensor of shape {list(result.shape)}")
    if not result.requires_grad:
        raise InputError("loss must return a number to differentiate; what it returns does not require grad")


def _joined(traced: Traced, loss: Traced, root: torch.nn.Module, places: list[int], end: StepEnd) -> Traced:
    """One program: the model's, and behind it the loss, whose inputs are outputs of the model."""
    graph, constants = torch.fx.Graph(), dict(traced.constants)
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    returned: tuple[torch.fx.Node, ...] = ()
    for node in traced.graph.nodes:
        if node.op == "output":
            returned = tuple(copies[one] for one in _outputs_of(node))
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    place = iter(places)
    for node in loss.graph.nodes:
        if node.op == "placeholder":
            copies[node] = returned[next(place)]
        elif node.op == "output":
            graph.output((*returned, copies[_outputs_of(node)[0]]))
        else:
            target, (args, kwargs) = node.target, map_arg((node.args, node.kwargs), copies.__getitem__)
            if node.op == "get_attr":
                target = f"{CONSTANT}loss_{len(constants)}"
                constants[target] = get_attribute(root, loss.constants, str(node.target))
            # Names that no operation of the model may get, be there a loss or not.
            copies[node] = graph.create_node(node.op, target, args, kwargs, name=f"loss_{node.name}")
            copies[node].meta = {**node.meta, OUTSIDE: True}
            forget_calls(copies[node])
    own = {target for target in loss.grad_targets if not isinstance(target, int)}
    return replace(
        traced,
        graph=graph,
        constants=constants,
        outputs=[*traced.outputs, *loss.outputs],
        requires_grad=[*traced.requires_grad, True],
        grad_targets=traced.grad_targets | own,
        state={**traced.state, "random state": loss.state["random state"]},
        end=end,
    )


def _outputs_of(node: torch.fx.Node) -> tuple[torch.fx.Node, ...]:
    return cast(tuple[torch.fx.Node, ...], node.args[0])
