"""Which operations and values names, patterns and types of modules mean; what a plan of such a graph is."""

import random
from dataclasses import replace

import pytest
from helpers import random_decisions, random_graph

import ogc
from ogc import Graph, Operation, Value
from ogc.errors import InputError, PlanError
from ogc.plan import simulate
from ogc.plan.fast import Replay
from ogc.plan.told import Instructions, kind_of

MODULES = [
    *("stem", "layers.0.attn.q", "layers.0.attn", "layers.0.mlp.up", "layers.0.mlp.act", "layers.0"),
    *("layers.1.attn.q", "layers.1.attn", "layers.1.mlp.up", "layers.1.mlp.act", "layers.1", "head", ""),
]


class Linear:
    pass


class Activation(Linear):
    pass


def network():
    """A chain of two layers, each with a sum of its first and its last value; every value is saved by the next."""
    operations = []
    for t, module in enumerate(MODULES):
        reads = (t - 1,) if t else ()
        if module in ("layers.0", "layers.1"):
            reads = (t - 5, t - 1)
        operations.append(
            Operation(
                f"op{t}",
                module=module,
                reads=reads,
                writes=(t,),
                saves=reads[:1],
                forward_seconds=1.0,
                backward_seconds=2.0,
            )
        )
    values = tuple(Value(f"v{t}", 8, is_output=t == len(MODULES) - 1) for t in range(len(MODULES)))
    kinds = {"": ()} | {
        module: kind_of(Activation if module.endswith("act") else Linear) for module in MODULES if module
    }
    return Graph(tuple(operations), values, kinds=kinds | {"layers.0.mlp": (), "layers.1.mlp": ()})


@pytest.mark.parametrize(
    ("entries", "saved"),
    [
        (["stem"], {0}),
        (["layers.0.mlp"], {3, 4}),
        (["layers.*.attn"], {1, 2, 6, 7}),
        (["layers.0.*", "head"], {1, 2, 3, 4, 11}),
        (["*.up", ""], {*range(13)}),
        ([Activation], {4, 9}),
        ([Linear], {*range(12)}),
    ],
)
def test_what_names_patterns_and_types_mean(entries, saved):
    for argument in ("keep", "once"):
        graph = Instructions(**{argument: entries}).on(network())
        assert graph.told.saved == saved
        assert [op.replayable for op in graph.operations] == [t not in saved for t in range(len(graph))]
        assert not graph.told.recomputed


@pytest.mark.parametrize(
    ("entries", "recomputed"),
    [
        (["stem"], {0}),
        (["layers.0.mlp"], {3}),  # the activation's result is handed on
        (["layers.0.mlp", "*.act"], {3, 4, 9}),
        (["layers.*"], {1, 2, 3, 4, 6, 7, 8, 9}),
        (["head"], {11}),
        ([""], {*range(12)}),  # but what the caller holds
    ],
)
def test_a_module_with_submodules_may_keep_what_it_hands_on(entries, recomputed):
    assert Instructions(recompute=entries).on(network()).told.recomputed == recomputed


def test_the_inner_module_decides():
    graph = Instructions(keep=["layers.0.attn"], recompute=["layers.*"]).on(network())
    assert graph.told.saved == {1, 2} and graph.told.recomputed == {3, 4, 6, 7, 8, 9}
    graph = Instructions(keep=["layers.0", "layers.1.mlp.up"], recompute=["layers.0.mlp.*", "layers.1"]).on(network())
    assert graph.told.saved == {1, 2, 5, 8} and graph.told.recomputed == {3, 4, 6, 7, 9}


@pytest.mark.parametrize("other", ["keep", "once"])
@pytest.mark.parametrize("entries", [["layers.0.mlp"], ["layers.*.mlp"], ["*"], [Activation]])
def test_what_contradicts_itself_is_refused(other, entries):
    one = entries if entries in (["*"], [Activation]) else ["layers.0.mlp"]
    with pytest.raises(InputError, match=rf"{other}= and recompute= both name [\w.]+; leave one of them out"):
        ogc.solve(network(), recompute=one, **{other: entries})


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"keep": "stem"}, r"keep= must be a list of module names, patterns and types, not 'stem'"),
        ({"once": Linear}, r"once= must be a list of module names, patterns and types, not <class"),
        ({"recompute": 3}, r"recompute= must be a list of module names, patterns and types, not 3"),
        ({"keep": [3]}, r"keep= must hold module names, patterns and types, not 3"),
        ({"keep": ["layers.0.atn"]}, r"keep= no submodule is called 'layers.0.atn'; the nearest are layers.0.attn"),
        ({"once": ["blocks.*"]}, r"once= no submodule is called 'blocks.*'; the nearest are "),
        ({"recompute": [Instructions]}, r"recompute= no submodule is a 'Instructions'; the nearest are Activation"),
    ],
)
def test_what_means_nothing_is_refused(told, message):
    for ask in (ogc.solve, ogc.frontier):
        with pytest.raises(InputError, match=message):
            ask(network(), **told)


def test_a_graph_made_by_hand_knows_no_types():
    graph = Graph(network().operations, network().values)
    assert Instructions(keep=["layers.0.mlp"]).on(graph).told.saved == {3, 4}
    with pytest.raises(InputError, match="keep= this graph does not know the types of its modules"):
        ogc.solve(graph, keep=[Linear])


def test_only_the_optimal_solver_can_be_told():
    with pytest.raises(InputError, match=r"solver='chen' cannot be told keep=\['stem'\]; only 'optimal' can"):
        ogc.solve(network(), solver="chen", keep=["stem"])


@pytest.mark.parametrize("seed", range(20))
def test_compiled_code_refuses_and_weighs_what_the_simulator_does(seed):
    graph, rng = random_graph(seed, most=12), random.Random(seed)
    operations = tuple(replace(op, module=rng.choice(MODULES)) for op in graph.operations)
    graph = Graph(operations, graph.values)
    graph = Instructions(keep=["layers.0"], recompute=["layers.1", "*.act", "stem"], once=["*.q"]).on(graph)
    costs = Replay(graph)
    for _ in range(40):
        decisions = random_decisions(graph, rng)
        try:
            cost = simulate(graph, decisions)
        except PlanError:
            with pytest.raises(PlanError):
                costs(decisions)
            continue
        assert costs(decisions)[::2] == (cost.peak_bytes, cost.peak_values)
        assert costs(decisions)[1] == pytest.approx(cost.added_seconds)


def test_an_opaque_module_is_kept_for_what_it_hides(caplog):
    graph = network()
    operations = tuple(
        replace(op, target="opaque Head" if op.module == "head" else "aten.add") for op in graph.operations
    )
    kinds = {**graph.kinds, "head.proj": (), "head.norm": ()}
    graph = Graph(operations, graph.values, kinds=kinds)
    for entry in ("head.proj", "head.*"):
        assert Instructions(keep=[entry]).on(graph).told.saved == {11}
    assert not Instructions(recompute=["head.norm"]).on(graph).told
    assert "head: it is called as a whole, so that recompute=['head.norm'] cannot hold" in caplog.text


def test_names_within_a_submodule():
    told = Instructions(keep=["layers.*.attn"], recompute=[Activation, "layers.1"], once=["stem"]).named(
        network().kinds
    )
    assert str(told) == f"keep=['layers.*.attn'] and recompute=[{__name__}.Activation, 'layers.1'] and once=['stem']"
    assert told.within("layers.0") == Instructions(keep=["attn"], recompute=["mlp.act"])
    assert told.within("layers.1") == Instructions(keep=["attn"], recompute=["", "mlp.act"])
    assert told.within("layers.1.attn") == Instructions(keep=[""])
    assert told.within("head") == Instructions() and not told.within("head")
