"""The front ends beside the recorder: the graphs that they give, the plans, and a step's bits; or why they refuse.

The networks are the eighteen of the published table, and twenty each of timm and transformers.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import ogc
from ogc.plan.saving import structure_of

from .cases import PUBLISHED
from .results import Results
from .row import Data
from .zoo.models import Build, Subject, family
from .zoo.training import call, digest, loss_of, tensors_in

DOORS = ("jit", "export", "dynamo")

TIMM = (
    "beit_base_patch16_224", "cait_xxs24_224", "convnext_atto", "convmixer_768_32", "crossvit_tiny_240", "cspresnet50",
    "davit_tiny", "densenet121", "dla34", "efficientnet_b0", "ghostnet_100", "hrnet_w18_small", "mixer_s32_224",
    "mobilenetv3_small_100", "pit_ti_224", "poolformer_s12", "regnety_002", "res2net50_26w_4s",
    "swin_tiny_patch4_window7_224", "xcit_nano_12_p16_224",
)  # fmt: skip
TRANSFORMERS = (
    "albert, padded", "bart, padded", "bloom, padded", "convnextv2", "distilbert, padded", "electra, padded",
    "falcon, padded", "gemma2, padded", "gpt_neox, padded", "mistral", "mt5, padded", "olmo, padded", "opt, padded",
    "pegasus, padded", "phi3, padded", "roberta, padded", "segformer", "stablelm, padded", "vit", "whisper",
)  # fmt: skip
NETWORKS = (*PUBLISHED, *TIMM, *TRANSFORMERS)

GOAL: dict[str, Any] = {"memory_budget": "least", "effort": 0}

SIZE = 96
"""Of images at most: as little as the networks of the published table take."""


def add_row(name: str, results: Results) -> None:
    build = _builds(name)[name]
    subject = _built(build)
    for _ in range(2):  # what the first call alone makes is there for the others
        recorded = ogc.parse(subject.model, subject.batch(0), profile="estimate")
    plan = ogc.solve(recorded, **GOAL)
    plain = _step(subject, subject.model)
    given = {"arch": name, "operations": len(recorded)}
    results.add({**given, **{door: _through(door, build, plan, plain) for door in DOORS}})


def _through(door: str, build: Build, plan: ogc.Plan, plain: dict[str, str]) -> Data:
    """What comes through a door: its graph beside the recorder's, the plan of each, and the bits of a step."""
    subject = _built(build)
    try:
        ogc.parse(subject.model, subject.batch(0), profile="estimate")  # as the recorder's is not the first one either
        start = time.process_time()
        optimised: Any = ogc.optimize(subject.model, subject.batch(0), front_end=door, profile="estimate", **GOAL)
    except ogc.OgcError as error:
        return {"refused": " ".join(str(error).split())[:400]}
    seconds = time.process_time() - start
    graph, recorded = optimised.graph, plan.graph
    assert recorded is not None
    return {
        "same_graph": _bare(graph) == _bare(recorded) and structure_of(graph) == structure_of(recorded),
        "same_modules": [op.module for op in graph.operations] == [op.module for op in recorded.operations],
        "same_plan": optimised.plan.decisions == plan.decisions and optimised.plan.peak_bytes == plan.peak_bytes,
        "same_bits": _step(subject, optimised) == plain,
        "seconds": seconds,
    }


def _bare(graph: ogc.Graph) -> tuple[Any, ...]:
    """A graph but for the names of its operations and values, and where these come from."""
    operations = [replace(op, name="", module="", source="") for op in graph.operations]
    return operations, [replace(value, name="") for value in graph.values]


def _builds(name: str) -> dict[str, Build]:
    if name in PUBLISHED:
        return {name: partial(_published, name)}
    return family("timm" if name in TIMM else "transformers")


def _published(name: str) -> Subject:
    case = PUBLISHED[name]
    assert case.published is not None
    size = min(case.published.image_size, SIZE)
    return Subject(case.build(), lambda _: (case.input.sample(2, size),))


def _built(build: Build) -> Subject:
    torch.manual_seed(0)
    subject = build()
    subject.model.train()
    batch = subject.batch(0)
    return replace(subject, batch=lambda _: batch)


def _step(subject: Subject, run: torch.nn.Module) -> dict[str, str]:
    """What a step gives, bit by bit."""
    model = subject.model
    torch.manual_seed(1)
    model.zero_grad()
    result = call(run, subject.batch(0))
    loss_of(result).backward()
    found: dict[str, Any] = dict(tensors_in(result, "output"))
    found |= {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    found |= {**dict(model.named_buffers()), "random state": torch.get_rng_state()}
    return {name: digest(value) for name, value in found.items()}
