"""Graphs of a parsed model for calls of other sizes: from a program, in one pass on tensors without content.

The program of the other size is recorded by one forward, or extrapolated from recorded ones: its numbers lie on a
polynomial through theirs. Where a batch grows, they grow along a line; where a sequence does, some are squares. What
was verified for the known call holds for another with the same program up to numbers. What must be run for its bytes,
or to be timed, is run by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from fractions import Fraction
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch.fx.node import map_aggregate, map_arg

from ..errors import ParseError
from ..graph import Graph
from ..operators.convolution_parts import Trials, trials_put_off
from ..operators.gpus import gpu_of
from ..parser.arguments import Sample, call_arguments, check_tensors
from ..parser.assemble import graph_of
from ..parser.faithful import observed, with_expected
from ..parser.loss import modules_of, with_step_end
from ..parser.opaque import OpaqueModules
from ..parser.parse import planned_form, profiler_of, visited
from ..parser.reuse import check_same_program
from ..parser.traced import ALIVE, BYTES, CALL, HISTORY, RecordAgain, Traced
from ..parser.weigh.estimate import Estimator
from ..parser.weigh.measure import Measurer, Profiler
from ..parser.weigh.record import Observation, Record, Visit, observe
from ..process import collecting_new_only
from ..program.opaque import OpaqueCall
from ..program.program import SHAPE, Loss, Program
from ..program.structures import InputSpec
from ..torch_state.compare import same_bits
from ..torch_state.forwards import plain_forward
from ..torch_state.no_trace import plainly, untouched
from ..torch_state.private import FakeTensorMode
from .cuda.kernels import as_on_cuda


class Weighed(NamedTuple):
    """A graph, which is that of :func:`ogc.parse` if the trials that were put off succeed; else that takes more
    bytes.
    """

    graph: Graph
    trials: Trials


class OtherSizes:
    """A model that was parsed for one call, ready for calls of other sizes.

    Raises:
        ParseError: shapes do not tell its graphs: it calls opaque modules, it was made by hand, it has the loss alone,
            or it is not on a CPU.
    """

    def __init__(self, model: torch.nn.Module, graph: Graph) -> None:
        self.model, self.graph = model, graph
        self.program: Program = graph.program
        if any(isinstance(node.target, OpaqueCall) for node in self.program.operations):
            raise ParseError("opaque modules are not called without content")
        if self.program.parse_graph is not None:
            raise ParseError("a graph made by hand is not made anew")
        if self.program.after_forward.outputs != "all":
            raise ParseError("the plain model has outputs that are not in the graph")
        self.home = torch.device("cpu")

    @plainly()
    def recorded(self, sample_input: Any, loss: Loss | None) -> Traced:
        """The program of a step, by one forward, with the memory of inference; raises ParseError where there is
        none.
        """
        sample = self._sample(sample_input)
        with untouched(*modules_of(loss), given=sample.spec.constants):
            traced = _recorded(sample, None, OpaqueModules(self.model, ()))
            traced = with_step_end(sample, traced, replace(self.program.after_forward, loss=loss), _recorded)
        return without_content(traced)

    @collecting_new_only()
    @plainly()
    def weighed(
        self, sample_input: Any, traced: Traced, is_timed: bool = True, runs: bool = True, puts_off: bool = True
    ) -> Weighed:
        """The graph that :func:`ogc.parse` gives for a call, from its program.

        Args:
            sample_input: the call.
            traced: its program. Its graph can be run if that was recorded.
            is_timed: measure what was measured for the known graph; or else estimate.
            runs: run what must be run for its bytes; or else take what rules say.
            puts_off: put trials off; or else make them.

        Raises:
            ParseError: it is not the known program up to numbers, or cannot be run without content.
        """
        sample = self._sample(sample_input)
        profiler = self._profiler(is_timed, runs)
        run = partial(_run, has_numbers=isinstance(profiler, Measurer))
        visit = partial(visited, self.model, profiler, OpaqueModules(self.model, ()))
        device = torch.device(self.graph.device)
        there = as_on_cuda(gpu_of(device, None) if device.type != self.home.type else None)
        try:
            with there, untouched(self.model), trials_put_off() if puts_off else nullcontext(Trials()) as trials:
                traced, observation, _ = planned_form(sample, traced, device, visit, run=run)
                found = self._graph_of(sample, traced, observation)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            raise ParseError(f"the program cannot be run without content: {error}") from error
        check_same_program(self.program.graph, found.program.graph)
        return Weighed(found, trials)

    def _graph_of(self, sample: Sample, traced: Traced, observation: Observation) -> Graph:
        """With what only a forward shows as it is known."""
        for number, record in enumerate(observation.records):
            record.random = number in self.program.random
        traced = replace(traced, reads=self.program.reads, cold=self.program.cold)
        found = graph_of(sample.spec, traced, observation, self.graph.device, self.graph.profile)
        return replace(found, runtime=self.graph.runtime)

    def _sample(self, sample_input: Any) -> Sample:
        sample = Sample(self.model, *InputSpec.of(*call_arguments(sample_input)))
        if check_tensors(sample).type != self.home.type:
            raise ParseError("what kernels take is told by shapes on a CPU alone")
        return sample

    def _profiler(self, is_timed: bool, runs: bool) -> Profiler:
        """A new one each time: it measures as long as it would for one size, and puts off trials of its own."""
        device, kind = torch.device(self.graph.device), self.graph.profile
        is_estimate = kind == "estimate" or not is_timed
        return Estimator(device, self.home, runs) if is_estimate else profiler_of(kind, device, self.home)


def to_be_run(graph: Graph, recorded: Traced, loss: Loss | None) -> Graph:
    """A graph of an extrapolated program, with what a recording of the same program has beside."""
    program: Program = graph.program
    constants = {name: recorded.constants[name] for name in program.constants}
    found = replace(program, constants=constants, guards=recorded.guards, reads=recorded.reads)
    return replace(graph, program=replace(found, after_forward=replace(program.after_forward, loss=loss)))


def without_content(traced: Traced) -> Traced:
    """The same, but for what its outputs hold."""
    outputs = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in traced.outputs]
    return replace(traced, outputs=outputs)


def _recorded(sample: Sample, forward: Callable[..., Any] | None, opaque: OpaqueModules) -> Traced:
    """A program that nobody verifies."""
    is_careful = False
    while True:
        try:
            run = forward or plain_forward(sample.model)
            with observed(sample, run, opaque.names, is_careful) as (traced, observer):
                traced = replace(traced, state={"random state": torch.get_rng_state()})
                if observer.writes(None):
                    raise ParseError("the forward changes attributes")
            return replace(with_expected(sample, traced), reads=observer.reads())
        except RecordAgain as again:
            is_careful = again.is_careful


def _run(
    model: torch.nn.Module, traced: Traced, inputs: list[torch.Tensor], visit: Visit, has_numbers: bool
) -> Observation:
    """An observation of a run on fake tensors; ``visit`` is shown real ones of their shapes."""
    fakes = Fakes()

    def shown(record: Record, args: Any, kwargs: Any) -> None:
        visit(record, *stand_ins((args, kwargs), has_numbers))

    return observe(model, traced, [fakes.of(tensor) for tensor in inputs], shown, fakes.of, fakes.mode)


def extrapolated_program(known: Sequence[Traced], sizes: Sequence[int], size: int) -> Traced:
    """What a step runs for ``size``, by what it runs for some others; tensors that depend on the size have no content.

    Raises:
        ParseError: the programs differ in more than numbers, or these lie on no such curve.
    """
    first, at = known[0], _Curve(sizes, size)
    for other in known[1:]:
        check_same_program(first.graph, other.graph)
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for nodes in zip(*(traced.graph.nodes for traced in known), strict=True):
        node = copies[nodes[0]] = graph.node_copy(nodes[0], copies.__getitem__)
        args, kwargs = at.of([(one.args, one.kwargs) for one in nodes])
        node.args, node.kwargs = map_arg((args, kwargs), copies.__getitem__)
        if SHAPE in node.meta:
            node.meta[SHAPE] = at.of([tuple(one.meta[SHAPE]) for one in nodes])
        if BYTES in node.meta:
            node.meta[BYTES] = at.of([one.meta[BYTES] for one in nodes])
        if HISTORY in node.meta:
            saved = at.of([one.meta[HISTORY].bytes for one in nodes])
            node.meta[HISTORY] = node.meta[HISTORY]._replace(bytes=saved)
    constants = {name: at.tensor([traced.constants[name] for traced in known]) for name in first.constants}
    outputs = [at.tensor(list(each)) for each in zip(*(traced.outputs for traced in known), strict=True)]
    return replace(first, graph=graph, constants=constants, outputs=outputs)


def shares(places: Sequence[int], place: int) -> list[Fraction]:
    """What each of the numbers at some places counts at another, on the polynomial through all of them."""
    return [
        prod((Fraction(place - other, one - other) for other in places if other != one), start=Fraction(1))
        for one in places
    ]


class _Curve:
    """The polynomials through what is known for some sizes, at another."""

    def __init__(self, sizes: Sequence[int], size: int) -> None:
        self.shares = shares(sizes, size)

    def of(self, known: Sequence[Any]) -> Any:
        """Arguments, from such that are alike up to numbers; nodes are those of the first."""
        first = known[0]
        if isinstance(first, dict):
            return {key: self.of([one[key] for one in known]) for key in first}
        if isinstance(first, (list, tuple)):
            return type(first)(self.of(each) for each in zip(*known, strict=True))
        if isinstance(first, slice):
            return slice(*self.of([(one.start, one.stop, one.step) for one in known]))
        if isinstance(first, bool) or not isinstance(first, int):
            return first  # no size is a fraction
        return self._number(known)

    def tensor(self, known: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor that all of them are, or one without content."""
        first = known[0]
        if all(one is first or (not one.is_meta and same_bits(one, first)) for one in known):
            return first
        shape, strides = (self.of([layout(one) for one in known]) for layout in _LAYOUT)
        made = torch.empty_strided(shape, strides, dtype=first.dtype, device=first.device)
        return made if made.is_meta else made.zero_()

    def _number(self, known: Sequence[int]) -> int:
        found = sum(share * number for share, number in zip(self.shares, known, strict=True))
        if found != int(found):
            raise ParseError(f"numbers of the program are {list(known)} for the sizes known, which predicts no others")
        return int(found)


_LAYOUT: tuple[Callable[[torch.Tensor], tuple[int, ...]], ...] = (lambda t: tuple(t.shape), lambda t: tuple(t.stride()))


def same_program(ours: Traced, theirs: Traced) -> bool:
    """Whether two programs are the same, numbers and shapes of constants and outputs included."""
    nodes = [
        [
            (node.name, node.op, node.target, *_named((node.args, node.kwargs)), *_noted(node))
            for node in traced.graph.nodes
        ]
        for traced in (ours, theirs)
    ]
    layouts = [
        [(tuple(t.shape), t.stride(), t.dtype) for t in (*traced.constants.values(), *traced.outputs)]
        for traced in (ours, theirs)
    ]
    return nodes[0] == nodes[1] and layouts[0] == layouts[1]


def _noted(node: torch.fx.Node) -> tuple[Any, ...]:
    """What was noted of a node that decides what is weighed."""
    return tuple(node.meta.get(SHAPE, ())), *map(node.meta.get, (CALL, ALIVE, BYTES, HISTORY))


def _named(arguments: Any) -> Any:
    return map_arg(arguments, lambda node: f"%{node.name}")


class Fakes:
    """Fake tensors in the places of real ones, alive as long as this is, as they are told apart by their addresses.

    ``mode`` is to be entered where operators make fake tensors.
    """

    def __init__(self) -> None:
        self.mode: AbstractContextManager[Any] = FakeTensorMode()
        self.held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the real one and its own, by the former's id

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake of a tensor, the same each time."""
        if id(tensor) not in self.held:
            self.held[id(tensor)] = tensor, self.mode.from_tensor(tensor)  # type: ignore[attr-defined]
        return self.held[id(tensor)][1]


def stand_ins(tree: Any, has_numbers: bool) -> Any:
    """Arguments with real tensors in the places of fake ones, for kernels to read; their memory is not touched.

    Whole numbers are zero, as they may be indices. Others, with ``has_numbers``, are such as kernels take their usual
    time with.
    """
    known: dict[int, torch.Tensor] = {}

    def stand_in(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in known:
            known[id(leaf)] = _stand_in(leaf, has_numbers)
        return known[id(leaf)]

    return map_aggregate(tree, stand_in)


def _stand_in(fake: torch.Tensor, has_numbers: bool) -> torch.Tensor:
    made = untouched_memory(fake)
    if not (fake.is_floating_point() or fake.is_complex()):
        made.zero_()
    elif has_numbers:
        made.uniform_(-1, 1, generator=torch.Generator(fake.device).manual_seed(0))
    return made.requires_grad_(fake.requires_grad)


def untouched_memory(like: torch.Tensor) -> torch.Tensor:
    """A tensor laid out as another, not by ``torch.empty``, which fills memory where algorithms are to be
    deterministic.
    """
    size = like.untyped_storage().nbytes()
    empty = torch.empty(0, dtype=like.dtype, device=like.device)
    storage = torch.UntypedStorage(size, device=like.device)
    return empty.set_(storage, like.storage_offset(), like.shape, like.stride())
