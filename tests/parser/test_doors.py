"""The front ends beside the recorder: they give its graph and its plan, or say why they do not."""

from contextlib import suppress

import pytest
import torch
from helpers import assert_same_training
from torch import nn

import ogc
from ogc.parser import faithful
from ogc.parser.doors import script
from ogc.plan.saving import structure_of

DOORS = ("jit", "export", "dynamo")
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=["jit", *(pytest.param(name, marks=pytest.mark.full) for name in DOORS[1:])])
def door(request):
    return request.param


class Net(nn.Module):
    """What tracers write otherwise than eager: numbers, sizes, indexing, gradient modes, calls that nothing uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.BatchNorm1d(8), nn.Dropout(0.1))
        self.head = nn.Linear(8, 8)
        self.scale = 2.0
        self.held = torch.tensor(3)

    def forward(self, x):
        y = self.blocks(x)
        _ = y.exp()
        rows, columns = y.shape
        z = y.view(rows // 2, 2 * columns) * 2 + 1.5 * rows**-0.5
        left, right = z.chunk(2, 1)
        with torch.no_grad():
            mean = left.mean() * self.scale
        left = left[:, 1:5].contiguous() + left[:, :].sum() + left[:].mean() + left[..., [1, 2]].sum()
        return self.head(torch.cat([left, right[:, None, 4:].squeeze(1)], 1) - mean + self.held + torch.tensor(0.5))


@pytest.mark.parametrize("name", DOORS)
def test_a_small_model_goes_through_each(name):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    optimised = ogc.optimize(model, X, front_end=name, memory_budget="least", profile="estimate")
    assert places(optimised.graph) == places(ogc.parse(model, X, profile="estimate"))
    assert_same_training(model, optimised, (X,))


def places(graph):
    return [(op.target, op.module, op.source) for op in graph.operations]


def test_a_graph_is_the_recorders(door):
    model = Net()
    recorded = ogc.parse(model, X, profile="estimate")
    graph = ogc.parse(model, X, front_end=door, profile="estimate")
    assert structure_of(graph) == structure_of(recorded)
    assert places(graph) == places(recorded)
    assert ogc.solve(graph).decisions == ogc.solve(recorded).decisions


def test_a_model_trains_as_ever(door):
    model = Net()
    optimised = ogc.optimize(model, X, front_end=door, memory_budget="least", profile="estimate")
    assert_same_training(model, optimised, (X,))


def test_the_graph_decides_what_runs(monkeypatch):
    """Operators are those of the traced graph: one that is another there is refused."""
    known = script.overload_of

    def other(node):
        operator = known(node)
        return torch.ops.aten.sigmoid.default if operator is torch.ops.aten.tanh.default else operator

    monkeypatch.setattr(script, "overload_of", other)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    with pytest.raises(ogc.ParseError, match=r"not what the forward runs.*module '1'.*sigmoid"):
        ogc.parse(model, X, front_end="jit")
    assert ogc.parse(model, X)


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Inner()

    def forward(self, x):
        return self.layer(x).sum()


class Inner(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)

    def forward(self, x):
        y = super().forward(x)
        if torch.jit.is_tracing() or torch.compiler.is_compiling():
            return y.sigmoid()
        return y.tanh()


def test_a_branch_on_tracing_is_refused_with_module_and_line(door):
    with pytest.raises(ogc.ParseError, match=r"module 'layer', test_doors\.py:\d+.*sigmoid.*instead of.*tanh"):
        ogc.optimize(Branch(), X, front_end=door)


class Reads(nn.Module):
    """Branches on what its input holds, which a trace bakes in."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x * 2 if x.sum().item() > 0 else x * 3).tanh()


@pytest.mark.parametrize("door", ["jit"])
def test_a_number_that_a_trace_bakes_in_is_a_guard(door):
    """The trace has one side of the branch; for other data the model is parsed anew."""
    model = Reads()
    optimised = ogc.optimize(model, X.abs(), front_end=door, memory_budget="least")
    for x in (X.abs(), -X.abs()):
        assert_same_training(model, optimised, (x,))


@pytest.mark.full
@pytest.mark.parametrize("door", ["export", "dynamo"])
def test_what_reads_data_cannot_be_exported(door):
    with pytest.raises(ogc.ParseError, match=f'front_end="{door}" cannot trace the forward, which raises'):
        ogc.parse(Reads(), X, front_end=door)


class Draws(Reads):
    def forward(self, x):
        import random

        return self.layer(x * random.random()).tanh()


def test_random_numbers_of_python_are_refused(door):
    with pytest.raises(ogc.ParseError):
        ogc.parse(Draws(), X, front_end=door)


COUNT = [0]


class Counts(Reads):
    def forward(self, x):
        COUNT[0] += 1
        return self.layer(x).tanh()


def test_what_a_forward_writes_elsewhere_is_put_back(door):
    with suppress(ogc.ParseError):
        ogc.parse(Counts(), X, front_end=door)
    assert COUNT == [0]


def test_an_attribute_that_changes_later_is_seen(door):
    model = Net()
    optimised = ogc.optimize(model, X, front_end=door, memory_budget="least", profile="estimate")
    model.scale = 5.0
    assert_same_training(model, optimised, (X,))
    optimised.blocks[3].p = 0.5
    assert_same_training(model, optimised, (X,))


def test_other_sizes_are_planned_for(door):
    model = Net()
    optimised = ogc.optimize(model, X, front_end=door, memory_budget="least", profile="estimate")
    assert_same_training(model, optimised, (torch.cat([X, X]),))


def test_casts_of_autocast_are_calls(door):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        recorded = ogc.parse(model, X, profile="estimate")
        graph = ogc.parse(model, X, front_end=door, profile="estimate")
    assert structure_of(graph) == structure_of(recorded)


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


class Custom(nn.Linear):
    def forward(self, x):
        return Function.apply(super().forward(x)).tanh()


@pytest.mark.full
def test_a_custom_function_goes_through_a_trace_alone():
    model = Custom(8, 8)
    recorded = ogc.parse(model, X, profile="estimate")
    assert structure_of(ogc.parse(model, X, front_end="jit", profile="estimate")) == structure_of(recorded)
    with pytest.raises(
        ogc.ParseError, match=r"parts from the forward at aten\.mul\.Tensor \(the model, test_doors\.py:\d+\)"
    ):
        ogc.parse(model, X, front_end="export")
    with pytest.raises(ogc.ParseError, match=r"has no custom torch\.autograd\.Function.*test_doors\.py:\d+"):
        ogc.parse(model, X, front_end="dynamo")


def test_arguments_by_name_and_structures_of_results(door):
    class Pairs(nn.Linear):
        def forward(self, pair, *, flag=None, factor=1.0):
            y = super().forward(pair[0]) * factor
            return {"y": y if flag else y + pair[1], "same": pair[0]}

    model = Pairs(8, 8)
    sample = {"pair": (X, X + 1), "factor": 2.0}
    optimised = ogc.optimize(model, sample, front_end=door, memory_budget="least", profile="estimate")
    ours, plain = optimised(**sample), model(**sample)
    assert ours.keys() == plain.keys() and torch.equal(ours["y"], plain["y"]) and ours["same"] is X


# -- ScriptModules -------------------------------------------------------------------------------------------


class Loop(nn.Module):
    """Has control flow that a script keeps."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.2)
        self.times = 3

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        found = []
        for number in range(self.times):
            found.append(self.dropout(self.norm(x)) * number)
        if x.shape[0] > 1:
            x = torch.cat(found, 1)
        return x.sum()


def scripted():
    return torch.jit.script(Loop())


def traced():
    torch.manual_seed(0)
    return torch.jit.trace(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2)), X, check_trace=False)


def step(model, run, seed=0):
    torch.manual_seed(seed)
    model.zero_grad()
    out = run(X)
    out.sum().backward()
    return [out, *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers()), torch.get_rng_state()]


@pytest.mark.parametrize("make", [scripted, traced])
def test_a_script_module_trains_as_its_interpreter_runs_it(make):
    plain, model = make(), make()
    optimised = ogc.optimize(model, X, front_end="jit", memory_budget="least", profile="estimate")
    assert list(optimised.state_dict()) == list(plain.state_dict())
    with torch.jit.optimized_execution(False):
        for seed in range(3):
            assert all(map(torch.equal, step(optimised, optimised, seed), step(plain, plain, seed)))


def test_an_attribute_of_a_script_that_changes_later_is_seen():
    plain, model = scripted(), scripted()
    optimised = ogc.optimize(model, X, front_end="jit", memory_budget="least", profile="estimate")
    model.times = plain.times = 5
    with torch.jit.optimized_execution(False):
        assert all(map(torch.equal, step(optimised, optimised), step(plain, plain)))
    assert optimised.times == 5


def test_a_script_module_has_its_modules_where_a_trace_knows_them():
    graph = ogc.parse(traced(), X, front_end="jit", profile="estimate")
    assert [op.module for op in graph.operations] == ["0", "1", "2"]


def test_other_front_ends_take_no_script_module():
    with pytest.raises(ogc.InputError, match=r'pass the eager module.*or give front_end="jit"'):
        ogc.parse(scripted(), X, front_end="export")


# -- bad input -----------------------------------------------------------------------------------------------


def test_an_unknown_front_end_is_refused_with_the_known():
    for call in (ogc.parse, ogc.optimize):
        with pytest.raises(ogc.InputError, match="'record', 'jit', 'export', 'dynamo', not 'fx'"):
            call(Net(), X, front_end="fx")
    with pytest.raises(ogc.InputError, match="not 'fx'"):
        ogc.optimize(Net(), front_end="fx")


def test_a_graph_made_by_hand_has_no_front_end():
    with pytest.raises(ogc.InputError, match="both say what the program is"):
        ogc.parse(Net(), X, front_end="jit", parse_graph=lambda model, x: torch.fx.symbolic_trace(model))


def test_opaque_modules_are_refused(door):
    with pytest.raises(ogc.ParseError, match=rf"blocks \(was asked.*front_end=\"{door}\" has no opaque modules"):
        ogc.optimize(Net(), X, front_end=door, opaque_modules=["blocks"])


def test_a_model_without_content_is_refused(door):
    with torch.device("meta"):
        model, x = nn.Linear(8, 8), torch.empty(4, 8)
    with pytest.raises(ogc.InputError, match="needs a model with content"):
        ogc.parse(model, x, front_end=door, device="cuda")


def test_torch_jit_may_be_missing(monkeypatch):
    monkeypatch.delattr(torch.jit, "trace")
    with pytest.raises(ogc.ParseError, match=r"needs torch\.jit\.trace"):
        ogc.parse(Net(), X, front_end="jit")
    assert ogc.parse(Net(), X)


def test_all_front_ends_are_tested():
    assert {*DOORS, "record"} == {*faithful.FRONT_ENDS}
