"""A text as a bag of hashed pieces: those of trainkit/reading/pieces.py."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from trainkit.reading.pieces import MAX_BITS, number_pieces

FEW = 800  # texts; with fewer, each piece that shares a row of the table with another counts more
MAX_WEIGHTS = 2**23  # of a table with a row for each number and a column for each class


def find_num_bits(bags: Sequence[np.ndarray], num_classes: int) -> int:
    """Return how many bits of the numbers are used, so that few pieces share a row of the table."""
    used = np.zeros(2**MAX_BITS, bool)
    for bag in bags:
        used[bag] = True
    spare = 4 if len(bags) < FEW else 1
    most = int(math.log2(MAX_WEIGHTS / num_classes))
    return max(1, min(spare + math.ceil(math.log2(used.sum())), most, MAX_BITS))


def make_bags(texts: Sequence[str], num_bits: int) -> list[torch.Tensor]:
    """Return the bag of each text."""
    return [make_bag(number_pieces(text), num_bits) for text in texts]


def make_bag(pieces: np.ndarray, num_bits: int) -> torch.Tensor:
    """Return the first num_bits of the numbers of pieces, each once, int32."""
    if num_bits < MAX_BITS:
        pieces = np.unique(pieces >> (MAX_BITS - num_bits))
    return torch.from_numpy(pieces.astype(np.int32))


def weigh(bags: Sequence[torch.Tensor], num_bits: int) -> torch.Tensor:
    """Return the inverse document frequency of each number, float32: log((1+n) / (1+df)) + 1."""
    counts = torch.cat([*bags]).bincount(minlength=2**num_bits)
    return torch.log((1 + len(bags)) / (1 + counts)) + 1


class Bag(nn.Module):
    """Logits are sums over the pieces of a text, weighted by how rare they are (TF-IDF).

    There is no bias, but each text has the blank as a piece.
    """

    def __init__(self, num_pieces: int, num_classes: int):
        super().__init__()
        # By itself it draws weights: where predict.py asks for shapes alone, that imports torch's
        # compiler, 1.4 s.
        zeros = torch.zeros(num_pieces, num_classes)
        self.table = nn.EmbeddingBag.from_pretrained(zeros, freeze=False, mode="sum")
        self.register_buffer("rarity", torch.ones(num_pieces))

    def forward(
        self, tokens: torch.Tensor, lengths: torch.Tensor, pieces: torch.Tensor | None = None
    ) -> torch.Tensor:
        """pieces: the tokens without padding, one text after the other. None: chosen by a mask.

        On a GPU a mask waits to learn how many there are.
        """
        is_piece = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        weights = self.rarity[tokens] * is_piece
        starts = lengths.cumsum(0) - lengths
        if pieces is None:
            pieces = tokens[is_piece]
        shares = self.rarity[pieces].to(self.table.weight.dtype)
        sums = self.table(pieces, starts, per_sample_weights=shares)
        return sums / weights.norm(dim=1, keepdim=True)
