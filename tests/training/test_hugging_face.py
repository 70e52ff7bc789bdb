"""The ``Trainer`` of transformers and that of TRL: the optimized model in the place of the plain one."""

import json

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

transformers = pytest.importorskip("transformers", reason="tests its Trainer")
pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")
transformers.logging.set_verbosity_error()


def small_gpt():
    return gpt(transformers)


def trainer_of(model, folder, data=None, trainer=transformers.Trainer, given=None, **settings):
    settings = {
        "per_device_train_batch_size": 6, "num_train_epochs": 2, "report_to": [], "disable_tqdm": True, "use_cpu": True,
        "save_strategy": "no", "seed": 3, "learning_rate": 1e-3, **settings,
    }  # fmt: skip
    arguments = transformers.TrainingArguments(str(folder), **settings)
    return trainer(model, arguments, train_dataset=sentences() if data is None else data, **(given or {}))


CASES = {
    "default arguments": (0.8, {}),
    "bf16": (0.8, {"bf16": True}),
    "eval during training": (
        0.8,
        {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
        | {"load_best_model_at_end": True, "save_total_limit": 1},
    ),
    "accumulation and clipping": (0.8, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}),
    "label smoothing": (0.8, {"label_smoothing_factor": 0.1}),
    "workers": (0.8, {"dataloader_num_workers": 1}),
    "another optimizer and schedule": (None, {"optim": "adafactor", "lr_scheduler_type": "cosine", "warmup_steps": 2}),
    "neftune": (None, {"neftune_noise_alpha": 5.0}),
    "find batch size": (None, {"auto_find_batch_size": True}),
    "bf16 evaluated wholly": (None, {"bf16": True, "bf16_full_eval": True, "eval_strategy": "epoch"}),
    "loss averaged over tokens": (None, {"average_tokens_across_devices": True, "gradient_accumulation_steps": 3}),
    "no last batch": (None, {"dataloader_drop_last": True, "torch_empty_cache_steps": 1}),
}


OF_NO_ONE = ["default arguments", "bf16", "eval during training", "accumulation and clipping"]


@pytest.mark.parametrize(
    "make, case",
    [
        *((small_gpt, case) for case in CASES),
        *((Own, case) for case in OF_NO_ONE),
        *((Dropped, case) for case in OF_NO_ONE[:2]),
    ],
)
def test_trainer(make, case, tmp_path, monkeypatch):
    share, settings = CASES[case]

    def train(training: Training):
        run = training.optimize(make(), memory_budget="least")
        given = {"eval_dataset": sentences(5)} if "eval_strategy" in settings else None
        trainer = trainer_of(run, tmp_path, given=given, **settings)
        training.measured(trainer.train)
        if given:
            training.same(
                torch.tensor([entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry])
            )
        training.same(torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry]))

    if make is Dropped and share is not None:
        share = 0.95  # the first calls in bf16 plan, and the parts are small
    assert_trained_alike(train, monkeypatch, share)


def padded(rows):
    """What a data collator does: rows of one length, a mask, and no loss where they are padded."""
    longest = max(len(row["input_ids"]) for row in rows)
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    mask = (torch.arange(longest) < lengths[:, None]).long()
    ids = torch.stack([nn.functional.pad(row["input_ids"], (0, longest - len(row["input_ids"]))) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask.bool(), -100)}


@pytest.mark.parametrize("sampling", ["random", "group_by_length"])
def test_sentences_of_many_lengths(sampling, tmp_path, monkeypatch):
    data = sentences(24, shortest=9)

    def train(training: Training):
        run = training.optimize(small_gpt())
        trainer = trainer_of(run, tmp_path, data, given={"data_collator": padded}, train_sampling_strategy=sampling)
        training.measured(trainer.train)

    assert_trained_alike(train, monkeypatch, 0.85)


def test_metrics_and_predictions(tmp_path, monkeypatch):
    def train(training: Training):
        def metrics(prediction):
            scores, labels = prediction
            return {"accuracy": float((scores.argmax(-1) == labels).mean())}

        run = training.optimize(small_gpt())
        given = {"compute_metrics": metrics, "eval_dataset": sentences(5)}
        trainer = trainer_of(run, tmp_path, given=given, eval_strategy="epoch")
        training.measured(trainer.train)
        found = trainer.predict(sentences(4))
        training.same(torch.tensor(found.predictions), torch.tensor(found.metrics["test_accuracy"]))
        assert not run.training
        training.same(*run(**batch(sentences()))[:2])
        run.train()
        run(**batch(sentences())).loss.backward()

    assert_trained_alike(train, monkeypatch, 0.85)


def test_a_checkpoint_is_resumed_from(tmp_path, monkeypatch):
    def train(training: Training):
        folder = tmp_path / str(training.is_plain)
        settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
        run = training.optimize(small_gpt())
        training.measured(trainer_of(run, folder, **settings).train)
        again = training.optimize(small_gpt())
        trainer_of(again, folder, **settings).train(resume_from_checkpoint=str(folder / "checkpoint-4"))
        for name, tensor in run.state_dict().items():
            assert torch.equal(tensor, again.state_dict()[name]), name
        if not training.is_plain:  # one that a plain training saved
            other = training.models[0].__class__(run.config)
            other = ogc.optimize(other, batch(sentences()), memory_budget="least")
            trainer_of(other, folder, **settings).train(resume_from_checkpoint=str(tmp_path / "True" / "checkpoint-4"))
            assert all(map(torch.equal, other.state_dict().values(), run.state_dict().values()))

    assert_trained_alike(train, monkeypatch, 0.8)


def test_what_is_saved_is_the_models_own(tmp_path):
    model = small_gpt()
    optimised = ogc.optimize(model, batch(sentences()), memory_budget="least")
    trainer = trainer_of(optimised, tmp_path / "run")
    trainer.train()
    trainer.save_model(str(tmp_path / "by the trainer"))
    optimised.save_pretrained(tmp_path / "by the model")
    for folder in ("by the trainer", "by the model"):
        config = json.loads((tmp_path / folder / "config.json").read_text("utf-8"))
        assert config["architectures"] == ["GPT2LMHeadModel"]
        again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / folder)
        assert type(again) is transformers.GPT2LMHeadModel
        assert all(map(torch.equal, again.state_dict().values(), model.state_dict().values()))
        auto = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert all(map(torch.equal, auto.state_dict().values(), model.state_dict().values()))


def test_a_model_that_was_trained_is_loaded_and_trained_on(tmp_path, monkeypatch):
    small_gpt().save_pretrained(tmp_path / "first")

    def train(training: Training):
        model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "first")
        run = training.optimize(model.train())
        trainer_of(run, tmp_path).train()

    assert_trained_alike(train, monkeypatch)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("when", ["by the trainer", "before"])
def test_checkpointing_of_transformers_beside_it(when, reentrant, tmp_path, monkeypatch):
    """Its own checkpoints recompute too; numbers stay the same, and memory is no more than with these alone.

    The trainer registers hooks when it starts, before the first call: they are planned for.
    """
    options = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}

    def train(training: Training):
        model = small_gpt()
        if when == "before":
            model.gradient_checkpointing_enable(**options)
        run = training.optimize(model)
        settings = {"gradient_checkpointing": True, **options} if when == "by the trainer" else {}
        training.measured(trainer_of(run, tmp_path, **settings).train)

    # those of the reentrant kind leave hardly anything to plan
    assert_trained_alike(train, monkeypatch, 1.02, runs_plan=None if reentrant else True)


def test_the_model_is_made_by_the_trainer(tmp_path, monkeypatch):
    def train(training: Training):
        def make():
            return training.optimize(small_gpt())

        trainer = trainer_of(None, tmp_path, given={"model_init": make})
        training.measured(trainer.train)

    assert_trained_alike(train, monkeypatch)


def test_a_loss_of_the_trainers_own(tmp_path, monkeypatch):
    """A subclass with a loss, and a callback that freezes a layer on the way."""

    class Weighted(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **rest):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return (loss, outputs) if return_outputs else loss

    class Freezing(transformers.TrainerCallback):
        def on_epoch_begin(self, args, state, control, model=None, **rest):
            model.transformer.wte.requires_grad_(state.epoch < 1)

    def train(training: Training):
        run = training.optimize(small_gpt(), {"input_ids": batch(sentences())["input_ids"]})
        trainer = trainer_of(run, tmp_path, trainer=Weighted, given={"callbacks": [Freezing()]}, weight_decay=0.1)
        training.measured(trainer.train)

    assert_trained_alike(train, monkeypatch, 0.85)


def test_sequences_to_sequences(tmp_path, monkeypatch):
    data = [{**row, "labels": row["input_ids"][:16]} for row in sentences()]

    def train(training: Training):
        config = transformers.T5Config(
            vocab_size=60, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
        )
        run = training.optimize(transformers.T5ForConditionalGeneration(config))
        arguments = transformers.Seq2SeqTrainingArguments(
            str(tmp_path), per_device_train_batch_size=6, num_train_epochs=2, report_to=[], disable_tqdm=True,
            use_cpu=True, save_strategy="no", predict_with_generate=True, generation_max_length=6,
            eval_strategy="epoch",
        )  # fmt: skip
        trainer = transformers.Seq2SeqTrainer(run, arguments, train_dataset=data, eval_dataset=data[:4])
        training.measured(trainer.train)
        training.same(torch.as_tensor(trainer.predict(data[:4]).predictions))

    assert_trained_alike(train, monkeypatch, 0.85)
