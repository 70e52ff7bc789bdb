"""A loop such as vision models are trained by: mixed images, smoothed labels, weights averaged, autocast, schedules."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from trained import Images, Training, assert_trained_alike

pytestmark = pytest.mark.full


def mixes():
    v2 = pytest.importorskip("torchvision.transforms.v2", reason="mixes images", exc_type=ImportError)
    return v2.RandomChoice([v2.MixUp(num_classes=5), v2.CutMix(num_classes=5)])


def loader(count=22):
    mix, collate = mixes(), torch.utils.data.default_collate
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, 3, 24, 24, generator=generator)
    labels = torch.randint(5, (count,), generator=generator)
    rows = list(zip(images, labels, strict=True))
    return torch.utils.data.DataLoader(rows, 8, shuffle=True, collate_fn=lambda some: mix(*collate(some)))


def residual():
    torchvision = pytest.importorskip("torchvision", reason="the models' home")
    return torchvision.models.resnet18(num_classes=5)


def epoch(run, training, batches, optimizer, scaler, average, autocast, number):
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def step(images, labels):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = criterion(run(images), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(run.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    run.train()
    for n, (images, labels) in enumerate(batches):
        training.measured(lambda x=images, y=labels: step(x, y)) if number else step(images, labels)
        if n % 2 == 0:
            average.update_parameters(run)
            if number == 0:
                average.n_averaged.fill_(0)  # while the rate warms up


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("make", [Images, residual])
def test_the_loop(make, autocast, tmp_path, monkeypatch):
    def train(training: Training):
        run = training.optimize(make(), torch.randn(8, 3, 24, 24))
        average = AveragedModel(run, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        optimizer = torch.optim.SGD(run.parameters(), 0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=1)
        then = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, then], milestones=[1])
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        parts = {"model": run, "optimizer": optimizer, "schedule": schedule, "average": average, "scaler": scaler}
        batches, file = loader(), tmp_path / "checkpoint"
        for number in range(3):
            epoch(run, training, batches, optimizer, scaler, average, autocast, number)
            schedule.step()
            for one in (run, average):
                one.eval()
                with torch.inference_mode():
                    training.same(one(torch.ones(3, 3, 24, 24)))
            torch.save({name: part.state_dict() for name, part in parts.items()}, file)
            for name, state in torch.load(file, weights_only=True).items():
                parts[name].load_state_dict(state)
        training.same(*average.state_dict().values())

    assert_trained_alike(train, monkeypatch, 0.85 if make is Images else None)


def test_a_plan_saves_in_a_network_of_torchvision(monkeypatch):
    """Beside gradients of parameters, which a plan does not lessen: they are as large as 32 of these images."""

    def train(training: Training):
        run = training.optimize(residual(), torch.randn(32, 3, 64, 64))
        average = AveragedModel(run, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for images in torch.randn(2, 32, 3, 64, 64):
            training.measured(lambda x=images: run(x).square().mean().backward())
            average.update_parameters(run)

    assert_trained_alike(train, monkeypatch, 0.8)
