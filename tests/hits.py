"""Detectors, segmenters, trackers and graph networks in small: what they compute of some rows, data decide how many.

Each is a function of a network, the features of ``ROWS`` rows and what is known of these rows; it returns a loss.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, CLASSES = 24, 16, 4


class Net(nn.Module):
    """A trunk that is worth a plan, and a head whose sizes data decide."""

    def __init__(self, head):
        super().__init__()
        self.head = head
        blocks = [
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH), nn.Sigmoid()) for _ in range(6)
        ]
        self.trunk = nn.Sequential(*blocks, nn.BatchNorm1d(WIDTH), nn.Dropout(0.1))
        self.classes, self.boxes = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 4)
        self.cell, self.message = nn.GRU(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, known):
        return self.head(self, self.trunk(x), known)


def known(hits, seed):
    """What is known of the rows: ``hits`` of them have a class above 0."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.zeros(ROWS, dtype=torch.long)
    labels[torch.randperm(ROWS, generator=g)[:hits]] = torch.randint(1, CLASSES, (hits,), generator=g)
    corners = torch.rand(ROWS, 2, generator=g) * 8
    boxes = torch.cat([corners, corners + torch.rand(ROWS, 2, generator=g) * 4 + 0.5], 1)
    return {
        "labels": labels,
        "boxes": boxes,
        "scores": torch.rand(ROWS, generator=g),
        "edges": torch.randint(0, ROWS, (2, 3 * ROWS), generator=g),
        "graphs": torch.arange(ROWS) * max(1, hits) // ROWS,
    }


HEADS = {}


def head(function):
    HEADS[function.__name__.replace("_", " ")] = function
    return function


def iou(a, b):
    inside = (
        (torch.min(a[:, None, 2:], b[None, :, 2:]) - torch.max(a[:, None, :2], b[None, :, :2])).clamp(min=0).prod(2)
    )
    areas = [(one[:, 2:] - one[:, :2]).prod(1) for one in (a, b)]
    return inside / (areas[0][:, None] + areas[1][None] - inside)


# -- detectors ---------------------------------------------------------------------------------------------


@head
def where_over_numel(net, h, known):
    hits = torch.where(known["labels"] > 0)[0]
    return (net.boxes(h)[hits] - known["boxes"][hits]).abs().sum() / hits.numel()


@head
def nonzero_as_a_tuple(net, h, known):
    (hits,) = known["labels"].nonzero(as_tuple=True)
    return F.smooth_l1_loss(net.boxes(h)[hits], known["boxes"][hits], reduction="sum") / max(1, len(hits))


@head
def focal_loss(net, h, known):
    wanted = F.one_hot(known["labels"], CLASSES).float()
    p = net.classes(h).sigmoid()
    focal = (wanted - p).square() * F.binary_cross_entropy(p, wanted, reduction="none")
    return focal.sum() / torch.argwhere(known["labels"] > 0).shape[0]


@head
def hard_negatives(net, h, known):
    losses, hits = F.cross_entropy(net.classes(h), known["labels"], reduction="none"), known["labels"] > 0
    count = min(3 * int(hits.sum()), int((~hits).sum()))
    return (losses[hits].sum() + losses[~hits].topk(count).values.sum()) / max(1, int(hits.sum()))


@head
def sampled_at_random(net, h, known):
    hits, others = (torch.where(one)[0] for one in (known["labels"] > 0, known["labels"] == 0))
    chosen = torch.cat([one[torch.randperm(one.numel())[:4]] for one in (hits, others)])
    return F.cross_entropy(net.classes(h)[chosen], known["labels"][chosen])


@head
def suppression_of_given_boxes(net, h, known):
    kept, left = [], known["scores"].argsort(descending=True)
    while left.numel():
        kept.append(left[0])
        left = left[iou(known["boxes"][left[:1]], known["boxes"][left])[0] <= 0.3]
    return net.boxes(h)[torch.stack(kept)].square().sum() / len(kept)


@head
def suppression_of_predicted_boxes(net, h, known):
    boxes = torch.cat([known["boxes"][:, :2], known["boxes"][:, 2:] + net.boxes(h)[:, 2:].sigmoid()], 1)
    scores = net.classes(h)[:, 1]
    order = scores.argsort(descending=True)
    overlaps = iou(boxes[order], boxes[order]).triu(1).max(0).values
    kept = order[(overlaps <= 0.5).nonzero()[:, 0]]
    return scores[kept].logsumexp(0) + boxes[kept].sum() / kept.numel()


@head
def matched_by_overlap(net, h, known):
    targets = known["boxes"][known["labels"] > 0]
    if not targets.shape[0]:
        return net.classes(h).square().mean()
    best, place = iou(known["boxes"], targets).max(1)
    near = best > 0.2
    return (net.boxes(h)[near] - targets[place[near]]).abs().sum() / near.sum().clamp(min=1)


@head
def centers_inside(net, h, known):
    centers = (known["boxes"][:, :2] + known["boxes"][:, 2:]) / 2
    targets = known["boxes"][known["labels"] > 0]
    inside = ((centers[:, None] > targets[None, :, :2]) & (centers[:, None] < targets[None, :, 2:])).all(2)
    rows, which = inside.nonzero().unbind(1)
    return (net.boxes(h)[rows] - targets[which]).abs().sum() / rows.unique().numel()


@head
def heatmap_in_a_loop(net, h, known):
    heat = torch.zeros(ROWS)
    for row in torch.where(known["labels"] > 0)[0].tolist():
        heat = torch.maximum(heat, torch.exp(-(torch.arange(ROWS) - row).square() / 4.0))
    return ((net.classes(h)[:, 0].sigmoid() - heat).square() * (1 - heat)).sum() / heat.eq(1).sum()


@head
def rows_in_a_loop(net, h, known):
    total = net.classes(h).square().mean()
    for row in (known["labels"] == 2).nonzero()[:, 0]:
        total = total + net.boxes(h)[row].square().sum()
    return total


@head
def greedy_matches(net, h, known):
    targets = known["boxes"][known["labels"] > 0]
    costs, boxes = torch.cdist(net.boxes(h), targets).detach(), net.boxes(h)
    total, free = boxes.square().mean(), torch.ones(ROWS, dtype=torch.bool)
    for target in range(targets.shape[0]):
        row = int(costs[:, target].masked_fill(~free, math.inf).argmin())
        free[row] = False
        total = total + (boxes[row] - targets[target]).abs().sum()
    return total


@head
def cells_by_bincount(net, h, known):
    counts = torch.bincount(known["labels"] * 2)
    return net.classes(h).square().sum() / len(counts) + h.sum() * counts.float().std()


@head
def one_row_for_each_class(net, h, known):
    members = F.one_hot(known["labels"]).float()
    means = members.T @ h / members.sum(0).clamp(min=1)[:, None]
    return torch.cdist(means, means).sum() / means.shape[0]


@head
def masked_select_of_losses(net, h, known):
    losses = F.cross_entropy(net.classes(h), known["labels"], reduction="none")
    return losses.masked_select(known["labels"] > 0).mean() + losses.mean()


# -- segmenters --------------------------------------------------------------------------------------------


@head
def ignored_rows(net, h, known):
    valid = known["labels"] != 0
    return F.cross_entropy(net.classes(h)[valid], known["labels"][valid], reduction="sum") / valid.count_nonzero()


@head
def losses_above_a_limit(net, h, known):
    losses = F.cross_entropy(net.classes(h), known["labels"], reduction="none")
    hard = losses[losses > losses.detach().median()]
    return hard.mean() if hard.numel() > 4 else losses.topk(4).values.mean()


@head
def each_instance(net, h, known):
    means = [h[known["labels"] == one].mean(0) for one in torch.unique(known["labels"])]
    return sum((a - b).square().sum() for a in means for b in means) / len(means) + h.square().mean()


@head
def classes_that_are_present(net, h, known):
    p, total = net.classes(h).softmax(1), []
    for one in known["labels"].unique().tolist():
        wanted = (known["labels"] == one).float()
        errors, order = (wanted - p[:, one]).abs().sort(descending=True)
        total.append(errors @ wanted[order].cumsum(0).div(wanted.sum()))
    return torch.stack(total).mean()


@head
def means_of_segments(net, h, known):
    found, place, counts = known["labels"].unique(return_inverse=True, return_counts=True)
    means = torch.zeros(len(found), WIDTH).index_add(0, place, h) / counts[:, None]
    return (h - means[place]).square().mean() + means.std()


@head
def voxels(net, h, known):
    cells, place = torch.unique(known["boxes"][:, :2].long(), dim=0, return_inverse=True)
    pooled = torch.full((cells.shape[0], WIDTH), -1.0).scatter_reduce(0, place[:, None].expand(-1, WIDTH), h, "amax")
    return net.classes(pooled).logsumexp(1).sum() / cells.shape[0]


@head
def uncertain_points(net, h, known):
    count = known["labels"].count_nonzero().item() // 2 + 1
    points = net.classes(h).detach().std(1).topk(count, largest=False).indices
    return F.cross_entropy(net.classes(h)[points], known["labels"][points])


@head
def written_by_a_mask(net, h, known):
    wanted = torch.zeros(ROWS, 4)
    wanted[known["labels"] > 0] = known["boxes"][known["labels"] > 0]
    return (net.boxes(h) - wanted).square().sum() / wanted.any(1).nonzero().numel()


# -- trackers ----------------------------------------------------------------------------------------------


@head
def pairs_of_frames(net, h, known):
    now, then = known["labels"][: ROWS // 2], known["labels"][ROWS // 2 :]
    i, j = ((now[:, None] == then[None]) & (now[:, None] > 0)).nonzero(as_tuple=True)
    likeness = h[: ROWS // 2][i] * h[ROWS // 2 :][j]
    return likeness.sum() / i.shape[0] + h.mean()


@head
def hardest_triplets(net, h, known):
    apart, same = torch.cdist(h, h), known["labels"][:, None] == known["labels"][None]
    anchors = (same.sum(1) > 1).nonzero().flatten()
    near = apart.masked_fill(same, math.inf).min(1).values[anchors]
    far = apart.masked_fill(~same, -math.inf).max(1).values[anchors]
    return F.relu(far - near + 0.2).sum() / anchors.numel()


@head
def packed_tracks(net, h, known):
    lengths = torch.bincount(known["labels"], minlength=CLASSES).clamp(1, 6)
    tracks = h.view(6, CLASSES, WIDTH)
    packed = nn.utils.rnn.pack_padded_sequence(tracks, lengths, enforce_sorted=False)
    states, _ = nn.utils.rnn.pad_packed_sequence(net.cell(packed)[0])
    return states.square().sum() / states.shape[0]


@head
def states_repeated(net, h, known):
    repeated = torch.repeat_interleave(h, known["labels"], 0)
    return net.classes(repeated).square().sum() / repeated.shape[0]


@head
def split_by_frames(net, h, known):
    counts = torch.bincount(known["labels"], minlength=CLASSES).tolist()
    parts = [part.mean(0) for part in h.split(counts) if part.shape[0] > 1]
    return torch.stack(parts).square().mean()


@head
def split_at_bounds(net, h, known):
    bounds = torch.searchsorted(known["scores"].sort().values, torch.tensor([0.3, 0.6]))
    return sum(part.sum() / part.shape[0] for part in torch.tensor_split(h, bounds))


@head
def only_if_seen(net, h, known):
    if (known["labels"] > 0).any():
        return net.boxes(h)[known["labels"].argmax()].square().sum()
    return net.classes(h).square().mean()


# -- graph networks ----------------------------------------------------------------------------------------


def passed(net, h, sources, targets):
    """One round of messages along edges."""
    return h.index_add(0, targets, net.message(torch.cat([h[sources], h[targets]], 1)).tanh())


@head
def messages(net, h, known):
    return net.classes(passed(net, h, *known["edges"])).square().mean()


@head
def edges_by_a_mask(net, h, known):
    sources, targets = known["edges"]
    kept = known["edges"][:, (known["labels"][sources] > 0) & (sources != targets)]
    return passed(net, h, *kept).square().sum() / kept.shape[1]


@head
def edges_at_random(net, h, known):
    kept = known["edges"][:, torch.rand(known["edges"].shape[1]) > 0.3]
    return passed(net, h, *kept).square().sum() / kept.shape[1]


@head
def radius_graph(net, h, known):
    near = torch.cdist(known["boxes"][:, :2], known["boxes"][:, :2]) < 1.5
    sources, targets = (near & ~torch.eye(ROWS, dtype=torch.bool)).nonzero().T
    return passed(net, h, sources, targets).square().sum() / (1 + sources.numel())


@head
def nearest_in_features(net, h, known):
    sources = torch.cdist(h, h).topk(3, largest=False).indices.flatten()
    return passed(net, h, sources, torch.arange(ROWS).repeat_interleave(3)).square().mean()


@head
def top_k_pooling(net, h, known):
    nodes = int((known["labels"] > 0).sum())
    score = net.classes(h)[:, 0]
    chosen = score.topk(math.ceil(0.5 * nodes)).indices
    return (h[chosen] * score[chosen].tanh()[:, None]).sum() / (1 + len(chosen))


@head
def pooled_by_score(net, h, known):
    score = net.classes(h)[:, 0].tanh()
    chosen = torch.where(score > score.mean())[0]
    is_left = torch.zeros(ROWS, dtype=torch.bool).index_fill(0, chosen, True)
    kept = known["edges"][:, is_left[known["edges"]].all(0)]
    return (passed(net, h, *kept)[chosen] * score[chosen, None]).sum() / chosen.numel()


@head
def batch_of_graphs(net, h, known):
    count = int(known["graphs"].max()) + 1
    pooled = torch.zeros(count, WIDTH).index_add(0, known["graphs"], h)
    return net.classes(pooled).square().sum() / count


@head
def nodes_of_some_degree(net, h, known):
    degrees = torch.bincount(known["edges"][0])
    return passed(net, h, *known["edges"])[: len(degrees)][degrees > 3].sum() / (degrees > 3).sum()


@head
def attention_over_runs(net, h, known):
    sources, targets = known["edges"][:, known["edges"][1].argsort(stable=True)]
    found, place, counts = targets.unique_consecutive(return_inverse=True, return_counts=True)
    weights = (h[sources] * h[targets]).sum(1).exp()
    sums = torch.segment_reduce(weights, "sum", lengths=counts)
    return (h[sources] * (weights / sums[place])[:, None]).sum() / found.numel()
