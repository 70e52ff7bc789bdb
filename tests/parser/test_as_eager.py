"""What is recorded is what eager runs: the model cannot tell that it is looked at, and everyday code is planned."""

import copy
from collections import OrderedDict, deque
from queue import SimpleQueue

import pytest
import torch
from helpers import assert_same_training, forced, measured_peak
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import ogc
from ogc.errors import ParseError


class Net(nn.Module):
    """``middle`` between two layers."""

    def __init__(self, middle):
        super().__init__()
        self.middle = middle
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.second(self.middle(torch.tanh(self.first(x))).sigmoid())


X = torch.randn(5, 6)


def targets(graph):
    return [op.target for op in graph.operations]


# -- nothing is seen of it -------------------------------------------------------------------------------------


def surroundings():
    """What code may ask to find out whether it is traced, compiled or watched."""
    return {
        "tracing": torch.jit.is_tracing(),
        "tracing state": torch._C._get_tracing_state(),
        "scripting": torch.jit.is_scripting(),
        "compiling": torch.compiler.is_compiling(),
        "exporting": torch.compiler.is_exporting(),
        "modes of functions": torch.overrides._get_current_function_mode_stack(),
        "modes of dispatch": [
            type(mode).__name__ for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        ],
        "transforms": torch._C._are_functorch_transforms_active(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "type of sizes": (type(X.shape), type(X.shape[0]), type(X.size(1)), type(len(X)), type(X.numel())),
    }


def test_a_forward_sees_what_it_sees_in_eager():
    queue = SimpleQueue()  # not a list: what a forward writes to one would be its result, too
    model = Net(lambda x: (queue.put((surroundings(), type(x.shape[0]), x.requires_grad)), x)[1])
    model(X)
    ogc.parse(model, X)
    seen = [queue.get() for _ in range(queue.qsize())]
    recorded = [entry for entry in seen[1:] if not entry[0]["modes of dispatch"]]  # all but the verifier's log
    assert recorded and len(seen) > len(recorded)
    assert all(entry == seen[0] for entry in recorded)


@pytest.mark.parametrize("grouped", [False, True])
def test_attention_is_that_of_eager(grouped):
    """The mask and repeated keys of a trace are other kernels."""

    def attend(x):
        x = x.view(1, 5, 3, 2).transpose(1, 2)
        keys = x[:, :1] if grouped else x
        if torch.jit.is_tracing():
            mask = torch.ones(5, 5, dtype=torch.bool).tril()
            return F.scaled_dot_product_attention(x, x, x, mask).transpose(1, 2).reshape(5, 6)
        return (
            F.scaled_dot_product_attention(x, keys, keys, is_causal=True, enable_gqa=grouped)
            .transpose(1, 2)
            .reshape(5, 6)
        )

    model = Net(attend)
    optimised = ogc.optimize(model, X, verify=True, memory_budget="least")
    (call,) = (n for n in optimised.graph.program.operations if "attention" in str(n.target))
    assert call.args[5] is True and call.kwargs["enable_gqa"] is grouped
    assert_same_training(model, optimised, (X,))


class Crops(nn.Module):
    """Takes all there is, in channels-last memory."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, images):
        x = self.first(images)
        y = self.second(F.relu(x))[..., : self.size, : self.size]
        return (y + x[..., : self.size, : self.size]).mean((2, 3)).tanh()


def test_a_full_slice_is_none():
    model, images = Crops(8), torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    model = model.to(memory_format=torch.channels_last)
    assert not any("slice" in target for target in targets(ogc.parse(model, images)))
    assert any("slice" in target for target in targets(ogc.parse(Crops(7), images)))
    assert_same_training(model, ogc.optimize(model, images, memory_budget="least"), (images,))
    assert_same_training(model, forced(model, images), (images,))


# -- what is done past the dispatcher -----------------------------------------------------------------------------


class Masked(nn.Linear):
    """A pruned layer that assigns to its own weight's memory."""

    def __init__(self):
        super().__init__(6, 6)
        self.register_buffer("mask", (torch.rand(6, 6) > 0.3).float())

    def forward(self, x):
        self.weight.data = self.weight.data * self.mask
        return super().forward(x)


class MaskedInPlace(Masked):
    def forward(self, x):
        self.weight.data.mul_(self.mask)
        return F.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("make", [Masked, MaskedInPlace])
def test_memory_that_is_assigned_past_autograd_makes_an_opaque_module(make):
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), make(), nn.Sigmoid(), nn.Linear(6, 6))
    optimised = ogc.optimize(model, X, memory_budget="least")
    assert [op.module for op in optimised.graph.operations if op.target.startswith("opaque")] == ["2"]
    assert_same_training(model, optimised, (X,))
    with pytest.raises(ParseError, match=r"data.*test_as_eager.py:\d+"):
        ogc.parse(make(), X)


class ReadsData(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight) * self.weight.data.abs().mean() + self.bias.data


def test_memory_that_is_read_past_autograd_has_no_gradient():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), ReadsData(6, 6), nn.Sigmoid(), nn.Linear(6, 6))
    optimised = ogc.optimize(model, X, memory_budget="least")
    assert not any(target.startswith("opaque") for target in targets(optimised.graph))
    assert_same_training(model, optimised, (X,))


class ReadsStorage(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            weight = torch.empty(0).set_(self.weight.untyped_storage(), 0, (6, 6), (6, 1))
        return F.linear(x, weight) + super().forward(x)


def test_memory_that_is_reached_through_its_storage_makes_an_opaque_module():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), ReadsStorage(6, 6), nn.Sigmoid(), nn.Linear(6, 6))
    optimised = ogc.optimize(model, X, memory_budget="least")
    assert [op.module for op in optimised.graph.operations if op.target.startswith("opaque")] == ["2"]
    assert_same_training(model, optimised, (X,))
    twin = copy.deepcopy(optimised)
    with torch.no_grad():
        twin[2].weight.mul_(3)
    assert_same_training(nn.Sequential(*twin), twin, (X,))
    with pytest.raises(ParseError, match=r"through its storage at test_as_eager.py:\d+"):
        ogc.parse(ReadsStorage(6, 6), X)


# -- everyday code ------------------------------------------------------------------------------------------------


def adds_to_its_own(x):
    mask = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    mask += 1
    mask[0] = 7
    return x * mask


EVERYDAY = {
    "a root of a number": lambda x: x / torch.sqrt(torch.tensor(8)),
    "a number where": lambda x: torch.where(x > 0, torch.tensor(5), x),
    "a constant of truth": lambda x: x * torch.tensor(True),
    "a number from a tensor of sizes": lambda x: x * torch.tensor(x.shape).prod(),
    "arithmetic on sizes": lambda x: x.view(x.shape[0] * 2, -1)[: x.numel() // 6].reshape(-1, 3).repeat(1, 2)[:5] * x,
    "constants that are written": adds_to_its_own,
    "a power of a size": lambda x: x * x.size(0) ** -0.5,
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x) @ x,
    "checkpoint": lambda x: checkpoint(lambda y: (y * 2).sin().exp(), x, use_reentrant=False),
    "vmap": lambda x: torch.vmap(lambda row: (row * row.sum()).sin())(x),
    "items that are put": lambda x: torch.stack([row * k for k, row in enumerate(x)]),
    "numbers of numpy": lambda x: x * torch.from_numpy(X.numpy() > 0),
    "an assertion": lambda x: (torch._assert_async((X < 100).all()), x)[1],
}


@pytest.mark.full
@pytest.mark.parametrize("name", EVERYDAY)
def test_everyday_code_is_planned(name):
    model = Net(EVERYDAY[name])
    for optimised in (ogc.optimize(model, X, memory_budget="least"), forced(model, X)):
        assert not any(target.startswith("opaque") for target in targets(optimised.graph))
        for seed in range(2):
            assert_same_training(model, optimised, (X + seed,), steps=2)


def test_numbers_may_be_returned():
    class Sized(Net):
        def forward(self, x):
            y = super().forward(x)
            return y, y.shape[0], {"size": y.size(), "text": "text", "nothing": None}

    model = Sized(torch.sin)
    optimised = ogc.optimize(model, X, memory_budget="least")
    (ours, *rest), (theirs, *others) = optimised(X), model(X)
    assert torch.equal(ours, theirs) and rest == others
    assert optimised(X[:3])[1] == 3


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, power):
        ctx.save_for_backward(x)
        ctx.power = power
        return x**power

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * ctx.power * x ** (ctx.power - 1), None


class BeginsGradient(nn.Module):
    """As speech models of transformers do, so that checkpoints have a gradient to begin with."""

    def __init__(self, by_method):
        super().__init__()
        self.by_method = by_method
        self.first, self.second = nn.Conv1d(1, 4, 3), nn.Conv1d(4, 4, 3)

    def forward(self, x):
        x = x[:, None]
        if self.by_method:
            x = x.requires_grad_()
        else:
            x.requires_grad = True
        return self.second(self.first(x).tanh()).sin().mean(-1)


@pytest.mark.parametrize("by_method", [False, True])
@pytest.mark.full
def test_a_tensor_may_be_said_to_require_grad(by_method):
    model = BeginsGradient(by_method)
    optimised = ogc.optimize(model, X, memory_budget="least")
    assert "aten.requires_grad_.default" in targets(optimised.graph)
    assert_same_training(model, optimised, (X,))
    assert_same_training(model, forced(model, X), (X,))
    assert_same_training(nn.Sequential(model), ogc.optimize(nn.Sequential(model), X, memory_budget="least"), (X,))


@pytest.mark.full
def test_a_custom_function_in_the_models_own_forward_is_an_opaque_module_of_one_call():
    model = Net(lambda x: Cube.apply(x.sin(), 3).exp())
    optimised = ogc.optimize(model, X, verify=True, memory_budget="least")
    assert targets(optimised.graph).count("opaque Cube") == 1
    assert_same_training(model, optimised, (X,))
    assert_same_training(model, forced(model, X), (X,))
    assert_same_training(model, optimised, (X[:2],), steps=1)


def test_a_function_that_was_looked_up_before_is_seen_all_the_same():
    cube = Cube.apply
    with pytest.raises(ParseError, match=r"custom torch\.autograd\.Function"):
        ogc.parse(Net(lambda x: cube(x, 3)), X)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_compiled_submodule_is_an_opaque_module(wrapped):
    torch._dynamo.reset()
    inner = nn.Sequential(nn.Linear(6, 6), nn.GELU())
    if not wrapped:
        inner.compile(backend="eager")
    part = torch.compile(inner, backend="eager") if wrapped else inner
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), part, nn.Sigmoid(), nn.Linear(6, 6))
    optimised = forced(model, X)
    assert [op.module for op in optimised.graph.operations if op.target.startswith("opaque")] == ["2"]
    assert_same_training(model, optimised, (X,), steps=2)


def test_a_forward_that_fails_only_while_it_is_recorded_is_refused_in_our_words():
    def peeks(x):
        if nn.Module.__call__ is not original:
            raise KeyError("somebody is here")
        return x

    original = nn.Module.__call__
    with pytest.raises(ParseError, match=r"fails while it is recorded: .*somebody is here"):
        ogc.parse(Net(peeks), X)


def test_what_an_argument_holds_may_not_be_changed_unseen():
    class Appends(nn.Linear):
        def forward(self, x, found):
            found.append(super().forward(x))
            return found[-1].tanh()

    with pytest.raises(ParseError, match="changes what it is given, which is no list, dict or object"):
        ogc.parse(Appends(6, 6), (X, deque()))


class Updates(nn.Module):
    """A block of a graph network: it writes into what it is given, and returns that."""

    def __init__(self, reads_numbers):
        super().__init__()
        self.up, self.down, self.reads_numbers = nn.Linear(32, 64), nn.Linear(64, 32), reads_numbers

    def forward(self, data, found):
        x = data["nodes"]["x"]
        data["nodes"]["x"] = x + self.down(self.up(x).tanh().sigmoid())
        data.pop("last", None)
        data["last"] = x.mean(-1)
        found.append(data["nodes"]["x"].sum(-1))
        return data


class Graphs(nn.Module):
    """Blocks that hand a dict on; ``reads_numbers`` makes each block a part."""

    def __init__(self, reads_numbers):
        super().__init__()
        self.blocks = nn.ModuleList(Updates(reads_numbers) for _ in range(6))
        self.reads_numbers = reads_numbers

    def forward(self, data, found):
        for block in self.blocks:
            block(data, found)
            if self.reads_numbers and data["last"].sum() < -1e9:
                data["nodes"]["x"] = data["nodes"]["x"] * 2
        data["all"] = found
        return data["nodes"]


class OfTensor(nn.Module):
    def __init__(self, reads_numbers):
        super().__init__()
        self.graphs = Graphs(reads_numbers)

    def forward(self, x):
        data = {"nodes": {"x": x}}
        return self.graphs(data, [])["x"].mean() + torch.stack(data["all"]).mean()


@pytest.mark.parametrize("reads_numbers", [False, True])
@pytest.mark.full
def test_blocks_that_write_into_what_they_are_given_are_planned(reads_numbers):
    model, x = OfTensor(reads_numbers), torch.randn(256, 32)
    optimised = ogc.optimize(model, x, memory_budget="least")
    plan = optimised.plan
    assert isinstance(plan, ogc.PartsPlan) == reads_numbers
    assert plan.peak_bytes < 0.5 * plan.plain_peak_bytes
    assert measured_peak(model, (x,)) == pytest.approx(plan.plain_peak_bytes, rel=0.03)
    assert measured_peak(optimised, (x,)) == pytest.approx(plan.peak_bytes, rel=0.03)
    assert_same_training(model, optimised, (x,))


@pytest.mark.parametrize("reads_numbers", [False, True])
def test_lists_and_dicts_that_are_given_hold_what_the_plain_forward_leaves_in_them(reads_numbers):
    model = Graphs(reads_numbers)
    made = [
        ({"nodes": OrderedDict(x=torch.ones(256, 32)), "last": 1, "kept": []}, [torch.zeros(256)]) for _ in range(3)
    ]
    optimised = ogc.optimize(model, made[0], memory_budget="least")
    assert list(made[0][0]) == ["nodes", "last", "kept"] and len(made[0][1]) == 1, "the sample is as it was"
    for run, (data, found) in ((model, made[1]), (optimised, made[2])):
        nodes, kept = data["nodes"], data["kept"]
        result = run(data, found)
        assert result is nodes is data["nodes"] and data["all"] is found and data["kept"] is kept
        assert list(data) == ["nodes", "kept", "last", "all"] and len(found) == 7
    assert optimised.report().planned
    ours, plain = (tree_leaves(one) for one in (made[2], made[1]))
    assert all(map(torch.equal, ours, plain))
    grads = [
        torch.autograd.grad(sum(t.sum() for t in of if t.requires_grad), list(model.parameters()))
        for of in (ours, plain)
    ]
    assert all(map(torch.equal, *grads))


class Fills(nn.Module):
    """Writes into two lists, which may be one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))

    def forward(self, x, one, other):
        for layer in self.layers:
            x = torch.tanh(layer(x)).sin()
            one.append(x)
            other[0] = x.mean()
        return x * 2 if one is other else x


@pytest.mark.parametrize("is_one", [True, False])
def test_lists_that_are_written_may_be_one(is_one):
    model, x = Fills(), torch.randn(64, 16)
    sample = [torch.zeros(64, 16)]
    optimised = ogc.optimize(model, (x, sample, sample if is_one else [1]), memory_budget="least")
    assert not optimised.plan.is_plain
    for together in (is_one, not is_one):
        found = []
        for run in (model, optimised):
            one = [torch.zeros(64, 16)]
            other = one if together else [1]
            result = run(x, one, other)
            tensors = [result, *one, *other]
            ends = [t.square().sum() for t in tensors if t.requires_grad]
            found.append([*tensors, *torch.autograd.grad(sum(ends), list(model.parameters()))])
        assert all(map(torch.equal, *found))
    assert optimised.report().plain == 0


def test_what_cannot_be_written_again_is_seen_beside_lists_that_can():
    class Appends(nn.Linear):
        def forward(self, x, found, others):
            found.append(super().forward(x))
            others.append(found[-1].tanh())
            return others[-1] * 2

    with pytest.raises(ParseError, match="changes what it is given, which is no list, dict or object"):
        ogc.parse(Appends(6, 6), (X, [], deque()))


def test_a_number_in_a_list_that_becomes_another_type_is_written():
    class Says(nn.Linear):
        def forward(self, x, flags):
            flags[0] = True
            return super().forward(x).tanh()

    model, flags = Says(6, 6), [1]
    forced(model, (X, [1]))(X, flags)
    assert flags[0] is True


class ReadsShapes(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        rows, width = x.data.shape
        y = self.up(x).tanh()
        return x + self.down(y.view(y.data.shape[0], -1)).view(rows, width) * (1 + y.data.mean())


class Shapes(nn.Module):
    def __init__(self, reads_numbers):
        super().__init__()
        self.blocks, self.reads_numbers = nn.ModuleList(ReadsShapes() for _ in range(4)), reads_numbers

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if self.reads_numbers and x.sum() < -1e9:
                x = x * 2
        return x.mean()


@pytest.mark.parametrize("reads_numbers", [False, True])
def test_data_may_be_looked_at(reads_numbers):
    model, x = Shapes(reads_numbers), torch.randn(64, 32)
    optimised = ogc.optimize(model, x, profile="estimate", memory_budget="least")
    graphs = optimised.graph.values() if reads_numbers else [optimised.graph]
    assert not any(op.target.startswith("opaque") for graph in graphs for op in graph.operations)
    assert optimised.plan.peak_bytes < optimised.plan.plain_peak_bytes
    assert_same_training(model, optimised, (x,))
