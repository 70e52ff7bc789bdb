"""More ways of training: other data, other losses, other things done to a model, each beside the plain model."""

from __future__ import annotations

import copy
import random
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trained import BATCH, Images, Way, assert_trained_alike, data, layers, pictures, registering, sgd, steps, unnamed

pytestmark = pytest.mark.full

WAYS: dict[str, Way] = {}
way = registering(WAYS)


@way()
def adversarial_images(training):
    """PGD: gradients go to the images, in eval mode; then the model is trained on what came out."""
    run = training.optimize(Images(), torch.randn(8, 3, 16, 16))
    optimizer = sgd(run)
    for x, y in pictures():
        worse = x.clone().requires_grad_()
        run.eval()
        for _ in range(2):
            (slope,) = torch.autograd.grad(F.cross_entropy(run(worse), y), worse)
            worse = (worse + 0.01 * slope.sign()).detach().requires_grad_()
        run.train()
        steps(training, run, [(worse.detach(), y)], optimizer)


@way()
def adversarial_in_training_mode(training):
    """FGSM for free: one backward gives the gradients of weights and of images."""
    run = training.optimize(Images(), torch.randn(8, 3, 16, 16))
    optimizer = sgd(run)
    shift = torch.zeros(8, 3, 16, 16)
    for x, y in pictures():
        shift.requires_grad_()
        F.cross_entropy(run(x + shift), y).backward()
        shift = (shift.detach() + 0.01 * shift.grad.sign()).clamp(-0.1, 0.1)
        optimizer.step()
        optimizer.zero_grad()


@way()
def gradients_with_respect_to_inputs(training):
    """A physics loss: second derivatives of the output by the input."""
    net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), *(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    run = training.optimize(nn.Sequential(net, nn.Linear(64, 1)), torch.randn(256, 2, requires_grad=True))
    optimizer = torch.optim.Adam(run.parameters(), 0.01)
    for _ in range(3):
        x = torch.rand(256, 2, requires_grad=True)
        u = run(x)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
        optimizer.zero_grad()
        (first[:, 1] - second[:, 0]).square().mean().backward()
        optimizer.step()


@way()
def hessian_vector_products(training):
    run = training.optimize(layers(3, drop=0.0), torch.randn(64, 32))
    optimizer = sgd(run)
    for x, y in data(2, 64):
        parameters = [*run.parameters()]
        slopes = torch.autograd.grad(F.cross_entropy(run(x), y), parameters, create_graph=True)
        vectors = [torch.sign(p.detach()) for p in parameters]
        products = torch.autograd.grad(slopes, parameters, vectors)
        for p, g, h in zip(parameters, slopes, products, strict=True):
            p.grad = g.detach() / (h.abs() + 1)
        optimizer.step()


class Encoder(nn.Module):
    """A variational autoencoder: draws inside, and several outputs."""

    def __init__(self):
        super().__init__()
        self.down, self.up = layers(4, out=16), nn.Sequential(nn.Linear(8, 32), layers(4, out=32))

    def forward(self, x):
        mean, spread = self.down(x).chunk(2, 1)
        code = torch.distributions.Normal(mean, F.softplus(spread) + 0.1, validate_args=False).rsample()
        return self.up(code), mean, spread


@way(0.8)
def variational_autoencoder(training):
    run = training.optimize(Encoder(), torch.randn(BATCH, 32))

    def loss(found, x):
        made, mean, spread = found
        return F.mse_loss(made, x) + 0.1 * (mean.square() + spread.exp() - spread).mean()

    steps(training, run, [(x, x) for x, _ in data()], sgd(run), loss)


@way()
def deep_q_learning(training):
    """A target net that is a copy, actions drawn by numpy between the steps, huber loss of picked scores."""
    run = training.optimize(layers(out=4), torch.randn(BATCH, 32))
    target = copy.deepcopy(run).eval()
    optimizer, draw = torch.optim.RMSprop(run.parameters(), 0.001), np.random.default_rng(0)
    for n in range(4):
        x, following = torch.randn(2, BATCH, 32)
        actions = torch.from_numpy(draw.integers(4, size=BATCH))
        with torch.no_grad():
            goal = 0.9 * target(following).max(1).values
        F.huber_loss(run(x).gather(1, actions[:, None]).squeeze(1), goal).backward()
        optimizer.step()
        optimizer.zero_grad()
        if n == 1:
            target.load_state_dict(run.state_dict())


@way()
def policy_gradients(training):
    """Rollouts one by one without gradients, then epochs over random parts of them."""

    class Actor(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.act, self.value = layers(drop=0.0, out=32), nn.Linear(32, 4), nn.Linear(32, 1)

        def forward(self, x):
            x = self.body(x)
            return self.act(x), self.value(x).squeeze(1)

    run = training.optimize(Actor(), torch.randn(64, 32))
    optimizer = torch.optim.Adam(run.parameters(), 0.01)
    for _ in range(2):
        seen, taken = [], []
        with torch.no_grad():
            for _ in range(16):
                x = torch.randn(16, 32)
                seen.append(x)
                taken.append(torch.distributions.Categorical(logits=run(x)[0]).sample())
        seen, taken = torch.cat(seen), torch.cat(taken)
        for part in torch.randperm(256).split(64):
            scores, value = run(seen[part])
            chosen = torch.distributions.Categorical(logits=scores)
            loss = -(chosen.log_prob(taken[part]) * (taken[part] - value.detach())).mean()
            (loss + F.mse_loss(value, taken[part].float()) - 0.01 * chosen.entropy().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()


@way(0.8)
def moco_queue(training):
    """MoCo: keys of a slow copy in a buffer of the wrapper."""
    run = training.optimize(layers(out=16), torch.randn(BATCH, 32))
    slow, queue = copy.deepcopy(run).requires_grad_(False), F.normalize(torch.randn(64, 16), dim=1)
    optimizer = sgd(run)

    def step(x, queue):
        query = F.normalize(run(x), dim=1)
        with torch.no_grad():
            for old, new in zip(slow.parameters(), run.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
            key = F.normalize(slow(x + 0.1), dim=1)
        scores = torch.cat([(query * key).sum(1, keepdim=True), query @ queue.T], 1) / 0.07
        F.cross_entropy(scores, torch.zeros(len(x), dtype=torch.long)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return torch.cat([key, queue])[:64]

    for x, _ in data():
        queue = training.measured(lambda x=x, queue=queue: step(x, queue))
    training.same(queue)


@way(0.9)
def a_frozen_backbone_without_gradients(training):
    """The model itself switches gradients off for its first half."""

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.back, self.front = layers(4, out=32), layers(6)

        def forward(self, x):
            with torch.no_grad():
                x = self.back(x)
            return self.front(x)

    run = training.optimize(Half(), torch.randn(BATCH, 32))
    steps(training, run, data(), sgd(run.front))


@way()
def a_head_that_is_replaced(training):
    model = layers()
    run = training.optimize(model, torch.randn(BATCH, 32))
    steps(training, run, data(2), sgd(run))
    run[-1] = nn.Linear(32, 7)
    steps(training, run, data(2, classes=7), sgd(run))
    run.append(nn.Tanh())
    steps(training, run, data(2, classes=7), sgd(run))
    del run[2]
    steps(training, run, data(2, classes=7), sgd(run))


@way()
def weights_that_are_loaded_assigned_and_drawn_anew(training):
    model = layers()
    run = training.optimize(model, torch.randn(BATCH, 32))
    start = copy.deepcopy(run.state_dict())
    steps(training, run, data(2), sgd(run))
    run.load_state_dict(start)
    steps(training, run, data(1), sgd(run))
    run.load_state_dict(copy.deepcopy(start), assign=True)
    steps(training, run, data(1), sgd(run))
    run.apply(lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else None)
    steps(training, run, data(1), sgd(run))
    nn.utils.vector_to_parameters(0.9 * nn.utils.parameters_to_vector(run.parameters()), run.parameters())
    steps(training, run, data(1), sgd(run))
    model[0][0].weight = nn.Parameter(torch.randn(32, 32))
    steps(training, run, data(2), sgd(run))


@way()
def sparse_embeddings(training):
    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.bag = nn.Embedding(50, 32, sparse=True), nn.EmbeddingBag(50, 32, mode="sum")
            self.body = layers()

        def forward(self, ids):
            return self.body(self.words(ids).mean(1) + self.bag(ids))

    run = training.optimize(Bags(), torch.randint(50, (BATCH, 6)))
    words = torch.optim.SparseAdam([run.words.weight], 0.01)
    rest = torch.optim.Adam([*run.bag.parameters(), *run.body.parameters()], 0.01)
    for _ in range(3):
        F.cross_entropy(run(torch.randint(50, (BATCH, 6))), torch.randint(5, (BATCH,))).backward()
        for optimizer in (words, rest):
            optimizer.step()
            optimizer.zero_grad()


@way()
def mixture_of_experts(training):
    """Tokens go where the router sends them: as many as the data decides."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.route = layers(4, out=32), nn.Linear(32, 3)
            self.experts, self.after = nn.ModuleList(layers(2, out=32) for _ in range(3)), layers(4)

        def forward(self, x):
            x = self.before(x)
            weight, chosen = self.route(x).softmax(1).max(1)
            out = torch.zeros_like(x)
            for n, expert in enumerate(self.experts):
                rows = (chosen == n).nonzero().squeeze(1)
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
            return self.after(x + out)

    run = training.optimize(Experts(), torch.randn(BATCH, 32))
    steps(training, run, data(), sgd(run))


@way(0.9)
def message_passing(training):
    class Messages(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(layers(2, out=32) for _ in range(3))
            self.head = nn.Linear(32, 5)

        def forward(self, x, edges):
            for layer in self.layers:
                x = x + torch.zeros_like(x).index_add(0, edges[1], layer(x)[edges[0]])
            return self.head(x)

    run = training.optimize(Messages(), (torch.randn(BATCH, 32), torch.randint(BATCH, (2, 400))))
    optimizer = sgd(run)

    def step(edges):
        F.cross_entropy(run(torch.randn(BATCH, 32), edges), torch.randint(5, (BATCH,))).backward()
        optimizer.step()
        optimizer.zero_grad()

    for count in (400, 300, 400):
        training.measured(lambda n=count: step(torch.randint(BATCH, (2, n))))


@way()
def masked_language_modelling(training):
    """The loss is of those rows alone that a mask picks."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.body, self.head = nn.Embedding(40, 32), layers(out=32), nn.Linear(32, 40)

        def forward(self, ids, mask):
            return self.head(self.body(self.words(ids))[mask])

    ids = torch.randint(40, (8, 32))
    run = training.optimize(Masked(), (ids, ids > 20))
    optimizer = sgd(run)
    for _ in range(4):
        ids = torch.randint(40, (8, 32))
        mask = torch.rand(8, 32) < 0.3
        F.cross_entropy(run(ids.where(~mask, 0), mask), ids[mask]).backward()
        optimizer.step()
        optimizer.zero_grad()


@way(0.8)
def ctc_loss(training):
    """CTC, with lengths."""
    run = training.optimize(layers(out=12), torch.randn(20, 8, 32))

    def loss(scores, targets):
        lengths = torch.full((8,), 20), torch.randint(3, 7, (8,))
        return F.ctc_loss(scores.log_softmax(2), targets, *lengths)

    batches = [(torch.randn(20, 8, 32), torch.randint(1, 12, (8, 7))) for _ in range(3)]
    steps(training, run, batches, sgd(run), loss)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


@way(0.9)
def gradient_reversal(training):
    class Domains(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.kind, self.domain = layers(out=32), layers(2), layers(2, out=2)

        def forward(self, x):
            x = self.body(x)
            return self.kind(x), self.domain(Reversed.apply(x))

    run = training.optimize(Domains(), torch.randn(BATCH, 32))

    def loss(found, y):
        return F.cross_entropy(found[0], y) + F.cross_entropy(found[1], y % 2)

    steps(training, run, data(), sgd(run), loss)


@way()
def checkpoints_of_torch_inside(training):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.head = nn.ModuleList(layers(2, out=32) for _ in range(4)), nn.Linear(32, 5)

        def forward(self, x):
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    run = training.optimize(Checkpointed(), torch.randn(BATCH, 32))
    steps(training, run, data(), sgd(run))


@way(0.8)
def a_checkpoint_of_torch_around(training):
    """The optimized model is itself run under torch's checkpoint."""
    run = training.optimize(layers(), torch.randn(BATCH, 32))
    steps(
        training,
        lambda x: torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False),
        data(),
        sgd(run),
    )


@way()
def saved_tensors_on_cpu(training):
    run = training.optimize(layers(), torch.randn(BATCH, 32))
    optimizer = sgd(run)
    for x, y in data():
        with torch.autograd.graph.save_on_cpu():
            loss = F.cross_entropy(run(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@way(0.8)
def anomaly_detection(training):
    run = training.optimize(layers(), torch.randn(BATCH, 32))
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        steps(training, run, data(), sgd(run))


@way()
def second_order_statistics_by_hooks(training):
    """K-FAC: hooks keep what goes into layers and the gradients that come out."""
    model = layers(4)
    seen = []
    for block in model[1:-1]:
        block[0].register_forward_pre_hook(lambda module, given: seen.append(given[0].detach().square().mean()))
        block[0].register_full_backward_hook(lambda module, g, out: seen.append(out[0].square().mean()))
    run = training.optimize(model, torch.randn(BATCH, 32))
    seen.clear()
    steps(training, run, data(), sgd(run))
    training.same(*seen)


@way()
def hooks_registered_after_optimizing(training):
    """The next step plans anew, which calls them besides."""
    model, seen = layers(4), []
    run = training.optimize(model, torch.randn(BATCH, 32))
    model[1].register_forward_hook(lambda module, given, out: seen.append(out.detach().mean()))
    optimizer = sgd(run)
    steps(training, run, data(1), optimizer)
    seen.clear()
    steps(training, run, data(2), optimizer)
    training.same(*seen)
    assert len(seen) == 2


@way(0.8)
def hooks_of_the_model_itself(training):
    seen = []
    run = training.optimize(layers(), torch.randn(BATCH, 32))
    run.register_forward_hook(lambda module, given, out: seen.append(out.detach().mean()))
    run.register_forward_pre_hook(lambda module, given: (given[0] * 2,))
    run.register_forward_hook(lambda module, given, out: out.register_hook(lambda g: seen.append(g.norm())) and None)
    steps(training, run, data(), sgd(run))
    training.same(*seen)
    assert len(seen) == 6


@way()
def metrics_inside_the_model(training):
    """Counts kept in buffers, and in plain attributes, by the forward."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.calls = layers(), 0
            self.register_buffer("total", torch.zeros(5), persistent=False)

        def forward(self, x):
            scores = self.body(x)
            self.total += scores.detach().sum(0)
            self.calls += 1
            return scores

    run = training.optimize(Counting(), torch.randn(BATCH, 32))
    steps(training, run, data(), sgd(run))
    training.same(run.total, torch.tensor(run.calls))


@way(0.8)
def parameter_groups(training):
    """Layer-wise rates, decay for weights alone, a schedule for each, noise in gradients."""
    run = training.optimize(layers(), torch.randn(BATCH, 32))
    groups = [
        {"params": [p], "lr": 0.01 * 0.9**n, "weight_decay": 0.1 * (p.ndim > 1)} for n, p in enumerate(run.parameters())
    ]
    optimizer = torch.optim.AdamW(groups)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [g["lr"] for g in groups], total_steps=5)
    for x, y in data(3):
        training.measured(lambda x=x, y=y: F.cross_entropy(run(x), y).backward())
        for p in run.parameters():
            p.grad.add_(torch.randn_like(p), alpha=0.01)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


@way()
def dropout_and_momentum_on_a_schedule(training):
    model = Images()
    run = training.optimize(model, torch.randn(8, 3, 16, 16))
    optimizer = sgd(run)
    for n, batch in enumerate(pictures(3)):
        model.drop.p = 0.1 * (n + 1)
        model.body[0][1].momentum = 0.1 / (n + 1)
        steps(training, run, [batch], optimizer)


@way()
def batch_norm_frozen(training):
    """Fine-tuning: some parts stay in eval mode while the model trains."""
    model = Images()
    run = training.optimize(model, torch.randn(8, 3, 16, 16))
    optimizer = sgd(run)
    for batch in pictures(3):
        run.train()
        for module in run.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval().requires_grad_(False)
        steps(training, run, [batch], optimizer)


@way()
def two_threads(training):
    """Hogwild without the race: one thread after the other trains the same model."""
    run = training.optimize(layers(), torch.randn(BATCH, 32))
    optimizer, batches = sgd(run), data(4)

    def train(some):
        for x, y in some:
            optimizer.zero_grad()
            F.cross_entropy(run(x), y).backward()
            optimizer.step()

    for some in (batches[:2], batches[2:]):
        thread = threading.Thread(target=train, args=(some,))
        thread.start()
        thread.join()


@way()
def forward_here_and_backward_in_another_thread(training):
    run = training.optimize(layers(), torch.randn(BATCH, 32))
    optimizer = sgd(run)
    for x, y in data(2):
        loss = F.cross_entropy(run(x), y)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        optimizer.step()
        optimizer.zero_grad()


@way(0.9)
def a_part_of_a_larger_model(training):
    """Only the body is optimized, within a model that is not."""
    model = nn.Sequential(nn.Linear(16, 32), layers(out=32), nn.LayerNorm(32), nn.Linear(32, 5))
    model[1] = training.optimize(model[1], torch.randn(BATCH, 32, requires_grad=True))
    steps(training, model, data(width=16), sgd(model))
    training.same(*model.parameters())


@way()
def a_module_that_is_used_again_and_again(training):
    """Deep equilibrium, unrolled: the same optimized cell, called in a loop, one backward."""
    cell = training.optimize(layers(2, out=32), torch.randn(BATCH, 32, requires_grad=True))
    head = nn.Linear(32, 5)
    optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()], 0.01)
    for x, y in data(2):
        state = x
        for _ in range(4):
            state = state + 0.1 * cell(state)
        F.cross_entropy(head(state), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    training.same(*head.parameters())


@way()
def complex_numbers(training):
    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.filter, self.body = nn.Parameter(torch.randn(17, dtype=torch.complex64)), layers()

        def forward(self, x):
            return self.body(torch.fft.irfft(torch.fft.rfft(x) * self.filter, 32))

    run = training.optimize(Spectral(), torch.randn(BATCH, 32))
    steps(training, run, data(), sgd(run))


@way()
def float16_weights_with_a_master_copy(training):
    """Weights in bfloat16, an optimizer on float32 copies."""
    run = training.optimize(layers().bfloat16(), torch.randn(BATCH, 32).bfloat16())
    masters = [p.detach().float().requires_grad_() for p in run.parameters()]
    optimizer = torch.optim.Adam(masters, 0.01)
    for x, y in data():
        F.cross_entropy(run(x.bfloat16()).float(), y).backward()
        for master, p in zip(masters, run.parameters(), strict=True):
            master.grad, p.grad = p.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, run.parameters(), strict=True):
                p.copy_(master)
    training.same(*masters)


@way()
def optimizers_fused_and_foreach(training):
    run = training.optimize(layers(), torch.randn(BATCH, 32))
    for kind, options in (
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"foreach": True}),
        (torch.optim.Rprop, {}),
    ):
        steps(training, run, data(2), kind(run.parameters(), lr=0.001, **options))


@way()
def conditional_gan_with_spectral_norm(training):
    """Hinge losses, a discriminator with spectral norm, a generator's copy averaged."""

    class Judge(nn.Module):
        def __init__(self):
            super().__init__()
            norm = nn.utils.parametrizations.spectral_norm
            self.body = nn.Sequential(*(nn.Sequential(norm(nn.Linear(32, 32)), nn.LeakyReLU(0.2)) for _ in range(5)))
            self.kinds = nn.Embedding(5, 32)

        def forward(self, x, y):
            return (self.body(x) * self.kinds(y)).sum(1)

    x, y = data(1)[0]
    make, verify = training.optimize(layers(out=32), x), training.optimize(Judge(), (x, y))
    optimizers = [torch.optim.Adam(one.parameters(), 0.001, betas=(0.0, 0.9)) for one in (make, verify)]
    for x, y in data(3):
        fake = make(torch.randn_like(x))
        optimizers[1].zero_grad()
        (F.relu(1 - verify(x, y)).mean() + F.relu(1 + verify(fake.detach(), y)).mean()).backward()
        optimizers[1].step()
        verify.requires_grad_(False)
        optimizers[0].zero_grad()
        (-verify(fake, y).mean()).backward()
        optimizers[0].step()
        verify.requires_grad_(True)


@way()
def two_forwards_of_a_model_that_counts(training):
    """Buffers that a forward updates, and copies, are updated by a second forward before the backward."""

    class Running(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(layers(2, out=32) for _ in range(4))
            self.register_buffer("size", torch.ones(32))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
                self.size.mul_(0.9).add_(x.detach().abs().mean(0), alpha=0.1)
                x = (x / self.size.clone()).tanh()
            return x

    run = training.optimize(Running(), torch.randn(BATCH, 32))
    optimizer = sgd(run)
    for (a, y), (b, z) in zip(data(2), data(2), strict=True):
        optimizer.zero_grad()
        (F.cross_entropy(run(a), y) + F.cross_entropy(run(b), z)).backward()
        optimizer.step()


@way()
def cyclegan(training):
    """CycleGAN: two generators, each after the other, one backward through four calls."""
    there, back = layers(4, out=32), layers(4, out=32)
    x = torch.randn(BATCH, 32, requires_grad=True)
    G, F_ = training.optimize(there, x), training.optimize(back, x)
    optimizer = torch.optim.Adam([*G.parameters(), *F_.parameters()], 0.01)
    for (a, _), (b, _) in zip(data(2), data(2), strict=True):
        loss = F.l1_loss(F_(G(a)), a) + F.l1_loss(G(F_(b)), b) + F.l1_loss(G(b), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@way()
def forward_forward(training):
    """Each layer has a loss of its own, on what is detached between them."""
    blocks = [training.optimize(layers(2, out=32), torch.randn(BATCH, 32)) for _ in range(2)]
    optimizers = [sgd(block) for block in blocks]
    for x, _ in data(3):
        for block, optimizer in zip(blocks, optimizers, strict=True):
            good, bad = block(x), block(x.flip(0))
            optimizer.zero_grad()
            F.softplus(bad.square().mean() - good.square().mean()).backward()
            optimizer.step()
            x = good.detach()


@way()
def langevin_noise_and_a_batch_sampler(training):
    """SGLD, and hard examples found by a pass without gradients first."""
    run = training.optimize(layers(), torch.randn(64, 32))
    for x, y in data(3):
        with torch.no_grad():
            hardest = F.cross_entropy(run(x), y, reduction="none").topk(64).indices
        F.cross_entropy(run(x[hardest]), y[hardest]).backward()
        with torch.no_grad():
            for p in run.parameters():
                p.sub_(0.01 * p.grad + 0.001 * torch.randn_like(p))
                p.grad = None


@way()
def double_backward_through_everything(training):
    """Double backward through everything: convolutions, batch norm, dropout."""
    run = training.optimize(Images(), torch.randn(8, 3, 16, 16))
    optimizer = sgd(run)
    for x, y in pictures():
        x.requires_grad_()
        loss = F.cross_entropy(run(x), y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        optimizer.zero_grad()
        (loss + slope.square().sum()).backward()
        optimizer.step()


@way()
def tensors_swapped_and_moved(training):
    """To another type and back between steps, to memory that is shared, through a copy and a pickle."""
    model = layers()
    run = training.optimize(model, torch.randn(BATCH, 32))
    steps(training, run, data(1), sgd(run))
    run.double().float().share_memory()
    steps(training, run, data(1), sgd(run))
    twin = copy.deepcopy(run)
    steps(training, twin, data(2), sgd(twin))
    run.load_state_dict(twin.state_dict())
    steps(training, run, data(1), sgd(run))


def test_the_page_on_training_names_each_way():
    assert not unnamed(WAYS)


@pytest.mark.parametrize("name", WAYS)
def test_way(name, monkeypatch):
    random.seed(0)
    assert_trained_alike(WAYS[name].train, monkeypatch, WAYS[name].share, WAYS[name].runs_plan)
