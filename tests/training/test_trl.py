"""The trainers of TRL by the one line, which put a forward of their own in the place of the model's."""

import pytest
import torch
from trained import Training, assert_trained_alike, sentences

import ogc

pytestmark = [
    pytest.mark.full,
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore"),  # the libraries' own, about one another
]

transformers = pytest.importorskip("transformers", reason="the models' home")
trl = pytest.importorskip("trl", reason="tests its trainers")
datasets = pytest.importorskip("datasets", reason="trl takes its data from there")
tokenizers = pytest.importorskip("tokenizers", reason="a tokenizer of one word for each number")
transformers.logging.set_verbosity_error()

WORDS = 60


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """The loss is computed in chunks of so many words, whose scores are otherwise most of the memory here."""
    monkeypatch.setattr(trl.trainer.utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 8, raising=False)


def tokenizer():
    words = {"<pad>": 0, **{f"w{n}": n for n in range(1, WORDS)}}
    known = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<pad>"))
    known.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=known, pad_token="<pad>", eos_token="w1")


def config(**more):
    return transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=2, eos_token_id=1, **more,
    )  # fmt: skip


def causal():
    return transformers.LlamaForCausalLM(config())


def dataset(**columns):
    return datasets.Dataset(datasets.table.InMemoryTable.from_pydict(columns), fingerprint="-".join(columns))


def text(row, start, stop):
    return " ".join(f"w{n}" for n in row["input_ids"][start:stop].tolist())


def rows(count=12):
    return sentences(count, 48, shortest=40)


COMMON = {
    "per_device_train_batch_size": 4, "max_steps": 3, "report_to": [], "disable_tqdm": True, "use_cpu": True,
    "bf16": False, "save_strategy": "no", "gradient_checkpointing": False, "seed": 3, "learning_rate": 1e-3,
}  # fmt: skip


def sft(folder, **settings):
    def trainer(model):
        data = dataset(input_ids=[row["input_ids"].tolist() for row in rows(24)])
        given = trl.SFTConfig(folder, **COMMON, **{"max_length": 64, **settings})
        return trl.SFTTrainer(model, given, train_dataset=data, processing_class=tokenizer())

    return trainer


def preferences():
    return dataset(
        prompt=[text(row, 0, 8) for row in rows()],
        chosen=[text(row, 8, 30) for row in rows()],
        rejected=[text(row, 20, 40) for row in rows()],
    )


def dpo(folder):
    def trainer(model):
        torch.manual_seed(5)
        reference, state = causal(), torch.get_rng_state()
        torch.set_rng_state(state)
        given = trl.DPOConfig(folder, **COMMON, max_length=64)
        return trl.DPOTrainer(model, reference, args=given, train_dataset=preferences(), processing_class=tokenizer())

    return trainer


def grpo(folder):
    def trainer(model):
        given = trl.GRPOConfig(folder, **COMMON, num_generations=4, max_completion_length=24, beta=0.0)
        lengths = lambda completions, **_: [float(len(one)) for one in completions]  # noqa: E731
        data = dataset(prompt=[text(row, 0, 8) for row in rows()])
        return trl.GRPOTrainer(model, lengths, args=given, train_dataset=data, processing_class=tokenizer())

    return trainer


def kto(folder):
    def trainer(model):
        torch.manual_seed(5)
        given = trl.KTOConfig(folder, **COMMON, max_length=64)
        data = dataset(
            prompt=[text(row, 0, 8) for row in rows()],
            completion=[text(row, 8, 30) for row in rows()],
            label=[n % 2 == 0 for n, _ in enumerate(rows())],
        )
        return trl.KTOTrainer(model, causal(), args=given, train_dataset=data, processing_class=tokenizer())

    return trainer


def reward(folder):
    def trainer(model):
        given = trl.RewardConfig(folder, **COMMON, max_length=64)
        return trl.RewardTrainer(model, given, train_dataset=preferences(), processing_class=tokenizer())

    return trainer


def classifier():
    return transformers.LlamaForSequenceClassification(config(num_labels=1))


CASES = {
    "SFT": (sft, causal, {}),
    "SFT packed": (sft, causal, {"packing": True}),
    "SFT without padding": (sft, causal, {"padding_free": True, "max_length": None}),
    "DPO with a reference": (dpo, causal, {}),
    "GRPO": (grpo, causal, {}),
    "KTO": (kto, causal, {}),
    "reward model": (reward, classifier, {}),
}

CLOSE = 1.05
"""What the whole model optimized may take of what it takes where what is below the head is."""


def trained(training, trainer, make, is_whole=True):
    model = make()
    if training.is_plain or is_whole:
        run = training.optimize(model)
    else:
        training.models.append(model)
        model.model, run = ogc.optimize(model.model), model
    training.measured(trainer(run).train)
    return run


@pytest.mark.parametrize("case", CASES)
def test_the_whole_model_is_optimized(case, tmp_path, monkeypatch):
    kind, make, settings = CASES[case]
    trainer = kind(str(tmp_path), **settings)
    ours = assert_trained_alike(lambda training: trained(training, trainer, make), monkeypatch, 0.95)
    report = ours.optimised[0].report()
    assert report.planned >= 3, str(report)
    below = Training(False)
    torch.manual_seed(0)
    trained(below, trainer, make, is_whole=False)
    assert ours.peak <= CLOSE * below.peak, f"{ours.peak} bytes, {below.peak} of what is below the head"
