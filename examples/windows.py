"""Read pieces of a memory-mapped file, or rows of tokens, by index, for gpt.py."""

import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from trainkit import count, shorten, write_durably

import numpy as np
import torch

from trainkit.errors import LoneFailure, UsageError
from trainkit.rows import (
    EVALUATED,
    ParquetRows,
    describe_given,
    shown,
)


def standard_library(folder: Path) -> Path:
    """Write all modules of Python's standard library into one file here, and return its path."""
    path = folder / f"stdlib-{sys.hexversion:x}.txt"
    if not path.exists():
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(path, b"".join(file.read_bytes() for file in files))
    return path


class Batch(NamedTuple):
    tokens: torch.Tensor  # (n, length)
    start: torch.Tensor | None = None  # (n,): tokens from here up to stop count, else all
    stop: torch.Tensor | None = None

    def counted(self) -> torch.Tensor:
        """Return which tokens after the first count, bool (n, length - 1)."""
        position = torch.arange(1, self.tokens.shape[1], device=self.tokens.device)
        if self.start is None:
            return torch.ones_like(self.tokens[:, 1:], dtype=torch.bool)
        return (self.start[:, None] <= position) & (position < self.stop[:, None])


class Windows:
    """Samples are `size` bytes, and start and stop of those that count. Every tenth is held out.

    Args:
        spans: where each begins, or (start, first, end), where only first to end counts.
    """

    def __init__(self, path: Path, size: int, spans: Sequence, held_out: bool):
        self.path, self.size, self.spans, self.held_out = path, size, spans, held_out

    def __len__(self) -> int:
        return (len(self.spans) + 9) // 10 if self.held_out else len(self.spans) * 9 // 10

    def __getitem__(self, index: int) -> tuple[np.ndarray, int, int]:
        span = self.spans[index * 10 if self.held_out else index + index // 9 + 1]
        start, first, end = span if isinstance(span, tuple) else (span, span, span + self.size)
        # Mapped here, because a kept memmap would be copied whole into each spawned worker. Mode
        # "c", because torch warns about arrays that are not writable.
        return np.memmap(self.path, np.uint8, "c", start, self.size), first - start, end - start


class Tokens(ParquetRows):
    """Samples are the lists of one column, as long as those of `like`, or as the first of them.

    Raises UsageError if that column has no lists of whole numbers.
    """

    def __init__(
        self,
        pattern: str,
        column: str,
        vocabulary: int,
        parts: Sequence[str],
        like: "Tokens | None" = None,
    ):
        super().__init__(pattern, column, parts=parts)
        first = self[0][0]
        if not torch.is_tensor(first) or first.ndim != 1 or first.is_floating_point():
            raise UsageError(f"{shown(pattern)}: {column} must hold lists of whole numbers, tokens")
        self.vocabulary, self.length = vocabulary, like.length if like else len(first)

    def make_batch(self, indices: torch.Tensor) -> list:
        """Raises LoneFailure for a list of another length, and a token that the model lacks."""
        (tokens,) = super().make_batch(indices)
        low, high = (int(end) for end in tokens.aminmax())
        if tokens.shape[1] != self.length or not 0 <= low <= high < self.vocabulary:
            raise LoneFailure(
                f"{shown(self.pattern)}: {self.columns[0]} has lists of {tokens.shape[1]} tokens "
                f"from {low} to {high}, and the model is for {self.length} tokens from 0 to "
                f"{self.vocabulary - 1}: raise --vocabulary, or write lists of one length"
            )
        return [tokens]


def read_tokens(
    data: str, eval_data: str | None, column: str, vocabulary: int
) -> tuple[Tokens, Tokens, dict[str, str]]:
    """Return the tokens to train on and to evaluate on, and lines of the plan. Raises UsageError.

    Evaluated are those of --eval-data, or else the files of --data that are called test or
    validation.
    """
    train_set = Tokens(data, column, vocabulary, ["train"])
    parts = [*EVALUATED, "train"] if eval_data else EVALUATED
    eval_set = Tokens(eval_data or data, column, vocabulary, parts, train_set)
    trained_on, evaluated = train_set.fingerprint(), eval_set.fingerprint()
    unread = [name for name in train_set.unread if eval_data or name not in evaluated]
    given = f"--eval-data {shown(eval_data)}" if eval_data else shorten([*evaluated])
    plan = {"data": shown(data)}
    plan |= describe_given(f"{given}: {count(len(eval_set), 'row')}", unread)
    if twice := [name for name, version in evaluated.items() if version in trained_on.values()]:
        plan["twice"] = f"the rows of {shorten(twice)} are also trained on"
    return train_set, eval_set, plan
