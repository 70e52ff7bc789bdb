"""A plan is the same after it was written and read; what is no plan, or another graph's, is told."""

import json
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from helpers import chain, random_decisions, random_graph, random_plans
from models import Attention, Dense, Residual, images
from torch import nn

import ogc
from ogc.plan import Fingerprint, SavedPlan, plan_from_text, saving, text_of

TOKENS = torch.arange(24).view(4, 6) % 11


def graph_of(kind):
    if kind == "transformer":
        return ogc.parse(Attention(), TOKENS)
    return ogc.parse({"residual": Residual, "dense": Dense}[kind](), images())


def depth(plan):
    return max(segment.depth for segment in plan.segments)


def test_files_with_the_earlier_word_for_opaque_modules_fit():
    graph = chain([10] * 4)
    now, then, other = (
        replace(graph, operations=(replace(graph.operations[0], target=f"{word} Block"), *graph.operations[1:]))
        for word in ("opaque", "leaf", "aten.")
    )
    assert Fingerprint.of(now) == Fingerprint.of(then) != Fingerprint.of(other)


@pytest.mark.parametrize("kind", ["residual", "dense", "transformer"])
def test_random_plans_come_back_whole(kind):
    graph = graph_of(kind)
    plans = random_plans(graph, random.Random(1), 30, random_decisions)
    for plan in plans:
        again = plan_from_text(text_of(plan), graph)
        assert again == plan and again.graph is graph
    assert max(map(depth, plans)) > 2
    assert any(plan.decisions.policies for plan in plans)
    assert {policy for plan in plans for segment in plan.segments for _, policy in segment.policies} == {
        *(ogc.Policy.SAVED, ogc.Policy.RECOMPUTED)
    }


def test_low_memory_operators_come_back():
    graph = graph_of("dense")
    plan = ogc.make_plan(graph, [ogc.recomputed(0, len(graph))], low_memory=graph.low_memory)
    assert plan.low_memory and plan_from_text(text_of(plan), graph) == plan


@pytest.mark.full
@pytest.mark.parametrize(
    "goal", [{"memory_budget": "least"}, {"memory_budget": 0.7}, {"max_overhead": 0.6}, {"memory_budget": 1.0}]
)
def test_plans_of_the_solver_are_loaded_for_the_same_graph_parsed_again(tmp_path, goal):
    plan = ogc.solve(graph_of("residual"), **goal)
    plan.save(tmp_path / "plan.json")
    again = ogc.load_plan(tmp_path / "plan.json", graph_of("residual"))
    weighed = replace(again, recomputed_seconds=pytest.approx(plan.recomputed_seconds))  # rounded otherwise
    assert weighed == plan and again.max_overhead == goal.get("max_overhead")
    assert again.is_plain == (goal == {"memory_budget": 1.0})


@pytest.mark.parametrize("seed", range(20))
def test_graphs_by_hand(seed):
    graph = random_graph(seed)
    plan = ogc.solve(graph, memory_budget="least")
    assert plan_from_text(text_of(plan), graph) == plan


def test_it_is_weighed_on_the_graph_at_hand():
    graph = graph_of("residual")
    slow = replace(graph, operations=tuple(replace(op, forward_seconds=1.0) for op in graph.operations))
    plan = ogc.solve(graph, memory_budget="least")
    again = plan_from_text(text_of(plan), slow)
    assert again == ogc.make_plan(slow, plan.decisions, plan.solver)
    assert again.recomputed_seconds >= 1.0 > plan.recomputed_seconds


FINGERPRINT = """
import sys
sys.path += ["tests"]
import torch, ogc
from models import Residual, images
from ogc.plan import Fingerprint
torch.manual_seed(5)
print(Fingerprint.of(ogc.parse(Residual(), images(), profile="time")))
"""


@pytest.mark.full
def test_the_fingerprint_is_that_of_other_processes_and_of_measured_times():
    here = str(Fingerprint.of(graph_of("residual")))
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", FINGERPRINT],
            capture_output=True,
            text=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
        )
        assert done.stdout.strip() == here, done.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "given", "difference"),
    [
        (Residual(), images(8), r"other sizes of values \(\d+ bytes in all, not \d+\)"),
        (Residual(inplace=False), images(), "other operations"),
        (Dense(), images(), r"other operations \(\d+, not \d+\)"),
        (nn.ModuleDict({"inner": Residual()}), images(), "other modules around the operations"),
    ],
)
def test_another_graph_is_told_by_its_difference(tmp_path, model, given, difference):
    if isinstance(model, nn.ModuleDict):
        model.forward = lambda x: model.inner(x)
    ogc.solve(graph_of("residual"), memory_budget="least").save(tmp_path / "plan.json")
    with pytest.raises(ogc.PlanError, match=rf"plan\.json does not fit the graph, which has {difference}"):
        ogc.load_plan(tmp_path / "plan.json", ogc.parse(model, given))


def test_other_uses_of_values_are_told():
    graph = chain([4, 8, 4, 2])
    text = text_of(ogc.solve(graph, memory_budget="least"))
    values = tuple(replace(value, is_output=True) for value in graph.values)
    with pytest.raises(ogc.PlanError, match="operations that read, write or save other values"):
        plan_from_text(text, replace(graph, values=values))


def changed(text, **fields):
    return json.dumps({**json.loads(text), **fields})


@pytest.mark.full
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: "", "the text is no plan: Expecting value"),
        (lambda text: text[: len(text) // 2], "the text is no plan"),
        (lambda text: 100_000 * "[", "the text is no plan"),
        (lambda text: "[]", "the text is no plan, as plan.save"),
        (lambda text: '{"format": "another"}', "the text is no plan, as plan.save"),
        (lambda text: changed(text, version=1), "of version 1, and this ogc reads version 2; plan again"),
        (lambda text: changed(text, plans=[]), "damaged plan.*0 plans of kind 'plan'"),
        (lambda text: changed(text, kind="leaf"), "damaged plan"),
        (lambda text: changed(text, solver=None), "damaged plan.*None is no text"),
        (lambda text: changed(text, chunks="2"), "damaged plan"),
        (lambda text: changed(text, regions=[["one"]]), "damaged plan"),
        (lambda text: text.replace('"segments"', '"sediments"'), "damaged plan.*segments"),
        (lambda text: text.replace('"operations": "', '"operators": "'), "damaged plan.*operators"),
        (lambda text: text.replace('"policies": {}', '"policies": {"0": "forgotten"}', 1), "damaged plan.*FORGOTTEN"),
        (lambda text: text.replace('"policies": {}', '"policies": {"9999": "saved"}', 1), "which the graph lacks"),
        (lambda text: text.replace('"low_memory": []', '"low_memory": [9999]'), "which the graph lacks"),
    ],
)
def test_what_is_no_plan_is_refused(damage, message):
    graph = graph_of("residual")
    text = damage(text_of(ogc.make_plan(graph, [ogc.recomputed(0, len(graph))])))
    with pytest.raises(ogc.PlanError, match=message):
        plan_from_text(text, graph)


def test_decisions_that_cannot_be_carried_out_are_refused():
    graph = graph_of("residual")
    plans = json.loads(text_of(ogc.solve(graph, memory_budget="least")))
    plans["plans"][0]["segments"][-1]["operations"][1] -= 1
    with pytest.raises(ogc.PlanError, match="do not cover operations"):
        plan_from_text(json.dumps(plans), graph)


def test_files_that_are_none(tmp_path):
    graph = graph_of("residual")
    with pytest.raises(FileNotFoundError):
        ogc.load_plan(tmp_path / "plan.json", graph)
    (tmp_path / "plan.json").write_bytes(b"\x80\xff")
    with pytest.raises(ogc.PlanError, match=r"plan\.json is no plan: it is no text"):
        ogc.load_plan(tmp_path / "plan.json", graph)
    ogc.solve(graph, memory_budget="least").save(tmp_path / "plan.json")
    with pytest.raises(ogc.InputError, match="graph must be a Graph"):
        ogc.load_plan(tmp_path / "plan.json", Residual())
    with pytest.raises(ogc.PlanError, match="does not know its graph"):
        replace(ogc.solve(graph, memory_budget="least"), graph=None).save(tmp_path / "plan.json")
    with pytest.raises(FileNotFoundError):
        ogc.solve(graph, memory_budget="least").save(tmp_path / "nowhere" / "plan.json")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]  # and no half of one


def test_another_version_of_torch_is_noted(monkeypatch, caplog):
    graph = graph_of("residual")
    text = text_of(ogc.solve(graph, memory_budget="least"))
    assert SavedPlan.from_text(text).torch == torch.__version__ or "+" in torch.__version__
    with caplog.at_level("INFO", "ogc.plan.saving"):
        plan_from_text(text, graph)
        assert not caplog.messages
        plan_from_text(changed(text, torch="1.0"), graph)
    assert caplog.messages == [f"the text was saved with torch 1.0, and this is {saving.torch_version()}"]
    with pytest.raises(ogc.PlanError, match=r"other sizes.*; it was saved with torch 1\.0, and this is"):
        plan_from_text(changed(text, torch="1.0"), ogc.parse(Residual(), images(8)))


def test_the_file_says_what_the_plan_costs():
    plan = ogc.solve(graph_of("residual"), memory_budget=0.7)
    found = json.loads(text_of(plan))
    assert found["about"]["peak_bytes"] == plan.peak_bytes and found["about"]["device"] == "cpu"
    assert found["budget_bytes"] == plan.budget_bytes and found["solver"] == "optimal"
