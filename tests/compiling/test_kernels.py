"""Which operators become one kernel, and what is then in memory."""

import pytest
import torch
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import gelu, layer_norm

from ogc.compiling.joint import runs_once
from ogc.compiling.kernels import Kernels, base_of, is_view
from ogc.compiling.sharing import saved_bytes, shared


def kernels(function, *shapes, fuses=True):
    with torch.no_grad():
        gm = make_fx(function, select_decomp_table(), tracing_mode="fake")(*(torch.randn(shape) for shape in shapes))
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    return [[node.target.overloadpacket.__name__ for node in k.nodes] for k in Kernels(nodes, fuses).kernels]


def test_elementwise_operators_are_one_kernel():
    assert len(kernels(lambda x: gelu(x) * x + 1, (4, 8))) == 1


def test_without_a_compiler_each_operator_is_its_own():
    assert kernels(lambda x: x.exp().sin() + 1, (4, 8), fuses=False) == [["exp"], ["sin"], ["add"]]


def test_products_stand_alone():
    found = kernels(lambda x, w: gelu((x * 2) @ w).exp(), (4, 8), (8, 8))
    assert found[0] == ["mul"] and found[1] == ["mm"] and found[2][-1] == "exp" and len(found) == 3


def test_reductions_over_the_last_dimension_go_with_what_follows():
    assert len(kernels(lambda x: layer_norm(x, (8,)) + 1, (4, 8))) == 1
    assert len(kernels(lambda x: x.softmax(-1).log(), (4, 8))) == 1


def test_reductions_over_others_end_their_loop():
    assert len(kernels(lambda x: x - x.exp().sum(0), (4, 8))) == 2


def test_what_a_product_reads_in_between_is_not_fused_across_it():
    """The sum reads the product, which reads the first exponential: these two cannot be one."""
    found = kernels(lambda x, w: (lambda e: e + e @ w)(x.exp()), (8, 8), (8, 8))
    assert found == [["exp"], ["mm"], ["add"]]


def test_views_are_no_kernels():
    assert kernels(lambda x: x.view(8, 4).t().exp(), (4, 8)) == [["exp"]]
    assert is_view(torch.ops.aten.view.default) and not is_view(torch.ops.aten.exp.default)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_without_dropout_may_run_twice(dropout):
    def attend(x):
        return torch.ops.aten._scaled_dot_product_efficient_attention(x, x, x, None, True, dropout_p=dropout)[0]

    gm = make_fx(attend, tracing_mode="fake")(torch.randn(2, 2, 4, 8, device="meta"))
    (node,) = (node for node in gm.graph.nodes if "attention" in node.name)
    assert runs_once(node) == bool(dropout)


def test_parts_of_several_views_lie_in_what_was_divided():
    gm = make_fx(lambda x: x.exp().split(2)[1].sin())(torch.randn(4, 8))
    part = next(node for node in gm.graph.nodes if node.name == "getitem_1")
    assert base_of(part).name == "exp"


@pytest.mark.parametrize("seed", range(12))
def test_graphs_share_a_budget_as_well_as_they_can(seed):
    """Beside all combinations of plans."""
    import random
    from itertools import product

    from helpers import random_graph

    from ogc.solver import frontier

    rng = random.Random(seed)
    graphs = [random_graph(rng.randrange(1000), 6) for _ in range(3)]
    graphs.append(rng.choice(graphs))
    plans = {id(graph): frontier(graph, points=12).plans for graph in graphs}

    def peak(chosen):
        before = [saved_bytes(graph, plan) for graph, plan in zip(graphs, chosen, strict=True)]
        return max(sum(before[:n]) + plan.peak_bytes for n, plan in enumerate(chosen))

    possible = [
        one for one in product(*(plans[id(graph)] for graph in graphs)) if one[3] is one[graphs.index(graphs[3])]
    ]
    for budget in sorted(map(peak, possible))[:: max(1, len(possible) // 5)]:
        best = min(sum(plan.added_seconds for plan in one) for one in possible if peak(one) <= budget)
        found = shared(graphs, budget)
        assert found is not None and peak(found) <= budget
        assert sum(plan.added_seconds for plan in found) == pytest.approx(best)
    assert shared(graphs, min(map(peak, possible)) - 1) is None
