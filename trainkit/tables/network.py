"""A network for the rows of a table: a linear model, and what members that share weights add to it.

Numbers are embedded piecewise (Gorishniy and others, 2022, arXiv:2203.05556), and the members share
most of their weights (Gorishniy and others, 2024, TabM, arXiv:2410.24210). The linear model is
solved before training, and the members begin with an output of zero. Rows that the training does
not see decide how far they are trusted.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from trainkit.loaders import InMemory

NUM_MEMBERS, WIDTH = 16, 128
NUM_BINS = 16  # of a number, with as many rows in each
SCALES = torch.linspace(0, 1, 21)  # of what the members add
PENALTIES = torch.logspace(-2, 5, 15, dtype=torch.float64)  # of ridge regression
NUM_STEPS = 1000  # about as many are taken by default
# Defaults of flags that suit this network.
DEFAULTS = {"learning_rate": 2e-3, "weight_decay": 0.03, "clip_norm": 1.0, "warmup": 0.05}

LinearFit = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class TabM(nn.Module):
    """Maps features, (rows, features), to outputs, (rows, outputs).

    While it trains it returns the outputs of all members, (rows, members, outputs), and each has a
    loss of its own. Evaluated, it returns the linear model plus `scale` times their mean.

    Args:
        num_outputs: numbers, or logits.
        edges: for each feature those of its bins, as find_edges returns them.
    """

    scale: Tensor

    def __init__(self, num_outputs: int, edges: list[list[float]]):
        super().__init__()
        bins = [(n, *pair) for n, limits in enumerate(edges) for pair in pairwise(limits)]
        column, low, high = zip(*bins, strict=True) if bins else ((), (), ())
        for name, values in (("low", low), ("high", high)):
            self.register_buffer(name, torch.tensor(values), persistent=False)
        self.register_buffer("column", torch.tensor(column, dtype=torch.int64), persistent=False)
        # Of the rows that are trained on, which training adds to, and of those held back too.
        self.register_buffer("weight", torch.zeros(2, num_outputs, len(edges)))
        self.register_buffer("bias", torch.zeros(2, num_outputs))
        self.register_buffer("scale", torch.zeros(()))
        num_inputs = len(edges) + len(column)
        signs = torch.randint(0, 2, (NUM_MEMBERS, num_inputs)).float() * 2 - 1
        self.signs = nn.Parameter(signs)  # of the inputs of each member, which makes them differ
        self.first, self.second = nn.Linear(num_inputs, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gains = nn.Parameter(torch.ones(2, NUM_MEMBERS, WIDTH))
        self.last = nn.Parameter(torch.zeros(NUM_MEMBERS, WIDTH, num_outputs))
        self.shift = nn.Parameter(torch.zeros(NUM_MEMBERS, num_outputs))

    def forward(self, features: Tensor, in_parts: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """in_parts: return the linear model of the rows trained on, and the mean of the members."""
        of = 0 if self.training or in_parts else 1
        linear = F.linear(features, self.weight[of], self.bias[of])
        position = (features[:, self.column] - self.low) / (self.high - self.low)
        inputs = torch.cat((features, position.clamp(0, 1)), 1)
        states = F.relu(self.first(inputs[:, None] * self.signs))
        states = F.relu(self.second(states * self.gains[0])) * self.gains[1]
        members = torch.einsum("nmw,mwo->nmo", states, self.last) + self.shift
        if self.training:
            return linear[:, None] + members
        added = members.mean(1)
        return (linear, added) if in_parts else linear + self.scale * added


def find_edges(features: Tensor) -> list[list[float]]:
    """Return for each feature the edges of bins with equally many rows, or none for two values."""
    places = torch.linspace(0, 1, NUM_BINS + 1, dtype=torch.float64)
    quantiles = [column.double().quantile(places).float().unique() for column in features.T]
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
        (loss := loss / len(labels)).backward()
        return loss

    optimizer.step(compute_loss)
    return weight.detach(), bias.detach()


def start_linear(model: TabM, train_set: InMemory, held_back: InMemory, fit: LinearFit) -> None:
    """Solve the linear models of the network, in float64, so that all processes get the same."""
    pairs = zip(train_set.tensors, held_back.tensors, strict=True)
    for of, rows in enumerate((train_set.tensors, [torch.cat(pair) for pair in pairs])):
        features, targets = rows
        weight, bias = fit(features.double(), targets if targets.ndim == 1 else targets.double())
        model.weight[of], model.bias[of] = weight.float(), bias.float()


@torch.no_grad()
def set_scale(
    accelerator: Accelerator, model: nn.Module, held_back: InMemory, loss: Callable[..., Tensor]
) -> None:
    """Trust the members as far as they help on the rows held back. Every process must call this.

    The scale is the smallest whose loss is not worse than that of the best one by more than half a
    standard error.
    """
    if not len(held_back):
        return  # they are too few: the linear model answers alone
    features, targets = (tensor.to(accelerator.device) for tensor in held_back.tensors)
    model.eval()
    linear, added = (part.float().cpu() for part in model(features, in_parts=True))
    model.train()
    rows = [loss(linear + s * added, targets.cpu(), reduction="none") for s in SCALES]
    losses = torch.stack([values.double().view(len(features), -1).mean(1) for values in rows])
    worse = losses - losses[losses.mean(1).argmin()]
    error = worse.std(1, correction=0) / len(features) ** 0.5
    accelerator.unwrap_model(model).scale.fill_(SCALES[worse.mean(1) <= error / 2].min())


def suit_size(config: Any, num_rows: int) -> None:
    """Set batch size and epochs, where the user has not, to about NUM_STEPS steps."""
    if config.batch_size is None:
        vars(config).update(batch_size=min(256, max(8, 2 ** ((num_rows // 30).bit_length() - 1))))
    if config.epochs is None:
        steps = -(-num_rows // config.batch_size)
        vars(config).update(epochs=min(40, max(5, round(NUM_STEPS / steps))))
