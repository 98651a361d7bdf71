"""Decode pictures once, with all cores, into a file of uint8 values."""

import json
import multiprocessing
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import (
    BrokenExecutor,
    Executor,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
)
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
import xxhash
from tqdm import tqdm

from trainkit.errors import as_usage_error, first_sentence
from trainkit.launch.signals import outlive_signals
from trainkit.reading.kept import no_bar
from trainkit.run_dir.files import replacing

NUM_BLOCKS, LARGEST = 100, 256  # of pictures, which a worker decodes at a time
NUM_ALONE = 256  # below this, starting workers costs more than it saves

# read(file) returns the values of a picture, uint8, and its size and mode in words.
Read = Callable[[BytesIO | Path], tuple[np.ndarray, str]]
Block = tuple[dict[int, str], Counter[str], str]  # its problems by row, kinds, hashes in hex


class Decoded(NamedTuple):
    """The pictures of a set, decoded.

    Attributes:
        path: the file (.npy) of the values of all rows.
        problems: what is wrong with the rows that cannot be read.
        kinds: how many pictures are of which size and mode.
        hashes: of the values of each row, int64, equal for equal pictures.
    """

    path: Path
    problems: dict[int, str]
    kinds: Counter[str]
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
            with replacing(path, prefix) if stored else nullcontext() as file:
                try:
                    report = join_blocks(decode(cells, shape, read, file))
                except BrokenExecutor:
                    raise MemoryError("a worker was killed: is memory full?") from None
                except OSError as problem:  # of a worker, whose whole traceback is its cause
                    raise problem from None
                with replacing(report_path, prefix) as temporary:
                    temporary.write_text(json.dumps(report))
    report = json.loads(report_path.read_text())
    problems = {int(row): problem for row, problem in report["problems"].items()}
    hashes = np.frombuffer(bytearray.fromhex(report["hashes"]), np.int64)
    return Decoded(path, problems, Counter(report["kinds"]), torch.from_numpy(hashes))


def decode(
    cells: datasets.Dataset, shape: tuple[int, ...], read: Read, file: Path | None
) -> list[Block]:
    """Decode all pictures into a file (.npy), if one is named; return the blocks in their order.

    The file is written, not mapped: on a full disk that would kill a worker without a word.
    """
    (column,) = cells.column_names
    # Large blocks cost less for each picture, small ones keep all workers busy to the end.
    size = min(LARGEST, 1 + len(cells) // NUM_BLOCKS)
    empty = np.zeros(shape, np.uint8)
    if file:
        whole = np.lib.format.open_memmap(file, "w+", np.uint8, (len(cells), *shape))

    def decode_block(start: int) -> Block:
        problems: dict[int, str] = {}
        kinds, hashes = Counter[str](), ""
        with open(file, "r+b", 2**18) if file else nullcontext() as into:  # few writes
            if into:
                into.seek(whole.offset + start * empty.nbytes)
            for row, cell in enumerate(cells[start : start + size][column], start):
                try:
                    pixels, kind = read(source_of(cell))
                    kinds[kind] += 1
                except Exception as problem:  # Pillow raises many kinds, and all are listed
                    name = f" ({cell['path']})" if cell and cell.get("path") else ""
                    problems[row] = f"row {row + 1}{name}: {first_sentence(problem)}"
                    pixels = empty
                values = pixels.tobytes()
                # A picture that cannot be read is equal to no other one.
                hashes += xxhash.xxh3_64_hexdigest(problems.get(row, "").encode() or values)
                if into:
                    into.write(values)
        return problems, kinds, hashes

    blocks, starts = [], range(0, len(cells), size)
    with (
        warnings.catch_warnings(action="ignore"),  # Pillow warns of the same thing for each file
        make_pool(decode_block, len(cells)) as pool,
        tqdm(total=len(cells), desc="decoding", leave=False, disable=no_bar(), delay=1) as bar,
    ):
        for block in pool.map(run_block, starts):
            blocks.append(block)
            bar.update(size)
    return blocks


def join_blocks(blocks: list[Block]) -> dict[str, Any]:
    """Return the problems, kinds and hashes of all blocks, as JSON."""
    kinds = sum((kinds for _, kinds, _ in blocks), Counter[str]())
    return {
        "problems": {row: text for problems, *_ in blocks for row, text in problems.items()},
        "kinds": dict(kinds.most_common()),
        "hashes": "".join(hashes for *_, hashes in blocks),
    }


BLOCK_TASKS: list[Callable[[int], Any]] = []  # the last one is what the workers of a pool do


def run_block(start: int) -> Any:
    return BLOCK_TASKS[-1](start)


def start_worker(task: Callable[[int], Any], is_process: bool) -> None:
    BLOCK_TASKS.append(task)
    if is_process:
        outlive_signals(0)
        torch.set_num_threads(1)  # the threads of the parent are not there


def make_pool(task: Callable[[int], Any], number: int) -> Executor:
    """Make a pool for run_block: of forked processes, which share memory, or else of threads.

    Unlike multiprocessing.Pool it notices if a process was killed, and does not wait for ever.
    """
    if sys.platform == "linux" and number > NUM_ALONE:
        fork = multiprocessing.get_context("fork")
        num_cores = len(os.sched_getaffinity(0))
        return ProcessPoolExecutor(num_cores, fork, start_worker, (task, True))
    num_threads = (os.cpu_count() or 1) if number > NUM_ALONE else 1
    return ThreadPoolExecutor(num_threads, "decoding", start_worker, (task, False))


def source_of(cell: dict[str, Any] | None) -> BytesIO | Path:
    """Return what is opened for a cell of datasets.Image. Raises ValueError if it is empty."""
    content, path = (cell or {}).get("bytes"), (cell or {}).get("path")
    if not (content or path):
        raise ValueError("there is no picture in it")
    return BytesIO(content) if content else Path(path or "")
