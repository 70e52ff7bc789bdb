"""Eager verifies what was recorded: a program that is changed in one place is refused, and the place named."""

import random
from dataclasses import replace
from queue import SimpleQueue

import pytest
import torch
from torch import nn

import ogc
from ogc.errors import ParseError
from ogc.parser.arguments import Sample
from ogc.parser.faithful import faithful_program
from ogc.parser.opaque import OpaqueModules
from ogc.parser.traced import OpaqueError
from ogc.parser.verify import verify
from ogc.program.program import WithoutGrad
from ogc.program.structures import InputSpec

aten = torch.ops.aten


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mix = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mix(x)


class Model(nn.Module):
    """Convolutions, statistics, attention, in-place and random operators, views, parts without gradients."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        )
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 5)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, images, shift):
        x = self.stem(images).flatten(2).transpose(1, 2).contiguous()
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
            scale = x.std()
        x = (x - self.mean) / (scale + 1e-3)
        for block in self.blocks:
            x = block(x).clamp(-4, 4)
        left, right = x.split(4, -1)
        x = torch.cat([right * torch.sigmoid(left), left[:, :, 1:].tanh(), right[..., :1]], -1)
        x = x.masked_fill(shift[:, None, None] > 0.5, 0.25)
        return self.head(x.mean(1)), x[:, 0]


@pytest.fixture(scope="module")
def recorded():
    torch.manual_seed(0)
    model = Model()
    sample = Sample(model, *InputSpec.of((torch.randn(4, 3, 8, 8), torch.rand(4)), {}))
    return sample, faithful_program(sample, None, OpaqueModules(model, ()))


def copied(traced):
    graph = torch.fx.Graph()
    output = graph.graph_copy(traced.graph, {})
    graph.output(output)
    return replace(traced, graph=graph)


# -- mutations: each changes a program in one place and says whether it has found one ---------------------------


def calls(graph):
    return [
        n for n in graph.nodes if n.op == "call_function" and isinstance(n.target, (torch._ops.OpOverload, WithoutGrad))
    ]


OTHERS = {
    aten.mul.Tensor: aten.div.Tensor,
    aten.div.Tensor: aten.mul.Tensor,
    aten.sub.Tensor: aten.rsub.Tensor,
    aten.sigmoid.default: aten.tanh.default,
    aten.tanh.default: aten.sigmoid.default,
    aten.relu_.default: aten.abs_.default,
    aten.gelu.default: aten.relu.default,
    aten.mean.dim: aten.sum.dim_IntList,
    aten.contiguous.default: aten.clone.default,
    aten.clamp.default: aten.clip.default,
    aten.add.Tensor: aten.sub.Tensor,
    aten.flatten.using_ints: aten.flatten.using_ints,
}


def another_operator(graph, rng):
    node = rng.choice([n for n in calls(graph) if n.target in OTHERS and OTHERS[n.target] is not n.target])
    name = "clamp" if node.target is aten.clamp.default else ""
    node.target = aten.clamp_min.default if name else OTHERS[node.target]
    if name:
        node.args = node.args[:2]
    return node


def another_scalar(graph, rng):
    def numbers(node):
        return [k for k, x in enumerate(node.args) if isinstance(x, float)]

    node = rng.choice([n for n in calls(graph) if numbers(n)])
    args, k = list(node.args), rng.choice(numbers(node))
    args[k] = args[k] * (1 + 1e-7) if args[k] else 1e-9
    node.args = tuple(args)
    return node


def another_flag(graph, rng):
    def flags(node):
        return [k for k, x in enumerate(node.args) if isinstance(x, bool)]

    node = rng.choice([n for n in calls(graph) if n.target is aten.batch_norm.default or "dropout" in str(n.target)])
    args, k = list(node.args), flags(node)[0]
    args[k] = not args[k]
    node.args = tuple(args)
    return node


def another_layout(graph, rng):
    """The same numbers at other strides."""
    node = rng.choice(
        [n for n in calls(graph) if n.meta.get("dims", 0) == 3 and n.users and not n.target._schema.is_mutable]
    )
    with graph.inserting_after(node):
        turned = graph.call_function(aten.transpose.int, (node, 0, 1))
    with graph.inserting_after(turned):
        whole = graph.call_function(aten.contiguous.default, (turned,))
    with graph.inserting_after(whole):
        back = graph.call_function(aten.transpose.int, (whole, 0, 1))
    node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not turned)
    return node


def an_operation_more(graph, rng):
    node = rng.choice([n for n in calls(graph) if n.users and not n.target._schema.is_mutable and n.meta.get("dims")])
    with graph.inserting_after(node):
        more = graph.call_function(rng.choice([aten.alias.default, aten.clone.default, aten.detach.default]), (node,))
    node.replace_all_uses_with(more, delete_user_cb=lambda user: user is not more)
    return node


def an_operation_less(graph, rng):
    same = (aten.add_.Tensor, aten.mul_.Tensor, aten.relu_.default, aten.dropout.default, aten.clamp.default)
    operator = lambda node: getattr(node.target, "operator", node.target)  # noqa: E731
    node = rng.choice([n for n in calls(graph) if operator(n) in same])
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)
    return node


def other_operands(graph, rng):
    both = [n for n in calls(graph) if n.target in (aten.sub.Tensor, aten.div.Tensor) and len(n.all_input_nodes) == 2]
    node = rng.choice(both)
    node.args = (node.args[1], node.args[0], *node.args[2:])
    return node


def other_parameters(graph, rng):
    """Of the same shape: those of another layer."""
    node, other = rng.sample([n for n in graph.find_nodes(op="get_attr") if n.target.endswith("norm.weight")], 2)
    node.target = other.target
    return node


def gradients_where_there_were_none(graph, rng):
    node = rng.choice(
        [n for n in calls(graph) if isinstance(n.target, WithoutGrad) and not n.target._schema.is_mutable]
    )
    node.target = node.target.operator
    return node


def no_gradients_where_there_were(graph, rng):
    node = rng.choice(
        [n for n in calls(graph) if n.target in (aten.linear.default, aten.mul.Tensor, aten.layer_norm.default)]
    )
    node.target = WithoutGrad(node.target)
    return node


def something_else_saved(graph, rng):
    """The same numbers from an operator that saves its operand, not its result."""
    node = rng.choice([n for n in calls(graph) if n.target in (aten.sigmoid.default, aten.tanh.default)])
    operator = aten.silu.default if node.target is aten.sigmoid.default else aten.sin.default
    with graph.inserting_before(node):
        graph.call_function(operator, (node.args[0],))
    return node


MUTATIONS = [
    another_operator,
    another_scalar,
    another_flag,
    another_layout,
    an_operation_more,
    an_operation_less,
    other_operands,
    other_parameters,
    gradients_where_there_were_none,
    no_gradients_where_there_were,
    something_else_saved,
]


def test_the_program_as_it_was_recorded_is_accepted(recorded):
    sample, traced = recorded
    verify(sample, traced)
    verify(sample, copied(traced))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(110))
def test_a_program_that_is_changed_in_one_place_is_refused(recorded, seed):
    sample, traced = recorded
    changed = copied(traced)
    MUTATIONS[seed % len(MUTATIONS)](changed.graph, random.Random(seed))
    changed.graph.lint()
    state = {name: tensor.clone() for name, tensor in sample.model.state_dict().items()}
    random_state = torch.get_rng_state()
    with pytest.raises(OpaqueError):
        verify(sample, changed)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in sample.model.state_dict().items())


def test_the_first_difference_is_named_with_its_place(recorded):
    sample, traced = recorded
    changed = copied(traced)
    (node,) = (
        n for n in calls(changed.graph) if n.target is aten.gelu.default and n.meta["module"] == "blocks.1.mix.1"
    )
    node.target = aten.silu.default
    node.kwargs = {}
    with pytest.raises(
        OpaqueError, match=r"module 'blocks.1.mix.1', test_verify.py:\d+.*aten.silu.default.*aten.gelu"
    ) as caught:
        verify(sample, changed)
    assert set(caught.value.modules) == {"blocks.1.mix.1"}


NUMBERS = SimpleQueue()


class Moody(nn.Linear):
    """Computes something else each second time, by what nobody can watch."""

    def forward(self, x):
        NUMBERS.put(None)
        return super().forward(x) * (2 if NUMBERS.qsize() % 2 else 3)


def test_a_forward_that_differs_from_time_to_time_is_refused():
    with pytest.raises(ParseError, match=r"not what the forward runs by itself.*test_verify.py:\d+"):
        ogc.parse(Moody(4, 4), torch.randn(3, 4))


class Flat(nn.Linear):
    """Asks where its weight lies, as cuDNN's recurrent layers do."""

    def forward(self, x):
        with torch.no_grad():
            torch.empty(0).set_(self.weight.untyped_storage(), 0, (self.weight.numel(),), (1,))
        return super().forward(x).relu()


def test_memory_as_an_argument_is_not_written_out_byte_by_byte(monkeypatch):
    def refused(storage):
        raise AssertionError("this takes minutes for a weight on a GPU")

    monkeypatch.setattr(torch.UntypedStorage, "__repr__", refused)
    ogc.parse(nn.Sequential(nn.Linear(4, 4), Flat(4, 4)), torch.randn(3, 4))
