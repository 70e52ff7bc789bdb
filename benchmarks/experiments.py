"""Networks by many ways, timed in turn: which networks, at what sizes, by which ways, and to what loss.

``time``: what plans promise and steps pay. ``families``: eight families of models, those of HiRemate (ICML 2025,
Gusak et al.), at small overheads and at the sizes of its table where these are said. ``compiled``: torch.compile with
its own budgets beside plans, as they are and compiled. ``partitioned``: its budgets beside ours in torch.compile.
``logits``: language models whose logits are the widest tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

import ogc

from .cases import CASES, Case, Tokens, with_labels
from .losses import Loss, mean_square, next_words, own_loss
from .measuring import Run
from .networks.transformers import Bert
from .results import Impossible
from .trial import Planned, Trial
from .ways import around_blocks, checkpointed, compiled, selectively_checkpointed


@dataclass(frozen=True)
class Way:
    """One way to run a network: ``make`` for it; the rest as for :meth:`Trial.measured`."""

    make: Callable[[Trial], Run | Planned]
    is_ours: bool = False
    tolerance: float = 0.0
    left_out: tuple[str, ...] = ()


Size = tuple[str, int, int | None]
"""The case, samples in a batch, and height and width of images or tokens in a sequence; None for the usual."""


@dataclass(frozen=True)
class Experiment:
    """Attributes: ``sizes`` of the networks by what they are called; ``ways`` of each; the ``loss`` by its inputs; how
    often each is timed at least, and for how many ``seconds``; whether the first way is the plain model once more, so
    that rounds count in which both take as long.
    """

    sizes: dict[str, Size]
    ways: dict[str, Way]
    loss: Callable[[str, Any], Loss | None] = lambda case, inputs: None
    rounds: int = 7
    seconds: float = 0.0
    has_twin: bool = False
    case_of: Callable[[str], Case] = field(default=lambda name: CASES[name])


def _plain(trial: Trial) -> Run:
    return trial.model


def _compiled(trial: Trial, budget: float = 1.0, **options: Any) -> Run:
    return compiled(trial.model, trial.inputs, budget, trial.loss, **options)


def _planned(trial: Trial, **goal: Any) -> Planned:
    """A plan for the graph."""
    return trial.planned(lambda: ogc.solve(trial.graph, **goal))


def _optimized(trial: Trial, **how: Any) -> Planned:
    """By the function that users call."""
    optimized: Any = ogc.optimize(trial.model, trial.inputs, **how)
    return Planned(optimized, optimized.plan)


# -- time: promised and paid --------------------------------------------------------------------------------------

PLAIN, NOTHING, BLOCKS, SELECTIVE, DEFAULT = "plain again", "nothing recomputed", "blocks", "selective", "default"
OF_BLOCKS, OF_SELECTIVE = "memory of blocks", "memory of selective"
NOT_INSTALLED = "all"
"""The one row of a network whose package is not there."""

TINY = "small_blocks"
"""The network where the host is the limit; what single items cost is measured with it."""


def _within(trial: Trial, **goal: Any) -> Planned:
    """A plan for the graph, if there is one."""
    try:
        return _planned(trial, **goal)
    except ogc.SolveError as error:
        raise Impossible(str(error)) from error


def _nothing_recomputed(trial: Trial) -> Planned:
    return trial.planned(lambda: ogc.make_plan(trial.graph, [ogc.saved(0, len(trial.graph))]))


def _at_memory_of(peer: str, trial: Trial) -> Planned:
    """The fastest plan within what the peer was measured to need."""
    budget = trial.rows[peer].peak_bytes
    if not budget:
        raise Impossible(f"{peer} has no figures")
    return _within(trial, memory_budget=budget)


TIME = Experiment(
    {
        name: (name, *size)
        for name, size in {
            TINY: (2, None), "squeezenet1_1": (4, 160), "alexnet": (8, None), "shufflenet_v2_x1_0": (8, 112),
            "mobilenet_v3_small": (8, 112), "mobilenet_v3_large": (4, 112), "mobilenet_v2": (4, 112),
            "mnasnet1_0": (4, 112), "regnet_y_400mf": (4, 112), "efficientnet_b0": (4, 224), "ghostnet_100": (4, 112),
            "resnet18": (4, 112), "resnet50": (2, 112), "resnext50_32x4d": (2, 112), "wide_resnet50_2": (2, 112),
            "resnet101": (1, 160), "densenet121": (2, 112), "googlenet": (2, None), "inception_v3": (2, None),
            "vgg11": (1, None), "unet": (1, 96), "convnext_tiny": (1, None), "vit_b_16": (2, None), "swin_t": (1, None),
            "maxvit_t": (1, 224), "mixer_s16_224": (2, 224), "bert_base": (4, 128), "gpt2_small": (1, 128),
            "llama": (2, 128), "lstm": (8, 48),
        }.items()
    },  # each at a size at which a plain step takes 0.05 to 1 CPU second or so; from the smallest to the largest
    {
        PLAIN: Way(_plain),
        NOTHING: Way(_nothing_recomputed, is_ours=True),
        **{f"memory {share:g}": Way(partial(_within, memory_budget=share), is_ours=True) for share in (0.7, 0.45)},
        "overhead 0.2": Way(partial(_within, max_overhead=0.2), is_ours=True),
        DEFAULT: Way(_planned, is_ours=True),
        BLOCKS: Way(lambda trial: around_blocks(trial.case, trial.model, checkpointed)),
        SELECTIVE: Way(lambda trial: around_blocks(trial.case, trial.model, selectively_checkpointed)),
        OF_BLOCKS: Way(partial(_at_memory_of, BLOCKS), is_ours=True),
        OF_SELECTIVE: Way(partial(_at_memory_of, SELECTIVE), is_ours=True),
    },
    # Seven rounds on each side of the median: what other work on the machine disturbs is left out. With seven in all,
    # on a busy machine, one of 164 plans seemed to pay 5 points more than it does. Quick steps vary more.
    rounds=15, seconds=20.0, has_twin=True,
)  # fmt: skip

# -- small overheads ----------------------------------------------------------------------------------------------


def _loss_of_family(case: str, inputs: Any) -> Loss:
    """Next words for a language model, squares for all others."""
    return next_words(inputs) if case == "gpt2_small" else mean_square


FAMILIES = Experiment(
    {
        "resnet101": ("resnet101", 4, 256), "regnet_x_32gf": ("regnet_x_32gf", 2, 256), "unet": ("unet_32", 4, 256),
        "mixer": ("mixer", 4, 256), "transformer": ("transformer", 4, None), "gpt2_small": ("gpt2_small", 1, 512),
        "fno_1d": ("fno_1d", 256, None), "fno_3d": ("fno_3d", 5, None),
    },
    {
        "plain": Way(_plain),
        **{f"ogc, {most:+.0%}": Way(partial(_planned, max_overhead=most), is_ours=True) for most in (0.1, 0.15, 0.2)},
    },
    _loss_of_family,
)  # fmt: skip

# -- compiled -----------------------------------------------------------------------------------------------------

COMPILED = Experiment(
    {"transformer": ("attention", 16, None), "pointwise": ("pointwise", 4096, None), "resnet18": ("resnet18", 4, 160)},
    {
        "plain": Way(_plain),
        "compiled": Way(_compiled),
        **{f"compiled, budget {budget:g}": Way(partial(_compiled, budget=budget)) for budget in (0.7, 0.5, 0.3, 0.1)},
        "ogc": Way(lambda trial: _optimized(trial, memory_budget=0.5, loss=trial.loss), is_ours=True),
        "ogc, compile=True": Way(
            lambda trial: _optimized(trial, memory_budget=0.5, loss=trial.loss, compile=True),
            is_ours=True, tolerance=float("inf"),
        ),
    },
    lambda case, inputs: mean_square,
)  # fmt: skip

# -- partitioned --------------------------------------------------------------------------------------------------

THEIR_BUDGETS, OUR_SHARES = (0.7, 0.5, 0.3, 0.15, 0.1, 0.05), (0.9, 0.7, 0.5, 0.3, 0.15, 0.1, 0.05)
COMPILED_BLOCKS = "compiled, blocks"
SMALL_BERT = replace(
    CASES["bert_base"], build=partial(Bert, 8192, width=256, heads=4, depth=6), input=Tokens(128, 8192)
)


def _compiled_blocks(trial: Trial) -> Run:
    """Every block checkpointed, in what is compiled."""
    around = partial(around_blocks, trial.case, trial.model, checkpointed)
    return _compiled(trial, fallback_random=False, around=around)


def _partitioned(trial: Trial, **goal: Any) -> Planned:
    """Compiled by Inductor as our partitioner plans the joint graph."""
    partitioner = ogc.Partitioner(**goal)
    run = _if_it_fits(trial, fallback_random=False, config_patches=partitioner.options)
    return Planned(run, partitioner.plans[-1])


def _in_backend(trial: Trial, **goal: Any) -> Run:
    """Operator by operator, by the backend."""
    return _if_it_fits(trial, backend="ogc", options=goal)


def _if_it_fits(trial: Trial, **options: Any) -> Run:
    try:
        return _compiled(trial, **options)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if isinstance(error.inner_exception, ogc.SolveError):
            raise Impossible(str(error.inner_exception)) from error
        raise


PARTITIONED = Experiment(
    {
        "attention": ("attention", 4, None), "bert": ("bert", 4, 128), "llama": ("llama", 2, 128),
        "pointwise": ("pointwise", 2048, None), "convnext_tiny": ("convnext_tiny", 1, 112),
        "resnet50": ("resnet50", 2, 112),
    },
    {
        "plain": Way(_plain),
        "compiled": Way(partial(_compiled, fallback_random=False)),
        **{f"compiled, budget {b:g}": Way(partial(_compiled, budget=b, fallback_random=False)) for b in THEIR_BUDGETS},
        COMPILED_BLOCKS: Way(_compiled_blocks),
        **{
            f"ogc, {share:g}": Way(partial(_partitioned, memory_budget=share), is_ours=True, tolerance=float("inf"))
            for share in OUR_SHARES
        },
        **{
            f"ogc, operators, {share:g}": Way(partial(_in_backend, memory_budget=share)) for share in (0.5, 0.3)
        },
    },
    lambda case, inputs: mean_square,
    case_of=lambda name: SMALL_BERT if name == "bert" else CASES[name],
)  # fmt: skip

# -- logits -------------------------------------------------------------------------------------------------------

CHUNKS = 8
CHUNKED = "linear_cross_entropy"
"""PyTorch's own loss in chunks, from 2.14 on: the model is changed to call it."""


def _chunked(trial: Trial) -> Run:
    """The model with a loss that shifts the labels as its own does."""
    model: Any = trial.model

    def run(input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = model.model(input_ids=input_ids).last_hidden_state.flatten(0, 1)
        targets = F.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
        options = torch.nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined]
        return {"loss": getattr(F, CHUNKED)(hidden, model.lm_head.weight, targets, options=options)}

    return run


def _in_chunks(**goal: Any) -> Way:
    how = partial(_optimized, chunks=CHUNKS, outputs="loss", **goal)
    return Way(how, is_ours=True, tolerance=1e-2, left_out=("output 1",))  # the logits, which it does not return


LOGITS = Experiment(
    {f"{words:,} words": (str(words), 2, None) for words in (32_000, 128_000)},
    {
        "plain": Way(_plain),
        "checkpoint per layer": Way(lambda trial: around_blocks(trial.case, trial.model, checkpointed)),
        "compiled, budget 0.5": Way(partial(_compiled, budget=0.5)),
        "compiled, budget 0": Way(partial(_compiled, budget=0.0)),
        **({CHUNKED: Way(_chunked)} if hasattr(F, CHUNKED) else {}),
        "ogc, overhead 0.2": Way(partial(_optimized, max_overhead=0.2), is_ours=True),
        "ogc": Way(_optimized, is_ours=True),
        f"ogc, {CHUNKS} chunks, half": _in_chunks(memory_budget=0.5),
        f"ogc, {CHUNKS} chunks, overhead 0.2": _in_chunks(max_overhead=0.2),
        f"ogc, {CHUNKS} chunks": _in_chunks(),
    },
    lambda case, inputs: own_loss,
    case_of=lambda words: with_labels(int(words)),
)  # fmt: skip

EXPERIMENTS = {"time": TIME, "families": FAMILIES, "compiled": COMPILED, "partitioned": PARTITIONED, "logits": LOGITS}


def measured(trial: Trial, ways: Mapping[str, Way]) -> Iterator[str]:
    """The ways, each when its peak and its bits are in the trial's rows."""
    for name, way in ways.items():
        make = partial(way.make, trial)
        trial.measured(name, make, is_ours=way.is_ours, tolerance=way.tolerance, left_out=way.left_out)
        yield name
