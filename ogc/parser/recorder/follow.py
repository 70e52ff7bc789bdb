"""Follows a forward along a recorded program, for the numbers that its calls take this time.

Less is done for each call than where a program is recorded. Whatever is not as it was recorded, but for numbers and
sizes, ends it.
"""

from __future__ import annotations

import operator as python_operator
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ...program.program import CONSTANT, OWN, WithoutGrad, leaves_of, tensor_leaves
from ...torch_state.compare import same_bits
from ...torch_state.dispatch import Call, complete, dispatched_to, unseen
from ...torch_state.forwards import plain_forward
from ...torch_state.no_trace import put_back_as_well, untouched, writing
from ...torch_state.private import schema_of
from ...torch_state.ranks import told_of_collectives
from ...torch_state.reads import Observer
from ...torch_state.settings import python_random_state
from ..arguments import Sample
from ..forward.flat import FlatForward, nothing_saved
from ..forward.location import running
from ..forward.patches import CONTENT, seen_as_recorded, wrap
from ..traced import ON_CONSTANTS, Followed, Traced, Unlike
from .operators import tells_content, usual_name
from .python_calls import REFUSED
from .record import buffers_of, refuse_new_buffers
from .recorder import is_opened, unprofiled
from .tensors import seen_of


@contextmanager
def followed(sample: Sample, known: Traced) -> Iterator[tuple[Followed, Observer]]:
    """Run the model's forward along a recorded program, and observe what it reads. Inside, all is as it leaves it.

    Raises:
        Unlike: the forward does something else.
        Exception: whatever the forward raises.
    """
    model = sample.model
    if model in writing:
        raise Unlike("the forward writes parameters")
    observer = Observer(model, running, is_brief=True)
    with untouched(model):
        try:
            tensors, buffers, draws = sample.copies(), buffers_of(model), python_random_state()
            flat = FlatForward(observer.around(plain_forward(model)), sample.spec)
            follower = _Follower(model, known, tensors)
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


class _Follower:
    """Compares each call of a forward with that of a recorded program."""

    def __init__(self, model: torch.nn.Module, known: Traced, inputs: Sequence[torch.Tensor]) -> None:
        self.constants = known.constants
        self.calls = iter([node for node in known.graph.nodes if node.op not in ("placeholder", "get_attr")])
        self.found = Followed()
        self.problem = ""
        self.saved: list[torch.Tensor] = []  # by the call that runs
        self.nodes = WeakTensorKeyDictionary()  # of tensors; the names of parameters and buffers
        for node, tensor in zip(known.graph.find_nodes(op="placeholder"), inputs, strict=True):
            self._bind(tensor, node)
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            self.nodes.setdefault(tensor, name)

    def refuse(self, why: str) -> NoReturn:
        """End it, whatever the forward does about errors."""
        self.problem = self.problem or why
        raise Unlike(self.problem)

    def __call__(self, call: Call) -> Any:
        return unprofiled(self._call, call)

    def _call(self, call: Call) -> Any:
        if is_opened(call):
            return call.open()
        operator = usual_name(call.operator)
        with unseen():
            args, kwargs = complete(operator, call.args, call.kwargs)
            call = call._replace(operator=operator, args=args, kwargs=kwargs)
            tensors = tensor_leaves(args, kwargs)
            is_off = not torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
            is_new = operator in ON_CONSTANTS and tensors[0] not in self.nodes
        self.saved.clear()
        result = call.run()
        with unseen():
            results = tensor_leaves(result)
            is_number = result is not None and not results
            if is_new or (is_number and (not tensors or not tells_content(operator))):
                return result
            changes = schema_of(operator).is_mutable or any(t.is_floating_point() or t.is_complex() for t in results)
            node = self._next(WithoutGrad(operator) if is_off and changes else operator)
            self.found.taken[node.name] = self._compared(node, leaves_of(args, kwargs))
            self.found.seen[node.name] = seen_of(tensors, results, self.saved)
            self._note_result(node, result)
            self.saved.clear()
        return result

    def _compared(self, node: torch.fx.Node, taken: list[Any]) -> list[Any]:
        """What a call takes, None in the places of tensors, if the program takes the same up to numbers."""
        ours = leaves_of(node.args, node.kwargs)
        if len(ours) != len(taken):
            self.refuse(f"{node.name} takes other arguments")
        for mine, other in zip(ours, taken, strict=True):
            if isinstance(mine, torch.fx.Node):
                is_same = isinstance(other, torch.Tensor) and self._is(other, mine)
            elif type(mine) in (int, float):
                is_same = type(mine) is type(other)
            else:
                is_same = type(mine) is type(other) and mine == other
            if not is_same:
                self.refuse(f"{node.name} takes something else")
        return [None if isinstance(one, torch.fx.Node) else other for one, other in zip(ours, taken, strict=True)]

    def _note_result(self, node: torch.fx.Node, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            self._bind(result, node)
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
        known = self.nodes.get(tensor)
        if known is None and node.op == "get_attr" and str(node.target).startswith(CONSTANT):
            if not same_bits(tensor, self.constants[str(node.target)]):
                self.refuse("a constant is another")
            self._bind(tensor, node)
            return True
        return known is node or (node.op == "get_attr" and known == node.target)

    def _bind(self, tensor: torch.Tensor, node: torch.fx.Node) -> None:
        self.nodes[tensor] = node
        self.found.shapes[node.name] = tuple(tensor.shape)
