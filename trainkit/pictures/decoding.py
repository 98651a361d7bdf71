"""Decode pictures once, with all cores, into a file of uint8 values."""

import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from trainkit.errors import as_usage_error, first_sentence
from trainkit.files.atomic import replacing
from trainkit.hashes import digest
from trainkit.launch.signals import outlive_signals
from trainkit.pictures.files import is_deep, measure_greys
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
        greys: the smallest and the largest value of each kind of deep grey pictures; if there are
            any, the file is not kept, because they must be decoded again by the range of their set.
    """

    path: Path
    problems: dict[int, str]
    forms: Counter[str]
    hashes: torch.Tensor
    greys: dict[str, list[float]]


def decode_once(
    cells: datasets.Dataset,
    shape: tuple[int, ...],
    read: Read,
    key: bytes,
    stored: bool = True,
    measured: bool = False,
) -> Decoded:
    """Decode all pictures with all cores, unless the cache has them.

    A picture that cannot be read is zeros in the file. Raises UsageError if the file cannot be
    written.

    Args:
        cells: rows of one column, datasets.Image(decode=False).
        shape: of what `read` returns.
        key: everything the cached file depends on: the pictures' content and the way of reading.
        stored: False writes no file, and only looks whether the pictures can be read.
        measured: `read` knows the range of deep grey pictures. False: look for them.
    """
    path = Path(datasets.config.HF_DATASETS_CACHE, "pictures", f"{digest(key)}.npy")
    report_path = path.with_suffix(".report.json")
    report = json.loads(report_path.read_text()) if report_path.is_file() else None
    if report is None or (stored and not report["greys"] and not path.is_file()):
        with as_usage_error(f"{path} cannot be written"):
            path.parent.mkdir(parents=True, exist_ok=True)
            prefix = f"{os.getpid()}-"  # another run may be writing the same
            with replacing(path, prefix) if stored else nullcontext(os.devnull) as file:
                report = decode(Blocks(cells, shape, read, measured), file)
                with replacing(report_path, prefix) as temporary:
                    temporary.write_text(json.dumps(report))
            if report["greys"]:
                path.unlink(missing_ok=True)
    problems = {int(row): problem for row, problem in report["problems"].items()}
    hashes = np.frombuffer(bytearray.fromhex(report["hashes"]), np.int64)
    forms = Counter[str](report["forms"])
    return Decoded(path, problems, forms, torch.from_numpy(hashes), report["greys"])


class Blocks(Dataset):
    """The pictures by blocks: the bytes of their values, problems, forms, hashes, and deep greys.

    See decode_once for the arguments.
    """

    def __init__(self, cells: datasets.Dataset, shape: tuple[int, ...], read: Read, measured: bool):
        self.cells = cells
        self.shape = shape
        self.read = read
        self.measured = measured
        # Large blocks cost less for each picture, small ones keep all workers busy to the end.
        self.size = min(LARGEST, 1 + len(cells) // NUM_BLOCKS)

    def __len__(self) -> int:
        return math.ceil(len(self.cells) / self.size)

    def __getitem__(
        self, number: int
    ) -> tuple[bytes, dict[int, str], Counter[str], str, dict[str, list[float]]]:
        start = number * self.size
        (cells,) = self.cells[start : start + self.size].values()
        block, hashes = [], ""
        problems: dict[int, str] = {}
        forms = Counter[str]()
        greys: dict[str, list[float]] = {}
        with warnings.catch_warnings(action="ignore"):  # Pillow warns of the same for each file
            for row, cell in enumerate(cells, start):
                may_be_deep = bool(cell and (cell.get("bytes") or cell.get("path")))
                try:
                    pixels, form = self.read(source_of(cell), self.shape[1])
                    forms[form] += 1
                    may_be_deep = is_deep(form.split()[3])
                except Exception as problem:  # Pillow raises many kinds, and all are listed
                    name = f" ({cell['path']})" if cell and cell.get("path") else ""
                    problems[row] = f"row {row + 1}{name}: {first_sentence(problem)}"
                    pixels = np.zeros(self.shape, np.uint8)
                if may_be_deep and not self.measured:
                    merge_greys(greys, measure_greys(source_of(cell)))
                block.append(pixels.tobytes())
                # A picture that cannot be read is equal to no other one.
                hashes += digest(problems.get(row) or block[-1])[:16]
        return b"".join(block), problems, forms, hashes, greys


def merge_greys(greys: dict[str, list[float]], more: Mapping[str, Sequence[float]]) -> None:
    """Widen the smallest and largest values of kinds of deep grey pictures by those of others."""
    for kind, (low, high) in more.items():
        old_low, old_high = greys.get(kind, (low, high))
        greys[kind] = [min(low, old_low), max(high, old_high)]


def decode(blocks: Blocks, path: Path | str) -> dict[str, Any]:
    """Decode all pictures into a file (.npy); return what Blocks says of them, as JSON.

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
    greys: dict[str, list[float]] = {}
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
                merge_greys(greys, report[3])
                bar.update(blocks.size)
        except RuntimeError as problem:
            if "DataLoader worker" not in str(problem):
                raise
            raise MemoryError("a worker was killed: is memory full?") from None
    forms_of = dict(forms.most_common())
    return {"problems": problems, "forms": forms_of, "hashes": hashes, "greys": greys}


def source_of(cell: dict[str, Any] | None) -> BytesIO | Path:
    """Return what is opened for a cell of datasets.Image. Raises ValueError if it is empty."""
    content, path = (cell or {}).get("bytes"), (cell or {}).get("path")
    if not (content or path):
        raise ValueError("there is no picture in it")
    return BytesIO(content) if content else Path(path or "")
