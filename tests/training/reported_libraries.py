"""Reports of models of libraries, each in small as its library makes it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from reported import Report, learn, registering
from torch.nn import functional as F
from trained import WORDS, Own, batch, gpt, sentences, sgd

REPORTS: dict[str, Report] = {}
report = registering(REPORTS)


def library(name):
    return pytest.importorskip(name, reason="the case is about it")


def loss_of_it(output):
    return output["loss"]


@report("pytorch/pytorch#155171", 0.8)
def a_language_model_that_fills_its_cache(training):
    transformers = library("transformers")
    config = transformers.Qwen2Config(
        vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, attention_dropout=0.1,
    )  # fmt: skip
    sample = {**batch(sentences()), "use_cache": True}
    run = training.optimize(transformers.Qwen2ForCausalLM(config).train(), sample)
    optimizer = sgd(run)
    for _ in range(3):
        optimizer.zero_grad()
        training.same(training.measured(lambda: filled(run(**sample))))
        optimizer.step()


def filled(output):
    output.loss.backward()
    assert output.past_key_values.get_seq_length() == 32
    return output.logits


def adapted(dropout=0.1):
    peft, transformers = library("peft"), library("transformers")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=dropout, fan_in_fan_out=True)
    return peft.get_peft_model(gpt(transformers, dropout), config).train()


@report("huggingface/transformers#42489", 0.9)
def adapters_above_frozen_embeddings(training):
    sample = batch(sentences())
    run = training.optimize(adapted(), sample)
    assert not run.get_input_embeddings().weight.requires_grad
    learn(training, run, (), loss_of_it, **sample)


@report("huggingface/trl#1798", 0.8)
def generation_between_steps(training):
    transformers, sample = library("transformers"), batch(sentences())
    run = training.optimize(gpt(transformers).train(), sample)
    for _ in range(2):
        learn(training, run, (), loss_of_it, count=1, **sample)
        run.eval()
        training.same(run.generate(sample["input_ids"][:2, :8], max_new_tokens=4, do_sample=True, pad_token_id=0))
        run.train()


@report("huggingface/trl#927")
def preferences_against_the_model_without_its_adapters(training):
    rows = batch(sentences())
    sample = {"input_ids": rows["input_ids"]}
    run = training.optimize(adapted(), sample)
    optimizer = sgd(run)

    def likelihood(is_reference):
        with (
            torch.no_grad() if is_reference else nullcontext(),
            run.disable_adapter() if is_reference else nullcontext(),
        ):
            scores = run(**sample).logits[:, :-1].log_softmax(-1)
        return scores.gather(2, rows["labels"][:, 1:, None]).sum((1, 2))

    for _ in range(2):
        optimizer.zero_grad()
        chosen, rejected = (likelihood(False) - likelihood(True)).chunk(2)
        loss = -F.logsigmoid(0.1 * (chosen - rejected)).mean()
        loss.backward()
        optimizer.step()
        training.same(loss)


@report("huggingface/diffusers#3404", 0.8)
def a_unet_of_which_a_part_is_frozen(training):
    diffusers = library("diffusers")
    model = diffusers.UNet2DModel(
        16, block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4, add_attention=False,
        down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2,
    )  # fmt: skip
    model.requires_grad_(False)
    model.mid_block.requires_grad_(True)
    model.up_blocks[1].requires_grad_(True)
    sample = {"sample": torch.randn(4, 3, 16, 16), "timestep": torch.randint(100, (4,)), "return_dict": False}
    learn(training, training.optimize(model.train(), sample), (), count=2, **sample)


@report("huggingface/pytorch-image-models#1595")
def a_list_of_features(training):
    timm = library("timm")
    images = torch.randn(2, 3, 32, 32)
    learn(training, training.optimize(timm.create_model("resnet10t", features_only=True), images), (images,), count=2)


@report("Lightning-AI/pytorch-lightning#49", 0.9)
def a_lightning_module(training):
    lightning = library("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = training.optimize(Own(), batch(sentences()))

        def training_step(self, inputs, number):
            return self.net(**inputs)["loss"]

        def configure_optimizers(self):
            return sgd(self)

    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, **dict.fromkeys(quiet, False))
    loader = torch.utils.data.DataLoader(sentences(), batch_size=6)
    training.measured(lambda: trainer.fit(Module(), loader))
