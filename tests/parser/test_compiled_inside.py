"""What was compiled before: blocks, in a wrapper or in place, and functions that a forward calls, stay compiled."""

import pytest
import torch
from helpers import measured_peak
from torch import nn

import ogc

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::DeprecationWarning:torch")

XS = [torch.randn(4, 8, generator=torch.Generator().manual_seed(n)) for n in range(3)]


class Counting:
    """A backend of torch.compile that counts the calls of what it made."""

    def __init__(self):
        self.calls = 0

    def __call__(self, graph, inputs):
        def run(*args):
            self.calls += 1
            return graph.forward(*args)

        return run


@pytest.fixture
def backend():
    torch.compiler.reset()
    return Counting()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.narrow(torch.relu(self.wide(x)))


def wrapped(backend):
    return torch.compile(Block(), backend=backend)


def in_place(backend):
    block = Block()
    block.compile(backend=backend)
    return block


def with_forward(backend):
    block = Block()
    block.forward = torch.compile(block.forward, backend=backend)
    return block


class CallsFunction(nn.Module):
    def __init__(self, backend):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.function = torch.compile(lambda x: torch.tanh(x) * x, backend=backend)

    def forward(self, x):
        return self.function(self.layer(x))


class CallsMethod(nn.Module):
    """Whose compiled method calls a submodule."""

    def __init__(self, backend):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.inner = torch.compile(self.inner_, backend=backend)

    def inner_(self, x):
        return torch.tanh(self.layer(x))

    def forward(self, x):
        return x + self.inner(x)


KINDS = [wrapped, in_place, with_forward, CallsFunction, CallsMethod]


class Whole(nn.Sequential):
    def __init__(self, kind, backend):
        super().__init__(Block(), kind(backend), Block())


class Branches(nn.Module):
    """It goes by the data, so that its blocks are planned one by one."""

    def __init__(self, kind, backend):
        super().__init__()
        self.first, self.compiled, self.last = Block(), kind(backend), Block()

    def forward(self, x):
        x = self.first(x)
        x = self.compiled(x if x.sum() > 0 else -x)
        return self.last(x)


class Alternates(Branches):
    """The sample leaves the compiled block out."""

    def __init__(self, kind, backend):
        super().__init__(kind, backend)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        x = self.first(x)
        return self.last(x if self.calls % 2 else self.compiled(x))


class CallsItself(CallsFunction):
    """The compiled function is called by the model itself."""

    def __init__(self, backend):
        super().__init__(backend)
        self.first = nn.Sequential(Block(), Block())

    def forward(self, x):
        return super().forward(self.first(x))


class CallsMethodItself(CallsMethod):
    """Its compiled method calls blocks, which are in the compiled code."""

    def __init__(self, backend):
        super().__init__(backend)
        self.layer, self.first = nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block())

    def forward(self, x):
        return super().forward(self.first(x))


def made(make):
    """Two that are equal: torch does not copy what is compiled in place."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    return models


def steps(run):
    seen, optimizer = [], torch.optim.SGD(run.parameters(), lr=0.05)
    for x in XS:
        optimizer.zero_grad()
        y = run(x)
        y.square().mean().backward()
        optimizer.step()
        seen += [y.detach(), *(p.grad.clone() for p in run.parameters() if p.grad is not None)]
    return seen


def assert_same(make, backend, calls):
    """The same training as the plain model, in which compiled code is called so often."""
    plain, model = made(make)
    expected = steps(plain)
    optimized = ogc.optimize(model, XS[0], memory_budget="least")
    before = backend.calls
    ours = steps(optimized)
    assert len(expected) == len(ours)
    assert all(map(torch.equal, expected, ours))
    assert backend.calls - before >= calls
    return optimized


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_code_makes_its_module_an_opaque_module(kind, backend):
    optimized = assert_same(lambda: Whole(kind, backend), backend, len(XS))
    assert {op.module for op in optimized.graph.operations if op.target.startswith("opaque")} == {"1"}


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_blocks_beside_parts(kind, backend):
    optimized = assert_same(lambda: Branches(kind, backend), backend, len(XS))
    assert {part.name for part in optimized.plan.parts} >= {"first", "last"}
    assert not any(part.name.startswith("compiled") for part in optimized.plan.parts)


@pytest.mark.full
@pytest.mark.parametrize("kind", [wrapped, in_place])
def test_compiled_blocks_that_the_sample_leaves_out(kind, backend):
    optimized = assert_same(lambda: Alternates(kind, backend), backend, len(XS) // 2)
    assert {part.name for part in optimized.plan.parts} == {"first", "last"}


@pytest.mark.full
@pytest.mark.parametrize("kind", [wrapped, in_place])
def test_nothing_but_compiled_blocks(kind, backend):
    assert_same(lambda: nn.Sequential(*(kind(backend) for _ in range(3))), backend, 3 * len(XS))


@pytest.mark.parametrize("kind", [CallsItself, CallsMethodItself])
def test_a_model_that_calls_compiled_code_itself_is_planned_in_parts(kind, backend):
    optimized = assert_same(lambda: kind(backend), backend, len(XS))
    assert "first" in {part.name for part in optimized.plan.parts}


def test_a_forward_that_is_compiled_as_a_whole_is_refused_in_own_words(backend):
    class Compiled(Block):
        forward = torch.compile(Block.forward, backend=backend)

    with pytest.raises(ogc.ParseError, match="the forward calls compiled code at") as caught:
        ogc.optimize(Compiled(), XS[0], memory_budget="least")
    assert "INTERNAL ASSERT" not in str(caught.value)


class Residual(nn.Module):
    def __init__(self, width, drop):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(drop)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.drop(self.narrow(torch.nn.functional.gelu(self.wide(self.norm(x)))))


@pytest.mark.full
@pytest.mark.parametrize(("is_wrapped", "drop"), [(True, 0.0), (False, 0.1)])
def test_blocks_that_inductor_compiled_are_recomputed(is_wrapped, drop):
    """One compilation serves all blocks, and plan and recomputation need no other."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    blocks = [Residual(32, drop) for _ in range(5)]
    if is_wrapped:
        blocks = [torch.compile(block, backend="inductor") for block in blocks]
    for block in [] if is_wrapped else blocks:
        block.compile(backend="inductor")
    model, x = nn.Sequential(nn.Linear(8, 32), *blocks, nn.Linear(32, 8)), torch.randn(256, 8)
    optimized = ogc.optimize(model, x, memory_budget=0.6)
    assert {op.module for op in optimized.graph.operations if op.target.startswith("opaque")} == set("12345")

    def trained(run):
        model.zero_grad()
        torch.manual_seed(3)
        y = run(x)
        y.square().mean().backward()
        return [y.detach(), *(p.grad for p in model.parameters()), torch.get_rng_state()]

    assert all(map(torch.equal, trained(optimized), trained(model)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    plain, ours = measured_peak(model, (x,)), measured_peak(optimized, (x,))
    assert ours <= 1.05 * optimized.plan.peak_bytes and ours <= 0.62 * plain
