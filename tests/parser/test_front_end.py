"""A front end is one function that gives a ``Traced``: one of thirty lines takes the recorder's place in all of ogc."""

import operator
import warnings

import pytest
import torch
from helpers import assert_same_training
from torch import nn

import ogc
from ogc.parser import faithful
from ogc.parser.forward.flat import FlatForward
from ogc.parser.traced import RecordAgain, Traced

aten = torch.ops.aten
OPERATORS = {nn.Linear: aten.linear.default, nn.Tanh: aten.tanh.default, nn.LayerNorm: aten.layer_norm.default}
X = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.LayerNorm(32)) for _ in range(6)))
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.blocks(x) + x)


class ByName:
    """Reads what ``torch.fx`` sees of a model: calls of layers, by the names of their classes, and sums."""

    def __init__(self, operators=OPERATORS):
        self.operators = operators
        self.calls = 0

    def __call__(self, sample, forward, opaque, is_careful):
        self.calls += 1
        flat = FlatForward(forward, sample.spec)
        flat.run(sample.tensors)
        graph, nodes = torch.fx.Graph(), {}
        for node in torch.fx.symbolic_trace(sample.model).graph.nodes:
            nodes[node] = self.copy(graph, sample.model, node, nodes)
        return Traced(graph, {}, flat.output_spec, flat.outputs, flat.requires_grad, flat.grad_targets)

    def copy(self, graph, model, node, nodes):
        if node.op == "placeholder":
            return graph.placeholder(node.name)
        if node.op == "output":
            return graph.output((nodes[node.args[0]],))
        given = [nodes[used] for used in node.all_input_nodes]
        target, module = aten.add.Tensor, ""
        if node.target is not operator.add:
            module = node.target
            layer = model.get_submodule(module)
            target = self.operators[type(layer)]
            given += [layer.normalized_shape] if isinstance(layer, nn.LayerNorm) else []
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # fx warns that its graph has no owning module
                given += [graph.get_attr(f"{module}.{name}") for name, _ in layer.named_parameters()]
        call = graph.call_function(target, tuple(given))
        call.meta.update(module=module, source="")
        return call


@pytest.fixture
def put(monkeypatch):
    """Puts a front end in the place of the recorder."""

    def put(front_end):
        monkeypatch.setitem(faithful.FRONT_ENDS, "record", front_end)
        return front_end

    return put


def test_another_front_end_gives_the_same_graph(put):
    def described(graph):
        return [(str(op.target), op.module, op.reads, op.writes, op.saves) for op in graph.operations]

    recorded = described(ogc.parse(Net(), X))
    toy = put(ByName())
    assert described(ogc.parse(Net(), X)) == recorded
    assert toy.calls == 1


def test_a_model_is_optimized_by_another_front_end(put):
    toy = put(ByName())
    model = Net()
    optimised = ogc.optimize(model, X, memory_budget=0.7)
    assert toy.calls == 1
    assert optimised.plan.recomputed_seconds > 0
    assert_same_training(model, optimised, (X,))


def test_the_judge_refuses_what_another_front_end_reads_wrongly(put):
    put(ByName(OPERATORS | {nn.Tanh: aten.sigmoid.default}))
    with pytest.raises(ogc.OgcError, match="not what the forward runs by itself"):
        ogc.parse(Net(), X)


def test_a_front_end_is_called_until_it_knows_how(put):
    class Careful(ByName):
        def __call__(self, *args, is_careful):
            if not is_careful:
                raise RecordAgain(True)
            return super().__call__(*args, is_careful)

    assert put(Careful()) and ogc.parse(Net(), X)
