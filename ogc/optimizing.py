"""The one function above parser, solver and runtime."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any

import torch

from .errors import InputError, optional
from .given import is_number
from .in_parts import PartsPlan
from .parser import Loss, NamesAndTypes, ParseGraph, ParseOptions
from .parser.arguments import call_arguments, check_model
from .parser.doors.scripted import as_python
from .parser.loss import modules_of, tensors_of
from .parser.parse import kinds_of_modules
from .parser.traced import RECORD
from .plan.plan import Plan
from .plan.saving import SavedPlan
from .plan.told import Entry, Instructions
from .planned import OnDevice, Planning
from .planning import Given, PlanOptions, Store, saved_plan
from .program.program import Optimizer, device_of_model
from .program.structures import Call
from .runtime.module import TARGETS, with_loss
from .runtime.offloading import Bandwidth, Offloading
from .solver import Budget, Goal, SolveOptions
from .torch_state.forwards import outside_of_modes
from .torch_state.ranks import within_data_parallel


@outside_of_modes()  # Lightning configures models in one
@within_data_parallel
def optimize(
    model: torch.nn.Module,
    sample_input: Any = None,
    *,
    loss: Loss | None = None,
    holds_outputs: bool = True,
    outputs: str = "all",
    targets: Any = None,
    parse_graph: ParseGraph | bool | None = None,
    memory_budget: Budget | None = None,
    max_overhead: float | None = None,
    device_memory: Budget | None = None,
    optimizer: Optimizer | None = None,
    ddp: bool | str = False,
    gradients: str = "none",
    solver: str = "optimal",
    profile: str = "auto",
    chunks: int = 1,
    compile: bool | str = False,
    opaque_modules: NamesAndTypes = (),
    recompute_opaque: NamesAndTypes | bool | None = None,
    front_end: str = RECORD,
    plan: str | PathLike[str] | Plan | PartsPlan | SavedPlan | None = None,
    cache_dir: str | PathLike[str] | None = None,
    verify: bool = False,
    effort: int = 1,
    planning_seconds: float | None = None,
    keep: Iterable[Entry] = (),
    recompute: Iterable[Entry] = (),
    once: Iterable[Entry] = (),
    offload: str | PathLike[str] | bool = False,
    bandwidth: Bandwidth | None = None,
    host_memory: int | str | None = None,
    ranks_per_host: int = 1,
    in_flight: int = 1,
) -> torch.nn.Module:
    """The same model with less activation memory: as much less as about one forward more can buy, or as is asked for.

    ``model = ogc.optimize(model)`` is all that it takes: what is called in training is planned with its first call.

    Args:
        model: any module whose forward takes and returns tensors; it stays usable and shares its
            parameters, buffers and submodules with the result. In a DistributedDataParallel its module is optimized.
        sample_input: a tensor, a tuple of positional arguments or a dict of keyword arguments, shaped like
            a training batch and on the model's device. Without it the model is planned at its first call in training,
            with that call's arguments, types, autocast, hooks and devices: after all that a trainer does to it. What
            cannot be planned runs plain then, with a warning.
        loss: how a step goes on: ``loss(output)`` returns the one number that the backward starts from, such as a
            criterion with its targets bound in. What it computes counts too; see :func:`ogc.parse`.
        holds_outputs: the caller holds all outputs through the backward; with False nothing but the loss.
        outputs: with ``"loss"`` the model returns its loss, and None in the place of all other tensors, where a plan
            runs: those need not exist whole then. Calls that run the plain model return everything. A model that
            returns no loss takes ``loss`` behind its forward then, and returns what that returns.
        targets: what ``loss`` takes besides the output, a tensor or a structure of tensors: ``loss(output, targets)``.
            With ``outputs="loss"`` each call takes its own: ``result(images, targets=labels)``.
        parse_graph: a function that returns a graph of the model made by hand; see :func:`ogc.parse`.
        memory_budget: recompute as little as possible such that the activations' peak fits: bytes, a text
            such as ``"8GB"`` or ``"512MiB"``, or a float in (0, 1], a share of the plain model's peak. ``"least"``
            asks for the least peak whatever its time. With neither goal no operation runs more than twice and a step
            takes at most a third longer; see :func:`ogc.solve`.
        max_overhead: the least peak with at most this share of a plain step's time recomputed.
        device_memory: in place of ``memory_budget``, what the whole step may take, such as ``"24GB"``: what
            :func:`ogc.estimate` finds beside activations is taken off. On CUDA what its allocator reserves counts.
        optimizer: what is to train the model, or a class such as ``torch.optim.AdamW``; for ``device_memory``.
        ddp: whether it is trained in DistributedDataParallel; for ``device_memory``, see :func:`ogc.estimate`.
        gradients: ``"none"`` before each forward, ``"kept"``, or ``"freed"`` in the backward; for ``device_memory``,
            whose plans count parameters' gradients as they come; see :func:`ogc.estimate`.
        solver: another name than ``"optimal"`` plans by a method to compare with; see :func:`ogc.solve`.
        profile: how operations are weighed, ``"auto"``, ``"time"``, ``"estimate"`` or ``"measure"``; see
            :func:`ogc.parse`.
        chunks: allow regions of convolutions, activations, pooling, linear layers and layer norms to
            run in so many chunks of the batch where that makes the plan better. Results then differ from
            the plain model's by rounding: sums over the batch are added up in another order.
        compile: run the regions between the cuts of the plan as torch.compile makes them, with its backend
            ``"inductor"`` or the one named. Results then differ from the plain model's by rounding.
        opaque_modules: names and types of submodules to call as they are, never in parts; see :func:`ogc.parse`.
        recompute_opaque: names and types of submodules such that opaque modules in them may be recomputed for their
            backward; True for all, False for none. Without it that is found out. See :func:`ogc.parse`.
        front_end: what the program comes from, ``"record"``, ``"jit"``, ``"export"`` or ``"dynamo"``; see
            :func:`ogc.parse`. Behind all but the first a model is planned as a whole or refused. Of a
            ``torch.jit.ScriptModule``, which ``"jit"`` takes, the result is a module of Python with its parameters.
        plan: a file that ``result.plan.save(path)`` wrote, or such a plan, to start from without a search. It has to
            fit the model and the sample input. One that does not keep the goal here is told in the log, and made anew.
        cache_dir: a folder in which plans are found again by what the model computes, the goal, solver and effort, and
            kept when they are made, those for other calls too; with the times that were measured for them.
        verify: run two steps of the result and two of the plain model and compare them: on the sample input, without
            one at the first call, and after the parameters moved, from another seed, on another input that is made of
            it. That takes the time of these and the memory of a plain step; :func:`ogc.check` tries more seeds, and a
            smaller batch.
        effort: how long a local search improves what the dynamic program finds, 0 to 3; see :func:`ogc.solve`. With
            ``compile`` there is none.
        planning_seconds: after which the best plan found so far is taken, for each call that is planned. What is then
            not measured yet is estimated. Recording the forward is not cut short.
        keep: names, patterns such as ``"layers.*.attn"`` and types of submodules whose results are saved and never
            recomputed. What this costs is in ``result.plan.summary``.
        recompute: submodules of which nothing stays from the forward to the backward, but what one with submodules of
            its own hands on; see :func:`ogc.solve`.
        once: submodules whose operations never run twice.
        offload: allow values to leave the device's memory between forward and backward, where that takes less time than
            to recompute them. On a CPU the path of a folder, in which a file without a name has them, or True for the
            folder of temporary files; on CUDA True, for pinned memory.
        bandwidth: bytes per second of these copies; a pair of them, out and back; or a link: ``"PCIe 3"``,
            ``"PCIe 4"``, ``"PCIe 5"``, ``"NVLink-C2C"``. Measured where it is not given.
        host_memory: most bytes, or a text like ``"64GB"``, that one forward may offload.
        ranks_per_host: how many processes share the bandwidth, as those that ``torchrun`` starts on one host.
        in_flight: so many forwards run before the backward of the first, as in a stage of a pipeline, see
            :func:`ogc.in_flight`: peaks and goals are those of all of them together.

    Returns:
        A module of a subclass of the model's class. Calls like the sample input in training recompute by
        ``result.plan``. For inputs of other sizes it is reused where the model computes the same
        program for them; calls that differ otherwise (types, flags, autocast) are planned for when they
        come, by the same goal. Where the model's own forward cannot be represented, or opaque modules hold much of the
        memory, its submodules are planned instead, and ``result.plan`` is an :class:`ogc.PartsPlan`.
        Eval mode and ``torch.no_grad()`` run the original forward. Outputs,
        gradients, buffers and the random stream are bitwise those of the plain model, unless the batch is
        chunked or regions are compiled.

    Raises:
        InputError: an argument is of the wrong kind; the message says what was expected.
        ParseError: neither the forward nor any part of it can be represented faithfully; the message says why.
        SolveError: nothing fits the budget; the message says what would. Once training runs, which is so at the first
            call without a sample, a warning says that instead, and the plan is the one with the least peak.
        PlanError: ``plan`` is no plan, or does not fit; the message says in what.
        CheckError: with ``verify``, where the result differs from the plain model.
    """
    _check_chunks(chunks, solver, verify)
    store, saved = Store.at(cache_dir), None if plan is None else saved_plan(plan)
    backend = _backend(compile, model, solver, verify or chunks > 1 or saved is not None)
    if targets is not None and not callable(loss):
        raise InputError("targets= is what loss= takes besides the output; give loss= too")
    model = plain = as_python(model, front_end)
    if callable(loss) and outputs == "loss":
        model, sample_input = _returning_its(loss, model, sample_input, targets)
        loss = None
    elif callable(loss) and targets is not None:
        loss = partial(_loss_of, loss, targets)
    if planning_seconds is not None and not (is_number(planning_seconds) and planning_seconds > 0):
        raise InputError(f"planning_seconds must be a number of seconds above 0, not {planning_seconds!r}")
    if device_memory is not None and memory_budget is not None:
        raise InputError("give memory_budget or device_memory, not both")
    device = None if device_memory is None else OnDevice(device_memory, optimizer, ddp, gradients)
    parsing = ParseOptions(
        loss, holds_outputs, outputs, parse_graph=parse_graph, profile=profile, opaque_modules=opaque_modules,
        recompute_opaque=recompute_opaque, front_end=front_end,
    )  # fmt: skip
    # What is compiled is the longer, the fewer cuts there are: a local search makes some that hardly pay.
    solving = SolveOptions(Goal(memory_budget, max_overhead), solver, effort if backend is None else 0)
    if (said := Instructions(keep, recompute, once)) and solver != "optimal":
        raise InputError(f"solver={solver!r} cannot be told {said}; only 'optimal' can")
    if said and (chunks > 1 or backend is not None):
        raise InputError(f"chunks= and compile= go across modules, so that {said} does not go with them")
    if said:
        check_model(model, may_lack_content=True)
        parsing = replace(parsing, told=said.named(kinds_of_modules(model)))
    offloading = Offloading.of(offload, bandwidth, host_memory, ranks_per_host)
    if offloading is not None:
        others = {
            "chunks=": chunks > 1, "compile=": backend is not None, "keep=, recompute= and once=": bool(said),
            "solver=": solver != "optimal",
        }  # fmt: skip
        _refuse_beside("offload=", others)
    if isinstance(in_flight, bool) or not isinstance(in_flight, int) or in_flight < 1:
        raise InputError(f"in_flight must be a number of micro-batches, 1 or more, not {in_flight!r}")
    if in_flight > 1:
        others = {
            "chunks=": chunks > 1, "compile=": backend is not None, "device_memory=": device is not None,
            "offload=": offloading is not None,
        }  # fmt: skip
        _refuse_beside("in_flight=", others)
    options = PlanOptions(parsing, solving, store, planning_seconds, offloading, in_flight)
    planning = Planning(options, chunks, Given(saved), backend, device, verify)
    return planning.result(model, sample_input, plain)


def _loss_of(loss: Callable[..., torch.Tensor], targets: Any, output: Any) -> torch.Tensor:
    return loss(output, targets)


def _returning_its(
    loss: Callable[..., torch.Tensor], model: torch.nn.Module, sample_input: Any, targets: Any
) -> tuple[torch.nn.Module, Call | None]:
    """The model that returns its loss, and the sample of what it takes, if there is one.

    Raises:
        InputError: the loss holds tensors, or trains.
    """
    check_model(model, may_lack_content=sample_input is None)
    if held := tensors_of(loss):
        raise InputError(
            f'with outputs="loss" the loss runs in every step, but it holds on to a tensor of shape '
            f"{list(held[0].shape)} as it is now; hand it in with each call: loss(output, targets) and targets="
        )
    if any(parameter.requires_grad for module in modules_of(loss) for parameter in module.parameters()):
        raise InputError("the loss has parameters that require grad; make it a submodule of the model, whose they are")
    if sample_input is None:
        return with_loss(model, loss, targets is not None or _takes_two(loss)), None
    args, kwargs = call_arguments(sample_input)
    given = {} if targets is None else {TARGETS: targets}
    return with_loss(model, loss, bool(given)), Call(args, {**kwargs, **given})


def _takes_two(loss: Callable[..., torch.Tensor]) -> bool:
    """Whether a loss takes targets beside the output."""
    try:
        inspect.signature(loss.forward if isinstance(loss, torch.nn.Module) else loss).bind(None)
    except TypeError:
        return True
    except ValueError:  # it does not tell
        pass
    return False


def _refuse_beside(option: str, others: dict[str, bool]) -> None:
    """Raise InputError if some of the options that do not go with this one are given."""
    if named := [name for name, is_given in others.items() if is_given]:
        raise InputError(f"{option} does not go with {', '.join(named)}; leave one of them out")


def _check_chunks(chunks: int, solver: str, verify: bool) -> None:
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise InputError(f"chunks must be a number of chunks, 1 for none, not {chunks!r}")
    if chunks > 1 and solver != "optimal":
        raise InputError(f"solver={solver!r} does not slice the batch; only 'optimal' does")
    if verify and chunks > 1:
        raise InputError("verify=True compares bit by bit, but a chunked batch is equal up to rounding only")


def _backend(compile: bool | str, model: torch.nn.Module, solver: str, has_others: bool) -> str | None:
    """The backend of torch.compile that is to be used, if any."""
    if compile is False:
        return None
    if not (compile is True or isinstance(compile, str)):
        raise InputError(f"compile must be True, False or the name of a backend of torch.compile, not {compile!r}")
    if solver != "optimal" or has_others:
        raise InputError(
            "compile= goes with none of verify= (it is equal up to rounding only), chunks=, plan= and solver="
        )
    check_model(model)
    backend = "inductor" if compile is True else compile
    optional("rewrites.compiled").check_backend(backend, device_of_model(model))
    return backend
