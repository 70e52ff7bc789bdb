"""Runs a model once under the tracer of ``torch.jit``."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import chain
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from ...errors import OgcError, ParseError, add_note
from ...program import InputSpec, OutputSpec
from ..reached import reached
from .leaf_calls import LeafCall, leaf_calls
from .lowering import Lowering
from .places import scope_name, untraced
from .recorders import recorders_watched
from .recording import record
from .shapes import refuse_shapes_of_data
from .traced import Traced
from .watch import OpaqueError, Watch


def trace(
    model: torch.nn.Module,
    spec: InputSpec,
    tensors: list[torch.Tensor],
    forward: Callable[..., Any] | None = None,
    leaves: Collection[str] = (),
    careful: bool = False,
) -> Traced:
    """Run ``model``, or ``forward`` in its place, once on ``tensors`` and return what it computed.

    Gradients are on, but nothing is saved for a backward: memory is that of inference.

    Args:
        model: the module.
        spec: how the arguments are rebuilt from ``tensors``.
        tensors: the tensors among the arguments of the call.
        leaves: names of submodules to call as they are.
        careful: look at the random states of Python and numpy with each call, which takes time.

    Raises:
        OpaqueError: the forward does what no trace can hold; modules named by the error would have to be leaves.
        ParseError: the forward cannot be represented faithfully; the message names file and line.
        LookAgain: it must be traced carefully to tell.
        Exception: whatever the model's own forward raises, with a note saying so.
    """
    watch = Watch(follows=bool(leaves), inputs=tensors, careful=careful)
    flat = FlatForward(model.forward if forward is None else forward, spec, watch.aside)
    buffers = dict(model.named_buffers())
    state = dict(chain(model.named_parameters(), buffers.items()))
    with (
        warnings.catch_warnings(),
        nothing_saved(),
        _without_jit_autocast(),
        _size_checks_untraced(),
        _module_scopes(model),
        watch.told_of_numbers(),
        leaf_calls(model, leaves, watch),
        recorders_watched(model, watch),
        watch,
    ):
        # torch.jit is deprecated; what its tracer warns of is decided here, by Watch.
        warnings.filterwarnings("ignore", message=r".*torch\.jit")
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        warnings.filterwarnings("ignore", message="To copy construct from a tensor")  # sizes are tensors here only
        # torch.jit.trace would make a script module of every submodule, which takes longer than the
        # forward. The tracer tells tensors by identity: parameters and buffers may as well be inputs.
        try:
            recording = record(lambda *given: flat(*given[: len(tensors)]), (*tensors, *state.values()))
        except Exception as error:
            watch.raise_if_leaky()  # which may be what it is about
            failure = _failure(model, error)
            if failure is error:
                raise
            raise failure from error
    watch.raise_if_unfaithful()
    _refuse_new_parameters(model, state)
    _refuse_new_buffers(model, buffers, leaves)
    refuse_shapes_of_data(recording, watch.decisions, len(flat.outputs))
    assert flat.output_spec is not None
    lowering = Lowering(model, state, watch, recording)
    lowering.run()
    follows_sizes = not watch.unclear and not leaves  # what a leaf makes of sizes is not known
    return Traced(
        lowering.graph,
        lowering.constants,
        flat.output_spec,
        flat.outputs,
        flat.requires_grad,
        follows_sizes,
        lowering.other_overloads,
        flat.reached,
    )


def forward_alone(
    model: torch.nn.Module, spec: InputSpec, tensors: list[torch.Tensor]
) -> tuple[OutputSpec, list[torch.Tensor]]:
    """The structure and the tensors that the model's forward returns, with gradients on and nothing saved."""
    flat = FlatForward(model.forward, spec)
    with nothing_saved():
        flat(*tensors)
    assert flat.output_spec is not None
    return flat.output_spec, flat.outputs


def _refuse_new_parameters(model: torch.nn.Module, before: dict[str, torch.Tensor]) -> None:
    after = dict(model.named_parameters())
    for name in [*before, *after]:
        if name not in after and isinstance(before[name], torch.nn.Parameter):
            raise ParseError(f"the forward takes the parameter {name} out of the model; make it keep its parameters")
        if after.get(name) is not before.get(name) and name in after:
            raise ParseError(
                f"the forward makes the parameter {name}; make it in __init__, or call the model once before it is "
                "optimized if it is made in the first call alone"
            )


def _refuse_new_buffers(model: torch.nn.Module, before: dict[str, torch.Tensor], leaves: Collection[str]) -> None:
    changed = [name for name, buffer in model.named_buffers() if before.get(name) is not buffer]
    outside = [name for name in changed if not any(name.startswith(f"{leaf}.") for leaf in leaves)]
    if outside:
        raise OpaqueError(
            f"the forward assigns a new tensor to the buffer {outside[0]}, which a replay would not repeat; "
            "update it in place (copy_, add_, mul_) instead",
            {name.rpartition(".")[0]: "assigns new tensors to buffers" for name in outside},
        )


def _failure(model: torch.nn.Module, error: Exception) -> Exception:
    """What to raise for an error of a traced forward: a leaf may hide what is only the tracer's."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [frame.f_locals["self"] for frame in frames if frame.f_code.co_name == "_slow_forward"]
    in_leaf = any(frame.f_code is LeafCall.__call__.__code__ for frame in frames)
    names = {module: name for name, module in model.named_modules()}
    if isinstance(error, OgcError) or in_leaf or not modules or modules[-1] not in names:
        return error
    what = f"fails while it is traced: {str(error).partition(chr(10))[0]}"
    return OpaqueError(f"the forward {what}", {names[modules[-1]]: what})


@contextmanager
def _module_scopes(model: torch.nn.Module) -> Iterator[None]:
    """Every node is traced in a scope named after the module that runs it."""
    before = torch.jit._trace._trace_module_map
    torch.jit._trace._trace_module_map = {m: name for name, m in model.named_modules(remove_duplicate=False)}
    try:
        yield
    finally:
        torch.jit._trace._trace_module_map = before


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Operators traced inside are said to come from ``name``, unless they come from a module."""
    state = torch._C._get_tracing_state()
    state.push_scope(name)
    try:
        yield
    finally:
        state.pop_scope()


@contextmanager
def _without_jit_autocast() -> Iterator[None]:
    """The trace has autocast's casts already; torch.jit would add its own, where autocast is off too."""
    before = torch._C._jit_set_autocast_mode(False)
    try:
        yield
    finally:
        torch._C._jit_set_autocast_mode(before)


@contextmanager
def _size_checks_untraced() -> Iterator[None]:
    """Norms check sizes in Python: nothing comes of it but an error, yet it takes more nodes than they do."""
    names = ("_verify_batch_size", "_verify_spatial_size")
    checks = {name: vars(functional)[name] for name in names if name in vars(functional)}

    def replace(check: Callable[[Any], None]) -> Callable[[Any], None]:
        @wraps(check)
        def call(size: Any) -> None:
            with untraced():
                check(size)

        return call

    vars(functional).update({name: replace(check) for name, check in checks.items()})
    try:
        yield
    finally:
        vars(functional).update(checks)


@contextmanager
def nothing_saved() -> Iterator[None]:
    """Gradients are on, but nothing is kept for a backward: memory is that of inference."""
    with saved_tensors_hooks(lambda tensor: None, _never_unpacked), torch.enable_grad():
        yield


def _never_unpacked(packed: object) -> torch.Tensor:
    raise OpaqueError(
        "the model runs a backward pass inside its forward, which cannot be traced; put it into a submodule of its own",
        {scope_name(): "runs a backward pass"},
    )


class FlatForward:
    """A forward as a function of a flat list of tensors. It remembers what it returned."""

    def __init__(
        self, forward: Callable[..., Any], spec: InputSpec, aside: Callable[[], list[torch.Tensor]] = list
    ) -> None:
        self.forward = forward
        self.spec = spec
        self.aside = aside  # what to return beside the outputs
        self.output_spec: OutputSpec | None = None
        self.outputs: list[torch.Tensor] = []
        self.requires_grad: list[bool] = []
        self.reached: frozenset[Any] = frozenset()
        self.graph: list[Any] = []  # nodes for a backward, held until the outputs are gone

    def __call__(self, *tensors: torch.Tensor) -> Any:
        args, kwargs = self.spec.rebuild(list(tensors))
        try:
            result = self.forward(*args, **kwargs)
        except OgcError:
            raise
        except Exception as error:
            add_note(error, "ogc: this error was raised by the model's own forward on the sample input.")
            raise
        self.output_spec, outputs = OutputSpec.of(result)
        if not outputs:
            raise ParseError("the model's forward returns no tensor; there is nothing to train")
        self.outputs = [tensor.detach() for tensor in outputs]
        self.requires_grad = [tensor.requires_grad for tensor in outputs]
        self.reached, self.graph = reached(outputs, tensors)
        return (*outputs, *self.aside())
