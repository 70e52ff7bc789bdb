"""GPUs by name, and times by their data sheets."""

import logging

import pytest
import torch
from torch import nn

import ogc
from ogc.errors import InputError
from ogc.operators.gpus import DEFAULT, gpu_named


def test_gpus_are_known_by_name(caplog):
    assert gpu_named("NVIDIA H100 80GB HBM3").name == "H100 SXM" == gpu_named("h100").name
    assert gpu_named("NVIDIA H100 PCIe").name == "H100 PCIe"
    assert gpu_named("NVIDIA A100-SXM4-80GB").name == "A100 80GB SXM" and gpu_named("Tesla T4").name == "T4"
    assert gpu_named("NVIDIA A100-SXM4-40GB").name == gpu_named("A100").name == DEFAULT == gpu_named(None).name
    assert (
        gpu_named("NVIDIA GeForce RTX 4090").name == "RTX 4090"
        and gpu_named("Tesla V100-SXM2-16GB").name == "V100 SXM2"
    )
    assert gpu_named("NVIDIA L40S").name == "L40S" and gpu_named("NVIDIA L4").name == "L4"
    assert gpu_named("NVIDIA A10G").name == "A10G" and gpu_named("NVIDIA A10").name == "A10"
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "ogc"):
        for _ in range(2):
            assert gpu_named("Voodoo 5").name == DEFAULT
    (record,) = caplog.records
    assert "no GPU named 'Voodoo 5'" in record.getMessage() and "H100 SXM" in record.getMessage()


def test_times_follow_the_gpu_and_the_type():
    model, x = nn.Linear(4096, 4096).to("meta"), torch.zeros(4096, 4096)

    def seconds(gpu, dtype=torch.float32):
        return ogc.parse(model.to(dtype), x.to(dtype), device="cuda", gpu=gpu).step_seconds

    assert seconds("T4") > seconds("A100") > seconds("H100")
    assert seconds("A100") > 5 * seconds("A100", torch.bfloat16)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gpu": "H100"}, "gpu='H100' says which CUDA device is meant, but the graph is for cpu"),
        ({"gpu": 100, "device": "cuda"}, "gpu must be the name of a GPU, such as 'H100', not 100"),
        ({"gpu": " ", "device": "cuda"}, "gpu must be the name of a GPU"),
    ],
)
def test_bad_names(given, message):
    with pytest.raises(InputError, match=message):
        ogc.parse(nn.Linear(3, 3), torch.randn(2, 3), **given)
