"""Where logits are the widest tensor: a language model with labels, by every way to save memory, side by side.

    OMP_NUM_THREADS=1 python -m benchmarks.logits --json FILE

A Llama of eight layers and width 256 with its own loss on 2 x 512 tokens. Each way's peak is the allocator's, its time
CPU seconds of one thread, in turn with the plain model's. It needs transformers.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ogc
from ogc.torch_state.allocator import peak_bytes

from .measuring import allocate_gradients, environment, write_json
from .timing.rounds import in_turn, one_thread

TOKENS, WIDTH, LAYERS, SLICES = (2, 512), 256, 8, 8
VOCABULARIES = (32_000, 128_000)
CHUNKED = "linear_cross_entropy"
"""PyTorch's own loss in chunks, from 2.14 on: the model is changed to call it."""

Step = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """One way to run the model.

    Attributes:
        vocabulary: how many words the model knows.
        way: what saves memory.
        peak_bytes: of the allocator, over one step whose output is held.
        promised_bytes, promised: what a plan of ogc's says of peak and overhead.
        paid: what the median step takes more than the plain one, as a share.
        distance: the most by which a gradient is off, as a share of its largest entry.
        reason: why there are no figures.
    """

    vocabulary: int
    way: str
    peak_bytes: int = 0
    promised_bytes: int | None = None
    promised: float | None = None
    paid: float = 0.0
    distance: float = 0.0
    reason: str = ""


class Subject:
    """The model, a batch, and the ways to run it."""

    def __init__(self, vocabulary: int) -> None:
        llama: Any = importlib.import_module("transformers.models.llama")
        torch.manual_seed(0)
        config = llama.LlamaConfig(
            vocab_size=vocabulary, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=LAYERS,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=TOKENS[1], use_cache=False,
        )  # fmt: skip
        self.vocabulary = vocabulary
        self.model: Any = llama.LlamaForCausalLM(config).train()
        ids = torch.randint(vocabulary, TOKENS)
        self.batch = {"input_ids": ids, "labels": ids}

    def ways(self) -> Iterator[tuple[str, Callable[[], tuple[Step, ogc.Plan | None]]]]:
        """Names, and functions that make what returns an output with a loss."""
        yield "plain", lambda: (partial(self.model, **self.batch), None)
        yield "checkpoint per layer", lambda: (self._checkpointed, None)
        for budget in (0.5, 0.0):
            yield f"compiled, budget {budget:g}", partial(self._compiled, budget)
        if hasattr(F, CHUNKED):
            yield CHUNKED, lambda: (self._chunked, None)
        sliced = {"batch_slices": SLICES, "outputs": "loss"}
        yield "ogc, overhead 0.2", partial(self._planned, max_overhead=0.2)
        yield "ogc", self._planned
        yield f"ogc, {SLICES} slices, half", partial(self._planned, memory_budget=0.5, **sliced)
        yield f"ogc, {SLICES} slices, overhead 0.2", partial(self._planned, max_overhead=0.2, **sliced)
        yield f"ogc, {SLICES} slices", partial(self._planned, **sliced)

    def _checkpointed(self) -> Any:
        layers = list(self.model.model.layers)
        for layer in layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        try:
            return self.model(**self.batch)
        finally:
            for layer in layers:
                del layer.forward

    def _compiled(self, budget: float) -> tuple[Step, None]:
        import torch._functorch.config

        torch._dynamo.reset()
        run = torch.compile(self.model)
        with torch._functorch.config.patch(activation_memory_budget=budget):
            run(**self.batch).loss.backward()
        return partial(run, **self.batch), None

    def _chunked(self) -> Any:
        """The model with a loss that shifts the labels as its own does."""
        ids = self.batch["input_ids"]
        hidden = self.model.model(input_ids=ids).last_hidden_state.flatten(0, 1)
        targets = F.pad(ids, (0, 1), value=-100)[:, 1:].flatten()
        options = torch.nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined]
        loss = getattr(F, CHUNKED)(hidden, self.model.lm_head.weight, targets, options=options)
        return argparse.Namespace(loss=loss)

    def _planned(self, **wish: Any) -> tuple[Step, ogc.Plan]:
        optimized = ogc.optimize(self.model, self.batch, **wish)
        plan: Any = optimized.plan
        return partial(optimized, **self.batch), plan

    def rows(self, rounds: int) -> list[Row]:
        """A row for each way: first the peaks, then the time of all of them in turn."""
        rows: dict[str, Row] = {}
        steps: dict[str, Step] = {}
        plain: dict[str, torch.Tensor] = {}
        allocate_gradients(self.model)
        for way, make in self.ways():
            print(f"{self.vocabulary}: {way}", file=sys.stderr)
            rows[way] = Row(self.vocabulary, way)
            try:
                run, plan = make()
                found = self._gradients(run)
            except Exception as error:  # of a peer's, such as no compiler: the others are all the same
                rows[way] = replace(rows[way], reason=f"{type(error).__name__}: {error}".splitlines()[0])
                continue
            plain = plain or found
            steps[way] = run
            rows[way] = replace(
                rows[way],
                peak_bytes=self._peak(run),
                promised_bytes=None if plan is None else plan.peak_bytes,
                promised=None if plan is None else plan.overhead,
                distance=max(float((found[n] - g).abs().max() / g.abs().max()) for n, g in plain.items()),
            )
        seconds = in_turn({way: partial(_timed, run) for way, run in steps.items()}, rounds, 0.0)
        base = seconds["plain"]
        paid = {w: median(own / p for own, p in zip(s, base, strict=True)) - 1 for w, s in seconds.items()}
        return [replace(row, paid=paid.get(way, 0.0)) for way, row in rows.items()]

    def _gradients(self, run: Step) -> dict[str, torch.Tensor]:
        for parameter in self.model.parameters():
            parameter.grad.zero_()
        run().loss.backward()
        return {name: parameter.grad.clone() for name, parameter in self.model.named_parameters()}

    def _peak(self, run: Step) -> int:
        def step() -> Any:
            output = run()
            output.loss.backward()
            return output

        return int(peak_bytes(step, torch.device("cpu")))


def _timed(run: Step) -> float:
    start = time.process_time()
    run().loss.backward()
    return time.process_time() - start


def main() -> int:
    """Measure, print, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--rounds", type=int, default=7, help="how often each way is timed")
    parser.add_argument("--vocabulary", type=int, nargs="+", default=VOCABULARIES, help="numbers of words")
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peers' own
        for vocabulary in options.vocabulary:
            for row in Subject(vocabulary).rows(options.rounds):
                found.append(asdict(row))
                figures = f"{row.peak_bytes / 2**20:8.1f} MiB {row.paid:+7.1%}"
                print(f"{row.vocabulary:>7} {row.way:<28} {row.reason or figures}")
        command = shlex.join(["python", "-m", "benchmarks.logits", *sys.argv[1:]])
        around = environment(command, torch.device("cpu"), 0, False)
    if options.json:
        write_json(options.json, {**around, "rows": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
