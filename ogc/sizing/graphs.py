"""Graphs of a model's step for many sizes, each found as cheaply as it can be.

Three small sizes are recorded. The program of any other follows from theirs, and its weights from one pass on tensors
without content. Where that cannot be, each size is parsed.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar

import torch

from ..errors import ParseError
from ..graph import Graph
from ..operators.convolution_parts import Trials
from ..parser import Loss, parse
from ..parser.traced import Traced
from .needs import input_bytes
from .shapes import OtherSizes, extrapolated_program, same_program, to_be_run

log = logging.getLogger(__name__)

SIZES = (2, 3, 4)
"""Multiples of ``step`` that are looked at first. With one sample alone, operators do otherwise."""

TIMED_SECONDS = 2.0
"""Of a step: where it takes longer, times are not measured but scaled from those of a small size, by estimates."""

Part = TypeVar("Part")


class Graphs:
    """The graphs of one model's step, for sizes that are multiples of ``step``.

    ``make_sample(n)`` and ``make_loss(n)`` give a sample input of size n and its loss; ``parsing`` are further
    arguments of :func:`ogc.parse`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        make_sample: Callable[[int], Any],
        make_loss: Callable[[int], Loss | None],
        step: int,
        parsing: dict[str, Any],
    ) -> None:
        self.model, self.make_sample, self.make_loss, self.parsing = model, make_sample, make_loss, parsing
        self.small = [multiple * step for multiple in SIZES]
        self.inputs: dict[int, int] = {}  # bytes, by size, as all that follows
        self.known: dict[int, Graph] = {}  # what parse gives, but for trials that are put off
        self.untimed: dict[int, Graph] = {}  # the same with estimated times
        self.guessed: dict[int, Graph] = {}  # without what must be run to be known
        self.programs: dict[int, Traced] = {}
        self.put_off: dict[int, Trials] = {}  # for those in ``known``
        self.settled: set[int] = set()  # those in ``known`` that are what parse gives, and can be run
        self.shapes: OtherSizes | None = None  # None: they do not tell
        self.puts_off = True  # trials

    def look(self) -> None:
        """Look at the small sizes; raises ParseError and InputError as :func:`ogc.parse` does."""
        first = self.small[0]
        self.known[first] = graph = self._parsed(first)
        try:
            self.shapes = OtherSizes(self.model, graph)
            self.programs = {size: self._recorded(size) for size in self.small}
            again = self.shapes.weighed(self._sample(first), self.programs[first], is_timed=False, puts_off=False).graph
            if _without_seconds(again) != _without_seconds(graph):
                raise ParseError("operators take other bytes than their shapes tell")
        except ParseError as error:
            self._parse_from_here_on(error)
        for size in self.small:
            self.of(size)

    def of(self, size: int, is_timed: bool = True) -> Graph:
        """The graph for a size; without ``is_timed`` its times may be estimated, whatever was asked for."""
        if size not in self.known and (is_timed or size not in self.untimed):
            is_long = is_timed and self._takes_long(size)
            graph = self._weighed(size, is_timed and not is_long)
            if graph is not None:
                (self.known if is_timed else self.untimed)[size] = self._at_pace(graph) if is_long else graph
            elif size not in self.known:
                self.known[size] = self._parsed(size)
        return self.known[size] if size in self.known else self.untimed[size]

    def like(self, size: int) -> Graph | None:
        """About the graph for a size, soon found; None where it would have to be parsed."""
        if size in self.known:
            return self.known[size]
        if size not in self.guessed and (graph := self._weighed(size, is_timed=False, runs=False)) is not None:
            self.guessed[size] = self._at_pace(graph)
        return self.guessed.get(size)

    def holds(self, size: int, is_planned: bool) -> bool:
        """Whether one forward of a size runs the program of its graph; else all graphs are found anew.

        Where a graph ``is_planned`` for, trials that were put off are made too, and it can be run.
        """
        if self.shapes is None or size in self.settled:
            return True
        try:
            recorded = self._recorded(size)
            if not same_program(self.programs[size], recorded):
                raise ParseError(f"another program runs for size {size}")
        except ParseError as error:
            self._parse_from_here_on(error)
            return False
        if is_planned and not self.put_off[size].succeed():
            self.puts_off = False  # where one fails, others may
            self._forget()
            return False
        if is_planned:
            self.known[size] = to_be_run(self.known[size], recorded, self.make_loss(size))
            self.settled.add(size)
        return True

    def input_bytes(self, size: int) -> int:
        """Bytes of the sample input, on a line through those that were seen where it was not."""
        if size in self.inputs:
            return self.inputs[size]
        few, many = min(self.inputs), max(self.inputs)
        slope = (self.inputs[many] - self.inputs[few]) / (many - few)
        return max(0, round(self.inputs[few] + slope * (size - few)))

    def _sample(self, size: int) -> Any:
        sample = self.make_sample(size)
        self.inputs[size] = input_bytes(sample)
        return sample

    def _parsed(self, size: int) -> Graph:
        self.settled.add(size)
        return parse(self.model, self._sample(size), loss=self.make_loss(size), **self.parsing)

    def _recorded(self, size: int) -> Traced:
        assert self.shapes is not None
        recorded = self.shapes.recorded(self._sample(size), self.make_loss(size))
        gc.collect()  # as below
        return recorded

    def _weighed(self, size: int, is_timed: bool, runs: bool = True) -> Graph | None:
        """The graph for a size by shapes, None where these do not tell: of fewer samples they may not."""
        if self.shapes is None or (runs and size < self.small[0]):
            return None
        try:
            if size not in self.programs:
                known = [self.programs[one] for one in self.small]
                self.programs[size] = extrapolated_program(known, self.small, size)
            weighed = partial(self.shapes.weighed, self._sample(size), self.programs[size])
            graph, trials = weighed(is_timed, runs, self.puts_off or not runs)
            del weighed
            gc.collect()  # what was run holds itself, and large tensors: the collector counts objects, not bytes
        except ParseError as error:
            self._parse_from_here_on(error)
            return None
        self.put_off[size] = trials
        return graph

    def _takes_long(self, size: int) -> bool:
        """Whether a step of a size takes too long for its operations to be timed."""
        is_small = size in self.small or self.shapes is None or self.known[self.small[0]].profile != "time"
        guess = None if is_small else self.like(size)
        return guess is not None and guess.step_seconds > TIMED_SECONDS

    def _at_pace(self, graph: Graph) -> Graph:
        """A graph whose times are estimated, by what the largest small size was measured to take."""
        last = self.small[-1]
        is_measured = self.known[last].profile != "estimate"
        return paced(graph, self.known[last], self.of(last, is_timed=False)) if is_measured else graph

    def _parse_from_here_on(self, error: ParseError) -> None:
        """Let go of all that shapes told."""
        log.info("each size is parsed: %s", error)
        self.shapes = None
        self.small = [self.small[0], self.small[-1]]
        self._forget()

    def _forget(self) -> None:
        """Find all graphs anew that are not certain."""
        self.known = {size: graph for size, graph in self.known.items() if size in self.settled}
        self.untimed, self.guessed = {}, {}
        for size in self.small:
            self.of(size)


def _without_seconds(graph: Graph) -> Any:
    """All numbers of a graph but those that are measured."""
    operations = [asdict(op) for op in graph.operations]
    for fields in [*operations, *(fields["low_memory"] or {} for fields in operations)]:
        for name in [name for name in fields if name.endswith("_seconds")]:
            del fields[name]
    return operations, graph.values, graph.outside


def paced(graph: Graph, measured: Graph, estimated: Graph) -> Graph:
    """A graph whose times are estimated, at each operation's pace in ``measured``, of which ``estimated`` has
    estimates.
    """

    def one(now: Part, then: Part, guess: Part) -> Part:
        found: dict[str, Any] = {}
        for name in type(now).__dataclass_fields__:  # type: ignore[attr-defined]
            numbers = [getattr(part, name) for part in (now, then, guess)]
            if name.endswith("_seconds") and None not in numbers and numbers[2]:
                found[name] = numbers[0] * numbers[1] / numbers[2]
            elif name == "low_memory" and None not in numbers:
                found[name] = one(*numbers)
        return replace(now, **found)  # type: ignore[type-var]

    each = zip(graph.operations, measured.operations, estimated.operations, strict=True)
    return replace(graph, operations=tuple(one(*three) for three in each))
