"""Several processes that train one model: collectives, one answer for all, parameters that are sharded.

A rank may plan alone, at any time, so planning runs no collective. What stands in for one gives what it would give if
all ranks held what this one holds: shapes and types are right, the numbers are not used. All collectives come to the
operators of one namespace, which get kernels for a dispatch key that goes before all others and is on while a rank is
alone, on all threads that a backward runs on.
"""

from __future__ import annotations

import base64
import logging
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any, TypeVar, cast

import torch

from ..process import OnThread
from .forwards import only_holds
from .private import (
    ALONE,
    FUNCTIONAL,
    MEMBERS,
    OPERATOR_NAMES,
    alone_on_this_thread,
    finished_work,
    gathered_parameter,
    groups_of_shards,
    nodes_of_function,
    parameters_of,
    pytree,
    run_on_device,
    schema_of,
    store_of_all_ranks,
    submodules_of,
)

OPERATORS = "c10d"
"""The namespace of the operators that all collectives come to."""

_told: OnThread[Callable[[bool], object] | None] = OnThread(None)


def are_several() -> bool:
    """Whether this process is one of several that talk to one another."""
    return _has_begun() and torch.distributed.get_world_size() > 1


def _has_begun() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@contextmanager
def alone() -> Iterator[None]:
    """Inside, no collective is run, forward or backward: what stands in for it is. Other ranks need not be here."""
    if not _has_begun():
        yield
        return
    _install()
    with alone_on_this_thread():
        yield


def arrived(result: Any) -> Any:
    """A result of collectives, with tensors in it that are there: functional ones give some that are on their way."""
    module = sys.modules.get("torch.distributed._functional_collectives")
    kind = getattr(module, "AsyncCollectiveTensor", None)
    return result if kind is None else pytree.tree_map_only(kind, _Arrival.apply, result)


class _Arrival(torch.autograd.Function):
    """Waits for a tensor; its gradient goes on as it is."""

    @staticmethod
    def forward(ctx: Any, coming: Any) -> torch.Tensor:
        there: torch.Tensor = coming.trigger_wait()
        return there

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def is_arrival(node: Any) -> bool:
    """Whether a node of autograd's graph is one that :func:`arrived` has put there."""
    return isinstance(node, nodes_of_function(_Arrival))


def told_of_collectives(told: Callable[[bool], object]) -> AbstractContextManager[None]:
    """``told(exchanges_numbers)`` is called for each collective that is not run inside, on this thread.

    It says whether that exchanges whole numbers, each rank others with each, such as how many rows follow.
    """
    return _told.set_to(told)


@cache
def _install() -> tuple[torch.library.Library, ...]:
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, ALONE)
    libraries = {namespace: torch.library.Library(namespace, "IMPL") for namespace in (OPERATORS, FUNCTIONAL)}
    for space, name in (qualified.split("::") for qualified in OPERATOR_NAMES() if "." not in qualified):
        if space in libraries and name not in LOCAL:
            operator = getattr(getattr(torch.ops, space), name).default
            stand_in = partial(_stand_in, schema_of(operator)) if space == OPERATORS else partial(_of_device, operator)
            libraries[space].impl(name, stand_in, ALONE)
    return others, *libraries.values()  # which take the kernels back when they are let go


LOCAL = {"wait_tensor", "_wrap_tensor_autograd"}
"""Functional operators that talk to no other rank."""


def _of_device(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run such a collective by its device's kernel: behind a dispatch mode, what it calls would be no stand-in."""
    first = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if torch.is_tensor(leaf))
    with torch.no_grad():
        return run_on_device(operator, first.device.type, args, kwargs)


def _stand_in(schema: Any, *args: Any, **kwargs: Any) -> Any:
    """What a collective, which writes into what it is given, leaves and returns."""
    is_exchange = "alltoall" in schema.name and any(map(_is_whole, pytree.tree_leaves(args[0])))
    if _told.value is not None:
        _told.value(is_exchange)
    outputs, second = args[0], schema.arguments[1].name if len(schema.arguments) > 1 else ""
    with torch.no_grad():
        if second.startswith("input"):
            _fill(outputs, args[1])
            if is_exchange:  # other ranks send more rows: what depends on their counts is seen by its size
                for tensor in filter(_is_whole, pytree.tree_leaves(outputs)):
                    tensor += 1
        elif "recv" in schema.name:
            _fill(outputs, ())
    found = tuple(finished_work() if "Work" in str(result.type) else outputs for result in schema.returns)
    return found[0] if len(found) == 1 else found or None


def _is_whole(value: Any) -> bool:
    return torch.is_tensor(value) and not (value.is_floating_point() or value.is_complex())


def _fill(made: Any, given: Any) -> None:
    """Write what is given, as often as it takes, into each tensor that is to be made; without any, zeros."""
    sources = [tensor.reshape(-1) for tensor in pytree.tree_leaves(given) if torch.is_tensor(tensor)]
    for target in pytree.tree_leaves(made):
        target.zero_()
        if sources and target.numel():
            source = torch.cat(sources)
            times = -(-target.numel() // max(1, source.numel()))
            target.copy_(source.repeat(times)[: target.numel()].view(target.shape))


# -- one answer for all ----------------------------------------------------------------------------------


log = logging.getLogger(__name__)

T = TypeVar("T")


def answer_of_ranks(question: str) -> Any:
    """What the first rank answered to a question, text that is equal on the ranks that are to agree; None if none has.

    Answers are put into the store that all ranks met at, and taken from there: no rank waits for another one.
    """
    key, store = f"ogc/{question}", store_of_all_ranks() if are_several() else None
    return None if store is None else _asked(lambda: store.get(key) if store.check([key]) else None)


def first_answer(question: str, mine: T) -> T:
    """What the first rank answered, be it this one; plain data that can be pickled."""
    store = store_of_all_ranks() if are_several() else None
    if store is None:
        return mine
    text = base64.b64encode(pickle.dumps(mine)).decode()
    first = _asked(lambda: store.compare_set(f"ogc/{question}", "", text))
    return mine if first is None else first


def _asked(ask: Callable[[], bytes | None]) -> Any:
    """What the store has, if it has anything and can still be asked."""
    try:
        found = ask()
    except RuntimeError as error:
        log.info("ogc plans on this rank by itself: %s", error)
        return None
    return None if found is None else pickle.loads(base64.b64decode(found))


# -- sharded parameters ----------------------------------------------------------------------------------


def is_unit(module: torch.nn.Module) -> bool:
    """Whether hooks of the module, those of ``fully_shard``, gather its parameters for its forward and its backward."""
    return isinstance(module, _sharding("FSDPModule"))


def is_wrapper(module: torch.nn.Module) -> bool:
    """Whether the module, a ``FullyShardedDataParallel``, does so for the module in it."""
    return isinstance(module, _sharding("FullyShardedDataParallel"))


def before_sharding(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """The class of a module before ``fully_shard`` made it a unit."""
    unit = _sharding("FSDPModule")
    if not (unit and issubclass(kind, unit)):
        return kind
    return next(base for base in kind.__bases__ if issubclass(base, torch.nn.Module) and base is not unit)


def is_of_sharding(value: Any) -> bool:
    """Whether something is torch's for sharding, such as what a hook of a unit belongs to."""
    return type(value).__module__.startswith("torch.distributed.fsdp")


@dataclass(frozen=True)
class Gathered:
    """Parameters that a unit of ``fully_shard`` gathers at once.

    Attributes:
        bytes: of them.
        reduced_bytes: of their gradients, as they are reduced.
        is_kept: they stay after the forward.
        is_around: there are units inside the unit, so that its gradients wait for theirs.
        dtypes: of each that is sharded now, by its identity, as it is gathered.
        shards: this rank's part of each, by the identity of the parameter, be it sharded now or gathered.
    """

    bytes: int
    reduced_bytes: int
    is_kept: bool
    is_around: bool
    dtypes: Mapping[int, torch.dtype]
    shards: Mapping[int, torch.Tensor]


def bytes_of_sharding(unit: int, reduced: int, kept: int, waiting: int) -> tuple[int, int]:
    """The most bytes of parameters and their gradients that are gathered at once, in the forward and in the backward.

    In the forward that is a unit, and the memory that it was gathered in, which is let go of when the next one is
    there; in the backward a unit and its gradients, the next one that is gathered, and gradients that are reduced.

    Args:
        unit, reduced: bytes of the largest unit, and of its gradients as they are reduced.
        kept: of parameters that stay gathered.
        waiting: of gradients that wait for those of all units.
    """
    return kept + 2 * unit, kept + waiting + 3 * unit + reduced


def gathered_by(model: torch.nn.Module) -> Iterator[Gathered]:
    """What the units of a model gather."""
    for module in filter(is_unit, model.modules()):
        for group in groups_of_shards(module):
            policy, parameters = group.mp_policy, [one.sharded_param for one in group.fsdp_params]
            dtypes = {id(p): policy.param_dtype or p.dtype for p in parameters}
            yield Gathered(
                sum(p.numel() * dtypes[id(p)].itemsize for p in parameters),
                sum(p.numel() * (policy.reduce_dtype or dtypes[id(p)]).itemsize for p in parameters),
                group.post_forward_mesh_info is None,
                has_inner_units(module),
                dtypes,
                {
                    id(p): one.sharded_param.to_local()
                    for one in group.fsdp_params
                    for p in (one.sharded_param, gathered_parameter(one))
                },
            )


def has_units(module: Any) -> bool:
    """Whether something is a module that is such a unit, or has some inside."""
    return isinstance(module, torch.nn.Module) and any(is_unit(one) or is_wrapper(one) for one in module.modules())


def has_inner_units(module: torch.nn.Module) -> bool:
    """Whether there are units inside the module: their parameters are not there while it runs, but while they do."""
    return any(is_wrapper(one) or (is_unit(one) and one is not module) for one in module.modules())


def is_flat(parameter: torch.Tensor) -> bool:
    """Whether a parameter is all of a wrapped module's in one."""
    return isinstance(parameter, _sharding("FlatParameter"))


def has_flat_parameters(module: torch.nn.Module) -> bool:
    """Whether what the module computes with are plain attributes, views of one parameter, made anew in each forward."""
    return any(map(is_flat, module.parameters()))


def views_of_flat(module: torch.nn.Module) -> list[str]:
    """The names of such attributes of one module, where it or one around it has a flat parameter."""
    found = vars(module).items()
    return [name for name, value in found if isinstance(value, torch.Tensor) and value.grad_fn is not None]


def _sharding(name: str) -> Any:
    """A class of torch's, or none where nobody has imported it yet."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), name, ())


def is_spread(tensor: Any) -> bool:
    """Whether a tensor is a ``DTensor``, of which each rank holds a part."""
    return isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor."""
    part: torch.Tensor = tensor.to_local() if is_spread(tensor) else tensor  # type: ignore[attr-defined]
    return part


def planned_apart(module: torch.nn.Module, name: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """The largest trained submodules, by name, of which all parameters are there while they run."""
    for key, child in module.named_children():
        inner = f"{name}.{key}" if name else key
        if has_inner_units(child) or only_holds(child):
            yield from planned_apart(child, inner)
        elif any(parameter.requires_grad for parameter in child.parameters()):
            yield inner, child


@contextmanager
def parameters_apart(model: torch.nn.Module) -> Iterator[None]:
    """Inside, parameters that are views of one of all ranks are parameters of their own, of the same memory.

    Else backwards of single operations would come to that one, whose gradients are sent to other ranks.
    """
    is_flat, own = has_flat_parameters(model), dict[int, torch.nn.Parameter]()
    before: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = []
    try:
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            found, table = vars(module), parameters_of(module)
            beside = {name: found[name] for name in views_of_flat(module) if is_flat or name in table}
            views = {name: view for name, view in table.items() if view is not None and view.grad_fn}
            if beside or views:
                before.append((found, table, beside, dict(table)))
            for name, view in (*beside.items(), *views.items()):
                table[name] = own.setdefault(id(view), torch.nn.Parameter(view.detach()))
            for name in beside:
                del found[name]
        yield
    finally:
        for found, table, beside, parameters in before:
            table.clear()
            table.update(parameters)
            found.update(beside)


def own_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Parameters of the same memory, put in the places of the model's, until these are put back."""
    own: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in parameters_of(module).items():
            if parameter is not None:
                copy = torch.nn.Parameter(parameter.detach(), parameter.requires_grad)
                parameters_of(module)[name] = own.setdefault(parameter, copy)
    return list(own.values())


def is_of_parallel(hook: Any) -> bool:
    """Whether a hook is one by which ``parallelize_module`` spreads what a module is given, and brings it together."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.tensor")


# -- wrappers --------------------------------------------------------------------------------------------


DataParallel = torch.nn.parallel.DistributedDataParallel


def around(wrapper: DataParallel, module: torch.nn.Module) -> DataParallel:
    """The same wrapper, of the same gradients, around another module that has the same parameters."""
    copy: DataParallel = object.__new__(type(wrapper))
    vars(copy).update(vars(wrapper))
    vars(copy)[MEMBERS[2]] = {**submodules_of(wrapper), "module": module}
    return copy


Optimize = TypeVar("Optimize", bound=Callable[..., torch.nn.Module])


def within_data_parallel(optimize: Optimize) -> Optimize:
    """What optimizes a model, for a DistributedDataParallel too: the model in it."""

    @wraps(optimize)
    def call(model: torch.nn.Module, sample_input: Any = None, **options: Any) -> torch.nn.Module:
        if isinstance(model, DataParallel):
            return around(model, optimize(model.module, sample_input, **options))
        return optimize(model, sample_input, **options)

    return cast(Optimize, call)
