"""From a module and a sample input to a weighted graph over an executable program."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..collecting import collecting_new_only
from ..compare import difference, same_bits
from ..errors import InputError, OgcError, ParseError
from ..graph import Graph, Operation, PlainOperator, Value
from ..leaf import Leaf, runs_once
from ..lean import lean_operator
from ..program import Call, InputSpec, Program, TensorRef
from .attributes import attributes_of, changes
from .custom import CustomForward, ParseGraph, custom_forward, parse_graph_of
from .estimate import Estimator, Weights, copies_strided_gradients
from .gradients import LiveGradients, OperationGradients, gradient_bytes
from .jit import (
    FlatForward,
    LookAgain,
    OpaqueError,
    Traced,
    forward_alone,
    has_decisions,
    nothing_saved,
    trace,
    without_decisions,
)
from .leaves import LeafModules, Leaves
from .measure import Measurer
from .observe import Observation, Record, is_dense, observe, repeatable, untouched
from .reached import names_of
from .rebased import run_out_of_place
from .repeatable import why_not_again
from .settled import copy_settled
from .stretches import Stretch, find_stretches, is_samplewise, slice_stretches
from .unfold import Unfolding
from .versions import separate_versions
from .weigh_leaf import weigh_leaf

log = logging.getLogger(__name__)


@collecting_new_only()
def parse(
    model: torch.nn.Module,
    sample_input: Any,
    *,
    parse_graph: ParseGraph | bool | None = None,
    profile: str = "auto",
    device: torch.device | str | None = None,
    stretches: Sequence[Stretch] = (),
    slices: int = 1,
    leaf_modules: LeafModules = (),
    repeatable_leaves: LeafModules | bool = (),
) -> Graph:
    """Turn ``model`` into a weighted graph over an executable program.

    The forward runs twice on copies of the sample input, each time with the memory of inference: once to
    be traced, once operation by operation to see what each one reads, writes and saves. The second run
    must give bitwise what the first gave. Buffers, flags and random states are afterwards as before.

    Args:
        model: any module; it is parsed as it stands (training flags, dtypes, device).
        sample_input: a tensor, a tuple of positional arguments or a dict of keyword arguments.
        parse_graph: ``parse_graph(model, *inputs)`` returns a graph made by hand, to be parsed instead of the
            forward: a ``torch.fx.Graph`` or ``GraphModule``, a ``torch.export.ExportedProgram``, an
            :class:`ogc.GraphBuilder`, or the published ``(networkx.MultiDiGraph, source, target)``. It must
            give bitwise what the forward gives. Without it the model's own method of that name is used if
            there is one; with False the forward all the same.
        profile: ``"estimate"`` finds the weights from shapes, ``"measure"`` times each operation on the
            device, ``"auto"`` measures on CUDA and estimates elsewhere.
        device: weigh for this device instead of the model's own; it need not exist here (implies
            ``profile="estimate"``). The graph is then for study: it cannot be run there.
        stretches: of ``graph.stretches`` of the same model: each becomes one operation that runs forward and
            backward a part of the batch at a time, with results that differ in the last bits.
        slices: into how many parts these divide the batch.
        leaf_modules: names and types of submodules to call as they are, hooks and all: each call becomes one
            operation, which runs once per step and keeps what it saves. What cannot be replayed operator by
            operator (control flow on data, custom autograd functions, hooks, scripted code) is made part of the
            smallest such module by itself, with a warning in the log.
        repeatable_leaves: names and types of submodules such that leaves in them may be called again for their
            backward, as with ``torch.utils.checkpoint``; True for all. They must depend on nothing but their
            arguments, their parameters and torch's random state. Those that are seen not to (hooks, buffers or
            attributes that they change, random numbers of Python) are called once all the same, with a warning;
            a call that saves or returns other bits than the first one raises ReplayError in the backward.

    Returns:
        The graph; ``print(graph)`` shows it as a table.

    Raises:
        InputError: an argument is of the wrong kind or on another device than the model.
        ParseError: the forward cannot be represented faithfully, or the graph made by hand is not the model's.
    """
    check_model(model)
    args, kwargs = call_arguments(sample_input)
    spec, tensors = InputSpec.of(args, kwargs)
    home = check_devices(model, tensors)
    target = _device(device) if device is not None else home
    kind = _profile_kind(profile, home, target)
    make = parse_graph_of(model, parse_graph)
    custom = None
    if make is not None:
        with untouched(model):
            custom = custom_forward(model, make, *spec.rebuild(copies(tensors)))
    leaves = Leaves(model, leaf_modules, repeatable_leaves)
    traced, after_trace = _trace(model, spec, tensors, custom, leaves)
    run_out_of_place(traced.graph)
    make_lean(traced.graph, target)
    checked = traced.graph
    if custom is not None:
        traced = _check_custom(model, custom, spec, tensors, traced, after_trace)
    profiler = Measurer(home) if kind == "measure" else Estimator(target, home)
    unfolding = Unfolding()
    while True:
        if stretches or has_decisions(checked):
            traced = replace(traced, graph=without_decisions(checked))
        slice_stretches(traced.graph, stretches, slices)
        weights: list[Weights] = []
        samplewise: list[bool] = []
        visit = partial(_weigh, model, profiler, leaves, weights, samplewise, unfolding)
        with untouched(model):
            observation = observe(model, traced, copies(tensors), visit)
            after_program = state_of(model)
        has_copies = copy_settled(checked, observation)
        if not unfolding.carry_out(checked) and not has_copies:
            break
    leaves.report()
    check_same(traced, observation, after_trace, after_program, close if stretches else same_bits)
    _check_reached("replaying the traced program", observation.reached, traced.reached, model)
    found = find_stretches(observation.records, samplewise)
    graph = _graph(spec, traced, observation, weights, str(target), kind)
    program = replace(graph.program, checked=checked if traced.follows_sizes and not stretches else None)
    return replace(graph, program=program, stretches=tuple(found))


def _weigh(
    model: torch.nn.Module,
    profiler: Measurer | Estimator,
    leaves: Leaves,
    weights: list[Weights],
    samplewise: list[bool],
    unfolding: Unfolding,
    node: torch.fx.Node,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    record: Record,
) -> None:
    if isinstance(node.target, Leaf):
        if leaves.may_repeat(node.target.module):
            _settle_repeats(model, leaves, node, args, record)
        weights.append(weigh_leaf(model, profiler, node, args, record))
    else:
        weights.append(profiler.weigh(node, args, kwargs, record))
    samplewise.append(is_samplewise(node, args))
    if profiler.device.type == "cpu":
        unfolding.meet(node, args, kwargs)


def _settle_repeats(
    model: torch.nn.Module, leaves: Leaves, node: torch.fx.Node, args: tuple[Any, ...], record: Record
) -> None:
    """Make a leaf repeatable unless something stands in the way."""
    assert isinstance(node.target, Leaf)
    obstacle = why_not_again(model, node, args, record)
    node.target = replace(node.target, repeatable=obstacle is None)
    if obstacle is None:
        record.random = True  # it may draw numbers as the data will have it
    else:
        leaves.obstacles[node.target.module] = obstacle


def check_model(model: Any) -> None:
    """Raise InputError unless ``model`` is a module that can be optimized."""
    if isinstance(model, type):
        raise InputError(f"model is the class {model.__name__}; pass an instance of it")
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError("model is a torch.jit.ScriptModule; pass the eager module that it was made from")
    if isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        kind = type(model).__name__
        raise InputError(
            f"model is a {kind}; optimize the module in it, model.module, and put the result into a {kind}"
        )
    compiled = model._compiled_call_impl  # or a part of a model that is planned in parts
    if "_orig_mod" in model._modules or not (compiled is None or hasattr(compiled, "part_of")):
        raise InputError("model was compiled, and would run compiled instead of planned; pass it without torch.compile")
    if torch.is_inference_mode_enabled():
        raise InputError("nothing can be trained under torch.inference_mode(); leave it first")
    for name, parameter in model.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise InputError(f"parameter {name} is not initialized; call the model once on an input before")
        if parameter.is_meta:
            raise InputError(
                f"parameter {name} is on the meta device, where it has no content; "
                "move the model with model.to_empty(device=...) and initialize it first"
            )
    if not any(p.requires_grad for p in model.parameters()):
        raise InputError(
            "no parameter of the model requires grad, so there is no backward pass to save memory in; "
            "call model.requires_grad_() first if it is to be trained"
        )


def call_arguments(sample_input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the call that a sample input stands for."""
    if isinstance(sample_input, torch.Tensor):
        return (sample_input,), {}
    if isinstance(sample_input, tuple):
        return sample_input, {}
    if isinstance(sample_input, dict):
        if strange := [key for key in sample_input if not isinstance(key, str)]:
            raise InputError(f"the keys of a dict as sample_input must be names of arguments, not {strange[0]!r}")
        return (), sample_input
    if isinstance(sample_input, Call):
        return sample_input.args, sample_input.kwargs
    raise InputError(
        "sample_input must be a tensor, a tuple of positional arguments or a dict of keyword arguments, "
        f"not {type(sample_input).__name__}"
    )


def check_devices(model: torch.nn.Module, tensors: list[torch.Tensor]) -> torch.device:
    """The device of the model's parameters.

    Raises:
        InputError: there is no tensor in the sample input, or one lives on another device.
    """
    home = next(p.device for p in model.parameters())
    if not tensors:
        raise InputError("sample_input holds no tensor")
    for number, tensor in enumerate(tensors):
        if tensor.device != home and not (tensor.dim() == 0 and tensor.device.type == "cpu"):
            raise InputError(
                f"tensor {number} of sample_input is on {tensor.device}, the model on {home}; "
                f"move it with .to('{home}')"
            )
        if tensor.layout is not torch.strided:
            raise InputError(
                f"tensor {number} of sample_input is {tensor.layout}, not dense; call the model with dense ones"
            )
    return home


def _device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise InputError(f"device must be a torch.device or its name, such as 'cuda', not {device!r}") from None


def _profile_kind(profile: str, home: torch.device, target: torch.device) -> str:
    if profile not in ("auto", "estimate", "measure"):
        raise InputError(f"profile must be 'auto', 'estimate' or 'measure', not {profile!r}")
    if target.type != home.type:
        if profile == "measure":
            raise InputError(f"cannot measure for {target} on a model that is on {home}")
        return "estimate"
    return ("measure" if home.type == "cuda" else "estimate") if profile == "auto" else profile


def _trace(
    model: torch.nn.Module,
    spec: InputSpec,
    tensors: list[torch.Tensor],
    forward: CustomForward | None,
    leaves: Leaves,
) -> tuple[Traced, list[torch.Tensor]]:
    """The model's trace, with as many leaves as it takes, and its state afterwards."""
    careful = False
    while True:
        with untouched(model):
            before = attributes_of(model)
            try:
                traced = trace(model, spec, copies(tensors), forward, leaves.names, careful)
            except OpaqueError as problem:
                leaves.cover(problem)
                continue
            except LookAgain:
                careful = True
                continue
            except OgcError:
                raise
            except Exception as error:
                if forward is None and _runs(model, spec, tensors):
                    raise ParseError(
                        f"the forward runs, but not while it is traced ({type(error).__name__}: {error}); put what the "
                        "traceback shows into a submodule of its own, or optimize the submodules around it instead"
                    ) from error
                raise
            called = {node.target.module for node in traced.graph.nodes if isinstance(node.target, Leaf)}
            if forward is not None:
                leaves.check_hooks(called)
            if forward is None and not any(traced.requires_grad):
                raise ParseError(
                    "no output of the model's forward requires grad, so there is no backward pass to save memory in; "
                    "take torch.no_grad() or detach() out of it"
                )
            after_trace = state_of(model)
            changed = dict(changes(before, attributes_of(model), called))
        if changed and forward is None:
            try:
                _refuse_dependence(model, spec, tensors, traced, changed, leaves.names)
            except OpaqueError as problem:
                leaves.cover(problem)
                continue
        if traced.other_overloads and forward is None:
            with untouched(model):
                traced = replace(traced, outputs=forward_alone(model, spec, copies(tensors))[1])
        return traced, after_trace


def _runs(model: torch.nn.Module, spec: InputSpec, tensors: list[torch.Tensor]) -> bool:
    try:
        forward_alone(model, spec, copies(tensors))
    except Exception:  # the model's own, as it was in the trace
        return False
    return True


def _refuse_dependence(
    model: torch.nn.Module,
    spec: InputSpec,
    tensors: list[torch.Tensor],
    traced: Traced,
    changed: dict[str, str],
    leaves: set[str],
) -> None:
    """Raise OpaqueError unless the attributes that a first call changed are settled then, and make no difference.

    Args:
        changed: an attribute that did change for each module.
        leaves: they may change with each call; one of which only methods are called as long as it makes no difference.

    Raises:
        OpaqueError: it names the modules whose attributes count, collect or tell the first call from others.
    """
    with untouched(model):
        with repeatable(model):
            forward_alone(model, spec, copies(tensors))
        before = attributes_of(model)
        _, outputs = forward_alone(model, spec, copies(tensors))
        again = dict(changes(before, attributes_of(model), leaves))
    when = "each call" if again else "its first call"
    if again or not all(map(same_bits, outputs, traced.outputs)):
        reasons = {name: f"changes its attribute {key} in {when}" for name, key in (again or changed).items()}
        all_of_them = "; ".join(f"{name or 'the model'} {why}" for name, why in reasons.items())
        raise OpaqueError(
            f"a replayed forward leaves attributes as they are: {all_of_them}. Return what others are to have "
            "instead, hold it in a buffer; if only its first call is another, call the model before it is optimized.",
            reasons,
        )


def _check_custom(
    model: torch.nn.Module,
    custom: CustomForward,
    spec: InputSpec,
    tensors: list[torch.Tensor],
    traced: Traced,
    after_trace: list[torch.Tensor],
) -> Traced:
    """A graph made by hand must do what the model's forward does. Its outputs get the forward's structure."""
    plain = FlatForward(model.forward, spec)
    with untouched(model), nothing_saved():
        plain(*copies(tensors))
        after_plain = state_of(model)
    if len(traced.outputs) != len(plain.outputs):
        raise ParseError(
            f"the graph gives {len(traced.outputs)} output tensors, the model's forward {len(plain.outputs)}"
        )
    for number, (ours, theirs) in enumerate(zip(traced.outputs, plain.outputs, strict=True)):
        where = f"{custom.output_label(number)} gives another output {number} than the model's forward"
        if not same_bits(ours, theirs):
            raise ParseError(f"{where}: {difference(ours, theirs)}")
        if traced.requires_grad[number] != plain.requires_grad[number]:
            raise ParseError(f"{where}: only one of the two requires grad")
    _check_reached("the graph", traced.reached, plain.reached, model)
    names = [*(f"buffer {name}" for name, _ in model.named_buffers()), "random state"]
    for name, ours, theirs in zip(names, after_trace, after_plain, strict=True):
        if not same_bits(ours, theirs):
            raise ParseError(f"the graph leaves another {name} than the model's forward: {difference(ours, theirs)}")
    assert plain.output_spec is not None
    return replace(traced, output_spec=plain.output_spec)


def make_lean(graph: torch.fx.Graph, device: torch.device) -> None:
    """Put operators whose backward needs less memory in the places of those that they stand for."""
    for node in graph.nodes:
        lean = lean_operator(node.target, device)
        if lean is not None:
            node.meta["operator"] = node.target
            node.target = lean


def copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Inputs of their own for a run on the side, of the same strides."""
    return [_copy(t.detach()).requires_grad_(t.requires_grad) for t in tensors]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided or is_dense(tensor) or not tensor.numel():
        return tensor.clone()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    block = tensor.as_strided((span,), (1,), tensor.storage_offset()).clone()
    return block.as_strided(tensor.shape, tensor.stride())


def state_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """What a forward may change: buffers and the random state."""
    return [*(b.clone() for b in model.buffers()), torch.get_rng_state()]


def check_same(
    traced: Traced,
    observation: Observation,
    after_trace: list[torch.Tensor],
    after_program: list[torch.Tensor],
    same: Callable[[torch.Tensor, torch.Tensor], bool],
) -> None:
    """Raise ParseError unless the program gave what the model gave, or it is not this model's."""
    for number, (ours, theirs) in enumerate(zip(observation.outputs, traced.outputs, strict=True)):
        if not same(ours, theirs):
            raise ParseError(
                f"replaying the traced program gives another output {number} than the model's forward; "
                "the forward is not deterministic, or depends on Python state that changes between calls"
            )
    if not all(same(a, b) for a, b in zip(after_trace, after_program, strict=True)):
        raise ParseError("replaying the traced program leaves other buffers or random state than the model's forward")


def _check_reached(what: str, ours: frozenset[Any], theirs: frozenset[Any], model: torch.nn.Module) -> None:
    """Raise ParseError unless both give gradients to the same inputs and parameters."""
    known = {*map(id, model.parameters())}
    ours, theirs = (frozenset(t for t in found if isinstance(t, int) or id(t) in known) for found in (ours, theirs))
    if ours != theirs:
        raise ParseError(
            f"{what} does not give gradients to what the model's forward gives them to: it misses "
            f"{names_of(theirs - ours, model)} and adds {names_of(ours - theirs, model)}"
        )


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal up to rounding."""
    scale = float(b.abs().max()) if b.numel() and b.is_floating_point() else 0.0
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, 1e-3, 1e-5 * scale, equal_nan=True)


def _graph(
    spec: InputSpec, traced: Traced, observation: Observation, weights: list[Weights], device: str, kind: str
) -> Graph:
    records = observation.records
    taken = versions_of(traced.graph, observation)
    ends = [TensorRef(node.name, 0) for node in _returned(traced.graph)]
    returned = [observation.rebased.get(ref, ref) for ref in ends]
    lean = gradient_bytes([_gradients(r, w) for r, w in zip(records, weights, strict=True)], returned)
    plain = gradient_bytes([_gradients(r, w.plain or w) for r, w in zip(records, weights, strict=True)], returned)
    seen = memory_of(records, taken)
    operations = tuple(
        _operation(*of_one, observation.storages) for of_one in zip(records, weights, lean, plain, seen, strict=True)
    )
    program = program_of(spec, traced, observation, taken)
    return Graph(operations, values_of(observation), program, device, kind)


def _returned(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return next(node for node in graph.nodes if node.op == "output").all_input_nodes


def versions_of(graph: torch.fx.Graph, observation: Observation) -> dict[int, tuple[int, Any]]:
    """Make values of their own of what is written in place; see :func:`separate_versions`."""
    return separate_versions(observation, {node.name for node in _returned(graph)})


def values_of(observation: Observation) -> tuple[Value, ...]:
    """The values of a graph."""
    return tuple(
        Value(name, size, number in observation.output_values)
        for number, (name, size) in enumerate(zip(observation.value_names, observation.value_bytes, strict=True))
    )


def program_of(spec: InputSpec, traced: Traced, observation: Observation, taken: dict[int, tuple[int, Any]]) -> Program:
    """A traced program with what was seen when it ran."""
    records = observation.records
    return Program(
        graph=traced.graph,
        constants=traced.constants,
        inputs=spec,
        outputs=traced.output_spec,
        saves=tuple(tuple(record.saves) for record in records),
        storages=observation.storages,
        differentiable=frozenset(
            ref for r in records for ref, flag in zip(r.outputs, r.differentiable, strict=True) if flag
        ),
        random=frozenset(t for t, record in enumerate(records) if record.random),
        out_of_place={t: twin for t, (_, twin) in taken.items()},
    )


def memory_of(records: Sequence[Record], taken: dict[int, tuple[int, Any]]) -> list[dict[str, Any]]:
    """For each operation, the fields of the graph's that say what it does to memory."""
    last_external_write = {e: t for t, record in enumerate(records) for e in record.writes_external}
    found = []
    for t, record in enumerate(records):
        # What a read of a buffer saw is gone once a later operation has written it.
        stale = any(last_external_write.get(e, -1) >= t for e in record.reads_external)
        found.append(
            {
                "reads": tuple(record.reads),
                "writes": tuple(record.writes),
                "saves": tuple(record.saved_values),
                "takes_over": taken.get(t, (None,))[0],
                "replayable": not (record.writes_external or stale or runs_once(record.node.target)),
            }
        )
    return found


def _operation(
    record: Record,
    weights: Weights,
    lean: LiveGradients,
    plain_gradients: LiveGradients,
    seen: dict[str, Any],
    storages: Mapping[TensorRef, int],
) -> Operation:
    node = record.node
    ours = PlainOperator(seen["saves"], _internal_bytes(record, weights), weights.scratch_bytes, lean.during)
    theirs = weights.plain or weights
    given = (record.arguments[n] for n in theirs.saved_arguments)
    saves = {storages[ref] for ref in given if ref is not None and ref in storages}.difference(ours.saves)
    plain = PlainOperator(
        (*ours.saves, *sorted(saves)), _internal_bytes(record, theirs), theirs.scratch_bytes, plain_gradients.during
    )
    return Operation(
        name=node.name,
        target=str(node.meta.get("operator", node.target)),
        module=node.meta.get("module", ""),
        source=node.meta.get("source", ""),
        internal_bytes=ours.internal_bytes,
        scratch_bytes=weights.scratch_bytes,
        gradient_bytes=lean.before,
        backward_bytes=lean.during,
        late_bytes=lean.late,
        plain=None if plain == ours and not lean.late else plain,
        forward_seconds=weights.forward_seconds,
        backward_seconds=weights.backward_seconds,
        forward_flops=weights.forward_flops,
        backward_flops=weights.backward_flops,
        again_seconds=weights.again_seconds,
        again_flops=weights.again_flops,
        repeat_seconds=weights.repeat_seconds,
        **seen,
    )


def _internal_bytes(record: Record, weights: Weights) -> int:
    return record.internal_bytes if weights.internal_bytes is None else weights.internal_bytes


def _gradients(record: Record, weights: Weights) -> OperationGradients:
    found = OperationGradients(
        outputs=tuple(record.outputs),
        output_bytes=tuple(record.output_bytes),
        differentiable=tuple(record.differentiable),
        arguments=tuple(record.receivers),
        gradients=weights.gradients,
        working_bytes=weights.working_bytes,
        late_bytes=weights.late_bytes,
        copies_strided=copies_strided_gradients(record.node),
        sources=tuple(record.sources),
    )
    return found if record.rebase is None else found.through_base(record.rebase)
