"""Decode pictures once, with all cores, into a file of uint8 values."""

import json
import math
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset
from tqdm import tqdm

from trainkit.errors import as_usage_error, first_sentence
from trainkit.hashes import digest
from trainkit.launch.signals import outlive_signals
from trainkit.pictures.files import is_deep, measure_greys
from trainkit.reading.kept import no_bar
from trainkit.reading.paths import find_spelt
from trainkit.store.atomic import replacing

NUM_BLOCKS, LARGEST = 100, 64  # of pictures, which a worker decodes at a time
PART = 32  # blocks in a file of their own, until all are decoded
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
    report = Report.read(report_path.read_bytes()) if report_path.is_file() else None
    if report is None or (stored and not report.greys and not path.is_file()):
        blocks = Blocks(cells, shape, read, measured, stored)
        with as_usage_error(f"{path} cannot be written"):
            report = decode_into(path, report_path, blocks)
    hashes = np.frombuffer(bytearray.fromhex(report.hashes), np.int64)
    return Decoded(path, report.problems, report.forms, torch.from_numpy(hashes), report.greys)


class Report(NamedTuple):
    """What is said of some pictures beside their values: see Decoded."""

    problems: dict[int, str]
    forms: Counter[str]
    hashes: str
    greys: dict[str, list[float]]

    def joined(self, more: "Report") -> "Report":
        """Return this, and what is said of the pictures that follow."""
        greys = {**self.greys}
        merge_greys(greys, more.greys)
        problems = self.problems | more.problems
        return Report(problems, self.forms + more.forms, self.hashes + more.hashes, greys)

    def line(self) -> bytes:
        """Return it as JSON, with the most frequent form first."""
        facts = {**self._asdict(), "forms": dict(self.forms.most_common())}
        return json.dumps(facts).encode()

    @classmethod
    def read(cls, line: bytes) -> "Report":
        """Return the report that line() was made of."""
        facts = json.loads(line)
        problems = {int(row): problem for row, problem in facts["problems"].items()}
        return cls(problems, Counter(facts["forms"]), facts["hashes"], facts["greys"])


class Blocks(Dataset):
    """The pictures by blocks: the bytes of their values, problems, forms, hashes, and deep greys.

    See decode_once for the arguments.
    """

    def __init__(
        self,
        cells: datasets.Dataset,
        shape: tuple[int, ...],
        read: Read,
        measured: bool,
        stored: bool,
    ):
        self.cells = cells
        self.shape = shape
        self.read = read
        self.measured = measured
        self.stored = stored
        # Large blocks cost less for each picture, small ones keep all workers busy to the end.
        self.size = min(LARGEST, 1 + len(cells) // NUM_BLOCKS)

    def __len__(self) -> int:
        return math.ceil(len(self.cells) / self.size)

    def parts(self) -> dict[str, range]:
        """Return which blocks are in which part, by the name of its file."""
        starts = range(0, len(self), PART)
        return {str(start): range(start, min(start + PART, len(self))) for start in starts}

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
        values = b"".join(block) if self.stored else b""
        return values, problems, forms, hashes, greys


def decode_into(path: Path, report_path: Path, blocks: Blocks) -> Report:
    """Decode all pictures into `path`, if they are stored, and write and return their report."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = "parts" if blocks.stored else "looked-at"
    folder = path.with_name(f"{path.stem}-{blocks.size}-{kind}")
    prefix = f"{os.getpid()}-"  # another run may be writing the same
    try:
        with replacing(path, prefix) if blocks.stored else nullcontext(os.devnull) as file:
            report = decode(blocks, file, folder)
            with replacing(report_path, prefix) as temporary:
                temporary.write_bytes(report.line())
    except FileNotFoundError:
        if folder.is_dir() or not report_path.is_file():
            raise
        # Another run was faster, and removed the parts.
        report = Report.read(report_path.read_bytes())
    shutil.rmtree(folder, ignore_errors=True)
    if report.greys:
        path.unlink(missing_ok=True)
    return report


def merge_greys(greys: dict[str, list[float]], more: Mapping[str, Sequence[float]]) -> None:
    """Widen the smallest and largest values of kinds of deep grey pictures by those of others."""
    for kind, (low, high) in more.items():
        old_low, old_high = greys.get(kind, (low, high))
        greys[kind] = [min(low, old_low), max(high, old_high)]


def decode(blocks: Blocks, path: Path | str, folder: Path) -> Report:
    """Decode all pictures into a file (.npy); return what Blocks says of them.

    Some blocks at a time are a part, a file of its own in `folder`, until all are there: what is
    interrupted goes on with the parts that are missing.
    """
    try:
        decode_parts(blocks, folder)
        report = join_parts(blocks, path, folder)
        return Report.read(report.line())  # as a run reads it that finds the file
    finally:
        with suppress(OSError):
            folder.rmdir()  # if there is no part in it


def decode_parts(blocks: Blocks, folder: Path) -> None:
    """Write a file for each part that is not there: its report, a line of JSON, and its values."""
    folder.mkdir(parents=True, exist_ok=True)
    blocks_of = {
        name: blocks_of_part
        for name, blocks_of_part in blocks.parts().items()
        if not (folder / name).is_file()
    }
    to_do = [block for of_part in blocks_of.values() for block in of_part]
    if not to_do:
        return
    num_pictures = len(blocks.cells)
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    loader = DataLoader(
        Subset(blocks, to_do),
        batch_size=None,
        num_workers=(num_cores or 1) if num_pictures > NUM_ALONE else 0,
        collate_fn=tuple,  # as a block is: the default would convert it
        worker_init_fn=outlive_signals,
        generator=torch.Generator(),  # else the seeds of the workers would be drawn from torch's
    )
    done = (len(blocks) - len(to_do)) * blocks.size
    bar = {"total": num_pictures, "initial": done, "desc": "decoding", "leave": False, "delay": 1}
    with tqdm(**bar, disable=no_bar()) as shown:
        try:
            made = iter(loader)
            for name, of_part in blocks_of.items():
                values = []
                report = Report({}, Counter(), "", {})
                for _ in of_part:
                    of_block, *more = next(made)
                    values.append(of_block)
                    report = report.joined(Report(*more))
                    shown.update(blocks.size)
                with replacing(folder / name, f"{os.getpid()}-") as temporary:
                    temporary.write_bytes(b"".join([report.line(), b"\n", *values]))
        except RuntimeError as problem:
            if "DataLoader worker" not in str(problem):
                raise
            raise MemoryError("a worker was killed: is memory full?") from None


def join_parts(blocks: Blocks, path: Path | str, folder: Path) -> Report:
    """Join the files of all parts into one (.npy), and return their report.

    The file is written, not mapped: on a full disk that would kill this process without a word.
    """
    shape = (len(blocks.cells), *blocks.shape)
    report = Report({}, Counter(), "", {})
    with open(path, "wb") as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for name in blocks.parts():
            with open(folder / name, "rb") as part:
                report = report.joined(Report.read(part.readline()))
                shutil.copyfileobj(part, file, 2**20)
    return report


def source_of(cell: dict[str, Any] | None) -> BytesIO | Path:
    """Return what is opened for a cell of datasets.Image. Raises ValueError if it is empty."""
    content, path = (cell or {}).get("bytes"), (cell or {}).get("path")
    if not (content or path):
        raise ValueError("there is no picture in it")
    return BytesIO(content) if content else find_spelt(Path(path or ""))
