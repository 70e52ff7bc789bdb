"""From a module and a sample input to a weighted graph over an executable program."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..errors import InputError, ParseError, optional
from ..graph import Graph
from ..operators.gpus import gpu_of
from ..operators.registry import out_of_place
from ..plan.simulate import plain_peak
from ..plan.told import kind_of
from ..process import collecting_new_only, shown
from ..program.opaque import OpaqueCall
from ..program.program import OUTSIDE, Gradients, Loss
from ..program.structures import autocast_state
from ..torch_state.compare import difference, same_bits
from ..torch_state.dispatch import run_in
from ..torch_state.forwards import plain_forward
from ..torch_state.no_trace import plainly, untouched
from ..torch_state.ranks import alone, parameters_apart
from .arguments import Sample, check_gpu, check_model, check_tensors, contents_of, device_of, profile_kind, sample_of
from .assemble import end_of, graph_of
from .custom import CustomForward, ParseGraph, custom_forward, parse_graph_of
from .doors.scripted import as_python
from .faithful import check_front_end, faithful_program
from .forward.flat import FlatForward, other_state, state_of
from .loss import modules_of, with_step_end
from .opaque import NamesAndTypes, OpaqueModules, refuse_chance, why_not_repeatable
from .options import ParseOptions, Rewrite
from .passes.calls import Bindings, Unfolding, share_casts
from .passes.lifetimes import unused_memory
from .passes.writes import copy_after_last_write, run_out_of_place, save_operands
from .traced import READS, RECORD, OpaqueError, Traced, forget_calls, without_unused
from .verify import verify_on_other_inputs
from .weigh.estimate import Estimator, Variants
from .weigh.host import choice_seconds
from .weigh.measure import Measurer, Profiler, weigh
from .weigh.record import Observation, Record, Visit, observe


def parse(
    model: torch.nn.Module,
    sample_input: Any,
    *,
    loss: Loss | None = None,
    holds_outputs: bool = True,
    outputs: str = "all",
    gradients: Gradients = "kept",
    parse_graph: ParseGraph | bool | None = None,
    profile: str = "auto",
    device: torch.device | str | None = None,
    rewrite: Rewrite | None = None,
    plain_peak_bytes: int | None = None,
    gpu: str | None = None,
    opaque_modules: NamesAndTypes = (),
    recompute_opaque: NamesAndTypes | bool | None = None,
    front_end: str = RECORD,
) -> Graph:
    """Turn ``model`` into a weighted graph over an executable program.

    The forward runs on copies of the sample input, with the memory of inference: recorded, unrecorded to verify that,
    and as a program, to be verified and observed. All must give the same bits. Measuring takes the memory of one
    operation's backward on top. Buffers, flags and random states are afterwards as before.

    Args:
        model: any module; it is parsed as it stands (training flags, dtypes, device).
        sample_input: a tensor, a tuple of positional arguments or a dict of keyword arguments.
        loss: ``loss(output)`` returns the one number that the backward starts from, such as a criterion with its
            targets bound in, or ``lambda out: out.loss``. Its tensors count, and outputs that it does not use get no
            gradient. It is called a few times here, and never by the optimized model. Without it the backward starts
            at the one scalar output that requires grad, of several at the one named ``loss``, or else at all outputs.
        holds_outputs: the caller holds all outputs through the backward; with False nothing but the loss.
        outputs: with ``"loss"`` the program returns None in the place of all tensors but the loss.
        gradients: of the parameters. ``"kept"``: they are there all the time and do not count; ``"none"``: the backward
            makes them, and from then on they count. A dict: hooks step the optimizer and free each at once, and such a
            step takes so many bytes for a parameter of that shape.
        parse_graph: ``parse_graph(model, *inputs)`` returns a graph made by hand, to be parsed instead of the forward:
            a ``torch.fx.Graph`` or ``GraphModule``, a ``torch.export.ExportedProgram``, an :class:`ogc.GraphBuilder`,
            or the published ``(networkx.MultiDiGraph, source, target)``. It must give bitwise what the forward gives.
            By default the model's own method of that name, if any; False for the forward all the same.
        profile: ``"estimate"`` finds the weights from shapes, ``"time"`` measures how long each operation takes on the
            device and estimates its bytes, ``"measure"`` measures both, ``"auto"`` both on CUDA and times elsewhere.
        device: weigh for this device, which need not exist here (implies ``profile="estimate"``): the graph is for
            study and cannot be run there. For ``"cuda"`` the model may be on the meta device, or of fake tensors,
            unless its forward reads what they hold.
        gpu: the name of the GPU that ``device="cuda"`` means, such as ``"H100"``: times follow its data sheet, and so
            do kernels of attention. By default the one here, or else an A100 with 40 GB. Known names:
            :data:`ogc.operators.gpus.GPUS`.
        rewrite: ``rewrite(graph, device)`` changes the program before it is planned, a ``torch.fx.Graph``; results may
            differ in the last bits. ``ogc.rewrites.chunking.Chunks(regions, chunks)`` is one, which runs some of
            ``graph.regions`` of the same model, forward and backward, in so many chunks of the batch.
        plain_peak_bytes: of the plain model; where the graph is another program, it is found anew unless it is given.
        opaque_modules: names and types of submodules to call as they are, hooks and all, each call one operation. What
            cannot be replayed by operators (control flow on data, custom autograd functions, hooks, scripted code)
            becomes part of the smallest such module by itself, with a warning in the log.
        recompute_opaque: names and types of submodules that may be recomputed for their backward, True for all,
            False for none. By default those that are seen to depend on their arguments, parameters and torch's random
            state alone, without hooks or changes of buffers and attributes. What obstructs a named one is told in the
            log, and it is called once. A second call that saves or returns other bits raises ReplayError.
        front_end: what the program comes from: ``"record"``, a recording of the forward; or the graph that ``"jit"``,
            ``torch.jit.trace``, makes of it, or ``"export"``, ``torch.export``, or ``"dynamo"``. All are verified
            against the forward alike. The others have no opaque modules: what would have to be one is refused. A
            ``torch.jit.ScriptModule`` goes through ``"jit"`` alone, as its interpreter runs it without optimizing.

    Returns:
        The graph; ``print(graph)`` shows it as a table.

    Raises:
        InputError: an argument is of the wrong kind or on another device than the model.
        ParseError: the forward cannot be represented faithfully, or the graph made by hand is not the model's.
    """
    options = ParseOptions(
        loss, holds_outputs, outputs, gradients, parse_graph, profile, device, rewrite, plain_peak_bytes, gpu,
        opaque_modules, recompute_opaque, front_end,
    )  # fmt: skip
    return parsed(as_python(model, front_end), sample_input, options)


@collecting_new_only()
@shown()
@plainly()
@alone()
def parsed(model: torch.nn.Module, sample_input: Any, options: ParseOptions) -> Graph:
    """What :func:`parse` returns for these options."""
    device, gpu, rewrite, after_forward = options.device, options.gpu, options.rewrite, options.after_forward
    check_model(model, may_lack_content=device is not None)
    contents = contents_of(model, device)
    sample = sample_of(model, sample_input, contents)
    model = sample.model
    home = check_tensors(sample)
    target = device_of(device) if device is not None else home
    kind = profile_kind(options.profile, home, target)
    check_gpu(gpu, target)
    make = parse_graph_of(model, options.parse_graph)
    check_front_end(options.front_end, make is not None)
    if contents is not None and options.front_end != RECORD:
        raise InputError(f"front_end={options.front_end!r} needs a model with content, on the device it is planned for")
    opaque = OpaqueModules(model, options.opaque_modules, options.recompute_opaque, options.front_end)
    visit = partial(visited, model, profiler_of(kind, target, home, gpu), opaque)
    is_elsewhere = contents is not None or home.type != target.type
    with (
        run_in(contents) if contents else nullcontext(),
        _as_on(target, gpu, bool(contents and autocast_state())) if is_elsewhere else nullcontext(),
        untouched(*modules_of(options.loss), given=sample.spec.constants),
        parameters_apart(model),
    ):
        while True:
            recorded = record_program(sample, make, opaque)
            try:
                verify_on_other_inputs(sample, recorded, is_own=make is None and recorded.cold is None)
                whole = with_step_end(sample, recorded, after_forward)
                traced, observation = lower(sample, whole, target, visit, rewrite)
                break
            except OpaqueError as problem:
                opaque.cover(problem)
        choice = 0.0 if kind == "estimate" else choice_seconds(model, recorded.reads)
        graph = graph_of(sample.spec, traced, observation, str(target), kind, choice)
        plain_peak_bytes = options.plain_peak_bytes
        is_another = options.outputs == "loss" or rewrite is not None  # the plain model has all outputs, whole
        if plain_peak_bytes is None and is_another:
            plain = lower(sample, with_step_end(sample, recorded, replace(after_forward, outputs="all")), target, visit)
            plain_peak_bytes = plain_peak(graph_of(sample.spec, *plain, str(target), kind))
    opaque.report()
    bare = replace(recorded, outputs=[], state={}, grad_targets=frozenset())  # without tensors
    program = replace(graph.program, parse_graph=make, recorded=bare)
    kinds = kinds_of_modules(model)
    return options.told.on(replace(graph, program=program, plain_peak_bytes=plain_peak_bytes, kinds=kinds))


def kinds_of_modules(model: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """``kinds`` of a graph of a model."""
    modules = dict(model.named_modules(remove_duplicate=False))
    kinds = {kind: kind_of(kind) for kind in {type(module) for module in modules.values()}}
    return {name: kinds[type(module)] for name, module in modules.items()}


def _as_on(device: torch.device, gpu: str | None, casts: bool) -> AbstractContextManager[None]:
    """Inside, operators on meta tensors are those of a device that the model is not on."""
    if device.type != "cuda":
        return nullcontext()
    found: AbstractContextManager[None] = optional("sizing.cuda.kernels").as_on_cuda(gpu_of(device, gpu), casts=casts)
    return found


def profiler_of(kind: str, device: torch.device, home: torch.device, gpu: str | None = None) -> Profiler:
    """What weighs operations for ``device``, a ``gpu``, by measuring or by estimating; the model is on ``home``."""
    return Estimator(device, home, gpu=gpu) if kind == "estimate" else Measurer(home, measures_bytes=kind == "measure")


def record_program(sample: Sample, make: ParseGraph | None, opaque: OpaqueModules) -> Traced:
    """The program of a model's forward, or of the graph that ``make`` returns, every call in it."""
    if make is None:
        return faithful_program(sample, None, opaque)
    with untouched(sample.model):
        custom = custom_forward(sample.model, make, *sample.spec.rebuild(sample.copies()))
    traced = faithful_program(sample, custom, opaque)
    for node in traced.graph.nodes:
        forget_calls(node)
    _refuse_foreign_parameters(traced)
    return _check_custom(sample, custom, traced)


def lower(
    sample: Sample,
    recorded: Traced,
    device: torch.device,
    visit: Visit,
    rewrite: Rewrite | None = None,
) -> tuple[Traced, Observation]:
    """The program as it is planned, and an observation of a run; ParseError if it computes something else."""
    traced, observation, state = planned_form(sample, recorded, device, visit, rewrite)
    _check_same(traced, observation, state, close if rewrite else same_bits)
    wanted = traced.grad_targets
    if end_of(traced).after_forward.outputs == "loss":
        wanted &= observation.grad_targets  # others belong to outputs that nobody wants
    _check_grad_targets("replaying the program", observation.grad_targets, wanted, sample.model)
    return traced, observation


def planned_form(
    sample: Sample,
    recorded: Traced,
    device: torch.device,
    visit: Visit,
    rewrite: Rewrite | None = None,
    run: Callable[[torch.nn.Module, Traced, list[torch.Tensor], Visit], Observation] = observe,
) -> tuple[Traced, Observation, dict[str, torch.Tensor]]:
    """The program in the form that is planned, an observation of its last ``run``, and the model's state after that.

    ``visit`` is shown each operation as it runs, from the start as often as the program changes.
    """
    program = without_unused(recorded.graph)
    unused = unused_memory(recorded.graph, program)
    run_out_of_place(program)
    share_casts(program)
    unfolding, variants, bindings = Unfolding(), Variants(device), Bindings()

    def visit_and_meet(record: Record, args: Any, kwargs: Any) -> None:
        if OUTSIDE in record.node.meta:
            return visit(record, args, kwargs)
        record.variant = variants.of(record, args, kwargs)
        for target in filter(None, (record.node.target, out_of_place(record.node.target))):
            if binding := bindings.of(target, args, kwargs):
                record.bindings[target] = binding
        visit(record, args, kwargs)
        if device.type == "cpu":
            unfolding.meet(record.node, args, kwargs)

    while True:
        traced = replace(recorded, graph=without_unused(program) if rewrite else program)
        if rewrite:
            rewrite(traced.graph, device)
        with untouched(sample.model):
            observation = run(sample.model, traced, sample.copies(), visit_and_meet)
            state = state_of(sample.model)
        has_copies = copy_after_last_write(program, observation)
        has_twins = save_operands(observation)
        if not unfolding.carry_out(program) and not has_copies and not has_twins:
            observation.take_saves()
            observation.unused = unused
            return traced, observation, state


def visited(
    model: torch.nn.Module, profiler: Profiler, opaque: OpaqueModules, record: Record, args: Any, kwargs: Any
) -> None:
    """Weigh an operation, and find out how it may be run."""
    node = record.node
    if isinstance(node.target, OpaqueCall) and OUTSIDE not in node.meta:
        if record.random and node.meta[READS]:
            refuse_chance(model, node, args)
        _allow_repeats(model, opaque, record, args)
    record.weights = weigh(model, profiler, record, args, kwargs)


def _allow_repeats(model: torch.nn.Module, opaque: OpaqueModules, record: Record, args: Any) -> None:
    """Make an opaque module repeatable unless something stands in the way."""
    node = record.node
    assert isinstance(node.target, OpaqueCall)
    name, is_named = node.target.module, opaque.is_repeatable(node.target.module)
    if not is_named and not opaque.finds_repeatable:
        return
    changed = opaque.changed_attribute(name) if node.target.submodule is not None else None
    obstacle = f"changes {changed}" if changed else why_not_repeatable(model, record, args)
    node.target = replace(node.target, repeatable=obstacle is None)
    if obstacle is None:
        opaque.repeated.add(name)
        record.random = True  # it may draw numbers as the data will have it
    elif is_named:
        opaque.obstacles[name] = obstacle


def _refuse_foreign_parameters(traced: Traced) -> None:
    for node in traced.graph.find_nodes(op="get_attr"):
        constant = traced.constants.get(str(node.target))
        if constant is not None and constant.requires_grad:
            where = next(iter(node.users)).meta.get("module", "")
            raise ParseError(
                f"{where or 'the graph'} uses a tensor of shape {tuple(constant.shape)} that requires grad, which is "
                "no part of the model; the optimized model trains and saves its own parameters only, so make it one"
            )


def _check_custom(sample: Sample, custom: CustomForward, traced: Traced) -> Traced:
    """A graph made by hand must do what the model's forward does. Its outputs get the forward's structure."""
    plain = FlatForward(plain_forward(sample.model), sample.spec)
    with untouched(sample.model):
        plain.run(sample.copies())
        state = state_of(sample.model)
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
    _check_grad_targets("the graph", traced.grad_targets, plain.grad_targets, sample.model)
    if other := other_state(traced.state, state):
        raise ParseError(f"the graph leaves {other[0]} than the model's forward: {other[1]}")
    assert plain.output_spec is not None
    return replace(traced, output_spec=plain.output_spec)


def _check_same(
    traced: Traced, observation: Observation, state: dict[str, torch.Tensor], same: Callable[..., bool]
) -> None:
    """Raise ParseError unless the program gave what the model gave, or it is not this model's."""
    for number, (ours, theirs) in enumerate(zip(observation.outputs, traced.outputs, strict=True)):
        if not same(ours, theirs):
            raise ParseError(
                f"replaying the program gives another output {number} than the model's forward; "
                "the forward is not deterministic, or depends on Python state that changes between calls"
            )
    if other_state(traced.state, state, same):
        raise ParseError("replaying the program leaves other buffers or random state than the model's forward")


def _check_grad_targets(what: str, ours: frozenset[Any], theirs: frozenset[Any], model: torch.nn.Module) -> None:
    """Raise ParseError unless both give gradients to the same inputs and parameters."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    given, wanted = (
        {f"input {t}" if isinstance(t, int) else known[id(t)] for t in targets if isinstance(t, int) or id(t) in known}
        for targets in (ours, theirs)
    )
    if given != wanted:
        missing, added = (", ".join(sorted(names)) or "nothing" for names in (wanted - given, given - wanted))
        raise ParseError(
            f"{what} does not give gradients to what the model's forward gives them to: it misses {missing} and adds "
            f"{added}"
        )


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal up to rounding."""
    is_rounded = b.numel() and b.is_floating_point()
    scale, ulp = (float(b.abs().max()), torch.finfo(b.dtype).eps) if is_rounded else (0.0, 0.0)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.allclose(a, b, max(1e-3, 4 * ulp), max(1e-5, ulp) * scale, equal_nan=True)
