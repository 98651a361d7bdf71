"""A text as numbers of its pieces: words, pairs of words, and n-grams of letters.

The n-grams are what is left of words that were not in training, and what there is in languages
that are written without blanks. An exported table has a copy of this file, which needs numpy alone.
"""

import base64
import re
import unicodedata
import zlib
from itertools import pairwise
from typing import Any

import numpy as np

WORD = re.compile(r"\w+|[^\w\s]")
MAX_LETTERS = 4  # of an n-gram
MAX_BITS = 18  # of the number of a piece
STEP, MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)  # odd; of splitmix64


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


def pack(weights: np.ndarray) -> str:
    """Return weights, (2**bits, scores), as base64 of float16, to be kept as JSON."""
    return base64.b64encode(weights.astype("<f2").tobytes()).decode()


def unpack(packed: str, num_scores: int) -> np.ndarray:
    """Return what was given to pack, float64 (2**bits, scores)."""
    weights = np.frombuffer(base64.b64decode(packed), "<f2")
    return weights.reshape(-1, num_scores).astype(np.float64)


def score_pieces(pieces: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the sums of the weights, (2**bits, scores), of pieces, by the root of their number."""
    num_bits = len(weights).bit_length() - 1
    return weights[pieces >> (MAX_BITS - num_bits)].sum(0) / max(1, len(pieces)) ** 0.5


def score_text(text: str, column: dict[str, Any]) -> np.ndarray:
    """Return the numbers of a free text: 0 without a text.

    column: the entry of a model's metadata["columns"] that has "scores" and "weights".
    """
    weights = unpack(column["weights"], len(column["scores"]))
    return score_pieces(number_pieces(text), weights) if text.strip() else weights[0] * 0
