"""Plans are taken up without a search: from a file, from a folder, in another process; or made anew where they fail."""

import json
import logging
import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from helpers import assert_same_training, measured_peak, trace_of_training
from models import Attention, Residual, images
from torch import nn

import ogc
from ogc.in_parts import PartsPlan
from ogc.parser.weigh import measure

solving = sys.modules["ogc.solver.solve"]
ROOT = Path(__file__).parent.parent
TOKENS = torch.arange(24).view(4, 6) % 11


class Wide(nn.Module):
    """A wide stage that may run in chunks, and a narrow one."""

    def __init__(self):
        super().__init__()
        layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
        self.one, self.two = nn.Sequential(*layers), nn.Sequential(nn.MaxPool2d(4), nn.Conv2d(16, 8, 3), nn.SiLU())
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.two(self.one(x)).mean((2, 3)))


def block():
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


class Branching(nn.Module):
    """Its own forward goes by the data, so that its blocks are planned one by one."""

    def __init__(self, blocks=3):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x) if x.detach().sum().item() != 0.125 else x
        return x


KINDS = {
    "residual": (Residual, images, {"memory_budget": "least"}),
    "budget": (Residual, images, {"memory_budget": 0.7}),
    "overhead": (Residual, images, {"max_overhead": 0.6}),
    "plain": (Residual, images, {"memory_budget": 1.0}),
    "transformer": (Attention, lambda: TOKENS, {"memory_budget": "least"}),
    "chunks": (Wide, lambda: torch.randn(10, 3, 32, 32), {"chunks": 4}),
    "parts": (Branching, lambda: torch.randn(64, 16), {"memory_budget": "least"}),
    "parts in a budget": (Branching, lambda: torch.randn(64, 16), {"memory_budget": 0.8}),
}


def model_of(kind):
    make, sample, goal = KINDS[kind]
    torch.manual_seed(0)
    return make(), sample(), {"profile": "estimate", **goal}


def digest(model, optimised, given):
    tensors = trace_of_training(model, optimised, (given,))
    return sha256(b"".join(t.contiguous().numpy().tobytes() for t in tensors)).hexdigest()


def no_more_searches():
    def refuse(graph, nested=True):
        raise AssertionError("the solver was called")

    solving.search_of = refuse


@pytest.fixture
def unsolved(monkeypatch):
    """From where a test calls it on, nothing is searched for."""
    monkeypatch.setattr(solving, "search_of", solving.search_of)
    return no_more_searches


OTHER_PROCESS = """
import sys
sys.path += ["tests"]
import ogc, test_stored
test_stored.no_more_searches()
for kind in test_stored.KINDS:
    for source, where in (("plan", f"{sys.argv[1]}/{kind}.json"), ("cache_dir", sys.argv[1])):
        model, given, goal = test_stored.model_of(kind)
        optimised = ogc.optimize(model, given, **{source: where}, **goal)
        print(source, kind, optimised.plan.peak_bytes, test_stored.digest(model, optimised, given), sep=";")
"""


def started(code, *arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    )


def output_of(process):
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    return output


@pytest.mark.full
def test_another_process_starts_without_a_search(tmp_path):
    expected = {}
    for kind in KINDS:
        model, given, goal = model_of(kind)
        optimised = ogc.optimize(model, given, cache_dir=tmp_path, **goal)
        optimised.plan.save(tmp_path / f"{kind}.json")
        assert isinstance(optimised.plan, PartsPlan) == kind.startswith("parts")
        assert optimised.plan.is_plain == (kind == "plain")
        assert kind != "chunks" or "chunked" in optimised.code
        expected[kind] = optimised.plan.peak_bytes, digest(model, optimised, given)
    lines = output_of(started(OTHER_PROCESS, tmp_path)).splitlines()
    assert len(lines) == 2 * len(KINDS)
    for source, kind, peak, numbers in (line.split(";") for line in lines):
        # What is around parts is measured, in a step with other plans.
        tolerance = 0.01 if source == "plan" and kind.startswith("parts") else 0.0
        assert int(peak) == pytest.approx(expected[kind][0], rel=tolerance, abs=0), (source, kind)
        assert numbers == expected[kind][1], (source, kind)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_is_the_same_and_so_are_the_numbers(unsolved, kind):
    model, given, goal = model_of(kind)
    first = ogc.optimize(model, given, **goal)
    plan = first.plan
    unsolved()
    optimised = ogc.optimize(model, given, plan=plan, **goal)
    assert optimised.plan.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.01)
    if isinstance(plan, PartsPlan):
        assert [part.plan.decisions for part in optimised.plan.parts] == [part.plan.decisions for part in plan.parts]
    else:
        assert optimised.plan.decisions == plan.decisions and optimised.plan.budget_bytes == plan.budget_bytes
    assert measured_peak(optimised, (given,)) == pytest.approx(measured_peak(first, (given,)), rel=0.01)
    if kind != "chunks":
        assert_same_training(model, optimised, (given,))


def test_a_plan_may_be_given_as_what_is_in_its_file(unsolved):
    model, given, goal = model_of("budget")
    plan = ogc.optimize(model, given, **goal).plan
    unsolved()
    assert ogc.optimize(model, given, plan=plan.as_saved(), **goal).plan.decisions == plan.decisions


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "other", "message"),
    [
        ("residual", lambda: (Residual(), images(8)), "does not fit the graph, which has other sizes"),
        ("residual", lambda: (Attention(), TOKENS), "does not fit the graph, which has other operations"),
        ("residual", lambda: (Branching(), torch.randn(64, 16)), "for a model that is planned as a whole"),
        ("parts", lambda: (Residual(), images()), "for a model in parts, but this one is planned as a whole"),
        ("parts", lambda: (Branching(4), torch.randn(64, 16)), None),  # equal blocks share a plan
        ("parts", lambda: (Branching(2), torch.randn(64, 16)), "with a part blocks.2, which is none here"),
        ("parts", lambda: (Branching(), torch.randn(32, 16)), "fit the graph for part blocks.0, which has other sizes"),
        ("chunks", lambda: (Wide(), torch.randn(10, 3, 32, 32)), "runs regions in 4 chunks of the batch; give"),
    ],
)
def test_a_plan_for_something_else_is_refused_and_the_model_left_alone(kind, other, message):
    model, given, goal = model_of(kind)
    plan = ogc.optimize(model, given, **goal).plan
    model, given = other()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    if message is None:
        assert len(ogc.optimize(model, given, plan=plan).plan.parts) == 4
        return
    with pytest.raises(ogc.PlanError, match=message):
        ogc.optimize(model, given, plan=plan)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_a_sliced_plan_for_another_model_is_refused():
    model, given, goal = model_of("chunks")
    plan = ogc.optimize(model, given, **goal).plan
    for other, x in ((Residual(), images()), (Wide(), torch.randn(12, 3, 32, 32))):
        with pytest.raises(ogc.PlanError, match="does not fit the graph"):
            ogc.optimize(other, x, plan=plan, chunks=4)


def test_a_sliced_plan_is_loaded_for_the_graph_in_slices(tmp_path):
    model, given, _ = model_of("chunks")
    graph = ogc.parse(model, given)
    chunked, plan = ogc.chunk_batch(model, given, graph, chunks=4)
    plan.save(tmp_path / "plan.json")
    assert chunked.chunked and ogc.load_plan(tmp_path / "plan.json", chunked).decisions == plan.decisions
    with pytest.raises(
        ogc.PlanError, match=r"regions? in 4 chunks of the batch, which this graph does not run so; use"
    ):
        ogc.load_plan(tmp_path / "plan.json", graph)


def test_the_plans_of_parts_are_none_for_a_graph(tmp_path):
    model, given, _ = model_of("parts")
    ogc.optimize(model, given, memory_budget="least").plan.save(tmp_path / "plan.json")
    text = ogc.plan.text_of(ogc.optimize(model, given, memory_budget="least").plan)
    for load in (lambda g: ogc.load_plan(tmp_path / "plan.json", g), lambda g: ogc.plan.plan_from_text(text, g)):
        with pytest.raises(
            ogc.PlanError, match=r"has the plans of a model's parts, not one plan of a graph; hand it to"
        ):
            load(ogc.parse(model.blocks[0], given))


def test_bad_input(tmp_path):
    model, given, _ = model_of("residual")
    (tmp_path / "file").write_text("nothing")
    for plan in (5, [], model):
        with pytest.raises(ogc.InputError, match="plan must be the path of a saved plan, or a plan, not"):
            ogc.optimize(model, given, plan=plan)
    for path, why in ((tmp_path / "none.json", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ogc.InputError, match=rf"plan='{path}' cannot be read \({why}.*result.plan.save"):
            ogc.optimize(model, given, plan=path)
    with pytest.raises(ogc.PlanError, match="file is no plan"):
        ogc.optimize(model, given, plan=tmp_path / "file")
    for folder in (5, tmp_path / "file"):
        with pytest.raises(ogc.InputError, match="cache_dir must be the path of a folder"):
            ogc.optimize(model, given, cache_dir=folder, memory_budget="least")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["residual", "chunks", "parts"])
@pytest.mark.parametrize("source", ["plan", "cache_dir"])
def test_a_plan_that_does_not_keep_the_goal_is_made_anew(tmp_path, caplog, kind, source):
    model, given, goal = model_of(kind)
    goal.pop("memory_budget", None)
    least = ogc.optimize(model, given, memory_budget="least", **goal).plan
    loose = ogc.optimize(model, given, memory_budget=0.95, **goal).plan
    budget = (least.peak_bytes + loose.peak_bytes) // 2
    assert least.peak_bytes < budget < loose.peak_bytes
    given_as = {"plan": loose}
    if source == "cache_dir" and kind != "parts":  # whose single plans are kept, and not those of a goal
        ogc.optimize(model, given, memory_budget=budget, cache_dir=tmp_path, **goal)
        (kept,) = tmp_path.glob("plan-*.json")
        loose.save(kept)
        given_as = {"cache_dir": tmp_path}
    caplog.clear()
    optimised = ogc.optimize(model, given, memory_budget=budget, **given_as, **goal)
    assert "does not keep memory_budget=" in caplog.text
    assert optimised.plan.peak_bytes <= budget and measured_peak(optimised, (given,)) <= budget * 1.02
    if "cache_dir" in given_as:  # and is kept in its place
        caplog.clear()
        ogc.optimize(model, given, memory_budget=budget, **given_as, **goal)
        assert "does not keep" not in caplog.text


@pytest.mark.parametrize("kind", ["residual", "parts"])
def test_a_plan_that_takes_more_time_than_is_allowed_is_made_anew(caplog, kind):
    model, given, goal = model_of(kind)
    goal.pop("memory_budget", None)
    least = ogc.optimize(model, given, memory_budget="least", **goal).plan
    seconds = least.part_seconds if kind == "parts" else least.step_seconds
    share = least.added_seconds / seconds
    optimised = ogc.optimize(model, given, plan=least, max_overhead=share / 2, **goal)
    assert "does not keep max_overhead=" in caplog.text
    assert optimised.plan.added_seconds <= share / 2 * seconds
    caplog.clear()
    assert ogc.optimize(model, given, plan=least, max_overhead=1.01 * share, **goal).plan.peak_bytes
    assert "anew" not in caplog.text


def test_a_budget_on_the_device_is_kept(caplog):
    model, given, _ = model_of("residual")
    least = ogc.optimize(model, given, memory_budget="least").plan
    wanted = {"device_memory": "40MB", "plan": least}
    assert ogc.optimize(model, given, **wanted).plan.decisions == least.decisions
    assert "anew" not in caplog.text


# -- folders -------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_what_is_kept_goes_by_graph_goal_and_solver(tmp_path, unsolved):
    model, given, _ = model_of("residual")
    goals = {}, {"memory_budget": 0.7}, {"memory_budget": "70KB"}, {"max_overhead": 0.5}, {"solver": "chen"}
    plans = [ogc.optimize(model, given, cache_dir=tmp_path / "new", **goal).plan for goal in goals]
    assert len(list((tmp_path / "new").glob("plan-*.json"))) == len(goals)
    unsolved()
    for goal, plan in zip(goals, plans, strict=True):
        again = ogc.optimize(model, given, cache_dir=str(tmp_path / "new"), **goal).plan
        assert again.decisions == plan.decisions and again.solver == plan.solver
    same = ogc.optimize(model, given, cache_dir=tmp_path / "new", memory_budget=70_000).plan
    assert same.decisions == plans[2].decisions
    with pytest.raises(AssertionError, match="solver was called"):
        ogc.optimize(model, given, cache_dir=tmp_path / "new", memory_budget=0.71)
    with pytest.raises(AssertionError, match="solver was called"):
        ogc.optimize(model, images(8), cache_dir=tmp_path / "new", memory_budget="least")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["residual", "parts"])
@pytest.mark.parametrize("damage", ["", "{}", '{"format": "ogc plan", "version": 0}', "cut"])
def test_a_damaged_file_is_told_and_written_anew(tmp_path, caplog, kind, damage):
    model, given, _ = model_of(kind)
    plan = ogc.optimize(model, given, cache_dir=tmp_path, memory_budget="least").plan
    files = sorted(path for path in tmp_path.iterdir() if not path.name.startswith("times"))
    texts = [path.read_text() for path in files]
    for path, text in zip(files, texts, strict=True):
        path.write_text(text[: len(text) // 2] if damage == "cut" else damage)
    caplog.clear()
    assert ogc.optimize(model, given, cache_dir=tmp_path, memory_budget="least").plan == plan
    assert "a plan is made anew, as the one in cache_dir does not do" in caplog.text
    assert [path.read_text() for path in files] == texts


@pytest.mark.full
def test_a_plan_of_another_kind_in_the_place_of_ones_own_is_told(tmp_path, caplog):
    model, given, _ = model_of("parts")
    plan = ogc.optimize(model, given, cache_dir=tmp_path, memory_budget="least").plan
    whole, x, _ = model_of("residual")
    other = ogc.optimize(whole, x, memory_budget="least").plan.as_saved().text
    (path,) = tmp_path.glob("parts-*.json")
    kept = json.loads(path.read_text())
    none = json.dumps({**kept, "plans": []})
    for text, why in ((other, "for a model that is planned as a whole"), (none, "has nothing for part blocks.0")):
        path.write_text(text)
        caplog.clear()
        assert ogc.optimize(model, given, cache_dir=tmp_path, memory_budget="least").plan == plan
        assert why in caplog.text


def test_a_folder_that_cannot_be_written_is_told(tmp_path, caplog, monkeypatch):
    def full(path, *args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    model, given, _ = model_of("residual")
    assert ogc.optimize(model, given, cache_dir=tmp_path, memory_budget="least").plan.peak_bytes
    assert "the plan is not kept in cache_dir: [Errno 28]" in caplog.text
    assert not list(tmp_path.iterdir())


AT_ONCE = """
import sys, time
sys.path += ["tests"]
import ogc, test_stored
folder, start = sys.argv[1], float(sys.argv[2])
pairs = [(test_stored.model_of(kind)) for kind in ("residual", "chunks", "parts")]
time.sleep(max(0.0, start - time.time()))
for _ in range(2):
    for model, given, goal in pairs:
        optimised = ogc.optimize(model, given, cache_dir=folder, **{**goal, "profile": "time"})
        print(optimised.plan.peak_bytes)
"""


@pytest.mark.full
def test_processes_may_write_at_once(tmp_path):
    import time

    processes = [started(AT_ONCE, tmp_path, time.time() + 6) for _ in range(2)]
    for output, errors in (process.communicate() for process in processes):
        assert len(output.split()) == 6 and "anew" not in errors and "not used" not in errors, errors
    for path in tmp_path.iterdir():
        assert json.loads(path.read_text()), path
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


# -- later calls, pickles, times -----------------------------------------------------------------------------


def call(optimised, given):
    optimised(given).square().sum().backward()


@pytest.mark.parametrize("kind", ["residual", "parts"])
@pytest.mark.full
def test_plans_for_other_kinds_of_calls_are_kept_too(tmp_path, unsolved, caplog, kind):
    model, given, goal = model_of(kind)
    frozen = model.head if kind == "residual" else model.blocks[0][3]

    def planned():
        optimised = ogc.optimize(model, given, cache_dir=tmp_path, **goal)
        frozen.requires_grad_(False)
        caplog.clear()
        call(optimised, given)
        frozen.requires_grad_(True)
        return [message for message in caplog.messages if "a plan for calls where" in message]

    assert planned()
    kept = sorted(path.name for path in tmp_path.iterdir())
    unsolved()
    assert planned() and kept == sorted(path.name for path in tmp_path.iterdir())
    assert "runs the plain model" not in caplog.text and "as it is" not in caplog.text


ONLY_ONCE = """
import sys
sys.path += ["tests"]
import ogc, test_stored
from ogc.parser.weigh import measure
test_stored.no_more_searches()
def refuse(*args):
    raise AssertionError("an operation was measured")
measure.typical = refuse
measure._overheads = refuse
for kind in sys.argv[2:]:
    model, given, goal = test_stored.model_of(kind)
    optimised = ogc.optimize(model, given, cache_dir=sys.argv[1], **{**goal, "profile": "time"})
    print(test_stored.operator_seconds(optimised.graph))
"""


def operator_seconds(graphs):
    graphs = [graphs] if isinstance(graphs, ogc.Graph) else graphs.values()
    return sum(op.forward_seconds + op.backward_seconds for graph in graphs for op in graph.operations)


@pytest.mark.full
def test_nothing_is_measured_twice(tmp_path):
    kinds, seconds = ("overhead", "chunks", "parts"), []
    for kind in kinds:
        model, given, goal = model_of(kind)
        optimised = ogc.optimize(model, given, cache_dir=tmp_path, **{**goal, "profile": "time"})
        seconds.append(operator_seconds(optimised.graph))
    assert len(list(tmp_path.glob("times-*.json"))) == 1
    assert [*map(float, output_of(started(ONLY_ONCE, tmp_path, *kinds)).split())] == pytest.approx(seconds)


@pytest.mark.full
@pytest.mark.parametrize("damage", ["", "[]", '{"call": ["a", 1, 2]}', '{"call": [1]}', '{"call": 3}'])
def test_damaged_times_are_told_and_measured_anew(tmp_path, caplog, monkeypatch, damage):
    model, given, goal = model_of("residual")
    monkeypatch.setattr(measure, "_known", {})
    ogc.optimize(model, given, cache_dir=tmp_path, **{**goal, "profile": "time"})
    (times,) = tmp_path.glob("times-*.json")
    known = json.loads(times.read_text())
    times.write_text(damage)
    monkeypatch.setattr(measure, "_known", {})
    ogc.optimize(model, given, cache_dir=tmp_path, **{**goal, "profile": "time"})
    assert f"the times in {times} are not used" in caplog.text
    assert json.loads(times.read_text()).keys() >= known.keys()
    assert "call" not in json.loads(times.read_text())


@pytest.mark.full
def test_times_are_no_part_of_what_is_looked_for(tmp_path, unsolved, monkeypatch):
    model, given, goal = model_of("residual")
    plan = ogc.optimize(model, given, cache_dir=tmp_path, **{**goal, "profile": "time"}).plan
    for path in tmp_path.glob("times-*.json"):
        path.unlink()
    monkeypatch.setattr(measure, "_known", {})
    unsolved()
    again = ogc.optimize(model, given, cache_dir=tmp_path, **{**goal, "profile": "time"}).plan
    assert again.decisions == plan.decisions and again.step_seconds != plan.step_seconds


@pytest.mark.full
@pytest.mark.parametrize("kind", ["residual", "chunks", "parts"])
def test_the_log_says_where_a_plan_is_from(tmp_path, caplog, kind):
    model, given, goal = model_of(kind)
    ogc.optimize(model, given, cache_dir=tmp_path, **goal)
    with caplog.at_level(logging.INFO, "ogc.planning"):
        ogc.optimize(model, given, cache_dir=tmp_path, **goal)
    assert "the plan is that of" in caplog.text
