"""A text as a bag of hashed pieces: words, pairs of words, and n-grams of letters.

The n-grams are what is left of words that were not in training, and what there is in languages
that are written without blanks.
"""

import math
import re
import unicodedata
import zlib
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import nn

WORD = re.compile(r"\w+|[^\w\s]")
MAX_LETTERS = 4  # of an n-gram
MAX_BITS = 18  # of the number of a piece
STEP, MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)  # odd; of splitmix64
FEW = 800  # texts; with fewer, each piece that shares a row of the table with another counts more
MAX_WEIGHTS = 2**23  # of a table with a row for each number and a column for each class


def number_pieces(text: str) -> np.ndarray:
    """Return a number below 2**MAX_BITS for each piece of a text, int64, sorted, each once.

    Case, and forms of letters that Unicode calls compatible, make no difference.
    """
    text = unicodedata.normalize("NFKC", text).lower()
    words = WORD.findall(text)
    named = [zlib.crc32(piece.encode()) for piece in (*words, *map(" ".join, pairwise(words)))]
    parts = [np.array(named, np.uint64)]
    points = f" {' '.join(text.split())} ".encode("utf-32-le", "replace")
    letters = np.frombuffer(points, "<u4").astype(np.uint64)
    # Blanks may begin and end an n-gram, as they do words, but are not inside of one.
    blank = letters == ord(" ")
    grams = np.ones(len(letters) + 1, np.uint64)
    is_one = np.ones(len(letters) + 1, bool)
    for length in range(1, 1 + min(MAX_LETTERS, len(letters))):
        grams = grams[:-1] * STEP + letters[length - 1 :]
        is_one = is_one[:-1]
        if length > 2:
            is_one = is_one & ~blank[length - 2 : -1]
        parts.append(grams[is_one])
    codes = np.concatenate(parts)
    mixed = (codes ^ (codes >> np.uint64(29))) * MIX
    return np.unique(mixed >> np.uint64(64 - MAX_BITS)).astype(np.int64)


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
        zeros = torch.zeros(num_pieces, num_classes)
        self.table = nn.EmbeddingBag.from_pretrained(zeros, freeze=False, mode="sum")
        self.register_buffer("rarity", torch.ones(num_pieces))

    def forward(
        self, tokens: torch.Tensor, lengths: torch.Tensor, pieces: torch.Tensor
    ) -> torch.Tensor:
        """pieces: the tokens without padding, one text after the other. A mask would cost time."""
        is_piece = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        weights = self.rarity[tokens] * is_piece
        starts = lengths.cumsum(0) - lengths
        shares = self.rarity[pieces].to(self.table.weight.dtype)
        sums = self.table(pieces, starts, per_sample_weights=shares)
        return sums / weights.norm(dim=1, keepdim=True)
