"""The graph of all parts: its plans against those of the parts, its peaks against a list of what each call holds."""

import random
from itertools import product

import pytest
from helpers import random_graph, random_plans

import ogc
from ogc.in_parts.joined import BACK, CALL, REGION, REGION_BACK, Chooser, Event, Joined, PartCost, usual_events
from ogc.in_parts.plan import frugal
from ogc.solver import FAIR, FAIR_OVERHEAD, LEAST_PEAK, Goal, SolveOptions

SEEDS = range(40)


def some_step(seed, calls=None, most=5):
    """Parts called in some order, with any bytes beside them."""
    rng = random.Random(seed)
    parts = tuple(random_graph(100 * seed + n, most) for n in range(rng.randrange(1, 4)))
    order = (*range(len(parts)), *(rng.randrange(len(parts)) for _ in range(calls - len(parts) if calls else 0)))
    events = tuple(
        Event(event.key, 0 if event.key[0] == CALL else rng.randrange(60)) for event in usual_events(len(order))
    )
    return Joined(parts, order, ("",) * len(parts), events, ((),) * len(order))


def some_choices(step, seed, count=3):
    """Plans of each part, the plain one among them; all their combinations."""
    rng = random.Random(seed)
    plans = [[ogc.solve(part, solver="none"), *random_plans(part, rng, count)] for part in step.parts]
    return list(product(*plans))


def chooser_of(step, effort=0):
    solving = SolveOptions(effort=effort)
    return Chooser(step, tuple(frugal(solving, part) for part in step.parts), solving)


def with_backwards_inside(step, seed):
    """The same, where some calls run backward inside the forward, end there, or are held by what is made of them."""
    rng = random.Random(seed)
    events, open_calls = [], []
    for event in step.events:
        kind, n = event.key
        if kind == BACK and n not in open_calls:
            continue
        events.append(event)
        if kind == CALL:
            open_calls.append(n)
        elif kind == REGION:
            for call in [c for c in reversed(open_calls) if rng.random() < 0.4]:
                ends = rng.random() < 0.5
                events += [Event((BACK, call), rng.randrange(60), ends, 1), Event((REGION, n), rng.randrange(60))]
                open_calls = [c for c in open_calls if c != call or not ends]
    again = tuple(tuple(rng.randrange(40) for _ in range(rng.choice([0, 0, 1, 2]))) for _ in step.calls)
    return Joined(step.parts, step.calls, step.names, tuple(events), again)


def peaks_one_by_one(step, choice):
    """For each forward and backward of a call, its peak from a list of what calls hold."""
    costs = [PartCost.of(*one) for one in zip(step.parts, choice, strict=True)]
    held, found = {}, {}
    for number, event in enumerate(step.events):
        kind, n = event.key
        if kind == CALL:
            cost, (kept, beyond) = costs[step.calls[n]], step.saved(choice)[n]
            assert kept == cost.saved_bytes
            missing = max(0, step.saved(step.plain)[n][0] - (kept - beyond))
            found[number] = sum(held.values()) + cost.forward_bytes
            held[n] = kept + sum(min(again, missing) for again in step.saved_again[n])
        elif kind == BACK:
            others = sum(size for call, size in held.items() if call != n)
            found[number] = others + costs[step.calls[n]].backward_bytes
            if event.ends:
                del held[n]
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_the_simulator_and_the_events_give_the_same_peak(seed):
    step = some_step(seed)
    graph = step.graph({event.key: event.outside for event in step.events})
    for choice in some_choices(step, seed)[1:]:
        if not any(plan.is_plain for plan in choice):
            assert step.peak(choice) == ogc.simulate(graph, step.decisions(choice)).peak_bytes


@pytest.mark.parametrize("seed", SEEDS)
def test_what_calls_hold_adds_up(seed):
    step = with_backwards_inside(some_step(seed, calls=4), seed)
    for choice in some_choices(step, seed)[:20]:
        sizes = step.sizes(choice)
        assert {n: sizes[n][1] for n in peaks_one_by_one(step, choice)} == peaks_one_by_one(step, choice)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_of_the_graph_is_one_of_each_call_that_takes_no_more(seed):
    step = some_step(seed)
    graph = step.graph({event.key: event.outside for event in step.events})
    for plan in ogc.frontier(graph).plans:
        if plan.decisions.policies:  # for other calls too, which no plan of one call can say
            continue
        choice = tuple(step.plan_of_call(n, plan.decisions, "by hand") for n in range(len(step.calls)))
        assert step.peak(choice) <= plan.peak_bytes
    for choice in some_choices(step, seed)[:10]:
        for n, plan in enumerate(choice):
            again = step.plan_of_call(n, step.decisions(choice), "by hand")
            assert again.decisions == plan.decisions or (again.is_plain and not plan.recomputed_seconds)


def test_no_segment_has_operations_of_two_calls():
    step = some_step(3, calls=3)
    graph = step.graph({})
    with pytest.raises(ogc.PlanError, match="must not run twice"):
        ogc.make_plan(graph, [ogc.recomputed(0, len(graph))])


@pytest.mark.full
def test_effort_finds_more():
    seconds, peaks = [0.0, 0.0], [0, 0]
    for seed in SEEDS[:20]:
        step = some_step(seed, calls=4, most=10)
        budget = (step.peak(step.plain) + step.peak(chooser_of(step).chosen(LEAST_PEAK))) // 2
        for effort in (0, 1):
            fast, small = (chooser_of(step, effort).chosen(goal) for goal in (Goal(budget), Goal(max_overhead=0.1)))
            assert step.peak(fast) <= budget and step.seconds(small) <= 0.1 * step.part_seconds * (1 + 1e-9)
            seconds[effort] += step.seconds(fast)
            peaks[effort] += step.peak(small)
    assert seconds[1] < seconds[0] and peaks[1] < peaks[0], (seconds, peaks)


@pytest.mark.parametrize("calls", [None, 4])
@pytest.mark.full
def test_almost_every_choice_is_as_good_as_all_others(calls):
    worse = dict.fromkeys(["peak", "time", "both"], 0)
    for seed in SEEDS:
        step = some_step(seed, calls)
        known = some_choices(step, seed)
        peaks = sorted(map(step.peak, known))
        least, chooser = min(peaks), chooser_of(step)
        worse["peak"] += step.peak(chooser.chosen(LEAST_PEAK)) > 1.005 * least
        budget, seconds = peaks[len(peaks) // 2], sum(map(step.seconds, known)) / len(known)
        found = chooser.chosen(Goal(max(1, budget)))
        fits = [step.seconds(choice) for choice in known if step.peak(choice) <= budget]
        assert found is None or step.peak(found) <= budget
        worse["time"] += found is None or step.seconds(found) > min(fits)
        share = seconds / step.part_seconds
        found = chooser.chosen(Goal(max_overhead=share))
        assert step.seconds(found) <= share * step.part_seconds * (1 + 1e-9)
        best = min(step.peak(choice) for choice in known if step.seconds(choice) <= seconds)
        worse["both"] += step.peak(found) > 1.005 * best
    most = len(SEEDS) // (5 if calls else 20)  # calls of one part share a plan, which is looked for less closely
    assert all(count <= most for count in worse.values()), worse


@pytest.mark.parametrize("seed", SEEDS)
def test_without_a_goal_no_more_time_is_paid_than_is_fair(seed):
    step = some_step(seed, calls=3)
    found = chooser_of(step).chosen(FAIR)
    assert step.seconds(found) <= FAIR_OVERHEAD * step.part_seconds * (1 + 1e-9)
    assert step.peak(found) <= step.peak(step.plain)


@pytest.mark.parametrize("seed", SEEDS)
def test_with_backwards_inside_a_budget_is_kept(seed):
    step = with_backwards_inside(some_step(seed, calls=4), seed)
    chooser, known = chooser_of(step), some_choices(step, seed)[:30]
    assert step.peak(chooser.chosen(LEAST_PEAK)) <= step.peak(step.plain)
    for budget in sorted(map(step.peak, known))[::10]:
        found = chooser.chosen(Goal(max(1, budget)))
        assert found is None or step.peak(found) <= budget
    assert chooser.chosen(Goal(10**6)) == step.plain


def test_a_call_more_is_like_the_one_beside_it():
    step = some_step(5, calls=3)
    graph = step.parts[step.calls[1]]
    more = step.with_call("late", graph, 1)
    assert [event.key for event in more.events] == [event.key for event in usual_events(4)]
    assert more.calls == (*step.calls[:2], len(step.parts), *step.calls[2:])
    assert more.peak((*step.plain, ogc.solve(graph, solver="none"))) >= step.peak(step.plain)
    assert {event.key[0] for event in more.events} == {CALL, BACK, REGION, REGION_BACK}
