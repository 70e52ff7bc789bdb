"""Adapters of ``peft``, put in before or after the model is optimized."""

import pytest
import torch
from trained import Training, assert_trained_alike, batch, gpt, sentences

import ogc

pytestmark = [
    pytest.mark.full,
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore"),  # the libraries' own, about one another
]

transformers = pytest.importorskip("transformers", reason="the models' home")
peft = pytest.importorskip("peft", reason="tests its adapters")
transformers.logging.set_verbosity_error()
SAMPLE = batch(sentences())

ADAPTERS = {
    "lora": lambda: peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True),
    "lora beside trained embeddings": lambda: peft.LoraConfig(
        r=2, target_modules=["c_attn", "c_proj"], modules_to_save=["wpe"], fan_in_fan_out=True
    ),
    "dora": lambda: peft.LoraConfig(r=2, target_modules=["c_attn"], use_dora=True, fan_in_fan_out=True),
    "ia3": lambda: peft.IA3Config(target_modules=["c_attn"], feedforward_modules=[], fan_in_fan_out=True),
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
}


def steps(run, training, count=3, is_measured=True):
    optimizer = torch.optim.AdamW([p for p in run.parameters() if p.requires_grad], 0.01)

    def step():
        run(**SAMPLE).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # the first one may plan
    for _ in range(count - 1):
        training.measured(step) if is_measured else step()


def with_adapter(training, adapter, is_first, length=32):
    """The adapted model, optimized before or after."""
    config, sample = ADAPTERS[adapter](), {key: tensor[:, :length] for key, tensor in SAMPLE.items()}
    model = gpt(transformers)
    if is_first:
        return peft.get_peft_model(training.optimize(model, sample), config).train()
    return training.optimize(peft.get_peft_model(model, config).train(), sample)


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("is_first", [True, False], ids=["optimized first", "adapted first"])
def test_peft(is_first, adapter, monkeypatch):
    if adapter == "prompt":
        monkeypatch.setitem(SAMPLE, "input_ids", SAMPLE["input_ids"][:, :24])
        monkeypatch.setitem(SAMPLE, "labels", SAMPLE["labels"][:, :24])

    def train(training: Training):
        run = with_adapter(training, adapter, is_first)
        steps(run, training)
        training.same(*(p for p in run.parameters() if p.requires_grad))

    assert_trained_alike(train, monkeypatch, 0.9)


@pytest.mark.parametrize("is_first", [True, False], ids=["optimized first", "adapted first"])
def test_adapters_are_saved_loaded_switched_off_and_merged(is_first, tmp_path, monkeypatch):
    def train(training: Training):
        folder = tmp_path / str(training.is_plain)
        run = with_adapter(training, "lora", is_first)
        steps(run, training)
        run.save_pretrained(folder)
        with run.disable_adapter():
            training.same(run(**SAMPLE).loss)
        run.load_adapter(folder, "again", is_trainable=True)
        run.set_adapter("again")
        steps(run, training)
        training.same(run(**SAMPLE).loss)
        merged = run.merge_and_unload()
        training.same(*merged.state_dict().values(), merged(**SAMPLE).loss)
        merged.requires_grad_(True)
        steps(merged, training, is_measured=is_first)  # else it is the plain model that was inside

    assert_trained_alike(train, monkeypatch, 0.9)
    saved = [tmp_path / kind / "adapter_model.safetensors" for kind in ("True", "False")]
    assert saved[0].read_bytes() == saved[1].read_bytes()
    again = peft.PeftModel.from_pretrained(gpt(transformers), tmp_path / "False")
    assert type(again.base_model.model) is transformers.GPT2LMHeadModel


def test_adapters_in_the_trainer(tmp_path, monkeypatch):
    pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")

    def train(training: Training):
        run = with_adapter(training, "lora", False)
        arguments = transformers.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=6, num_train_epochs=2, report_to=[], disable_tqdm=True,
            use_cpu=True, save_strategy="no", bf16=True, seed=3,
        )  # fmt: skip
        training.measured(transformers.Trainer(run, arguments, train_dataset=sentences()).train)

    assert_trained_alike(train, monkeypatch, 0.9)


def test_the_plan_of_an_adapted_model_is_for_its_frozen_weights():
    model = peft.get_peft_model(gpt(transformers), ADAPTERS["lora"]()).train()
    optimised = ogc.optimize(model, SAMPLE, memory_budget="least")
    assert optimised.plan.peak_bytes < 0.7 * optimised.plan.plain_peak_bytes


def lora_layers(model):
    return [module for module in model.modules() if isinstance(module, peft.tuners.lora.LoraLayer)]


def set_weights(model):
    with torch.no_grad():
        for layer in lora_layers(model):
            layer.lora_B["default"].weight.add_(0.05)


BETWEEN_STEPS = {
    "scaled": lambda model: [layer.set_scale("default", 0.5) for layer in lora_layers(model)],
    "scaled by a factor": lambda model: [layer.scale_layer(2.0) for layer in lora_layers(model)],
    "one of them scaled back": lambda model: lora_layers(model)[1].unscale_layer(),
    "set to other weights": set_weights,
    "number in its table": lambda model: lora_layers(model)[0].scaling.update(default=0.125),
    "another adapter": lambda model: model.set_adapter("other"),
    "scaled while it is not in use": lambda model: lora_layers(model)[0].set_scale("default", 3.0),
    "the first again": lambda model: model.set_adapter("default"),
    "switched off": lambda model: model.base_model.disable_adapter_layers(),
    "switched on": lambda model: model.base_model.enable_adapter_layers(),
    "merged": lambda model: model.merge_adapter(),
    "unmerged": lambda model: model.unmerge_adapter(),
}


def test_what_is_done_to_adapters_between_steps_is_the_plain_models():
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        model = peft.get_peft_model(gpt(transformers), ADAPTERS["lora"]())
        model.add_adapter("other", ADAPTERS["lora"]())
        set_weights(model.train())
        model.get_input_embeddings().requires_grad_(True)  # for a backward where adapters are switched off
        runs.append(model)
    plain, other = runs
    optimised = ogc.optimize(other, SAMPLE, profile="estimate", memory_budget="least")
    for change in (lambda model: None, *BETWEEN_STEPS.values()):
        results = []
        for run, model in ((plain, plain), (optimised, other)):
            change(model)
            model.zero_grad()
            torch.manual_seed(1)
            loss = run(**SAMPLE).loss
            loss.backward()
            results.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        assert len(results[0]) == len(results[1]) > 1 and all(map(torch.equal, *results))
    assert optimised.report().planned > 1
