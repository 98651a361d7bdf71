"""Pieces of a memory-mapped file by index, for gpt.py: no list of them is made."""

import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trainkit.run_dir.files import write_durably


def standard_library(folder: Path) -> Path:
    """A file in this folder with all modules of Python's standard library, one after another."""
    path = folder / f"stdlib-{sys.hexversion:x}.txt"
    if not path.exists():
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(path, b"".join(file.read_bytes() for file in files))
    return path


class Windows:
    """`size` bytes each, and from where and to where in them counts. Every tenth is held out.

    Args:
        spans: where each begins, and perhaps what counts, as (start, first, end).
    """

    def __init__(self, path: Path, size: int, spans: Sequence, held_out: bool):
        self.path, self.size, self.spans, self.held_out = path, size, spans, held_out

    def __len__(self) -> int:
        return (len(self.spans) + 9) // 10 if self.held_out else len(self.spans) * 9 // 10

    def __getitem__(self, index: int) -> tuple[np.ndarray, int, int]:
        span = self.spans[index * 10 if self.held_out else index + index // 9 + 1]
        start, first, end = span if isinstance(span, tuple) else (span, span, span + self.size)
        # Mapped here: a memmap that is kept would be sent as a whole to a worker that is spawned.
        # "c", because torch warns of what it may not write to.
        return np.memmap(self.path, np.uint8, "c", start, self.size), first - start, end - start
