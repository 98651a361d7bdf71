"""Decode pictures once, with all cores, into a file of uint8 values."""

import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from trainkit.errors import as_usage_error, first_sentence
from trainkit.files.atomic import replacing
from trainkit.launch.signals import outlive_signals
from trainkit.reading.kept import no_bar

NUM_BLOCKS, LARGEST = 100, 64  # of pictures, which a worker decodes at a time
NUM_ALONE = 256  # below this, starting workers costs more than it saves

# read(file, side) returns a square of a picture, uint8, and its form: its size and mode in words.
Read = Callable[[BytesIO | Path, int], tuple[np.ndarray, str]]


class Decoded(NamedTuple):
    """The pictures of a set, decoded.

    Attributes:
        path: the file (.npy) of the values of all rows.
        problems: what is wrong with the rows that cannot be read.
        forms: how many pictures are of which size and mode.
        hashes: of the values of each row, int64, equal for equal pictures.
    """

    path: Path
    problems: dict[int, str]
    forms: Counter[str]
    hashes: torch.Tensor


def decode_once(
    cells: datasets.Dataset, shape: tuple[int, ...], read: Read, key: bytes, stored: bool = True
) -> Decoded:
    """Decode all pictures with all cores, unless the cache has them.

    A picture that cannot be read is zeros in the file. Raises UsageError if the file cannot be
    written.

    Args:
        cells: rows of one column, datasets.Image(decode=False).
        shape: of what `read` returns.
        key: everything the cached file depends on: the pictures' content and the way of reading.
        stored: False writes no file, and only looks whether the pictures can be read.
    """
    path = Path(
        datasets.config.HF_DATASETS_CACHE, "pictures", f"{xxhash.xxh3_128_hexdigest(key)}.npy"
    )
    report_path = path.with_suffix(".json")
    if not report_path.is_file() or stored > path.is_file():
        with as_usage_error(f"{path} cannot be written"):
            path.parent.mkdir(parents=True, exist_ok=True)
            prefix = f"{os.getpid()}-"  # another run may be writing the same
            with replacing(path, prefix) if stored else nullcontext(os.devnull) as file:
                report = decode(Blocks(cells, shape, read), file)
                with replacing(report_path, prefix) as temporary:
                    temporary.write_text(json.dumps(report))
    report = json.loads(report_path.read_text())
    problems = {int(row): problem for row, problem in report["problems"].items()}
    hashes = np.frombuffer(bytearray.fromhex(report["hashes"]), np.int64)
    return Decoded(path, problems, Counter(report["forms"]), torch.from_numpy(hashes))


class Blocks(Dataset):
    """The pictures by blocks: the bytes of their values, and problems, forms and hashes of them."""

    def __init__(self, cells: datasets.Dataset, shape: tuple[int, ...], read: Read):
        self.cells, self.shape, self.read = cells, shape, read
        # Large blocks cost less for each picture, small ones keep all workers busy to the end.
        self.size = min(LARGEST, 1 + len(cells) // NUM_BLOCKS)

    def __len__(self) -> int:
        return math.ceil(len(self.cells) / self.size)

    def __getitem__(self, number: int) -> tuple[bytes, dict[int, str], Counter[str], str]:
        start = number * self.size
        (cells,) = self.cells[start : start + self.size].values()
        block, hashes = [], ""
        problems: dict[int, str] = {}
        forms = Counter[str]()
        with warnings.catch_warnings(action="ignore"):  # Pillow warns of the same for each file
            for row, cell in enumerate(cells, start):
                try:
                    pixels, form = self.read(source_of(cell), self.shape[1])
                    forms[form] += 1
                except Exception as problem:  # Pillow raises many kinds, and all are listed
                    name = f" ({cell['path']})" if cell and cell.get("path") else ""
                    problems[row] = f"row {row + 1}{name}: {first_sentence(problem)}"
                    pixels = np.zeros(self.shape, np.uint8)
                block.append(pixels.tobytes())
                # A picture that cannot be read is equal to no other one.
                hashes += xxhash.xxh3_64_hexdigest(problems.get(row, "").encode() or block[-1])
        return b"".join(block), problems, forms, hashes


def decode(blocks: Blocks, path: Path | str) -> dict[str, Any]:
    """Decode all pictures into a file (.npy); return problems, forms and hashes, as JSON.

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
    problems: dict[int, str] = {}
    forms = Counter[str]()
    hashes = ""
    header = {"descr": "|u1", "fortran_order": False, "shape": (num_pictures, *blocks.shape)}
    with (
        open(path, "wb") as file,
        tqdm(total=num_pictures, desc="decoding", leave=False, disable=no_bar(), delay=1) as bar,
    ):
        np.lib.format.write_array_header_1_0(file, header)
        try:
            for values, *report in loader:
                file.write(values)
                problems |= report[0]
                forms += report[1]
                hashes += report[2]
                bar.update(blocks.size)
        except RuntimeError as problem:
            if "DataLoader worker" not in str(problem):
                raise
            raise MemoryError("a worker was killed: is memory full?") from None
    return {"problems": problems, "forms": dict(forms.most_common()), "hashes": hashes}


def source_of(cell: dict[str, Any] | None) -> BytesIO | Path:
    """Return what is opened for a cell of datasets.Image. Raises ValueError if it is empty."""
    content, path = (cell or {}).get("bytes"), (cell or {}).get("path")
    if not (content or path):
        raise ValueError("there is no picture in it")
    return BytesIO(content) if content else Path(path or "")
