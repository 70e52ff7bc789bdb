"""Optimized models on many devices: two processes, gloo, bitwise what the plain model does on them."""

import copy
from contextlib import nullcontext
from queue import SimpleQueue
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn
from ranks import Told
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import ogc
from ogc.runtime import frame
from ogc.torch_state import ranks as of_torch
from ogc.torch_state.ranks import alone


class Block(nn.Module):
    def __init__(self, width=16, extra=None):
        super().__init__()
        self.wide, self.norm, self.narrow = (
            nn.Linear(width, 4 * width),
            nn.LayerNorm(width),
            nn.Linear(4 * width, width),
        )
        self.extra = extra

    def forward(self, x):
        x = x + self.narrow(torch.nn.functional.gelu(self.wide(self.norm(x))))
        return x if self.extra is None else self.extra(x)


class Network(nn.Module):
    """Blocks with dropout and a buffer; one parameter is left out where there are many rows, one never used."""

    def __init__(self, blocks=3, width=16, norm=None):
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.dropout, self.norm, self.head = nn.Dropout(0.2), norm or nn.BatchNorm1d(width), nn.Linear(width, 4)

    def forward(self, x):
        return self.head(self.norm(self.dropout(self.blocks(x))))


class Unused(Network):
    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(3, 3)


def batch(rank, step, rows=32, width=16):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, width, generator=generator)


def trained(rank, run, parameters, steps=3, rows=(32, 32, 32), context=nullcontext, width=16):
    """Everything that some steps of training leave behind."""
    torch.manual_seed(3 + rank)
    seen, optimizer = [], torch.optim.SGD(list(parameters), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        with context(step):
            loss = run(batch(rank, step, rows[step], width)).square().mean()
            loss.backward()
        seen += [loss.detach().clone()]
        seen += [p.grad.clone() if p.grad is not None else torch.zeros(0) for p in parameters]
        optimizer.step()
        seen += [p.detach().clone() for p in parameters]
        seen.append(torch.get_rng_state())
    return seen


def assert_same(plain, ours):
    assert len(plain) == len(ours)
    for number, (a, b) in enumerate(zip(plain, ours, strict=True)):
        assert torch.equal(a, b), f"tensor {number} of {len(plain)} differs"


class Opened:
    """Counts the frames that are opened: none where the plain model runs."""

    def __enter__(self):
        self.count, self.original = 0, frame.Step.open

        def open_one(*args):
            self.count += 1
            return self.original(*args)

        frame.Step.open = open_one
        return self

    def __exit__(self, *error):
        frame.Step.open = self.original


# -- DistributedDataParallel -------------------------------------------------------------------------------


OPTIONS = {
    "plain": {},
    "find unused": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "bucket views": {"gradient_as_bucket_view": True},
    "no broadcast": {"broadcast_buffers": False},
    "small buckets": {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True},
}


def ddp(rank, name, kind, order):
    torch.manual_seed(0)
    plain = kind()
    other = copy.deepcopy(plain)
    options = OPTIONS.get(name, {})
    expected = DDP(plain, **options)
    sample = None if name == "without a sample" else batch(rank, 0)
    if order == "before":
        ours = DDP(ogc.optimize(other, sample, memory_budget="least"), **options)
    else:
        ours = ogc.optimize(DDP(other, **options), sample, memory_budget="least")
    runs = []
    for one in (expected, ours):
        assert isinstance(one, DDP)
        context = nullcontext_of
        if name == "no_sync":
            context = lambda step, one=one: one.no_sync() if step < 2 else nullcontext()  # noqa: E731
        if name == "comm hook":
            one.register_comm_hook(None, bf16_compress_hook)
        if name == "autocast":
            context = lambda step: torch.autocast("cpu", dtype=torch.bfloat16)  # noqa: E731
        with Opened() as opened:
            runs.append(trained(rank, one, list(one.parameters()), context=context))
        runs[-1] += list(one.state_dict().values())
    assert_same(*runs)
    assert opened.count >= 3
    assert list(expected.state_dict()) == list(ours.state_dict())
    return runs[1][1]


def nullcontext_of(step):
    return nullcontext()


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("name", [*OPTIONS, "no_sync", "comm hook", "autocast", "without a sample"])
@pytest.mark.full
def test_data_parallel(ranks, name, order):
    kind = Unused if name == "find unused" else Network
    one, other = ranks.run(ddp, name, kind, order)
    assert torch.equal(one, other) or name == "no_sync"


# -- Collectives in a forward ------------------------------------------------------------------------------


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        y = x.clone()
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient, None


class NormOverRanks(nn.Module):
    """As ``SyncBatchNorm``, which a CPU refuses."""

    def __init__(self, width=16):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(width))
        self.weight = nn.Parameter(torch.ones(width))
        self.calls = 0

    def forward(self, x):
        counts.append("norm")
        sums = SumOverRanks.apply(torch.stack([x.sum(0), x.square().sum(0)]), dist.group.WORLD)
        rows = dist.get_world_size() * x.shape[0]
        mean = sums[0] / rows
        with torch.no_grad():
            self.running_mean.lerp_(mean, 0.1)
        return (x - mean) * torch.rsqrt(sums[1] / rows - mean.square() + 1e-3) * self.weight


class Gathered(nn.Module):
    """As a contrastive loss gathers what other ranks have. Its collective is counted where it is run."""

    def forward(self, x):
        return x + torch.stack(dist.nn.functional.all_gather(x)).mean(0)


class Functional(nn.Module):
    def forward(self, x):
        from torch.distributed import _functional_collectives as functional

        counts.append("functional")
        return x * functional.all_reduce(x.detach(), "sum", dist.group.WORLD).mean()


class InPlace(nn.Module):
    def forward(self, x):
        counts.append("in place")
        y = x.detach().mean()
        dist.all_reduce(y)
        return x * y


def counted_all_gather(*args, run=dist.all_gather, **kwargs):
    counts.append("gather")
    return run(*args, **kwargs)


class Counts(SimpleQueue):
    """A list that planning does not put back, as nobody sees what is in it."""

    append = SimpleQueue.put

    def __len__(self):
        return self.qsize()

    def clear(self):
        while not self.empty():
            self.get()


counts = Counts()
COLLECTIVES = {"norm": NormOverRanks, "gather": Gathered, "functional": Functional, "in place": InPlace}


def collective(rank, name):
    torch.manual_seed(0)
    plain = Network(norm=COLLECTIVES[name]())
    other = copy.deepcopy(plain)
    if rank == 1:
        optimized = ogc.optimize(other, batch(rank, 0), memory_budget="least")  # while rank 0 is elsewhere
    dist.barrier()
    if rank == 0:
        optimized = ogc.optimize(other, batch(rank, 0), memory_budget="least")
    runs = []
    for one in (DDP(plain), DDP(optimized)):
        counts.clear()
        with Opened() as opened, patch.object(dist, "all_gather", counted_all_gather):
            runs.append(trained(rank, one, list(one.parameters())))
        runs[-1] += list(one.state_dict().values())
        assert [counts.get() for _ in range(len(counts))] == [name] * 3
    assert_same(*runs)
    assert opened.count >= 3


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.full
def test_collectives_of_a_forward_run_once(ranks, name):
    ranks.run(collective, name)


def uneven(rank, change):
    """Calls are others on one rank than the sample was: it plans while the other one waits for its collective."""
    torch.manual_seed(0)
    plain = Network(norm=NormOverRanks())
    other = copy.deepcopy(plain)
    optimized = ogc.optimize(other, batch(rank, 0), memory_budget="least")
    rows, runs = (32, 20 if rank and change == "size" else 32, 32), []
    for model in (plain, optimized):
        counts.clear()
        run = DDP(model)

        def called(x, run=run):
            return run(x.requires_grad_(bool(rank) and change == "gradient"))

        with Told() as told, Opened() as opened:
            runs.append(trained(rank, called, list(run.parameters()), rows=rows))
        planning = len(counts) - 3
    assert_same(*runs)
    assert opened.count >= 3
    return planning, told.lines


@pytest.mark.parametrize("change", ["size", "gradient"])
@pytest.mark.full
def test_one_rank_plans_inside_a_step(ranks, change):
    """Its forward runs for that, but nothing in it that the other ranks would have to join."""
    (none, _), (some, lines) = ranks.run(uneven, change)
    assert none == 0 and some > 0
    assert change == "size" or any("is ready" in line for line in lines)


def stand_ins(rank):
    """All collectives, on one rank alone."""
    from torch.distributed import _functional_collectives as functional

    if rank:
        return
    x, four = torch.arange(3.0), torch.arange(4.0).requires_grad_()
    with alone():
        for call in (dist.all_reduce, lambda t: dist.broadcast(t, 1), lambda t: dist.reduce(t, 1)):
            call(y := x.clone())
            assert torch.equal(x, y)
        dist.all_reduce(x.clone(), async_op=True).wait()
        dist.barrier()
        dist.all_gather(parts := [torch.empty(3), torch.empty(3)], x)
        assert all(torch.equal(part, x) for part in parts)
        dist.all_gather_into_tensor(both := torch.empty(6), x)
        assert torch.equal(both, torch.cat([x, x]))
        dist.reduce_scatter_tensor(half := torch.empty(2), torch.arange(4.0))
        assert torch.equal(half, torch.arange(2.0))
        dist.all_to_all_single(other := torch.empty(4), torch.arange(4.0))
        assert torch.equal(other, torch.arange(4.0))
        dist.all_gather_object(objects := [None, None], {"a": 1})
        assert objects == [{"a": 1}] * 2
        dist.send(x, 1)
        dist.recv(nothing := torch.ones(3), 1)
        assert torch.equal(nothing, torch.zeros(3))
        assert torch.equal(functional.all_reduce(x, "sum", dist.group.WORLD) + 0, x)
        assert torch.equal(functional.all_gather_tensor(x, 0, dist.group.WORLD) + 0, torch.cat([x, x]))
        torch.cat(dist.nn.functional.all_gather(four)).sum().backward()
        assert four.grad is not None


@pytest.mark.full
def test_a_rank_that_plans_talks_to_nobody(ranks):
    ranks.run(stand_ins)


# -- Equal plans -------------------------------------------------------------------------------------------


def decisions_of_ranks(rank, kind, goal, unequal):
    """The decisions of a plan on each rank, where operations take other times on each."""
    from ogc.parser.weigh import meter

    torch.manual_seed(0)
    model, rates = kind(), meter.Rates.seconds
    if unequal:
        noise = torch.Generator().manual_seed(rank + (1000 if goal else 0))

        def seconds(self, *args):
            return rates(self, *args) * (0.1 + 20 * float(torch.rand((), generator=noise)))

        meter.Rates.seconds = seconds
    try:
        plan = ogc.optimize(model, batch(rank, 0), **goal).plan
    finally:
        meter.Rates.seconds = rates
    if isinstance(plan, ogc.PartsPlan):
        return [part.plan.decisions for part in plan.parts]
    return plan.decisions


class InParts(Network):
    """Its own forward is what no program can hold."""

    def __init__(self):
        super().__init__(blocks=2)
        self.gathered = 0

    def forward(self, x):
        self.gathered = self.gathered + 1
        x = self.blocks(x)
        return self.head(self.norm(torch.cat(torch.distributed.nn.functional.all_gather(x))))


@pytest.mark.parametrize("kind", [Network, InParts])
def test_ranks_have_equal_plans(ranks, kind):
    one, other = ranks.run(decisions_of_ranks, kind, {"max_overhead": 0.15}, True)
    assert one == other


def alone_first(rank):
    """One rank plans by itself; the other one never does."""
    return ogc.optimize(Network(blocks=4), batch(rank, 0), memory_budget="least").plan.peak_bytes if rank else None


def test_one_rank_alone_optimizes(ranks):
    assert ranks.run(alone_first)[1] > 0


def in_parts(rank):
    torch.manual_seed(0)
    plain = InParts()
    other = copy.deepcopy(plain)
    optimized = ogc.optimize(other, batch(rank, 0), memory_budget="least")
    assert isinstance(optimized.plan, ogc.PartsPlan)
    runs = []
    for one in (plain, optimized):
        with Opened() as opened:
            runs.append(trained(rank, DDP(one), list(one.parameters())))
    assert_same(*runs)
    assert opened.count >= 3


def test_collectives_of_a_model_in_parts(ranks):
    ranks.run(in_parts)


def answers(rank):
    unasked = of_torch.answer_of_ranks("nobody's")
    first = of_torch.first_answer("whose", rank)
    again = of_torch.first_answer("whose", 7)
    known = of_torch.answer_of_ranks("whose")
    own = of_torch.first_answer(f"rank {rank}", rank)
    of_torch.store_of_all_ranks = lambda: Broken()
    try:
        broken, unknown = of_torch.first_answer("another", rank), of_torch.answer_of_ranks("whose")
    finally:
        of_torch.store_of_all_ranks = store
    assert own == broken == rank and first == again == known and unasked is unknown is None
    return first


store = of_torch.store_of_all_ranks


class Broken:
    """A store that nobody answers for."""

    def check(self, *given):
        raise dist.DistNetworkError("gone")

    compare_set = check


@pytest.mark.full
def test_ranks_have_one_answer(ranks):
    one, other = ranks.run(answers)
    assert one == other
