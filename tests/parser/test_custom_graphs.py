"""Graphs made by hand: every accepted form trains like the plain model, every mistake is named."""

import operator

import networkx as nx
import pytest
import torch
from helpers import assert_same_training, forced, measured_peak
from models import Residual, images
from torch import nn
from torch.nn import functional as F

import ogc
from ogc.errors import InputError, OgcError, ParseError


def by_module(model, x):
    return torch.fx.symbolic_trace(model)


def by_graph(model, x):
    return torch.fx.Tracer().trace(model)


def by_export(model, x):
    return torch.export.export(model, (x,))


def by_exported_module(model, x):
    return torch.export.export(model, (x,)).module()


def by_builder(model, x):
    build = ogc.GraphBuilder(model)
    x = build.call(model.stem, build.input("x"))
    for block in model.blocks:
        y = build.call(operator.iadd, build.call(block, x), x)
        x = build.call(F.relu, y, inplace=True)
    x = build.call(model.dropout, build.call(model.pool, x))
    return build.output(build.call(model.head, build.call(torch.flatten, x, 1)))


def by_networkx(model, x):
    graph = nx.MultiDiGraph()
    graph.add_edge("images", 0, module=model.stem)
    for k, block in enumerate(model.blocks):
        graph.add_edge(k, k + 1, module=nn.Identity())
        graph.add_edge(k, k + 1, module=block)
        graph.nodes[k + 1].update(
            cost=1,
            transition=lambda parts: torch.relu_(parts[0].add_(parts[1])),
            transition_input_order=[(k, 1), (k, 0)],
        )
    graph.add_edge(4, 5, module=lambda y: model.dropout(model.pool(y)).flatten(1))
    graph.add_edge(5, 6, module=model.head)
    return graph, "images", 6


VARIANTS = [by_module, by_graph, by_export, by_exported_module, by_builder, by_networkx]


@pytest.mark.full
@pytest.mark.parametrize("form", VARIANTS)
def test_every_form_trains_like_the_plain_model_in_less_memory(form):
    model, x = Residual(inplace=False), torch.randn(64, 3, 8, 8)
    optimised = forced(model, x, parse_graph=form)
    assert_same_training(model, optimised, (x,), steps=2)
    assert measured_peak(optimised, (x,)) < 0.8 * measured_peak(model, (x,))


@pytest.mark.full
@pytest.mark.parametrize("form", VARIANTS)
def test_every_form_weighs_what_the_forward_weighs(form):
    def weights(graph):
        return ogc.make_plan(graph, [ogc.saved(0, len(graph))]).peak_bytes, graph.step_flops

    model, x = Residual(), images()
    assert weights(ogc.parse(model, x, parse_graph=form)) == weights(ogc.parse(model, x))


class Small(nn.Module):
    """Two layers and a sum; a graph of it by hand takes few lines."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        y = torch.relu(self.first(x))
        return y + self.norm(self.second(y))


class WithItsOwnGraph(Small):
    def parse_graph(self, x):
        return published(self)


def published(model):
    graph = nx.MultiDiGraph()
    graph.add_edge(0, 1, module=model.first)
    graph.add_edge(1, 2, module=torch.relu)
    graph.add_edge(2, 3, module=nn.Identity())
    graph.add_edge(2, 3, module=lambda y: model.norm(model.second(y)))
    return graph, 0, 3


SAMPLE = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def modules_of(graph):
    return {op.module for op in graph.operations}


def test_a_models_own_method_is_used_unless_told_otherwise():
    model = WithItsOwnGraph()
    assert "edge 1 -> 2" in modules_of(ogc.parse(model, SAMPLE))
    assert "edge 1 -> 2" not in modules_of(ogc.parse(model, SAMPLE, parse_graph=False))
    assert "node 'relu'" in modules_of(ogc.parse(model, SAMPLE, parse_graph=by_graph))
    assert_same_training(model, ogc.optimize(model, SAMPLE, memory_budget="least"), (SAMPLE,))
    with pytest.raises(InputError, match="Small has no method parse_graph"):
        ogc.parse(Small(), SAMPLE, parse_graph=True)


def test_operations_name_their_node_or_edge():
    def build(model, x):
        builder = ogc.GraphBuilder(model)
        y = builder.call(torch.relu, builder.call(model.first, builder.input("x")))
        return builder.output(builder.call(torch.add, y, builder.call(model.norm, builder.call(model.second, y))))

    assert modules_of(ogc.parse(Small(), SAMPLE, parse_graph=build)) == {
        "first", "node 'relu'", "second", "norm", "node 'add'"
    }  # fmt: skip
    assert "node 3" in modules_of(ogc.parse(Small(), SAMPLE, parse_graph=lambda model, x: published(model)))


def test_keyword_inputs_and_structured_outputs():
    class Structured(Small):
        def forward(self, x, *, scale):
            y = super().forward(x)
            return {"scaled": y * scale, "all": [y, "text"]}

    def build(model, *, x, scale):
        builder = ogc.GraphBuilder(model)
        x, scale = builder.input("x"), builder.input("scale")
        y = builder.call(Small.forward, model, x)
        return builder.output([builder.call(torch.mul, y, scale), y])

    model = Structured()
    sample = {"scale": torch.tensor(2.0), "x": SAMPLE}
    optimised = ogc.optimize(model, sample, parse_graph=build, memory_budget="least")
    assert set(optimised(**sample)) == {"scaled", "all"} and optimised(**sample)["all"][1] == "text"
    for form in (lambda model, x, scale: torch.export.export(model, (), {"scale": scale, "x": x}), build):
        assert ogc.check(model, ogc.optimize(model, sample, parse_graph=form, memory_budget="least"), **sample)


def test_parameters_and_constants_may_be_arguments():
    def build(model, x):
        builder = ogc.GraphBuilder(model)
        x = builder.input("x")
        y = builder.call(torch.relu, builder.call(F.linear, x, model.first.weight, bias=model.first.bias))
        zero = builder.call(torch.mul, torch.zeros(4), 2)
        y = builder.call(torch.add, y, zero)
        return builder.output(builder.call(torch.add, y, builder.call(model.norm, builder.call(model.second, y))))

    model = Small()
    assert_same_training(model, ogc.optimize(model, SAMPLE, parse_graph=build, memory_budget="least"), (SAMPLE,))


def test_sliced_batches_use_the_graph_too():
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(12544, 2))
    x = torch.randn(8, 3, 32, 32)
    optimised = ogc.optimize(model, x, parse_graph=by_module, chunks=4, memory_budget="least")
    assert any(op.target == "chunked" for op in optimised.graph.operations)
    torch.testing.assert_close(optimised(x), model(x))


def a_cycle(graph):
    graph.add_edge(3, 1, module=nn.Identity())


def an_unreachable_node(graph):
    graph.add_edge("lost", 3, module=nn.Identity())


def a_dead_end(graph):
    graph.add_edge(2, "aside", module=nn.Identity())


def no_module(graph):
    graph.add_edge(1, 3)


def no_function(graph):
    graph.add_edge(1, 3, module=3)


def an_unknown_tail(graph):
    graph.nodes[3].update(transition=sum, transition_input_order=[(2, 0), (7, 0)])


def a_missing_tail(graph):
    graph.nodes[3].update(transition=sum, transition_input_order=[(2, 0)])


def a_foreign_module(graph):
    graph.add_edge(2, 3, module=nn.Linear(4, 4))


def another_output(graph):
    graph.add_edge(2, 3, module=nn.Identity())


def a_raising_edge(graph):
    graph.add_edge(2, 3, module=lambda y: y @ y)


def a_detached_edge(graph):
    graph.add_edge(3, 4, module=torch.Tensor.detach)


def a_detached_argument(graph):
    edge = graph.edges[1, 2, 0]
    module = edge["module"]
    edge["module"] = lambda y: module(y.detach())


def a_number(graph):
    graph.add_edge(3, 4, module=lambda y: y if y.sum() > 0 else -y)


@pytest.mark.full
@pytest.mark.parametrize(
    ("mistake", "target", "message"),
    [
        (a_cycle, 3, r"the graph has a cycle: .*3 -> 1"),
        (an_unreachable_node, 3, "node 'lost' cannot be reached from the source 0"),
        (a_dead_end, 3, "node 'aside' does not lead to the target 3"),
        (no_module, 3, r"edge 1 -> 3 has no module; give it torch.nn.Identity\(\)"),
        (no_function, 3, "edge 1 -> 3 calls 3, which is not callable"),
        (
            an_unknown_tail,
            3,
            r"node 3: transition_input_order names \(7, 0\), but the edges into it come from \(2, 0\)",
        ),
        (a_missing_tail, 3, r"node 3: transition_input_order leaves out the edge from \(2, 1\)"),
        (a_foreign_module, 3, r"edge 2 -> 3 \(2\) uses 'weight' of a Linear, which is not the model's"),
        (
            another_output,
            3,
            "node 3 gives another output 0 than the model's forward: off by up to .*, where the largest",
        ),
        (a_raising_edge, 3, r"edge 2 -> 3 \(2\) of the graph raises RuntimeError: .*mat1 and mat2 shapes"),
        (a_detached_edge, 4, "edge 3 -> 4 gives another output 0 than the model's forward: only one .* requires grad"),
        (
            a_detached_argument,
            3,
            "the graph does not give gradients to what .* it misses first.bias.* and adds nothing",
        ),
        (a_number, 4, "the forward reads numbers out of tensors"),
        (lambda graph: None, 9, "the target 9 is not a node of the graph"),
        (lambda graph: None, 0, "source and target are the same node 0"),
        (lambda graph: graph.remove_node(0), 3, "the source 0 is not a node of the graph"),
    ],
)
def test_mistakes_in_a_published_graph_are_named(mistake, target, message):
    def parse_graph(model, x):
        graph, source, _ = published(model)
        mistake(graph)
        return graph, source, target

    assert_refused(parse_graph, message, ParseError)


def test_a_transition_may_name_tails_alone():
    def parse_graph(model, x):
        graph = nx.DiGraph()
        graph.add_edge(0, 1, module=lambda x: torch.relu(model.first(x)))
        graph.add_edge(1, 2, module=lambda y: model.norm(model.second(y)))
        graph.add_edge(1, 3, module=nn.Identity())
        graph.add_edge(2, 3, module=nn.Identity())
        graph.nodes[3].update(transition=sum, transition_input_order=[1, (2, 0)])
        return graph, 0, 3

    ogc.parse(Small(), SAMPLE, parse_graph=parse_graph)


def test_a_published_graph_has_one_input():
    class Two(Small):
        def forward(self, x, y):
            return super().forward(x) + y

    with pytest.raises(ParseError, match="one input, the sample input has 2; use ogc"):
        ogc.parse(Two(), (SAMPLE, SAMPLE), parse_graph=lambda model, *inputs: published(model))


def uses_a_node_too_early(model, x):
    graph = by_graph(model, x)
    first, relu = list(graph.nodes)[1:3]
    relu.append(first)
    return graph


def uses_another_graph(model, x):
    other = ogc.GraphBuilder(model)
    stranger = other.input("x")
    build = ogc.GraphBuilder(model)
    build.input("x")
    return build.output(build.call(model.first, stranger))


def leads_nowhere(model, x):
    build = ogc.GraphBuilder(model)
    y = build.call(model.first, build.input("x"))
    build.call(model.second, y)
    return build.output(y)


def goes_on_after_the_output(model, x):
    build = ogc.GraphBuilder(model)
    build.output(build.input("x")).call(torch.relu, 1)


def has_no_output(model, x):
    return ogc.GraphBuilder(model)


def has_no_output_node(model, x):
    graph = torch.fx.Graph()
    graph.placeholder("x")
    return graph


def ignores_its_input(model, x):
    build = ogc.GraphBuilder(model)
    build.input("x")
    return build.output(build.call(model.first, SAMPLE))


def takes_too_much(model, x):
    build = ogc.GraphBuilder(model)
    build.input("x")
    return build.output(build.call(model.first, build.input("mask")))


def has_two_inputs_of_a_name(model, x):
    build = ogc.GraphBuilder(model)
    build.input("x")
    build.input("x")


def stands_for_nothing(model, x):
    graph = torch.fx.Graph()
    graph.output(graph.call_module("third", (graph.placeholder("x"),)))
    return graph


def is_of_another_model(model, x):
    return torch.fx.symbolic_trace(Small())


def uses_a_foreign_parameter(model, x):
    build = ogc.GraphBuilder(model)
    return build.output(build.call(F.linear, build.input("x"), torch.ones(4, 4, requires_grad=True)))


def hides_a_foreign_parameter(model, x):
    hidden = nn.Linear(4, 4)
    build = ogc.GraphBuilder(model)
    return build.output(build.call(hidden.forward, build.input("x")))


def has_more_outputs(model, x):
    build = ogc.GraphBuilder(model)
    y = build.call(model.forward, build.input("x"))
    return build.output((y, y))


@pytest.mark.parametrize(
    ("parse_graph", "message"),
    [
        (uses_a_node_too_early, "node 'relu' uses node 'first' before it is computed: the graph has a cycle or is out"),
        (uses_another_graph, "node 'first' uses input 'x', which belongs to another graph"),
        (leads_nowhere, "node 'second' does not lead to the output"),
        (goes_on_after_the_output, "the graph has its output already"),
        (has_no_output, "GraphBuilder that parse_graph returned has no output"),
        (has_no_output_node, "the graph has no output node"),
        (ignores_its_input, "the output of the graph does not depend on its inputs"),
        (takes_too_much, r"the graph takes \(x, mask\), the sample input does not fit: missing .* 'mask'"),
        (has_two_inputs_of_a_name, "two inputs named 'x'"),
        (stands_for_nothing, "node 'third' stands for 'third': 'Small' object has no attribute 'third'"),
        (is_of_another_model, "node 'first' uses 'weight' of a Linear, which is not the model's"),
        (uses_a_foreign_parameter, r"node 'linear' uses a tensor of shape \(4, 4\) that requires grad"),
        (hides_a_foreign_parameter, r"node 'forward' uses a tensor of shape \(4, 4\) that requires grad"),
        (has_more_outputs, "the graph gives 2 output tensors, the model's forward 1"),
    ],
)
def test_mistakes_in_a_program_are_named(parse_graph, message):
    assert_refused(parse_graph, message, ParseError)


@pytest.mark.parametrize(
    ("made", "described"),
    [
        (None, "NoneType"),
        (torch.zeros(1), "Tensor"),
        ((nx.Graph(), 0, 1), r"\(Graph, int, int\)"),
        ((nx.DiGraph(), 0), r"\(DiGraph, int\)"),
    ],
)
def test_what_is_no_graph_is_refused(made, described):
    assert_refused(
        lambda model, x: made, f"parse_graph must return a torch.fx.Graph.* it returned {described}", InputError
    )


def test_parse_graph_must_be_a_function():
    assert_refused("networkx", "parse_graph must be a function of the model and its inputs, not 'networkx'", InputError)


def test_other_buffers_are_noticed():
    def parse_graph(model, x):
        build = ogc.GraphBuilder(model)
        x = build.input("x")
        extra = build.call(model.norm, x)
        return build.output(build.call(lambda a, b: a, build.call(model.forward, x), extra))

    assert_refused(
        parse_graph, r"the graph leaves another buffer norm\.running_mean than the model's forward: off by", ParseError
    )


def test_an_error_of_parse_graph_is_passed_on_with_a_note():
    def parse_graph(model, x):
        model.norm.running_mean += 1
        torch.rand(3)
        raise KeyError("mine")

    error = assert_refused(parse_graph, "mine", KeyError)
    if hasattr(error, "__notes__"):  # Python 3.11
        assert error.__notes__ == ["ogc: this error was raised by parse_graph on the sample input."]


def assert_refused(parse_graph, message, kind):
    """The error is of this kind and text, and the model is afterwards as before."""
    model = Small()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    attributes = set(vars(model))
    with pytest.raises(kind, match=message) as caught:
        ogc.optimize(model, SAMPLE, parse_graph=parse_graph, memory_budget="least")
    assert issubclass(kind, OgcError) or kind is KeyError
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert model.training and set(vars(model)) == attributes
    return caught.value
