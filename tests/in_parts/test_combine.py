"""The plans of parts, combined: against every combination there is."""

import random
from dataclasses import replace
from itertools import product

import pytest

from ogc.in_parts.choice.combine import Problem, Stop, fastest, least_peak, within
from ogc.plan import PartCost


def some_problem(seed: int, repeated: bool = False) -> Problem:
    rng = random.Random(seed)

    def options() -> tuple[PartCost, ...]:
        return tuple(
            PartCost(rng.randrange(60), rng.randrange(90), rng.randrange(90), rng.choice([0.0, 1.0, 2.0, 5.0]), 0)
            for _ in range(rng.randrange(1, 5))
        )

    count = rng.randrange(1, 6)
    order = [*range(count), *([rng.randrange(count)] if repeated else [])]
    stops = tuple(Stop(part, rng.randrange(20), rng.randrange(20), rng.randrange(150)) for part in order)
    return Problem(stops, tuple(options() for _ in range(count)), rng.randrange(200))


def with_backwards_inside(problem: Problem, seed: int) -> Problem:
    """The same, where some calls end inside the forward, hold more, or are run backward twice."""
    rng = random.Random(seed)
    stops, open_calls = [], []
    for number, stop in enumerate(problem.stops):
        open_calls.append(number)
        ended = [call for call in open_calls if rng.random() < 0.3]
        open_calls = [call for call in open_calls if call not in ended]
        again = tuple(rng.randrange(60) for _ in range(rng.choice([0, 0, 1, 2])))
        inside = tuple((call, rng.randrange(20)) for call in {*ended, *open_calls} if rng.random() < 0.3)
        backwards = rng.choice([1, 1, 2])
        stops.append(replace(stop, again=again, backwards=backwards, inside=inside, ended=tuple(ended)))
    options = [[replace(c, beyond_bytes=rng.randint(0, c.kept_bytes)) for c in costs] for costs in problem.options]
    return replace(problem, stops=tuple(stops), options=tuple(map(tuple, options)))


def every_choice(problem: Problem) -> list[tuple[int, ...]]:
    return list(product(*(range(len(options)) for options in problem.options)))


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_the_least_peak_is_that_of_all_choices(seed, repeated):
    problem = some_problem(seed, repeated)
    best = min(every_choice(problem), key=lambda c: problem.peak(c))
    found = least_peak(problem)
    assert problem.peak(found) == problem.peak(best) or (repeated and problem.peak(found) <= 1.1 * problem.peak(best))


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_the_fastest_choice_within_a_budget_is_that_of_all_choices(seed, repeated):
    problem = some_problem(seed, repeated)
    for budget in sorted({problem.peak(choice) for choice in every_choice(problem)})[:6]:
        found = fastest(problem, budget)
        best = min(problem.seconds(c) for c in every_choice(problem) if problem.peak(c) <= budget)
        if not repeated:
            assert found is not None
        if found is not None:
            assert problem.peak(found) <= budget
            assert problem.seconds(found) == best or repeated
    assert fastest(problem, min(map(problem.peak, every_choice(problem))) - 1) is None


def test_almost_every_part_that_is_called_twice_gets_its_best_plan():
    same = 0
    for seed in range(100):
        problem = some_problem(seed, repeated=True)
        budget = sorted(map(problem.peak, every_choice(problem)))[len(every_choice(problem)) // 2]
        found = fastest(problem, budget)
        best = min(problem.seconds(c) for c in every_choice(problem) if problem.peak(c) <= budget)
        same += found is not None and problem.seconds(found) == best
    assert same >= 95


@pytest.mark.parametrize("seed", range(40))
def test_the_least_peak_within_a_time_is_that_of_all_choices(seed):
    problem = some_problem(seed)
    for seconds in (0.0, 2.0, 6.0, 100.0):
        allowed = [c for c in every_choice(problem) if problem.seconds(c) <= seconds]
        found = within(problem, seconds)
        if allowed:
            assert problem.seconds(found) <= seconds
            assert problem.peak(found) == min(map(problem.peak, allowed))
        else:
            assert problem.seconds(found) == min(map(problem.seconds, every_choice(problem)))


def peak_event_by_event(problem: Problem, choice: tuple[int, ...]) -> int:
    """The peak from a list of what each call holds."""
    held: dict[int, int] = {}
    sums = [problem.before]
    for number, stop in enumerate(problem.stops):
        cost, plain = problem.options[stop.part][choice[stop.part]], problem.options[stop.part][-1]
        before = sum(held.values())
        sums += [before + stop.forward + cost.forward_bytes, before + stop.backward + cost.backward_bytes]
        held[number] = cost.kept_bytes
        for again in stop.again:
            held[number] += max(0, min(again, plain.kept_bytes - (cost.kept_bytes - cost.beyond_bytes)))
        sums.append(sum(held.values()) + stop.after)
        for call, others in stop.inside:
            backward = problem.options[problem.stops[call].part][choice[problem.stops[call].part]].backward_bytes
            sums.append(sum(kept for number, kept in held.items() if number != call) + others + backward)
        for call in stop.ended:
            del held[call]
    return max(sums)


@pytest.mark.parametrize("seed", range(60))
def test_backwards_inside_the_forward_are_counted(seed):
    problem = with_backwards_inside(some_problem(seed), seed)
    choices = every_choice(problem)
    assert [problem.peak(choice) for choice in choices] == [peak_event_by_event(problem, choice) for choice in choices]
    best = min(map(problem.peak, choices))
    assert best <= problem.peak(least_peak(problem)) <= 1.1 * best
    for budget in sorted(set(map(problem.peak, choices)))[:6]:
        found = fastest(problem, budget)
        seconds = [problem.seconds(choice) for choice in choices if problem.peak(choice) <= budget]
        if found is not None:
            assert problem.peak(found) <= budget
            assert problem.seconds(found) >= min(seconds)
    assert problem.peak(fastest(problem, 10**6)) <= 10**6


def test_with_backwards_inside_almost_every_choice_is_the_best():
    same = 0
    for seed in range(100):
        problem = with_backwards_inside(some_problem(seed), seed)
        budget = sorted(map(problem.peak, every_choice(problem)))[len(every_choice(problem)) // 2]
        found = fastest(problem, budget)
        best = min(problem.seconds(c) for c in every_choice(problem) if problem.peak(c) <= budget)
        same += found is not None and problem.seconds(found) == best
    assert same >= 95


def test_large_sums_lose_little_by_rounding():
    options = tuple(PartCost(k * 10**9 + 7, 5 * 10**9, 6 * 10**9, (4 - k) * 1.0, 0) for k in range(5))
    problem = Problem(tuple(Stop(part) for part in range(40)), (options,) * 40)
    least = least_peak(problem)
    assert problem.seconds(least) < 160  # the last ones may keep all
    assert problem.peak(least) == problem.peak((0,) * 40)
    found = fastest(problem, 100 * 10**9)
    assert problem.peak(found) <= 100 * 10**9
    assert problem.seconds(found) <= 64 + 2  # nothing but rounding is lost: 96 of 160 units of a second are saved


def test_a_call_that_needs_much_leaves_little_to_those_before_it():
    small = (PartCost(0, 10, 50, 1.0, 0), PartCost(40, 50, 50, 0.0, 0))
    large = (PartCost(0, 100, 100, 0.0, 0),)
    early = Problem((Stop(0), Stop(1)), (small, large))
    late = Problem((Stop(1), Stop(0)), (small, large))
    assert fastest(early, 100) == (0, 0)
    assert fastest(late, 100) == (1, 0) or fastest(late, 100)[0] == 1
