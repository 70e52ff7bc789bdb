"""A U-Net of ``diffusers``, trained as its own examples do."""

import pytest
import torch
from torch.nn import functional as F
from trained import Training, assert_trained_alike

pytestmark = [
    pytest.mark.full,
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore"),  # the libraries' own, about one another
]

diffusers = pytest.importorskip("diffusers", reason="the models' home")
SETTINGS = {"sample_size": 16, "layers_per_block": 1, "block_out_channels": (8, 16), "norm_num_groups": 4}


def unet():
    return diffusers.UNet2DModel(
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), **SETTINGS
    )


def conditional():
    return diffusers.UNet2DConditionModel(
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=8, attention_head_dim=4, **{**SETTINGS, "in_channels": 3, "out_channels": 3},
    )  # fmt: skip


def noised(scheduler, count=6):
    images, noise = torch.randn(count, 3, 16, 16), torch.randn(count, 3, 16, 16)
    times = torch.randint(scheduler.config.num_train_timesteps, (count,))
    return scheduler.add_noise(images, noise, times), times, noise


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", [unet, conditional])
def test_diffusers(make, precision, monkeypatch):
    def train(training: Training):
        words = (torch.randn(6, 5, 8),) if make is conditional else ()
        scheduler = diffusers.DDPMScheduler(100)
        given = {"sample": torch.randn(6, 3, 16, 16), "timestep": torch.randint(100, (6,)), "return_dict": False}
        if words:
            given["encoder_hidden_states"] = words[0]
        run = training.optimize(make().train())
        average = diffusers.training_utils.EMAModel(run.parameters(), decay=0.9, use_ema_warmup=True)
        optimizer = torch.optim.AdamW(run.parameters(), 1e-3)
        schedule = diffusers.optimization.get_cosine_schedule_with_warmup(optimizer, 2, 4)

        def step():
            x, times, noise = noised(scheduler)
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
                named = {**given, "sample": x, "timestep": times}
                loss = F.mse_loss(run(**named)[0], noise)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(run.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            average.step(run.parameters())

        step()
        for _ in range(2):
            training.measured(step)
        training.same(*average.shadow_params)
        average.store(run.parameters())
        average.copy_to(run.parameters())
        with torch.no_grad():
            training.same(run(**given)[0])
        average.restore(run.parameters())

    assert_trained_alike(train, monkeypatch, 0.85)


def test_what_is_saved_is_the_models_own(tmp_path, monkeypatch):
    """And a pipeline takes the optimized model."""

    def train(training: Training):
        folder = tmp_path / str(training.is_plain)
        scheduler = diffusers.DDPMScheduler(100)
        run = training.optimize(unet().train())
        optimizer = torch.optim.AdamW(run.parameters(), 1e-3)
        for _ in range(2):
            x, times, noise = noised(scheduler)
            F.mse_loss(run(x, times).sample, noise).backward()
            optimizer.step()
            optimizer.zero_grad()
        run.save_pretrained(folder)
        again = diffusers.UNet2DModel.from_pretrained(folder)
        assert type(again) is diffusers.UNet2DModel
        assert all(map(torch.equal, again.state_dict().values(), run.state_dict().values()))
        pipeline = diffusers.DDPMPipeline(run, scheduler)
        pipeline.set_progress_bar_config(disable=True)
        made = pipeline(2, torch.Generator().manual_seed(0), num_inference_steps=2, output_type="np").images
        training.same(torch.as_tensor(made))

    assert_trained_alike(train, monkeypatch)
    assert (tmp_path / "True" / "config.json").read_text() == (tmp_path / "False" / "config.json").read_text()


def test_adapters_in_a_unet(monkeypatch):
    peft = pytest.importorskip("peft", reason="diffusers takes its adapters from there")

    def train(training: Training):
        model = conditional().requires_grad_(False).train()
        model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v"], init_lora_weights="gaussian"))
        given = (torch.randn(6, 3, 16, 16), torch.randint(100, (6,)), torch.randn(6, 5, 8))
        run = training.optimize(model, given)
        optimizer = torch.optim.AdamW([p for p in run.parameters() if p.requires_grad], 1e-2)

        def step():
            run(*given).sample.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            training.measured(step)

    assert_trained_alike(train, monkeypatch, 0.9)


def test_an_autoencoder_whose_halves_are_called(monkeypatch):
    """Its forward is never called."""

    def train(training: Training):
        blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
        vae = diffusers.AutoencoderKL(block_out_channels=(8, 16), norm_num_groups=4, latent_channels=4, **blocks)
        run = training.optimize(vae.train())
        optimizer, x = torch.optim.AdamW(run.parameters(), 1e-3), torch.randn(4, 3, 32, 32)

        def step():
            found = run.encode(x).latent_dist
            made = run.decode(found.sample()).sample
            (F.mse_loss(made, x) + 1e-3 * found.kl().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            training.measured(step)
        if not training.is_plain:
            assert {calls.module for calls in run.report().calls} == {"encoder", "decoder"} and not run.report().plain

    assert_trained_alike(train, monkeypatch, 0.9)
