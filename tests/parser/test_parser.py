"""What the parser sees, and what it refuses."""

import warnings

import networkx as nx
import pytest
import torch
from helpers import forced
from models import CASES, Attention, Frozen, InObjects, Residual, Result, Shared, images
from torch import nn
from torch.nn import functional as F

import ogc
from ogc.errors import InputError, ParseError
from ogc.operators.registry import of
from ogc.parser.recorder.operators import SAME_OPERATOR
from ogc.torch_state.allocator import peak_bytes


def operation(graph, part):
    return next(op for op in graph.operations if part in op.target)


def test_operations_carry_their_module_and_source():
    graph = ogc.parse(Residual(), images())
    first = operation(graph, "convolution")
    assert first.module == "stem.0"
    assert operation(graph, "flatten").source.startswith("models.py:")
    assert graph.device == "cpu" and graph.profile == "estimate"


def test_saved_values_are_those_of_autograd():
    graph = ogc.parse(Residual(inplace=False), images())
    relu = operation(graph, "relu")
    assert relu.saves == relu.writes
    norm = operation(graph, "batch_norm")
    assert norm.saves == norm.reads
    assert norm.internal_bytes == 2 * 8 * 4
    pool = operation(graph, "max_pool2d")
    assert pool.low_memory.internal_bytes == 4 * 8 * 4 * 4  # places in windows, one byte each
    assert pool.internal_bytes == 8 * pool.low_memory.internal_bytes  # PyTorch's indices
    assert pool.saves == pool.reads and not pool.low_memory.saves
    add = next(op for op in graph.operations if "aten.add_.Tensor" in op.target and op.reads)
    assert add.saves == ()


def test_views_share_their_bases_value():
    graph = ogc.parse(Residual(), images())
    flatten = operation(graph, "flatten")
    assert flatten.writes == ()
    assert operation(graph, "linear").reads == flatten.reads


def test_in_place_results_take_over_their_argument():
    graph = ogc.parse(Residual(), images())
    relu = operation(graph, "relu_")
    assert relu.takes_over in relu.reads
    assert relu.writes != relu.reads


def test_in_place_through_a_view_stays_one_value():
    graph = ogc.parse(Shared(), torch.randn(5, 6))
    writes = [op for op in graph.operations if "aten.mul_" in op.target]
    assert writes and all(op.takes_over is None and op.writes == op.reads for op in writes)


def test_buffer_writes_that_change_results_are_not_replayable():
    graph = ogc.parse(Frozen(), images())
    assert not operation(graph, "aten.add_.Tensor").replayable
    assert operation(graph, "batch_norm").replayable
    assert operation(graph, "instance_norm").replayable


def test_the_weights_add_up():
    graph = ogc.parse(Residual(), images())
    convolution = operation(graph, "convolution")
    flops = 2 * 4 * 8 * 64 * 3 * 9
    assert convolution.forward_flops == flops
    assert convolution.backward_flops == flops  # no gradient for the images
    assert all(op.forward_seconds >= 0 for op in graph.operations)
    assert 0 < graph.forward_seconds < graph.step_seconds


def described(tensors):
    return [None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(4, 8), (4, 8, 5, 5), (2, 3, 4, 5, 6)])
def test_batch_norm_on_meta_tensors_is_as_pytorch_finds_it(shape, dtype, training):
    forward, backward = torch.ops.aten.native_batch_norm.default, torch.ops.aten.native_batch_norm_backward.default
    plain = torch.empty(shape, dtype=dtype, device="meta")
    for image in (plain, plain.transpose(0, -1).contiguous().transpose(0, -1)):
        weight, mean = (torch.empty(shape[1], device="meta") for _ in range(2))
        args = (image, weight, weight, mean, mean, training, 0.1, 1e-5)
        result = forward(*args)
        assert described(of(forward).on_meta(*args)) == described(result)
        args = (result[0], image, weight, mean, mean, *result[1:], training, 1e-5, [True, False, True])
        assert described(of(backward).on_meta(*args)) == described(backward(*args))


@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize(("width", "stride", "padding", "dilation"), [(1, 1, 0, 1), (3, 2, 1, 1), (2, 3, 1, 2)])
@pytest.mark.parametrize(("dims", "transposed"), [(1, False), (2, False), (2, True), (3, False)])
def test_convolution_on_meta_tensors_is_as_pytorch_finds_it(
    dims, transposed, channels, width, stride, padding, dilation
):
    forward, backward = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
    plain = torch.empty(2, channels, *(7, 8, 9)[:dims], device="meta")
    kernel = torch.empty((channels, 6) if transposed else (6, channels), device="meta")[(..., *[None] * dims)]
    kernel = kernel.expand(*kernel.shape[:2], *[width] * dims).contiguous()
    settings = ([stride] * dims, [padding] * dims, [dilation], transposed, [0] * dims, 1)
    for image in (plain, plain.transpose(1, -1).contiguous().transpose(1, -1)):
        for some in (settings, (*settings[:2], [dilation] * dims, *settings[3:])):
            result = forward(image, kernel, None, *some)
            assert described([of(forward).on_meta(image, kernel, None, *some)]) == described([result])
            args = (result, image, kernel, [6], *some, [True, True, False])
            assert described(of(backward).on_meta(*args)) == described(backward(*args))


@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 1, 0, 2)])
def test_simple_operators_on_meta_tensors_are_as_pytorch_finds_them(first, order):
    aten = torch.ops.aten
    a, b = (torch.empty(4, 8, 5, 6, dtype=dtype, device="meta") for dtype in (first, torch.float32))
    for x in (a, a.contiguous(memory_format=torch.channels_last), a.permute(order), a[:, ::2], a[:1].expand_as(a)):
        y = torch.empty_like(b[:, : x.shape[1]]) if x.shape[0] == 4 and x.shape[2:] == b.shape[2:] else x
        flat = torch.empty(0, dtype=first, device="meta")
        calls = [
            (aten.relu.default, (x,)),
            (aten.threshold_backward.default, (x, y, 0)),
            (aten.threshold_backward.default, (y, x, 0)),
            *((aten.cat.default, tensors) for tensors in (([x],), ([x, y], 1), ([x, x], -1), ([x, flat], 2))),
        ]
        for operator, args in calls:
            assert described([of(operator).on_meta(*args)]) == described([operator(*args)])


def test_export_to_networkx_is_a_dag_over_all_operations():
    graph = ogc.parse(Residual(), images())
    dag = graph.to_networkx()
    assert nx.is_directed_acyclic_graph(dag)
    assert len(dag) == len(graph)
    assert all(data["bytes"] > 0 for _, _, data in dag.edges(data=True))


def test_tracing_needs_no_more_memory_than_inference():
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(12)))
    x = torch.randn(8, 8, 32, 32)

    def infer():
        with torch.no_grad():
            model(x)

    infer()
    inference = peak_bytes(infer, "cpu")
    size = x.numel() * x.element_size()
    # Beyond inference: a copy of the input, kernels' copies, the outputs of two runs, and random states.
    states = 4 * torch.get_rng_state().numel()
    assert peak_bytes(lambda: ogc.parse(model, x, profile="estimate"), "cpu") <= inference + 3 * size + states


def test_measuring_gives_times_and_the_same_structure():
    model = Residual()
    estimated = ogc.parse(model, images(), profile="estimate")
    measured = ogc.parse(model, images(), profile="measure")
    assert [op.saves for op in measured.operations] == [op.saves for op in estimated.operations]
    assert measured.profile == "measure"
    assert operation(measured, "convolution").backward_seconds > 0


def test_a_device_that_is_not_here_can_be_planned_for():
    graph = ogc.parse(Residual(), images(), device="cuda")
    assert graph.device == "cuda"
    assert operation(graph, "dropout").internal_bytes == 4 * 8 * 4 * 4  # a byte each, a float each on CPU
    assert operation(ogc.parse(Residual(), images()), "dropout").internal_bytes == 4 * 8 * 4 * 4 * 4


@pytest.mark.parametrize("name", CASES)
def test_parsing_leaves_the_model_as_it_was(name):
    make, inputs = CASES[name]
    model = make()
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    flags = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    ogc.parse(model, inputs())
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


def test_no_warning_of_torch_jit_reaches_the_user():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ogc.parse(Residual(), images())


# -- bad input ---------------------------------------------------------------------------------------


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen.add_(1)
        y = self.layer(nn.functional.dropout(x, 0.5))
        if y.sum() > 0:
            y = y * 2
        return y


class SizeBranch(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        if x.shape[0] > 2 and x.size(1) % 2 == 0:
            x = x.reshape(x.shape[0] // 2 * 2, -1)
        return self.layer(x)


class Raises(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        raise KeyError("the model's own words")


class Reassigns(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean = self.mean * 0.9 + x.mean(0).detach() * 0.1
        return self.layer(x - self.mean)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return Double.apply(self.layer(x))


class WritesSaved(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = torch.sigmoid(self.layer(x))
        y.mul_(2)
        return y


class InPlaceWithoutGrad(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x)
        with torch.no_grad():
            y.mul_(2)
        return y


class Nothing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return None


X = torch.randn(4, 4)


@pytest.mark.parametrize(
    ("make", "sample", "error", "message"),
    [
        (lambda: 3, X, InputError, "must be a torch.nn.Module, not int"),
        (lambda: nn.Linear(4, 4), [X], InputError, "not list"),
        (lambda: nn.Linear(4, 4), "x", InputError, "not str"),
        (lambda: nn.Linear(4, 4), (3,), InputError, "holds no tensor"),
        (lambda: nn.Linear(4, 4), X.to("meta"), InputError, r"is on meta, the model on cpu; move it with .to\('cpu'\)"),
        (lambda: nn.Linear(4, 4).requires_grad_(False), X, InputError, "no parameter of the model requires grad"),
        (lambda: nn.ReLU(), X, InputError, "no parameter of the model requires grad"),
        (Branch, X, ParseError, r"bool\(\) of a tensor at .*test_parser.py:\d+.*torch.where"),
        (Raises, X, KeyError, "the model's own words"),
        (Reassigns, X, ParseError, "assigns a new tensor to the buffer mean.*copy_"),
        (WritesSaved, X, ParseError, "which autograd refuses"),
        (InPlaceWithoutGrad, X, ParseError, "in place, under no_grad"),
        (Nothing, X, ParseError, "returns no tensor"),
    ],
)
def test_bad_input_gets_a_clear_error_and_changes_nothing(make, sample, error, message):
    model = make()
    if isinstance(model, nn.Module):
        state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        identities = {key: id(tensor) for key, tensor in model.named_buffers()}
    random = torch.get_rng_state()
    with pytest.raises(error, match=message):
        ogc.optimize(model, sample, memory_budget="least")
    assert torch.equal(random, torch.get_rng_state())
    if isinstance(model, nn.Module):
        assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
        assert {key: id(tensor) for key, tensor in model.named_buffers()} == identities
        assert model.training and "forward" not in vars(model)


def test_the_models_own_error_says_whose_it_is():
    with pytest.raises(KeyError) as caught:
        ogc.optimize(Raises(), X, memory_budget="least")
    assert any("the model's own forward" in note for note in caught.value.__notes__)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = self.second = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return x @ self.first @ self.second


def test_a_parameter_may_have_two_names():
    optimised = ogc.optimize(Twice(), X, memory_budget="least")
    assert torch.equal(optimised(X), Twice.forward(optimised, X))


def signatures(name):
    packet = getattr(torch.ops.aten, name)
    return {str(getattr(packet, overload)._schema).partition("(")[2] for overload in packet.overloads()}


def test_operators_of_two_names_are_one():
    names = {name: usual for name, usual in SAME_OPERATOR.items() if hasattr(torch.ops.aten, name)}
    assert len(names) > 40 and all(signatures(name) <= signatures(usual) for name, usual in names.items())
    graph = ogc.parse(TwoNames(), X)
    targets = ["aten.linear.default", "aten.mul.Tensor", "aten.clamp.default", "aten.cat.default"]
    assert [op.target for op in graph.operations] == targets


class TwoNames(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        y = super().forward(x)
        return torch.concat([torch.multiply(y, y), torch.clip(y, 0)])


def test_checks_of_sizes_in_norms_are_no_part_of_the_graph():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4))
    checks = F._verify_batch_size
    optimised = ogc.optimize(model, X, memory_budget="least")
    assert F._verify_batch_size is checks
    assert not any("size" in op.target for op in optimised.plan.graph.operations)
    assert torch.equal(optimised(X[:3]), model(X[:3]))
    for run in (model, optimised):
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            run(X[:1])


def test_control_flow_on_sizes_is_fine():
    optimised = ogc.optimize(SizeBranch(), X, memory_budget="least")
    assert torch.equal(optimised(X), SizeBranch.forward(optimised, X))


class OneHot(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.classes = classes
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return F.one_hot(self.layer(x).argmax(1), self.classes) * self.layer(x).sum()


def test_the_shape_of_one_hot_is_fixed_where_the_number_of_classes_is():
    optimised = ogc.optimize(OneHot(4), X, memory_budget="least")
    assert torch.equal(optimised(X), OneHot.forward(optimised, X))
    with pytest.raises(ParseError, match="one_hot, whose result has a shape that depends on the data"):
        ogc.optimize(OneHot(-1), X, memory_budget="least")


def test_unknown_profile_and_impossible_measurement():
    with pytest.raises(InputError, match="'auto', 'time', 'estimate' or 'measure', not 'guess'"):
        ogc.parse(nn.Linear(4, 4), X, profile="guess")
    with pytest.raises(InputError, match="cannot measure for cuda"):
        ogc.parse(nn.Linear(4, 4), X, profile="measure", device="cuda")


def test_attention_is_parsed_with_its_log_sum_exp():
    graph = ogc.parse(Attention(), torch.zeros(2, 10, dtype=torch.long))
    attention = operation(graph, "scaled_dot_product_attention")
    assert attention.internal_bytes > 0 and len(attention.saves) > 0


@pytest.mark.full
def test_shapes_that_depend_on_the_data_are_refused():
    class Picks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            x = self.layer(x)
            return x[x > 0] if self.masked else x[(x[:, 0] > 0).nonzero()]

    for masked, what in [(True, "aten::index"), (False, "aten::nonzero")]:
        model = Picks()
        model.masked = masked
        with pytest.raises(ParseError, match=f"{what}, whose result has a shape that depends on the data"):
            ogc.parse(model, torch.randn(5, 6))


def test_objects_among_the_outputs_are_made_anew():
    model, sample = InObjects().train(), torch.randn(5, 6)
    optimised = forced(model, sample)
    first, second = optimised(sample), optimised(sample * 2)
    assert type(first[0]) is Result and first[0].label == "inside"
    assert first[0] is not second[0]
    assert torch.equal(second[0].logits, sample * 2)
    assert torch.equal(second[0].layers[-1] * 2, second[1]["outside"])
