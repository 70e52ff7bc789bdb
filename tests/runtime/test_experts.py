"""Experts on several ranks: tokens go to them and come back, by counts that differ by rank and step."""

import pytest
import torch
import torch.distributed as dist
from test_devices import assert_same
from torch import nn
from torch.nn import functional as F

import ogc
from ogc.torch_state.allocator import peak_bytes

WIDTH = 32


class Exchange(torch.autograd.Function):
    """Rows go to other ranks, so many to each; their gradients come back."""

    @staticmethod
    def forward(ctx, x, sent, received):
        ctx.counts = sent, received
        result = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(result, x.contiguous(), received, sent)
        return result

    @staticmethod
    def backward(ctx, gradient):
        sent, received = ctx.counts
        result = gradient.new_empty(sum(sent), *gradient.shape[1:])
        dist.all_to_all_single(result, gradient.contiguous(), sent, received)
        return result, None, None


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Dispatch(nn.Module):
    """Rows in the order of the ranks that they go to, all of them or so many for each rank; the others are dropped."""

    def __init__(self, capacity):
        super().__init__()
        self.capacity = capacity

    def forward(self, x, where):
        ranks = dist.get_world_size()
        if self.capacity is not None:
            order = torch.stack([(where - rank).abs().argsort(stable=True)[: self.capacity] for rank in range(ranks)])
            sent = received = torch.full((ranks,), self.capacity)
            order = order.flatten()
        else:
            order, sent = where.argsort(stable=True), torch.bincount(where, minlength=ranks)
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent)
        return Exchange.apply(x[order], sent.tolist(), received.tolist()), order, sent, received


class Combine(nn.Module):
    def forward(self, like, y, order, sent, received):
        back = Exchange.apply(y, received.tolist(), sent.tolist())
        return torch.zeros_like(like).index_add(0, order, back)


class Experts(nn.Module):
    """The best two experts of each token's, one on each rank, and one that all tokens share; tells their balance."""

    def __init__(self, capacity):
        super().__init__()
        self.router, self.dispatch, self.combine = nn.Linear(WIDTH, 2), Dispatch(capacity), Combine()
        self.expert, self.shared = Expert(), Expert()

    def forward(self, x):
        rows = x.flatten(0, 1)
        shares = self.router(rows).softmax(-1)
        share, where = shares.max(-1)
        given, *route = self.dispatch(rows, where)
        result = self.combine(rows, self.expert(given), *route) * share[:, None]
        return (result + self.shared(rows)).view_as(x), shares.mean(0).square().sum()


class Block(nn.Module):
    def __init__(self, capacity):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.experts = nn.MultiheadAttention(WIDTH, 4, batch_first=True), Experts(capacity)

    def forward(self, x):
        given = self.first(x)
        x = x + self.attention(given, given, given, need_weights=False)[0]
        result, balance = self.experts(self.second(x))
        return x + result, balance


class Model(nn.Module):
    def __init__(self, capacity, blocks=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block(capacity) for _ in range(blocks))

    def forward(self, x):
        balances = []
        for block in self.blocks:
            x, balance = block(x)
            balances.append(balance)
        return x.square().mean() + 0.01 * torch.stack(balances).sum()


def trained(rank, capacity, optimize):
    torch.manual_seed(0)
    model = Model(capacity)
    run, seen = optimize(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(4):
        torch.manual_seed(5 + step + 10 * rank)
        optimizer.zero_grad()
        loss = run(torch.randn(8, 32, WIDTH))
        loss.backward()
        optimizer.step()
        seen += [loss.detach(), *(tensor.detach().clone() for p in model.parameters() for tensor in (p, p.grad))]
    x = torch.randn(8, 32, WIDTH)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return seen, peak_bytes(lambda: run(x).backward(), "cpu"), run


def experts(rank, capacity):
    expected, most, _ = trained(rank, capacity, lambda model: model)
    ours, peak, run = trained(rank, capacity, lambda model: ogc.optimize(model, memory_budget="least"))
    assert_same(expected, ours)
    assert not run.report().plain, str(run.report())
    return most, peak, {part.name for part in getattr(run.plan, "parts", ())}


@pytest.mark.parametrize("capacity", [pytest.param(None, id="dropless"), pytest.param(100, id="so many a rank")])
@pytest.mark.full
def test_experts_of_all_ranks(ranks, capacity):
    for most, peak, parts in ranks.run(experts, capacity):
        assert peak < 0.5 * most
        assert (capacity is not None) == (not parts), "with one size there is one plan"
        assert capacity or {"blocks.0.experts.expert", "blocks.1.attention", "blocks.2.experts.shared"} <= parts
