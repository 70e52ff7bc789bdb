"""Optimized models whose parameters are spread over two processes: bitwise what plain sharding gives."""

import copy
import threading
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import Told
from test_devices import Block, Network, NormOverRanks, Opened, assert_same, batch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor

import ogc
from ogc.torch_state.allocator import peak_bytes

WIDTH = 32

frugally = partial(ogc.optimize, memory_budget="least")


def sharded(model, how, options, optimize=lambda module, x: module, rows=32):
    """The model in units: its blocks and itself, optimized before or after that, as a whole or unit by unit."""
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0))
    options = {**options, "mesh": init_device_mesh("cpu", (dist.get_world_size(),))}  # where there are GPUs, too
    if how == "before":
        model = optimize(model, x)
    for number, block in enumerate(model.blocks):
        if how == "units before":
            block = model.blocks[number] = optimize(block, x)
        fully_shard(block, **options)
        if how == "units after":
            model.blocks[number] = optimize(block, x)
    fully_shard(model, **{**options, "reshard_after_forward": options.get("reshard_after_forward")})
    return optimize(model, x) if how == "after" else model


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def steps_of(rank, run, sizes, step_of=None):
    """All that some steps leave behind, and how often parameters were gathered."""
    torch.manual_seed(3 + rank)
    seen, gathers, gather = [], [], dist.all_gather_into_tensor

    def counted(*args, **kwargs):
        gathers.append(1)
        return gather(*args, **kwargs)

    optimizer = torch.optim.SGD(run.parameters(), lr=0.05, momentum=0.9)
    dist.all_gather_into_tensor = counted
    try:
        for step, rows in enumerate(sizes):
            optimizer.zero_grad()
            loss = run(batch(rank, step, rows, WIDTH)).square().mean()
            loss.backward()
            seen.append(loss.detach())
            optimizer.step()
            seen += [p.grad.to_local().clone() for p in run.parameters()]
            seen += [p.to_local().detach().clone() for p in run.parameters()]
            seen.append(torch.get_rng_state())
    finally:
        dist.all_gather_into_tensor = gather
    return [*seen, *(whole(value).clone() for value in run.state_dict().values())], len(gathers)


OPTIONS = {
    "default": {},
    "gathered again": {"reshard_after_forward": True},
    "kept gathered": {"reshard_after_forward": False},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
}


def sharding(rank, how, options, sizes):
    torch.manual_seed(0)
    plain = Network(width=WIDTH, norm=nn.LayerNorm(WIDTH) if options == "bf16" else None)
    other = copy.deepcopy(plain)
    expected, gathers = steps_of(rank, sharded(plain, how, OPTIONS[options]), sizes)
    optimized = sharded(other, how, OPTIONS[options], frugally)
    assert isinstance(optimized, FSDPModule)
    with Opened() as opened, Told() as told:
        ours, ours_gathers = steps_of(rank, optimized, sizes)
    assert_same(expected, ours)
    assert opened.count >= 3 * len(sizes), (opened.count, told.lines)
    assert ours_gathers == gathers, (ours_gathers, gathers)
    optimized.unshard()
    optimized.reshard()
    return told.lines


def without_sample(rank, how):
    torch.manual_seed(0)
    plain = Network(width=WIDTH)
    other = copy.deepcopy(plain)
    expected, gathers = steps_of(rank, sharded(plain, how, {}), (32, 32))
    optimized = sharded(other, how, {}, lambda module, x: ogc.optimize(module, memory_budget="least"))
    with Opened() as opened, Told() as told:
        ours, ours_gathers = steps_of(rank, optimized, (32, 32))
    assert_same(expected, ours)
    assert opened.count and ours_gathers == gathers, (opened.count, told.lines)


@pytest.mark.parametrize("how", ["before", "after", "units before"])
@pytest.mark.full
def test_fully_sharded_without_a_sample(ranks, how):
    ranks.run(without_sample, how)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    "how", ["before", *(pytest.param(how, marks=pytest.mark.full) for how in ("after", "units before", "units after"))]
)
def test_fully_sharded(ranks, how, options):
    ranks.run(sharding, how, options, (32, 32, 32))


@pytest.mark.full
def test_fully_sharded_with_another_size(ranks):
    ranks.run(sharding, "after", "default", (32, 24, 32, 24))


def memory(rank, how, goal):
    """Peak bytes of a step, plain and optimized, and what was said."""
    torch.manual_seed(0)
    plain = Network(blocks=6, width=WIDTH, norm=nn.LayerNorm(WIDTH))
    other, rows, peaks = copy.deepcopy(plain), 512, []
    with Told() as told:
        for one in (sharded(plain, how, {}), sharded(other, how, {}, lambda m, x: ogc.optimize(m, x, **goal), rows)):
            x = batch(rank, 0, rows, WIDTH)

            def step(one=one, x=x):
                one(x).square().mean().backward()

            step()
            peaks.append(peak_bytes(step, x.device))
    return peaks, told.lines


@pytest.mark.parametrize("how", ["before", "after", "units after"])
@pytest.mark.full
def test_memory_of_a_sharded_model(ranks, how):
    for (plain, ours), _ in ranks.run(memory, how, {"memory_budget": "least"}):
        assert ours < (0.6 if how == "units after" else 0.5) * plain, (ours, plain)  # what is around units is plain


@pytest.mark.full
def test_goal_of_a_sharded_model(ranks):
    """A share is kept by each unit: less is run again, and more kept, than without."""
    (least, _), (share, _) = (
        ranks.run(memory, "after", goal)[0] for goal in ({"memory_budget": "least"}, {"memory_budget": 0.5})
    )
    (quick, _) = ranks.run(memory, "after", {"max_overhead": 0.05})[0]
    assert least[1] < share[1] < 0.52 * share[0]
    assert least[1] < quick[1]
    ranks.run(refused)


def shared(rank, how, options, **goal):
    """A budget for all units: plain and measured peak, and the plan; the bits are plain's."""
    torch.manual_seed(0)
    plain = Network(blocks=6, width=WIDTH, norm=nn.LayerNorm(WIDTH))
    rows, models, peaks, seen = 512, (plain, copy.deepcopy(plain)), [], []
    for model, optimize in zip(
        models, (lambda module, x: module, lambda module, x: ogc.optimize(module, x, **goal)), strict=True
    ):
        run, x = sharded(model, how, OPTIONS[options], optimize, rows), batch(rank, 0, rows, WIDTH)

        def step(run=run, x=x):
            run(x).square().mean().backward()

        seen.append(steps_of(rank, run, (rows, rows)))
        peaks.append(peak_bytes(step, x.device))
    assert_same(seen[0][0], seen[1][0])
    assert seen[0][1] == seen[1][1], "parameters are gathered as often"
    return peaks, run.plan.peak_bytes, run.plan.budget_bytes, [str(part.plan.decisions) for part in run.plan.parts]


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("after", "default"),
        *(
            pytest.param(how, options, marks=pytest.mark.full)
            for how, options in (
                ("before", "default"),
                ("after", "kept gathered"),
                ("before", "bf16"),
                ("after", "bf16"),
            )
        ),
    ],
)
def test_units_share_a_budget(ranks, how, options):
    (plain, _), *_ = ranks.run(partial(shared, memory_budget="least"), how, options)[0]
    budget = plain // 2
    found = ranks.run(partial(shared, memory_budget=budget), how, options)
    for (_, measured), promised, asked, _ in found:
        assert measured <= promised <= budget == asked
        assert promised == pytest.approx(measured, rel=0.06), "a unit's gradients count while they come"
    assert found[0][3] == found[1][3], "plans are the same on all ranks"


@pytest.mark.full
def test_sharded_before_or_after_the_plan_is_the_same(ranks):
    before, after = (ranks.run(partial(shared, memory_budget=0.5), how, "default")[0] for how in ("before", "after"))
    assert before[1:] == after[1:]


@pytest.mark.full
@pytest.mark.parametrize("gradients", ["none", "kept"])
def test_memory_of_a_device_for_a_sharded_model(ranks, gradients):
    """What the rank holds of parameters, gradients and the optimizer's state is counted."""
    memory = 2_500_000
    goal = {"device_memory": memory, "optimizer": torch.optim.AdamW, "gradients": gradients}
    own = 4 * sum(p.numel() for p in Network(blocks=6, width=WIDTH, norm=nn.LayerNorm(WIDTH)).parameters()) // 2
    for (plain, measured), promised, budget, _ in ranks.run(partial(shared, **goal), "after", "default"):
        assert measured <= promised <= budget < plain
        assert budget == pytest.approx(memory - (3 + (gradients == "kept")) * own, rel=0.05)


class Locked(Network):
    """It cannot be copied, and so not be planned without its shards."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.lock = threading.Lock()


def one_by_one(rank):
    torch.manual_seed(0)
    runs, x = [], batch(rank, 0, 32, WIDTH)
    for goal in ({"memory_budget": 0.5}, {"memory_budget": "1MB"}):
        run = sharded(Locked(width=WIDTH), "after", {}, lambda module, x, goal=goal: ogc.optimize(module, x, **goal))
        with Told() as told:
            run(x).sum().backward()
        runs.append((run.report().planned, run.report().plain, told.lines))
    return runs


@pytest.mark.full
def test_units_that_cannot_be_planned_together(ranks):
    for (planned, _, _), (none, plain, lines) in ranks.run(one_by_one):
        assert planned and (none, plain) == (0, 1)
        assert any("cannot be planned together" in line for line in lines), lines


def told(rank, how):
    """What a model tells of itself before its first step and after two, one of them in evaluation mode."""
    torch.manual_seed(0)
    model, x = Network(width=WIDTH), batch(rank, 0, 32, WIDTH)
    if how == "root after":
        model = ogc.optimize(
            fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),))), x, memory_budget="least"
        )
    else:
        model = sharded(model, how, {}, frugally)
    one = model.blocks[0] if how.startswith("units") else model
    is_planned = how in ("before", "units before")
    assert (one.plan is not None, one.graph is not None, one.code is not None) == (is_planned,) * 3
    before = one.report()
    assert (before.planned, before.plain) == (0, 0), str(before)
    with torch.no_grad():
        model(x)
    for _ in range(2):
        model(x).square().mean().backward()
    return str(one.report()), one.report().planned, str(one.plan)


@pytest.mark.parametrize("how", ["before", "after", "root after", "units before", "units after"])
@pytest.mark.full
def test_a_sharded_model_tells_what_it_does(ranks, how):
    for report, planned, plan in ranks.run(told, how):
        in_units = how in ("before", "after")
        assert planned >= 2 * (2 if in_units else 1), report
        assert ("blocks.1" in report) == in_units, report
        assert "gradients are off" in report, report
        assert ("is sharded; its units are planned" in plan) == in_units, plan


def without_anything_to_plan(rank):
    """Nothing of it can be planned: the plain model runs, and the report says so."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    fully_shard(model[0], mesh=mesh)
    model = ogc.optimize(
        fully_shard(model, mesh=mesh), batch(rank, 0, 4, WIDTH), opaque_modules=["0"], memory_budget="least"
    )
    for _ in range(2):
        model(batch(rank, 0, 4, WIDTH)).sum().backward()
    return model.plan, model.report().plain, str(model.report())


def test_a_sharded_model_that_runs_plain_says_so(ranks):
    for plan, plain, report in ranks.run(without_anything_to_plan):
        assert plan is None and plain == 2 and "no submodule of the sharded model is trained" in report


def compiled_units(rank):
    """Units that were compiled in place stay compiled."""
    torch.compiler.reset()
    calls, runs = [], []

    def backend(graph, inputs):
        return lambda *args: (calls.append(1), graph.forward(*args))[1]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of what it cannot compile
        for optimize in (lambda module, x: module, ogc.optimize):
            torch.manual_seed(0)
            model = Network(width=WIDTH, norm=nn.LayerNorm(WIDTH))
            for block in model.blocks:
                block.compile(backend=backend)
            runs.append((steps_of(rank, sharded(model, "after", {}, optimize), (32, 32))[0], len(calls)))
            calls.clear()
    (expected, plain_calls), (ours, our_calls) = runs
    assert_same(expected, ours)
    assert our_calls >= plain_calls > 0, runs


@pytest.mark.full
def test_units_that_were_compiled_stay_compiled(ranks):
    ranks.run(compiled_units)


def refused(rank):
    for goal, what in (({"chunks": 2}, "chunks does not go with it"), ({"verify": True}, "verify=")):
        with pytest.raises(ogc.InputError, match=what):
            sharded(Network(width=WIDTH), "after", {}, lambda module, x, goal=goal: ogc.optimize(module, x, **goal))


def parsed(rank):
    model = sharded(Network(width=WIDTH), "after", {})
    for function in (ogc.parse, ogc.estimate):
        with pytest.raises(ogc.InputError, match="is sharded, and is whole only while its unit"):
            function(model, batch(rank, 0, 32, WIDTH))


@pytest.mark.full
def test_a_sharded_model_is_not_parsed(ranks):
    ranks.run(parsed)


def parses(rank):
    """How many units of each kind are searched for plans."""
    from ogc.in_parts import make as module

    found, frugal = [], module.frugal
    module.frugal = lambda solving, graph: (found.append(len(graph)), frugal(solving, graph))[1]
    try:
        torch.manual_seed(0)
        model = sharded(Network(blocks=4, width=WIDTH), "after", {}, frugally)
        for _ in range(2):
            model(batch(rank, 0, 44, WIDTH)).square().mean().backward()  # of a size that no other test has planned for
    finally:
        module.frugal = frugal
    plan = model.plan
    assert {part.name for part in plan.parts} >= {"blocks.0", "blocks.3"}
    assert plan.peak_bytes < plan.plain_peak_bytes and "blocks.3" in str(plan), str(plan)
    return found


def test_equal_units_are_planned_once(ranks):
    found = ranks.run(parses)
    block = max(max(sizes, default=0) for sizes in found)
    # The first, whose input needs no gradient, and all others; none where the other rank was the first.
    assert max(sizes.count(block) for sizes in found) == 2


def collective_in_unit(rank):
    torch.manual_seed(0)
    plain = Network(width=WIDTH, norm=NormOverRanks(WIDTH))
    other = copy.deepcopy(plain)
    (expected, _), (ours, _) = (
        steps_of(rank, sharded(one, "after", {}, optimize), (32, 20 if rank else 32, 32))
        for one, optimize in ((plain, lambda module, x: module), (other, ogc.optimize))
    )
    assert_same(expected, ours)


def test_collectives_in_a_sharded_model(ranks):
    ranks.run(collective_in_unit)


# -- FullyShardedDataParallel ------------------------------------------------------------------------------


def wrapped(rank, how, orig):
    options = {
        "auto_wrap_policy": ModuleWrapPolicy({Block}),
        "use_orig_params": orig,
        "device_id": torch.device("cpu"),
    }
    torch.manual_seed(0)
    plain = Network(width=WIDTH, norm=nn.LayerNorm(WIDTH))
    other, x = copy.deepcopy(plain), batch(0, 0, 32, WIDTH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a CPU
        expected = flat_steps(rank, FSDP(plain, **options))
        if how == "before":
            optimized = FSDP(ogc.optimize(other, x, memory_budget="least"), **options)
        elif how == "after":
            optimized = ogc.optimize(FSDP(other, **options), x, memory_budget="least")
        else:
            for number, block in enumerate(other.blocks):
                other.blocks[number] = ogc.optimize(block, x, memory_budget="least")
            other.head = ogc.optimize(other.head, x, memory_budget="least")  # whose parameters are in one with others'
            optimized = FSDP(other, **options)
        with Opened() as opened, Told() as told:
            ours = flat_steps(rank, optimized)
    assert isinstance(optimized, FSDP)
    assert_same(expected, ours)
    assert opened.count >= 9, told.lines


def flat_steps(rank, run):
    torch.manual_seed(3 + rank)
    seen, optimizer = [], torch.optim.SGD(run.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        loss = run(batch(rank, step, 32, WIDTH)).square().mean()
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in run.parameters() if p.grad is not None)]
        optimizer.step()
        seen += [*(p.detach().clone() for p in run.parameters()), torch.get_rng_state()]
    return seen


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("how", ["before", "after", "units before"])
def test_wrapped(ranks, how, orig):
    ranks.run(wrapped, how, orig)


# -- Tensor parallel ---------------------------------------------------------------------------------------


def with_tensors_of_all_ranks(rank):
    """Parameters and inputs become DTensors, without any hook."""
    torch.manual_seed(0)
    mesh, runs = init_device_mesh("cpu", (2,)), []
    plain = Block(WIDTH)
    other = copy.deepcopy(plain)
    for one in (plain, ogc.optimize(other, batch(0, 0, 32, WIDTH), memory_budget="least")):
        one = distribute_module(one, mesh)
        one(distribute_tensor(batch(0, 0, 32, WIDTH), mesh, [Shard(0)])).square().mean().backward()
        runs.append([whole(p.grad).clone() for p in one.parameters()])
    assert_same(*runs)


@pytest.mark.full
def test_a_model_of_tensors_of_all_ranks_runs_plain(ranks):
    ranks.run(with_tensors_of_all_ranks)


# -- A training loop ---------------------------------------------------------------------------------------


def loop(rank, how):
    """Evaluation first, then gradients added up over two batches, the first without other ranks."""
    torch.manual_seed(0)
    plain = Network(width=WIDTH, norm=nn.LayerNorm(WIDTH))
    other, runs = copy.deepcopy(plain), []
    for one, optimize in ((plain, lambda module, x: module), (other, ogc.optimize)):
        model = sharded(one, how, {}, optimize)
        torch.manual_seed(3 + rank)
        optimizer, seen = torch.optim.AdamW(model.parameters(), lr=0.01), []
        for step in range(3):
            model.eval()
            with torch.no_grad():
                seen.append(model(batch(rank, 10 + step, 16, WIDTH)))
            model.train()
            for part in range(2):
                model.set_requires_gradient_sync(part == 1)
                loss = model(batch(rank, 2 * step + part, 32, WIDTH)).square().mean()
                loss.backward()
                seen.append(loss.detach())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            seen += [whole(p).detach().clone() for p in model.parameters()]
        runs.append(seen)
    assert_same(*runs)


@pytest.mark.full
@pytest.mark.parametrize("how", ["before", "after", "units after"])
def test_a_loop_with_sharded_parameters(ranks, how):
    ranks.run(loop, how)
