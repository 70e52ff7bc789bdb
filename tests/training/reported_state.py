"""Reports where something that is kept was written once too often, or where nobody looked for it."""

from __future__ import annotations

from queue import SimpleQueue

import torch
from reported import Report, learn, mean_square, registering
from torch import nn
from torch.nn import functional as F
from trained import BATCH, Images, layers, pictures

REPORTS: dict[str, Report] = {}
report = registering(REPORTS)


@report("facebookresearch/fairscale#1035")
def statistics_of_a_forward_without_a_backward(training):
    """Forwards whose loss is thrown away, with gradients and without, count as any other."""
    x = torch.randn(8, 3, 16, 16)
    model = Images()
    run = training.optimize(model, x)
    for images, _ in pictures():
        run(images)
        with torch.no_grad():
            training.same(run(images))
        training.same(run(images))
    learn(training, run, (x,))


class CountedLoad(nn.Module):
    """A gate whose load is not there before its first call, and added up from then on."""

    def __init__(self):
        super().__init__()
        self.score, self.expert, self.load = nn.Linear(32, 4), layers(2, out=32), None

    def forward(self, x):
        scores = self.score(x).softmax(1)
        counted = torch.bincount(scores.argmax(1), minlength=4).float()
        if self.load is None:
            self.load = counted
        else:
            self.load += counted
        return x + self.expert(x) * scores.max(1, keepdim=True).values


@report("NVIDIA-NeMo/Automodel#3247")
def a_load_that_is_counted_in_the_forward(training):
    x = torch.randn(BATCH, 32)
    model = nn.Sequential(layers(4, out=32), CountedLoad(), layers(2))
    learn(training, training.optimize(model, x), (x,))
    training.same(model[1].load)


TRACKED = {"loss": torch.zeros(()), "calls": 0}


class Tracked(nn.Module):
    """A router whose loss is added up in a table of the module's file, to be logged."""

    def __init__(self):
        super().__init__()
        self.score, self.expert = nn.Linear(32, 4), layers(3, out=32)

    def forward(self, x):
        share = self.score(x).softmax(1).mean(0)
        TRACKED["loss"] = TRACKED["loss"] + share.detach().square().sum() * 4
        TRACKED["calls"] += 1
        return x + self.expert(x) * share.max()


@report("NVIDIA/Megatron-LM#1330")
def a_loss_that_is_tracked_beside_the_model(training):
    TRACKED.update(loss=torch.zeros(()), calls=0)
    x = torch.randn(BATCH, 32)
    model = nn.Sequential(layers(4, out=32), Tracked(), layers(2, out=32))
    learn(training, training.optimize(model, x), (x,))
    training.same(TRACKED["loss"], torch.tensor(TRACKED["calls"]))


class Cache:
    """Keys and values of the layers before, which attention appends to."""

    def __init__(self):
        self.keys, self.values = {}, {}

    def update(self, number, k, v):
        if number in self.keys:
            k, v = torch.cat([self.keys[number], k], 1), torch.cat([self.values[number], v], 1)
        self.keys[number], self.values[number] = k, v
        return k, v


class Attention(nn.Module):
    def __init__(self, number, width=16):
        super().__init__()
        self.number, self.qkv, self.mlp = number, nn.Linear(width, 3 * width), layers(2, width, width)

    def forward(self, x, cache):
        q, k, v = self.qkv(x).chunk(3, -1)
        if cache is not None:
            k, v = cache.update(self.number, k, v)
        x = x + F.scaled_dot_product_attention(q, k, v)
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(Attention(n) for n in range(depth))

    def forward(self, x, cache=None):
        for layer in self.layers:
            x = layer(x, cache)
        return x


@report("shihao1895/MemoryVLA#18")
def a_cache_that_attention_appends_to(training):
    x = torch.randn(4, 12, 16)
    run = training.optimize(Decoder(), (x, Cache()))
    filled = []

    def inputs():
        filled.append(Cache())
        return x, filled[-1]

    learn(training, run, inputs)
    training.same(*(t for cache in filled for t in (*cache.keys.values(), *cache.values.values())))


class WithMemory(nn.Module):
    """An encoder that writes what each layer knows into a table, which the decoder's layers read with gradients."""

    def __init__(self, depth=3):
        super().__init__()
        self.encoder = nn.ModuleList(layers(2, 16, 16) for _ in range(depth))
        self.decoder = nn.ModuleList(layers(2, 16, 16) for _ in range(depth))

    def forward(self, x, y):
        shared = {}
        for n, layer in enumerate(self.encoder):
            x = x + self.keep(layer, n, x, shared)
        for n, layer in enumerate(self.decoder):
            y = y + F.scaled_dot_product_attention(layer(y), *shared[n])
        return y

    @staticmethod
    def keep(layer, n, x, shared):
        x = layer(x)
        shared[n] = (x, torch.tanh(x))
        return x


@report("huggingface/transformers#46572", 0.85)
def what_an_encoder_writes_for_the_decoder(training):
    x, y = torch.randn(4, 24, 16), torch.randn(4, 12, 16)
    learn(training, training.optimize(WithMemory(), (x, y)), (x, y))


@report("pytorch/pytorch#143573", 0.9)
def hooks_of_a_block_that_runs_again(training):
    """Hooks of the forward and of the backward of a block inside are called once a step each."""
    x, model, calls = torch.randn(BATCH, 32), layers(), SimpleQueue()
    model[4].register_forward_pre_hook(lambda *_: calls.put(1))
    model[4].register_forward_hook(lambda *_: calls.put(2))
    model[4].register_full_backward_pre_hook(lambda *_: calls.put(3))
    model[4].register_full_backward_hook(lambda *_: calls.put(4))
    run = training.optimize(model, x)
    while not calls.empty():
        calls.get()
    learn(training, run, (x,))
    training.same(torch.tensor([calls.get() for _ in range(calls.qsize())]))


class Repeated(nn.Module):
    def __init__(self, count=4):
        super().__init__()
        self.block, self.count = layers(2, out=32, drop=0.0), count

    def forward(self, x):
        for _ in range(self.count):
            x = x + self.block(x)
        return x


@report("pytorch/pytorch#81296", 0.8)
def hooks_of_a_gradient_that_layers_share(training):
    x, model, calls = torch.randn(BATCH, 32), Repeated(), SimpleQueue()
    weight = model.block[0][0].weight
    run = training.optimize(model, x)
    weight.register_hook(lambda g: calls.put(g.clone()))
    weight.register_post_accumulate_grad_hook(lambda p: calls.put(p.grad.clone()))
    learn(training, run, (x,))
    assert calls.qsize() == 6
    training.same(*(calls.get() for _ in range(6)))


@report("facebookresearch/fairscale#777", 0.8)
def a_block_that_runs_several_times_a_step(training):
    """Once more in each step than in the one before."""
    x, model = torch.randn(BATCH, 32), Repeated(3)
    run = training.optimize(model, x)
    for count in (3, 4):
        model.count = count
        learn(training, run, (x,), count=2)


def grouped(train):
    """In a group of one process."""
    import torch.distributed as dist

    def run(training):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            train(training)
        finally:
            dist.destroy_process_group()

    return run


@report("huggingface/peft#313", 0.8)
@grouped
def weights_that_are_ready_twice(training):
    """DistributedDataParallel, one block several times, unused and frozen parameters."""
    x, model = torch.randn(BATCH, 32), Repeated()
    model.unused = nn.Linear(4, 4)
    model.block[1].requires_grad_(False)
    run = nn.parallel.DistributedDataParallel(training.optimize(model, x), find_unused_parameters=True)
    learn(training, run, (x,))


@report("pytorch/pytorch#24005")
@grouped
def gradients_that_are_asked_for_within_a_group(training):
    """Of the inputs by torch.autograd.grad, and then of the weights by backward."""
    x, model = torch.randn(BATCH, 32, requires_grad=True), layers()
    run = nn.parallel.DistributedDataParallel(training.optimize(model, x))
    for _ in range(2):
        loss = mean_square(run(x))
        training.same(*torch.autograd.grad(loss, [x], retain_graph=True))
        loss.backward()


@report("huggingface/transformers#47254")
def frozen_weights_that_are_there_while_they_are_used(training):
    """A frozen block's weights are brought by hooks before it runs forward and backward, and taken away after."""
    x, model = torch.randn(BATCH, 32), layers(4)
    frozen = model[1].requires_grad_(False)
    stored = [p.data.clone() for p in frozen.parameters()]

    def bring(*_):
        for p, data in zip(frozen.parameters(), stored, strict=True):
            p.data = data

    def take(*_):
        for p in frozen.parameters():
            p.data = torch.empty(0)

    frozen.register_forward_pre_hook(bring)
    frozen.register_forward_hook(take)
    frozen.register_full_backward_pre_hook(bring)
    frozen.register_full_backward_hook(take)
    learn(training, training.optimize(model, x), (x,))
    bring()
