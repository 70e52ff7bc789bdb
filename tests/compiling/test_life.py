"""backend="ogc" where torch.compile leads a life of its own: sizes, limits, autocast, compiled autograd, what is not
compiled. Numbers are those of backend="eager", or of "aot_eager" where AOTAutograd itself computes otherwise."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._dynamo.compiled_autograd import _enable as compiled_autograd
from torch.utils.checkpoint import checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.usefixtures("fresh"),
]


@pytest.fixture
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def network():
    torch.manual_seed(0)
    layers = (nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.Dropout(0.1), nn.Tanh(), nn.LayerNorm(32))
    return nn.Sequential(*(nn.Sequential(*layers) for _ in range(3)))


X = torch.randn(256, 32, generator=torch.Generator().manual_seed(1))


def step(run, model, x=X, around=nullcontext):
    model.zero_grad()
    torch.manual_seed(1)
    with around():
        y = run(x)
    y.float().square().mean().backward()
    return [y.detach(), *(p.grad for p in model.parameters()), torch.rand(1)]


def planned(model, budget=0.7, **how):
    return torch.compile(model, backend="ogc", options={"memory_budget": budget}, **how)


def assert_same(model, around=nullcontext, yardstick="eager", **how):
    ours = step(planned(model, **how), model, around=around)
    assert all(map(torch.equal, ours, step(torch.compile(model, backend=yardstick, **how), model, around=around)))


@pytest.mark.full
@pytest.mark.parametrize("how", [{"fullgraph": True}, {"dynamic": True}, {"dynamic": False}])
def test_options_of_torch_compile(how):
    assert_same(network(), **how)


@pytest.mark.parametrize("budget", [0.7, pytest.param("1MB", marks=pytest.mark.full)])
def test_sizes_that_are_said_to_change(budget):
    model, x, y = network(), X.clone(), X[:192].clone()
    torch._dynamo.mark_dynamic(x, 0)
    run = planned(model, budget)
    for given in (x, y):
        assert all(map(torch.equal, step(run, model, given), step(model, model, given)))


@pytest.mark.full
def test_beyond_the_limit_of_recompilations_the_plain_model_runs():
    model = network()
    run = planned(model, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        for rows in (64, 96, 128, 160):
            assert all(map(torch.equal, step(run, model, X[:rows]), step(model, model, X[:rows])))


@pytest.mark.full
def test_autocast():
    assert_same(network(), lambda: torch.autocast("cpu", torch.bfloat16), "aot_eager")


@pytest.mark.full
def test_parts_that_are_not_compiled():
    model = network()
    model[1].forward = torch.compiler.disable(model[1].forward)
    assert_same(model)


@pytest.mark.full
def test_hooks_are_called():
    model, seen = network(), []
    model[1].register_forward_hook(lambda *args: seen.append(1))
    assert_same(model)
    assert len(seen) == 2


@pytest.mark.full
def test_checkpoints_inside():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = network()

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    assert_same(Checkpointed(), yardstick="aot_eager")


@pytest.mark.full
def test_compiled_autograd():
    model = network()

    def trained(run):
        with compiled_autograd(torch.compile(backend="eager")):
            return step(run, model)

    assert all(map(torch.equal, trained(planned(model)), trained(torch.compile(model, backend="eager"))))


@pytest.mark.full
def test_a_mode_is_said_by_options():
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no mode 'reduce-overhead'; the same with Ind"):
        torch.compile(network(), backend="ogc", mode="reduce-overhead")(X)
    assert "triton.cudagraphs" in torch._inductor.list_mode_options("reduce-overhead")


@pytest.mark.full
def test_a_second_derivative_is_refused_by_torch():
    model, x = network(), X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(planned(model)(x).square().mean(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        gradient.sum().backward()


@pytest.mark.full
def test_without_gradients_nothing_changes():
    model = network().eval()
    run = planned(model)
    with torch.no_grad():
        assert torch.equal(run(X), model(X))
    with torch.inference_mode():
        assert torch.equal(run(X), model(X))
    assert torch.equal(run(X), model(X))
