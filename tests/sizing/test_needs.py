"""What a step needs on a device, held against real steps by the allocator, line by line."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ogc
from ogc.errors import InputError, SolveError
from ogc.plan import plain_plan
from ogc.sizing.optimizers import optimizer_bytes
from ogc.torch_state.allocator import allocated_bytes, peak_bytes

CPU = torch.device("cpu")


class Network(nn.Module):
    """Convolutions with batch norm: images N, 3, 32, 32 to N, 10."""

    def __init__(self, blocks=4, width=24):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))
                for _ in range(blocks)
            )
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


IMAGES, LABELS = torch.randn(16, 3, 32, 32), torch.arange(16) % 10


def loss(output):
    return F.cross_entropy(output, LABELS)


OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "AMSGrad": partial(torch.optim.Adam, amsgrad=True),
    "Adafactor": torch.optim.Adafactor,
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
}


def named(*names):
    """Parameters of a test, but for what torch itself cannot run."""
    is_broken = torch.cuda.is_available() and "capturable" not in torch.optim.Adafactor([torch.ones(1)]).defaults
    skip = pytest.mark.skipif(is_broken, reason="torch's own step of Adafactor raises KeyError where there is a GPU")
    return [pytest.param(name, marks=skip if name == "Adafactor" else ()) for name in names]


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("name", named(*OPTIMIZERS))
def test_an_optimizer_takes_what_the_allocator_says(name, foreach):
    model = nn.Sequential(nn.Linear(200, 300), nn.Linear(300, 100), nn.LayerNorm(100))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    make = partial(OPTIMIZERS[name], foreach=foreach)
    found = optimizer_bytes(model, make, CPU)
    held = []
    made = allocated_bytes(lambda: held.append(make(model.parameters())), CPU)[1]
    (optimizer,) = held
    made += allocated_bytes(optimizer.step, CPU)[1]
    assert found.state == pytest.approx(made, rel=0.01, abs=64)
    assert found.working == pytest.approx(peak_bytes(optimizer.step, CPU), rel=0.01, abs=64)


def test_an_optimizer_of_the_users_is_left_as_it_was():
    model = Network()
    optimizer = torch.optim.AdamW([{"params": model.stem.parameters(), "lr": 0.1}, {"params": model.head.parameters()}])
    calls = []
    optimizer.register_step_pre_hook(lambda *args: calls.append(1))
    found = optimizer_bytes(model, optimizer, CPU)
    trained = [*model.stem.parameters(), *model.head.parameters()]
    assert found.state == sum(2 * p.numel() * 4 + 4 for p in trained)
    assert not optimizer.state and not calls
    assert optimizer.param_groups[0]["params"][0] is model.stem.weight
    assert all(p.grad is None for p in model.parameters())


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(InputError, match=r"optimizer must be a torch\.optim\.Optimizer"):
        ogc.estimate(Network(), IMAGES, optimizer="adam")
    with pytest.raises(InputError, match="optimizer must be"):
        ogc.estimate(Network(), IMAGES, optimizer=lambda parameters: 3)
    with pytest.raises(InputError, match="what LBFGS takes cannot be told"):
        ogc.estimate(Network(), IMAGES, optimizer=torch.optim.LBFGS)


@pytest.mark.full
@pytest.mark.parametrize("name", named("SGD", "Adam", "AdamW", "Adafactor"))
def test_each_line_is_that_of_a_real_step(name):
    model = Network()
    needs = ogc.estimate(model, IMAGES, loss=loss, optimizer=OPTIMIZERS[name], gradients="kept")
    optimizer = OPTIMIZERS[name](model.parameters())

    def forward_and_backward():
        output = model(IMAGES)
        loss(output).backward()
        return output

    forward_and_backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert needs.parameters == sum(p.numel() * 4 for p in model.parameters())
    assert needs.buffers == sum(b.numel() * b.element_size() for b in model.buffers())
    assert needs.gradients == sum(p.grad.numel() * 4 for p in model.parameters())
    held = sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t))
    assert needs.optimizer == held
    assert needs.inputs == IMAGES.numel() * 4
    assert needs.plain == pytest.approx(peak_bytes(forward_and_backward, CPU), rel=0.01)
    assert needs.optimizer_step == pytest.approx(peak_bytes(optimizer.step, CPU), rel=0.01, abs=64)
    assert needs.context == needs.workspaces == 0
    optimised = ogc.apply(model, ogc.parse(model, IMAGES, loss=loss), needs.least)
    with torch.no_grad():
        optimised.zero_grad(set_to_none=False)
    peak = peak_bytes(lambda: loss(optimised(IMAGES)).backward(), CPU)
    assert needs.least.peak_bytes == pytest.approx(peak, rel=0.01)


def test_the_table_says_what_a_step_needs():
    needs = ogc.estimate(Network(), IMAGES, loss=loss, optimizer=torch.optim.Adam)
    text = str(needs)
    assert f"{needs.plain_bytes / 2**20:.1f} MiB" in text
    assert "optimizer step" in text and "activations and gradients, least" in text
    assert f"holds nothing, needs {needs.bytes_of(plain_plan(needs.least.graph), is_first=True) / 2**20:.1f}" in text
    assert needs.plain_bytes == needs.with_activations(needs.plain)
    assert "gradients (none before the backward)" in text
    kept = ogc.estimate(Network(), IMAGES, loss=loss, optimizer=torch.optim.Adam, gradients="kept")
    assert kept.plain_bytes == kept.fixed + max(kept.plain, kept.optimizer_step) > needs.plain_bytes
    assert kept.fixed == needs.fixed + needs.gradients
    assert "gradients (kept)" in str(kept) and "activations, least" in str(kept)


def test_a_device_that_is_not_there_has_allowances():
    needs = ogc.estimate(Network(), IMAGES, loss=loss, optimizer=torch.optim.Adam, device="cuda")
    assert needs.device == "cuda"
    assert needs.context and needs.workspaces
    here = optimizer_bytes(Network(), torch.optim.Adam, CPU)
    assert needs.optimizer == here.state
    assert needs.optimizer_step > here.working  # all parameters at once


def test_where_no_plan_needs_less_it_says_so():
    needs = ogc.estimate(Network(), IMAGES, loss=loss, device="cuda")
    vars(needs).update(plain_bytes=2**20, least_bytes=2**19)
    assert "a plain step needs 1.0 MiB, at least 0.5 MiB at +" in str(needs)
    vars(needs).update(plain_bytes=2**20, least_bytes=2**20 + 100)  # each is known to a percent
    assert "a plain step needs 1.0 MiB, no plan less" in str(needs)


def test_shared_and_frozen_parameters_count_for_what_they_are():
    model = Network()
    model.stem.requires_grad_(False)
    model.blocks[1][2].weight = model.blocks[2][2].weight
    needs = ogc.estimate(model, IMAGES, optimizer=torch.optim.Adam)
    assert needs.parameters == sum(p.numel() * 4 for p in model.parameters())
    assert needs.gradients == sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("gradients", ["none", "kept"])
def test_the_memory_of_a_device_is_kept_by_a_whole_step(gradients):
    model = Network()
    options = {"loss": loss, "optimizer": torch.optim.Adam, "gradients": gradients}
    needs = ogc.estimate(model, IMAGES, **options)
    room = (needs.plain_bytes + needs.least_bytes) // 2
    optimised = ogc.optimize(model, IMAGES, device_memory=room, **options)
    assert optimised.plan.budget_bytes == room - needs.fixed
    assert not optimised.plan.is_plain
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        if gradients == "kept":
            optimizer.zero_grad(set_to_none=False)
        loss(optimised(IMAGES)).backward()
        optimizer.step()

    step()
    if gradients == "none":
        optimizer.zero_grad()
    assert needs.fixed + peak_bytes(step, CPU) <= 1.01 * room


@pytest.mark.full
def test_a_device_that_is_too_small_is_told_what_would_do():
    model = Network()
    needs = ogc.estimate(model, IMAGES, loss=loss, optimizer=torch.optim.Adam)
    options = {"loss": loss, "optimizer": torch.optim.Adam}
    for room in (needs.least_bytes // 2, needs.fixed // 2):
        with pytest.raises(SolveError, match="the smallest that would do has") as caught:
            ogc.optimize(model, IMAGES, device_memory=room, **options)
        assert f"{needs.least_bytes / 2**20:.1f} MiB" in str(caught.value)
    ogc.optimize(model, IMAGES, device_memory=needs.least_bytes + 1, **options)


@pytest.mark.parametrize("memory", [0.5, True, "much", -3, 0])
def test_what_is_no_memory_of_a_device_is_refused(memory):
    with pytest.raises(InputError, match="device_memory must be bytes"):
        ogc.optimize(Network(), IMAGES, device_memory=memory)


def test_a_budget_and_a_device_are_not_both_given():
    with pytest.raises(InputError, match="memory_budget or device_memory, not both"):
        ogc.optimize(Network(), IMAGES, device_memory="1GB", memory_budget=0.5)
