"""Colour photos in the folders of their classes, decoded once into a file of uint8 squares.

A batch maps the file into memory for as long as it takes to copy its rows, so the process needs no
more memory for more pictures. A set whose file would be too large is decoded for each batch.
"""

import json
import os
import warnings
from io import BytesIO
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL
import torch
import xxhash
from torch.utils.data import Dataset
from tqdm import tqdm

from trainkit.cli.text import shorten
from trainkit.data import files, pictures
from trainkit.errors import UsageError, first_sentence, is_main_rank
from trainkit.private import fingerprint_of
from trainkit.run_dir.files import sync, write_json

BLOCK = 64  # pictures that a thread decodes at a time


class Photos(Dataset):
    """A sample is a picture, uint8 (3, side, side), its class and its index.

    Args:
        path: of the file that holds all rows, uint8 (num_rows, side, side, 3).
        rows: the row of each sample, int64.
        labels: the class of each sample, int64.
        key: identifies the content of the rows.
    """

    def __init__(self, path: Path, rows: torch.Tensor, labels: torch.Tensor, key: str):
        self.path, self.rows, self.labels, self.key = path, rows, labels, key

    def __len__(self) -> int:
        return len(self.rows)

    def make_batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See pick; a loader calls this."""
        return self.pick(indices)

    def pick(self, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the pictures, uint8 (n, 3, side, side) in channels-last memory, and the rest."""
        mapped = np.load(self.path, mmap_mode="r")  # for this batch: mapped pages count as memory
        pixels = torch.from_numpy(mapped[self.rows[indices].numpy()]).permute(0, 3, 1, 2)
        return pixels, self.labels[indices], indices

    def fingerprint(self) -> dict[str, Any]:
        """Return what is compared when a run is resumed."""
        chosen = xxhash.xxh3_128_hexdigest(self.rows.numpy().tobytes())
        return {"pictures": f"{self.key}-{chosen}"}


class Files(Photos):
    """The same samples, decoded each time they are read, if possible by loader workers."""

    def __init__(self, cells: datasets.Dataset, side: int, *options: Any):
        super().__init__(Path(), *options)
        self.cells, self.side = cells, side

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        (cell,) = self.cells[int(self.rows[index])].values()
        pixels = torch.from_numpy(files.read_centre(source_of(cell), self.side))
        return pixels.permute(2, 0, 1), self.labels[index], index

    def pick(self, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See Photos.pick."""
        return torch.utils.data.default_collate([self[int(index)] for index in indices])


def source_of(cell: dict[str, Any] | None) -> BytesIO | Path:
    """Return what is opened for a cell of datasets.Image. Raises ValueError if it is empty."""
    content, path = (cell or {}).get("bytes"), (cell or {}).get("path")
    if not (content or path):
        raise ValueError("there is none in it")
    return BytesIO(content) if content else Path(path or "")


def decode(cells: datasets.Dataset, side: int, into: np.ndarray | None) -> dict[int, str]:
    """Decode all pictures with all cores, into a uint8 array (n, side, side, 3) if one is given.

    Returns what is wrong with each row that cannot be read.
    """
    problems: dict[int, str] = {}
    (column,) = cells.column_names

    def decode_block(start: int) -> int:
        block = cells[start : start + BLOCK][column]
        for row, cell in enumerate(block, start):
            try:
                pixels = files.read_centre(source_of(cell), side)
            except Exception as problem:  # Pillow raises many kinds, and all are listed
                name = (cell or {}).get("path") or f"row {row + 1}"
                problems[row] = f"{name} ({first_sentence(problem)})"
            else:
                if into is not None:
                    into[row] = pixels
        return len(block)

    with (
        ThreadPool(os.cpu_count()) as pool,
        warnings.catch_warnings(action="ignore"),  # Pillow warns of the same thing for each file
        tqdm(total=len(cells), desc="decoding", unit="", leave=False, disable=bar_is_off()) as bar,
    ):
        for number in pool.imap_unordered(decode_block, range(0, len(cells), BLOCK)):
            bar.update(number)
    return dict(sorted(problems.items()))


def bar_is_off() -> bool | None:
    """For tqdm(disable=...): a bar is drawn by one process of a machine, on a terminal."""
    return None if is_main_rank() else True


def load_photos(
    split: str,
    name: str,
    side: int,
    list_of_labels: Path | None = None,
    classes: list[str] | None = None,
    skip_unreadable: bool = False,
    cache_bytes: int = 2**35,
) -> tuple[Photos, list[str], dict[str, str]]:
    """Return a split, the names of its classes, and lines for the plan.

    Raises UsageError, which names all pictures that cannot be read, unless skip_unreadable leaves
    them out. For the other arguments see pictures.read_split.

    Args:
        side: the short side is resized to as many pixels, and the centre square is kept.
        cache_bytes: a larger file of decoded pictures is not written.
    """
    rows, numbers, classes, chosen, where = pictures.read_split(
        name, split, None, classes, 0, list_of_labels
    )
    (image,) = rows.column_names
    cells = rows.cast_column(image, datasets.Image(decode=False))
    num_bytes = len(rows) * side * side * 3
    made_by = Path(files.__file__).read_bytes() + PIL.__version__.encode()
    stored = num_bytes <= cache_bytes
    key = f"{fingerprint_of(rows)} {side} RGB {stored} ".encode()
    key = xxhash.xxh3_128_hexdigest(key + made_by)
    path = Path(datasets.config.HF_DATASETS_CACHE, "pictures", f"{key}.npy")
    found = path.with_suffix(".json")
    if not found.is_file() or stored > path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
        shape = len(rows), side, side, 3
        into = np.lib.format.open_memmap(temporary, "w+", np.uint8, shape) if stored else None
        problems = decode(cells, side, into)
        if into is not None:
            into.flush()
            del into
            sync(temporary)
            os.replace(temporary, path)
        write_json(found, problems)
    problems = {int(row): said for row, said in json.loads(found.read_text()).items()}
    if problems and not skip_unreadable:
        raise UsageError(
            f"{where}: {len(problems)} of {len(rows)} pictures cannot be read: "
            f"{'; '.join(problems.values())}; add --skip-unreadable to go on without them"
        )
    chosen = chosen[~torch.isin(chosen, torch.tensor([*problems], dtype=torch.int64))]
    chosen_labels = numbers[chosen]
    plan = {}
    if problems:
        plan["unreadable"] = f"{len(problems)} left out: {shorten([*problems.values()])}"
    if stored:
        return Photos(path, chosen, chosen_labels, key), classes, plan
    plan["decoding"] = "for each batch, because --cache-bytes is too small: use --num-workers"
    return Files(cells, side, chosen, chosen_labels, key), classes, plan


def describe_largest(labels: torch.Tensor, classes: list[str]) -> dict[str, str]:
    """Return a line of the plan: how often it is right to always say the largest class."""
    counts = labels.bincount()
    number = int(counts.argmax())
    share = 100 * counts[number].item() / len(labels)
    return {"largest class": f"{classes[number]}, {share:.1f} % of the pictures to evaluate on"}


def describe_recall(predictions: dict[str, torch.Tensor], classes: list[str]) -> str:
    """Say how many pictures of each class were recognised, and what the accuracy is worth."""
    targets, hit = predictions["target"], predictions["prediction"] == predictions["target"]
    counts = targets.bincount(minlength=len(classes)).tolist()
    found = targets[hit].bincount(minlength=len(classes)).tolist()
    pairs = zip(classes, found, counts, strict=True)
    text = ", ".join(f"{name} {part} of {number}" for name, part, number in pairs if number)
    text = f"recognised: {text}"
    if sum(found) <= max(counts):
        largest = classes[counts.index(max(counts))]
        text += (
            f"\nthis network is no better than always saying {largest!r}, which is right for "
            f"{max(counts)} of {len(targets)}: it recognised {sum(found)}"
        )
    return text
