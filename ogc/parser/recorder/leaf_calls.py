"""Calls of leaves as nodes of a program, with the recorder aside while they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from ...program.leaf import Leaf, Returned
from ...program.structures import CONSTANTS, Given, InputSpec, autocast_state
from ..forward.flat import saved_until_done
from ..forward.location import user_line
from ..traced import READS
from .dispatch import unseen
from .recorder import Recorder, writes_of


class LeafCalls:
    """Calls leaves, and writes each call down as one node."""

    def __init__(self, recorder: Recorder, model: torch.nn.Module) -> None:
        self.recorder = recorder
        self.model = model
        self.count = 0

    def module(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a submodule that is a leaf."""
        module = self.model.get_submodule(name)
        held = {id(t): t for t in chain(module.parameters(), module.buffers())}

        def write(leaf: Leaf, given: list[torch.fx.Node]) -> torch.fx.Node:
            tensors = self.recorder.tensors
            own = [t for name, t in tensors.state.items() if id(t) in held]
            state = [tensors.node(t) for t in own]
            return self.recorder.graph.call_function(leaf, (tensors.get_attr(name), given, state))

        return self._call(name, f"leaf {type(module).__name__}", call, args, kwargs, write)

    def function(
        self,
        kind: type[torch.autograd.Function],
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a custom ``autograd.Function``, a leaf of its own wherever it stands."""
        strange = [x for x in (*args, *kwargs.values()) if not isinstance(x, (torch.Tensor, *CONSTANTS))]
        name = self.recorder.scopes.current
        if strange:
            given = f"that is given a {type(strange[0]).__name__}"
            self.recorder.refuse(f"calls a custom torch.autograd.Function, {kind.__name__}, {given}, at {user_line()}")

        def write(leaf: Leaf, given: list[torch.fx.Node]) -> torch.fx.Node:
            return self.recorder.graph.call_function(replace(leaf, function=kind), (None, given, []))

        return self._call(name, f"leaf {kind.__name__}", call, args, kwargs, write)

    def _call(
        self,
        name: str,
        what: str,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        write: Callable[[Leaf, list[torch.fx.Node]], torch.fx.Node],
    ) -> Any:
        recorder = self.recorder
        with unseen():
            inputs, given = InputSpec.of(args, kwargs)
            before = Given(args, kwargs)
            recorder.check_known(given)
            nodes = [recorder.node(tensor) for tensor in given]
            versions = [writes_of(tensor) for tensor in given]
        source = user_line()
        with recorder.inside(name, given), saved_until_done():
            result = call(*args, **kwargs)
        with unseen():
            returned, tensors = Returned.of(result, before, given, versions)
            leaf = Leaf(
                f"_ogc_leaf_{self.count}", name, source, inputs, returned, torch.is_grad_enabled(), autocast_state()
            )
            self.count += 1
            self._check(leaf)
            node = write(leaf, nodes)
            node.meta.update({"module": name, "source": source, "operator": what, READS: name in recorder.counting})
            recorder.note_leaf(node, [tensors[number] for number in leaf.new], given)
        return result

    def _check(self, leaf: Leaf) -> None:
        """Note whether something goes in or comes out that is neither a tensor nor the same each time."""
        recorder, name = self.recorder, leaf.module
        returned = leaf.returned.outputs
        strange = [x for x in (*leaf.inputs.constants, *returned.constants) if not isinstance(x, CONSTANTS)]
        numbers = [x for x in returned.leaves if isinstance(x, (int, float)) and not isinstance(x, bool)]
        decides = name in recorder.counting
        if strange:
            recorder.leaky[name] = f"takes or returns a {type(strange[0]).__name__}, in which tensors may hide"
        elif decides and numbers:
            recorder.leaky[name] = "returns a number read out of a tensor"
        elif decides and any(view is not None for view in leaf.returned.views) and "." in name:
            recorder.leaky[name] = "returns its own input, as the data will have it"
