"""Long trainings in which everything happens: the plain model's numbers to the last bit, flat memory, nothing left.

Batches of random sizes, eval passes, errors in forwards and backwards, checkpoints saved and loaded, rates changed,
layers frozen and thawed, graphs that are never run backward or run twice.
"""

from __future__ import annotations

import copy
import gc
import io
import os
import random
import resource
import time
import weakref
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ogc
from ogc.runtime import runner
from ogc.runtime.copies import Away
from ogc.runtime.frame import Frame, Step
from ogc.runtime.runner import SHAPES


class Interrupted(Exception):
    """What is thrown in the middle of a step."""


class Net(nn.Module):
    """Convolutions with batch norm, dropout, layers that are frozen now and then, and an input of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(8), nn.GELU(), nn.Dropout(0.1), nn.Conv2d(8, 8, 3, padding=1))
            for _ in range(4)
        )
        self.norm, self.head = nn.GroupNorm(2, 8), nn.Linear(8, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = x + block(x)
        return self.head(F.silu(self.norm(x)).mean((2, 3)))


@dataclass
class Life:
    """One training, told step by step what happens by ``chance``, the same for each run."""

    model: Net
    run: nn.Module
    chance: random.Random
    saved: bytes = b""
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.run.parameters(), 0.01, momentum=0.9)
        self.save()

    def save(self) -> None:
        file = io.BytesIO()
        torch.save([self.run.state_dict(), self.optimizer.state_dict(), torch.get_rng_state()], file)
        self.saved = file.getvalue()

    def load(self) -> None:
        weights, optimizer, state = torch.load(io.BytesIO(self.saved))
        self.run.load_state_dict(weights)
        self.optimizer.load_state_dict(optimizer)
        torch.set_rng_state(state)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        size, side = self.chance.choice([1, 2, 3, 5, 8, 8, 8]), self.chance.choice([6, 8, 8, 8, 9])
        return torch.randn(size, 3, side, side), torch.randint(5, (size,))

    def happen(self) -> str:
        """What happens in this step."""
        what = self.chance.choice([*["step"] * 12, *HAPPENINGS])
        if what == "step":
            self.step()
        else:
            HAPPENINGS[what](self)
        self.optimizer.zero_grad()
        torch.zeros((), requires_grad=True).backward()  # the engine lets go of what it had left to do after an error
        return what

    def step(self) -> torch.Tensor:
        images, labels = self.batch()
        loss = F.cross_entropy(self.run(images), labels)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        return loss

    def evaluate(self) -> None:
        self.run.eval()
        with torch.no_grad():
            self.losses.append(self.run(self.batch()[0]).square().mean().item())
        if self.chance.random() < 0.3:  # with gradients, too
            (slope,) = torch.autograd.grad(self.run(self.batch()[0]).sum(), self.run.stem.weight)
            self.losses.append(slope.norm().item())
        self.run.train()

    def fail_forward(self) -> None:
        """An operator fails: images with too many channels, after a size that is fine."""
        images, _ = self.batch()
        try:
            self.run(torch.cat([images, images], 1))
        except RuntimeError:
            return
        raise AssertionError("six channels for three went through")

    def fail_after(self, calls: int) -> None:
        """An error out of the middle of the forward: of an operator, whichever runs it."""
        images, _ = self.batch()
        self.run(images)  # planned, if it is a kind of calls that was not seen before
        try:
            with Failing(calls):
                self.run(images)
        except Interrupted:
            return
        raise AssertionError("the forward was not interrupted")

    def fail_in_a_hook(self) -> None:
        """A hook of a submodule raises, which was not there when the model was optimized."""
        hook = self.run.blocks[2].register_forward_hook(lambda *_: interrupt(_))
        try:
            self.run(self.batch()[0])
        except Interrupted:
            return
        finally:
            hook.remove()
        raise AssertionError("the hook did not raise")

    def fail_backward(self) -> None:
        """A hook on a parameter raises; then the graph is let go of, and what gradients there are as well."""
        images, labels = self.batch()
        hook = self.chance.choice([p for p in self.run.parameters() if p.requires_grad]).register_hook(interrupt)
        try:
            F.cross_entropy(self.run(images), labels).backward()
        except Interrupted:
            return
        finally:
            hook.remove()
        raise AssertionError("the backward was not interrupted")

    def fail_backward_and_go_on(self) -> None:
        """The same graph is run backward again after an error."""
        images, labels = self.batch()
        loss = F.cross_entropy(self.run(images), labels)
        hook = self.run.blocks[2][3].weight.register_hook(interrupt)
        try:
            loss.backward(retain_graph=True)
        except Interrupted:
            hook.remove()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            return
        raise AssertionError("the backward was not interrupted")

    def forget(self) -> None:
        """A forward whose backward never comes."""
        self.run(self.batch()[0])

    def twice(self) -> None:
        images, labels = self.batch()
        loss = F.cross_entropy(self.run(images), labels)
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        self.optimizer.step()

    def change_rate(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.chance.choice([0.001, 0.01, 0.02])

    def freeze(self) -> None:
        self.run.blocks[self.chance.randrange(2)].requires_grad_(self.chance.random() < 0.5)


def interrupt(_: object) -> None:
    raise Interrupted


class Failing(torch.overrides.TorchFunctionMode):
    """Operators fail after so many calls of a convolution, which the plain model and a plan make alike."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.left = calls

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if "conv" in str(function):
            self.left -= 1
            if self.left == 0:
                raise Interrupted
        return function(*args, **(kwargs or {}))


HAPPENINGS = {
    "evaluates": Life.evaluate,
    "a forward fails": Life.fail_forward,
    "a forward fails in the middle": lambda life: life.fail_after(life.chance.randint(2, 4)),
    "a hook fails": Life.fail_in_a_hook,
    "a backward fails": Life.fail_backward,
    "a backward fails and is run again": Life.fail_backward_and_go_on,
    "a graph is forgotten": Life.forget,
    "two backwards": Life.twice,
    "saves": Life.save,
    "loads": Life.load,
    "another rate": Life.change_rate,
    "freezes or thaws": Life.freeze,
}


def resident_bytes() -> int:
    """Memory of this process, where the system tells."""
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[1]) * resource.getpagesize() if file.exists() else 0


@pytest.fixture
def living(monkeypatch):
    """The frames and steps that are alive, and how many frames have been opened."""
    living: weakref.WeakSet[Frame | Step] = weakref.WeakSet()
    opened = []
    original = Step.open

    def open_and_note(step, *args):
        frame = original(step, *args)
        opened.append(1)
        living.update((step, frame))
        return frame

    monkeypatch.setattr(Step, "open", open_and_note)
    return living, opened


def tensors() -> int:
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


def live(run_of, steps: int, watch) -> tuple[Life, list[str]]:
    torch.manual_seed(0)
    model = Net()
    random_state = torch.get_rng_state()
    run = run_of(model)
    torch.set_rng_state(random_state)
    life = Life(model, run, random.Random(0))
    happened = []
    for number in range(steps):
        happened.append(life.happen())
        watch(number, life)
    return life, happened


def collected() -> int:
    """Frames and steps among all objects there are, in circles or not."""
    return sum(type(one) in (Frame, Step) for one in gc.get_objects())


GOALS = {"recomputes": {"memory_budget": "least"}, "offloads": {"memory_budget": 0.6, "bandwidth": 1e12}}


@pytest.mark.parametrize("steps", [150, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("does", GOALS)
@pytest.mark.full
def test_everything_happens_and_nothing_is_left(does, steps, living, tmp_path, monkeypatch):
    """Also of what was offloaded: places in the file, threads of copies and the file itself."""
    frames, opened = living
    goal, homes = dict(GOALS[does]), []
    if does == "offloads":
        goal["offload"], makes = tmp_path, runner.home_at
        monkeypatch.setattr(runner, "home_at", lambda *place: homes.append(makes(*place)) or homes[-1])
        monkeypatch.setattr(Away, "leave", lambda away, leave=Away.leave: opened.append(1) or leave(away))
    gc.collect()
    others = collected()  # of tests before this one, whose tracebacks hold them
    tracked: list[tuple[int, int]] = []
    expected: list[dict[str, torch.Tensor]] = []

    def note(number: int, life: Life) -> None:
        if number % 10 == 0:
            expected.append(copy.deepcopy(life.model.state_dict()) | {"random state": torch.get_rng_state()})

    def compare(number: int, life: Life) -> None:
        assert not frames, f"after step {number}"
        if number % 10 == 0:
            assert collected() <= others
            found = {**life.model.state_dict(), "random state": torch.get_rng_state()}
            for name, tensor in expected[number // 10].items():
                assert torch.equal(found[name], tensor), f"{name} after step {number}"
            if does == "offloads":  # what planning leaves in circles goes later
                gc.collect()
            tracked.append((tensors(), resident_bytes()))

    plain, happened = live(lambda model: model, steps, note)
    ours, happened_too = live(lambda model: ogc.optimize(model, torch.randn(8, 3, 8, 8), **goal), steps, compare)
    assert happened == happened_too and set(happened) == {"step", *HAPPENINGS}
    assert ours.losses == plain.losses and len(ours.losses) > steps / 2
    assert len(opened) > steps / 2
    counts, sizes = zip(*tracked, strict=True)
    half = len(tracked) // 2  # by then most kinds of calls have been planned for
    assert counts[-1] <= counts[half] + 120, counts
    assert sizes[-1] <= sizes[half] + 32 * 2**20, sizes
    assert bool(homes) == (does == "offloads")
    gc.collect()
    files = [file for home in homes for file in home.files.values()]
    assert all(sum(size * len(places) for size, places in f.free.items()) == f.end <= 2**24 for f in files)
    handles, running = [file.file for file in files], threads()
    homes.clear(), files.clear()
    del ours
    for _ in range(200):  # the threads end by themselves
        gc.collect()
        if threads() <= running - 2 * len(handles):
            break
        time.sleep(0.05)
    assert threads() <= running - 2 * len(handles) and all(handle.closed for handle in handles)


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_what_a_step_returns_dies_with_it(living):
    model = Net()
    run = ogc.optimize(model, torch.randn(8, 3, 8, 8), memory_budget="least")
    gc.collect()
    gc.disable()  # by references alone: no circles
    try:
        for _ in range(3):
            output = run(torch.randn(8, 3, 8, 8))
            loss = output.square().mean()
            dead = [weakref.ref(output), weakref.ref(loss)]
            del output
            loss.backward()
            del loss
            assert not any(reference() for reference in dead)
            assert living[1] and not living[0]
    finally:
        gc.enable()


@pytest.mark.full
@pytest.mark.parametrize("when", ["while it is planned anew", "while it is planned"])
def test_a_model_whose_forward_failed_can_go(when):
    """What autograd's graph of that forward holds is out of sight of the garbage collector."""

    def failing():
        model = Net()
        sample = torch.randn(8, 3, 8, 8)
        run = ogc.optimize(model, sample, memory_budget="least") if when.endswith("anew") else ogc.optimize(model)
        run.blocks[2].register_forward_hook(lambda *_: interrupt(_))
        with pytest.raises(Interrupted):
            run(sample)
        return [weakref.ref(one) for one in (model, run, *model.parameters())]

    gone = failing()
    gc.collect()
    assert not [one() for one in gone if one() is not None]


def test_calls_that_fail_make_no_plan_go(living):
    """However many kinds of them there are; and new kinds of calls are planned for afterwards."""
    model = Net()
    run = ogc.optimize(model, torch.randn(8, 3, 8, 8), memory_budget="least")
    for side in range(3, 3 + SHAPES + 6):
        with pytest.raises(RuntimeError, match="channels"):
            run(torch.randn(1, 6, side, 8))
    for freeze in (False, True):
        model.stem.requires_grad_(not freeze)
        before = len(living[1])
        run(torch.randn(8, 3, 8, 8)).sum().backward()
        assert len(living[1]) > before
