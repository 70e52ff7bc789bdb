"""Reports where what ran again computed something else than the forward had."""

from __future__ import annotations

import torch
from reported import Report, learn, registering
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from trained import BATCH, layers

REPORTS: dict[str, Report] = {}
report = registering(REPORTS)


def chain(*kinds, depth=6, width=32):
    """Layers with what a report is about between them."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), *(kind() for kind in kinds)) for _ in range(depth)))


@report("pytorch/pytorch#193671", 0.7)
def noise_that_the_kernel_fills_in_after_it_is_saved(training):
    """A leaky slope drawn at random, whose noise is an argument that the kernel writes."""
    x = torch.randn(BATCH, 32)
    run = training.optimize(chain(lambda: nn.RReLU(0.1, 0.9), nn.Tanh), x)
    learn(training, run, (x,))


@report("allenai/OLMo-core#828", 0.7)
def masks_of_dropout_in_each_block(training):
    x = torch.randn(BATCH, 32)
    run = training.optimize(chain(lambda: nn.Dropout(0.15), nn.GELU), x)
    learn(training, run, (x,))
    training.same(torch.randn(4))


class ListsOfLists(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.drop = layers(4, out=32), nn.Dropout(0.3)

    def forward(self, scales):
        return [[self.drop(self.body(x)) for x in scale["rows"]] for scale in scales]


@report("pytorch/pytorch#121212")
def random_numbers_with_tensors_in_nested_arguments(training):
    sample = [{"rows": [torch.randn(24, 32), torch.randn(16, 32)]}, {"rows": [torch.randn(8, 32)]}]
    run = training.optimize(ListsOfLists(), (sample,))
    learn(training, run, (sample,))


class SharedUnderAutocast(nn.Module):
    """A projection that two blocks share, and that runs before them once more."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(32, 32)
        self.first, self.second = layers(2, out=32, drop=0.0), layers(2, out=32, drop=0.0)

    def forward(self, x):
        x = self.shared(x)
        x = x + torch.tanh(self.shared(self.first(x)))
        return x + torch.tanh(self.shared(self.second(x)))


def under_autocast(run):
    """The forward alone under autocast, as is advised."""

    def forward(*inputs):
        with torch.autocast("cpu", torch.bfloat16):
            return run(*inputs)

    forward.parameters = run.parameters
    return forward


@report("pytorch/pytorch#193338", 0.85)
def a_weight_that_is_cast_once_for_two_regions(training):
    x = torch.randn(BATCH, 32)
    with torch.autocast("cpu", torch.bfloat16):
        run = training.optimize(SharedUnderAutocast(), x)
    learn(training, under_autocast(run), (x,))


@report("pytorch/pytorch#141896")
def weights_that_were_cast_before_the_region(training):
    """The caller uses a weight of the model in the same region of autocast, before the model."""
    x, model = torch.randn(BATCH, 32), SharedUnderAutocast()
    with torch.autocast("cpu", torch.bfloat16):
        run = training.optimize(model, x)

    def both(x):
        with torch.autocast("cpu", torch.bfloat16):
            return run(F.linear(x, model.shared.weight).float())

    both.parameters = run.parameters
    learn(training, both, (x,))


@report("pytorch/pytorch#71124")
def a_backward_under_another_autocast(training):
    """What runs again is cast as the forward was, whatever is on in the backward."""
    x = torch.randn(BATCH, 32)
    run = training.optimize(layers(), x)
    for kind in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", kind):
            out = run(x)
        with torch.autocast("cpu", torch.bfloat16):
            out.float().square().mean().backward()
        training.same(out)


class Island(nn.Module):
    """A block that leaves autocast, and one in it that enters another."""

    def __init__(self):
        super().__init__()
        self.before, self.exact, self.after = layers(3, out=32), layers(3, out=32), layers(3)

    def forward(self, x):
        x = self.before(x)
        with torch.autocast("cpu", enabled=False):
            x = self.exact(x.float())
            with torch.autocast("cpu", torch.bfloat16):
                x = self.after(x)
        return x


@report("NVIDIA/TransformerEngine#787", 0.8)
def regions_of_autocast_in_one_another(training):
    x = torch.randn(BATCH, 32)
    with torch.autocast("cpu", torch.float16):
        run = training.optimize(Island(), x)

    def forward(x):
        with torch.autocast("cpu", torch.float16):
            return run(x)

    forward.parameters = run.parameters
    learn(training, forward, (x,))


@report("pytorch/pytorch#26546", 0.8)
def a_region_that_ends_in_place_behind_a_view(training):
    x = torch.randn(8, 4, 64, requires_grad=True)
    model = nn.Sequential(
        *(nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.InstanceNorm1d(4), nn.ReLU(inplace=True)) for _ in range(6))
    )
    learn(training, training.optimize(model, x), (x,))
    training.same(x.grad)


class Routed(nn.Module):
    """Rows go to the expert with the best score; scores are noisy and have ties."""

    def __init__(self, experts=2):
        super().__init__()
        self.before, self.score = layers(3, out=32), nn.Linear(32, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(experts)
        )
        self.after = layers(2)

    def forward(self, x):
        x = self.before(x)
        scores = (self.score(x) + 0.5 * torch.randn(len(x), len(self.experts))).round()
        weight, chosen = scores.softmax(1).max(1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return self.after(x + out)


@report("NVIDIA-NeMo/Automodel#2635")
def rows_that_are_routed_otherwise_when_they_run_again(training):
    x = torch.randn(BATCH, 32)
    learn(training, training.optimize(Routed(), x), (x,))


class PartlyDetached(nn.Module):
    """A frozen part runs without gradients, another's result is detached."""

    def __init__(self):
        super().__init__()
        self.frozen, self.open, self.target = layers(3, out=32), layers(6, out=32), layers(2, out=32)

    def forward(self, x):
        with torch.no_grad():
            x = self.frozen(x)
        return self.open(x), self.target(x).detach()


@report("pytorch/pytorch#37266", 0.8)
def a_region_with_a_part_without_gradients(training):
    x = torch.randn(BATCH, 32)
    learn(training, training.optimize(PartlyDetached(), x), (x,))


class Scan(nn.Module):
    """A linear recurrence over time as a scan that doubles its stride, written into its own memory."""

    def __init__(self, width=16):
        super().__init__()
        self.decay, self.value, self.out = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        a, h = torch.sigmoid(self.decay(x)), self.value(x)
        stride = 1
        while stride < x.shape[1]:
            h, a = h.clone(), a.clone()
            earlier, before = h[:, :-stride].clone(), a[:, :-stride].clone()
            h[:, stride:] += a[:, stride:].clone() * earlier
            a[:, stride:] *= before
            stride *= 2
        return x + self.out(h)


@report("alxndrTL/mamba.py#80", 0.7)
def a_scan_in_place(training):
    x = torch.randn(4, 32, 16)
    learn(training, training.optimize(nn.Sequential(*(Scan() for _ in range(3))), x), (x,))


class Twice(torch.autograd.Function):
    """Its backward asks for the saved tensors twice."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return torch.sin(x) * scale

    @staticmethod
    def backward(ctx, g):
        (x, scale) = ctx.saved_tensors
        return g * torch.cos(x) * scale, (g * torch.sin(ctx.saved_tensors[0])).sum(0)


class WithTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(32, 32), nn.Parameter(torch.ones(32))

    def forward(self, x):
        return F.softplus(Twice.apply(self.linear(x), self.scale))


@report("state-spaces/mamba#909", 0.8)
def saved_tensors_that_are_asked_for_twice(training):
    x = torch.randn(BATCH, 32)
    learn(training, training.optimize(nn.Sequential(*(WithTwice() for _ in range(6))), x), (x,))


class Step(torch.autograd.Function):
    """A step of the wave equation with a backward by hand that reads the fields of the forward."""

    @staticmethod
    def forward(ctx, now, before, speed):
        bent = torch.roll(now, 1, -1) + torch.roll(now, -1, -1) - 2 * now
        ctx.save_for_backward(bent, speed)
        return 2 * now - before + speed.square() * bent

    @staticmethod
    def backward(ctx, g):
        bent, speed = ctx.saved_tensors
        pulled = speed.square() * g
        back = torch.roll(pulled, -1, -1) + torch.roll(pulled, 1, -1) - 2 * pulled
        return 2 * g + back, -g, (2 * speed * bent * g).sum(0)


class Wave(nn.Module):
    def __init__(self, steps=16):
        super().__init__()
        self.speed, self.steps = nn.Parameter(torch.full((64,), 0.4)), steps

    def forward(self, source):
        now, before = source, torch.zeros_like(source)
        seen = []
        for _ in range(self.steps):
            now, before = Step.apply(now, before, torch.sigmoid(self.speed)), now
            seen.append(now[:, ::16])
        return torch.stack(seen, 1)


@report("ar4/deepwave#120")
def a_wave_with_a_backward_by_hand(training):
    source = torch.randn(16, 64)
    learn(training, training.optimize(Wave(), source), (source,))


class Softer(TorchFunctionMode):
    """Has each activation replaced while it is on."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {})) if function is not torch.tanh else torch.sin(*args)


@report("pytorch/pytorch#148023", says="a TorchFunctionMode is on, which may have functions of torch do something else")
def a_function_mode_around_the_forward(training):
    x = torch.randn(BATCH, 32)
    run = training.optimize(Tanhs(), x)

    def softer(x):
        with Softer():
            return run(x)

    softer.parameters = run.parameters
    learn(training, softer, (x,))


class Tanhs(nn.Module):
    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x):
        for linear in self.linears:
            x = torch.tanh(linear(x))
        return x


def rounded(tensor):
    return tensor.bfloat16() if tensor.dtype == torch.float32 else tensor


@report(
    "pytorch/pytorch#147565",
    says="hooks for saved tensors are on, which may give the backward something else than was saved",
)
def hooks_of_saved_tensors_around_the_forward(training):
    """The caller's hooks round what is kept, so that gradients are others."""
    x = torch.randn(BATCH, 32)
    run = training.optimize(layers(), x)

    def around(x):
        with saved_tensors_hooks(rounded, lambda t: t.float()):
            return run(x)

    around.parameters = run.parameters
    learn(training, around, (x,))


class OwnHooks(nn.Module):
    """Keeps what a block inside saves as it says itself."""

    def __init__(self):
        super().__init__()
        self.before, self.inside, self.after = layers(3, out=32), layers(3, out=32), layers(3)

    def forward(self, x):
        x = self.before(x)
        with saved_tensors_hooks(lambda t: t, lambda t: t):
            x = self.inside(x)
        return self.after(x)


@report("pytorch/pytorch#115255")
def hooks_of_saved_tensors_in_the_forward(training):
    x = torch.randn(BATCH, 32)
    learn(training, training.optimize(OwnHooks(), x), (x,))
