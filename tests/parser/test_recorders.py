"""Hooks by which transformers collects hidden states: part of the forward that makes the collector."""

import logging

import pytest
import torch
from helpers import assert_same_training, tensors_of
from torch import nn

import ogc
from ogc.parser import hooked_modules
from ogc.torch_state.no_trace import untouched

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.integrations

TOKENS = torch.randint(1, 50, (3, 16), generator=torch.Generator().manual_seed(0))


class Asks(nn.Module):
    """Asks a small BERT for its hidden states."""

    def __init__(self, wanted=True):
        super().__init__()
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32
        )
        self.bert = transformers.BertModel(config, add_pooling_layer=False)
        self.wanted = wanted

    def forward(self, tokens):
        return self.bert(tokens, output_hidden_states=self.wanted)


def hooks(model):
    return sum(len(module._forward_hooks) for module in model.modules())


def opaque_calls(graph):
    return {op.module for op in graph.operations if op.target.startswith("opaque ")}


@pytest.mark.full
def test_hooks_that_a_forward_registers_while_it_is_planned_are_not_left_behind():
    model, plain = Asks(), Asks()
    plain(TOKENS)
    optimised = ogc.optimize(model, TOKENS, memory_budget="least")
    assert hooks(model) == 0
    assert len(model(TOKENS).hidden_states) == len(plain(TOKENS).hidden_states) == 4
    assert hooks(model) == hooks(plain) > 0
    assert len(optimised(TOKENS).hidden_states) == 4


@pytest.mark.full
@pytest.mark.parametrize("was_called", [False, True])
def test_hidden_states_are_recomputed_like_anything_else(was_called, caplog):
    model = Asks()
    if was_called:
        model(TOKENS)
    optimised = ogc.optimize(model, TOKENS, memory_budget="least")
    assert not opaque_calls(optimised.graph)
    assert optimised.plan.peak_bytes < 0.8 * optimised.plan.plain_peak_bytes
    with caplog.at_level(logging.WARNING):
        assert_same_training(model, optimised, (TOKENS,), steps=2)
    assert "runs the plain model" not in caplog.text  # if it had no hooks when it was optimised, either
    assert_same_training(model, optimised, (TOKENS[:, :9],), steps=1)


@pytest.mark.full
def test_a_collector_around_the_optimised_part_gets_what_it_asks_for(caplog):
    """Its forward is not traced, so the hooks must be called in each step."""
    model, plain = Asks(), Asks()
    expected = tensors_of(plain(TOKENS))
    model(TOKENS)
    state = torch.get_rng_state()
    part = model.bert.encoder
    assert opaque_calls(ogc.parse(part, torch.randn(3, 16, 16))) == {"layer.0", "layer.1", "layer.2"}
    optimised = ogc.optimize(part, torch.randn(3, 16, 16), memory_budget="least")
    assert optimised.graph.keys() == {"layer.0", "layer.1", "layer.2"}  # which are planned with their hooks
    model.bert.encoder = optimised
    for _ in range(2):
        for run in (model, plain):
            torch.set_rng_state(state)
            found = tensors_of(run(TOKENS))
            assert len(found) == len(expected)
            if run is model:
                ours = found
        assert all(torch.equal(a, b) for a, b in zip(ours, found, strict=True))


@pytest.mark.full
def test_a_plan_is_not_made_while_a_collector_around_the_part_is_filled(caplog):
    model, plain = Asks(), Asks()
    model.bert.encoder = ogc.optimize(model.bert.encoder, torch.randn(3, 16, 16), memory_budget="least")
    state = torch.get_rng_state()
    found = model(TOKENS)  # registers the hooks
    torch.set_rng_state(state)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(found), tensors_of(plain(TOKENS)), strict=True))
    assert len(found.hidden_states) == 4
    assert "has hooks that collect what it gives for a forward around the model" in caplog.text


@pytest.mark.full
def test_a_hook_of_any_other_kind_makes_an_opaque_module():
    model = Asks()
    model(TOKENS)
    seen = []
    layer = model.bert.encoder.layer[1]
    layer.register_forward_hook(lambda module, given, result: seen.append(1))
    assert hooked_modules(dict(model.named_modules())) == {"bert.encoder.layer.1"}
    optimised = ogc.optimize(model, TOKENS, memory_budget="least")
    assert opaque_calls(optimised.graph) == {"bert.encoder.layer.1"}
    seen.clear()
    assert_same_training(model, optimised, (TOKENS,), steps=2)
    assert len(seen) == 4


def test_hooks_of_all_kinds_are_as_before():
    layer = nn.Linear(2, 2)
    kept = layer.register_forward_hook(print)
    with untouched(layer):
        kept.remove()
        layer.register_forward_hook(print, with_kwargs=True, always_call=True)
        layer.register_forward_pre_hook(print, with_kwargs=True)
        layer.register_full_backward_hook(print)
        layer.register_full_backward_pre_hook(print)
    changed = {key: value for key, value in vars(layer).items() if "hooks" in key and value}
    assert changed == {"_forward_hooks": {kept.id: print}}
