"""How models are planned, and where plans come from. For a call, these are tried in turn:

1. :class:`Given`, the plan of ``plan=``, or that of a model before it was pickled: for the first call alone;
2. :meth:`Replanner.reuse`, the plan of another size, with which the runtime begins for all further calls;
3. :func:`of_another_rank`, of the rank that was the first to look for an equal one;
4. :func:`cached`, what ``cache_dir=`` has;
5. :func:`searched`, by the solver.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from itertools import chain
from math import prod
from operator import gt
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from .errors import InputError, ParseError, PlanError
from .graph import MIB, Graph
from .parser import ParseOptions, Shapes, at_shapes, hooked_modules, parsed, reuse, reuse_quickly, shapes_of
from .parser.weigh.measure import times_kept_in
from .plan import Plan, SavedPlan, plan_on, simulate
from .plan.saving import VERSION
from .plan.simulate import plain_peak
from .process import within_seconds
from .program.structures import Call, InputSpec
from .runtime.offloading import Bandwidth, Offloading
from .solver import FAIR, Budget, Goal, SolveOptions
from .solver.goal import in_bytes
from .torch_state.forwards import collects_now
from .torch_state.ranks import answer_of_ranks, are_several, first_answer, has_inner_units

log = logging.getLogger(__name__)

# -- calls of other shapes -----------------------------------------------------------------------------


GraphAndPlan = tuple[Graph, Plan]
"""A plan, and the graph that it runs on."""

Make = Callable[[torch.nn.Module, Call], GraphAndPlan]
"""Parses a model with a call's arguments, and plans."""

Meets = Callable[[Graph, Plan], bool]
"""Whether a plan keeps the goal where a graph, weighed for that, is computed."""


ROUNDING, NOISE = 1 + 1e-9, 1.05
"""By how much a plan that was made before may miss the overhead that was asked for: where times are estimated, and
measured anew."""


def tolerant(goal: Goal, graph: Graph) -> Goal:
    """The goal with a little more time than was asked for: sums of it are rounded, or it is measured anew."""
    share, slack = goal.max_overhead, ROUNDING if graph.profile == "estimate" else NOISE
    return goal if share is None else replace(goal, max_overhead=slack * share)


def meets(goal: Goal) -> Meets | None:
    """What tells whether a plan that was made before meets a goal; None for a goal for nothing in particular."""

    def keeps(graph: Graph, plan: Plan) -> bool:
        cost = None if plan.is_plain else simulate(graph, plan)
        if (share := tolerant(goal, graph).max_overhead) is not None:
            return (cost.added_seconds if cost else 0.0) <= share * graph.step_seconds
        plain = plain_peak(graph)
        budget = goal.budget_bytes(plain)
        return budget is None or (cost.peak_bytes if cost else plain) <= budget

    return keeps if goal.is_bounded else None


@dataclass
class _Sizes:
    """For which calls a plan is known to hold and to keep its goal, the first of them that for which it was made."""

    sizes: list[Shapes]  # of the tensors of their programs, the inputs first
    is_trusted: bool = True  # whether others may be found by their numbers alone
    told: bool = False

    def have(self, sizes: Shapes, is_in_bytes: bool) -> bool:
        """Whether a goal is kept for others as no size is larger than one, nor smaller than another, that keep it.

        Smaller ones take fewer bytes, but not a smaller share of those that they take in the plain model.
        """
        below = is_in_bytes or any(_is_within(one, sizes) for one in self.sizes)
        return below and any(_is_within(sizes, one) for one in self.sizes)

    def are_like(self, sizes: Shapes) -> bool:
        """Whether others are about as large as those for which the plan was made."""
        each = zip(chain.from_iterable(self.sizes[0]), chain.from_iterable(sizes), strict=True)
        return all(planned <= 2 * size and size <= 2 * planned for planned, size in each)

    def miss(self, why: str) -> None:
        """Note that a call was not found by its numbers."""
        if not self.told:
            log.info("the plan is not reused by numbers alone: %s", why)
        self.told = True


def _is_within(small: Shapes, large: Shapes) -> bool:
    return not any(map(gt, chain.from_iterable(small), chain.from_iterable(large)))


@dataclass(frozen=True, eq=False)
class Replanner:
    """Reuses plans to other sizes and, given ``make``, makes plans for any other call.

    A budget in bytes stays one, a share is one of that call's own plain peak, and an overhead one of its own time: a
    plan that does not keep them is not reused, as ``keeps`` tells. Of an overhead it tells by times in proportion to
    sizes, where these are no more than twice, and no less than half, of those that were planned for; else by what is
    weighed anew. Where a budget cannot be met, the plan is the one with the least peak; one that misses its share is
    reused like those without a goal. ``anew`` plans a model that was sharded, or has hooks that submodules did not have
    when it was optimized (``hooked`` had some).
    """

    make: Make | None = None
    budget: Budget | None = None
    hooked: Collection[str] = frozenset()
    keeps: Meets | None = None
    anew: Callable[[torch.nn.Module, Call], torch.nn.Module] | None = None
    known: dict[int, _Sizes] = field(default_factory=dict)  # of each graph, by the identity of its program

    def apart(self, model: torch.nn.Module, call: Call) -> torch.nn.Module | None:
        """The model planned unit by unit if it was sharded since it was planned, anew if it has got hooks."""
        if self.anew is None:
            return None
        if has_inner_units(model):
            log.warning("the model was sharded since it was optimized: its units are planned anew")
            return self.anew(model, call)
        hooked = hooked_modules(dict(model.named_modules(remove_duplicate=False)))
        new = [name for name in hooked if name and name not in self.hooked]
        return None if not new or _collecting(model) else self.anew(model, call)

    def reuse(self, model: torch.nn.Module, call: Call, graph: Graph, plan: Plan, quickly: bool) -> Graph | None:
        """``graph`` for inputs of other sizes, or None unless ``plan`` still holds and meets the goal.

        ``quickly``, if that is seen by numbers alone.
        """
        is_in_bytes = in_bytes(self.budget)
        inputs = InputSpec.of(call.args, call.kwargs)[0], graph.program.inputs
        sizes, planned = ([spec.shape for spec in given.tensors] for given in inputs)
        if is_in_bytes and sum(map(prod, sizes)) > sum(map(prod, planned)):
            return None  # more bytes than were planned for
        is_larger_somewhere = any(map(gt, chain.from_iterable(sizes), chain.from_iterable(planned)))
        if plan.is_plain and not (is_in_bytes and is_larger_somewhere):
            return graph
        missed = isinstance(self.budget, float) and plan.budget_bytes is None  # where it was made
        keeps = None if missed else self.keeps
        known = self._sizes_of(graph)

        def holds(shapes: Shapes) -> bool:
            if keeps is None or known.have(shapes, is_in_bytes):
                return True
            return self.budget is None and known.are_like(shapes) and keeps(at_shapes(graph, shapes), plan)

        if quickly:
            if not known.is_trusted or (is_in_bytes and not known.have(sizes, is_in_bytes)):
                return None
            try:
                return reuse_quickly(model, graph, call, holds)
            except Exception as error:  # be it slowly
                known.miss(str(error))
                return None
        try:
            reused = reuse(model, graph, call, weighed=keeps is not None)
            if keeps is None:
                simulate(reused, plan)  # refuses a plan that the graph does not allow
            elif not keeps(reused, plan):
                log.info("the plan is not reused: it would not keep to the goal")
                return None
        except Exception as error:  # if the call is broken, so is the plain model's
            log.info("the plan is not reused: %s", error)
            return None
        known.sizes.append(shapes_of(reused.program.recorded.graph))
        return reused

    def distrust(self, graph: Graph) -> None:
        """Find no more graphs like this one by numbers alone."""
        self._sizes_of(graph).is_trusted = False

    def _sizes_of(self, graph: Graph) -> _Sizes:
        """Those for which a graph, or the one that it was found from, is known."""
        program, key = graph.program.graph, id(graph.program.graph)
        if key not in self.known:
            recorded = graph.program.recorded
            self.known[key] = _Sizes([] if recorded is None else [shapes_of(recorded.graph)])
            weakref.finalize(program, self.known.pop, key, None)
        return self.known[key]

    def plan(self, model: torch.nn.Module, call: Call) -> GraphAndPlan | None:
        """A graph and a plan for the call, by the goal that the module was optimised for."""
        if self.make is None:
            return None
        if name := _collecting(model):
            raise ParseError(f"module {name} has hooks that collect what it gives for a forward around the model")
        return self.make(model, call)


def _collecting(model: torch.nn.Module) -> str:
    """A module that collects for a forward around the model; planning would add to that."""
    return next((name for name, module in model.named_modules() if name and collects_now(module)), "")


# -- plans that were saved -----------------------------------------------------------------------------


Found = TypeVar("Found")


def saved_plan(source: Any) -> SavedPlan:
    """What ``ogc.optimize`` is given as ``plan``.

    Raises:
        InputError: it is no plan and no path, or the file cannot be read.
        PlanError: the file is no plan, or of an unknown version.
    """
    if isinstance(source, SavedPlan):
        return source
    if isinstance(source, (str, os.PathLike)):
        try:
            return SavedPlan.from_file(source)
        except OSError as error:
            raise InputError(
                f"plan={os.fspath(source)!r} cannot be read ({error.strerror}); give the path of a file that "
                "result.plan.save(path) wrote, or leave plan= out and have cache_dir= keep and find plans"
            ) from error
    if not hasattr(source, "as_saved"):
        raise InputError(f"plan must be the path of a saved plan, or a plan, not {type(source).__name__}")
    found: SavedPlan = source.as_saved()
    return found


@dataclass(frozen=True)
class Store:
    """A folder of plans, and of the times that were measured for them; without a folder nothing is kept.

    Any number of processes may use it at once: files are whole or not there.
    """

    folder: str | None = None

    @classmethod
    def at(cls, folder: str | os.PathLike[str] | None) -> Store:
        """That of a folder, which is made when the first plan is.

        Raises:
            InputError: there is something else in its place.
        """
        if folder is None:
            return cls()
        if not isinstance(folder, (str, os.PathLike)) or (os.path.exists(folder) and not os.path.isdir(folder)):
            raise InputError(f"cache_dir must be the path of a folder, not {folder!r}")
        return cls(os.path.abspath(folder))

    def found(self, wanted: Wanted[Found]) -> Found | None:
        """What is kept of plans; None if there are none that hold."""
        if self.folder is None:
            return None
        path = Path(self.folder, f"{wanted.key}.json")
        try:
            found = wanted.taken_up(SavedPlan.from_file(path))
        except FileNotFoundError:
            return None
        except (OSError, PlanError) as error:
            log.warning("a plan is made anew, as the one in cache_dir does not do: %s", error)
            return None
        if found is not None:
            log.info("the plan is that of %s", path)
        return found

    def keep(self, wanted: Wanted[Found], found: Found) -> None:
        """Keep plans, in the place of what was there."""
        if self.folder is None:
            return
        try:
            os.makedirs(self.folder, exist_ok=True)
            wanted.saved(found).write(Path(self.folder, f"{wanted.key}.json"))
        except OSError as error:
            log.warning("the plan is not kept in cache_dir: %s", error)

    def times(self) -> AbstractContextManager[None]:
        """In here, operations that were measured before on such a machine are not measured again."""
        return nullcontext() if self.folder is None else times_kept_in(self.folder)


NOWHERE = Store()


def tell_broken(goal: Goal, peak_bytes: int, overhead: float) -> None:
    """Say that a saved plan does not keep the goal."""
    asked = "memory_budget" if goal.max_overhead is None else "max_overhead"
    log.warning(
        "a plan is made anew: the saved one peaks here at %.1f MiB, with %.1f %% more time, and does not keep %s=%r",
        *(peak_bytes / MIB, 100 * overhead, asked, getattr(goal, asked)),
    )


# -- where a plan is looked for ------------------------------------------------------------------------


def with_host(
    graph: Graph,
    *,
    bandwidth: Bandwidth | None = None,
    host_memory: int | str | None = None,
    ranks_per_host: int = 1,
    offload: str | os.PathLike[str] | bool = True,
) -> Graph:
    """The graph, whose plans may offload: for :func:`ogc.solve`, :func:`ogc.frontier` and :func:`ogc.make_plan`.

    Args:
        graph: from :func:`ogc.parse`.
        bandwidth, host_memory, ranks_per_host, offload: as for :func:`ogc.optimize`. For a device that is not there,
            bandwidth is needed.

    Raises:
        InputError: an argument is of the wrong kind, or bandwidth cannot be measured.
    """
    if not isinstance(graph, Graph) or graph.program is None:
        raise InputError("graph must be a Graph that ogc.parse made; one by hand gets its host=ogc.Host(out, back)")
    found = Offloading.of(offload or True, bandwidth, host_memory, ranks_per_host)
    assert found is not None
    return found.on(graph)


@dataclass(frozen=True)
class PlanOptions:
    """How a model and its parts are parsed and planned, where that is kept, and how many seconds each plan may take."""

    parsing: ParseOptions
    solving: SolveOptions
    store: Store = NOWHERE
    seconds: float | None = None
    offloading: Offloading | None = None
    in_flight: int = 1

    @property
    def goal(self) -> Goal:
        """That of the plans."""
        return self.solving.goal

    @property
    def needs_one_plan(self) -> str:
        """Which of these cannot do with plans of parts, as the beginning of a sentence; "" if none."""
        return "offload= needs" if self.offloading is not None else "in_flight= needs" if self.in_flight > 1 else ""

    def parse(self, model: torch.nn.Module, sample_input: Any) -> Graph:
        """The graph of a call, as :func:`ogc.parse` makes it."""
        graph = replace(parsed(model, sample_input, self.parsing), in_flight=self.in_flight)
        return graph if self.offloading is None else self.offloading.on(graph)

    def of_submodule(self, name: str, module: torch.nn.Module) -> PlanOptions:
        """The same for calls of a submodule, which offload nothing and of which one is in flight."""
        return replace(self, parsing=self.parsing.of_submodule(name, module), offloading=None, in_flight=1)

    def within(self, budget: Budget | None) -> PlanOptions:
        """The same with another budget."""
        return replace(self, solving=replace(self.solving, goal=replace(self.goal, memory_budget=budget)))

    @contextmanager
    def while_planning(self) -> Iterator[None]:
        """In here one plan is made: until its seconds are over, and with the times that were measured before."""
        with within_seconds(self.seconds), self.store.times():
            yield


class Wanted(Protocol[Found]):
    """What is looked for: the plan of a model, or those of its parts."""

    options: PlanOptions

    @property
    def asked(self) -> tuple[Any, ...]:
        """A word for what it is the plan of, and all that it depends on beside the options, but for seconds."""

    @cached_property
    def key(self) -> str:
        """Its name in the store and among ranks, where that of equal programs and goals is equal."""
        goal, others = self.options.goal, replace(self.options.solving, goal=FAIR)
        budget = goal.budget_bytes(1) if goal.is_in_bytes else goal.memory_budget
        text = repr((self.asked, VERSION, budget, goal.max_overhead, others))
        return f"{self.asked[0]}-{sha256(text.encode()).hexdigest()[:32]}"

    @cached_property
    def known(self) -> SavedPlan | None:
        """What another rank had when this one began to look for it."""
        found: SavedPlan | None = answer_of_ranks(self.key) if are_several() else None
        return found

    def taken_up(self, saved: SavedPlan) -> Found | None:
        """It as it was saved; None, which is told, if it misses the goal here. PlanError: it does not fit."""

    def of_rank(self, saved: SavedPlan) -> Found | None:
        """The same as another rank has it: whether it keeps a goal of time is for that rank to say, as times differ."""

    def searched(self) -> Found:
        """It by a search."""

    def saved(self, found: Found) -> SavedPlan:
        """What is saved of it."""


Source = Callable[[Wanted[Found]], "Found | None"]
"""Looks for plans in one place; None if there are none that hold."""


@dataclass(frozen=True)
class Given:
    """A plan to begin with, if there is one; where it need not fit, others are looked for in its place."""

    saved: SavedPlan | None = None
    must_fit: bool = True

    def __call__(self, wanted: Wanted[Found]) -> Found | None:
        """It as it holds here. PlanError: it does not fit, and must."""
        try:
            return None if self.saved is None else wanted.taken_up(self.saved)
        except PlanError as error:
            if self.must_fit:
                raise
            log.info("a plan is made anew, as the saved one does not do: %s", error)
            return None


NOTHING = Given()


def of_another_rank(wanted: Wanted[Found]) -> Found | None:
    """That of the rank that was the first to look for an equal one."""
    return None if wanted.known is None else _of_rank(wanted, wanted.known)


def cached(wanted: Wanted[Found]) -> Found | None:
    """That which was kept in the store."""
    found = wanted.options.store.found(wanted)
    return None if found is None else _agreed(wanted, found)


def searched(wanted: Wanted[Found]) -> Found:
    """A new one, which is kept."""
    found = wanted.searched()
    wanted.options.store.keep(wanted, found)
    return _agreed(wanted, found)


def _agreed(wanted: Wanted[Found], found: Found) -> Found:
    """What this rank has found, for others to take; or theirs, if one was quicker and it does here."""
    if not are_several():
        return found
    mine = wanted.saved(found)
    first = first_answer(wanted.key, mine)
    theirs = None if first in (mine, wanted.known) else _of_rank(wanted, first)
    return found if theirs is None else theirs


def _of_rank(wanted: Wanted[Found], saved: SavedPlan) -> Found | None:
    try:
        return wanted.of_rank(saved)
    except PlanError as error:
        log.info("the plan of another rank does not fit: %s", error)
        return None


def look_for(wanted: Wanted[Found], given: Source[Any] = NOTHING) -> Found:
    """What is wanted, from the first source that has it."""
    sources: tuple[Source[Found], ...] = given, of_another_rank, cached, searched
    return next(found for source in sources if (found := source(wanted)) is not None)


@dataclass(frozen=True)
class OfGraph(Wanted[GraphAndPlan]):
    """The plan of a graph, and the graph that it runs on."""

    options: PlanOptions
    graph: Graph

    def restored(self, saved: SavedPlan) -> GraphAndPlan:
        """What was saved, on the graph that it runs on. PlanError: it does not fit."""
        return self.graph, plan_on(self.graph, saved)

    def of_rank(self, saved: SavedPlan) -> GraphAndPlan | None:
        graph, plan = self.restored(saved)
        if plan.budget_bytes is not None and plan.peak_bytes > plan.budget_bytes:  # sizes were measured
            raise PlanError(f"it takes {plan.peak_bytes} bytes on this rank, more than {plan.budget_bytes}")
        return graph, plan

    def saved(self, found: GraphAndPlan) -> SavedPlan:
        return found[1].as_saved()
