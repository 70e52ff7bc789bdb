"""Training loops that others wrote: one line more in the user's code, the same weights bit by bit."""

import copy

import pytest
import torch
from torch import nn

import ogc

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore"),  # the libraries' own, about one another
]

WORDS = 60


def sentences(count=11, length=12):
    ids = torch.randint(WORDS, (count, length), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row, "length": length} for row in ids]


def gpt(transformers):
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=WORDS, n_positions=32, n_embd=16, n_layer=3, n_head=2)
    return transformers.GPT2LMHeadModel(config)


class Own(nn.Module):
    """A model that is no one's: it returns its loss first."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.layer, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, 64), nn.Linear(64, WORDS)

    def forward(self, input_ids, labels=None):
        scores = self.head(torch.relu(self.layer(self.words(input_ids))).square())
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": scores}


def assert_trained_alike(make, train, sample):
    """``train`` gives the same weights to a model and to an optimized one, which runs its plan."""
    plain, model = make(), make()
    train(plain)
    optimised = ogc.optimize(model, sample)
    assert not optimised.plan.is_plain
    train(optimised)
    for (name, ours), theirs in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    "settings",
    [{}, {"bf16": True}, {"gradient_checkpointing": True}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}],
    ids=str,
)
@pytest.mark.parametrize("kind", ["transformers", "own"])
def test_the_trainer_of_transformers(kind, settings, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    if kind == "own" and "gradient_checkpointing" in settings:
        pytest.skip("its models have no such switch")
    transformers.logging.set_verbosity_error()
    data = sentences()
    ids = torch.stack([one["input_ids"] for one in data[:4]])

    def train(model):
        arguments = transformers.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=4, num_train_epochs=2, report_to=[], disable_tqdm=True,
            use_cpu=True, eval_strategy="epoch", save_strategy="epoch", seed=3, **settings,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:5])
        trainer.train()
        assert 0 < trainer.evaluate()["eval_loss"] < 10

    make = Own if kind == "own" else lambda: gpt(transformers)
    assert_trained_alike(make, train, {"input_ids": ids, "labels": ids})


def test_what_is_saved_is_the_models_own(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = gpt(transformers)
    ids = torch.randint(WORDS, (2, 8))
    ogc.optimize(model, {"input_ids": ids, "labels": ids}).save_pretrained(tmp_path)
    assert '"GPT2LMHeadModel"' in (tmp_path / "config.json").read_text()
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert all(map(torch.equal, again.state_dict().values(), model.state_dict().values()))


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("is_first", [True, False], ids=["prepared after", "prepared before"])
def test_accelerate(is_first, precision):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # its precision is the process's
    data = sentences()
    ids = torch.stack([one["input_ids"] for one in data[:4]])
    sample = {"input_ids": ids, "labels": ids}

    def train(model, wrap):
        accelerator = accelerate.Accelerator(mixed_precision=precision, cpu=True)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        loader = torch.utils.data.DataLoader(data, batch_size=4)
        run = wrap(model) if is_first else model
        run, optimizer, loader = accelerator.prepare(run, optimizer, loader)
        run = run if is_first else wrap(run)
        for batch in loader:
            loss = run(input_ids=batch["input_ids"], labels=batch["labels"])["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        assert not torch.is_autocast_enabled("cpu")

    plain, model = Own(), Own()
    train(plain, lambda run: run)
    train(model, lambda run: ogc.optimize(run, sample))
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning(precision, tmp_path):
    lightning = pytest.importorskip("lightning")
    data = [(one["input_ids"], one["labels"]) for one in sentences()]

    class Module(lightning.LightningModule):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def training_step(self, batch, number):
            return self.net(input_ids=batch[0], labels=batch[1])["loss"]

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 0.01)

    def train(net):
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=2, precision=precision, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(Module(net), torch.utils.data.DataLoader(data, batch_size=4))

    ids = torch.stack([ids for ids, _ in data[:4]])
    assert_trained_alike(Own, train, {"input_ids": ids, "labels": ids})


def test_weights_averaged_beside_the_training():
    """As torchvision's reference loop does it."""
    plain, model = Own(), Own()
    ids = torch.randint(WORDS, (4, 12))
    optimised = ogc.optimize(model, {"input_ids": ids, "labels": ids})
    averages = []
    for run in (plain, optimised):
        average = torch.optim.swa_utils.AveragedModel(run, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        optimizer = torch.optim.SGD(run.parameters(), 0.1)
        for _ in range(3):
            run(input_ids=ids, labels=ids)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(run)
        averages.append([copy.deepcopy(t) for t in average.state_dict().values()])
    assert all(map(torch.equal, *averages))
