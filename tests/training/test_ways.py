"""Ways of training, each written as anybody would, beside the same with the plain model."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from trained import BATCH, Images, Way, assert_trained_alike, data, layers, pictures, registering, sgd, steps, unnamed

pytestmark = pytest.mark.full

WAYS: dict[str, Way] = {}
way = registering(WAYS)


@way(0.7)
def gradient_accumulation(training):
    model = layers()
    run = training.optimize(model, torch.randn(BATCH, 32))
    optimizer = sgd(run)

    def step(batches):
        for x, y in batches:
            (F.cross_entropy(run(x), y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        training.measured(lambda: step(data(2)))


@way(0.8)
def clipped_gradients(training):
    run = training.optimize(layers(), torch.randn(BATCH, 32))
    optimizer = sgd(run)
    for x, y in data():
        training.measured(lambda x=x, y=y: F.cross_entropy(run(x), y).backward())
        training.same(nn.utils.clip_grad_norm_(run.parameters(), 0.1))
        nn.utils.clip_grad_value_(run.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()


@way(0.8)
def gradient_scaler_and_autocast(training):
    run = training.optimize(layers(), torch.randn(BATCH, 32))
    optimizer, scaler = sgd(run), torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(x, y):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(run(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(run.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    for n, (x, y) in enumerate(data()):
        training.measured(lambda x=x, y=y: step(x, y)) if n else step(x, y)  # the first one plans


@way(0.8)
def stochastic_weight_averaging(training):
    run = training.optimize(Images(), torch.randn(8, 3, 16, 16))
    optimizer, average = sgd(run), AveragedModel(run)
    schedule = SWALR(optimizer, swa_lr=0.01, anneal_epochs=2)
    for x, y in pictures(4):
        steps(training, run, [(x, y)], optimizer)
        average.update_parameters(run)
        schedule.step()
    update_bn(pictures(2), average)
    training.same(*average.state_dict().values(), average(torch.randn(8, 3, 16, 16)))


@way(0.8)
def distillation(training):
    teacher, student = layers(4), layers()
    sample = torch.randn(BATCH, 32)
    steps(training, training.optimize(teacher, sample), data(2), sgd(teacher))
    teacher.requires_grad_(False).eval()
    run = training.optimize(student, sample)

    def loss(scores, x_y):
        x, y = x_y
        with torch.no_grad():
            soft = teacher(x)
        distance = F.kl_div(scores.log_softmax(1), soft.log_softmax(1), reduction="batchmean", log_target=True)
        return F.cross_entropy(scores, y) + distance

    steps(training, run, [(x, (x, y)) for x, y in data()], sgd(student), loss)


@way(0.8)
def a_frozen_teacher_behind_the_student(training):
    """Frozen, in eval mode, and optimized: the gradient goes to its input."""
    teacher, student = layers(6).requires_grad_(False), layers(4, out=32)
    x = torch.randn(BATCH, 32)
    inner = training.optimize(student, x)
    outer = training.optimize(teacher, torch.randn(BATCH, 32, requires_grad=True))
    steps(training, lambda x: outer(inner(x)), data(), sgd(student))


@way(0.8)
def gan(training):
    """A GAN: two optimizers, the discriminator runs on real and made images, the generator through it."""
    make, verify = layers(out=32), layers(out=1)
    G, D = training.optimize(make), training.optimize(verify)
    of_make, of_judge = torch.optim.Adam(G.parameters(), 0.01), torch.optim.Adam(D.parameters(), 0.01)
    bce = nn.BCEWithLogitsLoss()

    def step(real):
        fake = G(torch.randn_like(real))
        of_judge.zero_grad()
        (bce(D(real), torch.ones(len(real), 1)) + bce(D(fake.detach()), torch.zeros(len(real), 1))).backward()
        of_judge.step()
        of_make.zero_grad()
        bce(D(fake), torch.ones(len(real), 1)).backward()
        of_make.step()

    for n, (real, _) in enumerate(data(4)):
        training.measured(lambda real=real: step(real)) if n else step(real)


@way()
def gan_with_a_gradient_penalty(training):
    make, verify = layers(4, out=32), layers(4, out=1, drop=0.0)
    x = torch.randn(BATCH, 32)
    G, D = training.optimize(make, x), training.optimize(verify, x)
    of_make, of_judge = torch.optim.Adam(G.parameters(), 0.01), torch.optim.Adam(D.parameters(), 0.01)
    for real, _ in data(3):
        fake = G(torch.randn_like(real)).detach()
        mixed = torch.lerp(real, fake, torch.rand(len(real), 1)).requires_grad_()
        (slope,) = torch.autograd.grad(D(mixed).sum(), mixed, create_graph=True)
        of_judge.zero_grad()
        (D(fake).mean() - D(real).mean() + 10 * (slope.norm(2, 1) - 1).square().mean()).backward()
        of_judge.step()
        of_make.zero_grad()
        (-D(G(torch.randn_like(real))).mean()).backward()
        of_make.step()


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.kind, self.size = layers(out=32), nn.Linear(32, 5), nn.Linear(32, 1)
        self.weights = nn.Parameter(torch.ones(2))

    def forward(self, x):
        x = self.body(x)
        return {"kind": self.kind(x), "size": self.size(x).squeeze(1)}


@way(0.8)
def multi_task(training):
    run = training.optimize(TwoHeads(), torch.randn(BATCH, 32))

    def loss(found, y):
        both = torch.stack([F.cross_entropy(found["kind"], y), F.mse_loss(found["size"], y.float())])
        return (both * run.weights.exp()).sum() - run.weights.sum()

    steps(training, run, data(), sgd(run), loss)


@way()
def multi_task_in_turn(training):
    """Another head's loss in each step: the backward goes through a part of the graph."""
    run = training.optimize(TwoHeads(), torch.randn(BATCH, 32))
    optimizer = sgd(run)
    for n, (x, y) in enumerate(data(4)):
        found = run(x)
        loss = F.cross_entropy(found["kind"], y) if n % 2 else F.mse_loss(found["size"], y.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@way()
def gradnorm(training):
    """GradNorm: norms of the tasks' gradients in a shared layer are differentiated again."""
    model = TwoHeads()
    run = training.optimize(model, torch.randn(BATCH, 32))
    optimizer = sgd(run)
    for x, y in data():
        found = run(x)
        losses = [F.cross_entropy(found["kind"], y), F.mse_loss(found["size"], y.float())]
        weighted = [w * loss for w, loss in zip(run.weights, losses, strict=True)]
        optimizer.zero_grad()
        sum(weighted).backward(retain_graph=True)
        shared = model.body[-1].weight
        norms = torch.stack([torch.autograd.grad(one, shared, create_graph=True)[0].norm() for one in weighted])
        target = norms.mean().detach()
        run.weights.grad = torch.autograd.grad((norms - target).abs().sum(), run.weights)[0]
        optimizer.step()


@way()
def pcgrad(training):
    """PCGrad: one backward for each task, and gradients that conflict are projected."""
    run = training.optimize(TwoHeads(), torch.randn(BATCH, 32))
    optimizer = sgd(run)
    parameters = [*run.body.parameters()]
    for x, y in data():
        found = run(x)
        first = torch.autograd.grad(F.cross_entropy(found["kind"], y), parameters, retain_graph=True)
        second = torch.autograd.grad(F.mse_loss(found["size"], y.float()), parameters)
        for p, a, b in zip(parameters, first, second, strict=True):
            overlap = (a * b).sum()
            p.grad = a + b - (overlap / b.square().sum() * b if overlap < 0 else 0)
        optimizer.step()


@way(0.8)
def loader_with_workers(training):
    run = training.optimize(layers(), torch.randn(BATCH, 32))
    x, y = data(1, 3 * BATCH)[0]
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, y), BATCH, shuffle=True, num_workers=2, persistent_workers=True
    )
    optimizer = sgd(run)
    for _ in range(2):
        steps(training, run, loader, optimizer)


@way(0.8)
def loader_with_workers_and_a_smaller_last_batch(training):
    run = training.optimize(layers(), torch.randn(BATCH, 32))
    x, y = data(1, 2 * BATCH + 37)[0]
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), BATCH, num_workers=1)
    steps(training, run, loader, sgd(run))


@way()
def tied_weights(training):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.body, self.head = nn.Embedding(40, 32), layers(out=32), nn.Linear(32, 40, bias=False)
            self.head.weight = self.words.weight

        def forward(self, ids):
            return self.head(self.body(self.words(ids)))

    ids = torch.randint(40, (8, 16))
    run = training.optimize(Tied(), ids)
    assert run.head.weight is run.words.weight
    optimizer = sgd(run)
    for _ in range(3):
        ids = torch.randint(40, (8, 16))
        F.cross_entropy(run(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


@way(0.9)
def gradual_unfreezing(training):
    model = layers()
    run = training.optimize(model, torch.randn(BATCH, 32))
    model[:-1].requires_grad_(False)
    for n in reversed(range(len(model))):
        model[n].requires_grad_(True)
        optimizer = torch.optim.SGD([p for p in run.parameters() if p.requires_grad], 0.05)
        steps(training, run, data(2) if n == 0 else [], optimizer)
        for x, y in data(1):
            F.cross_entropy(run(x), y).backward()
            optimizer.step()


@way()
def flags_toggled_between_steps(training):
    model = layers()
    run = training.optimize(model, torch.randn(BATCH, 32))
    optimizer = sgd(run)
    for n, (x, y) in enumerate(data(6)):
        model[n % 3].requires_grad_(n % 2 == 0)
        optimizer.zero_grad()
        F.cross_entropy(run(x), y).backward()
        optimizer.step()


@way(0.8)
def progressive_resizing(training):
    run = training.optimize(Images(), torch.randn(8, 3, 24, 24))
    optimizer = sgd(run)
    for side in (8, 12, 16, 24):
        steps(training, run, pictures(2, side=side), optimizer)


@way(0.8)
def growing_lengths(training):
    class Sequences(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.body, self.head = nn.Embedding(40, 32), nn.ModuleList(), nn.Linear(32, 40)
            for _ in range(2):
                self.body.append(nn.TransformerEncoderLayer(32, 2, 64, 0.1, batch_first=True))

        def forward(self, ids, mask=None):
            x = self.words(ids)
            for layer in self.body:
                x = layer(x, src_key_padding_mask=mask)
            return self.head(x)

    run = training.optimize(Sequences(), torch.randint(40, (8, 32)))
    optimizer = torch.optim.Adam(run.parameters(), 0.01)
    for length in (8, 16, 24, 32):
        ids = torch.randint(40, (8, length))
        steps(training, run, [(ids, ids)], optimizer, lambda s, y: F.cross_entropy(s.flatten(0, 1), y.flatten()))
        mask = torch.arange(length) >= torch.randint(2, length + 1, (8, 1))
        F.cross_entropy(run(ids, mask).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()


@way(0.9)
def stochastic_depth(training):
    torchvision = pytest.importorskip("torchvision")

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(layers(1, out=32) for _ in range(6))
            self.drop = torchvision.ops.StochasticDepth(0.3, "row")

        def forward(self, x):
            for block in self.blocks:
                x = x + self.drop(block(x))
            return x

    run = training.optimize(Residual(), torch.randn(BATCH, 32))
    steps(training, run, data(classes=32), sgd(run))


@way()
def layerdrop(training):
    """LayerDrop: Python's own random numbers choose the layers."""

    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(layers(3, out=32) for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                if not self.training or torch.rand(()).item() > 0.3:
                    x = x + block(x)
            return x

    run = training.optimize(Dropped(), torch.randn(BATCH, 32))
    steps(training, run, data(5, classes=32), sgd(run))


@way(0.8)
def bfloat16_weights(training):
    run = training.optimize(layers().bfloat16(), torch.randn(BATCH, 32).bfloat16())
    steps(training, run, [(x.bfloat16(), y) for x, y in data()], sgd(run))


@way()
def cast_after_optimizing(training):
    run = training.optimize(layers(), torch.randn(BATCH, 32))
    run.double()
    steps(training, run, [(x.double(), y) for x, y in data()], sgd(run))
    run.to(torch.bfloat16)
    steps(training, run, [(x.bfloat16(), y) for x, y in data()], sgd(run))


@way(0.8)
def float64_by_default(training):
    torch.set_default_dtype(torch.float64)
    try:
        run = training.optimize(layers(), torch.randn(BATCH, 32))
        steps(training, run, data(), sgd(run))
    finally:
        torch.set_default_dtype(torch.float32)


@way()
def gradients_set_to_zero(training):
    run = training.optimize(layers(), torch.randn(BATCH, 32))
    optimizer = sgd(run)
    for x, y in data():
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(run(x), y).backward()
        optimizer.step()


@way()
def closures(training):
    """LBFGS calls its closure as often as it likes."""
    run = training.optimize(layers(4, drop=0.0), torch.randn(BATCH, 32))
    optimizer = torch.optim.LBFGS(run.parameters(), 0.1, max_iter=4, line_search_fn="strong_wolfe")
    for x, y in data(2):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(run(x), y)
            loss.backward()
            return loss

        training.same(torch.as_tensor(optimizer.step(closure)))


@way(0.8)
def sharpness_aware_minimization(training):
    """SAM: forward and backward twice in a step, at changed weights the second time."""
    run = training.optimize(Images(), torch.randn(8, 3, 16, 16))
    optimizer = sgd(run)

    def step(x, y):
        F.cross_entropy(run(x), y).backward()
        norm = torch.stack([p.grad.norm() for p in run.parameters()]).norm()
        moves = [0.05 * p.grad / norm for p in run.parameters()]
        with torch.no_grad():
            for p, move in zip(run.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        F.cross_entropy(run(x), y).backward()
        with torch.no_grad():
            for p, move in zip(run.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()

    for x, y in pictures():
        training.measured(lambda x=x, y=y: step(x, y))


@way()
def lookahead(training):
    run = training.optimize(layers(), torch.randn(BATCH, 32))
    optimizer = sgd(run)
    slow = copy.deepcopy(run.state_dict())
    for n, (x, y) in enumerate(data(6)):
        steps(training, run, [(x, y)], optimizer)
        if n % 2:
            for name, tensor in run.state_dict().items():
                slow[name].lerp_(tensor, 0.5)
            run.load_state_dict(slow)


@way(0.8)
def optimizer_in_the_backward(training):
    model = layers()
    run = training.optimize(model, torch.randn(BATCH, 32))
    optimizers = {p: torch.optim.Adam([p], 0.01) for p in run.parameters()}

    def update(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in run.parameters():
        p.register_post_accumulate_grad_hook(update)
    for x, y in data():
        training.measured(lambda x=x, y=y: F.cross_entropy(run(x), y).backward())


@way()
def hooks_on_parameters(training):
    model = layers()
    run = training.optimize(model, torch.randn(BATCH, 32))
    seen = []
    for p in model.parameters():
        p.register_hook(lambda g: (seen.append(g.norm()), g.clamp(-0.001, 0.001))[1])
    steps(training, run, data(), sgd(run))
    training.same(*seen)


@way()
def pruned(training):
    model = layers()
    for block in model[:-1]:
        prune.l1_unstructured(block[0], "weight", 0.3)
    run = training.optimize(model, torch.randn(BATCH, 32))
    optimizer = sgd(run)
    steps(training, run, data(2), optimizer)
    prune.random_unstructured(model[0][0], "bias", 0.5)
    steps(training, run, data(2), optimizer)
    for block in model[:-1]:
        prune.remove(block[0], "weight")
    steps(training, run, data(2), sgd(run))


@way()
def pruned_after_optimizing(training):
    model = layers()
    run = training.optimize(model, torch.randn(BATCH, 32))
    steps(training, run, data(2), sgd(run))
    prune.global_unstructured([(b[0], "weight") for b in model[:-1]], prune.L1Unstructured, amount=0.3)
    steps(training, run, data(2), sgd(run))


@way()
def weight_norm_and_spectral_norm(training):
    model = nn.Sequential(
        *(parametrizations.weight_norm(nn.Linear(32, 32)) for _ in range(3)),
        nn.Tanh(),
        *(parametrizations.spectral_norm(nn.Linear(32, 32)) for _ in range(3)),
        layers(),
    )
    run = training.optimize(model, torch.randn(BATCH, 32))
    steps(training, run, data(), sgd(run))


@way()
def parametrized_after_optimizing(training):
    model = layers()
    run = training.optimize(model, torch.randn(BATCH, 32))
    steps(training, run, data(1), sgd(run))
    parametrizations.orthogonal(model[0][0])
    parametrizations.spectral_norm(model[1][0])
    steps(training, run, data(2), sgd(run))


class Quantised(nn.Module):
    """A layer that trains for eight bits: scales observed in a buffer, rounding passed straight through."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, x):
        if self.training:
            self.scale.mul_(0.9).add_(0.1 * x.detach().abs().max() / 127)
        x = torch.fake_quantize_per_tensor_affine(x, self.scale, torch.zeros(1, dtype=torch.int32), -128, 127)
        w = self.layer.weight
        w = w + ((w * 64).round() / 64 - w).detach()
        return F.linear(x, w, self.layer.bias).tanh()


@way()
def quantization_aware(training):
    run = training.optimize(nn.Sequential(*(Quantised() for _ in range(6)), layers()), torch.randn(BATCH, 32))
    steps(training, run, data(), sgd(run))


@way(0.9)
def monte_carlo_dropout(training):
    """MC dropout: eval mode but for dropout, many samples, in training and beside it."""
    model = layers()
    run = training.optimize(model, torch.randn(BATCH, 32))
    optimizer = sgd(run)
    for x, y in data(2):
        steps(training, run, [(x, y)], optimizer)
        run.eval()
        for module in run.modules():
            if isinstance(module, nn.Dropout):
                module.train()
        with torch.no_grad():
            training.same(torch.stack([run(x) for _ in range(3)]).std(0))
        run.train()


@way(0.8)
def simclr(training):
    """SimCLR: the model twice before one backward."""
    run = training.optimize(layers(out=16), torch.randn(BATCH, 32))
    optimizer = sgd(run)

    def step(x):
        a, b = (F.normalize(run(x + 0.1 * torch.randn_like(x)), dim=1) for _ in range(2))
        F.cross_entropy(a @ b.T / 0.1, torch.arange(len(x))).backward()
        optimizer.step()
        optimizer.zero_grad()

    for x, _ in data(3, 128):
        training.measured(lambda x=x: step(x))


@way(0.8)
def momentum_encoder(training):
    """BYOL: a deep copy of the optimized model follows it."""
    run = training.optimize(Images(classes=16), torch.randn(8, 3, 16, 16))
    slow = copy.deepcopy(run).requires_grad_(False)
    optimizer = sgd(run)

    def step(x):
        with torch.no_grad():
            target = slow(x.flip(3))
        (2 - 2 * F.cosine_similarity(run(x), target)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for old, new in zip(slow.parameters(), run.parameters(), strict=True):
                old.lerp_(new, 0.1)

    for x, _ in pictures():
        training.measured(lambda x=x: step(x))
    training.same(*slow.state_dict().values())


@way(0.8)
def siamese(training):
    class Twins(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = layers(out=16)

        def forward(self, a, b, c):
            return [self.body(x) for x in (a, b, c)]

    run = training.optimize(Twins(), tuple(torch.randn(96, 32) for _ in range(3)))
    optimizer = sgd(run)

    def step():
        F.triplet_margin_loss(*run(*(torch.randn(96, 32) for _ in range(3)))).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        training.measured(step)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.cells, self.body = nn.Embedding(40, 32), nn.LSTM(32, 32, 2, dropout=0.1), layers(out=40)

    def forward(self, ids, state=None):
        x = self.words(ids) if isinstance(ids, torch.Tensor) else ids._replace(data=self.words(ids.data))
        x, state = self.cells(x, state)
        return self.body(x if isinstance(x, torch.Tensor) else x.data), state


@way()
def packed_sequences(training):
    pack = nn.utils.rnn.pack_sequence

    def ids(*lengths):
        return pack([torch.randint(40, (8 * n,)) for n in lengths for _ in range(8)], enforce_sorted=False)

    run = training.optimize(Recurrent(), (ids(9, 4, 7),))
    optimizer = sgd(run)
    for lengths in [(9, 4, 7), (9, 9, 1), (3, 2, 1, 5), (9, 4, 7)]:
        packed = ids(*lengths)
        F.cross_entropy(run(packed)[0], packed.data).backward()
        optimizer.step()
        optimizer.zero_grad()


@way()
def truncated_backpropagation_through_time(training):
    run = training.optimize(Recurrent(), torch.randint(40, (12, 8)))
    optimizer = sgd(run)
    ids, state = torch.randint(40, (60, 8)), None
    for chunk in ids.split(12):
        scores, state = run(chunk, state)
        F.cross_entropy(scores.flatten(0, 1), chunk.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        state = tuple(s.detach() for s in state)
    training.same(*state)


@way()
def maml(training):
    """MAML: inner steps by functional_call, differentiated through."""
    model = layers(4, drop=0.0)
    run = training.optimize(model, torch.randn(64, 32))
    optimizer = torch.optim.Adam(run.parameters(), 0.01)
    for (x, y), (x2, y2) in zip(data(3, 64), data(3, 64), strict=True):
        weights = dict(run.named_parameters())
        for _ in range(2):
            loss = F.cross_entropy(functional_call(run, weights, (x,)), y)
            slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), slopes, strict=True)}
        optimizer.zero_grad()
        F.cross_entropy(functional_call(run, weights, (x2,)), y2).backward()
        optimizer.step()
    steps(training, run, data(1, 64), optimizer)


@way()
def torch_func_losses(training):
    """torch.func: gradients of a loss as a function of the weights, per sample too."""
    run = training.optimize(layers(3, drop=0.0), torch.randn(64, 32))
    weights = {name: p.detach().clone() for name, p in run.named_parameters()}

    def loss(weights, x, y):
        return F.cross_entropy(functional_call(run, weights, (x,)), y)

    for x, y in data(2, 64):
        slopes = torch.func.grad(loss)(weights, x, y)
        weights = {name: w - 0.1 * slopes[name] for name, w in weights.items()}
        each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weights, x.unsqueeze(1), y.unsqueeze(1))
        training.same(*weights.values(), *each.values())
    steps(training, run, data(2, 64), sgd(run))


@way()
def memory_formats(training):
    run = training.optimize(Images().to(memory_format=torch.channels_last), torch.randn(8, 3, 16, 16))
    batches = [(x.to(memory_format=torch.channels_last), y) for x, y in pictures()]
    steps(training, run, batches, sgd(run))


def test_the_page_on_training_names_each_way():
    assert not unnamed(WAYS)


@pytest.mark.parametrize("name", WAYS)
def test_way(name, monkeypatch):
    random.seed(0)
    assert_trained_alike(WAYS[name].train, monkeypatch, WAYS[name].share, WAYS[name].runs_plan)
