"""Plans a model in parts, where it cannot be planned as a whole or is better so."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any

import torch

from ..errors import ParseError, PlanError, SolveError
from ..graph import MIB, Graph
from ..plan import Fingerprint, Plan, SavedPlan, plain_plan, restored
from ..plan.saving import PARTS, saved_decisions, structure_of
from ..plan.simulate import plain_peak
from ..planning import PlanOptions, Source, Wanted, look_for, tell_broken, tolerant
from ..program.opaque import OpaqueCall
from ..program.program import device_of_model
from ..runtime.module import refuse_replaced_forward
from ..solver import LEAST_PEAK, Goal
from ..torch_state.allocator import can_measure
from ..torch_state.forwards import only_holds
from ..torch_state.ranks import first_answer
from .find import FoundParts, Part, find_parts, is_alike
from .joined import REGION, REGION_BACK, Choice, Chooser, Joined, Key, PartCost, usual_events
from .late import LatePlanner, Share
from .measure import Outside, measure, outside_of_step
from .module import Parts, PlannedPart, module_in_parts, planned_part_of
from .plan import PartPlan, PartsPlan, PlainModule, frugal

log = logging.getLogger(__name__)

ROUNDS = 3
"""How often plans are chosen where a step with them takes more than a budget, or runs backwards inside the forward."""

HEAVY = 1 / 3
"""Share of the plain peak that opaque modules hold from which on it is tried to plan what is in them."""

EXCESS = 1.01
"""By how much a saved plan may miss a budget where what is around the parts is measured in another step."""


def optimize_in_parts(
    model: torch.nn.Module,
    sample_input: Any,
    options: PlanOptions,
    plain: Mapping[str, str],
    source: Source[Any] = look_for,
    is_wanted: Callable[[PartsPlan], bool] = lambda plan: True,
) -> torch.nn.Module | None:
    """The same model with its parts planned, where the whole cannot be.

    Args:
        model, sample_input, options: as for :func:`ogc.optimize`.
        plain: modules that have to stay plain, by name, and why; ``""`` is the model itself.
        source: where plans are looked for.
        is_wanted: whether a plan is good enough.

    Returns:
        None if it is not, or if the source has none, or else a module whose ``plan`` is a
        :class:`PartsPlan`; ``graph`` and ``code`` are dictionaries by the names of parts; those that run as they are
        have no code.

    Raises:
        InputError: the model's forward was replaced on the instance.
        ParseError: nothing in the model can be planned; the message says why for each part.
        PlanError: a plan that was given is for other parts.
        SolveError: nothing fits the budget; the message says what would.
    """
    refuse_replaced_forward(model)
    with _quiet_about_opaque():
        found = find_parts(model, sample_input, options, plain)
        options.parsing.told.warn_of(found.plain)
        planning = _Planning(model, sample_input, options, found)
        planned = source(planning)
    if planned is None or not first_answer(f"{planning.key} is wanted", is_wanted(planned.plan)):
        return None
    result = planned.module()
    _tell(planned.plan)
    return result


def plans_of_parts(
    model: torch.nn.Module,
    sample_input: Any,
    options: PlanOptions,
    plain: Mapping[str, str],
    beside: Callable[[Key], int],
) -> tuple[PartsPlan, list[tuple[Part, Share]]]:
    """The plans of a model's parts, where more bytes are ``beside`` them during the events of a step.

    The arguments and errors are those of :func:`optimize_in_parts`. The plans are there to be reused.
    """
    with _quiet_about_opaque():
        found = find_parts(model, sample_input, options, plain)
        planned = look_for(_Planning(model, sample_input, options, found, beside))
    return planned.plan, [(part, planned._share(number)) for number, part in enumerate(planned.parts)]


def heavy_opaque(model: torch.nn.Module, graph: Graph, options: PlanOptions) -> dict[str, str]:
    """The modules that have to stay Python if opaque ones are to be planned inside, by name, and why.

    Nothing unless opaque modules that nobody asked for hold a good part of the plain peak.
    """
    asked = set(options.parsing.asked_for(model))
    nodes = zip(graph.operations[: graph.end], graph.program.operations, strict=True)
    opaque = [(op, node.target.submodule) for op, node in nodes if isinstance(node.target, OpaqueCall)]
    held = [(op.internal_bytes, name) for op, name in opaque if name is not None and name not in asked]
    if options.solving.solver != "optimal" or not held or sum(size for size, _ in held) < HEAVY * plain_peak(graph):
        return {}
    around = chain.from_iterable(list(accumulate(name.split("."), "{}.{}".format))[:-1] for _, name in held)
    names = ["", *(name for name in around if not only_holds(model.get_submodule(name)))]
    return dict.fromkeys(names, "opaque modules in it would hold much of the memory")


def in_parts_instead(
    model: torch.nn.Module, sample_input: Any, options: PlanOptions, problem: ParseError, source: Source[Any]
) -> Any:
    """The model with its parts planned, where the whole cannot be."""
    why = str(problem).partition(" Nothing smaller")[0].rstrip(".")
    try:
        return optimize_in_parts(model, sample_input, options, {"": why}, source)
    except ParseError as error:
        raise ParseError(f"{why}. {error}") from problem


def in_parts_if_better(
    model: torch.nn.Module,
    sample_input: Any,
    options: PlanOptions,
    heavy: dict[str, str],
    found: tuple[Graph, Plan] | SolveError,
) -> torch.nn.Module | None:
    """The model in parts, where that meets the goal better than one plan whose opaque modules hold much; else None."""

    def is_better(plan: PartsPlan) -> bool:
        if isinstance(found, SolveError):
            return True
        is_for_bytes = options.goal.is_bounded and options.goal.max_overhead is None
        cost = attrgetter("added_seconds" if is_for_bytes else "peak_bytes")
        return bool(cost(plan) < cost(found[1]))

    if not heavy:
        return None
    try:
        return optimize_in_parts(model, sample_input, options, heavy, is_wanted=is_better)
    except (ParseError, SolveError) as error:
        log.info("what is in opaque modules is not planned: %s", error)
        return None


@dataclass(frozen=True)
class _Planning(Wanted["_Planned"]):
    """The parts of a model, to be planned; the arguments are those of :func:`optimize_in_parts`."""

    model: torch.nn.Module
    sample_input: Any
    options: PlanOptions
    found: FoundParts
    beside: Callable[[Key], int] = lambda key: 0

    @property
    def asked(self) -> tuple[Any, ...]:
        parts = sorted([*self.found.parts, *self.alike.values()], key=lambda part: part.name)
        beside = [self.beside((kind, 0)) for kind in (REGION, REGION_BACK)]
        return "parts", [(part.name, structure_of(part.graph)) for part in parts], beside

    @cached_property
    def alike(self) -> dict[str, Part]:
        """Submodules that the sample left out, by name, as far as they are like a part."""
        found = {}
        for name, module in self.found.late.items():
            told = self.options.of_submodule(name, module).parsing.told
            like = next((part for part in self.found.parts if is_alike(part, module) and part.told == told), None)
            if like is not None:
                found[name] = replace(like, name=name, module=module)
        return found

    def searched(self) -> _Planned:
        """The parts with plans that are searched for."""
        kinds, solving = dict[int, Plan](), self.options.solving
        for part in self.found.parts:
            if part.like not in kinds:
                kinds[part.like] = frugal(solving, part.graph)
        plans = [replace(kinds[part.like], graph=part.graph) for part in self.found.parts]
        idle = [plan.is_plain and solving.solver != "none" for plan in plans]
        planned = _Planned(self, plans, idle, {name: kinds[part.like] for name, part in self.alike.items()})
        if solving.solver == "optimal":
            planned.choose()
        return planned

    def taken_up(self, saved: SavedPlan) -> _Planned | None:
        planned = self._restored(saved)
        return planned if planned.keeps_goal() else None

    def of_rank(self, saved: SavedPlan) -> _Planned | None:
        planned = self._restored(saved)
        return planned if planned.fits_budget else None

    def _restored(self, saved: SavedPlan) -> _Planned:
        """The parts with plans that were saved. PlanError: they are for other parts."""
        taken = _Saved(saved)
        plans = [taken.plan(part.name, part.graph) for part in self.found.parts]
        alike = {name: taken.plan(name, part.graph) for name, part in self.alike.items()}
        taken.check_all_used(self.found.late)
        idle = [taken.is_idle(part.name, part.graph) for part in self.found.parts]
        return _Planned(self, plans, idle, alike, saved.solver)

    def saved(self, found: _Planned) -> SavedPlan:
        return found.plan.as_saved()


class _Planned:
    """Parts with plans.

    Args:
        planning: the parts.
        plans: of those found.
        idle: whether they run as they are, as no plan is better.
        alike: by name, the plans of parts that the sample left out.
        solver: what made the plans.
    """

    def __init__(
        self,
        planning: _Planning,
        plans: Sequence[Plan],
        idle: Sequence[bool],
        alike: Mapping[str, Plan],
        solver: str | None = None,
    ) -> None:
        self.planning, self.options, found = planning, planning.options, planning.found
        self.solver = solver or self.options.solving.solver
        self.members: dict[Any, PlannedPart] = {}
        self.floor: tuple[int, float] | None = None
        self.idle = [part for part, is_idle in zip(found.parts, idle, strict=True) if is_idle]
        stay = [n for n, is_idle in enumerate(idle) if not is_idle]
        self.parts = [found.parts[n] for n in stay]
        if not stay:
            reasons = _listed({name: why for name, why in found.plain.items() if name})
            raise ParseError(f"Nothing in it can be planned either{reasons and f': {reasons}'}")
        self.choice: Choice = tuple(plans[n] for n in stay)
        calls = [
            (stay.index(part), again) for part, again in zip(found.calls, found.again, strict=True) if part in stay
        ]
        self.called = Joined(
            tuple(part.graph for part in self.parts),
            tuple(part for part, _ in calls),
            tuple(part.name for part in self.parts),
            usual_events(len(calls)),
            tuple(tuple(again.values()) for _, again in calls),
        )
        self.late: dict[int, int] = {}  # by number, parts that the sample left out, and the calls beside theirs
        self._add_late(alike)
        self._measure()

    def _measure(self) -> None:
        """Find out what runs outside of the parts takes, in a step with these plans."""
        self.outside = self._outside() if can_measure(device_of_model(self.planning.model)) else None
        self.step = self.called if self.outside is None else replace(self.called, events=self.outside.events)
        for number, beside in self.late.items():
            self.step = self.step.with_call(self.parts[number].name, self.parts[number].graph, beside)
        events = [replace(one, outside=one.outside + self.planning.beside(one.key)) for one in self.step.events]
        self.step = replace(self.step, events=tuple(events))

    def _outside(self) -> Outside | None:
        model = self.planning.model
        parts = self._running({})
        optimized = module_in_parts(model, parts, {})
        try:
            marks = measure(model, optimized, parts, self.planning.sample_input)
        except Exception as error:
            raise ParseError(f"In parts, a step of it fails ({type(error).__name__}: {error})") from error
        finally:
            parts.uninstall()
        return outside_of_step(marks, self.called, self.choice[: len(self.called.parts)])

    def _add_late(self, alike: Mapping[str, Plan]) -> None:
        """Add each part that the sample left out, where the order of the modules has its call."""
        step = self.called
        order = {name: n for n, (name, _) in enumerate(self.planning.model.named_modules())}
        for name, plan in alike.items():
            part = self.planning.alike[name]
            beside = [n for n, other in enumerate(step.calls) if self.parts[other].like == part.like]
            if beside:
                before = [n for n in beside if order[self.parts[step.calls[n]].name] < order[name]]
                number = len(self.parts)
                self.late[number] = (before or beside[:1])[-1]
                self.parts.append(part)
                self.choice = *self.choice, replace(plan, graph=part.graph)
                step = step.with_call(part.name, part.graph, self.late[number])

    def choose(self) -> None:
        """Choose plans for the goal.

        Raises:
            SolveError: nothing fits the budget.
        """
        goal = self.options.goal
        for _ in range(ROUNDS):
            found = self._chooser().chosen(goal)
            if found is None:
                least = self._chooser().chosen(LEAST_PEAK)
                self._take(self.step.plain if least is None else least)
                raise SolveError(self._infeasible())
            is_new, budget = self._take(found), self.budget
            over = 0 if budget is None else self.step.peak(found) - budget
            if not is_new or (over <= 0 and not self.step.runs_backward_inside):
                break
            if budget is not None and over > 0:
                goal = Goal(max(1, (goal.budget_bytes(self.step.peak(self.step.plain)) or 0) - over))

        if not self.options.goal:
            floor = self._chooser().chosen(LEAST_PEAK)
            self.floor = None if floor is None else (self.step.peak(floor), self.step.seconds(floor))

    def _chooser(self) -> Chooser:
        return Chooser(self.step, self.choice, self.options.solving)

    def _take(self, choice: Choice) -> bool:
        """Take plans, and measure a step with them unless they are those that were measured, or the plain model.

        What a backward inside the forward holds is known least of all: with such a one, the plain model is measured.
        """
        before, taken, plain = ([plan.decisions for plan in plans] for plans in (self.choice, choice, self.step.plain))
        self.choice = choice
        if taken == before or (taken == plain and not self.step.runs_backward_inside):
            return False
        self._measure()
        return True

    @property
    def budget(self) -> int | None:
        """The budget in bytes, if one was asked for."""
        return self.options.goal.budget_bytes(self.step.peak(self.step.plain))

    def _infeasible(self) -> str:
        step, budget, peak = self.step, self.budget or 0, self.step.peak(self.choice)
        floor = max(event.outside for event in step.events if event.key[0] in (REGION, REGION_BACK))
        overhead = step.seconds(self.choice) / step.part_seconds if step.part_seconds else 0.0
        plain = ", ".join(_named(self.planning.found.plain))
        return (
            f"no plan found peaks at or below {budget / MIB:.1f} MiB ({budget} bytes); the smallest peak is "
            f"{peak / MIB:.1f} MiB ({peak} bytes) at {overhead:.1%} overhead. The model is planned in parts, and what "
            f"stays plain ({plain}) takes up to {floor / MIB:.1f} MiB by itself"
        )

    @property
    def fits_budget(self) -> bool:
        """Whether plans that were taken up keep a budget in bytes, if there is one."""
        plan, budget = self.plan, self.plan.budget_bytes
        return budget is None or plan.peak_bytes <= (EXCESS if plan.is_measured else 1) * budget

    def keeps_goal(self) -> bool:
        """Whether plans that were taken up keep the goal; it is told if not."""
        goal, plan = self.options.goal, self.plan
        share = tolerant(goal, self.parts[0].graph).max_overhead
        if self.fits_budget and (share is None or plan.added_seconds <= share * plan.part_seconds):
            return True
        tell_broken(goal, plan.peak_bytes, plan.added_seconds / plan.part_seconds)
        return False

    @cached_property
    def plan(self) -> PartsPlan:
        """What can be looked at."""
        step, outside = self.step, self.outside
        plain_peak, saved_bytes = step.peak(step.plain), self._saved_outside()
        plain = self.planning.found.plain.items()
        return PartsPlan(
            parts=tuple(self._part(number) for number in range(len(self.parts))),
            plain=tuple(PlainModule(name, why, saved_bytes[name]) for name, why in plain),
            peak_bytes=step.peak(self.choice),
            plain_peak_bytes=plain_peak,
            outside_bytes=outside.saved_bytes if outside else saved_bytes.total(),
            part_seconds=step.part_seconds,
            recomputed_seconds=step.seconds(self.choice),
            outside_seconds=step.part_seconds * outside.time_share if outside else 0.0,
            budget_bytes=self.budget,
            is_measured=outside is not None,
            solver=self.solver,
            max_overhead=self.options.goal.max_overhead,
            floor=self.floor,
            idle=tuple(saved_decisions(part.graph, plain_plan(part.graph).decisions, part.name) for part in self.idle),
        )

    def _saved_outside(self) -> Counter[str]:
        """The bytes that autograd saves in each plain module; idle parts belong to the one around them."""
        found = self.planning.found
        saved = Counter(found.saved_bytes)
        for call in found.calls:
            part = found.parts[call]
            if part in self.idle:
                around = part.name
                while around and around not in found.plain:
                    around = around.rpartition(".")[0]
                saved[around] += PartCost.of(part.graph, plain_plan(part.graph)).saved_bytes
        return saved

    def _part(self, number: int) -> PartPlan:
        part, is_late, plan = self.parts[number], number in self.late, self.choice[number]
        targets = [] if is_late else [node.target for node in part.graph.program.operations]
        opaque = dict.fromkeys(f"{part.name}.{target.module}" for target in targets if isinstance(target, OpaqueCall))
        calls = self.step.calls.count(number)
        return PartPlan(part.name, calls, plan, PartCost.of(part.graph, plan), tuple(opaque), is_late)

    def module(self) -> torch.nn.Module:
        """The model with its parts run by their plans."""
        found = self.planning.found
        parts = self._running(found.late, self.options.goal.is_in_bytes)
        names = {id(part.module): part.name for part in self.parts}
        code = {names[key]: member.runner.generated.source for key, member in parts.members.items()}
        graphs: dict[str, Graph] = {}  # by name, where one is called with several kinds of inputs with numbers
        seen = Counter[str]()
        for part in self.parts[: len(self.parts) - len(self.late)]:
            seen[part.name] += 1
            graphs[part.name if seen[part.name] == 1 else f"{part.name} ({seen[part.name]})"] = part.graph
        return module_in_parts(self.planning.model, parts, {"plan": self.plan, "graph": graphs, "code": code})

    def _running(self, late: Mapping[str, torch.nn.Module], with_plain: bool = True) -> Parts:
        """What runs the parts, of which the plain ones may need plans for larger inputs."""
        numbers: dict[torch.nn.Module, list[int]] = {}
        for number in range(len(self.parts) - len(self.late)):
            numbers.setdefault(self.parts[number].module, []).append(number)
        members = [self._planned_part(of_module) for of_module in numbers.values()]
        examples = [(self.parts[number], self._share(number)) for number in self.late]
        planner = LatePlanner(self.options, examples)
        return Parts(
            [member for member in members if with_plain or not member.runner.is_plain],
            late,
            planner,
        )

    def _planned_part(self, numbers: Sequence[int]) -> PlannedPart:
        """What runs a module, of which the numbers are those of its parts: one for each kind of calls."""
        key = numbers[0], tuple(self.choice[number].decisions for number in numbers)
        if key not in self.members:
            part = self.parts[numbers[0]]
            plans = [(self.parts[number].graph, self.choice[number]) for number in numbers]
            self.members[key] = planned_part_of(
                part.module, plans, self._share(numbers[0]).planner(part.name, part.module)
            )
        return self.members[key]

    def _share(self, number: int) -> Share:
        graph, plan = self.parts[number].graph, self.choice[number]
        return Share(self.options, plan, PartCost.of(graph, plan))


class _Saved:
    """What was saved for parts, each for one kind of calls.

    Raises:
        PlanError: it is a plan for a whole model.
    """

    def __init__(self, saved: SavedPlan) -> None:
        if saved.kind != PARTS:
            raise PlanError("the plan is for a model that is planned as a whole, but this one is planned in parts")
        self.saved = saved
        self.used: set[str] = set()

    def is_idle(self, name: str, graph: Graph) -> bool:
        """Whether no plan of a part was better than the plain one."""
        return any((one.name, one.fingerprint) == (name, Fingerprint.of(graph)) for one in self.saved.idle)

    def plan(self, name: str, graph: Graph) -> Plan:
        """That of a part.

        Where the plan was made, the forward may have left other parts out: one of an equal part does as well.

        Raises:
            PlanError: nothing was saved for such a part; the message says in what it differs, or that it is new.
        """
        if self.is_idle(name, graph):
            return plain_plan(graph)
        named = [one for one in self.saved.plans if one.name == name]
        for one in (*named, *self.saved.plans):
            if one.fingerprint == Fingerprint.of(graph):
                self.used.add(one.name)
                return restored(graph, one, self.saved)
        for one in (*named, *self.saved.idle):
            if one.name == name:
                restored(graph, one, self.saved)  # which says in what it differs
        raise PlanError(f"the plan has nothing for part {name}; it was saved for another model, or other parts of it")

    def check_all_used(self, late: Collection[str]) -> None:
        """Raise PlanError if a part is no more; one that the forward has left out, by ``late``, may be planned yet."""
        for one in self.saved.plans:
            if one.name not in self.used and one.name not in late:
                raise PlanError(f"the plan is for a model with a part {one.name}, which is none here")


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
        log.warning("no plan of its parts needs less memory than the plain model: %s", plan.summary)
        return
    modules = {f"{one.name or 'the model itself'} {one.saved_bytes / MIB:.1f} MiB": one.why for one in plan.plain}
    share = f"{plan.outside_seconds / plan.step_seconds:.0%} of the time" if plan.is_measured else "unmeasured time"
    log.warning(
        "ogc plans the model in %d parts: %s. Plain stay, with %.1f MiB and %s: %s",
        *(len(plan.parts), plan.summary, plan.outside_bytes / MIB, share, _listed(modules)),
    )


@contextmanager
def _quiet_about_opaque() -> Iterator[None]:
    """What opaque modules there are in parts is said by the plan, not part by part."""
    logger = logging.getLogger("ogc.parser.opaque")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
