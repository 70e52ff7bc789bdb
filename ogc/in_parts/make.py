"""Plans a model in parts: finds them, measures what is around them, and chooses a plan for each."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from ..errors import ParseError, SolveError
from ..graph import Graph
from ..plan.plan import Plan
from ..plan.saving import SavedDecisions, SavedPlan, saved_decisions
from ..planning.agreement import question
from ..planning.stored import tell_broken, tolerant
from ..program.leaf import Leaf
from ..program.program import device_of_model
from ..runtime.module import refuse_replaced_forward
from ..solver import NEGLIGIBLE, solver_of
from ..torch_state.allocator import can_measure
from ..torch_state.ranks import first_of_all
from .choice.agreed import agreed_choice
from .choice.combine import Choice, Problem, Stop, fastest, least_peak, within
from .choice.ways import Way
from .find import FoundParts, Part, find_parts, is_alike
from .measure import Rest, measure, rest_of_step
from .module import Parts, Twin, module_in_parts, twin_of
from .options import Options
from .plan import PartPlan, PartsPlan, PlainRest
from .resume import SavedParts
from .share import LatePlanner, Share, planner_of

log = logging.getLogger(__name__)

EXCESS = 1.01
"""By how much a saved plan may miss a budget where what is around the parts is measured in another step."""


def optimize_in_parts(
    model: torch.nn.Module,
    sample_input: Any,
    options: Options,
    plain: Mapping[str, str],
    is_wanted: Callable[[PartsPlan], bool] = lambda plan: True,
    saved: SavedPlan | None = None,
) -> torch.nn.Module | None:
    """The same model with its parts planned, where the whole cannot be.

    Args:
        model, sample_input, options: as for :func:`ogc.optimize`.
        plain: modules that have to stay plain, by name, and why; ``""`` is the model itself.
        is_wanted: whether a plan is good enough.
        saved: a plan to take up without a search.

    Returns:
        None if it is not, or if the saved plan does not keep the wish, or else a module whose ``plan`` is a
        :class:`PartsPlan`; ``graph`` and ``code`` are dictionaries by the names of parts; those that run as they are
        have no code.

    Raises:
        InputError: the model's forward was replaced on the instance.
        ParseError: nothing in the model can be planned; the message says why for each part.
        PlanError: the saved plan is for other parts.
        SolveError: nothing fits the budget; the message says what would.
    """
    refuse_replaced_forward(model)
    solver_of(options.solver, options.wish)  # refuses a name that is none
    planning = _Planning(model, sample_input, options, saved)
    with _quiet_about_leaves():
        planning.find(plain)
        planning.measure()
    choice = planning.agreed(planning.choose())
    plan = planning.plan(choice)
    if not first_of_all(planning.question("is wanted"), lambda: is_wanted(plan)) or not planning.keeps_wish(plan):
        return None
    result = planning.module(choice, plan)
    _tell(plan)
    return result


@dataclass
class _Planning:
    """The way from a model to its plan in parts."""

    model: torch.nn.Module
    sample_input: Any
    options: Options
    saved: SavedPlan | None = None
    found: FoundParts = field(default_factory=FoundParts)
    parts: list[Part] = field(default_factory=list)  # those found, then the late ones that are like one of these
    ways: list[tuple[Way, ...]] = field(default_factory=list)  # for each of these
    late: dict[int, int] = field(default_factory=dict)  # numbers of the late ones, and of those that they are like
    rest: Rest | None = None
    twins: dict[tuple[int, Choice], Twin] = field(default_factory=dict)
    idle: tuple[SavedDecisions, ...] = ()

    def find(self, plain: Mapping[str, str]) -> None:
        """Find the parts and the ways to run each."""
        found = find_parts(self.model, self.sample_input, self.options, plain)
        saved = None if self.saved is None else SavedParts(self.saved)
        ways = self._ways(found.parts) if saved is None else [saved.ways(part.name, part.graph) for part in found.parts]
        ways = list(map(self._left_alone, ways))
        if self.options.solver != "none":
            self.idle = tuple(
                saved_decisions(part.graph, of_part[0].plan.decisions, part.name)
                for part, of_part in zip(found.parts, ways, strict=True)
                if len(of_part) == 1
            )
            found, ways = _without_idle(found, ways)
        self.found, self.parts, self.ways = found, [*found.parts], ways
        if not ways:
            reasons = _listed({name: why for name, why in found.plain.items() if name})
            raise ParseError(f"Nothing in it can be planned either{reasons and f': {reasons}'}")
        for name, module in found.late.items():
            like = next((n for n, part in enumerate(found.parts) if is_alike(part, module)), None)
            if like is not None:
                self.late[len(self.parts)] = like
                self.parts.append(replace(found.parts[like], name=name, module=module))
                self.ways.append(ways[like] if saved is None else saved.ways(name, found.parts[like].graph))
        if saved is not None:
            saved.check_all_used(found.late)

    def _ways(self, parts: Sequence[Part]) -> list[tuple[Way, ...]]:
        by_kind: dict[int, tuple[Way, ...]] = {}
        for part in parts:
            if part.like not in by_kind:
                by_kind[part.like] = self.options.ways(part.graph)
        return [by_kind[part.like] for part in parts]

    def _left_alone(self, ways: tuple[Way, ...]) -> tuple[Way, ...]:
        """The ways, of which the plain one takes no time, unless larger inputs may need another one."""
        if self.options.wish.is_in_bytes or not ways[-1].plan.is_plain:
            return ways
        return (*ways[:-1], replace(ways[-1], cost=replace(ways[-1].cost, seconds=0.0)))

    def measure(self) -> None:
        """Find out what the rest takes, in a step with plans that keep little."""
        if not can_measure(device_of_model(self.model)):
            return
        problem = self._problem(self._stops)
        choice = least_peak(problem)
        parts = self._parts(self._twins(choice), choice, {})
        optimized = module_in_parts(self.model, parts, {})
        costs = [self.ways[stop.part][choice[stop.part]].cost for stop in problem.stops]
        kept = [problem.kept(stop, choice[stop.part]) for stop in problem.stops]
        try:
            marks = measure(self.model, optimized, parts, self.sample_input)
        except Exception as error:
            raise ParseError(f"In parts, a step of it fails ({type(error).__name__}: {error})") from error
        finally:
            parts.uninstall()
        self.rest = rest_of_step(marks, problem.stops, costs, kept)

    @property
    def _stops(self) -> tuple[Stop, ...]:
        """The calls of the sample's forward, as far as that showed them."""
        calls = zip(self.found.calls, self.found.again, strict=True)
        return tuple(Stop(part, again=tuple(again.values())) for part, again in calls)

    @cached_property
    def problem(self) -> Problem:
        """What is to be chosen; every part that the sample left out is called too."""
        rest = self.rest
        stops = list(rest.stops if rest else self._stops)
        for number in self.late:
            self._put_in(stops, number)
        return self._problem(tuple(stops), rest.before if rest else 0)

    def _put_in(self, stops: list[Stop], number: int) -> None:
        """Add the call of a part that the sample left out, where the order of the modules has it."""
        part, order = self.parts[number], {name: n for n, (name, _) in enumerate(self.model.named_modules())}
        alike = [n for n, stop in enumerate(stops) if self.parts[stop.part].like == part.like]
        before = [n for n in alike if order[self.parts[stops[n].part].name] < order[part.name]]
        beside = before[-1] if before else alike[0]
        place = beside + bool(before)
        new = replace(stops[beside], part=number, inside=(), ended=())
        stops[:] = [stop.making_room(place) for stop in stops]
        stops.insert(place, new)
        # What is given from one to the next stays, too, and the rest holds it.
        given = sum(value.bytes for value in part.graph.values if value.is_output)
        for n, stop in enumerate(stops[beside + 1 :], beside + 1):
            more = {name: getattr(stop, name) + given for name in ("forward", "backward", "after")}
            stops[n] = replace(stop, **more)

    def choose(self) -> Choice:
        """The choice that the wish asks for.

        Raises:
            SolveError: nothing fits the budget.
        """
        problem, wish = self.problem, self.options.wish
        if self.saved is not None:
            return (0,) * len(self.ways)
        budget = wish.budget_bytes(problem.peak(self._plain))
        if budget is not None:
            found = fastest(problem, budget)
            if found is None:
                raise SolveError(self._infeasible(budget))
            return found
        if self.options.solver != "optimal":
            return (0,) * len(self.ways)
        if wish.max_overhead is not None:
            # Of the time of the parts alone: that of the rest is measured, and would make plans vary.
            found = within(problem, wish.max_overhead * self._part_seconds)
        else:
            found = least_peak(problem, NEGLIGIBLE)
        return found if (1 + NEGLIGIBLE) * problem.peak(found) < problem.peak(self._plain) else self._plain

    def keeps_wish(self, plan: PartsPlan) -> bool:
        """Whether a plan that was taken up keeps the wish; it is told if not."""
        wish, budget = self.options.wish, plan.budget_bytes
        share = tolerant(wish, self.parts[0].graph).max_overhead
        fits = budget is None or plan.peak_bytes <= (EXCESS if plan.is_measured else 1) * budget
        is_quick = share is None or plan.added_seconds <= share * plan.part_seconds
        if self.saved is not None and not (fits and is_quick):
            tell_broken(wish, plan.peak_bytes, plan.added_seconds / plan.part_seconds)
            return False
        return True

    def question(self, what: str) -> str:
        """What all ranks that plan the same parts by the same wish ask."""
        names = [part.name for part in self.parts]
        return question((what, names, self.options.wish, self.options.solver), [part.graph for part in self.parts])

    def agreed(self, choice: Choice) -> Choice:
        """The choice of the first rank that made one."""
        graphs = [part.graph for part in self.parts]
        ways, choice = agreed_choice(self.question("choice"), graphs, self.ways, choice, self.options.solver)
        if ways is not self.ways:
            self.ways = ways
            self.twins.clear()  # which go by the places of ways
            del self.problem
        return choice

    def plan(self, choice: Choice) -> PartsPlan:
        """The choice as a plan that can be looked at."""
        problem, found = self.problem, self.found
        plain_peak = problem.peak(self._plain)
        return PartsPlan(
            parts=tuple(self._part(number, choice) for number in range(len(self.parts))),
            plain=tuple(PlainRest(name, why, found.saved_bytes.get(name, 0)) for name, why in found.plain.items()),
            peak_bytes=problem.peak(choice),
            plain_peak_bytes=plain_peak,
            rest_bytes=self.rest.kept_bytes if self.rest else sum(found.saved_bytes.values()),
            part_seconds=self._part_seconds,
            recomputed_seconds=problem.seconds(choice),
            rest_seconds=self._part_seconds * self.rest.time_share if self.rest else 0.0,
            budget_bytes=self.options.wish.budget_bytes(plain_peak),
            is_measured=self.rest is not None,
            solver=self.options.solver if self.saved is None else self.saved.solver,
            max_overhead=self.options.wish.max_overhead,
            idle=self.idle,
        )

    def _part(self, number: int, choice: Choice) -> PartPlan:
        part, is_late = self.parts[number], number in self.late
        cost = self.ways[number][choice[number]].cost
        targets = [] if is_late else [node.target for node in part.graph.program.operations]
        leaves = dict.fromkeys(f"{part.name}.{target.module}" for target in targets if isinstance(target, Leaf))
        plan, calls = self._part_plan(number, choice), self.problem.calls[number]
        return PartPlan(part.name, calls, plan, cost, tuple(leaves), is_late)

    def module(self, choice: Choice, plan: PartsPlan) -> torch.nn.Module:
        """The model with its parts run by the choice."""
        twins = self._twins(choice)
        if not self.options.wish.is_in_bytes:  # else larger inputs may need a plan
            twins = {name: twin for name, twin in twins.items() if not twin.runner.is_plain}
        code = {name: twin.runner.generated.source for name, twin in twins.items()}
        parts = self._parts(twins, choice, self.found.late)
        return module_in_parts(self.model, parts, {"plan": plan, "graph": self._graphs(), "code": code})

    def _problem(self, stops: tuple[Stop, ...], before: int = 0) -> Problem:
        return Problem(stops, tuple(tuple(way.cost for way in ways) for ways in self.ways), before)

    @property
    def _plain(self) -> Choice:
        return tuple(len(ways) - 1 for ways in self.ways)

    @property
    def _part_seconds(self) -> float:
        return sum(self.ways[part][0].plan.step_seconds * count for part, count in self.problem.calls.items())

    def _part_plan(self, number: int, choice: Choice) -> Plan:
        return replace(self.ways[number][choice[number]].plan, graph=self.parts[number].graph)

    def _graphs(self) -> dict[str, Graph]:
        """The graphs of parts by their names; where one is called with several kinds of inputs, with numbers."""
        graphs: dict[str, Graph] = {}
        seen: Counter[str] = Counter()
        for part in self.found.parts:
            seen[part.name] += 1
            graphs[part.name if seen[part.name] == 1 else f"{part.name} ({seen[part.name]})"] = part.graph
        return graphs

    def _twins(self, choice: Choice) -> dict[str, Twin]:
        """What runs each part by the choice, by its name."""
        return {self.parts[numbers[0]].name: self._twin(numbers, choice) for numbers in self._modules.values()}

    def _parts(self, twins: Mapping[str, Twin], choice: Choice, late: Mapping[str, torch.nn.Module]) -> Parts:
        examples = [(self.parts[like], self._share(number, choice)) for number, like in self.late.items()]
        return Parts(list(twins.values()), late, LatePlanner(self.options, examples))

    @cached_property
    def _modules(self) -> dict[torch.nn.Module, list[int]]:
        """For each module that is planned, the numbers of its parts: one for each kind of calls."""
        found: dict[torch.nn.Module, list[int]] = {}
        for number, part in enumerate(self.found.parts):
            found.setdefault(part.module, []).append(number)
        return found

    def _twin(self, numbers: Sequence[int], choice: Choice) -> Twin:
        key = numbers[0], tuple(choice[number] for number in numbers)
        if key not in self.twins:
            part = self.parts[numbers[0]]
            plans = [(self.parts[number].graph, self._part_plan(number, choice)) for number in numbers]
            planner = planner_of(self.options, part.name, part.module, self._share(numbers[0], choice))
            self.twins[key] = twin_of(part.module, plans, planner)
        return self.twins[key]

    def _share(self, number: int, choice: Choice) -> Share:
        ways, wish = self.ways[number], self.options.wish
        return Share(ways[choice[number]], ways[-1].plan.plain_peak_bytes, wish, wish.is_in_bytes)

    def _infeasible(self, budget: int) -> str:
        problem = self.problem
        least = least_peak(problem, NEGLIGIBLE)
        peak, floor = problem.peak(least), max(problem.before, *(stop.after for stop in problem.stops))
        overhead = problem.seconds(least) / self._part_seconds if self._part_seconds else 0.0
        plain = ", ".join(_named(self.found.plain))
        return (
            f"no plan found peaks at or below {budget / 1e6:.1f} MB ({budget} bytes); the smallest peak is "
            f"{peak / 1e6:.1f} MB ({peak} bytes) at {overhead:.1%} overhead. The model is planned in parts, and what "
            f"stays plain ({plain}) takes up to {floor / 1e6:.1f} MB by itself"
        )


def _without_idle(found: FoundParts, ways: list[tuple[Way, ...]]) -> tuple[FoundParts, list[tuple[Way, ...]]]:
    """Without the parts that can only be run as they are: they belong to the module that calls them."""
    stay = [number for number, of_part in enumerate(ways) if len(of_part) > 1]
    saved = dict(found.saved_bytes)
    for call in found.calls:
        if len(ways[call]) == 1:
            around = found.parts[call].name
            while around and around not in found.plain:
                around = around.rpartition(".")[0]
            saved[around] = saved.get(around, 0) + ways[call][0].cost.kept_bytes
    without = replace(
        found,
        parts=[found.parts[number] for number in stay],
        calls=[stay.index(call) for call in found.calls if call in stay],
        again=[again for call, again in zip(found.calls, found.again, strict=True) if call in stay],
        saved_bytes=saved,
    )
    return without, [ways[number] for number in stay]


def _named(reasons: Mapping[str, str]) -> dict[str, str]:
    return {name or "the model itself": why for name, why in reasons.items()}


def _listed(reasons: Mapping[str, str]) -> str:
    """The reasons, each with those modules that have it."""
    by_reason: dict[str, list[str]] = {}
    for name, why in reasons.items():
        by_reason.setdefault(why, []).append(name)
    return "; ".join(f"{_few(names)} ({why})" for why, names in by_reason.items())


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]}, {names[1]} and {len(names) - 2} more"


def _tell(plan: PartsPlan) -> None:
    """One warning that names what stays plain and what it costs."""
    if plan.is_plain and plan.budget_bytes is None and plan.solver != "none":
        log.warning("no plan of its parts needs less memory than the plain model (%.1f MB)", plan.peak_bytes / 1e6)
        return
    rests = {f"{rest.name or 'the model itself'} {rest.saved_bytes / 1e6:.1f} MB": rest.why for rest in plan.plain}
    share = f"{plan.rest_seconds / plan.step_seconds:.0%} of the time" if plan.is_measured else "unmeasured time"
    log.warning(
        "ogc plans the model in %d parts, with a peak of %.1f MB (plain %.1f MB). Plain stay, with %.1f MB and %s: %s",
        len(plan.parts), plan.peak_bytes / 1e6, plan.plain_peak_bytes / 1e6, plan.rest_bytes / 1e6, share,
        _listed(rests),
    )  # fmt: skip


@contextmanager
def _quiet_about_leaves() -> Iterator[None]:
    """What leaves there are in parts is said by the plan, not part by part."""
    logger = logging.getLogger("ogc.parser.leaves")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
