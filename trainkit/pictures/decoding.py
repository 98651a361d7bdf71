"""Decode pictures once, with all cores, into a file of uint8 values in the cache of `datasets`."""

import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from trainkit.errors import UsageError, as_usage_error, first_sentence
from trainkit.hashes import digest
from trainkit.launch.signals import outlive_signals
from trainkit.pictures.files import source_of
from trainkit.reading.kept import no_bar
from trainkit.store.atomic import replacing

NUM_BYTES = 2**18  # about, of the pictures that a worker decodes at a time
NUM_ALONE = 256  # below this, starting workers costs more than it saves

# read(file, side) returns a square of a picture, uint8, and its form: its size and mode in words.
Read = Callable[[BytesIO | Path, int], tuple[np.ndarray, str]]


class Pictures(Dataset):
    """Of some pictures the bytes of all values, the forms, the hashes in hex, and what is wrong."""

    def __init__(self, cells: datasets.Dataset, side: int, read: Read):
        self.cells, self.side, self.read = cells, side, read

    def __len__(self) -> int:
        return len(self.cells)

    def __getitems__(self, rows: list[int]) -> tuple[bytes, Counter[str], str, list[str]]:
        (cells,) = self.cells[rows].values()
        with warnings.catch_warnings(action="ignore"):  # Pillow warns of the same for each file
            decoded = [self.decode(*pair) for pair in zip(rows, cells, strict=True)]
        values, forms, problems = zip(*decoded, strict=True)
        hashes = "".join(digest(value)[:16] for value in values)
        return b"".join(values), Counter(forms), hashes, [*filter(None, problems)]

    def decode(self, row: int, cell: dict[str, Any] | None) -> tuple[bytes, str, str]:
        try:
            pixels, form = self.read(source_of(cell), self.side)
        except Exception as problem:  # Pillow raises many kinds, and all are listed
            name = f" ({cell['path']})" if cell and cell.get("path") else ""
            return b"", "", f"row {row + 1}{name}: {first_sentence(problem)}"
        return pixels.tobytes(), form, ""


def decode_once(
    cells: datasets.Dataset, shape: tuple[int, ...], read: Read, key: bytes, where: str
) -> tuple[Path, Counter[str], torch.Tensor]:
    """Decode all pictures with all cores, unless the cache has them.

    Return the file (.npy) of the values of all rows, how many are of which form, and a hash of each
    row, int64. key: the content and the way of reading, on which the file depends. where: begins
    the sentence of a UsageError, which names all pictures that cannot be read.
    """
    path = Path(datasets.config.HF_DATASETS_CACHE, "pictures", f"{digest(key)}.npy")
    report_path = path.with_suffix(".json")
    if not (path.is_file() and report_path.is_file()):
        path.parent.mkdir(parents=True, exist_ok=True)
        tag = f"{os.getpid()}-"  # another run may be writing the same
        with (
            as_usage_error(f"{path} cannot be written"),
            replacing(report_path, tag) as report_to,
            replacing(path, tag) as values_to,
        ):
            forms, hashes, problems = decode(Pictures(cells, shape[1], read), shape, values_to)
            if problems:
                raise UsageError(
                    f"{where}: {len(problems)} of {len(cells)} pictures cannot be read, save them "
                    "again or remove them: " + "; ".join(problems)
                )
            report_to.write_text(json.dumps({"forms": forms, "hashes": hashes}))
    report = json.loads(report_path.read_bytes())
    numbers = np.frombuffer(bytearray.fromhex(report["hashes"]), np.int64)
    return path, Counter(report["forms"]), torch.from_numpy(numbers)


def decode(
    pictures: Pictures, shape: tuple[int, ...], path: Path
) -> tuple[Counter[str], str, list[str]]:
    """Decode all pictures into a file (.npy); return forms, hashes in hex, and problems.

    The file is written, not mapped: on a full disk that would kill this process without a word.
    """
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    size = max(1, NUM_BYTES // math.prod(shape))
    num_workers = min(num_cores or 1, math.ceil(len(pictures) / size))
    loader = DataLoader(
        pictures,
        batch_size=size,
        num_workers=num_workers if len(pictures) > NUM_ALONE else 0,
        collate_fn=tuple,  # as it is: the default would convert it
        worker_init_fn=outlive_signals,
        generator=torch.Generator(),  # else the seeds of the workers would be drawn from torch's
    )
    forms, hashes, problems = Counter[str](), list[str](), list[str]()
    header = {"descr": "|u1", "fortran_order": False, "shape": (len(pictures), *shape)}
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for values, found, hashed, wrong in tqdm(
            loader, desc="decoding", leave=False, delay=1, disable=no_bar()
        ):
            file.write(values)
            forms += found
            hashes.append(hashed)
            problems += wrong
    return forms, "".join(hashes), problems
