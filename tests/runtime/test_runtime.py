"""The optimised module is the plain one, bit by bit, with less memory."""

import copy
import gc
import linecache
import pickle
import random
import threading
import traceback
import weakref
from contextlib import contextmanager

import pytest
import torch
from helpers import assert_same_training, forced, loss_of, random_decisions, random_plans, random_tree
from models import CASES, Attention, Outputs, Residual, images, rows
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ogc
from ogc.errors import InputError, PlanError, ReplayError
from ogc.operators import normalization
from ogc.plan.decisions import Decisions, cut_into_segments
from ogc.plan.schedule import Schedule
from ogc.runtime import frame
from ogc.torch_state.private import CALL


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_training_is_bitwise_the_plain_models(name, device):
    if device.type == "cuda" and name == "written result":
        pytest.skip("cuDNN's GRU saves its result, so that the plain model's own backward fails where that is written")
    make, inputs = CASES[name]
    model, given = make().to(device), tuple(t.to(device) for t in inputs())
    assert_same_training(model, ogc.optimize(model, given, memory_budget="least"), given)


def random_segments(graph, rng):
    """One level of segments, most of them recomputed."""
    cuts = [0, *(c for c in graph.cuts[1:-1] if rng.random() < 0.4), len(graph)]
    return cut_into_segments(cuts, [rng.random() < 0.8 for _ in cuts[1:]])


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", CASES)
def test_any_segmentation_is_bitwise_the_plain_model(name, seed):
    make, inputs = CASES[name]
    model, given = make(), inputs()
    graph = ogc.parse(model, given)
    (plan,) = random_plans(graph, random.Random(seed), 1, random_segments)
    assert_same_training(model, ogc.apply(model, graph, plan), given, steps=2)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_any_fates_are_bitwise_the_plain_model(name):
    make, inputs = CASES[name]
    model, given = make(), inputs()
    graph = ogc.parse(model, given)
    for plan in random_plans(graph, random.Random(name), 3, random_decisions):
        assert_same_training(model, ogc.apply(model, graph, plan), given, steps=1)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", CASES)
def test_any_nested_plan_is_bitwise_the_plain_model(name, seed):
    make, inputs = CASES[name]
    model, given = make(), inputs()
    graph = ogc.parse(model, given)
    (plan,) = random_plans(graph, random.Random(seed), 1)
    assert_same_training(model, ogc.apply(model, graph, plan), given, steps=2)


class Largest(nn.Module):
    """Of the maximum, the forward needs the values alone, the backward the indices."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)).reshape(-1, 4, 4).max(-1)[0]).relu()


def test_a_result_that_only_the_backward_needs_may_be_kept():
    model, x = Largest(), torch.randn(8, 16)
    graph = ogc.parse(model, x)
    stop = len(graph)
    (results,) = (op.writes for op in graph.operations if op.target == "aten.max.dim")
    plan = ogc.make_plan(graph, [ogc.recomputed(0, stop, ogc.recomputed(0, stop, saved_values=results))])
    report = ogc.check(model, ogc.apply(model, graph, plan), x)
    assert report.ok, report


def test_inputs_that_require_grad_get_the_same_gradient():
    model = Residual()
    x = images().requires_grad_()
    assert_same_training(model, forced(model, x), (x,))


class WritesItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        x[:, 0] += self.layer(x * 2).sum(1)
        return torch.tanh(x)


def test_an_input_may_be_written_in_place():
    model, x = WritesItsInput(), rows()
    optimised, (plain, ours) = ogc.optimize(model, x, memory_budget="least"), (x.clone(), x.clone())
    assert torch.equal(model(plain), optimised(ours))
    assert torch.equal(plain, ours) and not torch.equal(plain, x)


def test_keyword_arguments_and_pytree_outputs():
    model = Outputs()
    x, shift = torch.randn(5, 6), torch.randn(6)
    sample = {"x": x, "scale": 3.0, "shift": shift}
    optimised = forced(model, sample)
    plain, ours = model(**sample), optimised(**sample)
    assert list(plain) == list(ours)
    assert ours["none"] is None
    assert ours["input"] is x
    assert torch.equal(plain["hidden"][0], ours["hidden"][0])
    assert not ours["plain"].requires_grad
    loss_of(ours).backward()


@pytest.mark.parametrize("seed", range(4))
def test_each_run_is_carried_out_once_and_in_order(seed, monkeypatch):
    model = Residual()
    graph = ogc.parse(model, images())
    segments = random_tree(graph, random.Random(seed))
    optimised = ogc.apply(model, graph, ogc.make_plan(graph, segments))
    expected = [n for n, run in enumerate(Schedule(graph, Decisions.of(segments)).runs) if n and run.program]
    ran = []
    original = frame.Frame._run
    monkeypatch.setattr(frame.Frame, "_run", lambda self: (original(self), ran.append(self.code.number)))
    loss_of(optimised(images())).backward()
    assert [n for n in ran if n in expected] == expected


@pytest.mark.full
def test_a_backward_through_one_output_alone_finds_what_other_parts_would_have_made():
    """A run inside another may be the first to be asked for."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))

        def forward(self, x):
            for layer in self.layers[:3]:
                x = layer(x).tanh()
            y = x
            for layer in self.layers[3:]:
                y = layer(y).tanh()
            return x.sum(), y

    model, x = Two(), torch.randn(4, 6)
    graph = ogc.parse(model, x)
    n = len(graph)
    parts = [ogc.recomputed(0, 4, ogc.recomputed(0, 2), ogc.saved(2, 4)), ogc.saved(4, n)]
    optimised = ogc.apply(model, graph, ogc.make_plan(graph, [ogc.recomputed(0, n, *parts)]))
    for chosen in (0, 1):
        for parameter in model.parameters():
            parameter.grad = None
        model(x)[chosen].sum().backward()
        plain = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = None
        result = optimised(x)[chosen]
        gc.collect()
        result.sum().backward()
        for a, parameter in zip(plain, model.parameters(), strict=True):
            assert (a is None and parameter.grad is None) or torch.equal(a, parameter.grad)


def test_the_result_is_the_models_own_kind_and_shares_everything():
    model = Residual()
    before = dict(vars(model))
    optimised = ogc.optimize(model, images(), memory_budget="least")
    assert isinstance(optimised, Residual)
    assert list(optimised.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(optimised.parameters(), model.parameters(), strict=True))
    assert [n for n, _ in optimised.named_modules()] == [n for n, _ in model.named_modules()]
    assert optimised.greet() == "label kept"
    assert {key: value for key, value in vars(model).items() if key != CALL} == before
    assert type(model) is Residual
    optimised.eval()
    assert not model.training
    optimised.train().requires_grad_(False)
    assert not any(p.requires_grad for p in model.parameters())
    optimised.requires_grad_(True).to(torch.float64)
    assert next(model.parameters()).dtype == torch.float64


def test_the_plan_and_the_code_can_be_read():
    optimised = ogc.optimize(Residual(), images(), memory_budget="least")
    text = str(optimised.plan)
    assert "recomputed" in text and "% time" in text
    assert "def forward(step, input_0, stem_0_weight, " in optimised.code
    assert "low_memory.convolution(" in optimised.code
    assert "stem.0" in str(optimised.graph)


def test_eval_mode_and_no_grad_run_the_original_forward(monkeypatch):
    model = Residual()
    optimised = forced(model, images())
    opened = []
    monkeypatch.setattr(frame.Step, "open", lambda *args: opened.append(args))
    with torch.no_grad():
        optimised(images())
    optimised.eval()
    assert torch.equal(optimised(images()), model(images()))
    assert not opened


def test_batch_norm_counts_each_step_once():
    optimised = forced(Residual(), images())
    for _ in range(3):
        loss_of(optimised(images())).backward()
    assert optimised.stem[1].num_batches_tracked == 3


def test_a_graph_that_is_kept_can_be_run_backward_again():
    model = Residual(dropout=0.0)
    optimised = forced(model, images())
    results = []
    for run in (model, optimised):
        loss = loss_of(run(images()))
        first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        second = torch.autograd.grad(loss, list(model.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        results.append(second)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class Normalizations(TorchDispatchMode):
    """Lists for each batch norm whether it computed statistics."""

    only_looks = True

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.native_batch_norm.default:
            self.seen.append(args[5])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("lost", [False, True])
def test_statistics_of_batch_norm_are_computed_once_where_they_are_there(lost, monkeypatch):
    monkeypatch.setattr(normalization, "CHUNK_BYTES", 64)
    model = nn.Sequential(
        *(layer for _ in range(4) for layer in (nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.ReLU(True)))
    )
    x = torch.randn(2, 3, 20, 20)
    optimised = forced(model, x, pieces=1)
    if lost:  # as after a backward through a part of the graph alone
        monkeypatch.setattr(frame.Frame, "notes", lambda self, operation: [])
    assert_same_training(model, optimised, (x,))
    with Normalizations() as found:
        optimised(x).sum().backward()
    assert found.seen[:4] == [True] * 4
    again = found.seen[4:]
    assert again == [lost] * 3


def test_notes_go_with_the_graph(monkeypatch):
    monkeypatch.setattr(normalization, "CHUNK_BYTES", 64)
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3))
    steps = []
    monkeypatch.setattr(frame.Step, "__init__", _remembering(frame.Step.__init__, steps))
    loss = forced(model, torch.randn(2, 3, 20, 20), pieces=1)(torch.randn(2, 3, 20, 20)).sum()
    notes = [note for noted in steps[-1].notes.values() for note in noted]
    assert len(notes) >= 2
    assert all(note() is not None for note in notes)
    loss.backward()
    assert all(note() is None for note in notes)


def _remembering(method, found):
    def wrapped(self, *args, **kwargs):
        found.append(self)
        method(self, *args, **kwargs)

    return wrapped


def test_double_backward():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 1))
    x = torch.randn(3, 4, requires_grad=True)
    optimised = forced(model, x)
    results = []
    for run in (model, optimised):
        (gradient,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        results.append(torch.autograd.grad(gradient.square().sum(), list(model.parameters())[:3]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_only_some_outputs_reach_the_loss():
    model = Outputs()
    x = torch.randn(5, 6)
    optimised = forced(model, x)
    gradients = []
    for run in (model, optimised):
        model.zero_grad()
        run(x)["hidden"][0].sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert torch.equal(gradients[0][0], gradients[1][0])
    assert gradients[1][2] is None


def test_steps_may_overlap():
    model = Residual()
    optimised = forced(model, images())
    results = []
    for run in (model, optimised):
        torch.manual_seed(3)
        model.zero_grad()
        first, second = loss_of(run(images())), loss_of(run(images(4) + 1))
        first.backward()
        second.backward()
        results.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("change", ["freeze", "eval a part", "hook", "double", "replace"])
def test_what_a_plan_by_hand_does_not_hold_for_runs_plain(change, monkeypatch):
    model = Residual()
    optimised = forced(model, images())
    x, seen = images(), []
    if change == "freeze":
        model.stem.requires_grad_(False)
    elif change == "eval a part":
        model.stem[1].eval()
    elif change == "hook":
        model.stem.register_forward_hook(lambda module, given, result: seen.append(1))
    elif change == "replace":
        model.stem[2] = nn.Tanh()
    else:
        model.double()
        x = x.double()
    monkeypatch.setattr(frame.Step, "open", lambda *args: pytest.fail("the plan was run"))
    loss_of(optimised(x)).backward()
    assert seen == ([1] if change == "hook" else [])


def test_changing_a_parameter_before_the_backward_is_an_error():
    model = Residual()
    loss = loss_of(forced(model, images())(images()))
    with torch.no_grad():
        model.stem[0].weight.add_(1)
    with pytest.raises(ReplayError, match=r"stem\.0\.weight was modified"):
        loss.backward()


@pytest.mark.parametrize("backward_under_autocast", [False, True])
def test_autocast_regions_are_replayed_as_traced(backward_under_autocast):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            x = torch.tanh(self.layers[1](torch.tanh(self.layers[0](x))))
            with torch.autocast("cpu", enabled=False):
                x = torch.tanh(self.layers[2](x.float()))
            return self.layers[3](x)

    model, x = Mixed(), torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        optimised = forced(model, x)
    results = []
    for run in (model, optimised):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(run(x))
            if backward_under_autocast:
                loss.backward()
        if not backward_under_autocast:
            loss.backward()
        results.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert optimised(x).dtype == torch.float32  # without autocast: the plain model


def test_a_deep_copy_trains_by_itself():
    optimised = forced(Residual(), images())
    twin = copy.deepcopy(optimised)
    assert type(twin) is type(optimised)
    loss_of(twin(images())).backward()
    assert all(p.grad is None for p in optimised.parameters())
    assert all(p.grad is not None for p in twin.parameters())


def test_pickling_a_plan_by_hand_says_what_to_do_instead():
    graph = ogc.parse(model := Residual(), images())
    with pytest.raises(InputError, match=r"by hand cannot be pickled.*save state_dict\(\)"):
        pickle.dumps(ogc.apply(model, graph, ogc.solve(graph, memory_budget="least")))


@contextmanager
def frames_opened():
    """Weak references to the frames that are opened inside."""
    frames = []
    original = frame.Frame.__init__

    def remembered(self, *args):
        frames.append(weakref.ref(self))
        original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame.Frame, "__init__", remembered)
        yield frames


def test_a_step_leaves_nothing_behind():
    model = Residual()
    optimised = forced(model, images())
    gc.disable()
    try:
        with frames_opened() as frames:
            loss_of(optimised(images())).backward()
        assert frames and all(ref() is None for ref in frames), "a reference cycle keeps a frame"
    finally:
        gc.enable()


@pytest.mark.full
def test_the_text_of_a_plan_is_there_for_tracebacks_as_long_as_the_plan_is():
    def plans_with_text():
        gc.collect()
        return {name for name in linecache.cache if name.startswith("<ogc plan")}

    before, model, tokens = plans_with_text(), Attention(), torch.zeros(2, 10, dtype=torch.long)
    graph = ogc.parse(model, tokens)
    for plan in ogc.frontier(graph).plans:
        ogc.apply(model, graph, plan)
    assert plans_with_text() <= before
    optimised = forced(model, tokens)
    with pytest.raises(IndexError) as caught:
        optimised(tokens + 1000)
    assert plans_with_text() - before
    assert any("embedding" in line for line in traceback.format_exception(caught.value) if "<ogc plan" in line)


@pytest.mark.full
def test_a_forward_that_is_never_followed_by_a_backward_leaves_nothing_behind():
    optimised = forced(Attention(), torch.zeros(2, 10, dtype=torch.long))
    with frames_opened() as frames:
        optimised(torch.zeros(2, 10, dtype=torch.long))
    gc.collect()
    assert frames and all(ref() is None for ref in frames)


def test_a_plan_of_a_graph_without_program_is_refused():
    graph = ogc.parse(Residual(), images())
    bare = ogc.Graph(graph.operations, graph.values)
    with pytest.raises(PlanError, match="no program to run"):
        ogc.apply(Residual(), bare, ogc.solve(bare, memory_budget="least"))


def test_a_graph_weighed_for_another_device_is_refused():
    model = Residual()
    graph = ogc.parse(model, images(), device="meta")
    with pytest.raises(PlanError, match="weighed for meta"):
        ogc.apply(model, graph, ogc.solve(graph, memory_budget="least"))


def test_an_optimized_module_may_be_optimized_again():
    model = Residual()
    once = ogc.optimize(model, images(), memory_budget="least")
    again = ogc.optimize(once, images(8), memory_budget="least")
    assert type(again).__bases__ == (Residual,)
    assert again.graph is not once.graph and again.plan.graph is again.graph
    assert_same_training(model, again, (images(8),))


def test_another_thread_that_draws_beside_is_an_error_and_never_other_masks():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)) for _ in range(4)))
    x = torch.randn(16, 8)
    optimised, own = forced(model, x), torch.get_rng_state
    states = []

    def drawn_beside():
        states.append(own())
        if len(states) == 2:  # between the state that an operation is said to start from and its own numbers
            torch.rand(1)
        return states[-1]

    end = threading.Event()
    other = threading.Thread(target=end.wait)
    other.start()
    try:
        assert_same_training(model, optimised, (x,))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "get_rng_state", drawn_beside)
            result = optimised(x)
        with pytest.raises(ogc.ReplayError, match="another thread drew random numbers"):
            result.sum().backward()
        assert_same_training(model, optimised, (x,))
    finally:
        end.set()
        other.join()
