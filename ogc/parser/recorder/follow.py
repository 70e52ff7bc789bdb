"""Follows a forward along a recorded program, for the numbers that its calls take this time.

Less is done for each call than where a program is recorded. Whatever is not as it was recorded, but for numbers and
sizes, ends it.
"""

from __future__ import annotations

import operator as python_operator
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple, NoReturn

import torch

from ...program.program import CONSTANT, OWN, WithoutGrad, leaves_of, operator_name, tensor_leaves
from ...program.structures import TensorSpec
from ...torch_state.compare import same_bits
from ...torch_state.dispatch import Call, complete, dispatched_to, in_mode, unseen
from ...torch_state.forwards import plain_forward
from ...torch_state.no_trace import put_back_as_well, untouched, writing
from ...torch_state.private import OpOverload, is_any_autocast_enabled, schema_of
from ...torch_state.ranks import told_of_collectives
from ...torch_state.reads import Observer
from ...torch_state.settings import python_random_state
from ..arguments import Sample
from ..forward.flat import FlatForward, nothing_saved
from ..forward.location import running
from ..forward.patches import CONTENT, seen_as_recorded, wrap
from ..traced import ON_CONSTANTS, SEEN, Followed, Seen, Traced, Unlike
from .operators import OPENED, tells_content, usual_name
from .python_calls import REFUSED
from .record import buffers_of, refuse_new_buffers
from .recorder import is_opened, unprofiled
from .tensors import memory_seen_of


@contextmanager
def followed(sample: Sample, known: Traced, wanted: Mapping[str, bool]) -> Iterator[tuple[Followed, Observer]]:
    """Run the model's forward along a recorded program, and observe what it reads. Inside, all is as it leaves it.

    ``wanted`` are the names of the calls of which is told what they are given and what they do to memory, and whether
    that must be alike up to sizes, which are zero, one or more.

    Raises:
        Unlike: the forward does something else.
        Exception: whatever the forward raises.
    """
    model = sample.model
    if model in writing:
        raise Unlike("the forward writes parameters")
    observer = Observer(model, running, is_brief=True, known=known.reads)
    with untouched(model, given=sample.spec.constants):
        try:
            tensors, buffers, draws = sample.copies(), buffers_of(model), python_random_state()
            flat = FlatForward(observer.around(plain_forward(model)), sample.spec)
            follower = _Follower(model, known, tensors, wanted)
            with _watched(model, known.graph, follower):
                outputs = flat(*tensors)
            follower.finish(outputs)
            refuse_new_buffers(model, buffers, ())
            if python_random_state() != draws:
                raise Unlike("the forward draws random numbers of Python or numpy")
            found = follower.found
            found.output_spec, found.requires_grad = flat.output_spec, [tensor.requires_grad for tensor in outputs]
            found.outputs = [tensor.detach() for tensor in outputs]
            del outputs
            yield found, observer
        finally:
            put_back_as_well(observer.others)
            observer.put_back()


@contextmanager
def _watched(model: torch.nn.Module, graph: torch.fx.Graph, follower: _Follower) -> Iterator[None]:
    """Operators are handed to ``follower``, and what goes past them ends it."""

    def refuse(name: str, *_: Any, **__: Any) -> NoReturn:
        follower.refuse(f"the forward does what is no call of an operator: {name}")

    refused = [(owner, name) for owner, name, _ in REFUSED]
    refused += [*((torch.Tensor, name) for name in (*CONTENT, "requires_grad_")), (torch.autograd.Function, "apply")]
    with ExitStack() as stack:
        stack.enter_context(seen_as_recorded(model, graph))
        stack.enter_context(nothing_saved(follower.saved.append))
        for owner, name in refused:
            wrap(stack, owner, name, partial(refuse, name))
        stack.enter_context(told_of_collectives(partial(refuse, "a collective")))
        stack.enter_context(dispatched_to(follower))
        yield


class _Nodes:
    """What stands for tensors, until they are gone."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[torch.Tensor], Any]] = {}

    def of(self, tensor: Any) -> Any:
        """None for an unknown one."""
        reference, node = self._found.get(id(tensor), _NOTHING)
        return node if reference() is tensor else None  # else another had its address

    def bind(self, tensor: torch.Tensor, node: Any) -> None:
        self._found[id(tensor)] = weakref.ref(tensor), node


_NOTHING: Any = (lambda: _NOTHING, None)


class _Operator(NamedTuple):
    """What is true of all calls of an operator."""

    usual: OpOverload
    is_on_constants: bool
    is_mutable: bool
    tells_content: bool
    may_be_opened: bool  # without autocast
    rest: dict[int, list[Any]]  # by how many arguments are given, all by position, what the others are

    @staticmethod
    @cache
    def of(called: OpOverload) -> _Operator:
        usual, schema = usual_name(called), schema_of(usual_name(called))
        is_opened = operator_name(called) in OPENED
        return _Operator(usual, usual in ON_CONSTANTS, schema.is_mutable, tells_content(usual), is_opened, {})

    def leaves(self, call: Call) -> list[Any]:
        """What a call takes, flat, with the default values of what it is not given."""
        if call.kwargs:
            return leaves_of(*complete(self.usual, call.args, call.kwargs))
        given = len(call.args)
        if given not in self.rest:
            args, kwargs = complete(self.usual, call.args, {})
            self.rest[given] = leaves_of(args[given:], kwargs)
        return leaves_of(call.args) + self.rest[given]


class _Known(NamedTuple):
    """What a recorded call takes and does, to compare with."""

    leaves: list[Any]
    numbers: list[Any]  # the same without nodes
    outline: Any
    memory: Any  # of that, what is shared and saved
    kinds: Any

    @staticmethod
    def of(node: torch.fx.Node) -> _Known:
        seen: Seen | None = node.meta.get(SEEN)
        memory = (None,) * 3 if seen is None else (seen.outline, seen.outline[1:], seen.kinds)
        leaves = leaves_of(node.args, node.kwargs)
        return _Known(leaves, [None if isinstance(leaf, torch.fx.Node) else leaf for leaf in leaves], *memory)


_KNOWN = "known"
"""In the ``meta`` of a node of a program that was followed once."""


class _Follower:
    """Compares each call of a forward with that of a recorded program."""

    def __init__(
        self, model: torch.nn.Module, known: Traced, inputs: Sequence[torch.Tensor], wanted: Mapping[str, bool]
    ) -> None:
        self.constants, self.wanted = known.constants, wanted
        self.calls = iter([node for node in known.graph.nodes if node.op not in ("placeholder", "get_attr")])
        self.found = Followed()
        self.problem = ""
        self.saved: list[torch.Tensor] = []  # by the call that runs
        self.nodes = _Nodes()  # of tensors; the names of parameters and buffers
        for node, tensor in zip(known.graph.find_nodes(op="placeholder"), inputs, strict=True):
            self._bind(tensor, node)
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            if self.nodes.of(tensor) is None:
                self.nodes.bind(tensor, name)

    def refuse(self, why: str) -> NoReturn:
        """End it, whatever the forward does about errors."""
        self.problem = self.problem or why
        raise Unlike(self.problem)

    def __call__(self, call: Call) -> Any:
        return unprofiled(self._call, call)

    def _call(self, call: Call) -> Any:
        operator = _Operator.of(call.operator)
        if (operator.may_be_opened or is_any_autocast_enabled()) and is_opened(call):
            return call.open()
        with unseen():
            taken = operator.leaves(call)
            tensors = [leaf for leaf in taken if isinstance(leaf, torch.Tensor)]
            is_off = not torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
            is_new = operator.is_on_constants and self.nodes.of(tensors[0]) is None
            self.saved.clear()
            with in_mode():
                result = operator.usual(*call.args, **call.kwargs)
            results = [result] if isinstance(result, torch.Tensor) else tensor_leaves(result)
            is_number = result is not None and not results
            if is_new or (is_number and not (tensors and operator.tells_content)):
                return result
            acts = operator.is_mutable or (is_off and any(t.is_floating_point() or t.is_complex() for t in results))
            node = self._next(WithoutGrad(operator.usual) if is_off and acts else operator.usual)
            known = node.meta.get(_KNOWN)
            if known is None:
                known = node.meta[_KNOWN] = _Known.of(node)
            self._compare(node, known, taken)
            self._compare_memory(node, known, tensors, results, acts)
            self._note_result(node, result)
            self.saved.clear()
        return result

    def _compare(self, node: torch.fx.Node, known: _Known, taken: list[Any]) -> None:
        """Note what a call takes, if the program takes the same up to numbers."""
        if len(known.leaves) != len(taken):
            self.refuse(f"{node.name} takes other arguments")
        of, has_others = self.nodes.of, False
        for mine, other in zip(known.leaves, taken, strict=True):
            kind = type(mine)
            if kind is torch.fx.Node:
                is_same = of(other) is mine or (isinstance(other, torch.Tensor) and self._is(other, mine))
            elif mine is other:
                continue
            elif kind is int or kind is float:
                is_same = kind is type(other)
                has_others |= repr(mine) != repr(other)
            else:
                is_same = kind is type(other) and bool(mine == other)
            if not is_same:
                self.refuse(f"{node.name} takes something else")
        self.found.taken[node.name] = known.numbers
        if has_others:
            self.found.taken[node.name] = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in taken]
            self.found.changed.append(node.name)

    def _compare_memory(
        self,
        node: torch.fx.Node,
        known: _Known,
        given: list[torch.Tensor],
        results: list[torch.Tensor],
        may_write: bool,
    ) -> None:
        """Compare what a call saves and shares.

        Where more than numbers may depend on it, also the outlines of what it is given; where it may write, which of
        these are alike.
        """
        try:
            views, saves = memory_seen_of(given, results, self.saved)
        except (NotImplementedError, RuntimeError):
            self.refuse(f"{node.name} is given or makes what has no memory of its own")
        is_like = known.memory == (views, [save and (save[0], save[1] is None) for save in saves])
        if is_like and (may_write or node.name in self.wanted):
            seen = Seen(tuple(map(TensorSpec.of, given)), views, saves)
            is_like = not may_write or seen.kinds == known.kinds
            if may_write or self.wanted[node.name]:
                is_like = is_like and seen.outline == known.outline
            self.found.seen[node.name] = seen
        if not is_like:
            self.refuse(f"{node.name} does something else to memory")

    def _note_result(self, node: torch.fx.Node, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            self._bind(result, node)
            return
        for index, item in enumerate(result if isinstance(result, (tuple, list)) else ()):
            if isinstance(item, torch.Tensor):
                picked = self._next(python_operator.getitem)
                if picked.args != (node, index):
                    self.refuse(f"{picked.name} is another result")
                self._bind(item, picked)
            elif not schema_of(node.target).name.startswith("aten::"):
                self.refuse(f"{node.name} returns numbers")

    def finish(self, outputs: Sequence[torch.Tensor]) -> None:
        """Compare the end of the program."""
        if self.problem:
            raise Unlike(self.problem)
        node = next(self.calls)
        if node.op != "output":
            self.refuse(f"the forward ends before {node.name}")
        expected: Any = node.args[0]
        if len(outputs) != len(expected) or not all(map(self._is, outputs, expected)):
            self.refuse("the forward returns something else")

    def _next(self, target: Any) -> torch.fx.Node:
        node = next(self.calls)
        if node.op == "output" or node.target != target or OWN in node.meta:
            self.refuse(f"the forward calls {target} in the place of {node.name}")
        return node

    def _is(self, tensor: torch.Tensor, node: torch.fx.Node) -> bool:
        """Whether a node stands for a tensor, which may be new if it is a constant of the program."""
        known = self.nodes.of(tensor)
        if known is None and node.op == "get_attr" and str(node.target).startswith(CONSTANT):
            if not same_bits(tensor, self.constants[str(node.target)]):
                self.refuse("a constant is another")
            self._bind(tensor, node)
            return True
        return known is node or (node.op == "get_attr" and known == node.target)

    def _bind(self, tensor: torch.Tensor, node: torch.fx.Node) -> None:
        self.nodes.bind(tensor, node)
        self.found.shapes[node.name] = tuple(tensor.shape)
