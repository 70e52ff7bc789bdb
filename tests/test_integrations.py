"""Models of the libraries that most are made with: found the same by the full check, in less memory."""

import pytest
import torch

import ogc
from ogc.torch_state.allocator import peak_bytes

pytestmark = [
    pytest.mark.full,
    pytest.mark.integrations,
    # The libraries' own, about each other's newest releases.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]


def seeded(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def tokens(*shape):
    return torch.randint(1, 50, shape, generator=torch.Generator().manual_seed(0))


def assert_same_in_less_memory(model, *inputs, **named):
    plan = (optimised := ogc.optimize(model, named or inputs, memory_budget="least")).plan
    report = ogc.check(model, optimised, *inputs, **named)
    assert report.ok, report
    assert not report.skipped
    assert plan.peak_bytes < 0.9 * plan.plain_peak_bytes


def gpt(transformers):
    config = transformers.GPT2Config(vocab_size=50, n_positions=32, n_embd=16, n_layer=4, n_head=2)
    return transformers.GPT2LMHeadModel(config).train()


def test_transformers():
    transformers = pytest.importorskip("transformers")
    ids = tokens(4, 16)
    assert_same_in_less_memory(
        gpt(transformers), input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False
    )


def test_timm():
    timm = pytest.importorskip("timm")
    # so many images that the workspace of convolutions, which grows with the threads, is not the floor
    model = timm.create_model("resnet18", num_classes=10, drop_path_rate=0.1)
    assert_same_in_less_memory(model, seeded(32, 3, 64, 64))
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=10, depth=4, drop_rate=0.1)
    assert_same_in_less_memory(model, seeded(32, 3, 64, 64))


def test_peft():
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
    model = peft.get_peft_model(gpt(transformers), lora)
    assert_same_in_less_memory(model, input_ids=tokens(4, 16), use_cache=False)


def test_diffusers():
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.UNet2DModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    assert_same_in_less_memory(model, seeded(4, 3, 16, 16), torch.tensor([3, 14, 15, 92]))


IDS = tokens(2, 128)
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
STEPS = {
    "GPT2LMHeadModel": (
        {"vocab_size": 500, "n_embd": 64, "n_layer": 2, "n_head": 4},
        {"input_ids": IDS, "labels": IDS},
    ),
    "LlamaForCausalLM": ({"vocab_size": 500, "num_key_value_heads": 2, **SMALL}, {"input_ids": IDS, "labels": IDS}),
    "BertForMaskedLM": ({"vocab_size": 500, **SMALL}, {"input_ids": IDS, "labels": IDS}),
    "T5ForConditionalGeneration": (
        {"vocab_size": 500, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
        | {"decoder_start_token_id": 0},
        {"input_ids": IDS, "labels": IDS},
    ),
    "ViTForImageClassification": (
        {"image_size": 64, "patch_size": 8, **SMALL},
        {"pixel_values": seeded(4, 3, 64, 64), "labels": torch.tensor([0, 1, 0, 1])},
    ),
    "Wav2Vec2ForCTC": (
        {"vocab_size": 60, "num_conv_pos_embedding_groups": 4, "layerdrop": 0.0, "apply_spec_augment": False, **SMALL},
        {"input_values": seeded(2, 8000), "labels": tokens(2, 8)},
    ),
}


MEDIUM = {"num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048}
LONG = tokens(2, 256)
MEDIUM_STEPS = {
    "GPT2LMHeadModel": ({"n_embd": 512, "n_layer": 8, "n_head": 8}, {"input_ids": LONG, "labels": LONG}),
    "LlamaForCausalLM": ({"num_key_value_heads": 4, **MEDIUM}, {"input_ids": LONG, "labels": LONG}),
    "BertForMaskedLM": (MEDIUM, {"input_ids": LONG, "labels": LONG}),
    "T5ForConditionalGeneration": (
        {"d_model": 512, "num_layers": 6, "num_heads": 8, "decoder_start_token_id": 0},
        {"input_ids": LONG, "labels": tokens(2, 64)},
    ),
    "ViTForImageClassification": (
        {"image_size": 224, **MEDIUM},
        {"pixel_values": seeded(4, 3, 224, 224), "labels": torch.tensor([0, 1, 0, 1])},
    ),
    "CLIPModel": (
        {"text_config": MEDIUM, "vision_config": {"image_size": 224, **MEDIUM}},
        {"input_ids": tokens(4, 77), "pixel_values": seeded(4, 3, 224, 224), "return_loss": True},
    ),
    "Wav2Vec2ForCTC": (
        {"vocab_size": 60, "layerdrop": 0.0, "apply_spec_augment": False, **MEDIUM},
        {"input_values": seeded(2, 24000), "labels": tokens(2, 20)},
    ),
}
GOALS = {"least": {}, "0.6": {"memory_budget": 0.6}}


@pytest.mark.slow
@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("holds_outputs", [True, False])
@pytest.mark.parametrize("name", MEDIUM_STEPS)
def test_steps_of_medium_models_peak_as_simulated(name, holds_outputs, goal):
    assert_peak_as_simulated(*MEDIUM_STEPS[name], name, holds_outputs, profile="estimate", **GOALS[goal])


@pytest.mark.parametrize("holds_outputs", [True, False])
@pytest.mark.parametrize("name", STEPS)
def test_steps_with_the_models_own_loss_peak_as_simulated(name, holds_outputs):
    optimised = assert_peak_as_simulated(*STEPS[name], name, holds_outputs)
    assert optimised.plan.peak_bytes < 0.9 * optimised.plan.plain_peak_bytes


def assert_peak_as_simulated(settings, inputs, name, holds_outputs, **goal):
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**settings)).train()
    optimised = ogc.optimize(model, inputs, holds_outputs=holds_outputs, **goal)

    def step(run):
        output = run(**inputs)
        loss, kept = output.loss, output if holds_outputs else None
        del output
        loss.backward()
        return kept

    for run, promised in ((model, optimised.plan.plain_peak_bytes), (optimised, optimised.plan.peak_bytes)):
        step(run)
        model.zero_grad(set_to_none=False)
        measured = peak_bytes(lambda run=run: step(run), "cpu")
        assert 0.99 * measured <= promised <= 1.02 * measured
    return optimised


GEMMA = {"vocab_size": 500, "num_key_value_heads": 2, "head_dim": 16, **SMALL}
WORDS = {name: STEPS[name] for name in STEPS if "vocab_size" in STEPS[name][0] and "ids" in str(STEPS[name][1].keys())}
WORDS["Gemma2ForCausalLM"] = (GEMMA, {"input_ids": IDS, "labels": IDS})  # which caps its logits


@pytest.mark.parametrize("name", WORDS)
def test_losses_over_words_are_sliced(name):
    transformers = pytest.importorskip("transformers")
    settings, inputs = WORDS[name]
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**{**settings, "vocab_size": 8000})).train()
    optimised = ogc.optimize(model, inputs, chunks=8, outputs="loss", memory_budget="least")
    assert any(op.target == "chunked loss" for op in optimised.graph.operations)
    assert optimised.plan.peak_bytes < 0.4 * optimised.plan.plain_peak_bytes
    found = []
    for run in (model, optimised):
        model.zero_grad()
        torch.manual_seed(0)
        output = run(**inputs)
        output.loss.backward()
        found.append([output.loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
    assert output.logits is None

    def step():
        output = optimised(**inputs)
        output.loss.backward()
        return output

    assert optimised.plan.peak_bytes == pytest.approx(peak_bytes(step, "cpu"), rel=0.01)


ADAPTERS = {
    "LoRA": ("LoraConfig", {"r": 2, "target_modules": ["c_attn"], "lora_dropout": 0.1, "fan_in_fan_out": True}),
    "DoRA": ("LoraConfig", {"r": 2, "use_dora": True, "target_modules": ["c_attn"], "fan_in_fan_out": True}),
    "IA3": (
        "IA3Config",
        {"target_modules": ["c_attn", "mlp.c_proj"], "feedforward_modules": ["mlp.c_proj"], "fan_in_fan_out": True},
    ),
    "prompts": ("PromptTuningConfig", {"num_virtual_tokens": 4}),
    "p-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 4, "encoder_hidden_size": 16}),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_on_a_frozen_model_peak_as_simulated(name):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    kind, settings = ADAPTERS[name]
    model = peft.get_peft_model(gpt(transformers), getattr(peft, kind)(task_type="CAUSAL_LM", **settings)).train()
    ids = tokens(4, 16)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids, "use_cache": False}
    optimised = ogc.optimize(model, inputs, holds_outputs=False, memory_budget="least")
    assert ogc.check(model, optimised, **inputs).ok
    assert optimised.plan.peak_bytes < 0.5 * optimised.plan.plain_peak_bytes
    for run, promised in ((model, optimised.plan.plain_peak_bytes), (optimised, optimised.plan.peak_bytes)):
        run(**inputs).loss.backward()
        model.zero_grad(set_to_none=False)
        measured = peak_bytes(lambda run=run: run(**inputs).loss.backward(), "cpu")
        assert promised == pytest.approx(measured, rel=0.01)
