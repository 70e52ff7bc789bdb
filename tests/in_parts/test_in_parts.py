"""Models whose own forward must stay Python: their submodules are planned, and the numbers are the plain model's."""

import copy
import gc
import logging
import pickle
import random
import threading

import numpy
import pytest
import torch
from helpers import assert_same_training, loss_of, measured_peak, trace_of_training
from models import SelfAttention
from torch import nn
from torch.utils.checkpoint import checkpoint

import ogc
from ogc import planning
from ogc.errors import InputError, ParseError, SolveError
from ogc.in_parts import PartsPlan, optimize_in_parts
from ogc.in_parts.module import CALL
from ogc.parser import ParseOptions
from ogc.planning import PlanOptions
from ogc.process import is_late
from ogc.solver import SolveOptions


class Scale(torch.autograd.Function):
    """Keeps a number where nobody looks for it, so that it cannot be replayed."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def scaled(x, factor):
    """Goes one way or another by the data, so that whoever calls it must run as it is."""
    return Scale.apply(x, factor) if x.detach().sum().item() != 0.125 else x


class Block(nn.Module):
    def __init__(self, width=32, drop=0.1):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Tower(nn.Module):
    """Blocks with something between them that must stay Python; ``between`` is the model's own."""

    def __init__(self, blocks=4, width=32):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.last = nn.Linear(width, 4)

    def between(self, x):
        return scaled(x, 1.01)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = self.between(block(x))
        return self.last(x)


class Picks(Tower):
    """Goes on with those rows that its data says."""

    def between(self, x):
        return x[x.sum(-1) > -1e9]


class ReadsNumbers(Tower):
    def between(self, x):
        return x * 0.5 if x.mean().item() > 0.1 else x


class DrawsInPython(Tower):
    """Leaves out blocks by numbers that Python draws."""

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            if random.random() < 0.7:
                x = self.between(block(x))
        return self.last(x)


class Counts(Tower):
    def __init__(self):
        super().__init__()
        self.steps = 0

    def between(self, x):
        self.steps += 1
        return x * (1 + 0.01 * self.steps)


class Deep(nn.Module):
    """What must stay Python is at several depths."""

    def __init__(self):
        super().__init__()
        self.tower = Tower()
        self.head = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4))

    def forward(self, x):
        return scaled(self.head(self.tower(x)), 0.5)


class Twice(Tower):
    """Calls each block twice."""

    def forward(self, x):
        x = self.first(x)
        for block in (*self.blocks, *self.blocks):
            x = self.between(block(x))
        return self.last(x)


class Pyramid(Tower):
    """Calls each block with several shapes."""

    def forward(self, x):
        x = self.first(x)
        sizes = [x, x[::2], x[::4]]
        for block in self.blocks:
            sizes = [self.between(block(y)) for y in sizes]
        return [self.last(y) for y in sizes]


class Normed(Tower):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(4)
        )


class Experts(nn.Module):
    """Each row goes to the two experts that its data says."""

    def __init__(self, width=32):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(Block(width) for _ in range(4))
        self.last = nn.Sequential(*(Block(width) for _ in range(2)))

    def forward(self, x):
        x = self.first(x)
        weights, chosen = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, place, None])
        return self.last(out)


class Graphs(nn.Module):
    """Message passing, where self-loops are taken out of the edges by their data."""

    def __init__(self, width=32, layers=4):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x, edges):
        x = self.first(x)
        edges = edges[:, edges[0] != edges[1]]
        for layer in self.layers:
            messages = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
            x = layer(scaled(x + 0.1 * messages, 1.0))
        return x


ROWS = 256


def rows(count=ROWS):
    return (torch.randn(count, 8),)


def graph():
    return torch.randn(ROWS, 8), torch.randint(0, ROWS, (2, 300))


MODELS = {
    "branch": (Tower, rows),
    "mask": (Picks, rows),
    "numbers": (ReadsNumbers, rows),
    "counts": (Counts, rows),
    "deep": (Deep, rows),
    "twice": (Twice, rows),
    "pyramid": (Pyramid, rows),
    "batch norm": (Normed, rows),
    "graph network": (Graphs, graph),
}


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_outputs_gradients_buffers_and_random_stream_are_the_plain_models(name):
    make, inputs = MODELS[name]
    model, given = make(), inputs()
    optimised = ogc.optimize(model, given, memory_budget="least")
    assert isinstance(optimised.plan, PartsPlan)
    if name == "counts":
        plain, ours = trace_with_count(model, model, given), trace_with_count(model, optimised, given)
        assert all(map(torch.equal, plain, ours))
        return
    assert_same_training(model, optimised, given)


def trace_with_count(model, run, given):
    """Outputs and gradients of a model that counts its calls, from the same count."""
    model.steps = 0
    torch.manual_seed(0)
    found = []
    for _ in range(3):
        model.zero_grad()
        result = run(*given)
        loss_of(result).backward()
        found += [result.detach(), *(p.grad.clone() for p in model.parameters())]
    assert model.steps == 12
    return found


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_is_much_less_and_as_expected(name):
    make, inputs = MODELS[name]
    model, given = make(), inputs()
    plan = ogc.optimize(model, given, memory_budget="least").plan
    optimised = ogc.optimize(model, given, memory_budget="least")
    assert optimised.plan.parts == plan.parts or name == "counts"
    plain, ours = measured_peak(model, given), measured_peak(optimised, given)
    assert ours <= 0.7 * plain
    assert 0.99 * ours <= plan.peak_bytes <= 1.03 * ours + 20_000
    assert 0.99 * plain <= plan.plain_peak_bytes <= 1.03 * plain + 20_000


@pytest.mark.full
@pytest.mark.parametrize("share", [0.5, 0.75, 0.9])
def test_a_budget_is_kept_and_costs_less_than_the_least_peak(share):
    model, given = Tower(), rows()
    optimised = ogc.optimize(model, given, memory_budget=share)
    plan = optimised.plan
    assert plan.peak_bytes <= share * plan.plain_peak_bytes
    assert measured_peak(optimised, given) <= 1.01 * share * plan.plain_peak_bytes
    assert (
        plan.recomputed_seconds < ogc.optimize(model, given, memory_budget="least").plan.recomputed_seconds
    )  # an overhead is measured, too
    assert_same_training(model, optimised, given)


def test_a_budget_in_bytes_and_one_that_holds_everything():
    model, given = Tower(), rows()
    plan = ogc.optimize(model, given, memory_budget="1MB").plan
    assert plan.peak_bytes <= plan.budget_bytes == 10**6
    assert ogc.optimize(model, given, memory_budget="1GB").plan.recomputed_seconds == 0


class Attending(Tower):
    def __init__(self):
        nn.Module.__init__(self)
        self.first, self.last = nn.Identity(), nn.Identity()
        self.blocks = nn.ModuleList(nn.Sequential(SelfAttention(), SelfAttention()) for _ in range(4))


def plans_of_parts(model):
    """The plan that each block ran by last; none of those that run as they are."""
    for block in model.blocks:
        found = vars(block).get(CALL)
        parts = next(iter(found.part_of if found is not None else ()), None)
        yield parts and parts.members[id(block)].runner.entries[0].plan


@pytest.mark.full
@pytest.mark.parametrize("shape", [(8, 64, 16), (2, 128, 16)])
def test_a_budget_in_bytes_holds_for_as_many_numbers_in_another_shape(shape):
    model, sample, x = Attending(), torch.randn(32, 16, 16), torch.randn(shape)
    least = ogc.optimize(model, sample, memory_budget="least").plan
    budget = (least.peak_bytes + least.plain_peak_bytes) // 2
    optimised = ogc.optimize(model, sample, memory_budget=budget)
    assert measured_peak(model, (x,)) > 1.5 * budget
    assert measured_peak(optimised, (x,)) <= budget
    assert_same_training(model, optimised, (x / 10,), steps=1)


@pytest.mark.full
@pytest.mark.parametrize("goal", [{"memory_budget": 0.7}, {"max_overhead": 0.1}])
def test_parts_keep_their_shares_for_other_shapes(goal, free_runtime):
    model, sample, x = Attending(), torch.randn(32, 16, 16), torch.randn(2, 128, 16)
    optimised = ogc.optimize(model, sample, **goal)
    chosen = [part.plan for part in optimised.plan.parts]
    optimised(x).sum().backward()
    assert not all(plan.is_plain for plan in chosen)
    for number, (ran, plan) in enumerate(zip(plans_of_parts(model), chosen, strict=True)):
        graph = ogc.parse(model.blocks[0], x.clone().requires_grad_(number > 0))
        assert ran is not None or plan.is_plain
        took = ogc.simulate(graph, ran) if ran is not None and not ran.is_plain else None
        if "max_overhead" in goal:
            assert took is None or took.added_seconds <= 1.001 * plan.overhead * graph.step_seconds
        else:
            share = 1.0 if took is None else took.peak_bytes / ogc.solve(graph, solver="none").peak_bytes
            assert share <= 1.001 * plan.peak_bytes / plan.plain_peak_bytes


@pytest.mark.full
def test_a_budget_that_nothing_meets_names_the_least_peak_and_leaves_no_trace():
    model, given = Tower(), rows()
    least = ogc.optimize(model, given, memory_budget="least").plan.peak_bytes
    gc.collect()
    with pytest.raises(SolveError, match=rf"smallest peak is .* \({least} bytes\).*the model itself"):
        ogc.optimize(model, given, memory_budget=least // 2)
    assert not any(CALL in vars(module) for module in model.modules())


@pytest.mark.full
def test_more_time_is_less_memory():
    model, given = Tower(), rows()
    plans = [ogc.optimize(model, given, max_overhead=share).plan for share in (0.0, 0.05, 0.1, 0.2)]
    assert [plan.peak_bytes for plan in plans] == sorted((plan.peak_bytes for plan in plans), reverse=True)
    assert plans[-1].peak_bytes < plans[0].peak_bytes
    for plan, share in zip(plans, (0.0, 0.05, 0.1, 0.2), strict=True):
        assert plan.overhead <= share


def test_the_plan_shows_parts_and_what_stays_plain(caplog):
    model, given = Deep(), rows()
    with caplog.at_level(logging.WARNING):
        optimised = ogc.optimize(model, given, memory_budget="least")
    text = str(optimised.plan)
    assert "tower.blocks.0" in text
    assert "reads numbers out of tensors" in text
    assert "of time" in text
    assert optimised.code.keys() <= optimised.graph.keys()
    assert "def forward(" in next(iter(optimised.code.values()))
    assert {rest.name for rest in optimised.plan.plain} == {"", "tower"}
    (warning,) = [record.message for record in caplog.records]
    assert "the model itself" in warning
    assert "tower" in warning


def test_equal_blocks_are_parsed_once(monkeypatch):
    seen = []
    original = planning.parsed
    monkeypatch.setattr(planning, "parsed", lambda module, *a: seen.append(module) or original(module, *a))
    ogc.optimize(Tower(8), rows(), memory_budget="least")
    assert sum(isinstance(module, Block) for module in seen) == 1


def test_all_calls_of_parts_are_planned_by_what_was_asked_for(monkeypatch):
    seen = []
    plan = SolveOptions.plan
    monkeypatch.setattr(SolveOptions, "plan", lambda self, *a: seen.append((self.effort, is_late())) or plan(self, *a))
    model = Tower(2)
    optimised = ogc.optimize(model, rows(), memory_budget=500_000, effort=1, planning_seconds=1e-9)
    assert set(seen) == {(1, True)}
    seen.clear()
    assert_same_training(model, optimised, rows(2 * ROWS))
    assert set(seen) == {(1, True)} and optimised.report().planned


def test_a_model_of_which_nothing_can_be_planned_is_refused_with_all_reasons():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return scaled(self.inner(scaled(x, 2.0)), 2.0)

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return scaled(x * self.weight, 3.0)

    model = Whole()
    with pytest.raises(ParseError, match=r"reads numbers out of tensors(?s:.*)inner"):
        ogc.optimize(model, rows(), memory_budget="least")
    assert not any(CALL in vars(module) for module in model.modules())


def test_the_plain_model_runs_plain_beside_it(opened):
    model, (x,) = Tower(), rows()
    optimised = ogc.optimize(model, x, memory_budget="least")
    opened.clear()
    model(x).sum().backward()
    assert not opened
    optimised(x).sum().backward()
    assert opened


def test_eval_mode_and_no_grad_run_plain(opened):
    model, (x,) = Tower(), rows()
    optimised = ogc.optimize(model, x, memory_budget="least")
    opened.clear()
    with torch.no_grad():
        optimised(x)
    optimised.eval()
    assert torch.equal(optimised(x), model(x))
    assert not opened


def test_state_attributes_and_modules_are_shared():
    model, given = Tower(), rows()
    optimised = ogc.optimize(model, given, memory_budget="least")
    assert isinstance(optimised, Tower)
    assert optimised.state_dict().keys() == model.state_dict().keys()
    assert optimised.blocks is model.blocks
    optimised.load_state_dict(Tower().state_dict())
    assert_same_training(model, optimised, given)


@pytest.mark.full
def test_copies_and_pickles_of_the_plain_model_are_clean():
    model, given = Tower(), rows()
    optimised = ogc.optimize(model, given, memory_budget="least")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model.blocks[0])):
        assert not any(getattr(module, CALL) for module in twin.modules() if module not in set(model.modules()))
    assert not vars(copy.copy(model.blocks[0])).get(CALL)
    again = pickle.loads(pickle.dumps(optimised))
    plain = object.__new__(Tower)
    object.__setattr__(plain, "__dict__", vars(again))
    assert_same_training(plain, again, given)
    assert isinstance(again.plan, ogc.PartsPlan)


def test_a_deep_copy_is_planned_and_apart(opened):
    model, given = Tower(), rows()
    twin = copy.deepcopy(ogc.optimize(model, given, memory_budget="least"))
    assert twin.blocks[0].up.weight is not model.blocks[0].up.weight
    opened.clear()
    plain = copy.deepcopy(model)
    assert_same_training(plain, rerouted(twin, plain), given)
    assert opened
    assert measured_peak(twin, given) <= 0.7 * measured_peak(model, given)
    again = copy.deepcopy(twin)
    assert measured_peak(again, given) <= 0.7 * measured_peak(model, given)


def rerouted(twin, plain):
    """Runs ``twin`` with what ``plain`` holds: parameters are tied."""
    for name, parameter in plain.named_parameters():
        owner, _, key = name.rpartition(".")
        setattr(twin.get_submodule(owner), key, parameter)
    return twin


@pytest.mark.full
def test_two_optimised_models_of_one_plain_model():
    model, given = Tower(), rows()
    small, fast = ogc.optimize(model, given, memory_budget="least"), ogc.optimize(model, given, memory_budget=0.8)
    assert measured_peak(small, given) < measured_peak(fast, given) < measured_peak(model, given)
    del small
    gc.collect()
    assert measured_peak(fast, given) < measured_peak(model, given)
    assert_same_training(model, fast, given)
    del fast
    gc.collect()
    assert not any(CALL in vars(module) for module in model.modules())


@pytest.mark.full
def test_an_optimised_model_may_be_optimised_again_and_be_part_of_another():
    model, given = Tower(), rows()
    optimised = ogc.optimize(ogc.optimize(model, given, memory_budget="least"), given, memory_budget=0.8)
    assert_same_training(model, optimised, given)

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.tower = ogc.optimize(model, given, memory_budget="least")
            self.head = nn.Sequential(Block(4), Block(4))

        def forward(self, x):
            return scaled(self.head(self.tower(x)), 2.0)

    around = Around()
    outer = ogc.optimize(around, given, memory_budget="least")
    assert_same_training(around, outer, given)


def test_threads_are_apart(opened):
    model, (x,) = Tower(), rows()
    # Another thread's random numbers would be told where some are drawn twice.
    optimised = ogc.optimize(model, x, memory_budget="least", once=[nn.Dropout])
    failures = []

    def train(run):
        try:
            for _ in range(5):
                run(x).sum().backward()
        except Exception as error:
            failures.append(error)

    runs = [threading.Thread(target=train, args=(run,)) for run in (model, optimised, optimised)]
    for thread in runs:
        thread.start()
    for thread in runs:
        thread.join()
    assert not failures


@pytest.mark.full
def test_really_compiled_models_are_refused_and_parts_are_not():
    model, given = Tower(), rows()
    optimised = ogc.optimize(model, given, memory_budget="least")
    ogc.parse(model.blocks[0], torch.randn(4, 32))
    del optimised
    gc.collect()
    model.blocks[0].compile()
    with pytest.raises(InputError, match="compiled"):
        ogc.parse(model.blocks[0], torch.randn(4, 32))


@pytest.mark.full
def test_a_part_with_hooks_keeps_them():
    seen = []

    def before(module, args):
        return (args[0] * 1.5,)

    def after(module, args, result):
        seen.append(module)
        return result + 1

    model, given = Tower(), rows()
    model.blocks[1].register_forward_pre_hook(before)
    model.blocks[2].register_forward_hook(after)
    model.blocks[3].register_full_backward_hook(lambda module, given, taken: seen.append(module))
    model.blocks[3].up.register_forward_hook(lambda module, args, result: seen.append(module))
    optimised = ogc.optimize(model, given, memory_budget="least")
    assert "blocks.1" in optimised.graph
    assert "blocks.2" in optimised.graph
    seen.clear()
    optimised(*given).sum().backward()
    assert seen.count(model.blocks[2]) == seen.count(model.blocks[3]) == seen.count(model.blocks[3].up) == 1
    assert_same_training(model, optimised, given)


def test_hooks_on_parameters_see_each_gradient_once():
    model, given = Tower(), rows()
    seen = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(id(p)))
    optimised = ogc.optimize(model, given, memory_budget="least")
    assert not seen
    assert all(parameter.grad is None for parameter in model.parameters())
    optimised(*given).sum().backward()
    assert sorted(seen) == sorted(map(id, model.parameters()))


def test_a_child_under_no_grad_is_no_part():
    class Teacher(Tower):
        def forward(self, x):
            with torch.no_grad():
                target = self.blocks[0](self.first(x))
            x = self.first(x)
            for block in self.blocks[1:]:
                x = self.between(block(x))
            return self.last(x - target)

    model, given = Teacher(), rows()
    optimised = ogc.optimize(model, given, memory_budget="least")
    assert "blocks.0" not in optimised.graph
    assert_same_training(model, optimised, given)


@pytest.mark.full
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_child_under_checkpoint_is_no_part(reentrant):
    class Checkpoints(Tower):
        def forward(self, x):
            x = checkpoint(self.blocks[0], self.first(x), use_reentrant=reentrant)
            for block in self.blocks[1:]:
                x = self.between(block(x))
            return self.last(x)

    model, given = Checkpoints(), rows()
    optimised = ogc.optimize(model, given, memory_budget="least")
    assert "blocks.0" not in optimised.graph
    assert_same_training(model, optimised, given)


@pytest.mark.full
def test_what_is_written_after_a_part_took_it_is_no_trouble():
    class InPlace(Tower):
        def forward(self, x):
            x = scaled(self.first(x), 1.0)
            for block in self.blocks:
                y = block(torch.relu(x)) if block is self.blocks[0] else block(x)
                x = x + y
                x += 1
            z = x.sin()
            y = self.takes(z)
            z.mul_(2)
            return self.last(y + z)

        def takes(self, z):
            return self.free(z)

        def __init__(self):
            super().__init__()
            self.free = Adds()

    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32))

        def forward(self, x):
            y = x + self.weight
            for _ in range(4):
                y = y.tanh()
            return y

    model, given = InPlace(), rows()
    optimised = ogc.optimize(model, given, memory_budget="least")
    assert "free" not in optimised.graph
    assert "changed in place afterwards" in str(optimised.plan)
    assert_same_training(model, optimised, given)


@pytest.mark.full
def test_other_sizes_are_carried_over_or_planned(opened):
    model, given = Tower(), rows()
    optimised = ogc.optimize(model, given, memory_budget="least")
    for count in (64, 512):
        other = rows(count)
        opened.clear()
        assert_same_training(model, optimised, other)
        assert opened
        assert measured_peak(optimised, other) <= 0.75 * measured_peak(model, other)


@pytest.mark.full
def test_experts_that_get_other_rows_each_time():
    model, given = Experts(), rows(512)
    optimised = ogc.optimize(model, given, memory_budget="least")
    assert measured_peak(optimised, given) <= 0.7 * measured_peak(model, given)
    assert_same_training(model, optimised, given)
    assert_same_training(model, optimised, rows(512))


def test_blocks_that_the_sample_left_out_are_planned_like_their_equals(opened):
    model, given = DrawsInPython(), rows()
    random.seed(1)
    optimised = ogc.optimize(model, given, memory_budget="least")
    late = [part.name for part in optimised.plan.parts if part.is_late]
    assert late
    random.seed(4)
    for _ in range(4):
        state, python = torch.get_rng_state(), random.getstate()
        results = []
        for run in (model, optimised):
            torch.set_rng_state(state)
            random.setstate(python)
            model.zero_grad()
            out = run(*given)
            loss_of(out).backward()
            results.append([out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
            results[-1] += [torch.get_rng_state(), torch.tensor(random.random())]
        assert len(results[0]) == len(results[1])
        assert all(map(torch.equal, *results))
    twins = sum(type(vars(module).get(CALL)).__name__ == "PartCall" for module in model.blocks)
    assert twins == 4


def test_python_draws_are_where_they_were_after_planning():
    model, given = DrawsInPython(), rows()
    random.seed(1)
    state = random.getstate()
    ogc.optimize(model, given, memory_budget="least")
    assert random.getstate() == state


def test_inputs_that_require_grad_get_theirs():
    model, (x,) = Tower(), rows()
    x.requires_grad_()
    optimised = ogc.optimize(model, x, memory_budget="least")
    assert_same_training(model, optimised, (x,))


@pytest.mark.full
def test_autocast_inside_is_respected():
    class Casts(Tower):
        def between(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().between(self.casts(x)).float()

        def __init__(self):
            super().__init__()
            self.casts = Block()

    model, given = Casts(), rows()
    optimised = ogc.optimize(model, given, memory_budget="least")
    assert_same_training(model, optimised, given)


def test_verify_and_check_work():
    model, given = Tower(), rows()
    optimised = ogc.optimize(model, given, verify=True, memory_budget="least")
    assert ogc.check(model, optimised, *given).ok


@pytest.mark.parametrize("solver", ["chen", "uniform", "none"])
def test_other_solvers_plan_each_part(solver):
    model, given = Tower(), rows()
    if solver == "none":
        assert ogc.optimize(model, given, solver=solver).plan.is_plain
        return
    optimised = ogc.optimize(model, given, solver=solver)
    assert optimised.plan.solver == solver
    assert_same_training(model, optimised, given)


@pytest.mark.full
def test_opaque_modules_in_parts_and_parts_that_are_asked_to_stay():
    class Branches(Block):
        def forward(self, x):
            return self.choose(super().forward(x))

        def __init__(self):
            super().__init__()
            self.choose = Chooses()

    class Chooses(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, x):
            y = self.layer(x)
            return y.sin() if y.sum() > 0 else y.cos()

    model, given = Tower(), rows()
    model.blocks = nn.ModuleList(Branches() for _ in range(4))
    optimised = ogc.optimize(model, given, memory_budget="least")
    assert optimised.plan.parts[0].opaque_modules == ("blocks.0.choose",)
    assert_same_training(model, optimised, given)
    optimised = ogc.optimize(
        model, given, opaque_modules=["blocks.0", "blocks.1.up"], recompute_opaque=["blocks.2"], memory_budget="least"
    )
    assert "blocks.0" not in optimised.graph
    assert "was asked to be called as it is" in str(optimised.plan)
    assert optimised.plan.parts[0].opaque_modules == ("blocks.1.up", "blocks.1.choose")
    assert_same_training(model, optimised, given)
    with pytest.raises(ParseError, match="Nothing in it can be planned either"):
        ogc.optimize(model, given, opaque_modules=[Chooses, Branches], memory_budget="least")


def test_chunks_are_refused_as_before():
    with pytest.raises(ParseError, match="reads numbers out of tensors"):
        ogc.optimize(Tower(), rows(), chunks=2, memory_budget="least")


def test_a_model_with_backward_hooks_is_planned_in_parts():
    model, given = Tower(), rows()
    given[0].requires_grad_()
    seen = []
    model.register_full_backward_hook(lambda module, given, taken: seen.append(1))
    optimised = ogc.optimize(model, given, memory_budget="least")
    seen.clear()
    optimised(*given).sum().backward()
    assert seen == [1]
    given[0].grad = None
    assert_same_training(model, optimised, given)


def test_broken_calls_fail_as_the_plain_model_does_and_leave_no_trace():
    model = Tower()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ogc.optimize(model, (torch.randn(4, 9),), memory_budget="least")
    assert not any(CALL in vars(module) or "forward" in vars(module) for module in model.modules())
    optimised = ogc.optimize(model, rows(), memory_budget="least")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        optimised(torch.randn(4, 9))


def test_a_replaced_forward_is_refused():
    model = Tower()
    model.forward = lambda x: Tower.forward(model, x)
    with pytest.raises(InputError, match="replaced on the instance"):
        ogc.optimize(model, rows(), memory_budget="least")


def test_a_frozen_part_and_one_in_eval_mode():
    model, given = Normed(), rows()
    optimised = ogc.optimize(model, given, memory_budget="least")
    model.blocks[0].requires_grad_(False)
    model.blocks[1].eval()
    assert_same_training(model, optimised, given)


def test_a_replaced_part_runs_as_it_is():
    model, given = Tower(), rows()
    optimised = ogc.optimize(model, given, memory_budget="least")
    model.blocks[1] = Block()
    assert_same_training(model, optimised, given)


def test_retained_graphs_and_double_backward():
    model, (x,) = Tower(), rows(16)
    optimised = ogc.optimize(model, x, memory_budget="least")
    found = []
    for run in (model, optimised):
        torch.manual_seed(5)
        loss = run(x).square().sum()
        parameters = list(model.parameters())
        first = torch.autograd.grad(loss, parameters, retain_graph=True)
        found.append([*first, *torch.autograd.grad(loss, parameters)])
    assert all(map(torch.equal, *found))


def test_data_parallel_replicas_are_refused():
    optimised = ogc.optimize(Tower(), rows(), memory_budget="least")
    with pytest.raises(InputError, match="DistributedDataParallel"):
        optimised._replicate_for_data_parallel()


@pytest.mark.full
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_a_part_whose_attributes_the_model_sets_is_none(kind):
    class Sets(Tower):
        def __init__(self):
            super().__init__()
            self.blocks[1] = Scaled()
            self.steps = 0

        def forward(self, x):
            self.steps += 1
            self.blocks[1].scale = kind(self.steps)
            return super().forward(x)

    model, given = Sets(), rows()
    optimised = ogc.optimize(model, given, memory_budget="least")
    assert "blocks.1" not in optimised.graph
    assert "blocks.1.inner" in optimised.graph
    assert_same_for_counts(model, optimised, given)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Block()
        self.scale = 0.5

    def forward(self, x):
        return self.inner(x) * self.scale


def assert_same_for_counts(model, optimised, given):
    results = []
    for run in (model, optimised):
        model.steps = 0
        torch.manual_seed(0)
        results.append([])
        for _ in range(3):
            model.zero_grad()
            result = run(*given)
            loss_of(result).backward()
            results[-1] += [result.detach(), *(p.grad.clone() for p in model.parameters())]
        assert model.steps == 3
    assert all(map(torch.equal, *results))


@pytest.mark.full
def test_an_attribute_that_is_set_in_a_later_step_alone_is_seen():
    class SetsLater(Tower):
        def __init__(self):
            super().__init__()
            self.blocks[1] = Scaled()
            self.steps = 0

        def forward(self, x):
            self.steps += 1
            if self.steps == 2:
                self.blocks[1].scale = 3.0
            return super().forward(x)

    model, given = SetsLater(), rows()
    optimised = ogc.optimize(model, given, memory_budget="least")
    assert "blocks.1" in optimised.graph
    results = []
    for run in (model, optimised):
        model.steps, model.blocks[1].scale = 0, 0.5
        torch.manual_seed(0)
        results.append([loss_of(run(*given)).detach() for _ in range(3)])
    assert all(map(torch.equal, *results))
    later = [calls for calls in optimised.report().calls if "the attribute scale is another" in calls.kind]
    assert later and not any(calls.is_plain for calls in later)


@pytest.mark.full
def test_a_part_that_sets_attributes_of_others_is_none():
    class Tells(Block):
        def __init__(self):
            super().__init__()
            self.others = []

        def forward(self, x):
            y = super().forward(x)
            self.others[0].heard = y.detach().mean()
            return y

    class Hears(Tower):
        def __init__(self):
            super().__init__()
            self.blocks[0] = Tells()
            self.blocks[0].others.append(Holder(self))
            self.heard = torch.zeros(())

        def between(self, x):
            return super().between(x) * (1 + self.heard)

    class Holder:
        def __init__(self, model):
            object.__setattr__(self, "model", model)

        def __setattr__(self, name, value):
            setattr(self.model, name, value)

    model, given = Hears(), rows()
    optimised = ogc.optimize(model, given, memory_budget="least")
    assert "blocks.0" not in optimised.graph
    assert "the model changes its attribute others[0].model.heard in each call" in str(optimised.plan)
    assert_same_training(model, optimised, given)


@pytest.mark.full
def test_what_an_opaque_module_in_a_part_leaves_behind_is_there():
    class Leaves(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(32, 32)
            self.aside = None

        def forward(self, x):
            y = self.layer(x)
            y = y.sin() if y.sum() > 0 else y.cos()
            self.aside = y.square().mean()
            return y

    class Takes(Tower):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(Block(), Leaves(), Block())

        def between(self, x):
            return super().between(self.inner(x)) * self.inner[1].aside

    model, given = Takes(), rows()
    optimised = ogc.optimize(model, given, memory_budget="least")
    assert_same_training(model, optimised, given)


class Routes(nn.Module):
    """Sends rows on by its data, so that as an opaque module it keeps all that its experts save."""

    def __init__(self, width=32):
        super().__init__()
        self.router = nn.Linear(width, 2)
        self.experts = nn.ModuleList(nn.Sequential(Block(width), Block(width)) for _ in range(2))

    def forward(self, x):
        chosen = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            if not bool((chosen == number).any()):
                continue
            out = out.index_add(0, rows, expert(x[rows]))
        return out


def routed():
    return nn.Sequential(nn.Linear(8, 32), Routes(), Block(), Routes(), Block())


@pytest.mark.full
def test_opaque_modules_that_hold_most_of_the_memory_are_planned_in_parts():
    model, given = routed(), rows()
    optimised = ogc.optimize(model, given, memory_budget="least")
    assert isinstance(optimised.plan, PartsPlan)
    assert "1.experts.0" in optimised.graph
    whole = ogc.solve(ogc.parse(model, given), memory_budget="least")
    assert optimised.plan.peak_bytes < 0.7 * whole.peak_bytes
    assert measured_peak(optimised, given) < 0.7 * measured_peak(model, given)
    assert_same_training(model, optimised, given)


@pytest.mark.full
def test_opaque_modules_are_left_whole_where_that_is_faster_or_they_hold_little():
    model, given = routed(), rows()
    assert isinstance(ogc.optimize(model, given, memory_budget=1.0).plan, ogc.Plan)
    least = ogc.optimize(model, given, memory_budget="least").plan.peak_bytes
    assert least < ogc.solve(ogc.parse(model, given), memory_budget="least").peak_bytes
    optimised = ogc.optimize(model, given, memory_budget=int(1.1 * least))
    assert isinstance(optimised.plan, PartsPlan)
    assert_same_training(model, optimised, given)
    with pytest.raises(SolveError):
        ogc.optimize(model, given, memory_budget=least // 2)


@pytest.mark.parametrize(
    ("goal", "message"),
    [
        ({"memory_budget": 0.5, "max_overhead": 0.1}, "not both"),
        ({"max_overhead": -1}, "must be a share of the plain step's time"),
        ({"memory_budget": "much"}, "memory_budget must be bytes"),
        ({"solver": "chen", "memory_budget": 0.5}, "takes neither"),
        ({"solver": "best"}, "solver must be one of"),
        ({"profile": "guess"}, "profile must be"),
        ({"opaque_modules": ["blocks.9"]}, "has no submodule 'blocks.9'"),
    ],
)
def test_wrong_goal_are_told_as_ever(goal, message):
    with pytest.raises(InputError, match=message):
        ogc.optimize(Tower(), rows(), **goal)


# -- networks that people train ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_detection_model_of_torchvision():
    detection = pytest.importorskip("torchvision").models.detection
    model = detection.retinanet_resnet50_fpn(
        weights=None, weights_backbone=None, num_classes=5, min_size=128, max_size=160
    )
    boxes = [torch.tensor([[10.0, 10, 60, 60]]), torch.tensor([[20.0, 20, 90, 90]])]
    given = (
        [torch.rand(3, 128, 128), torch.rand(3, 120, 140)],
        [{"boxes": box, "labels": torch.tensor([number])} for number, box in enumerate(boxes, 1)],
    )
    assert_much_less(model, ogc.optimize(model, given, memory_budget="least"), given)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Wav2Vec2", "Hubert"])
def test_speech_models_with_layer_drop(kind):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=512,
        conv_dim=(64,) * 7,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        layerdrop=0.3,
        mask_time_length=2,
    )
    model, given = getattr(transformers, f"{kind}Model")(config).train(), (torch.randn(4, 16000),)
    plain = {"": "draws masks with numpy", "encoder": "leaves out layers by chance"}
    assert_much_less(model, optimize_in_parts(model, given, PlanOptions(ParseOptions(), SolveOptions()), plain), given)


def assert_much_less(model, optimised, given):
    """At least 30 % less memory, as expected, and the same three steps."""
    peaks, steps = [], []
    for _ in range(8):  # until all that the sample left out was planned
        optimised(*given)
    for what, found in ((measured_peak, peaks), (trace_of_training_of(model), steps)):
        for run in (model, optimised):
            torch.manual_seed(3)
            numpy.random.seed(3)
            found.append(what(run, given))
    assert peaks[1] <= 0.7 * peaks[0]
    assert peaks[1] <= 1.01 * optimised.plan.peak_bytes
    assert len(steps[0]) == len(steps[1])
    assert all(map(torch.equal, *steps))


def trace_of_training_of(model):
    return lambda run, given: trace_of_training(model, run, given)


class Aside(Tower):
    """What takes the memory is not in the parts."""

    def forward(self, x):
        y = torch.cat([x] * 40, -1).exp()
        for _ in range(4):
            y = scaled(y, 1.01).sin()
        return super().forward(x[:2]).mean() + y.mean()


@pytest.mark.parametrize("goal", [{}, {"max_overhead": 0.5}])
def test_parts_run_as_they_are_where_their_plans_save_nothing(goal, caplog):
    model, (given,) = Aside(), rows()
    given = given.repeat(40, *[1] * (given.dim() - 1))
    with caplog.at_level(logging.WARNING):
        optimised = ogc.optimize(model, given, **goal)
    assert optimised.plan.is_plain and not optimised.plan.overhead and not optimised.code
    assert optimised.plan.peak_bytes == optimised.plan.plain_peak_bytes
    assert "no plan of its parts needs less memory than the plain model" in caplog.text
    assert_same_training(model, optimised, (given,))
    assert not optimised.report().planned
