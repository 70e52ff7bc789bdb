"""Autocast of CUDA on meta tensors: what is planned is what PyTorch dispatches for fake tensors on CUDA."""

from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import ogc
from ogc.program.program import call_node, get_attribute, run_nodes, tensor_leaves
from ogc.torch_state.settings import flags


class Words(nn.Module):
    """Linear layers, norms, attention, operators that want the widest type, numbers in float32, a loss."""

    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(50, 32), nn.LayerNorm(32)
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 50, bias=False)
        self.positions = nn.Parameter(torch.zeros(12, 32))

    def forward(self, ids):
        x = self.norm(self.words(ids) + self.positions)
        y = self.first(x)
        q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in (y, self.first(y), y))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        y = torch.einsum("bik,bjk->bij", y, x).softmax(-1) @ F.gelu(y)
        y = torch.addcmul(y, x, y).pow(2) + y.norm(dim=-1, keepdim=True)
        scores = self.last(torch.cat([x, y], 1)[:, :12])
        return F.cross_entropy(scores.flatten(0, 1), ids.flatten(), label_smoothing=0.1)


class Images(nn.Module):
    """Convolutions, norms and a head; a part of it is never cast."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.GroupNorm(2, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.body(x).mean((2, 3))
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            x = x.float() @ x.float().t() @ x.float()
        return F.softmax(self.head(x), -1).log()


MODELS = {"words": (Words, torch.arange(24).view(2, 12)), "images": (Images, torch.randn(5, 3, 9, 9))}


class Dispatched(TorchDispatchMode):
    """The operators below autograd, and the types of what they give."""

    only_looks = True

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.namespace == "aten":
            self.calls.append((function.name(), tuple(t.dtype for t in tensor_leaves(result))))
        return result


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=str)
def dtype(request):
    return request.param


@pytest.fixture
def on_cuda(dtype):
    """Autocast for CUDA, which torch.autocast refuses where there is none."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")

    def switch(is_on):
        torch.set_autocast_enabled("cuda", is_on)
        torch.set_autocast_dtype("cuda", dtype)

    yield switch
    torch.set_autocast_enabled("cuda", before[0])
    torch.set_autocast_dtype("cuda", before[1])
    torch.clear_autocast_cache()


def in_order(calls):
    """Casts apart, as C++ makes those of one call in the order that a compiler likes."""
    casts = [call for call in calls if call[0] == "aten::_to_copy"]
    return [call for call in calls if call not in casts], sorted(map(str, casts))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")
@pytest.mark.parametrize("name", MODELS)
def test_what_is_planned_is_what_is_dispatched_on_cuda(name, dtype, on_cuda):
    make, inputs = MODELS[name]
    with torch.autocast("cpu", dtype):
        graph = ogc.parse(make().to("meta"), inputs, device="cuda", gpu="A100")
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        model, given = make(), torch.empty(inputs.shape, dtype=inputs.dtype)
        eager, planned = Dispatched(), Dispatched()
        on_cuda(True)
        with eager:
            model(given)
        on_cuda(False)
        attribute = partial(get_attribute, model, graph.program.constants)
        with planned:
            run_nodes(graph.program.graph.nodes, [given], attribute, call_node)
    assert in_order(planned.calls) == in_order(eager.calls)
    assert ("aten::_to_copy", (dtype,)) in eager.calls


@pytest.mark.full
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_are_cast_whole(kind, dtype):
    with torch.autocast("cpu", dtype):
        graph = ogc.parse(kind(8, 16, batch_first=True), torch.randn(2, 5, 8), device="cuda")
    (layer,) = (op for op in graph.operations if op.target.startswith(("aten.lstm", "aten.gru")))
    assert max(graph.values[v].bytes for v in layer.writes) == 2 * 5 * 16 * 2


def test_a_model_with_content_is_planned_as_one_without(dtype):
    model, inputs = Images(), MODELS["images"][1]
    with torch.autocast("cpu", dtype):
        graphs = [ogc.parse(one, inputs, device="cuda") for one in (model, Images().to("meta"))]
    with_content, without = ([op.target for op in graph.operations] for graph in graphs)
    assert with_content == without
    assert graphs[0].plain_peak_bytes == graphs[1].plain_peak_bytes
    outside = ogc.parse(model, inputs, device="cuda")
    assert not any(op.target == "aten.to.dtype" for op in outside.operations[:4])


def test_what_autocast_refuses_is_its_own_error(dtype):
    class Unsafe(nn.Linear):
        def forward(self, x):
            return F.binary_cross_entropy(super().forward(x), x)

    with (
        torch.autocast("cpu", dtype),
        pytest.raises(RuntimeError, match=r"binary_cross_entropy.*unsafe to autocast"),
    ):
        ogc.parse(Unsafe(4, 4), torch.rand(2, 4), device="cuda")


@pytest.mark.full
def test_settings_are_as_before(dtype):
    before = flags(), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    with torch.autocast("cpu", dtype):
        ogc.parse(Words(), MODELS["words"][1], device="cuda")
    assert before == (flags(), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"))
