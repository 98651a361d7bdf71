"""Decode pictures once, with all cores, into a file of uint8 values in the cache of `datasets`."""

import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from trainkit.errors import as_usage_error, first_sentence
from trainkit.hashes import digest
from trainkit.launch.signals import outlive_signals
from trainkit.pictures.files import is_deep, source_of
from trainkit.reading.kept import no_bar
from trainkit.store.atomic import replacing

SIZE = 32  # pictures, which a worker decodes at a time
NUM_ALONE = 256  # below this, starting workers costs more than it saves

# read(file, side) returns a square of a picture, uint8, and its form: its size and mode in words.
Read = Callable[[BytesIO | Path, int], tuple[np.ndarray, str]]


class Decoded(NamedTuple):
    """The pictures of a set, decoded.

    Attributes:
        path: the file (.npy) of the values of all rows; those that cannot be read are zeros.
        problems: what is wrong with the rows that cannot be read.
        forms: how many pictures are of which size and mode.
        hashes: of the values of each row, int64, equal for equal pictures.
        brightest: the largest value of grey pictures of more than 8 bits, -1 if there are none.
    """

    path: Path
    problems: dict[int, str]
    forms: Counter[str]
    hashes: torch.Tensor
    brightest: int


class Blocks(Dataset):
    """Blocks of pictures: the bytes of their values, and what is said of them, as in Decoded."""

    def __init__(self, cells: datasets.Dataset, shape: tuple[int, ...], read: Read):
        self.cells, self.shape, self.read = cells, shape, read

    def __len__(self) -> int:
        return math.ceil(len(self.cells) / SIZE)

    def __getitem__(self, number: int) -> tuple[bytes, dict[int, str], Counter[str], str, int]:
        start = number * SIZE
        (cells,) = self.cells[start : start + SIZE].values()
        block, hashes, brightest = [], "", -1
        problems: dict[int, str] = {}
        forms = Counter[str]()
        with warnings.catch_warnings(action="ignore"):  # Pillow warns of the same for each file
            for row, cell in enumerate(cells, start):
                try:
                    pixels, form = self.read(source_of(cell), self.shape[1])
                    forms[form] += 1
                    if is_deep(form.split()[3]):
                        brightest = max(brightest, int(pixels.max()))
                except Exception as problem:  # Pillow raises many kinds, and all are listed
                    name = f" ({cell['path']})" if cell and cell.get("path") else ""
                    problems[row] = f"row {row + 1}{name}: {first_sentence(problem)}"
                    pixels = np.zeros(self.shape, np.uint8)
                block.append(pixels.tobytes())
                # A picture that cannot be read is equal to no other one.
                hashes += digest(problems.get(row) or block[-1])[:16]
        return b"".join(block), problems, forms, hashes, brightest


def decode_once(cells: datasets.Dataset, shape: tuple[int, ...], read: Read, key: bytes) -> Decoded:
    """Decode all pictures with all cores, unless the cache has them.

    Raises UsageError if the file cannot be written.

    Args:
        cells: rows of one column, datasets.Image(decode=False).
        shape: of what `read` returns.
        key: the pictures' content and the way of reading, on which the file depends.
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
            report_to.write_text(json.dumps(decode(Blocks(cells, shape, read), values_to)))
    report = json.loads(report_path.read_bytes())
    problems = {int(row): problem for row, problem in report["problems"].items()}
    hashes = torch.from_numpy(np.frombuffer(bytearray.fromhex(report["hashes"]), np.int64))
    return Decoded(path, problems, Counter(report["forms"]), hashes, report["brightest"])


def decode(blocks: Blocks, path: Path) -> dict[str, Any]:
    """Decode all pictures into a file (.npy), and return what Blocks says of them, as JSON.

    The file is written, not mapped: on a full disk that would kill this process without a word.
    """
    num_pictures = len(blocks.cells)
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    loader = DataLoader(
        blocks,
        batch_size=None,
        num_workers=(num_cores or 1) if num_pictures > NUM_ALONE else 0,
        collate_fn=tuple,  # as a block is: the default would convert it
        worker_init_fn=outlive_signals,
        generator=torch.Generator(),  # else the seeds of the workers would be drawn from torch's
    )
    report: dict[str, Any] = {"problems": {}, "forms": Counter(), "hashes": "", "brightest": -1}
    header = {"descr": "|u1", "fortran_order": False, "shape": (num_pictures, *blocks.shape)}
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for values, problems, forms, hashes, brightest in tqdm(
            loader, desc="decoding", leave=False, delay=1, disable=no_bar()
        ):
            file.write(values)
            report["problems"] |= problems
            report["forms"] += forms
            report["hashes"] += hashes
            report["brightest"] = max(report["brightest"], brightest)
    return report
