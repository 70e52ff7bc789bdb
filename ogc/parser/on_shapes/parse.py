"""Graphs of a model for calls of other sizes than one that was parsed: next to nothing is computed.

A program of the other size, recorded by one forward or foretold, is run on tensors without content, operation by
operation. What was found faithful for the known call is so for another where it is the same program up to numbers.
Weights are found as ever: what must be run for its bytes, or to be timed, is run by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from ...collecting import collecting_new_only
from ...errors import ParseError
from ...graph import Graph
from ...operators.convolution.parts import Trials, trials_put_off
from ...operators.cuda.gpus import gpu_of
from ...operators.cuda.on_meta import as_on_cuda
from ...program.leaf import Leaf
from ...program.program import Program
from ...program.step import Loss
from ...program.structures import InputSpec
from ...torch_state.forwards import plain_forward
from ...torch_state.no_trace import plainly, untouched
from ..arguments import Sample, call_arguments, check_tensors
from ..assemble import graph_of
from ..carry_over import check_same_program
from ..faithful import observed, with_expected
from ..leaves import Leaves
from ..loss import modules_of, with_step_end
from ..parse import planned_form, profiler_of, visited, with_stretches
from ..traced import RecordAgain, Traced
from ..weigh.estimate import Estimator
from ..weigh.measure import Measurer, Profiler
from ..weigh.record import Observation, Record, Visit, observe
from .stand_ins import Fakes, stand_ins


class Weighed(NamedTuple):
    """A graph, and the trials of convolutions that were put off: it is that of :func:`ogc.parse` if these succeed.

    Where one does not, that takes more bytes than the graph has.
    """

    graph: Graph
    trials: Trials


class OtherSizes:
    """A model that was parsed for one call, ready for calls of other sizes.

    Args:
        model: the module, unchanged since.
        graph: from :func:`ogc.parse`.

    Raises:
        ParseError: its graphs cannot be told by shapes: there are leaves in it, it was made by hand, it has the loss
            alone, or it is not on a CPU.
    """

    def __init__(self, model: torch.nn.Module, graph: Graph) -> None:
        self.model, self.graph = model, graph
        self.program: Program = graph.program
        if any(isinstance(node.target, Leaf) for node in self.program.operations):
            raise ParseError("leaves are not called without content")
        if self.program.parse_graph is not None:
            raise ParseError("a graph made by hand is not made anew")
        if self.program.rest.outputs != "all":
            raise ParseError("the plain model has outputs that are not in the graph")
        self.home = torch.device("cpu")

    @plainly()
    def recorded(self, sample_input: Any, loss: Loss | None) -> Traced:
        """The program of a step that is given this, by one forward, with the memory of inference.

        Raises:
            ParseError: the forward does what no program can hold.
        """
        sample = self._sample(sample_input)
        with untouched(*modules_of(loss), given=sample.spec.constants):
            traced = _recorded(sample, None, Leaves(self.model, ()))
            traced = with_step_end(sample, traced, replace(self.program.rest, loss=loss), _recorded)
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
        visit = partial(visited, self.model, profiler, Leaves(self.model, ()))
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
        return replace(with_stretches(found, observation), runtime=self.graph.runtime)

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
    """A graph of a program that was foretold, with all that is not foretold from one that is the same."""
    program: Program = graph.program
    constants = {name: recorded.constants[name] for name in program.constants}
    found = replace(program, constants=constants, guards=recorded.guards, reads=recorded.reads)
    return replace(graph, program=replace(found, rest=replace(program.rest, loss=loss)))


def without_content(traced: Traced) -> Traced:
    """The same, but for what its outputs hold."""
    outputs = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in traced.outputs]
    return replace(traced, outputs=outputs)


def _recorded(sample: Sample, forward: Callable[..., Any] | None, leaves: Leaves) -> Traced:
    """A program that nobody judges."""
    is_careful = False
    while True:
        try:
            run = forward or plain_forward(sample.model)
            with observed(sample, run, leaves.names, is_careful) as (traced, observer):
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
