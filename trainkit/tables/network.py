"""A network for the rows of a table: a linear model, and what members that share weights add to it.

Numbers are embedded piecewise (Gorishniy and others, 2022, arXiv:2203.05556), and members share
most of their weights (Gorishniy and others, 2024, TabM, arXiv:2410.24210). Each group of members
does not learn from one fold of the rows, which decides how far the members are trusted.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from trainkit.numbers.loaders import InMemory
from trainkit.repairs.private_names import as_it_was

NUM_FOLDS, NUM_MEMBERS, WIDTH = 4, 4, 128  # of the rows; of a group, which is one for each fold
NUM_BINS = 16  # of a number, with as many rows in each
SCALES = torch.linspace(0, 1, 21)  # of what the members add
NUM_JUDGED = 2000  # rows that decide between them, at most
PENALTIES = torch.logspace(-2, 5, 15, dtype=torch.float64)  # of ridge regression
NUM_STEPS = 1000  # about as many are taken by default


class TabM(nn.Module):
    """Maps features, (rows, features), to outputs, (rows, outputs).

    They are those of the linear model plus `scale` times the mean of the members. While it trains
    it returns the outputs of the members that may learn from each row, (rows, members, outputs),
    and each has a loss of its own.

    Args:
        num_outputs: numbers, or logits.
        edges: for each feature those of its bins, as find_edges returns them.
    """

    bins: Tensor  # the feature of each bin, and its two edges
    scale: Tensor

    def __init__(self, num_outputs: int, edges: list[list[float]]):
        super().__init__()
        bins = [(n, *pair) for n, limits in enumerate(edges) for pair in pairwise(limits)]
        self.register_buffer("bins", torch.tensor(bins).view(-1, 3), persistent=False)
        # Of the rows without each fold, which the members of a group add to; the last of all rows.
        self.register_buffer("weight", torch.zeros(NUM_FOLDS + 1, num_outputs, len(edges)))
        self.register_buffer("bias", torch.zeros(NUM_FOLDS + 1, num_outputs))
        self.register_buffer("scale", torch.zeros(()))
        num_inputs = len(edges) + len(bins)
        groups = NUM_FOLDS, NUM_MEMBERS, 1
        signs = torch.empty(*groups, num_inputs).random_(0, 2).mul_(2).sub_(1)
        self.signs = nn.Parameter(signs)  # of the inputs of each member, which makes them differ
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for width in (num_inputs, WIDTH):
            bound = width**-0.5  # as nn.Linear has it
            for part, size in ((self.weights, width), (self.biases, 1)):
                part.append(torch.empty(NUM_FOLDS, size, WIDTH).uniform_(-bound, bound))
        self.gains = nn.Parameter(torch.ones(2, *groups, WIDTH))
        self.last = nn.Parameter(torch.zeros(*groups[:2], WIDTH, num_outputs))
        self.shift = nn.Parameter(torch.zeros(*groups, num_outputs))

    def forward(self, features: Tensor, fold: Tensor | None = None) -> Any:
        """fold: of each row, for training. Evaluated with it, return what judges the members.

        That is what the linear model and the members say who do not know the row, on average.
        """
        column, low, high = self.bins.T
        position = (features[:, column.long()] - low) / (high - low)
        inputs = torch.cat((features, position.clamp(0, 1)), 1)
        states = inputs * self.signs  # (folds, members of a group, rows, inputs)
        for weight, bias, gain in zip(self.weights, self.biases, self.gains, strict=True):
            sums = torch.baddbmm(bias, states.flatten(1, 2), weight)
            states = F.relu(sums).view(*states.shape[:3], WIDTH) * gain
        members = states @ self.last + self.shift
        if fold is None:
            linear = F.linear(features, self.weight[-1], self.bias[-1])
            return linear + self.scale * members.mean((0, 1))
        row = torch.arange(len(features), device=features.device)[:, None]
        linear = torch.einsum("nd,god->ngo", features, self.weight[:-1]) + self.bias[:-1]
        if not self.training:
            return linear[row[:, 0], fold], members.mean(1)[fold, row[:, 0]]
        others = torch.arange(NUM_FOLDS - 1, device=features.device)
        others = others + (others >= fold[:, None])  # all groups but the one of the row's fold
        outputs = linear[:, :, None] + members.permute(2, 0, 1, 3)
        return outputs[row, others].flatten(1, 2)


def find_edges(features: Tensor) -> list[list[float]]:
    """Return for each feature the edges of bins with equally many rows, or none for two values."""
    shares = torch.linspace(0, 1, NUM_BINS + 1, dtype=torch.float64)
    quantiles = [column.double().quantile(shares).float().unique() for column in features.T]
    return [edges.tolist() if len(edges) > 2 else [] for edges in quantiles]


def fit_ridge(features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight and bias of ridge regression; leave-one-out errors choose its penalty.

    features: (rows, features), float64. targets: (rows, outputs), each with its own penalty.
    """
    mean, middle = features.mean(0), targets.mean(0)
    left, values, right = torch.linalg.svd(features - mean, full_matrices=False)
    kept = values > 1e-8 * values.max().clamp(min=1e-300)
    left, values, right = left[:, kept], values[kept], right[kept]
    centred = targets - middle
    shadow = left.T @ centred
    weights = []
    errors = []
    for penalty in PENALTIES:
        shrunk = values**2 / (values**2 + penalty)
        leverage = left**2 @ shrunk + 1 / len(features)
        residual = centred - left @ (shrunk[:, None] * shadow)
        errors.append((residual / (1 - leverage).clamp(min=1e-9)[:, None]).square().mean(0))
        weights.append(right.T @ (shadow * (values / (values**2 + penalty))[:, None]))
    best = torch.stack(errors).argmin(0)
    weight = torch.stack([weights[number][:, n] for n, number in enumerate(best.tolist())])
    return weight, middle - weight @ mean


def fit_logistic(features: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return weight and bias of logistic regression with an L2 penalty of 1, as scikit-learn's."""
    weight = torch.zeros(num_classes, features.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(num_classes, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=300, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def compute_loss() -> Tensor:
        optimizer.zero_grad()
        logits = F.linear(features, weight, bias)
        loss = F.cross_entropy(logits, labels, reduction="sum") + weight.square().sum() / 2
        loss = loss / len(labels)
        loss.backward()
        return loss

    optimizer.step(compute_loss)
    return weight.detach(), bias.detach()


def start_linear(model: TabM, train_set: InMemory) -> None:
    """Solve the linear models of the network, in float64, so that all processes get the same.

    They are ridge regression for targets that are numbers, and logistic regression for classes.
    """
    features, targets, fold = train_set.tensors
    for left_out in range(NUM_FOLDS + 1):  # the last one leaves out none
        kept = fold != left_out
        if kept.any():
            rows = features[kept].double()
            if targets.is_floating_point():
                weight, bias = fit_ridge(rows, targets[kept].double())
            else:
                weight, bias = fit_logistic(rows, targets[kept], len(model.bias[0]))
            model.weight[left_out] = weight.float()
            model.bias[left_out] = bias.float()


@torch.no_grad()
def set_scale(
    accelerator: Accelerator,
    model: nn.Module,
    train_set: InMemory,
    losses: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Trust the members as far as they help with rows that they do not know.

    The scale is the smallest whose loss is not worse than that of the best one by more than half a
    standard error. losses: of outputs and targets, unreduced. Every process must call this.
    """
    num = len(train_set)
    judged = torch.linspace(0, num - 1, min(num, NUM_JUDGED), dtype=torch.float64).long()
    features, targets, fold = (tensor[judged] for tensor in train_set.tensors)
    model.eval()
    parts = []
    for rows in torch.arange(len(judged)).split(256):
        batch = (tensor[rows].to(accelerator.device) for tensor in (features, fold))
        parts.append([part.float().cpu() for part in model(*batch)])
    model.train()
    linear, added = map(torch.cat, zip(*parts, strict=True))
    found = [losses(linear + scale * added, targets).double() for scale in SCALES]
    means = torch.stack([values.view(len(judged), -1).mean(1) for values in found])
    worse = means - means[means.mean(1).argmin()]
    error = worse.std(1, correction=0) / len(judged) ** 0.5
    as_it_was(model).scale.fill_(SCALES[worse.mean(1) <= error / 2].min())


def choose_sizes(num_rows: int, batch_size: int | None) -> dict[str, int]:
    """Return a batch size, and epochs that make about NUM_STEPS steps, with batch_size if given."""
    suitable = min(256, max(8, 2 ** ((num_rows // 30).bit_length() - 1)))
    steps = -(-num_rows // (batch_size or suitable))
    return {"batch_size": suitable, "epochs": min(40, max(5, round(NUM_STEPS / steps)))}
