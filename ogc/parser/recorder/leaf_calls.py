"""Calls of leaves as nodes of a program, with the recorder aside while they run."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

from ...program.leaf import Leaf, Returned
from ...program.program import storage_of, tensor_leaves
from ...program.structures import CONSTANTS, Given, InputSpec, autocast_state
from ...torch_state.dispatch import unseen
from ...torch_state.ranks.collectives import arrived
from ..forward.flat import saved_until_done
from ..forward.location import user_line
from ..traced import READS
from .recorder import Recorder, writes_of


class LeafCalls:
    """Calls leaves, and writes each call down as one node."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.count = 0

    def module(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a submodule that is a leaf."""
        return self._call(name, self.recorder.model.get_submodule(name), call, args, kwargs)

    def function(self, kind: type[torch.autograd.Function], call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a custom ``autograd.Function``, a leaf of its own wherever it stands."""
        strange = [x for x in (*args, *kwargs.values()) if not isinstance(x, (torch.Tensor, *CONSTANTS))]
        if strange:
            given = f"that is given a {type(strange[0]).__name__}"
            self.recorder.refuse(f"calls a custom torch.autograd.Function, {kind.__name__}, {given}, at {user_line()}")
        return self._call(self.recorder.scopes.current, kind, call, args, kwargs)

    def _call(self, name: str, called: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call ``called``, a submodule or a custom function, by ``call``."""
        recorder, tensors = self.recorder, self.recorder.tensors
        module, function = (called, None) if isinstance(called, torch.nn.Module) else (None, called)
        held = {} if module is None else {id(t): t for t in chain(module.parameters(), module.buffers())}
        with unseen():
            inputs, given = InputSpec.of(args, kwargs)
            before = Given(args, kwargs)
            recorder.check_known(given)
            nodes = [tensors.node(tensor) for tensor in given]
            versions = [writes_of(tensor) for tensor in given]
        source = user_line()
        with recorder.inside(name, given), saved_until_done():
            result = call(*args, **kwargs)
            if name in recorder.talking:
                with unseen():
                    result = arrived(result)
        with unseen():
            self._check_dense(name, given, "is given")
            self._check_dense(name, tensor_leaves(result), "returns")
            returned, results = Returned.of(result, before, given, versions)
            is_on, casts = torch.is_grad_enabled(), autocast_state()
            talks = name in recorder.talking
            leaf = Leaf(
                f"_ogc_leaf_{self.count}", name, source, inputs, returned, is_on, casts,
                function=function, talks=talks, takes_no_hooks=recorder.takes_no_hooks,
            )  # fmt: skip
            self.count += 1
            self._check(leaf)
            state = [tensors.node(t) for t in tensors.state.values() if id(t) in held and storage_of(t) is not None]
            holder = None if module is None else tensors.get_attr(name)
            node = recorder.graph.call_function(leaf, (holder, nodes, state))
            what = f"leaf {(function or type(module)).__name__}"
            node.meta.update({"module": name, "source": source, "operator": what, READS: name in recorder.counting})
            recorder.note_leaf(node, [results[number] for number in leaf.new], given)
        return result

    def _check_dense(self, name: str, tensors: list[torch.Tensor], what: str) -> None:
        """Raise OpaqueError unless no program has to hold a sparse tensor between a leaf and the rest."""
        if (layout := next((t.layout for t in tensors if t.layout is not torch.strided), None)) is not None:
            self.recorder.leaky[name] = f"{what} a tensor that is {layout}, not dense"
            self.recorder.raise_if_leaky()

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
