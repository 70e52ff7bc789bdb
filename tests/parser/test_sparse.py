"""Sparse tensors, which no program holds: as buffers, parameters and arguments, and made inside of a forward."""

import pytest
import torch
from torch import nn

import ogc

pytestmark = pytest.mark.filterwarnings("ignore:Sparse:UserWarning")  # torch's, of a beta state and of checks

LAYOUTS = {"coo": torch.Tensor.to_sparse, "csr": torch.Tensor.to_sparse_csr, "csc": torch.Tensor.to_sparse_csc}
EDGES = torch.eye(6) + torch.diag(torch.ones(5), 1)
XS = [torch.randn(6, 8, generator=torch.Generator().manual_seed(n)) for n in range(3)]


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))


class Held(nn.Module):
    """A layer that holds a sparse matrix, as a buffer or parameter, and multiplies by it or not."""

    def __init__(self, layout, kind, is_used=True):
        super().__init__()
        self.layer, self.is_used = nn.Linear(8, 8), is_used
        matrix = LAYOUTS[layout](EDGES)
        if kind == "parameter":
            self.matrix = nn.Parameter(matrix)
        else:
            self.register_buffer("matrix", matrix)

    def forward(self, x):
        y = self.layer(x)
        return torch.sparse.mm(self.matrix, y) if self.is_used else y


def by_indices(x):
    indices = torch.tensor([[0, 1, 2], [1, 2, 3]])
    return torch.sparse.mm(torch.sparse_coo_tensor(indices, x[0, :3], (6, 6)), x)


def by_rows(x):
    return torch.sparse_csr_tensor(torch.arange(7), torch.arange(6), x[:, 0], (6, 6)) @ x


def of_itself(x):
    return torch.sparse.mm(x.relu().to_sparse(), torch.eye(8))


def softmax(x):
    return torch.sparse.softmax(x.to_sparse(), 1).to_dense()


class Makes(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.layer, self.make = nn.Linear(8, 8), make

    def forward(self, x):
        return self.make(self.layer(x))


class Gives(nn.Module):
    """Whose submodules hand a sparse tensor to one another."""

    def __init__(self):
        super().__init__()
        self.layer, self.sparse, self.dense = nn.Linear(8, 8), ToSparse(), ToDense()

    def forward(self, x):
        return self.dense(self.sparse(self.layer(x)))


class ToSparse(nn.Module):
    def forward(self, x):
        return x.relu().to_sparse()


class ToDense(nn.Module):
    def forward(self, x):
        return x.to_dense()


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = Block(), Block()

    def forward(self, x, edges):
        return self.last(edges @ self.first(x))


def dense(tensor):
    return tensor.detach().to_dense().clone()


def steps(model, run, *more):
    seen, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.01)
    for x in XS:
        optimizer.zero_grad()
        y = run(x, *more)
        y.square().mean().backward()
        seen += [y, *(p.grad for p in model.parameters())]
        optimizer.step()
        seen += model.state_dict().values()
    return [dense(tensor) for tensor in seen]


def assert_same(model, plain, optimized, *more):
    assert all(map(torch.equal, steps(plain, plain, *more), steps(model, optimized, *more)))


def made(make):
    """Two that are equal: torch copies no compressed tensors."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    return models


def opaque_of(optimized):
    return {op.module for op in optimized.graph.operations if op.target.startswith("opaque")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sparse_buffer_that_is_not_used_changes_nothing(layout):
    model, plain = made(lambda: nn.Sequential(Block(), Held(layout, "buffer", is_used=False), Block()))
    optimized = ogc.optimize(model, XS[0], verify=True, memory_budget="least")
    assert not opaque_of(optimized)
    assert_same(model, plain, optimized)


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_module_that_holds_a_sparse_matrix_is_an_opaque_module(layout, kind):
    model, plain = made(lambda: nn.Sequential(Block(), Held(layout, kind), Block()))
    optimized = ogc.optimize(model, XS[0], memory_budget="least")
    assert opaque_of(optimized) == {"1"}
    assert_same(model, plain, optimized)


@pytest.mark.parametrize("make", [by_indices, by_rows, of_itself, softmax])
def test_a_module_that_makes_a_sparse_matrix_is_an_opaque_module(make):
    model, plain = made(lambda: nn.Sequential(Block(), Makes(make), Block()))
    optimized = ogc.optimize(model, XS[0], memory_budget="least")
    assert opaque_of(optimized) == {"1"}
    assert_same(model, plain, optimized)


def test_a_module_within_which_sparse_tensors_go_from_one_to_another_is_an_opaque_module():
    model, plain = made(lambda: nn.Sequential(Block(), Gives(), Block()))
    optimized = ogc.optimize(model, XS[0], memory_budget="least")
    assert opaque_of(optimized) == {"1"}
    assert_same(model, plain, optimized)


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_model_with_a_sparse_argument_is_planned_in_parts(layout):
    model, plain = made(Graph)
    edges = LAYOUTS[layout](EDGES)
    optimized = ogc.optimize(model, (XS[0], edges), memory_budget="least")
    assert {part.name for part in optimized.plan.parts} == {"first", "last"}
    assert_same(model, plain, optimized, edges)


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_sparse_argument_in_the_place_of_a_dense_one_runs_the_plain_model(layout):
    model, plain = made(Graph)
    optimized = ogc.optimize(model, (XS[0], EDGES), memory_budget="least")
    assert_same(model, plain, optimized, LAYOUTS[layout](EDGES))
    assert_same(model, plain, optimized, EDGES)
    assert [call.runs.startswith("plain") for call in optimized.report().calls] == [True, False]
