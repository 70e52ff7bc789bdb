"""Whole steps by the allocator: all that a device holds at once, from the first step on, wherever gradients are."""

from functools import partial
from itertools import pairwise

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

import ogc
from ogc.errors import InputError
from ogc.program.program import each_storage_bytes, tensor_leaves
from ogc.sizing.needs import fixed_needs
from ogc.torch_state.allocator import peak_bytes

OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.01),
    "SGD with momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "AdamW": torch.optim.AdamW,
    "AdamW, fused": partial(torch.optim.AdamW, fused=True),
    "AdamW, foreach": partial(torch.optim.AdamW, foreach=True),
    "Adafactor": torch.optim.Adafactor,
}


def called(model, inputs):
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def bytes_of(*tensors):
    return sum(each_storage_bytes(tensor_leaves(*tensors)))


def whole_steps(model, run, inputs, loss, make, gradients):
    """Bytes that are alive at once in the first step and in a later one; the model is afterwards as before."""
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters, found = [p for p in model.parameters() if p.requires_grad], []

    def step():
        if gradients == "kept":
            optimizer.zero_grad(set_to_none=False)
        output = called(run, inputs)
        loss(output).backward()
        optimizer.step()

    for is_later in (False, True):
        optimizer = make(parameters)
        if gradients == "kept":
            loss(called(run, inputs)).backward()
        if is_later:
            step()
        if gradients == "none":
            optimizer.zero_grad()
        held = bytes_of(list(model.parameters()), list(model.buffers()), inputs, [p.grad for p in parameters])
        held += bytes_of(*optimizer.state.values())
        found.append(held + peak_bytes(step, "cpu"))
        optimizer.zero_grad()
    model.load_state_dict(start)
    return found


def steps_with_hooks(model, run, inputs, loss, make):
    """The same of later steps in which hooks step the optimizer and free each gradient; of the first one, no more."""
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizers = {parameter: make([parameter]) for parameter in model.parameters()}

    def hook(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    def step():
        output = called(run, inputs)
        loss(output).backward()

    handles = [parameter.register_post_accumulate_grad_hook(hook) for parameter in optimizers]
    held = bytes_of(list(model.parameters()), list(model.buffers()), inputs)
    first, later = held + peak_bytes(step, "cpu"), held + peak_bytes(step, "cpu")
    for handle in handles:
        handle.remove()
    later += bytes_of(*(state for one in optimizers.values() for state in one.state.values()))
    model.load_state_dict(start)
    return first, later


def assert_as_allocated(make_case, gradients, optimizers=OPTIMIZERS):
    torch.manual_seed(0)
    model, inputs, loss = make_case()
    known = {}
    for name, make in optimizers.items():
        needs = fixed_needs(model, inputs, make, gradients=gradients)
        if (when := str(needs.when)) not in known:
            graph = ogc.parse(model, inputs, loss=loss, gradients=needs.when, profile="estimate")
            plain, least = ogc.solve(graph, solver="none"), ogc.solve(graph, memory_budget="least")
            known[when] = (plain, model), (least, ogc.apply(model, graph, least))
        for plan, run in known[when]:
            counted = [needs.bytes_of(plan, is_first=True), needs.bytes_of(plan)]
            if gradients == "freed":
                first, later = steps_with_hooks(model, run, inputs, loss, make)
                assert first <= 1.01 * counted[0] and later == pytest.approx(counted[1], rel=0.01), name
            else:
                measured = whole_steps(model, run, inputs, loss, make, gradients)
                assert counted == pytest.approx(measured, rel=0.01), (name, plan.is_plain)


class Images(nn.Module):
    """Convolutions, the last of which have most of the parameters: N, 3, 16, 16 to N, 10."""

    def __init__(self, num_classes=10):
        super().__init__()
        widths = (3, 16, 32, 128)
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths[1:])
        self.head = nn.Linear(128, num_classes)

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x)).relu()
        return self.head(x.mean((2, 3)))


class Words(nn.Module):
    """Attention between an embedding and itself as the head, and parameters that gradients reach by copies, by views
    and in several uses: N, L to N, L, 200.
    """

    def __init__(self, width=32):
        super().__init__()
        self.words, self.places = nn.Embedding(200, width), nn.Parameter(torch.randn(2, 16, width))
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.twice = nn.Linear(width, width)

    def forward(self, words):
        x = self.words(words) + self.places  # whose gradient is the sum's
        weights = torch.cat([self.query.weight, self.key.weight, self.value.weight])  # views of one gradient
        query, key, value = F.linear(x, weights).chunk(3, -1)
        x = x + (query @ key.transpose(1, 2)).softmax(-1) @ value
        x = self.twice(self.twice(x).tanh())
        return F.linear(x, self.words.weight) + self.places.sum()


def images():
    return Images(), torch.randn(8, 3, 16, 16), lambda y: F.cross_entropy(y, torch.arange(8))


def words():
    ids = torch.arange(32).view(2, 16) * 5
    return Words(), ids, lambda y: F.cross_entropy(y.flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("gradients", ["none", "kept", "freed"])
@pytest.mark.parametrize("make_case", [images, words])
@pytest.mark.full
def test_a_small_step_takes_what_the_allocator_says(make_case, gradients):
    assert_as_allocated(make_case, gradients)


class Opaque(nn.Module):
    """A network within that is called as it is: N, 64 to N, 64."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 128), nn.Linear(128, 64)
        self.inner = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))

    def forward(self, x):
        return self.last(self.inner(self.first(x).tanh()).tanh())


@pytest.mark.parametrize("gradients", ["none", "kept"])
def test_gradients_of_an_opaque_module_are_its_own(gradients):
    model, inputs, make = Opaque(), torch.randn(64, 64), OPTIMIZERS["SGD with momentum"]
    needs = ogc.estimate(
        model, inputs, optimizer=make, gradients=gradients, opaque_modules=["inner"], profile="estimate"
    )
    seen = whole_steps(model, model, inputs, torch.Tensor.sum, make, gradients)[1]
    assert needs.plain_bytes == pytest.approx(seen, rel=0.01)
    assert needs.least.graph.left_bytes == (needs.gradients if gradients == "none" else 0)


class Rows(nn.Module):
    """Goes on with those rows that its data says, so that its layers are planned one by one: N, 8 to N, 8."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 8))
            for _ in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)[x.sum(-1) > -1e9]
        return x


@pytest.mark.full
@pytest.mark.parametrize("gradients", ["none", "kept", "freed"])
def test_a_model_in_parts_fits(gradients):
    model, inputs, make = Rows(), torch.randn(256, 8), OPTIMIZERS["AdamW"]
    needs = fixed_needs(model, inputs, make, gradients=gradients)
    plain = whole_steps(model, model, inputs, torch.Tensor.sum, make, "kept")[1]
    room = int(needs.fixed + 0.8 * (plain - fixed_needs(model, inputs, make, gradients="kept").fixed))
    optimised = ogc.optimize(model, inputs, device_memory=room, optimizer=make, gradients=gradients)
    assert isinstance(optimised.plan, ogc.PartsPlan) and needs.bytes_of(optimised.plan) <= room
    if gradients == "freed":
        assert steps_with_hooks(model, optimised, inputs, torch.Tensor.sum, make)[1] <= room
    else:
        assert whole_steps(model, optimised, inputs, torch.Tensor.sum, make, gradients)[1] <= room


@pytest.mark.parametrize(
    ("network", "size", "room", "largest", "kept"),
    [
        pytest.param(Images, 16, 2 * 2**20, 55, 52, marks=pytest.mark.full),
        pytest.param(torchvision.models.resnet18, 64, 286 * 2**20, 71, 56, marks=pytest.mark.slow),
    ],
)
def test_the_largest_batch_of_a_step_that_sets_gradients_to_none(network, size, room, largest, kept):
    model, make = network(num_classes=10), torch.optim.AdamW

    def samples(number):
        return torch.randn(number, 3, size, size)

    def loss_for(number):
        labels = torch.arange(number) % 10
        return lambda output: F.cross_entropy(output, labels)

    options = {"device_memory": room, "optimizer": make, "make_loss": loss_for}
    found = ogc.largest_batch(model, samples, **options)
    assert found.plain == largest and ogc.largest_batch(model, samples, gradients="kept", **options).plain == kept
    for number, does_fit in ((found.plain, True), (found.plain + 1, False)):
        seen = whole_steps(model, model, samples(number), loss_for(number), make, "none")
        assert (max(seen) <= room) == does_fit
    planned = ogc.apply(model, found.graph, found.plan)
    assert max(whole_steps(model, planned, samples(found.size), loss_for(found.size), make, "none")) <= 1.001 * room


def test_a_plan_for_a_device_counts_gradients_as_they_come():
    model, inputs, loss = words()
    needs = ogc.estimate(model, inputs, loss=loss, profile="estimate")
    room = (needs.least_bytes + needs.plain_bytes) // 2
    optimised = ogc.optimize(model, inputs, loss=loss, device_memory=room, profile="estimate")
    assert optimised.graph.left_bytes == needs.gradients
    assert optimised.plan.budget_bytes == room - needs.fixed and not optimised.plan.is_plain
    assert max(whole_steps(model, optimised, inputs, loss, OPTIMIZERS["SGD"], "none")) <= room
    memory = needs.memory()
    assert memory.planned.requested == needs.least_bytes and memory.plain.requested == needs.plain_bytes


def test_a_gradient_that_is_sparse_stays_so():
    words, x = nn.Embedding(500, 64, sparse=True), torch.arange(96).view(4, 24)
    graph = ogc.parse(words, x, loss=lambda y: y.tanh().sum(), gradients="none", profile="estimate")
    assert graph.left_bytes == 96 * (8 + 64 * 4)  # of each row its number and what it is

    def step():
        output = words(x)
        output.tanh().sum().backward()

    # on a CPU the numbers are a view of what was given
    assert ogc.solve(graph, solver="none").peak_bytes == pytest.approx(peak_bytes(step, "cpu"), abs=96 * 8)


@pytest.mark.parametrize("given", ["all", None, True])
def test_what_says_nothing_of_gradients_is_refused(given):
    with pytest.raises(InputError, match='gradients must be "none", "kept" or "freed"'):
        ogc.estimate(Opaque(), torch.randn(2, 64), gradients=given)
    with pytest.raises(InputError, match='gradients must be "none", "kept" or "freed"'):
        ogc.largest_batch(Opaque(), lambda n: torch.randn(n, 64), device_memory="1GB", gradients=given)
    with pytest.raises(InputError, match='gradients must be "kept", "none", or by shape'):
        ogc.parse(Opaque(), torch.randn(2, 64), gradients=given)
