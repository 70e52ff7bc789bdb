"""Lightning: a module whose net is optimized outside, in ``__init__``, in ``configure_model`` or by a callback."""

import pytest
import torch
from trained import Own, Training, assert_trained_alike, batch, sentences

pytestmark = [
    pytest.mark.full,
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore"),  # the libraries' own, about one another
]

lightning = pytest.importorskip("lightning", reason="tests its Trainer")
SAMPLE = batch(sentences())


class Module(lightning.LightningModule):
    def __init__(self, training: Training, where: str):
        super().__init__()
        self.way, self.where = [training], where  # in a list, as it is no part of the model
        self.net = Own()
        if where == "__init__":
            self.net = training.optimize(self.net)

    def configure_model(self):
        if self.where == "configure_model":
            self.net = self.way[0].optimize(self.net)

    def training_step(self, inputs, number):
        loss = self.net(**inputs)["loss"]
        self.log("loss", loss)
        return loss

    def validation_step(self, inputs, number):
        self.log("validation", self.net(**inputs)["loss"])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Optimize(lightning.Callback):
    """Optimizes the net when the training starts."""

    def on_fit_start(self, trainer, module):
        module.net = module.way[0].optimize(module.net)


def trainer_of(folder, epochs=2, **settings):
    settings = {"enable_checkpointing": False, **settings}
    return lightning.Trainer(
        accelerator="cpu", max_epochs=epochs, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, **settings,
    )  # fmt: skip


def loaders():
    data = sentences()
    return [torch.utils.data.DataLoader(rows, batch_size=6) for rows in (data, data[:5])]


SETTINGS = {
    "defaults": {},
    "bf16": {"precision": "bf16-mixed"},
    "accumulation and clipping": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "bf16 throughout": {"precision": "bf16-true"},
    "anomalies detected": {"detect_anomaly": True},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("where", ["__init__", "configure_model", "callback"])
def test_lightning(where, settings, tmp_path, monkeypatch):
    if where != "__init__" and settings in ("anomalies detected", "accumulation and clipping"):
        pytest.skip("where it is optimized does not matter to these")

    def train(training: Training):
        module = Module(training, where)
        callbacks = [Optimize()] if where == "callback" else []
        trainer = trainer_of(tmp_path, callbacks=callbacks, **SETTINGS[settings])
        training.measured(lambda: trainer.fit(module, *loaders()))
        training.same(torch.tensor(trainer.validate(module, loaders()[1], verbose=False)[0]["validation"]))

    assert_trained_alike(train, monkeypatch, 0.85)


def test_a_checkpoint_is_resumed_from(tmp_path, monkeypatch):
    def train(training: Training):
        folder = tmp_path / str(training.is_plain)
        saver = lightning.pytorch.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
        whole = Module(training, "__init__")
        fit = trainer_of(folder, epochs=3, enable_checkpointing=True, callbacks=[saver]).fit
        training.measured(lambda: fit(whole, *loaders()))
        again = Module(training, "__init__")
        trainer_of(folder, epochs=3).fit(again, *loaders(), ckpt_path=folder / "epoch=1.ckpt")
        assert all(map(torch.equal, again.state_dict().values(), whole.state_dict().values()))
        random_state = torch.get_rng_state()
        if not training.is_plain:  # one that a plain training saved
            other = Module(training, "__init__")
            trainer_of(folder, epochs=3).fit(other, *loaders(), ckpt_path=tmp_path / "True" / "epoch=1.ckpt")
            assert all(map(torch.equal, other.state_dict().values(), whole.state_dict().values()))
            training.models.pop()
            torch.set_rng_state(random_state)

    assert_trained_alike(train, monkeypatch, 0.85)


def test_weights_averaged_by_its_callback(tmp_path, monkeypatch):
    def train(training: Training):
        average = lightning.pytorch.callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1)
        training.measured(
            lambda: trainer_of(tmp_path, 3, callbacks=[average]).fit(Module(training, "__init__"), *loaders())
        )

    assert_trained_alike(train, monkeypatch)


class Adversaries(lightning.LightningModule):
    """Steps by hand: two optimizers."""

    def __init__(self, training: Training):
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = training.optimize(Own()), training.optimize(Own())

    def training_step(self, inputs, number):
        for net, optimizer in zip((self.first, self.second), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            self.manual_backward(net(**inputs)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.Adam(net.parameters(), 0.01) for net in (self.first, self.second)]


def test_steps_by_hand(tmp_path, monkeypatch):
    def train(training: Training):
        module = Adversaries(training)
        training.measured(lambda: trainer_of(tmp_path).fit(module, loaders()[0]))

    assert_trained_alike(train, monkeypatch, 0.85)


def test_the_module_itself_is_optimized(tmp_path, monkeypatch):
    """Its forward is, which its training step calls; the trainer gets the optimized module."""

    class Whole(Module):
        def forward(self, input_ids, labels):
            return self.net(input_ids, labels)["loss"]

        def training_step(self, inputs, number):
            return self(**inputs)

    def train(training: Training):
        run = training.optimize(Whole(training, "outside"))
        training.measured(lambda: trainer_of(tmp_path).fit(run, loaders()[0]))

    assert_trained_alike(train, monkeypatch, 0.85)
