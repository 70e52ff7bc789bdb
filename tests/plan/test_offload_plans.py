"""Offloaded values: what the simulator counts of them, held against plans that save them and against clocks by hand."""

import random
from dataclasses import replace

import pytest
from helpers import chain, random_decisions, random_graph

import ogc
from ogc.plan import fast, trace
from ogc.plan.decisions import Decisions, Offload, Policy
from ogc.plan.fast import Replay
from ogc.plan.queues import Queues
from ogc.plan.schedule import FORWARD, Schedule

HOST = ogc.Host(out=4.0, back=2.0, each=0.125)


def offloading(graph, rng):
    """A random plan that offloads some values at random moments; None if there are none."""
    decisions = random_decisions(graph, rng)
    chosen = [v for v in sorted(graph.offloadable) if rng.random() < 0.5]
    moments = (
        Offload(v, rng.randrange(graph.last_uses[v] + 1, graph.end + 1), rng.randrange(len(graph))) for v in chosen
    )
    return replace(decisions, offloaded=tuple(moments)) if chosen else None


def as_saved(decisions):
    """The plan that saves what another one offloads."""
    saved = {one.value: Policy.SAVED for one in decisions.offloaded}
    return replace(decisions, policies=tuple(sorted({**dict(decisions.policies), **saved}.items())), offloaded=())


def random_offloads(count):
    """Random graphs and plans that offload and can be carried out."""
    found, seed = 0, 0
    while found < count:
        seed += 1
        graph, rng = replace(random_graph(seed, 14), host=HOST), random.Random(seed)
        if (decisions := offloading(graph, rng)) is None:
            continue
        try:
            ogc.simulate(graph, decisions)
        except ogc.PlanError:
            continue
        found += 1
        yield graph, decisions


def steps_of_events(graph, decisions):
    """For each event of the timeline, the number of its step."""
    steps, found, number = Schedule(graph, decisions).steps, [], -1
    for event in ogc.simulate(graph, decisions).timeline:
        now = steps[number] if number >= 0 else None
        key = ("backward" if now.is_backward else "recompute" if now.run else "forward", *now[:2]) if now else None
        if key != event[:3]:
            number += 1
        found.append(number)
    assert number == len(steps) - 1
    return found


def test_an_offloaded_value_counts_but_while_it_is_away():
    away = 0
    for graph, decisions in random_offloads(150):
        trips = Schedule(graph, decisions).trips
        saved, found = ogc.simulate(graph, as_saved(decisions)), ogc.simulate(graph, decisions)
        for step, one, other in zip(steps_of_events(graph, decisions), saved.timeline, found.timeline, strict=True):
            absent = sum(graph.values[v].bytes for v, trip in trips.items() if trip.gone <= step < trip.back)
            away += absent
            assert other == one._replace(bytes=one.bytes - absent)
        assert found.recomputed_seconds == saved.recomputed_seconds
        assert [moment.event for moment in trace(graph, decisions)] == list(found.timeline)
    assert away


@pytest.mark.parametrize("is_compiled", [True, False])
def test_searches_weigh_offloads_as_the_simulator_does(is_compiled, monkeypatch):
    if not is_compiled:
        monkeypatch.setattr(fast, "library", lambda: None)
    for graph, decisions in random_offloads(60):
        cost, expected = Replay(graph)(decisions), ogc.simulate(graph, decisions)
        assert cost.peak_bytes == expected.peak_bytes
        assert cost.added_seconds == pytest.approx(expected.added_seconds)


def by_hand(graph, decisions):
    """The clock of a plan, event by event: what copies are under way is asked at every moment."""
    schedule, host = Schedule(graph, decisions), graph.host
    now, waited, queues, left = 0.0, 0.0, {True: [], False: []}, {}
    trips, steps = schedule.trips, schedule.steps

    def pass_time(until):
        """Run both queues up to a time."""
        nonlocal now
        for is_out, queue in queues.items():
            clock = now
            while queue and clock < until:
                take = min(until - clock, queue[0][2])
                clock += take
                queue[0][2] -= take
                if queue[0][2] <= 1e-12:
                    left[queue.pop(0)[0], is_out] = clock
        now = until

    def wait_for(v, is_out):
        nonlocal waited
        queue = queues[is_out]
        names = [one[0] for one in queue]
        if v in names:
            ahead = sum(one[2] for one in queue[: names.index(v) + 1])
            waited += ahead
            pass_time(now + ahead)

    for number, step in enumerate(steps):
        op = graph.operations[step.operation]
        for v in trips:
            if trips[v].gone == number:
                wait_for(v, True)
        due = sorted((v for v in trips if trips[v].back == number), key=lambda v: (trips[v].needed, v))
        for v in due:
            queues[False].append([v, False, graph.values[v].bytes / host.back])
        for v in trips:
            if trips[v].needed == number:
                wait_for(v, False)
        seconds = op.backward_seconds if step.is_backward else op.forward_seconds
        if step.run and not step.is_backward:
            seconds = schedule.graph.repeat_seconds[step.operation]
        pass_time(now + seconds)
        for v in trips:
            if trips[v].made == number:
                queues[True].append([v, True, graph.values[v].bytes / host.out])
    return waited


def test_waits_are_those_of_two_queues_run_by_hand():
    found = [(by_hand(g, d), ogc.simulate(g, d).waiting_seconds) for g, d in random_offloads(150)]
    assert all(mine == pytest.approx(theirs, abs=1e-6) for mine, theirs in found)
    assert sum(mine > 0 for mine, _ in found) > 50


def test_a_chain_by_hand():
    """Four values of 8 bytes; operations take 1 s forward, 2 s backward. Out takes 2 s, back 4 s."""
    graph = replace(chain([8, 8, 8, 8]), host=HOST)
    plan = ogc.make_plan(graph, [ogc.saved(0, 4)], offloaded=[Offload(0, 3, 2), Offload(1, 4, 2)])
    queues = Queues.of(Schedule(graph, plan.decisions))
    assert [(c.value, c.is_out, c.start, c.stop) for c in queues.copies] == [
        (0, True, 1.0, 3.0),
        (1, True, 3.0, 5.0),  # made at 2 s, behind the first in the queue
        (1, False, 7.0, 11.0),  # before the backward of operation 2, which needs it
        (0, False, 11.0, 15.0),
    ]
    # 1 s before the backward, 4 s for value 1, and 2 s more than the backward of operation 2 for value 0
    assert queues.waiting == plan.waiting_seconds == 1 + 4 + 2
    assert plan.added_seconds == plan.waiting_seconds + 2 * HOST.each
    assert [event.bytes for event in ogc.simulate(graph, plan).timeline] == [8, 16, 24, 24, 16, 24, 16, 8]


def test_a_value_that_no_backward_needs_stays_what_it_is():
    graph = replace(chain([8, 8, 8, 8]), host=HOST)
    whole = ogc.make_plan(graph, [ogc.recomputed(0, 3), ogc.saved(3, 4)])
    assert Schedule(graph, replace(whole.decisions, offloaded=(Offload(2, 4, 3),))).trips.keys() == {2}
    lost = replace(graph, operations=tuple(replace(op, saves=()) for op in graph.operations))
    assert not Schedule(lost, Decisions((ogc.saved(0, 4),), offloaded=(Offload(0, 3, 2),))).trips


def test_what_a_recomputation_starts_from_is_there_when_it_begins():
    graph = replace(chain([8, 8, 8, 8, 8]), host=HOST)
    decisions = Decisions((ogc.saved(0, 1), ogc.recomputed(1, 4), ogc.saved(4, 5)), offloaded=(Offload(0, 5, 0),))
    schedule = Schedule(graph, decisions)
    trip = schedule.trips[0]
    assert schedule.steps[trip.needed].run == 1 and schedule.steps[trip.needed - 1].run == FORWARD
    assert trip.back == trip.needed


@pytest.mark.parametrize(
    "offloaded, words",
    [
        ([Offload(9, 3, 2)], "offloads value 9, which the graph lacks"),
        ([Offload(1, 4, 2), Offload(1, 4, 3)], "or which follows value 1"),
        ([Offload(3, 4, 2)], "value v3 cannot be offloaded: its caller or an opaque module holds it"),
        ([Offload(2, 4, 2)], "value v2 cannot be offloaded"),
        ([Offload(0, 1, 2)], "value v0 cannot be gone before operation 1: the forward uses it up to operation 1"),
        ([Offload(0, 5, 2)], "and ends with operation 3"),
        ([Offload(0, 3, 4)], "to be back before operation 4, which the graph lacks"),
    ],
)
def test_what_cannot_be_offloaded_is_an_error_that_says_why(offloaded, words):
    graph = replace(chain([8, 8, 8, 8]), host=ogc.Host(1.0, 1.0, frozenset({0, 1, 3})))
    with pytest.raises(ogc.PlanError, match=words):
        ogc.make_plan(graph, [ogc.saved(0, 4)], offloaded=offloaded)


def test_an_offload_needs_a_host_and_moments():
    graph = chain([8, 8, 8, 8])
    with pytest.raises(ogc.PlanError, match="no host to offload them to"):
        ogc.make_plan(graph, [ogc.saved(0, 4)], offloaded=[Offload(0, 3, 2)])
    with pytest.raises(ogc.PlanError, match="offloaded at no moment"):
        ogc.make_plan(graph, Decisions((ogc.saved(0, 4),), ((0, Policy.OFFLOADED),)))
    with pytest.raises(ogc.PlanError, match="offloaded at no moment"):
        ogc.make_plan(graph, [replace(ogc.recomputed(0, 4), policies=((0, Policy.OFFLOADED),))])
    with pytest.raises(ogc.InputError, match="bandwidth must be bytes per second"):
        ogc.Host(0.0, 1.0)


def test_bounds_are_of_plans_that_offload_nothing():
    graph = replace(chain([8, 8, 8, 8]), host=HOST)
    plan = ogc.make_plan(graph, [ogc.saved(0, 4)], offloaded=[Offload(0, 3, 2)])
    assert plan.peak_bytes >= plan.lower_bound
    with pytest.raises(ogc.PlanError, match="there is no bound for those"):
        _ = plan.gap


def test_a_plan_that_offloads_is_saved_and_loaded(tmp_path):
    graph = replace(chain([8, 8, 8, 8]), host=HOST)
    plan = ogc.make_plan(graph, [ogc.saved(0, 4)], offloaded=[Offload(0, 3, 2)])
    plan.save(tmp_path / "plan.json")
    assert ogc.load_plan(tmp_path / "plan.json", graph) == plan
    with pytest.raises(ogc.PlanError, match="no host"):
        ogc.load_plan(tmp_path / "plan.json", replace(graph, host=None))


def test_a_plan_tells_what_it_offloads_and_draws_the_queues(tmp_path):
    graph = replace(chain([8 * 2**20] * 4), host=ogc.Host(4 * 2**20, 2 * 2**20))
    plan = ogc.make_plan(graph, [ogc.saved(0, 4)], offloaded=[Offload(0, 3, 2)])
    lines = str(plan).splitlines()
    assert [line.split() for line in lines if line.startswith("v0")] == [["v0", "8.00", "3", "2", "1"]]
    assert "operations wait for copies +16.7% time" in lines
    figure = plan.plot(tmp_path / "plan.png")
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {"copies out", "copies back"} <= {*texts}
