"""Loops with ``accelerate``: the model is optimized before or after it is prepared."""

from functools import partial

import pytest
import torch
from torch import nn
from trained import Dropped, Own, Training, assert_trained_alike, batch, gpt, sentences

import ogc

pytestmark = [
    pytest.mark.full,
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore"),  # the libraries' own, about one another
]

accelerate = pytest.importorskip("accelerate", reason="tests its loops")
SAMPLE = batch(sentences())


@pytest.fixture(autouse=True)
def own_state():
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # its precision is the process's
    accelerate.state.GradientState._reset_state()


def prepared(training, accelerator, model, is_first, sample=SAMPLE):
    """Optimizer, loader and the model, which is optimized first or last."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    loader = torch.utils.data.DataLoader(sentences(), batch_size=6)
    run = training.optimize(model, sample) if is_first else model
    run, optimizer, loader = accelerator.prepare(run, optimizer, loader)
    return run if is_first else training.optimize(run, sample), optimizer, loader


def trained_once(accelerator, run, optimizer, loader):
    for inputs in loader:
        accelerator.backward(run(**inputs)["loss"])
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("is_first", [True, False], ids=["prepared after", "prepared before"])
def test_accelerate(is_first, precision, monkeypatch):
    def train(training: Training):
        accelerator = accelerate.Accelerator(mixed_precision=precision, cpu=True)
        run, optimizer, loader = prepared(training, accelerator, Own(), is_first)

        epoch = partial(trained_once, accelerator, run, optimizer, loader)

        epoch()
        training.measured(epoch)
        assert accelerator.unwrap_model(run).state_dict().keys() == Own().state_dict().keys()

    assert_trained_alike(train, monkeypatch, 0.8)


@pytest.mark.parametrize("is_first", [True, False], ids=["prepared after", "prepared before"])
def test_accumulation_and_clipping(is_first, monkeypatch):
    def train(training: Training):
        accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
        run, optimizer, loader = prepared(training, accelerator, Own(), is_first)

        def epoch():
            for inputs in loader:
                with accelerator.accumulate(run):
                    accelerator.backward(run(**inputs)["loss"])
                    if accelerator.sync_gradients:
                        training.same(accelerator.clip_grad_norm_(run.parameters(), 0.1))
                    optimizer.step()
                    optimizer.zero_grad()

        training.measured(epoch)

    assert_trained_alike(train, monkeypatch, 0.8)


@pytest.mark.parametrize("is_first", [True, False], ids=["prepared after", "prepared before"])
def test_states_are_saved_and_loaded(is_first, tmp_path, monkeypatch):
    def train(training: Training):
        accelerator = accelerate.Accelerator(cpu=True)
        model = Own()
        run, optimizer, loader = prepared(training, accelerator, model, is_first)
        folder = str(tmp_path / str(training.is_plain))

        epoch = partial(trained_once, accelerator, run, optimizer, loader)

        epoch()
        accelerator.save_state(folder)
        epoch()
        last = [p.detach().clone() for p in model.parameters()]
        accelerator.load_state(folder)
        training.measured(epoch)
        assert all(map(torch.equal, last, model.parameters()))
        accelerator.save_model(run, folder)
        accelerator.free_memory()

    assert_trained_alike(train, monkeypatch, 0.85)
    assert (tmp_path / "True" / "model.safetensors").read_bytes() == (
        tmp_path / "False" / "model.safetensors"
    ).read_bytes()


def test_a_model_that_is_planned_in_parts_is_optimized_first(monkeypatch):
    def train(training: Training):
        accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
        run, optimizer, loader = prepared(training, accelerator, Dropped(), True)

        epoch = partial(trained_once, accelerator, run, optimizer, loader)

        training.measured(epoch)

    assert_trained_alike(train, monkeypatch, 0.9)
    wrapped = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(Dropped())
    with pytest.raises(ogc.InputError, match="optimize the model before its forward is replaced"):
        ogc.optimize(wrapped, SAMPLE, memory_budget="least")


def test_two_models_and_two_optimizers(monkeypatch):
    """With autocast of its own around calls, and metrics gathered."""

    def train(training: Training):
        accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
        models = [Own(), Own()]
        runs = [accelerator.prepare(training.optimize(model, SAMPLE)) for model in models]
        optimizers = [accelerator.prepare(torch.optim.SGD(run.parameters(), 0.1)) for run in runs]
        for inputs in (batch(sentences()), batch(sentences()[6:])):
            with accelerator.autocast():
                first, second = (run(**inputs) for run in runs)
                loss = first["loss"] + nn.functional.mse_loss(second["logits"], first["logits"].detach())
            accelerator.backward(loss)
            training.same(accelerator.gather_for_metrics(second["loss"]))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    assert_trained_alike(train, monkeypatch)


def test_a_model_of_transformers(monkeypatch):
    transformers = pytest.importorskip("transformers", reason="the model's home")

    def train(training: Training):
        accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
        run, optimizer, loader = prepared(training, accelerator, gpt(transformers), True)
        schedule = accelerator.prepare(transformers.get_linear_schedule_with_warmup(optimizer, 2, 6))

        def epoch():
            for inputs in loader:
                accelerator.backward(run(**inputs).loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

        epoch()
        training.measured(epoch)

    assert_trained_alike(train, monkeypatch, 0.8)
