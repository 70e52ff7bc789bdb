"""What operators save and allocate on CUDA, worked out by hand from PyTorch's sources."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import ogc
from ogc.operators.gpus import gpu_named
from ogc.parser.weigh.estimate import Estimator
from ogc.parser.weigh.record import Output, Record
from ogc.program.program import TensorRef
from ogc.sizing.cuda.kernels import of_sum

aten = torch.ops.aten


def operation(model, x, name, dtype=torch.float32):
    graph = ogc.parse(model.to("meta", dtype), x, device="cuda", profile="estimate")
    return next(op for op in graph.operations if f".{name}." in op.target)


IMAGES = torch.zeros(2, 6, 8, 8, requires_grad=True)
ROWS = torch.zeros(4, 8, 16, requires_grad=True)
SAVED = {
    "batch_norm": (nn.BatchNorm2d(6), IMAGES, 2 * 4 * 6),  # mean and deviation of each channel
    "group_norm": (nn.GroupNorm(3, 6), IMAGES, 2 * 4 * 2 * 3),
    "layer_norm": (nn.LayerNorm(16), ROWS, 2 * 4 * 4 * 8),
    "rms_norm": (nn.RMSNorm(16), ROWS, 4 * 4 * 8),
    "dropout": (nn.Dropout(0.3), ROWS, 4 * 8 * 16),  # a mask of bytes
    "max_pool2d": (nn.MaxPool2d(2), IMAGES, 8 * 2 * 6 * 4 * 4),  # indices of eight bytes
    "softmax": (nn.Softmax(-1), ROWS, 0),  # nothing but its result
}


@pytest.mark.parametrize("name", SAVED)
def test_internal_tensors(name):
    model, x, size = SAVED[name]
    assert operation(model, x, name).internal_bytes == size


def test_cross_entropy_saves_scores_made_probable_and_a_weight():
    targets = torch.zeros(32, dtype=torch.int64)
    graph = ogc.parse(
        nn.Linear(16, 50).to("meta"),
        torch.zeros(32, 16),
        device="cuda",
        loss=lambda scores: nn.functional.cross_entropy(scores, targets),
    )
    assert graph.operations[-1].internal_bytes == 4 * 32 * 50 + 4


@pytest.mark.full
@pytest.mark.parametrize(("kind", "kept"), [(nn.LSTM, 6), (nn.GRU, 5), (nn.RNN, 1)])
def test_recurrent_layers(kind, kept):
    """Gates, cells and hidden states of all steps are reserved, and a byte for each that dropout may take away."""
    model = kind(8, 6, num_layers=2, bidirectional=True, dropout=0.1, batch_first=True)
    found = operation(model, torch.zeros(4, 5, 8), {nn.RNN: "rnn_tanh"}.get(kind, kind.__name__.lower()))
    each = 4 * 5 * 6 * 2
    assert found.internal_bytes == kept * 2 * each * 4 + each
    assert found.forward_flops > 0 and found.backward_flops == 2 * found.forward_flops


def test_group_norm_works_with_sums_of_channels():
    found = operation(nn.GroupNorm(3, 6), IMAGES, "group_norm", torch.bfloat16)
    image, each = 2 * IMAGES.numel(), 4 * 2 * 6
    assert found.scratch_bytes == 2 * each
    assert found.backward_bytes - found.gradient_bytes >= image + 3 * each + 4 * 2 * 2 * 3


@pytest.mark.parametrize("words", [3072, 4000])
def test_many_words_are_sorted_for_the_gradient_of_an_embedding(words):
    found = operation(nn.Embedding(100, 16), torch.zeros(words, dtype=torch.int64), "embedding")
    gradient, parts = 4 * 100 * 16, words // 10 + 100
    more = 0 if words == 3072 else 8 * (2 * words + 300 + parts) + 4 * parts * 16
    assert found.backward_bytes - found.gradient_bytes == gradient + more


# What an H200 allocated beside the results, torch 2.11: rows, columns, MiB. For biases of BERT, AlexNet and VGG-16.
SUMS = [
    (8192, 768, 48.0),
    (8192, 3072, 132.0),
    (1024, 4096, 32.0),
    (1024, 1000, 7.8125),
    (64, 4096, 0.0),
]


@pytest.mark.parametrize(("rows", "columns", "size"), SUMS)
def test_sums_of_rows_take_what_an_h200_took(rows, columns, size):
    x = torch.empty(rows, columns, device="meta")
    assert of_sum((x, [0], True), gpu_named("H200")) == size * 2**20
    assert of_sum((x.view(4, rows // 4, columns), [0, 1], True), gpu_named("H200")) == size * 2**20


def test_other_sums_take_nothing():
    gpu, x = gpu_named("H200"), torch.empty(8192, 768, device="meta")
    for args in ((x, [1]), (x, None), (x, [0, 1]), (x.t(), [0]), (x.new_empty(0, 4), [0]), (x.new_empty(()), None)):
        assert of_sum(args, gpu) == 0


def test_the_gradient_of_a_bias_is_weighed_with_its_partial_sums():
    x = torch.empty(8192, 768, device="meta")
    made = []
    for bias in (False, True):
        layer = nn.Linear(768, 3072, bias=bias, device="meta")
        (found,) = ogc.parse(layer, x, device="cuda", profile="estimate", gpu="H200").operations
        made.append(found.backward_bytes)
    assert made[1] - made[0] == 132 * 2**20 + 4 * 3072


def test_estimates_are_those_of_the_kernel_wherever_the_model_is():
    """Attention in float32, which runs as one kernel there, and the gradient of an embedding."""
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    q = torch.randn(2, 2, 128, 32, requires_grad=True)
    weight, indices = torch.randn(9000, 8, requires_grad=True), torch.zeros(4000, dtype=torch.int64)
    for target, args in (
        (aten.scaled_dot_product_attention.default, (q, q, q)),
        (aten.embedding.default, (weight, indices)),
    ):
        node = torch.fx.Graph().call_function(target, ())
        record = Record(node)
        record.outputs = [Output(TensorRef("x", 0), q.nbytes)]
        there, here = (Estimator(cuda, home, gpu="H200").weigh(record, args, {}) for home in (cpu, cuda))
        assert here == replace(there, internal_bytes=here.internal_bytes, saves=here.saves)
