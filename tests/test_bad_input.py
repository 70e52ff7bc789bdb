"""What users get wrong, in one table: the kind of error, what it says, and that it changes nothing."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
import pytest
import torch
from helpers import chain
from torch import nn

import ogc
from ogc.errors import InputError, ParseError, PlanError, SolveError

X = torch.randn(6, 4)


def network() -> nn.Module:
    """What is given where nothing is wrong with the model."""
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 4))


class Of(nn.Module):
    """A layer, a buffer, and a forward that is given."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.__dict__["body"] = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


class Case(NamedTuple):
    """``run(model)`` raises ``error`` whose text, with its notes, holds ``message``."""

    name: str
    error: type[BaseException]
    message: str
    run: Callable[[Any], Any]
    make: Callable[[], Any] = network


def optimize(sample: Any = X, **options: Any) -> Callable[[Any], Any]:
    return lambda model: ogc.optimize(model, sample, **options)


def of(forward: Callable[..., Any]) -> Callable[[], nn.Module]:
    return lambda: Of(forward)


# -- models ------------------------------------------------------------------------------------------------


def branches(self, x):
    return self.layer(x) if self.layer(x).sum() > 0 else x


def raises(self, x):
    torch.rand(3)
    self.mean += 1
    raise KeyError("mine")


def deletes(self, x):
    y = self.layer(x)
    del self.layer.bias
    return y


def adds(self, x):
    if "extra" not in self._parameters:
        self.extra = nn.Parameter(torch.ones(4))
    return self.layer(x) * self.extra


def without_gradient(self, x):
    return self.layer(x).detach()


def writes_inside_a_function_under_no_grad(self, x):
    y = self.layer(x)
    with torch.no_grad():
        nn.functional.relu(y, inplace=True)
    return y


@torch.no_grad()
def under_no_grad(self, x):
    return self.layer(x)


def by_chance(self, x):
    return self.layer(x) * random.random()


def compiled():
    model = network()
    model.compile()
    return model


def half_on_meta():
    model = network()
    model[4].to("meta")
    return model


# -- the table ---------------------------------------------------------------------------------------------

GRAPH = chain([4] * 6)

CASES = [
    Case("no module", InputError, "must be a torch.nn.Module, not int", optimize(), lambda: 3),
    Case("a class", InputError, r"the class Linear; pass an instance", optimize(), lambda: nn.Linear),
    Case("a function", InputError, "must be a torch.nn.Module, not builtin", optimize(), lambda: torch.relu),
    Case(
        "scripted",
        InputError,
        "is a torch.jit.ScriptModule; pass the eager module",
        optimize(),
        lambda: torch.jit.script(nn.Linear(4, 4)),
    ),
    Case(
        "data parallel", InputError, r"is a DataParallel.*model\.module", optimize(), lambda: nn.DataParallel(network())
    ),
    Case("compiled", InputError, "was compiled.*without torch.compile", optimize(), compiled),
    Case(
        "compiled wrapper",
        InputError,
        "was compiled.*without torch.compile",
        optimize(),
        lambda: torch.compile(network()),
    ),
    Case(
        "on meta",
        InputError,
        r"parameter 0\.weight is on the meta device.*to_empty",
        optimize(),
        lambda: network().to("meta"),
    ),
    Case("in part on meta", InputError, r"4\.weight is on the meta device", optimize(), half_on_meta),
    Case(
        "lazy",
        InputError,
        r"0\.weight is not initialized.*call the model once",
        optimize(),
        lambda: nn.Sequential(nn.LazyLinear(4)),
    ),
    Case(
        "nothing to train",
        InputError,
        "no parameter of the model requires grad.*requires_grad_",
        optimize(),
        lambda: network().requires_grad_(False),
    ),
    Case("no parameters", InputError, "no parameter of the model requires grad", optimize(), nn.ReLU),
    # what its forward does
    Case(
        "branch on data",
        ParseError,
        r"bool\(\) of a tensor at .*test_bad_input.py:\d+.*torch.where",
        optimize(),
        of(branches),
    ),
    Case("own error", KeyError, r"mine.*raised by the model's own forward", optimize(), of(raises)),
    Case("deletes a parameter", ParseError, "takes the parameter layer.bias out of the model", optimize(), of(deletes)),
    Case("adds a parameter", ParseError, "makes the parameter extra; make it in __init__", optimize(), of(adds)),
    Case("no gradient", ParseError, "no output .* requires grad", optimize(), of(without_gradient)),
    Case("forward under no_grad", ParseError, "no output .* requires grad", optimize(), of(under_no_grad)),
    Case(
        "writes inside a function under no_grad",
        ParseError,
        "under no_grad, a tensor that requires grad: relu_ at .*make it out of place",
        optimize(),
        of(writes_inside_a_function_under_no_grad),
    ),
    Case("no output", ParseError, "returns no tensor", optimize(), of(lambda self, x: None)),
    Case(
        "chance in Python",
        ParseError,
        "draws random numbers of Python or numpy before .*test_bad_input.py.*Draw them with torch",
        optimize(),
        of(by_chance),
    ),
    # the sample
    Case("a list", InputError, "tuple of positional arguments or a dict of keyword arguments, not list", optimize([X])),
    Case("an array", InputError, "not ndarray", optimize(X.numpy())),
    Case("no tensor", InputError, "holds no tensor", optimize((3,))),
    Case("nothing", InputError, "holds no tensor", optimize(())),
    Case("keys that are no names", InputError, "must be names of arguments, not 1", optimize({1: X})),
    Case("elsewhere", InputError, r"is on meta, the model on cpu; move it with .to\('cpu'\)", optimize(X.to("meta"))),
    Case(
        "sparse",
        ParseError,
        "tensor 0 of sample_input is torch.sparse_coo, not dense",
        lambda model: ogc.parse(model, X.to_sparse()),
    ),
    Case(
        "missing argument",
        TypeError,
        "missing 1 required.*the model's own forward",
        optimize(),
        lambda: nn.Bilinear(4, 4, 4),
    ),
    Case("too many arguments", TypeError, "takes 2 positional.*the model's own forward", optimize((X, X))),
    Case("unknown keyword", TypeError, "unexpected keyword.*the model's own forward", optimize({"image": X})),
    Case("other width", RuntimeError, "mat1 and mat2.*the model's own forward", optimize(torch.randn(6, 5))),
    Case("other type", RuntimeError, "dtype.*the model's own forward", optimize(X.double())),
    Case(
        "in inference mode", InputError, "under torch.inference_mode.*leave it", lambda model: _in_inference_mode(model)
    ),
    # goals
    *(
        Case(f"memory_budget={goal!r}", InputError, message, optimize(memory_budget=goal))
        for goal, message in [
            ("8 apples", "bytes.*'8 apples'"),
            ("", "not ''"),
            ("-8GB", "not '-8GB'"),
            (0, "not 0"),
            (-5, "not -5"),
            (1.5, r"share in \(0, 1\].*not 1.5"),
            (0.0, "not 0.0"),
            (True, "not True"),
            (float("nan"), "not nan"),
            (float("inf"), "not inf"),
            ([1], r"not \[1\]"),
        ]
    ),
    *(
        Case(f"max_overhead={goal!r}", InputError, f"such as 0.2.*not {goal!r}", optimize(max_overhead=goal))
        for goal in [-0.1, True, float("nan"), "20%"]
    ),
    Case("solve a model", InputError, "must be a Graph, as ogc.parse", lambda model: ogc.solve(model)),
    Case("frontier of a model", InputError, "must be a Graph, as ogc.parse", lambda model: ogc.frontier(model)),
    Case("two goals", InputError, "not both", optimize(memory_budget=0.5, max_overhead=0.2)),
    Case(
        "too small a budget",
        SolveError,
        "no plan found .* the smallest peak is .* with these alive",
        optimize(memory_budget=8),
    ),
    Case("unknown solver", InputError, "'optimal'.*not 'best'", optimize(solver="best")),
    Case("no solver", InputError, "'optimal'.*not None", optimize(solver=None)),
    Case("solver without goals", InputError, "'chen' takes neither", optimize(solver="chen", memory_budget=0.5)),
    Case(
        "unknown profile", InputError, "'auto', 'time', 'estimate' or 'measure', not 'fast'", optimize(profile="fast")
    ),
    *(
        Case(
            f"chunks={chunks!r}",
            InputError,
            "must be a number of chunks, 1 for none, not",
            optimize(chunks=chunks),
        )
        for chunks in (0, -1, True, 2.0, "2", None)
    ),
    Case("chunked by another", InputError, "only 'optimal' does", optimize(chunks=2, solver="chen")),
    Case("chunked and verified", InputError, "up to rounding only", optimize(chunks=2, verify=True)),
    Case("opaque module unknown", InputError, "no submodule '5'; the nearest are", optimize(opaque_modules=["5"])),
    Case(
        "opaque module of no such type",
        InputError,
        "no submodule of the model is a 'LSTM'",
        optimize(opaque_modules=[nn.LSTM]),
    ),
    Case(
        "opaque module as text",
        InputError,
        "must be a list of module names and types, not '0'",
        optimize(opaque_modules="0"),
    ),
    Case("opaque module a number", InputError, "names and types, not 0", optimize(opaque_modules=[0])),
    # graphs by hand
    Case("parse_graph no function", InputError, "must be a function.*not 'networkx'", optimize(parse_graph="networkx")),
    Case("parse_graph missing", InputError, "Sequential has no method parse_graph", optimize(parse_graph=True)),
    Case(
        "parse_graph of nothing",
        InputError,
        "must return a torch.fx.Graph.*returned NoneType",
        optimize(parse_graph=lambda *_: None),
    ),
    Case(
        "parse_graph of other arguments", TypeError, "raised by parse_graph", optimize(parse_graph=lambda model: None)
    ),
    Case(
        "cyclic",
        ParseError,
        "cycle: 0 -> 1 -> 0",
        optimize(parse_graph=lambda *_: (nx.DiGraph([(0, 1), (1, 0)]), 0, 1)),
    ),
    Case(
        "disconnected",
        ParseError,
        "cannot be reached from the source",
        optimize(parse_graph=lambda *_: (nx.DiGraph([(0, 1), (2, 1)]), 0, 1)),
    ),
    Case(
        "unknown target",
        ParseError,
        "the target 7 is not a node",
        optimize(parse_graph=lambda *_: (nx.DiGraph([(0, 1)]), 0, 7)),
    ),
    # the steps by themselves
    Case("parse for no device", InputError, "device.*'gpu'", lambda model: ogc.parse(model, X, device="gpu")),
    Case(
        "measure elsewhere",
        InputError,
        "cannot measure for cuda",
        lambda model: ogc.parse(model, X, device="cuda", profile="measure"),
    ),
    Case("frontier budgets", InputError, "memory_budget must be", lambda model: ogc.frontier(GRAPH, budgets=["much"])),
    Case(
        "segments with a hole",
        PlanError,
        "do not cover",
        lambda model: ogc.make_plan(GRAPH, [ogc.saved(0, 2), ogc.saved(3, 6)]),
    ),
    *(
        Case(
            f"keep {name}",
            PlanError,
            f"does not make value {value} again",
            lambda model, segments=segments: ogc.make_plan(GRAPH, segments),
        )
        for name, value, segments in [
            ("no value", 99, [ogc.recomputed(0, 6, saved_values=[99])]),
            ("another segment's value", 0, [ogc.saved(0, 3), ogc.recomputed(3, 6, saved_values=[0])]),
            ("what is saved", 0, [ogc.Segment(0, 6, policies=((0, ogc.Policy.SAVED),))]),
        ]
    ),
    Case(
        "remake no value",
        PlanError,
        "value 99, which the graph lacks",
        lambda model: ogc.make_plan(GRAPH, [ogc.saved(0, 6)], recomputed_values=[99]),
    ),
    Case(
        "apply without program", PlanError, "no program to run", lambda model: ogc.apply(model, GRAPH, ogc.solve(GRAPH))
    ),
    Case(
        "apply another's plan",
        PlanError,
        "another graph",
        lambda model: ogc.apply(
            model, ogc.parse(model, X), ogc.make_plan(GRAPH, [ogc.recomputed(0, 3), ogc.saved(3, 6)])
        ),
    ),
    Case(
        "apply to another model",
        PlanError,
        "was parsed from another model",
        lambda model: ogc.apply(nn.PReLU(), ogc.parse(model, X), ogc.solve(ogc.parse(model, X))),
    ),
    Case(
        "check no module",
        InputError,
        "two torch.nn.Modules, not function",
        lambda model: ogc.check(model, lambda x: x, X),
    ),
    Case("check another", InputError, "only one of the two models has", lambda model: ogc.check(model, nn.ReLU(), X)),
]


def _in_inference_mode(model: nn.Module) -> None:
    with torch.inference_mode():
        ogc.optimize(model, X)


def seen(model: Any) -> dict[str, Any]:
    """Everything that an error must leave as it was."""
    found: dict[str, Any] = {
        "random": torch.get_rng_state().tolist(),
        "Python's random": random.getstate(),
        "numpy's random": str(np.random.get_state()),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "methods of tensors": dict(vars(torch.Tensor)),
        "calls of modules": nn.Module.__call__,
        "calls of functions": torch.autograd.Function.apply,
    }
    if not isinstance(model, nn.Module):
        return found
    for name, module in model.named_modules():
        found[f"attributes of {name}"] = {key: id(value) for key, value in vars(module).items()}
        found[f"tables of {name}"] = {
            key: list(value) for key, value in vars(module).items() if isinstance(value, dict)
        }
        found[f"training of {name}"] = module.training
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found[name] = (id(tensor), tensor.requires_grad, tensor.grad, tensor.device)
        if not tensor.is_meta and not nn.parameter.is_lazy(tensor):
            found[f"content of {name}"] = tensor.tolist()
    return found


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning", "ignore:Lazy modules"
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_mistake_is_named_and_changes_nothing(case):
    model = case.make()
    before, state = seen(model), X.clone()
    with pytest.raises(case.error) as caught:
        case.run(model)
    text = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert re.search(case.message, text, re.DOTALL), text
    after = seen(model)
    for name in before.keys() | after.keys():
        assert after.get(name) == before.get(name), name
    assert torch.equal(X, state)
