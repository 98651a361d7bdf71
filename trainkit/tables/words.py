"""What free text says of the targets: for each of them a sum of weights of its pieces.

The weights are those of a linear model of TF-IDF (Salton and Buckley, 1988), fitted by partial
least squares, which are steps of conjugate gradients (Phatak and de Hoog, 2002). How many steps are
taken is decided by texts that a model did not learn from. What the other columns say, by ridge
regression, is taken off the targets before, so that the words are asked for the rest alone.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit.reading.pieces import MAX_BITS, number_pieces, score_pieces, unpack
from trainkit.tables.network import NUM_FOLDS, fit_ridge

MAX_STEPS = 30
PATIENCE = 5  # steps without a better one, after which the best one is taken
MAX_SCORES = 20  # of classes, those that most rows have
MIN_BITS, MOST_BITS = 10, 16  # of the number of a weight
SPARE_BITS = 2  # with fewer, more pieces share a weight
SURE = 2.5  # standard errors that the words must be of use by
MIN_GAIN = 1e-3  # of the squares of the targets
MIN_TEXTS = 20
NO_PIECES = np.empty(0, np.int32)


class Learned(NamedTuple):
    """Weights, (2**bits, scores), scores of the training rows, and the share that is explained.

    The scores of a row, (rows, scores), come from weights that do not know its fold. The share is
    that of the squares that the other columns leave, by the best multiples of such scores; 0 if it
    may be chance.
    """

    weights: Tensor
    scores: Tensor
    share: float


class Bags:
    """Texts as rows of a matrix, which has a column for each piece: by the root of their number.

    Sums go in the order of the pieces, or of the texts, so that they are the same on every machine.

    Args:
        texts: the pieces of each text, as number_texts returns them.
        num_bits: how many bits of their numbers are used.
    """

    def __init__(self, texts: Sequence[np.ndarray], num_bits: int):
        self.sizes = np.array([len(pieces) for pieces in texts])
        self.pieces = np.concatenate([NO_PIECES, *texts]) >> (MAX_BITS - num_bits)
        self.counts = np.bincount(self.pieces, minlength=2**num_bits)
        # A text without pieces has a sum of 0, whatever it is divided by.
        self.lengths = torch.from_numpy(self.sizes.clip(1)).float().sqrt()[:, None]

    def sum_pieces(self, weights: Tensor) -> Tensor:
        """Return the matrix times weights, float32 (pieces, columns)."""
        return _sum(self.pieces, self.sizes, weights) / self.lengths

    def sum_texts(self, values: Tensor) -> Tensor:
        """Return the transposed matrix times values, float32 (texts, columns)."""
        return _sum(self.texts, self.counts, values / self.lengths)

    @cached_property
    def texts(self) -> np.ndarray:
        """The texts that have the first piece, those that have the second one, and so on."""
        order = self.pieces.astype(np.uint16).argsort(kind="stable")  # fast for 16 bits
        return np.arange(len(self.sizes), dtype=np.int32).repeat(self.sizes)[order]


def _sum(rows: np.ndarray, sizes: np.ndarray, values: Tensor) -> Tensor:
    """Return sums of rows of `values`: of the first sizes[0] in `rows`, of the next sizes[1] ..."""
    starts = (sizes.cumsum() - sizes).astype(np.int32)
    return F.embedding_bag(torch.from_numpy(rows), values, torch.from_numpy(starts), mode="sum")


def number_texts(texts: Iterable[str]) -> list[np.ndarray]:
    """Return the pieces of each text, int32; there are none in one that is empty."""
    return [number_pieces(text).astype(np.int32) if text.strip() else NO_PIECES for text in texts]


def score_texts(texts: Sequence[np.ndarray], packed: str, num_scores: int) -> np.ndarray:
    """Return scores, float64 (texts, scores), of the pieces of texts, by packed weights."""
    weights = unpack(packed, num_scores)
    scores = [score_pieces(pieces, weights) for pieces in texts]
    return np.array(scores).reshape(len(texts), num_scores)


def learn_words(
    texts: Sequence[np.ndarray], targets: Tensor, others: Tensor, fold: Tensor
) -> Learned:
    """Learn what the pieces of the training rows say of their targets.

    Args:
        texts: the pieces of each row.
        targets: (rows, scores), float64.
        others: numbers of the other columns, (rows, features), float64.
        fold: of each row, int64.
    """
    if len(texts) < MIN_TEXTS or len(fold.unique()) < 2:
        return Learned(torch.zeros(1, targets.shape[1]), targets * 0, 0.0)
    used = len(np.unique(np.concatenate([NO_PIECES, *texts])))
    num_bits = min(MOST_BITS, max(MIN_BITS, used.bit_length() + SPARE_BITS))
    rest = targets - explain_by_numbers(others, targets, fold)
    weights, scores = fit_words(Bags(texts, num_bits), rest.float(), fold)
    told, is_sure = measure_gain(rest, scores.double())
    is_sure &= told > MIN_GAIN * (targets - targets.mean(0)).square().sum().item()
    is_sure &= bool((scores.amax(0) > scores.amin(0)).all())
    return Learned(weights, scores, told / rest.square().sum().item() if is_sure else 0.0)


def measure_gain(rest: Tensor, scores: Tensor) -> tuple[float, bool]:
    """Return the sum of the squares of `rest` that scores tell, and whether it is not chance.

    Both are (rows, targets), float64. How large the scores are makes no difference, as the network
    finds a weight for each: those learned from few texts are too large, and their own squared error
    exceeds that of no words at all. The sum over all targets is tested, so that those that words do
    not tell, such as the classes in the middle of five ratings, hide none that they do.
    """
    rest, scores = rest - rest.mean(0), scores - scores.mean(0)
    products = rest * scores
    told = products.sum(0).clamp(min=0).square() / scores.square().sum(0).clamp(min=1e-30)
    # Two rows say the same of each other, so that the variance of the sum over rows is twice that
    # of independent ones.
    error = products.sum(1).std() * (2 / len(rest)) ** 0.5
    return told.sum().item(), bool(products.sum(1).mean() > SURE * error)


def explain_by_numbers(others: Tensor, targets: Tensor, fold: Tensor) -> Tensor:
    """Return what ridge regression of the rows outside its fold says of each row."""
    others = others - others.mean(0)
    spread = others.square().mean(0).sqrt()
    others = others[:, spread > 0] / spread[spread > 0]
    said = torch.zeros_like(targets)
    for left_out in fold.unique():
        kept = fold != left_out
        said[~kept] = targets[kept].mean(0)
        if others.shape[1]:
            weight, bias = fit_ridge(others[kept], targets[kept])
            said[~kept] = F.linear(others[~kept], weight, bias)
    return said


def fit_words(bags: Bags, targets: Tensor, fold: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights, (pieces, targets), and scores of the rows, (rows, targets).

    The weights are learned from all rows, the scores of a row from those outside its fold. All
    models are solved at once, as columns of one matrix: one without each fold, and at last that of
    all rows, with a column for each target, which has a number of steps of its own.
    targets: float32, (rows, targets).
    """
    num, num_targets = targets.shape
    row = torch.arange(num)
    learns = torch.cat((fold[:, None] != torch.arange(NUM_FOLDS), torch.ones(num, 1).bool()), 1)
    means = torch.stack(
        [targets[rows].mean(0) if rows.any() else 0 * targets[0] for rows in learns.T]
    )
    mask = learns[:, :, None].expand(num, NUM_FOLDS + 1, num_targets).flatten(1).float()
    rarity = (torch.log((1 + num) / (1 + torch.from_numpy(bags.counts)).float()) + 1)[:, None]
    left = mask * (targets[:, None] - means).flatten(1)
    said = torch.zeros_like(left)
    weights = torch.zeros(len(rarity), left.shape[1])
    best_weights, best_scores = weights[:, -num_targets:], torch.zeros_like(targets)
    least = torch.full((num_targets,), torch.inf, dtype=torch.float64)
    num_worse = torch.zeros(num_targets, dtype=torch.int64)
    slope = rarity * bags.sum_texts(left)
    direction, steepness = slope, sum_squares(slope)
    for _ in range(MAX_STEPS):
        change = bags.sum_pieces(rarity * direction)
        length = steepness / sum_squares(mask * change).clamp(min=1e-30)
        weights = weights + length * direction
        said = said + length * change
        left = left - length * mask * change
        scores = said.view(num, -1, num_targets)[row, fold]
        error = (targets - scores - means[fold]).double().square().mean(0)
        is_best = error < least
        best_weights = torch.where(is_best, rarity * weights[:, -num_targets:], best_weights)
        best_scores = torch.where(is_best, scores, best_scores)
        least = torch.where(is_best, error, least)
        num_worse = torch.where(is_best, 0, num_worse + 1)
        if (num_worse >= PATIENCE).all():
            break
        slope = rarity * bags.sum_texts(left)
        before, steepness = steepness, sum_squares(slope)
        direction = slope + steepness / before.clamp(min=1e-30) * direction
    return best_weights, best_scores


def sum_squares(columns: Tensor) -> Tensor:
    """Return the sum of squares of each column, computed in float64."""
    return columns.double().square().sum(0).float()
