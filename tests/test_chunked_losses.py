"""Losses over many classes in chunks of the rows: numbers are the plain model's up to rounding, logits never whole."""

import pytest
import torch
from helpers import measured_peak
from torch import nn
from torch.nn import functional as F

import ogc
from ogc.rewrites.chunking import Chunks
from ogc.rewrites.losses import ChunkedLoss

CLASSES, WIDTH = 600, 8


class Language(nn.Module):
    """Words to words, with a loss in its forward; returns loss and logits."""

    def __init__(self, form, head=None, dtype=torch.float32):
        super().__init__()
        self.words = nn.Embedding(CLASSES, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = head or nn.Linear(WIDTH, CLASSES)
        self.register_buffer("weights", torch.rand(CLASSES) + 0.5)
        self.form = form
        self.to(dtype)

    def forward(self, ids, labels):
        hidden = torch.tanh(self.layer(self.words(ids)))
        logits = self.head(hidden)
        return {"loss": self.form(self, logits, labels), "logits": logits}


class Column(nn.Module):
    """A linear layer whose weight has a column for each class."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, CLASSES)), nn.Parameter(torch.randn(CLASSES))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, WIDTH), self.weight).view(*x.shape[:-1], CLASSES)


class Product(nn.Module):
    """A linear layer without a bias, whose weight may be that of the words, transposed."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, CLASSES))

    def forward(self, x):
        return x @ self.weight


def flat(logits, labels):
    return logits.reshape(-1, CLASSES), labels.reshape(-1)


def shifted(logits, labels):
    return logits[:, :-1].contiguous().view(-1, CLASSES), labels[:, 1:].contiguous().view(-1)


def shares(labels):
    return F.one_hot(labels.clamp(min=0), CLASSES).float().mul(0.9).add(0.1 / CLASSES)


VARIANTS = {
    "view": lambda m, x, y: F.cross_entropy(x.view(-1, CLASSES), y.view(-1)),
    "flatten": lambda m, x, y: nn.CrossEntropyLoss(ignore_index=3)(x.flatten(0, 1), y.clamp(min=0).flatten()),
    "shifted": lambda m, x, y: F.cross_entropy(*shifted(x, y)),
    "shifted, reshaped": lambda m, x, y: F.cross_entropy(*flat(x[:, :-1], y[:, 1:])),
    "classes second": lambda m, x, y: F.cross_entropy(x.transpose(1, 2), y),
    "classes permuted": lambda m, x, y: F.cross_entropy(x.permute(0, 2, 1), y),
    "smooth": lambda m, x, y: F.cross_entropy(*flat(x, y), label_smoothing=0.1),
    "weights": lambda m, x, y: F.cross_entropy(*flat(x, y), weight=m.weights),
    "weights, smooth": lambda m, x, y: F.cross_entropy(*flat(x, y), weight=m.weights, label_smoothing=0.2),
    "sum": lambda m, x, y: F.cross_entropy(*flat(x, y), reduction="sum") / 7,
    "log_softmax": lambda m, x, y: F.nll_loss(*flat(F.log_softmax(x, -1), y)),
    "capped": lambda m, x, y: F.cross_entropy(*flat(20 * torch.tanh(x / 20), y)),
    "cast": lambda m, x, y: F.cross_entropy(*flat(x.float(), y)),
    "double": lambda m, x, y: F.cross_entropy(*flat(x.double(), y)),
    "shares": lambda m, x, y: F.cross_entropy(x.view(-1, CLASSES), shares(y).view(-1, CLASSES)),
    "scaled": lambda m, x, y: 3 * F.cross_entropy(x.view(-1, CLASSES), y.view(-1)).square(),
}


@pytest.fixture
def batch():
    ids = torch.randint(CLASSES, (2, 30))
    return ids, torch.where(ids % 5 == 0, -100, ids.roll(1))


def step(run, model, batch):
    model.zero_grad()
    loss = run(*batch)["loss"]
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def peak(run, batch):
    return measured_peak(run, batch, loss=lambda out: out["loss"], holds_outputs=True)


def chunked(model):
    return [node.target for node in model.graph.program.operations if isinstance(node.target, ChunkedLoss)]


@pytest.mark.full
@pytest.mark.parametrize("form", VARIANTS)
def test_every_form_of_the_loss_is_found_and_right(form, batch):
    model = Language(VARIANTS[form])
    plain = step(model, model, batch)
    optimised = ogc.optimize(model, batch, chunks=4, outputs="loss", memory_budget="least")
    (_,) = chunked(optimised)
    torch.testing.assert_close(step(optimised, model, batch), plain)
    assert optimised(*batch)["logits"] is None
    plan, ours, theirs = optimised.plan, peak(optimised, batch), peak(model, batch)
    assert plan.peak_bytes < plan.plain_peak_bytes * (0.7 if form == "shares" else 0.5)  # these are as wide as logits
    assert plan.peak_bytes >= 0.999 * ours and plan.plain_peak_bytes >= 0.999 * theirs
    if form not in ("shares", "weights, smooth"):
        # Where gradients of one tensor are added up inside an operator, autograd does so in place, but not while its
        # operators are watched.
        assert plan.peak_bytes == pytest.approx(ours, rel=0.01)
        assert plan.plain_peak_bytes == pytest.approx(theirs, rel=0.01)


@pytest.mark.parametrize("head", [nn.Linear(WIDTH, CLASSES, bias=False), Column(), Product()])
def test_every_form_of_the_layer_is_found(head, batch):
    model = Language(VARIANTS["shifted"], head)
    plain = step(model, model, batch)
    optimised = ogc.optimize(model, batch, chunks=5, outputs="loss", memory_budget="least")
    assert len(chunked(optimised)) == 1
    torch.testing.assert_close(step(optimised, model, batch), plain)
    assert optimised.plan.peak_bytes == pytest.approx(peak(optimised, batch), rel=0.01)


def test_the_gradient_of_a_tied_weight_is_alive_until_that_of_the_words_is_added(batch):
    model = Language(VARIANTS["view"])
    model.layer = nn.Sequential(nn.Linear(WIDTH, 400), nn.Tanh(), nn.Linear(400, WIDTH))  # the peak is in its backward
    model.head.weight = model.words.weight
    optimised = ogc.optimize(model, batch, chunks=8, outputs="loss", memory_budget=0.9)
    assert len(chunked(optimised)) == 1
    assert optimised.plan.peak_bytes == pytest.approx(peak(optimised, batch), rel=0.01)


def test_nothing_runs_twice(batch):
    model = Language(VARIANTS["view"])
    graph = ogc.parse(model, batch, outputs="loss")
    region = graph.regions[-1]
    assert region == ("linear_default_1", "cross_entropy_loss_default")
    again = ogc.parse(model, batch, outputs="loss", rewrite=Chunks([region], 4))
    assert not any(op.again_flops or op.again_seconds for op in again.operations)
    assert again.step_flops == graph.step_flops


def test_logits_that_somebody_wants_stay(batch):
    model = Language(VARIANTS["view"])
    plain = step(model, model, batch)
    graph = ogc.parse(model, batch)
    assert graph.regions[-1] == ("view_default", "cross_entropy_loss_default")  # without the layer
    optimised = ogc.optimize(model, batch, chunks=4, memory_budget="least")
    assert len(chunked(optimised)) == 1
    torch.testing.assert_close(step(optimised, model, batch), plain)
    torch.testing.assert_close(optimised(*batch)["logits"], model(*batch)["logits"])
    assert optimised.plan.peak_bytes == pytest.approx(peak(optimised, batch), rel=0.01)
    assert optimised.plan.peak_bytes < ogc.optimize(model, batch, memory_budget="least").plan.peak_bytes


def test_logits_that_the_forward_goes_on_with_stay(batch):
    model = Language(lambda m, x, y: VARIANTS["view"](m, x, y) + x.square().mean())
    plain = step(model, model, batch)
    optimised = ogc.optimize(model, batch, chunks=4, outputs="loss", memory_budget="least")
    assert not any(loss.name.startswith("sliced_linear") for loss in chunked(optimised))
    torch.testing.assert_close(step(optimised, model, batch), plain)


def test_training_goes_on_where_no_plan_runs(batch):
    model = Language(VARIANTS["view"])
    optimised = ogc.optimize(model, batch, chunks=4, outputs="loss", memory_budget="least")
    with torch.no_grad():
        assert optimised(*batch)["logits"] is not None
    shorter = tuple(t[:, :17].contiguous() for t in batch)
    plain = step(model, model, shorter)
    torch.testing.assert_close(step(optimised, model, shorter), plain)
    assert optimised(*shorter)["logits"] is None


def test_outputs_that_nobody_wants_without_slices(batch):
    model = Language(VARIANTS["view"])
    plain = step(model, model, batch)
    optimised = ogc.optimize(model, batch, outputs="loss", memory_budget="least")
    assert all(map(torch.equal, step(optimised, model, batch), plain))
    assert optimised(*batch)["logits"] is None
    assert optimised.plan.peak_bytes == pytest.approx(peak(optimised, batch), rel=0.01)
    assert optimised.plan.peak_bytes < ogc.optimize(model, batch, memory_budget="least").plan.peak_bytes
    shorter = tuple(t[:, :17].contiguous() for t in batch)
    plain = step(model, model, shorter)
    assert all(map(torch.equal, step(optimised, model, shorter), plain))
    assert optimised(*shorter)["logits"] is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, batch):
    model = Language(VARIANTS["cast"], dtype=dtype)
    plain = step(model, model, batch)
    optimised = ogc.optimize(model, batch, chunks=4, outputs="loss", memory_budget="least")
    (_,) = chunked(optimised)
    rounding = 8 * torch.finfo(dtype).eps
    for ours, theirs in zip(step(optimised, model, batch), plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rounding, atol=rounding * float(theirs.abs().max()))
    assert optimised.plan.peak_bytes == pytest.approx(peak(optimised, batch), rel=0.02)


def test_a_scaled_loss_keeps_small_gradients_in_float16(batch):
    """As with the plain model: gradients of the logits are too small for float16 before the loss is scaled."""
    model = Language(lambda m, x, y: F.cross_entropy(x.float().view(-1, CLASSES), y.view(-1)) * 1e-4)
    model.to(torch.float16)

    def gradient(run):
        model.zero_grad()
        (run(*batch)["loss"] * 2.0**20).backward()
        return model.head.weight.grad.float()

    plain = gradient(model)
    optimised = ogc.optimize(model, batch, chunks=4, outputs="loss", memory_budget="least")
    (_,) = chunked(optimised)
    torch.testing.assert_close(gradient(optimised), plain, rtol=0.02, atol=0.01 * float(plain.abs().max()))


def test_the_graph_may_be_used_again(batch):
    model = Language(VARIANTS["smooth"])
    optimised = ogc.optimize(model, batch, chunks=4, outputs="loss", memory_budget="least")
    found = []
    for run in (model, optimised):
        model.zero_grad()
        loss = run(*batch)["loss"]
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        found.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*found)


def test_frozen_layers_get_no_gradient(batch):
    model = Language(VARIANTS["view"])
    model.head.requires_grad_(False)
    optimised = ogc.optimize(model, batch, chunks=4, outputs="loss", memory_budget="least")
    (_,) = chunked(optimised)
    found = []
    for run in (model, optimised):
        model.zero_grad()
        run(*batch)["loss"].backward()
        found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    assert model.head.weight.grad is None
    torch.testing.assert_close(*([g for g in of_one if g is not None] for of_one in found))
    assert optimised.plan.peak_bytes == pytest.approx(peak(optimised, batch), rel=0.01)


@pytest.mark.full
@pytest.mark.parametrize("form", ["smooth", "weights", "capped", "sum"])
def test_gradients_and_their_gradients_are_right(form):
    model = Language(VARIANTS[form], nn.Linear(3, CLASSES)).double()
    model.layer = nn.Linear(WIDTH, 3).double()
    batch = torch.randint(CLASSES, (2, 3)), torch.randint(CLASSES, (2, 3))
    graph = ogc.parse(model, batch, outputs="loss")
    program = ogc.parse(model, batch, outputs="loss", rewrite=Chunks(graph.regions[-1:], 2)).program
    (node,) = (n for n in program.operations if isinstance(n.target, ChunkedLoss))
    rows = torch.randn(6, 3, dtype=torch.double, requires_grad=True)
    targets = torch.tensor([5, 1, -100, 7, 0, 2])
    weight = torch.randn(9, 3, dtype=torch.double, requires_grad=True)
    bias = torch.randn(9, dtype=torch.double, requires_grad=True)
    classes = None if node.args[4] is None else torch.rand(9, dtype=torch.double)
    given = rows, targets, weight, bias, classes
    assert torch.autograd.gradcheck(node.target, given)
    assert torch.autograd.gradgradcheck(node.target, given)


def test_outputs_must_hold_one_loss(batch):
    model = nn.Linear(3, 4)
    with pytest.raises(
        ogc.InputError, match=r"one number to differentiate.*of shapes \[2, 4\].*Compute the loss in its"
    ):
        ogc.optimize(model, torch.randn(2, 3), outputs="loss", memory_budget="least")
    with pytest.raises(ogc.InputError, match='outputs must be "all" or "loss", not'):
        ogc.optimize(model, torch.randn(2, 3), outputs="logits", memory_budget="least")
    assert model(torch.randn(2, 3)).shape == (2, 4)


class Scores(nn.Module):
    """Words to scores of words, without a loss."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, ids):
        return self.head(torch.tanh(self.words(ids)))


def of_words(scores, labels):
    return F.cross_entropy(*flat(scores, labels))


def test_a_loss_outside_is_taken_into_the_model(batch):
    ids, labels = batch
    model = Scores()
    optimised = ogc.optimize(model, ids, loss=of_words, targets=labels, outputs="loss", chunks=4, memory_budget="least")
    (_,) = chunked(optimised)
    assert type(optimised).__name__ == "Scores" and optimised.state_dict().keys() == model.state_dict().keys()
    for given in (labels, labels.roll(3), labels[:, :11]):
        inputs = ids[:, : given.shape[1]]
        found = []
        for loss in (of_words(model(inputs), given), optimised(inputs, targets=given)):
            model.zero_grad()
            loss.backward()
            found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        torch.testing.assert_close(*found)
    assert optimised.plan.peak_bytes < optimised.plan.plain_peak_bytes / 2
    seen = measured_peak(
        optimised, (), loss=lambda loss: loss, holds_outputs=True, named={"targets": labels, "ids": ids}
    )
    assert optimised.plan.peak_bytes == pytest.approx(seen, rel=0.01)
    with torch.no_grad():
        torch.testing.assert_close(optimised(ids), model(ids))
        torch.testing.assert_close(optimised(ids, targets=labels), of_words(model(ids), labels))


def test_a_loss_that_takes_the_output_alone_is_taken_in_too(batch):
    model = Scores()
    optimised = ogc.optimize(
        model, batch[0], loss=lambda scores: scores.square().mean(), outputs="loss", memory_budget="least"
    )
    plain = model(batch[0]).square().mean()
    assert torch.equal(optimised(batch[0]), plain)


def test_targets_without_slices_are_bitwise_the_plain_models(batch):
    ids, labels = batch
    model = Scores()
    criterion = nn.CrossEntropyLoss(weight=torch.rand(CLASSES))
    loss = lambda scores, targets: criterion(*flat(scores, targets))  # noqa: E731
    optimised = ogc.optimize(model, ids, loss=loss, targets=labels, outputs="loss", verify=True, memory_budget="least")
    assert torch.equal(optimised(ids, targets=labels), loss(model(ids), labels))
    assert ogc.check(model, ogc.optimize(model, ids, loss=loss, targets=labels, memory_budget="least"), ids).ok


def test_check_compares_the_loss_of_what_returns_that_alone(batch):
    model = Language(VARIANTS["view"])
    assert ogc.optimize(model, batch, outputs="loss", verify=True, memory_budget="least") is not None
    report = ogc.check(model, ogc.optimize(model, batch, chunks=4, outputs="loss", memory_budget="least"), *batch)
    assert not report.ok and all(difference.distance < 1e-5 for difference in report.differences)


def test_bad_losses_and_targets(batch):
    ids, labels = batch
    model = Scores()
    with pytest.raises(ogc.InputError, match="give loss= too"):
        ogc.optimize(model, ids, targets=labels, memory_budget="least")
    with pytest.raises(ogc.InputError, match=r"holds on to a tensor of shape \[2, 30\] as it is now; hand it in"):
        ogc.optimize(model, ids, loss=lambda scores: of_words(scores, labels), outputs="loss", memory_budget="least")
    trained = nn.Linear(CLASSES, 1)
    with pytest.raises(ogc.InputError, match="make it a submodule of the model"):
        ogc.optimize(model, ids, loss=lambda scores: trained(scores).mean(), outputs="loss", memory_budget="least")
    with pytest.raises(ogc.InputError, match=r"ogc\.optimize makes one with loss="):
        ogc.parse(model, ids, loss=lambda scores: scores.mean(), outputs="loss")

    class Own(Scores):
        def forward(self, ids, targets=None):
            return super().forward(ids)

    with pytest.raises(ogc.InputError, match="takes targets of its own"):
        ogc.optimize(Own(), ids, loss=of_words, targets=labels, outputs="loss", memory_budget="least")
