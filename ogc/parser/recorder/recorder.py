"""Writes down each operator of a forward as a node of a ``torch.fx.Graph``, while it runs as ever."""

from __future__ import annotations

import operator as python_operator
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.fx.node import map_aggregate

from ...program.autocast import is_shared
from ...program.program import SHARED, WithoutGrad, call_beside, has_history, operator_name, tensor_leaves
from ...program.structures import autocast_kinds
from ...torch_state.dispatch import Call, complete, dispatched_to, unseen
from ...torch_state.private import OpOverload, schema_of, version_of
from ...torch_state.reads import is_observer, opaque_call
from ..forward.location import Scopes, user_line
from ..traced import HISTORY, ON_CONSTANTS, SEEN, SIZED, OpaqueError
from .operators import OPENED, Sizes, deciding, sizes_of, tells_content, usual_name
from .tensors import Tensors, seen_of

_casting: set[OpOverload] = set()
"""Operators that are made of such as autocast casts: where it is on, they are written down in parts."""

SETS_PROFILERS_QUICKLY = sys.version_info < (3, 12)
"""Since 3.12, all code is prepared anew whenever a profiler is set."""

OPAQUE = {
    torch.Generator: "draws from a torch.Generator of its own",
    torch.UntypedStorage: "reaches a tensor through its storage",
}
"""Arguments of operators that are another object, or another's, the next time."""


def unprofiled(run: Callable[[Call], Any], call: Call) -> Any:
    """What ``run`` makes of a call; who observes the forward is not told of all that it does itself."""
    profiler = sys.getprofile() if SETS_PROFILERS_QUICKLY else None
    if profiler is None or call.operator.namespace != "aten" or not is_observer(profiler):
        return run(call)
    sys.setprofile(None)  # PyTorch's own operators call no Python
    try:
        return run(call)
    finally:
        sys.setprofile(profiler)


def is_opened(call: Call) -> bool:
    """Whether a call is written down as the operators that it is made of; if autocast has a rule for it, with casts."""
    return _is_opened(call.operator) or call.is_cast or (call.operator in _casting and bool(autocast_kinds()))


@cache
def _is_opened(operator: OpOverload) -> bool:
    return operator_name(operator) in OPENED


class Read(NamedTuple):
    """One read of a tensor's content by Python."""

    node: torch.fx.Node  # a number, a tensor whose content was read, or one whose shape others' content decides
    deciding: tuple[torch.fx.Node, ...]  # those others
    is_number: bool  # whether the node gives a number
    last: torch.fx.Node  # the last call before it was read
    what: str  # in words
    module: str  # where


class Touched(NamedTuple):
    """Numbers of the storages that a call is given, and of those that it writes."""

    given: set[int]
    written: set[int]


class Argument(NamedTuple):
    """A tensor that a call is given, as it was before."""

    tensor: torch.Tensor
    version: int
    requires_grad: bool
    has_history: bool


class Recorder:
    """Writes down the operators of one forward, which is given the tensors ``inputs``."""

    def __init__(self, model: torch.nn.Module, inputs: list[torch.Tensor], opaque_names: Collection[str]) -> None:
        self.model = model
        self.opaque_names = opaque_names  # submodules to call as they are
        self.shares_casts = False  # with whatever else runs in the caller's region
        self.before_call: Callable[[], object] | None = None
        # What is written down.
        self.graph = torch.fx.Graph()  # every call, also such as nothing uses
        self.tensors = Tensors(self.graph, model, inputs, self.refuse)
        self.reads: list[Read] = []  # what Python learnt of the content of tensors, in order
        self.sizes_read: dict[torch.fx.Node, set[str]] = {}  # where Python asks for the shape of what a node gives
        self.touched: dict[torch.fx.Node, Touched] = {}  # for each call, what it does to storages
        # What stands in the way of a program.
        self.opaque: dict[str, str] = {}  # module -> what it does that no program can hold
        self.leaky: dict[str, str] = {}  # opaque module -> what it does that it must not
        self.counting: set[str] = set()  # opaque modules that read numbers out of tensors
        self.talking: set[str] = set()  # opaque modules that run collectives
        self.counting_rows: set[str] = set()  # those that exchange whole numbers, such as how many rows follow
        self.is_valid = True  # until a call is found to be cast in parts that was written down whole: record again
        # Where the forward is.
        self.scopes = Scopes()
        self.within: str | None = None  # the opaque module that runs
        self.takes_no_hooks = False  # it takes none, for what it saves
        self.casting = 0  # calls that we are inside of and that autocast makes casts for
        self.is_in_operator = False  # whose kernel may be Python's, too
        self.saved: list[torch.Tensor] = []  # by the call that runs, for its backward
        self._given: set[int] = set()  # numbers of the storages that the opaque module was given
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}  # of parameters, by identity

    def refuse(self, why: str, module: str | None = None) -> None:
        """Note what the running module, or the named one, does that no program can hold."""
        self.opaque.setdefault(self.scopes.current if module is None else module, why)

    def note_collective(self, exchanges_numbers: bool) -> None:
        """Note that ranks talk to one another, which they do once in each step."""
        if self.within is not None:
            self.talking.add(self.within)
            self.counting_rows.update([self.within] * exchanges_numbers)
        else:
            self.refuse(f"runs a collective at {user_line()}")

    def raise_if_leaky(self) -> None:
        what = "what cannot be replayed leaves the modules that would hide it"
        _raise_for(self.leaky, what, "Pass tensors as arguments and results (or in tuples, lists and dicts of these)")

    def raise_if_opaque(self) -> None:
        _raise_for(self.opaque, "what no program can hold", "Put it into a submodule of its own")

    # -- operators -----------------------------------------------------------------------------------------

    def __call__(self, call: Call) -> Any:
        """Run a call of an operator in its place, write it down, and return its result."""
        return unprofiled(self._call, call)

    def _call(self, call: Call) -> Any:
        if schema_of(call.operator).is_mutable:
            with unseen():
                self._protect_written(call)
        if self.within is not None:
            return self._call_in_opaque(call)
        if is_opened(call):
            return self._open(call)
        operator = usual_name(call.operator)
        call = call._replace(operator=operator)
        if self.before_call is not None:
            self.before_call()
        with unseen():
            args, kwargs = complete(operator, call.args, call.kwargs)
            call = call._replace(args=args, kwargs=kwargs)
            tensors = tensor_leaves(args, kwargs)
            self._refuse_sparse(tensors)
            self.check_known(tensors)
            if operator is torch.ops.aten.lift_fresh.default and self.tensors.is_new(tensors[0]):
                self.tensors.constant(tensors[0], is_fresh=True)
            given = self._nodes(args), self._nodes(kwargs)
            states = [Argument(t, writes_of(t), t.requires_grad, has_history(t)) for t in tensors]
            for kind, why in OPAQUE.items():
                if any(isinstance(x, kind) for x in (*args, *kwargs.values())):
                    self.refuse(f"{why} at {user_line()}")
        self.saved.clear()
        with self._in_operator():
            result = self._run(call)
        with unseen():
            self._write_down(call, given, states, result)
            self.saved.clear()
        return result

    def _open(self, call: Call) -> Any:
        """Run what a call is made of; if autocast has a rule for it, its casts come first."""
        self.casting += call.is_cast
        try:
            return call.open()
        finally:
            self.casting -= call.is_cast

    @contextmanager
    def _in_operator(self) -> Iterator[None]:
        """What Python reads inside, a kernel reads: it will again where the operator is recomputed."""
        before, self.is_in_operator = self.is_in_operator, True
        try:
            yield
        finally:
            self.is_in_operator = before

    def _sizes_of(self, call: Call, results: list[torch.Tensor]) -> Sizes:
        with self._in_operator():
            return sizes_of(call, results)

    def protect(self, tensor: torch.Tensor) -> None:
        """Copy a parameter before the forward writes it past autograd, for :meth:`restore`."""
        storage = self.tensors.storage(tensor)
        for parameter in self.tensors.state.values():
            is_new = isinstance(parameter, torch.nn.Parameter) and id(parameter) not in self._copies
            if is_new and self.tensors.storage(parameter) is storage:
                self._copies[id(parameter)] = parameter, parameter.data, parameter.detach().clone()

    def restore(self) -> bool:
        """Give parameters the memory and content that they had; whether any was written."""
        for parameter, data, copy in self._copies.values():
            data.copy_(copy)
            parameter.data = data
        return bool(self._copies)

    def _protect_written(self, call: Call) -> None:
        for argument, given in zip(schema_of(call.operator).arguments, call.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(given, torch.Tensor):
                self.protect(given)

    def _run(self, call: Call) -> Any:
        if not (call.is_composite and autocast_kinds()) or call.takes_numbers:
            return call.run()
        casts = []

        def run(inner: Call) -> Any:
            casts.append(inner.is_cast)
            return inner.open() if inner.is_composite and not inner.takes_numbers else inner.run()

        with dispatched_to(run):
            result = call.open()
        if any(casts):
            _casting.add(call.operator)
            self.is_valid = False
        return result

    def _nodes(self, given: Any) -> Any:
        return map_aggregate(given, lambda x: self.tensors.node(x) if isinstance(x, torch.Tensor) else x)

    def _write_down(self, call: Call, given: tuple[Any, Any], states: list[Argument], result: Any) -> None:
        operator, results = call.operator, tensor_leaves(result)
        if operator in ON_CONSTANTS and given[0][0] in self.tensors.fresh:
            self.tensors.bind(result, given[0][0])
            return
        is_number = result is not None and not results
        if is_number and (not states or not tells_content(operator)):
            return
        node = self.graph.call_function(operator, *given)
        node.meta.update(self.scopes.here(), dims=max((t.dim() for t in results), default=0))
        if self.casting and self.shares_casts and operator is torch.ops.aten.to.dtype:
            node.meta[SHARED] = is_shared(call.args[0], call.args[1])
        written = [before for before in states if writes_of(before.tensor) != before.version]
        self._note_writes(operator, written)
        changes = schema_of(operator).is_mutable or any(t.is_floating_point() or t.is_complex() for t in results)
        if changes and not torch.is_grad_enabled() and any(before.requires_grad for before in states):
            node.target = WithoutGrad(operator)
        self._refuse_sparse(results)
        self._note_result(node, result)
        if any(map(has_history, results)):
            node.meta[HISTORY] = self.tensors.history(results, self.saved)
        self._note_touched(node, [before.tensor for before in states], [before.tensor for before in written])
        node.meta[SEEN] = seen_of([before.tensor for before in states], results, self.saved)
        name = operator_name(operator)
        if is_number:
            name = {"is_nonzero": "bool", "_local_scalar_dense": "item"}.get(name, name)
            self._note_read(node, (), f"{name}() of a tensor", is_number=True)
        else:
            sizes = self._sizes_of(call, results)
            node.meta[SIZED] = sizes.are_decided or sizes.are_tried
            if sizes.are_decided:
                what = f"the operator {operator.namespace}::{name}, whose result has a shape that depends on the data,"
                self._note_read(node, tuple(map(self.tensors.node, deciding(call))), what)
        for index, item in enumerate(result if operator.namespace != "aten" and isinstance(result, tuple) else ()):
            if isinstance(item, (bool, int, float)):
                number = call_beside(node, python_operator.getitem, node, index)
                self._note_read(number, (), f"number {index} that {operator.name()} returns", is_number=True)

    def _refuse_sparse(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                self.refuse(f"computes with a tensor that is {tensor.layout}, not dense, at {user_line()}")

    def _note_read(
        self, node: torch.fx.Node, decisive: tuple[torch.fx.Node, ...], what: str, is_number: bool = False
    ) -> None:
        last = next(iter(reversed(self.graph.nodes)))
        self.reads.append(Read(node, decisive, is_number, last, f"{what} at {user_line()}", self.scopes.current))

    def read_content(self, tensor: torch.Tensor, what: str) -> None:
        """Note that Python has got all that a tensor holds."""
        if self.is_in_operator:
            return
        with unseen():
            if self.within is not None:
                self.counting.add(str(self.within))
            else:
                self._note_read(self.tensors.node(tensor), (), what)

    def read_size(self, tensor: torch.Tensor) -> None:
        """Note that Python asks for the shape of a tensor, which matters if the shape depends on data."""
        if self.reads and self.within is None and (node := self.tensors.known(tensor)) is not None:
            self.sizes_read.setdefault(node, set()).add(self.scopes.current)

    @contextmanager
    def gradient_begun_at(self, tensor: torch.Tensor) -> Iterator[None]:
        """Inside, Python says of a tensor whether it requires grad, which is a call of its own if that is news."""
        before = tensor.requires_grad
        with unseen():
            node = self.tensors.node(tensor)
            yield
            if tensor.requires_grad == before:
                return
            if before or node.op == "get_attr":
                self.refuse(f"changes what requires grad at {user_line()}")
            call = self.graph.call_function(torch.ops.aten.requires_grad_.default, (node, True))
            call.meta.update(self.scopes.here(), dims=tensor.dim())
            self.tensors.bind(tensor, call)
            self._note_touched(call, [tensor], [])

    def _note_writes(self, operator: OpOverload, written: list[Argument]) -> None:
        for before in written:
            self.tensors.write(before.tensor)
            if before.has_history and not torch.is_grad_enabled():
                what = "writes in place, under no_grad, a tensor that requires grad"
                self.refuse(f"{what}: {operator_name(operator)} at {user_line()}; make it out of place")

    def _note_result(self, node: torch.fx.Node, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            self.tensors.bind(result, node)
        elif isinstance(result, (tuple, list)):
            for index, item in enumerate(result):
                if isinstance(item, torch.Tensor):
                    self.tensors.bind(item, call_beside(node, python_operator.getitem, node, index))

    def _note_touched(self, node: torch.fx.Node, given: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        self.touched[node] = Touched(self._numbers(given), self._numbers(written))
        self.tensors.note_call(node)

    def _numbers(self, tensors: list[torch.Tensor]) -> set[int]:
        return {storage.number for storage in map(self.tensors.storage, tensors) if storage is not None}

    # -- opaque modules --------------------------------------------------------------------------------------------

    @contextmanager
    def inside(self, opaque: str, given: list[torch.Tensor]) -> Iterator[None]:
        """Nothing that is called inside is written down: an opaque module runs, which was given these tensors."""
        self.within, self._given, self.takes_no_hooks = opaque, self._numbers(given), False
        try:
            with opaque_call(opaque):
                yield
        finally:
            self.within, self._given = None, set()

    def note_opaque(self, node: torch.fx.Node, new: list[torch.Tensor], given: list[torch.Tensor]) -> None:
        """Note the tensors that an opaque module made and those that it was given."""
        for tensor in new:
            if (storage := self.tensors.storage(tensor)) is not None:
                storage.opaque = None  # from here on it is the program's
        self._note_result(node, new[0] if len(new) == 1 else new)
        self._note_touched(node, given, [])

    def _call_in_opaque(self, call: Call) -> Any:
        with unseen():
            self.check_known(tensor_leaves(call.args, call.kwargs))
        result = call.run()
        with unseen():
            results = tensor_leaves(result)
            for tensor in results:
                self.tensors.storage(tensor, self.within)
            is_number = result is not None and not results
            if (is_number and tells_content(call.operator)) or (results and self._sizes_of(call, results).are_decided):
                self.counting.add(str(self.within))
        return result

    def check_known(self, used: list[torch.Tensor]) -> None:
        """Note which of the tensors should not be known to the opaque module, or outside of opaque modules."""
        for tensor in used if self.opaque_names else ():
            storage = None if self.tensors.is_new(tensor) else self.tensors.storage(tensor)
            if storage is None or storage.opaque == self.within or storage.number in self._given:
                continue
            if not storage.is_state:
                for opaque in {one for one in (storage.opaque, self.within) if one is not None}:
                    self.leaky.setdefault(opaque, "shares tensors with other modules by other ways than arguments")


def _raise_for(modules: dict[str, str], what: str, advice: str) -> None:
    if modules:
        reasons = "; ".join(f"{module or 'the model'} {why}" for module, why in modules.items())
        advice = f"{advice}, or optimize the submodules around it instead"
        raise OpaqueError(f"{what}: {reasons}. {advice}", modules)


def writes_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written; tensors of inference do not count."""
    return 0 if tensor.is_inference() else int(version_of(tensor))
