"""What is asked of a device beside benchmarks and tests: each question gives rows, and whether all is as promised."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import ogc
from ogc.plan.simulate import plain_peak
from ogc.torch_state.allocator import peak_bytes
from ogc.torch_state.compare import same_bits

from ..measuring import MIB, allocate_gradients
from ..networks.transformers import Gpt2

Rows = list[dict[str, Any]]
Answer = tuple[Rows, bool]


def encoder(depth: int = 4) -> nn.Module:
    """A few layers of a transformer, with dropout. Input N, T, 64; output alike."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


def convolutions(depth: int = 5) -> nn.Module:
    """Blocks of convolution, batch norm and dropout. Input N, 8, H, W; output alike."""
    blocks = [[nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1)] for _ in range(depth)]
    return nn.Sequential(*(layer for block in blocks for layer in block))


class Recurrent(nn.Module):
    """Two LSTMs with dropout between their layers. Input N, T, 16; output N, T, 32."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(16, 32, 2, dropout=0.2, batch_first=True)
        self.second = nn.LSTM(32, 32, 2, dropout=0.2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.first(x)[0]))[0]
        return out


def examples(device: torch.device) -> list[tuple[nn.Module, torch.Tensor]]:
    """Two of these with larger inputs."""
    return [
        (convolutions().to(device), torch.randn(16, 8, 64, 64, device=device)),
        (encoder().to(device), torch.randn(16, 128, 64, device=device)),
    ]


@contextlib.contextmanager
def _benchmark() -> Iterator[None]:
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = False


def _autocast(dtype: torch.dtype, device: torch.device) -> Any:
    return torch.autocast(device.type, dtype)


def settings(device: torch.device) -> Answer:
    """Whether a step gives the plain model's bits under each setting, as far as two plain steps agree."""
    images, words = torch.randn(4, 8, 32, 32, device=device), torch.randn(4, 64, 64, device=device)
    rows: Rows = []
    for name, model, x, setting in (
        ("plain settings", convolutions(), images, contextlib.nullcontext),
        ("cudnn.benchmark", convolutions(), images, _benchmark),
        ("channels_last", convolutions(), images.to(memory_format=torch.channels_last), contextlib.nullcontext),
        ("bfloat16 autocast", convolutions(), images, partial(_autocast, torch.bfloat16, device)),
        ("float16 autocast", convolutions(), images, partial(_autocast, torch.float16, device)),
        ("attention", encoder(), words, contextlib.nullcontext),
        ("flash attention", encoder(), words,
         partial(_autocast, torch.bfloat16, device)),
        ("math attention", encoder(), words, partial(sdpa_kernel, SDPBackend.MATH)),
        ("two LSTMs with dropout", Recurrent(), torch.randn(4, 16, 16, device=device), contextlib.nullcontext),
    ):  # fmt: skip
        rows.append({"setting": name, **_bits(model.to(device), x, setting)})
    return rows, not any(row["differs"] for row in rows)


def _bits(model: nn.Module, x: torch.Tensor, setting: Callable[[], Any]) -> dict[str, Any]:
    optimised: Any = ogc.optimize(model, x, memory_budget="least")
    plain, again, ours = (_step(run, model, x, setting) for run in (model, model, optimised))
    repeatable = [name for name in plain if same_bits(plain[name], again[name])]
    differs = [name for name in repeatable if not same_bits(plain[name], ours[name])]
    return {"compared": len(repeatable), "of": len(plain), "differs": differs, "report": str(optimised.report())}


def _step(run: nn.Module, model: nn.Module, x: torch.Tensor, setting: Callable[[], Any]) -> dict[str, torch.Tensor]:
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.zero_grad()
    torch.manual_seed(0)
    with setting():
        output = run(x)
    output.float().square().mean().backward()
    found = {"output": output.detach(), "random state": torch.get_rng_state()}
    found |= {f"gradient of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for name, buffer in model.named_buffers():
        found[f"buffer {name}"] = buffer.clone()
        buffer.detach().copy_(before[name])
    return found


def memory(device: torch.device) -> Answer:
    """Simulated against allocated peaks, plain and planned, within 3 %; on CUDA also what is reserved."""
    rows: Rows = []
    for model, x in examples(device):
        graph = ogc.parse(model, x, loss=torch.sum, holds_outputs=False)
        plan = ogc.solve(graph, memory_budget="least")
        for name, run, simulated in (
            ("plain", model, plain_peak(graph)), ("planned", ogc.apply(model, graph, plan), plan.peak_bytes)
        ):  # fmt: skip
            allocate_gradients(model)
            _sum_step(run, x)
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
                before = torch.cuda.memory_reserved(device)
            measured = peak_bytes(partial(_sum_step, run, x), device)
            row = {"model": type(model).__name__, "run": name, "simulated": simulated, "allocated": measured}
            if device.type == "cuda":
                row["reserved"] = torch.cuda.max_memory_reserved(device) - before
            rows.append(row)
    return rows, all(abs(row["simulated"] / row["allocated"] - 1) <= 0.03 for row in rows)


def _sum_step(run: nn.Module, x: torch.Tensor) -> None:
    run(x).sum().backward()


def weights(device: torch.device) -> Answer:
    """What each operation was estimated to take beside what it was measured to take, the worst first."""
    rows: Rows = []
    for model, x in examples(device):
        estimated, measured = (ogc.parse(model, x, profile=kind).operations for kind in ("estimate", "measure"))
        for guess, truth in zip(estimated, measured, strict=True):
            row: dict[str, Any] = {"model": type(model).__name__, "operation": truth.name, "target": truth.target}
            for field in ("scratch_bytes", "backward_bytes", "forward_seconds", "backward_seconds"):
                row[field] = (getattr(guess, field), getattr(truth, field))
            rows.append(row)
    return rows, True


def graphs(device: torch.device) -> Answer:
    """Whether a planned step without random operations is captured as a CUDA graph, and replayed to the same bits."""
    if device.type != "cuda":
        return [{"captured": None, "why": "only CUDA has graphs"}], True
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh()))).to(device)
    x = torch.randn(256, 64, device=device)
    optimised = ogc.optimize(model, x, memory_budget="least")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            optimised(x).sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimised(x).sum().backward()
    graph.replay()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    same = all(map(same_bits, found, expected))
    return [{"captured": True, "same bits": same}], same


def longest(device: torch.device) -> Answer:
    """The longest sequence that fits, plain and optimised: of GPT-2 medium under bfloat16 on CUDA, else a small one."""
    is_cuda = device.type == "cuda"
    size = (50257, 65536, 1024, 16, 24) if is_cuda else (500, 4096, 32, 2, 1)
    model = Gpt2(*size).to(device)

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            with _autocast(torch.bfloat16, device):
                out: torch.Tensor = self.model(tokens)
            return out

    def sample(length: int) -> torch.Tensor:
        return torch.randint(size[0], (1, length), device=device)

    budget = int(0.8 * torch.cuda.get_device_properties(device).total_memory) if is_cuda else 6 * MIB
    start = time.perf_counter()
    found = ogc.largest_batch(Cast(), sample, device_memory=budget, max_overhead=0.5)
    row = {"found": str(found), "seconds": time.perf_counter() - start}
    return [row], True


QUESTIONS: dict[str, Callable[[torch.device], Answer]] = {
    "settings": settings, "memory": memory, "weights": weights, "graphs": graphs, "longest": longest,
}  # fmt: skip
